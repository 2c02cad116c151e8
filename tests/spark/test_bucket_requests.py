"""How many requests a root in a bucket costs: counted on a real S3 server, so that nobody adds some unseen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.harness import tidegate
from tests.s3_proxy import S3Proxy
from tests.s3_server import S3Server
from tests.test_documents import ROOT
from tests.test_drivers_guide import said, started
from tidegate.cli.exits import Exit
from tidegate.engine.status_files import read_status
from tidegate.storage.places import as_given

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.s3]

PLACE = "s3://requests/orders"
_PATIENCE_S = 240
_INTERVAL_S = 5
_CHECKPOINTS = 6
# Mark its id, look at the log; write its manifest, claim its slot, look at the log.
_PER_CHECKPOINT = 5
# Of commands that look, however many files there are: the log of ten records, three manifests, a list, a few besides.
_MOST_OF = {"status": 22, "checkpoints": 26, "verify --quick": 24, "history": 5}
# By a run that is alive, while one of them looks.
_BESIDE = 6


@pytest.fixture
def proxy(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    s3_server.make_bucket("requests")
    with S3Proxy(s3_server.port) as proxy:
        for name, value in s3_server.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield proxy


def test_an_idle_pipeline_makes_few_requests(tmp_path: Path, proxy: S3Proxy) -> None:
    """Seven stages and four tables. A minute with a checkpoint every 10 s is at most 60: 30 for the checkpoints, 29 for
    the lease, for what it may be asked, and for its history."""
    folder = tmp_path / "orders"
    shutil.copytree(ROOT / "examples" / "orders", folder)
    subprocess.run([sys.executable, "generate.py", "--files", "2"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    run = f"tidegate run pipeline.py --root {PLACE} --checkpoint-interval {_INTERVAL_S}s"
    with started(folder, run) as (process,):
        _wait_until_idle(folder, process, proxy)
        asked, began = len(proxy.asked), time.monotonic()
        first = _decided(proxy)
        while _decided(proxy) < first + _CHECKPOINTS:
            assert process.poll() is None, said(folder)
            assert time.monotonic() - began < _PATIENCE_S, said(folder)
            time.sleep(0.5)
        time.sleep(1)  # it is cleaned up behind the last
        minutes = (time.monotonic() - began) / 60
        made = Counter(map(_kind, list(proxy.asked)[asked:]))
        checkpoints = _decided(proxy) - first
        for command, most in _MOST_OF.items():
            assert _made_by(command, proxy) <= most + _BESIDE, command
        process.terminate()
        assert process.wait(_PATIENCE_S) == 0, said(folder)
    beside = {
        kind: made.pop(kind, 0) for kind in ("PUT lease.json", "GET lease.json", "LIST requests/", "PUT history/")
    }
    assert beside["PUT lease.json"] <= 12 * minutes + 1, made
    assert beside["LIST requests/"] <= 12 * minutes + 1, made
    assert beside["GET lease.json"] <= 2 * minutes + 1, made
    assert beside["PUT history/"] <= 2 * minutes + 1, made
    # One more, where what they leave is deleted: that of many at once.
    assert made.total() <= _PER_CHECKPOINT * (checkpoints + 1) + 2, made
    for command, most in _MOST_OF.items():
        assert _made_by(command, proxy) <= most, command
    left = as_given(PLACE).files
    assert len(left.list("ids")) == 1, "with the last checkpoint all is cleaned up"
    assert not any(name.startswith("status") for name in left.names_in()), "what it says is in the lease"


def test_what_a_checkpoint_calls_new_is_what_was_uploaded_for_it(tmp_path: Path, proxy: S3Proxy) -> None:
    folder = tmp_path / "orders"
    shutil.copytree(ROOT / "examples" / "orders", folder)
    for _ in range(2):  # the second goes on from what the first has stored
        generate = [sys.executable, "generate.py", "--files", "2"]
        subprocess.run(generate, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        proxy.put_bytes.clear()
        done = tidegate("run", "pipeline.py", "--root", f"{PLACE}-new", "--available-now", "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines()]
        taken = {each["checkpoint"]["checkpoint"]: each["checkpoint"] for each in events if "checkpoint" in each}
        new_bytes = sum(each["new_bytes"] for each in taken.values() if each["state"] == "complete")
        sent = {path: size for path, size in proxy.put_bytes.items() if "/snapshots/" in path}
        assert new_bytes == sum(sent.values()) > 0
        beside = proxy.put_bytes.total() - new_bytes
        assert not any("/stages/" in path for path in proxy.put_bytes), "what Spark writes between stays here"
        assert beside < 100_000 * len(taken), "manifests, records, the lease"


def _wait_until_idle(folder: Path, process: subprocess.Popen[bytes], proxy: S3Proxy) -> None:
    """Two checkpoints behind all that was read."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        assert process.poll() is None, said(folder)
        assert time.monotonic() < deadline, said(folder)
        status = read_status(as_given(PLACE).files)
        last = () if status is None else [each for each in status.checkpoints if each.state == "complete"][-2:]
        if len(last) == 2 and not any(each.new_bytes for each in last):
            return
        proxy.asked.clear()
        time.sleep(1)


def _made_by(command: str, proxy: S3Proxy) -> int:
    before = proxy.counts.total()
    done = tidegate(*command.split(), "--root", PLACE)
    assert done.returncode in (Exit.FINE, Exit.NOT_RUNNING), done.stdout + done.stderr
    return proxy.counts.total() - before


def _decided(proxy: S3Proxy) -> int:
    return sum(_kind(each) == "PUT decisions/" for each in list(proxy.asked))


def _kind(asked: tuple[str, str]) -> str:
    method, path = asked
    path, _, query = path.partition("?")
    if "list-type" in query:
        return f"LIST {query.partition('prefix=')[2].replace('%2F', '/').removeprefix('orders/').split('&')[0]}"
    name = path.removeprefix("/requests/orders").lstrip("/")
    return f"{method} {name if '/' not in name else name.split('/')[0] + '/'}"
