"""What stands in for Spark and for tables where everything else is real: in tests, and in the simulator.

A stage of a played pipeline is a `PlayedQuery` on the folders that the engine has laid for it:

    query = PlayedQuery(
        checkpoint=root.at("generations/000001/stages/middle/spark"),
        output=root.at("generations/000001/stages/middle/output"),
        sources=[GateSource(root.at("generations/000001/stages/middle/gates/rows"), root)],
        plan=Plan(paths={0: 1}, has_state=True, holds_back=True),
        new_id=..., now_ms=...,           # of the simulated world, so that a seed repeats itself
    )
    query.step()                          # the next thing that outlives a kill; see `Step`
    query.run_batch(); query.run(100)     # until a batch is committed; a query that runs away
    for _ in query.maintain(): ...        # Spark's upkeep of the state
    query.task_fails = 1                  # a task of the next batch is tried twice
    del query                             # killed, wherever it stood

A source reads a `PlayedStream` by a `StreamSource`, as a folder of files, or by a `TopicSource`, as a topic. The query
of a sink writes into what `staged_by` gives of a bound `PlayedTable` or, with `Plan(writes="rows")`, calls
`stage_rows`, which is where `RowSink.stage` belongs.
"""

from tidegate.testing.played.rows import PlayedRows, decode_rows, encode_rows
from tidegate.testing.played.sources import GateSource, PlayedSource, PlayedStream, StreamSource, TopicSource
from tidegate.testing.played.spark import Plan, PlayedQuery, Step
from tidegate.testing.played.state import PlayedFailure
from tidegate.testing.played.tables import PlayedTable

__all__ = [
    "GateSource",
    "Plan",
    "PlayedFailure",
    "PlayedQuery",
    "PlayedRows",
    "PlayedSource",
    "PlayedStream",
    "PlayedTable",
    "Step",
    "StreamSource",
    "TopicSource",
    "decode_rows",
    "encode_rows",
]
