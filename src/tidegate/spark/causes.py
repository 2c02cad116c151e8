"""Why a query has failed, in one line for people: the words that say it, without the pages around them.

Spark gives a page of plan and JVM trace; what was raised in Python lies in the middle of it, the reason of a loss of
data in its fifth line, and why a file could not be read only in the cause of the cause. Secrets that a message may
hold, in a URL or in settings, are left out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger

from tidegate.errors import DataLost, StageFailed, first_line
from tidegate.scrubbing import text_without_secrets
from tidegate.spark.definition import StageDefinition
from tidegate.spark.sources import without_secrets
from tidegate.storage.system import refusal_in

if TYPE_CHECKING:
    from pyspark.errors import StreamingQueryException
    from pyspark.sql.streaming.query import StreamingQuery

_PYSPARKS_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
_LONGEST: Final = 500
_MOST_CAUSES: Final = 20
_TRACEBACK: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'\s*File "(.+)", line (\d+)(?:, in (\S+))?')
_NOT_THE_USERS: Final = re.compile(r"[/\\](site-packages|dist-packages|py4j|pyspark|pyspark\.zip|tidegate)[/\\]")
# Where Spark's own words about the query begin.
_END: Final = re.compile(r"^(=== Streaming Query ===|JVM stacktrace:|Driver stacktrace:)", re.MULTILINE)
_NOISE: Final = re.compile(
    r"\s*(at |===|== DataFrame ==|Current |Logical |Identifier: |Thread State: |Caused by: |\.\.\. \d+ more)"
)
_WRAPPERS: Final = (
    re.compile(r"^\[STREAM_FAILED\] .*?terminated with exception: "),
    re.compile(r"^\[STREAM_FAILED\] \S*\s*"),
    re.compile(r"^(py4j\.protocol\.)?(Py4JJavaError: )?An error occurred while calling \S+\s*(: )?"),
    re.compile(r"^Job aborted due to stage failure: .*?\(TID \d+\) \([^)]*\): "),
    re.compile(r"^Job aborted due to stage failure: (?=\S)"),
    re.compile(r"^: "),
    re.compile(r"^(org\.apache\.spark|java\.util\.concurrent)\.[\w.$]*(Exception|Error): "),
)
_SQLSTATE: Final = re.compile(r"\s*SQLSTATE: \w{5}")
_LINE: Final = re.compile(r"\(([^()]+), line (\d+), in [^()]*\)")
_CALLED_FROM: Final = re.compile(r'"(\w+)" was called from\s+(\S+):(\d+)')

# Sources say it where they offer to go on without what is lost.
_LOSS: Final = re.compile(r"failOnDataLoss|\[KAFKA_DATA_LOSS", re.IGNORECASE)
_REASON: Final = re.compile(r"Reason:\s*(.+)", re.DOTALL)
_GROUP: Final = re.compile(r"\s*with consumer group \S+")


@contextmanager
def without_pysparks_log() -> Iterator[None]:
    """PySpark writes what it raises to stderr too, as a page of JSON."""
    loggers = [PySparkLogger.getLogger(name) for name in _PYSPARKS_LOGGERS]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


_FRAMES: Final = 8


def exception_of(query: StreamingQuery) -> StreamingQueryException | None:
    """What a query has failed with."""
    with without_pysparks_log():
        return query.exception()


def failure_of(stage: StageDefinition, error: object) -> StageFailed:
    """What a run fails with, when the query of a stage, or of a chain, has failed with this."""
    said = _said(error)
    if _LOSS.search(said) is None:
        return _failure_in(stage, cause_of(error))
    reason = _REASON.search(said)
    told = _GROUP.sub("", " ".join(reason[1].split())) if reason else cause_of(error)
    return DataLost(stage.head, _shortened(_scrubbed(_SQLSTATE.sub("", told))))


def _failure_in(stage: StageDefinition, why: str) -> StageFailed:
    """Of which of the stages that run as one query, the line of the user's own file tells that is named."""
    if not stage.chained:
        return StageFailed(stage.name, why)
    for file, number in _LINE.findall(why):
        for each in stage.members:
            if int(number) in _lines_of(each.function, file):
                return StageFailed(each.name, why)
    others = ", ".join(each.name for each in stage.chained)
    return StageFailed(stage.name, f"{why} (it runs in one query with {others}: it may have failed in any of them)")


