"""The same queries with their checkpoints on a disk and in a bucket, each measured in a process of its own: the jars
that Spark needs for a bucket, and its master, are to be there when its JVM starts.

`python -m benchmarks.bucket_runs KIND SCALE` measures one of them, and prints what it found.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock
from urllib.parse import unquote

import msgspec

from benchmarks.measure import WrongWork
from benchmarks.spark_chain import Feed, chain, input_files, paid_of
from benchmarks.spark_runs import (
    EXTRA_SETTINGS,
    Input,
    PlainRun,
    Run,
    TidegateRun,
    Variant,
    base_session,
    derived_session,
    temporary_folder,
    workspace,
)
from benchmarks.spark_state import KEY_BYTES, MAINTENANCE, STAGE, Keys, bytes_between, change, distinct_keys
from tests.s3_proxy import S3Proxy
from tests.s3_server import ACCESS_KEY, NONE_HERE, SECRET_KEY, S3Server, find_program
from tests.spark_cluster import SparkCluster, user_of_executors
from tidegate.engine.pipeline import Pipeline
from tidegate.spark.s3a import with_s3a
from tidegate.spark.session import forget_yarn

Kind = Literal[
    "local",
    "bucket",
    "bucket, not chained",
    "plain",
    "state",
    "cluster",
    "cluster, not chained",
    "cluster, plain",
]
DELAY_MS: Final = 20.0
_INTERVAL: Final = "2s"
_FILES: Final = 30
_WARM_UP_FILES: Final = 8
_FEWEST_FILES: Final = 3
_ROWS_PER_FILE: Final = 100
_STATE_MB: Final = 20
_SETTLE_S: Final = 6.0
_COUNTED_S: Final = 20.0
_TIME_OUT_S: Final = 1_800
Purpose = Literal["state", "rows handed on", "the rest"]


class Measured(msgspec.Struct, frozen=True):
    """What is not measured of a kind is 0."""

    rows_per_s: float = 0
    checkpoint_ms: float = 0
    requests: int = 0
    """While the rows passed."""
    batches: int = 0
    """Of all queries, meanwhile."""
    requests_for: dict[Purpose, int] = msgspec.field(default_factory=dict)
    """The same requests, by what they were for."""
    files: int = 0
    """That were put in meanwhile."""
    uploaded_bytes: int = 0
    changed_bytes: int = 0

    def requests_per_batch(self, *purposes: Purpose) -> float:
        """Of all purposes, or of some."""
        counted = sum(self.requests_for.get(each, 0) for each in purposes) if purposes else self.requests
        return counted / self.batches

    @property
    def requests_per_file(self) -> float:
        return self.requests / self.files


def measure(kind: Kind, scale: float) -> Measured:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bucket_runs", kind, str(scale)]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=_TIME_OUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WrongWork(f"{kind} has not ended in {_TIME_OUT_S} s") from error
    if done.returncode:
        raise WrongWork(f"{kind} failed: {done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)


# -- in that process -------------------------------------------------------------------------------


class _BucketRun(TidegateRun):
    def __init__(self, pipeline: Pipeline, folder: Path, interval: str, *, url: str, chain: bool = True) -> None:
        super().__init__(pipeline, folder, interval, chain=chain)
        self.root = url
        self._options["work"] = str(self.spark_root)

    @property
    def spark_root(self) -> Path:
        return self.folder / "work"


class _Bucket:
    """A part of one: `url` names it, `held` is where the server has it."""

    def __init__(self, proxy: S3Proxy, url: str, held: Path) -> None:
        self.proxy = proxy
        self.url = url
        self.held = held

    def at(self, name: str) -> _Bucket:
        return _Bucket(self.proxy, f"{self.url}/{name}", self.held / name)

    @property
    def s3a(self) -> str:
        return self.url.replace("s3://", "s3a://")


class _PlainOnBucket(PlainRun):
    """Its output lies on the disk, as that of Tidegate between checkpoints."""

    def __init__(self, pipeline: Pipeline, folder: Path, bucket: _Bucket) -> None:
        super().__init__(pipeline, folder, Variant.TUNED)
        self._bucket = bucket

    def checkpoint_location(self, stage: str) -> str:
        return f"{self._bucket.s3a}/{stage}"

    def checkpoint_folder(self, stage: str) -> Path:
        """Where the server has it: to look there is no request."""
        return self._bucket.held / stage


class _PlainOnCluster(_PlainOnBucket):
    """What queries hand on lies in the bucket: executors share nothing else, but for the tables and the input."""

    def _is_table(self, stage: str) -> bool:
        return not any(stage in each.inputs for each in self.definitions)

    def output_location(self, stage: str) -> str:
        return super().output_location(stage) if self._is_table(stage) else f"{self._bucket.s3a}/output/{stage}"

    def make_output(self, stage: str) -> None:
        if self._is_table(stage):
            super().make_output(stage)
            return
        context: Any = self._session.sparkContext
        path = context._jvm.org.apache.hadoop.fs.Path(self.output_location(stage))
        path.getFileSystem(context._jsc.hadoopConfiguration()).mkdirs(path)


@contextmanager
def _bucket() -> Iterator[_Bucket]:
    program = find_program()
    if program is None:
        raise WrongWork(NONE_HERE)
    server = S3Server(program)
    try:
        with S3Proxy(server.port) as proxy, mock.patch.dict("os.environ", server.environment(proxy.endpoint)):
            proxy.delay_ms = DELAY_MS
            proxy.asked = deque()  # all of them
            yield _Bucket(proxy, server.make_bucket("bench"), server.folder / "buckets" / "bench")
    finally:
        server.remove()


@contextmanager
def _cluster() -> Iterator[dict[str, str]]:
    """The settings by which Spark runs there. Executors are another user, where there is one."""
    os.umask(0)  # two users write into the tables
    workspace().chmod(0o777)
    cluster = SparkCluster(2, user_of_executors())
    try:
        os.environ["PYSPARK_PYTHON"] = cluster.python
        hadoop = {"spark.hadoop.fs.permissions.umask-mode": "0000"}
        yield {"spark.master": cluster.master, **cluster.settings, **hadoop}
        base_session().stop()
    finally:
        cluster.remove()


def _opened(kind: Kind, pipeline: Pipeline, folder: Path, bucket: _Bucket) -> Run:
    match kind:
        case "plain":
            return _PlainOnBucket(pipeline, folder, bucket)
        case "cluster, plain":
            return _PlainOnCluster(pipeline, folder, bucket)
        case "local":
            return TidegateRun(pipeline, folder, _INTERVAL, chain=True)
        case _:
            return _BucketRun(pipeline, folder, _INTERVAL, url=bucket.url, chain=kind in ("bucket", "cluster"))


def _run_through(kind: Kind, files: int, bucket: _Bucket) -> Measured:
    feed, proxy = Feed(files, _ROWS_PER_FILE, 1), bucket.proxy
    paths, (first,) = input_files(feed.files, feed.rows_per_file), input_files(1, 1)
    with temporary_folder() as folder:
        folder.chmod(workspace().stat().st_mode)
        source = Input(folder / "input")
        pipeline = chain(source.folder, folder / "tables", 1)
        with _opened(kind, pipeline, folder, bucket.at(f"{kind.replace(', ', '-')}-{files}")) as run:
            source.offer(first)
            run.await_consumed(1)
            batches, asked, started = _batches(run), len(proxy.asked), time.perf_counter()
            taken = len(run.durations_ms) if isinstance(run, TidegateRun) else 0
            for path in paths:
                source.offer(path)
            run.await_consumed(1 + feed.rows, 1 + paid_of(0, feed.rows))
            took_s, requests = time.perf_counter() - started, list(proxy.asked)[asked:]
            batches = _batches(run) - batches
            if run.rows_at("paid") != 1 + paid_of(0, feed.rows):
                raise WrongWork(f"{run.rows_at('paid')} rows came to paid, not {1 + paid_of(0, feed.rows)}")
            checkpoint_ms = 0.0
            if isinstance(run, TidegateRun):
                tidegate_run = run
                run.await_that(lambda: len(tidegate_run.durations_ms) > taken + 1)
                checkpoint_ms = statistics.median([*run.durations_ms.values()][taken:])
    return Measured(feed.rows / took_s, checkpoint_ms, len(requests), batches, purposes_of(requests), files)


def _batches(run: Run) -> int:
    """That all queries have committed so far."""
    return sum(run.last_batch(name) + 1 for name in run.query_names)


def purposes_of(requests: Iterable[tuple[str, str]]) -> dict[Purpose, int]:
    """What requests were for, by the folder of Spark's that they name: as they are asked, method and path."""
    found: Counter[Purpose] = Counter()
    for _, asked in requests:
        path, _, query = asked.partition("?")
        listed = query.partition("prefix=")[2].partition("&")[0] if "list-type" in query else ""
        folders = [*path.split("/"), *unquote(listed).split("/")]
        if "state" in folders:
            found["state"] += 1
        elif any(each.startswith("output") for each in folders):
            found["rows handed on"] += 1
        else:
            found["the rest"] += 1
    return dict(found)


