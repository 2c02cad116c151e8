"""What instances have said that do not come back is deleted by whoever leads, and nothing that somebody may need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.cluster.places import KINDS, Place
from tidegate.cluster.exchange import Exchange
from tidegate.engine.company import Company
from tidegate.engine.part import Part
from tidegate.flows.boards import LeaderBoard, MemberBoard

GRACE_MS = 30_000
LARGE = "x" * 300


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(request.param)
    yield made
    made.close()


def says(exchange: Exchange, generation: int = 1, why: str = "") -> None:
    """As a leader, and as a member."""
    own = exchange.own
    exchange.lead(LeaderBoard(generation, f"{own.instance}#{why}"))
    exchange.follow_up(MemberBoard(generation, own.instance, own.incarnation, failed=why))
    exchange.send()


def tidies(leader: Exchange, generation: int = 9, but: tuple[str, ...] = ()) -> None:
    leader.receive()
    leader.forget_boards(generation, but)
    leader.send()


def all_of(place: Place) -> list[str]:
    folders = ("orders", "boards")
    return [key for folder in folders for key in (*place.keys(folder), *place.spilled(folder))]


def test_lists_do_not_grow_with_names_that_are_made_up_for_each_process(place: Place) -> None:
    leader = place.joined("leader")
    says(leader, 9)
    for number in range(30):
        pod = place.joined(f"pod-{number}")
        says(pod, 1 + number % 3, LARGE if number % 2 else "")
        tidies(leader)
        pod.close()
        tidies(leader)
    tidies(leader)
    assert all_of(place) == ["orders/leader", "boards/leader"]
    leader.receive()
    assert len(leader._decoded) == 2, "nor does what it remembers of them"
    assert len(leader._profiles) == 1


def test_what_was_said_stays_until_it_was_nobodys_at_two_looks(place: Place) -> None:
    leader, pod = place.joined("leader"), place.joined("pod")
    says(leader, 9)
    says(pod)
    tidies(leader)
    pod.close()
    tidies(leader)
    assert "boards/pod" in place.keys("boards")
    assert "orders/pod" in place.keys("orders")
    tidies(leader)
    assert place.keys("boards") == ["boards/leader"]
    assert place.keys("orders") == ["orders/leader"]


def test_what_was_said_between_two_looks_stays(place: Place) -> None:
    leader, pod = place.joined("leader"), place.joined("pod")
    says(leader, 9)
    says(pod)
    pod.close()
    tidies(leader)
    again = place.joined("pod", "2")
    again.follow_up(MemberBoard(0, "pod", "pod2", failed=LARGE))
    again.send()
    again.close()
    tidies(leader)
    assert place.keys("boards") == ["boards/leader", "boards/pod"]
    assert len(place.spilled("boards")) == 1
    assert place.keys("orders") == ["orders/leader"]


def test_whoever_has_a_part_or_is_there_keeps_what_it_has_said(place: Place) -> None:
    leader, lost, idle = (place.joined(each) for each in ("leader", "lost", "idle"))
    for each, generation in ((leader, 9), (lost, 8), (idle, 7)):
        says(each, generation)
    lost.close()
    for _ in range(4):
        tidies(leader, but=("leader", "lost"))
    assert place.keys("boards") == ["boards/idle", "boards/leader", "boards/lost"]
    assert place.keys("orders") == ["orders/idle", "orders/leader", "orders/lost"]


def test_nothing_goes_before_others_can_hear_of_the_generation_that_takes_its_place(place: Place) -> None:
    """How the pipeline has ended, and who had a part, is told by what was said last."""
    leader, pod = place.joined("leader"), place.joined("pod")
    says(pod, 8)
    pod.close()
    says(leader, 7)
    for _ in range(4):
        tidies(leader, 9)
        tidies(leader, 7)
    assert place.keys("orders") == ["orders/leader", "orders/pod"]
    assert place.keys("boards") == ["boards/leader", "boards/pod"]
    says(leader, 9)
    for _ in range(2):
        tidies(leader, 9)
    assert place.keys("orders") == ["orders/leader"]
    assert place.keys("boards") == ["boards/leader"]


def test_what_a_leader_says_that_cannot_be_understood_stays(place: Place) -> None:
    leader = place.joined("leader")
    says(leader, 9)
    place.session().write("orders/newer", b'{"much":"newer"}')
    for _ in range(4):
        tidies(leader)
    assert place.keys("orders") == ["orders/leader", "orders/newer"]


def test_what_lies_in_the_root_of_one_that_was_killed_before_it_said_so_goes(place: Place) -> None:
    leader = place.joined("leader")
    says(leader, 9)
    place.root.write("spilled/boards/pod-1-pod11.json", LARGE.encode())
    tidies(leader)
    assert place.spilled("boards")
    tidies(leader)
    assert not place.spilled("boards")


def test_who_was_taken_for_gone_says_it_again(place: Place) -> None:
    leader, pod = place.joined("leader"), place.joined("pod")
    says(leader, 9)
    says(pod, 1, LARGE)
    keys = ["orders/pod", "boards/pod"]
    place.root.delete([*place.spilled("orders"), *place.spilled("boards")])
    place.session().delete(keys)
    leader.receive()
    assert "pod" not in leader.heard.members
    pod.receive()
    assert pod.said.is_set()
    pod.send()
    leader.receive()
    assert leader.heard.members["pod"].failed == LARGE
    assert leader.heard.leaders["pod"].leader == f"pod#{LARGE}"


def test_who_comes_back_after_all_is_heard(place: Place) -> None:
    leader, pod = place.joined("leader"), place.joined("pod")
    says(leader, 9)
    says(pod, 1, LARGE)
    pod.close()
    for _ in range(2):
        tidies(leader)
    again = place.joined("pod", "2")
    again.follow_up(MemberBoard(0, "pod", "pod2"))
    again.send()
    leader.receive()
    assert leader.heard.members["pod"] == MemberBoard(0, "pod", "pod2")


# -- when whoever leads looks ---------------------------------------------------------------------


class Leading:
    """An instance that leads generation 9, with a member of it."""

    def __init__(self, place: Place) -> None:
        self.exchange = place.joined("leader")
        self.company = Company(self.exchange, how_many=1, grace_ms=GRACE_MS)
        self.now_ms = 1_000_000
        self.exchange.receive()
        self.look()
        self.exchange.send()
        self.look()
        assert self.company.leads

    def look(self) -> None:
        self.exchange.receive()
        self.company.cue(self.now_ms)
        self.exchange.send()

    def opens(self, generation: int, incarnations: Mapping[str, str]) -> None:
        placed = dict.fromkeys(incarnations, ("stage",))
        part = Part("leader", "leader1", leads=True, placed=placed, incarnations=dict(incarnations))
        opened: Any = SimpleNamespace(generation=generation, part=part, leader=mock.Mock(completed=0), queries=())
        self.exchange.lead(LeaderBoard(generation, "leader#1"))
        self.company.on_opened(opened)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.look()


def test_whoever_leads_deletes_what_is_nobodys_when_a_grace_is_over(place: Place) -> None:
    gone, member = place.joined("gone"), place.joined("member")
    says(gone, 3, LARGE)
    says(member, 3)
    gone.close()
    member.close()
    leading = Leading(place)
    for _ in range(5):
        leading.wait(GRACE_MS)
    assert "boards/gone" in place.keys("boards"), "it leads nothing yet"
    leading.opens(9, {"leader": "leader1", "member": "member1"})
    leading.look()
    leading.wait(GRACE_MS - 1)
    assert "boards/gone" in place.keys("boards")
    assert "orders/gone" in place.keys("orders")
    leading.wait(1)
    assert place.keys("boards") == ["boards/leader", "boards/member"]
    assert place.keys("orders") == ["orders/leader", "orders/member"]
    assert not place.spilled("boards")
    leading.company.on_ended()
    leading.opens(10, {"leader": "leader1"})
    leading.wait(GRACE_MS)
    leading.wait(GRACE_MS)
    assert place.keys("boards") == ["boards/leader"]


def test_two_looks_are_a_grace_apart_also_where_generations_follow_each_other_soon(place: Place) -> None:
    gone = place.joined("gone")
    says(gone, 3)
    gone.close()
    leading = Leading(place)
    for generation in range(9, 20):
        leading.opens(generation, {"leader": "leader1"})
        leading.wait(GRACE_MS // 20)
        leading.company.on_ended()
    assert "boards/gone" in place.keys("boards")
    leading.opens(20, {"leader": "leader1"})
    leading.wait(GRACE_MS)
    assert place.keys("boards") == ["boards/leader"]


def test_whoever_stood_by_and_left_goes_later_in_the_same_generation(place: Place) -> None:
    leading = Leading(place)
    leading.opens(9, {"leader": "leader1"})
    for _ in range(5):
        leading.wait(GRACE_MS)
    idle = place.joined("idle")
    says(idle, 0)
    for _ in range(3):
        leading.wait(GRACE_MS)
    idle.close()
    leading.wait(GRACE_MS)
    leading.wait(GRACE_MS)
    assert place.keys("boards") == ["boards/leader"]
    with mock.patch.object(leading.exchange, "forget_boards") as looks:
        for _ in range(3):
            leading.wait(GRACE_MS)
    assert not looks.called, "there is nothing to look for"
