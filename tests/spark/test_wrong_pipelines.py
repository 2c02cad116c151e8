"""Pipelines that cannot run: what their users are told, and that nothing is left behind."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

import tidegate as tg
from tests.spark.harness import run_to_end, stream, table_rows, write_input
from tidegate.cli.load import load_pipeline
from tidegate.engine.root import Root
from tidegate.engine.run import run_pipeline
from tidegate.errors import (
    ForeignRoot,
    InvalidConfig,
    InvalidPipeline,
    NoRoot,
    PipelineChanged,
    RootInUse,
    SinkFailed,
)
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder

TABLE = tg.DeltaTable("/nowhere/table")


# In the place of a session where none is needed: what is wrong is found before.
NO_SESSION: Any = object()


def called(name: str, *parameters: str) -> Callable[..., Any]:
    """A function with a name and parameters. It is never called: what is wrong is found before."""

    def function(*_: object) -> None:
        raise AssertionError("called though the pipeline is wrong")

    function.__name__ = name
    taken = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in parameters]
    vars(function)["__signature__"] = inspect.Signature(taken)
    return function


# -- shapes that cannot be --------------------------------------------------------------------------


def a_cycle(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.stage(called("one", "rows", "two"))
    pipeline.stage(called("two", "one"))
    pipeline.sink(TABLE)(called("table", "two"))


def a_stage_that_reads_itself(pipeline: tg.Pipeline) -> None:
    pipeline.stage(called("one", "one"))
    pipeline.sink(TABLE)(called("table", "one"))


def an_unknown_input(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.sink(TABLE)(called("table", "row"))


def two_stages_of_one_name(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.source(called("rows"))


def no_sink(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.stage(called("doubled", "rows"))


def nothing_at_all(_pipeline: tg.Pipeline) -> None:
    pass


def a_sink_that_is_read(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.sink(TABLE)(called("table", "rows"))
    pipeline.sink(TABLE)(called("copied", "table"))


def a_stage_that_nothing_reads(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.stage(called("forgotten", "rows"))
    pipeline.sink(TABLE)(called("table", "rows"))


def a_source_that_nothing_reads(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.source(called("forgotten"))
    pipeline.sink(TABLE)(called("table", "rows"))


def a_stage_that_reads_nothing(pipeline: tg.Pipeline) -> None:
    pipeline.stage(called("alone", "spark"))


def a_source_with_parameters(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows", "spark", "day"))


def a_lambda(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.stage(lambda rows: rows)


def a_name_with_an_underscore_in_front(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("_rows"))


def a_stage_called_spark(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("spark"))


def an_input_that_is_named_twice(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.sink(TABLE, inputs=["rows", "rows"])(called("table", "one", "other"))


def fewer_inputs_than_parameters(pipeline: tg.Pipeline) -> None:
    pipeline.source(called("rows"))
    pipeline.sink(TABLE, inputs=["rows"])(called("table", "one", "other"))


def an_output_mode_that_does_not_exist(pipeline: tg.Pipeline) -> None:
    wrong: Any = "upsert"
    pipeline.sink(TABLE, output_mode=wrong)(called("table", "rows"))


def a_sink_without_a_table(pipeline: tg.Pipeline) -> None:
    """`@pipeline.sink` where `@pipeline.sink(table)` is meant."""
    undecorated: Any = called("table", "rows")
    pipeline.sink(undecorated)


def a_path_for_a_table(pipeline: tg.Pipeline) -> None:
    path: Any = "lake/table"
    pipeline.sink(path)(called("table", "rows"))


def one_memory_for_two_sinks(pipeline: tg.Pipeline) -> None:
    memory = tg.Memory()
    pipeline.source(called("rows"))
    pipeline.sink(memory)(called("one", "rows"))
    pipeline.sink(memory)(called("other", "rows"))


# Each with the words that its message must have: what is wrong, where, and what to do.
WRONG_SHAPES: dict[Callable[[tg.Pipeline], None], tuple[str, ...]] = {
    a_cycle: ("one", "two", "cycle"),
    a_stage_that_reads_itself: ("one", "cycle"),
    an_unknown_input: ("sink 'table'", "'row'", "rows"),
    two_stages_of_one_name: ("'rows'", "another name"),
    no_sink: ("'wrong'", "no sink"),
    nothing_at_all: ("'wrong'", "no sink"),
    a_sink_that_is_read: ("sink 'copied'", "sink 'table'", "make a stage"),
    a_stage_that_nothing_reads: ("stage 'forgotten'", "add a stage"),
    a_source_that_nothing_reads: ("source 'forgotten'", "add a stage"),
    a_stage_that_reads_nothing: ("stage 'alone'", "parameter"),
    a_source_with_parameters: ("source 'rows'", "day", "`spark` and nothing else"),
    a_lambda: ("<lambda>", "a name starts with a letter"),
    a_name_with_an_underscore_in_front: ("'_rows'", "a name starts with a letter"),
    a_stage_called_spark: ("'spark'", "session"),
    an_input_that_is_named_twice: ("sink 'table'", "twice"),
    fewer_inputs_than_parameters: ("sink 'table'", "2 inputs", "names 1"),
    an_output_mode_that_does_not_exist: ("'table'", "'upsert'", "append, update, complete"),
    a_sink_without_a_table: ("sink", "table", "DeltaTable"),
    a_path_for_a_table: ("sink", "lake/table", "DeltaTable"),
    one_memory_for_two_sinks: ("'one'", "'other'", "Memory()", "give each its own"),
}


@pytest.mark.parametrize("define", WRONG_SHAPES, ids=lambda define: define.__name__)
def test_a_shape_that_cannot_be_is_refused_before_anything_is_touched(
    define: Callable[[tg.Pipeline], None], tmp_path: Path
) -> None:
    def define_and_run() -> None:
        pipeline = tg.Pipeline("wrong")
        define(pipeline)
        run_pipeline(pipeline, tmp_path / "root", NO_SESSION)

    with pytest.raises(InvalidPipeline) as refused:
        define_and_run()
    for words in WRONG_SHAPES[define]:
        assert words in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "my pipeline", "1st", "a/b", "a-b", "_a", "größe", "a\n"])
def test_a_name_that_a_pipeline_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidPipeline, match="must start with a letter"):
        tg.Pipeline(name)


def right_shape() -> tg.Pipeline:
    pipeline = tg.Pipeline("right")
    pipeline.source(called("rows"))
    pipeline.sink(TABLE)(called("table", "rows"))
    return pipeline


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpoint_interval": "10"}, ("checkpoint_interval", "'10'", "10s")),
        ({"checkpoint_interval": "ten seconds"}, ("checkpoint_interval", "'ten seconds'")),
        ({"checkpoint_interval": "-1s"}, ("checkpoint_interval", "'-1s'")),
        ({"checkpoint_interval": "1.5s"}, ("checkpoint_interval", "'1.5s'")),
        ({"checkpoint_interval": "0s"}, ("checkpoint_interval is '0s'", "at least 1ms")),
        ({"restart_pause": "soon"}, ("restart_pause", "'soon'")),
        ({"unaligned_after": "3"}, ("unaligned_after", "'3'", "10s")),
        ({"checkpoint_intervall": "10s"}, ("checkpoint_intervall",)),
        ({"restarts": "many"}, ("restarts",)),
        ({"available_now": "yes"}, ("available_now",)),
        ({"retain": "long"}, ("retain", "'long'", "such as 3", "24h")),
        ({"retain": 0}, ("retain", "'0'", "at least 1 checkpoint")),
        ({"retain": "0h"}, ("retain", "'0h'", "1ms")),
    ],
    ids=[
        "no unit",
        "words",
        "negative",
        "a fraction",
        "zero",
        "a pause in words",
        "a time without a unit",
        "a misspelt name",
        "a word for a number",
        "a word for a bool",
        "a word for what to retain",
        "no checkpoint to retain",
        "no time to retain them",
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(
    options: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        run_pipeline(right_shape(), tmp_path / "root", NO_SESSION, **options)
    for each in words:
        assert each in str(refused.value)
    assert list(tmp_path.iterdir()) == []


# -- files that define pipelines --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("x = 1", None, ("defines no pipeline", "tidegate.Pipeline(name)")),
        ("import tidegate as tg\na = tg.Pipeline('one')\nb = tg.Pipeline('two')", None, ("one, two", "--pipeline")),
        ("import tidegate as tg\na = tg.Pipeline('one')", "three", ("'three'", "one")),
        ("import sys\nsys.exit(0)", None, ("cannot be loaded at line 2", "SystemExit")),
    ],
    ids=["none", "several", "another", "one that exits"],
)
def test_a_file_without_the_pipeline_says_which_it_has(
    text: str, name: str | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "orders.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidPipeline) as refused:
        load_pipeline(file, name)
    assert all(each in str(refused.value) for each in (*words, "orders.py"))


# -- roots that cannot be used ----------------------------------------------------------------------

HOLDS_THE_LOCK = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
os.write(handle, str(os.getpid()).encode())
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(root: Path) -> Iterator[int]:
    """Another process that lives and holds the root."""
    root.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(root / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.kill()


def test_a_root_that_a_live_run_holds_is_refused_with_that_runs_process(tmp_path: Path) -> None:
    with held(tmp_path / "root") as process:
        with pytest.raises(RootInUse, match=rf"root.*process {process}.*--take-over") as refused:
            run_pipeline(right_shape(), tmp_path / "root", NO_SESSION)
        assert refused.value.retry_helps
        assert [path.name for path in (tmp_path / "root").iterdir()] == ["lock"]


def test_a_root_that_belongs_to_another_pipeline_is_refused(tmp_path: Path) -> None:
    Root(tmp_path / "root", "theirs")
    before = (tmp_path / "root" / "pipeline.json").read_bytes()
    with pytest.raises(ForeignRoot, match=r"root belongs to pipeline 'theirs', not to 'ours'; give .* root of its own"):
        Root(tmp_path / "root", "ours")
    assert (tmp_path / "root" / "pipeline.json").read_bytes() == before


def test_a_root_whose_owner_cannot_be_read_is_refused(tmp_path: Path) -> None:
    Folder(tmp_path).write("pipeline.json", b"{")
    with pytest.raises(ForeignRoot, match=r"pipeline\.json cannot be read"):
        Root(tmp_path, "ours")


def test_a_log_of_decisions_without_an_owner_is_no_new_root(tmp_path: Path) -> None:
    Folder(tmp_path).write("decisions/000000000001.json", b"{}")
    with pytest.raises(ForeignRoot, match=r"no pipeline\.json"):
        Root(tmp_path, "ours")


def test_a_root_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    for root in (tmp_path / "file", tmp_path / "file" / "root"):
        with pytest.raises(NoRoot, match="cannot be a folder"):
            run_pipeline(right_shape(), root, NO_SESSION)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize("name", ["[prod]", "a*", "{a,b}", "what?"])
def test_a_root_whose_name_spark_would_take_for_a_pattern_is_refused(name: str, tmp_path: Path) -> None:
    """Spark would look for folders that match, find no gate's log, and never read a row."""
    with pytest.raises(InvalidConfig, match="root"):
        run_pipeline(right_shape(), tmp_path / name / "root", NO_SESSION)
    assert list(tmp_path.iterdir()) == []


