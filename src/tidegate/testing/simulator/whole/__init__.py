"""The simulator at its second depth: everything but Spark is what runs.

Each driver process runs whole generations: the real opening, stages, gates, logs, snapshots, restore and cleaning, over
files in memory, with a played Spark and played tables (`tidegate.testing.played`), in simulated time. Drivers take over
from one another, crash between any two calls of the files, pause, and wake up late; or several of them run one pipeline
together, over keys in memory, cut off from these, from the files, or from both.
"""

from tidegate.testing.simulator.whole.cluster import WholeScenario
from tidegate.testing.simulator.whole.run import (
    random_together_scenario,
    random_whole_scenario,
    simulate_together,
    simulate_whole,
)

__all__ = [
    "WholeScenario",
    "random_together_scenario",
    "random_whole_scenario",
    "simulate_together",
    "simulate_whole",
]
