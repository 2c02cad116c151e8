"""Public helpers for testing Tidegate, and what is built on it."""

from tidegate.testing.simulator import Outcome, random_scenario, simulate

__all__ = ["Outcome", "random_scenario", "simulate"]
