"""Whether the executors of a cluster and the driver mean the same folder by the same path.

Where they do not, executors write to a folder of their own machine, and say that all is well.
"""

from __future__ import annotations

import importlib
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from pyspark.errors import PySparkException

from tidegate.errors import InvalidConfig
from tidegate.spark.causes import cause_of
from tidegate.storage.system import reason

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_Py4JError: Any = importlib.import_module("py4j.protocol").Py4JError  # it has no types

_TRIED: Final = ".executors"
_OLD_S: Final = 3600.0
"""However slow a cluster is, what was tried so long ago is of a process that was killed."""
_INSTEAD: Final = {"the root": ", or in a bucket"}
_shared: WeakKeyDictionary[SparkContext, set[Path]] = WeakKeyDictionary()
"""What was found to be shared: neither a machine nor a mount changes while a session lives."""


def check_shared(session: SparkSession, folder: Path, what: str) -> None:
    """Refuse a folder that executors do not reach, or in which they write what the driver cannot keep. `what`: is in
    it. Of a session it is tried once."""
    known = _shared.setdefault(session.sparkContext, set())
    if folder in known:
        return
    was_there = folder.exists()
    _remove_old(folder)
    # Others may try the same folder at the same time: other drivers, or pipelines whose tables are beside each other.
    tried = folder / f"{_TRIED}-{uuid.uuid4().hex}"
    try:
        _try(session, folder, tried, what)
    except InvalidConfig:
        if not was_there:
            with suppress(OSError):  # somebody else has begun to use it meanwhile
                folder.rmdir()
        raise
    known.add(folder)  # one that was made stays: another driver may be about to write there


def _try(session: SparkSession, folder: Path, tried: Path, what: str) -> None:
    tasks = session.sparkContext.defaultParallelism
    try:
        session.range(0, tasks, 1, tasks).write.parquet(tried.as_uri())
        written = list(tried.glob("part-*.parquet"))
        if len(written) != tasks:
            raise _refused(session, folder, what, "what they write there is not there for the driver")
        for each in written:
            each.with_suffix(".kept").hardlink_to(each)
    except OSError as error:
        why = f"the driver cannot keep what they write: {reason(error, tried)}"
        raise _refused(session, folder, what, why) from error
    except (PySparkException, _Py4JError) as error:
        raise _refused(session, folder, what, cause_of(error)) from error
    finally:
        shutil.rmtree(tried, ignore_errors=True)


def _remove_old(folder: Path) -> None:
    """What processes have left that were killed while they tried."""
    before = time.time() - _OLD_S
    for path in folder.glob(f"{_TRIED}*"):
        with suppress(OSError):  # whoever left it may be another user
            if path.stat().st_mtime < before:
                shutil.rmtree(path, ignore_errors=True)


def _refused(session: SparkSession, folder: Path, what: str, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"the executors of {session.sparkContext.master} do not share {folder} with this driver: {why}; on a cluster "
        f"{what} is in a folder that all its machines have, by the same path, and that the user of the executors may "
        f"write to (one group for both, and umask 002){_INSTEAD.get(what, '')}"
    )
