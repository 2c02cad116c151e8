"""Looking into checkpoints that real Spark has written: their state is what the input demands, and damage is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from pyspark.sql import SparkSession

import tidegate
from tests.cli.strict import answered
from tests.spark import inspected_pipeline
from tests.spark.harness import START, run_to_end, write_input
from tidegate.cli.answers import DiffAnswer, InspectAnswer, RowsAnswer, VerifyAnswer
from tidegate.cli.diff import diff_command
from tidegate.cli.exits import Exit
from tidegate.cli.inspect import Format, inspect_command
from tidegate.cli.load import load_pipeline
from tidegate.cli.verify import verify_command
from tidegate.engine.inspecting import CheckpointInside, reading_session
from tidegate.errors import DamagedCheckpoint, InvalidConfig, StageFailed, UnknownCheckpoint, UnknownState
from tidegate.protocol.names import checkpoint_name
from tidegate.spark.state_diff import KeyChange, difference
from tidegate.spark.stored_state import StoredOperator
from tidegate.storage.file_lists import files_of
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import as_given
from tidegate.storage.scratch import scratch

pytestmark = [pytest.mark.matrix, pytest.mark.spark, pytest.mark.slow]

FIRST, ALL = 180, 360
"""Rows that were read by the end of the first run, and of the second."""


class Place:
    """A pipeline that has run twice, and the last checkpoint of each run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "pipeline.py"
        self.broken = folder / "broken.py"
        """The same, of which one stage would not run."""
        self.root = folder / "root"
        self.first = ""
        self.last = ""

    def cuts(self) -> dict[str, dict[str, int | None]]:
        """Of every checkpoint, oldest first, the batch at which each stage was cut."""
        inspected = InspectedRoot(self.root)
        return {
            checkpoint_name(record.checkpoint_id): {
                name: stage.cut for name, stage in inspected.manifest(record).stages.items()
            }
            for record in inspected.retained()
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Place:
    place = Place(tmp_path_factory.mktemp("inspected"))
    shutil.copy(inspected_pipeline.__file__, place.file)
    written = place.file.read_text(encoding="utf-8")
    place.broken.write_text(
        written.replace('getValueState("count"', 'getValueState(1 / 0 or "count"'), encoding="utf-8"
    )
    pipeline = load_pipeline(place.file, None, to_run=True)
    write_input(place.folder / "in", 4, FIRST // 4)
    run_to_end(pipeline, place.root, spark, retain=20)
    after_first = list(place.cuts().values())[-1]
    write_input(place.folder / "in", 4, FIRST // 4, first_file=4)
    run_to_end(pipeline, place.root, spark, retain=20)
    # Another one may have taken its place, in which no stage had come further.
    place.first = [name for name, cuts in place.cuts().items() if cuts == after_first][-1]
    place.last = list(place.cuts())[-1]
    return place


@pytest.fixture
def copy(place: Place, tmp_path: Path) -> Path:
    """Of the root, that a test may damage."""
    return Path(shutil.copytree(place.root, tmp_path / "root"))


def operators(place: Place, stage: str) -> list[StoredOperator]:
    inside = CheckpointInside(InspectedRoot(place.root), "latest")
    with scratch() as files:
        return inside.stored(stage, reading_session(), files).operators()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def untouched(place: Place) -> Iterator[None]:
    """Whoever looks changes nothing, neither in the root nor in a table."""
    before = contents(place.folder)
    yield
    assert contents(place.folder) == before


Ask = Callable[..., RowsAnswer]


@pytest.fixture
def ask(place: Place, capsys: pytest.CaptureFixture[str]) -> Ask:
    def asked(stage: str, checkpoint: str = "latest", **options: Any) -> RowsAnswer:
        capsys.readouterr()
        inspect_command(as_given(place.root), checkpoint, stage, **{"limit": 1000, "as_json": True, **options})
        answer = answered(capsys.readouterr().out)
        assert isinstance(answer, RowsAnswer)
        assert answer.count == len(answer.rows) or answer.out
        return answer

    return asked


# -- state is what the input demands ------------------------------------------------------------------


def windows(rows: int, watermark_ms: int) -> dict[tuple[str, str], tuple[int, int]]:
    """The sums of the windows that are still open, by where they start and their key."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for each in range(rows):
        start = START + timedelta(seconds=each - each % 60)
        if (start + timedelta(minutes=1)).timestamp() * 1000 > watermark_ms:
            name = f"{start:%Y-%m-%dT%H:%M:%S.000Z}", f"k{each % 5}"
            value, ids = found.get(name, (0, 0))
            found[name] = value + each, ids + each
    return found


@pytest.mark.usefixtures("untouched")
def test_the_windows_of_a_chained_aggregation_are_those_that_are_open(place: Place, ask: Ask) -> None:
    for checkpoint, rows in ((place.first, FIRST), (place.last, ALL)):
        inspected = InspectedRoot(place.root)
        manifest = inspected.manifest(inspected.find(int(checkpoint.removeprefix("ckpt-"))))
        assert manifest.chains == {"totals": ("per_minute",)}
        watermark_ms = manifest.stages["per_minute"].watermark_ms
        assert watermark_ms is not None
        expected = windows(rows, watermark_ms)
        assert 0 < len(expected) < len(windows(rows, 0))
        for stage in ("per_minute", "totals"):  # the second ran in the query of the first
            answer = ask(stage, checkpoint)
            assert (answer.held_by, answer.operator, answer.part) == ("per_minute", 0, None)
            assert {
                (row["key"]["window"]["start"], row["key"]["key"]): (row["value"]["sum"], row["value"]["sum_2"])
                for row in answer.rows
            } == expected


@pytest.mark.usefixtures("untouched")
def test_both_sides_of_a_join_and_the_operator_behind_it_are_read(place: Place, ask: Ask) -> None:
    with pytest.raises(UnknownState, match=r"several operators; name one of: 0 \(\w+\), 1 \(\w+\)"):
        ask("matched")
    found = {len(each.parts): each.number for each in operators(place, "matched")}
    once, join = found[1], found[2]
    with pytest.raises(UnknownState, match=f"operator {join} keeps several; name one of: left, right"):
        ask("matched", operator=join)
    with pytest.raises(UnknownState, match="has no part 'up'; name one of: left, right"):
        ask("matched", operator=join, part="up")
    with pytest.raises(UnknownState, match="no operator 7"):
        ask("matched", operator=7)
    left, right = (ask("matched", operator=join, part=side).rows for side in ("left", "right"))
    # The optimiser knows that no other row will find a partner.
    assert sorted(row["value"]["id"] for row in left) == list(range(0, ALL, 6))
    assert sorted(row["value"]["third"] for row in right) == list(range(0, ALL, 6))
    assert [row["key"] for row in ask("matched", operator=once).rows] == [{"key": f"k{each}"} for each in range(5)]


@pytest.mark.usefixtures("untouched")
def test_every_variable_of_a_processor_and_its_timers_are_read(ask: Ask) -> None:
    with pytest.raises(UnknownState, match="operator 0 keeps several; name one of: count, ids, thirds, timers"):
        ask("visits")
    count, ids, thirds, timers = (ask("visits", part=each).rows for each in ("count", "ids", "thirds", "timers"))
    assert {row["key"]["key"]: row["value"]["seen"] for row in count} == {f"k{each}": ALL // 5 for each in range(5)}
    assert len(ids) == ALL
    assert len(thirds) == 15
    assert [row["expiration_timestamp_ms"] for row in timers] == [inspected_pipeline.FAR_FUTURE_MS] * 5


# -- and what else there is to ask --------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_the_frame_of_a_state_may_be_read_again_and_again(place: Place, spark: SparkSession) -> None:
    frame = tidegate.state(place.root, place.first, "visits", part="ids", spark=spark)
    assert frame.count() == FIRST
    assert frame.where("key.key = 'k1'").count() == FIRST // 5
    assert tidegate.state(str(place.root), "latest", "visits", 0, "ids").count() == ALL
    with pytest.raises(UnknownState, match="stage 'rows' keeps no state at ckpt-"):
        tidegate.state(place.root, place.last, "rows")
    with pytest.raises(UnknownState, match="no stage 'row'; it has: rows, per_minute, matched, visits, totals"):
        tidegate.state(place.root, place.last, "row")
    with pytest.raises(UnknownCheckpoint, match="'newest' names no checkpoint"):
        tidegate.state(place.root, "newest", "visits")


@pytest.mark.usefixtures("untouched")
def test_rows_are_given_as_a_table_a_file_or_a_folder(
    place: Place, ask: Ask, tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    of_one: dict[str, Any] = {"part": "count", "where": "key.key >= 'k3'"}
    assert [row["key"]["key"] for row in ask("visits", **of_one).rows] == ["k3", "k4"]
    inspect_command(as_given(place.root), place.last, "visits", **of_one, limit=1)
    told = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert told[0] == f"state of visits at {place.last}: transformWithState (operator 0, count)"
    assert told[1].split() == ["key.key", "value.seen", "partition_id"]
    assert told[3].split()[:2] == ["k3", "72"]
    assert told[-1] == "the first 1 of 2 rows where key.key >= 'k3'; --limit shows more"
    inspect_command(as_given(place.root), place.last, "visits", **of_one, form=Format.CSV)
    assert [line.split(",")[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["key.key", "value.seen"],
        ["k3", "72"],
        ["k4", "72"],
    ]
    inspect_command(as_given(place.root), place.last, "visits", **of_one, form=Format.CSV, out=tmp_path / "rows.csv")
    assert len((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()) == 3
    folder = tmp_path / "rows"
    answer = ask("per_minute", form=Format.PARQUET, out=folder)
    assert spark.read.parquet(str(folder)).count() == answer.count > 0
    assert answer.out == str(folder)
    with pytest.raises(InvalidConfig, match="is there already"):
        ask("per_minute", form=Format.PARQUET, out=folder)
    with pytest.raises(InvalidConfig, match=r"--where 'country = 1' cannot be asked: .*; there is: key.key, "):
        ask("visits", part="count", where="country = 1")
    with pytest.raises(StageFailed, match=r"its rows cannot be read: \[CAST_INVALID_INPUT\] The value 'k\d'"):
        ask("visits", part="count", where="CAST(key.key AS int) = 1")


@pytest.mark.usefixtures("untouched")
def test_all_stages_are_listed_with_what_they_hold(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_command(as_given(place.root), as_json=True)
    answer = answered(capsys.readouterr().out)
    assert isinstance(answer, InspectAnswer)
    held = {name: [(each.kind, each.keys, each.rows) for each in stage.state] for name, stage in answer.stages.items()}
    (windows,) = held["per_minute"]
    assert windows[:2] == ("aggregation", ("window(ts)", "key"))
    assert held == {
        "rows": [],
        "per_minute": [windows],
        "totals": [],
        "matched": [("deduplication", ("key",), {"": 5}), ("join", (), {"left": ALL // 6, "right": ALL // 6})],
        "visits": [("transformWithState", ("key",), {"count": 5, "ids": ALL, "thirds": 15, "timers": 5})],
    }
    assert answer.stages["totals"].in_query_of == "per_minute"
    inspect_command(as_given(place.root))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == f"{place.last} of pipeline inspected"
    assert {"rows no state", "totals in the query of per_minute", "matched 0 deduplication key 5"} <= set(lines)
    assert f"visits 0 transformWithState key ids {ALL}" in lines


@pytest.mark.usefixtures("untouched")
def test_two_checkpoints_are_compared_key_by_key(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    def compared(stage: str, **options: Any) -> DiffAnswer:
        diff_command(place.first, "latest", as_given(place.root), stage, **options, as_json=True)
        answer = answered(capsys.readouterr().out)
        assert isinstance(answer, DiffAnswer)
        return answer

    def counts(answer: DiffAnswer) -> tuple[int, int, int, int]:
        return answer.added, answer.removed, answer.changed, answer.unchanged

    counted = compared("visits", part="count", limit=2)
    assert counts(counted) == (0, 0, 5, 0)
    first = counted.some["changed"][0]
    assert (first.key, first.before, first.after) == ({"key": "k0"}, ({"seen": 36},), ({"seen": 72},))
    assert {kind: len(keys) for kind, keys in counted.some.items()} == {"changed": 2}
    assert counts(compared("visits", part="ids")) == (0, 0, 5, 0)
    # A window that was open then is closed by now, and others are open.
    moved = compared("totals")
    assert moved.added > 0
    assert moved.removed > 0
    left = compared("matched", operator=1, part="left")
    assert counts(left) == (FIRST // 6, 0, 0, FIRST // 6)
    assert counts(compared("matched", operator=0)) == (0, 0, 0, 5)
    diff_command(place.first, place.last, as_given(place.root), "visits", part="count", limit=1)
    assert capsys.readouterr().out.splitlines() == [
        f"state of visits (count) from {place.first} to {place.last}",
        "0 keys added, 0 removed, 5 changed, 0 unchanged",
        "~ key k0: seen 36 → seen 72",
        "  and 4 more changed; --limit shows more",
    ]


def test_state_that_goes_by_no_key_is_compared_as_a_whole(spark: SparkSession) -> None:
    before, after = (
        spark.sql(f"SELECT named_struct('count', {count}) AS value, 0 AS partition_id") for count in (5, 9)
    )
    found = difference(before, after, 10)
    assert (found.added, found.removed, found.changed, found.unchanged) == (0, 0, 1, 0)
    assert found.some["changed"] == (KeyChange({"key": "all rows"}, ({"count": 5},), ({"count": 9},)),)
    with pytest.raises(InvalidConfig, match="the two states are not of one kind"):
        difference(before, after.drop("value"), 10)


# -- damage -------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_is_named(copy: Path) -> None:
    inspected = InspectedRoot(copy)
    manifest = inspected.manifest(inspected.newest())
    files = {stage: files_of(inspected.files, stage, each.files) for stage, each in manifest.stages.items()}
    cut = max((each for each in files["visits"] if each.name.startswith("state/")), key=lambda each: each.size_bytes)
    data = (copy / cut.stored).read_bytes()
    (copy / cut.stored).write_bytes(data[: len(data) // 2])
    for look in (
        lambda: inspect_command(as_given(copy), stage="visits", part="count"),
        lambda: inspect_command(as_given(copy)),
        lambda: diff_command("latest", "latest", as_given(copy), "visits", part="count"),
        lambda: tidegate.state(copy, "latest", "visits", part="count").collect(),
    ):
        with pytest.raises(DamagedCheckpoint, match=f"{cut.stored} of stage 'visits' is not what it was: size differs"):
            look()
    inspect_command(as_given(copy), stage="per_minute")  # of another stage nothing is damaged


# -- a rehearsal --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_a_rehearsal_tells_which_queries_would_run_from_a_checkpoint(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    verify_command(as_given(place.root), deep=place.file, as_json=True)
    answer = answered(capsys.readouterr().out)
    assert isinstance(answer, VerifyAnswer)
    assert answer.rehearsal is not None
    assert answer.rehearsal.checkpoint == place.last
    assert {each.stages: each.outcome for each in answer.rehearsal.queries} == {
        ("rows",): "idle",
        ("per_minute", "totals"): "ran",
        ("matched",): "ran",
        ("visits",): "ran",
    }
    with pytest.raises(typer.Exit) as ended:
        verify_command(as_given(place.root), int(place.first.removeprefix("ckpt-")), place.broken)
    assert ended.value.exit_code == Exit.FAILED
    told = capsys.readouterr().out
    assert "visits failed: stage 'visits' failed: TransformWithStateInPySpark driver worker exited" in told
    assert f"queries started on a copy of {place.first}, to read nothing" in told
    assert "rows would run: it has planned its next batch, and was stopped before it read any" in told
    assert "per_minute → totals would run: it has run a batch without rows, on its state" in told
