"""The commands of docs/clusters.md, run as they stand there, on a real cluster and a real S3 server."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import deltalake
import pytest

from tests.cli.harness import tidegate
from tests.s3_server import SECRET_KEY, S3Server
from tests.spark_cluster import SparkCluster
from tests.test_documents import ROOT, example
from tests.test_drivers_guide import commands_in, put_orders
from tidegate.storage.bucket_access import open_bucket

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.s3]

BESIDE = """

from pyspark.sql.functions import udf
from pyspark.sql.types import StringType

import beside

@udf(returnType=StringType())
def labelled(city):
    return beside.label(city)
"""


@pytest.mark.usefixtures("s3a")
def test_the_guide_to_clusters_is_true(
    cluster: SparkCluster, s3_server: S3Server, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_bucket, in_folder = commands_in(ROOT / "docs" / "clusters.md")
    s3_server.make_bucket("bucket")
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
    monkeypatch.setenv("PYSPARK_PYTHON", cluster.python)
    before = os.umask(0)
    try:
        for number, command in enumerate((in_bucket, in_folder)):
            folder = shared / str(number)
            (folder / "orders").mkdir(parents=True)
            text = example()
            # A module beside the file, which its functions import where they run.
            (folder / "beside.py").write_text("def label(city):\n    return f'in {city}'\n", encoding="utf-8")
            text = text.replace("import tidegate as tg", f"import tidegate as tg{BESIDE}", 1)
            large = 'where("amount >= 100")'
            text = text.replace(large, f'{large}.withColumn("country", labelled("country"))')
            (folder / "orders.py").write_text(text, encoding="utf-8")
            put_orders(folder, 0)
            words = shlex.split(command.replace("spark://head:7077", cluster.master).replace("/shared", str(shared)))
            options = [f"--conf={key}={value}" for key, value in cluster.settings.items()]
            if "--available-now" not in words:
                options.append("--available-now")
            done = tidegate(*words[1:], *options, cwd=folder)
            assert done.returncode == 0, done.stdout + done.stderr
            found = deltalake.DeltaTable(folder / "lake" / "large_orders").to_pyarrow_table()
            assert set(found["country"].to_pylist()) == {"in DE"}
            assert sorted(found["id"].to_pylist()) == list(range(100, 300))
            assert SECRET_KEY not in done.stdout + done.stderr
    finally:
        os.umask(before)
    bucket = open_bucket("s3://bucket/orders", s3_server.options())
    assert any("/state/" in name for name in bucket.list("generations"))
    assert not any(SECRET_KEY.encode() in (bucket.read(name) or b"") for name in bucket.list())
    told = (shared / "cache").rglob("spark.log")
    assert not any(SECRET_KEY in path.read_text(encoding="utf-8", errors="replace") for path in told)
