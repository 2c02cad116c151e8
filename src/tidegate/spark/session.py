"""Spark sessions: the user's own is used where given and never changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidegate.errors import InvalidConfig, first_line
from tidegate.sinks.sessions import derived_session
from tidegate.spark.filelog import NEVER_COMPACT

_LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")
_STATE: Final = "spark.sql.streaming.stateStore"

_STREAMING: Final = {
    # State as immutable files, a change log per batch, and names that are unique per batch.
    f"{_STATE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STATE}.rocksdb.changelogCheckpointing.enabled": "true",
    f"{_STATE}.checkpointFormatVersion": "2",
    # The format that filelog.py knows.
    "spark.sql.streaming.offsetLog.formatVersion": "1",
    "spark.sql.streaming.queryEvolution.enableSourceEvolution": "false",
    # One writer per folder is what a generation guarantees, so plain renames are safe, and 3 to 5 times cheaper.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.fileSink.log.compactInterval": str(NEVER_COMPACT),
    "spark.sql.streaming.numRecentProgressUpdates": "4",
    # A batch is looked at, and a snapshot of it is taken, before Spark deletes its entries.
    "spark.sql.streaming.minBatchesToRetain": "100",
    # How soon an idle query looks again; at Spark's 10 ms five idle queries take half a core.
    "spark.sql.streaming.pollingDelay": "20ms",
    # A query that does not stop must not keep a run from stopping; whatever it still writes is of an old generation.
    "spark.sql.streaming.stopTimeout": "30s",
    # A manifest holds the SHA-256 of every file that a checkpoint needs; a second checksum file for each is not needed.
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    # What every other reader of Parquet and Delta writes; Spark's default is a deprecated one without statistics.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}

# Only for stages that read gates: a user's own file source keeps its log, and is read, as the user has it.
_GATE_READING: Final = {
    "spark.sql.streaming.fileSource.log.compactInterval": str(NEVER_COMPACT),
    # A gate is nothing but such a log.
    "spark.sql.streaming.fileStreamSink.ignoreMetadata": "false",
    # What a channel holds is rows that were handed on, never to be skipped.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}


def existing_session() -> SparkSession | None:
    """The session that this thread or else the process has. None is active in a thread that was given none, but all
    threads of a process share one SparkContext, and what a builder sets would change the session that is there."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    context = SparkContext._active_spark_context
    return None if context is None else SparkSession(context)  # the default one; only where there is none, a new one


def check_settings(settings: Mapping[str, str], given: SparkSession | None) -> None:
    """Refuse settings for a session of our own that would have no effect."""
    if settings and (given or existing_session()) is not None:
        raise InvalidConfig(
            f"there is a Spark session already: {min(settings)} cannot be set any more; set it where that one is made"
        )
    for key in settings:
        if not key.startswith("spark."):
            raise InvalidConfig(f"{key!r} is no setting of Spark's: those start with spark.")
        if key in _STREAMING:
            raise InvalidConfig(f"{key} is set by Tidegate for its stages; leave it out")


def local_session(name: str, log: Path, settings: Mapping[str, str] | None = None) -> SparkSession:
    """A `local[*]` session with settings that suit small machines. Spark's own messages go to the file `log`.

    `settings` come on top. A session that is there already is used as it is: it is not ours to change.
    """
    existing = existing_session()
    if existing is not None:
        return existing
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    log.parent.mkdir(parents=True, exist_ok=True)
    # By the environment, not by options of the JVM: those cannot hold every path.
    os.environ["LOG4J_CONFIGURATION_FILE"] = str(_LOG_SETTINGS)
    os.environ["TIDEGATE_SPARK_LOG"] = str(log)
    builder = (
        SparkSession.builder.master("local[*]")
        .appName(name)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", str(os.cpu_count() or 2))
    )
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    try:
        with _stderr_to(log):
            return builder.getOrCreate()
    except PySparkException as error:
        raise InvalidConfig(
            f"Spark could not be started: {first_line(error)} It needs Java 17 or 21, by JAVA_HOME or on the PATH; its "
            f"own messages are in {log}"
        ) from error


@contextmanager
def _stderr_to(log: Path) -> Iterator[None]:
    """What the JVM writes past its own log (warnings at its start, a dying driver's traces) goes to the log too.

    It inherits its stderr from us when it is started, so ours leads there for that while.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class StageSessions:
    """The two sessions that a pipeline's stages run on."""

    def __init__(self, session: SparkSession) -> None:
        self.of_sources = derived_session(session)
        self.of_stages = derived_session(session)
        for derived in (self.of_sources, self.of_stages):
            for key, value in _STREAMING.items():
                derived.conf.set(key, value)
        for key, value in _GATE_READING.items():
            self.of_stages.conf.set(key, value)
