"""Several runs that fight over one decision log, in a store that is slow and forgets to answer.

The model is the full history of the records that took effect, never trimmed. A record takes effect when it is
created in the slot behind the last one; every record that was ever proposed may be created at any later time.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.protocol.logs import propose
from tests.protocol.search import Step, search, steps
from tests.protocol.unchanged import state_of, unchanged
from tidegate.errors import Superseded
from tidegate.protocol.decision_log import (
    Brought,
    CheckpointCompleted,
    ClaimAnswer,
    Decision,
    DecisionLog,
    GenerationOpened,
    judge_claim,
)

which = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5])  # counted back from the newest run or proposal
gaps = st.integers(1, 2)
choices = st.sampled_from([0, 0, 0, 1, 2])
dropped = st.sets(st.integers(0, 4), max_size=2)
STEPS = steps(
    (2, "a_run_starts", {}),
    (2, "a_run_proposes_to_open_a_generation", {"number": which, "choice": choices}),
    (2, "a_run_proposes_to_complete_a_checkpoint", {"number": which, "dropped": dropped, "gap": gaps}),
    (3, "a_run_claims", {"number": which}),
    (2, "a_claim_is_written_now_or_long_after", {"number": which}),
    (4, "a_run_asks_what_became_of_its_claim", {"number": which}),
    (6, "a_run_goes_on_undisturbed", {"number": which, "dropped": dropped, "gap": gaps}),
    (3, "a_run_deletes_what_it_knows_to_be_trimmed", {"number": which, "kept": st.sets(st.integers(1, 30))}),
    (1, "somebody_proposes_to_bring_a_checkpoint", {"gap": gaps, "ahead": st.integers(0, 3)}),
    (1, "a_run_dies", {"number": which}),
    (1, "power_is_lost_while_a_record_is_written", {}),
    (1, "a_superseded_run_can_propose_nothing", {}),
)


class Run:
    def __init__(self, name: str, log: DecisionLog) -> None:
        self.name = name
        self.log = log
        self.generation: int | None = None
        self.proposed: Decision | None = None


class DecisionLogAgainstAModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, Decision] = {}
        self.torn: set[int] = set()
        self.history: list[Decision] = []
        self.proposals: list[Decision] = []
        self.runs: list[Run] = []
        self.started = 0
        self.next_id = 1

    # -- what the model can tell ------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self.history[-1].generation if self.history else 0

    @property
    def next_slot(self) -> int:
        last = self.history[-1].slot if self.history else 0
        return last + 1 + sum(slot > last for slot in self.torn)

    def read(self) -> DecisionLog:
        return DecisionLog.from_records(self.stored.values(), self.torn)

    def lineage(self) -> list[int]:
        """All checkpoints that the current state descends from, newest first."""
        found: list[int] = []
        for record in self.history:
            if isinstance(record, CheckpointCompleted):
                found.append(record.checkpoint_id)
            elif record.brings is not None:
                found = [record.brings.checkpoint_id]  # it descends from none of this root
            else:
                found = [] if record.base is None else found[: found.index(record.base) + 1]
        return found[::-1]

    def completions(self) -> list[CheckpointCompleted | Brought]:
        """In the order of the history, also those that were brought."""
        found = (record if isinstance(record, CheckpointCompleted) else record.brings for record in self.history)
        return [each for each in found if each is not None]

    def pick(self, number: int) -> Run | None:
        return self.runs[-1 - number % len(self.runs)] if self.runs else None

    def create(self, record: Decision) -> None:
        """Create if absent, as the store does it."""
        if record.slot not in self.stored and record.slot not in self.torn:
            takes_effect = record.slot == self.next_slot
            self.stored[record.slot] = record
            if takes_effect:
                self.history.append(record)

    @rule(step=STEPS)
    def something_happens(self, step: Step) -> None:
        name, drawn = step
        getattr(self, name)(**drawn)

    # -- what runs do -----------------------------------------------------------------------------

    def a_run_starts(self) -> None:
        if len(self.runs) < 6:
            self.started += 1
            self.runs.append(Run(f"run{self.started}", self.read()))

    def a_run_proposes_to_open_a_generation(self, number: int, choice: int) -> None:
        run = self.pick(number)
        if run is None or run.proposed is not None or run.generation is not None:
            return
        # Mostly the newest one; an older one where a damaged checkpoint is skipped.
        candidates = [record.checkpoint_id for record in run.log.lineage()]
        base = candidates[choice % len(candidates)] if candidates else None
        with unchanged(run.log):
            run.proposed = run.log.opening(run.name, base)
        self.proposals.append(run.proposed)

    def a_run_proposes_to_complete_a_checkpoint(self, number: int, dropped: set[int], gap: int) -> None:
        run = self.pick(number)
        if run is None or run.proposed is not None or run.generation is None:
            return
        self.next_id += gap
        lineage = [record.checkpoint_id for record in reversed(run.log.lineage())]
        older = [each for each in lineage if each % 5 not in dropped][-3:]
        try:
            run.proposed = propose(
                run.log,
                self.next_id,
                generation=run.generation,
                epoch=self.next_id + gap,
                retained=(*older, self.next_id),
                claimant=run.name,
            )
        except Superseded:
            assert run.log.generation > run.generation
            self.runs.remove(run)
            return
        self.next_id += gap
        self.proposals.append(run.proposed)

    def somebody_proposes_to_bring_a_checkpoint(self, gap: int, ahead: int) -> None:
        """Under numbers of its own, which may be far above; it looks for itself what became of it."""
        self.started += 1
        somebody = Run(f"run{self.started}", self.read())
        self.next_id += gap
        brought = Brought(self.next_id, self.next_id + gap, "brought", "0" * 64, aligned=True)
        self.next_id += gap
        generation = somebody.log.next_generation + ahead
        with unchanged(somebody.log):
            somebody.proposed = somebody.log.opening(
                somebody.name, brought.checkpoint_id, sets_back=True, brings=brought, generation=generation
            )
        self.proposals.append(somebody.proposed)
        if len(self.runs) < 6:
            self.runs.append(somebody)

    def a_claim_is_written_now_or_long_after(self, number: int) -> None:
        if self.proposals:
            self.create(self.proposals[-1 - number % len(self.proposals)])

    def a_run_claims(self, number: int) -> None:
        run = self.pick(number)
        if run is not None and run.proposed is not None:
            self.create(run.proposed)

    def a_run_asks_what_became_of_its_claim(self, number: int) -> None:
        run = self.pick(number)
        if run is None or run.proposed is None:
            return
        proposed = run.proposed
        log = self.read()
        with unchanged(log):
            answer = judge_claim(proposed, log)
        took_effect = proposed in self.history
        if answer is ClaimAnswer.WON:
            assert took_effect
            self.on_won(run, proposed, log)
        elif answer is ClaimAnswer.RETRY:
            assert proposed.slot == self.next_slot
        elif answer is ClaimAnswer.RECONSIDER:
            assert isinstance(proposed, GenerationOpened)
            assert not took_effect
            assert self.generation < proposed.generation
            run.proposed, run.log = None, log
        else:
            # One that took effect and was trimmed by a newer generation may be told so too, and an opening anyway.
            is_opening = isinstance(proposed, GenerationOpened)
            lost_to_its_own_number = is_opening and self.generation == proposed.generation and not took_effect
            assert self.generation > proposed.generation or lost_to_its_own_number
            assert not took_effect or is_opening or proposed.slot < log.first_slot
            self.runs.remove(run)

    def a_run_goes_on_undisturbed(self, number: int, dropped: set[int], gap: int) -> None:
        self.a_run_proposes_to_open_a_generation(number, 0)
        self.a_run_proposes_to_complete_a_checkpoint(number, dropped, gap)
        self.a_run_claims(number)
        self.a_run_asks_what_became_of_its_claim(number)

    def on_won(self, run: Run, proposed: Decision, log: DecisionLog) -> None:
        run.proposed = None
        if isinstance(proposed, GenerationOpened):
            run.generation = proposed.generation
            run.log = log
        else:
            run.log.append(proposed)

    def a_run_deletes_what_it_knows_to_be_trimmed(self, number: int, kept: set[int]) -> None:
        run = self.pick(number)
        if run is None:
            return
        for slot in [slot for slot in self.stored if run.log.has_dropped(slot) and slot not in kept]:
            del self.stored[slot]
        self.torn = {slot for slot in self.torn if not run.log.has_dropped(slot) or slot in kept}

    def a_run_dies(self, number: int) -> None:
        if self.runs:
            del self.runs[-1 - number % len(self.runs)]

    def power_is_lost_while_a_record_is_written(self) -> None:
        """Its name is on the disk, its content is not. Nobody has acted on it, and nobody lives."""
        self.torn.add(self.next_slot)
        self.runs.clear()

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def the_log_that_is_read_is_the_end_of_the_history(self) -> None:
        log = self.read()
        assert list(log) == [record for record in self.history if record.slot >= log.first_slot]
        assert log.next_slot == self.next_slot
        assert log.generation == self.generation
        completions = self.completions()
        assert log.last_checkpoint_id == (completions[-1].checkpoint_id if completions else 0)
        assert log.last_epoch == (completions[-1].epoch if completions else 0)

    @invariant()
    def the_newest_checkpoint_and_its_lineage_are_those_of_the_history(self) -> None:
        log = self.read()
        lineage = self.lineage()
        assert (log.newest.checkpoint_id if log.newest else None) == (lineage[0] if lineage else None)
        expected = [each for each in lineage if each in log.retained]
        reachable = [record.checkpoint_id for record in log.lineage()]
        assert reachable == expected

    @invariant()
    def what_is_retained_has_its_record_in_the_log(self) -> None:
        log = self.read()
        assert all(log.completed(checkpoint_id) is not None for checkpoint_id in log.retained)
        assert not log.lineage() or log.lineage()[0] == log.newest

    @invariant()
    def a_log_that_was_appended_to_is_the_one_that_is_read(self) -> None:
        appended = DecisionLog()
        for record in self.history:
            appended.append(record)
        read = self.read()
        read._undecided = 0  # which only the store can tell
        assert state_of(appended) == state_of(read)

    @invariant()
    def generations_ids_and_epochs_only_grow(self) -> None:
        openings = [record for record in self.history if isinstance(record, GenerationOpened)]
        lost = 0
        for number, record in enumerate(openings, 1):
            lost += record.skipped
            assert record.generation >= number + lost
            if record.brings is not None:
                lost = record.generation - number  # tables knew larger ones
            assert record.generation == number + lost
        for before, after in pairwise(self.completions()):
            assert after.checkpoint_id > before.checkpoint_id
            assert after.epoch > before.epoch

    @invariant()
    def a_generation_completes_nothing_after_the_next_was_opened(self) -> None:
        generations = [record.generation for record in self.history]
        assert generations == sorted(generations)

    def a_superseded_run_can_propose_nothing(self) -> None:
        """A generation that the log has left behind proposes no completion, by a log that knows of it."""
        log = self.read()
        if log.generation > 1:
            with unchanged(log), pytest.raises(Superseded):
                propose(log, self.next_id + 1, generation=log.generation - 1, epoch=self.next_id + 9)


TestDecisionLogAgainstAModel = DecisionLogAgainstAModel.TestCase
TestDecisionLogAgainstAModel.settings = search(100, steps=50)
