"""What a member does with orders, announcements and what its stages say."""

from __future__ import annotations

from tests.flows.by_hand import ByHand, running_member, stage
from tests.mutants import flow_properties
from tidegate.errors import StageFailed, StoreUnavailable
from tidegate.flows.leader import Announced, Visible
from tidegate.flows.member import Member, MemberFailed, Seen
from tidegate.flows.requests import DropShown, RunStages, StartOrder, Stored, StoreSnapshot
from tidegate.flows.stage import StageCheckpoints
from tidegate.protocol.coordinator import StageDecline, StageReport
from tidegate.protocol.messages import Barrier
from tidegate.protocol.quorum import Ack, AnnouncedPhase, Announcement

PREPARE = Announcement(1, 1, AnnouncedPhase.PREPARE, Barrier(1, 1), 4)


def acks(host: ByHand) -> list[Ack]:
    return [message for message in host.sent if isinstance(message, Ack)]


def report(name: str, watermark_ms: int | None = None) -> StageReport:
    return StageReport(name, 1, 0, 1, 0, watermark_ms=watermark_ms, has_event_time=True)


class TestStarting:
    def order(self, generation: int, incarnation: str = "0") -> StartOrder:
        return StartOrder(generation, incarnation, "leader", ("stage",), None, 0)

    def test_an_order_of_an_older_generation_or_for_a_process_that_died_is_not_obeyed(self) -> None:
        host = ByHand()
        member = running_member(host, stage(host))
        member.on_start(self.order(1))
        member.on_start(self.order(2, incarnation="1"))
        assert host.is_idle
        assert member.generation == 1

    def test_nothing_is_taken_before_its_stages_run(self) -> None:
        host = ByHand()
        member = Member(host, "member")
        member.on_start(self.order(1))
        member.on_announced(Announced(1, (PREPARE,)))
        assert not host.sent
        host.answer(RunStages, {"stage": stage(host)})
        member.on_announced(Announced(1, (PREPARE,)))
        assert host.sent[-1] == Seen(1, "member", 1)

    def test_stages_of_a_generation_that_is_over_are_not_heard(self) -> None:
        host = ByHand()
        old = stage(host)
        member = running_member(host, old)
        old.inject(Barrier(1, 1))
        member.on_start(self.order(2))
        host.answer(StoreSnapshot, Stored(("state",)))
        assert not member.reports(1)

    def test_stages_that_could_not_be_rebuilt_for_a_generation_that_is_over_are_no_failure(self) -> None:
        host = ByHand()
        member = Member(host, "member")
        member.on_start(self.order(1))
        member.on_start(self.order(2))
        host.fail(RunStages)
        assert not host.of("failed")
        host.fail(RunStages, StoreUnavailable("a file is gone"))
        assert host.sent == [MemberFailed(2, "member", "a file is gone")]


class TestAnswering:
    def two(self) -> tuple[ByHand, Member, StageCheckpoints, StageCheckpoints]:
        host = ByHand()
        left, right = stage(host, name="left"), stage(host, name="right")
        return host, running_member(host, left, right), left, right

    def test_it_acknowledges_when_all_its_stages_have_reported_and_says_so_again(self) -> None:
        host, member, _, _ = self.two()
        member.on_announced(Announced(1, (PREPARE,)))
        host.answer(StoreSnapshot, Stored(("left",)))
        assert not acks(host)
        host.answer(StoreSnapshot, Stored(("right",)))
        (ack,) = acks(host)
        assert [(each.stage, each.attempt) for each in ack.reports] == [("left", 4), ("right", 4)]
        member.on_time()
        assert acks(host) == [ack, ack]

    def test_it_says_so_no_more_when_it_hears_how_that_ended(self) -> None:
        host, member, _, _ = self.two()
        member.on_announced(Announced(1, (PREPARE,)))
        host.answer(StoreSnapshot, Stored(("left",)))
        host.answer(StoreSnapshot, Stored(("right",)))
        commit = Announcement(1, 2, AnnouncedPhase.COMMIT, Barrier(1, 1), 4)
        member.on_announced(Announced(1, (PREPARE, commit)))
        member.on_time()
        assert len(acks(host)) == 1

    def test_reports_from_before_the_announcement_count(self) -> None:
        host, member, _, _ = self.two()
        member.on_report(report("left"))
        member.on_report(report("right"))
        assert not host.sent
        member.on_announced(Announced(1, (PREPARE,)))
        assert len(acks(host)) == 1

    def test_a_decline_from_before_the_announcement_is_sent_with_it(self) -> None:
        host, member, _, _ = self.two()
        member.on_decline("left", 1, "no room")
        assert not host.sent
        member.on_announced(Announced(1, (PREPARE,)))
        assert StageDecline("left", 1, 4, 1, "no room") in host.sent
        assert not acks(host)

    def test_a_stage_whose_watermark_is_not_set_holds_it_back(self) -> None:
        for watermarks, expected in (((5, 7), 5), ((5, None), None)):
            host, member, _, _ = self.two()
            for name, watermark_ms in zip(("left", "right"), watermarks, strict=True):
                member.on_report(report(name, watermark_ms))
            member.on_announced(Announced(1, (PREPARE,)))
            assert acks(host)[0].watermark_ms == expected

    def test_what_a_table_shows_is_dropped_and_one_that_cannot_be_dropped_is_no_failure(self) -> None:
        host, member, _, _ = self.two()
        member.on_visible(Visible(1, "left", 3))
        member.on_visible(Visible(7, "left", 4))
        assert host.asked(DropShown) == [DropShown("left", 3)]
        host.fail(DropShown)
        assert not host.of("failed")

    def test_what_gets_lost_is_said_again(self) -> None:
        flow_properties.what_gets_lost_is_said_again()

    def test_a_failure_is_over_with_its_generation(self) -> None:
        host, member, _, _ = self.two()
        member.on_failed(StageFailed("left", "its query died"))
        member.on_start(StartOrder(2, "0", "leader", ("left",), None, 0))
        host.sent.clear()
        member.on_time()
        assert not host.sent
