"""What holds of tables, by the tests that every sink must pass, and not of a mutant. See `properties.py`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import deltalake

import tidegate as tg
from tests.sinks.test_function import Called, Disturbed, stage
from tests.sinks.test_healthy_tables import HealthyTable
from tidegate.errors import Fenced
from tidegate.sinks.contract import Committable, Sink
from tidegate.storage.files import Files
from tidegate.testing.sinks import Rows, SinkConformance, as_rows, permit


class _Tables(SinkConformance):
    """Delta tables in a folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._lake = Path(self._folder.name) / "lake"

    def make_sink(self, name: str) -> Sink:
        return tg.DeltaTable(self._lake / name)

    def shown(self, name: str) -> Rows:
        return as_rows(deltalake.DeltaTable(self._lake / name).to_pyarrow_table().to_pylist())

    def keep(self, name: str) -> Callable[[], object]:
        backup = shutil.copytree(self._lake / name, self._lake / "backup")

        def put_back() -> None:
            shutil.rmtree(self._lake / name)
            shutil.copytree(backup, self._lake / name)

        return put_back


@contextmanager
def tables() -> Iterator[_Tables]:
    suite = _Tables()
    with suite._folder:
        yield suite


def a_table_that_was_put_back_is_refused() -> None:
    with tables() as suite:
        suite.test_a_table_that_was_put_back_is_refused_whether_there_are_rows_to_show_or_not()


def a_table_is_of_one_root() -> None:
    with tables() as suite:
        suite.test_a_table_belongs_to_the_root_that_claimed_it()


def of_two_that_claim_a_table_one_wins() -> None:
    with tables() as suite:
        suite.test_of_two_roots_that_claim_a_table_at_once_one_wins()


def a_fence_stops_a_functions_commit_that_is_under_way() -> None:
    """Also where the number of its record is empty again: others have come and were removed meanwhile."""
    for fences in ((2,), (2, 3, 4)):
        files, is_fenced = Disturbed(), False
        sink = Called(files)
        sealed = Committable(0, tuple(stage(files, 1)))
        files.before_writes.append(partial(_fence, files, fences))
        try:
            sink.commit(permit(1), sealed)
        except Fenced:
            is_fenced = True
        assert is_fenced
        assert not sink.calls
        assert sink.facts().fence == fences[-1]


def _fence(files: Files, generations: tuple[int, ...]) -> None:
    for generation in generations:
        Called(files).fence(generation)


def upkeep_shows_the_same_at_every_retained_checkpoint() -> None:
    table = HealthyTable()
    with table.folder:

        def an_epoch_is_shown() -> None:
            table.a_batch_is_staged(rows=2)
            table.a_checkpoint_is_decided(gap=1)
            table.the_oldest_epoch_is_committed(is_known=True)

        an_epoch_is_shown()
        an_epoch_is_shown()
        just_written = table.path / "theirs.parquet"
        just_written.write_bytes(b"by another writer, who is about to add it")
        for ends in ("in vain", "before", "well", "unanswered"):
            an_epoch_is_shown()
            table.the_table_is_looked_after(ends)
            table.nothing_is_shown_twice_and_nothing_that_was_not_decided()
        assert just_written.exists()
        table.teardown()
