"""Spark's logs: we read what Spark wrote, and Spark goes on from what we wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.spark.harness import stream, write_input
from tidegate.errors import DamagedCheckpoint
from tidegate.spark.filelog import (
    METADATA,
    checked_by,
    is_committed,
    log_offset,
    read_offsets,
    read_sink_log,
    read_source_log,
    remove_files,
    seed_sink_log,
    trim_log,
    write_log,
)
from tidegate.spark.session import StageSessions
from tidegate.storage.files import Files, clear
from tidegate.storage.folder import Folder
from tidegate.storage.memory import Memory
from tidegate.storage.parquet import count_rows

pytestmark = pytest.mark.matrix

ODD_NAMES = ["plain", "a b", "größe", "50%", "a%20b", "a+b", "k=v", "a#b", "a?b", "日本", "it's", "a&b;c,d@e", "~x"]


# -- single files -----------------------------------------------------------------------------------


@pytest.fixture
def files() -> Memory:
    return Memory()


def test_a_log_file_starts_with_its_version(files: Memory) -> None:
    write_log(files, "commits/3", ["one", "two"])
    assert files.read("commits/3") == b"v1\none\ntwo"


def test_what_spark_has_not_logged_is_none(files: Memory) -> None:
    assert read_sink_log(files, 0) is None
    assert read_source_log(files, 0, 0) is None
    assert not is_committed(files, 0)


def test_an_entry_may_name_no_file(files: Memory) -> None:
    seed_sink_log(files, 7)
    assert read_sink_log(files, 7) == []
    assert read_sink_log(files, 6) is None


def test_offsets_of_a_batch_are_as_spark_wrote_them(files: Memory) -> None:
    metadata = '{"batchWatermarkMs":1767225600000,"batchTimestampMs":1,"conf":{}}'
    write_log(files, "offsets/4", [metadata, '{"logOffset":3}', "-", '{"topic":{"0":17}}'])
    found = read_offsets(files, 4)
    assert found.watermark_ms == 1_767_225_600_000
    assert found.sources == ('{"logOffset":3}', None, '{"topic":{"0":17}}')


def test_a_watermark_that_has_not_moved_yet_is_none(files: Memory) -> None:
    write_log(files, "offsets/0", ['{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}', "-"])
    assert read_offsets(files, 0).watermark_ms is None


READERS: dict[str, tuple[str, Callable[[Files], object]]] = {
    "sink log": (f"{METADATA}/0", lambda files: read_sink_log(files, 0)),
    "source log": ("sources/1/0", lambda files: read_source_log(files, 1, 0)),
    "offsets": ("offsets/0", lambda files: read_offsets(files, 0)),
}
DAMAGE = {
    "empty": b"",
    "another version": b'v2\n{"path":"file:/a"}',
    "cut off": b'v1\n{"path":"file:/a","si',
    "no object": b"v1\n17",
    "a field is missing": b'v1\n{"path":"file:/a","batchWatermarkMs":"x"}',
    "no text": b"v1\n\xff\xfe\x00",
}


@pytest.mark.parametrize("log", READERS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(files: Memory, log: str, damage: str) -> None:
    name, read = READERS[log]
    files.write(name, DAMAGE[damage])
    with pytest.raises(DamagedCheckpoint) as damaged:
        read(files)
    assert files.location(name) in str(damaged.value)


def test_offsets_that_are_gone_though_the_batch_was_committed_are_damage(files: Memory) -> None:
    with pytest.raises(DamagedCheckpoint, match="offsets/3"):
        read_offsets(files, 3)


# -- trimming ---------------------------------------------------------------------------------------


def test_trimming_deletes_lower_numbers_with_their_checksums_and_nothing_else(files: Memory) -> None:
    for name in ("7", ".7.crc", "8", "9.compact", ".9.compact.crc", "10", ".10.crc", "11", ".hidden", "README", "x7"):
        files.write(f"log/{name}", b"")
    trim_log(files, "log", below=10)
    assert files.names_in("log") == [".10.crc", ".hidden", "10", "11", "README", "x7"]
    trim_log(files, "nothing", below=10)


def test_a_file_goes_with_its_checksum(files: Memory) -> None:
    for name in ("a.parquet", ".a.parquet.crc", "k=v/a.parquet", "k=v/.a.parquet.crc", "k=v/b.parquet"):
        files.write(name, b"")
    for name in ("a.parquet", "k=v/a.parquet", "k=v/a.parquet"):
        remove_files(files, [name])
    assert files.list() == ["k=v/b.parquet"]


# -- what Spark writes ------------------------------------------------------------------------------

BATCHES = 11
ROWS_PER_FILE = 3


class Written:
    """The folders of a query that Spark has run."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.source = source
        self.checkpoint = Folder(folder / "spark")
        self.output = Folder(folder / "output")

    def run(self, spark: SparkSession) -> None:
        rows = stream(StageSessions(spark).of_sources, self.source, files_per_batch=1)
        names = F.array(*(F.lit(name) for name in ODD_NAMES))
        keyed = rows.select("id", F.element_at(names, (F.col("id") % len(ODD_NAMES) + 1).cast("int")).alias("key"))
        writer = keyed.writeStream.partitionBy("key").option("checkpointLocation", self.checkpoint.location())
        writer.trigger(availableNow=True).start(self.output.location(), "parquet").awaitTermination()

    def restored(self, folder: Path, as_batch: int) -> Written:
        """The same query with a fresh output, as if the last batch that it ran had been another."""
        other = Written(folder, self.source)
        for name in self.checkpoint.list():
            other.checkpoint.copy(name, self.checkpoint, name)
        for log in ("offsets", "commits"):
            clear(other.checkpoint, log)
            for number, back in ((as_batch - 1, 2), (as_batch, 1)):
                other.checkpoint.copy(f"{log}/{number}", self.checkpoint, f"{log}/{BATCHES - back}")
        seed_sink_log(other.output, as_batch)
        return other


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Written:
    """11 batches, after which Spark's file source has compacted its log; then two more files of input."""
    folder = tmp_path_factory.mktemp("written") / "größe 50% a+b k=v it's"
    found = Written(folder, folder / "in")
    write_input(found.source, BATCHES, ROWS_PER_FILE)
    found.run(spark)
    write_input(found.source, 2, ROWS_PER_FILE, first_file=BATCHES)
    return found


