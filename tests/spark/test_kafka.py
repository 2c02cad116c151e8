"""Kafka as a source, with a real broker. `./dev kafka` runs this; `./dev test` does not, because of the jars."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import tidegate as tg
from tests.kafka_broker import KafkaBroker, KafkaClient, connector_jars
from tests.spark.harness import Crash, at_most, run_to_end, table_rows
from tidegate.engine import planning
from tidegate.engine.status import RunStatus
from tidegate.errors import DataLost, PipelineChanged, RecoveryRefused
from tidegate.spark import watch
from tidegate.spark.session import existing_session, own_session
from tidegate.spark.sources import existing, going_on, streams_read
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow]

SECRET = "very-secret"


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    broker = KafkaBroker()
    yield broker
    broker.remove()


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    assert existing_session() is None, "these tests need a session with Spark's connector: run them alone (./dev kafka)"
    settings = {"spark.jars": connector_jars()}
    session = own_session("tidegate-kafka", tmp_path_factory.mktemp("spark") / "spark.log", settings)
    yield session
    session.stop()


@pytest.fixture
def client(broker: KafkaBroker, spark: SparkSession) -> Iterator[KafkaClient]:
    client = KafkaClient(broker.servers, spark._jvm)
    yield client
    client.close()


def reading(folder: Path, **options: object) -> tg.Pipeline:
    pipeline = tg.Pipeline("read")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        reader = spark.readStream.format("kafka")
        for name, value in options.items():
            reader = reader.option(name.replace("__", "."), str(value))
        return reader.load().selectExpr("topic", "CAST(CAST(value AS string) AS long) AS value")

    @pipeline.sink(tg.DeltaTable(folder / "lake" / "table"))
    def table(rows: DataFrame) -> DataFrame:
        return rows

    return pipeline


def shown(folder: Path) -> Counter[tuple[object, ...]]:
    return table_rows(folder / "lake" / "table", ["topic", "value"])


def run(pipeline: tg.Pipeline, folder: Path, spark: SparkSession) -> None:
    run_to_end(pipeline, folder / "root", spark, view=at_most(120))


def crash_before_the_first_batch(pipeline: tg.Pipeline, folder: Path, spark: SparkSession) -> None:
    first = "generations/000001/stages/rows/spark/sources/0/0"
    in_time = at_most(60)

    def crash(status: RunStatus) -> None:
        in_time(status)
        if (folder / "root" / first).exists():
            raise Crash

    with pytest.raises(Crash):
        run_to_end(pipeline, folder / "root", spark, available_now=False, checkpoint_interval="1h", view=crash)


def test_a_quiet_topic_is_read_from_where_it_first_stood_whatever_options_changed_but_not_another_one(
    tmp_path: Path, spark: SparkSession, broker: KafkaBroker, client: KafkaClient
) -> None:
    client.create("orders", "returns", "others")
    client.send("orders", range(5))
    latest = {"subscribe": "orders", "kafka__bootstrap__servers": broker.servers, "startingOffsets": "latest"}
    login = {"kafka__sasl__jaas__config": f'org.example.Login required password="{SECRET}";'}
    crash_before_the_first_batch(reading(tmp_path, **latest, **login), tmp_path, spark)
    client.send("orders", range(100, 150))
    client.send("returns", range(3))
    with pytest.raises(PipelineChanged, match=r"source 'rows' .*subscribe=orders.*subscribe=others") as refused:
        run(reading(tmp_path, **{**latest, "subscribe": "others"}), tmp_path, spark)
    assert SECRET not in str(refused.value)
    assert StoredDecisions(Folder(tmp_path / "root")).read().generation == 1

    login = {"kafka__sasl__jaas__config": 'org.example.Login required password="rotated";'}
    run(reading(tmp_path, **latest, **login, maxOffsetsPerTrigger=1000), tmp_path, spark)
    assert shown(tmp_path) == Counter(("orders", each) for each in range(100, 150))

    # Now after a checkpoint with rows: a topic may come, the broker may have another name, but no topic may go.
    more = {
        **latest,
        "subscribe": "returns, orders",
        "kafka__bootstrap__servers": broker.servers.replace("127.0.0.1", "localhost"),
    }
    run(reading(tmp_path, **more), tmp_path, spark)
    both = Counter(("orders", each) for each in range(100, 150)) + Counter(("returns", each) for each in range(3))
    assert shown(tmp_path) == both
    with pytest.raises(PipelineChanged, match=r"source 'rows' .*ckpt-0000\d\d.*=orders,returns\).*=orders\)"):
        run(reading(tmp_path, **latest), tmp_path, spark)
    for path in (tmp_path / "root").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_topic_that_was_deleted_and_created_anew_is_refused(
    tmp_path: Path, spark: SparkSession, broker: KafkaBroker, client: KafkaClient
) -> None:
    client.create("payments")
    client.send("payments", range(10))
    earliest = {"kafka__bootstrap__servers": broker.servers, "startingOffsets": "earliest"}
    pipeline = reading(tmp_path, subscribePattern="pay.*", **earliest)
    run(pipeline, tmp_path, spark)
    run(pipeline, tmp_path, spark)
    assert shown(tmp_path) == Counter(("payments", each) for each in range(10))
    before = list(StoredDecisions(Folder(tmp_path / "root")).read())
    client.delete("payments")
    client.create("payments")
    client.send("payments", range(1000, 1030))
    with pytest.raises(RecoveryRefused, match=r"source 'rows'.* topic 'payments' was deleted and created anew"):
        run(pipeline, tmp_path, spark)
    assert list(StoredDecisions(Folder(tmp_path / "root")).read()) == before


def test_a_topic_that_is_deleted_and_created_anew_while_it_is_read_ends_the_run(
    tmp_path: Path, spark: SparkSession, broker: KafkaBroker, client: KafkaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Spark does not see it gone. A topic that comes meanwhile is known from then on."""
    monkeypatch.setattr(watch, "_LOOK_EVERY_S", 1.0)
    client.create("visit-1")
    client.send("visit-1", range(10))
    options = {"kafka__bootstrap__servers": broker.servers, "startingOffsets": "earliest"}
    options["kafka__metadata__max__age__ms"] = "1000"
    pipeline = reading(tmp_path, subscribePattern="visit-.*", **options)
    in_time = at_most(120)
    done: list[str] = []

    def topics_known() -> set[str]:
        log = StoredDecisions(Folder(tmp_path / "root")).read()
        manifest = b"" if log.newest is None else (tmp_path / "root" / log.newest.manifest).read_bytes()
        return {topic for topic in ("visit-1", "visit-2") if f'"{topic}": "'.encode() in manifest}

    def change(status: RunStatus) -> None:
        in_time(status)
        known, rows = topics_known(), sum(shown(tmp_path).values())
        if not done and known == {"visit-1"} and rows == 10:
            done.append("a topic came")
            client.create("visit-2")
            client.send("visit-2", range(10))
        elif done == ["a topic came"] and known == {"visit-1", "visit-2"} and rows == 20:
            done.append("it was created anew")
            client.delete("visit-2")
            client.create("visit-2")
            client.send("visit-2", range(100, 130))

    gone = (
        "topic 'visit-2' was deleted and created anew|Partitions Set.visit-2-0. have been deleted"  # if Spark sees it
    )
    with pytest.raises((RecoveryRefused, DataLost), match=gone):
        run_to_end(
            pipeline, tmp_path / "root", spark, available_now=False, view=change, restarts=3, restart_pause="1ms"
        )
    assert all(shown(tmp_path)["visit-2", each] == 1 for each in range(10))


