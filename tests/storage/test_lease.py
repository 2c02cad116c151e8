"""Who is alive on a root in a bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from tidegate.errors import RootInUse, StoreUnavailable
from tidegate.storage.lease import NAME, InstanceLease, Lease, LeaseLock, SeenLease, read_lease
from tidegate.storage.memory import Memory

SHORT_S = 0.6


@pytest.fixture
def files() -> Memory:
    return Memory("s3://bucket/orders")


class Pauses:
    """How often and how long somebody has waited."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0

    def __call__(self, for_s: float) -> None:
        self.count, self.total_s = self.count + 1, self.total_s + for_s
        time.sleep(for_s)


def lock(files: Memory, work: Path, *, take_over: bool = False, pauses: Pauses | None = None) -> LeaseLock:
    return LeaseLock(files, work, take_over=take_over, lease_s=SHORT_S, look_s=0.05, pause=pauses or Pauses())


def killed(files: Memory, of: LeaseLock) -> Lease:
    """Leave the lease behind as a process does that is killed."""
    found = read_lease(files)
    assert found is not None
    of.__exit__(None, None, None)
    files.write(NAME, msgspec.json.encode(found))
    return found


def test_a_second_run_is_refused_while_the_first_one_lives(files: Memory, tmp_path: Path) -> None:
    with lock(files, tmp_path / "a"):
        assert SeenLease(files).is_held()
        with pytest.raises(
            RootInUse, match=r"another run is alive on .*s3://bucket/orders \(process \d+ on .*--take-over"
        ):
            lock(files, tmp_path / "b").__enter__()
        with lock(files, tmp_path / "c", take_over=True):
            assert SeenLease(files).is_held()
    assert not SeenLease(files).is_held()


def test_one_that_ended_in_order_is_not_waited_for(files: Memory, tmp_path: Path) -> None:
    for _ in range(3):
        pauses = Pauses()
        with lock(files, tmp_path / "a", pauses=pauses):
            assert pauses.count == 0
        found = read_lease(files)
        assert found is not None
        assert found.is_over


def test_one_that_was_killed_elsewhere_is_waited_for_as_long_as_its_lease(files: Memory, tmp_path: Path) -> None:
    first = lock(files, tmp_path / "a")
    first.__enter__()
    killed(files, first)
    pauses = Pauses()
    started = time.monotonic()
    with lock(files, tmp_path / "b", pauses=pauses):
        assert time.monotonic() - started >= SHORT_S
        assert pauses.count > 1


def test_one_that_was_killed_in_the_same_work_folder_is_known_to_be_dead(files: Memory, tmp_path: Path) -> None:
    first = lock(files, tmp_path / "a")
    first.__enter__()
    killed(files, first)
    pauses = Pauses()
    with lock(files, tmp_path / "a", pauses=pauses):
        assert pauses.count == 0


def test_whoever_was_taken_over_from_leaves_the_lease_to_the_other(files: Memory, tmp_path: Path) -> None:
    first = lock(files, tmp_path / "a")
    with first:
        second = lock(files, tmp_path / "b", take_over=True)
        second.__enter__()
        second.__exit__(None, None, None)
        files.delete([NAME])
    assert read_lease(files) is None, "it is not made anew: the root may have been removed"


def test_two_on_one_machine_are_told_apart_by_the_lock_of_the_work_folder(files: Memory, tmp_path: Path) -> None:
    with lock(files, tmp_path / "a"), pytest.raises(RootInUse, match="another run is alive"):
        lock(files, tmp_path / "a").__enter__()


def test_a_store_that_fails_for_a_while_does_not_end_the_beats(
    files: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock(files, tmp_path / "a"):
        with monkeypatch.context() as patched:
            patched.setattr(Memory, "write", _unavailable)
            time.sleep(SHORT_S / 2)
        before = read_lease(files)
        deadline = time.monotonic() + 10
        while read_lease(files) == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _unavailable(_files: Memory, name: str, _data: bytes) -> None:
    raise StoreUnavailable(f"could not write {name}")


def seen(beat: int = 1, at: str = "2026-01-01T00:00:00+00:00", *, is_over: bool = False) -> bytes:
    return msgspec.json.encode(Lease("x", 17, "host", "/work", beat, 15.0, at, is_over))


def test_commands_wait_only_for_one_that_may_be_alive_with_another_clock(files: Memory) -> None:
    now = datetime.now(UTC)
    waited: list[float] = []
    look = SeenLease(files, pause=waited.append)
    assert not look.is_held()
    files.write(NAME, seen())
    assert not look.is_held(), "of long ago"
    files.write(NAME, seen(at=now.isoformat(), is_over=True))
    assert not look.is_held()
    files.write(NAME, seen(at=now.isoformat()))
    assert look.is_held()
    assert not waited
    behind = (now - timedelta(minutes=3)).isoformat()
    files.write(NAME, seen(at=behind))
    assert not look.is_held()
    assert waited == [6.0]
    assert SeenLease(files, pause=lambda _: files.write(NAME, seen(2, behind))).is_held(), "its clock is behind"
    assert look.holder() == "17"


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"holder": 1}'])
def test_a_lease_that_cannot_be_understood_is_none(files: Memory, data: bytes, tmp_path: Path) -> None:
    files.write(NAME, data)
    assert read_lease(files) is None
    with lock(files, tmp_path / "a"):
        assert read_lease(files) is not None


