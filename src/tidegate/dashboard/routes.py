"""What is under which address of the API, and what may be asked for with it: one table, by which requests are answered
and the OpenAPI document is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

import msgspec

from tidegate.dashboard import values
from tidegate.dashboard.actions import offered
from tidegate.dashboard.root import ShownRoot
from tidegate.engine import events
from tidegate.engine.status import CheckpointState
from tidegate.errors import UnknownCheckpoint

API: Final = "/api/v1"
_NAME: Final = re.compile(r"(?:ckpt-)?([0-9]{1,15})")
_LONGEST_PAGE: Final = 500
KINDS: Final[dict[str, type[Any]]] = {str(each.__struct_config__.tag): each for each in get_args(events.AnyEvent)}


class WrongQuery(Exception):
    """What was asked for cannot be."""


class NotThere(Exception):
    """There is nothing at that address."""


class Parameter(msgspec.Struct, frozen=True):
    """`read` gives the value that a text stands for, or raises `WrongQuery`."""

    name: str
    about: str
    schema: dict[str, Any]
    read: Callable[[str], Any]


class Board(msgspec.Struct, frozen=True):
    """All that is shown. `roots`: by their keys, in the order in which they were given."""

    roots: dict[str, ShownRoot]
    actions_allowed: bool = False

    def root(self, key: str) -> ShownRoot:
        if key not in self.roots:
            raise NotThere("this dashboard shows no pipeline by that key; /api/v1/pipelines lists those that it does")
        return self.roots[key]


class Asked(msgspec.Struct, frozen=True):
    """What a request names: parts of its address, and its query."""

    board: Board
    path: Mapping[str, str]
    query: Mapping[str, Any] = {}

    @property
    def root(self) -> ShownRoot:
        return self.board.root(self.path["key"])

    def checkpoint(self, part: str = "name") -> int:
        found = _NAME.fullmatch(self.path[part])
        if found is None:
            raise NotThere("that names no checkpoint; write such as ckpt-000042")
        return int(found[1])


class Route(msgspec.Struct, frozen=True):
    """`answer` is called on a thread, and gives a value of `type`."""

    path: str
    about: str
    type: Any
    answer: Callable[[Asked], Any]
    parameters: tuple[Parameter, ...] = ()


def _among(name: str, about: str, known: tuple[str, ...]) -> Parameter:
    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if wrong := [each for each in found if each not in known]:
            raise WrongQuery(f"{name} is {wrong[0]!r}; it is any of {', '.join(known)}, separated by commas")
        return found

    schema = {"type": "array", "items": {"type": "string", "enum": list(known)}, "minItems": 1}
    return Parameter(name, about, schema, read)


def _matching(name: str, about: str, pattern: str, such_as: str) -> Parameter:
    def read(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise WrongQuery(f"{name} is {text[:40]!r}; it is what the page before gave as `next`, such as {such_as}")
        return text

    return Parameter(name, about, {"type": "string", "pattern": f"^{pattern}$"}, read)


def _read_limit(text: str) -> int:
    if re.fullmatch("[0-9]{1,4}", text) is None or not 1 <= int(text) <= _LONGEST_PAGE:
        raise WrongQuery(f"limit is {text[:40]!r}; it is a number from 1 to {_LONGEST_PAGE}")
    return int(text)


_LIMIT: Final = Parameter(
    "limit",
    "how many at most; 50 if it is not given",
    {"type": "integer", "minimum": 1, "maximum": _LONGEST_PAGE, "default": 50},
    _read_limit,
)
_BEFORE: Final = "only what comes before: `next` of the page before this one"


def _checkpoints(asked: Asked) -> values.Checkpoints:
    before = asked.query.get("before")
    number = None if before is None else int(before)
    return asked.root.checkpoints(asked.query.get("state"), number, asked.query.get("limit", 50))


def _history(asked: Asked) -> values.History:
    kinds = asked.query.get("kinds")
    wanted = None if kinds is None else [KINDS[each] for each in kinds]
    return asked.root.history(wanted, asked.query.get("before"), asked.query.get("limit", 50))


def _compare(asked: Asked) -> values.Comparison:
    return asked.root.compare(asked.checkpoint("a"), asked.checkpoint("b"))


def pipelines(board: Board) -> values.Pipelines:
    return values.Pipelines(tuple(root.pipeline_summary() for root in board.roots.values()))


_ONE: Final = f"{API}/pipelines/{{key}}"
ROUTES: Final = (
    Route(
        f"{API}/pipelines",
        "All pipelines that are shown, each at a glance.",
        values.Pipelines,
        lambda asked: pipelines(asked.board),
    ),
    Route(
        _ONE,
        "A pipeline: what it does, its graph and where everything stands in a drawing of it, what the next run does.",
        values.PipelineDetail,
        lambda asked: asked.root.detail(actions_allowed=asked.board.actions_allowed),
    ),
    Route(
        f"{_ONE}/checkpoints",
        "Its checkpoints, also those that were aborted, newest first, and how many there were.",
        values.Checkpoints,
        _checkpoints,
        (
            _among("state", "only those in one of these states", get_args(CheckpointState)),
            _matching("before", _BEFORE, "[0-9]{1,15}", "42"),
            _LIMIT,
        ),
    ),
    Route(
        f"{_ONE}/checkpoints/summary",
        "Its completed checkpoints in numbers, and as series to plot.",
        values.CheckpointsSummary,
        lambda asked: asked.root.summary(),
    ),
    Route(
        f"{_ONE}/checkpoints/{{name}}",
        "One checkpoint in full.",
        values.CheckpointDetail,
        lambda asked: asked.root.checkpoint(asked.checkpoint()),
    ),
    Route(f"{_ONE}/compare/{{a}}/{{b}}", "Two of its checkpoints, side by side.", values.Comparison, _compare),
    Route(
        f"{_ONE}/tables",
        "Its tables, which checkpoint each of them shows, and what each checkpoint has added.",
        values.Tables,
        lambda asked: asked.root.tables(),
    ),
    Route(
        f"{_ONE}/history",
        "What has happened to it, newest first.",
        values.History,
        _history,
        (
            _among("kinds", "only events of these kinds", tuple(KINDS)),
            _matching("before", _BEFORE, "[0-9]{1,16}-[0-9A-Za-z_.-]{1,64}", "1767323045000-ckpt-000042.3"),
            _LIMIT,
        ),
    ),
    Route(
        f"{_ONE}/actions",
        "What its run can be asked for, and what each action would do.",
        values.Actions,
        lambda asked: offered(asked.root.place, *asked.root.word(), is_allowed=asked.board.actions_allowed),
    ),
)


def query_of(given: list[tuple[str, str]], parameters: tuple[Parameter, ...]) -> dict[str, Any]:
    """What a query says. Whatever would have no effect is refused: whoever gives it believes that it has one."""
    known = {each.name: each for each in parameters}
    found: dict[str, Any] = {}
    for name, text in given:
        if name not in known:
            allowed = f"it takes {', '.join(known)}" if known else "it takes none"
            raise WrongQuery(f"there is no parameter {name[:40]!r} here; {allowed}")
        if name in found:
            raise WrongQuery(f"{name} is given twice")
        found[name] = known[name].read(text)
    return found


def status_of(error: Exception) -> int:
    """With which code an error is answered."""
    if isinstance(error, WrongQuery):
        return 400
    return 404 if isinstance(error, NotThere | UnknownCheckpoint) else 503
