from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.logs import complete, log_with, open_generation, propose
from tests.protocol.search import search
from tests.protocol.unchanged import state_of, unchanged
from tidegate.errors import DamagedLog, InvariantViolation, Superseded
from tidegate.protocol.decision_log import (
    Brought,
    CheckpointCompleted,
    ClaimAnswer,
    Copied,
    Decision,
    DecisionLog,
    GenerationOpened,
    decode_decision,
    encode_decision,
    is_torn,
    judge_claim,
)


def completed(slot: int, checkpoint_id: int, **changed: object) -> CheckpointCompleted:
    record = CheckpointCompleted(
        slot=slot,
        claimant="leader",
        generation=1,
        checkpoint_id=checkpoint_id,
        epoch=checkpoint_id * 10,
        parent=None,
        manifest="manifest",
        manifest_sha256="0" * 64,
        aligned=True,
        retained=(checkpoint_id,),
        log_start=1,
    )
    return msgspec.structs.replace(record, **changed)


def opened(slot: int, generation: int, **changed: object) -> GenerationOpened:
    record = GenerationOpened(slot=slot, claimant="leader", generation=generation, base=None, retained=(), log_start=1)
    return msgspec.structs.replace(record, **changed)


# Generation 1 has completed 5 and 7, and 5 and 7 are retained.
GOOD: list[Decision] = [opened(1, 1), completed(2, 5), completed(3, 7, parent=5, retained=(5, 7))]
NEXT = completed(4, 9, parent=7, retained=(5, 7, 9))
NEXT_OPENED = opened(4, 2, base=7, retained=(5, 7))

# A next record that may not stand, by the invariant that it breaks.
BAD: dict[str, tuple[Decision, str]] = {
    "the same generation is opened again": (
        msgspec.structs.replace(NEXT_OPENED, generation=1),
        "generation 1 follows generation 1",
    ),
    "a generation is left out": (
        msgspec.structs.replace(NEXT_OPENED, generation=3),
        "generation 3 follows generation 1",
    ),
    "an opening drops a retained one": (
        msgspec.structs.replace(NEXT_OPENED, retained=(7,)),
        "changes what is retained",
    ),
    "an opening retains one more": (
        msgspec.structs.replace(NEXT_OPENED, retained=(5, 7, 8)),
        "changes what is retained",
    ),
    "from nothing although some are retained": (
        msgspec.structs.replace(NEXT_OPENED, base=None),
        "from nothing",
    ),
    "from one that is not retained": (
        msgspec.structs.replace(NEXT_OPENED, base=6),
        "checkpoint 6, which is not retained",
    ),
    "completed by a newer generation": (
        msgspec.structs.replace(NEXT, generation=2),
        "generation 2 is not open",
    ),
    "completed by an older generation": (
        msgspec.structs.replace(NEXT, generation=0),
        "generation 0 is not open",
    ),
    "an id a second time": (
        msgspec.structs.replace(NEXT, checkpoint_id=7, retained=(5, 7)),
        "checkpoint 7 comes after 7",
    ),
    "an id that is older": (
        msgspec.structs.replace(NEXT, checkpoint_id=6, retained=(5, 7, 6)),
        "checkpoint 6 comes after 7",
    ),
    "an epoch a second time": (msgspec.structs.replace(NEXT, epoch=70), "epoch 70 comes after 70"),
    "an epoch that is older": (msgspec.structs.replace(NEXT, epoch=60), "epoch 60 comes after 70"),
    "it does not retain itself": (
        msgspec.structs.replace(NEXT, retained=(5, 7)),
        "does not retain itself",
    ),
    "it retains what was not retained": (
        msgspec.structs.replace(NEXT, retained=(3, 9)),
        "retains what was dropped",
    ),
    "another parent": (
        msgspec.structs.replace(NEXT, parent=5),
        "its parent is 5, but the lineage ends in 7",
    ),
    "no parent": (
        msgspec.structs.replace(NEXT, parent=None),
        "its parent is None, but the lineage ends in 7",
    ),
}

# A first record that may not stand there.
BAD_FIRST: dict[str, Decision] = {
    "a checkpoint before any generation": completed(1, 5),
    "a later generation": opened(1, 7),
    "a generation from a checkpoint": opened(1, 1, base=3),
    "a generation that retains something": opened(1, 1, retained=(3,)),
    "below slot 1": opened(-3, 1, log_start=-3),
    "a generation where the log was trimmed": opened(2, 1, log_start=2),
    "a checkpoint that does not retain itself": completed(2, 5, retained=(), log_start=2),
    "a checkpoint that retains what is gone": completed(2, 5, retained=(4, 5), log_start=2),
}


