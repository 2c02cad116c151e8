"""What tables must show together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.testing.simulator.checkers import UNKNOWN, SimulationFailure
from tidegate.testing.simulator.dag import Dag


class WholePrefix:
    """Tables that show an aligned checkpoint show the same prefix of each source, by what was read from them."""

    def __init__(self, dag: Dag, holding_back: Collection[str]) -> None:
        """`holding_back`: stages in which rows wait for the watermark."""
        self._dag = dag
        self._aligned: set[int] = set()
        self._shown: dict[tuple[int, str], tuple[str, int]] = {}
        """By epoch and source, how many rows of it the first table has shown."""
        self.held_back = _behind(dag, holding_back)
        """The paths whose rows may wait on their way."""

    def on_completed(self, record: CheckpointCompleted) -> None:
        if record.aligned:
            self._aligned.add(record.epoch)

    def on_visible(self, sink: str, epoch: int, visible: Mapping[int, int]) -> None:
        if epoch not in self._aligned:
            return
        for path, count in visible.items():
            if path in self.held_back or count == UNKNOWN:
                continue
            source = self._dag.source_of[path]
            first, expected = self._shown.setdefault((epoch, source), (sink, count))
            if count != expected:
                raise SimulationFailure(
                    "SourcePrefix",
                    f"epoch {epoch}, which is aligned: {first} shows {expected} rows of {source}, {sink} {count} of "
                    f"path {path}",
                )


def _behind(dag: Dag, stages: Collection[str]) -> set[int]:
    """The paths that lead through one of these."""
    found: set[int] = set()
    for name, spec in dag.stages.items():
        for taken, path in spec.paths.items():
            if name in stages or taken in found or -1 - taken in found:
                found.add(path)
    return found
