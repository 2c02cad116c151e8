"""Opening a generation while another run does, with Spark played: the one that loses does no harm to the other."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, StructField, StructType

import tidegate as tg
from tests.spark.played import READ_STREAM, CountingTable, PlayedPipeline, open_next
from tidegate.engine import fitting, run
from tidegate.engine.generation import Generation
from tidegate.engine.launching import Launch
from tidegate.engine.requests import StopRun
from tidegate.engine.root import Root
from tidegate.engine.stopping import Stop
from tidegate.errors import ForeignRoot, ForeignTable, PipelineChanged, RecoveryRefused, StageFailed, Superseded
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import Sink, SinkPlace, decode_committable, staged_by
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.spark import queries
from tidegate.spark.session import RunSession
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import examine
from tidegate.storage.manifest import SourceStream, TableAddress
from tidegate.storage.memory import Memory
from tidegate.storage.paths import RootPaths

SCHEMA = StructType([StructField("id", LongType())])
BUILT = SimpleNamespace(
    schema=SCHEMA, sources=(), frame=None, streams=(READ_STREAM,), has_event_time=False, aggregates=False
)


class Broken(Exception):
    """Of a user's function, such as one that cannot reach its broker."""


def pipeline_of(folder: Path, table: str = "table", sink: Sink | None = None) -> tg.Pipeline:
    """As `PlayedPipeline` has it. Its functions are not called."""
    pipeline = tg.Pipeline("flat")

    @pipeline.source
    def rows() -> DataFrame:
        raise AssertionError

    @pipeline.stage
    def middle(rows: DataFrame) -> DataFrame:
        return rows

    pipeline.sink(sink or CountingTable(folder / "lake" / table), inputs=["middle"])(_named("table"))
    return pipeline


def _named(name: str) -> Callable[[DataFrame], DataFrame]:
    def function(middle: DataFrame) -> DataFrame:
        return middle

    function.__name__ = name
    return function


def take_over(folder: Path, table: TableAddress | None = None, checkpoints: int = 1, *, has_rows: bool = True) -> None:
    """Another run opens a generation, and takes checkpoints in it. `table` is what it says that its sink writes to."""
    winner = PlayedPipeline(folder, address=table)
    try:
        for _ in range(checkpoints):
            if has_rows:
                winner.one_batch_each()
            winner.checkpoint()
            # What it has counted no table shows: a run that goes on from there finds it staged.
            for file in winner.sealed().files:
                Path(file.path).parent.mkdir(parents=True, exist_ok=True)
                Path(file.path).write_bytes(bytes(file.size_bytes))
    finally:
        winner.generation.stop()


def place_in(folder: Path) -> SinkPlace:
    return SinkPlace("flat", "table", Folder(folder / "root" / "sinks" / "table"))


def damage_newest(folder: Path) -> None:
    root = Root(folder / "root", "flat")
    log = root.decisions.read()
    assert log.newest is not None
    (folder / "root" / log.newest.manifest).write_bytes(b"{}")


def check_newest(folder: Path) -> None:
    root = Root(folder / "root", "flat")
    log = root.decisions.read()
    assert log.newest is not None
    examine(root.store, log, log.newest.checkpoint_id)


@pytest.fixture(autouse=True)
def spark_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "build", lambda *_: BUILT)
    monkeypatch.setattr(fitting, "may_join", lambda _: frozenset())
    monkeypatch.setattr(fitting, "StageSessions", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(fitting, "states_of", lambda _: nullcontext(lambda _stage: None))
    monkeypatch.setattr(run, "own_session", lambda *_: SimpleNamespace())
    monkeypatch.setattr(RunSession, "check", lambda *_: None)
    monkeypatch.setattr(run.Run, "_check_reached", lambda *_: None)
    monkeypatch.setattr(run.Run, "_watch_sources", lambda *_: None)
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)


