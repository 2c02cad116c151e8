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
from tidegate.spark import s3a as module
from tidegate.spark.s3a import mount, prepare
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.bucket_s3a import s3a_settings
from tidegate.storage.memory import Memory
from tidegate.storage.mounted import Mounted

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

    def __init__(self, url: str, options: dict[str, str]) -> None:
        super().__init__()
        self._url = url
        self.options = options

    def for_spark(self, name: str = "") -> str:
        return f"viewfs://table/{name}"

    def links(self) -> dict[str, str]:
        return {}

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
