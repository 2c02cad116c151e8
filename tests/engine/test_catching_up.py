"""What a run finds of the one before, which was killed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest

from tidegate.engine.catching_up import Missed, why_started
from tidegate.engine.chronicle import ended
from tidegate.engine.control import Desk, Remote
from tidegate.engine.events import CheckpointEnded
from tidegate.engine.history import Past, Recorder, record
from tidegate.engine.status import CheckpointState, CheckpointStatus, RunState, RunStatus, StagePart, StartingStep
from tidegate.engine.status_files import StatusFiles, last_words, read_status
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder
from tidegate.storage.lock import RootLock
from tidegate.storage.memory import Memory

AT = "2030-01-01T10:00:00.000+00:00"


def checkpoint(number: int, state: CheckpointState, **stages: StagePart) -> CheckpointStatus:
    return CheckpointStatus(
        checkpoint=f"ckpt-{number:06d}", state=state, generation=4, epoch=number + 10, stages=stages
    )


def status(
    *ended_ones: CheckpointStatus, in_progress: tuple[CheckpointStatus, ...] = (), state: RunState = "running"
) -> RunStatus:
    return RunStatus(
        "orders", 4711, "here", AT, AT, state, generation=4, checkpoints=ended_ones, in_progress=in_progress
    )


def decided(*ids: int) -> DecisionLog:
    log = DecisionLog()
    log.append(log.opening("x", None))
    for number in ids:
        proposed = log.completing(
            "x",
            1,
            checkpoint_id=number,
            epoch=number + 10,
            manifest=f"generations/000001/manifests/ckpt-{number:06d}.json",
            manifest_sha256="0",
            aligned=True,
            retained=(number,),
            content="",
            at_ms=1,
        )
        log.append(proposed)
    assert all(isinstance(log.completed(each), CheckpointCompleted) for each in ids[-1:])
    return log


def missed(files: Memory, earlier: RunStatus | None, log: DecisionLog, largest: int) -> dict[str, CheckpointStatus]:
    found = [each for each in Missed(files, earlier, log, largest)() if isinstance(each, CheckpointEnded)]
    assert len({each.id for each in found}) == len(found)
    return {each.checkpoint.checkpoint: each.checkpoint for each in found}


def test_a_first_run_has_missed_nothing() -> None:
    assert missed(Memory(), None, DecisionLog(), 0) == {}
    assert why_started(None) == ("first", None)


def test_what_was_under_way_is_told_with_who_was_at_it() -> None:
    files = Memory()
    for number in (7, 8, 9):
        StoredDecisions(files).mark_used(number)
    working = checkpoint(
        8,
        "preparing",
        rows=StagePart(progress="done"),
        table=StagePart(progress="waiting"),
        join=StagePart(progress="storing"),
    )
    prepared = checkpoint(9, "prepared", rows=StagePart(progress="done"))
    found = missed(files, status(in_progress=(working, prepared)), decided(), 9)
    assert {name: each.state for name, each in found.items()} == dict.fromkeys(
        ("ckpt-000007", "ckpt-000008", "ckpt-000009"), "aborted"
    )
    assert found["ckpt-000008"].why == "the run was killed while join was storing and table was waiting"
    assert found["ckpt-000009"].why == "the run was killed while it was being decided"
    assert found["ckpt-000007"].why == "whoever had begun it was killed; nothing more is known of it"
    assert found["ckpt-000008"].stages["join"].progress == "storing"
    (event,) = [each for each in Missed(files, status(in_progress=(working,)), decided(), 8)() if "8" in each.id]
    assert event.at == AT, "its last word"


def test_what_is_decided_is_complete_whatever_was_said_of_it() -> None:
    files = Memory()
    StoredDecisions(files).mark_used(3)
    earlier = status(checkpoint(2, "committing"), in_progress=(checkpoint(3, "deciding"),))
    found = missed(files, earlier, decided(2, 3), 3)
    assert {name: each.state for name, each in found.items()} == {"ckpt-000002": "complete", "ckpt-000003": "complete"}
    assert all(each.why is None for each in found.values())


def test_what_is_in_the_history_is_not_told_again() -> None:
    files = Memory()
    for number in (1, 2, 3):
        StoredDecisions(files).mark_used(number)
    record(files, ended(checkpoint(1, "complete")))
    record(files, ended(checkpoint(2, "committing")))
    earlier = status(checkpoint(1, "complete"), checkpoint(2, "committing"), checkpoint(3, "aborted"))
    found = missed(files, earlier, decided(1, 2), 3)
    assert {name: each.state for name, each in found.items()} == {"ckpt-000002": "complete", "ckpt-000003": "aborted"}
    recorder = Recorder(files)
    recorder.begin(Missed(files, earlier, decided(1, 2), 3))
    recorder.close()
    assert missed(files, earlier, decided(1, 2), 3) == {}
    assert len(Past(files).everything()) == 3, "each once, by its last word"


@pytest.mark.parametrize("at", ["2020-01-01T10:00:00.000+00:00", "2040-01-01T10:00:00.000+00:00"])
def test_what_is_told_of_one_later_counts_whatever_the_clocks_said(at: str) -> None:
    files = Memory()
    record(files, msgspec.structs.replace(ended(checkpoint(2, "committing")), at=at))
    recorder = Recorder(files)
    recorder.begin(Missed(files, status(checkpoint(2, "committing")), decided(2), 2))
    recorder.close()
    for _ in range(2):
        (event,) = Past(files).everything()
        assert isinstance(event, CheckpointEnded)
        assert event.checkpoint.state == "complete"
        assert (found := Past(files).checkpoint("ckpt-000002")) is not None
        assert found.checkpoint.state == "complete"
        recorder.compact()


def test_what_is_decided_is_told_though_nobody_has_said_anything_of_it() -> None:
    assert {name: each.state for name, each in missed(Memory(), None, decided(2), 2).items()} == {
        "ckpt-000002": "complete"
    }


def test_a_run_that_fails_to_start_takes_nothing_away_from_the_one_that_was_killed(tmp_path: Path) -> None:
    files = Folder(tmp_path / "root", fsync=False)
    killed = status(checkpoint(2, "committing"), in_progress=(checkpoint(3, "preparing"),))
    with RootLock(tmp_path / "lock") as lock:
        StatusFiles(files, lock).write(killed)
        for _ in range(2):  # once, and again on top of that
            assert last_words(files) == killed
            desk = partial(Desk, earlier=last_words(files))
            with pytest.raises(ValueError, match="no Java"), Remote(files, "orders", lock, desk=desk):
                raise ValueError("no Java")
            told = read_status(files)
            assert told is not None
            assert (told.state, told.why, told.generation) == ("failed", "no Java", None)
        with pytest.raises(ValueError, match="no Java"), Remote(files, "orders", lock):  # which could not keep them
            raise ValueError("no Java")
        found = last_words(files)
        assert found is not None
        assert found.why == "no Java", "what somebody else has kept is of another time"
        started = msgspec.structs.replace(status(), pid=4712, generation=5)
        StatusFiles(files, lock, killed).write(started)
        assert last_words(files) == started, "what was before that is in the history by now"


def test_marks_of_the_run_itself_are_its_own() -> None:
    files = Memory()
    for number in (5, 6):
        StoredDecisions(files).mark_used(number)
    assert list(missed(files, status(state="finished"), decided(), 5)) == ["ckpt-000005"]
    assert missed(files, status(), decided(4), 5)["ckpt-000005"].epoch == 15


@pytest.mark.parametrize("state", ["finished", "interrupted", "failed"])
def test_a_run_that_ended_is_followed_by_another(state: RunState) -> None:
    assert why_started(status(state=state)) == ("again", None)


def test_one_that_was_killed_is_told_with_what_it_was_doing() -> None:
    assert why_started(status()) == (
        "killed",
        f"process 4711 on here was killed, or its machine went down, after {AT} (running)",
    )
    step = StartingStep(step="starting_queries", since=AT, stage="join", number=2, of=5)
    starting = msgspec.structs.replace(status(state="starting"), step=step)
    assert (why_started(starting)[1] or "").endswith("(starting, starting queries: join, 2 of 5)")