def test_it_carries_what_the_run_says(files: Memory, tmp_path: Path) -> None:
    with lock(files, tmp_path / "a") as held:
        held.say(b'{"at": "once"}', at_once=True)
        assert _said(files) == b'{"at": "once"}'
        held.say(b'{"with": "a beat"}')
        deadline = time.monotonic() + 10
        while _said(files) != b'{"with": "a beat"}':
            assert time.monotonic() < deadline
            time.sleep(0.02)
        held.say(b'{"the": "last"}')
    found = read_lease(files)
    assert found is not None
    assert (found.is_over, bytes(found.said)) == (True, b'{"the": "last"}')


def test_of_two_that_live_the_later_one_is_heard(files: Memory, tmp_path: Path) -> None:
    with lock(files, tmp_path / "a") as first:
        first.say(b'"first"', at_once=True)
        with lock(files, tmp_path / "b", take_over=True) as second:
            second.say(b'"second"', at_once=True)
            first.say(b'"first, once more"', at_once=True)
            assert _said(files) == b'"second"'
            time.sleep(SHORT_S * 3)  # it has looked by then
            for _ in range(20):
                assert _said(files) == b'"second"'
                time.sleep(SHORT_S / 10)
        first.say(b'"first again"', at_once=True)
        assert _said(files) == b'"first again"', "the other one has ended, and this one may be alive"


def _said(files: Memory) -> bytes:
    found = read_lease(files)
    assert found is not None
    return bytes(found.said)


# -- instances ----------------------------------------------------------------------------------------


def instance(files: Memory, work: Path, name: str, *, take_over: bool = False) -> InstanceLease:
    return InstanceLease(files, work / name, name, take_over=take_over, lease_s=SHORT_S, look_s=0.05)


def held_by(files: Memory) -> Lease:
    found = read_lease(files)
    assert found is not None
    return found


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_instances_hold_it_together_and_no_run_alone_beside_them(files: Memory, tmp_path: Path) -> None:
    with instance(files, tmp_path, "a") as first:
        assert not first.is_shared, "nobody else is alive"
        with instance(files, tmp_path, "b") as second:
            assert second.is_shared
            assert SeenLease(files).is_held()
            with pytest.raises(RootInUse, match=r"another run is alive on .*s3://bucket/orders"):
                lock(files, tmp_path / "alone").__enter__()
            with pytest.raises(RootInUse, match="another run is alive"):
                instance(files, tmp_path, "b").__enter__()
    assert not SeenLease(files).is_held()
    with lock(files, tmp_path / "alone"):
        assert not held_by(files).is_shared


def test_no_instance_starts_beside_a_run_alone(files: Memory, tmp_path: Path) -> None:
    with lock(files, tmp_path / "alone"):
        with pytest.raises(RootInUse, match=r"a run that is no instance is alive on .* start all instances"):
            instance(files, tmp_path, "a").__enter__()
        with instance(files, tmp_path, "a", take_over=True):
            assert held_by(files).is_shared


def test_the_one_that_leads_says_what_the_run_does_and_another_one_after_it(files: Memory, tmp_path: Path) -> None:
    with instance(files, tmp_path, "a") as first, instance(files, tmp_path, "b") as second:
        first.speak(True)
        first.say(b'"by a"', at_once=True)
        second.say(b'"by nobody"', at_once=True)
        assert bytes(held_by(files).said) == b'"by a"'
        second.speak(True)
        second.say(b'"by b"', at_once=True)
        first.say(b'"by a, which does not know yet"', at_once=True)
        beat = held_by(files).beat
        eventually(lambda: held_by(files).beat > beat + 2)
        assert bytes(held_by(files).said) == b'"by b"'
        first.speak(False)
    assert held_by(files).is_over


