"""`tidegate status` and `tidegate checkpoint` on a run that is alive, hangs, or is gone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from tests.cli.harness import TIDEGATE, LiveRun, live_run, make_root, tidegate, wait_until
from tests.spark.played import played
from tidegate.engine.control import Life, Remote, ask_for_checkpoint, look, read_status
from tidegate.engine.status import Observer, StartingStep, StepName
from tidegate.errors import NotRunning, RequestFailed, RootInUse
from tidegate.protocol.coordinator import AbortReason
from tidegate.storage.lock import RootLock, is_held
from tidegate.storage.paths import RootPaths


def taken(run: LiveRun) -> int:
    return run.pipeline.root.decisions.read().last_checkpoint_id


# -- a run that is alive ----------------------------------------------------------------------------


def test_a_live_run_shows_its_stages_and_its_last_checkpoints(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        assert tidegate("checkpoint", "--root", run.root).returncode == 0
        wait_until(lambda: bool((status := read_status(RootPaths(run.root))) and status.checkpoints))
        done = tidegate("status", "--root", run.root)
        assert done.returncode == 0
        assert "pipeline flat is running in process" in done.stdout
        for stage in ("rows", "middle", "table"):
            assert stage in done.stdout
        assert "ckpt-000001" in done.stdout
        found = json.loads(tidegate("status", "--root", run.root, "--json").stdout)
        assert found["life"] == "alive"
        assert found["newest_checkpoint"] == "ckpt-000001"
        assert found["run"]["stages"]["middle"] == {
            "kind": "stage",
            "batch": 0,
            "rows": 1,
            "rows_per_s": found["run"]["stages"]["middle"]["rows_per_s"],
            "lag": 0,
            "watermark_ms": None,
            "held_back_by": None,
            "no_batch": None,
        }
        assert [each["checkpoint"] for each in found["run"]["checkpoints"]] == ["ckpt-000001"]


def test_a_checkpoint_is_taken_when_it_is_asked_for(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        done = tidegate("checkpoint", "--root", run.root)
        assert done.returncode == 0
        assert done.stdout.startswith("ckpt-000001 complete in ")
        assert taken(run) == 1
        found = json.loads(tidegate("checkpoint", "--root", run.root, "--json").stdout)
        assert found["checkpoint"]["checkpoint"] == "ckpt-000002"
        assert found["checkpoint"]["state"] == "complete"
        # Both of the asker's files are gone.
        assert list((run.root / "requests").iterdir()) == []


def test_a_request_waits_for_the_checkpoint_in_progress_and_gets_the_next(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        # The stage has not consumed what lies before the barrier, so the first checkpoint stays in progress.
        segment = run.pipeline.played["rows"].run_batch()
        wait_until(lambda: run.may_read("middle", "rows"))
        run.in_its_thread(run.pipeline.generation.trigger)
        wait_until(lambda: bool((status := read_status(RootPaths(run.root))) and status.in_progress))
        with ThreadPoolExecutor(2) as askers:
            asked = [askers.submit(tidegate, "checkpoint", "--root", run.root, "--json") for _ in range(2)]
            wait_until(lambda: len(list((run.root / "requests").glob("*.request"))) == 2)
            progress = json.loads(tidegate("status", "--root", run.root, "--json").stdout)["run"]["in_progress"]
            assert [each["checkpoint"] for each in progress] == ["ckpt-000001"]
            assert {name: part["progress"] for name, part in progress[0]["stages"].items()} == {
                "rows": "done",
                "middle": "catching_up",
                "table": "waiting",
            }
            assert not any(each.done() for each in asked)
            middle = run.pipeline.played["middle"].run_batch(segment)
            wait_until(lambda: run.may_read("table", "middle"))
            run.pipeline.played["table"].run_batch(middle)
            answers = [json.loads(each.result().stdout) for each in asked]
        assert {answer["checkpoint"]["checkpoint"] for answer in answers} <= {"ckpt-000002", "ckpt-000003"}


def test_a_checkpoint_that_is_aborted_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        run.pipeline.played["rows"].run_batch()  # nobody consumes it: the checkpoint stays in progress
        wait_until(lambda: run.may_read("middle", "rows"))
        with subprocess.Popen(
            [TIDEGATE, "checkpoint", "--root", str(run.root)], stderr=subprocess.PIPE, text=True
        ) as asker:
            generation = run.pipeline.generation
            wait_until(lambda: bool(generation.coordinator.active))

            def abort() -> None:
                checkpoint = generation.coordinator.active[0]
                generation._stop_preparing(checkpoint.checkpoint_id, AbortReason.CANCELLED, "for a test")

            run.in_its_thread(abort)
            _, error = asker.communicate(timeout=60)
        assert asker.returncode == 1
        assert (
            error == "error: ckpt-000001 was aborted: cancelled by the user: for a test; the run goes on, ask again\n"
        )
        wait_until(lambda: bool((status := read_status(RootPaths(run.root))) and status.checkpoints))
        assert "aborted: cancelled by the user: for a test" in tidegate("status", "--root", run.root).stdout


def test_an_asker_gives_up_after_its_timeout_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        run.pipeline.played["rows"].run_batch()
        wait_until(lambda: run.may_read("middle", "rows"))
        done = tidegate("checkpoint", "--root", run.root, "--timeout", "300ms")
        assert done.returncode == 1
        assert "has not completed a checkpoint in 0.3 s" in done.stderr
        assert list((run.root / "requests").glob("*.request")) == []
    assert tidegate("checkpoint", "--root", run.root, "--timeout", "soon").returncode == 2


def test_a_request_that_a_starting_run_removes_is_made_again(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        run.stop()
        with ThreadPoolExecutor(1) as asker:
            asked = asker.submit(ask_for_checkpoint, RootPaths(run.root), 60)
            wait_until(lambda: bool(list((run.root / "requests").glob("*.request"))))
            with RootLock(tmp_path / "another") as lock, Remote(RootPaths(run.root), "flat", lock) as remote:
                again = LiveRun(run.pipeline, remote)
                again.start()
                assert asked.result().checkpoint == "ckpt-000001"
                again.stop()


def test_a_run_that_cannot_be_asked_is_told_in_one_line(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    (root / "requests").touch()
    with RootLock(root / "lock"):
        done = tidegate("checkpoint", "--root", root)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the run cannot be asked for a checkpoint: ")
    assert len(done.stderr.splitlines()) == 1


# -- a run that is not ------------------------------------------------------------------------------


def test_without_a_run_there_is_nobody_to_take_a_checkpoint(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    done = tidegate("checkpoint", "--root", root)
    assert done.returncode == 6
    assert done.stderr.startswith("error: no run is alive on ")
    assert not (root / "requests").exists()


def test_a_run_that_ends_while_it_is_asked_answers_first(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as asker:
        with live_run(tmp_path) as run:
            run.pipeline.played["rows"].run_batch()
            wait_until(lambda: run.may_read("middle", "rows"))
            asked = asker.submit(ask_for_checkpoint, RootPaths(run.root), 60)
            wait_until(lambda: bool(run.pipeline.generation.coordinator.active))
        with pytest.raises(RequestFailed, match="the run has ended"):
            asked.result()


def test_a_run_that_is_killed_while_it_is_asked_is_noticed(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    with ThreadPoolExecutor(1) as asker:
        with RootLock(root / "lock"):
            asked = asker.submit(ask_for_checkpoint, RootPaths(root), 60)
            wait_until(lambda: (root / "requests").exists() and bool(list((root / "requests").glob("*.request"))))
        with pytest.raises(NotRunning, match="ended before"):
            asked.result()


def test_a_run_that_ends_when_nothing_more_fits_on_the_disk_leaves_word_all_the_same(tmp_path: Path) -> None:
    paths = RootPaths(make_root(tmp_path, checkpoints=1))
    in_the_way = paths.root / f".status.json.{os.getpid()}.tmp"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(paths.root / "decisions"))
    with RootLock(paths.lock) as lock:
        remote = Remote(paths, "flat", lock).__enter__()
        in_the_way.mkdir()
        remote.restarting("the first time")
        assert look(paths)[0] is Life.ALIVE
        assert "restarting" in (said := tidegate("status", "--root", paths.root).stdout)
        assert "the first time" in said
        remote.__exit__(OSError, full, None)
    said = tidegate("status", "--root", paths.root).stdout
    assert "is not running: the last run failed at" in said
    assert f"{paths.root / 'decisions'}: No space left on device (" in said

    in_the_way.rmdir()
    with RootLock(paths.lock) as lock, Remote(paths, "flat", lock) as remote:
        remote.ended_because = "it was told to stop"
    assert "ended well" in tidegate("status", "--root", paths.root).stdout


def test_how_the_last_run_ended_is_told(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=2)
    paths = RootPaths(root)
    done = tidegate("status", "--root", root)
    assert done.returncode == 6
    assert "no run has left word" in done.stdout
    assert "goes on from ckpt-000002" in done.stdout

    with RootLock(paths.lock) as lock, Remote(paths, "flat", lock) as remote:
        remote.ended_because = "it was told to stop"
    done = tidegate("status", "--root", root)
    assert done.returncode == 6
    assert "ended well" in done.stdout
    assert "because it was told to stop" in done.stdout

    with pytest.raises(ValueError, match="for a test"), RootLock(paths.lock) as lock, Remote(paths, "flat", lock):
        raise ValueError("broken [for a test]")
    assert "failed at" in (said := tidegate("status", "--root", root).stdout)
    assert "broken [for a test]" in said

    # A run that is killed says nothing more: its last words are of one that was at work.
    _write(paths, "running")
    assert "was killed" in tidegate("status", "--root", root).stdout


def _write(paths: RootPaths, state: str, **fields: object) -> None:
    status = {**msgspec.to_builtins(Observer("flat").status), "state": state, **fields}
    paths.status.write_bytes(msgspec.json.encode(status))


@pytest.mark.parametrize(
    ("whole", "damaged"),
    [(b"{", b""), (b"flat", b"\xff"), (b":00", b" past"), (b"+00:00", b"")],
    ids=["no JSON", "not UTF-8", "no time", "a time of no zone"],
)
def test_a_status_that_cannot_be_understood_is_as_good_as_none(tmp_path: Path, whole: bytes, damaged: bytes) -> None:
    paths = RootPaths(tmp_path)
    _write(paths, "running")
    paths.status.write_bytes(paths.status.read_bytes().replace(whole, damaged))
    assert read_status(paths) is None
    # Nor does it keep a run from saying what is.
    with RootLock(paths.lock) as lock, Remote(paths, "flat", lock):
        assert read_status(paths) is not None


def test_a_run_that_says_nothing_for_long_hangs_and_since_when_is_told(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    paths = RootPaths(root)
    with RootLock(paths.lock):
        _write(paths, "running", updated_at="2026-01-02T03:04:05+00:00")
        done = tidegate("status", "--root", root)
        assert done.returncode == 7
        assert "last heard of at 2026-01-02 03:04:05 UTC" in " ".join(done.stdout.split())
        assert "--take-over" in done.stdout
        assert "when it was running" in " ".join(done.stdout.split())
        # What an earlier run has left says nothing of this one.
        _write(paths, "failed", updated_at="2026-01-02T03:04:05+00:00")
        done = tidegate("status", "--root", root)
        assert done.returncode == 0
        assert "is starting" in done.stdout


def test_what_has_changed_since_the_checkpoint_is_told_of_a_run_that_is_alive(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    paths = RootPaths(root)
    change = "stage 'counts': window(ts) is 5 minutes, was 1 minute at ckpt-000001: open windows keep their length"
    with RootLock(paths.lock):
        _write(paths, "running", changes=(change,))
        assert f"changed: {change}" in " ".join(tidegate("status", "--root", root).stdout.split())


@pytest.mark.parametrize("state", ["starting", "restarting"])
def test_a_run_may_take_its_time_to_start_but_not_for_ever(tmp_path: Path, state: str) -> None:
    paths = RootPaths(tmp_path)
    with RootLock(paths.lock):
        for minutes, life in ((4, Life.ALIVE), (6, Life.HANGING)):
            _write(paths, state, updated_at=(datetime.now(UTC) - timedelta(minutes=minutes)).isoformat())
            assert look(paths)[0] is life


@pytest.mark.parametrize(("name", "patience"), [("making_session", 2), ("laying_out", 5), ("fetching_packages", 5)])
def test_a_run_that_starts_tells_what_it_does_and_hangs_if_that_takes_too_long(
    tmp_path: Path, name: StepName, patience: int
) -> None:
    root = make_root(tmp_path, checkpoints=1)
    paths = RootPaths(root)
    with RootLock(paths.lock) as lock, Remote(paths, "flat", lock) as remote:
        for minutes, code in ((patience - 1, 0), (patience + 1, 7)):
            since = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()
            remote.begin(StartingStep(step=name, since=since, stage="middle", number=2, of=3))
            done = tidegate("status", "--root", root)
            assert done.returncode == code, done.stdout
            assert ": middle, 2 of 3" in done.stdout
            assert (f", for {minutes} min" in done.stdout) is (code == 0)
        found = json.loads(tidegate("status", "--root", root, "--json").stdout)["run"]["step"]
        assert (found["step"], found["stage"], found["number"], found["of"]) == (name, "middle", 2, 3)
        # While Spark's process starts, what that writes is a sign of life too.
        paths.spark_log.touch()
        assert look(paths)[0] is (Life.HANGING if name == "laying_out" else Life.ALIVE)


def test_a_run_that_never_speaks_hangs_since_it_took_the_lock(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    paths = RootPaths(root)
    six_minutes_ago = time.time() - 360
    with RootLock(paths.lock):
        assert look(paths)[0] is Life.ALIVE
        os.utime(paths.lock, (six_minutes_ago, six_minutes_ago))
        assert look(paths)[0] is Life.HANGING
        # The last words of an earlier run, and the process that holds the root now.
        _write(paths, "finished")
        os.utime(paths.status, (six_minutes_ago, six_minutes_ago))
        done = tidegate("status", "--root", root)
        assert done.returncode == 7
        assert f"pipeline flat hangs: process {os.getpid()} holds the root" in done.stdout
        assert "ago, when it was starting" in " ".join(done.stdout.split())
        # Of a run that says what this version does not understand, at least the time is known.
        paths.status.write_bytes(b'{"of another": "version"}')
        assert look(paths)[0] is Life.ALIVE


def test_a_run_that_was_taken_over_does_not_speak_for_its_successor(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        paths = RootPaths(run.root)
        _write(paths, "running", generation=7)
        run.in_its_thread(lambda: run.remote.restarting("it is late"))
        status = read_status(paths)
        assert status is not None
        assert (status.generation, status.state) == (7, "running")
    status = read_status(paths)
    assert status is not None
    assert status.generation == 7


def test_a_run_that_took_over_has_the_lock_once_the_other_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with RootLock(path, take_over=True) as old:
        with RootLock(path, take_over=True) as new:
            assert not new.take_if_free()
            old.__exit__(None, None, None)
            assert new.take_if_free()
            assert is_held(path)
        assert not is_held(path)


def test_whoever_asks_whether_a_run_is_alive_does_not_keep_one_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with ThreadPoolExecutor(1) as askers:
        stop = False

        def ask_without_end() -> None:
            while not stop:
                is_held(path)

        asking = askers.submit(ask_without_end)
        try:
            for _ in range(200):
                with RootLock(path):
                    pass
            with RootLock(path), pytest.raises(RootInUse), RootLock(path):
                pass
        finally:
            stop = True
        asking.result()


def test_a_status_that_cannot_be_written_does_not_fail_the_run(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        paths = pipeline.root.paths
        paths.status.mkdir()
        with RootLock(paths.lock) as lock, Remote(paths, "flat", lock) as remote:
            pipeline.one_batch_each()
            assert remote.update(pipeline.generation).stages["rows"].rows == 1


def test_a_lock_that_cannot_be_taken_later_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: RootLock) -> bool:
        raise PermissionError(13, "Permission denied")

    with played(tmp_path) as pipeline:
        paths = pipeline.root.paths
        with RootLock(paths.lock) as lock, Remote(paths, "flat", lock) as remote:
            monkeypatch.setattr(RootLock, "take_if_free", refuse)
            monkeypatch.setattr("tidegate.engine.control._WRITE_EVERY_S", 0.0)
            assert remote.update(pipeline.generation).state == "running"
