"""A table that nobody has put back is never taken for one that was, and shows each row once, whatever happens when.

A pipeline of one sink is stopped, restored, set back to an older checkpoint where the newest is damaged, and overtaken,
beside another owner of the table, another writer, and the upkeep of the table's log. Its small files are made few, and
what nobody needs is deleted. Rows are staged, and written again, without Spark.
"""

from __future__ import annotations

import importlib
import tempfile
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
from deltalake.exceptions import DeltaError
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.protocol.search import Step, search, steps
from tidegate.errors import Fenced, SinkFailed, TablePutBack
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.sinks.delta.compacting import Rewritten
from tidegate.sinks.delta.home import Shelf
from tidegate.sinks.delta.log import TableLog
from tidegate.sinks.delta.reading import versions_of
from tidegate.sinks.delta.scan import TableFile
from tidegate.sinks.delta.staged import Staged
from tidegate.sinks.delta.table import DeltaTable
from tidegate.sinks.delta.upkeep import Keeper
from tidegate.sinks.staging import refuse_put_back
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import StageShape
from tidegate.testing.sinks import Row, SinkRun, columns

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

STEPS = steps(
    (6, "a_batch_is_staged", {"rows": st.sampled_from([0, 1, 1, 2])}),
    (2, "a_batch_leaves_an_empty_file", {}),
    (5, "a_checkpoint_is_decided", {"gap": st.integers(1, 2)}),
    (5, "the_oldest_epoch_is_committed", {"is_known": st.booleans()}),
    (1, "the_last_commit_comes_again", {}),
    (2, "the_run_is_killed_and_restored", {}),
    (1, "the_newest_checkpoint_is_damaged", {}),
    (2, "an_old_run_wakes_up", {}),
    (1, "what_older_runs_staged_is_forgotten", {}),
    (1, "another_sink_commits", {}),
    (1, "another_writer_appends", {}),
    (1, "the_log_is_kept_short", {}),
    (
        4,
        "the_table_is_looked_after",
        {"ends": st.sampled_from(["well", "well", "before", "after", "in vain", "unanswered"])},
    ),
)


class Killed(Exception):
    """In the middle of something."""


class EndingLog(TableLog):
    """`ends` says how the transaction of a pass of upkeep does."""

    def __init__(self, table: DeltaTable, place: SinkPlace, ends: str) -> None:
        super().__init__(table, place, table.home.files(place))
        self._ends = ends

    def transact(self, *arguments: Any) -> bool:
        if self._ends == "before":
            raise Killed
        answer = super().transact(*arguments)
        if self._ends == "after":
            raise Killed
        return answer and self._ends != "unanswered"


class EndingKeeper(Keeper):
    """Its files are written again by Arrow."""

    def __init__(self, table: DeltaTable, place: SinkPlace, ends: str) -> None:
        log = EndingLog(table, place, ends)
        super().__init__(table, place, log, Staged(table, place, log))
        self._ends = ends

    def _rewriting(
        self, session: Any, table: deltalake.DeltaTable, shelf: Shelf, folder: str
    ) -> Callable[[Sequence[TableFile]], Rewritten]:
        path, files_of_root = shelf.folder, self._place.files

        def rewritten(files: Sequence[TableFile]) -> Rewritten:
            target = self._staged.path(folder) / f"{table.version()}-{uuid.uuid4()}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(parquet.read_table([path / file.path for file in files]), target)
            if self._ends == "in vain":
                another = SinkPlace("shop", "returns", files_of_root, session)
                EndingKeeper(kept_table(path, None), another, "well").keep_up(1, list, threading.Event())
            return Rewritten(files, [target])

        return rewritten


def kept_table(path: Path, vacuum: str | None = "0s") -> DeltaTable:
    return DeltaTable(path, target_file_size="8KB", optimize="1h", vacuum=vacuum)


