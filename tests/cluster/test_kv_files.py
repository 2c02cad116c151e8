"""Keys and values as files pass the tests that all must pass; and what stores that fail, and clocks, do to them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tidegate.cluster.files import FilesSession
from tidegate.cluster.kv import Session
from tidegate.errors import CoordinationUnavailable, MaybeWritten, NotWritten, SessionLost, StoreUnavailable
from tidegate.storage.files import AtHand, Files
from tidegate.storage.folder import Folder
from tidegate.storage.memory import Memory
from tidegate.testing.kv import KVConformance, eventually, failure

WRITES = ("write", "create", "delete")
CALLS = ("read", "exists", "names_in", "list", *WRITES)


class FaultyFiles(AtHand):
    """Files that count what is asked of them, and fail when a test says so, before or after they have done it."""

    def __init__(self, files: Files, shared: FaultyFiles | None = None) -> None:
        self._files = files
        self.asked: Counter[str] = Counter() if shared is None else shared.asked
        self.fails_before: set[str] = set() if shared is None else shared.fails_before
        self.fails_after: set[str] = set() if shared is None else shared.fails_after
        self.answers_false: set[str] = set() if shared is None else shared.answers_false
        self.misses_once: list[str] = [] if shared is None else shared.misses_once

    def at(self, folder: str, *, durable: bool = True) -> FaultyFiles:
        return FaultyFiles(self._files.at(folder, durable=durable), self)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._files, name)
        return partial(self._call, name, call) if name in CALLS else call

    def _call(self, name: str, call: Callable[..., object], *given: object) -> object:
        self.asked[name] += 1
        if name in self.fails_before:
            raise StoreUnavailable("the store is gone")
        answer = call(*given)
        if name in self.fails_after:
            raise StoreUnavailable("the answer was lost")
        if name in self.misses_once:
            self.misses_once.remove(name)
            return []
        return False if name in self.answers_false else answer


class TestFilesInAFolder(KVConformance):
    lease_s = 2.0

    @pytest.fixture(autouse=True)
    def given(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.faults: dict[int, FaultyFiles] = {}

    def make_files(self, name: str) -> Files:
        return Folder(self.folder / name).at("coordination", durable=False)

    def make_session(self, name: str) -> Session:
        faulty = FaultyFiles(self.make_files(name))
        session = FilesSession(faulty, lease_s=self.lease_s)
        self.faults[id(session)] = faulty
        return session

    def cut_off(self, session: Session) -> None:
        self.faults[id(session)].fails_before.update(CALLS)

    def mend(self, session: Session) -> None:
        self.faults[id(session)].fails_before.clear()


class TestFilesInMemory(TestFilesInAFolder):
    @pytest.fixture(autouse=True)
    def given_memories(self) -> None:
        self.memories: dict[str, Memory] = {}

    def make_files(self, name: str) -> Files:
        return self.memories.setdefault(name, Memory(name)).at("coordination")


class TestFilesOfWhichEachCallIsARequest(TestFilesInMemory):
    """One list is of all folders, and what counts no more is deleted now and then."""

    def make_session(self, name: str) -> Session:
        faulty = FaultyFiles(self.make_files(name))
        session = FilesSession(faulty, lease_s=self.lease_s, poll_s=(0.05, 0.2), is_far=True)
        self.faults[id(session)] = faulty
        return session


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(Memory())


def session_on(
    files: FaultyFiles, *, lease_s: float = 1000.0, clock: Callable[[], float] | None = None
) -> FilesSession:
    """With a lease that is long enough for no beat to come by itself."""
    given = {} if clock is None else {"clock": clock}
    return FilesSession(files, lease_s=lease_s, **given)  # type: ignore[arg-type]


# -- stores that fail ---------------------------------------------------------------------------------


def test_what_the_store_has_not_answered_may_be_written(files: FaultyFiles) -> None:
    session, reader = session_on(files), session_on(files)
    session.write("boards/a", b"1")
    files.fails_after.add("write")
    with pytest.raises(MaybeWritten):
        session.write("boards/a", b"2")
    files.fails_after.clear()
    assert reader.read_folder("boards")["a"].value == b"2"
    files.fails_before.add("write")
    with pytest.raises(MaybeWritten):
        session.write("boards/a", b"3")
    files.fails_before.clear()
    assert reader.read_folder("boards")["a"].value == b"2"
    session.write("boards/a", b"4")
    assert reader.read_folder("boards")["a"].value == b"4"
    assert len(files.names_in("boards")) == 1, "what the tries have left is deleted"


def test_what_was_not_begun_is_not_written(files: FaultyFiles) -> None:
    session = session_on(files)
    files.fails_before.add("names_in")
    for call in (
        lambda: session.write("boards/a", b""),
        lambda: session.swap("boards/a", b"", 1),
        lambda: session.delete(["boards/a"]),
        lambda: session.join("a", "1", b""),
    ):
        assert isinstance(failure(call), NotWritten)
    assert isinstance(failure(lambda: session.read_folder("boards")), CoordinationUnavailable)
    assert isinstance(failure(lambda: session.wait(["boards"], 10)), CoordinationUnavailable | SessionLost)


def test_what_could_not_be_deleted_after_a_write_is_deleted_after_the_next(files: FaultyFiles) -> None:
    session, reader = session_on(files), session_on(files)
    files.fails_before.add("delete")
    for number in range(5):
        session.write("boards/a", str(number).encode())
    assert reader.read_folder("boards")["a"].value == b"4"
    assert len(files.names_in("boards")) == 5
    files.fails_before.clear()
    session.write("boards/a", b"5")
    assert len(files.names_in("boards")) == 1
    session_on(files).write("boards/a", b"of the next owner")
    assert len(files.names_in("boards")) == 1
    assert reader.read_folder("boards")["a"].value == b"of the next owner"


def test_an_own_try_that_the_store_denies_is_known_for_what_it_is(files: FaultyFiles) -> None:
    session = session_on(files)
    files.answers_false.add("create")
    assert session.create("leader", b"mine")
    assert session.swap("leader", b"still mine", 1)
    assert not session.swap("leader", b"late", 1)
    assert not session.create("leader", b"mine")


@pytest.mark.parametrize("given", [1, 2, 3, 12])
@pytest.mark.parametrize("overtaken_by", range(14))
def test_a_swap_that_is_overtaken_claims_to_have_done_it_only_if_it_has(
    files: FaultyFiles, given: int, overtaken_by: int
) -> None:
    """By so many others, between its look and its try."""
    session, other = session_on(files), session_on(files.at(""))
    session.create("leader", b"0")
    for version in range(1, given):
        assert session.swap("leader", b"", version)
    names_in = session._files.names_in

    def overtaken(folder: str = "") -> list[str]:
        found = names_in(folder)
        session._files.names_in = names_in  # type: ignore[method-assign]
        for version in range(given, given + overtaken_by):
            assert other.swap("leader", b"theirs", version)
        return found

    session._files.names_in = overtaken  # type: ignore[method-assign]
    try:
        has_done_it = session.swap("leader", b"late", given)
    except MaybeWritten:
        assert overtaken_by > 8
    else:
        assert has_done_it == (overtaken_by == 0)
    for each in (session, other):
        entry = each.read("leader")
        assert entry is not None
        assert entry.value == (b"theirs" if overtaken_by else b"late")


@pytest.mark.parametrize("followed_by", range(14))
def test_a_swap_that_has_done_it_says_so_unless_too_many_have_followed(files: FaultyFiles, followed_by: int) -> None:
    """By so many others, between its try and its second look."""
    session, other = session_on(files), session_on(files.at(""))
    session.create("leader", b"0")
    create = session._files.create

    def followed(name: str, data: bytes) -> bool:
        created = create(name, data)
        for version in range(2, 2 + followed_by):
            assert other.swap("leader", b"theirs", version)
        return created

    session._files.create = followed  # type: ignore[method-assign]
    try:
        assert session.swap("leader", b"mine", 1)
    except MaybeWritten:
        assert followed_by > 8


def test_a_version_that_is_gone_when_it_is_read_is_looked_for_again(files: FaultyFiles) -> None:
    writer, reader = session_on(files), session_on(files)
    writer.write("boards/a", b"0")
    read, left = reader._files.read, [3]

    def overtaken(name: str) -> bytes | None:
        if left[0] and not name.endswith("@1"):
            left[0] -= 1
            writer.write("boards/a", str(left[0]).encode())
        return read(name)

    reader._files.read = overtaken  # type: ignore[method-assign]
    assert reader.read_folder("boards")["a"].value == b"0"
    writer.write("boards/a", b"new")
    left[0] = 10_000
    with pytest.raises(CoordinationUnavailable):
        reader.read("boards/a")


# -- what it costs ------------------------------------------------------------------------------------


def test_what_has_not_changed_is_not_read_again(files: FaultyFiles) -> None:
    writer, reader = session_on(files), session_on(files)
    for number in range(20):
        writer.write(f"boards/{number}", b"")
    assert len(reader.read_folder("boards")) == 20
    writer.write("boards/7", b"new")
    files.asked.clear()
    assert reader.read_folder("boards")["7"].value == b"new"
    assert files.asked == {"names_in": 1, "read": 1}


def test_what_was_created_once_is_read_without_a_list(files: FaultyFiles) -> None:
    writer, reader = session_on(files), session_on(files)
    writer.create("channels/a/1", b"")
    files.asked.clear()
    assert reader.read("channels/a/1") is not None
    assert files.asked == {"read": 1, "exists": 1}
    files.asked.clear()
    writer.write("boards/a", b"")
    files.asked.clear()
    writer.write("boards/a", b"")
    assert files.asked == {"write": 1, "delete": 1}


# -- time ---------------------------------------------------------------------------------------------


def test_a_process_that_slept_for_longer_than_its_lease_is_lost_before_anything_else(files: FaultyFiles) -> None:
    clock = Clock()
    sleeper, watcher = session_on(files, clock=clock), session_on(files)
    sleeper.join("a", "1", b"")
    assert watcher.present().keys() == {"a"}
    clock.s += 999
    assert sleeper.read("a") is None
    clock.s += 2
    files.asked.clear()
    for call in (lambda: sleeper.write("a", b""), lambda: sleeper.read("a"), sleeper.present):
        with pytest.raises(SessionLost):
            call()
    assert not files.asked
    clock.s -= 1000
    assert isinstance(failure(lambda: sleeper.read("a")), SessionLost), "whatever its clock says afterwards"
    sleeper.join("a", "2", b"")
    assert {name: each.incarnation for name, each in watcher.present().items()} == {"a": "2"}
    sleeper.close()


def test_a_watcher_that_slept_does_not_hold_the_living_for_dead(files: FaultyFiles) -> None:
    clock = Clock()
    member, watcher = session_on(files, lease_s=2.0), session_on(files, clock=clock)
    member.join("a", "1", b"")
    assert watcher.present().keys() == {"a"}
    before = set(files.names_in("@present"))
    eventually(lambda: before.isdisjoint(files.names_in("@present")))
    clock.s += 3600
    assert watcher.present().keys() == {"a"}, "it has beaten since"
    member.close()


def test_who_is_held_for_dead_stays_so_and_hears_of_it(files: FaultyFiles) -> None:
    clock = Clock()
    member, watcher = session_on(files, lease_s=4.0), session_on(files, clock=clock)
    member.join("a", "1", b"")
    assert watcher.present().keys() == {"a"}
    clock.s += 4.1  # before its first beat
    assert watcher.present() == {}
    assert session_on(files).present() == {}
    eventually(lambda: isinstance(failure(lambda: member.read("a")), SessionLost))
    assert watcher.present() == {}
    member.close()


def test_who_is_missing_from_a_list_is_looked_for_again(files: FaultyFiles) -> None:
    member, watcher = session_on(files), session_on(files)
    member.join("a", "1", b"")
    member.write("boards/a", b"")
    assert watcher.present().keys() == {"a"}
    assert watcher.read_folder("boards").keys() == {"a"}
    for call in (watcher.present, lambda: watcher.read_folder("boards")):
        files.misses_once.append("names_in")
        assert call().keys() == {"a"}
        assert not files.misses_once
    member.close()


def test_beats_that_fail_for_less_than_a_lease_do_no_harm(files: FaultyFiles) -> None:
    member = session_on(files, lease_s=4.0)
    member.join("a", "1", b"")
    files.fails_after.add("write")
    files.asked.clear()
    eventually(lambda: files.asked["write"] >= 2)
    files.fails_after.clear()
    before = files.asked["delete"]
    eventually(lambda: files.asked["delete"] > before)
    eventually(lambda: len(files.names_in("@present")) == 1)
    assert member.present().keys() == {"a"}
    member.close()


def test_no_thread_is_left_when_a_session_is_closed_or_lost(files: FaultyFiles) -> None:
    def beating() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "tidegate-beats-ended"]

    session, other = session_on(files, lease_s=2.0), session_on(files)
    session.join("ended", "1", b"")
    assert len(beating()) == 1
    assert beating()[0].daemon
    other.join("ended", "2", b"")
    eventually(lambda: len(beating()) == 1)
    session.join("ended", "3", b"")
    session.close()
    other.close()
    assert beating() == []
    assert files.names_in("@present") == []


def test_foreign_files_are_no_keys_and_nobody(files: FaultyFiles) -> None:
    session = session_on(files)
    for name in ("boards/notes.txt", "boards/a@b", "boards/@1", "@present/a", "@present/a@b@c@d"):
        files.write(name, b"")
    assert session.read_folder("boards") == {}
    assert session.present() == {}
