"""A deterministic simulator: one seed drives a whole cluster through the protocol that runs pipelines.

The DAG, the rows, the stages over several instances, message delay and loss, crashes, pauses, changes of
leader, and a store that fails, is slow or fails after having written, are all drawn from the seed. Checkers,
one per concern, watch every step; when the faults have ended, all rows must become visible.
"""

from tidegate.testing.simulator.cluster import Scenario
from tidegate.testing.simulator.dag import Dag, DagBuilder, example_dag, random_dag
from tidegate.testing.simulator.run import Outcome, random_scenario, simulate

__all__ = [
    "Dag",
    "DagBuilder",
    "Outcome",
    "Scenario",
    "example_dag",
    "random_dag",
    "random_scenario",
    "simulate",
]
