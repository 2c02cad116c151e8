"""The parts of the dashboard that need no server: what is kept, attempts, phases, tables, alerts, layouts."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.harness import ended_checkpoint
from tidegate.dashboard.alerts import alerts_of
from tidegate.dashboard.attempts import Attempts, Happened, measured, spread
from tidegate.dashboard.kept import Kept
from tidegate.dashboard.phases import spans_of
from tidegate.dashboard.root import layout_of
from tidegate.dashboard.tables import Decided, ReadTable, ShownTables, read_version
from tidegate.engine.control import Life
from tidegate.engine.events import CheckpointEnded
from tidegate.engine.graph import GraphStage
from tidegate.engine.status import (
    CheckpointStatus,
    DueCheckpoint,
    InstanceStatus,
    NoBatch,
    Observer,
    RunStatus,
    SinkCommit,
    StagePart,
    StageStatus,
    as_moment,
)
from tidegate.errors import StoreUnavailable
from tidegate.sinks.delta.log import number_of
from tidegate.storage.manifest import Manifest, StageShape, TableAddress
from tidegate.storage.memory import Memory

AT = "2026-01-02T03:04:05.000+00:00"


# -- what is kept -----------------------------------------------------------------------------------


class AtOnce(ThreadPoolExecutor):
    """Does what it is given when it is given it."""

    def submit(self, call: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*arguments, **more))
        return done


class Counted:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        self.number += 1
        return self.number


def test_what_is_fresh_is_not_read_again_and_what_is_old_is() -> None:
    kept = Kept(Counted(), AtOnce(), fresh_s=60, stale_s=600)
    assert [kept.get(), kept.get()] == [1, 1]
    kept.forget()
    assert kept.get() == 2
    assert Kept(Counted(), AtOnce(), fresh_s=0, stale_s=0).get() == 1
    old = Kept(Counted(), AtOnce(), fresh_s=-1, stale_s=-1)
    assert [old.get(), old.get()] == [1, 2]


def test_what_is_stale_is_given_and_read_beside() -> None:
    kept = Kept(Counted(), AtOnce(), fresh_s=-1, stale_s=600)
    assert kept.get() == 1
    assert kept.get() == 2  # beside is at once here
    assert kept.peek(0) == 3
    assert Kept(Counted(), AtOnce(), fresh_s=60, stale_s=600).peek(0) == 0


def test_a_failure_is_kept_like_a_value() -> None:
    tries = Counted()

    def read() -> int:
        raise StoreUnavailable(f"try {tries()}")

    kept = Kept(read, AtOnce(), fresh_s=60, stale_s=600)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="try 1"):
            kept.get()
    assert kept.peek(7) == 7


def test_many_who_ask_at_once_read_once() -> None:
    may_go = threading.Event()
    tries = Counted()

    def read() -> int:
        assert may_go.wait(20)
        return tries()

    kept = Kept(read, AtOnce(), fresh_s=60, stale_s=600)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(kept.get) for _ in range(8)]
        may_go.set()
        assert [each.result(20) for each in asked] == [1] * 8


# -- attempts ---------------------------------------------------------------------------------------


def said(state: str = "running", **more: Any) -> RunStatus:
    return msgspec.structs.replace(Observer("flat").status, state=state, **more)


def happened(*numbers: int) -> Happened:
    return Happened([CheckpointEnded(at=AT, checkpoint=ended_checkpoint(each)) for each in sorted(numbers)[::-1]])


def test_what_the_history_lacks_is_told_by_the_run_and_by_manifests() -> None:
    status = said(
        checkpoints=(ended_checkpoint(4, "aborted", "timeout"), ended_checkpoint(5, "committing")),
        in_progress=(ended_checkpoint(6, "preparing"),),
    )
    kept = {2: ended_checkpoint(2), 3: ended_checkpoint(3), 5: ended_checkpoint(5)}
    attempts = Attempts(happened(1, 2), Life.ALIVE, status, kept, {})
    assert list(attempts.newest_first()) == [6, 5, 4, 3, 2, 1]
    page = attempts.page(None, None, 10)
    assert (page.counts.completed, page.counts.failed, page.counts.in_progress) == (4, 1, 1)
    assert [row.retained for row in page.checkpoints] == [False, True, False, True, True, False]
    found = attempts.get(5)
    assert found is not None
    assert found.state == "committing"


def test_what_a_dead_run_had_under_way_is_not_in_progress() -> None:
    status = said(in_progress=(ended_checkpoint(3, "preparing"),), checkpoints=(ended_checkpoint(2, "committing"),))
    attempts = Attempts(happened(1), Life.STOPPED, status, {2: ended_checkpoint(2)}, {})
    assert list(attempts.newest_first()) == [2, 1]
    assert attempts.page(None, None, 1).counts.in_progress == 0
    found = attempts.get(2)
    assert found is not None
    assert found.state == "complete"


def test_damage_counts_more_than_what_was_said() -> None:
    attempts = Attempts(happened(1, 2), Life.STOPPED, None, {2: ended_checkpoint(2)}, {2: "a file is gone"})
    page = attempts.page(("damaged",), None, 10)
    assert [(row.checkpoint.checkpoint, row.checkpoint.why) for row in page.checkpoints] == [
        ("ckpt-000002", "a file is gone")
    ]
    assert page.counts.completed == 2


def test_a_measure_tells_percentiles_of_what_is_known() -> None:
    found = measured([*range(1, 101), None])
    assert (found.count, found.min, found.average, found.max) == (100, 1, 50.5, 100)
    assert (found.p50, found.p90, found.p95, found.p99) == (50, 90, 95, 99)
    assert measured([7]).p99 == 7
    assert measured([None]).count == 0


def test_a_series_that_is_too_long_is_spread_evenly() -> None:
    done = [ended_checkpoint(each) for each in range(1, 2501)]
    found = spread(done, 1_000)
    assert len({each.checkpoint for each in found}) == 1_000
    assert (found[0], found[-1]) == (done[0], done[-1])
    assert spread(done[:3], 1_000) == done[:3]


# -- phases -----------------------------------------------------------------------------------------


def told(checkpoint: CheckpointStatus) -> list[tuple[str | None, str, int, int, bool]]:
    return [(each.name, each.phase, each.from_ms, each.to_ms, each.is_critical) for each in spans_of(checkpoint)]


def test_phases_follow_one_another_and_what_was_waited_for_is_marked() -> None:
    checkpoint = msgspec.structs.replace(
        ended_checkpoint(1),
        stages={
            "a": StagePart(progress="done", barrier_ms=0, aligned_ms=0, alignment_ms=10, snapshot_ms=2),
            "b": StagePart(
                progress="done", barrier_ms=5, aligned_ms=30, alignment_ms=55, snapshot_ms=5, last_barrier_from="a"
            ),
        },
        begun_ms=1,
        prepared_ms=70,
        decided_ms=90,
        duration_ms=90,
        commits={
            "t": SinkCommit(begun_ms=90, took_ms=20),
            "u": SinkCommit(begun_ms=90, took_ms=3),
            "v": SinkCommit(begun_ms=95),
        },
        shown_ms=110,
    )
    assert told(checkpoint) == [
        (None, "beginning", 0, 1, True),
        ("b", "waiting", 1, 6, False),
        ("a", "catching_up", 1, 11, True),
        ("b", "aligning", 6, 11, False),
        ("a", "storing", 11, 13, False),
        ("b", "aligning", 11, 31, True),
        ("b", "catching_up", 31, 61, True),
        ("b", "storing", 61, 66, True),
        (None, "quorum", 66, 70, True),
        (None, "deciding", 70, 90, True),
        ("u", "committing", 90, 93, False),
        ("t", "committing", 90, 110, True),
    ]
    assert told(ended_checkpoint(1)) == []


def test_a_stage_that_waits_for_its_only_barrier_is_on_the_path() -> None:
    checkpoint = msgspec.structs.replace(
        ended_checkpoint(1),
        stages={
            "a": StagePart(progress="done", barrier_ms=0, alignment_ms=0, snapshot_ms=2),
            "b": StagePart(
                progress="done", barrier_ms=40, aligned_ms=40, alignment_ms=0, snapshot_ms=5, last_barrier_from="a"
            ),
        },
        duration_ms=45,
    )
    assert told(checkpoint) == [
        ("a", "storing", 0, 2, False),
        ("b", "waiting", 0, 40, True),
        ("b", "storing", 40, 45, True),
    ]


def test_a_checkpoint_under_way_has_the_phases_that_it_has_come_to() -> None:
    checkpoint = msgspec.structs.replace(
        ended_checkpoint(1, "preparing"),
        stages={
            "a": StagePart(progress="storing", barrier_ms=0, alignment_ms=10),
            "b": StagePart(progress="catching_up", barrier_ms=10, alignment_ms=40),
            "c": StagePart(progress="waiting"),
        },
        duration_ms=50,
    )
    assert [each[:4] for each in told(checkpoint)] == [
        ("a", "aligning", 0, 10),
        ("b", "waiting", 0, 10),
        ("c", "waiting", 0, 50),
        ("a", "storing", 10, 50),
        ("b", "catching_up", 10, 50),
    ]


def test_a_stage_that_recorded_until_a_late_barrier_says_so() -> None:
    late = StagePart(
        progress="done",
        cut_because="always",
        barrier_ms=0,
        alignment_ms=0,
        aligned_ms=80,
        last_barrier_from="a",
        snapshot_ms=10,
        stored_ms=95,
    )
    source = StagePart(progress="done", cut_because="aligned", barrier_ms=0, alignment_ms=0, stored_ms=1)
    checkpoint = msgspec.structs.replace(
        ended_checkpoint(1, "complete"),
        stages={"a": source, "b": late},
        begun_ms=0,
        prepared_ms=95,
        decided_ms=95,
        shown_ms=95,
        duration_ms=95,
        commits={},
    )
    assert told(checkpoint) == [
        ("a", "storing", 0, 1, False),
        ("b", "recording", 0, 80, True),
        ("b", "storing", 80, 95, True),
    ]


# -- tables -----------------------------------------------------------------------------------------

OURS = number_of("ours")


def version(epoch: int, root: int = OURS, rows: int | None = 5, **records: int) -> bytes:
    actions: list[dict[str, Any]] = [{"commitInfo": {"timestamp": 1_000 + epoch}}]
    for kind, value in {"epoch": epoch, "batch": epoch + 1, "root": root, **records}.items():
        actions.append({"txn": {"appId": f"tidegate/flat/table/{kind}", "version": value}})
    stats = None if rows is None else json.dumps({"numRecords": rows})
    actions.append({"add": {"path": "x", "stats": stats}})
    return "\n".join(map(json.dumps, actions)).encode()


def table(*versions: bytes) -> ReadTable:
    files = Memory("table")
    for number, data in enumerate(versions):
        files.write(f"_delta_log/{number:020d}.json", data)
    files.write("_delta_log/_last_checkpoint", b"{}")
    found = ReadTable(files, "flat", "table", OURS)
    found.look()
    return found


def test_a_version_tells_the_epoch_and_the_rows_that_it_added() -> None:
    found = read_version(3, version(7), "flat")
    assert (found.at_ms, found.rows_added, found.records["table"]["epoch"]) == (1_007, 5, 7)
    assert read_version(3, version(7, rows=None), "flat").rows_added is None
    assert read_version(3, version(7), "another").records == {}


def test_a_table_shows_the_last_epoch_of_this_root() -> None:
    found = table(version(1), b'{"commitInfo":{}}', version(2), version(9, root=number_of("another's")))
    assert found.newest == 3
    assert {epoch: each.number for epoch, each in found.by_epoch().items()} == {1: 0, 2: 2}
    last = found.last()
    assert last is not None
    assert (last[0], last[1].number) == (2, 2)


def test_a_version_that_shows_a_checkpoint_is_told_where_that_is_plain() -> None:
    found = table(version(1), b'{"commitInfo":{}}', version(3))
    assert [found.showing(epoch, epoch) for epoch in (1, 3)] == [1, 2]
    assert found.showing(2, 1) == 1  # it had no rows for it
    assert found.showing(3, 9) is None  # it lacks some of it
    assert found.showing(0, -1) is None
    assert table(version(1), version(2, set_back=4)).showing(2, 2) is None
    assert table(version(1, root=number_of("another's"))).showing(1, 1) is None


def test_a_table_has_the_batches_that_its_own_record_tells() -> None:
    found = table(version(1), b'{"commitInfo":{}}', version(2), version(9, root=number_of("another's")))
    assert [found.has(batch) for batch in (-1, 2, 3)] == [True, True, False]
    assert [table().has(batch) for batch in (-1, 0)] == [True, False]


def decided(*, newest: int, is_told: bool) -> Decided:
    done = [ended_checkpoint(each) for each in range(newest, 0, -1)]
    return Decided(
        newest_first=done,
        lineage=done,
        shown=done[0 if is_told else 1],
        in_doubt=None if is_told else done[0],
        sealed={each.checkpoint: {"table": each.epoch} for each in done},
    )


def shown_of(kind: str, given: Decided, address: str = "there") -> tuple[str | None, str | None]:
    shape = {"table": StageShape("sink", (), "append", "struct<id:bigint>", TableAddress(kind, address))}
    manifest = Manifest(1, "flat", 3, 3, 1, 1, 0, True, AT, 1, None, shape, {})
    (found,) = ShownTables().look(manifest, "ours", given).tables
    return found.shows, found.why


def test_of_a_table_that_only_the_run_can_tell_of_nothing_is_claimed_that_it_has_not_told() -> None:
    assert shown_of("postgres", decided(newest=3, is_told=True)) == ("ckpt-000003", None)
    assert shown_of("postgres", decided(newest=3, is_told=False)) == (
        "ckpt-000002",
        "no run has told yet whether it shows ckpt-000003",
    )


def test_a_delta_table_shows_what_its_own_record_says_whatever_others_tell(tmp_path: Path) -> None:
    def shows(given: Decided, *versions: bytes) -> str | None:
        log = tmp_path / "_delta_log"
        shutil.rmtree(log, ignore_errors=True)
        log.mkdir()
        for number, data in enumerate(versions):
            (log / f"{number:020d}.json").write_bytes(data)
        return shown_of("delta", given, str(tmp_path))[0]

    told = decided(newest=3, is_told=True)
    assert shows(told, version(1), version(2), version(3)) == "ckpt-000003"
    assert shows(told, version(1), version(2)) == "ckpt-000002"
    assert shows(told) is None
    idle = msgspec.structs.replace(told, sealed={**told.sealed, "ckpt-000003": {"table": 2}})
    assert shows(idle, version(1), version(2)) == "ckpt-000003", "which has added nothing to it"
    rewound = msgspec.structs.replace(
        told, lineage=told.lineage[1:], left_behind=told.lineage[:1], shown=told.lineage[1]
    )
    assert shows(rewound, version(1), version(2), version(3)) == "ckpt-000003", "it is yet to be set back"
    assert shows(rewound, version(1), version(2), version(3), version(2, set_back=4)) == "ckpt-000002"


def test_what_only_the_log_tells_of_a_killed_run_is_in_doubt() -> None:
    status = said(generation=1, checkpoints=(ended_checkpoint(2), ended_checkpoint(3, "committing")))
    kept = {number: ended_checkpoint(number) for number in (1, 2, 3)}
    attempts = Attempts(happened(1), Life.STOPPED, status, kept, {})
    assert [attempts.is_in_doubt(number) for number in (1, 2, 3)] == [False, False, True]
    later = {3: msgspec.structs.replace(kept[3], generation=2)}
    assert not Attempts(happened(1), Life.STOPPED, status, later, {}).is_in_doubt(3), "it is of no run"


def test_a_version_that_is_no_json_is_passed_over() -> None:
    found = table(version(1), b"\xff{", version(2))
    assert sorted(found.by_epoch()) == [1, 2]


# -- alerts -----------------------------------------------------------------------------------------


def texts(life: Life, status: RunStatus | None, *newest_first: Any, interval: str | None = None) -> list[str]:
    return [each.text for each in alerts_of(life, status, newest_first, {}, None, interval)]


def test_a_run_that_is_well_is_no_alert() -> None:
    now = as_moment(datetime.now(UTC))
    done = msgspec.structs.replace(ended_checkpoint(1), triggered_at=now)
    assert texts(Life.ALIVE, said(), done, interval="10s") == []
    assert texts(Life.STOPPED, said("finished", why="all is read")) == []
    assert texts(Life.STOPPED, None) == []


def test_how_a_run_ended_or_hangs_is_one() -> None:
    assert texts(Life.STOPPED, said("running")) == ["the last run was killed, or its machine went down"]
    assert texts(Life.STOPPED, said("failed", why="stage x")) == ["the last run failed: stage x"]
    assert "has not been heard of since" in texts(Life.HANGING, said())[0]
    assert texts(Life.ALIVE, said("restarting", why="stage x")) == ["the run restarts: stage x"]


def test_aborts_in_a_row_and_no_checkpoint_for_long_are() -> None:
    aborted = [ended_checkpoint(each, "aborted", f"why {each}") for each in (3, 2)]
    (text,) = texts(Life.ALIVE, said(), *aborted, ended_checkpoint(1))
    assert text == "the last 2 checkpoints were aborted, the newest because: why 3"
    old = as_moment(datetime.now(UTC) - timedelta(minutes=10))
    last = msgspec.structs.replace(ended_checkpoint(1), triggered_at=old)
    (text,) = texts(Life.ALIVE, said(started_at=AT), last, interval="10s")
    assert text == f"no checkpoint was completed since {old}, though one is to be taken every 10s"
    (text,) = texts(Life.ALIVE, said(started_at=old), ended_checkpoint(1), interval="10s")
    assert f"since {old}" in text
    assert texts(Life.ALIVE, said(), last, interval="10s") == [], "it has just been started"
    assert texts(Life.ALIVE, said(), ended_checkpoint(1), interval="no time") == []
    (text,) = texts(Life.ALIVE, said(due=DueCheckpoint(AT, "sinks_lag", "table t")), interval="10s")
    assert text == f"a checkpoint is due since {AT}: table t"


def test_stages_that_wait_and_instances_that_are_missing_are() -> None:
    stages = {
        "a": StageStatus("source", 1, 1, 0.0, None, None, no_batch=NoBatch(AT, "no broker answers")),
        "b": StageStatus("stage", 1, 1, 0.0, 3, None, held_back_by="its table"),
    }
    missing = InstanceStatus(name="i", leads=False, host=None, pid=None, stages=("b",), missing_since=AT)
    found = texts(Life.ALIVE, said(stages=stages, instances=(missing,)))
    assert [text.split()[:2] for text in found] == [["source", "a"], ["b", "is"], ["instance", "i"]]


# -- layouts ----------------------------------------------------------------------------------------


def test_an_edge_that_passes_a_column_bends_there() -> None:
    graph = {
        "a": GraphStage("source", (), "append"),
        "b": GraphStage("stage", ("a",), "append"),
        "c": GraphStage("sink", ("a", "b"), "append"),
    }
    layout = layout_of(graph)
    (far,) = [edge for edge in layout.edges if (edge.source, edge.target) == ("a", "c")]
    assert [point.column for point in far.points] == [0, 1, 2]
    assert layout.columns == 3
    assert layout_of({}).nodes == ()
