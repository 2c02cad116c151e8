"""What people are told of a query that has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.logger import PySparkLogger

from tests.spark.definitions import stage
from tidegate.errors import DataLost, StageFailed
from tidegate.spark.causes import cause_of, exception_of, failure_of

pytestmark = pytest.mark.matrix

IN_A_WORKER = """[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted due to stage failure:
org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown from the Python worker: \
Traceback (most recent call last):
  File "worker.py", line 3, in main
    process()
    ~~~~~~~^^
ModuleNotFoundError: No module named 'geo'
 SQLSTATE: 39000
\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
"""
IN_A_CALLBACK = """[FOREACH_BATCH_USER_FUNCTION_ERROR] py4j.Py4JException: An exception was raised by the \
Python Proxy. Return Message: Traceback (most recent call last):
  File "postgres.py", line 1, in stage
    raise ValueError
ValueError: inner

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "postgres.py", line 2, in stage
tidegate.errors.SinkFailed: orders: a string holds a NUL
"""
IN_A_UDF = """[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):
  File "/home/me/orders.py", line 36, in country
    return names[code]
           ~~~~~^^^^^^
  File "/opt/venv/lib/python3.12/site-packages/names/table.py", line 3, in __getitem__
KeyError: 'x'
 SQLSTATE: 38000

=== Streaming Query ===
Identifier: [id = 1, runId = 2]
"""
IN_A_BATCH = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "/home/me/orders.py", line 92, in write
    rows.collect()
  File "/opt/venv/lib/python3.12/site-packages/py4j/protocol.py", line 327, in get_return_value
    raise Py4JJavaError(
py4j.protocol.Py4JJavaError: An error occurred while calling o615.collectToPython.
: org.apache.spark.SparkException: [FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file a.json.
Gone. SQLSTATE: KD001
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.fileNotExistError(QueryExecutionErrors.scala:1)
Caused by: java.io.FileNotFoundException: a.json
\t... 23 more
"""
ON_TWO_LINES = """[USER_RAISED_EXCEPTION] amount is negative
in order 7 SQLSTATE: P0001
=== Streaming Query ===
"""
CALLED = """[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012
== DataFrame ==
"__truediv__" was called from
/home/me/orders.py:66

=== Streaming Query ===
"""
WORKER_GONE = """Job aborted due to stage failure: Task 0 in stage 16.0 failed 1 times, most recent failure: Lost task \
0.0 in stage 16.0 (TID 18) (localhost executor driver): org.apache.spark.SparkException: Python worker exited \
unexpectedly (crashed).
\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
Caused by: java.io.EOFException
\t... 23 more

Driver stacktrace:
"""
# As Spark's connector of Kafka says it.
LOST = """Some data may have been lost because they are not available in Kafka any more;
either the data was aged out by Kafka or the topic may have been deleted before all the data in the
topic was processed.
If you don't want your streaming query to fail on such cases, set the source option failOnDataLoss to false.
Reason: {reason}
=== Streaming Query ===
Identifier: [id = 1, runId = 2]
Current Committed Offsets: {{KafkaV2[Subscribe[a]]: {{"a":{{"0":500}}}}}}
"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (IN_A_WORKER, "ModuleNotFoundError: No module named 'geo'"),
        (IN_A_CALLBACK, "tidegate.errors.SinkFailed: orders: a string holds a NUL"),
        (
            "[STREAM_FAILED] x\n=== Plan ===\n[DIVIDE_BY_ZERO] Division by zero.\n\tat a.b(C.scala:1)",
            "[DIVIDE_BY_ZERO] Di",
        ),
        (
            "An error occurred while calling o5.start.\n: java.io.IOException: full\n\tat a.b(C.scala:1)",
            "java.io.IOExc",
        ),
        (IN_A_UDF, "KeyError: 'x' (/home/me/orders.py, line 36, in country)"),
        (IN_A_BATCH, "[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file a.json. Gone. (/home/me"),
        (ON_TWO_LINES, "[USER_RAISED_EXCEPTION] amount is negative in order 7"),
        (CALLED, "[DIVIDE_BY_ZERO] Division by zero. (/home/me/orders.py, line 66, in __truediv__)"),
        (WORKER_GONE, "Python worker exited unexpectedly (crashed)."),
        ("java.lang.OutOfMemoryError: Java heap space", "java.lang.OutOfMemoryError: Java heap space"),
        ("", "unknown"),
    ],
    ids=[
        "in a worker",
        "in a callback",
        "in the JVM",
        "at the start",
        "in a function of the user's",
        "in Spark, called by a function of the user's",
        "on two lines",
        "with the line that it was called from",
        "a worker that is gone",
        "out of memory",
        "nothing",
    ],
)
def test_the_cause_of_a_failure_is_told_in_one_line(said: str, cause: str) -> None:
    assert cause_of(said).startswith(cause)
    assert "\n" not in cause_of(said)


def test_what_only_the_innermost_cause_tells_is_told_too() -> None:
    kind = SimpleNamespace(getClass=lambda: SimpleNamespace(getSimpleName=lambda: "JsonParseException"))
    innermost = SimpleNamespace(_desc="Unexpected character ('b' (code 98))", _origin=kind, _cause=None)
    silent = SimpleNamespace(_desc="", _cause=innermost)
    failed = SimpleNamespace(_desc="[FAILED_READ_FILE.NO_HINT] Encountered error while reading a.json. ", _cause=silent)
    assert cause_of(failed) == (
        "[FAILED_READ_FILE.NO_HINT] Encountered error while reading a.json: JsonParseException: Unexpected character "
        "('b' (code 98))"
    )
    said_already = SimpleNamespace(_desc="Unexpected character ('b' (code 98)) in a.json", _cause=silent)
    assert cause_of(said_already) == "Unexpected character ('b' (code 98)) in a.json"


@pytest.mark.parametrize(
    "said",
    [
        "cannot log in to jdbc:postgresql://db/orders?user=me&password=hunter2",
        "cannot read https://me:hunter2@example.org/rows",
        'sasl.jaas.config=org.example.Login required username="me" password="hunter2";',
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nOSError: api_key=hunter2',
    ],
)
def test_no_secret_is_told(said: str) -> None:
    assert "hunter2" not in cause_of(said)
    assert "hunter2" not in str(failure_of(stage("rows"), LOST.format(reason=said)))


def test_no_more_is_told_than_can_be_read() -> None:
    assert len(cause_of("much " * 1000)) <= 500


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (
            "Could not read records in offset [500, 520) for topic partition a-0\nwith consumer group spark-1.",
            "Could not read records in offset [500, 520) for topic partition a-0.",
        ),
        ("Partition c-0 offset was changed from 500 to 300.\nThis could be", "offset was changed from 500 to 300."),
    ],
)
def test_a_loss_that_no_retry_mends_is_told_with_what_is_lost_and_what_to_do(reason: str, told: str) -> None:
    failed = failure_of(stage("orders"), LOST.format(reason=reason))
    assert isinstance(failed, DataLost)
    assert not failed.retry_helps
    assert str(failed).startswith("stage 'orders' failed: rows that it has yet to read are gone from its source: ")
    assert told in str(failed)
    assert "What to do: " in str(failed)
    assert "consumer group" not in str(failed)


def test_other_failures_are_no_losses() -> None:
    assert type(failure_of(stage("orders"), WORKER_GONE)) is StageFailed


def test_a_failure_is_told_to_people_alone(caplog: pytest.LogCaptureFixture) -> None:
    """PySpark logs it too, as JSON, when it is asked for it."""
    logger = PySparkLogger.getLogger("DataFrameQueryContextLogger")
    logger.addHandler(caplog.handler)
    failed = SimpleNamespace(exception=lambda: logger.error("[DIVIDE_BY_ZERO]"))
    query: Any = failed
    exception_of(query)
    assert not caplog.records
    failed.exception()  # of a query of the user's own it is PySpark's to tell
    assert caplog.records
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    "said",
    [
        "cannot connect with password: hunter2",
        'the answer to {"client_secret": "hunter2"} was 401',
        "IllegalArgumentException: fs.s3a.secret.key = 'hunter 2' is too short",
        "sent Authorization: Bearer hunter2.eyJhbGciOiJIUzI1NiJ9 to it",
        "no answer from jdbc:postgresql://orders:hunter2@db/lake?sslpassword=hunter2",
    ],
)
def test_what_a_failure_quotes_of_credentials_is_left_out(said: str) -> None:
    told = cause_of(ValueError(said))
    assert "hunter" not in told
    assert "..." in told or "…" in told


def test_half_a_character_is_no_reason_to_tell_nothing() -> None:
    assert cause_of(ValueError("a name that ends early: \ud83d")) == "a name that ends early: ?"
