"""What was recorded of a real Spark, and is played: queries of every kind that Tidegate runs, step by step.

A scenario is one query in a folder of its own. Its steps:

- `feed <input> <seconds> <rows>`: a segment arrives at a gate (or a file at a source), with rows of that event time;
- `start`, `start available-now`, `start without-empty-batches`: the query is started, also again;
- `idle`: it runs until it waits for data, or has ended;
- `maintain`: Spark looks after its state, once;
- `stop`: it is stopped while it waits;
- `killed in <place>`: a segment arrives, and the process is killed in the batch that reads it, at a place: `the tasks`
  (it is begun, nothing of it is written) or `the commit` (all but the entry of the commit log is written);
- `restored`: fresh folders, as of the last committed batch, as Tidegate makes them.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Kind = Literal["source", "stateless", "totals", "union", "updates", "rows"]

DELAY_S: Final = 10
"""By which the watermark of `totals` is behind, and how long its windows are."""


class Scenario(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    steps: tuple[str, ...]
    deletions_only: bool = False
    """So many batches that of those before nothing is told but what Spark deletes, and its full snapshots."""


def _fed(seconds: int, *, rows: int = 3, source: int = 0) -> str:
    return f"feed {source} {seconds} {rows}; idle"


def _scenario(name: str, kind: Kind, *steps: str, deletions_only: bool = False) -> Scenario:
    return Scenario(name, kind, tuple("; ".join(steps).split("; ")), deletions_only)


_KILLED: Final = "killed in the tasks; start; idle", _fed(60), "killed in the commit; start; idle"

SCENARIOS: Final = (
    _scenario("source", "source", "start", *map(_fed, range(12)), "stop; start", _fed(20)),
    _scenario(
        "available",
        "source",
        "feed 0 0 3; feed 0 1 3; feed 0 2 3; start available-now; idle; feed 0 3 3; start available-now; idle",
        "start available-now; idle",
    ),
    _scenario(
        "stateless",
        "stateless",
        "start",
        _fed(0),
        "stop; feed 0 1 3; feed 0 2 3; feed 0 3 0; start; idle",
        _fed(4, rows=0),
        "stop; start; idle",
        _fed(5),
    ),
    _scenario(
        "totals",
        "totals",
        "start",
        _fed(0),
        _fed(5),
        *(f"{_fed(20 * number)}; maintain" for number in range(2, 8)),
        "stop; start; idle",
        _fed(160),
        _fed(180),
        _fed(170),
        "maintain",
    ),
    _scenario(
        "closing",
        "totals",
        "start without-empty-batches",
        _fed(0),
        _fed(40),
        "stop; start; idle",
        _fed(40),
        _fed(80),
        "stop; start; idle",
    ),
    _scenario(
        "union",
        "union",
        "start",
        _fed(0),
        _fed(0, source=1),
        "stop; feed 0 1 3; feed 1 1 3; start; idle",
        _fed(2, source=1),
    ),
    _scenario("updates", "updates", "start", _fed(0), _fed(1), _fed(2, rows=0), "stop; start", _fed(3)),
    _scenario("rows", "rows", "start", _fed(0), _fed(1, rows=0), "stop; start", _fed(2)),
    _scenario(
        "restored",
        "totals",
        "start",
        *(_fed(20 * number) for number in range(6)),
        "maintain; stop; restored; start; idle",
        _fed(120),
        _fed(140),
        "maintain",
    ),
    _scenario(
        "restored-union",
        "union",
        "start",
        _fed(0),
        _fed(0, source=1),
        "stop; restored; start; idle",
        _fed(1, source=1),
        _fed(1),
    ),
    _scenario("restored-source", "source", "start", _fed(0), _fed(1), "stop; restored; start; idle", _fed(2)),
    _scenario(
        "long",
        "totals",
        "start",
        *(_fed(20 * number) + ("; maintain" if number % 5 == 4 else "") for number in range(80)),
        "stop; start",
        _fed(2000),
        "maintain",
        deletions_only=True,
    ),
    _scenario("killed-stateless", "stateless", "start", _fed(0), *_KILLED, _fed(80)),
    _scenario("killed-totals", "totals", "start", _fed(0), _fed(20), *_KILLED),
    _scenario("killed-updates", "updates", "start", _fed(0), *_KILLED),
)