def test_it_does_not_end_while_one_of_them_lives_and_what_was_said_last_stands(files: Memory, tmp_path: Path) -> None:
    leader = instance(files, tmp_path, "a")
    leader.__enter__()
    leader.speak(True)
    leader.say(b'"by a"', at_once=True)
    with instance(files, tmp_path, "b"):
        last = killed(files, leader)
        eventually(lambda: held_by(files).holder != last.holder)
        assert bytes(held_by(files).said) == b'"by a"'
        with pytest.raises(RootInUse):
            lock(files, tmp_path / "alone").__enter__()
    assert not held_by(files).is_over, "others may live: it ends by itself"
    with lock(files, tmp_path / "alone"):
        assert not held_by(files).is_shared


def test_who_is_left_when_the_pipeline_has_ended_leaves_the_lease_as_it_is(files: Memory, tmp_path: Path) -> None:
    with instance(files, tmp_path, "a") as leader:
        with instance(files, tmp_path, "b") as member:
            leader.speak(True)
            leader.say(b'"the end"', at_once=True)
            leader.__exit__(None, None, None)
            ended = held_by(files)
            assert ended.is_over
            for _ in range(5):
                member._renew()
            assert held_by(files) == ended
        assert held_by(files) == ended


def test_instances_that_were_killed_are_no_reason_to_wait_for_instances(files: Memory, tmp_path: Path) -> None:
    first = instance(files, tmp_path, "a")
    first.__enter__()
    killed(files, first)
    started = time.monotonic()
    with instance(files, tmp_path, "b"):
        assert time.monotonic() - started < SHORT_S


def made_older(files: Memory, by: timedelta) -> None:
    """As one that is written by another clock."""
    found = held_by(files)
    at = (datetime.fromisoformat(found.at) - by).isoformat()
    files.write(NAME, msgspec.json.encode(msgspec.structs.replace(found, at=at)))


@pytest.mark.parametrize("behind", [timedelta(minutes=3), timedelta(hours=3)])
def test_whoever_leads_is_heard_by_instances_whose_clocks_differ(
    files: Memory, tmp_path: Path, behind: timedelta
) -> None:
    with instance(files, tmp_path, "a") as leader:
        leader.speak(True)
        leader.say(b'"by a"', at_once=True)
        made_older(files, behind)
        member = instance(files, tmp_path, "b")
        with member:
            assert bytes(held_by(files).said) == b'"by a"', "what was said stands"
        assert not held_by(files).is_over, "it is not the member's to end"
        leader.say(b'"and again"', at_once=True)
        assert bytes(held_by(files).said) == b'"and again"'
        with pytest.raises(RootInUse):
            lock(files, tmp_path / "alone").__enter__()
    assert held_by(files).is_over


def test_whoever_leads_is_heard_again_when_a_run_alone_that_took_over_has_ended(files: Memory, tmp_path: Path) -> None:
    with instance(files, tmp_path, "a") as leader:
        leader.speak(True)
        leader.say(b'"by a"', at_once=True)
        with lock(files, tmp_path / "alone", take_over=True) as alone:
            alone.say(b'"alone"', at_once=True)
            leader.say(b'"by a, which was taken over from"', at_once=True)
            assert bytes(held_by(files).said) == b'"alone"'
        leader.say(b'"by a again"', at_once=True)
        assert bytes(held_by(files).said) == b'"by a again"'
        assert SeenLease(files).is_held()
        with instance(files, tmp_path, "b"):  # it has nothing to say
            leader.say(b'"still"', at_once=True)
            assert bytes(held_by(files).said) == b'"still"'


def test_an_instance_that_comes_after_a_run_alone_does_not_silence_the_one_that_leads(
    files: Memory, tmp_path: Path
) -> None:
    with instance(files, tmp_path, "a") as leader:
        leader.speak(True)
        leader.say(b'"by a"', at_once=True)
        with lock(files, tmp_path / "alone", take_over=True):
            pass
        with instance(files, tmp_path, "b"):
            assert held_by(files).is_shared
            leader.say(b'"by a again"', at_once=True)
            assert bytes(held_by(files).said) == b'"by a again"'


def test_one_that_led_and_leads_again_is_heard(files: Memory, tmp_path: Path) -> None:
    with instance(files, tmp_path, "a") as first, instance(files, tmp_path, "b") as second:
        for speaker, words in ((first, b'"a"'), (second, b'"b"'), (first, b'"a again"')):
            speaker.speak(True)
            speaker.say(words, at_once=True)
            assert bytes(held_by(files).said) == words
        second.speak(False)


def test_an_old_leader_that_wakes_up_does_not_say_that_an_ended_pipeline_lives(files: Memory, tmp_path: Path) -> None:
    with instance(files, tmp_path, "a") as old:
        old.speak(True)
        old.say(b'"by a"', at_once=True)
        with instance(files, tmp_path, "b") as new:
            new.speak(True)
            new.say(b'"the end"', at_once=True)
        ended = held_by(files)
        assert ended.is_over
        old.say(b'"by a, which does not know yet"', at_once=True)
        assert held_by(files) == ended
