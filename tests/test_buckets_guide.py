"""The commands of docs/buckets.md, run as they stand there, on a real S3 server; and how many requests they make."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidegate as tg
from tests.cli.harness import tidegate
from tests.s3_proxy import S3Proxy
from tests.s3_server import SECRET_KEY, S3Server
from tests.test_documents import ROOT, example
from tests.test_drivers_guide import commands_in, put_orders, said, started
from tidegate.engine.status_files import read_status
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.places import as_given
from tidegate.storage.savepoints import savepoints_in

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.s3]

GUIDE = ROOT / "docs" / "buckets.md"
PLACE = "s3://bucket/orders"
TABLE = "s3://bucket/lake/large_orders"
_PATIENCE_S = 240
# What the guide says of commands that look, and a little more: what is retained differs. One table in the bucket is
# opened, whose log is short.
_MOST_REQUESTS = {"status": 24, "checkpoints": 35 + 30}
# Of an idle pipeline with one table in the bucket, while it takes one checkpoint.
_MOST_PER_CHECKPOINT = 7 + 4


@pytest.fixture
def proxy(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    s3_server.make_bucket("bucket")
    with S3Proxy(s3_server.port) as proxy:
        for name, value in s3_server.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield proxy


def test_the_guide_to_buckets_is_true(tmp_path: Path, proxy: S3Proxy, s3_server: S3Server) -> None:
    run, *looking, stop, checkpoints, verify, fork, elsewhere = commands_in(GUIDE)
    (tmp_path / "orders.py").write_text(_pipeline(), encoding="utf-8")
    (tmp_path / "orders").mkdir()
    put_orders(tmp_path, 0)
    with started(tmp_path, f"{run} --checkpoint-interval 2s") as running:  # sooner than by default
        _wait_for_rows(tmp_path, running[0])
        for command in looking:
            _checked(tmp_path, command, s3_server)
        _check_idle(proxy)
        _checked(tmp_path, stop, s3_server)
        assert running[0].wait(_PATIENCE_S) == 0, said(tmp_path)
    for command in (checkpoints, verify, fork):
        _checked(tmp_path, command, s3_server)
    put_orders(tmp_path, 1)
    before = proxy.counts["GET"]
    done = tidegate(*shlex.split(elsewhere)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert proxy.counts["GET"] > before + 20, "the other work folder is empty: all is fetched"
    assert (tmp_path / "elsewhere" / "lock").exists()
    tables = tg.read(PLACE)
    assert tables["large_orders"].address == TABLE
    assert not (tmp_path / "lake" / "large_orders").exists()
    assert len(tables["large_orders"].to_pandas()) == 400
    assert [each.folder for each in savepoints_in("s3://bucket/savepoints")] == [
        "s3://bucket/savepoints/before-upgrade"
    ]
    places = [as_given(PLACE).files, open_bucket(TABLE)]
    told = b"\n".join(files.read(name) or b"" for files in places for name in files.list())
    assert SECRET_KEY.encode() not in told + said(tmp_path).encode()


def _pipeline() -> str:
    """The readme's, with the table that the guide has in a bucket."""
    (table,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    in_a_folder = table.replace(TABLE, "lake/large_orders")
    assert table != in_a_folder
    assert in_a_folder in example()
    return example().replace(in_a_folder, table)


def _checked(folder: Path, command: str, server: S3Server) -> None:
    """By a way of its own: the run that is alive makes requests beside it."""
    name, *rest = shlex.split(command)[1:]
    with S3Proxy(server.port) as proxy, pytest.MonkeyPatch.context() as patch:
        for key, value in server.environment(proxy.endpoint).items():
            patch.setenv(key, value)
        done = tidegate(name, *rest, cwd=folder)
        made = proxy.counts.total()
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{said(folder)}"
    assert made > 0, command
    assert made <= _MOST_REQUESTS.get(name, made), f"{command}: {made} requests"


def _check_idle(proxy: S3Proxy) -> None:
    """Bounded by its checkpoints, whatever the stages are: none of them looks into the bucket by itself."""
    status = read_status(as_given(PLACE).files)
    assert status is not None
    before, first, began = proxy.counts.total(), _newest(), time.monotonic()
    while _newest() < first + 3:
        assert time.monotonic() - began < _PATIENCE_S
        time.sleep(2)
    taken, idle_s = _newest() - first, time.monotonic() - began
    beside = 4 * idle_s  # requests and the lease; and what was asked here
    assert proxy.counts.total() - before <= beside + _MOST_PER_CHECKPOINT * (taken + 1)


def _newest() -> int:
    marks = as_given(PLACE).files.list("ids")
    return max(int(each.rpartition("/")[2]) for each in marks)


def _wait_for_rows(folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        assert process.poll() is None, said(folder)
        assert time.monotonic() < deadline, said(folder)
        found = read_status(as_given(PLACE).files)
        if found is not None and any(each.new_bytes and each.state == "complete" for each in found.checkpoints):
            return
        time.sleep(1)
