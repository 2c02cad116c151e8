"""What a mutant is: a defect, the switch that puts it back, and who has to catch it."""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import pytest

from tidegate.testing.simulator import Scenario, random_scenario, simulate

Switch = Callable[[pytest.MonkeyPatch], None]
Property = Callable[[], None]

PLAYED: Final = "tidegate.testing"


class Section(enum.Enum):
    """Which part of the seeds has the defect; OWN are those that this design could have."""

    ALIGNER = "Aligner"
    COORDINATOR = "Coordinator"
    INJECTOR = "Injector"
    UNALIGNED = "Unaligned"
    CLUSTER = "Cluster"
    AROUND = "Around them"
    OWN = "Our own design"


class Simulated(NamedTuple):
    """A checker of the simulator catches it, within so many seeds of a scenario."""

    checker: str
    seeds: int
    scenario: Callable[[int], Scenario] = random_scenario


class Mutant(NamedTuple):
    name: str
    section: Section
    defect: str
    put_back: Switch
    caught_by: Simulated | Property


class Edit(NamedTuple):
    """A fragment of a function's source, and what takes its place.

    Further lines of `new` are indented like the line that `old` stands in.
    """

    function: Callable[..., Any]
    old: str
    new: str


def rewrite(*edits: Edit) -> Switch:
    """The switch that makes these edits in what runs: what is only played proves nothing of it."""
    for edit in edits:
        module = inspect.unwrap(edit.function).__module__
        assert not module.startswith(PLAYED), f"{module} does not run a pipeline"
    return switch(*edits)


def switch(*edits: Edit) -> Switch:
    """The switch that makes these edits. It swaps the code of the function itself, so that they hold for
    every module that has imported it."""

    def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
        for function in dict.fromkeys(inspect.unwrap(edit.function) for edit in edits):
            assert isinstance(function, FunctionType)
            own = [edit for edit in edits if inspect.unwrap(edit.function) is function]
            monkeypatch.setattr(function, "__code__", _edited(function, own))

    return put_back


def _edited(function: FunctionType, edits: Sequence[Edit]) -> CodeType:
    text = textwrap.dedent(inspect.getsource(function))
    for _, old, new in edits:
        # Without the fragment the mutant would be the real code, and its test would say nothing.
        assert text.count(old) == 1, f"{function.__qualname__} has {old!r} {text.count(old)} times"
        before, after = text.split(old)
        line = before.rsplit("\n", 1)[-1]
        indent = line[: len(line) - len(line.lstrip())]
        text = before + new.replace("\n", f"\n{indent}") + after
    tree = ast.parse(f"from __future__ import annotations\n{text}")
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 2)
    module = compile(tree, function.__code__.co_filename, "exec", dont_inherit=True)
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


def first_seed_caught(by: Simulated) -> int | None:
    """The first seed in which the checker finds something."""
    for seed in range(by.seeds):
        try:
            outcome = simulate(seed, by.scenario(seed))
        except (LookupError, StopIteration):
            # The simulator itself has tripped over what the mutant left behind: no checker's verdict.
            continue
        if outcome.checker == by.checker:
            return seed
    return None
