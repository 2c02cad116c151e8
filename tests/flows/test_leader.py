"""What a leader does, in order, request by request."""

from __future__ import annotations

from msgspec.structs import replace

from tests.flows.by_hand import CONFIG, PATIENCE, Led
from tests.mutants import flow_properties
from tidegate.errors import Fenced, InstanceFailed, StoreUnavailable, Superseded
from tidegate.flows.leader import Announced, Visible
from tidegate.flows.requests import (
    Claim,
    CommitSink,
    Delete,
    Force,
    ForgetMarks,
    ForgetStaged,
    ListStored,
    Mark,
    ReadLog,
    Sleep,
    Trim,
    WriteManifest,
    Written,
)
from tidegate.protocol.coordinator import AbortReason, StageDecline
from tidegate.protocol.decision_log import DecisionLog
from tidegate.protocol.quorum import AnnouncedPhase
from tidegate.protocol.retention import StoredFile


def announced(led: Led) -> list[tuple[AnnouncedPhase, int]]:
    """All announcements that were sent, each once."""
    found = {
        each.sequence: (each.phase, each.barrier.checkpoint_id)
        for message in led.host.sent
        if isinstance(message, Announced)
        for each in message.announcements
    }
    return [found[sequence] for sequence in sorted(found)]


class TestBeginning:
    def test_an_id_is_marked_and_the_log_is_read_before_anybody_hears_of_it(self) -> None:
        led = Led()
        checkpoint_id = led.leader.trigger()
        assert led.host.asked(Mark) == [Mark(checkpoint_id)]
        led.host.answer(Mark)
        assert not announced(led)
        led.host.answer(ReadLog, DecisionLog.from_records(led.log))
        assert led.host.of("begun") == [(checkpoint_id,)]
        assert announced(led) == [(AnnouncedPhase.PREPARE, checkpoint_id)]

    def test_the_second_is_marked_when_the_first_is_announced(self) -> None:
        led = Led()
        first, second = led.leader.trigger(), led.leader.trigger()
        assert led.host.asked(Mark) == [Mark(first)]
        led.host.answer(Mark)
        assert not led.host.asked(Mark)
        led.host.answer(ReadLog, DecisionLog.from_records(led.log))
        assert led.host.asked(Mark) == [Mark(second)]

    def test_a_newer_generation_in_the_log_ends_it(self) -> None:
        led = Led()
        led.leader.trigger()
        led.host.answer(Mark)
        newer = DecisionLog.from_records(led.log)
        newer.append(newer.opening("another", None))
        led.host.answer(ReadLog, newer)
        assert [why for why, _ in led.host.of("stepped down")] == [Superseded]
        assert not announced(led)

    def test_a_mark_that_fails_is_tried_again_after_a_pause(self) -> None:
        led = Led()
        checkpoint_id = led.leader.trigger()
        led.host.fail(Mark)
        assert not led.host.asked(Mark)
        assert led.host.sleep() == PATIENCE.pause.first_ms
        assert led.host.asked(Mark) == [Mark(checkpoint_id)]
        assert not led.host.of("aborted")

    def test_what_is_overdue_before_it_is_announced_is_told_in_the_words_of_the_store(self) -> None:
        led = Led()
        checkpoint_id = led.leader.trigger()
        led.host.fail(Mark, StoreUnavailable("no space is left"))
        led.host.now_ms = CONFIG.timeout_ms
        led.leader.on_time()
        detail = "it could not be begun: no space is left"
        assert led.host.of("aborted") == [(checkpoint_id, AbortReason.STORE_FAILED, detail)]

    def test_a_store_that_does_not_answer_at_all_is_told_as_such(self) -> None:
        led = Led()
        led.leader.trigger()
        led.host.now_ms = CONFIG.timeout_ms
        led.leader.on_time()
        ((_, reason, detail),) = led.host.of("aborted")
        assert (reason, detail) == (AbortReason.STORE_FAILED, "it could not be begun: the store does not answer")

    def test_one_that_was_aborted_meanwhile_is_not_announced(self) -> None:
        led = Led()
        checkpoint_id = led.leader.trigger()
        led.leader.cancel()
        led.host.answer(Mark)
        led.host.answer(ReadLog, DecisionLog.from_records(led.log))
        assert not led.host.of("begun")
        assert announced(led) == [(AnnouncedPhase.ABORT, checkpoint_id)]