class HealthyTable(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="tidegate-healthy-")
        self.path = Path(self.folder.name) / "table"
        self.generation = 0
        self.epoch = 0
        self.ids = 0
        self.batches: dict[int, list[Row]] = {}
        self.decided: list[tuple[int, Committable]] = []
        self.pending: deque[tuple[int, Committable]] = deque()
        self.overtaken: list[tuple[SinkRun, deque[tuple[int, Committable]]]] = []
        self.others: Counter[Row] = Counter()
        self.run = self.started(None)
        self.other = SinkRun(DeltaTable(self.path).bind(self.place("returns")), 1)
        self.other.sink.check_table(columns(), "append")
        self.other.sink.claim()

    def teardown(self) -> None:
        """In the end all that was decided is shown."""
        try:
            self.the_run_is_killed_and_restored()
            while self.pending:
                self.the_oldest_epoch_is_committed(is_known=True)
            through = self.decided[-1][1].through_batch if self.decided else -1
            rows = Counter(row for batch, staged in self.batches.items() if batch <= through for row in staged)
            assert self.shown() == rows + self.others
        finally:
            self.folder.cleanup()

    def place(self, stage: str) -> SinkPlace:
        session: Any = object()  # never used
        return SinkPlace("shop", stage, Folder(self.folder.name, fsync=False), session, root="root")

    def started(self, restored: Committable | None) -> SinkRun:
        """As a run opens: the table is checked against the checkpoint, and claimed."""
        self.generation += 1
        sink = kept_table(self.path).bind(self.place("orders"))
        sink.check_table(columns(), "append")
        facts = sink.facts()
        if restored is None:
            sink.prepare_table(columns())
        else:
            refuse_put_back("the table", sink.place, facts.committed_epoch, facts.next_batch, restored)
        sink.claim()
        next_batch = 0 if restored is None else restored.through_batch + 1
        self.batches = {batch: rows for batch, rows in self.batches.items() if batch < next_batch}
        return SinkRun(sink, self.generation, restored, next_batch)

    def shown(self, version: int | None = None) -> Counter[Row]:
        found = deltalake.DeltaTable(self.path, version=version).to_pyarrow_table().to_pylist()
        return Counter((row["id"], row["value"]) for row in found)

    def new_rows(self, count: int) -> list[Row]:
        self.ids += count
        return [(self.ids - each, "row") for each in range(count)]

    # -- what may happen --------------------------------------------------------------------------

    @rule(step=STEPS)
    def happens(self, step: Step) -> None:
        name, arguments = step
        getattr(self, name)(**arguments)

    def a_batch_is_staged(self, rows: int) -> None:
        staged = self.new_rows(rows)
        if staged:
            self.run.stage(staged)
        else:
            self.run.batch += 1  # an empty file is removed before anything is sealed
        self.batches[self.run.batch] = staged

    def a_batch_leaves_an_empty_file(self) -> None:
        self.run.stage([])
        self.batches[self.run.batch] = []

    def a_checkpoint_is_decided(self, gap: int) -> None:
        self.epoch += gap
        self.decided.append((self.epoch, self.run.sealed()))
        self.pending.append(self.decided[-1])

    def the_oldest_epoch_is_committed(self, is_known: bool) -> None:
        if not self.pending:
            return
        epoch, sealed = self.pending[0]
        self.run.commit(epoch, sealed)
        if is_known:
            self.pending.popleft()
            for file in sealed.files:
                Path(file.path).unlink(missing_ok=True)
            self.run.on_visible(sealed)

    def the_last_commit_comes_again(self) -> None:
        facts = self.run.sink.facts()
        for epoch, sealed in self.decided:
            if epoch == facts.committed_epoch:
                assert self.run.commit(epoch, sealed) is CommitAnswer.ALREADY

    def the_run_is_killed_and_restored(self) -> None:
        self.overtaken.append((self.run, self.pending))
        self.run = self.started(self.decided[-1][1] if self.decided else None)
        self.pending = deque(self.decided[-1:])

    def the_newest_checkpoint_is_damaged(self) -> None:
        """One before it is restored, if the table shows nothing that comes after that."""
        facts = self.run.sink.facts()
        if len(self.decided) < 2 or facts.committed_epoch > self.decided[-2][0]:
            return
        self.decided.pop()
        self.run.sink.fence(self.generation + 1)
        self.the_run_is_killed_and_restored()

    def an_old_run_wakes_up(self) -> None:
        """It goes on committing what it had decided; where that was not shown by then, it may find it gone."""
        for run, pending in self.overtaken:
            while pending:
                epoch, sealed = pending.popleft()
                try:
                    run.commit(epoch, sealed)
                except TablePutBack:
                    raise
                except (Fenced, SinkFailed):
                    break
                run.on_visible(sealed)

    def what_older_runs_staged_is_forgotten(self) -> None:
        if not self.pending:  # not before all that was decided is visible
            self.run.sink.forget_staged(self.generation)

    def another_sink_commits(self) -> None:
        rows = self.new_rows(1)
        self.other.show(self.other.batch + 2, rows)
        self.others.update(rows)

    def another_writer_appends(self) -> None:
        rows = self.new_rows(1)
        ids, values = zip(*rows, strict=True)
        table = pyarrow.table({"id": pyarrow.array(ids, pyarrow.int64()), "value": list(values)})
        deltalake.write_deltalake(self.path, table, mode="append")
        self.others.update(rows)

    def the_log_is_kept_short(self) -> None:
        table = deltalake.DeltaTable(self.path)
        table.create_checkpoint()
        checkpoint = table.version()
        with suppress(DeltaError):
            table.cleanup_metadata()
        table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
        for path in sorted((self.path / "_delta_log").glob("*.json"))[:-1]:  # as if they were old enough
            if int(path.stem) < checkpoint:
                path.unlink()

    def the_table_is_looked_after(self, ends: str) -> None:
        """What retained checkpoints show can be read as before."""
        retained = [self.manifest(*each) for each in self.decided[-3:]]
        before = [self.shown_at(each) for each in retained]
        sink = self.run.sink
        assert isinstance(sink, BoundDeltaTable)
        keeper = EndingKeeper(sink.sink, sink.place, ends)
        with suppress(Killed):
            keeper.keep_up(self.generation, lambda: retained, threading.Event())
        assert [self.shown_at(each) for each in retained] == before

    def manifest(self, epoch: int, sealed: Committable) -> Any:
        shape = {"orders": StageShape("sink", (), "append", "", self.run.sink.table)}
        stages = {"orders": SimpleNamespace(committable=sealed.encode())}
        return SimpleNamespace(
            pipeline="shop",
            epoch=epoch,
            shown_epoch=epoch,
            counted_by=lambda root: root,
            checkpoint_id=epoch,
            shape=shape,
            stages=stages,
        )

    def shown_at(self, manifest: Any) -> Counter[Row] | None:
        """None: no version shows it that the log still has, and all files of."""
        try:
            versions = versions_of(self.path, "orders", [manifest])
            return self.shown(*versions) if versions else None
        except (SinkFailed, FileNotFoundError):
            return None

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def nothing_is_shown_twice_and_nothing_that_was_not_decided(self) -> None:
        shown = self.shown() - self.others
        assert max(shown.values(), default=0) <= 1
        through = self.decided[-1][1].through_batch if self.decided else -1
        assert shown.keys() <= {row for batch, rows in self.batches.items() if batch <= through for row in rows}
        facts = self.run.sink.facts()
        rows = {row for batch, rows in self.batches.items() if batch < facts.next_batch for row in rows}
        assert shown.keys() == rows


TestHealthyTable = HealthyTable.TestCase
TestHealthyTable.settings = search(8, steps=30)
