"""Keys and values in memory pass the tests that all must pass; and what can be done to them besides."""

from __future__ import annotations

import time

import pytest

from tidegate.cluster.kv import Session
from tidegate.cluster.memory import MemoryKV, MemorySession
from tidegate.errors import CoordinationUnavailable, MaybeWritten, NotWritten, SessionLost
from tidegate.testing.kv import KVConformance


class TestMemory(KVConformance):
    lease_s = 0.4

    def setup_method(self) -> None:
        super().setup_method()
        self.kvs: dict[str, MemoryKV] = {}

    def make_session(self, name: str) -> Session:
        lease_ms = int(self.lease_s * 1000)
        return self.kvs.setdefault(name, MemoryKV(lambda: time.monotonic_ns() // 10**6, lease_ms=lease_ms)).open()

    def cut_off(self, session: Session) -> None:
        assert isinstance(session, MemorySession)
        session.cut_off()

    def mend(self, session: Session) -> None:
        assert isinstance(session, MemorySession)
        session.heal()


class TestMemoryWhoseNoticesComeLateAndTwice(TestMemory):
    def make_session(self, name: str) -> Session:
        session = super().make_session(name)
        self.kvs[name].notice_delays_ms = lambda: (20, 35)
        return session


class Clock:
    def __init__(self) -> None:
        self.ms = 1000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kv(clock: Clock) -> MemoryKV:
    return MemoryKV(clock, lease_ms=100)


def test_a_session_that_is_cut_off_is_lost_with_its_lease(kv: MemoryKV, clock: Clock) -> None:
    member, watcher = kv.open(), kv.open()
    member.join("a", "1", b"")
    member.cut_off()
    with pytest.raises(NotWritten):
        member.write("a", b"")
    with pytest.raises(CoordinationUnavailable):
        member.read("a")
    clock.ms += 99
    assert watcher.present().keys() == {"a"}
    assert not watcher.has_news([])
    assert kv.next_due_ms() == clock.ms + 1
    clock.ms += 1
    assert watcher.has_news([])
    assert watcher.present() == {}
    with pytest.raises(SessionLost):
        member.read("a")
    member.heal()
    with pytest.raises(SessionLost):
        member.write("a", b"")
    member.join("a", "2", b"")
    assert watcher.present().keys() == {"a"}


def test_a_session_that_is_healed_in_time_has_lost_nothing(kv: MemoryKV, clock: Clock) -> None:
    member, watcher = kv.open(), kv.open()
    member.join("a", "1", b"")
    for _ in range(3):
        member.cut_off()
        clock.ms += 99
        member.heal()
        clock.ms += 1
        assert watcher.present().keys() == member.present().keys() == {"a"}


def test_a_session_can_be_expired(kv: MemoryKV) -> None:
    member, watcher = kv.open(), kv.open()
    member.join("a", "1", b"")
    member.expire()
    assert watcher.present() == {}
    with pytest.raises(SessionLost):
        member.present()


def test_a_write_in_doubt_takes_effect_now_later_or_never(kv: MemoryKV, clock: Clock) -> None:
    session = kv.open()
    for after_ms in (0, 50, None):
        session.doubt_next(after_ms)
    for value in (b"now", b"later", b"never"):
        with pytest.raises(MaybeWritten):
            session.write("boards/a", value)
    entry = session.read("boards/a")
    assert entry is not None
    assert entry.value == b"now"
    clock.ms += 50
    entry = session.read("boards/a")
    assert entry is not None
    assert entry.value == b"later"
    session.doubt_next(50)
    with pytest.raises(MaybeWritten):
        session.swap("boards/a", b"too late", entry.version)
    assert session.swap("boards/a", b"in time", entry.version)
    clock.ms += 50
    assert session.read_folder("boards")["a"].value == b"in time"


def test_a_join_in_doubt_leaves_the_session_lost(kv: MemoryKV) -> None:
    member, watcher = kv.open(), kv.open()
    member.doubt_next(0)
    with pytest.raises(MaybeWritten):
        member.join("a", "1", b"")
    assert watcher.present().keys() == {"a"}
    with pytest.raises(SessionLost):
        member.read("a")
    member.join("a", "2", b"")
    assert member.present()["a"].incarnation == "2"


def test_notices_can_be_late_repeated_and_lost(kv: MemoryKV, clock: Clock) -> None:
    writer, reader = kv.open(), kv.open()
    kv.notice_delays_ms = lambda: (10, 20)
    writer.write("boards/a", b"")
    assert not reader.has_news(["boards"])
    clock.ms += 10
    assert reader.has_news(["boards"])
    assert not reader.has_news(["boards"])
    clock.ms += 10
    assert reader.has_news(["boards"])
    kv.notice_delays_ms = lambda: ()
    writer.write("boards/a", b"")
    clock.ms += 1000
    assert not reader.has_news(["boards"])
    assert kv.next_due_ms() is None