# -- functions that return what cannot run ----------------------------------------------------------


def returns(frame: Callable[[DataFrame], Any], mode: str = "append", **table: Any) -> Callable[[Path], tg.Pipeline]:
    """A pipeline whose stage `middle` returns what a function makes of the rows; its sinks are as they should be."""

    def define(folder: Path) -> tg.Pipeline:
        pipeline = tg.Pipeline("wrong")
        chosen: Any = mode

        @pipeline.source
        def rows(spark: SparkSession) -> DataFrame:
            return stream(spark, folder / "in")

        @pipeline.stage(output_mode=chosen)
        def middle(rows: DataFrame) -> Any:
            return frame(rows)

        @pipeline.sink(tg.DeltaTable(folder / "lake" / "first"))
        def first(rows: DataFrame) -> DataFrame:
            return rows

        @pipeline.sink(tg.DeltaTable(folder / "lake" / "second", **table))
        def second(middle: DataFrame) -> DataFrame:
            return middle

        return pipeline

    return define


def ticks(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


def fails(rows: DataFrame) -> DataFrame:
    columns = ["id"]
    return rows.select(columns[3])


NO_COLUMN = "[UNRESOLVED_COLUMN"
WRONG_FUNCTIONS: dict[str, tuple[Callable[[Path], tg.Pipeline], tuple[str, ...]]] = {
    "nothing": (returns(lambda _: None), ("stage 'middle'", "NoneType", "streaming DataFrame")),
    "a list": (returns(lambda _: [1]), ("stage 'middle'", "list", "streaming DataFrame")),
    "a table": (
        returns(lambda rows: rows.sparkSession.range(3)),
        ("stage 'middle'", "not streaming", "stream it reads"),
    ),
    "a stream of its own": (
        returns(
            lambda rows: rows.select("id").union(rows.sparkSession.readStream.format("rate").load().select("value"))
        ),
        ("stage 'middle'", "a stream of its own", "make a source of it"),
    ),
    "none of its input": (
        returns(lambda rows: ticks(rows.sparkSession)),
        ("stage 'middle'", "a stream of its own", "make a source of it"),
    ),
    "an error of its own": (
        returns(fails),
        (f"stage 'middle' failed at {__file__}, line {fails.__code__.co_firstlineno + 2}: IndexError: list index",),
    ),
    "a wrong column": (
        returns(lambda rows: rows.select("nope")),
        (f"stage 'middle' does not fit its input at {__file__}, line ", NO_COLUMN, "`nope`", "[`id`"),
    ),
    "a condition that is no SQL": (
        returns(lambda rows: rows.where("id >> > 3")),
        (f"stage 'middle' does not fit its input at {__file__}, line ", "Syntax error at or near '>'"),
    ),
    "a table that is not there": (
        returns(lambda rows: rows.join(rows.sparkSession.read.parquet("/nowhere/static"), "id")),
        ("stage 'middle' reads file:/nowhere/static, which is not there at ", "create it; or correct the path"),
    ),
    "aggregation without watermark": (
        returns(lambda rows: rows.groupBy("key").count()),
        ("stage 'middle'", "output_mode 'append'", "without watermark", "call withWatermark in this stage, even if"),
    ),
    "deduplication without watermark": (
        returns(lambda rows: rows.dropDuplicatesWithinWatermark(["id"])),
        ("stage 'middle' cannot run as a stream", "dropDuplicatesWithinWatermark", "call withWatermark in this stage"),
    ),
    "complete without aggregation": (
        returns(lambda rows: rows, mode="complete"),
        ("stage 'middle'", "output_mode 'complete'", "aggregat"),
    ),
    "two columns of one name": (
        returns(lambda rows: rows.select("id", F.col("value").alias("id"))),
        ("stage 'middle'", "two columns", "'id'", "rename or drop"),
    ),
    "two columns that differ in case": (
        returns(lambda rows: rows.select("id", F.col("value").alias("ID"))),
        ("stage 'middle'", "two columns", "rename or drop"),
    ),
    "a column without a type": (
        returns(lambda rows: rows.withColumn("empty", F.lit(None))),
        ("stage 'middle'", "'empty'", "cast it"),
    ),
    "a type that Parquet does not have": (
        returns(lambda rows: rows.withColumn("span", F.expr("make_interval(1)"))),
        ("stage 'middle'", "'span'", "interval"),
    ),
    "a partition column that is not there": (
        returns(lambda rows: rows, partition_by=["day"]),
        ("second", "'day'", "does not have"),
    ),
    "every column a partition column": (
        returns(lambda rows: rows.select("key"), partition_by=["key"]),
        ("second", "partition"),
    ),
}


@pytest.mark.spark
@pytest.mark.slow
def test_an_input_that_is_taken_but_not_read_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    """Nothing would ever consume it, and no checkpoint would complete."""
    pipeline = tg.Pipeline("unread")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.source
    def others(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path / "in")

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table"))
    def table(rows: DataFrame, others: DataFrame) -> DataFrame:  # noqa: ARG001
        return rows

    (tmp_path / "in").mkdir()
    with pytest.raises(InvalidPipeline, match="sink 'table' takes 'others' but does not read it"):
        run_to_end(pipeline, tmp_path / "root", spark)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.spark
@pytest.mark.slow
def test_a_source_that_removes_what_it_has_read_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    """A restart would look in vain for what lies between the checkpoint and the last batch."""
    pipeline = tg.Pipeline("cleaned")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("id long").option("CleanSource", "delete").json(str(tmp_path / "in"))

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake" / "table"))
    def table(rows: DataFrame) -> DataFrame:
        return rows

    (tmp_path / "in").mkdir()
    with pytest.raises(InvalidPipeline, match="source 'rows' has cleanSource=delete"):
        run_to_end(pipeline, tmp_path / "root", spark)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG_FUNCTIONS)
