"""What a run shows of itself while it runs."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import time
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from rich.console import Console

from tests.cli.harness import ended_checkpoint
from tests.cli.strict import told
from tidegate.cli.answers import ChangedEvent
from tidegate.cli.view import JsonView, LiveView, LogView, _Start
from tidegate.engine.status import (
    DueCheckpoint,
    HeldInput,
    NoBatch,
    Observer,
    RunStatus,
    StagePart,
    StageStatus,
    StartingStep,
    StepName,
    StoppingStep,
    now,
)
from tidegate.engine.stopping import stopping_by


def running(*checkpoints: int) -> RunStatus:
    ended = tuple(ended_checkpoint(number) for number in checkpoints)
    return msgspec.structs.replace(Observer("orders").status, state="running", generation=1, checkpoints=ended)


def test_the_live_view_tells_that_a_run_is_stopping_and_what_stops_it_at_once() -> None:
    shown = io.StringIO()
    with LiveView(Console(file=shown, force_terminal=True, width=120)) as view:
        view.update(running(1))
        before = shown.getvalue()
        view.update(msgspec.structs.replace(running(1), state="stopping"))
    assert "stopping" not in before
    assert "stopping after a last checkpoint" in shown.getvalue()
    assert "Ctrl-C once more stops it at once" in shown.getvalue()


@pytest.mark.parametrize(("step", "said"), [("draining", "draining:"), ("closing_windows", "closing windows:")])
def test_the_live_view_tells_what_a_run_does_before_its_last_checkpoint(step: StoppingStep, said: str) -> None:
    shown = io.StringIO()
    with LiveView(Console(file=shown, force_terminal=True, width=120)) as view:
        view.update(msgspec.structs.replace(running(1), state="stopping", stopping=step))
    assert said in shown.getvalue()
    assert "Ctrl-C skips that, and takes the last checkpoint now" in shown.getvalue()


def test_the_live_view_tells_that_a_run_is_stopping_before_there_is_a_table() -> None:
    shown = io.StringIO()
    with LiveView(Console(file=shown, force_terminal=True, width=120)):
        logging.getLogger("tidegate").info("a checkpoint is complete")
        with pytest.raises(KeyboardInterrupt, match="stopped at once by a second signal"):
            stopped_by_two_signals()
    assert "stopping after a last checkpoint" in shown.getvalue()
    assert "is complete" not in shown.getvalue()


def test_what_is_logged_has_its_time_in_utc_wherever_the_machine_stands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        shown = io.StringIO()
        for view in (LiveView(Console(file=shown, force_terminal=True, width=120)), LogView()):
            with view:
                record = logging.LogRecord("tidegate", logging.WARNING, "", 0, "late", None, None)
                record.created, record.msecs = 1_700_000_000.25, 250.0
                logging.getLogger("tidegate").handle(record)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "22:13:20Z" in shown.getvalue()
    assert "2023-11-14 22:13:20.250Z WARNING late" in capsys.readouterr().err


def stopped_by_two_signals() -> None:
    with stopping_by(None) as stop:
        stop.is_starting = False
        signal.raise_signal(signal.SIGINT)
        assert stop.wanted
        signal.raise_signal(signal.SIGINT)


def test_each_checkpoint_is_told_once_and_no_more_of_them_are_remembered_than_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = JsonView()
    for last in range(1, 40):
        for _ in range(2):
            view.update(running(*range(max(1, last - 7), last + 1)))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [event["checkpoint"]["checkpoint"] for event in events if event["event"] == "checkpoint"]
    assert names == [f"ckpt-{number:06d}" for number in range(1, 40)]
    assert len(view._told) == 8


def test_what_has_changed_since_the_checkpoint_is_told_once_a_generation(capsys: pytest.CaptureFixture[str]) -> None:
    changed = msgspec.structs.replace(running(), changes=("stage 'revenue': window(ts) is 5 minutes, was 1 minute",))
    view = JsonView()
    for generation in (1, 1, 2):
        view.update(msgspec.structs.replace(changed, generation=generation))
    view.update(msgspec.structs.replace(running(), generation=3))
    events = [event for event in told(capsys.readouterr().out) if isinstance(event, ChangedEvent)]
    assert [event.changes for event in events] == [changed.changes, changed.changes]


def held_back() -> RunStatus:
    stages = {
        "orders": StageStatus("source", 41, 82_000, 0.0, None, None, "revenue"),
        "revenue": StageStatus("sink", 3, 3_000, 99.0, 800, None, "its table"),
    }
    return msgspec.structs.replace(running(1), stages=stages)


def test_every_view_tells_who_is_held_back_by_whom(capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with LiveView(Console(file=shown, force_terminal=True, width=120)) as live:
        live.update(held_back())
    with LogView() as log:
        for _ in range(3):
            log.update(held_back())
    JsonView().update(held_back())
    said = capsys.readouterr()
    for line in ("orders is held back by revenue", "revenue is held back by its table"):
        assert line in shown.getvalue()
        assert said.err.count(line) == 1, "told, and not with every look"
    stages = json.loads(said.out.splitlines()[-1])["stages"]
    assert [stages[name]["held_back_by"] for name in stages] == ["revenue", "its table"]


def held() -> RunStatus:
    clicks, late = HeldInput("clicks", "impressions", 721_000), HeldInput("late", "impressions", None)
    stages = {
        "clicks": StageStatus("source", 41, 82_000, 0.0, None, None),
        "pairs": StageStatus("stage", 3, 3_000, 99.0, 800, None, held=(clicks, late)),
    }
    return msgspec.structs.replace(running(1), stages=stages)


def test_every_view_tells_which_input_is_held_and_how_far_it_is_ahead_of_which(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = io.StringIO()
    with LiveView(Console(file=shown, force_terminal=True, width=120)) as live:
        live.update(held())
    with LogView() as log:
        for _ in range(3):
            log.update(held())
    JsonView().update(held())
    said = capsys.readouterr()
    for line in (
        "clicks is held at pairs: it is 12 min 1 s ahead of impressions",
        "late is held at pairs: it is ahead of impressions, which has no watermark yet",
    ):
        assert line in shown.getvalue()
        assert said.err.count(line) == 1, "told, and not with every look"
    stages = json.loads(said.out.splitlines()[-1])["stages"]
    assert stages["pairs"]["held"] == [
        {"input": "clicks", "ahead_of": "impressions", "by_ms": 721_000},
        {"input": "late", "ahead_of": "impressions", "by_ms": None},
    ]


def waiting() -> RunStatus:
    since = (datetime.now(UTC) - timedelta(seconds=40)).isoformat()
    asking = "Spark is getting offsets from KafkaV2[Subscribe[orders]]; no broker of localhost:9092 answers"
    stages = {"orders": StageStatus("source", 41, 82_000, 0.0, None, None, None, NoBatch(since, asking))}
    due = DueCheckpoint(since, "sinks_lag", "the commit of ckpt-000004 to revenue is under way for 38 s")
    return msgspec.structs.replace(running(1), stages=stages, due=due)


def test_every_view_tells_of_a_source_that_plans_nothing_and_why_a_checkpoint_that_is_due_is_not_begun(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = io.StringIO()
    with LiveView(Console(file=shown, force_terminal=True, width=160)) as live:
        live.update(waiting())
    with LogView() as log:
        for _ in range(3):
            log.update(waiting())
    JsonView().update(waiting())
    said = capsys.readouterr()
    source = r"orders has planned no batch for 40.\d s: Spark is getting .*; no broker of localhost:9092 answers"
    due = r"the next checkpoint has been due for 40.\d s: the commit of ckpt-000004 to revenue is under way for 38 s"
    assert re.search(source, shown.getvalue())
    assert re.search(due, shown.getvalue())
    assert len(re.findall(due, said.err)) == 1, "told, and not with every look"
    told = json.loads(said.out.splitlines()[-1])
    assert told["stages"]["orders"]["no_batch"]["why"].endswith("no broker of localhost:9092 answers")
    assert told["due"]["held_back_by"] == "sinks_lag"


def aligning() -> RunStatus:
    """A stage was to be cut unaligned, and more is in flight than allowed; one before it has no watermark yet."""
    part = StagePart(progress="catching_up", alignment_ms=31_400, in_flight_bytes=2_100_000, over_bound=True)
    active = msgspec.structs.replace(ended_checkpoint(2, "preparing"), aligned=None, stages={"joined": part})
    done = {"joined": StagePart(progress="done", cut_because="timeout", in_flight_bytes=4_000_000)}
    ended = msgspec.structs.replace(
        ended_checkpoint(1), aligned=False, alignment_ms=30_000, in_flight_bytes=4_000_000, stages=done
    )
    stages = {
        "joined": StageStatus("stage", 41, 82_000, 0.0, 9, 1_767_225_600_000, has_event_time=True),
        "revenue": StageStatus("sink", 3, 3_000, 99.0, 0, None, has_event_time=True),
    }
    return msgspec.structs.replace(
        running(), stages=stages, in_progress=(active,), checkpoints=(ended,), min_watermark_ms=None
    )


@pytest.mark.parametrize("width", [70, 160])
def test_the_live_view_tells_who_aligns_for_how_long_why_one_is_unaligned_and_the_pipelines_watermark(
    width: int,
) -> None:
    shown = io.StringIO()
    with LiveView(Console(file=shown, force_terminal=True, width=width, height=40)) as live:
        live.update(aligning())
    said = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).split())
    assert "generation 1, watermark not set yet" in said
    assert (
        "joined keeps aligning for ckpt-000002, for 31.4 s now: 2.1 MB are in flight, more than --max-inflight" in said
    )
    assert "preparing, aligning for 31.4 s" in said
    assert "unaligned (timeout at joined)" in said
    if width > 100:
        assert "catching up, 2.1 MB in flight" in said
        assert "30.0 s 4.0 MB complete, unaligned" in said


def step(name: StepName, stage: str | None = None, number: int | None = None) -> StartingStep:
    return StartingStep(step=name, since=now(), stage=stage, number=number, of=None if number is None else 13)


STEPS = [
    step("loading"),
    step("checking"),
    step("fetching_packages"),
    step("making_session"),
    *(step("calling_functions", f"stage_{number}", number) for number in range(1, 4)),
]


def test_every_view_tells_the_steps_of_a_start_and_which_stage_it_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with LiveView(Console(file=shown, force_terminal=True, width=120, height=30)) as live:
        for each in STEPS:
            live.starting(each)
    with LogView() as log:
        for each in STEPS:
            log.starting(each)
    view = JsonView()
    for each in STEPS:
        view.starting(each)
    lines = shown.getvalue()
    assert "fetches packages" in lines
    assert "calling the functions of stages: stage_3, 3 of 13, " in lines
    said = capsys.readouterr()
    assert [line.split("INFO ")[1] for line in said.err.splitlines()] == [
        "starting Spark's process, which fetches packages",
        "making Spark's session",
        "calling the functions of stages",
    ]
    events = [json.loads(line) for line in said.out.splitlines()]
    assert [(each["event"], each["step"]["step"]) for each in events] == [("starting", each.step) for each in STEPS[1:]]
    assert (events[-1]["step"]["stage"], events[-1]["step"]["number"], events[-1]["step"]["of"]) == ("stage_3", 3, 13)


@pytest.mark.parametrize(("width", "height"), [(40, 10), (40, 4), (80, 24)])
def test_the_steps_of_a_start_fit_the_terminal(width: int, height: int) -> None:
    start = _Start()
    for each in STEPS:
        start.begin(each)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    lines = console.render_lines(start, pad=False)
    assert len(lines) <= height
    assert max(sum(segment.cell_length for segment in line) for line in lines) <= width
    assert "3 of 13" in "".join(segment.text for segment in lines[-1]) or width == 40


def test_after_a_start_the_live_view_shows_the_run_and_a_restart_counts_its_steps_anew() -> None:
    shown = io.StringIO()
    with LiveView(Console(file=shown, force_terminal=True, width=100, height=30)) as live:
        live.starting(step("checking"))
        live.update(held_back())
        before = shown.tell()
        live.starting(step("reading_checkpoint"))
    after = shown.getvalue()[before:]
    assert "reading the newest checkpoint" in after
    assert "looking at the root" not in after.split("reading the newest checkpoint")[-1]
