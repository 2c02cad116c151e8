"""Scenarios that bring out a defect sooner than the random ones. Each varies the random one of its seed."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from tidegate.testing.simulator import Dag, DagBuilder, Mishaps, Scenario, Together, random_scenario
from tidegate.testing.simulator.world import Faults

AT_ONCE: Final = Together(at_first=1, grace_ms=0)
PATIENT: Final = {"tolerable_failures": 10**6}


def _varied(seed: int, dag: Dag | None = None, *, config: dict[str, Any], **changes: Any) -> Scenario:
    scenario = random_scenario(seed, dag)
    return replace(scenario, config=replace(scenario.config, **config), **changes)


def _source_and_sink() -> Dag:
    return DagBuilder().source("source").stage("sink", "source", is_sink=True).build()


def quiet(seed: int) -> Scenario:
    """One process, two stages, no faults."""
    config = {"max_concurrent": 1, "interval_ms": 60}
    return _varied(
        seed,
        _source_and_sink(),
        config=config,
        rows={"source": 250},
        instances=1,
        faults=Faults(),
        mishaps=Mishaps(),
    )


def soon_idle(seed: int) -> Scenario:
    """A row comes now and then, and checkpoints go on, by clocks that jump."""
    scenario = quiet(seed)
    config = replace(scenario.config, interval_ms=30, max_retained=3, retain_ms=300)
    return replace(scenario, config=config, rows={"source": 12})


def many_unaligned(seed: int) -> Scenario:
    """Three checkpoints at a time, each cut at once: late barriers of one meet the first of the next."""
    alignment = replace(random_scenario(seed).config.alignment, unaligned="always", max_inflight_bytes=1_000_000)
    config = {"max_concurrent": 3, "interval_ms": 20, "alignment": alignment}
    return _varied(seed, config=config)


def many_at_a_time(seed: int) -> Scenario:
    """Three checkpoints at a time, triggered faster than their ids are marked."""
    return _varied(seed, config={"max_concurrent": 3, "interval_ms": 10})


def slow_store(seed: int) -> Scenario:
    """Deciding takes longer than a checkpoint's timeout, now and then."""
    return _varied(seed, config={}, faults=Faults(store_is_slow=0.3))


def answers_lost(seed: int) -> Scenario:
    """The store does what it is asked to do, and fails to say so."""
    return _varied(seed, config={}, faults=Faults(store_fails_after_writing=0.2))


def failing_store(seed: int) -> Scenario:
    """Some snapshots cannot be stored in any of the tries."""
    return _varied(seed, config={}, faults=Faults(store_fails=0.5))


def many_elections(seed: int) -> Scenario:
    """An old leader goes on deciding and committing while a new one recovers."""
    return _varied(seed, config={}, mishaps=Mishaps(spurious_elections=20), instances=3, together=AT_ONCE)


def slow_recovery(seed: int) -> Scenario:
    """An old leader goes on deciding and committing while a new one waits for the store."""
    config = {"interval_ms": 10, "min_pause_ms": 0}
    mishaps = Mishaps(spurious_elections=10)
    return _varied(seed, _source_and_sink(), config=config, mishaps=mishaps, faults=Faults(store_is_slow=0.2))


def messages_lost(seed: int) -> Scenario:
    """Reports arrive, and the acks behind them do not."""
    return _varied(seed, config={}, mishaps=Mishaps(), instances=3, faults=Faults(lose_message=0.4))


def opened_at_once(seed: int) -> Scenario:
    """Many want to open the first generation."""
    return _varied(
        seed,
        config={},
        mishaps=Mishaps(spurious_elections=12),
        instances=3,
        faults=Faults(store_is_slow=0.4),
        fault_phase_ms=600,
        together=AT_ONCE,
    )


def only_checkpoint_damaged(seed: int) -> Scenario:
    """One checkpoint is retained, and a file of it is lost."""
    return _varied(seed, config={"max_retained": 1}, mishaps=Mishaps(damages=1))


def power_lost(seed: int) -> Scenario:
    """Everything goes down three times, while a record is being written."""
    return _varied(seed, config={}, mishaps=Mishaps(power_losses=3))


def crashes_unnoticed(seed: int) -> Scenario:
    """Messages are lost, so a leader may not know that a crashed process had started its stages."""
    return _varied(
        seed,
        config={},
        instances=3,
        fault_phase_ms=4_000,
        faults=Faults(lose_message=0.75),
        mishaps=Mishaps(crashes=15),
    )


def leaders_asleep(seed: int) -> Scenario:
    """Claims under way for so long that the log is trimmed past their slot before they take effect."""
    config = {"max_retained": 1, "max_concurrent": 1, "interval_ms": 10, "min_pause_ms": 0, "timeout_ms": 500}
    return _varied(
        seed,
        _source_and_sink(),
        config={**config, "incremental": False},
        rows={"source": 20},
        instances=4,
        fault_phase_ms=8_000,
        faults=Faults(store_is_slow=0.04),
        mishaps=Mishaps(spurious_elections=40),
        together=AT_ONCE,
    )


def drained(seed: int) -> Scenario:
    """Somebody stops the pipeline, now and then in vain."""
    return _varied(seed, config={}, mishaps=Mishaps(drains=3))


def three_instances(seed: int) -> Scenario:
    """Three that are there from the start, and lose sight of each other now and then."""
    faults = Faults(lose_message=0.1, kv_lags=0.2, lose_notice=0.2, repeats=0.2)
    mishaps = Mishaps(spurious_elections=4, cut_offs=2)
    return _varied(seed, config={}, instances=3, faults=faults, mishaps=mishaps, together=Together(at_first=3))


def leaders_crash(seed: int) -> Scenario:
    """Processes come and go, and who leads with them."""
    return _varied(seed, config={}, instances=2, faults=Faults(), mishaps=Mishaps(crashes=6, deaths=1))


def members_die(seed: int) -> Scenario:
    """One of three is gone for good."""
    together = Together(at_first=3, grace_ms=200)
    return _varied(seed, config={}, instances=3, faults=Faults(), mishaps=Mishaps(deaths=2), together=together)


def members_expire(seed: int) -> Scenario:
    """Processes are taken for dead that are not. No failure of a checkpoint leads to a restart."""
    return _varied(seed, config=PATIENT, instances=2, faults=Faults(), mishaps=Mishaps(early_expiries=8))


def members_fail(seed: int) -> Scenario:
    """Queries die in processes that do not lead."""
    mishaps = Mishaps(dead_queries=6)
    return _varied(seed, config={}, instances=3, faults=Faults(), mishaps=mishaps, together=Together(at_first=3))


def leaders_blink(seed: int) -> Scenario:
    """Somebody does not see who leads, or the leader a member, for a moment."""
    together = Together(at_first=3, grace_ms=250)
    faults = Faults(kv_lags=0.3)
    return _varied(
        seed, config={}, instances=3, faults=faults, mishaps=Mishaps(spurious_elections=6, blinks=8), together=together
    )


def writes_late(seed: int) -> Scenario:
    """What is written takes effect later, or fails, or both. No failure of a checkpoint leads to a restart."""
    faults = Faults(kv_fails=0.35, kv_lags=0.2)
    return _varied(seed, config=PATIENT, instances=3, faults=faults, mishaps=Mishaps(), together=Together(at_first=3))


def slow_to_hear(seed: int) -> Scenario:
    """Old leaders go on, and members hear of the new ones late."""
    faults = Faults(lose_message=0.5, kv_lags=0.3)
    mishaps = Mishaps(spurious_elections=12)
    return _varied(seed, config={}, instances=3, faults=faults, mishaps=mishaps, together=Together(at_first=3))
