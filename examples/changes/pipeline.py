"""Change rows of a customers table, as a capture of a database sends them, into a table by key."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg

pipeline = tg.Pipeline("changes")


@pipeline.source
def changes(spark: SparkSession) -> DataFrame:
    # `seq` numbers the changes of the database: its log position, an LSN, an SCN. `op`: insert, update or delete. A
    # delete brings the key and nothing else.
    schema = "seq long, op string, id long, name string, city string, credit long"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", "5").json("input/changes")


@pipeline.sink(tg.DeltaTable("lake/change_log"))
def change_log(changes: DataFrame) -> DataFrame:
    """All that came, in no order and some of it twice: captures deliver at least once."""
    return changes


# Of two changes of a customer the one with the higher `seq` counts, in whatever order and however often they come.
# Without `newest_by` the later one would, and two in one batch would be an error: nothing tells which is newer.
@pipeline.sink(tg.DeltaTable("lake/customers", key="id", newest_by="seq"))
def customers(changes: DataFrame) -> DataFrame:
    # A row that was deleted stays, with a flag. It has to: its `seq` is what keeps out an update that comes late, which
    # would bring the customer back to life.
    return changes.withColumn("deleted", F.col("op") == "delete").drop("op")
