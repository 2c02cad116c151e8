"""Beside a run: whether the topics that its sources read are still those that they read when it was started.

Spark notices when a topic is gone, or is shorter than it was. It does not notice one that was deleted, created anew and
filled again between two of its looks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.errors import RecoveryRefused, StageFailed
from tidegate.spark.sources import existing, going_on, kafka_options
from tidegate.spark.topics import topic_ids, why_unreachable
from tidegate.storage.manifest import StageShape

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOOK_EVERY_S: Final = 15.0


class TopicWatch:
    """Looks on a thread of its own, because a broker may take long to answer. One that does not is asked again."""

    def __init__(self, sources: Mapping[str, DataFrame]) -> None:
        self._frames = sources
        self._options = {name: kafka_options(frame) for name, frame in sources.items()}
        self._options = {name: found for name, found in self._options.items() if any(found)}
        self._found: dict[str, list[dict[str, str]]] = {}
        self._stopped = threading.Event()
        if self._options:
            threading.Thread(target=self._look, name="tidegate-watch", daemon=True).start()

    def _look(self) -> None:
        while not self._stopped.wait(_LOOK_EVERY_S):
            for name, streams in self._options.items():
                jvm = self._frames[name].sparkSession._jvm
                self._found[name] = [topic_ids(jvm, options)[0] if options else {} for options in streams]

    def why_unreachable(self, source: str) -> str | None:
        """Why what a source reads from does not answer, if it does not and can be asked. Takes its time."""
        jvm = self._frames[source].sparkSession._jvm
        reasons = (why_unreachable(jvm, options) for options in self._options.get(source, ()) if options)
        return next((why for why in reasons if why is not None), None)

    def check(self, shape: dict[str, StageShape]) -> None:
        """Take what was found into the shape, so that the next manifest has topics that have come since."""
        while self._found:
            name, found = self._found.popitem()
            then = shape[name].streams
            # One that is not there fails its query, and then the next start, if it does not come back.
            now = tuple(existing(msgspec.structs.replace(each, ids=ids)) for each, ids in zip(then, found, strict=True))
            try:
                streams = going_on(name, "when it was started", then, now)
            except RecoveryRefused as error:
                raise StageFailed(name, "one of its topics was deleted and created anew while it was read") from error
            shape[name] = msgspec.structs.replace(shape[name], streams=streams)

    def stop(self) -> None:
        self._stopped.set()