def test_what_a_stage_cannot_return_is_refused_and_nothing_is_left(
    what: str, tmp_path: Path, spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    define, words = WRONG_FUNCTIONS[what]
    (tmp_path / "in").mkdir()
    capfd.readouterr()
    with pytest.raises(InvalidPipeline) as refused:
        run_to_end(define(tmp_path), tmp_path / "root", spark)
    for each in words:
        assert each in str(refused.value)
    assert "SQLSTATE" not in str(refused.value)
    assert capfd.readouterr().err == "", "the error is all that is told of it"
    assert len(str(refused.value)) < 700
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


WRONG_SOURCES: dict[str, tuple[Callable[[SparkSession], DataFrame], str]] = {
    "a folder that is not there": (
        lambda spark: spark.readStream.schema("id long").json("/nowhere/in"),
        r"reads /nowhere/in, which is not there at .+, line \d+: create it, an empty folder will do; or correct",
    ),
    "a schema that is none": (
        lambda spark: spark.readStream.schema("id lang").json("/"),
        r'failed at .+, line \d+: \[UNSUPPORTED_DATATYPE\] Unsupported data type "LANG"',
    ),
    "a format that nobody has": (
        lambda spark: spark.readStream.format("nobodys").load(),
        r"failed at .+, line \d+: \[DATA_SOURCE_NOT_FOUND\] Failed to find the data source: nobodys",
    ),
    "Kafka without its connector": (
        lambda spark: spark.readStream.format("kafka").option("subscribe", "orders").load(),
        r"failed at .+, line \d+: .* data source: kafka.*; that is Spark's connector: give --conf spark.jars.packages=",
    ),
}


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG_SOURCES)
def test_a_source_that_cannot_be_is_told_with_its_line_and_nothing_is_left(
    what: str, tmp_path: Path, spark: SparkSession
) -> None:
    read, told = WRONG_SOURCES[what]
    pipeline = tg.Pipeline("wrong")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return read(spark)

    @pipeline.sink(tg.DeltaTable(tmp_path / "lake"))
    def table(rows: DataFrame) -> DataFrame:
        return rows

    with pytest.raises(InvalidPipeline, match=f"^source 'rows' {told}") as refused:
        run_to_end(pipeline, tmp_path / "root", spark)
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.spark
@pytest.mark.slow
def test_an_error_of_the_functions_own_is_told_with_its_cause_and_nothing_is_left(
    tmp_path: Path, spark: SparkSession
) -> None:
    def fails(_: DataFrame) -> None:
        raise KeyError("their own")

    (tmp_path / "in").mkdir()
    with pytest.raises(InvalidPipeline, match=r"stage 'middle' failed at .*: KeyError: 'their own'") as refused:
        run_to_end(returns(fails)(tmp_path), tmp_path / "root", spark)
    assert isinstance(refused.value.__cause__, KeyError)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.spark
