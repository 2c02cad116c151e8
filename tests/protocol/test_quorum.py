from __future__ import annotations

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.search import Step, search, steps
from tests.protocol.unchanged import unchanged
from tidegate.errors import ProtocolViolation
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.messages import Barrier
from tidegate.protocol.quorum import (
    Ack,
    AckAnswer,
    AnnouncedPhase,
    Announcement,
    AnnouncementReader,
    Announcements,
    Failed,
    Member,
    Outcome,
    Quorum,
    Reached,
    TimedOut,
    Waiting,
    watermark_of,
)

BARRIER = Barrier(7, 17)
GENERATION = 3
ATTEMPT = 2
DEADLINE_MS = 1_000
EARLY_MS = 10


def quorum_of(*members: str | Member) -> Quorum:
    known = [Member(each) if isinstance(each, str) else each for each in members]
    return Quorum(BARRIER, ATTEMPT, GENERATION, known, DEADLINE_MS)


def ack(instance: str, watermark_ms: int | None = 5, error: str | None = None) -> Ack:
    return Ack(instance, BARRIER.checkpoint_id, ATTEMPT, GENERATION, error, watermark_ms)


class TestQuorum:
    def test_it_waits_for_whoever_is_missing(self) -> None:
        quorum = quorum_of("a", "b", "c")
        assert quorum.on_ack(ack("b")) is AckAnswer.ACCEPTED
        assert quorum.on_time(EARLY_MS) == Waiting(("a", "c"))

    def test_it_is_reached_when_all_have_acknowledged(self) -> None:
        quorum = quorum_of("a", "b")
        quorum.on_ack(ack("a", 8))
        quorum.on_ack(ack("b", 6))
        assert quorum.on_time(EARLY_MS) == Reached(6)

    def test_one_instance_is_a_quorum_of_its_own(self) -> None:
        quorum = quorum_of("a")
        quorum.on_ack(ack("a", 8))
        assert quorum.on_time(EARLY_MS) == Reached(8)

    def test_at_its_deadline_it_tells_who_answered_and_who_did_not(self) -> None:
        quorum = quorum_of("a", "b", "c")
        quorum.on_ack(ack("b"))
        assert quorum.on_time(DEADLINE_MS - 1) == Waiting(("a", "c"))
        assert quorum.on_time(DEADLINE_MS) == TimedOut(got=("b",), missing=("a", "c"))

    def test_an_error_fails_it_with_the_reason(self) -> None:
        quorum = quorum_of("a", "b", "c")
        quorum.on_ack(ack("a"))
        assert quorum.on_ack(ack("b", error="disk full")) is AckAnswer.ACCEPTED
        assert quorum.on_time(EARLY_MS) == Failed((("b", "disk full"),))

    def test_several_errors_are_all_told(self) -> None:
        quorum = quorum_of("a", "b", "c")
        quorum.on_ack(ack("c", error="disk full"))
        quorum.on_ack(ack("a", error="no state"))
        assert quorum.on_time(EARLY_MS) == Failed((("c", "disk full"), ("a", "no state")))

    def test_an_error_fails_it_also_when_everybody_has_answered_and_also_past_the_deadline(self) -> None:
        quorum = quorum_of("a", "b")
        quorum.on_ack(ack("a"))
        quorum.on_ack(ack("b", error="disk full"))
        assert quorum.on_time(DEADLINE_MS) == Failed((("b", "disk full"),))

    def test_all_acks_at_the_deadline_reach_it(self) -> None:
        quorum = quorum_of("a")
        quorum.on_ack(ack("a"))
        assert quorum.on_time(DEADLINE_MS) == Reached(5)

    def test_a_member_that_is_named_twice_is_still_one_member(self) -> None:
        quorum = quorum_of("a", "b", "a", "a")
        assert quorum.on_time(EARLY_MS) == Waiting(("a", "b"))
        quorum.on_ack(ack("a"))
        quorum.on_ack(ack("b"))
        assert quorum.on_time(EARLY_MS) == Reached(5)


