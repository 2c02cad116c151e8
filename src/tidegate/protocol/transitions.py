"""Transitions as tables: (state, event) → state. What is not in the table is illegal.

The state diagrams in ARCHITECTURE.md are generated from these tables (`./dev docs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from tidegate.errors import InvariantViolation

S = TypeVar("S", bound=Enum)
V = TypeVar("V", bound=Enum)


def step(table: Mapping[tuple[S, V], S], state: S, event: V) -> S:
    """Return the next state, or raise without having changed anything."""
    try:
        return table[state, event]
    except KeyError:
        raise InvariantViolation(f"{event.name} cannot happen in state {state.name}") from None