@pytest.mark.slow
def test_a_root_that_was_there_is_kept_but_no_generation_is_opened(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "root").mkdir()
    with pytest.raises(InvalidPipeline):
        run_to_end(returns(lambda _: None)(tmp_path), tmp_path / "root", spark)
    store = Folder(tmp_path / "root")
    assert store.list("generations") == []
    assert len(StoredDecisions(store).read()) == 0


# -- tables that do not fit -------------------------------------------------------------------------


def existing_table(path: Path, *names: str, partition_by: list[str] | None = None) -> None:
    columns = StructType([StructField(name, LongType() if name == "id" else StringType()) for name in names])
    schema = deltalake.Schema.from_json(columns.json())
    deltalake.DeltaTable.create(path, schema=schema, partition_by=partition_by)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("partition_by", "table", "words"),
    [
        ([], {"names": ("id",)}, ("lake/second", "id long", "id long, key string", "wrong/second", "a new table")),
        ([], {"names": ("id", "key"), "partition_by": ["key"]}, ("lake/second", "partitioned by", "'key'", "nothing")),
        (["key"], {"names": ("id", "key")}, ("lake/second", "partitioned by", "'key'", "nothing")),
    ],
    ids=["columns", "no partitions", "partitions"],
)
def test_a_table_that_does_not_fit_is_refused_and_no_other_is_created(
    partition_by: list[str], table: dict[str, Any], words: tuple[str, ...], tmp_path: Path, spark: SparkSession
) -> None:
    (tmp_path / "in").mkdir()
    existing_table(tmp_path / "lake" / "second", *table["names"], partition_by=table.get("partition_by"))
    pipeline = returns(lambda rows: rows.select("id", "key"), partition_by=partition_by)(tmp_path)
    with pytest.raises(SinkFailed) as refused:
        run_to_end(pipeline, tmp_path / "root", spark)
    for each in words:
        assert each in str(refused.value)
    assert not (tmp_path / "root").exists()
    assert [path.name for path in (tmp_path / "lake").iterdir()] == ["second"]
    assert deltalake.DeltaTable(tmp_path / "lake" / "second").version() == 0


