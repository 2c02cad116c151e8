"""Stages as a user would have defined them, for tests that need no more of them than a name."""

from __future__ import annotations

from tidegate.spark.definition import StageDefinition


def stage(name: str) -> StageDefinition:
    def nothing() -> None:
        raise AssertionError("no function is called here")

    return StageDefinition(name, "stage", nothing, (), ())
