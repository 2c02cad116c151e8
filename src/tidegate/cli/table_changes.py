"""What restoring, forking and promoting do to tables, for people and for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console

from tidegate.cli.answers import RestoredTable
from tidegate.cli.text import plain_table
from tidegate.engine.graph import Table

if TYPE_CHECKING:
    from tidegate.engine.setting_back import TableBack


def as_answer(each: TableBack, copy_of: str | None = None) -> RestoredTable:
    return RestoredTable(
        sink=each.sink,
        table=Table(each.table.kind, each.table.address),
        from_version=each.change.from_version,
        to_version=each.change.to_version,
        rows_removed=each.change.rows_removed,
        rows_added=each.change.rows_added,
        others=each.change.others,
        remains=each.change.remains,
        refused=each.refused,
        is_left=each.is_left,
        copy_of=copy_of,
        is_anothers=each.change.is_anothers,
    )


def print_tables(tables: Iterable[TableBack], out: Console, copies: Mapping[str, str] | None = None) -> None:
    """`copies`: what each is to show a copy of, by the names of sinks."""
    tables = list(tables)
    copies = copies or {}
    table = plain_table(["sink", "table"], ["version", "rows"])
    for each in tables:
        table.add_row(each.sink, each.table.address, _versions(each, each.sink in copies), _rows(each))
    out.print(table)

    def tell(said: str) -> None:
        out.print(said, markup=False, soft_wrap=True)

    for each in tables:
        if each.sink in copies:
            tell(f"{each.table.address} shows what {copies[each.sink]} does")
        if each.refused is not None:
            tell(f"sink {each.sink}: {each.refused}")
        if each.change.remains is not None:
            tell(f"sink {each.sink}: {each.change.remains}")
        if each.change.is_anothers:
            tell(f"sink {each.sink}: {each.table.address} belongs to another root, which cannot write to it any more")
        for other in each.change.others:
            tell(f"written to {each.table.address} by others since: {other}")


def _versions(each: TableBack, is_copy: bool) -> str:
    change = each.change
    if each.is_left:
        return "left as it is"
    if change.from_version is None:
        return "new" if is_copy else "-"
    if is_copy:
        return f"{change.from_version} → {change.from_version + 1}"
    if change.from_version == change.to_version:
        return f"{change.to_version} stays"
    return f"{change.from_version} → {change.to_version}"


def _rows(each: TableBack) -> str:
    removed, added = each.change.rows_removed, each.change.rows_added
    said = [f"-{removed:,}"] if removed else []
    return " ".join([*said, *([f"+{added:,}"] if added else [])]) or "as they are"
