"""Which versions of Spark Tidegate runs on: those whose formats the tests have read, and no others."""

from __future__ import annotations

import re
from typing import Final

import pyspark

from tidegate.errors import InvalidConfig

OLDEST: Final = (4, 1)
NEWEST: Final = (4, 3)


def check_spark(version: str = pyspark.__version__, what: str = "PySpark") -> None:
    """Refuse a version whose files nobody has looked at: pip would not have installed it, but may have been told to.

    Spark's own logs and state are what a checkpoint consists of. What they hold in another version may be read wrongly,
    and be no error.
    """
    said = re.match(r"(\d+)\.(\d+)", version)
    if said is None or not OLDEST <= (int(said[1]), int(said[2])) <= NEWEST:
        raise InvalidConfig(
            f"Tidegate runs on Spark {_told(OLDEST)} to {_told(NEWEST)}, and {what} here is {version}. "
            f"What to do: pip install '{requirement()}'"
        )


def requirement() -> str:
    """What pyproject.toml asks pip for."""
    return f"pyspark>={_told(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}"


def _told(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
