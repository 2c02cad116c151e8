"""A function as a sink: what is remembered of its calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

import pytest

from tidegate.errors import Fenced
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedFile
from tidegate.sinks.function import KINDS, BoundFunction, Console, ForeachBatch, Memory
from tidegate.storage import memory
from tidegate.storage.files import Files
from tidegate.testing.sinks import permit


class Disturbed(memory.Memory):
    """Files in which something happens right before one is written, the first or a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []
        self.before_writes: list[Callable[[], object]] = []

    def write(self, name: str, data: bytes) -> None:
        self._disturb()
        super().write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._disturb()
        return super().create(name, data)

    def _disturb(self) -> None:
        if self.before_writes:
            self.before_writes.pop(0)()

    def sync(
        self, names: Iterable[str], known: Collection[object] = frozenset(), *, missing_ok: bool = False
    ) -> frozenset[object]:
        found = list(names)
        self.synced += map(self.location, found)
        return super().sync(found, known, missing_ok=missing_ok)


def stage(files: Files, batches: int) -> list[StagedFile]:
    for batch in range(batches):
        files.write(f"000001/{batch}.parquet", b"")
    return [StagedFile(batch, files.location(f"000001/{batch}.parquet"), 100, 3) for batch in range(batches)]


class Called(BoundFunction):
    """Calls are noted, not made; `then` comes with each."""

    def __init__(self, files: Files) -> None:
        super().__init__(ForeachBatch(print), SinkPlace("shop", "orders", files))
        self.calls: list[tuple[int, list[str]]] = []
        self.then: Callable[[], object] = lambda: None

    def _call(self, files: list[str], epoch: int) -> None:
        self.calls.append((epoch, [Path(file).stem for file in files]))
        self.then()


@pytest.mark.parametrize("at_call", [1, 2])
def test_a_fence_that_comes_during_a_call_stays_and_stops_the_old_run(at_call: int) -> None:
    files = memory.Memory()
    sink = Called(files)
    first, second = stage(files, 2)
    for epoch in range(1, at_call):
        sink.commit(permit(epoch), Committable(0, (first,)))
    sealed = Committable(1, (first, second))
    sink.then = partial(Called(files).fence, 2)
    with pytest.raises(Fenced, match="by generation 2"):
        sink.commit(permit(at_call), sealed)
    assert sink.facts() == SinkFacts(at_call - 1, 2, at_call - 1)
    sink.commit(permit(at_call, generation=2), sealed)  # the call is made again: at least once
    assert len(sink.calls) == at_call + 1
    assert sink.facts() == SinkFacts(at_call, 2, 2)


@pytest.mark.parametrize("at_write", [0, 1], ids=["before the call", "after it"])
@pytest.mark.parametrize("fences", [(2,), (2, 3, 4)], ids=["once", "again and again, until the first ones are trimmed"])
def test_a_fence_that_comes_between_a_look_at_the_record_and_the_next_one_stays_and_stops_the_old_run(
    at_write: int, fences: tuple[int, ...]
) -> None:
    files = Disturbed()
    sink, other = Called(files), Called(files)
    sealed = Committable(0, tuple(stage(files, 1)))

    def fence() -> None:
        for generation in fences:
            other.fence(generation)

    files.before_writes.extend([*[lambda: None] * at_write, fence])
    with pytest.raises(Fenced, match=f"by generation {fences[-1]}"):
        sink.commit(permit(1), sealed)
    assert len(sink.calls) == at_write
    assert sink.facts() == SinkFacts(0, fences[-1], 0)
    other.commit(permit(1, generation=fences[-1]), sealed)
    assert sink.facts() == SinkFacts(1, fences[-1], 1)
    assert len(files.list("records")) == 1


def test_of_two_runs_that_commit_at_once_the_one_that_is_behind_takes_nothing_back() -> None:
    files = Disturbed()
    old, new = Called(files), Called(files)
    first, second, third = stage(files, 3)

    def the_new_run_goes_on() -> None:
        new.commit(permit(2, generation=2), Committable(1, (first, second)))
        new.then = interrupted
        with pytest.raises(InterruptedError):
            new.commit(permit(3, generation=2), Committable(2, (first, second, third)))

    def interrupted() -> None:
        raise InterruptedError

    files.before_writes.extend([lambda: None, the_new_run_goes_on])
    assert old.commit(permit(1), Committable(0, (first,))) is CommitAnswer.COMMITTED
    assert old.facts() == SinkFacts(2, 0, 2)
    new.then = lambda: None
    new.commit(permit(4, generation=2), Committable(2, (first, second, third)))
    assert new.calls[-1] == (3, ["2"]), "the call that was interrupted is repeated as it was"


def test_a_record_that_a_killed_run_has_left_is_forced_to_the_disk_where_it_is_found() -> None:
    files = Disturbed()
    sink = Called(files)
    sink.commit(permit(1), Committable(0))
    sink.fence(1)
    files.synced.clear()
    assert sink.commit(permit(1), Committable(0)) is CommitAnswer.ALREADY
    sink.fence(1)
    assert files.synced == [files.location(files.list("records")[0])] * 2


def test_a_call_for_a_checkpoint_that_was_skipped_because_it_is_damaged_hides_no_rows() -> None:
    """The batches of the checkpoint that is gone on from have the same numbers, and other rows."""
    files = memory.Memory()
    sink = Called(files)
    staged = stage(files, 6)

    def interrupted() -> None:
        raise InterruptedError

    sink.commit(permit(1), Committable(0, (staged[0],)))
    sink.then = interrupted
    with pytest.raises(InterruptedError):
        sink.commit(permit(2), Committable(4, tuple(staged[1:5])))
    sink.then = lambda: None
    sink.fence(2)
    sink.commit(permit(1, generation=2), Committable(0, (staged[0],)))
    sink.commit(permit(3, generation=2), Committable(2, tuple(staged[1:3])))
    sink.commit(permit(4, generation=2), Committable(5, tuple(staged[3:])))
    assert sink.calls == [(1, ["0"]), (2, ["1", "2", "3", "4"]), (3, ["1", "2"]), (4, ["3", "4", "5"])]


class Writer:
    def __call__(self, *_: object) -> None: ...


def test_what_a_function_is_called_is_the_same_in_every_process() -> None:
    """An object's own text often has its place in memory, which is another one after a restart."""
    for function, name in ((print, "print"), (Writer(), "Writer"), (partial(Writer(), 1), "Writer")):
        assert ForeachBatch(function).describe() == f"function {name}"
        assert ForeachBatch(function).table.address == name
    assert repr(ForeachBatch(partial(print, "a"))) == "ForeachBatch(print)"
    assert {sink.table.kind for sink in (ForeachBatch(print), Console(), Memory())} == KINDS
