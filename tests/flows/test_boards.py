"""What is on a board, and what its readers take of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.flows.by_hand import ByHand, Led, running_member, stage
from tests.mutants import cluster_properties
from tests.protocol.search import search
from tidegate.errors import ProtocolViolation
from tidegate.flows.boards import (
    LeaderBoard,
    LeaderSays,
    MemberBoard,
    MemberSays,
    decode_leader_board,
    decode_member_board,
    encode_board,
    hand_to_leader,
    hand_to_member,
)
from tidegate.flows.leader import Announced, Visible
from tidegate.flows.member import MemberFailed, Seen
from tidegate.flows.requests import StartOrder
from tidegate.protocol.coordinator import StageDecline, StageReport
from tidegate.protocol.messages import Barrier, Flag
from tidegate.protocol.quorum import Ack, AnnouncedPhase, Announcement

flags = st.sampled_from([int(each) for each in (Flag.NONE, Flag.DRAIN, Flag.CANCEL, Flag.UNALIGNED)])
barriers = st.builds(Barrier, st.integers(1, 10**6), st.integers(1, 10**6), flags)
reports = st.builds(
    StageReport,
    st.sampled_from("st"),
    st.integers(1, 9),
    st.integers(1, 3),
    st.just(3),
    st.none() | st.integers(0, 99),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 99)),
    committable=st.none() | st.text(),
)


def announcement(sequence: int) -> Announcement:
    return Announcement(1, sequence, AnnouncedPhase.PREPARE, Barrier(sequence, sequence), 1)


@search(100)
@given(st.lists(barriers, max_size=4), st.dictionaries(st.sampled_from("ab"), st.integers(0, 99)), st.text())
def test_what_a_leader_says_is_understood(announced: list[Barrier], visible: dict[str, int], leader: str) -> None:
    says = LeaderSays(3, leader)
    says.say("a", StartOrder(3, "1", leader, ("s",), None, 7))
    told = [Announcement(3, n, AnnouncedPhase.ABORT, each, 2, n) for n, each in enumerate(announced, 1)]
    says.say("b", Announced(3, tuple(told)))
    for sink, batch in visible.items():
        says.say("a", Visible(3, sink, batch))
    board = says.board({"x": 1})
    assert decode_leader_board(encode_board(board)) == board


@search(100)
@given(st.lists(reports, max_size=4), st.none() | st.text(), st.booleans(), st.integers(0, 99))
def test_what_a_member_says_is_understood(
    done: list[StageReport], failed: str | None, is_leaving: bool, seen: int
) -> None:
    says = MemberSays(3, "a", "1")
    says.say(Seen(3, "a", seen))
    for each in done:
        says.say(each)
        says.say(Ack("a", each.checkpoint_id, each.attempt, 3, reports=(each,)))
        says.say(StageDecline(each.stage, each.checkpoint_id, each.attempt, 3, "why"))
    if failed is not None:
        says.say(MemberFailed(3, "a", failed))
    board = says.board(is_leaving=is_leaving)
    assert decode_member_board(encode_board(board)) == board


@pytest.mark.parametrize("data", [b"", b"{}", b'{"generation":1,"leader":"x","more":1}', b"\xff", b"[1]"])
def test_what_is_no_board_is_told(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_leader_board(data)
    with pytest.raises(ProtocolViolation):
        decode_member_board(data)


def test_announcements_stay_until_all_have_taken_them() -> None:
    cluster_properties.announcements_stay_until_all_have_taken_them()


def test_an_ack_hides_no_other() -> None:
    cluster_properties.an_ack_hides_no_other()


def test_a_report_says_who_is_done_until_the_ack_says_it_all() -> None:
    says = MemberSays(1, "a", "1")
    report = StageReport("s", 4, 1, 1, 0, detail="much")
    says.say(report)
    assert says.board().reports == (report,)
    says.say(Ack("a", 4, 1, 1))
    assert not says.board().reports


def test_what_is_seen_and_visible_does_not_go_back() -> None:
    member, leader = MemberSays(1, "a", "1"), LeaderSays(1, "leader")
    for number in (3, 5, 4):
        member.say(Seen(1, "a", number))
        leader.say("a", Visible(1, "sink", number))
    assert member.board().seen == 5
    assert leader.board().visible == {"sink": 5}


class TestHandedToAMember:
    def test_an_order_begins_a_generation_and_is_not_obeyed_twice(self) -> None:
        host = ByHand()
        member = running_member(host, stage(host))
        board = LeaderBoard(2, "leader", {"member": StartOrder(2, host.incarnation, "leader", ("stage",), None, 0)})
        for _ in range(3):
            hand_to_member(board, member)
        assert member.generation == 2
        assert len(host._waiting) == 1

    def test_of_another_generation_it_takes_nothing_else(self) -> None:
        host = ByHand()
        member = running_member(host, stage(host))
        hand_to_member(LeaderBoard(2, "other", {}, (announcement(1),), {"stage": 9}), member)
        assert not host.of("announced")
        assert host.is_idle

    def test_announcements_are_taken_once_however_often_they_are_read(self) -> None:
        host = ByHand()
        member = running_member(host, stage(host))
        for count in (1, 1, 3, 2, 3):
            hand_to_member(LeaderBoard(1, "leader", {}, tuple(map(announcement, range(1, count + 1)))), member)
        assert [number for _, number in host.of("announced")] == [1, 2, 3]

    def test_what_is_visible_is_dropped_once(self) -> None:
        cluster_properties.what_is_visible_is_dropped_once()


class TestHandedToALeader:
    def test_a_board_of_another_generation_says_nothing_to_it(self) -> None:
        led = Led()
        for generation in (0, 2):
            hand_to_leader(MemberBoard(generation, "member", "0", seen=9, failed="it died"), led.leader)
        assert led.leader.seen_by_all == 0
        assert not led.host.of("stepped down")

    def test_a_checkpoint_is_decided_by_boards_that_are_read_again_and_again(self) -> None:
        led = Led()
        checkpoint_id = led.begin()
        done = tuple(led.reports(checkpoint_id, 1).values())
        board = MemberBoard(1, "member", "0", seen=1, acks=(Ack("member", checkpoint_id, 1, 1, reports=done),))
        for _ in range(3):
            hand_to_leader(board, led.leader)
        led.claim()
        hand_to_leader(board, led.leader)
        assert [number for number, _ in led.host.of("completed")] == [checkpoint_id]
        assert led.leader.seen_by_all == 1

    def test_it_hears_of_declines_and_failures(self) -> None:
        led = Led()
        checkpoint_id = led.begin()
        decline = StageDecline("sink", checkpoint_id, 1, 1, "no room")
        hand_to_leader(MemberBoard(1, "member", "0", declines=(decline,)), led.leader)
        assert len(led.host.of("aborted")) == 1
        hand_to_leader(MemberBoard(1, "member", "0", failed="it died"), led.leader)
        assert len(led.host.of("stepped down")) == 1
