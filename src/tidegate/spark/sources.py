"""What a source reads, told apart from how: a position in one stream says nothing of another.

Kept in manifests in clear text, so that an error can name both, and without secrets. Of Kafka it is the topics and the
brokers; of files the format, the path and what selects files; of any other format all options but those that by their
name are credentials, limits or where a first start begins. Of these a value is kept as a checksum, unless it is a
number or the name says that it is an address: who knows what is in it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.errors import InvalidPipeline, PipelineChanged, RecoveryRefused
from tidegate.spark.topics import assigned_partitions, no_answer, topic_ids
from tidegate.storage.manifest import SourceStream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("tidegate")

STREAM_V1: Final = "StreamingRelation"
_STREAM_V2: Final = "StreamingRelationV2"
_FILE_SOURCE: Final = "FileSource["
_KAFKA: Final = "kafka"
_KAFKA_NAMES: Final = (_KAFKA, "org.apache.spark.sql.kafka010.kafkasourceprovider")
_TOPICS: Final = "subscribe"
_PATTERN: Final = "subscribePattern"
_PARTITIONS: Final = "assign"
_SERVERS: Final = "kafka.bootstrap.servers"
_SELECTS_FILES: Final = ("pathGlobFilter", "recursiveFileLookup", "fileNameOnly")

_WORD: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_CREDENTIAL: Final = re.compile(
    "password|passwd|passphrase|secret|token|credential|signature|certificate|keystore|truststore|jaas|sasl|"
    "(access|api|private|account|shared|encryption).?key"
)
_CREDENTIAL_WORD: Final = re.compile(
    "auth|authentication|authorization|cert|login|pass|pwd|sas|sig|ssl|tls|user(name)?"
)
_HOW_WORD: Final = re.compile(
    "backoff|buffer|cache|client|concurrency|delay|fetch|heartbeat|initial|interval|keepalive|limits?|max|metrics|min|"
    "parallelism|partitions|poll|prefetch|retries|retry|size|starting|threads|throttle|timeout|trigger|wait"
)
_LIMIT: Final = re.compile(r"max\w+per\w+")  # in lower case its words cannot be told apart
_ADDRESS_WORD: Final = re.compile(
    "account|brokers?|bucket|catalog|channel|collection|container|database|dataset|directory|endpoint|file|folder|"
    "hosts?|index|keyspace|location|name|namespace|path|port|project|queue|region|schema|servers?|stream|subscription|"
    "table|topics?|uri|url"
)
_NUMBER: Final = re.compile(r"[\d.:+-]+|true|false", re.IGNORECASE)
_LOGIN: Final = re.compile(r"(?<!abfs)(?<!abfss)(?<!wasb)(?<!wasbs)(://)[^/@\s]*@")  # there it is the container
_SETTING: Final = re.compile(r"(^|[?&;,\s])([\w.-]+)=([^?&;,\s]*)")


def stream_leaves(frame: DataFrame) -> Iterator[Any]:
    """The streams that a stage reads, as the leaves of its plan, in Spark's order."""
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()
    return (leaf for leaf in (leaves.apply(index) for index in range(leaves.size())) if leaf.isStreaming())


def log_numbers(frame: DataFrame) -> tuple[int, ...]:
    """The number of the source log of each stream, in the same order: those that are equal share one."""
    different: list[Any] = []
    found: list[int] = []
    for leaf in stream_leaves(frame):
        equal = [number for number, each in enumerate(different) if each.equals(leaf)]
        if not equal:
            different.append(leaf)
        found.append(equal[0] if equal else len(different) - 1)
    return tuple(found)


def streams_read(source: str, frame: DataFrame) -> tuple[SourceStream, ...]:
    """What a source reads, stream by stream. A broker is asked for its topics' ids, but not waited for for long."""
    return tuple(_stream(source, frame, leaf) for leaf in stream_leaves(frame))


def kafka_options(frame: DataFrame) -> list[dict[str, str]]:
    """The options of each stream that is of Kafka, by their names in lower case; none of the others."""
    found = [_name_and_options(leaf) for leaf in stream_leaves(frame)]
    return [_lowered(options) if name.lower() in _KAFKA_NAMES else {} for name, options in found]


