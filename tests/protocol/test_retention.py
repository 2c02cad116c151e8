from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.logs import complete, log_with, open_generation, propose
from tests.protocol.search import Step, search, steps
from tests.protocol.unchanged import unchanged
from tidegate.protocol.aligner import InFlight
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.coordinator import StageReport
from tidegate.protocol.decision_log import CheckpointCompleted, Decision, DecisionLog
from tidegate.protocol.retention import PARTS, StoredFile, content_of, deletable, retained_after

NOTHING: frozenset[str] = frozenset()

which = st.sampled_from([0, 0, 0, 1, 1, 2])  # counted back from the newest run
shares = st.integers(0, 7)
coins = st.booleans()
STEPS = steps(
    (1, "a_run_takes_over", {}),
    (4, "a_run_writes", {"number": which, "count": st.integers(1, 3)}),
    (2, "a_run_is_done_with_some_of_its_files", {"number": which, "share": shares}),
    (
        5,
        "the_newest_run_claims_a_slot",
        {
            "share": shares,
            "also_decided": coins,
            "is_idle": coins,
            "is_aligned": st.sampled_from([True, False, False, False]),
            "at_ms": st.integers(0, 200),
        },
    ),
    (2, "a_run_learns_that_it_has_won", {"number": which}),
    (4, "a_run_cleans_up", {"number": which, "unknown": st.sets(st.integers(0, 9)), "is_whole": coins}),
)


class TestWhatIsRetained:
    @pytest.mark.parametrize(
        ("most", "retained"), [(1, (4,)), (2, (3, 4)), (3, (2, 3, 4)), (4, (1, 2, 3, 4)), (9, (1, 2, 3, 4))]
    )
    def test_the_new_one_and_the_newest_before_it(self, most: int, retained: tuple[int, ...]) -> None:
        log = log_with(1, 2, 3)
        with unchanged(log):
            assert retained_after(log, 4, CheckpointConfig(max_retained=most)) == retained

    def test_the_first_checkpoint_retains_itself(self) -> None:
        assert retained_after(log_with(), 1, CheckpointConfig(max_retained=3)) == (1,)

    def test_one_that_was_skipped_as_damaged_is_not_retained_further(self) -> None:
        log = log_with(1, 2)
        open_generation(log, base=1)
        assert retained_after(log, 3, CheckpointConfig(max_retained=3)) == (1, 3)

    def test_what_was_dropped_does_not_come_back(self) -> None:
        log = log_with(1, 2, 3, max_retained=2)
        assert retained_after(log, 4, CheckpointConfig(max_retained=4)) == (2, 3, 4)

    def test_checkpoints_that_failed_push_no_good_one_out(self) -> None:
        log = log_with(1)
        # Whatever was triggered and aborted between 1 and 90 left no record.
        assert retained_after(log, 90, CheckpointConfig(max_retained=2)) == (1, 90)
        assert log.retained == (1,)


HOUR = 3_600_000
A_DAY = CheckpointConfig(max_retained=3, retain_ms=24 * HOUR)


class TestWhatIsRetainedWhileNothingChanges:
    def test_an_idle_checkpoint_takes_the_place_of_the_one_before_it(self) -> None:
        log = log_with(1, 2)
        complete(log, 3, content="c")
        for checkpoint_id in range(4, 40):
            assert complete(log, checkpoint_id, content="c").retained == (1, 2, checkpoint_id)

    def test_what_is_not_known_is_not_the_same(self) -> None:
        log = log_with(1, 2, 3)
        assert complete(log, 4).retained == (2, 3, 4)

    def test_one_that_is_like_an_older_one_is_not_idle(self) -> None:
        """What the one between has shown is not undone."""
        log = log_with()
        for checkpoint_id, content in enumerate("aba", 1):
            complete(log, checkpoint_id, content=content)
        assert log.retained == (1, 2, 3)

    @pytest.mark.parametrize(
        "changed",
        [
            {"cut": 8},
            {"positions": {"a": 4}},
            {"output_sequence": 6},
            {"source_position": "10"},
            {"in_flight": (InFlight("a", 3, 4, 100),)},
            {"stage": "other"},
        ],
        ids=lambda changed: str(next(iter(changed))),
    )
    def test_a_stage_that_has_come_further_is_a_change(self, changed: dict[str, Any]) -> None:
        report = StageReport("s", 1, 1, 1, 7, positions={"a": 3}, output_sequence=5, source_position="9")
        other = msgspec.structs.replace(report, checkpoint_id=2, attempt=2, generation=2, files=("b",), new_bytes=9)
        assert content_of([report]) == content_of([other])
        assert content_of([report]) != content_of([msgspec.structs.replace(report, **changed)])

    def test_in_which_order_stages_report_does_not_count(self) -> None:
        reports = [StageReport(name, 1, 1, 1, 7) for name in "ab"]
        assert content_of(reports) == content_of(reversed(reports))