def test_what_is_gone_before_it_was_read_ends_the_run_at_once_with_what_is_lost(
    tmp_path: Path, spark: SparkSession, broker: KafkaBroker, client: KafkaClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.create("aged")
    client.send("aged", range(10))
    options = {"subscribe": "aged", "kafka__bootstrap__servers": broker.servers, "startingOffsets": "earliest"}
    run(reading(tmp_path, **options), tmp_path, spark)
    client.send("aged", range(10, 30))
    client.delete_before("aged", 20)
    with pytest.raises(DataLost, match=r"stage 'rows' .*offset \[10, 30\) for topic partition aged-0\. .*What to do: "):
        run(reading(tmp_path, **options), tmp_path, spark)
    assert "restarting" not in caplog.text
    run(reading(tmp_path, **options, failOnDataLoss="false"), tmp_path, spark)
    assert shown(tmp_path) == Counter(("aged", each) for each in (*range(10), *range(20, 30)))
    client.delete("aged")
    with pytest.raises(RecoveryRefused, match=r"source 'rows' .*topic 'aged' was deleted.*What to do: "):
        run(reading(tmp_path, **options), tmp_path, spark)


def test_a_broker_that_is_away_is_told_and_when_it_is_back_the_run_goes_on(
    tmp_path: Path, spark: SparkSession, broker: KafkaBroker, client: KafkaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_WAITS_AFTER_S", 2.0)
    client.create("late")
    client.send("late", range(10))
    options = {"subscribe": "late", "kafka__bootstrap__servers": broker.servers, "startingOffsets": "earliest"}
    broker.stop()
    in_time = at_most(180)
    told: list[str] = []
    stop = threading.Event()

    def view(status: RunStatus) -> None:
        in_time(status)
        no_batch = status.stages["rows"].no_batch
        if not told and no_batch is not None and "answers" in no_batch.why:
            told.append(no_batch.why)
            broker.start()
        if told and sum(shown(tmp_path).values()) == 10:
            stop.set()

    pipeline = reading(tmp_path, **options)
    run_to_end(pipeline, tmp_path / "root", spark, available_now=False, view=view, stop=stop)
    assert told == [f"Spark is getting offsets from KafkaV2[Subscribe[late]]; no broker of {broker.servers} answers"]


def test_a_broker_that_is_away_holds_up_no_start_and_what_is_known_of_its_topics_is_not_forgotten(
    spark: SparkSession, broker: KafkaBroker, client: KafkaClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.create("visits")
    frame = spark.readStream.format("kafka").option("kafka.bootstrap.servers", broker.servers)
    visits = frame.option("subscribe", "visits,none").option("kafka.sasl.jaas.config", SECRET).load()
    known = streams_read("rows", visits)
    assert list(existing(known[0]).ids) == ["visits"]
    assert known[0].ids["none"] == "", "one that does not exist has no id, and is not created"
    assert not caplog.records
    broker.stop()
    started = time.monotonic()
    away = streams_read("rows", visits)
    assert time.monotonic() - started < 60
    assert away[0].ids == {}
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "source 'rows': the ids of its topics could not be looked up" in caplog.text
    assert SECRET not in caplog.text
    then = tuple(map(existing, known))
    assert going_on("rows", "then", then, away) == then
    broker.start()
    client.send("visits", [1])  # waits until it is there
    assert streams_read("rows", visits) == known


def test_a_run_reads_exactly_up_to_where_another_root_stands(
    tmp_path: Path, spark: SparkSession, broker: KafkaBroker, client: KafkaClient
) -> None:
    client.create("shared")
    client.send("shared", range(5))
    here, there = tmp_path / "here", tmp_path / "there"
    latest = {"subscribe": "shared", "kafka__bootstrap__servers": broker.servers, "startingOffsets": "latest"}
    crash_before_the_first_batch(reading(there, **latest), there, spark)
    client.send("shared", range(100, 150))
    run(reading(there, **latest), there, spark)
    client.send("shared", range(200, 250))
    for _ in range(2):  # from where the other began, and then not a row more
        settings = {"available_now": False, "up_to": str(there / "root"), "view": at_most(120)}
        run_to_end(reading(here, **latest), here / "root", spark, **settings)
        assert shown(here) == shown(there) == Counter(("shared", each) for each in range(100, 150))
    assert tg.compare(there / "root", here / "root", spark=spark).is_equal
    run(reading(there, **latest), there, spark)
    client.send("shared", range(300, 350))
    run_to_end(reading(here, **latest), here / "root", spark, **settings)
    assert shown(here) == shown(there)
    assert shown(here).total() == 100
    run(reading(here, **latest), here, spark)
    with pytest.raises(RecoveryRefused, match=r"it has read more \(here: .*shared"):
        run_to_end(reading(here, **latest), here / "root", spark, **settings)
