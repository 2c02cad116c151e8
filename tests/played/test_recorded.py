"""The played Spark writes what a real one was seen to write, step by step; see `record.py`."""

from __future__ import annotations

import difflib
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.mutants.mutation import Edit, switch
from tests.played.player import Player
from tests.played.recording import read_recording
from tests.played.scenarios import SCENARIOS, Scenario
from tidegate.testing.played.sources import SourceLog
from tidegate.testing.played.spark import SETTINGS, PlayedQuery
from tidegate.testing.played.state import PlayedStore

RECORDING = read_recording(Path(__file__).with_name("spark-4.3.0.txt"))


def difference(scenario: Scenario) -> str | None:
    """The first step in which the played one does something else than Spark, and what; None: there is none."""
    recorded = RECORDING.scenarios[scenario.name]
    for number, (own, spark) in enumerate(zip_longest(Player(scenario).steps(), recorded)):
        if own is None or spark is None:
            return f"{scenario.name}: {len(recorded)} steps were recorded"
        if own != spark:
            lines = difflib.unified_diff(spark.text().split("\n"), own.text().split("\n"), "Spark", "played", n=3)
            return "\n".join([f"{scenario.name}, step {number} ({own.step}):", *lines])
    return None


def test_every_scenario_was_recorded_with_the_settings_that_are_played() -> None:
    assert {each.name: each.steps for each in SCENARIOS} == {
        name: tuple(step.step for step in steps) for name, steps in RECORDING.scenarios.items()
    }
    assert RECORDING.settings == SETTINGS


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_a_played_query_writes_what_spark_writes_in_the_same_order(scenario: Scenario) -> None:
    found = difference(scenario)
    assert found is None, found


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
