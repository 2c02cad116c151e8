"""Whether the executors of a cluster and the driver mean the same folder by the same path.

Where they do not, executors write to a folder of their own machine, and say that all is well.
"""

from __future__ import annotations

import importlib
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException

from tidegate.errors import InvalidConfig
from tidegate.spark.causes import cause_of
from tidegate.storage.system import reason

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Py4JError: Any = importlib.import_module("py4j.protocol").Py4JError  # it has no types

_TRIED: Final = ".executors"
_INSTEAD: Final = {"the root": ", or in a bucket"}


def check_shared(session: SparkSession, folder: Path, what: str) -> None:
    """Refuse a folder that executors do not reach, or in which they write what the driver cannot keep. `what`: is in
    it."""
    was_there = folder.exists()
    tried = folder / _TRIED
    tasks = session.sparkContext.defaultParallelism
    try:
        session.range(0, tasks, 1, tasks).write.mode("overwrite").parquet(tried.as_uri())
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
        if not was_there:
            with suppress(OSError):
                folder.rmdir()


def _refused(session: SparkSession, folder: Path, what: str, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"the executors of {session.sparkContext.master} do not share {folder} with this driver: {why}; on a cluster "
        f"{what} is in a folder that all its machines have, by the same path, and that the user of the executors may "
        f"write to (one group for both, and umask 002){_INSTEAD.get(what, '')}"
    )
