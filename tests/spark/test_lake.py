"""A pipeline on a folder whose tables are in a bucket: run, run again, read, set back, forked; and its secrets kept."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.spark.harness import as_rows, run_to_end, stream, write_input
from tidegate.storage.bucket_access import open_bucket

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.s3]


class Lake:
    def __init__(self, folder: Path, server: S3Server) -> None:
        self.folder = folder
        self.server = server
        self.root = folder / "root"
        self.url = f"{server.make_bucket(f'lake-{uuid.uuid4().hex[:12]}')}/lake"
        self.said = ""

    def pipeline(self) -> tg.Pipeline:
        pipeline = tg.Pipeline("shop")
        options: Any = {"storage_options": self.server.options(), "optimize": "1s", "vacuum": "0s"}

        @pipeline.source
        def orders(spark: SparkSession) -> DataFrame:
            return stream(spark, self.folder / "orders", files_per_batch=1)

        @pipeline.sink(tg.DeltaTable(f"{self.url}/all_orders", "key", **options))
        def all_orders(orders: DataFrame) -> DataFrame:
            return orders.select("id", F.expr("concat(key, ':%')").alias("key"))

        @pipeline.sink(tg.DeltaTable(f"{self.url}/totals", key="key", **options), output_mode="update")
        def totals(orders: DataFrame) -> DataFrame:
            return orders.groupBy("key").agg(F.count("*").alias("orders"))

        return pipeline

    def command(self, *arguments: str, exits: int = 0) -> str:
        """What a command of its own process says, which knows the credentials by its environment."""
        command = [sys.executable, "-m", "tidegate", *arguments]
        done = subprocess.run(
            command, env=os.environ | self.server.environment(), capture_output=True, text=True, check=False
        )
        self.said += done.stdout + done.stderr
        assert done.returncode == exits, done.stdout + done.stderr
        return done.stdout

    def shown(self, root: Path, checkpoint: str | None = None) -> tuple[set[int], dict[str, int]]:
        tables = tg.read(root, checkpoint, storage_options=self.server.options())
        ids = Counter(tables["all_orders"].to_arrow()["id"].to_pylist())
        assert not ids or max(ids.values()) == 1
        totals = tables["totals"].to_arrow().to_pylist()
        return set(ids), {row["key"]: row["orders"] for row in totals}


def expected(rows: int) -> tuple[set[int], dict[str, int]]:
    return set(range(rows)), {f"k{key}": len(range(key, rows, 5)) for key in range(5)}


def test_tables_in_a_bucket_are_run_read_set_back_and_forked_and_no_secret_is_told(
    tmp_path: Path, spark: SparkSession, s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    lake = Lake(tmp_path, s3_server)
    for number in range(2):
        write_input(tmp_path / "orders", 2, 40, first_file=number * 2)
        run_to_end(lake.pipeline(), lake.root, spark, retain=50)
        assert lake.shown(lake.root) == expected(80 * (number + 1))
    tables = tg.read(lake.root, storage_options=s3_server.options())
    read = as_rows(tables["all_orders"].to_spark(spark).select("id", "key").collect())
    assert read == Counter({(each, f"k{each % 5}:%"): 1 for each in range(160)})

    status = json.loads(lake.command("status", "--root", str(lake.root), "--json", exits=6))
    assert status["life"] == "stopped"
    lake.command("verify", "--root", str(lake.root))
    retained = json.loads(lake.command("checkpoints", "--root", str(lake.root), "--json"))
    names = [each["checkpoint"] for each in retained["checkpoints"] if each["state"] == "complete"]
    before = next(name for name in reversed(names) if len(lake.shown(lake.root, name)[0]) < 160)
    then = lake.shown(lake.root, before)

    fork = tmp_path / "fork"
    lake.command("fork", "--root", str(lake.root), "--to", str(fork))
    assert lake.shown(fork) == expected(160)
    lake.command("restore", "--root", str(lake.root), "--to", before, "--yes")
    assert lake.shown(lake.root) == then
    run_to_end(lake.pipeline(), lake.root, spark, retain=50)
    assert lake.shown(lake.root) == lake.shown(fork) == expected(160)

    bucket = open_bucket(lake.url, s3_server.options())
    left = [name for name in bucket.list() if "/_tidegate/" in name and name.endswith(".parquet")]
    assert left == []
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts = [path.read_bytes() for path in written] + [bucket.read(name) or b"" for name in bucket.list()]
    texts += [caplog.text.encode(), lake.said.encode(), repr(tables).encode()]
    assert len(texts) > 20
    for secret in (SECRET_KEY, ACCESS_KEY):
        assert not [text for text in texts if secret.encode() in text]