class TestAnAckThatDoesNotCount:
    @pytest.mark.parametrize(
        ("wrong", "answer"),
        [
            ({"generation": 2}, AckAnswer.WRONG_GENERATION),
            ({"generation": 4}, AckAnswer.WRONG_GENERATION),
            ({"checkpoint_id": 6}, AckAnswer.WRONG_CHECKPOINT),
            ({"checkpoint_id": 8}, AckAnswer.WRONG_CHECKPOINT),
            ({"attempt": 1}, AckAnswer.WRONG_ATTEMPT),
            ({"attempt": 3}, AckAnswer.WRONG_ATTEMPT),
            ({"instance": "c"}, AckAnswer.STRANGER),
        ],
    )
    @pytest.mark.parametrize("error", [None, "disk full"])
    def test_one_that_is_about_something_else_changes_nothing(
        self, wrong: dict[str, object], answer: AckAnswer, error: str | None
    ) -> None:
        quorum = quorum_of("a", "b")
        quorum.on_ack(ack("a"))
        with unchanged(quorum):
            assert quorum.on_ack(msgspec.structs.replace(ack("b", error=error), **wrong)) is answer
        assert quorum.on_time(EARLY_MS) == Waiting(("b",))

    @pytest.mark.parametrize("repeated", [ack("a"), ack("a", 1), ack("a", error="disk full")])
    def test_a_duplicate_changes_nothing_whatever_it_says(self, repeated: Ack) -> None:
        quorum = quorum_of("a", "b")
        quorum.on_ack(ack("a"))
        with unchanged(quorum):
            assert quorum.on_ack(repeated) is AckAnswer.DUPLICATE
        assert quorum.on_time(EARLY_MS) == Waiting(("b",))

    def test_one_that_comes_after_the_end_is_late(self) -> None:
        quorum = quorum_of("a", "b")
        outcome = quorum.on_time(DEADLINE_MS)
        with unchanged(quorum):
            assert quorum.on_ack(ack("a")) is AckAnswer.LATE
            assert quorum.on_ack(ack("b", error="disk full")) is AckAnswer.LATE
        assert quorum.on_time(EARLY_MS) == outcome == TimedOut((), ("a", "b"))


class TestMembership:
    def test_an_instance_that_is_lost_before_it_acknowledged_fails_the_quorum_at_once(self) -> None:
        quorum = quorum_of("a", "b")
        quorum.on_lost("b")
        outcome = quorum.on_time(EARLY_MS)
        assert isinstance(outcome, Failed)
        assert [instance for instance, _ in outcome.failures] == ["b"]
        assert "lost before it acknowledged" in outcome.failures[0][1]

    def test_an_ack_of_an_instance_that_was_lost_is_late_and_not_a_duplicate(self) -> None:
        quorum = quorum_of("a", "b")
        quorum.on_lost("a")
        with unchanged(quorum):
            assert quorum.on_ack(ack("a")) is AckAnswer.LATE

    def test_what_a_lost_instance_had_acknowledged_still_counts(self) -> None:
        quorum = quorum_of("a", "b")
        quorum.on_ack(ack("b", 3))
        with unchanged(quorum):
            quorum.on_lost("b")
        quorum.on_ack(ack("a", 4))
        assert quorum.on_time(EARLY_MS) == Reached(3)

    def test_an_instance_that_joins_has_no_part_in_it(self) -> None:
        quorum = quorum_of("a")
        with unchanged(quorum):
            assert quorum.on_ack(ack("newcomer", 1)) is AckAnswer.STRANGER
            quorum.on_lost("newcomer")
        quorum.on_ack(ack("a", 4))
        assert quorum.on_time(EARLY_MS) == Reached(4)

    @pytest.mark.parametrize("end", ["reached", "timed out", "failed"])
    def test_the_outcome_does_not_change_any_more(self, end: str) -> None:
        quorum = quorum_of("a", "b")
        if end == "failed":
            quorum.on_ack(ack("a", error="disk full"))
        if end == "reached":
            quorum.on_ack(ack("a"))
            quorum.on_ack(ack("b"))
        outcome = quorum.on_time(DEADLINE_MS)
        with unchanged(quorum):
            for instance in ("a", "b"):
                quorum.on_ack(ack(instance))
                quorum.on_ack(ack(instance, error="too late"))
                quorum.on_lost(instance)
            assert quorum.on_time(0) == quorum.on_time(10**9) == outcome


