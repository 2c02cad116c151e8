"""The ids of Kafka's topics: a topic that was deleted and created anew has another one.

Asked of the broker with the Kafka client and the settings of the source itself, in Spark's JVM. A broker that does not
answer in time holds up no start: then the ids are not known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

_SECONDS: Final = 10
_SETTING: Final = "kafka."
_NO_ID: Final = "AAAAAAAAAAAAAAAAAAAAAA"  # of brokers that know none
_LOOKS_FOR_MISSING: Final = 2
_SILENT: Final = f"no answer within {_SECONDS} s"
_TIMED_OUT: Final = "TimeoutException"
_UNKNOWN_TOPIC: Final = "UnknownTopicOrPartitionException"


def assigned_partitions(options: Mapping[str, str]) -> dict[str, list[int]]:
    """Those that a source names one by one. What cannot be read Spark itself refuses, when it starts the source."""
    try:
        return msgspec.json.decode(options.get("assign", "{}"), type=dict[str, list[int]])
    except msgspec.MsgspecError:
        return {}


def topic_ids(jvm: Any, options: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """The ids of the topics, empty of those that there are not, and why they are not known, if they are not.

    The names of the source's options are in lower case.
    """
    found: dict[str, str] = {}
    why: list[str] = []

    def ask() -> None:
        try:
            found.update(_ask(jvm, options))
            why.clear()
        except Exception as error:
            why[:] = [_kind(error)]

    why.append(_SILENT)
    # On a thread of its own: finding a host and logging in may take longer than the client was told to wait.
    asking = threading.Thread(target=ask, name="tidegate-topics", daemon=True)
    asking.start()
    asking.join(_SECONDS + 1)
    return (dict(found), None) if not why else ({}, why[0])


def why_unreachable(jvm: Any, options: Mapping[str, str]) -> str | None:
    """Why a source's brokers do not tell of its topics; None if they do."""
    _, why = topic_ids(jvm, options)
    return None if why is None else no_answer(options, why)


def no_answer(options: Mapping[str, str], why: str) -> str:
    """What it means that the ids are not known, by `topic_ids`."""
    servers = options.get("kafka.bootstrap.servers", "")
    if why in (_TIMED_OUT, _SILENT):
        return f"no broker of {servers} answers"
    return f"the brokers of {servers} give no answer ({why})"


def _ask(jvm: Any, options: Mapping[str, str]) -> dict[str, str]:
    settings = {name.removeprefix(_SETTING): value for name, value in options.items() if name.startswith(_SETTING)}
    limit = str(_SECONDS * 1000)
    settings |= {"default.api.timeout.ms": limit, "request.timeout.ms": limit}
    given = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(settings)
    updater = jvm.org.apache.spark.kafka010.KafkaConfigUpdater("source", given)  # adds Spark's own tokens
    admin = jvm.org.apache.kafka.clients.admin.Admin.create(updater.setAuthenticationConfigIfNeeded().build())
    try:
        ids = dict(_ids(admin, _topics(jvm, admin, options)))
        for _ in range(_LOOKS_FOR_MISSING):
            if all(ids.values()):
                break
            # A broker that has just been started may not know them yet.
            time.sleep(1)
            ids = dict(_ids(admin, list(ids)))
        return ids
    finally:
        admin.close(jvm.java.time.Duration.ZERO)


def _topics(jvm: Any, admin: Any, options: Mapping[str, str]) -> list[str]:
    pattern = options.get("subscribepattern")
    if pattern is None:
        named = [topic for each in options.get("subscribe", "").split(",") if (topic := each.strip())]
        return named or list(assigned_partitions(options))
    names = jvm.java.util.HashSet(admin.listTopics().names().get())
    names.removeIf(jvm.java.util.regex.Pattern.compile(pattern).asMatchPredicate().negate())
    return list(map(str, names))


def _ids(admin: Any, topics: list[str]) -> Iterable[tuple[str, str]]:
    answers = admin.describeTopics(topics).topicNameValues()
    for topic in topics:
        try:
            found = str(answers.get(topic).get().topicId().toString())
        except Exception as error:
            if _kind(error) != _UNKNOWN_TOPIC:
                raise
            found = ""
        if found != _NO_ID:
            yield topic, found


def _kind(error: Exception) -> str:
    """Of a failure, and no more: what else it says may name what was given to log in with."""
    failed = getattr(error, "java_exception", None)
    return type(error).__name__ if failed is None else str((failed.getCause() or failed).getClass().getSimpleName())
