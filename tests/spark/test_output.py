"""What a batch has written, by a folder of its own."""

from __future__ import annotations

from tidegate.spark.output import batch_folder, written_files
from tidegate.storage.memory import Memory

WRITTEN = ["part-0.parquet", "key=a/part-0.parquet", "_day=1/.hour=2/part-1.parquet"]
LEFT = [
    "_temporary/0/_temporary/attempt_20260101_0001_m_000000_7/part-0.parquet",
    "key=a/.spark-staging-1/key=a/part-0.parquet",
    "key=a/_part-0.parquet",
    "_temporary/0/.part-0.parquet.crc",
]
"""By a task that was taken for lost, and has ended its upload after the job was committed."""


def test_what_a_lost_task_has_left_is_no_output_and_is_deleted() -> None:
    output = Memory()
    folder = batch_folder(7)
    kept = [*WRITTEN, ".part-0.parquet.crc"]
    for name in (*kept, *LEFT):
        output.write(f"{folder}/{name}", b"rows")
    assert written_files(output, 7, "update") == [(f"{folder}/{name}", 4) for name in sorted(WRITTEN)]
    assert output.list() == sorted(f"{folder}/{name}" for name in kept), "what Hadoop checks a file by stays with it"


def test_a_batch_of_which_only_that_is_there_has_written_nothing() -> None:
    output = Memory()
    for name in LEFT:
        output.write(f"{batch_folder(7)}/{name}", b"rows")
    assert written_files(output, 7, "complete") == []
    assert output.list() == []
