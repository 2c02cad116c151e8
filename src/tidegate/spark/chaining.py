"""Whether a stage may run in the query of its input: what its function makes of that input's DataFrame tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# What hands on row by row what it reads, and remembers nothing: of joins, those with a table.
_PASSING: Final = frozenset(
    ("Project", "Filter", "SubqueryAlias", "View", "Generate", "Join", "ResolvedHint", "MapInPandas", "MapInArrow")
)


def only_passes_on(frame: DataFrame, read: DataFrame) -> bool:
    """Whether a DataFrame is made of the rows of another one alone, each read once, without state or a watermark of its
    own."""
    plan, goal = (each._jdf.queryExecution().analyzed() for each in (frame, read))
    while not plan.equals(goal):
        streams = [child for child in children_of(plan) if child.isStreaming()]
        if plan.nodeName() not in _PASSING or len(streams) != 1:
            return False
        plan = streams[0]
    return True


def sealed_off(frame: DataFrame, stage: str) -> DataFrame:
    """The same rows, of which nothing that is done later is moved to before them.

    The optimiser would: a filter on the keys of a sum goes before the sum, a column that nobody asks for goes from what
    a join stores. Then the state would be that of the chain, and of no use to the stage alone. Through the count of an
    observation it moves no filter, and leaves the columns that are counted.
    """
    names = ", ".join("`" + name.replace("`", "``") + "`" for name in frame.columns)
    return frame.observe(f"tidegate_{stage}", F.expr(f"count({names})").alias("whole_rows"))


def children_of(plan: Any) -> list[Any]:
    """Of a node of a plan, in the JVM."""
    children = plan.children()
    return [children.apply(index) for index in range(children.size())]
