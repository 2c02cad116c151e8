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
from contextlib import suppress
from pathlib import Path
from typing import Final

import deltalake
from deltalake.exceptions import DeltaError

from tidegate.errors import SinkFailed
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


def unneeded_files(table: deltalake.DeltaTable, path: Path, kept_s: int, versions: Iterable[int]) -> list[Path]:
    """The files below a table's folder that no one needs who may read it. `versions`: whose files stay in any case."""
    if any(_ELSEWHERE.match(file.path) for file in active_files(table)):
        raise SinkFailed("it has files that lie elsewhere, so no file is deleted")
    kept = sorted({*versions, *_last_before(table, path, time.time() - kept_s)})
    hours = math.ceil(kept_s / _HOUR_S)

    def listed(*, full: bool) -> set[str]:
        return set(table.vacuum(hours, True, False, full=full, keep_versions=kept))

    removed = listed(full=False)
    found = {name: kept_s if name in removed else max(kept_s, _UNKNOWN_FOR_S) for name in removed | listed(full=True)}
    now = time.time()
    return [
        path / name
        for name, age_s in found.items()
        if name.endswith(".parquet") and _is_older(path / name, now - age_s)
    ]


def _is_older(file: Path, moment: float) -> bool:
    """By all that has happened to it: a link does not change a file's own time, but that of its names."""
    with suppress(FileNotFoundError):
        status = file.stat()
        return max(status.st_mtime, status.st_ctime) <= moment
    return False


def _last_before(table: deltalake.DeltaTable, path: Path, moment: float) -> list[int]:
    """The version that the table had at a moment: younger ones show files of it, also where the log has forgotten when
    these were removed."""
    log = path / "_delta_log"
    older = [int(file.stem) for file in log.glob("*.json") if file.stem.isdigit() and file.stat().st_mtime <= moment]
    version = max(older, default=None)
    if version is None or version > table.version():
        return []
    try:
        deltalake.DeltaTable(path, version=version)
    except DeltaError:
        return []  # nobody can read it
    return [version]
