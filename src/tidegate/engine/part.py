"""The part that a process has in a generation: which queries it runs, who runs the others, and whether it leads."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidegate.cluster.exchange import Exchange


class Part(msgspec.Struct, frozen=True):
    """`placed`: which queries each instance runs; empty: all of them are run here, and nobody else has a part in it."""

    instance: str = "local"
    incarnation: str = ""
    leads: bool = True
    placed: Mapping[str, tuple[str, ...]] = {}
    incarnations: Mapping[str, str] = {}
    """Of those that have a part in it."""
    exchange: Exchange | None = None
    tell_every_ms: int = 50
    """See `Pace`."""
    tell_status_every_ms: int = 250

    def runs(self, query: str) -> bool:
        return not self.placed or query in self.placed.get(self.instance, ())

    def runs_at(self, query: str) -> str:
        """The instance that runs a query."""
        return next((name for name, queries in self.placed.items() if query in queries), self.instance)
