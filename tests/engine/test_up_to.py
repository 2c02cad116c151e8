"""A run up to another root: what is named, and what of a snapshot is of a batch that was only begun."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec

from tests.cli.harness import make_root, tidegate
from tidegate.engine.up_to import _without_begun, in_full, root_and_checkpoint
from tidegate.spark.filelog import write_log
from tidegate.spark.positions import position_at
from tidegate.storage.file_lists import SnapshotFile, SnapshotFiles, files_of
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import SourceStream

STREAMS = (SourceStream("json", {"path": "file:/a"}), SourceStream("json", {"path": "file:/b"}))


def test_a_checkpoint_is_named_behind_the_root() -> None:
    assert root_and_checkpoint("state/orders") == ("state/orders", None)
    assert root_and_checkpoint("state/orders@42") == ("state/orders", 42)
    assert root_and_checkpoint("state@home/orders@ckpt-000042") == ("state@home/orders", 42)
    assert root_and_checkpoint("state@home") == ("state@home", None)
    assert in_full("orders@42") == f"{Path.cwd()}/orders@ckpt-000042"
    assert in_full("/state/../orders") == "/orders"


def test_entries_of_a_batch_that_was_begun_are_left_out_of_what_it_starts_from(tmp_path: Path) -> None:
    root = make_root(tmp_path / "made", checkpoints=1)
    inspected = InspectedRoot(root)
    manifest = inspected.manifest(inspected.newest())
    files = Folder(root)

    def kept(name: str, *lines: str) -> SnapshotFile:
        stored = f"kept/{name}"
        write_log(files, stored, lines)
        data = files.read(stored) or b""
        return SnapshotFile(name, stored, len(data), hashlib.sha256(data).hexdigest())

    def entry(number: int) -> str:
        return json.dumps({"path": f"file:/{number}", "timestamp": 1, "batchId": number})

    added = (
        kept("offsets/5", "{}", '{"logOffset":1}', '{"logOffset":2}'),
        *(kept(f"sources/0/{number}", entry(number)) for number in range(3)),  # the last one is of the next batch
        *(kept(f"sources/1/{number}", entry(number)) for number in range(3)),
    )
    snapshot = msgspec.structs.replace(manifest.stages["rows"], cut=5, files=SnapshotFiles(added=added))
    base = msgspec.structs.replace(manifest, stages={**manifest.stages, "rows": snapshot})
    own = position_at(files, "rows", added, 5, STREAMS)
    left = _without_begun(files, "rows", base, own)
    names = {each.name for each in files_of(files, "rows", left.stages["rows"].files)}
    assert names == {each.name for each in added} - {"sources/0/2"}
    assert _without_begun(files, "rows", left, own) is left
    assert left.stages.keys() == manifest.stages.keys()


def test_what_is_compared_is_told_before_spark_is_started(tmp_path: Path) -> None:
    root = make_root(tmp_path / "made", checkpoints=1)
    done = tidegate("compare", "--root", root, "--with", tmp_path / "nowhere")
    assert done.returncode == 3
    done = tidegate("compare", "--root", root, "--with", root, "--checkpoint", "99")
    assert "retains no ckpt-000099" in done.stderr
    assert done.returncode == 1
