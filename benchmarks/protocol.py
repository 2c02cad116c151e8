"""The pure protocol: what a message, a poll, a checkpoint and a quorum cost, and how that grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Final

from benchmarks.measure import Benchmark, Case, Derived, Round, Target, WrongWork, cpu_ns
from tidegate.protocol.aligner import Aligner, Cut
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.coordinator import Coordinator, StageReport
from tidegate.protocol.injector import Injector
from tidegate.protocol.messages import Barrier
from tidegate.protocol.quorum import Ack, Member, Quorum, Reached
from tidegate.testing.simulator import simulate

# The work of one measurement at scale 1: tenths of a second each.
_MESSAGES: Final = 80_000
_POLLS: Final = 3_000_000
_REPORTS: Final = 100_000
_ACKS: Final = 100_000
_SEEDS: Final = 60

_SEGMENTS_PER_BARRIER: Final = 4
_SEGMENT_BYTES: Final = 1 << 20

# Over a hundredfold size: above 1 for memory that no longer fits a cache, and below the 2 or 3 of n log n.
_LINEAR: Final = Target(at_most=1.5)

_NOTES: Final = """\
aligner: each on_segment, on_barrier and on_committed is one message, however many inputs a commit moves.
  Per checkpoint every input delivers 4 segments and a barrier, round robin; each round ends in a commit that
  consumes it, and the last of them cuts. The driving loop is counted in.
aligner barriers: nothing but barriers; the last of each checkpoint cuts.
injector poll: a loop of `injector.poll()` with nothing pending, less the same loop with `pass`. What is left
  is the look-up of the method, the call and its work.
coordinator: trigger, a report of each stage with ready_to_decide after it, decide, is_aligned, slot won,
  sinks committed. Reports are made beforehand, with names that are objects of their own, as if decoded.
quorum: made for its members, an ack of each, the outcome asked once. Acks are made beforehand, likewise.
growth: the cost per stage or instance at the larger size over that at the smaller, within each round. Over
  the whole range up to 1.5 counts as linear: n log n would be 2 (coordinator) or 3 (quorum).
simulator: the same seeds in each round, from 0 on, on one core."""


def measure_aligner(inputs: int, segments: int, messages: int) -> float:
    """Messages per second through one aligner, over about that many of them."""
    names = [f"input-{number}" for number in range(inputs)]
    per_checkpoint = inputs * (segments + 1) + segments
    checkpoints = max(1, messages // per_checkpoint)
    aligner = Aligner("stage", names, AlignmentConfig())

    def work() -> None:
        on_segment, on_barrier, on_committed = aligner.on_segment, aligner.on_barrier, aligner.on_committed
        sequence = 0
        for checkpoint_id in range(1, checkpoints + 1):
            barrier = Barrier(checkpoint_id, checkpoint_id)
            for _ in range(segments - 1):
                sequence += 1
                for name in names:
                    on_segment(name, sequence, _SEGMENT_BYTES)
                on_committed(sequence, dict.fromkeys(names, sequence), checkpoint_id)
            if segments:
                sequence += 1
                for name in names:
                    on_segment(name, sequence, _SEGMENT_BYTES)
                    on_barrier(name, barrier, checkpoint_id)
                actions = on_committed(sequence, dict.fromkeys(names, sequence), checkpoint_id)
            else:
                for name in names:
                    actions = on_barrier(name, barrier, checkpoint_id)
            if not any(isinstance(action, Cut) for action in actions):
                raise WrongWork(f"checkpoint {checkpoint_id} was not cut")

    return checkpoints * per_checkpoint * 1e9 / cpu_ns(work)


def measure_poll(polls: int) -> float:
    """Nanoseconds of one poll with nothing pending."""
    injector = Injector("source")

    def poll() -> None:
        for _ in repeat(None, polls):
            injector.poll()

    def bare_loop() -> None:
        for _ in repeat(None, polls):
            pass

    return (cpu_ns(poll) - cpu_ns(bare_loop)) / polls


def measure_coordinator(stages: int, reports: int) -> float:
    """Microseconds of one whole checkpoint, over about that many reports."""
    checkpoints = max(1, reports // stages)
    coordinator = Coordinator(
        [_name("stage", number) for number in range(stages)], CheckpointConfig(), generation=1, now_ms=0
    )
    reported = [
        [
            StageReport(_name("stage", number), checkpoint_id, 1, 1, checkpoint_id, {"input": checkpoint_id})
            for number in range(stages)
        ]
        for checkpoint_id in range(1, checkpoints + 1)
    ]

    def work() -> None:
        for of_checkpoint in reported:
            checkpoint_id = coordinator.trigger(now_ms=0).barrier.checkpoint_id
            for report in of_checkpoint:
                coordinator.on_report(report)
                ready = coordinator.ready_to_decide()
            if ready is None or not coordinator.decide(checkpoint_id).is_aligned:
                raise WrongWork(f"checkpoint {checkpoint_id} was not prepared, or not aligned")
            coordinator.on_slot_won(checkpoint_id, now_ms=0)
            coordinator.on_sinks_committed(checkpoint_id)

    return cpu_ns(work) / checkpoints / 1e3


def measure_quorum(instances: int, acks: int) -> float:
    """Microseconds of one whole quorum, over about that many acks."""
    quorums = max(1, acks // instances)
    members = [Member(_name("instance", number)) for number in range(instances)]
    acknowledged = [
        [Ack(_name("instance", number), checkpoint_id, 1, 1, watermark_ms=number) for number in range(instances)]
        for checkpoint_id in range(1, quorums + 1)
    ]

    def work() -> None:
        for checkpoint_id, of_checkpoint in enumerate(acknowledged, 1):
            quorum = Quorum(Barrier(checkpoint_id, checkpoint_id), 1, 1, members, deadline_ms=1)
            for ack in of_checkpoint:
                quorum.on_ack(ack)
            if quorum.on_time(now_ms=0) != Reached(0):
                raise WrongWork(f"the quorum of checkpoint {checkpoint_id} was not reached")

    return cpu_ns(work) / quorums / 1e3


def measure_simulator(seeds: int) -> float:
    """Seeds per minute."""

    def work() -> None:
        for seed in range(seeds):
            outcome = simulate(seed)
            if outcome.failure is not None:
                raise WrongWork(f"{outcome.failure}\nreplay it with: {outcome.replay}")

    return seeds * 60e9 / cpu_ns(work)


def _name(kind: str, number: int) -> str:
    """Names as long as people's, each call another object: a look-up compares them by content."""
    return f"{kind}-{number:06d}"