class TestTheMinimumWatermark:
    def test_it_is_the_smallest_of_all(self) -> None:
        quorum = quorum_of("a", "b", "c")
        for instance, watermark_ms in (("a", 9), ("b", -4), ("c", 0)):
            quorum.on_ack(ack(instance, watermark_ms))
        assert quorum.on_time(EARLY_MS) == Reached(-4)

    def test_an_instance_whose_watermark_is_not_set_yet_holds_it_back(self) -> None:
        quorum = quorum_of("a", "b", "c")
        quorum.on_ack(ack("a", 9))
        quorum.on_ack(ack("b", None))
        quorum.on_ack(ack("c", 4))
        assert quorum.on_time(EARLY_MS) == Reached(None)

    @pytest.mark.parametrize("watermark_ms", [None, 1])
    def test_an_instance_without_event_time_has_no_say_in_it(self, watermark_ms: int | None) -> None:
        quorum = quorum_of("a", Member("b", has_event_time=False))
        quorum.on_ack(ack("a", 9))
        quorum.on_ack(ack("b", watermark_ms))
        assert quorum.on_time(EARLY_MS) == Reached(9)

    def test_a_member_that_is_named_twice_has_event_time_if_it_has_it_once(self) -> None:
        quorum = quorum_of("a", Member("a", has_event_time=False), "b")
        quorum.on_ack(ack("a", None))
        quorum.on_ack(ack("b", 5))
        assert quorum.on_time(EARLY_MS) == Reached(None)

    @pytest.mark.parametrize(
        ("stages", "expected"),
        [
            ([(True, 9), (True, -4), (True, 0)], -4),
            ([(True, 9), (True, None)], None),
            ([(False, None), (True, 9)], 9),
            ([(False, 1), (True, 9)], 9),
            ([(False, None), (False, 1)], None),
            ([], None),
        ],
    )
    def test_of_the_stages_of_an_instance_those_with_event_time_have_a_say_and_one_without_a_watermark_holds_it_back(
        self, stages: list[tuple[bool, int | None]], expected: int | None
    ) -> None:
        reports = [
            StageReport(f"s{number}", 1, 1, 1, 0, has_event_time=has_event_time, watermark_ms=watermark_ms)
            for number, (has_event_time, watermark_ms) in enumerate(stages)
        ]
        assert watermark_of(reports) == watermark_of(reversed(reports)) == expected

    def test_where_no_instance_has_event_time_there_is_none(self) -> None:
        quorum = quorum_of(Member("a", has_event_time=False))
        quorum.on_ack(ack("a", 9))
        assert quorum.on_time(EARLY_MS) == Reached(None)


class TestAnnouncements:
    def announced(self, count: int) -> Announcements:
        announcements = Announcements(GENERATION)
        for number in range(1, count + 1):
            announcements.announce(AnnouncedPhase.PREPARE, Barrier(number, number), 1)
        return announcements

    def test_they_are_numbered_and_carry_the_generation(self) -> None:
        announcements = Announcements(GENERATION)
        first = announcements.announce(AnnouncedPhase.PREPARE, BARRIER, ATTEMPT)
        second = announcements.announce(AnnouncedPhase.COMMIT, BARRIER, ATTEMPT, 99)
        assert first == Announcement(GENERATION, 1, AnnouncedPhase.PREPARE, BARRIER, ATTEMPT)
        assert second == Announcement(GENERATION, 2, AnnouncedPhase.COMMIT, BARRIER, ATTEMPT, 99)
        assert announcements.since(0) == (first, second)

    def test_a_prepare_does_not_hide_the_commit_before_it(self) -> None:
        announcements = Announcements(GENERATION)
        announcements.announce(AnnouncedPhase.COMMIT, Barrier(1, 1), 1)
        announcements.announce(AnnouncedPhase.PREPARE, Barrier(2, 2), 1)
        taken = AnnouncementReader(GENERATION).take(announcements.since(0))
        assert [(each.phase, each.barrier.checkpoint_id) for each in taken] == [
            (AnnouncedPhase.COMMIT, 1),
            (AnnouncedPhase.PREPARE, 2),
        ]

    def test_a_reader_takes_each_once_and_in_order(self) -> None:
        announcements = self.announced(3)
        reader = AnnouncementReader(GENERATION)
        assert reader.take(announcements.since(reader.seen)) == list(announcements.since(0))
        assert reader.seen == 3
        assert reader.take(announcements.since(0)) == []
        announcements.announce(AnnouncedPhase.ABORT, BARRIER, 1)
        assert [each.sequence for each in reader.take(announcements.since(0))] == [4]

    def test_a_reader_stops_before_a_gap_and_goes_on_when_the_missing_one_is_sent_again(self) -> None:
        announcements = self.announced(4)
        everything = announcements.since(0)
        reader = AnnouncementReader(GENERATION)
        assert reader.take([everything[0], everything[2], everything[3]]) == [everything[0]]
        assert reader.seen == 1
        assert reader.take(announcements.since(reader.seen)) == list(everything[1:])
        assert reader.seen == 4

    def test_what_comes_before_the_first_gap_in_the_wrong_order_is_not_taken_in_the_wrong_order(self) -> None:
        everything = self.announced(2).since(0)
        reader = AnnouncementReader(GENERATION)
        assert reader.take(reversed(everything)) == []
        assert reader.take(everything) == list(everything)

    def test_what_is_sent_again_among_new_ones_is_skipped(self) -> None:
        announcements = self.announced(3)
        everything = announcements.since(0)
        reader = AnnouncementReader(GENERATION)
        reader.take(everything[:2])
        assert reader.take([everything[1], everything[0], everything[2]]) == [everything[2]]

    def test_they_are_kept_until_everybody_has_seen_them(self) -> None:
        announcements = self.announced(4)
        announcements.seen_by_all(2)
        assert [each.sequence for each in announcements.since(0)] == [3, 4]
        assert [each.sequence for each in announcements.since(3)] == [4]
        announcements.seen_by_all(1)
        assert [each.sequence for each in announcements.since(0)] == [3, 4]
        announcements.seen_by_all(4)
        assert announcements.since(0) == ()

    def test_numbers_go_on_after_all_were_trimmed(self) -> None:
        announcements = self.announced(2)
        announcements.seen_by_all(2)
        assert announcements.announce(AnnouncedPhase.PREPARE, BARRIER, 1).sequence == 3

    @pytest.mark.parametrize("generation", [GENERATION - 1, GENERATION + 1])
    def test_one_of_a_foreign_generation_is_refused(self, generation: int) -> None:
        foreign = Announcements(generation).announce(AnnouncedPhase.COMMIT, BARRIER, 1)
        reader = AnnouncementReader(GENERATION)
        with unchanged(reader), pytest.raises(ProtocolViolation, match=f"of generation {generation}"):
            reader.take([foreign])

    def test_one_of_a_foreign_generation_does_not_swallow_the_one_before_it(self) -> None:
        own = self.announced(1).since(0)
        foreign = Announcements(GENERATION + 1).announce(AnnouncedPhase.COMMIT, BARRIER, 1)
        reader = AnnouncementReader(GENERATION)
        with unchanged(reader), pytest.raises(ProtocolViolation):
            reader.take([*own, foreign])
        assert reader.take(own) == list(own)


