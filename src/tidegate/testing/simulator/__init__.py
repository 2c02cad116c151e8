"""A deterministic simulator: one seed drives a whole cluster through the protocol that runs pipelines.

The DAG, the rows, several instances that come, find each other, are cut off, leave and die, what they share, which
fails, lags and forgets who is alive, crashes, pauses, changes of leader, queries that die, and a store that fails, is
slow, full, stands still, fails after having written, or says that a slot is taken which is free, are all drawn from the
seed. Checkers, one per concern, watch every step; when the faults have ended, all rows must become visible.
"""

from tidegate.testing.simulator.cluster import Mishaps, Scenario, Together
from tidegate.testing.simulator.dag import Dag, DagBuilder, example_dag, random_dag
from tidegate.testing.simulator.run import Outcome, random_scenario, simulate

__all__ = [
    "Dag",
    "DagBuilder",
    "Mishaps",
    "Outcome",
    "Scenario",
    "Together",
    "example_dag",
    "random_dag",
    "random_scenario",
    "simulate",
]
