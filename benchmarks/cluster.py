"""Several drivers: how long they take to agree, what a hop between two of them costs, and how soon others take over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from benchmarks.measure import Benchmark, Case, Derived, Round, Target

_MEMBERS: Final = (3, 16, 64)
_CHECKPOINTS: Final = 50
_HOPS: Final = 40
_LEASE_S: Final = 10

_CLOCK: Final = "wall clock (time.perf_counter; hops: the times of the files of Spark's commit and of the gate's entry)"

_NOTES: Final = f"""\
quorum: members without Spark, in at most four processes, each with one stage that has nothing to store; from the
  trigger until the checkpoint is decided, its manifest written and its record forced to the disk. The median of
  {_CHECKPOINTS}. files: they share a folder, looked at every 5 to 25 ms. ZooKeeper: one server on this machine, without
  forced writes.
hop: from Spark's commit of a batch of a source until its reader is shown it, with both in one process, and in two on a
  folder. The median of {_HOPS}; batches are 0.1 s apart.
failover: three drivers of eight stages on a folder, a checkpoint every 0.7 s, a lease of {_LEASE_S} s, no grace: from
  kill -9 of the one that leads until the next checkpoint is complete. restart: the same pipeline in one process, which
  is killed and started again at once."""


def _cases(scale: float) -> list[Case | Derived]:
    from benchmarks.cluster_runs import measure_failover, measure_hop, measure_quorum, measure_restart

    checkpoints, hops = max(3, round(_CHECKPOINTS * scale)), max(5, round(_HOPS * scale))
    found: list[Case | Derived] = []
    for kind, name in (("files", "files"), ("zk", "ZooKeeper")):
        for members in _MEMBERS:
            target = Target(at_most=200) if kind == "zk" and members == max(_MEMBERS) else None
            measure: Callable[[], float] = partial(measure_quorum, kind, members, checkpoints)
            found.append(Case(f"quorum: {name}", {"members": members}, "ms", measure, target))
    near = Case("hop: one process", {}, "ms", partial(measure_hop, 1, hops))
    far = Case("hop: two processes", {}, "ms", partial(measure_hop, 2, hops))

    def added(values: Round) -> float:
        return values[far] - values[near]

    restart = Case("restart of one process", {}, "s", measure_restart)
    failover = Case("failover of three", {}, "s", partial(measure_failover, f"{_LEASE_S}s"))

    def beyond_lease(values: Round) -> float:
        return (values[failover] - _LEASE_S) / values[restart]

    return [
        *found,
        near,
        far,
        Derived("hop: added by the second process", {}, "ms", added, Target(at_most=50)),
        restart,
        failover,
        Derived("failover without the lease / restart", {}, "ratio", beyond_lease, Target(at_most=1.3)),
    ]


BENCHMARK: Final = Benchmark("several drivers: quorum, hop and failover", _NOTES, 3, _cases, _CLOCK)
