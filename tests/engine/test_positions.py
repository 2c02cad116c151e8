"""Where sources stand, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.cli.harness import make_root
from tidegate.engine.positions import SourcePosition, positions_of, told_position
from tidegate.spark.positions import StreamPosition
from tidegate.storage.file_lists import SnapshotFiles
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import SourceStream

KAFKA = SourceStream("kafka", {"subscribe": "orders"})
FILES = SourceStream("json", {"path": "/in"})


def test_kafka_by_topic_partition_and_offset() -> None:
    offset = '{"orders":{"0":42,"10":7,"2":0},"paid":{"0":1}}'
    assert told_position(StreamPosition(KAFKA, 0, offset)) == SourcePosition(
        format="kafka",
        words="topic orders: partition 0 at offset 42, partition 2 at offset 0, partition 10 at offset 7; "
        "topic paid: partition 0 at offset 1",
        offset=offset,
        topics={"orders": {"0": 42, "10": 7, "2": 0}, "paid": {"0": 1}},
    )
    many = '{"orders":{' + ",".join(f'"{number}":{number}' for number in range(32)) + "}}"
    words = told_position(StreamPosition(KAFKA, 0, many)).words
    assert words.endswith("partition 7 at offset 7 and 24 more partitions")


def test_files_by_how_many_and_the_last() -> None:
    read = {("/in/b.json", 100): 0, ("/in/a.json", 200): 1, ("/in/c.json", 150): 1}
    found = told_position(StreamPosition(FILES, 0, '{"logOffset":1}', read))
    assert (found.words, found.files, found.last_file) == ("3 files read, the last: /in/a.json", 3, "/in/a.json")
    one = told_position(StreamPosition(FILES, 0, '{"logOffset":0}', {("/in/b.json", 100): 0}))
    assert one.words == "1 file read, the last: /in/b.json"


@pytest.mark.parametrize(
    ("stream", "offset", "words"),
    [
        (FILES, None, "nothing read yet"),
        (SourceStream("rate", {}), "17", "offset 17"),
        (KAFKA, "what is this", "offset what is this"),
    ],
)
def test_others_as_spark_wrote_them(stream: SourceStream, offset: str | None, words: str) -> None:
    assert told_position(StreamPosition(stream, 0, offset)).words == words


def test_what_cannot_be_read_is_told_as_spark_wrote_it(tmp_path: Path) -> None:
    inspected = InspectedRoot(make_root(tmp_path, checkpoints=1))
    manifest = inspected.manifest(inspected.newest())
    (told,) = positions_of(inspected.files, manifest)["rows"]
    assert told.words == 'offset {"played":{"0":1}}'
    gone = replace(manifest.stages["rows"], source_positions=('{"logOffset":29}',), files=SnapshotFiles())
    (told,) = positions_of(inspected.files, replace(manifest, stages={**manifest.stages, "rows": gone}))["rows"]
    assert told == SourcePosition(format="json", words='{"logOffset":29}', offset='{"logOffset":29}')
