"""A PostgreSQL table as a user writes it down."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from tidegate.errors import InvalidConfig, InvalidPipeline
from tidegate.protocol.config import as_ms
from tidegate.sinks.contract import SinkPlace
from tidegate.sinks.postgres.bound import BoundPostgresTable
from tidegate.sinks.postgres.statements import sql
from tidegate.sinks.staging import as_names
from tidegate.storage.manifest import TableAddress

if TYPE_CHECKING:
    from psycopg.sql import Identifier

    from tidegate.sinks.postgres.connection import Server


class PostgresTable:
    """A PostgreSQL table that a sink stage appends to or, with a `key`, inserts into and updates.

    `table` is `name` or `schema.name`; without a schema it is in `public`, whatever the `search_path`. `dsn` is a
    connection string or URL; what it leaves out comes from the usual environment variables (PGHOST, PGUSER, PGPASSWORD,
    …), also on the executors. `newest_by` names columns that tell which of two rows with one key is the newer one,
    whenever it comes; without it the later one is.

    `timeout` bounds each statement. A server that does not answer for that long is given up, and told as an error.

    With `check`, the rows of every checkpoint are first tried in a transaction that is rolled back: if the table does
    not take one (UNIQUE, CHECK, a foreign key, …), there is no such checkpoint. It costs as much as the commit itself.

    With `history`, such as "7d", the table can be set back to a checkpoint: each commit keeps what it takes to undo it,
    in a table beside this one, for so long, and for as long as a retained checkpoint needs it.
    """

    is_exactly_once = True

    def __init__(
        self,
        table: str,
        dsn: str = "",
        *,
        key: str | Sequence[str] = (),
        newest_by: str | Sequence[str] = (),
        timeout: str = "10m",
        check: bool = False,
        history: str | None = None,
    ) -> None:
        self.schema, self.name = _parts(table)
        self._dsn = dsn
        self.key = as_names(key)
        self._timeout_ms = as_ms("timeout", timeout)
        if not self._timeout_ms:
            raise InvalidConfig(f"timeout is {timeout!r}; it must be at least 1ms, such as 10m")
        self.newest_by = as_names(newest_by)
        self.check = check
        self.history_ms = None if history is None else as_ms("history", history)
        self.turn = threading.Lock()
        """A check and a commit take turns here: in the server one would end the other, if it took long."""

    def __repr__(self) -> str:
        return f"PostgresTable({self.schema}.{self.name})"

    def describe(self) -> str:
        return f"PostgreSQL table {self.schema}.{self.name}"

    @property
    def table(self) -> TableAddress:
        return TableAddress("postgres", f"{self.schema}.{self.name}")

    def at(self, address: str) -> Self:
        """The same sink for another table of its server, "schema.name"."""
        another = copy.copy(self)
        another.schema, another.name = _parts(address)
        another.turn = threading.Lock()
        return another

    @property
    def needs_order(self) -> bool:
        return bool(self.key) and not self.newest_by

    def bind(self, place: SinkPlace) -> BoundPostgresTable:
        return BoundPostgresTable(self, place)

    @property
    def identifier(self) -> Identifier:
        """Its name in statements."""
        return self.beside(self.name)

    def beside(self, name: str) -> Identifier:
        """That of a table in the same schema."""
        identifier: Identifier = sql().Identifier(self.schema, name)
        return identifier

    def belonging(self, prefix: str, place: SinkPlace) -> str:
        """The name of a table beside it that is one stage's own."""
        # By a digest, because names are cut off at 63 bytes.
        digest = hashlib.sha256(f"{place.owner}\n{self.name}".encode()).hexdigest()[:12]
        return f"{prefix}_{digest}"

    def server(self) -> Server:
        """How its server is reached."""
        try:
            from tidegate.sinks.postgres.connection import Server
        except ImportError as error:
            raise InvalidPipeline(
                "PostgresTable needs the package psycopg: pip install 'tidegate[postgres]'"
            ) from error
        return Server(self._dsn, self._timeout_ms)


def _parts(table: str) -> tuple[str, str]:
    """Its schema and its name."""
    schema, _, name = table.rpartition(".")
    if not name or "." in schema:
        raise InvalidPipeline(f"a PostgreSQL table is called 'name' or 'schema.name', not {table!r}")
    return schema or "public", name