class TestInvariants:
    @pytest.mark.parametrize("following", [NEXT, NEXT_OPENED], ids=["completed", "opened"])
    def test_a_record_that_keeps_them_all_is_taken(self, following: Decision) -> None:
        log = DecisionLog.from_records(GOOD)
        log.append(following)
        assert list(log) == [*GOOD, following]
        assert list(DecisionLog.from_records([*GOOD, following])) == [*GOOD, following]

    @pytest.mark.parametrize("name", BAD)
    def test_a_record_that_breaks_one_is_refused_when_it_is_appended(self, name: str) -> None:
        record, why = BAD[name]
        log = DecisionLog.from_records(GOOD)
        with unchanged(log), pytest.raises(DamagedLog, match=f"slot 4 cannot stand.*{why}"):
            log.append(record)

    @pytest.mark.parametrize("name", BAD)
    def test_a_record_that_breaks_one_is_refused_when_it_is_read(self, name: str) -> None:
        record, why = BAD[name]
        with pytest.raises(DamagedLog, match=f"slot 4 cannot stand.*{why}"):
            DecisionLog.from_records([*GOOD, record])

    @pytest.mark.parametrize("name", BAD)
    def test_it_is_refused_in_the_middle_of_the_log_too(self, name: str) -> None:
        record, _ = BAD[name]
        with pytest.raises(DamagedLog, match="slot 4 cannot stand"):
            DecisionLog.from_records([*GOOD, record, opened(5, 2, base=7, retained=(5, 7))])

    @pytest.mark.parametrize("name", BAD_FIRST)
    def test_the_first_record_is_checked_as_far_as_it_can_be(self, name: str) -> None:
        with pytest.raises(DamagedLog):
            DecisionLog.from_records([BAD_FIRST[name]])

    def test_the_first_checkpoint_has_no_parent(self) -> None:
        with pytest.raises(DamagedLog, match="its parent is 3, but the lineage ends in None"):
            DecisionLog.from_records([opened(1, 1), completed(2, 5, parent=3)])

    @pytest.mark.parametrize("slot", [1, 3, 5])
    def test_slots_follow_one_another(self, slot: int) -> None:
        log = DecisionLog.from_records(GOOD)
        with unchanged(log), pytest.raises(InvariantViolation, match=f"slot {slot} does not follow slot 3"):
            log.append(msgspec.structs.replace(NEXT, slot=slot))

    @pytest.mark.parametrize("lost", [1, 2, 3])
    def test_a_gap_is_found_when_the_log_is_read(self, lost: int) -> None:
        records = [record for record in [*GOOD, NEXT] if record.slot != lost]
        with pytest.raises(DamagedLog, match=f"lacks slot {lost}; its last slot is 4"):
            DecisionLog.from_records(records)

    def test_two_records_for_one_slot_are_found_when_the_log_is_read(self) -> None:
        with pytest.raises(DamagedLog, match="two records for slot 4"):
            DecisionLog.from_records([*GOOD, NEXT, NEXT_OPENED])

    def test_records_may_be_read_in_any_order(self) -> None:
        assert list(DecisionLog.from_records([NEXT, *reversed(GOOD)])) == [*GOOD, NEXT]

    def test_the_start_of_the_log_never_moves_back(self) -> None:
        log = DecisionLog.from_records([*GOOD, msgspec.structs.replace(NEXT, log_start=2)])
        following = completed(5, 11, parent=9, retained=(9, 11))
        with unchanged(log), pytest.raises(DamagedLog, match="it starts the log at slot 1, but slot 4 at 2"):
            log.append(msgspec.structs.replace(following, log_start=1))
        log.append(msgspec.structs.replace(following, log_start=2))

    def test_the_log_does_not_start_behind_its_last_record(self) -> None:
        log = DecisionLog.from_records(GOOD)
        with unchanged(log), pytest.raises(DamagedLog, match="it starts the log at slot 5"):
            log.append(msgspec.structs.replace(NEXT, retained=(9,), log_start=5))
        log.append(msgspec.structs.replace(NEXT, retained=(9,), log_start=4))
        assert list(log) == [msgspec.structs.replace(NEXT, retained=(9,), log_start=4)]

    def test_a_log_that_starts_behind_its_last_record_is_not_read_as_empty(self) -> None:
        with pytest.raises(DamagedLog, match="slot 4 of the decision log starts the log at slot 5"):
            DecisionLog.from_records([*GOOD, msgspec.structs.replace(NEXT, retained=(9,), log_start=5)])

    def test_the_record_of_a_retained_checkpoint_counts_also_below_the_start(self) -> None:
        log = DecisionLog.from_records(GOOD)
        log.append(msgspec.structs.replace(NEXT, log_start=3))
        assert [record.slot for record in log] == [3, 4]
        assert log.completed(5) == GOOD[1]
        assert [slot for slot in range(1, 6) if log.has_dropped(slot)] == [1]
        read = DecisionLog.from_records([*GOOD[1:], msgspec.structs.replace(NEXT, log_start=3)])
        assert state_of(read) == state_of(log)

    def test_a_retained_checkpoint_whose_record_is_gone_is_noticed_when_the_log_is_read(self) -> None:
        with pytest.raises(DamagedLog, match="retains checkpoint 5, but its record is missing"):
            DecisionLog.from_records([GOOD[0], GOOD[2], msgspec.structs.replace(NEXT, log_start=3)])

    def test_a_checkpoint_retains_none_that_it_does_not_descend_from(self) -> None:
        log = DecisionLog.from_records([*GOOD, msgspec.structs.replace(NEXT_OPENED, base=5)])
        other = completed(5, 9, generation=2, parent=5, retained=(5, 7, 9))
        with unchanged(log), pytest.raises(DamagedLog, match="retains checkpoint 7, which it does not descend from"):
            log.append(other)
        log.append(msgspec.structs.replace(other, retained=(5, 9)))


