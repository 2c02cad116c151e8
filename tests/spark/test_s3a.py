"""What Hadoop is told of a bucket: what its user has set stays, and what we have set ourselves is renewed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.s3_server import S3Server
from tests.spark.kills import ROOT
from tidegate.errors import InvalidConfig
from tidegate.spark import s3a as module
from tidegate.spark.s3a import mount, prepare
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.bucket_s3a import s3a_settings
from tidegate.storage.folder import Folder
from tidegate.storage.memory import Memory
from tidegate.storage.mounted import Mounted
from tidegate.storage.paths import RootPaths

_FOR_A_WHILE = {"access_key_id": "first", "secret_access_key": "hidden", "session_token": "until-noon"}
_KEY, _TOKEN = (f"fs.s3a.bucket.orders.{name}" for name in ("access.key", "session.token"))


class Hadoop(dict[str, str]):
    """Its settings."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def unset(self, key: str) -> None:
        self.pop(key, None)


class Table(Memory, Mounted):
    """A folder of it that executors write to."""

    def __init__(self, url: str, options: dict[str, str], links: dict[str, str] | None = None) -> None:
        super().__init__(url)
        self._url = url
        self.options = options
        self._links = links or {}

    def for_spark(self, name: str = "") -> str:
        return f"viewfs://table/{name}"

    def links(self) -> dict[str, str]:
        return self._links

    def make_near(self) -> None:
        pass

    def settings(self) -> dict[str, str]:
        return s3a_settings(self._url, self.options)


class Context:
    def __init__(self, hadoop: Hadoop) -> None:
        self._jsc = SimpleNamespace(hadoopConfiguration=lambda: hadoop)


@pytest.fixture
def hadoop() -> Hadoop:
    return Hadoop()


@pytest.fixture
def closed() -> list[str]:
    return []


