"""Where a channel leaves its process: what readers in other processes have yet to take.

Guarantees:
- Entries are numbered from 0, without a gap.
- One is let go of when every reader has taken it, and once. Of what a reader has said the most counts, because it may
  be heard late and twice; who does not read the channel has no say.
"""

from __future__ import annotations

from collections.abc import Collection


class Outlet:
    def __init__(self, readers: Collection[str]) -> None:
        """`readers`: the instances where the channel is read, but for the one that writes it."""
        self._taken = dict.fromkeys(readers, 0)
        self._next = 0
        self._let_go = 0

    @property
    def readers(self) -> Collection[str]:
        return self._taken.keys()

    @property
    def appended(self) -> int:
        """How many entries there were."""
        return self._next

    @property
    def kept(self) -> int:
        """How many entries are not let go of."""
        return self._next - self._let_go

    def append(self) -> int:
        """The number of the next entry."""
        self._next += 1
        return self._next - 1

    def on_taken(self, instance: str, count: int) -> None:
        """An instance says how many it has taken."""
        if instance in self._taken:
            self._taken[instance] = max(self._taken[instance], count)

    def let_go(self) -> range:
        """The entries that all have taken since the last time."""
        first, self._let_go = self._let_go, min(self._taken.values(), default=self._next)
        return range(first, self._let_go)