def test_what_a_lost_generation_has_left_is_not_there_for_one_of_its_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log was put back from a backup. Files that have names elsewhere too keep these, and what they hold."""
    take_over(tmp_path)
    root, backup = tmp_path / "root", tmp_path / "backup"
    shutil.copytree(root / "decisions", backup)
    take_over(tmp_path)
    lost = root / RootPaths.generation(2)
    left = [path for path in lost.rglob("*") if path.is_file()]
    assert {path.relative_to(lost).parts[0] for path in left} >= {"manifests", "snapshots", "stages"}
    (tmp_path / "elsewhere").hardlink_to(left[0])
    content = left[0].read_bytes()
    shutil.rmtree(root / "decisions")
    shutil.copytree(backup, root / "decisions")
    opened, base = open_next(Root(root, "flat"))
    assert opened.generation == 2
    assert base is not None
    assert not lost.exists()
    assert (tmp_path / "elsewhere").read_bytes() == content
    assert f"has {len(left)} files of a generation that the decision log does not know" in caplog.text
    check_newest(tmp_path)


def before_it_opens(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Something happens when a run has checked everything, and is about to open a generation."""
    real = Root.claim_anew

    def late(root: Root) -> None:
        monkeypatch.setattr(Root, "claim_anew", real)
        act()
        real(root)

    monkeypatch.setattr(Root, "claim_anew", late)


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("when", ["while it builds", "as it opens", "before its function fails"])
def test_a_run_that_is_taken_over_while_it_starts_gives_way_and_deletes_nothing(
    when: str, existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existed:
        (tmp_path / "root").mkdir()
    taken_over: list[str] = []

    def once() -> None:
        if not taken_over:
            taken_over.append(when)
            take_over(tmp_path)

    def build(*_: Any) -> Any:
        once()
        if "fails" in when:
            raise Broken
        return BUILT

    if when == "as it opens":
        before_it_opens(monkeypatch, once)
    else:
        monkeypatch.setattr(queries, "build", build)
    with pytest.raises(Broken if "fails" in when else Superseded):
        pipeline_of(tmp_path).run(tmp_path / "root")
    check_newest(tmp_path)


def test_a_run_that_restarts_gives_way_to_one_that_took_over_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven: list[int] = []

    def drive(_run: object, generation: Generation) -> None:
        driven.append(generation.generation)
        raise StageFailed("rows", "out of memory")

    def pause(_stop: object, _seconds: float) -> bool:
        open_next(Root(tmp_path / "root", "flat"))
        return False

    monkeypatch.setattr(run.Run, "_drive", drive)
    monkeypatch.setattr(Stop, "wait", pause)
    with pytest.raises(Superseded):
        pipeline_of(tmp_path).run(tmp_path / "root")
    assert driven == [1]


def noting(driven: list[Generation]) -> Callable[[object, Generation], StopRun]:
    """Instead of driving a generation, note it, and end."""

    def drive(_run: object, generation: Generation) -> StopRun:
        driven.append(generation)
        return StopRun()

    return drive


def test_a_run_that_is_told_to_stop_between_two_tries_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))

    def drive(*_: object) -> None:
        told.start()
        raise StageFailed("rows", "out of memory")

    monkeypatch.setattr(run.Run, "_drive", drive)
    with pytest.raises(StageFailed):
        pipeline_of(tmp_path).run(tmp_path / "root", restart_pause="1h")
    assert not told.is_alive(), "it was told in the pause"