class TestProposals:
    def test_the_first_generation_is_1_in_slot_1_and_from_nothing(self) -> None:
        assert DecisionLog().opening("me", None) == opened(1, 1, claimant="me")

    def test_the_next_generation_keeps_what_is_retained(self) -> None:
        log = log_with(5, 7)
        assert log.opening("me", 7) == GenerationOpened(4, "me", 2, 7, (5, 7), log.first_slot)

    def test_proposing_changes_nothing(self) -> None:
        log = log_with(5, 7)
        with unchanged(log):
            log.opening("me", 7)
            propose(log, 9)

    @pytest.mark.parametrize(("base", "why"), [(None, "from nothing"), (6, "not retained")])
    def test_an_opening_that_cannot_stand_is_not_proposed(self, base: int | None, why: str) -> None:
        log = log_with(5, 7)
        with unchanged(log), pytest.raises(DamagedLog, match=why):
            log.opening("me", base)

    def test_a_completion_follows_the_newest_of_its_lineage(self) -> None:
        log = log_with(5, 7)
        assert propose(log, 9, epoch=90, claimant="me") == CheckpointCompleted(
            slot=4,
            claimant="me",
            generation=1,
            checkpoint_id=9,
            epoch=90,
            parent=7,
            manifest="manifest-9",
            manifest_sha256="0" * 64,
            aligned=True,
            retained=(5, 7, 9),
            log_start=2,
        )

    @pytest.mark.parametrize(
        ("checkpoint_id", "epoch", "retained", "why"),
        [
            (7, 8, (5, 7), "checkpoint 7 comes after 7"),
            (8, 7, (5, 7, 8), "epoch 7 comes after 7"),
            (8, 8, (5, 7), "does not retain itself"),
            (8, 8, (4, 8), "retains what was dropped"),
        ],
    )
    def test_a_completion_that_cannot_stand_is_not_proposed(
        self, checkpoint_id: int, epoch: int, retained: tuple[int, ...], why: str
    ) -> None:
        log = log_with(5, 7)
        with unchanged(log), pytest.raises(DamagedLog, match=why):
            propose(log, checkpoint_id, epoch=epoch, retained=retained)

    def test_a_generation_that_was_superseded_proposes_nothing(self) -> None:
        log = log_with(5)
        open_generation(log, base=5)
        with unchanged(log), pytest.raises(Superseded) as caught:
            propose(log, 9, generation=1)
        assert (caught.value.own_generation, caught.value.newer_generation) == (1, 2)

    @pytest.mark.parametrize("log", [DecisionLog(), log_with(5)], ids=["empty", "of generation 1"])
    def test_a_generation_that_is_not_open_yet_was_not_superseded_by_an_older_one(self, log: DecisionLog) -> None:
        with unchanged(log), pytest.raises(DamagedLog, match="generation 2 is not open"):
            propose(log, 9, generation=2)


class TestWhatTheLogKnows:
    def test_an_empty_log_knows_of_nothing(self) -> None:
        log = DecisionLog.from_records([])
        assert (len(log), list(log)) == (0, [])
        assert (log.first_slot, log.next_slot, log.generation) == (1, 1, 0)
        assert (log.last_checkpoint_id, log.last_epoch) == (0, 0)
        assert log.newest is None
        assert log.retained == ()
        assert log.lineage() == []
        assert log.at(1) is None

    def test_it_knows_its_slots_its_generation_and_its_newest_checkpoint(self) -> None:
        log = DecisionLog.from_records(GOOD)
        assert len(log) == 3
        assert (log.first_slot, log.next_slot, log.generation) == (1, 4, 1)
        assert (log.last_checkpoint_id, log.last_epoch) == (7, 70)
        assert log.newest == GOOD[2]
        assert log.retained == (5, 7)
        assert log.lineage() == [GOOD[2], GOOD[1]]
        assert [log.at(slot) for slot in range(5)] == [None, *GOOD, None]
        assert (log.completed(5), log.completed(6)) == (GOOD[1], None)

    def test_it_knows_who_has_opened_its_generation(self) -> None:
        assert DecisionLog().claimant == ""
        log = log_with()
        open_generation(log, claimant="a#1")
        complete(log, 9, claimant="a#1")
        assert log.claimant == "a#1"
        open_generation(log, base=9, claimant="alone")
        assert log.claimant == "alone"

    def test_a_generation_opened_from_nothing_has_no_newest(self) -> None:
        log = log_with()
        open_generation(log)
        assert log.generation == 2
        assert log.newest is None

    def test_after_a_fall_back_the_lineage_goes_on_from_the_older_checkpoint(self) -> None:
        log = log_with(1, 2)
        open_generation(log, base=1)
        assert log.newest == log.completed(1)
        assert [record.checkpoint_id for record in log.lineage()] == [1]
        # The skipped one is retained until the next completion, and its id and epoch are never used again.
        assert log.retained == (1, 2)
        assert (log.last_checkpoint_id, log.last_epoch) == (2, 2)
        with pytest.raises(DamagedLog, match="checkpoint 2 comes after 2"):
            complete(log, 2)
        third = complete(log, 3)
        assert third.parent == 1
        assert [record.checkpoint_id for record in log.lineage()] == [3, 1]
        assert log.retained == (1, 3)

    def test_the_lineage_holds_what_is_retained_alone(self) -> None:
        log = log_with(1, 2, 3)
        complete(log, 4, retained=(1, 4))
        assert [record.checkpoint_id for record in log.lineage()] == [4, 1]


