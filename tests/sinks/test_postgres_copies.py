"""A PostgreSQL table that shows a copy of another one at a checkpoint: a fork's, and the one whose place it takes."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import msgspec
import psycopg
import pytest

import tidegate as tg
from tests.postgres_server import PostgresServer
from tests.sinks.test_postgres_history import BOTH, SCHEMA, Table, empty, row
from tidegate.errors import CheckpointNotVisible, ForeignTable, SinkFailed
from tidegate.protocol.recovery import SinkFacts
from tidegate.sinks.contract import Committable, CopyingSink, SinkPlace
from tidegate.sinks.postgres.bound import BoundPostgresTable
from tidegate.sinks.postgres.duplicating import Duplicate
from tidegate.storage.manifest import Manifest, Origin, StageShape, TableAddress
from tidegate.storage.memory import Memory
from tidegate.testing.sinks import permit

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


@pytest.fixture
def server(postgres_server: PostgresServer) -> PostgresServer:
    return empty(postgres_server)


class Fork:
    """Of the pipeline of a table, with a table of its own."""

    def __init__(self, table: Table, name: str = "fork", stage: str = "orders") -> None:
        self.table = table
        self.name = name
        self.sink = table.bound().sink.at(f"public.{name}")
        self.place = SinkPlace("shop", stage, Memory(), root="fork")

    def bound(self) -> BoundPostgresTable:
        return self.sink.bind(self.place)

    def at(self, epoch: int) -> Manifest:
        """The checkpoint, as the fork has it."""
        return self.table.at(epoch, Origin(self.table.place.root, epoch, epoch))

    def show_copy(self, epoch: int, generation: int = 1) -> None:
        self.bound().show_copy(self.table.bound().table, self.at(epoch), generation, replaces=False)

    @property
    def rows(self) -> Counter[Any]:
        return Counter(self.table.select(self.name))


def test_the_same_sink_for_another_table() -> None:
    sink = tg.PostgresTable("sales.orders", "dbname=x", key="id", history="1h", check=True)
    other = sink.at("fork.orders 2")
    assert (other.table.address, sink.table.address) == ("fork.orders 2", "sales.orders")
    assert (other.key, other.history_ms, other.check) == (("id",), 3_600_000, True)
    assert other.turn is not sink.turn
    assert isinstance(other.bind(SinkPlace("shop", "orders", Memory())), CopyingSink)


@BOTH
@pytest.mark.parametrize("history", [None, "7d"])
def test_a_fork_shows_what_its_origin_does_and_goes_on_alone(
    server: PostgresServer, key: tuple[str, ...], history: str | None
) -> None:
    table = Table(server, key=key, history=history)
    table.show(row(1, "a", "1.5000", "NaN"), row(2, "", None, "-0"))
    newest = table.show(row(2, "later"), row(3))
    fork, before = Fork(table), table.rows
    plan = fork.bound().look_at_copy(table.bound().table, fork.at(newest), replaces=False)
    assert (plan.rows_removed, plan.rows_added, plan.is_anothers) == (0, before.total(), False)
    assert fork.bound().identity() is None, "looking creates nothing"
    for _ in range(2):
        fork.show_copy(newest)
        assert fork.rows == before
        assert fork.bound().facts() == SinkFacts(newest, 1, 2)
    table.show(row(9))
    assert fork.rows == before
    assert fork.bound().check_table(SCHEMA, "update")
    fork.bound().open_staging(2, SCHEMA)
    assert fork.bound().commit(permit(newest, 2), table.sealed[newest]).name == "ALREADY"
    with pytest.raises(ForeignTable):
        table.bound().sink.at("fork").bind(table.place).commit(permit(9, 9), Committable(9))
    table.run("DROP TABLE t")
    assert fork.rows == before
    if history is not None:
        fork.bound().set_back(fork.at(newest), 2, discards_others=False)
        with pytest.raises(SinkFailed, match="reaches back to epoch 2"):
            fork.bound().set_back(fork.at(1), 3, discards_others=False)


@BOTH
def test_what_came_after_the_checkpoint_is_undone_in_the_copy(server: PostgresServer, key: tuple[str, ...]) -> None:
    table = Table(server, key=key)
    first = table.show(row(1, "a"), row(2))
    table.show(row(1, "b"), row(3))
    table.show()
    table.show(row(1, "c"))
    kept, fork = table.kept(), Fork(table)
    plan = fork.bound().look_at_copy(table.bound().table, fork.at(first), replaces=False)
    assert plan.rows_added == 2
    fork.show_copy(first)
    assert fork.rows == table.rows_at[first]
    assert fork.bound().facts() == SinkFacts(first, 1, 1)
    assert (table.rows, table.kept()[1]) == (table.rows_at[table.epoch], kept[1])
    table.set_back(first)  # the history of the other table is its own
    assert table.rows == table.rows_at[first]


def test_a_table_that_shows_more_than_the_checkpoint_and_has_no_history_is_refused(server: PostgresServer) -> None:
    table = Table(server, history=None)
    first, second = table.show(row(1)), table.show(row(2))
    table.stage([row(3)])
    table.seal()
    fork = Fork(table)
    for call in (
        fork.show_copy,
        lambda epoch: fork.bound().look_at_copy(table.bound().table, fork.at(epoch), replaces=False),
    ):
        with pytest.raises(
            CheckpointNotVisible, match=r"ckpt-000001 any more, but epoch 2.*stop the pipeline, or take"
        ):
            call(first)
        with pytest.raises(CheckpointNotVisible, match="does not show it yet"):
            call(3)
    fork.show_copy(second)
    assert fork.rows == table.rows_at[second]


def test_rows_that_others_have_changed_cannot_be_undone_in_the_copy(server: PostgresServer) -> None:
    table = Table(server)
    first = table.show(row(1))
    table.show(row(2))
    table.run("UPDATE t SET value = 'other' WHERE id = 2")
    with pytest.raises(CheckpointNotVisible, match="others have changed rows of it since"):
        Fork(table).show_copy(first)


def test_a_checkpoint_that_was_not_brought_from_elsewhere_is_that_of_the_other_table(server: PostgresServer) -> None:
    table = Table(server)
    first = table.show(row(1))
    table.show(row(2))
    fork = Fork(table)
    fork.bound().show_copy(table.bound().table, table.at(first), 1, replaces=False)
    assert fork.rows == table.rows_at[first]
    fork.bound().set_back(fork.at(first), 2, discards_others=False)


def test_a_fork_takes_the_place_of_the_old_table_which_stays_the_table_that_it_is(server: PostgresServer) -> None:
    table = Table(server, key="id")
    first = table.show(row(1, "a"), row(2, "b"))
    fork = Fork(table)
    fork.show_copy(first)
    table.run(
        "CREATE ROLE reader",
        "GRANT SELECT ON t TO reader",
        "UPDATE fork SET value = 'of the fork' WHERE id = 2",
        "INSERT INTO fork VALUES (4, 'new')",
    )
    try:
        table.show(row(3, "of the old run"))
        identity = table.bound().identity()
        old = table.bound().sink.bind(SinkPlace("shop", "orders", Memory(), root="fork"))
        source, to = fork.bound().table, fork.at(first)
        with pytest.raises(SinkFailed, match="holds rows"):
            old.look_at_copy(source, to, replaces=False)
        plan = old.look_at_copy(source, to, replaces=True)
        assert (plan.rows_removed, plan.rows_added, plan.is_anothers) == (3, 3, True)
        for _ in range(2):
            old.show_copy(source, to, 5, replaces=True)
            assert table.rows == fork.rows
        assert old.facts() == SinkFacts(first, 5, 1)
        with pytest.raises(ForeignTable):
            table.bound().commit(permit(9, 9), Committable(9))
        assert old.identity() == identity
        with psycopg.connect(server.dsn) as connection:
            found = connection.execute("SELECT has_table_privilege('reader', 't', 'SELECT')").fetchone()
        assert found == (True,)
    finally:
        table.run("DROP OWNED BY reader", "DROP ROLE reader")


def test_tables_of_other_columns_and_no_table_are_refused(server: PostgresServer) -> None:
    table = Table(server)
    first = table.show(row(1))
    fork = Fork(table)
    table.run("CREATE TABLE fork (LIKE t)", "ALTER TABLE fork ALTER price TYPE numeric(20,2)")
    for call in (
        fork.show_copy,
        lambda epoch: fork.bound().look_at_copy(table.bound().table, fork.at(epoch), replaces=False),
    ):
        with pytest.raises(SinkFailed, match=r"column 'price' is numeric\(20,4\), here numeric\(20,2\)"):
            call(first)
    table.run("ALTER TABLE fork DROP price")
    with pytest.raises(SinkFailed, match=r"'price' is numeric\(20,4\), here missing"):
        fork.show_copy(first)
    with pytest.raises(SinkFailed, match="not in the same database, or is gone"):
        fork.bound().show_copy(TableAddress("postgres", "public.nowhere"), fork.at(first), 1, replaces=False)
    with pytest.raises(SinkFailed, match="a table of kind delta"):
        fork.bound().show_copy(TableAddress("delta", "/lake/t"), fork.at(first), 1, replaces=False)
    with pytest.raises(SinkFailed, match="a copy of itself"):
        table.bound().show_copy(table.bound().table, fork.at(first), 1, replaces=False)
    with pytest.raises(SinkFailed, match=r"cut 'ffff.* off at 63 bytes"):
        Fork(table, "f" * 64).show_copy(first)


def test_the_records_of_all_sinks_that_write_to_it_come_along(server: PostgresServer) -> None:
    tables = [Table(server, stage=stage) for stage in ("orders", "returns")]
    for table in tables:
        table.show(row(1, table.place.stage))
    tables[1].show(row(2))
    shape = StageShape("sink", (), "append", "", tables[0].bound().table)
    forks = [Fork(table, stage=table.place.stage) for table in tables]
    to = forks[0].at(1)
    to = msgspec.structs.replace(
        to, shape={"orders": shape, "returns": shape}, stages={**to.stages, **forks[1].at(1).stages}
    )
    for fork in (*forks, *forks):
        fork.bound().show_copy(tables[0].bound().table, to, 1, replaces=False)
        assert fork.rows == Counter([row(1, "orders"), row(1, "returns")])
        assert [each.bound().facts() for each in forks] == [SinkFacts(1, 1, 1)] * 2


class Meanwhile(Duplicate):
    """The other table goes on right after its rows were copied."""

    def __init__(self, fork: Fork, epoch: int, act: Any) -> None:
        super().__init__(fork.sink, fork.place, fork.table.bound().table, fork.at(epoch))
        self.act = act

    def _copy(self, connection: psycopg.Connection[Any]) -> Any:
        found = super()._copy(connection)
        self.act()
        return found


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_the_other_table_may_go_on_while_it_is_copied(server: PostgresServer, is_forgotten: bool) -> None:
    table = Table(server, key="id")
    first = table.show(row(1, "a"))
    table.show(row(1, "b"), row(2))
    fork = Fork(table)

    def act() -> None:
        newest = table.show(row(1, "c"))
        if is_forgotten:
            table.bound(history="0s").keep_up(1, lambda: [table.at(newest)], threading.Event())

    duplicate = Meanwhile(fork, first, act)
    with fork.bound()._connected() as connection:
        duplicate.prepare(connection)
    if is_forgotten:
        with pytest.raises(CheckpointNotVisible), fork.bound()._connected() as connection:
            duplicate.apply(connection, 1, must_be_empty=True)
        assert fork.rows == Counter()
    else:
        with fork.bound()._connected() as connection:
            duplicate.apply(connection, 1, must_be_empty=True)
        assert fork.rows == table.rows_at[first]
