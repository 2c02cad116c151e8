"""What a manifest names outside of the root and the tables is damage: nothing there is read, linked to or deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.spark.played import PlayedPipeline, open_next, played
from tidegate.errors import RecoveryRefused
from tidegate.protocol.decision_log import encode_decision
from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.sinks.contract import SinkPlace, StagedFile, decode_committable
from tidegate.storage.file_lists import SnapshotFiles
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.manifest import Manifest, StageSnapshot, encode_manifest


def rewrite_newest(pipeline: PlayedPipeline, change: Callable[[Manifest], Manifest]) -> None:
    """Change the newest manifest, and the record that names its checksum: as somebody would who means harm."""
    paths, store = pipeline.root.paths, pipeline.root.store
    record = InspectedRoot(paths.root).retained()[-1]
    data, sha256 = encode_manifest(change(InspectedRoot(paths.root).manifest(record)))
    store.write(record.manifest, data)
    store.write(paths.decision(record.slot), encode_decision(msgspec.structs.replace(record, manifest_sha256=sha256)))


def refusal(pipeline: PlayedPipeline) -> str:
    """Why a run does not start on the root."""
    place = SinkPlace("flat", "table", pipeline.root.store.at("sinks/table"), root=pipeline.root.id)
    with pytest.raises(RecoveryRefused) as refused:
        open_next(pipeline.root, {"table": pipeline.table.bind(place)})
    return str(refused.value)


def with_stage(manifest: Manifest, name: str, changed: StageSnapshot) -> Manifest:
    return msgspec.structs.replace(manifest, stages={**manifest.stages, name: changed})


@pytest.mark.parametrize("kind", ["stored", "name", "in flight", "staged", "manifest"])
def test_nothing_that_a_manifest_names_elsewhere_is_touched(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("somebody else's", encoding="utf-8")

    def lead_out(manifest: Manifest) -> Manifest:
        rows, middle, table = (manifest.stages[name] for name in ("rows", "middle", "table"))
        if kind in ("stored", "name"):
            evil = msgspec.structs.replace(rows.files.added[0], **{kind: "../../victim"})
            files = SnapshotFiles(added=(evil, *rows.files.added[1:]))
            return with_stage(manifest, "rows", msgspec.structs.replace(rows, files=files))
        if kind == "in flight":
            segment = Segment(1, 0, (SegmentFile("../victim", victim.stat().st_size),))
            return with_stage(manifest, "middle", msgspec.structs.replace(middle, in_flight={"rows": (segment,)}))
        assert table.committable is not None
        sealed = decode_committable(table.committable)
        evil_rows = StagedFile(sealed.through_batch, str(victim), victim.stat().st_size, 1)
        sealed = msgspec.structs.replace(sealed, files=(evil_rows,))
        return with_stage(manifest, "table", msgspec.structs.replace(table, committable=sealed.encode()))

    with played(tmp_path) as pipeline:
        pipeline.one_batch_each()
        pipeline.checkpoint()
        if kind == "manifest":
            record = InspectedRoot(pipeline.root.paths.root).retained()[-1]
            evil = msgspec.structs.replace(record, manifest="../victim")
            pipeline.root.store.write(pipeline.root.paths.decision(record.slot), encode_decision(evil))
        else:
            rewrite_newest(pipeline, lead_out)
        said = refusal(pipeline)
        assert "victim" in said
        assert "ckpt-000001 is damaged" in said
    assert victim.read_text(encoding="utf-8") == "somebody else's"


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_link_that_leads_out_of_the_root_is_damage(tmp_path: Path, what: str) -> None:
    with played(tmp_path) as pipeline:
        pipeline.one_batch_each()
        pipeline.checkpoint()
        stored = min((pipeline.root.paths.root / "generations" / "000001" / "snapshots" / "rows").rglob("offsets/*"))
        moved = stored.parent if what == "folder" else stored
        moved.rename(tmp_path / "elsewhere")
        moved.symlink_to(tmp_path / "elsewhere")
        assert "is a link that leads elsewhere" in refusal(pipeline)