class TestTrimming:
    def test_records_before_the_oldest_retained_checkpoint_are_trimmed(self) -> None:
        log = log_with(1, 2, 3, 4, max_retained=2)
        assert log.retained == (3, 4)
        assert log.first_slot == 4
        assert [record.slot for record in log] == [4, 5]
        assert log.completed(2) is None
        assert log.at(3) is None
        assert log.at(4) == log.completed(3)

    def test_the_log_stays_short_however_far_back_a_retained_checkpoint_lies(self) -> None:
        log = log_with(1)
        stored: dict[int, Decision] = {record.slot: record for record in log}
        lengths = set()
        for checkpoint_id in range(2, 60):
            record = complete(log, checkpoint_id, content="idle")
            stored = {slot: each for slot, each in {**stored, record.slot: record}.items() if not log.has_dropped(slot)}
            lengths.add(len(stored))
            read = DecisionLog.from_records(stored.values())
            assert state_of(read) == state_of(log)
            assert log.retained == (1, checkpoint_id)
            assert [each.checkpoint_id for each in read.lineage()] == [checkpoint_id, 1]
        assert max(lengths) == 10

    def test_what_it_has_dropped_may_be_asked_while_it_grows(self) -> None:
        """By the thread that cleans up."""
        log = log_with(1)
        for checkpoint_id in range(2, 20):
            complete(log, checkpoint_id, retained=(1, checkpoint_id))

        class Asked(int):
            def __ne__(self, other: object) -> bool:
                complete(log, log.last_checkpoint_id + 1, retained=(1, log.last_checkpoint_id + 1))
                return super().__ne__(other)

        assert [log.has_dropped(Asked(slot)) for slot in (2, 3)] == [False, True]

    def test_an_opening_trims_nothing(self) -> None:
        log = log_with(1, 2, 3, max_retained=2)
        first_slot = log.first_slot
        open_generation(log, base=3)
        assert log.first_slot == first_slot

    def test_a_trimmed_log_reads_the_same_with_and_without_what_was_trimmed(self) -> None:
        log = log_with()
        everything = list(log)
        everything += [complete(log, checkpoint_id, max_retained=2) for checkpoint_id in range(1, 6)]
        for start in range(log.first_slot):
            read = DecisionLog.from_records(everything[start:])
            assert list(read) == list(log)
            assert read.newest == log.newest
            assert read.lineage() == log.lineage()
            assert (read.next_slot, read.last_checkpoint_id, read.last_epoch) == (7, 5, 5)

    def test_a_trimmed_log_reads_also_where_a_lineage_has_left_its_base_behind(self) -> None:
        log = log_with(5, 7)
        open_generation(log, base=5)
        ninth = complete(log, 9, retained=(9,))
        assert ninth.parent == 5
        assert log.completed(5) is None
        assert DecisionLog.from_records(log).lineage() == log.lineage() == [ninth]

    def test_a_record_that_was_created_in_a_trimmed_slot_is_not_part_of_the_log(self) -> None:
        sleeper = log_with(1)
        late = sleeper.opening("sleeper", 1)
        log = DecisionLog.from_records(sleeper)
        for checkpoint_id in (2, 3, 4):
            complete(log, checkpoint_id, max_retained=1)
        assert late.slot < log.first_slot
        assert list(DecisionLog.from_records([late, *log])) == list(log)

    def test_what_lies_below_the_start_need_not_even_follow(self) -> None:
        log = log_with(1, 2, 3, max_retained=1)
        nonsense = completed(2, 99, generation=77)
        assert list(DecisionLog.from_records([nonsense, *log])) == list(log)


def test_an_opening_of_which_a_newer_one_has_taken_over_is_superseded_though_it_is_in_the_log() -> None:
    """What it was to go on from may have been dropped by the newer one."""
    log = log_with(1, 2)
    mine = log.opening("me", 2)
    log.append(mine)
    assert judge_claim(mine, log) is ClaimAnswer.WON
    open_generation(log, base=2, claimant="another")
    complete(log, 3, retained=(1, 3))
    assert log.at(mine.slot) == mine
    assert judge_claim(mine, log) is ClaimAnswer.SUPERSEDED


