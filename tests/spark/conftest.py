"""One Spark session for all tests in this folder: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tidegate.spark.session import local_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = local_session("tidegate-tests", tmp_path_factory.mktemp("spark") / "spark.log")
    session.conf.set("spark.sql.session.timeZone", "UTC")
    yield session
    session.stop()
