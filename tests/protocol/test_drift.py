from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.search import search
from tidegate.protocol.drift import ConsumedTime, Hold, WatermarkDrift
from tidegate.protocol.messages import END_OF_TIME_MS

PLENTY = {"fast": 100, "slow": 100}


def drift(max_drift_ms: int | None = 10) -> WatermarkDrift:
    return WatermarkDrift(("fast", "slow"), max_drift_ms)


def tell(stage: WatermarkDrift, name: str, *watermarks: int | None) -> None:
    for each in watermarks:
        stage.on_segment(name, each)


class TestWatermarkDrift:
    def test_an_input_is_shown_up_to_the_drift_ahead_of_the_slowest(self) -> None:
        stage = drift()
        tell(stage, "slow", 100)
        tell(stage, "fast", 105, 110, 111, 200)
        assert stage.show(PLENTY) == {"fast": 2, "slow": 1}
        assert stage.held == (Hold("fast", "slow", 11),)
        assert stage.is_held("fast")
        assert not stage.is_held("slow")

    def test_it_goes_on_in_order_as_the_slowest_catches_up(self) -> None:
        stage = drift()
        tell(stage, "slow", 100)
        tell(stage, "fast", 120, 130, 140)
        assert stage.show(PLENTY) == {"fast": 0, "slow": 1}
        tell(stage, "slow", 110)
        assert stage.show(PLENTY) == {"fast": 1, "slow": 1}
        stage.on_watermark("slow", 129)
        assert stage.show(PLENTY) == {"fast": 1, "slow": 0}
        stage.on_watermark("slow", 130)
        assert stage.show(PLENTY) == {"fast": 1, "slow": 0}
        assert stage.held == ()

    def test_where_an_input_stands_is_told_by_what_it_will_show_next(self) -> None:
        """Else each would wait for the other, when both jump."""
        stage = drift()
        tell(stage, "slow", 1, 500)
        tell(stage, "fast", 1, 505)
        assert stage.show(PLENTY) == {"fast": 2, "slow": 2}

    def test_what_waits_for_room_is_where_an_input_stands(self) -> None:
        stage = drift()
        tell(stage, "slow", 10, 20, 30)
        tell(stage, "fast", 20, 30, 40)
        assert stage.show({"fast": 100, "slow": 1}) == {"fast": 2, "slow": 1}
        assert stage.held == (Hold("fast", "slow", 20),)
        assert stage.show({"fast": 100, "slow": 1}) == {"fast": 1, "slow": 1}

    def test_without_a_drift_nothing_is_held(self) -> None:
        stage = drift(None)
        tell(stage, "fast", 10**12)
        assert stage.show(PLENTY) == {"fast": 1, "slow": 0}
        assert stage.held == ()

    def test_an_input_without_a_watermark_yet_counts_as_the_slowest(self) -> None:
        stage = drift()
        tell(stage, "fast", 1)
        assert stage.show(PLENTY) == {"fast": 0, "slow": 0}
        assert stage.held == (Hold("fast", "slow", None),)
        tell(stage, "slow", None, None)
        assert stage.show(PLENTY) == {"fast": 0, "slow": 2}, "segments without one are never held"
        tell(stage, "slow", 1)
        assert stage.show(PLENTY) == {"fast": 1, "slow": 1}

    def test_a_watermark_that_waits_behind_segments_counts_when_they_are_shown(self) -> None:
        stage = drift()
        tell(stage, "slow", 10)
        stage.on_watermark("slow", 100)
        tell(stage, "fast", 90)
        assert stage.show({"fast": 100, "slow": 0}) == {"fast": 0, "slow": 0}
        assert stage.show(PLENTY) == {"fast": 1, "slow": 1}

    def test_nothing_is_held_while_holds_yield(self) -> None:
        stage = drift()
        tell(stage, "slow", 1)
        tell(stage, "fast", 1000, 2000)
        stage.yields = True
        assert stage.show(PLENTY) == {"fast": 2, "slow": 1}
        assert not stage.is_held("fast")
        stage.yields = False
        tell(stage, "fast", 3000)
        assert stage.show(PLENTY) == {"fast": 0, "slow": 0}
        assert stage.held == (Hold("fast", "slow", 2999),)

    def test_nobody_waits_for_an_input_that_has_ended(self) -> None:
        stage = drift()
        tell(stage, "slow", 1)
        tell(stage, "fast", 1000)
        assert stage.show(PLENTY) == {"fast": 0, "slow": 1}
        stage.on_watermark("slow", END_OF_TIME_MS)
        assert stage.show(PLENTY) == {"fast": 1, "slow": 0}

    def test_what_a_closed_query_writes_is_not_held(self) -> None:
        stage = drift()
        tell(stage, "slow", 1)
        tell(stage, "fast", END_OF_TIME_MS)
        assert stage.show(PLENTY) == {"fast": 1, "slow": 1}

    def test_an_input_without_event_time_is_unknown(self) -> None:
        stage = drift()
        stage.on_segment("static", None)
        stage.on_watermark("static", END_OF_TIME_MS)
        assert stage.show(PLENTY) == {"fast": 0, "slow": 0}
        assert not stage.is_held("static")


