"""One Spark session for all tests in this folder: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tidegate.spark.session import local_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = local_session("tidegate-tests")
    session.conf.set("spark.sql.session.timeZone", "UTC")
    yield session
    session.stop()
