from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.search import search
from tidegate.protocol.outlet import Outlet

READERS = ("a", "b")
steps = st.lists(st.none() | st.tuples(st.sampled_from(("a", "b", "stranger")), st.integers(0, 9)), max_size=40)


@search(300)
@given(steps)
def test_an_entry_is_let_go_of_once_and_when_all_have_taken_it(happens: list[tuple[str, int] | None]) -> None:
    outlet = Outlet(READERS)
    appended: list[int] = []
    taken = dict.fromkeys(READERS, 0)
    gone: list[int] = []
    for each in happens:
        if each is None:
            appended.append(outlet.append())
        else:
            name, count = each[0], min(each[1], len(appended))
            outlet.on_taken(name, count)
            if name in taken:
                taken[name] = max(taken[name], count)
        gone += outlet.let_go()
        assert gone == list(range(min(taken.values())))
        assert outlet.kept == len(appended) - len(gone)
    assert appended == list(range(len(appended)))


def test_without_readers_elsewhere_nothing_is_kept() -> None:
    outlet = Outlet(())
    outlet.append()
    assert list(outlet.let_go()) == [0]
    assert outlet.kept == 0
