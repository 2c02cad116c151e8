from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.search import search
from tidegate.protocol.placement import Placeable, kept_apart, place

STAGES = [f"s{number}" for number in range(8)]


@st.composite
def queries(draw: st.DrawFn) -> list[Placeable]:
    """Each after those it reads; some run several stages."""
    found: list[Placeable] = []
    left = list(STAGES)
    for count in draw(st.lists(st.integers(1, 2), max_size=6)):
        if not left:
            break
        stages = [left.pop(0) for _ in range(min(len(left), count))]
        before = st.sampled_from([each.name for each in found])
        inputs = draw(st.lists(before, unique=True)) if found else []
        found.append(Placeable(stages[-1], tuple(stages), tuple(inputs)))
    return found


instances = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.sampled_from(STAGES), unique=True, max_size=3).map(tuple), min_size=1
)


@search(300)
@given(queries(), instances, st.randoms(use_true_random=False))
def test_every_query_is_given_to_one_instance_and_as_evenly_as_can_be(
    asked: list[Placeable], wanted: dict[str, tuple[str, ...]], chance: object
) -> None:
    placed = place(asked, wanted)
    assert placed.keys() == wanted.keys()
    assert sorted(name for each in placed.values() for name in each) == sorted(each.name for each in asked)
    order = {each.name: number for number, each in enumerate(asked)}
    for names in placed.values():
        assert [order[name] for name in names] == sorted(order[name] for name in names)
    shuffled = list(wanted.items())
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert place(asked, dict(shuffled)) == placed
    _are_pins_kept(asked, wanted, placed)
    _is_even(asked, wanted, placed)


def _are_pins_kept(
    asked: list[Placeable], wanted: dict[str, tuple[str, ...]], placed: dict[str, tuple[str, ...]]
) -> None:
    for query in asked:
        first = next((stage for stage in query.stages if any(stage in each for each in wanted.values())), None)
        if first is not None:
            owner = min(name for name, stages in wanted.items() if first in stages)
            assert query.name in placed[owner]


def _is_even(asked: list[Placeable], wanted: dict[str, tuple[str, ...]], placed: dict[str, tuple[str, ...]]) -> None:
    """Nobody has a query that nobody asked for while another one has two fewer."""
    pinned = {each.name for each in asked if any(stage in own for stage in each.stages for own in wanted.values())}
    fewest = min(len(each) for each in placed.values())
    for names in placed.values():
        assert set(names) <= pinned or len(names) <= fewest + 1


def test_what_is_next_to_each_other_stays_together() -> None:
    line = [
        Placeable("a1", ("a1",), ()),
        Placeable("b1", ("b1",), ()),
        Placeable("a2", ("a2",), ("a1",)),
        Placeable("b2", ("b2",), ("b1",)),
    ]
    placed = place(line, {"x": (), "y": ("b1",)})
    assert placed == {"x": ("a1", "a2"), "y": ("b1", "b2")}


def test_of_several_that_ask_the_first_by_name_gets_it() -> None:
    assert place([Placeable("q", ("q",), ())], {"b": ("q",), "a": ("q",)}) == {"a": ("q",), "b": ()}


def test_an_instance_for_which_nothing_is_left_gets_nothing() -> None:
    assert place([Placeable("q", ("q",), ())], {"a": (), "b": ()}) == {"a": ("q",), "b": ()}


def test_stages_that_were_asked_for_apart_are_kept_apart() -> None:
    inputs = {"source": (), "clean": ("source",), "table": ("clean",)}
    assert kept_apart(inputs, {"a": ("source",), "b": ("table",)}) == {"table"}
    assert kept_apart(inputs, {"a": ("source", "table"), "b": ("clean",)}) == {"clean", "table"}
    assert kept_apart(inputs, {"a": (), "b": ("table",)}) == frozenset()