@pytest.mark.spark
@pytest.mark.slow
def test_the_sink_log_names_the_files_of_every_batch(written: Written) -> None:
    seen: Counter[str] = Counter()
    for batch in range(BATCHES):
        entries = read_sink_log(written.output, batch)
        assert entries
        names = [written.output.name_of(entry.path) or "elsewhere" for entry in entries]
        assert [written.output.size(name) for name in names] == [entry.size for entry in entries]
        assert sum(count_rows(written.output, name) for name in names) == ROWS_PER_FILE
        assert {entry.action for entry in entries} == {"add"}
        seen.update(names)
    assert set(seen) == parquet_files(written.output)
    assert set(seen.values()) == {1}
    assert len({name.partition("/")[0] for name in seen}) == len(ODD_NAMES)
    assert read_sink_log(written.output, BATCHES) is None


def parquet_files(output: Files) -> set[str]:
    return {name for name in output.list() if name.endswith(".parquet")}


@pytest.mark.spark
@pytest.mark.slow
def test_offsets_and_source_log_tell_what_every_batch_has_read(written: Written) -> None:
    for batch in range(BATCHES):
        assert is_committed(written.checkpoint, batch)
        (source,) = read_offsets(written.checkpoint, batch).sources
        assert source is not None
        assert log_offset(source) == batch
        if batch != 9:  # there it is compacted, as the log of a source of the user's may be
            entries = read_source_log(written.checkpoint, 0, batch)
            assert entries is not None
            assert [Folder(written.source).name_of(entry.path) for entry in entries] == [f"{batch:05d}.json"]
            assert [entry.batch_id for entry in entries] == [batch]
    assert not is_committed(written.checkpoint, BATCHES)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("last", [7, 8, 999_998, 1_000_000_000])
def test_a_query_that_is_restored_at_a_batch_writes_the_next_into_a_fresh_folder(
    written: Written, spark: SparkSession, tmp_path: Path, last: int
) -> None:
    """Also where Spark would compact its log, for which it wants every entry since the beginning."""
    restored = written.restored(tmp_path, last)
    restored.run(spark)
    assert read_sink_log(restored.output, last - 1) is None
    assert read_sink_log(restored.output, last) == []
    entries = [entry for more in (1, 2) for entry in read_sink_log(restored.output, last + more) or ()]
    names = [restored.output.name_of(entry.path) or "elsewhere" for entry in entries]
    assert sum(count_rows(restored.output, name) for name in names) == 2 * ROWS_PER_FILE
    assert set(names) == parquet_files(restored.output)
    assert not is_committed(restored.checkpoint, last + 3)


def test_a_file_of_checksums_is_of_the_file_beside_it() -> None:
    assert checked_by("a/b/.part-0.parquet.crc") == "a/b/part-0.parquet"
    assert checked_by(".part.crc") == "part"
    for own in ("a/part-0.parquet", "a/.hidden", "a/part.crc", "part"):
        assert checked_by(own) == own
