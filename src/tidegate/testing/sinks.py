"""The tests that a sink must pass, whoever wrote it.

Subclass `SinkConformance` in a pytest file, under a name that starts with `Test`, and say how to make the sink, how to
read what its table shows, and how to put it back to an older state:

    class TestMyTable(SinkConformance):
        def make_sink(self, name):
            return MyTable(URL, name)

        def shown(self, name):
            return Counter(query(f"select id, value from {name}"))

        def keep(self, name):
            backup = dump(name)
            return lambda: restore(backup)

Each test uses tables of its own names. `make_sink` with the same name gives another handle on the same table, as
another process would have it.
"""

from __future__ import annotations

import importlib
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tidegate.errors import (
    CheckpointNotVisible,
    ConflictingRows,
    Fenced,
    ForeignTable,
    SinkFailed,
    TablePutBack,
    TidegateError,
)
from tidegate.protocol.aligner import CutCause
from tidegate.protocol.commit import CommitPermit, permit_commit
from tidegate.protocol.decision_log import DecisionLog
from tidegate.sinks.contract import (
    BoundSink,
    CheckingSink,
    CommitAnswer,
    Committable,
    CopyingSink,
    FileSink,
    ProbingSink,
    ReversibleSink,
    RowSink,
    Sink,
    SinkPlace,
    Staged,
    StagedBatch,
    StagedFile,
    decode_committable,
    staged_by,
    staged_generation,
)
from tidegate.storage.file_lists import SnapshotFiles
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import FORMAT, Manifest, Origin, StageShape, StageSnapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

Row = tuple[int, str]
Rows = Counter[Row]


def permit(epoch: int, generation: int = 1) -> CommitPermit:
    """The permit that a decision log gives for an epoch."""
    log = DecisionLog()
    while log.generation < generation:
        log.append(log.opening("conformance", None))
    log.append(
        log.completing(
            "conformance",
            generation,
            checkpoint_id=epoch,
            epoch=epoch,
            manifest="manifest",
            manifest_sha256="00",
            aligned=True,
            retained=(epoch,),
        )
    )
    return permit_commit(log, epoch, generation)


def columns() -> StructType:
    """The rows of these tests: an id and a value."""
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    return StructType([StructField("id", LongType()), StructField("value", StringType())])


class SinkRun:
    """One generation of a pipeline, as a sink sees it. It keeps of its stage what a checkpoint would keep."""

    def __init__(
        self, sink: BoundSink, generation: int, restored: Committable | None = None, next_batch: int = 0
    ) -> None:
        self.sink = sink
        self.generation = generation
        self.batch = next_batch - 1
        self.staged: list[Staged] = [] if restored is None else [*restored.files, *restored.batches]
        self.shown_through = -1 if restored is None else restored.shown_through
        if isinstance(sink, RowSink):
            sink.open_staging(generation, columns())

    def stage(self, rows: Sequence[Row], batch: int | None = None) -> None:
        """A batch, the next one unless it is named."""
        batch = self.batch + 1 if batch is None else batch
        self.staged = [each for each in self.staged if each.batch != batch]
        if isinstance(self.sink, RowSink):
            session = self.sink.place.session
            assert session is not None, "a RowSink stages a DataFrame: give the suite a session"
            frame = session.createDataFrame(list(rows), columns())
            count = self.sink.stage(self.generation, batch, frame)
            assert count == len(rows), "stage() tells how many rows it has staged"
            self.staged.append(StagedBatch(batch, self.generation, count))
        else:
            assert isinstance(self.sink, FileSink)
            self.staged.append(_write_file(staged_by(self.sink, self.generation), batch, rows))
        self.batch = max(self.batch, batch)

    def sealed(self) -> Committable:
        """What a checkpoint's manifest holds, after it was written and read."""
        files = tuple(each for each in self.staged if isinstance(each, StagedFile))
        batches = tuple(each for each in self.staged if isinstance(each, StagedBatch))
        return decode_committable(Committable(self.batch, files, batches, self.shown_through).encode())

    def commit(self, epoch: int, sealed: Committable | None = None) -> CommitAnswer:
        return self.sink.commit(permit(epoch, self.generation), sealed or self.sealed())

    def on_visible(self, sealed: Committable) -> None:
        """What the table is known to show is sealed no more."""
        done = [each for each in self.staged if each.batch <= sealed.through_batch]
        self.staged = [each for each in self.staged if each.batch > sealed.through_batch]
        self.shown_through = max([self.shown_through, *(each.batch for each in done if each.rows)])

    def show(self, epoch: int, rows: Sequence[Row]) -> Committable:
        """A batch, its checkpoint and its commit."""
        self.stage(rows)
        sealed = self.sealed()
        assert self.commit(epoch, sealed) is CommitAnswer.COMMITTED
        self.on_visible(sealed)
        return sealed