def _stream(source: str, frame: DataFrame, leaf: Any) -> SourceStream:
    node = leaf.nodeName()
    name, options = _name_and_options(leaf)
    if name.lower() in _KAFKA_NAMES:
        return _of_kafka(source, frame, _lowered(options))
    if node == STREAM_V1 and str(leaf.sourceName()).startswith(_FILE_SOURCE):
        return SourceStream(name.lower(), _of_files(frame, options))
    reads = _of_any(options)
    if ":" not in reads.get("path", ":"):  # else it is of a scheme that may be its own
        reads["path"] = _qualified(frame, reads["path"])
    if node == _STREAM_V2 and leaf.identifier().isDefined():
        reads["table"] = str(leaf.identifier().get())
    return SourceStream(name, reads)


def _name_and_options(leaf: Any) -> tuple[str, dict[str, str]]:
    """The format of a stream, and its options as they were given."""
    node = str(leaf.nodeName())
    if node == _STREAM_V2:
        return str(leaf.sourceName()), dict(leaf.extraOptions().asCaseSensitiveMap())
    if node != STREAM_V1:
        return node, {}
    found: dict[str, str] = {}
    pairs = leaf.dataSource().options().iterator()
    while pairs.hasNext():
        pair = pairs.next()
        found[str(pair._1())] = str(pair._2())
    return str(leaf.dataSource().className()), found


def _lowered(options: Mapping[str, str]) -> dict[str, str]:
    """Spark does not tell options apart by case."""
    return {name.lower(): value for name, value in options.items()}


def _of_kafka(source: str, frame: DataFrame, given: Mapping[str, str]) -> SourceStream:
    reads = {_SERVERS: _joined(given.get(_SERVERS, "").lower().split(","))}
    if _TOPICS in given:
        reads[_TOPICS] = _joined(given[_TOPICS].split(","))
    elif _PATTERN.lower() in given:
        reads[_PATTERN] = given[_PATTERN.lower()]
    else:
        assigned = assigned_partitions(given)
        reads[_PARTITIONS] = _joined(f"{topic}-{each}" for topic, numbers in assigned.items() for each in numbers)
    ids, why = topic_ids(frame.sparkSession._jvm, given)
    if why:
        _log.warning(
            "source %r: the ids of its topics could not be looked up (%s), so whether one was deleted and created anew "
            "is not checked",
            source,
            no_answer(given, why),
        )
    return SourceStream(_KAFKA, reads, ids)


def _of_files(frame: DataFrame, options: Mapping[str, str]) -> dict[str, str]:
    given = _lowered(options)
    reads = {"path": _qualified(frame, given.get("path", ""))}
    chosen = {name: given.get(name.lower(), "") for name in _SELECTS_FILES}
    return reads | {name: value for name, value in chosen.items() if value.lower() not in ("", "false")}


def _qualified(frame: DataFrame, path: str) -> str:
    """As Spark takes it: a relative one names another folder where Spark's process was started elsewhere."""
    if not path:
        return path
    found, files = _in_files(frame.sparkSession, path)
    return without_secrets(str(found.makeQualified(files.getUri(), files.getWorkingDirectory())))


def working_folder(session: SparkSession) -> Any:
    """From where Spark takes relative paths, as Java's URI."""
    return _in_files(session, "relative")[1].getWorkingDirectory().toUri()


def _in_files(session: SparkSession, path: str) -> tuple[Any, Any]:
    """A path, and the file system that it is in, as Spark has them."""
    jvm = session._jvm
    assert jvm is not None
    found = jvm.org.apache.hadoop.fs.Path(path)
    return found, found.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())


def check_folder(what: str, frame: DataFrame, folder: Path) -> None:
    """Refuse a relative path which Spark's process, started by others, takes from another folder than this one."""
    for leaf in stream_leaves(frame):
        path = _lowered(_name_and_options(leaf)[1]).get("path", "")
        if not path or ":" in path or path.startswith("/"):
            continue
        working = working_folder(frame.sparkSession)
        if working.getScheme() == "file" and os.path.realpath(working.getPath()) != os.path.realpath(folder):
            raise InvalidPipeline(
                f"{what} reads the relative path {path!r}, which means {folder / path}, beside the file that makes the "
                f"pipeline; but the Spark session that is there takes it from {working.getPath()}. What to do: give "
                f"the source the whole path, or start the program in {folder}, or let the run make its own session"
            )


def _of_any(options: Mapping[str, str]) -> dict[str, str]:
    return {
        name if name.lower() != "path" else "path": _shown(name, without_secrets(value))
        for name, value in sorted(options.items())
        if not _is_credential(name) and not _is_how(name)
    }


def _shown(name: str, value: str) -> str:
    if _NUMBER.fullmatch(value) or _has_word(name, _ADDRESS_WORD):
        return value
    # Short, so that who tries out values to find one that fits finds too many.
    return f"#{hashlib.sha256(value.encode()).hexdigest()[:6]}"


