"""Every defect of what runs around the choreography is caught where all of it is simulated."""

from __future__ import annotations

import pytest

from tests.mutants.together_mutants import TOGETHER_DEFECTS
from tests.mutants.whole_mutants import WHOLE_DEFECTS, WholeMutant
from tidegate.testing.simulator.whole import simulate_whole


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("mutant", WHOLE_DEFECTS, ids=lambda mutant: mutant.name)
def test_every_whole_mutant_is_caught(mutant: WholeMutant) -> None:
    check_caught(mutant)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("mutant", TOGETHER_DEFECTS, ids=lambda mutant: mutant.name)
def test_every_mutant_of_instances_is_caught(mutant: WholeMutant) -> None:
    check_caught(mutant)


def check_caught(mutant: WholeMutant) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.put_back(monkeypatch)
        seeds = range(mutant.seeds)
        caught = next((s for s in seeds if simulate_whole(s, mutant.scenario(s)).checker == mutant.checker), None)
    assert caught is not None, f"{mutant.checker} found nothing in {mutant.seeds} seeds"
    assert simulate_whole(caught, mutant.scenario(caught)).failure is None, f"seed {caught} fails without the mutant"
