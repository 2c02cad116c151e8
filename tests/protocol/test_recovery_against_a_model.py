"""Runs that crash, sinks that lag and checkpoints that rot, and a recovery after each crash.

The model knows what every sink shows: the checkpoints whose rows it has committed. Rows are doubled exactly
where a run is restored from a checkpoint that does not descend from all of them. So no recovery may do that.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.logs import complete
from tests.protocol.search import Step, search, steps
from tests.protocol.unchanged import unchanged
from tidegate.protocol.decision_log import CheckpointCompleted, Decision, DecisionLog, GenerationOpened
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import (
    Examine,
    Facts,
    FenceSinks,
    RecoveryDecision,
    Refuse,
    Restore,
    SinkFacts,
    StartFresh,
    StartOver,
    recover,
)

which = st.sampled_from([0, 0, 0, 1, 1, 2, 3])  # counted back from the newest
lagging = st.sampled_from([{0, 1, 2}, {0, 1, 2}, {0, 1}, {2}, set()])
ways = st.sampled_from(["its manifest is gone", "a file is gone"])
STEPS = steps(
    (8, "a_checkpoint_is_completed", {"lagging": lagging, "gap": st.integers(1, 2)}),
    (1, "a_lagging_sink_commits", {"number": which}),
    (4, "the_run_crashes", {"forgets": st.booleans()}),
    (4, "a_retained_checkpoint_rots", {"number": which, "way": ways}),
    (2, "the_user_restores_the_files_from_a_backup", {}),
    (8, "a_run_recovers", {}),
    (1, "a_log_that_lost_its_end_is_found_out_by_the_sinks", {"lost": st.integers(1, 9)}),
)


class Sink:
    def __init__(self) -> None:
        self.shown: list[CheckpointCompleted] = []
        self.fence = 0

    @property
    def facts(self) -> SinkFacts:
        return SinkFacts(self.shown[-1].epoch if self.shown else 0, self.fence)

    def commit(self, record: CheckpointCompleted, generation: int) -> None:
        """Idempotent and monotone, and closed to generations below its fence."""
        if generation >= self.fence and record.epoch > self.facts.committed_epoch:
            self.shown.append(record)


class RecoveryAgainstAModel(RuleBasedStateMachine):
    @initialize(sinks=st.sampled_from([1, 2, 3, 0]), most=st.sampled_from([3, 2, 3, 1]))
    def start(self, sinks: int, most: int) -> None:
        self.sinks = {f"sink{number}": Sink() for number in range(sinks)}
        self.max_retained = most
        self.log = DecisionLog()
        self.history: list[Decision] = []
        self.ancestors: dict[int, set[int]] = {}
        self.damage: dict[int, str] = {}
        self.uncommitted: list[tuple[int, CheckpointCompleted, set[str]]] = []
        self.next_id = 1
        self.is_running = False
        self.is_stuck = False

    @rule(step=STEPS)
    def something_happens(self, step: Step) -> None:
        name, drawn = step
        getattr(self, name)(**drawn)

    # -- a run ------------------------------------------------------------------------------------

    def a_checkpoint_is_completed(self, lagging: set[int], gap: int) -> None:
        """Some sinks commit it at once; the others may do so later."""
        if not self.is_running:
            return
        self.next_id += gap
        parent = self.log.newest
        record = complete(
            self.log, self.next_id, epoch=self.next_id + self.log.generation, max_retained=self.max_retained
        )
        self.next_id += self.log.generation
        self.history.append(record)
        above = set() if parent is None else {*self.ancestors[parent.checkpoint_id], parent.checkpoint_id}
        self.ancestors[record.checkpoint_id] = above
        behind = {f"sink{number}" for number in lagging} & self.sinks.keys()
        self.uncommitted.append((self.log.generation, record, behind))
        for name in self.sinks.keys() - behind:
            self.commit_up_to(name, self.log.generation, record)

    def commit_up_to(self, name: str, generation: int, record: CheckpointCompleted) -> None:
        """A sink commits in order: first whatever this generation still owes it."""
        for owed_by, owed, behind in self.uncommitted:
            if owed_by == generation and owed.epoch <= record.epoch:
                self.sinks[name].commit(owed, generation)
                behind.discard(name)

    def a_lagging_sink_commits(self, number: int) -> None:
        """Perhaps by a run that is taken for dead."""
        if not self.uncommitted:
            return
        generation, record, behind = self.uncommitted[-1 - number % len(self.uncommitted)]
        for name in sorted(behind):
            self.commit_up_to(name, generation, record)

    def the_run_crashes(self, forgets: bool) -> None:
        is_running, self.is_running = self.is_running, False
        if is_running and forgets:
            self.uncommitted = []

    def a_retained_checkpoint_rots(self, number: int, way: str) -> None:
        if self.log.retained:
            self.damage[self.log.retained[-1 - number % len(self.log.retained)]] = way

    def the_user_restores_the_files_from_a_backup(self) -> None:
        self.damage.clear()
        self.is_stuck = False

    # -- recovery ---------------------------------------------------------------------------------

    def a_run_recovers(self) -> None:
        if self.is_running or self.is_stuck:
            return
        decision, asked = self.ask_until_decided()
        # Each checkpoint is examined once, and the sinks are fenced once, at most.
        assert asked <= len(self.log.retained) + 2
        match decision:
            case StartFresh():
                assert not len(self.log)
                self.open_generation(None)
            case StartOver():
                assert len(self.log)
                self.open_generation(None)
            case Restore(checkpoint, skipped):
                self.check_restore(checkpoint, skipped)
                self.open_generation(checkpoint)
            case Refuse():
                self.check_refusal(decision)
                self.is_stuck = True
            case _:
                raise AssertionError(decision)

    def ask_until_decided(self) -> tuple[RecoveryDecision, int]:
        health: dict[int, str | None] = {}
        for asked in range(100):
            facts = Facts(self.log, {name: sink.facts for name, sink in self.sinks.items()}, health)
            with unchanged(facts):
                decision = recover(facts)
            if isinstance(decision, Examine):
                assert decision.checkpoint_id in self.log.retained
                assert decision.checkpoint_id not in health
                health[decision.checkpoint_id] = self.damage.get(decision.checkpoint_id)
            elif isinstance(decision, FenceSinks):
                assert decision.generation == self.log.generation + 1
                assert any(sink.fence < decision.generation for sink in self.sinks.values())
                for sink in self.sinks.values():
                    sink.fence = decision.generation
            else:
                return decision, asked + 1
        raise AssertionError("recovery goes on asking")

    def check_restore(self, restored: CheckpointCompleted, skipped: tuple[int, ...]) -> None:
        lineage = [record.checkpoint_id for record in self.log.lineage()]
        assert restored.checkpoint_id not in self.damage, "it is damaged"
        assert list(skipped) == lineage[: lineage.index(restored.checkpoint_id)], "an intact one was skipped"
        assert all(checkpoint_id in self.damage for checkpoint_id in skipped)
        if skipped:
            assert all(sink.fence > self.log.generation for sink in self.sinks.values())

    def check_refusal(self, refusal: Refuse) -> None:
        """Refused only where there is damage, and it is named with the way out."""
        lineage = [record.checkpoint_id for record in self.log.lineage()]
        assert lineage[0] in self.damage
        assert checkpoint_name(lineage[0]) in refusal.why
        intact = [checkpoint_id for checkpoint_id in lineage if checkpoint_id not in self.damage]
        if intact:
            assert checkpoint_name(intact[0]) in refusal.why
            descended = {*self.ancestors[intact[0]], intact[0]}
            assert any(
                record.checkpoint_id not in descended for sink in self.sinks.values() for record in sink.shown
            ), "no sink has committed past it"
        else:
            assert "backup" in refusal.way_out

    def open_generation(self, base: CheckpointCompleted | None) -> None:
        opening = self.log.opening("run", None if base is None else base.checkpoint_id)
        self.log.append(opening)
        self.history.append(opening)
        self.is_running = True
        if base is not None:
            for sink in self.sinks.values():
                sink.commit(base, opening.generation)

    def a_log_that_lost_its_end_is_found_out_by_the_sinks(self, lost: int) -> None:
        """Tried without effect: nothing is started from what is left where a sink knows of more."""
        log = DecisionLog()
        for record in self.history[:-lost]:
            log.append(record)
        sinks = {name: sink.facts for name, sink in self.sinks.items()}
        health: dict[int, str | None] = dict.fromkeys(log.retained)
        known = 0 if log.newest is None else log.newest.epoch
        decision = recover(Facts(log, sinks, health))
        if any(facts.committed_epoch > known for facts in sinks.values()):
            assert isinstance(decision, Refuse)
        elif log.newest is None:
            assert decision == (StartOver() if len(log) else StartFresh())
        else:
            assert decision == Restore(log.newest)

    @invariant()
    def no_row_is_doubled(self) -> None:
        """What every sink shows lies in the lineage that the pipeline is in, and in order."""
        if not self.is_running:
            return
        newest = self.log.newest
        descended = set() if newest is None else {*self.ancestors[newest.checkpoint_id], newest.checkpoint_id}
        for sink in self.sinks.values():
            shown = [record.checkpoint_id for record in sink.shown]
            assert set(shown) <= descended
            assert shown == sorted(shown)

    @invariant()
    def nothing_starts_from_nothing_once_there_are_checkpoints(self) -> None:
        records = list(self.log)
        if self.log.retained:
            assert not isinstance(records[-1], GenerationOpened) or records[-1].base is not None


TestRecoveryAgainstAModel = RecoveryAgainstAModel.TestCase
TestRecoveryAgainstAModel.settings = search(150, steps=40)
