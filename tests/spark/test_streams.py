"""What a source reads: when it is the same, and that no secret is in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.types import StructType

from tidegate.errors import PipelineChanged, RecoveryRefused, StageFailed
from tidegate.spark import watch
from tidegate.spark.snapshot import Snapshotter, first_position, keep_first_position, note_streams, restore_checkpoint
from tidegate.spark.sources import going_on, streams_read, without_secrets
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import SourceStream, StageShape
from tidegate.storage.paths import RootPaths

pytestmark = pytest.mark.matrix

SERVERS = "kafka.bootstrap.servers"


def kafka(servers: str = "one:9092,two:9092", ids: dict[str, str] | None = None, **reads: str) -> SourceStream:
    return SourceStream("kafka", {SERVERS: servers, **(reads or {"subscribe": "a,b"})}, ids or {})


def goes_on(then: SourceStream, now: SourceStream) -> bool:
    """Whether it does. If not, the error names both."""
    try:
        going_on("rows", "at ckpt-000007", (then,), (now,))
    except PipelineChanged as error:
        told = str(error)
    else:
        return True
    for words in ("source 'rows'", "at ckpt-000007", *then.reads.values(), *now.reads.values(), "on a new root"):
        assert words in told
    return False


@pytest.mark.parametrize(
    ("then", "now", "is_same"),
    [
        (kafka(), kafka(), True),
        (kafka(), kafka(subscribe="a,b,c"), True),
        (kafka(), kafka(subscribe="a"), False),
        (kafka(), kafka(subscribe="b,c"), False),
        (kafka(), kafka("three:9092,two:9092"), True),
        (kafka(), kafka("three:9092"), False),
        (kafka(ids={"a": "1", "b": "2"}), kafka("three:9092", ids={"a": "1"}), True),
        (kafka(ids={"a": "1"}), kafka("three:9092", ids={"a": "2"}), False),
        (kafka(ids={"a": "1"}), kafka("three:9092", ids={"b": "1"}), False),
        (kafka(), kafka(subscribePattern="a|b"), False),
        (kafka(subscribePattern="a.*"), kafka(subscribePattern="a.*"), True),
        (kafka(subscribePattern="a.*"), kafka(subscribePattern="b.*"), False),
        (kafka(assign="a-0"), kafka(assign="a-0,a-1"), True),
        (kafka(assign="a-0,a-1"), kafka(assign="a-1"), False),
        (SourceStream("json", {"path": "file:/in"}), SourceStream("json", {"path": "file:/in"}), True),
        (SourceStream("json", {"path": "file:/in"}), SourceStream("json", {"path": "file:/other"}), False),
        (SourceStream("json", {"path": "file:/in"}), SourceStream("text", {"path": "file:/in"}), False),
    ],
)
def test_a_source_goes_on_only_in_what_it_read(then: SourceStream, now: SourceStream, is_same: bool) -> None:
    assert goes_on(then, now) is is_same


def test_a_stream_more_or_less_is_another_source() -> None:
    with pytest.raises(PipelineChanged, match=r"that was kafka .* and kafka .*, now it is kafka"):
        going_on("rows", "then", (kafka(), kafka()), (kafka(),))


def test_a_topic_of_another_id_is_refused_and_one_that_is_not_known_now_is_not_forgotten() -> None:
    then = (kafka(ids={"a": "1", "b": "2"}),)
    with pytest.raises(RecoveryRefused, match=r"source 'rows'.* topic 'b' was deleted and created anew.* was 2.* is 3"):
        going_on("rows", "then", then, (kafka(ids={"a": "1", "b": "3"}),))
    assert going_on("rows", "then", then, (kafka(),)) == then
    assert going_on("rows", "then", (kafka(),), then) == then
    more = going_on("rows", "then", then, (kafka(ids={"a": "1", "c": "3"}, subscribe="a,b,c"),))
    assert more[0].ids == {"a": "1", "b": "2", "c": "3"}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("/in", "/in"),
        ("s3a://key:secret@bucket/in", "s3a://bucket/in"),
        ("https://secret@host/in?page=1&sig=secret&token=secret", "https://host/in?page=1&sig=…&token=…"),
        ("abfss://container@account/in", "abfss://container@account/in"),
        (
            "Endpoint=sb://bus/;SharedAccessKey=secret=;EntityPath=hub",
            "Endpoint=sb://bus/;SharedAccessKey=…;EntityPath=hub",
        ),
        ("host=db password=secret user=secret dbname=shop", "host=db password=… user=… dbname=shop"),
    ],
)
def test_addresses_are_kept_without_secrets(value: str, kept: str) -> None:
    assert without_secrets(value) == kept


def test_topics_are_watched_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(
        [({"a": "1"}, None), ({}, "TimeoutException"), ({"a": "1", "b": "2"}, None), ({"a": "1", "b": "3"}, None)]
    )
    asked = threading.Semaphore(0)

    def topic_ids(_jvm: object, _options: object) -> tuple[dict[str, str], str | None]:
        assert asked.acquire(timeout=20)
        return next(answers, ({}, None))

    monkeypatch.setattr(watch, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(watch, "topic_ids", topic_ids)
    monkeypatch.setattr(watch, "kafka_options", lambda _: [{"subscribe": "a,b"}, {}])
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(_jvm=None))
    streams = (kafka(ids={"a": "1"}), SourceStream("json", {"path": "file:/in"}))
    shape = {"rows": StageShape("source", (), "append", "", None, streams)}
    watching = watch.TopicWatch({"rows": frame})

    def look() -> None:
        asked.release()
        deadline = time.monotonic() + 20
        while not watching._found:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        watching.check(shape)

    for known in ({"a": "1"}, {"a": "1"}, {"a": "1", "b": "2"}):
        look()
        assert [each.ids for each in shape["rows"].streams] == [known, {}]
    with pytest.raises(StageFailed, match="'rows' failed: one of its topics was deleted and created anew while it was"):
        look()
    watching.stop()
    asked.release()


def test_where_a_source_first_stood_is_found_in_whichever_attempt_has_it(tmp_path: Path) -> None:
    paths = RootPaths(tmp_path)
    note_streams(Folder(tmp_path), 1, "rows", (kafka(),))
    for attempt in (2, 3):
        log = paths.absolute(paths.spark_checkpoint(1, "rows", attempt)) / "sources" / "0"
        log.mkdir(parents=True)
        (log / "0").write_text('v1\n{"a":{"0":7}}', encoding="utf-8")
    first = first_position(Folder(tmp_path), 3, "rows")
    assert first is not None
    assert (len(first.files), first.streams) == (1, (kafka(),))
    keep_first_position(Folder(tmp_path), 3, "rows")
    kept = paths.absolute(paths.spark_checkpoint(3, "rows")) / "sources" / "0" / "0"
    assert kept.read_text(encoding="utf-8") == 'v1\n{"a":{"0":7}}'


def test_where_a_source_first_stood_is_passed_over_where_a_loss_of_power_has_torn_it(tmp_path: Path) -> None:
    root, paths = Folder(tmp_path), RootPaths(tmp_path)
    for generation in (1, 2):
        note_streams(root, generation, "rows", (kafka(),))
        root.write(f"{paths.spark_checkpoint(generation, 'rows')}/sources/0/0", b'v1\n{"a":{"0":7}}')
    for torn in (paths.source_streams(2, "rows"), f"{paths.spark_checkpoint(2, 'rows')}/sources/0/0"):
        root.write(torn, b"v1\n{")
        first = first_position(root, 3, "rows")
        assert first is not None
        assert first.files[0].startswith("generations/000001/")
    root.write(paths.source_streams(1, "rows"), b"")
    assert first_position(root, 3, "rows") is None


@pytest.mark.parametrize("full", [False, True])
def test_a_snapshot_of_a_source_without_a_batch_has_where_it_first_stood(tmp_path: Path, *, full: bool) -> None:
    """It was forced to the disk with the checkpoint, which what lies in the folder of a generation never is."""
    root = Folder(tmp_path)
    checkpoint = root.at("generations/000001/stages/rows/spark")
    snapshotter = Snapshotter(root, 1, "rows", None, reads_gates=False)
    assert snapshotter.take(checkpoint, 1, None, full=full).files.is_empty, "Spark has noted nothing yet"
    checkpoint.write("sources/0/0", b'v1\n{"a":{"0":7}}')
    checkpoint.write("sources/1/0", b'v1\n{"path":"file:///in/1","timestamp":1,"batchId":0}')
    taken = snapshotter.take(checkpoint, 2, None, full=full)
    (noted,) = taken.files.added
    assert (noted.name, taken.new_bytes) == ("sources/0/0", 16), "files are found again by who looks for them"
    checkpoint.delete(["sources/0/0"])
    restore_checkpoint(root, (noted,), root.at("generations/000002/stages/rows/spark"))
    assert root.read("generations/000002/stages/rows/spark/sources/0/0") == b'v1\n{"a":{"0":7}}'


# -- of real streams --------------------------------------------------------------------------------


class NothingReader(SimpleDataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"next": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[int]], dict[str, int]]:
        return iter([]), start


class Nothing(DataSource):
    """A user's own source, in Python."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def schema(self) -> str:
        return "value long"

    def simpleStreamReader(self, schema: StructType) -> NothingReader:  # noqa: N802, ARG002
        return NothingReader()


