"""A function as a sink: what is remembered of its calls."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tidegate.errors import Fenced
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedFile
from tidegate.sinks.function import KINDS, Console, ForeachBatch, Memory
from tidegate.testing.sinks import permit


@pytest.mark.parametrize("at_call", [1, 2])
def test_a_fence_that_comes_during_a_call_stays_and_stops_the_old_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_call: int
) -> None:
    place = SinkPlace("shop", "orders", tmp_path)
    sink = ForeachBatch(print).bind(place)
    calls = []

    def call(*_: object) -> None:
        calls.append(1)
        if len(calls) == at_call:
            ForeachBatch(print).bind(place).fence(2)

    monkeypatch.setattr(sink, "_call", call)
    files = [tmp_path / f"part-{batch}.parquet" for batch in range(2)]
    for file in files:
        file.touch()
    first, second = (StagedFile(batch, str(file), 100, 3) for batch, file in enumerate(files))
    for epoch in range(1, at_call):
        sink.commit(permit(epoch), Committable(0, (first,)))
    sealed = Committable(1, (first, second))
    with pytest.raises(Fenced, match="by generation 2"):
        sink.commit(permit(at_call), sealed)
    assert sink.facts() == SinkFacts(at_call - 1, 2, at_call - 1)
    sink.commit(permit(at_call, generation=2), sealed)  # the call is made again: at least once
    assert len(calls) == at_call + 1
    assert sink.facts() == SinkFacts(at_call, 2, 2)


def test_a_record_that_a_killed_run_has_left_is_forced_to_the_disk_where_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = ForeachBatch(print).bind(SinkPlace("shop", "orders", tmp_path))
    sink.commit(permit(1), Committable(0))
    sink.fence(1)
    forced: list[Path] = []
    monkeypatch.setattr("tidegate.sinks.function.sync_names", forced.extend)
    assert sink.commit(permit(1), Committable(0)) is CommitAnswer.ALREADY
    sink.fence(1)
    assert forced == [tmp_path / "record.json"] * 2


def test_a_call_for_a_checkpoint_that_was_skipped_because_it_is_damaged_hides_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches of the checkpoint that is gone on from have the same numbers, and other rows."""
    sink = ForeachBatch(print).bind(SinkPlace("shop", "orders", tmp_path))
    calls: dict[int, list[str]] = {}

    def call(files: list[str], epoch: int) -> None:
        is_first = epoch not in calls
        calls[epoch] = [Path(file).stem for file in files]
        if epoch == 2 and is_first:
            raise InterruptedError

    monkeypatch.setattr(sink, "_call", call)
    staged = [StagedFile(batch, str(tmp_path / f"{batch}.parquet"), 100, 3) for batch in range(6)]
    for file in staged:
        Path(file.path).touch()
    sink.commit(permit(1), Committable(0, (staged[0],)))
    with pytest.raises(InterruptedError):
        sink.commit(permit(2), Committable(4, tuple(staged[1:5])))
    sink.fence(2)
    sink.commit(permit(1, generation=2), Committable(0, (staged[0],)))
    sink.commit(permit(3, generation=2), Committable(2, tuple(staged[1:3])))
    sink.commit(permit(4, generation=2), Committable(5, tuple(staged[3:])))
    assert calls == {1: ["0"], 2: ["1", "2", "3", "4"], 3: ["1", "2"], 4: ["3", "4", "5"]}


class Writer:
    def __call__(self, *_: object) -> None: ...


def test_what_a_function_is_called_is_the_same_in_every_process() -> None:
    """An object's own text often has its place in memory, which is another one after a restart."""
    for function, name in ((print, "print"), (Writer(), "Writer"), (functools.partial(Writer(), 1), "Writer")):
        assert ForeachBatch(function).describe() == f"function {name}"
        assert ForeachBatch(function).table.address == name
    assert repr(ForeachBatch(functools.partial(print, "a"))) == "ForeachBatch(print)"
    assert {sink.table.kind for sink in (ForeachBatch(print), Console(), Memory())} == KINDS
