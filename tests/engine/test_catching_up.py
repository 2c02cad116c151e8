"""What a run finds of the one before, which was killed."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.engine.catching_up import Missed, why_started
from tidegate.engine.chronicle import ended
from tidegate.engine.events import CheckpointEnded
from tidegate.engine.history import Past, Recorder, record
from tidegate.engine.status import CheckpointState, CheckpointStatus, RunState, RunStatus, StagePart, StartingStep
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog
from tidegate.storage.decisions import StoredDecisions
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