def test_acks_and_announcements_survive_json_with_their_64_bit_numbers() -> None:
    report = StageReport("paid", 2**64 - 1, 1, 3, 4, {"orders": 2**60}, watermark_ms=-1)
    said = Ack("a", 2**64 - 1, 1, 3, None, 7, (report,))
    assert msgspec.json.decode(msgspec.json.encode(said), type=Ack) == said
    announced = Announcement(3, 9, AnnouncedPhase.ABORT, Barrier(2**64 - 1, 2**64 - 1), 1, 5)
    assert msgspec.json.decode(msgspec.json.encode(announced), type=Announcement) == announced


INSTANCES = ["a", "b", "c"]
instances = st.sampled_from([*INSTANCES * 3, "stranger"])
mistakes = st.sampled_from([""] * 8 + ["generation", "checkpoint_id", "attempt"])
QUORUM_STEPS = steps(
    (
        6,
        "an_ack_comes",
        {
            "instance": instances,
            "watermark_ms": st.sampled_from([None, -3, 0, 1, 2, 3]),
            "error": st.sampled_from([None] * 5 + ["disk full"]),
            "mistake": mistakes,
            "by": st.sampled_from([-1, 1]),
        },
    ),
    (1, "an_instance_is_lost", {"instance": instances}),
    (3, "time_passes", {"ms": st.sampled_from([1, 100, 600])}),
)