def _has_word(name: str, words: re.Pattern[str]) -> bool:
    return any(words.fullmatch(each.lower()) for each in _WORD.findall(name))


def _is_credential(name: str) -> bool:
    return _CREDENTIAL.search(name.lower()) is not None or _has_word(name, _CREDENTIAL_WORD)


def _is_how(name: str) -> bool:
    return _LIMIT.fullmatch(name.lower()) is not None or _has_word(name, _HOW_WORD)


def without_secrets(value: str) -> str:
    """A path, URL or connection string without who logs in, and without settings that are credentials."""

    def kept(setting: re.Match[str]) -> str:
        before, name, text = setting.groups()
        return f"{before}{name}={'…' if _is_credential(name) else text}"

    return _SETTING.sub(kept, _LOGIN.sub(r"\1", value))


def _joined(values: Any) -> str:
    return ",".join(sorted({each.strip() for each in values} - {""}))


def existing(stream: SourceStream) -> SourceStream:
    """Without topics that there are not: these have no id."""
    return msgspec.structs.replace(stream, ids={topic: found for topic, found in stream.ids.items() if found})


# -- comparing --------------------------------------------------------------------------------------


def going_on(
    source: str, since: str, then: tuple[SourceStream, ...], now: tuple[SourceStream, ...]
) -> tuple[SourceStream, ...]:
    """What a source reads, with what was known of it before, if it may go on from where it stood in that.

    `since` says where it stood, for the error.
    """
    if len(then) != len(now) or not all(map(_is_same, then, now)):
        raise PipelineChanged(
            f"source {source!r} no longer reads what it read {since}: that was {described(then)}, now it is "
            f"{described(now)}. Where it stood in the one says nothing of the other: start the changed pipeline on a "
            f"new root with new tables, or change it back; nothing was changed"
        )
    known = []
    for before, found_now in zip(then, now, strict=True):
        for topic in before.ids:
            if found_now.ids.get(topic, "unknown") == "":
                raise RecoveryRefused(
                    f"source {source!r} does not find the topic that it read {since}: topic {topic!r} was deleted, and "
                    f"what was yet to be read of it is lost. What to do: start the pipeline on a new root with new "
                    f"tables, without the topic or once there is one again; nothing was changed"
                )
        stream = existing(found_now)
        for topic, found in stream.ids.items():
            if before.ids.get(topic, found) != found:
                raise RecoveryRefused(
                    f"source {source!r} does not find the topic that it read {since}: topic {topic!r} was deleted and "
                    f"created anew, or is that of another cluster (its id was {before.ids[topic]}, now it is {found}). "
                    f"Rows of it would be skipped. What to do: start the pipeline on a new root with new tables; "
                    f"nothing was changed"
                )
        # One that is not known now, because the broker is away, is not forgotten.
        known.append(msgspec.structs.replace(stream, ids={**before.ids, **stream.ids}))
    return tuple(known)


def are_same(some: tuple[SourceStream, ...], others: tuple[SourceStream, ...]) -> bool:
    """Whether two sources, of different roots perhaps, read the same streams, in the same order: a position in the one
    says where the other stands. Topics of one name that are known by different ids are not the same."""
    return len(some) == len(others) and all(
        (_is_same(one, other) or _is_same(other, one))
        and not any(other.ids.get(topic, found) != found for topic, found in one.ids.items())
        for one, other in zip(some, others, strict=True)
    )


def _is_same(then: SourceStream, now: SourceStream) -> bool:
    if then.format != _KAFKA:
        return then.format == now.format and _lowered(then.reads) == _lowered(now.reads)
    if then.format != now.format or then.reads.keys() != now.reads.keys():
        return False
    are_same_brokers = bool(_set_of(then, _SERVERS) & _set_of(now, _SERVERS)) or any(
        now.ids.get(topic) == found for topic, found in then.ids.items()
    )
    # Spark reads a topic or a partition that is new from its beginning. One that is left out would be read again from
    # there when it comes back.
    are_all_there = all(_set_of(then, name) <= _set_of(now, name) for name in (_TOPICS, _PARTITIONS))
    return are_same_brokers and are_all_there and then.reads.get(_PATTERN) == now.reads.get(_PATTERN)


def _set_of(stream: SourceStream, name: str) -> set[str]:
    return set(stream.reads.get(name, "").split(",")) - {""}


def described(streams: tuple[SourceStream, ...]) -> str:
    """What a source reads, for people."""
    return " and ".join(
        f"{each.format} ({', '.join(f'{name}={value}' for name, value in each.reads.items())})" for each in streams
    )
