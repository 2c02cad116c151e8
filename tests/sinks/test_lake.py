"""Delta tables in a bucket: what no other table has to be tested for."""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import deltalake
import pytest
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

import tidegate as tg
from tests.s3_proxy import Fault, Plan, S3Proxy
from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tidegate.errors import BucketUnfit, InvalidConfig, SinkFailed, TablePutBack, TidegateError
from tidegate.sinks.contract import CommitAnswer, Committable, SinkPlace, StagedFile, Upkeep, staged_by
from tidegate.sinks.delta.bound import BoundDeltaTable
from tidegate.sinks.delta.home import InBucket, home_of
from tidegate.sinks.delta.log import TableLog
from tidegate.sinks.delta.reading import TableAt
from tidegate.sinks.delta.scan import active_files
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.folder import Folder
from tidegate.testing.sinks import SinkRun, columns, permit

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

pytestmark = pytest.mark.s3


@pytest.fixture
def url(s3_server: S3Server) -> str:
    return f"{s3_server.make_bucket(f'lake-{uuid.uuid4().hex[:12]}')}/tables/orders"


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.port) as proxy:
        yield proxy


def place(folder: Path, stage: str = "orders") -> SinkPlace:
    return SinkPlace("shop", stage, Folder(folder / uuid.uuid4().hex), root="root")


def bound(table: tg.DeltaTable, folder: Path) -> BoundDeltaTable:
    return table.bind(place(folder))


def started(table: tg.DeltaTable, folder: Path, schema: StructType | None = None) -> SinkRun:
    sink = bound(table, folder)
    sink.check_table(schema or columns(), "append")
    sink.prepare_table(schema or columns())
    sink.claim()
    return SinkRun(sink, 1)


def ids(table: tg.DeltaTable) -> list[int]:
    opened = table.home.opened()
    found: list[int] = TableAt(table.home, opened.version()).to_arrow()["id"].to_pylist()
    return sorted(found)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("s3://bucket", "a table is a folder in one"),
        ("s3://bucket/a b", "letters, digits"),
        ("s3://user:password@bucket/orders", "not in a URL"),
        ("gs://bucket/orders", "only those of S3"),
        ("abfss://c@a.dfs.core.windows.net/orders", "only those of S3"),
        ("hdfs://name/orders", "not a local folder"),
    ],
)
def test_what_cannot_be_a_table_in_a_bucket_is_refused_without_its_secrets(given: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=why) as refused:
        tg.DeltaTable(given)
    assert "password" not in str(refused.value)


def test_options_are_for_tables_in_buckets() -> None:
    with pytest.raises(InvalidConfig, match="storage_options are for a table in a bucket"):
        tg.DeltaTable("lake/orders", storage_options={"AWS_REGION": "x"})


def test_a_table_says_where_it_is_and_nothing_of_its_credentials(s3_server: S3Server) -> None:
    table = tg.DeltaTable("s3a://bucket/lake/orders/", storage_options=s3_server.options())
    assert table.table.address == "s3://bucket/lake/orders"
    moved = table.at("s3://bucket/lake/other")
    for each in (table, moved, table.seen_from(Path("/x"))):
        told = f"{each!r} {each.describe()} {each.table}"
        assert SECRET_KEY not in told
        assert ACCESS_KEY not in told