class TestTornRecords:
    @pytest.mark.parametrize("cut", [0, 1, 20, -1])
    def test_a_record_that_was_not_written_to_its_end_is_torn(self, cut: int) -> None:
        data = encode_decision(NEXT)
        assert is_torn(data[:cut])
        assert is_torn(data[:cut] + bytes(100))
        assert not is_torn(data)

    def test_whatever_bit_of_a_record_is_flipped_it_is_damaged_and_not_torn(self) -> None:
        """Else the last one, with a checkpoint that was decided, would be passed over."""
        data = encode_decision(NEXT)
        for number in range(8 * len(data)):
            changed = bytearray(data)
            changed[number // 8] ^= 1 << number % 8
            assert not is_torn(bytes(changed)), number
            with pytest.raises(DamagedLog, match=r"record 4\.json cannot be read"):
                decode_decision(bytes(changed), "4.json")

    def test_however_much_of_a_record_is_written_it_is_torn_until_all_of_it_is(self) -> None:
        data = encode_decision(NEXT)
        assert all(is_torn(data[:length]) for length in range(len(data)))
        assert all(is_torn(data[:length] + bytes(len(data) - length)) for length in range(len(data)))

    def test_one_that_is_whole_but_strange_is_not_torn(self) -> None:
        assert not is_torn(b'{"type":"rewound","slot":4}')
        with pytest.raises(DamagedLog):
            decode_decision(b'{"type":"rewound","slot":4}', "4.json")

    def test_at_the_end_of_the_log_it_was_never_decided(self) -> None:
        log = DecisionLog.from_records(GOOD, {4})
        assert list(log) == GOOD
        assert (log.newest, log.generation) == (GOOD[2], 1)
        assert list(log.undecided) == [4]
        assert log.next_slot == 5

    def test_the_next_opening_takes_the_slot_behind_it_and_a_generation_that_nobody_can_have_had(self) -> None:
        log = DecisionLog.from_records(GOOD, {4, 5})
        opening = log.opening("me", 7)
        assert (opening.slot, opening.skipped, opening.generation) == (6, 2, 4)
        read = DecisionLog.from_records([*GOOD, opening], {4, 5})
        assert list(read) == [*GOOD, opening]
        assert not read.undecided
        assert [read.at(slot) for slot in (3, 4, 5, 6)] == [GOOD[2], None, None, opening]
        assert complete(read, 9, epoch=90).slot == 7
        assert judge_claim(opening, log) is ClaimAnswer.RETRY
        assert judge_claim(opening, read) is ClaimAnswer.WON
        assert judge_claim(msgspec.structs.replace(opening, claimant="other"), read) is ClaimAnswer.SUPERSEDED

    def test_what_lies_in_a_slot_that_was_skipped_is_not_part_of_the_log_whatever_it_is(self) -> None:
        opening = DecisionLog.from_records(GOOD, {4}).opening("me", 7)
        assert list(DecisionLog.from_records([*GOOD, NEXT, opening])) == [*GOOD, opening]
        assert list(DecisionLog.from_records([*GOOD, opening])) == [*GOOD, opening]

    def test_no_checkpoint_is_completed_behind_it(self) -> None:
        with pytest.raises(InvariantViolation):
            propose(DecisionLog.from_records(GOOD, {4}), 9)

    def test_where_another_record_follows_it_is_damage(self) -> None:
        with pytest.raises(DamagedLog, match="slot 2 of the decision log is empty or torn, but slot 3 follows"):
            DecisionLog.from_records([GOOD[0], GOOD[2]], {2})

    def test_one_that_earlier_records_were_deleted_for_is_named(self) -> None:
        with pytest.raises(DamagedLog, match="lacks slot 1; its last slot is 3, and slot 4 after it is empty or torn"):
            DecisionLog.from_records(GOOD[1:], {4})

    def test_one_that_does_not_follow_the_last_means_that_slots_are_missing(self) -> None:
        with pytest.raises(DamagedLog, match="lacks slot 4"):
            DecisionLog.from_records(GOOD, {5})
        with pytest.raises(DamagedLog, match="lacks slot 1"):
            DecisionLog.from_records([], {3})

    def test_one_that_was_trimmed_means_nothing(self) -> None:
        log = log_with(1, 2, 3, max_retained=1)
        assert list(DecisionLog.from_records(log, {1})) == list(log)

    def test_a_log_of_which_nothing_was_decided_is_empty_and_goes_on(self) -> None:
        log = DecisionLog.from_records([], {1})
        assert (len(log), log.generation) == (0, 0)
        opening = log.opening("me", None)
        assert (opening.slot, opening.generation) == (2, 2)
        read = DecisionLog.from_records([opening], {1})
        complete(read, 1)
        for checkpoint_id in (2, 3):
            complete(read, checkpoint_id, max_retained=1)
        assert list(DecisionLog.from_records(read, {1})) == list(read)

    def test_an_opening_that_skips_less_than_nothing_cannot_stand(self) -> None:
        with pytest.raises((DamagedLog, InvariantViolation)):
            DecisionLog.from_records([*GOOD, opened(4, 1, base=7, retained=(5, 7), skipped=-1)])


class TestClaims:
    def test_a_record_that_is_read_back_has_won(self) -> None:
        log = log_with(1)
        proposed = log.opening("me", 1)
        log.append(proposed)
        assert judge_claim(proposed, log) is ClaimAnswer.WON

    def test_it_has_won_also_when_others_followed_it(self) -> None:
        log = log_with(1)
        proposed = complete(log, 2)
        complete(log, 3)
        open_generation(log, base=3)
        assert judge_claim(proposed, log) is ClaimAnswer.WON

    @pytest.mark.parametrize("kind", ["opening", "completion"])
    def test_where_the_slot_is_still_free_the_same_record_is_claimed_again(self, kind: str) -> None:
        log = log_with(1)
        before = DecisionLog.from_records(log)
        proposed: Decision = log.opening("me", 1) if kind == "opening" else propose(log, 2)
        assert judge_claim(proposed, before) is ClaimAnswer.RETRY

    def test_an_opening_that_lost_to_a_completion_is_reconsidered(self) -> None:
        log = log_with(1)
        proposed = log.opening("me", 1)
        complete(log, 2)
        assert judge_claim(proposed, log) is ClaimAnswer.RECONSIDER

    def test_an_opening_that_lost_to_another_opening_is_superseded(self) -> None:
        log = log_with(1)
        proposed = log.opening("me", 1)
        open_generation(log, base=1, claimant="other")
        assert judge_claim(proposed, log) is ClaimAnswer.SUPERSEDED

    def test_an_opening_that_lost_to_a_completion_and_then_an_opening_is_superseded(self) -> None:
        log = log_with(1)
        proposed = log.opening("me", 1)
        complete(log, 2)
        open_generation(log, base=2, claimant="other")
        assert judge_claim(proposed, log) is ClaimAnswer.SUPERSEDED

    def test_a_completion_that_lost_to_an_opening_is_superseded(self) -> None:
        log = log_with(1)
        proposed = propose(log, 2)
        open_generation(log, base=1, claimant="other")
        assert judge_claim(proposed, log) is ClaimAnswer.SUPERSEDED

    def test_a_completion_that_was_created_in_a_trimmed_slot_is_superseded_and_not_won(self) -> None:
        log = log_with(1)
        proposed = propose(log, 2)
        open_generation(log, base=1, claimant="other")
        for checkpoint_id in (3, 4, 5):
            complete(log, checkpoint_id, max_retained=1)
        read = DecisionLog.from_records([proposed, *log])
        assert judge_claim(proposed, read) is ClaimAnswer.SUPERSEDED

    def test_an_opening_that_was_created_in_a_trimmed_slot_is_not_won(self) -> None:
        log = log_with(1)
        proposed = log.opening("me", 1)
        for checkpoint_id in (2, 3):
            complete(log, checkpoint_id, max_retained=1)
        read = DecisionLog.from_records([proposed, *log])
        assert judge_claim(proposed, read) is ClaimAnswer.RECONSIDER

    def test_a_generation_cannot_lose_a_slot_to_itself(self) -> None:
        log = log_with(1)
        proposed = propose(log, 2)
        complete(log, 3)
        with pytest.raises(InvariantViolation, match="two leaders of one generation"):
            judge_claim(proposed, log)

    def test_a_completion_is_not_reconsidered_by_a_log_that_has_become_shorter(self) -> None:
        log = log_with(1)
        before = DecisionLog.from_records(log)
        open_generation(log, base=1)
        proposed = propose(log, 2)
        with pytest.raises(InvariantViolation):
            judge_claim(proposed, before)

    def test_the_same_decision_by_another_claimant_is_not_ones_own(self) -> None:
        log = log_with(1)
        proposed = log.opening("me", 1)
        open_generation(log, base=1, claimant="other")
        assert msgspec.structs.replace(proposed, claimant="other") == log.at(3)
        assert judge_claim(proposed, log) is not ClaimAnswer.WON


numbers = st.integers(0, 2**64 - 1)
retained = st.lists(numbers, max_size=4).map(tuple)
decisions: st.SearchStrategy[Decision] = st.one_of(
    st.builds(
        GenerationOpened,
        slot=numbers,
        claimant=st.text(),
        generation=numbers,
        base=st.none() | numbers,
        retained=retained,
        log_start=numbers,
        brings=st.none()
        | st.builds(
            Brought,
            checkpoint_id=numbers,
            epoch=numbers,
            manifest=st.text(),
            manifest_sha256=st.text(),
            aligned=st.booleans(),
            copies=st.dictionaries(
                st.text(), st.builds(Copied, st.text(), st.booleans(), st.none() | numbers), max_size=2
            ),
        ),
    ),
    st.builds(
        CheckpointCompleted,
        slot=numbers,
        claimant=st.text(),
        generation=numbers,
        checkpoint_id=numbers,
        epoch=numbers,
        parent=st.none() | numbers,
        manifest=st.text(),
        manifest_sha256=st.text(),
        aligned=st.booleans(),
        retained=retained,
        log_start=numbers,
    ),
)


class TestEncoding:
    @given(decisions)
    @search(80)
    def test_a_record_survives_its_encoding(self, decision: Decision) -> None:
        copy = decode_decision(encode_decision(decision), "slot")
        assert type(copy) is type(decision)
        assert copy == decision

    @given(decisions)
    @search(80)
    def test_a_record_of_before_that_has_no_checksum_is_read_as_it_is(self, decision: Decision) -> None:
        assert decode_decision(msgspec.json.encode(decision), "slot") == decision

    def test_a_number_that_was_edited_is_told_by_the_checksum_though_it_makes_sense(self) -> None:
        edited = encode_decision(NEXT).replace(f'"epoch":{NEXT.epoch}'.encode(), f'"epoch":{NEXT.epoch + 1}'.encode())
        assert not is_torn(edited)
        with pytest.raises(DamagedLog, match="record 000004 cannot be read: it is not what was decided, its checksum"):
            decode_decision(edited, "000004")

    @given(decisions, st.data())
    @search(80)
    def test_a_record_that_was_cut_short_is_named_and_refused(self, decision: Decision, data: st.DataObject) -> None:
        encoded = encode_decision(decision)
        length = data.draw(st.integers(0, len(encoded) - 1))
        with pytest.raises(DamagedLog, match="record 000004 cannot be read"):
            decode_decision(encoded[:length], "000004")

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"null",
            b"{}",
            b"\x00" * 64,
            b'{"type":"generation_opened"}',
            encode_decision(NEXT).replace(b"checkpoint_completed", b"checkpoint_aborted"),
            encode_decision(NEXT).replace(b'"claimant":', b'"claimer":'),
            encode_decision(NEXT).replace(b'"aligned":true', b'"aligned":1'),
            encode_decision(NEXT).replace(b'"aligned":true', b'"aligned":true,"note":""'),
            encode_decision(NEXT).replace(b"leader", b"\xff\xfe"),
        ],
    )
    def test_damaged_bytes_are_refused(self, data: bytes) -> None:
        with pytest.raises(DamagedLog, match="record 000004 cannot be read"):
            decode_decision(data, "000004")