class TestConsumedTime:
    def test_it_is_the_lowest_of_what_is_consumed_of_each_input(self) -> None:
        time = ConsumedTime({"a": 0, "b": 4})
        time.on_segment("a", 1, 10)
        time.on_segment("a", 2, 20)
        time.on_segment("b", 5, 15)
        assert time.reached_ms(("a", "b")) is None
        time.on_consumed("a", 2)
        assert time.reached_ms(("a", "b")) is None, "one of them has none yet"
        assert time.reached_ms(("a",)) == 20
        time.on_consumed("b", 5)
        assert time.reached_ms(("a", "b")) == 15

    def test_a_watermark_counts_when_what_stands_before_it_is_consumed(self) -> None:
        time = ConsumedTime({"a": 7})
        time.on_watermark("a", 5, 7)
        assert time.reached_ms(("a",)) == 5
        time.on_segment("a", 8, None)
        time.on_watermark("a", 9, 7)
        assert time.reached_ms(("a",)) == 5
        time.on_consumed("a", 8)
        assert time.reached_ms(("a",)) == 9

    def test_it_has_ended_when_all_inputs_have_and_are_consumed(self) -> None:
        time = ConsumedTime({"a": 0, "b": 0})
        time.on_segment("a", 1, 10)
        time.on_watermark("a", END_OF_TIME_MS, 0)
        time.on_watermark("b", END_OF_TIME_MS, 0)
        assert not time.has_ended
        time.on_consumed("a", 1)
        assert time.has_ended

    def test_a_source_has_no_inputs_that_could_end(self) -> None:
        assert not ConsumedTime({}).has_ended


# -- whatever is told -------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
tellings = st.tuples(st.sampled_from(NAMES), st.sampled_from(("segment", "watermark", "none")), st.integers(0, 30))
rooms = st.fixed_dictionaries({name: st.integers(0, 4) for name in NAMES})
happenings = st.lists(st.one_of(tellings, rooms), max_size=40)


class Model:
    """The same by hand: each input as the whole list of what was told, and how many segments of it are shown."""

    def __init__(self, max_drift_ms: int) -> None:
        self.max_drift_ms = max_drift_ms
        self.told: dict[str, list[tuple[str, int | None]]] = {name: [] for name in NAMES}
        self.shown = dict.fromkeys(NAMES, 0)

    def stands(self, name: str) -> float:
        """The highest watermark up to the next segment, with that one."""
        segments, highest = 0, float("-inf")
        for kind, watermark in self.told[name]:
            if segments > self.shown[name]:
                break
            segments += kind == "segment"
            highest = max(highest, float("-inf") if watermark is None else watermark)
        return highest

    def next(self, name: str) -> float | None:
        segments = [watermark for kind, watermark in self.told[name] if kind == "segment"]
        if self.shown[name] == len(segments):
            return None
        watermark = segments[self.shown[name]]
        return float("-inf") if watermark is None else watermark

    @property
    def limit(self) -> float:
        return min(map(self.stands, NAMES)) + self.max_drift_ms

    def may_show(self, room: dict[str, int]) -> list[str]:
        nexts = {name: self.next(name) for name in NAMES if room[name]}
        return [name for name, each in nexts.items() if each is not None and each <= self.limit]


def tell_both(stage: WatermarkDrift, model: Model, name: str, kind: str, ahead: int) -> None:
    """A writer's watermark only grows."""
    last = max((watermark for _, watermark in model.told[name] if watermark is not None), default=0)
    if kind == "watermark":
        model.told[name].append(("watermark", last + ahead))
        stage.on_watermark(name, last + ahead)
    else:
        watermark = None if kind == "none" else last + ahead
        model.told[name].append(("segment", watermark))
        stage.on_segment(name, watermark)


@search(300)
@given(st.integers(0, 40), happenings)
def test_what_is_shown_is_what_may_be_one_by_one_in_any_order(
    max_drift_ms: int, happens: list[tuple[str, str, int] | dict[str, int]]
) -> None:
    stage, model = WatermarkDrift(NAMES, max_drift_ms), Model(max_drift_ms)
    for each in happens:
        if isinstance(each, tuple):
            tell_both(stage, model, *each)
            continue
        shown = stage.show(each)
        assert all(0 <= shown[name] <= each[name] for name in NAMES)
        left = dict(each)
        while may := model.may_show(left):  # the last one first: it comes to the same
            model.shown[may[-1]] += 1
            left[may[-1]] -= 1
        assert shown == {name: each[name] - left[name] for name in NAMES}
        held = {each.input for each in stage.held}
        assert held == {name for name in NAMES if (after := model.next(name)) is not None and after > model.limit}
        assert held == {name for name in NAMES if stage.is_held(name)}
        # Never all, nor the slowest: whoever they wait for is not held.
        assert not {each.ahead_of for each in stage.held} & held
        assert all(each.by_ms is None or each.by_ms > max_drift_ms for each in stage.held)


@search(200)
@given(st.one_of(st.none(), st.integers(0, 40)), st.booleans(), happenings)
def test_without_a_drift_or_while_holds_yield_all_is_shown_that_there_is_room_for(
    max_drift_ms: int | None, yields: bool, happens: list[tuple[str, str, int] | dict[str, int]]
) -> None:
    stage, model = WatermarkDrift(NAMES, max_drift_ms), Model(0)
    stage.yields = yields or max_drift_ms is not None
    for each in happens:
        if isinstance(each, tuple):
            tell_both(stage, model, *each)
            continue
        waiting = {name: sum(kind == "segment" for kind, _ in model.told[name]) - model.shown[name] for name in NAMES}
        shown = stage.show(each)
        assert shown == {name: min(each[name], waiting[name]) for name in NAMES}
        assert stage.held == ()
        for name, count in shown.items():
            model.shown[name] += count
