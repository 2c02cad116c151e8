"""What is live: a change arrives without being asked for."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.harness import live_run, make_root
from tests.dashboard.harness import Client, served
from tidegate.dashboard import server
from tidegate.dashboard.root import ShownRoot
from tidegate.dashboard.values import Live, Pipelines


@contextmanager
def stream(client: Client, path: str) -> Iterator[Iterator[tuple[str, bytes]]]:
    """The events of a stream, each with its name; a comment has none."""
    connection = http.client.HTTPConnection("127.0.0.1", client.board.port, timeout=60)
    connection.request("GET", path, headers={"Host": f"127.0.0.1:{client.board.port}"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.getheader("content-type", "").startswith("text/event-stream")
    assert answer.getheader("cache-control") == "no-store"

    def events() -> Iterator[tuple[str, bytes]]:
        name = ""
        while line := answer.readline():
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield name, line[6:].strip()
            elif line.startswith(b":"):
                yield "", line

    try:
        yield events()
    finally:
        connection.close()


def until(events: Iterator[tuple[str, bytes]], kind: type[Any], wanted: Any) -> Any:
    for name, data in events:
        if name:
            found = msgspec.json.decode(data, type=kind)
            if wanted(found):
                return found
    raise AssertionError("the stream has ended")


def test_a_checkpoint_arrives_at_whoever_looks_at_the_pipeline(tmp_path: Path) -> None:
    with (
        live_run(tmp_path / "played", checkpoints=1) as run,
        served(run.root) as client,
        stream(client, f"{client.one}/live") as events,
        stream(client, "/api/v1/live") as listed,
    ):
        first = until(events, Live, lambda live: live.status is not None and live.status.stages)
        assert first.summary.pipeline == "flat"
        assert first.summary.last_checkpoint.checkpoint == "ckpt-000001"
        run.in_its_thread(run.pipeline.generation.trigger)
        name = "ckpt-000002"
        until(events, Live, lambda live: live.summary.last_checkpoint.checkpoint == name)
        found = until(listed, Pipelines, lambda each: each.pipelines[0].last_checkpoint.checkpoint == name)
        assert found.pipelines[0].life == "alive"


def test_the_first_checkpoint_is_told_with_all_that_it_says_of_the_pipeline(tmp_path: Path) -> None:
    with (
        live_run(tmp_path / "played") as run,
        served(run.root) as client,
        stream(client, f"{client.one}/live") as events,
    ):
        before = until(events, Live, lambda live: live.status is not None and live.status.stages)
        assert client.value()["graph"]["table"]["inputs"] == []
        run.in_its_thread(run.pipeline.generation.trigger)
        marks = {before.mark}

        def is_told(live: Live) -> bool:
            """As a page does: what is not live is asked for whenever the mark changes, and else never."""
            if live.mark in marks:
                return False
            marks.add(live.mark)
            detail = client.value()
            return detail["graph"]["table"]["inputs"] == ["middle"] and "ckpt-000001" in detail["outlook_told"]

        until(events, Live, is_told)


def test_where_nothing_changes_there_are_signs_of_life_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEARTBEAT_S", 0.2)
    monkeypatch.setattr(server, "_LOOK_EVERY_S", 0.05)
    root = make_root(tmp_path, checkpoints=1)
    with served(root) as client, stream(client, f"{client.one}/live") as events:
        told = [next(events)[0] for _ in range(8)]
        assert told[0] == "status"
        assert told[-3:] == ["", "", ""]


def test_there_are_signs_of_life_while_a_root_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEARTBEAT_S", 0.1)
    may_go = threading.Event()
    live = ShownRoot.live

    def slow(root: ShownRoot) -> Live:
        assert may_go.wait(60)
        return live(root)

    monkeypatch.setattr(ShownRoot, "live", slow)
    root = make_root(tmp_path, checkpoints=1)
    try:
        with served(root) as client, stream(client, f"{client.one}/live") as events:
            assert [next(events)[0] for _ in range(2)] == ["", ""]
            may_go.set()
            assert until(events, Live, lambda _: True).summary.pipeline == "flat"
    finally:
        may_go.set()


def test_a_stream_of_nothing_is_not_found_and_too_many_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_root(tmp_path, checkpoints=1)
    monkeypatch.setattr(server, "_STREAMS_AT_ONCE", 1)
    with served(root) as client:
        assert client.get("/api/v1/pipelines/000000000000/live").code == 404
        with stream(client, "/api/v1/live") as events:
            next(events)
            assert client.get(f"{client.one}/live").code == 503


def test_it_ends_at_once_though_somebody_looks(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    ended = threading.Event()
    with served(root) as client, stream(client, f"{client.one}/live") as events:
        next(events)

        def read_on() -> None:
            for _ in events:
                pass
            ended.set()

        reader = threading.Thread(target=read_on)
        reader.start()
        client.board.close()
        assert ended.wait(20)
        reader.join()
        assert not client.board.is_serving