class TestSettingTablesBack:
    def test_it_opens_a_generation_from_an_older_checkpoint_and_newer_ones_stay_until_the_next_is_complete(
        self,
    ) -> None:
        log = log_with(1, 2, 3)
        decided = log.opening("somebody", 1, sets_back=True)
        log.append(decided)
        assert log.setting_back == decided
        assert (log.generation, log.newest, log.retained) == (2, log.completed(1), (1, 2, 3))
        assert not open_generation(log, 1).sets_back
        record = complete(log, 4)
        assert record.parent == 1
        assert log.retained == (1, 4)

    def test_it_can_be_undone_while_they_stay(self) -> None:
        log = log_with(1, 2, 3)
        for base in (1, 3):
            log.append(log.opening("somebody", base, sets_back=True))
        open_generation(log, 3)
        assert [each.checkpoint_id for each in log.lineage()] == [3, 2, 1]

    def test_tables_are_not_set_back_to_nothing(self) -> None:
        log = DecisionLog()
        with pytest.raises(DamagedLog, match="sets tables back to no checkpoint"):
            log.opening("somebody", None, sets_back=True)

    def test_what_is_to_be_done_with_which_tables_is_part_of_the_record(self) -> None:
        log = log_with(1, 2)
        record = log.opening("somebody", 1, sets_back=True, discards_others=True, left=("mine",))
        assert decode_decision(encode_decision(record), "slot") == record


