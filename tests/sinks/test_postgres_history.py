"""A PostgreSQL table with a history: set back to checkpoints, whatever its rows hold and whoever wrote to it."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg import sql
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import tidegate as tg
from tests.postgres_server import PostgresServer
from tidegate.errors import CheckpointNotVisible, Fenced, ForeignTable, InvalidConfig, SinkFailed
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import (
    CommitAnswer,
    Committable,
    KeptSink,
    ReversibleSink,
    SinkPlace,
    StagedBatch,
)
from tidegate.sinks.postgres.bound import BoundPostgresTable
from tidegate.sinks.postgres.history import History, State
from tidegate.storage.manifest import Manifest, Origin
from tidegate.storage.memory import Memory
from tidegate.testing.sinks import manifest_at, permit

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

SCHEMA = StructType(
    [
        StructField("id", LongType()),
        StructField("value", StringType()),
        StructField("price", DecimalType(20, 4)),
        StructField("weight", DoubleType()),
        StructField("tags", ArrayType(StringType())),
        StructField("at", TimestampType()),
    ]
)
NAMES = SCHEMA.names
Row = tuple[str | None, ...]
Rows = Counter[Row]


def row(key: int | None, value: str | None = None, price: str | None = None, weight: str | None = None) -> Row:
    return (None if key is None else str(key), value, price, weight, None, None)


def odd_row(rng: random.Random, key: int) -> Row:
    return (
        str(key),
        rng.choice([None, "", "a", "A", "null"]),
        rng.choice([None, "0.0000", "1.5000"]),
        rng.choice([None, "0", "-0", "NaN", "Infinity", "-Infinity", "0.1"]),
        rng.choice([None, "[]", "[1.0]", "[1.00]", '["NaN", null]']),
        rng.choice([None, "2026-03-29 01:30:00.123456+00", "0001-01-01 00:00:00+00"]),
    )


def empty(server: PostgresServer) -> PostgresServer:
    """The server with nothing in it."""
    with psycopg.connect(server.dsn) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return server


@pytest.fixture
def server(postgres_server: PostgresServer) -> PostgresServer:
    return empty(postgres_server)


class Table:
    """A table of one sink. It is staged without Spark; what a checkpoint has sealed, and the table showed at it, is
    remembered by its epoch."""

    def __init__(
        self, server: PostgresServer, name: str = "t", *, stage: str = "orders", root: str = "root", **options: Any
    ) -> None:
        self.server = server
        self.name = name
        self.place = SinkPlace("shop", stage, Memory(), root=root)
        self.options: dict[str, Any] = {"history": "7d", **options}
        self.sealed: dict[int, Committable] = {}
        self.rows_at: dict[int, Rows] = {}
        self.generations: dict[int, int] = {}
        self.epoch = 0
        self.generation = 1
        self.batch = self.shown_through = -1
        self.bound().prepare_table(SCHEMA)
        self.bound().claim()
        self._open()

    def bound(self, **options: Any) -> BoundPostgresTable:
        return tg.PostgresTable(self.name, self.server.dsn, **{**self.options, **options}).bind(self.place)

    def _open(self) -> None:
        self.bound().open_staging(self.generation, SCHEMA)
        self.staged: list[StagedBatch] = []

    def run(self, *commands: str) -> None:
        with psycopg.connect(self.server.dsn) as connection:
            for command in commands:
                connection.execute(command.encode())

    @property
    def rows(self) -> Rows:
        return Counter(self.select(f'"{self.name}"'))

    def select(self, table: str) -> list[Row]:
        columns = ", ".join(f"{name}::text" for name in NAMES)
        with psycopg.connect(self.server.dsn, options="-c TimeZone=UTC") as connection:
            return connection.execute(f"SELECT {columns} FROM {table}".encode()).fetchall()

    def stage(self, rows: Sequence[Row]) -> None:
        self.batch += 1
        staging = self.bound()._staging(self.generation)
        columns = sql.SQL(", ").join(map(sql.Identifier, (*NAMES, "tidegate_batch", "tidegate_part")))
        copy = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(staging), columns)
        with (
            psycopg.connect(self.server.dsn, options="-c TimeZone=UTC") as connection,
            connection.cursor() as cursor,
            cursor.copy(copy) as into,
        ):
            for each in rows:
                into.write_row((*each, str(self.batch), "0"))
        self.staged.append(StagedBatch(self.batch, self.generation, len(rows)))

    def seal(self) -> Committable:
        """A checkpoint is decided, and not committed yet."""
        self.epoch += 1
        sealed = Committable(self.batch, (), tuple(self.staged), self.shown_through)
        self.sealed[self.epoch] = sealed
        self.generations[self.epoch] = self.generation
        return sealed

    def commit(self, **options: Any) -> CommitAnswer:
        """The newest checkpoint."""
        answer = self.bound(**options).commit(permit(self.epoch, self.generation), self.sealed[self.epoch])
        self.shown_through = self.sealed[self.epoch].last_with_rows
        self.staged = []
        self.rows_at[self.epoch] = self.rows
        return answer

    def show(self, *rows: Row, **options: Any) -> int:
        """A batch, its checkpoint and its commit. Returns its epoch."""
        self.stage(rows)
        self.seal()
        assert self.commit(**options) is CommitAnswer.COMMITTED
        return self.epoch

    def at(self, epoch: int, origin: Origin | None = None) -> Manifest:
        sealed = None if epoch == 0 else self.sealed[epoch]
        found = manifest_at(epoch, self.bound(), sealed)
        return msgspec.structs.replace(found, generation=self.generations.get(epoch, 1), origin=origin)

    def set_back(self, epoch: int, *, discards_others: bool = False, goes_on: bool = True) -> None:
        """And another generation goes on from there."""
        generation = self.generation + 1
        self.bound().set_back(self.at(epoch), generation, discards_others=discards_others)
        self.generation = generation + 1
        sealed = self.sealed[epoch] if epoch else Committable(-1)
        self.batch, self.shown_through = sealed.through_batch, sealed.last_with_rows
        if goes_on:
            self._open()

    def kept(self) -> tuple[int, int]:
        """How many states, and how many rows."""
        rows = self.bound()._history.rows.as_string()
        with psycopg.connect(self.server.dsn) as connection:
            query = f"SELECT (SELECT count(*) FROM tidegate_history), (SELECT count(*) FROM {rows})"
            found = connection.execute(query.encode()).fetchone()
        assert found is not None
        return found[0], found[1]


BOTH = pytest.mark.parametrize("key", [(), ("id",)], ids=["appended", "by key"])


def test_with_a_history_or_without_it_is_a_sink_that_can_be_asked_to_go_back() -> None:
    place = SinkPlace("shop", "orders", Memory())
    plain, kept = (tg.PostgresTable("t", history=history).bind(place) for history in (None, "1h"))
    assert isinstance(plain, ReversibleSink)
    assert isinstance(kept, ReversibleSink)
    assert isinstance(kept, KeptSink)
    assert (plain.upkeep_every_ms, kept.upkeep_every_ms) == (None, 60_000)
    with pytest.raises(InvalidConfig, match="history is 'long'"):
        tg.PostgresTable("t", history="long")


@BOTH
def test_rows_of_all_kinds_go_and_come_exactly(server: PostgresServer, key: tuple[str, ...]) -> None:
    table = Table(server, key=key)
    first = table.show(row(1, "a", "1.5000", "NaN"), row(2, None, None, "-0"), row(3, ""))
    second = table.show(row(2, None, None, "0"), row(3), row(4, "d", "0.0000", "Infinity"))
    table.show()  # a checkpoint without rows
    third = table.show(row(1, "a", "1.5000", "NaN"), row(1, "a", "1.5000", "NaN"), row(5))
    plan = table.bound().look_back(table.at(first))
    assert plan.others == ()
    assert (plan.rows_removed, plan.rows_added) == ((4, 2) if key else (6, 0))
    table.set_back(first)
    assert table.rows == table.rows_at[first]
    assert table.bound().facts() == SinkFacts(first, 2, table.sealed[first].through_batch + 1)
    table.set_back(third)  # forward again, to what was left behind
    assert table.rows == table.rows_at[third]
    table.set_back(second)
    assert table.rows == table.rows_at[second]
    table.set_back(0)
    assert table.rows == Counter()
    assert table.bound().facts().next_batch == 0
    table.show(row(7, "again"))
    assert table.rows == Counter([row(7, "again")])


@BOTH
def test_it_is_done_once_and_older_runs_are_fenced(server: PostgresServer, key: tuple[str, ...]) -> None:
    table = Table(server, key=key)
    first = table.show(row(1, "a"))
    table.show(row(1, "b"), row(2))
    table.stage([row(3)])
    late = table.seal()
    to = table.at(first)
    for _ in range(2):
        table.bound().set_back(to, 2, discards_others=False)
        assert table.rows == table.rows_at[first]
    with pytest.raises(Fenced):
        table.bound().commit(permit(3, 1), late)
    table.bound().set_back(table.at(2), 1, discards_others=False)  # of somebody who comes late
    assert table.rows == table.rows_at[first]
    with pytest.raises(ForeignTable):
        table.bound().sink.bind(SinkPlace("shop", "orders", Memory(), root="fork")).set_back(
            to, 3, discards_others=False
        )


class Model:
    """What the table of a random run must show."""

    def __init__(self, server: PostgresServer, seed: int) -> None:
        self.rng = random.Random(seed)
        self.is_keyed = self.rng.random() < 0.5
        self.newest_by = ("price",) if self.is_keyed and self.rng.random() < 0.3 else ()
        key = ("id",) if self.is_keyed else ()
        self.table = Table(server, key=key, newest_by=self.newest_by)
        self.own: list[Row] = []
        self.others: list[Row] = []
        self.at: dict[int, list[Row]] = {0: []}

    def go_on(self) -> None:
        what = self.rng.choices([self.commit, self.set_back, self.write, self.look], [6, 2, 1, 1])[0]
        what()
        assert self.table.rows == Counter([*self.own, *self.others])

    def commit(self) -> None:
        for _ in range(self.rng.randint(1, 2)):
            ids = [self.rng.randint(1, 8) for _ in range(self.rng.randint(0, 6))]
            rows = [odd_row(self.rng, each) for each in (set(ids) if self.is_keyed else ids)]
            self.table.stage(rows)
            self.own = self._with(rows)
        if self.rng.random() < 0.15:  # it is decided, and the next one commits it too
            self.table.seal()
        self.table.seal()
        self.table.commit()
        self.at[self.table.epoch] = list(self.own)

    def _with(self, rows: list[Row]) -> list[Row]:
        if not self.is_keyed:
            return self.own + rows
        by_key = {each[0]: each for each in self.own}
        for each in rows:
            there = by_key.get(each[0])
            if not self.newest_by or there is None or (there[2] or "") <= (each[2] or ""):
                by_key[each[0]] = each
        return list(by_key.values())

    def set_back(self) -> None:
        epoch = self.rng.choice(list(self.at))
        self.table.set_back(epoch, discards_others=self.rng.random() < 0.5)
        self.own = list(self.at[epoch])

    def write(self) -> None:
        """Somebody else does."""
        other = row(1000 + len(self.others), "other") if self.is_keyed else odd_row(self.rng, self.rng.randint(1, 8))
        self.others.append(other)
        with psycopg.connect(self.table.server.dsn, options="-c TimeZone=UTC") as connection:
            connection.execute("INSERT INTO t VALUES (%s, %s, %s, %s, %s, %s)", other)

    def look(self) -> None:
        epoch = self.rng.choice(list(self.at))
        plan = self.table.bound().look_back(self.table.at(epoch))
        now, then = Counter(self.own), Counter(self.at[epoch])
        assert (plan.rows_removed, plan.rows_added) == ((now - then).total(), (then - now).total())
        assert plan.others == ()


@pytest.mark.parametrize("seed", range(8))
def test_a_random_run_shows_what_a_model_of_it_says(server: PostgresServer, seed: int) -> None:
    model = Model(server, seed)
    for _ in range(40):
        model.go_on()


# -- what others have done ----------------------------------------------------------------------------


def test_rows_that_others_have_changed_are_lost_only_if_somebody_says_so(server: PostgresServer) -> None:
    table = Table(server, key="id")
    first = table.show(row(1, "a"), row(2, "b"))
    table.show(row(1, "later"), row(3, "c"), row(4, "d"))
    table.run("UPDATE t SET value = 'other' WHERE id = 1", "DELETE FROM t WHERE id = 3", "INSERT INTO t VALUES (9)")
    plan = table.bound().look_back(table.at(first))
    assert plan.others == ("others have changed or deleted 2 rows that shop/orders has written since",)
    before = table.rows
    with pytest.raises(SinkFailed, match=r"cannot be set back to ckpt-000001: others have .*--discard-others"):
        table.set_back(first)
    assert table.rows == before
    assert table.bound().facts().committed_epoch == 2
    table.set_back(first, discards_others=True)
    assert table.rows == table.rows_at[first] + Counter([row(9)]), "what they have added is no loss"


def test_of_appended_rows_those_that_others_have_changed_stay(server: PostgresServer) -> None:
    table = Table(server)
    first = table.show(row(1, "a"))
    table.show(row(2, "b"), row(2, "b"), row(3, "c"))
    table.run("UPDATE t SET value = 'other' WHERE id = 3", "INSERT INTO t VALUES (2, 'b')")
    plan = table.bound().look_back(table.at(first))
    assert (plan.rows_removed, len(plan.others)) == (2, 1)
    assert plan.remains is not None
    with pytest.raises(SinkFailed, match="others have changed or deleted a row"):
        table.set_back(first)
    table.set_back(first, discards_others=True)
    assert table.rows == Counter([row(1, "a"), row(2, "b"), row(3, "other")])


def test_a_row_that_others_refer_to_is_changed_in_its_place_and_not_taken_away(server: PostgresServer) -> None:
    table = Table(server, key="id")
    first = table.show(row(1, "a"))
    second = table.show(row(1, "b"), row(2))
    table.run("CREATE TABLE o (t bigint REFERENCES t ON DELETE CASCADE)", "INSERT INTO o VALUES (1)")
    table.set_back(first)
    with psycopg.connect(server.dsn) as connection:
        assert connection.execute("SELECT * FROM o").fetchall() == [(1,)]
    table.set_back(second)
    table.run("DROP TABLE o", "CREATE TABLE o (t bigint REFERENCES t)", "INSERT INTO o VALUES (2)")
    with pytest.raises(SinkFailed, match=r"refuses a row: .*still referenced.* nothing was changed.*in the way"):
        table.set_back(first)
    assert table.rows == table.rows_at[second]


def test_a_trigger_that_changes_rows_is_noticed(server: PostgresServer) -> None:
    table = Table(server, key="id")
    first = table.show(row(1, "a"))
    table.run(
        "CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN new.weight := 7; RETURN new; END'",
        "CREATE TRIGGER touch BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION touch()",
    )
    table.show(row(1, "b"))
    before = table.rows
    assert before == Counter([row(1, "b", None, "7")])
    with pytest.raises(SinkFailed, match=r"a trigger or a rule of the table .* Nothing was changed; disable that"):
        table.set_back(first)
    assert table.rows == before
    table.run("ALTER TABLE t DISABLE TRIGGER touch")
    table.set_back(first)
    assert table.rows == table.rows_at[first]


@BOTH
def test_a_column_that_was_added_stays_and_one_that_was_changed_is_refused(
    server: PostgresServer, key: tuple[str, ...]
) -> None:
    table = Table(server, key=key)
    first = table.show(row(1, "a"))
    table.show(row(1, "b"), row(2))
    table.run("ALTER TABLE t ADD COLUMN more text")
    assert table.bound().look_back(table.at(first)).others == ()
    table.set_back(first, goes_on=False)
    assert table.rows == table.rows_at[first]
    table.set_back(2, goes_on=False)
    assert table.rows == table.rows_at[2]
    table.run("ALTER TABLE t ALTER price TYPE numeric(20,2)")
    with pytest.raises(SinkFailed, match=r"column 'price' was changed or dropped since.*change the column back"):
        table.set_back(first)
    with pytest.raises(SinkFailed, match=r"column 'price' was changed or dropped since"):
        table.bound().look_back(table.at(first))


def test_two_sinks_of_one_table_go_back_each_by_its_own_rows(server: PostgresServer) -> None:
    tables = [Table(server, stage=stage) for stage in ("orders", "returns")]
    for number in range(3):
        for table in tables:
            table.show(row(number, "both"), row(number, table.place.stage))
    for table in tables:
        table.set_back(1)
    assert tables[0].rows == Counter([row(0, "both"), row(0, "both"), row(0, "orders"), row(0, "returns")])


# -- how far back it reaches --------------------------------------------------------------------------


def test_a_table_without_a_history_says_what_would_help(server: PostgresServer) -> None:
    table = Table(server, history=None)
    first = table.show(row(1))
    second = table.show(row(2))
    for epoch in (0, first):
        with pytest.raises(SinkFailed, match=r'kept no history.*--leave orders.*PostgresTable\(history="7d"\)'):
            table.bound().look_back(table.at(epoch))
        with pytest.raises(SinkFailed, match="kept no history"):
            table.set_back(epoch)
    table.set_back(second)  # where it is already
    table.seal()
    table.commit()  # without a batch
    table.set_back(second)
    assert table.bound().facts() == SinkFacts(second, 4, 2)
    assert table.rows == table.rows_at[second]


def test_a_history_begins_where_it_was_switched_on_and_ends_where_it_was_switched_off(server: PostgresServer) -> None:
    table = Table(server, history=None)
    first, second = table.show(row(1)), table.show(row(2))
    table.options["history"] = "7d"
    third = table.show(row(3))
    with pytest.raises(SinkFailed, match=r"epoch 1: its history reaches back to epoch 2, shown at 20.*--leave orders"):
        table.set_back(first)
    table.set_back(second)
    assert table.rows == table.rows_at[second]
    table.set_back(third)
    table.show(row(4), history=None)
    with pytest.raises(SinkFailed, match="kept no history"):
        table.set_back(second)
    assert table.rows == table.rows_at[4]


def test_a_record_that_was_moved_by_hand_has_no_history(server: PostgresServer) -> None:
    table = Table(server)
    first = table.show(row(1))
    table.show(row(2))
    table.run("DELETE FROM t WHERE id = 2", "UPDATE tidegate_epochs SET epoch = 1, next_batch = 1")
    table.bound().set_back(table.at(first), 2, discards_others=False)
    with pytest.raises(SinkFailed, match="reaches back to epoch 1"):
        table.bound().set_back(table.at(0), 3, discards_others=False)


def test_what_is_old_and_no_retained_checkpoint_needs_is_forgotten(server: PostgresServer) -> None:
    table = Table(server, key="id")
    epochs = [table.show(row(1, str(number)), row(2, str(number))) for number in range(6)]
    never = threading.Event()
    table.bound().keep_up(1, lambda: pytest.fail("nothing is old"), never)
    assert table.kept() == (7, 22)
    table.options["history"] = "0s"
    table.bound().keep_up(1, lambda: [table.at(each) for each in epochs[2:4]], never)
    assert table.kept() == (4, 12)
    with pytest.raises(SinkFailed, match="reaches back to epoch 3"):
        table.set_back(epochs[1])
    table.bound().fence(2)
    table.bound().keep_up(1, lambda: [table.at(epochs[-1])], never)  # of an old run
    assert table.kept() == (4, 12)
    table.set_back(epochs[2])
    assert table.rows == table.rows_at[epochs[2]]
    table.bound().keep_up(table.generation, lambda: [table.at(epochs[2])], never)
    assert table.kept() == (1, 0)
    table.show(row(1, "new"))
    table.set_back(epochs[2])
    assert table.rows == table.rows_at[epochs[2]]


# -- which state shows a checkpoint -------------------------------------------------------------------


def test_a_checkpoint_that_was_not_committed_alone_is_shown_by_the_one_before_if_it_had_no_rows(
    server: PostgresServer,
) -> None:
    table = Table(server)
    first = table.show(row(1))
    table.stage([])
    table.seal()
    idle = table.epoch
    table.stage([row(2)])
    table.seal()
    passed_by = table.epoch
    with pytest.raises(CheckpointNotVisible, match="does not show it yet"):
        table.bound().look_back(table.at(passed_by))
    table.show(row(3))
    with pytest.raises(CheckpointNotVisible, match="only together with a later one"):
        table.set_back(passed_by)
    table.set_back(idle)
    assert table.rows == table.rows_at[first]
    assert table.bound().facts().next_batch == 2
    table.show(row(9))
    with pytest.raises(CheckpointNotVisible):
        table.set_back(passed_by)


def test_rows_of_two_generations_in_one_commit_are_undone_too(server: PostgresServer) -> None:
    table = Table(server, key="id")
    first = table.show(row(1, "a"))
    table.stage([row(1, "b"), row(2)])
    staged = list(table.staged)
    table.generation = 2
    table._open()
    table.staged = staged
    both = table.show(row(1, "c"))
    table.set_back(first)
    assert table.rows == table.rows_at[first]
    table.set_back(both)
    assert table.rows == table.rows_at[both]


def test_another_root_takes_the_table_over_at_a_checkpoint_of_before(server: PostgresServer) -> None:
    table = Table(server, root="old")
    first = table.show(row(1))
    table.show(row(2))
    fork = copy.copy(table)
    fork.rows_at, fork.sealed, fork.generations = dict(table.rows_at), dict(table.sealed), dict(table.generations)
    fork.place = SinkPlace("shop", "orders", Memory(), root="fork")
    to = fork.at(first, Origin("old", first, first))
    assert table.bound().look_back(table.at(first)).is_anothers is False
    assert fork.bound().look_back(to, takes_over=True).is_anothers is True
    with pytest.raises(ForeignTable):
        fork.bound().look_back(to)
    for _ in range(2):
        fork.bound().set_back(to, 1, discards_others=False, takes_over=True)
        assert fork.rows == table.rows_at[first]
    with pytest.raises(ForeignTable):
        table.bound().commit(permit(3), Committable(5))
    fork.epoch, fork.batch, fork.shown_through = first, 0, 0
    fork.show(row(8))  # by the number that an epoch of the old root had
    assert fork.rows == Counter([row(1), row(8)])
    fork.bound().set_back(to, 3, discards_others=False)
    assert fork.rows == table.rows_at[first]
    fork.bound().set_back(fork.at(2), 4, discards_others=False)
    assert fork.rows == Counter([row(1), row(8)])
    table.bound().set_back(table.at(2), 9, discards_others=False, takes_over=True)
    assert table.rows == table.rows_at[2], "what the old root showed by that number"


def test_a_record_that_was_made_before_tables_were_set_back_learns_it(server: PostgresServer) -> None:
    table = Table(server)
    first = table.show(row(1))
    table.show(row(2))
    table.run("ALTER TABLE tidegate_epochs DROP COLUMN set_back")
    assert table.bound().facts() == SinkFacts(2, 0, 2)
    assert table.bound().look_back(table.at(first)).rows_removed == 1
    for _ in range(2):
        table.bound().set_back(table.at(first), 2, discards_others=False)
        assert table.rows == table.rows_at[first]


def test_a_table_that_is_gone_or_was_never_there(server: PostgresServer) -> None:
    table = Table(server)
    first = table.show(row(1))
    new = tg.PostgresTable("new", server.dsn, history="7d").bind(table.place)
    assert new.look_back(table.at(0)).rows_removed == 0
    new.set_back(table.at(0), 2, discards_others=False)
    with pytest.raises(SinkFailed, match="is gone"):
        new.look_back(table.at(first))
    table.run("DROP TABLE t")
    with pytest.raises(SinkFailed, match="is gone"):
        table.set_back(first)


# -- at the same time ---------------------------------------------------------------------------------


class SlowToMove(BoundPostgresTable):
    """Its commit has moved the rows and waits."""

    def __init__(self, table: Table) -> None:
        super().__init__(table.bound().sink, table.place)
        self.has_moved, self.may_go_on = threading.Event(), threading.Event()

    def _move(self, *args: Any) -> None:
        super()._move(*args)
        self.has_moved.set()
        assert self.may_go_on.wait(20)


@BOTH
def test_a_commit_that_is_under_way_is_waited_for_and_undone(server: PostgresServer, key: tuple[str, ...]) -> None:
    table = Table(server, key=key)
    first = table.show(row(1, "a"))
    table.stage([row(1, "b"), row(2)])
    late, slow = table.seal(), SlowToMove(table)
    with ThreadPoolExecutor(2) as threads:
        try:
            commit = threads.submit(slow.commit, permit(2, 1), late)
            assert slow.has_moved.wait(20)
            back = threads.submit(table.bound().set_back, table.at(first), 2, discards_others=False)
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            deadline = time.monotonic() + 20
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                while connection.execute(waiting).fetchone() != (1,):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        finally:
            slow.may_go_on.set()
        assert commit.result() is CommitAnswer.COMMITTED
        back.result()
    assert table.rows == table.rows_at[first]
    with pytest.raises(Fenced):
        table.bound().commit(permit(2, 1), late)


@BOTH
def test_a_crash_in_the_middle_changes_nothing_and_another_try_does_it(
    server: PostgresServer, key: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(server, key=key)
    first = table.show(row(1, "a"), row(2))
    second = table.show(row(1, "b"), row(3))
    add = History.add

    def crash(self: History, connection: psycopg.Connection[Any], state: State) -> None:
        add(self, connection, state)
        server.crash()

    with monkeypatch.context() as patch:
        patch.setattr(History, "add", crash)
        with pytest.raises(SinkFailed):
            table.bound().set_back(table.at(first), 2, discards_others=False)
    server.start()
    assert table.rows == table.rows_at[second]
    assert table.bound().facts() == SinkFacts(second, 0, 2)
    table.set_back(first)
    assert table.rows == table.rows_at[first]


def test_no_error_tells_a_secret(server: PostgresServer) -> None:
    table = Table(server)
    first = table.show(row(1))
    table.show(row(2))
    table.run("DROP TABLE tidegate_epochs", "CREATE TABLE tidegate_epochs (pipeline text)")
    with pytest.raises(SinkFailed) as failed:
        table.bound().set_back(table.at(first), 2, discards_others=False)
    table.run("DROP TABLE tidegate_epochs")  # others use this server too
    assert "very-secret" not in str(failed.value)
    assert failed.value.__cause__ is None
