"""Files that are written on a machine first: a bucket has what was synced, and what lay there before is not trusted."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.s3_server import S3Server
from tests.storage.test_bucket_root import Told
from tidegate.errors import StoreUnavailable
from tidegate.storage.bucket import Bucket
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.files import clear
from tidegate.storage.folder import Folder
from tidegate.storage.outbox import Outbox
from tidegate.storage.transfers import Progress

pytestmark = pytest.mark.s3


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    url = s3_server.make_bucket(f"outbox-{uuid.uuid4().hex[:12]}")
    return open_bucket(f"{url}/table", s3_server.options())


def test_what_is_synced_is_read_on_another_machine_and_nothing_else_is(bucket: Bucket, tmp_path: Path) -> None:
    here, there = (Outbox(bucket, Folder(tmp_path / machine)).at("staged") for machine in ("here", "there"))
    for name in ("1/a", "1/b"):
        Path(here.here.location("1")).mkdir(parents=True, exist_ok=True)
        Path(here.here.location(name)).write_bytes(name.encode())  # as Spark does
    here.sync(["1/a"])
    assert (here.exists("1/a"), here.exists("1/b")) == (True, False)
    assert (there.read("1/a"), there.read("1/b")) == (b"1/a", None)
    assert there.name_at(here.location("1/a")) == here.name_at(here.here.location("1/a")) == "1/a"
    there.bring(["1/a"])
    assert Path(there.here.location("1/a")).read_bytes() == b"1/a"
    with pytest.raises(StoreUnavailable):
        here.sync(["1/c"])
    assert here.sync(["1/c"], missing_ok=True) == {"1/c"}


def test_what_lay_there_before_is_neither_read_nor_sent(bucket: Bucket, tmp_path: Path) -> None:
    before = Outbox(bucket, Folder(tmp_path))
    before.at("", durable=False).write("1/a", b"whole")
    before.sync(["1/a"])
    (tmp_path / "1" / "a").write_bytes(b"torn!")  # by a loss of power
    (tmp_path / "1" / "b").write_bytes(b"never sent")
    now = Outbox(bucket, Folder(tmp_path))
    now.sync(["1/a", "1/b"], missing_ok=True)
    assert (now.read("1/a"), bucket.read("1/a"), bucket.read("1/b")) == (b"whole", b"whole", None)
    now.bring(["1/a"])
    assert (tmp_path / "1" / "a").read_bytes() == b"whole"


def test_what_is_removed_is_gone_here_and_there(bucket: Bucket, tmp_path: Path) -> None:
    files = Outbox(bucket, Folder(tmp_path))
    for name in ("1/a", "1/b", "2/c"):
        files.at("", durable=False).write(name, b"x")
    files.sync(["1/a", "2/c"])
    another = Outbox(bucket, Folder(tmp_path))
    assert another.names_in() == ["1", "2"]
    clear(another, "1")
    assert (another.list(), bucket.list()) == (["2/c"], ["2/c"])
    assert not (tmp_path / "1").exists()
    assert another.size("1/a") is None


def test_what_is_written_to_last_goes_to_the_bucket_at_once_and_copies_are_its_own(
    bucket: Bucket, tmp_path: Path
) -> None:
    files = Outbox(bucket, Folder(tmp_path))
    files.write("mark", b"1")
    files.keep("second", files, "mark")
    assert (bucket.read("mark"), bucket.read("second"), files.here.list()) == (b"1", b"1", [])


def test_how_far_transfers_have_come_is_told(bucket: Bucket, tmp_path: Path) -> None:
    told: list[tuple[str, Progress]] = []
    here, there = (Outbox(bucket, Folder(tmp_path / machine), Told(told)) for machine in ("here", "there"))
    for name in ("1/a", "1/b"):
        here.at("", durable=False).write(name, b"four")
    here.sync(["1/a", "1/b"])
    there.at("1").bring(["a", "b"])
    assert [each for each in told if each[1].files == 2] == [
        ("uploading", Progress(2, 2, 8, 8)),
        ("downloading", Progress(2, 2, 8)),
    ]
