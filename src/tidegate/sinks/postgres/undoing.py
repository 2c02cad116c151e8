"""Undoing what was kept of some steps: what came goes again, and what went comes back.

Rows are compared by what the server would send of them, bit by bit: null, NaN, -0 and the digits of a number within
JSON are told apart. Of equal rows one is as good as another, so as many are taken away as came. Nothing else tells a
row that was appended from others: the whole table is read for it. Rows with a key are found by that.

What steps have done to one row is taken together: it is changed once, from what it should be now to what it was then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from tidegate.sinks.postgres import catalog
from tidegate.sinks.postgres.history import kept_columns
from tidegate.sinks.postgres.moving import ADDED, ROW, STEP, Kept, qualified, same_key
from tidegate.sinks.postgres.statements import comma, names, sql

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier


class Effect(msgspec.Struct, frozen=True):
    """What undoing does to a table. `strange`: of how many rows it does not show what the steps have left."""

    removed: int = 0
    added: int = 0
    strange: int = 0


class Undoing:
    """Of the steps after one state of a table, up to another one."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        table: Identifier,
        rows: Identifier,
        key: tuple[str, ...],
        steps: tuple[int, int],
    ) -> None:
        """`rows`: where it is kept what came and went."""
        self._connection = connection
        self._table = table
        self._rows = rows
        self._key = key
        self._after, self._through = steps
        self._columns = catalog.columns(connection, table)
        self._kept = kept_columns(connection, rows)
        self._nullable = catalog.nullable(connection, table)

    def changed_columns(self) -> list[str]:
        """Those that rows had, and the table does not have any more as they were. What it was given since was null."""
        return [name for name, kind in self._kept.items() if self._columns.get(name) != kind]

    def look(self) -> Effect:
        """Changes nothing."""
        return self._look_by_key() if self._key else self._look_at_all()

    def apply(self, before: Effect, step: int | None) -> str | None:
        """`before` is what was seen of it; nobody else has written to the table since, nor does. `step`: as what it is
        kept itself; None: it is not.

        Returns why the table does not show what it should now, if it does not.
        """
        kept = None if step is None else Kept(self._rows, step)
        if not before.removed and not before.added:
            return None
        done = self._apply_by_key(kept) if self._key else self._apply_to_all(kept, before)
        expected = (before.removed, before.added)
        if done != expected or not self._is_undone(before, step):
            return (
                f"{expected[0]} rows were to go and {expected[1]} to come, and {done[0]} and {done[1]} did, or not as "
                f"they were: a trigger or a rule of the table changes what is written"
            )
        return None

    def _is_undone(self, before: Effect, step: int | None) -> bool:
        if self._key:
            after = self._look_by_key()
            return not after.removed and not after.added
        if step is None:
            return True
        with_it = Undoing(self._connection, self._table, self._rows, self._key, (self._after, step))
        left = with_it._one(with_it._net(), sql().SQL("SELECT coalesce(sum(abs(surplus)), 0) FROM net"))
        return bool(left == (before.strange,))

    # -- rows that were appended ------------------------------------------------------------------

    def _net(self) -> Composed:
        """How many more of each row came than went."""
        found: Composed = (
            sql()
            .SQL(
                "net AS (SELECT image, sum(CASE WHEN {0} THEN 1 ELSE -1 END) AS surplus"
                " FROM (SELECT {1} AS image, {0} FROM {2} AS kept) AS changed GROUP BY image"
                " HAVING sum(CASE WHEN {0} THEN 1 ELSE -1 END) <> 0)"
            )
            .format(sql().Identifier(ADDED), _image("kept", self._columns), self._steps())
        )
        return found

    def _there(self) -> Composed:
        """The rows of the table that are to go, numbered, of each kind."""
        found: Composed = (
            sql()
            .SQL(
                ", there AS (SELECT part, place, surplus, image, row_number() OVER (PARTITION BY image) AS number"
                " FROM (SELECT shown.tableoid AS part, shown.ctid AS place, {} AS image FROM {} AS shown) AS shown"
                " JOIN net USING (image) WHERE surplus > 0)"
            )
            .format(_image("shown", self._columns), self._table)
        )
        return found

    def _look_at_all(self) -> Effect:
        query = sql().SQL(
            "SELECT (SELECT count(*) FROM there WHERE number <= surplus),"
            " (SELECT coalesce(sum(-surplus), 0) FROM net WHERE surplus < 0),"
            " (SELECT coalesce(sum(surplus), 0) FROM net WHERE surplus > 0)"
        )
        removed, added, expected = map(int, self._one(self._net() + self._there(), query))
        return Effect(removed, added, expected - removed)

    def _apply_to_all(self, kept: Kept | None, before: Effect) -> tuple[int, int]:
        removed = self._take_away(kept) if before.removed else 0
        return removed, self._bring_back(kept) if before.added else 0

    def _take_away(self, kept: Kept | None) -> int:
        delete = sql().SQL(
            "DELETE FROM {} AS shown USING there"
            " WHERE shown.tableoid = there.part AND shown.ctid = there.place AND there.number <= there.surplus"
        )
        return self._change(self._net() + self._there(), delete.format(self._table), "shown", kept, added=False)

    def _bring_back(self, kept: Kept | None) -> int:
        columns = names(self._columns)
        one_each = sql().SQL(", one AS (SELECT DISTINCT ON (image) {} AS image, {} FROM {} AS kept)")
        insert = sql().SQL(
            "INSERT INTO {} AS shown ({}) SELECT {} FROM one JOIN net USING (image)"
            " CROSS JOIN generate_series(1, -net.surplus)"
        )
        return self._change(
            self._net() + one_each.format(_image("kept", self._columns), columns, self._steps()),
            insert.format(self._table, columns, qualified("one", self._columns)),
            "shown",
            kept,
            added=True,
        )

    # -- rows with a key --------------------------------------------------------------------------

    def _keys(self) -> Composed:
        """Each key that was touched, with the row that it had at first (`tidegate_added`: it had one) and what it was
        left with (`tidegate_row`; null: with none)."""
        found: Composed = (
            sql()
            .SQL(
                "kept AS (SELECT *, {key} AS {row} FROM {steps} AS kept),"
                " first AS (SELECT DISTINCT ON ({row}) * FROM kept ORDER BY {row}, {step}, {added}),"
                " last AS (SELECT DISTINCT ON ({row}) {row} AS key, CASE WHEN {added} THEN {image} END AS image"
                " FROM kept ORDER BY {row}, {step} DESC, {added} DESC),"
                " wanted AS (SELECT {columns}, NOT first.{added} AS {added}, last.image AS {row}"
                " FROM first JOIN last ON last.key = first.{row})"
            )
            .format(
                key=_image("kept", self._key),
                row=sql().Identifier(ROW),
                steps=self._steps(),
                step=sql().Identifier(STEP),
                added=sql().Identifier(ADDED),
                image=_image("kept", self._columns),
                columns=qualified("first", self._columns),
            )
        )
        return found

    def _look_by_key(self) -> Effect:
        query = sql().SQL(
            "SELECT count(*) FILTER (WHERE shown.{row} AND (NOT wanted.{added} OR {now} <> {then})),"
            " count(*) FILTER (WHERE wanted.{added} AND (shown.{row} IS NULL OR {now} <> {then})),"
            " count(*) FILTER (WHERE CASE WHEN shown.{row} THEN {now} END IS DISTINCT FROM wanted.{row})"
            " FROM wanted LEFT JOIN (SELECT *, true AS {row} FROM {table}) AS shown ON {same}"
        )
        row, added = sql().Identifier(ROW), sql().Identifier(ADDED)
        found = query.format(row=row, added=added, table=self._table, same=self._same(), **self._images())
        return Effect(*self._one(self._keys(), found))

    def _images(self) -> dict[str, Composed]:
        return {"now": _image("shown", self._columns), "then": _image("wanted", self._columns)}

    def _same(self) -> Composed:
        return same_key("shown", "wanted", self._key, self._nullable)

    def _apply_by_key(self, kept: Kept | None) -> tuple[int, int]:
        keys, added, same = self._keys(), sql().Identifier(ADDED), self._same()
        delete = sql().SQL("DELETE FROM {} AS shown USING wanted WHERE {} AND NOT wanted.{}")
        removed = self._change(keys, delete.format(self._table, same, added), "shown", kept, added=False)
        changed = self._update(kept)
        insert = sql().SQL(
            "INSERT INTO {table} AS shown ({columns}) SELECT {values} FROM wanted"
            " WHERE wanted.{added} AND NOT EXISTS (SELECT FROM {table} AS shown WHERE {same})"
        )
        columns, values = names(self._columns), qualified("wanted", self._columns)
        inserted = insert.format(table=self._table, columns=columns, values=values, added=added, same=same)
        return removed + changed, changed + self._change(keys, inserted, "shown", kept, added=True)

    def _update(self, kept: Kept | None) -> int:
        """Rows that stay under their key are changed where they are: others may refer to them."""
        others = [name for name in self._columns if name not in self._key]
        if not others:
            return 0
        keys = self._keys()
        which = sql().SQL("{same} AND wanted.{added} AND {now} <> {then}")
        which = which.format(same=self._same(), added=sql().Identifier(ADDED), **self._images())
        if kept is not None:
            before = sql().SQL("SELECT {} FROM {} AS shown JOIN wanted ON {}")
            went = before.format(qualified("shown", self._columns), self._table, which)
            self._connection.execute(self._with(keys) + self._keep(kept, went, added=False))
        values = comma(sql().SQL("{0} = wanted.{0}").format(sql().Identifier(name)) for name in others)
        update = sql().SQL("UPDATE {} AS shown SET {} FROM wanted WHERE {}").format(self._table, values, which)
        return self._change(keys, update, "shown", kept, added=True)

    # -- statements -------------------------------------------------------------------------------

    def _steps(self) -> Composed:
        """What came and went, as rows of the table as it is now."""
        columns = comma(
            sql().Identifier(name)
            if name in self._kept
            else sql().SQL("NULL::{} AS {}").format(sql().SQL(kind), sql().Identifier(name))
            for name, kind in self._columns.items()
        )
        found: Composed = (
            sql()
            .SQL("(SELECT {}, {step}, {} FROM {} WHERE {step} > {} AND {step} <= {})")
            .format(
                columns,
                sql().Identifier(ADDED),
                self._rows,
                sql().Literal(self._after),
                sql().Literal(self._through),
                step=sql().Identifier(STEP),
            )
        )
        return found

    def _one(self, given: Composed, query: Composed) -> tuple[Any, ...]:
        found = self._connection.execute(self._with(given) + query).fetchone()
        assert found is not None
        return tuple(found)

    def _with(self, given: Composed) -> Composed:
        found: Composed = sql().SQL("WITH {} ").format(given)
        return found

    def _change(self, given: Composed, change: Composed, of: str, kept: Kept | None, *, added: bool) -> int:
        """Returns how many rows it has changed, and keeps them if they are to be kept."""
        if kept is None:
            return self._connection.execute(self._with(given) + change).rowcount
        done = sql().SQL(", done AS ({} RETURNING {})").format(change, qualified(of, self._columns))
        keep = self._keep(kept, sql().SQL("SELECT {} FROM done").format(names(self._columns)), added=added)
        return self._connection.execute(self._with(given + done) + keep).rowcount

    def _keep(self, kept: Kept, rows: Composed, *, added: bool) -> Composed:
        keep = sql().SQL("INSERT INTO {} ({}) SELECT changed.*, {}, {} FROM ({}) AS changed")
        columns = names((*self._columns, STEP, ADDED))
        found: Composed = keep.format(kept.rows, columns, sql().Literal(kept.step), sql().Literal(added), rows)
        return found


def _image(of: str, columns: Iterable[str]) -> Composed:
    """All that a row holds, as few bytes: different for rows of which one bit differs."""
    found: Composed = sql().SQL("sha256(record_send(ROW({})))").format(qualified(of, columns))
    return found
