"""The tests that keys and values which processes share must pass (`tidegate.cluster.kv`), whoever wrote them.

Subclass `KVConformance` in a pytest file, under a name that starts with `Test`, and say how to open a session, and how
to cut it off:

    class TestMyKV(KVConformance):
        lease_s = 2.0

        def make_session(self, name):
            return MySession(SERVER, path=name, lease_s=self.lease_s)

        def cut_off(self, session): ...
        def mend(self, session): ...

Each test uses keys of its own names. `make_session` with the same name gives another session on the same keys, as
another process would have it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from tidegate.cluster.kv import MAX_VALUE_BYTES, Entry, Presence, Session
from tidegate.errors import (
    CoordinationUnavailable,
    InvariantViolation,
    MaybeWritten,
    NotWritten,
    SessionLost,
    TidegateError,
)
from tidegate.testing.files import at_once

LONG_S = 30.0
"""What takes as long as that has not happened."""
SHORT_S = 0.3

ODD_KEYS = (
    "a b",
    "50%25",
    "a+b&c=d#e?f",
    "g*h[i]{j}:k;l,m!",
    'quote\'d "twice"',
    "back\\slash",
    ".hidden",
    "..dots",
    "größe",
    "潮🌊",
    "x" * 200,
    "deep/er/and/deep/er",
    "1",
)
NO_KEYS = ("", "/a", "a/", "a//b", ".", "a/..", "../a", "a@1", "@present/a", "a\nb", "a\0", "\x7f", "\ud800", "x" * 201)


def eventually(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < until, "it has not come to be so"
        time.sleep(0.01)


class KVConformance:
    lease_s: float = 2.0

    def make_session(self, name: str) -> Session:
        """A session on the keys of this name, of which there are none before a test uses them."""
        raise NotImplementedError

    def cut_off(self, session: Session) -> None:
        """Nothing that it does comes through from now on, and nothing comes to it."""
        raise NotImplementedError

    def mend(self, session: Session) -> None:
        """It is cut off no longer."""
        raise NotImplementedError

    def setup_method(self) -> None:
        self.opened: list[Session] = []

    def teardown_method(self) -> None:
        for session in self.opened:
            session.close()

    def open(self, name: str) -> Session:
        session = self.make_session(name)
        self.opened.append(session)
        return session

    # -- own keys ---------------------------------------------------------------------------------

    def test_what_is_written_is_read_by_everybody(self) -> None:
        writer, reader = self.open("written"), self.open("written")
        assert reader.read("boards/a") is None
        assert reader.read_folder("boards") == {}
        for value in (b"\x00\xff", b"", b"another, which is longer"):
            writer.write("boards/a", value)
            assert self.value(writer, "boards/a") == writer.read_folder("boards")["a"].value == value
            for each in (reader, self.open("written")):
                self.sees(each, "boards/a", value)
                entry = each.read("boards/a")
                assert each.read_folder("boards") == {"a": entry}
                assert writer.read("boards/a") == entry
        assert self.open("written elsewhere").read("boards/a") is None

    def test_versions_grow_with_every_change_also_over_a_delete(self) -> None:
        writer, reader = self.open("grow"), self.open("grow")
        versions = []
        for number in range(6):
            writer.write("boards/a", str(number).encode())
            self.sees(reader, "boards/a", str(number).encode())
            versions.append(self.version(reader, "boards/a"))
            if number % 2:
                writer.delete(["boards/a"])
                assert writer.read("boards/a") is None
                self.sees(reader, "boards/a", None)
        anew = self.open("grow")
        for value in (b"of the next owner", b"again"):
            anew.write("boards/a", value)
            self.sees(reader, "boards/a", value)
            versions.append(self.version(reader, "boards/a"))
        assert versions == sorted(set(versions))

    def test_deleting_what_is_not_there_is_no_error(self) -> None:
        session, reader = self.open("deleted"), self.open("deleted")
        for key in ("a", "folder/b", "folder/c", "folder/deep/d"):
            session.write(key, b"")
        eventually(lambda: len(reader.read_folder("folder")) == 2)
        session.delete(["a", "folder/b", "folder/gone", "nothing/there", "folder/b"])
        session.delete([])
        self.sees(reader, "a", None)
        eventually(lambda: reader.read_folder("folder").keys() == {"c"})
        self.sees(reader, "folder/deep/d", b"")

    def test_a_folder_is_cleared_with_all_that_is_below_it(self) -> None:
        session, reader = self.open("cleared"), self.open("cleared")
        for key in ("top/a/1", "top/a/deep/2", "top/b/3", "topmost/4"):
            session.create(key, key.encode())
        assert session.folders("top") == ["a", "b"]
        assert session.folders("top/b") == session.folders("nothing") == []
        self.sees(reader, "top/a/deep/2", b"top/a/deep/2")
        session.clear("top/a")
        session.clear("top/a")
        session.clear("nothing/there")
        assert [session.read(key) for key in ("top/a/1", "top/a/deep/2")] == [None, None]
        eventually(lambda: reader.read_folder("top/a") == {} and reader.read("top/a/deep/2") is None)
        self.sees(reader, "top/b/3", b"top/b/3")
        self.sees(reader, "topmost/4", b"topmost/4")
        assert "a" not in session.folders("top") or not session.read_folder("top/a")

    def test_folders_do_not_see_keys_of_folders_below(self) -> None:
        session, reader = self.open("folders"), self.open("folders")
        for key in ("a", "a/b", "a/b/c", "a/d"):
            session.write(key, key.encode())
        for each in (session, reader):
            self.sees(each, "a/d", b"a/d")
            assert {name: entry.value for name, entry in each.read_folder("a").items()} == {"b": b"a/b", "d": b"a/d"}
            assert each.read_folder("a/b").keys() == {"c"}
            assert each.read_folder("").keys() == {"a"}
            assert each.read_folder("a/b/c") == each.read_folder("ab") == {}

    def test_a_value_may_be_as_large_as_it_may_and_no_larger(self) -> None:
        session, reader = self.open("large"), self.open("large")
        largest = bytes(range(256)) * (MAX_VALUE_BYTES // 256)
        assert session.create("a", largest)
        session.write("b", largest)
        for key in ("a", "b"):
            self.sees(reader, key, largest)
        assert session.swap("a", largest[::-1], self.version(session, "a"))
        for call in (session.write, session.create, partial(session.swap, version=self.version(session, "a"))):
            said = refused(partial(call, "a", largest + b"x"))
            assert str(MAX_VALUE_BYTES) in said
            assert "'a'" in said
        refused(lambda: session.join("a", "1", largest + b"x"))
        self.sees(reader, "a", largest[::-1])

    def test_keys_may_hold_any_letters_that_can_be_printed(self) -> None:
        session, reader = self.open("odd"), self.open("odd")
        for key in ODD_KEYS:
            session.write(f"own/{key}", key.encode())
            assert session.create(f"shared/{key}", key.encode())
        for key in ODD_KEYS:
            for folder in ("own", "shared"):
                self.sees(reader, f"{folder}/{key}", key.encode())
        assert reader.read_folder("own").keys() == {key for key in ODD_KEYS if "/" not in key}
        session.delete([f"own/{key}" for key in ODD_KEYS])
        eventually(lambda: reader.read_folder("own") == {})

    def test_what_is_no_key_is_refused(self) -> None:
        session = self.open("refused")
        for key in NO_KEYS:
            refused(partial(session.write, key, b""))
            refused(partial(session.create, key, b""))
            refused(partial(session.swap, key, b"", 1))
            refused(partial(session.read, key))
            refused(partial(session.delete, ["a", key]))
            refused(partial(session.join, key, "1", b""))
            refused(partial(session.join, "a", key, b""))
            if key:
                refused(partial(session.read_folder, key))
                refused(partial(session.wait, [key], 0))
        assert session.read_folder("") == {}
        assert session.present() == {}

    def test_nobody_sees_an_older_version_after_a_newer_one_or_none(self) -> None:
        writer, readers = self.open("older"), [self.open("older") for _ in range(3)]
        writer.write("boards/a", b"0")
        is_done = threading.Event()

        def write() -> None:
            for number in range(1, 100):
                writer.write("boards/a", str(number).encode())
            is_done.set()

        def by_key(reader: Session) -> Entry | None:
            return reader.read("boards/a")

        def by_folder(reader: Session) -> Entry | None:
            return reader.read_folder("boards").get("a")

        def read(reader: Session, call: Callable[[Session], Entry | None]) -> None:
            last = (0, 0)
            while not is_done.is_set():
                entry = call(reader)
                assert entry is not None
                now = (int(entry.value), entry.version)
                assert now >= last
                last = now

        readings = [(readers[0], by_key), (readers[1], by_folder), (readers[2], by_key), (readers[2], by_folder)]
        calls: list[Callable[[], None]] = [write, *(partial(read, *each) for each in readings)]
        at_once(calls)
        for reader in readers:
            self.sees(reader, "boards/a", b"99")

    # -- shared keys ------------------------------------------------------------------------------

    def test_create_writes_only_where_nothing_is(self) -> None:
        session, other = self.open("created"), self.open("created")
        assert session.create("channels/a/1", b"mine") is True
        assert session.create("channels/a/1", b"mine, again") is False
        assert other.create("channels/a/1", b"theirs") is False
        self.sees(other, "channels/a/1", b"mine")
        assert other.read_folder("channels/a") == {"1": other.read("channels/a/1")}
        other.delete(["channels/a/1"])
        self.sees(session, "channels/a/1", None)
        assert session.read_folder("channels/a") == {}

    def test_of_many_that_create_one_key_exactly_one_does(self) -> None:
        racers = [self.open("raced") for _ in range(6)]
        for number in range(10):
            key = f"claims/{number}"
            won = at_once(partial(racer.create, key, str(each).encode()) for each, racer in enumerate(racers))
            assert won.count(True) == 1
            for racer in racers:
                self.sees(racer, key, str(won.index(True)).encode())

    def test_swap_writes_only_over_the_version_that_it_is_given(self) -> None:
        session, other = self.open("swapped"), self.open("swapped")
        assert session.swap("leader", b"x", 1) is False
        assert session.create("leader", b"0")
        versions = []
        for number in range(1, 25):
            before = self.version(other, "leader")
            versions.append(before)
            assert session.swap("leader", str(number).encode(), before) is True
            assert other.swap("leader", b"late", before) is False
            assert other.create("leader", b"anew") is False
            self.sees(other, "leader", str(number).encode())
            assert other.read_folder("")["leader"] == other.read("leader")
            assert self.version(other, "leader") > before
        for version in versions:
            assert session.swap("leader", b"far too late", version) is False
        assert session.swap("leader", b"from nowhere", before + 1_000_000) is False
        session.delete(["leader"])
        self.sees(other, "leader", None)
        assert other.swap("leader", b"gone", before) is False
        assert session.read_folder("") == {}

    def test_no_swap_of_many_is_lost_or_done_twice(self) -> None:
        racers = [self.open("counted") for _ in range(4)]
        racers[0].create("count", b"")
        at_once(partial(count_up, racer, str(each), 8) for each, racer in enumerate(racers))
        assert sorted(counted(self.open("counted"))) == sorted(f"{each}:{n}" for each in range(4) for n in range(8))

    def test_no_swap_is_lost_or_done_twice_where_connections_are_lost(self) -> None:
        racers = [self.open("counted on") for _ in range(3)]
        racers[0].create("count", b"")

        def disturb() -> None:
            for number in range(12):
                self.cut_off(racers[number % 3])
                time.sleep(0.02)
                self.mend(racers[number % 3])

        calls: list[Callable[[], None]] = [partial(count_up, racer, str(each), 8) for each, racer in enumerate(racers)]
        at_once([*calls, disturb])
        assert sorted(counted(self.open("counted on"))) == sorted(f"{each}:{n}" for each in range(3) for n in range(8))

    # -- changes ----------------------------------------------------------------------------------

    def test_a_wait_returns_when_something_changes(self) -> None:
        writer, reader = self.open("changes"), self.open("changes")
        changes: list[Callable[[], object]] = [
            lambda: writer.write("boards/a", b"1"),
            lambda: writer.write("boards/a", b"2"),
            lambda: writer.create("boards/b", b""),
            lambda: writer.swap("boards/b", b"", self.version(writer, "boards/b")),
            lambda: writer.delete(["boards/a"]),
            lambda: writer.join("a", "1", b""),
            lambda: writer.join("a", "2", b""),
            writer.leave,
        ]
        for change in changes:
            self.settle(reader, ["boards", "channels/a"])
            with ThreadPoolExecutor(1) as thread:
                waiting = thread.submit(reader.wait, ["channels/a", "boards"], LONG_S)
                change()
                waiting.result(LONG_S / 2)

    def test_a_wait_returns_at_once_for_what_has_changed_since_it_was_read(self) -> None:
        writer, reader = self.open("before"), self.open("before")
        self.settle(reader, ["boards"])
        writer.write("boards/a", b"1")
        self.waits_briefly(reader, ["boards"])
        self.settle(reader, ["boards"])
        writer.join("a", "1", b"")
        self.waits_briefly(reader, ["boards"])

    def test_a_wait_returns_for_a_key_that_was_looked_for_by_itself(self) -> None:
        writer, reader = self.open("awaited"), self.open("awaited")
        reader.present()
        for number in range(3):
            key = f"channels/a/{number}"
            assert reader.read(key) is None
            assert writer.create(key, b"")
            self.waits_briefly(reader, ["channels/a"])
            self.sees(reader, key, b"")

    def test_a_wait_lasts_when_nothing_changes(self) -> None:
        writer, reader = self.open("nothing"), self.open("nothing")
        writer.write("boards/a", b"1")
        writer.join("a", "1", b"")
        self.settle(reader, ["boards"])
        writer.write("boards/below/a", b"1")
        writer.write("elsewhere/a", b"1")
        began_s = time.monotonic()
        reader.wait(["boards"], SHORT_S)
        assert time.monotonic() - began_s >= SHORT_S * 0.9
        reader.wait(["boards"], 0)
        reader.wait([], 0)

    def test_every_change_is_heard_of_by_who_reads_and_waits(self) -> None:
        writer, readers = self.open("heard"), [self.open("heard") for _ in range(2)]

        def write() -> None:
            for number in range(30):
                writer.write("boards/a", str(number).encode())

        def follow(reader: Session) -> None:
            until = time.monotonic() + LONG_S / 2
            while (found := reader.read_folder("boards").get("a")) is None or found.value != b"29":
                reader.present()
                reader.wait(["boards"], LONG_S)
                assert time.monotonic() < until, "a notice was missed"

        calls: list[Callable[[], None]] = [write, *(partial(follow, reader) for reader in readers)]
        at_once(calls)

    def test_several_threads_may_wait_for_the_same(self) -> None:
        writer, reader = self.open("together"), self.open("together")
        self.settle(reader, ["boards"])
        with ThreadPoolExecutor(3) as threads:
            waiting = [threads.submit(reader.wait, ["boards"], LONG_S) for _ in range(3)]
            writer.write("boards/a", b"1")
            for each in waiting:
                each.result(LONG_S / 2)

    def test_who_waits_returns_when_the_session_is_closed(self) -> None:
        session = self.open("closed")
        self.settle(session, ["boards"])
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(session.wait, ["boards"], LONG_S)
            time.sleep(0.05)  # so that it has begun to, in most runs: it may also find it closed
            session.close()
            with suppress(CoordinationUnavailable):
                waiting.result(LONG_S / 2)
        session.close()
        for call in (lambda: session.write("a", b""), lambda: session.create("a", b""), lambda: session.delete(["a"])):
            assert isinstance(failure(call), NotWritten | MaybeWritten)
        assert isinstance(failure(lambda: session.read("a")), CoordinationUnavailable)

    # -- who is there -----------------------------------------------------------------------------

    def test_who_has_joined_is_seen_by_all_until_it_leaves(self) -> None:
        one, two, watcher = self.open("joined"), self.open("joined"), self.open("joined")
        assert watcher.present() == {}
        one.join("a", "a-1", b"at host:1")
        two.join("b", "b-1", b"")
        expected = {"a": Presence("a", "a-1", b"at host:1"), "b": Presence("b", "b-1", b"")}
        for each in (one, two, watcher, self.open("joined")):
            eventually(lambda each=each: each.present() == expected)  # type: ignore[misc]
        one.leave()
        one.leave()
        for each in (one, two, watcher):
            eventually(lambda each=each: each.present().keys() == {"b"})  # type: ignore[misc]
        one.write("a", b"who has left may go on writing")
        two.close()
        eventually(lambda: watcher.present() == {})

    def test_who_lives_is_present_for_longer_than_a_lease(self) -> None:
        member, watcher = self.open("lives"), self.open("lives")
        member.join("a", "1", b"")
        until = time.monotonic() + 1.6 * self.lease_s
        while time.monotonic() < until:
            assert watcher.present().keys() == member.present().keys() == {"a"}
            watcher.wait([], SHORT_S)

    def test_who_is_killed_is_not_present_after_a_lease(self) -> None:
        member, watcher = self.open("killed"), self.open("killed")
        member.join("a", "1", b"")
        eventually(lambda: watcher.present().keys() == {"a"})
        self.cut_off(member)
        assert watcher.present().keys() == {"a"}
        until = time.monotonic() + LONG_S
        while watcher.present():
            watcher.wait([], LONG_S)  # a notice comes of it
            assert time.monotonic() < until
        self.mend(member)
        eventually(lambda: isinstance(failure(lambda: member.read("a")), SessionLost))
        for call in self.calls(member):
            assert isinstance(failure(call), SessionLost)
        assert self.open("killed").present() == watcher.present() == {}
        eventually(lambda: failure(lambda: member.join("a", "2", b"")) is None)
        assert failure(lambda: member.write("a", b"")) is None
        eventually(lambda: watcher.present() == {"a": Presence("a", "2", b"")})

    def test_of_one_name_the_last_one_is_present_and_the_other_hears_of_it(self) -> None:
        first, second, watcher = self.open("named"), self.open("named"), self.open("named")
        first.join("a", "1", b"")
        first.write("boards/a", b"")
        eventually(lambda: watcher.present() == {"a": Presence("a", "1", b"")})
        second.join("a", "2", b"")
        eventually(lambda: watcher.present() == second.present() == {"a": Presence("a", "2", b"")})
        eventually(lambda: isinstance(failure(lambda: first.read("boards/a")), SessionLost))
        for call in self.calls(first):
            assert isinstance(failure(call), SessionLost)
        first.join("a", "3", b"")
        assert failure(lambda: first.read("boards/a")) is None
        eventually(lambda: isinstance(failure(lambda: second.read("boards/a")), SessionLost))
        second.close()
        for each in (first, watcher):
            self.settle(each, [])
            assert {name: seen.incarnation for name, seen in each.present().items()} == {"a": "3"}

    def test_who_was_not_present_for_a_moment_only_hears_of_it(self) -> None:
        first, second = self.open("moment"), self.open("moment")
        first.join("a", "1", b"")
        second.join("a", "2", b"")
        second.leave()
        eventually(lambda: isinstance(failure(lambda: first.read("a")), SessionLost))
        assert first.leave() is None  # type: ignore[func-returns-value]
        assert first.read("a") is None, "who has left is not present, and need not be"

    def test_who_waits_hears_that_the_session_is_lost(self) -> None:
        first, second = self.open("waits"), self.open("waits")
        first.join("a", "1", b"")
        self.settle(first, ["boards"])
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(self.follow_until_lost, first)
            second.join("a", "2", b"")
            waiting.result(LONG_S)

    # -- lost connections -------------------------------------------------------------------------

    def test_what_fails_while_cut_off_says_what_is_known_of_it(self) -> None:
        session, reader = self.open("cut"), self.open("cut")
        session.write("boards/a", b"before")
        self.cut_off(session)
        written = failure(lambda: session.write("boards/a", b"meanwhile"))
        assert isinstance(written, NotWritten | MaybeWritten)
        assert isinstance(failure(lambda: session.create("b", b"")), NotWritten | MaybeWritten)
        deleted = failure(lambda: session.delete(["boards/a"]))
        assert isinstance(deleted, NotWritten | MaybeWritten)
        eventually(lambda: isinstance(failure(lambda: session.read("boards/a")), CoordinationUnavailable))
        self.sees(reader, "boards/a", b"before")
        self.mend(session)
        eventually(lambda: failure(lambda: session.write("boards/b", b"after")) is None)
        self.sees(reader, "boards/b", b"after")
        if isinstance(written, NotWritten) and isinstance(deleted, NotWritten):
            self.sees(reader, "boards/a", b"before")
        eventually(lambda: session.read_folder("boards") == reader.read_folder("boards"))

    def test_what_has_changed_while_cut_off_is_seen_afterwards(self) -> None:
        writer, reader = self.open("mended"), self.open("mended")
        writer.write("boards/a", b"1")
        self.settle(reader, ["boards"])
        self.cut_off(reader)
        writer.write("boards/a", b"2")
        writer.join("a", "1", b"")
        self.mend(reader)
        eventually(lambda: failure(lambda: reader.wait(["boards"], LONG_S)) is None)
        eventually(lambda: failure(lambda: self.value(reader, "boards/a")) is None)
        eventually(lambda: self.value(reader, "boards/a") == reader.read_folder("boards")["a"].value == b"2")
        eventually(lambda: reader.present().keys() == {"a"})

    # -- what the tests say -----------------------------------------------------------------------

    def sees(self, session: Session, key: str, value: bytes | None) -> None:
        """Soon, and by each of the ways to read it from then on."""
        folder, _, name = key.rpartition("/")

        def is_seen() -> bool:
            entry = session.read(key)
            return (None if entry is None else entry.value) == value

        eventually(is_seen)
        found = session.read_folder(folder).get(name)
        assert (None if found is None else found.value) == value

    def value(self, session: Session, key: str) -> bytes:
        entry = session.read(key)
        assert entry is not None
        return entry.value

    def version(self, session: Session, key: str) -> int:
        entry = session.read(key)
        assert entry is not None
        return entry.version

    def settle(self, session: Session, folders: list[str]) -> None:
        """Read all, until no notice of what came before is on its way."""
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            for folder in folders:
                session.read_folder(folder)
            session.present()
            began_s = time.monotonic()
            session.wait(folders, SHORT_S / 2)
            if time.monotonic() - began_s >= SHORT_S * 0.4:
                return
        raise AssertionError("notices come for nothing all the time")

    def waits_briefly(self, session: Session, folders: list[str]) -> None:
        began_s = time.monotonic()
        session.wait(folders, LONG_S)
        assert time.monotonic() - began_s < LONG_S / 2

    def follow_until_lost(self, session: Session) -> None:
        until = time.monotonic() + LONG_S / 2
        with suppress(SessionLost):
            while time.monotonic() < until:
                session.read_folder("boards")
                session.present()
                session.wait(["boards"], LONG_S)
            raise AssertionError("it has not heard of it")

    def calls(self, session: Session) -> list[Callable[[], object]]:
        return [
            lambda: session.read("boards/a"),
            lambda: session.read_folder("boards"),
            lambda: session.write("boards/a", b""),
            lambda: session.create("boards/b", b""),
            lambda: session.swap("boards/b", b"", 1),
            lambda: session.delete(["boards/a"]),
            lambda: session.wait(["boards"], LONG_S),
            session.present,
        ]


def count_up(session: Session, name: str, times: int) -> None:
    """Add to what is counted, each number once, whatever fails."""
    for number in range(times):
        own = f"{name}:{number},".encode()
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            with suppress(CoordinationUnavailable):
                entry = session.read("count")
                assert entry is not None
                # It may be there by a try that did not know.
                if own in entry.value or session.swap("count", entry.value + own, entry.version):
                    break


def counted(session: Session) -> list[str]:
    entry = session.read("count")
    assert entry is not None
    return entry.value.decode().split(",")[:-1]


def failure(call: Callable[[], object]) -> TidegateError | None:
    """What Tidegate has to say of it, which is one line."""
    try:
        call()
    except TidegateError as error:
        failed = error
    else:
        return None
    assert "\n" not in str(failed)
    return failed


def refused(call: Callable[[], object]) -> str:
    """As what cannot be, in one line."""
    error = failure(call)
    assert isinstance(error, InvariantViolation), error
    return str(error)