@pytest.mark.parametrize("when", ["before it checks the table", "between its check and its claim"])
def test_of_two_roots_that_start_at_once_one_is_refused_before_it_stages_anything(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = CountingTable(tmp_path / "lake" / "table")
    winner = table.bind(SinkPlace("flat", "table", Memory(), root="winner"))
    staged = Path(staged_by(winner, 1).location()) / "part-0.parquet"

    def win() -> None:
        winner.prepare_table(SCHEMA)
        winner.claim()
        staged.parent.mkdir(parents=True)
        staged.touch()

    if when == "before it checks the table":
        win()
    else:
        before_it_opens(monkeypatch, win)
    monkeypatch.setattr(Launch, "__call__", lambda *_: pytest.fail("it goes on"))
    with pytest.raises(ForeignTable, match="belongs to another root of pipeline 'flat', for its sink 'table'"):
        pipeline_of(tmp_path).run(tmp_path / "root")
    assert staged.exists()
    assert (tmp_path / "root").exists() == (when != "before it checks the table"), "one without a log is removed"


def test_a_root_keeps_its_id_also_when_a_run_that_failed_has_removed_it_meanwhile(tmp_path: Path) -> None:
    root = Root(tmp_path / "root", "flat")
    assert Root(tmp_path / "root", "flat").id == root.id
    assert Root(tmp_path / "another", "flat").id != root.id
    (tmp_path / "root" / "pipeline.json").unlink()
    open_next(root)
    assert Root(tmp_path / "root", "flat").id == root.id


def test_a_root_that_was_made_anew_meanwhile_is_not_opened(tmp_path: Path) -> None:
    root = Root(tmp_path / "root", "flat")
    (tmp_path / "root" / "pipeline.json").unlink()
    assert Root(tmp_path / "root", "flat").id != root.id
    with pytest.raises(ForeignRoot, match="made anew by another run"):
        open_next(root)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("table", "of sink 'table' is gone"),
        (
            "another",
            r"wrote to Delta table .*/table \(no longer there\)\. Now it would write to .*/another, which is an",
        ),
        ("nowhere", r"wrote to Delta table .*/table \(no .*\)\. Now it would write to .*/nowhere, where there is none"),
    ],
)
def test_a_table_without_what_the_checkpoint_goes_on_from_is_refused(table: str, message: str, tmp_path: Path) -> None:
    take_over(tmp_path)
    if table == "another":  # there, but empty
        tg.DeltaTable(tmp_path / "lake" / table).bind(place_in(tmp_path)).prepare_table(SCHEMA)
    with pytest.raises(RecoveryRefused, match=message):
        pipeline_of(tmp_path, table).run(tmp_path / "root")
    assert Root(tmp_path / "root", "flat").decisions.read().generation == 1


@pytest.mark.parametrize("what", ["moved", "only named elsewhere", "created anew by others", "gone"])
def test_a_table_for_which_no_row_was_ever_sealed_may_be_another(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.Run, "_drive", lambda *_: StopRun())
    table = tg.DeltaTable(tmp_path / "lake" / "table").bind(place_in(tmp_path))
    table.prepare_table(SCHEMA)
    take_over(tmp_path, has_rows=False)
    if what == "moved":
        table.path.rename(tmp_path / "lake" / "elsewhere")
    elif what != "only named elsewhere":
        shutil.rmtree(table.path)
    if what == "created anew by others":
        table.prepare_table(SCHEMA)
    now = "table" if what in ("created anew by others", "gone") else "elsewhere"
    pipeline_of(tmp_path, now).run(tmp_path / "root")
    assert Root(tmp_path / "root", "flat").decisions.read().generation == 2
    assert tg.DeltaTable(tmp_path / "lake" / now).bind(place_in(tmp_path)).identity() is not None


def test_what_was_staged_in_a_table_that_was_moved_is_sought_where_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven: list[Generation] = []
    monkeypatch.setattr(run.Run, "_drive", noting(driven))
    table = tg.DeltaTable(tmp_path / "lake" / "table").bind(place_in(tmp_path))
    table.prepare_table(SCHEMA)
    take_over(tmp_path)
    table.path.rename(tmp_path / "moved")
    pipeline_of(tmp_path, sink=CountingTable(tmp_path / "moved")).run(tmp_path / "root")
    start = driven[0].stages["table"].start
    assert start is not None
    assert start.committable is not None
    assert [Path(each.path).parents[4] for each in decode_committable(start.committable).files] == [tmp_path / "moved"]


def test_a_table_that_neither_shows_nor_has_staged_what_a_checkpoint_has_sealed_was_put_back(tmp_path: Path) -> None:
    """By a backup from before: the checkpoint was sealed when the table was not yet known to show the rows of it."""
    table = tg.DeltaTable(tmp_path / "lake" / "table").bind(place_in(tmp_path))
    table.prepare_table(SCHEMA)
    take_over(tmp_path)
    shutil.rmtree(table.path / "_tidegate")
    with pytest.raises(RecoveryRefused, match=r"sink 'table' was put back to an older.*ckpt-000001 .* is gone\. W"):
        pipeline_of(tmp_path).run(tmp_path / "root")
    assert Root(tmp_path / "root", "flat").decisions.read().generation == 1


