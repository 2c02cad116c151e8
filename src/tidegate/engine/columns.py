"""Columns that a stage's output has and its checkpoint's did not.

All columns of a channel may be null (`stored_schema`), and Spark reads them by their names: what is in flight lacks a
new one, and reads as null there.
"""

from __future__ import annotations

from collections.abc import Iterator


def added_columns(then: str, now: str) -> tuple[str, ...] | None:
    """The columns of a schema that one before it did not have, as `name:type`; None: it is not only these that differ.
    Both as Spark writes them, such as `struct<id:bigint,name:string>`."""
    before, added = list(_columns(then)), list[str]()
    for column in _columns(now):
        if before and column == before[0]:
            del before[0]
        else:
            added.append(column)
    return None if before else tuple(added)


def _columns(schema: str) -> Iterator[str]:
    inside = schema.removeprefix("struct<").removesuffix(">")
    depth = start = 0
    for at, character in enumerate(inside):
        depth += (character in "<(") - (character in ">)")
        if character == "," and not depth:
            yield inside[start:at]
            start = at + 1
    if inside:
        yield inside[start:]