def _lines_of(function: Callable[..., Any], file: str) -> range:
    """Which lines of a file a function is written in."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename != file:
        return range(0)
    lines, codes = [code.co_firstlineno], [code]
    while codes:
        each = codes.pop()
        lines += [line for _, _, line in each.co_lines() if line is not None]
        codes += [const for const in each.co_consts if isinstance(const, CodeType)]
    return range(min(lines), max(lines) + 1)


def objection_of(error: Exception) -> str:
    """What Spark has against a frame or a stream that was asked for, without the plan that it adds."""
    said = error.getMessage() if isinstance(error, PySparkException) else None
    return _shortened(_scrubbed(_told(said))) if said else cause_of(error)


def cause_of(error: object) -> str:
    """What has failed, and where in the user's own file, if it is in Python."""
    said = _said(error)
    before, traced, trace = said.rpartition(_TRACEBACK)
    told = _raised(trace) if traced else _told(said)
    if not told:
        told = _told(before) or "unknown"
    innermost = _innermost(error)
    if innermost and not traced and innermost.partition(": ")[2] not in told:
        told = f"{told.rstrip('. ')}: {innermost}"
    # Where the system has refused something, the causes may tell no more than what Spark was doing: the trace has it.
    refusal = refusal_in(str(getattr(getattr(error, "_cause", None), "_stackTrace", "")))
    if refusal is not None and refusal.rpartition(": ")[2] not in told:
        told = f"{told} ({refusal})"
    return _shortened(_scrubbed(told))


def _said(error: object) -> str:
    """All that it says, but for the trace of its own that PySpark may add."""
    said = getattr(error, "_desc", None)
    text = said if isinstance(said, str) else str(error)
    end = _END.search(text)
    return text if end is None or not text[: end.start()].strip() else text[: end.start()]


def _raised(trace: str) -> str:
    """What was raised in Python, and where. The frames are indented; the first line that is not says what it was."""
    lines = [line.rstrip() for line in trace.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if not line[0].isspace()), None)
    if first is None:
        return ""
    raised = _told("\n".join(lines[first:]))
    frames = [found.groups() for line in lines[:first] if (found := _FRAME.match(line))]
    own = [frame for frame in frames if frame[2] is not None and not _NOT_THE_USERS.search(frame[0])]
    if not own:
        return raised
    file, number, function = own[-1]
    return f"{raised} ({file}, line {number}, in {function})"


def _told(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip() and not _NOISE.match(line)]
    text = " ".join(lines)
    for _ in range(len(_WRAPPERS)):  # one may lie in another
        for wrapper in _WRAPPERS:
            text = wrapper.sub("", text)
    called = _CALLED_FROM.search(text)
    if called is not None:
        what, file, number = called.groups()
        text = f"{text[: called.start()].rstrip()} ({file}, line {number}, in {what})"
    return _SQLSTATE.sub("", text).strip()


def _innermost(error: object) -> str:
    """The last of its causes that says anything, with its kind."""
    told = ""
    cause: Any = getattr(error, "_cause", None)
    for _ in range(_MOST_CAUSES):
        if cause is None:
            break
        if getattr(cause, "_desc", ""):
            origin = getattr(cause, "_origin", None)  # where there is none it is part of what it says
            kind = "" if origin is None else f"{origin.getClass().getSimpleName()}: "
            told = f"{kind}{_told(_said(cause))}"
        cause = getattr(cause, "_cause", None)
    return told


def _scrubbed(text: str) -> str:
    return text_without_secrets(without_secrets(text))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1].rstrip()}…"


def why_not_stopped(error: BaseException) -> str | None:
    """Of a query that Spark could not stop in its time: what it says, and where the query's thread is. None: it failed
    otherwise."""
    said = str(error)
    if "failed to stop within" not in said:
        return None
    frames = [line.strip() for line in said.partition("Caused by:")[2].splitlines() if line.strip().startswith("at ")]
    return f"{first_line(error)}; its thread is {', '.join(frames[:_FRAMES]) or 'somewhere'}"