@pytest.mark.parametrize("what", ["same", "created anew", "created anew and known before"])
def test_a_table_that_was_deleted_and_created_anew_is_refused_unless_it_holds_epochs_of_the_pipeline(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink that never had a row has no epoch in its table, so that alone is no reason."""
    monkeypatch.setattr(run.Run, "_drive", lambda *_: StopRun())
    table = tg.DeltaTable(tmp_path / "lake" / "table").bind(place_in(tmp_path))
    table.prepare_table(SCHEMA)
    take_over(tmp_path)
    if what != "same":
        shutil.rmtree(table.path)
        table.prepare_table(SCHEMA)
    if what == "created anew and known before":
        monkeypatch.setattr(BoundDeltaTable, "facts", lambda *_: SinkFacts(1, next_batch=1))
    if what == "created anew":
        with pytest.raises(RecoveryRefused, match="of sink 'table' is not the one that it wrote to"):
            pipeline_of(tmp_path).run(tmp_path / "root")
    else:
        pipeline_of(tmp_path).run(tmp_path / "root")
    assert Root(tmp_path / "root", "flat").decisions.read().generation == (1 if what == "created anew" else 2)


def test_what_a_table_is_known_by_is_kept_by_the_first_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is the first run that creates the table."""
    driven: list[Generation] = []
    monkeypatch.setattr(run.Run, "_drive", noting(driven))
    pipeline_of(tmp_path).run(tmp_path / "root")
    table = driven[0].shape["table"].table
    assert table is not None
    assert table.identity == tg.DeltaTable(tmp_path / "lake" / "table").bind(place_in(tmp_path)).identity()
    assert table.identity is not None


@pytest.mark.parametrize("reads", ["in", "elsewhere"])
def test_a_source_that_stood_in_another_stream_is_refused(
    reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tg.DeltaTable(tmp_path / "lake" / "table").bind(place_in(tmp_path)).prepare_table(SCHEMA)
    take_over(tmp_path)
    built = SimpleNamespace(**{**vars(BUILT), "streams": (SourceStream("json", {"path": reads}),)})
    monkeypatch.setattr(queries, "build", lambda *_: built)
    monkeypatch.setattr(run.Run, "_drive", lambda *_: StopRun())
    if reads == "in":
        pipeline_of(tmp_path).run(tmp_path / "root")
    else:
        with pytest.raises(PipelineChanged, match=r"path=in\), now it is json \(path=elsewhere\)"):
            pipeline_of(tmp_path).run(tmp_path / "root")
    assert Root(tmp_path / "root", "flat").decisions.read().generation == (2 if reads == "in" else 1)


class Writer:
    def __call__(self, *_: object) -> None: ...


@pytest.mark.parametrize("sink", [tg.ForeachBatch(Writer()), tg.ForeachBatch(print), tg.Console(), tg.Memory()])
def test_a_function_may_be_replaced_before_its_first_call_has_succeeded(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint was decided, and its epoch is not remembered yet: it lies in the root, and nowhere else."""
    take_over(tmp_path, TableAddress("function", "<test_opening.Writer object at 0x7f0123456789>"))
    monkeypatch.setattr(run.Run, "_drive", lambda *_: StopRun())
    pipeline_of(tmp_path, sink=sink).run(tmp_path / "root")
    assert Root(tmp_path / "root", "flat").decisions.read().generation == 2


def test_a_function_that_takes_the_place_of_a_table_is_refused(tmp_path: Path) -> None:
    take_over(tmp_path)
    with pytest.raises(RecoveryRefused, match=r"wrote to Delta table .*/table .*Now it would write to function print"):
        pipeline_of(tmp_path, sink=tg.ForeachBatch(print)).run(tmp_path / "root")


def test_a_damaged_checkpoint_is_not_skipped_where_a_table_that_must_be_fenced_is_gone(tmp_path: Path) -> None:
    take_over(tmp_path, checkpoints=2)
    damage_newest(tmp_path)
    with pytest.raises(RecoveryRefused, match=r"/lake/table of sink 'table' is gone or .* restore the table, or start"):
        pipeline_of(tmp_path).run(tmp_path / "root")
    assert Root(tmp_path / "root", "flat").decisions.read().generation == 1


def test_a_damaged_checkpoint_is_skipped_where_the_table_was_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.Run, "_drive", lambda *_: StopRun())
    table = tg.DeltaTable(tmp_path / "lake" / "table").bind(place_in(tmp_path))
    table.prepare_table(SCHEMA)
    take_over(tmp_path, checkpoints=2)
    damage_newest(tmp_path)
    pipeline_of(tmp_path).run(tmp_path / "root")
    assert table.facts().fence == 2
    assert Root(tmp_path / "root", "flat").decisions.read().generation == 2
