from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

import pytest

from tests.protocol.unchanged import unchanged
from tidegate.errors import InvariantViolation
from tidegate.protocol import aligner, backpressure, commit, coordinator
from tidegate.protocol.transitions import S, V, step

Table = dict[tuple[Enum, Enum], Enum]


def widened(table: Mapping[tuple[S, V], S]) -> Table:
    return {(state, event): after for (state, event), after in table.items()}


# Each table with the states that it starts and may end in.
TABLES: dict[str, tuple[Table, Enum, set[Enum]]] = {
    "aligner": (
        widened(aligner.TRANSITIONS),
        aligner.AlignmentPhase.ALIGNING,
        {aligner.AlignmentPhase.CAPTURED, aligner.AlignmentPhase.ABANDONED},
    ),
    "coordinator": (
        widened(coordinator.TRANSITIONS),
        coordinator.Phase.PREPARING,
        {coordinator.Phase.COMMITTED, coordinator.Phase.ABORTED},
    ),
    "commit": (widened(commit.TRANSITIONS), commit.SinkPhase.SETTLED, set()),
    "backpressure": (widened(backpressure.TRANSITIONS), backpressure.WriterPhase.FLOWING, set()),
}


class Light(Enum):
    RED = 1
    GREEN = 2


class Press(Enum):
    BUTTON = 1
    HORN = 2


def test_a_step_that_is_in_the_table_leads_to_the_next_state() -> None:
    table = {(Light.RED, Press.BUTTON): Light.GREEN, (Light.GREEN, Press.BUTTON): Light.RED}
    assert step(table, Light.RED, Press.BUTTON) is Light.GREEN
    assert step(table, Light.GREEN, Press.BUTTON) is Light.RED


def test_a_step_that_is_not_in_the_table_is_a_defect_and_names_both() -> None:
    table = MappingProxyType({(Light.RED, Press.BUTTON): Light.GREEN})
    with unchanged(table), pytest.raises(InvariantViolation, match=r"^HORN cannot happen in state RED$"):
        step(table, Light.RED, Press.HORN)


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reached_and_every_event_happens(name: str) -> None:
    table, start, _ = TABLES[name]
    assert {start, *table.values()} == set(type(start))
    events = {event for _, event in table}
    assert events == set(type(next(iter(events))))


@pytest.mark.parametrize("name", TABLES)
def test_every_state_but_the_last_ones_can_be_left(name: str) -> None:
    table, start, ends = TABLES[name]
    assert {state for state, _ in table} == set(type(start)) - ends


def test_nothing_aborts_a_checkpoint_from_deciding_on() -> None:
    allowed = {state for state, event in coordinator.TRANSITIONS if event is coordinator.Event.ABORT}
    assert allowed == {coordinator.Phase.PREPARING, coordinator.Phase.PREPARED}


def test_a_failed_commit_is_due_again_and_no_event_gives_a_sink_up() -> None:
    failed = commit.TRANSITIONS[commit.SinkPhase.COMMITTING, commit.SinkEvent.FAILED]
    assert failed is commit.SinkPhase.DUE
    settled = {event for (_, event), phase in commit.TRANSITIONS.items() if phase is commit.SinkPhase.SETTLED}
    assert settled == {commit.SinkEvent.COMMITTED}
