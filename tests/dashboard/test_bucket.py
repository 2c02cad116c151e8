"""A dashboard on a root in a bucket: what it tells, how many requests that takes, and what it says if it cannot."""

from __future__ import annotations

import logging
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import msgspec
import pytest

from benchmarks.dashboard_root import PIPELINE, LongPast
from tests.dashboard.harness import BEARER, served
from tests.s3_proxy import Fault, Plan, S3Proxy
from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tidegate.dashboard.root import ShownRoot
from tidegate.dashboard.routes import ROUTES
from tidegate.dashboard.tables import ReadTable
from tidegate.engine.status import RunStatus
from tidegate.protocol.names import checkpoint_name
from tidegate.storage import bucket_access, lease
from tidegate.storage.bucket import Bucket
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.folder import Folder
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import as_given

pytestmark = [pytest.mark.s3, pytest.mark.slow]

RETAINED = 10
OTHER_SECRET = f"{SECRET_KEY}-of-before"
P = ParamSpec("P")
T = TypeVar("T")


class Given:
    """A root in a bucket, behind a proxy that counts; and the bucket itself, for what others do there."""

    def __init__(self, server: S3Server, proxy: S3Proxy, past: LongPast, set_: Callable[[str, str], None]) -> None:
        """`set_`: a variable of the environment."""
        self.server = server
        self.set = set_
        self.proxy = proxy
        self.past = past
        self.bucket_name = f"board-{uuid.uuid4().hex[:12]}"
        self.url = f"{server.make_bucket(self.bucket_name)}/orders"
        self.files: Bucket = open_bucket(self.url, server.options())
        here = Folder(past.root)
        for name in here.list():
            if name not in (RootPaths.STATUS, RootPaths.STATUS_RESERVE, "lock"):
                self.files.write(name, here.read(name) or b"")
        self.hold()

    def hold(self, *, is_over: bool = False) -> None:
        """As a run does that is alive, and says something all the time, or has ended."""
        said = msgspec.json.decode((self.past.root / RootPaths.STATUS).read_bytes(), type=RunStatus)
        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat(timespec="milliseconds")
        said = msgspec.structs.replace(said, updated_at=later, state="finished" if is_over else "running")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        held = lease.Lease(
            "a run", 1, "host", "work", 1, 3600.0, now, is_over, 1, msgspec.Raw(msgspec.json.encode(said))
        )
        self.files.write(lease.NAME, msgspec.json.encode(held))

    def add(self, number: int, folder: Path) -> None:
        """One more checkpoint, the next one."""
        more = number - self.past.attempts
        new = Folder(LongPast(folder, number, retained=RETAINED + more, chains=2).root)
        own = [name for name in new.list() if checkpoint_name(number) in name]
        for name in (*own, max(new.list(RootPaths.DECISIONS))):
            self.files.write(name, new.read(name) or b"")

    def asked(self, doing: Callable[[], object]) -> Counter[str]:
        """The requests that it makes, by kind."""
        before = len(self.proxy.asked)
        doing()
        return Counter(map(self._kind, list(self.proxy.asked)[before:]))

    def _kind(self, asked: tuple[str, str]) -> str:
        method, path = asked
        path, _, query = path.partition("?")
        if "list-type" in query:
            name = query.partition("prefix=")[2].split("&")[0].replace("%2F", "/").removeprefix("orders/")
            return f"LIST {name.split('/')[0]}"
        return f"{method} {path.removeprefix(f'/{self.bucket_name}/orders/').split('/')[0]}"


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> LongPast:
    return LongPast(tmp_path_factory.mktemp("past"), 230, retained=RETAINED, chains=2)


