"""Metrics as Prometheus reads them: names, values, labels, and that none of these grows without bound."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engine.watching.told import AT, AT_S, Samples, ended, exposed, samples_in, stage, status
from tidegate.engine.events import Started
from tidegate.engine.status import SinkCommit
from tidegate.engine.watching.counts import Tally
from tidegate.engine.watching.families import NAMES, Shown, families
from tidegate.engine.watching.serving import collector_of
from tidegate.protocol.messages import END_OF_TIME_MS


def told(*shown: Shown) -> str:
    return exposed(collector_of(lambda: families(shown)))


def shown(**given: Any) -> Shown:
    """A pipeline of which everything is known."""
    tally = Tally()
    stages = {
        "read": stage(40, 4, 1_000, kind="source"),
        "totals": stage(30, 3, 2_500, lag=6, watermark_ms=1_767_225_600_500, held_back_by="paid"),
        "paid": stage(20, 2, 500, kind="sink", lag=0),
    }
    tally.on_status(status(1, stages=stages))
    commits = {"paid": SinkCommit(begun_ms=1, took_ms=300, failures=1)}
    sizes = {"new_bytes": 100, "total_bytes": 1_000, "in_flight_bytes": 10}
    tally.on_event(ended(1, duration_ms=2_000, alignment_ms=90, commits=commits, **sizes))
    tally.on_event(ended(2, "aborted", duration_ms=7_000))
    tally.on_event(Started(at=AT, because="killed"))
    values = {
        "pipeline": "orders",
        "root": "/state",
        "counted": tally.counted(),
        "is_alive": True,
        "interval_s": 10.0,
        "room": (5, 9),
        "requests": {"put": 3, "get": 2},
        "failed_requests": 1,
    }
    return Shown(**{**values, **given})


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, tuple(sorted(labels.items()))))


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("tidegate_run_alive", {}, 1),
        ("tidegate_root_readable", {}, 1),
        ("tidegate_run_state", {"state": "running"}, 1),
        ("tidegate_run_state", {"state": "failed"}, 0),
        ("tidegate_run_start_timestamp_seconds", {}, AT_S),
        ("tidegate_checkpoint_interval_seconds", {}, 10),
        ("tidegate_checkpoints_total", {"outcome": "complete"}, 1),
        ("tidegate_checkpoints_total", {"outcome": "aborted"}, 1),
        ("tidegate_checkpoints_in_progress", {}, 0),
        ("tidegate_checkpoints_aborted_in_a_row", {}, 1),
        ("tidegate_checkpoint_duration_seconds_count", {}, 1),
        ("tidegate_checkpoint_duration_seconds_sum", {}, 2),
        ("tidegate_checkpoint_duration_seconds_bucket", {"le": "1.0"}, 0),
        ("tidegate_checkpoint_duration_seconds_bucket", {"le": "2.5"}, 1),
        ("tidegate_checkpoint_duration_seconds_bucket", {"le": "+Inf"}, 1),
        ("tidegate_checkpoint_alignment_seconds_sum", {}, 0.09),
        ("tidegate_checkpoint_bytes", {"kind": "new"}, 100),
        ("tidegate_checkpoint_bytes", {"kind": "total"}, 1_000),
        ("tidegate_checkpoint_bytes", {"kind": "in_flight"}, 10),
        ("tidegate_last_checkpoint_timestamp_seconds", {}, AT_S + 2),
        ("tidegate_stage_rows_total", {"stage": "totals"}, 30),
        ("tidegate_stage_lag_segments", {"stage": "totals"}, 6),
        ("tidegate_stage_lag_segments", {"stage": "read"}, None),
        ("tidegate_stage_watermark_seconds", {"stage": "totals"}, 1_767_225_600.5),
        ("tidegate_stage_watermark_seconds", {"stage": "paid"}, None),
        ("tidegate_stage_held_back", {"stage": "totals"}, 1),
        ("tidegate_stage_held_back", {"stage": "read"}, 0),
        ("tidegate_stage_batch_duration_seconds_count", {"stage": "totals"}, 3),
        ("tidegate_stage_batch_duration_seconds_sum", {"stage": "totals"}, 2.5),
        ("tidegate_sink_commits_total", {"sink": "paid", "outcome": "committed"}, 1),
        ("tidegate_sink_commits_total", {"sink": "paid", "outcome": "failed"}, 1),
        ("tidegate_sink_commit_duration_seconds_sum", {"sink": "paid"}, 0.3),
        ("tidegate_sink_commit_duration_seconds_bucket", {"sink": "paid", "le": "0.25"}, 0),
        ("tidegate_sink_commit_duration_seconds_bucket", {"sink": "paid", "le": "0.5"}, 1),
        ("tidegate_recoveries_total", {"because": "killed"}, 1),
        ("tidegate_recoveries_total", {"because": "failure"}, 0),
        ("tidegate_failures_total", {}, 0),
        ("tidegate_store_requests_total", {"operation": "put"}, 3),
        ("tidegate_store_errors_total", {}, 1),
        ("tidegate_disk_free_bytes", {}, 5),
        ("tidegate_disk_size_bytes", {}, 9),
    ],
)
def test_a_metric_has_the_value_that_was_counted(name: str, labels: dict[str, str], expected: float | None) -> None:
    assert value(samples_in(told(shown())), name, **labels) == expected


def test_every_family_is_told_and_named_as_prometheus_wants_it() -> None:
    text = told(shown())
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert {name.removesuffix("_total") for name in types} == NAMES
    assert {name for name, kind in types.items() if kind == "counter"} == {each for each in types if "_total" in each}
    assert all(re.fullmatch("tidegate_[a-z_]+", name) for name in types)
    assert len(re.findall("^# HELP ", text, re.MULTILINE)) == len(types)


def test_what_is_not_known_is_not_told() -> None:
    samples = samples_in(told(Shown(pipeline="orders", root="/state")))
    names = {name for name, _ in samples}
    unknown = {"tidegate_run_alive", "tidegate_run_state", "tidegate_last_checkpoint_timestamp_seconds"}
    assert not names & (unknown | {"tidegate_checkpoint_bytes", "tidegate_store_errors_total"})
    assert value(samples, "tidegate_checkpoints_total", outcome="complete") is None


def test_of_a_root_that_cannot_be_read_nothing_is_told_but_that() -> None:
    samples = samples_in(told(shown(is_readable=False)))
    assert samples == {("tidegate_root_readable", ()): 0.0}


@pytest.mark.parametrize("state", ["starting", "restarting", "finished", "interrupted", "failed"])
def test_while_no_stage_runs_nothing_is_told_of_what_it_does_now(state: str) -> None:
    tally = Tally()
    stages = {"totals": stage(30, lag=6, watermark_ms=1)}
    for each in ("running", state):
        tally.on_status(status(1, stages=stages, state=each))
    samples = samples_in(told(shown(counted=tally.counted())))
    assert value(samples, "tidegate_stage_lag_segments", stage="totals") is None
    assert value(samples, "tidegate_stage_rows_total", stage="totals") == 30
    assert value(samples, "tidegate_run_state", state=state) == 1


def test_a_run_that_was_killed_says_it_runs_and_has_no_lag() -> None:
    samples = samples_in(told(shown(is_alive=False)))
    assert value(samples, "tidegate_run_alive") == 0
    assert value(samples, "tidegate_stage_lag_segments", stage="totals") is None
    assert value(samples, "tidegate_checkpoints_in_progress") is None


def test_a_watermark_at_the_end_of_time_is_no_time() -> None:
    tally = Tally()
    tally.on_status(status(1, stages={"totals": stage(1, watermark_ms=END_OF_TIME_MS)}))
    assert value(samples_in(told(shown(counted=tally.counted()))), "tidegate_stage_watermark_seconds") is None


def test_several_roots_share_every_family() -> None:
    text = told(shown(), shown(root="/other"))
    assert text.count("# TYPE tidegate_checkpoints_total counter") == 1
    assert 'tidegate_run_alive{pipeline="orders",root="/other"} 1.0' in text
    assert 'tidegate_run_alive{pipeline="orders",root="/state"} 1.0' in text


def test_names_of_stages_are_written_so_that_they_are_read_back() -> None:
    tally = Tally()
    name = 'a"b\\c\n{d="e"} 1'
    tally.on_status(status(1, stages={name: stage(1)}))
    samples = samples_in(told(shown(counted=tally.counted())))
    assert value(samples, "tidegate_stage_rows_total", stage=name) == 1


def test_no_label_grows_with_time() -> None:
    """A thousand checkpoints and generations later there are as many series as after the first."""
    tally = Tally()
    counts = set()
    for number in range(1, 1_000):
        commits = {"paid": SinkCommit(begun_ms=1, took_ms=number, failures=number % 3, why=f"why {number}")}
        stages = {"totals": stage(number, lag=number, watermark_ms=number), "paid": stage(1, kind="sink")}
        tally.on_status(status(number, stages=stages))
        tally.on_event(ended(number, duration_ms=number, alignment_ms=1, new_bytes=1, commits=commits))
        tally.on_event(ended(10_000 + number, "aborted", why=f"why {number}"))
        tally.on_event(Started(at=AT, because="failure", why=f"why {number}"))
        if number % 333 == 0:
            counts.add(len(samples_in(told(shown(counted=tally.counted())))))
    assert len(counts) == 1
    assert max(counts) < 120