def brought(checkpoint_id: int, **changed: object) -> Brought:
    record = Brought(checkpoint_id, checkpoint_id, f"manifest-{checkpoint_id}", "0" * 64, aligned=True, at_ms=7)
    return msgspec.structs.replace(record, **changed)


def bring(log: DecisionLog, checkpoint_id: int, generation: int = 0) -> GenerationOpened:
    record = log.opening(
        "somebody", checkpoint_id, sets_back=True, brings=brought(checkpoint_id), generation=generation
    )
    log.append(record)
    return record


class TestBringingACheckpoint:
    def test_it_completes_the_checkpoint_and_opens_a_generation_from_it(self) -> None:
        log = log_with(1, 2, 3)
        decided = bring(log, 9)
        found = log.completed(9)
        assert found is not None
        assert (found.slot, found.generation, found.parent, found.at_ms) == (decided.slot, 2, None, 7)
        assert log.newest == found
        assert log.setting_back == decided
        assert (log.last_checkpoint_id, log.last_epoch) == (9, 9)
        assert log.retained == (1, 2, 3, 9), "the others stay until the next one is complete"

    def test_it_descends_from_none_of_this_root(self) -> None:
        log = log_with(1, 2, 3)
        bring(log, 9)
        assert [each.checkpoint_id for each in log.lineage()] == [9]
        open_generation(log, 9)
        following = complete(log, 10)
        assert following.parent == 9
        assert log.retained == (9, 10)
        with pytest.raises(DamagedLog, match="retains what was dropped before"):
            propose(log, 11, retained=(3, 10, 11))

    def test_one_of_another_lineage_is_not_retained_behind_it(self) -> None:
        log = log_with(1, 2, 3)
        bring(log, 9)
        open_generation(log, 9)
        with pytest.raises(DamagedLog, match="retains checkpoint 3, which it does not descend from"):
            propose(log, 10, retained=(3, 9, 10))

    def test_it_may_be_the_first_thing_that_is_decided_on_a_root(self) -> None:
        log = DecisionLog()
        decided = bring(log, 43, generation=12)
        assert (log.generation, log.retained, log.first_slot) == (12, (43,), 1)
        assert open_generation(log, 43).generation == 13
        assert complete(log, 44, retained=(43, 44)).generation == 13
        assert state_of(DecisionLog.from_records([decided, *log])) == state_of(log)

    def test_what_is_decided_before_it_is_done_takes_the_tables_over_too(self) -> None:
        log = log_with(1)
        log.append(log.opening("somebody", 9, sets_back=True, brings=brought(9)))
        back = log.opening("another", 1, sets_back=True)
        assert back.takes_over
        log.append(back)
        assert log.opening("a third", 9, sets_back=True).takes_over
        log.append(log.opening("a run", 1))
        assert not log.opening("a fourth", 1, sets_back=True).takes_over, "a run has begun, so all of it was done"

    def test_it_may_leave_generations_out_and_nothing_else_may(self) -> None:
        log = log_with(1)
        decided = log.opening("somebody", 9, sets_back=True, brings=brought(9), generation=7)
        assert decided.generation == 7
        other = opened(3, 7, base=1, retained=(1,))
        with unchanged(log), pytest.raises(DamagedLog, match="generation 7 follows generation 1"):
            log.append(other)
        log.append(decided)
        assert log.next_generation == 8

    def test_it_never_has_a_generation_that_was_open(self) -> None:
        log = log_with(1)
        open_generation(log, 1)
        assert log.opening("somebody", 9, sets_back=True, brings=brought(9), generation=1).generation == 3
        late = opened(
            4, 2, base=9, retained=(1, 9), sets_back=True, brings=brought(9), takes_over=True, log_start=log.first_slot
        )
        with unchanged(log), pytest.raises(DamagedLog, match="generation 2 follows generation 2"):
            log.append(late)

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"base": 5}, "it brings checkpoint 9, but opens from 5"),
            ({"base": None}, "it brings checkpoint 9, but opens from None"),
            ({"sets_back": False}, "leaves the tables where they were"),
            ({"brings": brought(7), "base": 7}, "checkpoint 7 comes after 7"),
            ({"brings": brought(9, epoch=70)}, "epoch 70 comes after 70"),
            ({"retained": (5, 7)}, "changes what is retained"),
            ({"retained": (7, 9)}, "changes what is retained"),
            ({"retained": (9,)}, "changes what is retained"),
        ],
    )
    def test_what_it_may_not_be_is_refused_also_when_it_is_read(self, changed: dict[str, object], why: str) -> None:
        good = opened(4, 2, base=9, retained=(5, 7, 9), sets_back=True, brings=brought(9, epoch=90), takes_over=True)
        log = DecisionLog.from_records(GOOD)
        bad = msgspec.structs.replace(good, **changed)
        with unchanged(log), pytest.raises(DamagedLog, match=f"slot 4 cannot stand.*{why}"):
            log.append(bad)
        with pytest.raises(DamagedLog, match=f"slot 4 cannot stand.*{why}"):
            DecisionLog.from_records([*GOOD, bad])
        log.append(good)

    def test_its_record_counts_below_the_start_for_as_long_as_it_is_retained(self) -> None:
        log = log_with(1, 2)
        decided = bring(log, 9)
        open_generation(log, 9)
        after: list[Decision] = [complete(log, each, retained=(9, each)) for each in range(10, 25)]
        assert decided.slot < log.first_slot
        assert log.kept_before_start == {decided.slot}
        assert not log.has_dropped(decided.slot)
        read = DecisionLog.from_records([decided, *after])
        assert state_of(read) == state_of(log)
        assert read.completed(9) is not None
        with pytest.raises(DamagedLog, match="retains checkpoint 9, but its record is missing"):
            DecisionLog.from_records(after)
        complete(log, 25, retained=(24, 25))
        assert log.has_dropped(decided.slot)
        assert log.completed(9) is None

    def test_a_log_never_starts_with_it(self) -> None:
        """Of a first record that is trimmed up to, what came before cannot be told."""
        log = log_with(1, 2, 3)
        bring(log, 9)
        open_generation(log, 9)
        following = complete(log, 10, retained=(9, 10))
        assert log.first_slot == following.slot
        assert log.at(following.slot) == following

    def test_one_that_lost_to_a_completion_or_to_a_generation_below_its_own_is_reconsidered(self) -> None:
        log = log_with(1)
        near = log.opening("me", 9, sets_back=True, brings=brought(9))
        far = log.opening("me", 9, sets_back=True, brings=brought(9), generation=7)
        complete(log, 2)
        assert judge_claim(near, log) is ClaimAnswer.RECONSIDER
        open_generation(log, 2, claimant="other")
        assert judge_claim(near, log) is ClaimAnswer.SUPERSEDED
        assert judge_claim(far, log) is ClaimAnswer.RECONSIDER

    def test_what_becomes_of_which_tables_is_part_of_the_record(self) -> None:
        copies = {"orders": Copied("/lake/orders_next", replaces=True, since=12), "late": Copied("/lake/late")}
        log = log_with(1)
        record = log.opening("me", 9, sets_back=True, brings=brought(9, copies=copies, ends_fork=True), left=("mine",))
        assert decode_decision(encode_decision(record), "slot") == record
