"""`tidegate status` on a run that is alive, hangs, or is gone."""

from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from tests.cli.harness import (
    ended_checkpoint,
    live_run,
    make_root,
    said,
    seen,
    speaking,
    tidegate,
    wait_until,
    wait_until_said,
)
from tests.spark.played import played
from tests.storage.troubled import TroubledFolder
from tidegate.engine.control import Life, Remote
from tidegate.engine.status import (
    CutBecause,
    Observer,
    StagePart,
    StartingStep,
    StepName,
    now,
    part_after_cut,
    part_of,
)
from tidegate.errors import RootInUse
from tidegate.protocol.aligner import AlignmentProgress, Cut, CutCause, InFlight
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.messages import Barrier
from tidegate.storage.lock import RootLock, is_held
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Pace

# -- a run that is alive ----------------------------------------------------------------------------


def test_a_live_run_shows_its_stages_and_its_last_checkpoints(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        assert tidegate("checkpoint", "--root", run.root).returncode == 0
        wait_until(lambda: bool((status := said(run.root)) and status.checkpoints))
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
            "lags": {},
            "watermark_ms": None,
            "held_back_by": None,
            "no_batch": None,
            "has_event_time": False,
            "chained_into": None,
            "held": [],
            "batches": 0,  # the played Spark has a clock of its own
            "batches_ms": 0,
        }
        assert [each["checkpoint"] for each in found["run"]["checkpoints"]] == ["ckpt-000001"]


# -- a run that is not ------------------------------------------------------------------------------


def test_a_run_that_ends_when_nothing_more_fits_on_the_disk_leaves_word_all_the_same(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    files = TroubledFolder(root)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root / "decisions"))
    with RootLock(root / "lock") as lock:
        remote = Remote(files, "flat", lock).__enter__()
        wait_until_said(root, remote)
        files.is_full = True
        remote.restarting("the first time")
        wait_until(lambda: (status := said(root)) is not None and status.state == "restarting")
        assert seen(root) is Life.ALIVE
        assert "restarting" in (told := tidegate("status", "--root", root).stdout)
        assert "the first time" in told
        remote.__exit__(OSError, full, None)
    told = tidegate("status", "--root", root).stdout
    assert "is not running: the last run failed at" in told
    assert f"{root / 'decisions'}: No space left on device (" in told

    with speaking(root) as remote:
        remote.ended_because = "it was told to stop"
    assert "ended well" in tidegate("status", "--root", root).stdout


def test_how_the_last_run_ended_is_told(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=2)
    paths = RootPaths(root)
    done = tidegate("status", "--root", root)
    assert done.returncode == 6
    assert "no run has left word" in done.stdout
    assert "goes on from ckpt-000002" in done.stdout

    with speaking(paths.root) as remote:
        remote.ended_because = "it was told to stop"
    done = tidegate("status", "--root", root)
    assert done.returncode == 6
    assert "ended well" in done.stdout
    assert "because it was told to stop" in done.stdout

    with pytest.raises(ValueError, match="for a test"), speaking(paths.root):
        raise ValueError("broken [for a test]")
    assert "failed at" in (told := tidegate("status", "--root", root).stdout)
    assert "broken [for a test]" in told

    # A run that is killed says nothing more: its last words are of one that was at work.
    _write(paths, "running")
    assert "was killed" in tidegate("status", "--root", root).stdout


def _write(paths: RootPaths, state: str, **fields: object) -> None:
    status = {**msgspec.to_builtins(Observer("flat").status), "state": state, **fields}
    (paths.root / RootPaths.STATUS).write_bytes(msgspec.json.encode(status))


@pytest.mark.parametrize(
    ("whole", "damaged"),
    [(b"{", b""), (b"flat", b"\xff"), (b":00", b" past"), (b"+00:00", b"")],
    ids=["no JSON", "not UTF-8", "no time", "a time of no zone"],
)
def test_a_status_that_cannot_be_understood_is_as_good_as_none(tmp_path: Path, whole: bytes, damaged: bytes) -> None:
    paths = RootPaths(tmp_path)
    _write(paths, "running")
    (paths.root / RootPaths.STATUS).write_bytes(paths.absolute(RootPaths.STATUS).read_bytes().replace(whole, damaged))
    assert said(paths.root) is None
    # Nor does it keep a run from saying what is.
    with speaking(paths.root) as remote:
        wait_until_said(paths.root, remote)


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
            assert seen(paths.root) is life


@pytest.mark.parametrize(("name", "patience"), [("making_session", 2), ("laying_out", 5), ("fetching_packages", 5)])
def test_a_run_that_starts_tells_what_it_does_and_hangs_if_that_takes_too_long(
    tmp_path: Path, name: StepName, patience: int
) -> None:
    root = make_root(tmp_path, checkpoints=1)
    paths = RootPaths(root)
    with speaking(paths.root) as remote:
        for minutes, code in ((patience - 1, 0), (patience + 1, 7)):
            since = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()
            remote.begin(StartingStep(step=name, since=since, stage="middle", number=2, of=3))
            wait_until_said(root, remote)
            done = tidegate("status", "--root", root)
            assert done.returncode == code, done.stdout
            assert ": middle, 2 of 3" in done.stdout
            assert (f", for {minutes} min" in done.stdout) is (code == 0)
        found = json.loads(tidegate("status", "--root", root, "--json").stdout)["run"]["step"]
        assert (found["step"], found["stage"], found["number"], found["of"]) == (name, "middle", 2, 3)
        # While Spark's process starts, what that writes is a sign of life too.
        paths.spark_log.touch()
        assert seen(paths.root) is (Life.HANGING if name == "laying_out" else Life.ALIVE)


