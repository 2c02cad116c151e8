"""Sources that plan no batch, and a control thread that stands still: told while it lasts, and never wrongly."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.engine import planning, rounds
from tidegate.engine.planning import PlanningWatch
from tidegate.engine.rounds import Rounds

ASKING = "Getting offsets from KafkaV2[Subscribe[orders]]"


class Query:
    """As Spark tells of it."""

    def __init__(self, message: str) -> None:
        self.runId = "1"
        self.message = message
        self.progress: dict[str, str] | None = None
        self.looks = 0
        self.at_look: Callable[[int], None] = lambda _looks: None

    @property
    def status(self) -> dict[str, str]:
        self.looks += 1
        self.at_look(self.looks)
        return {"message": self.message}

    @property
    def lastProgress(self) -> dict[str, str] | None:  # noqa: N802 - its name
        return self.progress


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(planning, "_ASK_AFTER_S", 0.0)
    monkeypatch.setattr(planning, "_WAITS_AFTER_S", 0.05)
    monkeypatch.setattr(rounds, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(rounds, "_TELL_AFTER_S", 0.05)


@pytest.fixture
def watched() -> Iterator[Callable[..., tuple[PlanningWatch, Any]]]:
    watches: list[PlanningWatch] = []

    def watch(query: Query, why: str | None = None) -> tuple[PlanningWatch, Any]:
        progress: Any = SimpleNamespace(query=query, batch=-1, has_ended=False)
        source: Any = SimpleNamespace(definition=SimpleNamespace(head="orders"), progress=progress)
        watches.append(PlanningWatch([source], lambda _name: why))
        return watches[-1], progress

    yield watch
    for each in watches:
        each.stop()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_source_that_is_asking_for_long_is_told_with_the_reason_and_when_it_goes_on(
    watched: Callable[..., tuple[PlanningWatch, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(ASKING)
    with caplog.at_level(logging.WARNING, "tidegate"):
        watch, source = watched(query, "no broker of localhost:9092 answers")
        assert watch.waiting("orders") is None
        wait_until(lambda: watch.waiting("orders"))
        waiting = watch.waiting("orders")
        assert waiting is not None
        said = "Spark is getting offsets from KafkaV2[Subscribe[orders]]; no broker of localhost:9092 answers"
        assert waiting.why == said
        wait_until(lambda: query.looks > 200)
        assert [each.getMessage().partition(": ")[2] for each in caplog.records] == [said], (
            "told, and not with every look"
        )
        source.batch = 0
        wait_until(lambda: len(caplog.records) == 2)
        assert caplog.records[1].message.startswith("source orders goes on, after ")
        query.message = "Processing new data"
        wait_until(lambda: watch.waiting("orders") is None)


@pytest.mark.parametrize(
    "doing", ["Waiting for data to arrive", "Processing new data", "No new data but cleaning up state"]
)
def test_a_source_that_is_idle_or_at_work_waits_for_nothing(
    doing: str, watched: Callable[..., tuple[PlanningWatch, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(doing)
    watch, _ = watched(query)
    wait_until(lambda: query.looks > 100)
    assert watch.waiting("orders") is None
    assert not caplog.records


def test_a_source_that_finds_nothing_again_and_again_is_not_told_though_each_look_finds_it_asking(
    watched: Callable[..., tuple[PlanningWatch, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(ASKING)

    def go_on(looks: int) -> None:
        if looks % 5 == 0:  # Spark says now and then that it was through with planning
            query.progress = {"timestamp": str(looks)}

    query.at_look = go_on
    watch, _ = watched(query)
    wait_until(lambda: query.looks > 200)
    assert watch.waiting("orders") is None
    assert not caplog.records


def test_a_source_that_is_paused_or_whose_query_cannot_be_asked_is_told_by_others(
    watched: Callable[..., tuple[PlanningWatch, Any]],
) -> None:
    query = Query(ASKING)
    watch, source = watched(query)
    wait_until(lambda: watch.waiting("orders"))
    source.query = None
    wait_until(lambda: watch.waiting("orders") is None)

    def fail(_looks: int) -> None:
        raise ConnectionRefusedError

    query.at_look = fail
    source.query = query
    wait_until(lambda: query.looks > 300)
    assert watch.waiting("orders") is None


def test_a_control_thread_that_stands_still_is_told_while_it_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tidegate"), Rounds() as watching:
        watching.doing("waiting for Spark to tell of its queries")
        wait_until(lambda: caplog.records)
        told = r"the run has been waiting for Spark to tell of its queries for \d+ s"
        assert re.match(told, caplog.records[0].message)
        watching.doing(None)
        wait_until(lambda: len(caplog.records) == 2)
        assert re.match(r"the run goes on, after \d+ s of waiting for Spark", caplog.records[1].message)
        threading.Event().wait(0.1)
    assert len(caplog.records) == 2, "what may take long is not told"
