"""What holds of how instances come together, and not of a mutant, where no run shows the difference but by its pace.
See `properties.py`."""

from __future__ import annotations

from tests.flows.by_hand import ByHand, Led, running_member, stage
from tidegate.flows.boards import LeaderSays, MemberSays
from tidegate.flows.instance import Cue, Instance, had_part
from tidegate.flows.leader import Announced, Visible
from tidegate.flows.requests import DropShown, StartOrder
from tidegate.protocol.coordinator import AbortReason
from tidegate.protocol.membership import Attendance, Crew, Gathering, LeaderClaim
from tidegate.protocol.messages import Barrier
from tidegate.protocol.placement import Placeable
from tidegate.protocol.quorum import Ack, AnnouncedPhase, Announcement

GRACE_MS = 1_000
OWN = LeaderClaim("a", "1")
HERE = {"a": Attendance("1"), "b": Attendance("1")}


def leading(led: Led, members: dict[str, str] | None = None) -> Instance:
    """An instance that leads a generation."""
    instance = Instance(OWN, how_many=1, grace_ms=GRACE_MS)
    queries = [Placeable("source", ("source",), ()), Placeable("sink", ("sink",), ("source",))]
    instance.on_opened(led.leader, {"a": "1", "member": "0"} if members is None else members, queries)
    return instance


def a_member_that_is_not_seen_aborts_at_once_and_holds_the_next() -> None:
    led = Led()
    instance = leading(led)
    led.begin()
    assert instance.look({"a": Attendance("1")}, OWN, 10) is Cue.WAIT
    assert [reason for _, reason, _ in led.host.of("aborted")] == [AbortReason.INSTANCE_LOST]
    assert led.leader.coordinator.missing_instances == ("member",)
    assert instance.look({"a": Attendance("1"), "member": Attendance("0")}, OWN, 20) is Cue.WAIT
    assert not led.leader.coordinator.missing_instances, "it is back, and was never gone"


def a_member_that_was_started_again_is_not_waited_for() -> None:
    crew = Crew({"a": "1", "b": "1"}, GRACE_MS)
    crew.on_present({**HERE, "b": Attendance("2")}, 0, 0)
    assert crew.why_reopen(0, 0) == "instance b was started again"


def a_missing_member_is_waited_for_as_long_as_the_grace_and_no_longer() -> None:
    crew = Crew({"a": "1", "b": "1"}, GRACE_MS)
    crew.on_present({"a": Attendance("1")}, 100, 0)
    assert crew.why_reopen(100 + GRACE_MS - 1, 0) is None
    assert crew.why_reopen(100 + GRACE_MS, 0) == "instance b is missing for 1 s"


def who_leaves_is_not_waited_for() -> None:
    gathering = Gathering(("a", "b"), 1, GRACE_MS, 0)
    assert gathering.is_over({**HERE, "b": Attendance("1", is_leaving=True)}, 0)
    assert not gathering.is_over({"a": Attendance("1")}, 0)


def who_has_left_is_not_expected() -> None:
    board = LeaderSays(3, "leader")
    for name in ("a", "b"):
        board.say(name, StartOrder(3, "1", "leader", (name,), None, 0))
    gone = MemberSays(3, "b", "1").board(is_leaving=True)
    assert had_part({"a": board.board()}, {"b": gone}) == {"a"}
    started_again = MemberSays(0, "b", "2").board(is_leaving=True)
    assert had_part({"a": board.board()}, {"b": started_again}) == {"a", "b"}


def where_all_want_to_leave_nobody_makes_way() -> None:
    crew = Crew({"a": "1"}, GRACE_MS)
    crew.on_present({"a": Attendance("1", is_leaving=True)}, 0, 0)
    assert not crew.wants_checkpoint(0)
    assert crew.why_reopen(0, 1) is None


def who_comes_waits_for_a_checkpoint() -> None:
    crew = Crew({"a": "1"}, GRACE_MS)
    crew.on_present(HERE, 0, 4, {"b"})
    assert crew.wants_checkpoint(4)
    assert crew.why_reopen(0, 4) is None
    assert crew.why_reopen(0, 5) == "instance b has come"


def who_leads_on_takes_a_void_claim_back() -> None:
    instance = leading(Led(), {"a": "1"})
    assert instance.look({"a": Attendance("1")}, LeaderClaim("b", "1"), 0) is Cue.CAMPAIGN
    assert instance.look({"a": Attendance("1")}, OWN, 0) is Cue.WAIT


def who_is_cut_off_does_not_take_the_pipeline_back() -> None:
    instance = Instance(OWN, how_many=1, grace_ms=GRACE_MS)
    assert instance.look({"a": Attendance("1")}, OWN, 0, hearing=5) is Cue.OPEN
    instance.on_opened(Led().leader, {"a": "1"}, ())
    instance.on_ended()
    assert instance.look({"a": Attendance("1")}, OWN, 10, hearing=5) is Cue.WAIT, "others may lead by now"
    assert instance.look({"a": Attendance("1")}, OWN, 20, hearing=6) is Cue.OPEN


def who_sees_another_one_lead_ends_its_generation() -> None:
    instance = leading(Led(), {"a": "1"})
    assert instance.look(HERE, LeaderClaim("b", "1"), 0) is Cue.END
    assert instance.why == "another instance leads"


def an_ack_hides_no_other() -> None:
    says = MemberSays(1, "a", "1")
    for number in (1, 2):
        says.say(Ack("a", number, 1, 1))
    assert [each.checkpoint_id for each in says.board().acks] == [1, 2]
    says.forget_but({2})
    assert [each.checkpoint_id for each in says.board().acks] == [2]


def announcements_stay_until_all_have_taken_them() -> None:
    says = LeaderSays(1, "leader")
    told = [Announcement(1, number, AnnouncedPhase.PREPARE, Barrier(number, number), 1) for number in (1, 2)]
    says.say("a", Announced(1, tuple(told)))
    says.say("b", Announced(1, tuple(told[1:])))
    says.seen_by_all(0)
    assert says.board().announcements == tuple(told)
    says.seen_by_all(1)
    assert says.board().announcements == tuple(told[1:])


def what_is_visible_is_dropped_once() -> None:
    host = ByHand()
    member = running_member(host, stage(host, name="sink"))
    for _ in range(3):
        member.on_visible(Visible(1, "sink", 4))
    assert len(host.asked(DropShown)) == 1
    member.on_visible(Visible(1, "sink", 5))
    assert len(host.asked(DropShown)) == 2