class TestWhatIsRetainedWhereAllAreUnaligned:
    def test_the_newest_aligned_one_stays_however_many_follow_it(self) -> None:
        log = log_with(1, 2)
        for checkpoint_id in range(3, 40):
            complete(log, checkpoint_id, aligned=False, content=str(checkpoint_id))
        assert log.retained == (2, 37, 38, 39)
        assert complete(log, 40).retained == (38, 39, 40)

    def test_one_that_is_retained_anyway_is_enough(self) -> None:
        log = log_with(1, 2, 3)
        assert complete(log, 4, aligned=False).retained == (2, 3, 4)

    def test_one_of_another_lineage_does_not_count(self) -> None:
        log = log_with(1)
        complete(log, 2, aligned=False)
        complete(log, 3)
        open_generation(log, base=2)
        assert complete(log, 4, aligned=False, max_retained=1).retained == (1, 4)

    def test_one_that_lies_between_those_kept_by_time_has_its_place(self) -> None:
        log = log_with()
        for checkpoint_id, at_ms in enumerate((0, 1, HOUR, 2 * HOUR), 1):
            aligned = checkpoint_id == 2
            complete(log, checkpoint_id, max_retained=1, retain_ms=24 * HOUR, aligned=aligned, at_ms=at_ms)
        assert log.retained == (1, 2, 3, 4)


class TestWhatIsRetainedByTime:
    def taken(self, config: CheckpointConfig, times: Iterable[int]) -> tuple[DecisionLog, dict[int, int]]:
        log = log_with()
        at = dict(enumerate(times, 1))
        for checkpoint_id, at_ms in at.items():
            complete(
                log,
                checkpoint_id,
                at_ms=at_ms,
                content=str(checkpoint_id),
                max_retained=config.max_retained,
                retain_ms=config.retain_ms,
            )
        return log, at

    def test_the_newest_and_one_of_every_hour_of_a_day(self) -> None:
        log, at = self.taken(A_DAY, range(0, 50 * HOUR, 10 * 60_000))
        ages = [(max(at.values()) - at[each]) / HOUR for each in reversed(log.retained)]
        assert ages[:3] == [0, 1 / 6, 1 / 3]
        assert [round(ages[index + 1] - ages[index], 3) for index in range(4, len(ages) - 1)] == [1.0] * (len(ages) - 5)
        assert 23 <= ages[-1] < 24

    def test_all_where_they_are_few(self) -> None:
        log, at = self.taken(A_DAY, range(0, 20 * HOUR, HOUR))
        assert log.retained == tuple(at)

    def test_for_nothing_no_time(self) -> None:
        log, at = self.taken(CheckpointConfig(max_retained=2), range(0, 20 * HOUR, HOUR))
        assert log.retained == tuple(at)[-2:]

    @pytest.mark.parametrize("jump", [10**15, -(10**15)])
    def test_a_clock_that_jumps_takes_none_of_the_newest(self, jump: int) -> None:
        log, at = self.taken(A_DAY, [*range(0, 20 * HOUR, HOUR), 20 * HOUR + jump])
        assert log.retained[-3:] == tuple(at)[-3:]

    def test_a_clock_that_jumps_all_the_time_lets_nothing_grow(self) -> None:
        log, _ = self.taken(A_DAY, [(number * 7919 * HOUR) % 10**13 for number in range(500)])
        assert len(log.retained) <= A_DAY.max_retained + PARTS + 1
        assert len(list(log)) <= 9


def files(*paths: str, generation: int = 1) -> list[StoredFile]:
    return [StoredFile(path, generation) for path in paths]


