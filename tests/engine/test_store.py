"""A run on a store that is slow, or fails for a while: the control thread never waits for it. Spark is played."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.spark.played import PlayedPipeline, PlayedStore, played
from tidegate.errors import StoreUnavailable
from tidegate.flows.requests import Patience
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.storage.files import Files
from tidegate.storage.inspection import examine
from tidegate.storage.paths import RootPaths

TELLING = ("location", "name_at", "uri", "name_of")
"""Calls that ask nothing of the store."""


class Watched:
    """Files of which somebody hears each call that is about to be made, and may let it fail."""

    def __init__(self, files: Files, before: Callable[[str, str], None]) -> None:
        self._files = files
        self._before = before

    def at(self, folder: str, *, durable: bool = True) -> Files:
        return cast(Files, Watched(self._files.at(folder, durable=durable), self._before))

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._files, method)
        if method in TELLING or not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            arguments = [
                list(each) if method in ("delete", "sync") and not index else each for index, each in enumerate(args)
            ]
            name = str(arguments[0]) if arguments else ""
            self._before(method, name)
            return found(*arguments, **options)

        return call


# -- a store that is slow ---------------------------------------------------------------------------


_SLOW_CALLS = 5


class SlowStore:
    """Its calls, the first of each kind, end only when the sink has committed another batch since: for a control thread
    that waited for them, never."""

    def __init__(self) -> None:
        self._batches = 0
        self._handed_on = threading.Condition()
        self._control = threading.current_thread()
        self.may_store = threading.Event()
        self.may_store.set()
        self.called: Counter[str] = Counter()

    def watch(self, files: Files) -> Files:
        return cast(Files, Watched(files, self._before))

    def _before(self, method: str, name: str) -> None:
        assert threading.current_thread() is not self._control, f"the control thread waits for {method} {name}"
        assert "/snapshots/" not in name or self.may_store.wait(20)
        with self._handed_on:
            self.called[method] += 1
            if self.called[method] > _SLOW_CALLS:
                return  # each batch makes more to be deleted: it would never end
            before = self._batches
            assert self._handed_on.wait_for(lambda: self._batches > before, 20), f"nothing flows during {method} {name}"

    def on_batch(self) -> None:
        with self._handed_on:
            self._batches += 1
            self._handed_on.notify_all()


def flow_until(pipeline: PlayedPipeline, store: SlowStore, condition: Callable[[], bool]) -> None:
    """Batches go through all stages, one after the other, until it is so."""
    sink = pipeline.generation.stages["table"]
    for _ in range(2_000):
        if condition():
            return
        before = sink.progress.batch
        pipeline.one_batch_each()
        assert sink.progress.batch == before + 1
        store.on_batch()
        time.sleep(0.001)
    raise AssertionError("it never came true")


def test_batches_and_barriers_flow_while_the_store_is_slow_with_a_checkpoint(tmp_path: Path) -> None:
    store = SlowStore()
    config = CheckpointConfig(interval_ms=3_600_000, max_retained=1)
    with played(tmp_path, config=config, store=PlayedStore(store.watch)) as pipeline:
        generation = pipeline.generation
        pipeline.one_batch_each()
        store.may_store.clear()
        checkpoint_id = generation.trigger()
        stages = [stage.checkpoints for stage in generation.stages.values()]
        flow_until(pipeline, store, lambda: all(stage.has_cut(checkpoint_id) for stage in stages))
        assert generation.coordinator.missing(checkpoint_id) == generation.stages.keys(), "nothing is stored yet"
        store.may_store.set()
        flow_until(pipeline, store, lambda: generation.is_settled)
        assert generation.completed(checkpoint_id)
        assert store.called.keys() >= {"write", "create", "read_all", "list", "hold", "sync", "delete"}
        shown = pipeline.newest().stages["table"].cut
        assert shown is not None
        assert pipeline.table.batches == list(range(shown + 1))
        flow_until(pipeline, store, lambda: generation.carrier.is_idle)  # else the stop would wait for it


# -- a store that fails -----------------------------------------------------------------------------

MANIFESTS = f"{RootPaths.generation(1)}/manifests"
DECIDING = {
    "mark": ("write", RootPaths.IDS),
    "read log": ("list", RootPaths.DECISIONS),
    "manifest": ("write", MANIFESTS),
    "claim": ("create", RootPaths.DECISIONS),
}
CLEANING = {"deletion": ("delete", f"['{MANIFESTS}")}


class FailingStore:
    """It fails one kind of call, as often as it is told to."""

    def __init__(self, method: str, name: str) -> None:
        self._failing = (method, name)
        self.failures = 0

    def watch(self, files: Files) -> Files:
        return cast(Files, Watched(files, self._before))

    def _before(self, method: str, name: str) -> None:
        if self.failures and (method, name[: len(self._failing[1])]) == self._failing:
            self.failures -= 1
            raise StoreUnavailable(f"the store is away ({method})")


@pytest.mark.parametrize(("method", "name"), (DECIDING | CLEANING).values(), ids=(DECIDING | CLEANING).keys())
def test_what_the_store_did_not_answer_is_asked_again_and_told_once(
    method: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FailingStore(method, name)
    config = CheckpointConfig(interval_ms=3_600_000, max_retained=1)
    with played(tmp_path, config=config, store=PlayedStore(store.watch)) as pipeline:
        pipeline.one_batch_each()
        pipeline.checkpoint()
        pipeline.one_batch_each()
        store.failures = 2
        pipeline.checkpoint()
        assert store.failures == 0
        log = pipeline.root.decisions.read()
        assert [each.checkpoint_id for each in log if isinstance(each, CheckpointCompleted)][-1:] == [2]
        assert log.next_slot == 4, "each is decided once"
        assert pipeline.table.batches == [0, 1]
        examine(pipeline.root.store, log, 2)
        assert pipeline.root.store.names_in(MANIFESTS) == ["ckpt-000002.json"], "it is cleaned up after"
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert told == [f"the store is away ({method}); it is tried again"]


@pytest.mark.parametrize(("method", "name"), DECIDING.values(), ids=DECIDING.keys())
def test_a_store_that_stays_away_ends_the_generation_with_its_words(method: str, name: str, tmp_path: Path) -> None:
    store = FailingStore(method, name)
    with played(tmp_path, store=PlayedStore(store.watch, Patience(give_up_ms=200))) as pipeline:
        pipeline.one_batch_each()
        store.failures = 1_000
        with pytest.raises(StoreUnavailable, match=rf"^the store is away \({method}\) \(tried \d times\)$"):
            pipeline.checkpoint()
        assert pipeline.root.decisions.read().newest is None
        assert pipeline.table.batches == []


def test_what_could_not_be_cleaned_up_is_after_the_next_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FailingStore(*CLEANING["deletion"])
    config = CheckpointConfig(interval_ms=3_600_000, max_retained=1)
    with played(tmp_path, config=config, store=PlayedStore(store.watch, Patience(give_up_ms=60))) as pipeline:
        store.failures = 1_000
        for _ in range(2):
            pipeline.one_batch_each()
            pipeline.checkpoint()
        assert (
            "cleaning up failed and is tried again after the next checkpoint: the store is away (delete)" in caplog.text
        )
        store.failures = 0
        pipeline.one_batch_each()
        pipeline.checkpoint()
        assert pipeline.root.store.names_in(MANIFESTS) == ["ckpt-000003.json"]