def manifest_at(epoch: int, sink: BoundSink, sealed: Committable | None, taken_by: SinkRun | None = None) -> Manifest:
    """Of a checkpoint of a pipeline of one sink; None: it did not have that sink yet. `taken_by`: on another root."""
    stage = sink.place.stage
    shape = StageShape("sink", (), "append", "", sink.table)
    snapshot = StageSnapshot(
        cut=None, cause=CutCause.ALIGNED, over_bound=False, files=SnapshotFiles(), positions={}, output_sequence=0,
        in_flight={}, source_positions=(), watermark_ms=None, committable=None if sealed is None else sealed.encode(),
        barrier_ms=0, alignment_ms=0, snapshot_ms=0, new_bytes=0, total_bytes=0,
    )  # fmt: skip
    is_known = sealed is not None
    return Manifest(
        FORMAT, sink.place.pipeline, epoch, epoch, 1, 1, 0, True, "2026-01-01", 1, None,
        {stage: shape} if is_known else {}, {stage: snapshot} if is_known else {},
        origin=None if taken_by is None else Origin(taken_by.sink.place.root, epoch, epoch),
    )  # fmt: skip


def _write_file(staging: Files, batch: int, rows: Sequence[Row]) -> StagedFile:
    """What Spark's file sink would write."""
    pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    name = f"part-{batch:05d}-{uuid.uuid4()}.parquet"
    ids = pyarrow.array([each for each, _ in rows], pyarrow.int64())
    values = pyarrow.array([value for _, value in rows], pyarrow.string())
    written = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"id": ids, "value": values}), written)
    data = written.getvalue().to_pybytes()
    staging.at("", durable=False).write(name, data)
    staging.sync([name])  # as before a checkpoint is decided that names it
    return StagedFile(batch, staging.location(name), len(data), len(rows))