class TestWhatMayBeDeleted:
    REFERENCES: Final = {1: frozenset({"a", "shared"}), 2: frozenset({"b", "shared"})}

    def test_a_file_that_nothing_refers_to_is_deleted(self) -> None:
        stored = files("a", "b", "orphan", "shared")
        assert deletable([1, 2], 1, self.REFERENCES, stored) == files("orphan")

    def test_what_a_checkpoint_alone_referred_to_goes_with_it_and_what_is_shared_stays(self) -> None:
        assert deletable([2], 1, self.REFERENCES, files("a", "b", "shared")) == files("a")

    def test_a_file_of_a_newer_generation_is_not_deleted(self) -> None:
        stored = [StoredFile("old", 1), StoredFile("own", 2), StoredFile("newer", 3)]
        found = deletable([1, 2], 2, self.REFERENCES, stored)
        assert found == [StoredFile("old", 1), StoredFile("own", 2)]

    @pytest.mark.parametrize("unknown", [1, 2])
    def test_if_the_references_of_one_retained_checkpoint_are_not_known_nothing_is_deleted(self, unknown: int) -> None:
        known = {number: paths for number, paths in self.REFERENCES.items() if number != unknown}
        assert deletable([1, 2], 1, known, files("orphan")) == []

    def test_the_references_of_one_that_is_not_retained_need_not_be_known_and_protect_nothing(self) -> None:
        assert deletable([2], 1, {2: frozenset({"b"})}, files("a", "b")) == files("a")
        assert deletable([2], 1, self.REFERENCES, files("a", "b")) == files("a")

    def test_one_that_was_skipped_as_damaged_keeps_its_files_while_it_is_retained(self) -> None:
        log = log_with(1, 2)
        open_generation(log, base=1)
        assert deletable(log.retained, 2, self.REFERENCES, files("a", "b", "shared")) == []
        complete(log, 3)
        references = self.REFERENCES | {3: frozenset({"a"})}
        assert deletable(log.retained, 2, references, files("a", "b", "shared")) == files("b")

    def test_asking_changes_nothing(self) -> None:
        stored = files("orphan")
        with unchanged(self.REFERENCES, stored):
            deletable([1, 2], 1, self.REFERENCES, stored)


class Run:
    """A run with the log as it knows it. One that was superseded may live on and go on cleaning up."""

    def __init__(self, generation: int, log: DecisionLog) -> None:
        self.generation = generation
        self.log = log
        self.own_files: set[str] = set()
        self.under_way: frozenset[str] = NOTHING
        self.undecided: CheckpointCompleted | None = None

    @property
    def in_use(self) -> frozenset[str]:
        return self.under_way | self.own_files


