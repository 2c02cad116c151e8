"""Scenarios that bring out a defect sooner than the random ones. Each varies the random one of its seed."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tidegate.testing.simulator import Dag, DagBuilder, Mishaps, Scenario, random_scenario
from tidegate.testing.simulator.world import Faults


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
    return _varied(seed, config={}, mishaps=Mishaps(spurious_elections=20), instances=3)


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
    mishaps = Mishaps(spurious_elections=20)
    return _varied(seed, config={}, mishaps=mishaps, instances=3, faults=Faults(store_is_slow=0.6), fault_phase_ms=400)


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
    )


def drained(seed: int) -> Scenario:
    """Somebody stops the pipeline, now and then in vain."""
    return _varied(seed, config={}, mishaps=Mishaps(drains=3))
