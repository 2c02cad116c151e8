"""What holds of what a run tells and is told through files, and not of a mutant. See `properties.py`."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tests.spark.played import played
from tests.storage.troubled import TroubledFolder
from tidegate.engine.control import Remote
from tidegate.engine.requests import Asked, StopRun, TakeCheckpoint
from tidegate.engine.status_files import read_status
from tidegate.errors import NotRunning, RequestFailed
from tidegate.storage.lock import RootLock
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import as_given


@contextmanager
def _root() -> Iterator[tuple[TroubledFolder, RootLock]]:
    with tempfile.TemporaryDirectory(prefix="tidegate-played-") as folder, RootLock(Path(folder) / "lock") as lock:
        yield TroubledFolder(Path(folder)), lock


def _comes_true(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def _ask(files: TroubledFolder, name: str, request: StopRun | TakeCheckpoint) -> None:
    files.write(f"{RootPaths.REQUESTS}/{name}.request", msgspec.json.encode(request))


def a_run_that_cannot_write_its_status_still_says_how_it_ended() -> None:
    with _root() as (files, lock):
        with Remote(files, "flat", lock) as remote:
            _comes_true(lambda: read_status(files) is not None, "its reserve is made by then")
            files.is_full = True
            remote.ended_because = "it was told to stop"
        said = read_status(files)
        assert said is not None
        assert said.state == "finished"


def the_control_thread_does_not_wait_for_the_store() -> None:
    with _root() as (files, lock), Remote(files, "flat", lock) as remote:
        _comes_true(lambda: read_status(files) is not None, "it says something")
        files.moves.clear()
        done = threading.Event()

        def restart() -> None:
            remote.restarting("for a test")
            done.set()

        control = threading.Thread(target=restart, daemon=True)
        control.start()
        is_done = done.wait(2)
        files.moves.set()
        control.join()  # a mutant's still writes into the folder, which is removed next
        assert is_done


def a_request_that_is_older_than_the_run_is_not_for_it() -> None:
    with _root() as (files, lock):
        _ask(files, "older", StopRun())
        told = threading.Event()
        with Remote(files, "flat", lock, lambda _: told.set()):
            _comes_true(lambda: told.is_set() or files.names_in(RootPaths.REQUESTS) == [], "it is removed")
        assert not told.is_set()


def a_request_is_not_made_again_to_another_run() -> None:
    with _root() as (files, _):
        paths = RootPaths(Path(files.location()))
        with Asked(as_given(paths.root), StopRun(), "stop", 0.2) as asked:
            paths.lock.write_text("1", encoding="utf-8")  # another process holds it now
            with suppress(NotRunning, RequestFailed):
                asked.answer()
            assert files.names_in(RootPaths.REQUESTS) == []


def a_checkpoint_that_a_generation_died_upon_is_not_begun_in_the_next() -> None:
    with tempfile.TemporaryDirectory(prefix="tidegate-played-") as folder, played(Path(folder)) as pipeline:
        files = TroubledFolder(pipeline.root.paths.root)
        generation = pipeline.generation
        with RootLock(Path(folder) / "lock") as lock, Remote(files, "flat", lock) as remote:
            _comes_true(lambda: read_status(files) is not None, "it hears")
            pipeline.played["rows"].run_batch()  # which nobody reads, so that the checkpoint stays in progress
            generation.poll()
            _ask(files, "asked", TakeCheckpoint())
            deadline = time.monotonic() + 10
            while not generation.coordinator.active:
                assert time.monotonic() < deadline
                remote.serve(generation)
            generation.cancel()
            generation.generation += 1
            for _ in range(3):
                remote.serve(generation)
            assert not generation.coordinator.active