class TestDeciding:
    def test_reports_alone_decide_nothing(self) -> None:
        led = Led()
        checkpoint_id = led.begin()
        for report in led.reports(checkpoint_id, 1).values():
            led.leader.on_report(report)
        led.leader.on_time()
        assert not led.host.asked(WriteManifest)
        led.acknowledge(checkpoint_id)
        assert led.host.asked(WriteManifest)

    def test_an_ack_of_another_attempt_does_not_count(self) -> None:
        led = Led()
        led.acknowledge(led.begin(), attempt=7)
        assert not led.host.asked(WriteManifest)

    def test_manifest_then_slot_then_announcement_then_commit(self) -> None:
        led = Led()
        checkpoint_id = led.begin()
        led.acknowledge(checkpoint_id)
        assert not led.host.asked(Claim)
        led.host.answer(WriteManifest, Written("manifest", "", 0))
        assert not led.host.asked(CommitSink)
        record = led.host.asked(Claim)[0].record
        led.host.answer(Claim, True)
        assert not led.host.of("completed")
        led.log.append(record)
        led.host.answer(ReadLog, DecisionLog.from_records(led.log))
        assert led.host.of("completed") == [(checkpoint_id, None)]
        assert announced(led)[-1] == (AnnouncedPhase.COMMIT, checkpoint_id)
        assert led.host.asked(CommitSink)

    def test_a_manifest_that_cannot_be_written_is_tried_again(self) -> None:
        led = Led()
        led.acknowledge(led.begin())
        led.host.fail(WriteManifest)
        led.host.sleep()
        assert led.host.asked(WriteManifest)
        assert not led.host.of("stepped down")

    def test_a_claim_whose_answer_was_lost_is_found_in_the_log_and_forced(self) -> None:
        led = Led()
        checkpoint_id = led.begin()
        led.acknowledge(checkpoint_id)
        led.host.answer(WriteManifest, Written("manifest", "", 0))
        led.log.append(led.host.asked(Claim)[0].record)
        led.host.fail(Claim)
        led.host.answer(ReadLog, DecisionLog.from_records(led.log))
        assert not led.host.of("completed")
        led.host.answer(Force)
        assert led.host.of("completed") == [(checkpoint_id, None)]
        assert not led.host.asked(Claim)

    def test_a_slot_that_is_said_to_be_taken_and_is_free_is_claimed_again_after_a_pause(self) -> None:
        led = Led()
        led.acknowledge(led.begin())
        led.host.answer(WriteManifest, Written("manifest", "", 0))
        led.host.answer(Claim, False)
        led.host.answer(ReadLog, DecisionLog.from_records(led.log))
        assert not led.host.asked(Claim)
        led.host.sleep()
        assert led.host.asked(Claim)

    def test_a_slot_that_another_has_ends_it(self) -> None:
        led = Led()
        led.acknowledge(led.begin())
        led.host.answer(WriteManifest, Written("manifest", "", 0))
        led.log.append(led.log.opening("another", None))
        led.host.answer(Claim, False)
        led.host.answer(ReadLog, DecisionLog.from_records(led.log))
        assert [why for why, _ in led.host.of("stepped down")] == [Superseded]
        assert not led.host.of("completed")

    def test_pauses_grow_until_patience_is_over(self) -> None:
        led = Led()
        led.acknowledge(led.begin())
        pauses = []
        led.host.fail(WriteManifest)
        while led.host.asked(Sleep):
            pauses.append(led.host.sleep())
            led.host.fail(WriteManifest)
        assert pauses[:5] == [10, 20, 40, 80, 100]
        assert sum(pauses) <= PATIENCE.give_up_ms
        assert led.host.of("stepped down") == [(StoreUnavailable, f"the disk is full (tried {len(pauses) + 1} times)")]

    def test_what_is_being_decided_is_not_aborted_by_its_timeout_or_by_a_user(self) -> None:
        led = Led()
        checkpoint_id = led.begin()
        led.acknowledge(checkpoint_id)
        led.host.now_ms = CONFIG.timeout_ms
        led.leader.on_time()
        led.leader.on_decline(StageDecline("sink", checkpoint_id, 1, 1, "too late"))
        assert not led.host.of("aborted")

    def test_a_leader_that_stepped_down_does_nothing_more(self) -> None:
        led = Led()
        checkpoint_id = led.begin()
        led.leader.on_failed("member", "its query died")
        assert [why for why, _ in led.host.of("stepped down")] == [InstanceFailed]
        led.acknowledge(checkpoint_id)
        led.leader.on_failed("member", "its query died")
        led.host.now_ms = 10**9
        led.leader.on_time()
        assert led.host.is_idle
        assert len(led.host.of("stepped down")) == 1