class SinkConformance:
    """See the module's text."""

    key: ClassVar[bool] = False
    """Whether rows replace those with the same id."""
    shares_table: ClassVar[bool] = True
    """Whether two stages may write to one table."""
    undoes: ClassVar[bool] = True
    """Whether a table that is set back no longer shows what came since. Else that cannot be undone."""
    keeps_history: ClassVar[bool] = True
    """Whether a table that can be set back keeps what that takes. Else it refuses to be, where something came since."""
    creates_table: ClassVar[bool] = True
    """Whether there is a table that `prepare_table` has to create. Else all that is remembered lies in the root."""

    # -- to be given ------------------------------------------------------------------------------

    def make_sink(self, name: str) -> Sink:
        """A handle on the table of that name."""
        raise NotImplementedError

    def shown(self, name: str) -> Rows:
        """What a reader of the table sees."""
        raise NotImplementedError

    def keep(self, name: str) -> Callable[[], object]:
        """Back the table up as it is, with what it remembers of its commits. The call that is returned restores it."""
        raise NotImplementedError

    def session(self) -> SparkSession | None:
        """A Spark session, where the sink needs one."""
        return None

    # -- helpers ----------------------------------------------------------------------------------

    def place(self, name: str, stage: str = "orders", root: str = "root") -> SinkPlace:
        if not hasattr(self, "_folder"):
            self._folder = tempfile.TemporaryDirectory(prefix="tidegate-conformance-")
        files = Folder(Path(self._folder.name) / root).at(f"{name}/{stage}")
        return SinkPlace("conformance", stage, files, self.session(), root)

    def start(self, name: str, generation: int = 1, stage: str = "orders", root: str = "root") -> SinkRun:
        """The first run on a table."""
        sink = self.bound(name, stage, root)
        self.check(sink)
        sink.prepare_table(columns())
        sink.claim()
        return SinkRun(sink, generation)

    def bound(self, name: str, stage: str = "orders", root: str = "root") -> BoundSink:
        """A handle of its own on the table of that name, as a stage of a root has it."""
        return self.make_sink(name).bind(self.place(name, stage, root))

    def check(self, sink: BoundSink) -> bool:
        return sink.check_table(columns(), "update" if self.key else "append")

    def restart(self, name: str, generation: int, restored: Committable | None) -> SinkRun:
        """Another process starts a generation on what a checkpoint has sealed."""
        next_batch = 0 if restored is None else restored.through_batch + 1
        run = self.start(name, generation)
        return SinkRun(run.sink, generation, restored, next_batch)

    # -- the tests --------------------------------------------------------------------------------

    def test_it_is_a_sink_that_can_describe_itself(self) -> None:
        sink = self.make_sink("described")
        assert isinstance(sink, Sink)
        assert sink.describe()
        assert sink.table.kind
        place = self.place("described")
        bound = sink.bind(place)
        assert isinstance(bound, FileSink | RowSink)
        assert bound.place == place
        assert (bound.describe(), bound.table) == (sink.describe(), sink.table)

    def test_it_tells_whether_its_table_is_there_already(self) -> None:
        sink = self.bound("there")
        assert self.check(sink) is not self.creates_table
        assert self.check(sink) is not self.creates_table, "looking creates nothing"
        sink.prepare_table(columns())
        assert self.check(sink) is True
        assert self.check(self.bound("there")) is True

    def test_before_spark_is_started_it_tells_of_its_table_what_it_can(self) -> None:
        sink = self.bound("probed")
        if not isinstance(sink, ProbingSink):
            return
        assert sink.probe() is False
        assert sink.probe() is False, "looking creates nothing"
        sink.prepare_table(columns())
        assert sink.probe() is True

    def test_its_table_stays_the_same_whatever_is_committed(self) -> None:
        run = self.start("same")
        before = run.sink.identity()
        run.stage([(1, "a")])
        run.commit(1)
        assert self.bound("same").identity() == before

    def test_nothing_that_is_staged_is_visible(self) -> None:
        run = self.start("staged")
        run.stage([(1, "a"), (2, "b")])
        run.sealed()
        assert self.shown("staged") == Counter()
        assert run.sink.facts().committed_epoch == 0

    def test_a_commit_shows_all_that_was_staged_and_is_remembered(self) -> None:
        run = self.start("committed")
        run.stage([(1, "a"), (2, "b")])
        run.stage([(3, "c")])
        assert run.commit(5) is CommitAnswer.COMMITTED
        assert self.shown("committed") == Counter([(1, "a"), (2, "b"), (3, "c")])
        facts = self.bound("committed").facts()
        assert facts.committed_epoch == 5
        assert facts.next_batch == 2, "the record tells the batch after the last that is shown"

    def test_a_repeated_commit_changes_nothing(self) -> None:
        run = self.start("repeated")
        run.stage([(1, "a")])
        sealed = run.sealed()
        run.commit(1)
        assert run.commit(1, sealed) is CommitAnswer.ALREADY
        another = self.bound("repeated")
        assert another.commit(permit(1), sealed) is CommitAnswer.ALREADY
        assert another.commit(permit(1, generation=2), sealed) is CommitAnswer.ALREADY
        assert self.shown("repeated") == Counter([(1, "a")])

    def test_a_commit_that_a_crash_prevented_is_made_by_the_next_process(self) -> None:
        run = self.start("prevented")
        run.stage([(1, "a")])
        sealed = run.sealed()
        after = self.restart("prevented", 2, sealed)
        assert after.commit(1, sealed) is CommitAnswer.COMMITTED
        assert self.shown("prevented") == Counter([(1, "a")])

    def test_after_an_abort_the_next_epoch_shows_the_rows_of_both(self) -> None:
        run = self.start("aborted")
        run.stage([(1, "a")])
        first = run.sealed()  # prepared, and never decided
        run.stage([(2, "b")])
        assert run.commit(2) is CommitAnswer.COMMITTED
        assert self.shown("aborted") == Counter([(1, "a"), (2, "b")])
        assert run.commit(1, first) is CommitAnswer.ALREADY
        assert self.shown("aborted") == Counter([(1, "a"), (2, "b")])

    def test_epochs_that_overlap_show_each_row_once(self) -> None:
        run = self.start("overlapping")
        run.stage([(1, "a")])
        run.commit(1)
        run.stage([(2, "b")])
        run.commit(2)  # what it names of epoch 1 is visible already
        assert self.shown("overlapping") == Counter([(1, "a"), (2, "b")])

    def test_an_epoch_without_rows_is_no_obstacle(self) -> None:
        run = self.start("empty")
        run.commit(1)
        run.stage([])
        run.commit(2)
        run.stage([(1, "a")])
        assert run.commit(3) is CommitAnswer.COMMITTED
        assert self.shown("empty") == Counter([(1, "a")])

    def test_a_table_that_was_put_back_is_refused_whether_there_are_rows_to_show_or_not(self) -> None:
        run = self.start("back")
        run.show(1, [(1, "a")])
        put_back = self.keep("back")
        run.show(2, [(2, "b")])
        for epoch in (3, 4):
            run.show(epoch, [])  # nothing that the table need take notice of, and no reason to refuse it
        put_back()
        shown, facts = self.shown("back"), run.sink.facts()
        assert (facts.committed_epoch, facts.next_batch) == (1, 1), "keep() did not bring the older state back"
        after = self.restart("back", 2, run.sealed())
        for rows in ([], [(3, "c")]):
            for each in (run, after):
                each.stage(rows)
                refused = False
                try:
                    each.commit(5)
                except TablePutBack as error:
                    refused = (error.epoch, error.next_batch) == (1, 1)
                assert refused, "a table without the rows of an epoch that it had shown was taken for whole"
        assert self.shown("back") == shown
        assert run.sink.facts() == facts

    def test_a_table_that_is_set_back_to_a_checkpoint_shows_what_it_showed_then_and_goes_on_from_there(self) -> None:
        run = self.start("set back")
        if not isinstance(run.sink, ReversibleSink):
            return
        run.stage([(1, "a"), (2, "b")])
        sealed = run.sealed()
        run.commit(1, sealed)
        run.on_visible(sealed)
        then = Counter(self.shown("set back"))
        run.show(2, [(2, "c"), (3, "d")])
        run.show(3, [])
        run.stage([(4, "e")])
        late = run.sealed()
        now = Counter(self.shown("set back"))
        to = manifest_at(1, run.sink, sealed)
        if not self.keeps_history:
            self._refused_to_go_back("set back", run.sink, to)
            return
        run.sink.look_back(to)
        assert self.shown("set back") == now, "looking changes nothing"
        another = self.bound("set back")
        assert isinstance(another, ReversibleSink)
        for _ in range(2):  # the second time it is done already
            another.set_back(to, 2, discards_others=False)
            assert self.shown("set back") == (then if self.undoes else now)
            facts = self.bound("set back").facts()
            assert (facts.committed_epoch, facts.next_batch, facts.fence) == (1, 1, 2)
        is_fenced = False
        try:
            run.commit(4, late)
        except Fenced:
            is_fenced = True
        assert is_fenced, "a run of before, which has not heard of it, committed"
        after = self.restart("set back", 3, sealed)
        assert after.commit(1, sealed) is CommitAnswer.ALREADY
        after.show(5, [(5, "f")])
        assert self.shown("set back") == (then if self.undoes else now) + Counter([(5, "f")])

    def test_a_table_that_was_not_the_pipelines_yet_shows_nothing_of_it_when_it_is_set_back(self) -> None:
        run = self.start("unknown")
        if not isinstance(run.sink, ReversibleSink):
            return
        run.show(2, [(1, "a")])
        before = manifest_at(1, run.sink, None)
        if not self.keeps_history:
            self._refused_to_go_back("unknown", run.sink, before)
            return
        run.sink.set_back(before, 2, discards_others=False)
        facts = run.sink.facts()
        assert (facts.committed_epoch, facts.next_batch) == (0, 0)
        assert self.shown("unknown") == (Counter() if self.undoes else Counter([(1, "a")]))
        self.restart("unknown", 3, None).show(3, [(2, "b")])
        assert self.shown("unknown") == Counter([(2, "b")] if self.undoes else [(1, "a"), (2, "b")])

    def _refused_to_go_back(self, name: str, sink: ReversibleSink, to: Manifest) -> None:
        shown, facts = self.shown(name), sink.facts()
        for call in (partial(sink.look_back, to), partial(sink.set_back, to, 2, discards_others=True)):
            refused = False
            try:
                call()
            except SinkFailed:
                refused = True
            assert refused, "a table that has kept nothing of what it showed was set back"
        assert self.shown(name) == shown
        assert sink.facts() == facts

    def test_a_smaller_epoch_of_another_lineage_that_shows_more_is_not_taken_for_a_checkpoint(self) -> None:
        run = self.start("lineages")
        if not isinstance(run.sink, ReversibleSink) or not self.undoes or not self.keeps_history:
            return
        nothing = run.sealed()
        run.commit(1, nothing)
        more = run.show(10, [(1, "a")])
        run.sink.set_back(manifest_at(1, run.sink, nothing), 2, discards_others=False)
        SinkRun(run.sink, 3, nothing, 0).commit(17, nothing)
        run.sink.set_back(manifest_at(10, run.sink, more), 4, discards_others=False)
        assert self.shown("lineages") == Counter([(1, "a")])
        run.sink.set_back(manifest_at(17, run.sink, nothing), 5, discards_others=False)
        assert self.shown("lineages") == Counter()
        assert run.sink.facts().next_batch == 0

    def test_another_root_takes_a_table_over_only_where_it_is_told_to_and_then_the_first_is_refused(self) -> None:
        run = self.start("taken over")
        if not isinstance(run.sink, ReversibleSink) or not self.creates_table or not self.keeps_history:
            return
        sealed = run.show(1, [(1, "a"), (2, "b")])
        then = Counter(self.shown("taken over"))
        run.show(2, [(2, "c"), (3, "d")])
        run.stage([(4, "e")])
        to = manifest_at(1, run.sink, sealed, run)
        other = self.bound("taken over", root="another")
        assert isinstance(other, ReversibleSink)
        assert other.facts().is_anothers
        assert other.look_back(to, takes_over=True).is_anothers
        now = Counter(self.shown("taken over"))
        assert self._is_foreign(partial(other.set_back, to, 7, discards_others=False)), "it was not told to take over"
        assert self.shown("taken over") == now
        for _ in range(2):  # the second time it is done already
            other.set_back(to, 7, discards_others=False, takes_over=True)
            assert self.shown("taken over") == then
        facts = other.facts()
        assert (facts.committed_epoch, facts.next_batch, facts.fence, facts.is_anothers) == (1, 1, 7, False)
        for name, call in (
            ("commit", partial(run.commit, 3)),
            ("fence", partial(run.sink.fence, 99)),
            ("claim", run.sink.claim),
        ):
            assert self._is_foreign(call), f"{name} of the root that had it was let through"
        assert run.sink.facts().is_anothers
        self.check(other)
        other.claim()
        after = SinkRun(other, 8, sealed, sealed.through_batch + 1)
        after.show(9, [(5, "f")])
        assert self.shown("taken over") == then + Counter([(5, "f")])

    def test_a_table_that_is_taken_over_by_a_smaller_generation_is_not_taken_for_done(self) -> None:
        """Generations are numbers of a root."""
        run = self.start("smaller")
        if not isinstance(run.sink, ReversibleSink) or not self.creates_table or not self.keeps_history:
            return
        sealed = run.show(1, [(1, "a")])
        to = manifest_at(1, run.sink, sealed, run)
        run.sink.set_back(to, 9, discards_others=False)
        SinkRun(run.sink, 10, sealed, 1).show(2, [(2, "b")])
        other = self.bound("smaller", root="another")
        assert isinstance(other, ReversibleSink)
        other.set_back(to, 4, discards_others=False, takes_over=True)
        assert self.shown("smaller") == Counter([(1, "a")])
        assert other.facts().fence == 4

    def _is_foreign(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except ForeignTable:
            return True
        return False

    def test_a_copy_of_a_table_shows_what_that_did_at_a_checkpoint_and_has_a_life_of_its_own(self) -> None:
        run = self.start("original")
        copy = self.bound("copy", root="fork")
        if not isinstance(copy, CopyingSink) or not self.keeps_history:
            return
        sealed = run.show(1, [(1, "a"), (2, "b")])
        then = Counter(self.shown("original"))
        run.show(2, [(2, "c"), (3, "d")])
        to = manifest_at(1, copy, sealed, run)
        copy.look_at_copy(run.sink.table, to, replaces=False)
        assert self.check(copy) is False, "looking makes nothing"
        for _ in range(2):  # the second time it is done already
            copy.show_copy(run.sink.table, to, 5, replaces=False)
            assert self.shown("copy") == then
        facts = self.bound("copy", root="fork").facts()
        assert (facts.committed_epoch, facts.next_batch, facts.fence, facts.is_anothers) == (1, 1, 5, False)
        copy.claim()
        fork = SinkRun(copy, 6, sealed, sealed.through_batch + 1)
        assert fork.commit(1, sealed) is CommitAnswer.ALREADY
        fork.show(6, [(7, "fork")])
        run.show(3, [(8, "original")])
        assert self.shown("copy") == then + Counter([(7, "fork")])
        assert self.shown("original")[8, "original"] == 1, "the original goes on"
        assert (7, "fork") not in self.shown("original")

    def test_a_copy_takes_the_place_of_what_a_table_showed_and_its_root_is_refused_from_then_on(self) -> None:
        run = self.start("replaced")
        fork = self.start("fork", root="fork")
        if not isinstance(run.sink, CopyingSink) or not self.keeps_history:
            return
        run.show(1, [(1, "a")])
        run.stage([(2, "b")])
        sealed = fork.show(4, [(5, "e"), (6, "f")])
        fork.show(5, [(9, "later")])
        promoted = self.bound("replaced", root="fork")
        assert isinstance(promoted, CopyingSink)
        to = manifest_at(4, promoted, sealed)
        change = promoted.look_at_copy(fork.sink.table, to, replaces=True)
        assert change.is_anothers
        assert self.shown("replaced") == Counter([(1, "a")]), "looking changes nothing"
        for _ in range(2):
            promoted.show_copy(fork.sink.table, to, 7, replaces=True)
            assert self.shown("replaced") == Counter([(5, "e"), (6, "f")])
        facts = promoted.facts()
        assert (facts.committed_epoch, facts.next_batch, facts.fence, facts.is_anothers) == (4, 1, 7, False)
        assert self._is_foreign(partial(run.commit, 2)), "the root that it belonged to committed"
        self.check(promoted)
        SinkRun(promoted, 8, sealed, sealed.through_batch + 1).show(8, [(7, "g")])
        assert self.shown("replaced") == Counter([(5, "e"), (6, "f"), (7, "g")])
        assert self.shown("fork") == Counter([(5, "e"), (6, "f"), (9, "later")]), "the other stays as it is"

    def test_a_table_that_holds_something_is_no_place_for_a_new_copy(self) -> None:
        run = self.start("source")
        taken = self.start("taken", root="fork")
        if not isinstance(run.sink, CopyingSink):
            return
        sealed = run.show(1, [(1, "a")])
        taken.show(1, [(2, "b")])
        copy = self.bound("taken", root="third")
        assert isinstance(copy, CopyingSink)
        to = manifest_at(1, copy, sealed, run)
        calls: list[Callable[[], object]] = [
            partial(copy.look_at_copy, run.sink.table, to, replaces=False),
            partial(copy.show_copy, run.sink.table, to, 5, replaces=False),
        ]
        for call in calls:
            refused = False
            try:
                call()
            except SinkFailed:
                refused = True
            assert refused, "rows would have been lost"
        assert self.shown("taken") == Counter([(2, "b")])

    def test_what_the_other_table_does_not_show_cannot_be_copied(self) -> None:
        run = self.start("behind")
        copy = self.bound("ahead", root="fork")
        if not isinstance(copy, CopyingSink):
            return
        run.show(1, [(1, "a")])
        run.stage([(2, "b")])
        to = manifest_at(2, copy, run.sealed(), run)  # decided, and not shown yet
        refused = False
        try:
            copy.look_at_copy(run.sink.table, to, replaces=False)
        except (SinkFailed, CheckpointNotVisible):
            refused = True
        assert refused, "a copy would lack rows that are staged for the other"

    def test_a_table_that_lost_a_commit_which_is_still_sealed_shows_it_or_says_that_the_rows_are_gone(self) -> None:
        run = self.start("retold")
        run.show(1, [(1, "a")])
        run.stage([(2, "b")])
        put_back = self.keep("retold")
        sealed = run.sealed()
        run.commit(2, sealed)
        after = self.restart("retold", 2, sealed)
        put_back()
        try:
            assert after.commit(2, sealed) is CommitAnswer.COMMITTED
        except SinkFailed:  # what was staged lies where the older state did not come with it
            assert self.shown("retold") == Counter([(1, "a")])
        else:
            expected, shown = Counter([(1, "a"), (2, "b")]), self.shown("retold")
            assert shown == expected if self.make_sink("retold").is_exactly_once else set(shown) == set(expected)

    def test_rows_that_were_staged_and_are_gone_are_not_taken_for_nothing(self) -> None:
        run = self.start("gone")
        run.show(1, [(1, "a")])
        run.stage([(2, "b")])
        run.sink.forget_staged(2)
        refused = False
        try:
            run.commit(2)
        except SinkFailed:
            refused = True
        assert refused, "rows that are gone were taken for committed"
        assert self.shown("gone") == Counter([(1, "a")])

    def test_a_table_belongs_to_the_root_that_claimed_it(self) -> None:
        if not self.creates_table:
            return
        run = self.start("owned")
        run.sink.claim()  # may come again, at every start
        run.stage([(1, "a")])
        sink = self.bound("owned", root="another")
        calls: list[tuple[str, Callable[[], object]]] = [
            ("check_table", partial(self.check, sink)),
            ("claim", sink.claim),
            ("fence", partial(sink.fence, 7)),
            ("commit", partial(sink.commit, permit(7), Committable(0))),
        ]
        if isinstance(sink, ProbingSink):
            calls.append(("probe", sink.probe))
        for name, call in calls:
            refused = False
            try:
                call()
            except ForeignTable:
                refused = True
            assert refused, f"{name} took another root's table"
        run.commit(1)
        assert self.shown("owned") == Counter([(1, "a")])
        if self.shares_table:
            other = self.start("owned", stage="returns", root="another")
            other.show(1, [(2, "b")])
            assert self.shown("owned") == Counter([(1, "a"), (2, "b")])

    def test_of_two_roots_that_claim_a_table_at_once_one_wins(self) -> None:
        if not self.creates_table:
            return
        roots = ("one", "another", "third")
        self.bound("contested").prepare_table(columns())
        meet = threading.Barrier(len(roots))

        def claim(root: str) -> bool:
            sink = self.bound("contested", root=root)
            self.check(sink)
            meet.wait(60)
            try:
                sink.claim()
            except ForeignTable:
                return False
            return True

        with ThreadPoolExecutor(len(roots)) as threads:
            won = dict(zip(roots, threads.map(claim, roots), strict=True))
        assert sum(won.values()) == 1
        for root, has_won in won.items():
            try:
                self.bound("contested", root=root).claim()
            except ForeignTable:
                assert not has_won
            else:
                assert has_won

    def test_a_batch_that_is_staged_again_replaces_what_it_staged_before(self) -> None:
        if not isinstance(self.bound("again"), RowSink):
            return  # Spark's file sink sees to it
        run = self.start("again")
        run.stage([(1, "a"), (2, "b"), (3, "c")])
        run.stage([(4, "d")], batch=0)
        run.commit(1)
        assert self.shown("again") == Counter([(4, "d")])

    def test_what_a_lost_generation_staged_after_the_checkpoint_is_never_shown(self) -> None:
        lost = self.start("lost")
        lost.stage([(1, "a")])
        sealed = lost.sealed()
        lost.stage([(666, "lost")])
        run = self.restart("lost", 2, sealed)
        assert run.commit(1, sealed) is CommitAnswer.COMMITTED
        run.sink.forget_staged(2)
        run.stage([(2, "b")])
        assert run.commit(2) is CommitAnswer.COMMITTED
        assert self.shown("lost") == Counter([(1, "a"), (2, "b")])
        run.sink.forget_staged(2)  # may come again

    def test_it_tells_the_largest_generation_that_has_staged(self) -> None:
        """Whoever takes its table over goes on above that, because who had it may live on."""
        run = self.start("telling", generation=3)
        run.stage([(1, "a")])
        newer = SinkRun(run.sink, 5)
        newer.stage([(1, "a")])
        takes_over = isinstance(run.sink, ReversibleSink) and self.creates_table
        another = self.bound("telling", root="another" if takes_over else "root")
        assert staged_generation(another) == 5
        newer.show(1, [(2, "b")])
        assert staged_generation(another) == 5, "it may stage yet"
        newer.sink.forget_staged(6)
        assert staged_generation(another) == 0

    def test_a_check_of_what_was_sealed_changes_nothing(self) -> None:
        run = self.start("checked")
        if not isinstance(run.sink, CheckingSink):
            return
        run.stage([(1, "a"), (2, "b")])
        for _ in range(2):
            run.sink.check_commit(run.sealed())
        assert self.shown("checked") == Counter()
        assert run.sink.facts().committed_epoch == 0
        assert run.commit(1) is CommitAnswer.COMMITTED
        run.stage([(3, "c")])
        run.sink.check_commit(run.sealed())  # names what the table shows already, too
        assert self.shown("checked") == Counter([(1, "a"), (2, "b")])

    def test_what_was_staged_for_the_other_kind_of_sink_is_not_taken_for_nothing(self) -> None:
        run = self.start("foreign")
        if isinstance(run.sink, RowSink):
            foreign = Committable(0, files=(StagedFile(0, "/part-0.parquet", 100, 3),))
        else:
            foreign = Committable(0, batches=(StagedBatch(0, 1, 3),))
        refused = False
        try:
            run.commit(1, foreign)
        except SinkFailed:
            refused = True
        assert refused, "rows that the sink cannot show were taken for committed"
        assert run.sink.facts().committed_epoch == 0

    def test_an_old_generation_that_commits_late_is_refused(self) -> None:
        old = self.start("late", generation=2)
        old.stage([(1, "a")])
        another = self.bound("late")
        another.fence(3)
        another.fence(1)  # an older fence takes nothing back
        assert another.facts().fence == 3
        refused = False
        try:
            old.commit(7)
        except Fenced:
            refused = True
        assert refused, "a commit of generation 2 was let through a fence of generation 3"
        assert self.shown("late") == Counter()
        new = self.restart("late", 3, old.sealed())
        assert new.commit(8) is CommitAnswer.COMMITTED
        assert self.shown("late") == Counter([(1, "a")])

    def test_two_sinks_at_once_disturb_each_other_in_nothing(self) -> None:
        names = ("both", "both") if self.shares_table else ("one", "other")
        runs = [self.start(name, stage=f"stage{number}") for number, name in enumerate(names)]
        expected: Rows = Counter()

        def commit(run: SinkRun, epoch: int) -> None:
            for _ in range(5):  # as the pipeline tries again
                try:
                    run.commit(epoch)
                    return
                except Fenced:
                    raise
                except TidegateError:
                    continue
            run.commit(epoch)

        with ThreadPoolExecutor(2) as threads:
            for epoch in range(1, 6):
                for number, run in enumerate(runs):
                    rows = [(1000 * number + 10 * epoch + each, f"{number}") for each in range(3)]
                    expected.update(rows)
                    run.stage(rows)
                for future in [threads.submit(commit, run, epoch) for run in runs]:
                    future.result()
        shown: Rows = Counter()
        for name in set(names):
            shown.update(self.shown(name))
        assert shown == expected

    def test_a_crash_between_any_two_calls_loses_nothing_and_doubles_nothing(self) -> None:
        """For every prefix of a run's calls: stop there, and let another process go on as a pipeline would."""
        for calls in range(_CALLS + 1):
            name = f"crash{calls}"
            _Crashing(self, name).run(calls)
            assert self.shown(name) == Counter(_EXPECTED_BY_KEY if self.key else _EXPECTED), f"after {calls} calls"

    def test_by_key_the_row_of_the_last_batch_counts(self) -> None:
        if not self.key:
            return
        run = self.start("keyed")
        run.stage([(1, "a"), (2, "b")])
        run.stage([(1, "later")])
        run.commit(1)
        assert self.shown("keyed") == Counter([(1, "later"), (2, "b")])
        run.stage([(2, "changed"), (3, "c")])
        run.commit(2)
        assert self.shown("keyed") == Counter([(1, "later"), (2, "changed"), (3, "c")])
        run.commit(2)
        assert self.shown("keyed") == Counter([(1, "later"), (2, "changed"), (3, "c")])

    def test_by_key_different_rows_of_one_key_in_a_batch_are_refused(self) -> None:
        """Nothing tells which of them is the newest. Equal ones are one."""
        if not self.key:
            return
        run = self.start("conflicting")
        run.stage([(1, "a"), (1, "a"), (2, "b")])
        run.stage([(3, "c"), (1, "later"), (3, "another")])
        sealed = run.sealed()
        if isinstance(run.sink, CheckingSink):
            self._refused_for_a_conflict(partial(run.sink.check_commit, sealed))
        self._refused_for_a_conflict(partial(run.commit, 1, sealed))
        assert self.shown("conflicting") == Counter()
        assert run.sink.facts().committed_epoch == 0
        run.stage([(3, "c"), (1, "later")], batch=1)
        assert run.commit(1) is CommitAnswer.COMMITTED
        assert self.shown("conflicting") == Counter([(1, "later"), (2, "b"), (3, "c")])

    def _refused_for_a_conflict(self, call: Callable[[], object]) -> None:
        why = ""
        try:
            call()
        except ConflictingRows as error:
            why = str(error)
        assert why, "one of two different rows of a key was taken for the newest"
        assert "id = 3" in why, "the error names the key"


_BATCHES: tuple[tuple[Row, ...], ...] = (((1, "a"), (2, "b")), ((3, "c"),), (), ((1, "again"), (4, "d")), ((5, "e"),))
_EPOCH_ENDS = {1: 1, 2: 2, 3: 4}
"""The last batch of each epoch."""
_EXPECTED = [row for batch in _BATCHES for row in batch]
_EXPECTED_BY_KEY = list(dict(_EXPECTED).items())
_CALLS = len(_BATCHES) + len(_EPOCH_ENDS) * 3


class _Stopped(Exception):
    pass


class _Crashing:
    """A pipeline of one sink whose process stops after so many calls; then another one takes it to its end."""

    def __init__(self, suite: SinkConformance, name: str) -> None:
        self._suite = suite
        self._name = name
        self._decided: list[tuple[int, Committable]] = []

    def run(self, calls: int) -> None:
        try:
            self._go_on(self._suite.start(self._name), calls)
        except _Stopped:
            restored = self._decided[-1][1] if self._decided else None
            run = self._suite.restart(self._name, 2, restored)
            if restored is not None:
                run.commit(*self._decided[-1])
            self._go_on(run, None)

    def _go_on(self, run: SinkRun, calls: int | None) -> None:
        left = iter(range(calls)) if calls is not None else None

        def call(action: Callable[[], object]) -> None:
            if left is not None and next(left, None) is None:
                raise _Stopped
            action()

        for epoch, end in _EPOCH_ENDS.items():
            if any(decided == epoch for decided, _ in self._decided):
                continue
            for batch in range(run.batch + 1, end + 1):
                call(partial(run.stage, _BATCHES[batch]))
            sealed = run.sealed()
            call(partial(self._decided.append, (epoch, sealed)))
            call(partial(run.commit, epoch, sealed))
            run.on_visible(sealed)
            call(partial(run.sink.forget_staged, run.generation))


def as_rows(rows: Iterable[Any]) -> Rows:
    """Rows of any kind that can be indexed by name."""
    return Counter((int(row["id"]), str(row["value"])) for row in rows)
