"""`tidegate checkpoint`, `cancel` and `stop`: what a run that is alive is asked for, and what becomes of it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.harness import LiveRun, in_terminal, live_run, make_root, said, tidegate, wait_until, wait_until_said
from tests.cli.strict import answered
from tests.spark.played import ON_DEMAND, played
from tests.storage.troubled import TroubledFolder
from tidegate.cli.answers import CancelledAnswer, ErrorAnswer, StoppedAnswer, TakenAnswer
from tidegate.engine.control import Remote
from tidegate.engine.requests import (
    Answer,
    Request,
    StopRun,
    TakeCheckpoint,
    ask_for_checkpoint,
    ask_to_cancel,
    ask_to_stop,
)
from tidegate.engine.status import StartingStep, now
from tidegate.engine.status_files import read_status
from tidegate.engine.stopping import Stop
from tidegate.errors import NotRunning, RequestFailed
from tidegate.protocol.config import AlignmentConfig
from tidegate.protocol.coordinator import Phase
from tidegate.storage.folder import Folder
from tidegate.storage.lock import RootLock, is_held
from tidegate.storage.memory import Memory
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Place, as_given

COMMANDS = ("checkpoint", "cancel", "stop")


def place(root: Path) -> Place:
    """Where a run on a root is asked."""
    return as_given(root)


def taken(run: LiveRun) -> int:
    return run.pipeline.root.decisions.read().last_checkpoint_id


def requests(root: Path) -> list[str]:
    return Folder(root).names_in(RootPaths.REQUESTS)


def write_request(root: Path, name: str, request: Request | dict[str, Any]) -> None:
    Folder(root).write(f"{RootPaths.REQUESTS}/{name}.request", msgspec.json.encode(request))


def answer_to(root: Path, name: str) -> Answer | None:
    data = Folder(root).read(f"{RootPaths.REQUESTS}/{name}.answer")
    return None if data is None else msgspec.json.decode(data, type=Answer)


# -- a checkpoint -----------------------------------------------------------------------------------


def test_a_checkpoint_is_taken_when_it_is_asked_for(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        done = tidegate("checkpoint", "--root", run.root)
        assert done.returncode == 0
        assert done.stdout.startswith("ckpt-000001 complete in ")
        assert taken(run) == 1
        full = answered(tidegate("checkpoint", "--root", run.root, "--full", "--json").stdout)
        assert isinstance(full, TakenAnswer)
        assert (full.checkpoint.checkpoint, full.checkpoint.state) == ("ckpt-000002", "complete")
        assert full.checkpoint.full
        assert full.checkpoint.new_bytes == full.checkpoint.total_bytes, "everything was stored anew"
        plain = ask_for_checkpoint(place(run.root), 60)
        assert not plain.full
        assert plain.new_bytes == 0
        # Both of the asker's files are gone.
        assert requests(run.root) == []


def test_an_unaligned_checkpoint_waits_for_no_stage_but_only_where_stages_may_be_cut_so(tmp_path: Path) -> None:
    wanted = TakeCheckpoint(full=True, unaligned=True)
    with live_run(tmp_path / "aligned") as run, pytest.raises(RequestFailed, match="every stage of this run aligns"):
        ask_for_checkpoint(place(run.root), 60, wanted)
    alignment = AlignmentConfig(unaligned="on_timeout", timeout_ms=3_000_000)
    with live_run(tmp_path / "on demand", config=msgspec.structs.replace(ON_DEMAND, alignment=alignment)) as run:
        run.hold_up()
        found = answered(tidegate("checkpoint", "--root", run.root, "--full", "--unaligned", "--json").stdout)
        assert isinstance(found, TakenAnswer)
        assert (found.checkpoint.aligned, found.checkpoint.full) == (False, True)
        assert found.checkpoint.in_flight_bytes


def test_a_request_waits_for_the_checkpoint_in_progress_and_gets_the_next(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        run.hold_up()
        run.in_its_thread(run.pipeline.generation.trigger)
        wait_until(lambda: bool((status := said(run.root)) and status.in_progress))
        with ThreadPoolExecutor(3) as askers:
            asked = [askers.submit(tidegate, "checkpoint", "--root", run.root, "--json") for _ in range(2)]
            full = askers.submit(ask_for_checkpoint, place(run.root), 60, TakeCheckpoint(full=True))
            wait_until(lambda: len(requests(run.root)) == 3)
            progress = json.loads(tidegate("status", "--root", run.root, "--json").stdout)["run"]["in_progress"]
            assert [each["checkpoint"] for each in progress] == ["ckpt-000001"]
            assert {name: part["progress"] for name, part in progress[0]["stages"].items()} == {
                "rows": "done",
                "middle": "catching_up",
                "table": "waiting",
            }
            assert not any(each.done() for each in asked)
            run.let_go()
            names = {json.loads(each.result().stdout)["checkpoint"]["checkpoint"] for each in asked}
            assert full.result().full
            assert full.result().checkpoint not in names, "who wants something else gets another one"
        assert names | {full.result().checkpoint} <= {"ckpt-000002", "ckpt-000003", "ckpt-000004"}


def test_an_asker_gives_up_after_its_timeout_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        run.hold_up()
        done = tidegate("checkpoint", "--root", run.root, "--timeout", "300ms")
        assert done.returncode == 1
        assert "has not answered in 0.3 s when it was asked to take a checkpoint" in done.stderr
        assert requests(run.root) == []
    assert tidegate("stop", "--root", run.root, "--timeout", "soon").returncode == 2


# -- cancelling -------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_being_prepared_is_cancelled_and_whoever_asked_for_it_is_told(tmp_path: Path) -> None:
    with live_run(tmp_path) as run, ThreadPoolExecutor(3) as askers:
        run.hold_up()
        asked = askers.submit(tidegate, "checkpoint", "--root", run.root)
        wait_until(lambda: bool(run.pipeline.generation.coordinator.active))
        both = [askers.submit(ask_to_cancel, place(run.root), 60) for _ in range(2)]
        # Both are told the same, or the second one finds none in progress any more.
        assert {each.checkpoint for cancel in both for each in cancel.result().checkpoints} == {"ckpt-000001"}
        told = asked.result()
        assert told.returncode == 1
        assert told.stderr.startswith("error: ckpt-000001 was aborted: cancelled by the user: tidegate cancel; ")
        wait_until(lambda: bool((status := said(run.root)) and status.checkpoints))
        assert "aborted: cancelled by the user" in tidegate("status", "--root", run.root).stdout
        run.let_go()
        assert ask_for_checkpoint(place(run.root), 60).checkpoint == "ckpt-000002", "the run goes on"


def test_where_none_is_in_progress_none_is_cancelled(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        done = tidegate("cancel", "--root", run.root)
        assert (done.returncode, done.stdout) == (0, "no checkpoint is in progress, so none was cancelled\n")
        run.hold_up()
        run.in_its_thread(run.pipeline.generation.trigger)
        found = answered(tidegate("cancel", "--root", run.root, "--json").stdout)
        assert isinstance(found, CancelledAnswer)
        assert [(each.checkpoint, each.state) for each in found.checkpoints] == [("ckpt-000001", "aborted")]
        for _ in range(4):  # as often as one likes: that is no failure of the pipeline
            run.in_its_thread(run.pipeline.generation.trigger)
            assert len(ask_to_cancel(place(run.root), 60).checkpoints) == 1


def test_what_is_being_decided_cannot_be_cancelled_any_more(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        run.hold_up()
        run.in_its_thread(run.pipeline.generation.trigger)
        (checkpoint,) = run.pipeline.generation.coordinator.active
        run.in_its_thread(lambda: setattr(checkpoint, "phase", Phase.DECIDING))
        done = tidegate("cancel", "--root", run.root, "--json")
        error = answered(done.stdout)
        assert isinstance(error, ErrorAnswer)
        assert error.message == (
            "no checkpoint was cancelled: ckpt-000001 is being decided and cannot be cancelled any more"
        )


# -- stopping ---------------------------------------------------------------------------------------


def test_a_run_that_is_told_to_stop_takes_a_last_checkpoint_and_is_waited_for(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as askers:
        with live_run(tmp_path) as run:
            run.hold_up()
            told = tidegate("stop", "--root", run.root, "--no-wait")
            assert (told.returncode, told.stdout) == (0, "pipeline flat is stopping, after a last checkpoint\n")
            # It is stopping already: both that ask now wait for the same end.
            asked = askers.submit(ask_to_stop, place(run.root), 60)
            by_command = askers.submit(tidegate, "stop", "--root", run.root, "--json")
            wait_until(lambda: len(requests(run.root)) == 4)
            wait_until(lambda: bool((status := said(run.root)) and status.in_progress))
            assert "is stopping" in tidegate("status", "--root", run.root).stdout
            refused = tidegate("checkpoint", "--root", run.root)
            assert "the pipeline is draining" in refused.stderr
            assert not asked.done()
            run.let_go()
            run.await_end()
            assert not asked.done(), "the root is not free yet"
        assert asked.result() == "it was told to stop"
        done = by_command.result()
        assert done.returncode == 0
        assert answered(done.stdout) == StoppedAnswer(
            root=str(run.root), pipeline="flat", state="finished", why="it was told to stop"
        )
    assert run.pipeline.newest().flags, "of a drain"
    assert requests(run.root) == []
    assert not is_held(run.root / "lock")


def test_a_run_that_fails_before_its_last_checkpoint_is_complete_fails_whoever_stops_it(tmp_path: Path) -> None:
    def run_until_it_fails() -> None:
        with live_run(tmp_path) as run:
            run.hold_up()
            asked.append(askers.submit(ask_to_stop, place(run.root), 60))
            wait_until(lambda: run.is_told_to_stop.is_set() and len(requests(run.root)) == 2)
            raise ValueError("it can no more")

    asked: list[Future[str | None]] = []
    with ThreadPoolExecutor(1) as askers:
        with pytest.raises(ValueError, match="no more"):
            run_until_it_fails()
        with pytest.raises(RequestFailed, match="has not ended well: it can no more"):
            asked[0].result()


def test_a_run_that_is_killed_while_it_stops_fails_whoever_stops_it(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    with ThreadPoolExecutor(1) as asker:
        with RootLock(root / "lock"):
            asked = asker.submit(ask_to_stop, place(root), 60)
            wait_until(lambda: len(requests(root)) == 1)
            (name,) = requests(root)
            heard = f"{RootPaths.REQUESTS}/{name.removesuffix('.request')}.answer"
            Folder(root).write(heard, msgspec.json.encode(Answer("heard")))
        with pytest.raises(RequestFailed, match="has not ended well: it was killed, or its machine went down"):
            asked.result()


def test_a_run_that_ends_by_itself_while_it_is_asked_has_been_stopped(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    with ThreadPoolExecutor(1) as asker:
        with RootLock(root / "lock") as lock:
            with Remote(Folder(root), "flat", lock) as remote:
                remote.ended_because = "all its input is consumed"
            asked = asker.submit(ask_to_stop, place(root), 60)  # too late for the run to hear
            wait_until(lambda: len(requests(root)) == 1)
        assert asked.result() == "all its input is consumed"


# -- a run that is not there, not yet, or no more ---------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_run_there_is_nobody_to_ask(tmp_path: Path, command: str) -> None:
    root = make_root(tmp_path, checkpoints=1)
    done = tidegate(command, "--root", root)
    assert done.returncode == 6
    assert done.stderr.startswith(f"error: no run is alive on {root}, so there is none to ")
    assert requests(root) == []


def test_a_run_that_is_starting_hears_at_once_and_does_it_when_it_can(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    told = threading.Event()
    with (
        ThreadPoolExecutor(1) as asker,
        RootLock(root / "lock") as lock,
        Remote(Folder(root), "flat", lock, lambda _: told.set()) as remote,
    ):
        remote.begin(StartingStep(step="starting_spark", since=now()))
        asked = asker.submit(ask_for_checkpoint, place(root), 60)
        assert ask_to_stop(place(root), 60, is_awaited=False) is None
        assert told.is_set()
        assert not asked.done()
        with played(tmp_path / "started") as pipeline:
            run = LiveRun(pipeline, remote)
            run.start()
            assert asked.result().checkpoint == "ckpt-000001"
            run.stop()


def test_a_request_that_is_older_than_the_run_is_not_for_it(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    write_request(root, "older", StopRun())
    told = threading.Event()
    with RootLock(root / "lock") as lock, Remote(Folder(root), "flat", lock, lambda _: told.set()) as remote:
        wait_until_said(root, remote)
        assert requests(root) == []
        write_request(root, "newer", {"kind": "dance"})
        wait_until(lambda: answer_to(root, "newer") is not None)
    assert not told.is_set()


def test_a_request_that_a_starting_run_removes_is_made_again(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        run.stop()
        with ThreadPoolExecutor(1) as asker:
            asked = asker.submit(ask_for_checkpoint, place(run.root), 60)
            wait_until(lambda: bool(requests(run.root)))
            with RootLock(tmp_path / "another") as lock, Remote(Folder(run.root), "flat", lock) as remote:
                again = LiveRun(run.pipeline, remote)
                again.start()
                assert asked.result().checkpoint == "ckpt-000001"
                again.stop()


def test_a_request_that_a_run_died_upon_is_not_made_to_the_next_one(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    with RootLock(root / "lock"), ThreadPoolExecutor(1) as asker:
        asked = asker.submit(ask_to_stop, place(root), 60)
        wait_until(lambda: bool(requests(root)))
        (root / "lock").write_text("1", encoding="utf-8")  # another process has taken it meanwhile
        Folder(root).delete([f"{RootPaths.REQUESTS}/{name}" for name in requests(root)])
        with pytest.raises(NotRunning, match="another one has started; ask again if you mean that one"):
            asked.result()
        assert requests(root) == []


def test_a_checkpoint_that_a_generation_died_upon_is_not_taken_in_the_next_one(tmp_path: Path) -> None:
    with live_run(tmp_path) as run, ThreadPoolExecutor(1) as asker:
        run.hold_up()
        asked = asker.submit(ask_for_checkpoint, place(run.root), 60)
        generation = run.pipeline.generation
        wait_until(lambda: bool(generation.coordinator.active))
        run.in_its_thread(lambda: setattr(generation, "generation", generation.generation + 1))
        with pytest.raises(RequestFailed, match="the run restarted before ckpt-000001 was complete; the run goes on"):
            asked.result()


def test_a_run_that_ends_while_it_is_asked_answers_first(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as asker:
        with live_run(tmp_path) as run:
            run.hold_up()
            asked = asker.submit(ask_for_checkpoint, place(run.root), 60)
            wait_until(lambda: bool(run.pipeline.generation.coordinator.active))
        with pytest.raises(RequestFailed, match="the run has ended"):
            asked.result()


def test_a_run_that_is_killed_while_it_is_asked_is_noticed(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    with ThreadPoolExecutor(1) as asker:
        with RootLock(root / "lock"):
            asked = asker.submit(ask_for_checkpoint, place(root), 60)
            wait_until(lambda: bool(requests(root)))
        with pytest.raises(NotRunning, match="ended before"):
            asked.result()


# -- what cannot be asked, or answered --------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [{"kind": "dance"}, {}, {"kind": "checkpoint", "full": "yes"}, {"kind": "stop", "now": True}],
    ids=["an unknown kind", "no kind", "a value of another type", "an unknown field"],
)
def test_what_a_run_does_not_understand_is_answered_with_an_error(tmp_path: Path, request_: dict[str, Any]) -> None:
    files = Memory()
    with RootLock(tmp_path / "lock") as lock, Remote(files, "flat", lock):
        wait_until(lambda: read_status(files) is not None)
        files.write("requests/strange.request", msgspec.json.encode(request_))
        wait_until(lambda: files.exists("requests/strange.answer"))
    found = msgspec.json.decode(files.read("requests/strange.answer") or b"", type=Answer)
    assert found.outcome == "refused"
    assert (found.why or "").startswith("the run does not understand what it is asked for: ")


def test_a_run_that_cannot_be_asked_is_told_in_one_line(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    (root / "requests").touch()
    with RootLock(root / "lock"):
        done = tidegate("checkpoint", "--root", root)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the run cannot be asked to take a checkpoint: ")
    assert len(done.stderr.splitlines()) == 1


def test_the_control_thread_does_not_wait_for_a_store_that_stands_still(tmp_path: Path) -> None:
    files = TroubledFolder(tmp_path / "root")
    with played(tmp_path) as pipeline, RootLock(tmp_path / "lock") as lock, Remote(files, "flat", lock) as remote:
        generation = pipeline.generation
        wait_until_said(tmp_path / "root", remote)
        files.moves.clear()
        for _ in range(3):
            pipeline.one_batch_each()
            remote.begin(StartingStep(step="laying_out", since=now()))
            remote.serve(generation)
            pipeline.checkpoint()
            last = remote.update(generation)
        assert said(tmp_path / "root") != last, "the store has not moved"
        assert len(last.checkpoints) == 3
        files.moves.set()
        wait_until(lambda: said(tmp_path / "root") == last)


# -- how it is to stop ------------------------------------------------------------------------------


def test_a_plain_stop_is_understood_by_runs_of_before_and_closing_windows_implies_a_drain() -> None:
    assert msgspec.json.encode(StopRun()) == b'{"kind":"stop"}'
    assert StopRun(close_windows=True).drain
    both = StopRun(full=True).and_also(StopRun(drain=True))
    assert both == StopRun(full=True, drain=True)
    assert both.lacks(StopRun(drain=True)) == ("stored all anew",)
    assert StopRun().lacks(StopRun()) == ()


def test_whoever_asks_gets_what_he_asked_for_and_a_signal_waits_for_nothing() -> None:
    event = threading.Event()
    stop = Stop(event)
    assert not stop.wanted
    stop.ask(StopRun(drain=True))
    assert (stop.wanted, stop.is_soon) == (True, False)
    stop.ask(StopRun(full=True))
    assert stop.how == StopRun(full=True, drain=True), "a plain one takes nothing away"
    event.set()
    assert (stop.how, stop.is_soon) == (StopRun(full=True), True)


def test_a_run_that_has_ended_without_what_was_asked_has_not_ended_well(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    with ThreadPoolExecutor(3) as askers:
        with RootLock(root / "lock") as lock, Remote(Folder(root), "flat", lock) as remote:
            drained = askers.submit(ask_to_stop, place(root), 60, StopRun(drain=True))
            full = askers.submit(ask_to_stop, place(root), 60, StopRun(drain=True, full=True))
            wait_until(lambda: len(requests(root)) == 4)
            remote.ended_because, remote.ended_as = "it was told to stop", StopRun(drain=True)
        assert drained.result() == "it was told to stop"
        with pytest.raises(RequestFailed, match="because it was told to stop, but has not stored all anew"):
            full.result()


def test_a_person_is_told_first_what_closing_windows_means(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        run.hold_up()
        shown = in_terminal("stop", "--root", run.root, "--close-windows", "--no-wait", width=200)
        assert shown.returncode == 0
        first, last = shown.stdout.splitlines()[0], shown.stdout.splitlines()[-1]
        assert first.startswith("closing windows: what is open is written out as it is")
        assert last == "pipeline flat is stopping, after draining, closing windows, a last checkpoint"
        assert run.is_told_to_stop.is_set()
        run.let_go()
        run.await_end()