class QuorumAgainstAModel(RuleBasedStateMachine):
    """The model keeps the answers that counted and works the outcome out from them."""

    @initialize(members=st.lists(st.builds(Member, st.sampled_from(INSTANCES), st.booleans()), min_size=1, max_size=4))
    def start(self, members: list[Member]) -> None:
        self.members = dict.fromkeys(member.instance for member in members)
        self.with_event_time = {member.instance for member in members if member.has_event_time}
        self.quorum = quorum_of(*members)
        self.now_ms = 0
        self.acks: dict[str, Ack] = {}
        self.lost: list[str] = []
        self.failed: list[str] = []
        self.end: Outcome | None = None

    @rule(step=QUORUM_STEPS)
    def something_happens(self, step: Step) -> None:
        name, drawn = step
        getattr(self, name)(**drawn)

    def an_ack_comes(self, instance: str, watermark_ms: int | None, error: str | None, mistake: str, by: int) -> None:
        said = ack(instance, watermark_ms, error)
        if mistake:
            said = msgspec.structs.replace(said, **{mistake: getattr(said, mistake) + by})
        is_right = not mistake
        is_waited_for = instance in self.missing and self.end is None
        if is_right and is_waited_for:
            assert self.quorum.on_ack(said) is AckAnswer.ACCEPTED
            self.acks[instance] = said
            self.failed += [instance] if error else []
            return
        with unchanged(self.quorum):
            answer = self.quorum.on_ack(said)
        assert answer is not AckAnswer.ACCEPTED
        if not is_right:
            assert answer.name.startswith("WRONG_")
        elif instance not in self.members:
            assert answer is AckAnswer.STRANGER
        else:
            assert answer is (AckAnswer.DUPLICATE if instance in self.acks else AckAnswer.LATE)

    @property
    def missing(self) -> list[str]:
        return [each for each in self.members if each not in self.acks and each not in self.lost]

    def an_instance_is_lost(self, instance: str) -> None:
        if instance in self.missing and self.end is None:
            self.lost.append(instance)
            self.failed.append(instance)
        self.quorum.on_lost(instance)

    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        outcome = self.quorum.on_time(self.now_ms)
        if self.end is not None:
            assert outcome == self.end
            return
        assert outcome == self.expected()
        if not isinstance(outcome, Waiting):
            self.end = outcome

    def expected(self) -> Outcome:
        if self.failed:
            whys = {each: self.acks[each].error for each in self.failed if each in self.acks}
            lost = "the instance was lost before it acknowledged"
            return Failed(tuple((each, whys.get(each) or lost) for each in self.failed))
        if not self.missing:
            spoken = [self.acks[each] for each in self.with_event_time]
            told = [each.watermark_ms for each in spoken if each.watermark_ms is not None]
            return Reached(min(told) if told and len(told) == len(spoken) else None)
        if self.now_ms >= DEADLINE_MS:
            return TimedOut(tuple(self.acks), tuple(self.missing))
        return Waiting(tuple(self.missing))

    @invariant()
    def an_outcome_stays(self) -> None:
        if self.end is not None:
            assert self.quorum.on_time(0) == self.end


TestQuorumAgainstAModel = QuorumAgainstAModel.TestCase
TestQuorumAgainstAModel.settings = search(80, steps=20)


ANNOUNCEMENT_STEPS = steps(
    (3, "announce", {"phase": st.sampled_from(AnnouncedPhase)}),
    (
        3,
        "tell",
        {"number": st.integers(0, 2), "lost": st.sets(st.integers(1, 20)), "back": st.integers(0, 2)},
    ),
    (1, "trim_what_all_have_seen", {}),
)


class AnnouncementsAgainstAModel(RuleBasedStateMachine):
    """Readers that are told late, twice or not at all take everything once and in order."""

    @initialize(readers=st.integers(1, 3))
    def start(self, readers: int) -> None:
        self.announcements = Announcements(GENERATION)
        self.readers = [AnnouncementReader(GENERATION) for _ in range(readers)]
        self.taken: list[list[int]] = [[] for _ in range(readers)]
        self.count = 0

    @rule(step=ANNOUNCEMENT_STEPS)
    def something_happens(self, step: Step) -> None:
        name, drawn = step
        getattr(self, name)(**drawn)

    def announce(self, phase: AnnouncedPhase) -> None:
        self.count += 1
        assert self.announcements.announce(phase, BARRIER, ATTEMPT).sequence == self.count

    def tell(self, number: int, lost: set[int], back: int) -> None:
        reader = self.readers[number % len(self.readers)]
        told = self.announcements.since(max(0, reader.seen - back))
        taken = reader.take(each for each in told if each.sequence not in lost)
        self.taken[number % len(self.readers)] += [each.sequence for each in taken]

    def trim_what_all_have_seen(self) -> None:
        self.announcements.seen_by_all(min(reader.seen for reader in self.readers))

    @invariant()
    def each_took_all_in_order_up_to_what_it_has_seen(self) -> None:
        for reader, taken in zip(self.readers, self.taken, strict=True):
            assert taken == list(range(1, reader.seen + 1))

    @invariant()
    def whatever_a_reader_lacks_is_still_there(self) -> None:
        for reader in self.readers:
            lacking = [each.sequence for each in self.announcements.since(reader.seen)]
            assert lacking == list(range(reader.seen + 1, self.count + 1))


TestAnnouncementsAgainstAModel = AnnouncementsAgainstAModel.TestCase
TestAnnouncementsAgainstAModel.settings = search(40, steps=20)
