"""Every mutant is caught by the one that is there for it, and there is no checker that catches none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.mutants.cluster_mutants import CLUSTER_DEFECTS, MISTAKEN
from tests.mutants.files_mutants import FILES_DEFECTS
from tests.mutants.flow_mutants import FLOW_DEFECTS
from tests.mutants.kv_mutants import KV_DEFECTS
from tests.mutants.mutants import SEED_DEFECTS
from tests.mutants.mutation import Edit, Mutant, Property, Section, Simulated, first_seed_caught, rewrite
from tests.mutants.own_mutants import OWN_DEFECTS
from tidegate.testing.simulator import Scenario, checkers, random_scenario, simulate
from tidegate.testing.simulator.cluster import Cluster
from tidegate.testing.simulator.query import SimulatedQuery

MUTANTS = (*SEED_DEFECTS, *FLOW_DEFECTS, *OWN_DEFECTS, *FILES_DEFECTS, *KV_DEFECTS, *CLUSTER_DEFECTS)
BY_SIMULATOR = [mutant.caught_by for mutant in MUTANTS if isinstance(mutant.caught_by, Simulated)]
BY_PROPERTY = [mutant.caught_by for mutant in MUTANTS if not isinstance(mutant.caught_by, Simulated)]


def name_of(value: object) -> str:
    return str(getattr(value, "name", "") or getattr(value, "__name__", value))


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_every_mutant_is_caught(mutant: Mutant) -> None:
    expected = mutant.caught_by
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.put_back(monkeypatch)
        if not isinstance(expected, Simulated):
            with pytest.raises(AssertionError):
                expected()
            return
        seed = first_seed_caught(expected)
    assert seed is not None, f"{expected.checker} found nothing in {expected.seeds} seeds"
    assert simulate(seed, expected.scenario(seed)).failure is None, f"seed {seed} fails without the mutant"


@pytest.mark.slow
@pytest.mark.soak  # it takes long; leases that are wrong are in CI without being put there
@pytest.mark.parametrize("mutant", MISTAKEN, ids=name_of)
def test_what_an_instance_believes_wrongly_costs_no_row(mutant: Mutant) -> None:
    """It may cost all progress: the log decides what counts, and no lease does."""
    by = mutant.caught_by
    assert isinstance(by, Simulated)
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.put_back(monkeypatch)
        found = {simulate(seed, by.scenario(seed)).checker for seed in range(by.seeds)}
    assert found <= {None, "Liveness"}


@pytest.mark.parametrize("holds", dict.fromkeys(BY_PROPERTY), ids=name_of)
def test_every_property_holds_without_a_mutant(holds: Property) -> None:
    holds()


@pytest.mark.parametrize("scenario", dict.fromkeys(by.scenario for by in BY_SIMULATOR), ids=name_of)
def test_every_scenario_passes_without_a_mutant(scenario: Callable[[int], Scenario]) -> None:
    for seed in range(10):
        assert simulate(seed, scenario(seed)).failure is None


def test_no_mutant_edits_what_is_only_played() -> None:
    with pytest.raises(AssertionError, match="does not run a pipeline"):
        rewrite(Edit(SimulatedQuery.begin, "channel", "nothing"))


def test_every_checker_catches_a_mutant() -> None:
    installed = vars(Cluster(random_scenario(0), 0).checkers).values()
    names = {type(checker).__name__ for checker in installed if type(checker).__module__ == checkers.__name__}
    names |= {"DecisionLog", "Liveness", "Patience", "Protocol"}  # verdicts that need no class of their own
    assert names == {by.checker for by in BY_SIMULATOR}


def test_every_clause_of_the_seeds_defects_has_a_mutant() -> None:
    assert Counter(mutant.section for mutant in SEED_DEFECTS) == {
        Section.ALIGNER: 9,
        Section.COORDINATOR: 9,
        Section.INJECTOR: 4,
        Section.UNALIGNED: 9,
        Section.CLUSTER: 9,
        Section.AROUND: 4,
    }
