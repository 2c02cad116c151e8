"""What tests share that is slow to start: one Spark session, one PostgreSQL server."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.jvms import start_jvms_soon
from tests.postgres_server import PostgresServer, find_programs
from tidegate.spark.session import local_session

start_jvms_soon()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = local_session("tidegate-tests", tmp_path_factory.mktemp("spark") / "spark.log")
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: where tests run two at a time, none of them is then left to one worker at the end."""
    items.sort(key=lambda item: (item.path.name != "test_kills.py", item.get_closest_marker("slow") is None))


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """A view of a run that is shown in this process leaves its handlers, which would write to streams that are gone."""
    loggers = [logging.getLogger(name) for name in ("tidegate", "tidegate.stopping")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