@pytest.mark.parametrize("fault", [Fault.DONE_BUT_ERROR, Fault.DONE_BUT_CUT, Fault.CONFLICT, Fault.ERROR])
def test_a_commit_whose_answer_is_lost_is_known_by_what_it_has_written(
    url: str, s3_server: S3Server, proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    table = tg.DeltaTable(url, storage_options=s3_server.options(proxy.endpoint))
    run = started(table, tmp_path)
    run.show(1, [(1, "a")])
    transact = TableLog.transact

    def failing(log: TableLog, *arguments: Any) -> bool:
        proxy.plan = proxy.plan or Plan(1, {fault: 1.0}, at_most=1, methods=frozenset(("PUT",)))
        return transact(log, *arguments)

    monkeypatch.setattr(TableLog, "transact", failing)
    run.stage([(2, "b")])
    assert run.commit(2) is CommitAnswer.COMMITTED, "it was taken for another's"
    assert proxy.plan is not None
    assert proxy.plan.happened[fault] == 1
    assert ids(table) == [1, 2]
    assert run.commit(2) is CommitAnswer.ALREADY


@pytest.mark.parametrize("fault", [Fault.DONE_BUT_ERROR, Fault.DONE_BUT_CUT, Fault.CONFLICT, Fault.ERROR])
def test_a_table_is_made_though_the_answer_is_lost(
    url: str, s3_server: S3Server, proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    table = tg.DeltaTable(url, storage_options=s3_server.options(proxy.endpoint))
    create = InBucket.create

    def failing(home: InBucket, *arguments: Any, **more: Any) -> None:
        proxy.plan = proxy.plan or Plan(1, {fault: 1.0}, at_most=1, methods=frozenset(("PUT",)))
        create(home, *arguments, **more)

    monkeypatch.setattr(InBucket, "create", failing)
    started(table, tmp_path).show(1, [(1, "a")])
    assert proxy.plan is not None
    assert proxy.plan.happened[fault] == 1
    assert ids(table) == [1]


def test_what_was_staged_by_a_machine_that_is_lost_is_shown_by_another_and_leaves_nothing(
    url: str, s3_server: S3Server, tmp_path: Path
) -> None:
    table = tg.DeltaTable(url, storage_options=s3_server.options())
    run = started(table, tmp_path)
    run.stage([(1, "a")])
    sealed = run.sealed()
    run.stage([(2, "never sealed")])
    after = SinkRun(bound(table, tmp_path), 2, sealed, 1)
    assert isinstance(after.sink, BoundDeltaTable)
    after.sink.check_table(columns(), "append")
    assert after.commit(1, sealed) is CommitAnswer.COMMITTED
    after.sink.forget_staged(2)
    assert ids(table) == [1]
    names = open_bucket(url, s3_server.options()).list()
    assert [name for name in names if name.startswith("_tidegate/")] == []
    assert len([name for name in names if name.endswith(".parquet")]) == 1


def test_a_commit_takes_few_requests_however_many_versions_there_are(
    url: str, s3_server: S3Server, proxy: S3Proxy, tmp_path: Path
) -> None:
    table = tg.DeltaTable(url, storage_options=s3_server.options(proxy.endpoint))
    run = started(table, tmp_path)
    taken, idle = [], []
    for epoch in range(1, 26):
        for each in range(4):
            run.stage([(epoch * 4 + each, "a")])
        sealed = run.sealed()
        proxy.counts.clear()
        assert run.commit(epoch * 2, sealed) is CommitAnswer.COMMITTED
        taken.append(proxy.counts.total())
        run.on_visible(sealed)
        proxy.counts.clear()
        assert run.commit(epoch * 2 + 1) is CommitAnswer.COMMITTED
        idle.append(proxy.counts.total())
    assert ids(table) == list(range(4, 104))
    # Four copies, one version; a checkpoint of the log, every ten versions, is read and written besides.
    assert sorted(taken)[len(taken) // 2] <= 15, taken
    assert max(taken) <= 60, taken
    assert sum(taken[10:20]) <= 200, taken
    assert sorted(idle)[len(idle) // 2] <= 4, idle


def test_what_was_followed_is_what_is_there_whoever_has_written(url: str, s3_server: S3Server, tmp_path: Path) -> None:
    table = tg.DeltaTable(url, storage_options=s3_server.options())
    run, log = started(table, tmp_path), TableLog(table, place(tmp_path), table.home.files())
    beside = TableLog(table, place(tmp_path, "beside"), table.home.files())
    for epoch in range(1, 26):
        run.show(epoch, [(epoch, "a")])
        if epoch % 4 == 0:
            table.home.opened().delete(f"id = {epoch - 1}")
        if epoch % 5 == 0:
            assert beside.transact(beside.opened(), [], [beside.record("epoch", epoch)])
            run.sink.fence(1)
        followed, fresh = log.followed(), log.opened()
        assert followed.version() == fresh.version()
        assert active_files(followed, ["id"]) == active_files(fresh, ["id"])
        for kind in ("epoch", "batch", "fence", "root", "counted_by"):
            assert log.recorded(followed, kind) == log.recorded(fresh, kind)
            assert log.recorded(followed, kind, "beside") == log.recorded(fresh, kind, "beside")
    assert ids(table) == [each for each in range(1, 26) if (each + 1) % 4]


def test_a_table_that_was_put_back_while_it_was_followed_is_refused(
    url: str, s3_server: S3Server, tmp_path: Path
) -> None:
    table = tg.DeltaTable(url, storage_options=s3_server.options())
    run = started(table, tmp_path)
    run.show(1, [(1, "a")])
    bucket = open_bucket(url, s3_server.options())
    before = {name: bucket.read(name) or b"" for name in bucket.list()}
    run.show(2, [(2, "b")])
    bucket.delete([name for name in bucket.list() if name not in before])
    for number in range(2):  # so that there are as many versions as there were, and more
        table.home.opened().alter.set_table_properties({"delta.checkpointInterval": str(20 + number)})
    run.stage([(3, "c")])
    with pytest.raises(TablePutBack):
        run.commit(3)
    assert ids(table) == [1]


class Killed(BaseException):
    pass


def killed_before(*_: Any) -> bool:
    raise Killed


def killed_after(log: TableLog, *arguments: Any) -> bool:
    _transact(log, *arguments)
    raise Killed


_transact = TableLog.transact


def looked_after(table: tg.DeltaTable, folder: Path, spark: SparkSession, generation: int = 1) -> SinkRun:
    """A run of its own machine."""
    sink = table.bind(SinkPlace("shop", "orders", Folder(folder / uuid.uuid4().hex), spark, "root"))
    sink.check_table(columns(), "append")
    sink.prepare_table(columns())
    sink.claim()
    return SinkRun(sink, generation)


def kept_up(run: SinkRun) -> Upkeep | None:
    assert isinstance(run.sink, BoundDeltaTable)
    return run.sink.keep_up(run.generation, list, Event())


def files_in(url: str, server: S3Server) -> set[str]:
    """What lies in a table, shown or not."""
    names = open_bucket(url, server.options()).list()
    return {name for name in names if name.endswith(".parquet") and not name.startswith("_")}


@pytest.mark.spark
def test_what_a_killed_pass_has_brought_into_the_table_is_removed_by_the_next_run(
    url: str, s3_server: S3Server, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tg.DeltaTable(url, optimize="1h", vacuum=None, storage_options=s3_server.options())
    run = looked_after(table, tmp_path, spark)
    for epoch in range(1, 4):
        run.show(epoch, [(epoch, "a")])
    files = files_in(url, s3_server)
    with monkeypatch.context() as patched:
        patched.setattr(TableLog, "transact", killed_before)
        with pytest.raises(Killed):
            kept_up(run)
    assert len(files_in(url, s3_server)) == 4
    after = looked_after(table, tmp_path, spark, 2)
    after.sink.forget_staged(2)
    assert files_in(url, s3_server) == files
    with monkeypatch.context() as patched:
        patched.setattr(TableLog, "transact", killed_after)
        with pytest.raises(Killed):
            kept_up(after)
    made = files_in(url, s3_server)
    last = SinkRun(looked_after(table, tmp_path, spark).sink, 3, None, run.batch + 1)
    last.show(4, [(4, "a")])
    assert kept_up(last) is not None  # so that none but an older version shows what that pass has made
    last.sink.forget_staged(3)
    assert made < files_in(url, s3_server)
    assert ids(table) == [1, 2, 3, 4]
    names = open_bucket(url, s3_server.options()).list("_tidegate")
    assert not [name for name in names if "upkeep-" in name]


@pytest.mark.spark
def test_a_pass_of_an_old_run_shows_nothing_once_a_newer_one_has_removed_what_it_made(
    url: str, s3_server: S3Server, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tg.DeltaTable(url, optimize="1h", vacuum=None, storage_options=s3_server.options())
    run = looked_after(table, tmp_path, spark)
    for epoch in range(1, 4):
        run.show(epoch, [(epoch, "a")])
    files = files_in(url, s3_server)
    newer = looked_after(table, tmp_path, spark, 2)

    def after_a_pause(log: TableLog, *arguments: Any) -> bool:
        monkeypatch.setattr(TableLog, "transact", _transact)
        newer.sink.forget_staged(2)
        return _transact(log, *arguments)

    monkeypatch.setattr(TableLog, "transact", after_a_pause)
    assert kept_up(run) is None
    assert files_in(url, s3_server) == files
    assert ids(table) == [1, 2, 3]


@pytest.mark.spark
def test_what_two_killed_commits_have_brought_into_the_table_is_removed(
    url: str, s3_server: S3Server, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first before its version was made, the second before it has tidied up after the first."""
    table = tg.DeltaTable(url, key="id", storage_options=s3_server.options())
    run = looked_after(table, tmp_path, spark)
    run.stage([(1, "a")])
    sealed = run.sealed()
    for kill in (killed_before, killed_after):
        with monkeypatch.context() as patched:
            patched.setattr(TableLog, "transact", kill)
            with pytest.raises(Killed):
                run.commit(1, sealed)
    assert len(files_in(url, s3_server)) == 2
    assert run.commit(1, sealed) is CommitAnswer.ALREADY
    assert len(files_in(url, s3_server)) == 1
    assert ids(table) == [1]


@pytest.mark.spark
def test_a_pass_of_upkeep_in_a_bucket_makes_files_few_deletes_what_nobody_needs_and_tells_when_it_was(
    url: str, s3_server: S3Server, tmp_path: Path, spark: SparkSession
) -> None:
    options = s3_server.options()
    table = tg.DeltaTable(url, optimize="1h", vacuum="0s", storage_options=options)
    run = looked_after(table, tmp_path, spark)
    for epoch in range(1, 4):
        run.show(epoch, [(epoch, "a")])
    assert isinstance(run.sink, BoundDeltaTable)
    assert run.sink.upkeep_due_in_ms() == 0
    done = kept_up(run)
    assert done is not None
    assert (done.files_before, done.files_after, done.deleted) == (3, 1, 3)
    assert ids(table) == [1, 2, 3]
    assert len(files_in(url, s3_server)) == 1
    elsewhere = table.bind(SinkPlace("shop", "orders", Folder(tmp_path / "there"), spark, "root"))
    assert elsewhere.upkeep_due_in_ms() > 3_000_000


def test_partitions_with_odd_values_and_statistics_are_as_in_a_folder(
    url: str, s3_server: S3Server, tmp_path: Path
) -> None:
    schema = StructType([StructField("id", LongType()), StructField("part", StringType())])
    table = tg.DeltaTable(url, "part", storage_options=s3_server.options())
    run = started(table, tmp_path, schema)
    assert isinstance(run.sink, BoundDeltaTable)
    staging = staged_by(run.sink, 1)
    values = {"a:b": "a%3Ab", "x y": "x y", "50%": "50%25", None: "__HIVE_DEFAULT_PARTITION__", "ü": "ü"}
    files = []
    for number, folder in enumerate(values.values()):
        written = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.table({"id": [number]}), written)
        name, data = f"part={folder}/part-{number}.parquet", written.getvalue().to_pybytes()
        staging.at("", durable=False).write(name, data)
        files.append(StagedFile(0, staging.location(name), len(data), 1))
    names = [staging.name_at(file.path) for file in files]
    staging.sync([name for name in names if name is not None])
    run.sink.commit(permit(1), Committable(0, tuple(files)))
    opened = table.home.opened()
    expected = list(enumerate(values))
    for found in (TableAt(table.home, opened.version()).to_arrow(), opened.to_pyarrow_table()):
        assert sorted((row["id"], row["part"]) for row in found.to_pylist()) == expected
    log = open_bucket(url, s3_server.options()).read(f"_delta_log/{opened.version():020d}.json")
    assert log is not None
    added = [json.loads(line)["add"] for line in log.decode().splitlines() if '"add"' in line]
    assert sorted(json.loads(each["stats"])["minValues"]["id"] for each in added) == [0, 1, 2, 3, 4]


def test_credentials_of_a_profile_in_the_aws_files_are_enough(
    url: str, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in s3_server.environment():
        monkeypatch.delenv(name, raising=False)
    credentials, config = tmp_path / "credentials", tmp_path / "config"
    credentials.write_text(f"[lake]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
    config.write_text(f"[profile lake]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    table = tg.DeltaTable(url)
    started(table, tmp_path).show(1, [(1, "a")])
    assert ids(table) == [1]


@pytest.mark.parametrize("wrong", [{"secret_access_key": "wrong-and-secret"}, {"access_key_id": "nobody-we-know"}])
def test_what_a_bucket_refuses_is_told_in_a_line_without_secrets(
    url: str, s3_server: S3Server, tmp_path: Path, wrong: dict[str, str]
) -> None:
    if s3_server.is_moto:
        pytest.skip("moto checks no credentials")
    sink = bound(tg.DeltaTable(url, storage_options=s3_server.options() | wrong), tmp_path)
    for call in (sink.probe, sink.facts, lambda: sink.prepare_table(columns()), lambda: sink.fence(1)):
        with pytest.raises(TidegateError, match="see whether the credentials are right") as refused:
            call()
        told = str(refused.value)
        assert "\n" not in told
        assert url in told
        for secret in (SECRET_KEY, *wrong.values(), "StringToSign", "AWS4-HMAC"):
            assert secret not in told
        assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_a_bucket_that_lets_two_write_one_version_is_refused_before_a_table_is_made(
    url: str, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tidegate.storage.bucket.Bucket.create", lambda files, name, data: files.write(name, data) or True
    )
    sink = bound(tg.DeltaTable(url, storage_options=s3_server.options()), tmp_path)
    with pytest.raises(BucketUnfit, match="If-None-Match"):
        sink.prepare_table(columns())
    monkeypatch.undo()
    assert open_bucket(url, s3_server.options()).list() == []


def test_a_table_that_is_not_there_is_none_and_one_whose_bucket_is_gone_is_a_failure(
    url: str, s3_server: S3Server, tmp_path: Path
) -> None:
    assert bound(tg.DeltaTable(url, storage_options=s3_server.options()), tmp_path).probe() is False
    gone = tg.DeltaTable("s3://no-such-bucket-here/orders", storage_options=s3_server.options())
    with pytest.raises(SinkFailed, match="make the bucket, or correct its name"):
        bound(gone, tmp_path).probe()
    with pytest.raises((DeltaError, OSError)):
        deltalake.DeltaTable(url, storage_options=home_of(url, s3_server.options()).options)
