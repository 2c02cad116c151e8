"""Public helpers for testing Tidegate, what is built on it, and pipelines.

`run_pipeline` is loaded when it is first used: the simulator knows nothing of Spark, and does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.testing.simulator import Outcome, random_scenario, simulate

if TYPE_CHECKING:
    from tidegate.testing.pipelines.run import run_pipeline

__all__ = ["Outcome", "random_scenario", "run_pipeline", "simulate"]


def __getattr__(name: str) -> object:
    if name != "run_pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tidegate.testing.pipelines.run import run_pipeline

    return run_pipeline
