"""What a process of a peer is told to do. Standard library only: it is read under the interpreters of all peers."""

from __future__ import annotations

import dataclasses
import json
import os

VARIABLE = "TIDEGATE_PEER_JOB"

COUNTS = "counts"
CHAIN = "chain"
TABLES = {COUNTS: ("counts",), CHAIN: ("paid", "totals")}

WINDOW_S = 10
# Longer than the event time of all input. Flink's file source and Bytewax's two readers take files in no order: with a
# delay of seconds they would rightly drop rows as late, and every peer would have to do other work.
DELAY_S = 86_400


@dataclasses.dataclass(frozen=True)
class Job:
    """`output` has a folder per table, `state` is the peer's own, `record` is a file for what it tells of itself.
    `restore` is what it goes on from, where the peer has to be told."""

    work: str
    input: str
    output: str
    state: str
    record: str
    files_per_batch: int
    cores: int
    checkpoint_s: int
    port: int
    restore: str = ""
    settings: dict[str, str] = dataclasses.field(default_factory=dict)

    def table(self, name: str) -> str:
        return f"{self.output}/{name}"

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


def read_job() -> Job:
    return Job(**json.loads(os.environ[VARIABLE]))