class TestCommittingAndCleaningUp:
    def test_a_sink_is_tried_again_with_pauses_until_the_leader_steps_down(self) -> None:
        flow_properties.a_sink_is_tried_again_with_pauses_until_the_leader_steps_down()

    def test_a_fence_ends_it_at_once(self) -> None:
        led = Led()
        led.complete()
        led.host.fail(CommitSink, Fenced("by generation 2"))
        assert [why for why, _ in led.host.of("stepped down")] == [Fenced]
        assert not led.host.of("commit failed")

    def test_the_member_hears_what_its_table_shows_when_it_does(self) -> None:
        led = Led()
        checkpoint_id = led.complete()
        assert not any(isinstance(message, Visible) for message in led.host.sent)
        led.commit()
        assert Visible(1, "sink", 3) in led.host.sent
        assert led.host.of("shown") == [(checkpoint_id,)]

    def test_what_it_starts_from_is_committed_first_and_is_not_its_own_checkpoint(self) -> None:
        led = Led(1)
        led.leader.on_time()
        (asked,) = led.host.asked(CommitSink)
        assert asked.permit.checkpoint_id == 1
        led.commit()
        led.clean_up()
        assert not led.host.of("stepped down")
        assert led.leader.is_settled

    def test_files_then_log_then_marks_then_what_was_staged(self) -> None:
        led = Led(config=replace(CONFIG, max_retained=1))
        led.complete()
        led.commit()
        led.clean_up()
        second = led.complete()
        led.commit()
        stored = [StoredFile("source-1", 1), StoredFile(f"source-{second}", 1), StoredFile("newer", 2)]
        led.host.answer(ListStored, stored)
        assert led.host.asked(Delete) == [Delete((stored[0],))]
        led.host.answer(Delete)
        assert [each.start for each in led.host.asked(Trim)] == [led.leader.log.first_slot]
        led.host.answer(Trim)
        assert led.host.asked(ForgetMarks) == [ForgetMarks(second)]
        led.host.answer(ForgetMarks)
        assert led.host.asked(ForgetStaged) == [ForgetStaged(1)]
        led.host.answer(ForgetStaged)
        assert led.leader.is_settled

    def test_cleaning_that_fails_does_not_end_the_leader_and_comes_again_with_the_next(self) -> None:
        led = Led()
        led.complete()
        led.commit()
        led.host.fail(ListStored)
        while led.host.asked(Sleep):
            led.host.sleep()
            led.host.fail(ListStored)
        assert len(led.host.of("not cleaned")) == 1
        assert not led.host.of("stepped down")
        assert led.leader.is_settled
        led.complete()
        led.commit()
        led.clean_up()
        assert led.leader.is_settled
