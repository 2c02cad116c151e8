"""Sinks that are gone or have another name: nothing that was sealed for their tables is lost or shown twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.test_chains import snapshot
from tests.engine.test_changes import COLUMNS, SHAPE, base, definitions
from tidegate.engine.changes import Meant, take_up
from tidegate.engine.parting import Parted, part
from tidegate.engine.root import SeenRoot
from tidegate.errors import RecoveryRefused
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog, GenerationOpened
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import Committable, StagedFile, decode_committable
from tidegate.storage.manifest import Manifest, StageShape, TableAddress
from tidegate.storage.memory import Memory

FILES = (StagedFile(5, "/lake/t/5.parquet", 10, 3), StagedFile(7, "/lake/t/7.parquet", 10, 4))


def sealed(**given: Any) -> Manifest:
    """A checkpoint that has sealed rows of batches 5 and 7 for its table."""
    table = TableAddress(**{"kind": "played", "address": "/lake/t", **given})
    shape = {**SHAPE, "table": msgspec.structs.replace(SHAPE["table"], table=table)}
    part_of_sink = snapshot(positions={"middle": 5}, committable=Committable(7, FILES, shown_through=3).encode())
    return base(shape, table=part_of_sink)


class Table:
    """A table that says of each owner what it is told to."""

    def __init__(self, **facts: SinkFacts) -> None:
        self._facts = facts

    def bind(self, place: Any) -> Any:
        return _Bound(self, place)

    def facts(self, sink: str) -> SinkFacts:
        return self._facts.get(sink, SinkFacts())


class _Bound:
    table = TableAddress("played", "/lake/t")

    def __init__(self, sink: Table, place: Any) -> None:
        self._sink = sink
        self.place = place

    def describe(self) -> str:
        return "the table"

    def identity(self) -> str | None:
        return None

    def facts(self) -> SinkFacts:
        return self._sink.facts(self.place.stage)

    def check_table(self, *_: Any) -> bool:
        return True

    def _nothing(self, *_: Any) -> Any:
        raise AssertionError("nothing is changed")

    prepare_table = claim = fence = commit = forget_staged = open_staging = stage = _nothing


ROOT = SeenRoot(Memory("root"), "orders")


def decided(manifest: Manifest, *later: int) -> DecisionLog:
    log = DecisionLog()
    log.append(GenerationOpened(1, "x", 1, None, (), 1))
    retained: tuple[int, ...] = ()
    for slot, number in enumerate((manifest.checkpoint_id, *later), start=2):
        parent, retained = (retained[-1] if retained else None), (*retained, number)
        log.append(CheckpointCompleted(slot, "x", 1, number, number, parent, "m", "", True, retained, 1))
    return log


WITHOUT = {
    "rows": SHAPE["rows"],
    "middle": SHAPE["middle"],
    "other": StageShape("sink", ("middle",), "append", COLUMNS),
}


def removed(then: Manifest, table: Any, *allowed: str) -> Parted:
    meant = Meant(dropped_state=allowed)
    taken = take_up(ROOT.store, then, WITHOUT, meant)
    return part(taken, definitions(WITHOUT), ROOT, decided(then), meant, lambda _, place: table and table.bind(place))


def test_a_sink_may_go_when_its_table_shows_all_that_was_sealed() -> None:
    parted = removed(sealed(), Table(table=SinkFacts(committed_epoch=1, next_batch=8)))
    assert parted.told == ()
    assert [sink.place.stage for sink in parted.before] == ["table"]


def test_rows_that_a_table_does_not_show_yet_keep_its_sink() -> None:
    for next_batch, rows in ((6, 4), (0, 7)):
        with pytest.raises(RecoveryRefused, match=f"'table' is gone since ckpt-000001, but {rows} rows .* once more"):
            removed(sealed(), Table(table=SinkFacts(next_batch=next_batch)), "table")


def test_a_table_that_cannot_be_asked_needs_a_word() -> None:
    then = sealed(kind="postgres", address="public.t")
    with pytest.raises(
        RecoveryRefused, match=r"whether PostgreSQL table public\.t shows the last 7 rows .* cannot be as"
    ):
        removed(then, None)
    (told,) = removed(then, None, "table").told
    assert "public.t shows the last 7 rows" in told


def test_a_table_that_went_with_its_sink_keeps_nothing(tmp_path: Path) -> None:
    then = sealed(kind="delta", address=str(tmp_path / "gone"))
    assert removed(then, Table()).before == ()


NAMED = {"rows": SHAPE["rows"], "middle": SHAPE["middle"], "shown": msgspec.structs.replace(SHAPE["table"])}


def renamed(then: Manifest, log: DecisionLog | None = None, **facts: SinkFacts) -> Parted:
    meant = Meant({"table": "shown"})
    table: Any = Table(**facts)
    defined = [
        msgspec.structs.replace(each, sink=table) if each.name == "shown" else each for each in definitions(NAMED)
    ]
    return part(take_up(ROOT.store, then, NAMED, meant), defined, ROOT, log or decided(then), meant)


ALL_SHOWN = SinkFacts(committed_epoch=1, next_batch=8)


def test_a_sink_with_another_name_starts_with_nothing_sealed_behind_its_last_batch() -> None:
    parted = renamed(sealed(), table=ALL_SHOWN)
    start = parted.base.stages["shown"]
    assert start.cut == 7
    assert start.committable is not None
    assert decode_committable(start.committable) == Committable(7)
    assert [sink.place.stage for sink in parted.before] == ["table"]


def test_a_rename_may_be_tried_again_and_taken_back() -> None:
    """What it has committed under the new name is no more than what the checkpoint holds."""
    renamed(sealed(), table=ALL_SHOWN, shown=SinkFacts(committed_epoch=1, next_batch=8))
    renamed(sealed(), table=ALL_SHOWN, shown=SinkFacts(committed_epoch=1, next_batch=3))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"table": SinkFacts(committed_epoch=1, next_batch=6)}, "4 rows that ckpt-000001 has sealed for it the table"),
        ({"table": SinkFacts(committed_epoch=1, next_batch=2)}, "was put back to an older state"),
        ({"table": SinkFacts(committed_epoch=2, next_batch=9)}, "give the sink another name"),
        ({"table": ALL_SHOWN, "shown": SinkFacts(committed_epoch=1, next_batch=9)}, "give the sink another name"),
        ({"table": ALL_SHOWN, "shown": SinkFacts(committed_epoch=2, next_batch=1)}, "give the sink another name"),
    ],
    ids=["late", "put back", "ahead", "the other one ahead", "the other one later"],
)
def test_a_sink_keeps_its_name_where_rows_could_be_lost_or_doubled(facts: dict[str, SinkFacts], words: str) -> None:
    with pytest.raises(RecoveryRefused, match=words):
        renamed(sealed(), None, **facts)


def test_a_sink_keeps_its_name_where_a_newer_checkpoint_is_passed_over() -> None:
    then = sealed()
    with pytest.raises(RecoveryRefused, match="which is not the newest checkpoint: a run that still lives could"):
        renamed(then, decided(then, 2), table=ALL_SHOWN)
