"""Roots that are damaged, huge, being written, or gone: what can be told is told, and never a stack trace."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.dashboard_root import LongPast
from tests.cli.harness import ended_checkpoint, live_run, make_root, wait_until
from tests.dashboard.harness import Client, note, served
from tidegate.dashboard.routes import ROUTES
from tidegate.engine.events import CheckpointEnded
from tidegate.engine.status import Observer
from tidegate.storage.folder import Folder
from tidegate.storage.paths import RootPaths


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("made"), checkpoints=4)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "root"))


def answers(client: Client, name: str = "ckpt-000004") -> dict[str, int]:
    """Every route, by its path, with the code of its answer. Whatever it is, it is in words."""
    found = {}
    for route in ROUTES:
        path = route.path.replace("{key}", client.key)
        for part in ("{name}", "{a}", "{b}"):
            path = path.replace(part, name)
        answer = client.get(path)
        assert answer.code in (200, 404, 503), (path, answer)
        assert b"Traceback" not in answer.data
        if answer.code == 200:
            msgspec.json.decode(answer.data, type=route.type)
        else:
            assert answer.value["error"]
            assert "\n" not in answer.value["error"]
        found[route.path.removeprefix("/api/v1/pipelines")] = answer.code
    assert client.get("/metrics").code == 200
    return found


def spoil(path: Path) -> None:
    path.write_bytes(b"\x00\xffnonsense{")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "the last decision": lambda root: spoil(max((root / "decisions").iterdir())),
    "the first decision": lambda root: spoil(min((root / "decisions").iterdir())),
    "a torn last decision": lambda root: (max((root / "decisions").iterdir())).write_bytes(b""),
    "no decisions": lambda root: shutil.rmtree(root / "decisions"),
    "the status": lambda root: spoil(root / "status.json"),
    "half a status": lambda root: (root / "status.json").write_bytes(
        msgspec.json.encode(Observer("flat").status)[:100]
    ),
    "an old manifest": lambda root: spoil(root / "generations/000001/manifests/ckpt-000003.json"),
    "the newest manifest": lambda root: spoil(root / "generations/000001/manifests/ckpt-000004.json"),
    "no manifests": lambda root: shutil.rmtree(root / "generations/000001/manifests"),
    "no snapshots": lambda root: shutil.rmtree(root / "generations/000001/snapshots"),
    "no generations": lambda root: shutil.rmtree(root / "generations"),
    "a page of the history": lambda root: Folder(root).write(
        f"{RootPaths.HISTORY}/0000000000001-0a0a0a0a.json", b'[{"event":'
    ),
    "times in the history": lambda root: note(
        root,
        CheckpointEnded(
            at="2026-01-02T03:04:05.000+00:00",
            checkpoint=msgspec.structs.replace(ended_checkpoint(9), triggered_at="yesterday"),
        ),
        CheckpointEnded(
            at="2026-01-02T03:04:06.000+00:00",
            checkpoint=msgspec.structs.replace(ended_checkpoint(4), triggered_at="2026-01-02T03:04:05"),
        ),
    ),
    "a history that is a file": lambda root: Folder(root).write(RootPaths.HISTORY, b"[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_left_of_a_damaged_root_is_told(root: Path, damage: str) -> None:
    DAMAGES[damage](root)
    with served(root) as client:
        found = answers(client)
        assert {"": 200, "/{key}": 200, "/{key}/checkpoints": 200}.items() <= found.items()
        assert found["/{key}/history"] == (503 if damage == "a history that is a file" else 200)


def test_a_damaged_log_is_an_alert_and_a_problem(root: Path) -> None:
    DAMAGES["the last decision"](root)
    with served(root) as client:
        detail = client.value()
        assert any("decision log" in each for each in detail["problems"])
        assert detail["summary"]["pipeline"] == "flat"
        assert any("decision log" in each["text"] for each in detail["summary"]["alerts"])
        assert detail["summary"]["alerts"][0]["level"] == "error"


def test_a_damaged_checkpoint_is_listed_as_such(root: Path) -> None:
    DAMAGES["an old manifest"](root)
    snapshot = root / "generations/000001/snapshots"
    with served(root) as client:
        (row,) = client.value("/checkpoints?state=damaged")["checkpoints"]
        assert row["checkpoint"]["checkpoint"] == "ckpt-000003"
        assert "is not the manifest that was decided" in row["checkpoint"]["why"]
        assert row["retained"] is True
        one = client.value("/checkpoints/ckpt-000003")
        assert one["checkpoint"]["state"] == "damaged"
        assert one["problems"]
    shutil.rmtree(snapshot)
    with served(root) as client:  # by what its files are, which is looked at beside
        wait_until(lambda: len(client.value("/checkpoints?state=damaged")["checkpoints"]) == 3)
        assert any("damaged" in each["text"] for each in client.value()["summary"]["alerts"])


@pytest.mark.parametrize("gone", ["missing", "empty", "a file", "another's"])
def test_a_root_that_is_none_is_shown_as_unreadable_beside_others(made: Path, tmp_path: Path, gone: str) -> None:
    root = tmp_path / "root"
    if gone == "empty":
        root.mkdir()
    elif gone == "a file":
        root.write_text("no folder")
    elif gone == "another's":
        root.mkdir()
        (root / "pipeline.json").write_text('{"pipeline": 3}')
    with served(root, made) as client:
        unreadable, fine = client.get("/api/v1/pipelines").value["pipelines"]
        assert unreadable["life"] == "unreadable"
        assert unreadable["pipeline"] is None
        assert str(root) in unreadable["why"]
        assert unreadable["alerts"] == [{"level": "error", "text": unreadable["why"]}]
        assert (fine["pipeline"], fine["life"]) == ("flat", "stopped")
        found = answers(client)
        assert found["/{key}"] == found["/{key}/checkpoints"] == found["/{key}/history"] == 503


def test_a_root_that_goes_and_comes_back_is_told_each_time(root: Path, tmp_path: Path) -> None:
    with served(root) as client:
        assert client.value()["summary"]["pipeline"] == "flat"
        root.rename(tmp_path / "elsewhere")
        wait_until(lambda: client.get(client.one).code == 503)
        assert client.get("/api/v1/pipelines").value["pipelines"][0]["life"] == "unreadable"
        (tmp_path / "elsewhere").rename(root)
        wait_until(lambda: client.get(client.one).code == 200)


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    past = LongPast(tmp_path_factory.mktemp("huge"), 10_000, retained=20, chains=1)
    with served(past.root) as client:
        yield client


def test_a_huge_past_is_answered_in_pages(huge: Client) -> None:
    assert set(answers(huge, "ckpt-009999").values()) == {200}
    assert huge.value("/checkpoints")["counts"]["completed"] == 9_601
    assert len(huge.value("/checkpoints/summary")["series"]) == 1_000
    assert huge.value("/checkpoints/summary")["measures"]["duration_ms"]["count"] == 9_601
    deep = huge.value("/checkpoints?before=100&limit=500")
    assert (len(deep["checkpoints"]), deep["next"]) == (99, None)
    assert len(huge.value("/tables")["matrix"]) == 200


def test_a_root_that_is_written_all_the_time_is_read_all_the_time(tmp_path: Path) -> None:
    with live_run(tmp_path / "played", checkpoints=1) as run, served(run.root) as client:
        stopped = threading.Event()

        def trigger() -> None:
            if run.pipeline.generation.is_settled:
                run.pipeline.generation.trigger()

        def work() -> None:
            while not stopped.is_set():
                run.in_its_thread(trigger)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            seen: set[str] = set()
            while len(seen) < 4:
                found = answers(client, "ckpt-000001")
                assert found["/{key}/checkpoints"] == found["/{key}"] == 200
                seen.add(client.value()["summary"]["last_checkpoint"]["checkpoint"])
        finally:
            stopped.set()
            thread.join()