def _cases(scale: float) -> list[Case | Derived]:
    def work(amount: int) -> int:
        return max(1, round(amount * scale))

    def aligner(name: str, inputs: int, segments: int, target: Target | None = None) -> Case:
        measure = partial(measure_aligner, inputs, segments, work(_MESSAGES))
        return Case(name, {"inputs": inputs}, "messages/s", measure, target)

    return [
        aligner("aligner", 2, _SEGMENTS_PER_BARRIER),
        aligner("aligner", 100, _SEGMENTS_PER_BARRIER, Target(at_least=200_000)),
        aligner("aligner", 1_000, _SEGMENTS_PER_BARRIER),
        aligner("aligner barriers", 100, 0, Target(at_least=200_000)),
        Case("injector poll", {}, "ns", partial(measure_poll, work(_POLLS)), Target(at_most=150)),
        *_growing("coordinator", "stage", (100, 1_000, 10_000), measure_coordinator, work(_REPORTS)),
        *_growing("quorum", "instance", (10, 100, 1_000), measure_quorum, work(_ACKS)),
        Case("simulator", {}, "seeds/min", partial(measure_simulator, work(_SEEDS)), Target(at_least=1_000)),
    ]


def _growing(
    name: str, part: str, sizes: Sequence[int], measure: Callable[[int, int], float], amount: int
) -> list[Case | Derived]:
    """The time of the whole at each size, the same per part, and how the latter grows with the size."""
    wholes = {size: Case(name, {f"{part}s": size}, "µs", partial(measure, size, amount)) for size in sizes}

    def per_part(size: int) -> Callable[[Round], float]:
        return lambda values: values[wholes[size]] * 1e3 / size

    def ratio(smaller: int, larger: int, target: Target | None = None) -> Derived:
        def value(values: Round) -> float:
            return per_part(larger)(values) / per_part(smaller)(values)

        return Derived(f"{name} growth", {"from": smaller, "to": larger}, "ratio", value, target)

    smallest, middle, largest = sizes
    return [
        *wholes.values(),
        *(Derived(f"{name} per {part}", {f"{part}s": size}, "ns", per_part(size)) for size in sizes),
        ratio(smallest, middle),
        ratio(middle, largest),
        ratio(smallest, largest, _LINEAR),
    ]


BENCHMARK: Final = Benchmark("the pure protocol and its simulator, without Spark", _NOTES, 7, _cases)
