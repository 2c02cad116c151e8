"""What tests share that is slow to start: one Spark session, one PostgreSQL server, one ZooKeeper, one S3 server."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from tests.jvms import start_jvms_soon
from tests.postgres_server import PostgresServer, find_programs
from tests.s3_server import NONE_HERE, S3Server, find_program
from tests.spark_cluster import ON_CLUSTER, SparkCluster, user_of_executors
from tests.zookeeper_server import ZooKeeperServer
from tidegate.spark.session import own_session

start_jvms_soon()

LONGEST = (
    "test_drivers.py",
    "test_cluster.py",
    "test_bucket_kills.py",
    "test_kills.py",
    "test_documents.py",
    "test_clusters_guide.py",
    "test_drivers_guide.py",
    "test_operating.py",
    "test_buckets_guide.py",
)
"""Files with tests that take minutes, in several processes which want all cores there are."""


def pytest_configure(config: pytest.Config) -> None:
    """PySpark 4.1 leaves the sockets that it reads rows from to the garbage collector, which warns of each."""
    if pyspark.__version__.startswith("4.1."):
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")
        unclosed = "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
        config.addinivalue_line("filterwarnings", unclosed)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    settings = json.loads(os.environ.get(ON_CLUSTER, "{}"))
    session = own_session("tidegate-tests", tmp_path_factory.mktemp("spark") / "spark.log", settings)
    session.conf.set("spark.sql.session.timeZone", "UTC")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    programs = find_programs()
    if programs is None:
        pytest.skip("there is no PostgreSQL server here (on Debian and Ubuntu: apt-get install postgresql)")
    server = PostgresServer(programs)
    yield server
    server.remove()


@pytest.fixture(scope="session")
def zookeeper_server() -> Iterator[ZooKeeperServer]:
    server = ZooKeeperServer()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    program = find_program()
    if program is None:
        pytest.skip(NONE_HERE)
    server = S3Server(program)
    yield server
    server.remove()


@pytest.fixture(scope="session")
def cluster() -> Iterator[SparkCluster]:
    cluster = SparkCluster(2, user_of_executors())
    yield cluster
    cluster.remove()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may write to; those of pytest are its user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-shared-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def s3a(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The packages by which executors reach a bucket: from the local cache, or fetched."""
    start = (
        "import sys, pathlib; from tidegate.spark.session import own_session; from tidegate.spark.s3a import with_s3a"
    )
    start += "; own_session('packages', pathlib.Path(sys.argv[1]), with_s3a({})).stop()"
    log = tmp_path_factory.mktemp("packages") / "spark.log"
    done = subprocess.run([sys.executable, "-c", start, str(log)], capture_output=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip("the packages of s3a are not in the local cache, and cannot be fetched from here")


if ON_CLUSTER in os.environ:

    @pytest.fixture
    def tmp_path(shared: Path) -> Path:
        """Executors of a cluster are another user."""
        return shared


def pytest_report_header() -> str:
    program = find_program()
    return f"S3 server: {'none, its tests are skipped' if program is None else program.name}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: where tests run two at a time, one worker begins with these, the other with what is quick, and
    takes its share of the rest then. So two of them seldom meet, and none is left to one worker at the end."""
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, _rank(item)))


def _rank(item: pytest.Item) -> int:
    return LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """A view of a run that is shown in this process leaves its handlers, which would write to streams that are gone."""
    loggers = [logging.getLogger(name) for name in ("tidegate", "tidegate.stopping")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def active_session_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whoever makes a frame of rows in a session of its own makes that the active one of the process, which commands
    would take from then on."""
    session: SparkSession | None = request.getfixturevalue("spark") if "spark" in request.fixturenames else None
    yield
    if session is not None and session._jvm is not None:
        SparkSession._activeSession = session
        session._jvm.org.apache.spark.sql.SparkSession.setActiveSession(session._jsparkSession)
