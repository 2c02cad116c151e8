"""What the tests of the dashboard share: one that is served on a free port, a client of it, the way to its pages."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.dashboard.browser import Browser
from tidegate.dashboard.server import Dashboard
from tidegate.dashboard.token import Token
from tidegate.engine.events import AnyEvent
from tidegate.engine.history import as_data
from tidegate.storage.folder import Folder
from tidegate.storage.history import StoredHistory, as_event
from tidegate.storage.places import as_given

TOKEN = Token(b"a-token-of-the-tests-0123456789", "a test")
BEARER = {"Authorization": f"Bearer {TOKEN.secret.decode()}"}


class Answer(NamedTuple):
    code: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def value(self) -> Any:
        assert self.headers["content-type"] == "application/json", self.data
        return msgspec.json.decode(self.data)


class Client:
    def __init__(self, board: Dashboard) -> None:
        self.board = board

    @property
    def key(self) -> str:
        return next(iter(self.board.roots))

    @property
    def one(self) -> str:
        """The address of the first root."""
        return f"/api/v1/pipelines/{self.key}"

    def ask(self, method: str, target: str, headers: Mapping[str, str] | None = None) -> Answer:
        """As it stands there: neither the path nor a header is put right."""
        given = {"Host": f"127.0.0.1:{self.board.port}", **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.board.port, timeout=60)
        try:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def get(self, target: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.ask("GET", target, headers)

    def value(self, path: str = "") -> Any:
        """Of the first root, which must be there."""
        found = self.get(self.one + path)
        assert found.code == 200, found
        return found.value


@contextmanager
def served(*roots: Path | str, allow_actions: bool = False, host: str = "127.0.0.1") -> Iterator[Client]:
    token = TOKEN if allow_actions or host != "127.0.0.1" else None
    places = [as_given(each) for each in roots]
    with Dashboard(places, host, 0, allow_actions=allow_actions, token=token) as board:
        yield Client(board)


def open_page(page: Browser, client: Client, path: str) -> None:
    """Of the first root, as somebody does who has its address."""
    page.open("about:blank")
    page.open(f"http://127.0.0.1:{client.board.port}/")
    go(page, client, path)


def go(page: Browser, client: Client, path: str) -> None:
    """To another page of the one that is open, until it is drawn."""
    page.see(f"location.hash = '#/p/{client.key}{path}'")
    page.wait(f"document.getElementById('main')?.dataset.shows === '#/p/{client.key}{path}'")


def note(root: Path, *events: AnyEvent) -> None:
    """Put these into the history of a root."""
    StoredHistory(Folder(root)).write_whole([as_event(as_data(each)) for each in events])
