"""The JVMs of the tests start soon: they live for seconds, and most of that used to be their start.

An archive of the classes that Spark loads halves it. `./dev test` makes one per environment, beside lint and types,
with `python -m tests.jvms`. Tests run without it too, and a JVM that it does not fit leaves it alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

# Compiling their code well takes longer than they live.
_COMPILE_LITTLE = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SPARKS_OPTIONS = "SPARK_SUBMIT_OPTS"  # not for the small JVM that finds out how Spark's is started
_QUIET = "-Xlog:disable"  # what a JVM has to say of its archive would go to stdout


def start_jvms_soon() -> None:
    """For all JVMs that this process and its children start from here on."""
    os.environ.setdefault("JDK_JAVA_OPTIONS", _COMPILE_LITTLE)
    archive = _archive()
    if archive is not None and archive.exists():
        os.environ.setdefault(_SPARKS_OPTIONS, f'"-XX:SharedArchiveFile={archive}" {_QUIET}')


def make_archive() -> None:
    """Of the classes that a pipeline with joins, state and tables loads."""
    from tests.spark.kills import KilledRuns

    archive = _archive()
    if archive is None or archive.exists():
        return
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-classes-") as folder,
        tempfile.TemporaryDirectory(prefix=archive.name, dir=archive.parent) as unfinished,
    ):
        made = Path(unfinished) / archive.name
        os.environ["JDK_JAVA_OPTIONS"] = _COMPILE_LITTLE
        os.environ[_SPARKS_OPTIONS] = f'"-XX:ArchiveClassesAtExit={made}" {_QUIET}'
        runs = KilledRuns(Path(folder))
        runs.feed()
        runs.run_to_the_end()
        made.rename(archive)


def _archive() -> Path | None:
    """Where the archive for this Java and this Spark is, or would be."""
    home = os.environ.get("JAVA_HOME")
    if not home or not (release := Path(home, "release")).is_file():
        return None
    made_for = release.read_text(encoding="utf-8") + importlib.metadata.version("pyspark")
    return Path(sys.prefix) / f".dev-classes-{hashlib.sha256(made_for.encode()).hexdigest()[:12]}.jsa"


if __name__ == "__main__":
    make_archive()