# -- pipelines that were changed --------------------------------------------------------------------


def shop(folder: Path, change: str = "") -> tg.Pipeline:
    pipeline = tg.Pipeline("shop")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return stream(spark, folder / ("elsewhere" if change == "path" else "in"))

    @pipeline.stage
    def between(rows: DataFrame) -> DataFrame:
        return rows

    def unique(frame: DataFrame) -> DataFrame:
        picked = frame.select(F.col("id").cast("int") if change == "schema" else "id", "key")
        return picked.dropDuplicates(["id"])

    unique.__name__ = middle = "renamed" if change == "removed" else "middle"
    mode: Any = "update" if change == "output mode" else "append"
    pipeline.stage(inputs=["between" if change == "inputs" else "rows"], output_mode=mode)(unique)

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "table"), inputs=[middle])
    def table(frame: DataFrame) -> DataFrame:
        return frame.select("id", "key")

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "all_rows"), inputs=["between", middle])
    def all_rows(rows: DataFrame, unique: DataFrame) -> DataFrame:
        return rows.select("id").unionByName(unique.select(F.col("id").cast("long")))

    return pipeline


@pytest.mark.spark
@pytest.mark.slow
def test_a_pipeline_that_was_changed_is_refused_and_goes_on_once_it_is_changed_back(
    tmp_path: Path, spark: SparkSession
) -> None:
    write_input(tmp_path / "in", 2, 10)
    write_input(tmp_path / "elsewhere", 1, 10, first_file=5)
    run_to_end(shop(tmp_path), tmp_path / "root", spark)
    decisions = StoredDecisions(Folder(tmp_path / "root"))
    before = list(decisions.read())
    told = {
        "removed": r"stage 'middle' is gone, and ckpt-\d+ has state of it\. .*--rename middle=renamed if",
        "schema": r"stage 'middle' had schema .*bigint.*, now .*int",
        "inputs": "stage 'middle' had inputs rows, now between, and it keeps state",
        "output mode": "stage 'middle' had output_mode append, now update",
        "path": r"source 'rows' .* at ckpt-\d+: that was json \(path=.*/in\), now it is json \(path=.*/elsewhere\)",
    }
    for change, words in told.items():
        with pytest.raises(PipelineChanged, match=words):
            run_to_end(shop(tmp_path, change), tmp_path / "root", spark)
        assert list(decisions.read()) == before
        assert sorted(path.name for path in (tmp_path / "lake").iterdir()) == ["all_rows", "table"]
    write_input(tmp_path / "in", 1, 10, first_file=2)
    run_to_end(shop(tmp_path), tmp_path / "root", spark)
    assert table_rows(tmp_path / "lake" / "table", ["id"]) == {(each,): 1 for each in range(30)}
