"""Keys and values in ZooKeeper pass the tests that all must pass; and what a server that is killed, sessions that
expire and passwords do to them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from kazoo.client import KazooClient  # type: ignore[import-untyped]

from tests.zookeeper_server import Link, ZooKeeperServer
from tidegate.cluster import zookeeper
from tidegate.cluster.connect import connect
from tidegate.cluster.kv import Presence, Session
from tidegate.cluster.zookeeper import ZooKeeperSession
from tidegate.errors import CoordinationUnavailable, InvalidConfig, SessionLost
from tidegate.storage.memory import Memory
from tidegate.testing.kv import KVConformance, eventually, failure

pytestmark = pytest.mark.zookeeper


class TestZooKeeper(KVConformance):
    lease_s = 2.0

    @pytest.fixture(autouse=True)
    def given(self, zookeeper_server: ZooKeeperServer) -> Iterator[None]:
        self.server = zookeeper_server
        self.path = f"/tests/{uuid.uuid4().hex}"
        self.links: dict[int, Link] = {}
        yield
        super().teardown_method()
        for link in self.links.values():
            link.close()

    def teardown_method(self) -> None:
        """Done by the fixture, while there are links."""

    def make_session(self, name: str) -> Session:
        link = Link(self.server)
        session = ZooKeeperSession(link.servers, f"{self.path}/{name}", lease_s=self.lease_s)
        self.links[id(session)] = link
        return session

    def cut_off(self, session: Session) -> None:
        self.links[id(session)].drop()

    def mend(self, session: Session) -> None:
        self.links[id(session)].restore()

    # -- servers and sessions ---------------------------------------------------------------------

    def test_a_server_that_is_killed_and_started_again_has_lost_nothing(self) -> None:
        writer, reader = self.open("killed server"), self.open("killed server")
        writer.write("boards/a", b"1")
        version = self.version(reader, "boards/a")
        self.settle(reader, ["boards"])
        self.server.stop()
        try:
            eventually(lambda: isinstance(failure(lambda: writer.write("boards/a", b"2")), CoordinationUnavailable))
            eventually(lambda: isinstance(failure(lambda: reader.read("boards/a")), CoordinationUnavailable))
        finally:
            self.server.start()
        eventually(lambda: failure(lambda: writer.write("boards/a", b"3")) is None)
        eventually(lambda: failure(lambda: reader.wait(["boards"], 1)) is None)
        eventually(lambda: self.value(reader, "boards/a") == b"3")
        assert self.version(reader, "boards/a") > version

    def test_a_member_outlives_its_server_or_hears_that_it_has_not(self) -> None:
        member, watcher = self.open("outlived"), self.open("outlived")
        member.join("a", "1", b"")
        self.server.stop()
        self.server.start()
        eventually(lambda: failure(watcher.present) is None)
        eventually(lambda: isinstance(failure(lambda: member.read("a")), SessionLost | None))
        if failure(lambda: member.read("a")) is None:
            assert watcher.present().keys() == {"a"}
        else:
            eventually(lambda: failure(lambda: member.join("a", "2", b"")) is None)
        eventually(lambda: failure(lambda: member.write("a", b"")) is None)

    def test_a_session_that_the_server_has_expired_is_lost(self) -> None:
        member, watcher = self.open("expired"), self.open("expired")
        assert isinstance(member, ZooKeeperSession)
        member.join("a", "1", b"")
        eventually(lambda: watcher.present().keys() == {"a"})
        # Who closes a session under its id and password ends it for all.
        twin = KazooClient(self.server.servers, client_id=member._client.client_id)
        twin.start()
        twin.stop()
        twin.close()
        eventually(lambda: isinstance(failure(lambda: member.read("a")), SessionLost))
        eventually(lambda: watcher.present() == {})
        assert isinstance(failure(lambda: member.write("a", b"")), SessionLost), "also once it is connected again"
        eventually(lambda: failure(lambda: member.join("a", "2", b"")) is None)
        eventually(lambda: watcher.present() == {"a": Presence("a", "2", b"")})

    def test_a_session_that_has_not_joined_is_not_lost_when_it_expires(self) -> None:
        session = self.open("not joined")
        assert isinstance(session, ZooKeeperSession)
        session.write("boards/a", b"")
        session.read_folder("boards")
        twin = KazooClient(self.server.servers, client_id=session._client.client_id)
        twin.start()
        twin.stop()
        twin.close()
        eventually(lambda: session._connection > 1)
        eventually(lambda: failure(lambda: session.write("boards/b", b"")) is None)
        assert session.read_folder("boards").keys() == {"a", "b"}

    def test_who_could_not_say_that_it_leaves_says_it_later(self) -> None:
        member, watcher = self.open("left"), self.open("left")
        assert isinstance(member, ZooKeeperSession)
        member.join("a", "1", b"")
        eventually(lambda: watcher.present().keys() == {"a"})
        connected = member._client
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(member, "_client", SimpleNamespace(connected=False))
            member.leave()
        assert member._client is connected
        assert watcher.present().keys() == {"a"}
        member.join("b", "2", b"")
        eventually(lambda: watcher.present().keys() == {"b"})

    def test_no_thread_is_left_when_a_session_is_closed(self) -> None:
        before = set(threading.enumerate())
        session = ZooKeeperSession(self.server.servers, self.path, lease_s=self.lease_s)
        session.join("a", "1", b"")
        session.close()
        eventually(lambda: set(threading.enumerate()) <= before)

    def test_only_what_has_changed_is_read_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        writer, reader = self.open("cached"), self.open("cached")
        assert isinstance(reader, ZooKeeperSession)
        for number in range(10):
            writer.write(f"boards/{number}", b"")
        self.settle(reader, ["boards"])
        asked: list[str] = []
        send = reader._send

        def count(kind: type[CoordinationUnavailable], what: str, *given: object, **named: object) -> object:
            asked.append(what)
            return send(kind, what, *given, **named)

        monkeypatch.setattr(reader, "_send", count)
        reader.read_folder("boards")
        reader.present()
        assert reader.read("boards/3") is not None
        assert asked == []
        writer.write("boards/7", b"new")
        eventually(lambda: reader.read_folder("boards")["7"].value == b"new")
        assert asked == ["get"]

    def test_a_member_that_has_heard_nothing_for_long_asks_before_it_says_what_it_knows(self) -> None:
        slept_s = [0.0]
        link = Link(self.server)
        member = ZooKeeperSession(
            link.servers, f"{self.path}/slept", lease_s=self.lease_s, clock=lambda: time.monotonic() + slept_s[0]
        )
        self.opened.append(member)
        self.links[id(member)] = link
        member.join("a", "1", b"")
        member.write("boards/a", b"")
        self.settle(member, ["boards"])
        link.drop()
        assert member.read_folder("boards").keys() == {"a"}, "it does not know, and what it knows was so a moment ago"
        slept_s[0] = self.lease_s / 2
        assert isinstance(failure(lambda: member.read_folder("boards")), CoordinationUnavailable)
        slept_s[0] = 2 * self.lease_s
        eventually(lambda: isinstance(failure(lambda: member.read_folder("boards")), SessionLost))

    # -- addresses --------------------------------------------------------------------------------

    def test_an_address_leads_to_a_server(self) -> None:
        for path in ("", "/", f"{self.path}/addressed/", "/an%20odd%20path"):
            session = connect(f"zk://127.0.0.1:1,{self.server.servers}{path}", Memory(), self.lease_s)
            session.write("addressed", b"")
            session.join("a", "1", b"")
            assert session.read_folder("").keys() == {"addressed"}
            assert session.present().keys() == {"a"}
            session.delete(["addressed"])
            session.close()

    def test_a_password_is_used_and_never_said(self) -> None:
        path = f"{self.path}/secret"
        session = connect(f"zk://me:very%2Dsecret@{self.server.servers}{path}", Memory(), self.lease_s)
        session.join("a", "1", b"")
        session.write("boards/a", b"")
        assert session.read_folder("boards").keys() == {"a"}
        for login in ("", "me:wrong-password@"):
            other = connect(f"zk://{login}{self.server.servers}{path}", Memory(), self.lease_s)
            for call in (lambda: other.read("boards/a"), lambda: other.write("boards/a", b"")):  # noqa: B023
                error = failure(call)
                assert isinstance(error, InvalidConfig)
                assert "secret" not in str(error)
                assert "wrong-password" not in str(error)
            other.close()
        session.close()

    def test_a_server_that_is_not_there_is_told_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zookeeper, "_CONNECT_S", 0.5)
        error = failure(lambda: connect("zk://me:very-secret@127.0.0.1:1/path", Memory(), 1.0))
        assert isinstance(error, CoordinationUnavailable)
        assert "127.0.0.1:1" in str(error)
        assert "secret" not in str(error)
