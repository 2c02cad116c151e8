"""Spark's logs: we read what Spark wrote, and Spark goes on from what we wrote."""

from __future__ import annotations

import shutil
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
    as_path,
    as_uri,
    is_committed,
    log_offset,
    read_offsets,
    read_sink_log,
    read_source_log,
    remove_file,
    seed_sink_log,
    trim_log,
    write_whole,
)
from tidegate.spark.session import StageSessions
from tidegate.storage.parquet import count_rows

ODD_NAMES = ["plain", "a b", "größe", "50%", "a%20b", "a+b", "k=v", "a#b", "a?b", "日本", "it's", "a&b;c,d@e", "~x"]


# -- paths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_path_comes_back_from_its_uri(name: str) -> None:
    path = Path("/data") / name / f"part-{name}.parquet"
    assert as_path(as_uri(path)) == path


def test_both_forms_of_a_local_uri_are_understood() -> None:
    assert as_path("file:/data/a%20b") == as_path("file:///data/a%20b") == Path("/data/a b")


# -- single files -----------------------------------------------------------------------------------


def test_a_log_file_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "3", ["one", "two"])
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    assert (tmp_path / "3").read_text(encoding="utf-8") == "v1\none\ntwo"


def test_what_spark_has_not_logged_is_none(tmp_path: Path) -> None:
    assert read_sink_log(tmp_path, 0) is None
    assert read_source_log(tmp_path, 0, 0) is None
    assert not is_committed(tmp_path, 0)


def test_an_entry_may_name_no_file(tmp_path: Path) -> None:
    seed_sink_log(tmp_path / "output", 7)
    assert read_sink_log(tmp_path / "output", 7) == []
    assert read_sink_log(tmp_path / "output", 6) is None


def test_offsets_of_a_batch_are_as_spark_wrote_them(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    metadata = '{"batchWatermarkMs":1767225600000,"batchTimestampMs":1,"conf":{}}'
    write_whole(tmp_path / "offsets" / "4", [metadata, '{"logOffset":3}', "-", '{"topic":{"0":17}}'])
    found = read_offsets(tmp_path, 4)
    assert found.watermark_ms == 1_767_225_600_000
    assert found.sources == ('{"logOffset":3}', None, '{"topic":{"0":17}}')


def test_a_watermark_that_has_not_moved_yet_is_none(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    write_whole(tmp_path / "offsets" / "0", ['{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}', "-"])
    assert read_offsets(tmp_path, 0).watermark_ms is None


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "sink log": (f"{METADATA}/0", lambda folder: read_sink_log(folder, 0)),
    "source log": ("sources/1/0", lambda folder: read_source_log(folder, 1, 0)),
    "offsets": ("offsets/0", lambda folder: read_offsets(folder, 0)),
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
def test_a_damaged_file_is_named(tmp_path: Path, log: str, damage: str) -> None:
    name, read = READERS[log]
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(DAMAGE[damage])
    with pytest.raises(DamagedCheckpoint) as damaged:
        read(tmp_path)
    assert str(path) in str(damaged.value)


def test_offsets_that_are_gone_though_the_batch_was_committed_are_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="offsets/3"):
        read_offsets(tmp_path, 3)


# -- trimming ---------------------------------------------------------------------------------------


def test_trimming_deletes_lower_numbers_with_their_checksums_and_nothing_else(tmp_path: Path) -> None:
    for name in ("7", ".7.crc", "8", "9.compact", ".9.compact.crc", "10", ".10.crc", "11", ".hidden", "README", "x7"):
        (tmp_path / name).touch()
    trim_log(tmp_path, below=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".10.crc", ".hidden", "10", "11", "README", "x7"]


def test_a_log_that_is_not_there_needs_no_trimming(tmp_path: Path) -> None:
    trim_log(tmp_path / "nothing", below=10)


def test_a_file_goes_with_its_checksum(tmp_path: Path) -> None:
    for name in ("a.parquet", ".a.parquet.crc", "b.parquet"):
        (tmp_path / name).touch()
    remove_file(tmp_path / "a.parquet")
    remove_file(tmp_path / "a.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["b.parquet"]


# -- what Spark writes ------------------------------------------------------------------------------

BATCHES = 11
ROWS_PER_FILE = 3


class Written:
    """The folders of a query that Spark has run."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.source = source
        self.checkpoint = folder / "spark"
        self.output = folder / "output"

    def run(self, spark: SparkSession) -> None:
        rows = stream(StageSessions(spark).of_sources, self.source, files_per_batch=1)
        names = F.array(*(F.lit(name) for name in ODD_NAMES))
        keyed = rows.select("id", F.element_at(names, (F.col("id") % len(ODD_NAMES) + 1).cast("int")).alias("key"))
        writer = keyed.writeStream.partitionBy("key").option("checkpointLocation", str(self.checkpoint))
        writer.trigger(availableNow=True).start(str(self.output), "parquet").awaitTermination()

    def restored(self, folder: Path, as_batch: int) -> Written:
        """The same query with a fresh output, as if the last batch that it ran had been another."""
        other = Written(folder, self.source)
        shutil.copytree(self.checkpoint, other.checkpoint)
        for log in (other.checkpoint / "offsets", other.checkpoint / "commits"):
            kept = [(log / str(BATCHES - back)).read_bytes() for back in (2, 1)]
            shutil.rmtree(log)
            log.mkdir()
            for number, data in zip((as_batch - 1, as_batch), kept, strict=True):
                (log / str(number)).write_bytes(data)
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
    seen: Counter[Path] = Counter()
    for batch in range(BATCHES):
        entries = read_sink_log(written.output, batch)
        assert entries
        files = [as_path(entry.path) for entry in entries]
        assert [path.stat().st_size for path in files] == [entry.size for entry in entries]
        assert sum(count_rows(path) for path in files) == ROWS_PER_FILE
        assert {entry.action for entry in entries} == {"add"}
        seen.update(files)
    assert set(seen) == set(written.output.rglob("*.parquet"))
    assert set(seen.values()) == {1}
    assert len({path.parent for path in seen}) == len(ODD_NAMES)
    assert read_sink_log(written.output, BATCHES) is None


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
            assert [as_path(entry.path) for entry in entries] == [written.source / f"{batch:05d}.json"]
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
    files = [as_path(entry.path) for more in (1, 2) for entry in read_sink_log(restored.output, last + more) or ()]
    assert sum(count_rows(path) for path in files) == 2 * ROWS_PER_FILE
    assert set(files) == set(restored.output.rglob("*.parquet"))
    assert not is_committed(restored.checkpoint, last + 3)