class RetentionAgainstAModel(RuleBasedStateMachine):
    """Several runs write, complete and clean up. The log in full is `history`."""

    @initialize(most=st.integers(1, 3), retain_ms=st.sampled_from([0, 50]))
    def start(self, most: int, retain_ms: int) -> None:
        self.max_retained = most
        self.retain_ms = retain_ms
        self.contents: dict[int, str] = {}
        self.history: list[Decision] = []
        self.stored: dict[str, int] = {}
        self.references: dict[int, frozenset[str]] = {}
        self.next_id = 1
        self.runs: list[Run] = []
        self.a_run_takes_over()

    @rule(step=STEPS)
    def something_happens(self, step: Step) -> None:
        name, drawn = step
        getattr(self, name)(**drawn)

    def read(self) -> DecisionLog:
        return DecisionLog.from_records(self.history)

    def a_run_takes_over(self) -> None:
        if len(self.runs) == 4:
            return
        log = self.read()
        opening = log.opening("run", None if log.newest is None else log.newest.checkpoint_id)
        self.history.append(opening)
        log.append(opening)
        self.runs.append(Run(opening.generation, log))

    def a_run_writes(self, number: int, count: int) -> None:
        run = self.runs[-1 - number % len(self.runs)]
        for _ in range(count):
            path = f"g{run.generation}/{len(self.stored)}-{self.next_id}"
            self.next_id += 1
            self.stored[path] = run.generation
            run.own_files.add(path)

    def a_run_is_done_with_some_of_its_files(self, number: int, share: int) -> None:
        run = self.runs[-1 - number % len(self.runs)]
        run.own_files = {path for path in run.own_files if hash_of(path) % 8 >= share}

    def the_newest_run_claims_a_slot(
        self, share: int, also_decided: bool, is_idle: bool, is_aligned: bool, at_ms: int
    ) -> None:
        """The checkpoint refers to files of its run and of its parent. Its outcome may not be known yet."""
        run = self.runs[-1]
        if run.undecided is not None:
            return
        parent = run.log.newest
        candidates = run.own_files | (NOTHING if parent is None else self.references[parent.checkpoint_id])
        run.under_way = frozenset(path for path in candidates if hash_of(path) % 8 >= share)
        self.next_id += 1
        content = str(self.next_id)
        if is_idle and parent is not None:
            content, is_aligned = self.contents[parent.checkpoint_id], parent.aligned
        run.undecided = propose(
            run.log,
            self.next_id,
            generation=run.generation,
            max_retained=self.max_retained,
            retain_ms=self.retain_ms,
            aligned=is_aligned,
            content=content,
            at_ms=at_ms,
        )
        self.contents[self.next_id] = content
        self.references[self.next_id] = run.under_way
        self.history.append(run.undecided)
        if also_decided:
            self.a_run_learns_that_it_has_won(0)

    def a_run_learns_that_it_has_won(self, number: int) -> None:
        run = self.runs[-1 - number % len(self.runs)]
        if run.undecided is not None:
            run.log.append(run.undecided)
            run.undecided = None
            run.under_way = NOTHING

    def a_run_cleans_up(self, number: int, unknown: set[int], is_whole: bool) -> None:
        run = self.runs[-1 - number % len(self.runs)]
        hidden = set() if is_whole else {each for each in run.log.retained if each % 10 in unknown}
        known = {each: paths for each, paths in self.references.items() if each not in hidden}
        stored = [StoredFile(path, generation) for path, generation in self.stored.items() if path not in run.in_use]
        unneeded = deletable(run.log.retained, run.generation, known, stored)
        assert not (hidden and unneeded)
        needed = run.in_use.union(*(self.references[each] for each in run.log.retained))
        for file in unneeded:
            assert file.generation <= run.generation
            assert file.path not in run.in_use
            del self.stored[file.path]
        if not hidden:
            left = {path for path, generation in self.stored.items() if generation <= run.generation}
            assert left <= needed, "garbage was left"

    @invariant()
    def the_newest_checkpoint_is_retained(self) -> None:
        log = self.read()
        assert log.newest is None or log.newest.checkpoint_id in log.retained
        assert len(log.retained) <= self.max_retained + 1 + (PARTS + 1 if self.retain_ms else 0)

    @invariant()
    def the_newest_that_differ_are_retained_whatever_the_clock_says(self) -> None:
        """Of those that follow one another without a change the last."""
        log = self.read()
        if log.newest is None:
            return
        by_id = {each.checkpoint_id: each for each in self.history if isinstance(each, CheckpointCompleted)}
        current: CheckpointCompleted | None = log.newest
        different: list[int] = []
        last = None
        while current is not None and len(different) < self.max_retained:
            if current.content != last:
                different.append(current.checkpoint_id)
            last = current.content
            current = None if current.parent is None else by_id[current.parent]
        assert set(different) <= set(log.retained)

    @invariant()
    def the_newest_aligned_one_is_retained(self) -> None:
        log = self.read()
        by_id = {each.checkpoint_id: each for each in self.history if isinstance(each, CheckpointCompleted)}
        current: CheckpointCompleted | None = log.newest
        while current is not None and not current.aligned:
            current = None if current.parent is None else by_id[current.parent]
        assert current is None or current.checkpoint_id in log.retained

    @invariant()
    def every_file_of_every_retained_checkpoint_is_there(self) -> None:
        for checkpoint_id in self.read().retained:
            assert self.references[checkpoint_id] <= self.stored.keys()

    @invariant()
    def every_file_that_the_newest_run_needs_is_there(self) -> None:
        assert self.runs[-1].in_use <= self.stored.keys()


def hash_of(path: str) -> int:
    return sum(path.encode())


TestRetentionAgainstAModel = RetentionAgainstAModel.TestCase
TestRetentionAgainstAModel.settings = search(100, steps=40)
