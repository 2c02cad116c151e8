"""What older checkpoints have kept is read beside a run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.played import PlayedPipeline, played
from tidegate.engine.rereading import Rereading
from tidegate.storage.inspection import read_manifest, references
from tidegate.storage.manifest import Manifest


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[PlayedPipeline]:
    """With three checkpoints, all of them retained."""
    with played(tmp_path) as pipeline:
        for _ in range(3):
            for _ in range(2):
                pipeline.one_batch_each()
            pipeline.checkpoint()
        yield pipeline


def manifest_of(pipeline: PlayedPipeline, checkpoint_id: int) -> Manifest:
    record = pipeline.root.decisions.read().completed(checkpoint_id)
    assert record is not None
    return read_manifest(pipeline.root.store, record)


def only_of(pipeline: PlayedPipeline, checkpoint_id: int) -> Path:
    """A file that this checkpoint alone refers to."""
    store = pipeline.root.store
    others = (references(store, manifest_of(pipeline, each)) for each in (1, 2, 3) if each != checkpoint_id)
    named = references(store, manifest_of(pipeline, checkpoint_id)).difference(*others)
    return pipeline.root.paths.absolute(min(named))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # by its other names it stays whole
    path.write_bytes(data)


def test_what_is_whole_is_not_told(pipeline: PlayedPipeline) -> None:
    assert list(Rereading(pipeline.root.store, pipeline.newest()).damaged()) == []


def test_a_changed_file_of_an_older_checkpoint_is_told_with_that_one_alone(
    pipeline: PlayedPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = only_of(pipeline, 2)
    flip(damaged)
    reading = Rereading(pipeline.root.store, pipeline.newest())
    with caplog.at_level(logging.WARNING, "tidegate"):
        reading.start()
        for thread in threading.enumerate():
            if thread.name == "tidegate-rereading":
                thread.join(20)
    (told,) = caplog.messages
    assert told.startswith("ckpt-000002, which is retained, can no longer be restored: ")
    assert f"{pipeline.root.paths.relative(damaged)} of stage" in told
    assert "checksum differs" in told


def test_a_manifest_that_is_gone_is_told(pipeline: PlayedPipeline) -> None:
    pipeline.root.paths.absolute(pipeline.root.paths.manifest(1, 1)).unlink()
    ((checkpoint_id, damage),) = Rereading(pipeline.root.store, pipeline.newest()).damaged()
    assert (checkpoint_id, "is gone" in damage) == (1, True)


def test_what_the_run_removes_meanwhile_is_no_damage(pipeline: PlayedPipeline) -> None:
    """The record of the next checkpoint drops the first one, before its files are deleted."""
    base = pipeline.newest()
    reading = Rereading(pipeline.root.store, base).damaged()
    flip(only_of(pipeline, 2))
    assert next(reading)[0] == 2
    pipeline.one_batch_each()
    pipeline.checkpoint()
    assert 1 not in pipeline.root.decisions.read().retained
    assert list(reading) == []


def test_the_one_that_the_run_starts_from_was_read_before(pipeline: PlayedPipeline) -> None:
    flip(only_of(pipeline, 3))
    assert list(Rereading(pipeline.root.store, pipeline.newest()).damaged()) == []


def test_a_stop_ends_it(pipeline: PlayedPipeline) -> None:
    flip(only_of(pipeline, 1))
    reading = Rereading(pipeline.root.store, pipeline.newest())
    reading.stop()
    assert list(reading.damaged()) == []
