"""Keys and values in ZooKeeper.

Below the path of the address, `keys/boards/a@` is the key `boards/a`: no folder's node ends with an `@`. The ephemeral
node `present/<name>` is of who is present by this name. In nodes' names stand percent signs for what ZooKeeper takes
none of. A version is the number of the transaction that has written it
(`mzxid`), which grows also where a key was deleted.

Folders that were read are watched, and what is known of them is kept: only what has changed is read again. After a
connection was lost all of it has to be looked at again, as notices may have been.

- Nothing is tried again that may have taken effect: `MaybeWritten`. Without a connection nothing is sent: `NotWritten`.
- Whoever has joined is lost with ZooKeeper's session, and when it had no connection for the lease; also when its node
  is gone, or that of another session.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec
from kazoo.client import KazooClient, KazooState  # type: ignore[import-untyped]
from kazoo.exceptions import (  # type: ignore[import-untyped]
    AuthFailedError,
    BadVersionError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    SessionExpiredError,
)
from kazoo.handlers.threading import KazooTimeoutError  # type: ignore[import-untyped]
from kazoo.security import CREATOR_ALL_ACL  # type: ignore[import-untyped]

from tidegate.cluster.keys import check_folder, check_key, check_name, check_value
from tidegate.cluster.kv import Entry, Presence
from tidegate.cluster.seen import Seen
from tidegate.errors import CoordinationUnavailable, InvalidConfig, MaybeWritten, NotWritten, SessionLost

_TRIES: Final = 20
_ANSWER_S: Final = 10.0
_CONNECT_S: Final = 10.0
_KEY: Final = "@"
_RECONNECT: Final = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0, "max_jitter": 0.1}

# What goes wrong is told by errors; the client would say it a second time, and at length.
_SILENT: Final = logging.getLogger("tidegate.cluster.zookeeper.client")
_SILENT.setLevel(logging.CRITICAL + 1)


class _View:
    """The children of a node that are watched, and what is known of them."""

    def __init__(self, connection: int) -> None:
        self.connection = connection
        """The number of the connection that its watches came with."""
        self.is_whole = False
        self.stale: set[str] = set()
        self.entries: dict[str, Entry] = {}


class ZooKeeperSession:
    """A `Session` over ZooKeeper. `servers`: `host:port`, with commas between them; `path`: the node that all is below;
    `credentials`: `user:password`, for whom alone what is written here is then readable."""

    def __init__(
        self,
        servers: str,
        path: str,
        *,
        lease_s: float = 10.0,
        credentials: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path.rstrip("/")
        self._lease_s = lease_s
        self._clock = clock
        self._answer_s = min(lease_s, _ANSWER_S)
        self._views: dict[str, _View] = {}
        self._reading = threading.RLock()
        self._changing = threading.Condition()
        self._changes = self._connection = self._synced = 0
        self._cut_off_s: float | None = None
        self._own: str | None = None
        self._own_session = 0
        self._leaving: dict[str, int] = {}
        """Nodes of one's own that have yet to be deleted, and their sessions."""
        self._is_own_in_doubt = False
        self._answered_s = clock()
        self._lost: str | None = None
        self._is_closed = False
        self._seen = Seen()
        self._client = KazooClient(
            hosts=servers,
            timeout=lease_s,
            connection_retry=_RECONNECT,
            auth_data=None if credentials is None else [("digest", credentials)],
            default_acl=None if credentials is None else CREATOR_ALL_ACL,
            logger=_SILENT,
        )
        self._client.add_listener(self._on_connection)
        try:
            self._client.start(_CONNECT_S)
        except KazooTimeoutError as error:
            raise CoordinationUnavailable(f"ZooKeeper at {servers} does not answer") from error

    # -- what ZooKeeper tells by itself, on its client's threads ------------------------------------

    def _on_connection(self, state: str) -> None:
        with self._changing:
            if state == KazooState.CONNECTED:
                self._connection += 1
                self._cut_off_s = None
                self._is_own_in_doubt = True
            elif self._cut_off_s is None:
                self._cut_off_s = self._clock()
            if state == KazooState.LOST and self._own is not None:
                self._lost = "its session with ZooKeeper has expired"
            self._notify()

    def _on_change(self, event: Any) -> None:
        if event.path is None:
            return
        parent, _, name = event.path.rpartition("/")
        with self._changing:
            if (view := self._views.get(event.path)) is not None:
                view.is_whole = False
            if (view := self._views.get(parent)) is not None:
                view.stale.add(name)
            if event.path == self._own:
                self._is_own_in_doubt = True
            self._notify()

    def _notify(self) -> None:
        self._changes += 1
        self._changing.notify_all()

    # -- who is there -----------------------------------------------------------------------------

    def join(self, instance: str, incarnation: str, value: bytes) -> None:
        data = msgspec.msgpack.encode((check_name(incarnation), check_value(instance, value)))
        node = f"{self._path}/present/{quote(check_name(instance))}"
        self._withdraw("it could not join")
        self._ask(NotWritten, "ensure_path", f"{self._path}/present")
        for _ in range(_TRIES):
            before = self._ask(NotWritten, "exists", node)
            change = self._client.transaction()
            if before is not None:
                change.delete(node, before.version)
            change.create(node, data, ephemeral=True)
            answers = self._answered(MaybeWritten, change.commit_async())
            if not any(isinstance(answer, Exception) for answer in answers):
                break
        else:
            raise NotWritten(f"could not join: others join as {instance!r} all the time")
        made = self._ask(MaybeWritten, "exists", node, self._on_change)
        if made is None or made.ephemeralOwner != self._client.client_id[0]:
            raise MaybeWritten("could not join: it was not present any more when that was looked at")
        with self._changing:
            self._own, self._own_session, self._lost = node, made.ephemeralOwner, None

    def leave(self) -> None:
        self._withdraw(None)

    def _withdraw(self, lost: str | None) -> None:
        with self._changing:
            if self._own is not None:
                self._leaving[self._own] = self._own_session
            self._own, self._lost = None, lost
        self._delete_left()

    def _delete_left(self) -> None:
        """What cannot be asked for now is tried again with the next call; it ends with the session at the latest."""
        for node, session in tuple(self._leaving.items()):
            with suppress(CoordinationUnavailable):
                found = self._ask(NotWritten, "exists", node)
                if found is not None and found.ephemeralOwner == session and node != self._own:
                    with suppress(NoNodeError, BadVersionError):
                        self._ask(MaybeWritten, "delete", node, found.version)
                self._leaving.pop(node, None)

    def present(self) -> Mapping[str, Presence]:
        self._check()
        found = self._present()
        self._seen.present(_incarnations(found))
        return found

    def _present(self) -> dict[str, Presence]:
        found = {}
        for name, entry in self._refreshed(f"{self._path}/present").items():
            incarnation, value = msgspec.msgpack.decode(entry.value, type=tuple[str, bytes])
            found[name] = Presence(name, incarnation, value)
        return found

    def _check(self) -> None:
        """`SessionLost` if others may not have seen this one for a time. Who has slept, or has a connection that is
        silent, does not know of that: so from time to time it is asked for."""
        with self._changing:
            now_s, own = self._clock(), self._own
            if own is not None and self._cut_off_s is not None and now_s - self._cut_off_s > self._lease_s:
                self._lost = self._lost or f"it had no connection for {self._lease_s:g} s"
            is_quiet = now_s - self._answered_s > self._lease_s / 2
            is_in_doubt = own is not None and self._lost is None and (self._is_own_in_doubt or is_quiet)
            self._is_own_in_doubt = self._is_own_in_doubt and not is_in_doubt
        if self._leaving:
            self._delete_left()
        if is_in_doubt:
            self._look_at_own(own)
        if self._lost is not None:
            raise SessionLost(f"this session is lost: {self._lost}; it has to join anew")

    def _look_at_own(self, own: str | None) -> None:
        try:
            found = self._ask(CoordinationUnavailable, "exists", own, self._on_change)
        except CoordinationUnavailable:
            self._is_own_in_doubt = True
            raise
        with self._changing:
            if own == self._own and (found is None or found.ephemeralOwner != self._own_session):
                self._lost = self._lost or "another incarnation has joined by its name, or its node was deleted"

    # -- reading ----------------------------------------------------------------------------------

    def read(self, key: str) -> Entry | None:
        folder, name = check_key(key)
        self._check()
        with self._reading:  # so that nobody begins to watch the folder meanwhile, and knows less of it
            entry = self._read(folder, name)
        self._seen.key(folder, name, None if entry is None else entry.version)
        return entry

    def _read(self, folder: str, name: str) -> Entry | None:
        node = self._folder(folder)
        if node in self._views:
            return self._refreshed(node).get(name)
        self._sync()
        try:
            value, stat = self._ask(CoordinationUnavailable, "get", f"{node}/{quote(name)}{_KEY}")
        except NoNodeError:
            return None
        return Entry(value, stat.mzxid)

    def read_folder(self, folder: str) -> Mapping[str, Entry]:
        self._check()
        found = self._refreshed(self._folder(check_folder(folder)))
        self._seen.folder(folder, _versions(found))
        return found

    def _refreshed(self, node: str) -> dict[str, Entry]:
        """The keys in a folder, or who is present, after what has changed of them was read again."""
        with self._reading:
            self._sync()
            for _ in range(_TRIES):
                view = self._view(node)
                if self._refresh(node, view):
                    return {unquote(name.removesuffix(_KEY)): entry for name, entry in view.entries.items()}
        raise CoordinationUnavailable("what is in ZooKeeper keeps changing while it is read")

    def _view(self, node: str) -> _View:
        with self._changing:
            view = self._views.setdefault(node, _View(self._connection))
            if view.connection != self._connection:
                view.connection, view.is_whole = self._connection, False
                view.stale |= view.entries.keys()
            return view

    def _refresh(self, node: str, view: _View) -> bool:
        """Tells whether it is known what is there. Each part is marked as known before it is asked for: a change that
        comes later marks it otherwise again."""
        if not view.is_whole:
            view.is_whole = True
            names = self._children(node)
            if names is None:
                view.is_whole = False
                return False
            with self._changing:
                view.entries = {name: entry for name, entry in view.entries.items() if name in names}
                view.stale |= names - view.entries.keys()
        with self._changing:
            wanted = {name for name in view.stale if self._counts(node, name)}
            view.stale = set()
        is_known = True
        try:
            asked = {
                name: self._send(CoordinationUnavailable, "get", f"{node}/{name}", self._on_change) for name in wanted
            }
            for name, answer in asked.items():
                is_known &= self._read_into(view, name, answer)
                wanted.discard(name)
        finally:
            with self._changing:
                view.stale |= wanted
        return is_known

    def _counts(self, node: str, child: str) -> bool:
        """Whether it is a key, and no folder, or somebody who is present."""
        return child.endswith(_KEY) or node == f"{self._path}/present"

    def _children(self, node: str) -> set[str] | None:
        """None: it was made meanwhile."""
        try:
            found = self._ask(CoordinationUnavailable, "get_children", node, self._on_change)
        except NoNodeError:
            there = self._ask(CoordinationUnavailable, "exists", node, self._on_change)
            return set() if there is None else None
        return {name for name in found if self._counts(node, name)}

    def _read_into(self, view: _View, name: str, answer: Any) -> bool:
        try:
            value, stat = self._answered(CoordinationUnavailable, answer)
        except NoNodeError:
            view.entries.pop(name, None)
            view.is_whole = False
            return False
        view.entries[name] = Entry(value, stat.mzxid)
        return True

    def _sync(self) -> None:
        """After a new connection, which may be to a server that lags behind what was read over the one before."""
        connection = self._connection
        if not self._client.connected:
            raise CoordinationUnavailable("there is no connection to ZooKeeper")
        if self._synced != connection:
            self._ask(CoordinationUnavailable, "sync", self._path or "/")
            self._synced = connection

    # -- writing ----------------------------------------------------------------------------------

    def write(self, key: str, value: bytes) -> None:
        node = self._node(key)
        check_value(key, value)
        self._check()
        with self._changing_it(node):
            for _ in range(_TRIES):
                try:
                    self._ask(MaybeWritten, "set", node, value)
                    return
                except NoNodeError:
                    if self._create(node, value):
                        return
        raise NotWritten(f"{key!r} is made and deleted all the time")

    def create(self, key: str, value: bytes) -> bool:
        node = self._node(key)
        check_value(key, value)
        self._check()
        with self._changing_it(node):
            return self._create(node, value)

    def _create(self, node: str, value: bytes) -> bool:
        try:
            self._ask(MaybeWritten, "create", node, value, makepath=True)
        except NodeExistsError:
            return False
        return True

    def swap(self, key: str, value: bytes, version: int) -> bool:
        node = self._node(key)
        check_value(key, value)
        self._check()
        found = self._ask(NotWritten, "exists", node)
        if found is None or found.mzxid != version:
            return False
        with self._changing_it(node):
            try:
                self._ask(MaybeWritten, "set", node, value, found.version)
            except (BadVersionError, NoNodeError):
                return False
            return True

    def delete(self, keys: Iterable[str]) -> None:
        nodes = [self._node(key) for key in keys]
        self._check()
        for node in nodes:
            with suppress(NoNodeError), self._changing_it(node):
                self._ask(MaybeWritten, "delete", node)

    def folders(self, folder: str) -> list[str]:
        self._check()
        return sorted(unquote(name) for name in self._nodes_in(self._folder(check_folder(folder))) if _KEY not in name)

    def clear(self, folder: str) -> None:
        self._check()
        self._remove(self._folder(check_folder(folder)))

    def _remove(self, node: str) -> None:
        for name in self._nodes_in(node):
            self._remove(f"{node}/{name}")
        with suppress(NoNodeError), self._changing_it(node):
            self._ask(MaybeWritten, "delete", node)
        with self._changing:
            self._views.pop(node, None)

    def _nodes_in(self, node: str) -> list[str]:
        try:
            found: list[str] = self._ask(CoordinationUnavailable, "get_children", node)
        except NoNodeError:
            return []
        return found

    @contextmanager
    def _changing_it(self, node: str) -> Iterator[None]:
        """The notice of one's own change may come after its answer: what is read next has it all the same."""
        try:
            yield
        finally:
            parent, _, name = node.rpartition("/")
            with self._changing:
                if (view := self._views.get(parent)) is not None:
                    view.is_whole = False
                    view.stale.add(name)

    def _folder(self, folder: str) -> str:
        return f"{self._path}/keys/{quote(folder)}" if folder else f"{self._path}/keys"

    def _node(self, key: str) -> str:
        folder, name = check_key(key)
        return f"{self._folder(folder)}/{quote(name)}{_KEY}"

    # -- changes ----------------------------------------------------------------------------------

    def wait(self, folders: Collection[str], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        begin = None
        while True:
            with self._changing:
                changes = self._changes
            self._check()
            found = {folder: _versions(self._refreshed(self._folder(check_folder(folder)))) for folder in folders}
            present = _incarnations(self._present())
            if self._seen.is_news(found, present) or (begin is not None and begin != (found, present)):
                return
            begin = begin or (found, present)
            if not self._is_notified(changes, until - time.monotonic()) or self._is_closed:
                return

    def _is_notified(self, changes: int, timeout_s: float) -> bool:
        with self._changing:
            return self._changing.wait_for(lambda: self._changes != changes or self._is_closed, max(timeout_s, 0))

    def close(self) -> None:
        self.leave()
        with self._changing:
            self._is_closed = True
            self._notify()
        self._stop()

    def _stop(self) -> None:
        with suppress(Exception):  # its sockets may be gone in the very moment: the session ends with them
            self._client.stop()
        self._client.close()

    # -- what fails -------------------------------------------------------------------------------

    def _ask(self, kind: type[CoordinationUnavailable], what: str, *given: Any, **named: Any) -> Any:
        return self._answered(kind, self._send(kind, what, *given, **named))

    def _send(self, kind: type[CoordinationUnavailable], what: str, *given: Any, **named: Any) -> Any:
        if self._is_closed:
            raise _unsent(kind)("this session is closed")
        if not self._client.connected:
            raise _unsent(kind)("there is no connection to ZooKeeper")
        return getattr(self._client, f"{what}_async")(*given, **named)

    def _answered(self, kind: type[CoordinationUnavailable], answer: Any) -> Any:
        """That none comes is of this kind, unless it is known to have had no effect."""
        began_s = self._clock()
        try:
            found = answer.get(timeout=self._answer_s)
        except (NoNodeError, NodeExistsError, BadVersionError):
            raise
        except (NoAuthError, AuthFailedError) as error:
            raise _refused() from error
        except SessionExpiredError as error:
            raise _unsent(kind)("the session with ZooKeeper has expired") from error
        except (KazooException, KazooTimeoutError) as error:
            raise kind(f"ZooKeeper did not answer: {type(error).__name__}") from error
        self._answered_s = began_s
        return found


def _unsent(kind: type[CoordinationUnavailable]) -> type[CoordinationUnavailable]:
    return NotWritten if kind is MaybeWritten else kind


def _refused() -> InvalidConfig:
    return InvalidConfig("ZooKeeper refuses: the user and the password in its address are not those of what is there")


def _versions(entries: Mapping[str, Entry]) -> dict[str, int]:
    return {name: entry.version for name, entry in entries.items()}


def _incarnations(present: Mapping[str, Presence]) -> dict[str, str]:
    return {name: presence.incarnation for name, presence in present.items()}
