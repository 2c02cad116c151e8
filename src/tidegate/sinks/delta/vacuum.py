"""Which files of a Delta table nobody needs any more.

All of this is so of each:
- no version needs it that shows a checkpoint which the root retains, nor the newest one;
- it was removed from the table longer ago than the retention: no version that is younger needs it;
- its last change, or the last change of its names, is as old: nobody is about to add it. Of a file that the table's log
  knows nothing of, a day at least.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import deltalake

from tidegate.errors import SinkFailed
from tidegate.sinks.delta.home import Home, home_of
from tidegate.sinks.delta.scan import active_files

RETENTION: Final = "delta.deletedFileRetentionDuration"
_HOUR_S: Final = 3_600
_UNITS_S: Final = {"second": 1, "minute": 60, "hour": _HOUR_S, "day": 24 * _HOUR_S, "week": 7 * 24 * _HOUR_S}
_ELSEWHERE: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|/")
_UNKNOWN_FOR_S: Final = 24 * _HOUR_S


def retention_s(table: deltalake.DeltaTable, wanted_ms: int) -> int:
    """For how long what was removed stays: what the table itself demands, if that is longer."""
    text = table.metadata().configuration.get(RETENTION)
    if text is None:
        return math.ceil(wanted_ms / 1000)
    found = re.fullmatch(r"(?:interval\s+)?(\d+)\s+([a-z]+?)s?", text.strip().lower())
    if found is None or found[2] not in _UNITS_S:
        raise SinkFailed(f"its property {RETENTION} is {text!r}, which is not understood, so no file is deleted")
    return max(math.ceil(wanted_ms / 1000), int(found[1]) * _UNITS_S[found[2]])


def unneeded_files(table: deltalake.DeltaTable, at: Home | Path, kept_s: int, versions: Iterable[int]) -> list[str]:
    """The files below a table's folder that no one needs who may read it, by their names there. `versions`: whose files
    stay in any case."""
    home = home_of(at)
    if any(_ELSEWHERE.match(file.path) for file in active_files(table)):
        raise SinkFailed("it has files that lie elsewhere, so no file is deleted")
    kept = sorted({*versions, *_last_before(table, home, time.time() - kept_s)})
    hours = math.ceil(kept_s / _HOUR_S)

    def listed(*, full: bool) -> set[str]:
        with home.telling("be looked through"):
            return set(table.vacuum(hours, True, False, full=full, keep_versions=kept))

    removed = listed(full=False)
    found = {name: kept_s if name in removed else max(kept_s, _UNKNOWN_FOR_S) for name in removed | listed(full=True)}
    now = time.time()
    changed_at = home.changed_at(name for name in found if name.endswith(".parquet"))
    return [name for name, at_s in changed_at.items() if at_s <= now - found[name]]


def _last_before(table: deltalake.DeltaTable, home: Home, moment: float) -> list[int]:
    """The version that the table had at a moment: younger ones show files of it, also where the log has forgotten when
    these were removed."""
    version = max((number for number, at_s in home.versions_at() if at_s <= moment), default=None)
    if version is None or version > table.version():
        return []
    return [version] if home.can_be_read(version) else []
