"""The played Spark writes what a real one was seen to write, step by step; see `record.py`."""

from __future__ import annotations

import difflib
from itertools import zip_longest
from pathlib import Path

import pyspark
import pytest

from tests.mutants.mutation import Edit, switch
from tests.played.player import Player
from tests.played.recording import Recording, read_recording
from tests.played.scenarios import SCENARIOS, Scenario
from tidegate.testing.played.sources import SourceLog
from tidegate.testing.played.spark import SETTINGS, PlayedQuery
from tidegate.testing.played.state import PlayedStore

pytestmark = pytest.mark.matrix

RECORDINGS = [read_recording(path) for path in sorted(Path(__file__).parent.glob("spark-*.txt"))]
NEWEST = RECORDINGS[-1]

# What an older Spark does not keep in its offset log. It is what it knows; nothing of it changes what is written.
NOT_KEPT_BY_4_2 = {
    "spark.sql.dropDuplicates.deterministicKeyOrder.enabled",
    "spark.sql.streaming.statefulOperator.alwaysNullableOutput.enabled",
}
NOT_KEPT = {
    "4.1": NOT_KEPT_BY_4_2
    | {
        "spark.sql.function.protobufExtensions.enabled",
        "spark.sql.streaming.queryEvolution.enableSourceEvolution",
        "spark.sql.streaming.stateStore.rocksdb.mergeOperatorVersion",
        "spark.sql.streaming.stateStore.rowChecksum.enabled",
    },
    "4.2": NOT_KEPT_BY_4_2,
}
STORES_FIRST = {"4.1", "4.2"}
"""Where maintenance of the state is one thing after the other."""


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def difference(scenario: Scenario, recording: Recording = NEWEST, *, of: Recording | None = None) -> str | None:
    """The first step in which the played one does something else than Spark, and what; None: there is none. `of`: the
    version that is played, if it is another."""
    recorded = recording.scenarios[scenario.name]
    player = Player(scenario, stores_first=minor((of or recording).version) in STORES_FIRST)
    for number, (own, spark) in enumerate(zip_longest(player.steps(), recorded)):
        if own is None or spark is None:
            return f"{scenario.name}: {len(recorded)} steps were recorded"
        if own != spark:
            lines = difflib.unified_diff(spark.text().split("\n"), own.text().split("\n"), "Spark", "played", n=3)
            return "\n".join([f"{scenario.name}, step {number} ({own.step}):", *lines])
    return None


def test_the_spark_that_is_here_was_recorded() -> None:
    assert minor(pyspark.__version__) in {minor(each.version) for each in RECORDINGS}


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda each: each.version)
def test_every_scenario_was_recorded_with_the_settings_that_are_played(recording: Recording) -> None:
    assert {each.name: each.steps for each in SCENARIOS} == {
        name: tuple(step.step for step in steps) for name, steps in recording.scenarios.items()
    }
    not_kept = NOT_KEPT.get(minor(recording.version), set())
    assert recording.settings == {key: value for key, value in SETTINGS.items() if key not in not_kept}


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda each: each.version)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_a_played_query_writes_what_spark_writes_in_the_same_order(scenario: Scenario, recording: Recording) -> None:
    found = difference(scenario, recording)
    assert found is None, found


def test_a_version_is_not_taken_for_another() -> None:
    (long,) = [each for each in SCENARIOS if each.name == "long"]
    old, *_, new = RECORDINGS
    for recording, other in ((old, new), (new, old)):
        found = difference(long, recording, of=other)
        assert found is not None
        assert "(maintain)" in found


CLOSES = PlayedQuery._closes.fget  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "edits", "told"),
    [
        pytest.param(
            "long",
            [
                Edit(
                    PlayedQuery._planned, "batch.number - self._plan.retained", "batch.number - self._plan.retained - 1"
                )
            ],
            "-- spark-1/offsets/0",
            id="entries are kept for too long",
        ),
        pytest.param(
            "closing",
            [
                Edit(CLOSES, "and self._ran is not None", ""),
                Edit(CLOSES, "self._ran.watermark_ms", "(self._ran.watermark_ms if self._ran else 0)"),
            ],
            "++ spark-1/offsets/2",
            id="the first batch after a restart is one without data",
        ),
        pytest.param(
            "killed-stateless",
            [Edit(PlayedQuery._execute, "batch.number > self._logged", "batch.number >= self._logged")],
            "++ output-1/part",
            id="a batch that the sink's log has is run again",
        ),
        pytest.param(
            "totals",
            [Edit(PlayedStore.upload, "each.version >= made.version", "each.version > made.version")],
            '+    [{"version":11',
            id="a change log does not name the full snapshot that it goes on from",
        ),
        pytest.param(
            "stateless",
            [Edit(SourceLog.take_up, "number = self.offset + 1", "number = self.offset + 2")],
            "-+ spark-1/sources/0/0",
            id="a source log leaves an offset out",
        ),
    ],
)
def test_what_is_played_wrongly_is_told(
    name: str, edits: list[Edit], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch(*edits)(monkeypatch)
    (scenario,) = [each for each in SCENARIOS if each.name == name]
    found = difference(scenario)
    assert found is not None
    assert told in found