def of_files(spark: SparkSession, folder: Path, **options: Any) -> DataFrame:
    return spark.readStream.schema("id long").options(**options).format(options.get("as_", "json")).load(str(folder))


def of_own(spark: SparkSession, _folder: Path, **options: Any) -> DataFrame:
    spark.dataSource.register(Nothing)
    return spark.readStream.format("nothing").options(**options).load()


def of_rate(spark: SparkSession, _folder: Path, **options: Any) -> DataFrame:
    return spark.readStream.format("rate").options(**options).load()


CREDENTIALS = ["password", "apiToken", "AWS.secret.access.key", "userName", "sasl.jaas.config", "ssl.keystore.location"]


@pytest.mark.spark
@pytest.mark.parametrize(
    ("source", "then", "now", "is_same"),
    [
        (of_files, {}, {"maxFilesPerTrigger": 1, "latestFirst": "true", "recursiveFileLookup": "false"}, True),
        (of_files, {"pathGlobFilter": "*.json"}, {"PATHGLOBFILTER": "*.json"}, True),
        (of_files, {"pathGlobFilter": "*.json"}, {}, False),
        (of_files, {}, {"recursiveFileLookup": "true"}, False),
        (of_files, {}, {"as_": "csv"}, False),
        (of_rate, {"rowsPerSecond": 1}, {"rowsPerSecond": 1, "numPartitions": 1}, True),
        (of_rate, {"rowsPerSecond": 1}, {"rowsPerSecond": 2}, False),
        (of_own, {"stream": "a"}, {"stream": "b"}, False),
        (of_own, {"config": '{"a": 1}'}, {"config": '{"a": 2}'}, False),
        (of_own, {"url": "http://me:secret@host/a"}, {"URL": "http://me:rotated@host/a"}, True),
        (of_own, {"path": "own://me:secret@host/a"}, {"path": "own://host/a"}, True),
        (of_own, {"path": "a"}, {"path": "b"}, False),
        (of_own, {"url": "http://me:secret@host/a"}, {"url": "http://me:secret@host/b"}, False),
        (of_own, {"maxoffsetspertrigger": 1}, {"maxRowsPerBatch": 2, "fetchSize": 1, "startingPosition": "end"}, True),
        (of_own, dict.fromkeys(CREDENTIALS, "secret"), dict.fromkeys(CREDENTIALS, "rotated"), True),
    ],
)
def test_what_is_read_counts_and_not_how(
    source: Callable[..., DataFrame],
    then: dict[str, Any],
    now: dict[str, Any],
    is_same: bool,
    tmp_path: Path,
    spark: SparkSession,
) -> None:
    streams = [streams_read("rows", source(spark, tmp_path, **options)) for options in (then, now)]
    assert goes_on(streams[0][0], streams[1][0]) is is_same
    kept = msgspec.json.encode(streams)
    assert b"secret" not in kept
    assert b'"a":' not in kept, "who knows what is in a setting that is not known"


@pytest.mark.spark
def test_a_path_is_kept_as_the_folder_that_it_names(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "in").mkdir()
    whole = streams_read("rows", of_files(spark, tmp_path / "in"))
    assert whole == (SourceStream("json", {"path": f"file:{tmp_path}/in"}),)
    assert whole == streams_read("rows", spark.readStream.schema("id long").json(f"file://{tmp_path}/in/"))
    here = streams_read("rows", spark.readStream.schema("id long").json("src"))
    assert here[0].reads["path"].startswith("file:/")
    both = of_files(spark, tmp_path / "in").unionAll(of_rate(spark, tmp_path).selectExpr("value"))
    assert [each.format for each in streams_read("rows", both)] == ["json", "rate"]
