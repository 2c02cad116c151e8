from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import InvalidConfig
from tidegate.protocol.backpressure import BacklogBound, Backpressure


def test_a_writer_is_held_back_from_past_the_bound_until_down_to_half() -> None:
    backpressure = Backpressure(BacklogBound(max_bytes=100, max_segments=10))
    seen = []
    for size_bytes in (100, 101, 99, 51, 50, 100, 101):
        backpressure.on_backlog(1, size_bytes)
        seen.append(backpressure.is_held_back)
    assert seen == [False, True, True, True, False, False, True]


def test_either_bound_holds_and_both_must_be_down_to_half() -> None:
    backpressure = Backpressure(BacklogBound(max_bytes=100, max_segments=10))
    backpressure.on_backlog(11, 1)
    assert backpressure.is_held_back
    backpressure.on_backlog(5, 60)
    assert backpressure.is_held_back
    backpressure.on_backlog(5, 50)
    assert not backpressure.is_held_back


def test_one_segment_over_the_bound_holds_its_writer_back_until_it_is_consumed() -> None:
    backpressure = Backpressure(BacklogBound(max_bytes=100, max_segments=1))
    backpressure.on_backlog(1, 5000)
    assert backpressure.is_held_back
    backpressure.on_backlog(0, 0)
    assert not backpressure.is_held_back


def test_a_few_segments_are_the_bound_while_a_reader_holds_the_channel() -> None:
    backpressure = Backpressure(BacklogBound(max_bytes=100, max_segments=10))
    seen = []
    for segments, is_held in ((6, False), (4, True), (5, True), (3, True), (2, True), (5, True), (5, False), (6, True)):
        backpressure.on_backlog(segments, 1, is_held=is_held)
        seen.append(backpressure.is_held_back)
    assert seen == [False, False, True, True, False, True, False, True]
    backpressure = Backpressure(BacklogBound(max_bytes=100, max_segments=1))
    backpressure.on_backlog(2, 1, is_held=True)
    assert backpressure.is_held_back, "one that is smaller stays the bound"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 300))))
def test_what_holds_a_writer_back_is_never_below_half_and_what_lets_it_flow_never_past_the_bound(
    backlogs: list[tuple[int, int]],
) -> None:
    backpressure = Backpressure(BacklogBound(max_bytes=100, max_segments=10))
    for segments, size_bytes in backlogs:
        backpressure.on_backlog(segments, size_bytes)
        if backpressure.is_held_back:
            assert segments > 5 or size_bytes > 50
        else:
            assert segments <= 10
            assert size_bytes <= 100


@pytest.mark.parametrize("bound", [{"max_bytes": 0}, {"max_segments": 0}])
def test_a_bound_that_nothing_can_pass_is_refused(bound: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig, match="at least 1"):
        BacklogBound(**bound)
