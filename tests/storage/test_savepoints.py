"""Savepoints: what makes a folder one."""

from __future__ import annotations

import msgspec
import pytest

from tests.storage.test_files import Unsure
from tests.storage.test_manifest import a_manifest
from tidegate.errors import StoreUnavailable
from tidegate.storage.manifest import encode_manifest
from tidegate.storage.memory import Memory
from tidegate.storage.savepoints import RECORD, SavepointRecord, write_savepoint

SAID = SavepointRecord(
    format=0,
    name="before-upgrade",
    pipeline="orders",
    root_id="its-id",
    checkpoint_id=7,
    epoch=6,
    generation=2,
    aligned=True,
    drained=False,
    manifest="",
    manifest_sha256="",
    triggered_at="2026-11-18T12:00:00.000+00:00",
    made_at="2026-11-18T12:00:01.000+00:00",
    size_bytes=5,
    tables={},
)


def write(folder: Memory, said: SavepointRecord = SAID) -> None:
    manifest = a_manifest()
    write_savepoint(folder, manifest, *encode_manifest(manifest), said)


@pytest.mark.parametrize("does", [False, True])
def test_one_is_made_though_the_bucket_has_said_that_it_is_there_already(*, does: bool) -> None:
    folder = Unsure(1, does=does)
    write(folder)
    assert msgspec.json.decode(folder.read(RECORD) or b"", type=SavepointRecord).name == "before-upgrade"


def test_what_somebody_else_has_made_in_the_same_folder_is_not_taken_for_ours() -> None:
    folder = Memory()
    write(folder, msgspec.structs.replace(SAID, made_at="2026-11-18T12:00:01.001+00:00"))
    with pytest.raises(StoreUnavailable, match="was written by somebody else meanwhile"):
        write(folder)