def test_a_run_that_never_speaks_hangs_since_it_took_the_lock(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    paths = RootPaths(root)
    six_minutes_ago = time.time() - 360
    with RootLock(paths.lock):
        assert seen(paths.root) is Life.ALIVE
        os.utime(paths.lock, (six_minutes_ago, six_minutes_ago))
        assert seen(paths.root) is Life.HANGING
        # The last words of an earlier run, and the process that holds the root now.
        _write(paths, "finished", updated_at=datetime.fromtimestamp(six_minutes_ago, UTC).isoformat())
        done = tidegate("status", "--root", root)
        assert done.returncode == 7
        assert f"pipeline flat hangs: process {os.getpid()} holds the root" in done.stdout
        assert "ago, when it was starting" in " ".join(done.stdout.split())
        # Of a run that says what this version does not understand, at least the time is known.
        (paths.root / RootPaths.STATUS).write_text(f'{{"of another": "version", "updated_at": "{now()}"}}')
        assert seen(paths.root) is Life.ALIVE


def test_a_run_that_was_taken_over_does_not_speak_for_its_successor(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        paths = RootPaths(run.root)
        run.at_its_desk(lambda: _write(paths, "running", generation=7))
        run.in_its_thread(lambda: run.remote.restarting("it is late"))
        assert tidegate("checkpoint", "--root", run.root, "--timeout", "500ms").returncode == 1, (
            "nor does it hear for it"
        )
        status = said(paths.root)
        assert status is not None
        assert (status.generation, status.state) == (7, "running")
    status = said(paths.root)
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
        (paths.root / RootPaths.STATUS).mkdir()
        with speaking(paths.root) as remote:
            pipeline.one_batch_each()
            assert remote.update(pipeline.generation).stages["rows"].rows == 1


def test_a_lock_that_cannot_be_taken_later_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: RootLock) -> bool:
        raise PermissionError(13, "Permission denied")

    with played(tmp_path) as pipeline:
        paths = pipeline.root.paths
        with speaking(paths.root) as remote:
            monkeypatch.setattr(RootLock, "take_if_free", refuse)
            monkeypatch.setattr(remote._desk, "_pace", Pace(say_every_ms=0))
            assert remote.update(pipeline.generation).state == "running"


# -- why a checkpoint is unaligned ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "is_asked", "told"),
    [
        (CutCause.ALIGNED, True, "aligned"),
        (CutCause.TIMEOUT, False, "timeout"),
        (CutCause.ALWAYS, True, "always"),
        (CutCause.FORCED, True, "asked"),
        (CutCause.FORCED, False, "upstream"),
    ],
)
def test_a_cut_that_its_barrier_forced_is_told_by_who_has_put_that_onto_the_barrier(
    cause: CutCause, is_asked: bool, told: CutBecause
) -> None:
    assert part_of(StageReport("joined", 1, 1, 1, 0, cause=cause), is_asked=is_asked).cut_because == told
    cut = Cut(Barrier(1, 1), 0, {}, cause, 0)
    assert part_after_cut(cut, None, (), is_asked=is_asked).cut_because == told


def test_a_checkpoint_that_is_unaligned_names_the_stages_that_it_began_with() -> None:
    causes: dict[str, CutBecause] = {"a": "timeout", "b": "upstream", "c": "timeout", "d": "timeout", "e": "aligned"}
    parts = {name: StagePart(progress="done", cut_because=cause) for name, cause in causes.items()}
    checkpoint = msgspec.structs.replace(ended_checkpoint(1), aligned=False, stages=parts)
    assert checkpoint.alignment == "unaligned (timeout at a, c and 1 more)"
    assert msgspec.structs.replace(checkpoint, stages={}).alignment == "unaligned", "its manifest is damaged"
    assert msgspec.structs.replace(checkpoint, aligned=True).alignment == "aligned", "nothing was in flight in the end"


def test_a_stage_that_was_cut_and_waits_for_a_late_barrier_is_recording_what_comes_before_it() -> None:
    cut = Cut(Barrier(1, 1), 4, {}, CutCause.TIMEOUT, 30_000, over_bound=True)
    part = part_after_cut(cut, AlignmentProgress(frozenset({"b"}), 0, 500, over_bound=True), (), is_asked=False)
    assert (part.progress, part.waits_for, part.told) == ("recording", ("b",), "recording until b")
    assert (part.in_flight_bytes, part.alignment_ms, part.over_bound) == (500, 30_000, True)
    part = part_after_cut(cut, None, [InFlight("b", 0, 2, 700)], is_asked=False)
    assert (part.progress, part.in_flight_bytes) == ("storing", 700)
