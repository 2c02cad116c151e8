"""What others than a pipeline have written to a Delta table, as its log tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from tidegate.sinks.delta.log import TableLog


def written_by_others(log: TableLog, since: int, newest: int) -> Iterator[str]:
    """What others have changed after a version, each in words. What changes no row does not count."""
    for version, actions in log.changes_since(since, newest):
        if _changes_rows(actions) and not _is_ours(log, actions):
            yield f"version {version}, {_told(actions)}"


def _is_ours(log: TableLog, actions: list[dict[str, Any]]) -> bool:
    names = (action["txn"]["appId"] for action in actions if "txn" in action)
    return any(name.startswith(log.prefix) for name in names)


def _changes_rows(actions: list[dict[str, Any]]) -> bool:
    changed = (action.get("add") or action.get("remove") for action in actions)
    return any(each.get("dataChange", True) for each in changed if each)


def _told(actions: list[dict[str, Any]]) -> str:
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    at = info.get("timestamp")
    when = f" of {datetime.fromtimestamp(at / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC" if isinstance(at, int) else ""
    return f"{info.get('operation', 'a change')}{when} by {info.get('engineInfo', 'another writer')}"
