"""Metrics of roots, from outside: of their history and of what their runs say."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from prometheus_client.registry import Collector

from tests.cli.harness import live_run, make_root, wait_until
from tests.engine.watching.told import AT, Samples, checkpoint, ended, exposed, samples_in, stage, status
from tidegate.engine.events import AnyEvent, CheckpointEnded, Started
from tidegate.engine.history import Past, Recorder
from tidegate.engine.status_files import read_status
from tidegate.engine.watching.roots import Seen, collector_for, look_at
from tidegate.errors import StoreUnavailable
from tidegate.storage.folder import Folder
from tidegate.storage.places import place_of

COMPLETE = ("tidegate_checkpoints_total", (("outcome", "complete"),))
ROWS = ("tidegate_stage_rows_total", (("stage", "totals"),))


class Looking:
    """What is seen of a root, as a test says."""

    def __init__(self) -> None:
        self.seen = Seen(pipeline="orders", is_alive=True)
        self.error: Exception | None = None

    def __call__(self) -> Seen:
        if self.error is not None:
            raise self.error
        return self.seen


def samples(collector: Collector) -> Samples:
    return samples_in(exposed(collector))


def test_what_is_read_again_is_not_counted_again_and_what_is_dropped_stays_counted() -> None:
    looking = Looking()
    collector = collector_for({"/state": looking})
    events: list[AnyEvent] = [ended(number, duration_ms=10) for number in range(1, 4)]
    counted = []
    for known in (events[:2], events[:2], events, events[2:], [events[2], ended(4, duration_ms=10)], []):
        looking.seen = Seen(pipeline="orders", is_alive=True, events=known)
        counted.append(samples(collector)[COMPLETE])
    assert counted == [2, 2, 3, 3, 4, 4]


def test_an_event_of_which_more_is_known_later_counts_once() -> None:
    looking = Looking()
    collector = collector_for({"/state": looking})
    first = CheckpointEnded(at=AT, checkpoint=checkpoint(1, "committing", duration_ms=10))
    later = CheckpointEnded(at=AT, id=first.id, checkpoint=checkpoint(1, duration_ms=10, shown_ms=90))
    for known in (first, later):
        looking.seen = Seen(pipeline="orders", is_alive=True, events=[known])
        assert samples(collector)[COMPLETE] == 1


def test_rows_of_a_root_go_on_through_runs_that_come_and_go() -> None:
    looking = Looking()
    collector = collector_for({"/state": looking})
    found = []
    for generation, rows, is_alive in ((3, 100, True), (3, 120, False), (4, 5, True)):
        said = status(generation, stages={"totals": stage(rows)})
        looking.seen = Seen(pipeline="orders", is_alive=is_alive, status=said)
        found.append(samples(collector)[ROWS])
    assert found == [100, 120, 125]


def test_how_often_checkpoints_are_taken_is_what_the_last_start_says() -> None:
    looking = Looking()
    collector = collector_for({"/state": looking})
    early = Started(at="2026-01-01T00:00:00.000+00:00", because="first", settings={"checkpoint-interval": "5s"})
    late = Started(at="2026-01-02T00:00:00.000+00:00", because="again", settings={"checkpoint-interval": "2m"})
    looking.seen = Seen(pipeline="orders", is_alive=True, events=[late, early])
    assert samples(collector)["tidegate_checkpoint_interval_seconds", ()] == 120
    looking.seen = Seen(pipeline="orders", is_alive=True, events=[Started(at=AT, because="again")])
    assert ("tidegate_checkpoint_interval_seconds", ()) not in samples(collector)


@pytest.mark.parametrize("error", [StoreUnavailable("no"), PermissionError("no")])
def test_a_root_that_cannot_be_read_does_not_hide_the_others(error: Exception) -> None:
    good, bad = Looking(), Looking()
    good.seen = Seen(pipeline="payments", is_alive=True)
    collector = collector_for({"/bad": bad, "/good": good})
    exposed(collector)
    bad.error = error
    text = exposed(collector)
    assert 'tidegate_root_readable{pipeline="orders",root="/bad"} 0.0' in text
    assert 'tidegate_root_readable{pipeline="payments",root="/good"} 1.0' in text
    assert 'tidegate_run_alive{pipeline="orders",root="/bad"}' not in text
    bad.error = None
    assert 'tidegate_run_alive{pipeline="orders",root="/bad"} 1.0' in exposed(collector)


def test_a_root_without_a_run_is_told_with_its_history(tmp_path: Path) -> None:
    place = place_of(make_root(tmp_path, checkpoints=2))
    recorder = Recorder(place.files)
    for number in (1, 2):
        recorder.note(ended(number, duration_ms=1_500))
    recorder.begin()
    recorder.close()
    collector = collector_for({str(place): partial(look_at, place, Past(place.files))})
    found = samples(collector)
    assert found["tidegate_run_alive", ()] == 0
    assert found[COMPLETE] == 2
    assert found["tidegate_checkpoint_duration_seconds_sum", ()] == 3
    assert found["tidegate_disk_free_bytes", ()] > 0
    assert f'root="{place}"' in exposed(collector)


def test_a_root_with_a_run_tells_what_that_does(tmp_path: Path) -> None:
    with live_run(tmp_path, checkpoints=1) as run:
        wait_until(lambda: (said := read_status(Folder(run.root))) is not None and said.state == "running")
        place = place_of(run.root)
        found = samples(collector_for({"x": partial(look_at, place, Past(place.files))}))
    assert found["tidegate_run_alive", ()] == 1
    assert found["tidegate_run_state", (("state", "running"),)] == 1
    assert found["tidegate_stage_lag_segments", (("stage", "table"),)] == 0


def test_a_folder_that_is_no_root_is_not_readable(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    found = samples(collector_for({"x": partial(look_at, place, Past(place.files))}))
    assert found == {("tidegate_root_readable", ()): 0}