@pytest.fixture
def session(hadoop: Hadoop, closed: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a JVM that has s3a; `closed`: the file systems that it was told to forget."""

    def file_system(uri: str, _settings: Hadoop) -> Any:
        return SimpleNamespace(close=lambda: closed.append(uri))

    classes = {
        "org.apache.spark.util.Utils": SimpleNamespace(classIsLoadable=lambda _: True),
        "org.apache.hadoop.fs.FileSystem": SimpleNamespace(get=file_system),
        "java.net.URI": SimpleNamespace(create=str),
    }
    monkeypatch.setattr(module, "java_class", lambda _, name: classes[name])
    return SimpleNamespace(sparkContext=Context(hadoop))


def test_keys_that_were_renewed_are_told_and_what_was_opened_with_old_ones_is_closed(
    session: Any, hadoop: Hadoop, closed: list[str]
) -> None:
    prepare(session, s3a_settings("s3://orders/root", _FOR_A_WHILE))
    prepare(session, s3a_settings("s3://orders/root", _FOR_A_WHILE))
    assert hadoop[_TOKEN] == "until-noon"
    assert not closed, "nothing has changed"
    prepare(session, s3a_settings("s3://orders/root", {**_FOR_A_WHILE, "session_token": "until-midnight"}))
    assert hadoop[_TOKEN] == "until-midnight"
    assert closed == ["s3a://orders/"]
    prepare(session, s3a_settings("s3://orders/root", {"access_key_id": "lasting", "secret_access_key": "hidden"}))
    assert hadoop[_KEY] == "lasting"
    assert _TOKEN not in hadoop


def test_what_the_user_has_set_stays(session: Any, hadoop: Hadoop) -> None:
    hadoop[_KEY] = "theirs"
    prepare(session, s3a_settings("s3://orders/root", _FOR_A_WHILE))
    hadoop[_TOKEN] = "set by them since"
    prepare(session, s3a_settings("s3://orders/root", {**_FOR_A_WHILE, "session_token": "until-midnight"}))
    assert (hadoop[_KEY], hadoop[_TOKEN]) == ("theirs", "set by them since")
    prepare(session, s3a_settings("s3://orders/root", {"access_key_id": "lasting", "secret_access_key": "hidden"}))
    assert (hadoop[_KEY], hadoop[_TOKEN]) == ("theirs", "set by them since")


def test_what_is_in_use_is_closed_only_before_the_next_generation(
    session: Any, hadoop: Hadoop, closed: list[str]
) -> None:
    folder = Table("s3://lake/orders", _FOR_A_WHILE)
    mount(session, folder)
    folder.options = {**_FOR_A_WHILE, "session_token": "until-midnight"}
    mount(session, folder)
    assert hadoop["fs.s3a.bucket.lake.session.token"] == "until-midnight"
    assert not closed, "another query may be running"
    prepare(session, s3a_settings("s3://orders/root", _FOR_A_WHILE))
    assert closed == ["s3a://lake/"]


def test_a_root_and_a_table_in_one_bucket_with_different_keys_are_refused(session: Any) -> None:
    root, lasting = Table("s3://orders/root", _FOR_A_WHILE), {"access_key_id": "table", "secret_access_key": "hidden"}
    prepare(session, root.settings())
    mount(session, root, Table("s3://lake/table", lasting))
    mount(session, root, Table("s3://orders/table", {**_FOR_A_WHILE, "region": "eu-west-1"}))
    for options in (lasting, {**_FOR_A_WHILE, "endpoint": "https://elsewhere"}, {}):
        prepare(session, root.settings())
        with pytest.raises(InvalidConfig, match=r"s3://orders/table.* and .*s3://orders/root.* are in one bucket"):
            mount(session, root, Table("s3://orders/table", options))


def test_keys_that_are_renewed_between_two_folders_are_not_taken_for_different_ones(
    session: Any, hadoop: Hadoop
) -> None:
    options = dict(_FOR_A_WHILE)
    root, table = Table("s3://orders/root", options), Table("s3://orders/table", options)
    prepare(session, root.settings())
    mount(session, root)
    options["session_token"] = "until-midnight"
    mount(session, table)
    assert hadoop[_TOKEN] == "until-midnight"


def test_where_the_user_has_set_the_keys_of_a_bucket_those_of_folders_do_not_matter(
    session: Any, hadoop: Hadoop
) -> None:
    hadoop["fs.s3a.bucket.orders.aws.credentials.provider"] = "com.example.Own"
    root = Table("s3://orders/root", _FOR_A_WHILE)
    prepare(session, root.settings())
    mount(session, root, Table("s3://orders/table", {"access_key_id": "table", "secret_access_key": "hidden"}))


class Attempt(Table):
    """A folder of Spark's checkpoint."""

    def __init__(self, work: Path, stage: str, generation: int = 1, attempt: int = 1) -> None:
        folder = RootPaths.spark_checkpoint(generation, stage, attempt)
        super().__init__("s3://orders/root", _FOR_A_WHILE, {f"viewfs.{work.name}.{folder}": "there"})
        self.here = Folder(work).at(folder)


def mounts(hadoop: Hadoop) -> list[str]:
    return sorted(key for key in hadoop if key.startswith("viewfs."))


def test_the_mounts_of_an_attempt_are_forgotten_when_the_next_one_of_its_stage_begins(
    session: Any, hadoop: Hadoop, tmp_path: Path
) -> None:
    """Else each pause of a source would leave some, which every batch carries along."""
    for attempt in range(1, 5):
        mount(session, Attempt(tmp_path / "work", "orders", attempt=attempt))
    mount(session, Attempt(tmp_path / "work", "totals"))
    mount(session, Attempt(tmp_path / "elsewhere", "totals"))
    assert mounts(hadoop) == [
        "viewfs.elsewhere.generations/000001/stages/totals/spark",
        "viewfs.work.generations/000001/stages/orders/spark-4",
        "viewfs.work.generations/000001/stages/totals/spark",
    ], "those of other stages, and of other runs, are in use"
    mount(session, Attempt(tmp_path / "work", "orders", generation=2))
    mount(session, Attempt(tmp_path / "work", "orders", generation=2))
    assert mounts(hadoop)[1:] == [
        "viewfs.work.generations/000001/stages/totals/spark",
        "viewfs.work.generations/000002/stages/orders/spark",
    ]


def test_those_of_a_table_go_with_the_attempt_though_the_root_is_in_a_folder(
    session: Any, hadoop: Hadoop, tmp_path: Path
) -> None:
    for attempt in (1, 2):
        checkpoint = Folder(tmp_path).at(RootPaths.spark_checkpoint(1, "orders", attempt))
        mount(session, checkpoint, Table("s3://lake/orders", _FOR_A_WHILE, {f"viewfs.table.{attempt}": "there"}))
    assert mounts(hadoop) == ["viewfs.table.2"]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.usefixtures("s3a")
def test_a_session_reads_a_bucket_with_the_keys_that_it_was_last_told(tmp_path: Path, s3_server: S3Server) -> None:
    if s3_server.is_moto:
        pytest.skip("moto checks no credentials")
    bucket = s3_server.make_bucket("renewed")
    open_bucket(bucket, s3_server.options()).write("said.txt", b"hello")
    command = [sys.executable, "-m", "tests.spark.s3a_keys", f"{bucket}/said.txt", s3_server.endpoint]
    done = subprocess.run(
        [*command, str(tmp_path / "spark.log")], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines() == ["refused", "hello"], done.stderr[-3000:]
