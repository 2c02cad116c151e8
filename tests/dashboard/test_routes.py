"""What each address of the API answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.dashboard_root import LongPast
from tests.cli.harness import LiveRun, ended_checkpoint, live_run, make_root, wait_until
from tests.dashboard.harness import BEARER, Client, note, served
from tidegate.dashboard import values
from tidegate.dashboard.openapi import document
from tidegate.dashboard.routes import ROUTES
from tidegate.engine.events import CheckpointEnded, Ended, SavepointTaken, Started
from tidegate.engine.status import SinkCommit

AT = "2026-01-02T03:04:05.000+00:00"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("made"), checkpoints=5)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "root"))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveRun, Client]]:
    folder = tmp_path_factory.mktemp("live")
    with live_run(folder / "played", checkpoints=3) as run, served(run.root, allow_actions=True) as client:
        yield run, client


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> LongPast:
    return LongPast(tmp_path_factory.mktemp("past"), 230, retained=20, chains=2)


@pytest.fixture(scope="module")
def long(past: LongPast) -> Iterator[Client]:
    with served(past.root) as client:
        yield client


def test_every_answer_is_of_the_type_that_its_route_tells(long: Client) -> None:
    parts = {"{key}": long.key, "{name}": "ckpt-000230", "{a}": "ckpt-000220", "{b}": "ckpt-000230"}
    for route in ROUTES:
        path = route.path
        for part, value in parts.items():
            path = path.replace(part, value)
        found = long.get(path)
        assert found.code == 200, (path, found.data)
        msgspec.json.decode(found.data, type=route.type, strict=True)


def test_a_pipeline_that_runs_is_told_at_a_glance_and_in_full(live: tuple[LiveRun, Client]) -> None:
    run, client = live
    wait_until(lambda: bool((client.value()["status"] or {}).get("stages")))
    (summary,) = client.get("/api/v1/pipelines").value["pipelines"]
    assert summary["pipeline"] == "flat"
    assert summary["root"] == str(run.root)
    assert summary["last_checkpoint"]["checkpoint"] == "ckpt-000003"
    assert summary["last_checkpoint"]["age_ms"] >= 0
    assert summary["alerts"] == []
    detail = client.value()
    assert detail["status"]["stages"].keys() == {"rows", "middle", "table"}
    assert detail["graph"]["table"]["inputs"] == ["middle"]
    assert detail["graph"]["table"]["table"]["kind"] == "delta"
    assert detail["outlook"]["checkpoint"] == "ckpt-000003"
    assert "goes on from ckpt-000003" in detail["outlook_told"]
    assert detail["actions_allowed"] is True
    assert detail["problems"] == []


def test_the_layout_places_every_stage_and_leads_every_edge_from_left_to_right(long: Client) -> None:
    layout = long.value()["layout"]
    assert {each["stage"]: each["column"] for each in layout["nodes"]} == {
        f"{name}_{chain}": column for column, name in enumerate(("rows", "clean", "sum", "table")) for chain in range(2)
    }
    assert len(layout["edges"]) == 6
    for edge in layout["edges"]:
        columns = [point["column"] for point in edge["points"]]
        assert columns == sorted(set(columns))
        assert len(columns) >= 2
    assert layout["rows"] >= max(node["row"] + node["height"] for node in layout["nodes"])


def test_pages_of_checkpoints_hold_each_of_them_once_newest_first(long: Client) -> None:
    names: list[str] = []
    before: str | None = None
    while True:
        page = long.value(f"/checkpoints?limit=90{'' if before is None else f'&before={before}'}")
        names += [row["checkpoint"]["checkpoint"] for row in page["checkpoints"]]
        before = page["next"]
        if before is None:
            break
    assert names == [f"ckpt-{number:06d}" for number in range(230, 0, -1)]
    assert page["counts"] == {"completed": 222, "failed": 8, "in_progress": 0, "restored": 0, "savepoints": 0}
    assert page["latest"]["completed"]["checkpoint"]["checkpoint"] == "ckpt-000230"
    assert page["latest"]["failed"]["checkpoint"]["checkpoint"] == "ckpt-000200"


def test_pages_of_what_has_happened_hold_each_event_once_newest_first(long: Client) -> None:
    everything: list[dict[str, Any]] = []
    before = ""
    while True:
        page = long.value(f"/history?limit=40{before}")
        everything += page["events"]
        if page["next"] is None:
            break
        before = f"&before={page['next']}"
    ended = [each for each in everything if each["event"] == "checkpoint"]
    assert [each["checkpoint"]["checkpoint"] for each in ended] == [f"ckpt-{each:06d}" for each in range(230, 0, -1)]
    assert ended[0]["id"] == "ckpt-000230.1", "as a run makes it"
    assert [each["event"] for each in everything if each["event"] != "checkpoint"] == ["start"]


def test_checkpoints_are_chosen_by_their_state_and_tell_whether_they_are_retained(long: Client) -> None:
    page = long.value("/checkpoints?state=aborted,damaged&limit=3")
    assert [row["checkpoint"]["checkpoint"] for row in page["checkpoints"]] == [
        "ckpt-000200",
        "ckpt-000175",
        "ckpt-000150",
    ]
    assert not any(row["retained"] for row in page["checkpoints"])
    assert page["next"] == "150"
    newest = long.value("/checkpoints?limit=21")["checkpoints"]
    assert [row["retained"] for row in newest] == [True] * 20 + [False]
    assert long.value("/checkpoints?state=preparing")["checkpoints"] == []


def test_the_summary_counts_what_was_completed_and_its_series_ends_with_the_newest(long: Client) -> None:
    summary = long.value("/checkpoints/summary")
    duration = summary["measures"]["duration_ms"]
    assert duration["count"] == 222
    assert (
        duration["min"] <= duration["p50"] <= duration["p90"] <= duration["p95"] <= duration["p99"] <= duration["max"]
    )
    assert summary["measures"]["commit_ms"]["count"] == 222
    assert [point["checkpoint"] for point in summary["series"]][-1] == "ckpt-000230"
    assert len(summary["series"]) == 222
    assert summary["series"][0]["state_by_stage"]["sum_0"] > 0


def test_one_checkpoint_has_its_phases_files_positions_and_tables(long: Client, past: LongPast) -> None:
    found = long.value("/checkpoints/ckpt-000230")
    assert found["retained"] is True
    assert found["files"]["rows_0"] == {"count": 1, "bytes": 10}
    assert list(found["positions"]) == ["rows_0", "rows_1"]
    assert found["tables"]["table_1"] == {
        "kind": "delta",
        "address": str(past.lake / "table_1"),
        "version": 39,
        "why": None,
    }
    spans = {(span["name"], span["phase"]): span for span in found["gantt"]}
    assert (spans["sum_0", "aligning"]["from_ms"], spans["sum_0", "aligning"]["to_ms"]) == (20, 60)
    assert (spans["sum_0", "catching_up"]["from_ms"], spans["sum_0", "catching_up"]["to_ms"]) == (60, 220)
    assert spans["table_0", "committing"]["from_ms"] == 950
    assert spans[None, "deciding"]["to_ms"] == found["checkpoint"]["duration_ms"]
    older = long.value("/checkpoints/ckpt-000225")
    assert older["tables"]["table_0"]["version"] == 34


def test_stages_that_ran_as_one_query_have_the_files_of_both(tmp_path: Path) -> None:
    past = LongPast(tmp_path, 5, retained=2, chains=1, are_joined=True)
    with served(past.root) as client:
        found = client.value("/checkpoints/ckpt-000005")
        assert list(found["checkpoint"]["stages"]) == ["rows_0", "sum_0", "table_0"]
        assert found["files"] == {name: {"count": 1, "bytes": 10} for name in ("rows_0", "sum_0", "table_0")}


def test_one_that_is_no_longer_retained_is_what_the_history_tells_of_it(long: Client) -> None:
    found = long.value("/checkpoints/ckpt-000025")
    assert found["checkpoint"]["state"] == "aborted"
    assert "had not reported" in found["checkpoint"]["why"]
    assert found["retained"] is False
    assert found["tables"] == {}
    assert found["gantt"]


def test_two_checkpoints_are_compared_in_all_and_stage_by_stage(long: Client) -> None:
    found = long.value("/compare/ckpt-000221/ckpt-000230")
    assert found["apart_ms"] == 90_000
    assert found["duration_ms"] == {"a": 921, "b": 930, "difference": 9}
    stage = found["stages"]["rows_0"]
    assert stage["batch"]["difference"] == 9
    assert stage["positions_a"] == ["topic rows_0: partition 0 at offset 22100"]
    assert stage["positions_b"] == ["topic rows_0: partition 0 at offset 23000"]


def test_the_tables_tell_what_they_show_and_what_each_checkpoint_added(long: Client, past: LongPast) -> None:
    found = long.value("/tables")
    assert [each["sink"] for each in found["tables"]] == past.sinks
    for each in found["tables"]:
        assert (each["shows"], each["version"]) == ("ckpt-000230", 39)
        assert each["since"] is not None
    assert found["matrix"][0] == {
        "checkpoint": "ckpt-000230",
        "versions": {sink: {"version": 39, "rows_added": 250} for sink in past.sinks},
        "missing": {},
    }
    assert found["matrix"][-1]["versions"] == dict.fromkeys(past.sinks)


def test_of_a_run_that_was_killed_while_it_committed_each_table_shows_what_its_own_log_says(tmp_path: Path) -> None:
    past = LongPast(tmp_path, 30, retained=5, chains=2, is_killed=True)
    with served(past.root) as client:
        found = client.value("/tables")
        assert {each["sink"]: (each["shows"], each["version"]) for each in found["tables"]} == {
            "table_0": ("ckpt-000030", 9),
            "table_1": ("ckpt-000029", 8),
        }
        assert all(each["since"] for each in found["tables"])
        newest, before = found["matrix"][:2]
        assert newest["versions"] == {"table_0": {"version": 9, "rows_added": 250}, "table_1": None}
        assert newest["missing"] == {"table_1": "not_shown"}
        assert before["missing"] == {}


def test_a_table_that_cannot_be_asked_shows_what_the_run_has_told(tmp_path: Path) -> None:
    past = LongPast(tmp_path, 30, retained=5, chains=1, is_killed=True)
    shutil.rmtree(past.lake)
    past.lake.write_text("no folder")
    with served(past.root) as client:
        found = client.value("/tables")
        (table,) = found["tables"]
        assert (table["shows"], table["version"]) == ("ckpt-000029", None)
        assert table["why"]
        assert found["matrix"][0]["missing"] == {"table_0": "not_known"}


def test_what_has_happened_is_told_newest_first_by_kinds_and_in_pages(root: Path) -> None:
    done = msgspec.structs.replace(
        ended_checkpoint(6), commits={"table": SinkCommit(begun_ms=5, took_ms=7)}, triggered_at=AT
    )
    note(
        root,
        Started(at="2026-01-02T03:00:00.000+00:00", because="killed", base="ckpt-000005", settings={"retain": "3"}),
        CheckpointEnded(at="2026-01-02T03:04:06.000+00:00", checkpoint=done),
        SavepointTaken(at="2026-01-02T03:05:00.000+00:00", checkpoint="ckpt-000006", name="mine", place="there"),
        Ended(at="2026-01-02T03:06:00.000+00:00", state="finished", why="it was told to stop"),
    )
    with served(root) as client:
        kinds = [each["event"] for each in client.value("/history")["events"]]
        assert kinds == ["end", "savepoint", "checkpoint", "start"]
        page = client.value("/history?kinds=start,end&limit=1")
        assert [each["event"] for each in page["events"]] == ["end"]
        rest = client.value(f"/history?kinds=start,end&limit=1&before={page['next']}")
        assert [each["event"] for each in rest["events"]] == ["start"]
        assert rest["next"] is None
        listed = client.value("/checkpoints")
        assert listed["counts"]["restored"] == 1
        assert listed["latest"]["restored"]["checkpoint"] == "ckpt-000005"
        assert listed["latest"]["savepoint"]["name"] == "mine"
        assert listed["checkpoints"][0]["is_savepoint"] is True
        assert client.value()["settings"] == {"retain": "3"}


def test_a_checkpoint_in_progress_is_shown_until_it_is_complete(live: tuple[LiveRun, Client]) -> None:
    run, client = live
    run.hold_up()
    run.in_its_thread(run.pipeline.generation.trigger)

    def progress() -> list[str]:
        rows = client.value("/checkpoints?state=preparing")["checkpoints"]
        return [row["checkpoint"]["stages"]["middle"]["progress"] for row in rows]

    wait_until(lambda: progress() == ["catching_up"])
    assert client.value("/checkpoints")["counts"]["in_progress"] == 1
    (row,) = client.value("/checkpoints?state=preparing")["checkpoints"]
    name = row["checkpoint"]["checkpoint"]
    assert client.value(f"/checkpoints/{name}")["retained"] is False
    run.let_go()
    wait_until(lambda: client.value(f"/checkpoints/{name}")["retained"])
    assert client.value("/checkpoints")["counts"]["in_progress"] == 0


def test_several_roots_are_told_apart_by_their_keys(root: Path, past: LongPast) -> None:
    with served(root, past.root) as client:
        found = client.get("/api/v1/pipelines").value["pipelines"]
        assert [each["pipeline"] for each in found] == ["flat", "long"]
        assert len({each["key"] for each in found}) == 2
        assert client.get(f"/api/v1/pipelines/{found[1]['key']}/checkpoints").value["counts"]["failed"] == 8


@pytest.mark.parametrize(
    "query",
    [
        "/checkpoints?limit=0",
        "/checkpoints?limit=501",
        "/checkpoints?limit=x",
        "/checkpoints?limit=1&limit=2",
        "/checkpoints?state=unheard",
        "/checkpoints?state=",
        "/checkpoints?before=../x",
        "/checkpoints?colour=red",
        "/history?kinds=nothing",
        "/history?before=x",
        "/tables?limit=1",
        "?limit=1",
        "/live?since=1",
    ],
)
def test_a_query_that_cannot_be_is_refused(long: Client, query: str) -> None:
    found = long.get(long.one + query)
    assert found.code == 400
    assert found.value["error"]


@pytest.mark.parametrize(
    "path",
    ["/checkpoints/ckpt-999999", "/checkpoints/x", f"/checkpoints/{'9' * 500}", "/compare/1/ckpt-9999999", "/no"],
)
def test_what_is_not_there_is_not_found(long: Client, path: str) -> None:
    assert long.get(long.one + path).code == 404
    assert long.get("/api/v1/pipelines/000000000000").value["error"]


def test_metrics_are_told_of_every_root(long: Client, past: LongPast) -> None:
    found = long.get("/metrics")
    assert found.code == 200
    assert found.headers["content-type"].startswith("text/plain")
    assert f'root="{past.root}"' in found.data.decode()


def test_the_document_names_every_address_of_the_api() -> None:
    paths = document()["paths"]
    assert {route.path for route in ROUTES} <= paths.keys()
    assert "post" in paths["/api/v1/pipelines/{key}/actions/{action}"]
    for path in paths.values():
        for operation in path.values():
            assert operation["responses"].keys() >= {"200", "404", "421", "503"}


# -- actions ----------------------------------------------------------------------------------------


def test_an_action_is_done_and_says_how_it_went(live: tuple[LiveRun, Client]) -> None:
    _, client = live
    wait_until(lambda: not client.value()["status"]["in_progress"])
    offered = {each["name"]: each for each in client.value("/actions")["actions"]}
    assert offered["checkpoint"]["allowed"] is True
    assert "take a checkpoint" in offered["checkpoint"]["says"]
    assert offered["cancel"]["allowed"] is False
    assert offered["cancel"]["why_not"] == "no checkpoint is in progress"
    done = client.ask("POST", f"{client.one}/actions/checkpoint", BEARER).value
    assert done["done"] is True, done
    name = done["said"].split()[0]
    assert client.value(f"/checkpoints/{name}")["checkpoint"]["state"] in ("committing", "complete")
    cancelled = client.ask("POST", f"{client.one}/actions/cancel", BEARER).value
    assert cancelled == {"done": True, "said": "no checkpoint is in progress, so none was cancelled"}


def test_a_run_is_stopped_and_then_there_is_none_to_ask(tmp_path: Path) -> None:
    with live_run(tmp_path / "played", checkpoints=1) as run, served(run.root, allow_actions=True) as client:
        wait_until(lambda: client.value()["summary"]["life"] == "alive")
        done = client.ask("POST", f"{client.one}/actions/stop", BEARER).value
        assert done["done"] is True
        assert "stopping" in done["said"]
        run.await_end()
    with served(run.root, allow_actions=True) as client:
        wait_until(lambda: client.value()["summary"]["life"] == "stopped")
        refused = client.ask("POST", f"{client.one}/actions/checkpoint", BEARER).value
        assert refused["done"] is False
        assert "no run is alive" in refused["said"]


def test_a_savepoint_that_cannot_be_made_is_told_and_nothing_is_done(root: Path) -> None:
    with served(root, allow_actions=True) as client:
        (offered,) = [each for each in client.value("/actions")["actions"] if each["name"] == "savepoint"]
        assert f"{root}.savepoints" in offered["says"]
        answer = client.ask("POST", f"{client.one}/actions/savepoint", BEARER).value
        msgspec.convert(answer, values.ActionTaken)
        assert answer["done"] is False  # the played table shows nothing
