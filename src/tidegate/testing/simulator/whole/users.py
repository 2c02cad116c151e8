"""Users at other terminals: they ask the run that is alive for things, through the files of the root, and wait.

What `engine/requests.py` does by waiting, they do in simulated time: make the request, make it again where a run that
starts has removed it, and look for an answer until the run that they asked holds the root no more.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.engine.requests import ANSWER, REQUEST, Answer, CancelCheckpoint, Request, StopRun, TakeCheckpoint
from tidegate.protocol.names import checkpoint_id_of
from tidegate.storage.paths import RootPaths
from tidegate.testing.simulator.checkers import SimulationFailure

if TYPE_CHECKING:
    from tidegate.testing.simulator.whole.cluster import WholeCluster

_ASKS_EVERY_MS: Final = 30


class SimulatedUser:
    """One request."""

    def __init__(self, cluster: WholeCluster, request: Request, asked: str) -> None:
        """`asked`: the run that holds the root."""
        self._cluster = cluster
        self._root = cluster.root
        self._folder = cluster.root.folder  # of the tables that the run writes to: a fork's may be promoted meanwhile
        self._request = request
        self._asked = asked
        self._drained_before = len(cluster.drained)
        name = f"{RootPaths.REQUESTS}/{cluster.new_id()}"
        self._names = (name + REQUEST, name + ANSWER)
        self.is_done = False

    def __repr__(self) -> str:
        return f"{self._request} of {self._asked}"

    def look(self) -> None:
        memory, cluster = self._root.disk.memory, self._cluster
        request, answer = self._names
        is_alive = self._root.lock == self._asked  # before looking for the answer: a run's last act is to answer
        data = memory.read(answer)
        found: Answer | None = None
        with suppress(msgspec.DecodeError):  # torn by a loss of power
            found = None if data is None else msgspec.json.decode(data, type=Answer)
        if found is not None and found.outcome != "heard":
            cluster.world.note("{} is answered: {} {}", self, found.outcome, found.why)
            self._check(found)
        elif is_alive:
            if not memory.exists(request):
                memory.write(request, msgspec.json.encode(self._request))
            cluster.world.after(_ASKS_EVERY_MS, None, self.look)
            return
        self.is_done = True
        memory.delete(self._names)

    def _check(self, answer: Answer) -> None:
        cluster = self._cluster
        ids = [checkpoint_id_of(each.checkpoint) for each in answer.checkpoints]
        completed = {each.record.checkpoint_id: each.record for each in self._root.checkers.completions}
        match self._request:
            case TakeCheckpoint() if answer.outcome == "done":
                for checkpoint_id, said in zip(ids, answer.checkpoints, strict=True):
                    if checkpoint_id not in completed:
                        raise SimulationFailure("Requests", f"{checkpoint_id} was told to be taken, and is not")
                    if self._request.full and not said.full:
                        raise SimulationFailure("Requests", f"{checkpoint_id} is no full one, as {self} wanted")
                    stages = self._root.stages_of[completed[checkpoint_id].generation]
                    sinks = (name for name, spec in stages.items() if spec.is_sink)
                    late = [sink for sink in sinks if cluster.epoch_of(self._folder, sink) < said.epoch]
                    if late:
                        raise SimulationFailure("Requests", f"{checkpoint_id} was told to be shown by {late[0]}")
            case TakeCheckpoint() if any(each in completed for each in ids):
                raise SimulationFailure("Requests", f"{ids} is told to have {answer.outcome}, and is complete")
            case CancelCheckpoint() if answer.outcome == "done":
                self._root.cancelled.update((each.generation, each.epoch) for each in answer.checkpoints)
            case StopRun() if answer.outcome == "done":
                cluster.check_drained(self._asked, self._drained_before, self._request)
            case _:
                return
