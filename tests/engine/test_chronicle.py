"""What a run tells of what happens to it, with a Spark that is played."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.played import PlayedPipeline, played
from tidegate.engine.chronicle import Chronicle
from tidegate.engine.events import AnyEvent, CheckpointEnded, Ended, Failed, Started
from tidegate.engine.options import settings_of, settings_told
from tidegate.engine.status import CheckpointStatus, Observer
from tidegate.errors import StageFailed
from tidegate.protocol.coordinator import Phase


def following(pipeline: PlayedPipeline, chronicle: Chronicle | None = None) -> tuple[Chronicle, list[AnyEvent]]:
    chronicle = Chronicle() if chronicle is None else chronicle
    told: list[AnyEvent] = []
    chronicle.observers.append(told.append)
    chronicle.follow(pipeline.generation, pipeline.generation._ground.opened)
    return chronicle, told


def checkpoints(told: list[AnyEvent]) -> list[CheckpointStatus]:
    return [each.checkpoint for each in told if isinstance(each, CheckpointEnded)]


def test_a_checkpoint_is_told_once_when_all_tables_show_it(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        _, told = following(pipeline)
        pipeline.one_batch_each()
        pipeline.table.may_commit.clear()
        checkpoint_id = pipeline.generation.trigger()
        pipeline.poll_until(lambda: pipeline.generation.completed(checkpoint_id))
        assert told == [], "it is decided, but not shown"
        pipeline.table.may_commit.set()
        pipeline.poll_until(lambda: pipeline.generation.is_settled)
        pipeline.generation.poll()
    (status,) = checkpoints(told)
    assert (status.checkpoint, status.state) == ("ckpt-000001", "complete")
    times = (status.begun_ms, status.prepared_ms, status.decided_ms, status.shown_ms)
    assert list(times) == sorted(each for each in times if each is not None)
    assert status.commits["table"].took_ms is not None
    assert status.commits["table"].failures == 0
    middle = status.stages["middle"]
    assert middle.last_barrier_from == "rows"
    assert middle.caught_up_segments == 0
    assert middle.stored_ms is not None
    assert middle.aligned_ms is not None
    assert status.stages["rows"].last_barrier_from is None


def test_what_a_stage_had_to_consume_is_told_while_it_does_and_after(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        _, told = following(pipeline)
        generation = pipeline.generation
        for _ in range(3):
            pipeline.played["rows"].run_batch()
            generation.poll()
        checkpoint_id = generation.trigger()

        def now() -> CheckpointStatus:
            return Observer("flat").observe(generation).in_progress[0]

        pipeline.poll_until(lambda: now().stages["middle"].caught_up_segments == 3)
        assert now().stages["middle"].progress == "catching_up"
        pipeline.poll_until(lambda: "middle working off 3 segments" in (now().waited_for or ""))
        generation.cancel()
        pipeline.poll_until(lambda: not generation.is_under_way(checkpoint_id))
    (status,) = checkpoints(told)
    assert status.state == "aborted"
    assert (status.why or "").startswith("cancelled")
    assert status.stages["middle"].progress == "catching_up"
    assert status.stages["middle"].caught_up_segments == 3


def test_what_is_under_way_when_a_generation_ends_is_told_as_aborted(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        chronicle, told = following(pipeline)
        pipeline.played["rows"].run_batch()
        pipeline.generation.poll()
        pipeline.generation.trigger()
        pipeline.poll_until(
            lambda: (
                bool(pipeline.generation.coordinator.active)
                and "rows" in pipeline.generation.coordinator.active[0].reports
            )
        )
        error = StageFailed("middle", "division by zero")
        chronicle.over(pipeline.generation, str(error))
        chronicle.over(pipeline.generation, "the run has ended")
        chronicle.failed(error, 1_000)
    (status,) = checkpoints(told)
    assert (status.state, status.why) == ("aborted", f"the generation ended: {error}")
    assert status.stages["rows"].progress == "done"
    failed = told[-1]
    assert isinstance(failed, Failed)
    assert (failed.stage, failed.retried_in_ms, failed.generation) == ("middle", 1_000, 1)


def test_what_is_decided_and_not_shown_is_told_when_the_next_generation_shows_it(tmp_path: Path) -> None:
    with played(tmp_path / "one") as pipeline:
        chronicle, told = following(pipeline)
        pipeline.one_batch_each()
        pipeline.table.may_commit.clear()
        checkpoint_id = pipeline.generation.trigger()
        pipeline.poll_until(lambda: pipeline.generation.completed(checkpoint_id))
        chronicle.over(pipeline.generation, "spark was lost")
        assert told == []
        pipeline.table.may_commit.set()
        assert pipeline.generation.coordinator.history[-1].phase is Phase.COMPLETED
    with played(tmp_path / "other", after_batches=1, may_commit=False) as again:
        chronicle.follow(again.generation, again.generation._ground.opened)
        assert told == []
        again.table.may_commit.set()
        again.poll_until(lambda: bool(told))
    (status,) = checkpoints(told)
    assert (status.checkpoint, status.state) == ("ckpt-000001", "complete")
    assert status.shown_ms is not None
    assert status.commits["table"].took_ms is not None
    chronicle.ended("finished", "done")
    assert isinstance(told[-1], Ended)
    assert len(checkpoints(told)) == 1


def test_a_run_that_ends_before_tables_show_a_checkpoint_tells_of_it_as_it_is(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        chronicle, told = following(pipeline)
        pipeline.one_batch_each()
        pipeline.table.may_commit.clear()
        checkpoint_id = pipeline.generation.trigger()
        pipeline.poll_until(lambda: pipeline.generation.completed(checkpoint_id))
        chronicle.over(pipeline.generation, "the run has ended")
        chronicle.ended("interrupted", "stopped at once")
        pipeline.table.may_commit.set()
    assert [each.state for each in checkpoints(told)] == ["committing"]
    assert isinstance(told[-1], Ended)


def test_what_the_checkpoint_of_before_is_shown_by_again_is_no_event(tmp_path: Path) -> None:
    with played(tmp_path, after_batches=2) as pipeline:
        _, told = following(pipeline)
        pipeline.poll_until(lambda: pipeline.generation.shown_base == 2)
    assert told == []


@pytest.mark.parametrize("is_in_the_log", [True, False])
def test_what_was_being_decided_when_its_generation_ended_is_told_by_the_log(
    tmp_path: Path, is_in_the_log: bool
) -> None:
    with played(tmp_path / "one") as pipeline:
        chronicle, told = following(pipeline)
        pipeline.one_batch_each()
        pipeline.generation.trigger()
        coordinator = pipeline.generation.coordinator
        pipeline.poll_until(lambda: bool(coordinator.active) and len(coordinator.active[0].reports) == 3)
        coordinator.active[0].phase = Phase.DECIDING
        chronicle.over(pipeline.generation, "the store is gone")
        assert told == []
    with played(tmp_path / "other", after_batches=1 if is_in_the_log else 0, may_commit=False) as again:
        chronicle.follow(again.generation, again.generation._ground.opened)
        again.table.may_commit.set()
        again.poll_until(lambda: bool(told))
    (status,) = checkpoints(told)
    if is_in_the_log:
        assert (status.state, status.why) == ("complete", None)
    else:
        assert (status.state, status.why) == ("aborted", "the generation ended: the store is gone")


def test_an_observer_that_fails_is_in_nobodys_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(_event: AnyEvent) -> None:
        raise ValueError("no room")

    with played(tmp_path) as pipeline:
        chronicle = Chronicle("b")
        chronicle.observers.append(fails)
        _, told = following(pipeline, chronicle)
        pipeline.one_batch_each()
        pipeline.checkpoint()
    assert [each.instance for each in told] == ["b"]
    assert "no room" in caplog.text


def test_a_start_is_told_with_its_steps(tmp_path: Path) -> None:
    with played(tmp_path, after_batches=2) as pipeline:
        chronicle, told = following(pipeline)
        opened = pipeline.generation._ground.opened
        for step in ("checking", "starting_spark", "laying_out", "laying_out", "starting_queries"):
            chronicle.begin(step)
        run = Observer("flat").status
        options = settings_of({"retain": 5, "conf": {"spark.hadoop.fs.s3a.secret.key": "hush", "spark.ui.port": "1"}})
        chronicle.started(opened, ("killed", "it was"), run=run, skipped=(3,), settings=settings_told(options))
    started = told[0]
    assert isinstance(started, Started)
    assert (started.because, started.why, started.base, started.skipped) == (
        "killed",
        "it was",
        "ckpt-000002",
        ("ckpt-000003",),
    )
    assert [each.step for each in started.steps] == ["checking", "starting_spark", "laying_out", "starting_queries"]
    assert started.settings["retain"] == "5"
    assert started.settings["history-age"] == "30d"
    assert started.settings["conf spark.ui.port"] == "1"
    assert "hush" not in repr(started)


@pytest.mark.parametrize(
    ("options", "secret"),
    [
        ({"conf": {"spark.driver.extraJavaOptions": "-Djavax.net.ssl.keyStorePassword=hush"}}, "hush"),
        ({"conf": {"spark.proxy": "http://me:hush@proxy"}}, "hush"),
        ({"instance": "a", "coordination": "zk://me:hush@zoo:2181/x"}, "hush"),
    ],
)
def test_no_secret_is_told(options: dict[str, object], secret: str) -> None:
    told = settings_told(settings_of(options))
    assert secret not in repr(told)
    assert told["restarts"] == "3"