@pytest.fixture
def given(s3_server: S3Server, past: LongPast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    with S3Proxy(s3_server.port) as proxy:
        for name, value in s3_server.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(bucket_access, "RETRY_S", 0.2)
        yield Given(s3_server, proxy, past, monkeypatch.setenv)


def each_address(key: str) -> list[str]:
    parts = {"{key}": key, "{name}": "ckpt-000230", "{a}": "ckpt-000229", "{b}": "ckpt-000230"}
    found = []
    for route in ROUTES:
        path = route.path
        for part, value in parts.items():
            path = path.replace(part, value)
        found.append(path)
    return found


def test_every_address_tells_of_a_root_in_a_bucket_what_it_tells_of_the_same_in_a_folder(given: Given) -> None:
    with served(given.url, allow_actions=True) as client, served(given.past.root, allow_actions=True) as near:
        for route, path, there in zip(ROUTES, each_address(client.key), each_address(near.key), strict=True):
            found = client.get(path)
            assert found.code == 200, (path, found.data)
            msgspec.json.decode(found.data, type=route.type, strict=True)
            if any(each in path for each in ("/checkpoints", "/compare", "/tables", "/history")):
                assert found.value == near.get(there).value, path
        detail = client.value()
        assert (detail["summary"]["root"], detail["summary"]["life"]) == (given.url, "alive")
        assert detail["summary"]["alerts"] == []
        assert detail["problems"] == []
        assert detail["outlook"]["checkpoint"] == "ckpt-000230"
        assert detail["graph"] == near.value()["graph"]
        offered = {each["name"]: each for each in client.value("/actions")["actions"]}
        assert offered["stop"]["allowed"]
        assert "use tidegate savepoint --to" in offered["savepoint"]["why_not"]
        refused = client.ask("POST", f"{client.one}/actions/savepoint", BEARER)
        assert (refused.code, refused.value["done"]) == (200, False)
        assert "say which one the savepoint is in" in refused.value["said"]
        metrics = client.get("/metrics")
        assert (metrics.code, b"tidegate_checkpoints_total" in metrics.data) == (200, True)


# -- how many requests ------------------------------------------------------------------------------


class Inline(Executor):
    """Does at once what is to be done beside."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class Watched:
    """A root that is looked at, by a clock that a test moves: a minute is over at once, and the same each time."""

    def __init__(self, given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000.0
        monkeypatch.setattr("tidegate.dashboard.kept.time", SimpleNamespace(monotonic=lambda: self.now_s))
        self._given = given
        self.root = ShownRoot(as_given(given.url), Inline())

    def minutes(self, look: Callable[[], object], count: int = 1, every_s: float = 0.5) -> Counter[str]:
        def all_of_it() -> None:
            for _ in range(int(count * 60 / every_s)):
                self.now_s += every_s
                look()

        return self._given.asked(all_of_it)


def test_a_run_that_is_watched_costs_forty_requests_a_minute(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(given, monkeypatch)
    root = watched.root
    opened = given.asked(root.warm_up)
    assert opened.total() <= 3 * (RETAINED + 1) + 2 * RETAINED + 20, opened
    watched.minutes(root.live)
    live = watched.minutes(root.live, 10)
    lists = sum(count for kind, count in live.items() if kind.startswith("LIST"))
    assert lists <= 10 * 8 + 1, "which cost twelve times what others do"
    assert live.total() <= 10 * 40, live
    assert all(kind.startswith(("GET", "LIST")) for kind in live), "it only looks"


def as_the_page_does(root: ShownRoot) -> Callable[[], None]:
    """Whoever has it open asks for what is not live whenever its mark changes."""
    seen = ""

    def look() -> None:
        nonlocal seen
        mark = root.live().mark
        if mark != seen:
            seen = mark
            root.detail(actions_allowed=False)

    return look


def test_the_page_of_a_pipeline_that_takes_checkpoints_costs_little_more(
    given: Given, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watched = Watched(given, monkeypatch)
    monkeypatch.setattr("tidegate.dashboard.root.time", SimpleNamespace(monotonic=lambda: watched.now_s))
    watched.root.warm_up()
    look = as_the_page_does(watched.root)
    watched.minutes(look)
    for number in (231, 232, 233):
        given.add(number, tmp_path / str(number))
        asked = watched.minutes(look)
        lists = sum(count for kind, count in asked.items() if kind.startswith("LIST"))
        assert (lists <= 8 + 4, asked.total() <= 40 + 2 + 7) == (True, True), asked
        watched.minutes(look)
        told = watched.root.detail(actions_allowed=False)
        assert f"ckpt-000{number}" in (told.outlook_told or ""), "it is not left with what was before"


def test_one_that_has_ended_costs_little_more(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    given.hold(is_over=True)
    watched = Watched(given, monkeypatch)
    watched.root.warm_up()
    watched.minutes(watched.root.live)
    found = watched.minutes(watched.root.live, 10)
    assert found.total() <= 10 * 50, found
    assert found["GET decisions"] == 0, "what the log holds is read once"


def test_however_many_look_and_at_whatever_page_it_costs_no_more(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(given, monkeypatch)
    root = watched.root

    def look() -> None:
        for _ in range(3):
            root.live()
            root.detail(actions_allowed=False)
            root.checkpoints(None, None, 50)
            root.summary()
            root.checkpoint(230)
            root.compare(229, 230)
            root.history(None, None, 50)
            root.seen()

    look()
    watched.minutes(look, every_s=1)
    found = watched.minutes(look, 3, every_s=1)
    assert found.total() <= 3 * 48, found
    assert watched.minutes(lambda: None) == {}, "and nothing, where nobody looks"


def test_a_new_checkpoint_is_read_once(given: Given, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watched = Watched(given, monkeypatch)
    watched.root.warm_up()
    before = watched.minutes(watched.root.live)
    given.add(231, tmp_path / "past")
    after = watched.minutes(watched.root.live)
    assert (after - before)["GET decisions"] == 1
    assert (after - before)["GET generations"] == 1
    assert watched.root.known().newest is not None


def test_a_table_in_a_bucket_is_listed_and_each_version_of_it_read_once(given: Given) -> None:
    sink = given.past.sinks[0]
    log = Folder(given.past.lake / sink)
    table = open_bucket(f"s3://{given.bucket_name}/lake/{sink}", given.server.options(given.proxy.endpoint))
    for name in log.list():
        table.write(name, log.read(name) or b"")
    read = ReadTable(table, PIPELINE, sink, 1)
    assert given.asked(read.look).total() == 1 + len(log.list())
    assert given.asked(read.look).total() == 1


# -- what is wrong ----------------------------------------------------------------------------------


def is_gone(given: Given) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        given.set("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")


def is_not_there(given: Given) -> None:
    given.url = given.url.replace(given.bucket_name, "no-such-bucket")


def has_other_credentials(given: Given) -> None:
    given.set("AWS_SECRET_ACCESS_KEY", OTHER_SECRET)


def is_overloaded(given: Given) -> None:
    given.proxy.plan = Plan(1, {Fault.BUSY: 1.0})


def holds_no_root(given: Given) -> None:
    given.url = f"{given.url}/elsewhere"


TROUBLE: dict[str, Callable[[Given], None]] = {
    "see whether its address is right, and can be reached from here": is_gone,
    "make the bucket, or correct its name": is_not_there,
    "see whether the credentials are right, and still valid": has_other_credentials,
    "it has too much to do": is_overloaded,
    "is not the root of a pipeline": holds_no_root,
}


@pytest.mark.parametrize("advice", TROUBLE)
def test_what_is_wrong_with_a_bucket_is_told_without_its_credentials(
    given: Given, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    TROUBLE[advice](given)
    with caplog.at_level(logging.DEBUG), served(given.url, allow_actions=True) as client:
        addresses = each_address(client.key)
        answers = {path: client.get(path) for path in (*addresses, "/metrics")}
        answers["stop"] = client.ask("POST", f"{client.one}/actions/stop", BEARER)
    (summary,) = answers[addresses[0]].value["pipelines"]
    assert (summary["life"], summary["root"]) == ("unreadable", given.url)
    assert advice in summary["why"]
    assert [each["text"] for each in summary["alerts"]] == [summary["why"]]
    assert answers[client.one].code == 503
    for path, found in answers.items():
        assert found.code in (200, 503), path
        assert found.code == 200 or advice in found.value["error"], path
    told = b"".join(found.data for found in answers.values()).decode() + caplog.text
    assert not any(secret in told for secret in (ACCESS_KEY, SECRET_KEY, OTHER_SECRET))
    assert "this is a defect" not in caplog.text


def test_a_bucket_that_goes_and_comes_back_is_told_as_such(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(given, monkeypatch)
    watched.root.warm_up()
    given.proxy.plan = Plan(1, {Fault.BUSY: 1.0})
    watched.minutes(watched.root.live, every_s=60)
    told: Any = watched.root.live().summary
    assert (told.life, "too much to do" in told.why) == ("unreadable", True)
    given.proxy.plan = None
    watched.minutes(watched.root.live, every_s=60)
    assert watched.root.live().summary.life == "alive"