def _change_state(state_mb: int, counted_s: float, bucket: _Bucket) -> Measured:
    """What is uploaded while state changes at a fixed rate, and what Spark has written of it meanwhile."""
    with temporary_folder() as folder:
        source, keys = Input(folder / "input"), Keys(folder / "keys")
        pipeline = distinct_keys(source.folder, folder / "tables")
        run = _BucketRun(pipeline, folder, _INTERVAL, url=bucket.at("state").url, chain=False)
        run._session = derived_session(MAINTENANCE)
        with run:
            source.offer(keys.file(max(1, state_mb * 1_000_000 // KEY_BYTES)))
            run.await_consumed(keys.rows)
            change(source, keys, _SETTLE_S)
            began_ns, before = _when_one_has_ended(run, bucket.proxy)
            change(source, keys, counted_s)
            ended_ns, after = _when_one_has_ended(run, bucket.proxy)
            changed = bytes_between(run.checkpoint_folder(STAGE) / "state", began_ns, ended_ns)
    return Measured(uploaded_bytes=after - before, changed_bytes=changed)


def _when_one_has_ended(run: TidegateRun, proxy: S3Proxy) -> tuple[int, int]:
    """When a checkpoint is complete: the time, and how many bytes of checkpoints were uploaded until then."""
    taken = len(run.durations_ms)
    run.await_that(lambda: len(run.durations_ms) > taken)
    sent = sum(size for path, size in proxy.put_bytes.items() if "/generations/" in path)
    return time.time_ns(), sent


def _s3a(endpoint: str) -> dict[str, str]:
    """As its users set it: where the bucket is, and who they are."""
    found = {
        "endpoint": endpoint,
        "endpoint.region": "us-east-1",
        "path.style.access": "true",
        "access.key": ACCESS_KEY,
        "secret.key": SECRET_KEY,
    }
    return {f"spark.hadoop.fs.s3a.{key}": value for key, value in found.items()}


def _main(kind: Kind, scale: float) -> None:
    is_on_cluster, is_plain = kind.startswith("cluster"), kind.endswith("plain")
    with ExitStack() as stack:
        bucket = stack.enter_context(_bucket())
        settings = stack.enter_context(_cluster()) if is_on_cluster else {}
        if is_plain:
            settings |= _s3a(bucket.proxy.endpoint)
        EXTRA_SETTINGS.update(with_s3a(settings) if is_plain or is_on_cluster else settings)
        forget_yarn(base_session())
        if kind == "state":
            found = _change_state(max(1, round(_STATE_MB * scale)), max(5.0, _COUNTED_S * min(1, scale)), bucket)
        else:
            # The first run of a JVM takes seconds for each step.
            _run_through(kind, max(_FEWEST_FILES, round(_WARM_UP_FILES * min(1, scale))), bucket.at("warm-up"))
            found = _run_through(kind, max(_FEWEST_FILES, round(_FILES * scale)), bucket)
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    _main(msgspec.convert(sys.argv[1], Kind), float(sys.argv[2]))
