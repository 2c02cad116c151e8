"""The manifest: what it holds, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import DamagedCheckpoint, ForeignRoot
from tidegate.protocol.aligner import CutCause, InFlight
from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.storage.file_lists import SnapshotFile, SnapshotFiles
from tidegate.storage.inspection import references
from tidegate.storage.manifest import (
    FORMAT,
    Manifest,
    SourceStream,
    StageShape,
    StageSnapshot,
    as_report,
    decode_manifest,
    encode_manifest,
)
from tidegate.storage.memory import Memory

NAME = "generations/000002/manifests/ckpt-000007.json"
ORDERS = SourceStream("kafka", {"subscribe": "größe"}, {"größe": "CF4GXYYJSkumNFlcIUhWmQ"})


def a_file(name: str) -> SnapshotFile:
    return SnapshotFile(name, f"generations/000002/snapshots/joined/{name}", 10, "ab" * 32)


def a_segment(sequence: int) -> Segment:
    path = f"generations/000002/stages/orders/output/part-{sequence}.parquet"
    return Segment(sequence, sequence - 1, (SegmentFile(path, 100 + sequence),))


def a_snapshot() -> StageSnapshot:
    return StageSnapshot(
        cut=12,
        cause=CutCause.TIMEOUT,
        over_bound=True,
        files=SnapshotFiles(added=(a_file("offsets/12"), a_file("commits/12"))),
        positions={"orders": 4, "payments": 9},
        output_sequence=11,
        in_flight={"orders": (a_segment(5), a_segment(6)), "payments": ()},
        source_positions=(),
        watermark_ms=1_700_000_000_000,
        committable=None,
        barrier_ms=3,
        alignment_ms=20,
        snapshot_ms=5,
        new_bytes=10,
        total_bytes=20,
    )


def a_manifest() -> Manifest:
    source = msgspec.structs.replace(
        a_snapshot(),
        cut=None,
        files=SnapshotFiles(),
        positions={},
        in_flight={},
        watermark_ms=None,
        new_bytes=1,
        total_bytes=2,
    )
    return Manifest(
        format=FORMAT,
        pipeline="größe",
        checkpoint_id=7,
        epoch=6,
        generation=2,
        attempt=1,
        flags=2,
        aligned=True,
        triggered_at="2026-01-01T00:00:00.000+00:00",
        duration_ms=125,
        min_watermark_ms=1_700_000_000_000,
        shape={
            "joined": StageShape("stage", ("orders", "payments"), "append", "struct<id:bigint>", has_event_time=True),
            "orders": StageShape("source", (), "append", "struct<id:bigint>", None, (ORDERS,)),
        },
        stages={"joined": a_snapshot(), "orders": source},
    )


def decoded(changed: dict[str, Any]) -> Manifest:
    data = json.dumps(changed).encode()
    return decode_manifest(data, hashlib.sha256(data).hexdigest(), NAME)


def as_json() -> dict[str, Any]:
    data, _ = encode_manifest(a_manifest())
    plain: dict[str, Any] = json.loads(data)
    return plain


def test_a_manifest_comes_back_as_it_was() -> None:
    data, sha256 = encode_manifest(a_manifest())
    assert decode_manifest(data, sha256, NAME) == a_manifest()


EVIL = [
    "/etc/passwd",
    "../../etc/passwd",
    "generations/../../x",
    "generations/../x",
    "..",
    ".",
    "",
    "./x",
    "a//b",
    "a/",
]
EVIL += ["a/./b", "\0", "a\0b", "//etc", "a/..", "../", "generations/000001/.."]


def naming(path: str, where: str) -> Manifest:
    """A manifest that has this path where it has one."""
    snapshot = a_snapshot()
    if where == "in flight":
        segments = {
            name: tuple(
                msgspec.structs.replace(
                    each, files=tuple(msgspec.structs.replace(file, path=path) for file in each.files)
                )
                for each in found
            )
            for name, found in snapshot.in_flight.items()
        }
        snapshot = msgspec.structs.replace(snapshot, in_flight=segments)
    else:
        files = tuple(msgspec.structs.replace(file, **{where: path}) for file in snapshot.files.added)
        snapshot = msgspec.structs.replace(snapshot, files=SnapshotFiles(added=files))
    return msgspec.structs.replace(a_manifest(), stages={**a_manifest().stages, "joined": snapshot})


@pytest.mark.parametrize("where", ["name", "stored", "in flight"])
@pytest.mark.parametrize("path", EVIL)
def test_a_path_that_leads_out_of_the_root_is_damage(path: str, where: str) -> None:
    data, sha256 = encode_manifest(naming(path, where))
    with pytest.raises(DamagedCheckpoint, match="leads outside of where it belongs"):
        decode_manifest(data, sha256, NAME)


@given(st.text(max_size=30) | st.lists(st.sampled_from(["..", ".", "", "/", "a", "b"])).map("/".join))
def test_a_path_that_is_taken_stays_below_its_folder(path: str) -> None:
    data, sha256 = encode_manifest(naming(path, "stored"))
    try:
        decode_manifest(data, sha256, NAME)
    except DamagedCheckpoint:
        return
    folder = "/data/root/"
    assert os.path.normpath(os.path.join(folder, path)).startswith(folder)  # noqa: PTH118 - nothing of pathlib's own


def test_the_checksum_is_that_of_the_bytes() -> None:
    data, sha256 = encode_manifest(a_manifest())
    assert hashlib.sha256(data).hexdigest() == sha256
    assert encode_manifest(a_manifest()) == (data, sha256)


def test_a_manifest_is_read_by_people_too() -> None:
    data, _ = encode_manifest(a_manifest())
    assert len(data.splitlines()) > 50


def test_references_are_the_files_of_snapshots_and_what_is_in_flight() -> None:
    folder = "generations/000002"
    assert references(Memory(), a_manifest()) == {
        f"{folder}/snapshots/joined/offsets/12",
        f"{folder}/snapshots/joined/commits/12",
        f"{folder}/stages/orders/output/part-5.parquet",
        f"{folder}/stages/orders/output/part-6.parquet",
    }


def test_bytes_are_those_of_all_stages() -> None:
    assert (a_manifest().new_bytes, a_manifest().total_bytes) == (11, 22)


def test_one_changed_byte_is_refused() -> None:
    data, sha256 = encode_manifest(a_manifest())
    changed = data.replace(b'"epoch": 6', b'"epoch": 5')
    assert changed != data
    with pytest.raises(DamagedCheckpoint, match=rf"{NAME}.*checksum"):
        decode_manifest(changed, sha256, NAME)


def test_a_cut_off_manifest_is_refused() -> None:
    data, sha256 = encode_manifest(a_manifest())
    with pytest.raises(DamagedCheckpoint, match=rf"{NAME}.*checksum"):
        decode_manifest(data[:-1], sha256, NAME)


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 2, "pipeline": "\xff"}'])
def test_what_is_no_manifest_is_refused_though_its_checksum_fits(junk: bytes) -> None:
    with pytest.raises(DamagedCheckpoint, match=f"{NAME} cannot be read"):
        decode_manifest(junk, hashlib.sha256(junk).hexdigest(), NAME)


@pytest.mark.parametrize("where", ["manifest", "stage", "file", "shape", "segment"])
def test_an_unknown_field_is_refused_at_every_depth(where: str) -> None:
    plain = as_json()
    inside = {
        "manifest": plain,
        "stage": plain["stages"]["joined"],
        "file": plain["stages"]["joined"]["files"]["added"][0],
        "shape": plain["shape"]["joined"],
        "segment": plain["stages"]["joined"]["in_flight"]["orders"][0],
    }[where]
    inside["surprise"] = 1
    with pytest.raises(DamagedCheckpoint, match=rf"{NAME} cannot be read: .*surprise"):
        decoded(plain)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", "six"),
        ("epoch", None),
        ("epoch", 6.5),
        ("aligned", 1),
        ("pipeline", 3),
        ("stages", []),
        ("shape", {"joined": 1}),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name(field: str, value: object) -> None:
    plain = as_json()
    plain[field] = value
    with pytest.raises(DamagedCheckpoint, match=rf"{NAME} cannot be read: .*{field}"):
        decoded(plain)


LATER: dict[str, object] = {"chains": {}, "origin": None}


@pytest.mark.parametrize("field", Manifest.__struct_fields__)
def test_every_field_is_needed_but_those_that_older_versions_lack(field: str) -> None:
    plain = as_json()
    del plain[field]
    if field in LATER:
        assert getattr(decoded(plain), field) == LATER[field]
        return
    with pytest.raises(DamagedCheckpoint, match=rf"{NAME} cannot be read: .*{field}"):
        decoded(plain)


def test_another_format_is_refused_by_its_number() -> None:
    plain = as_json()
    plain["format"] = FORMAT + 1
    with pytest.raises(ForeignRoot, match=f"{NAME} .* format {FORMAT + 1}, this version reads formats 2 to {FORMAT}"):
        decoded(plain)


def test_another_format_is_refused_by_its_number_whatever_else_changed_with_it() -> None:
    plain = as_json()
    plain["format"] = FORMAT + 1
    plain["stages"] = ["something", "quite", "else"]
    plain["surprise"] = 1
    with pytest.raises(ForeignRoot, match=f"{NAME} .* format {FORMAT + 1}, this version reads formats 2 to {FORMAT}"):
        decoded(plain)


def test_one_of_the_format_before_is_read_as_one_of_this() -> None:
    plain = as_json()
    plain["format"] = 2
    for stage in plain["stages"].values():
        stage["files"] = stage["files"]["added"]
    assert decoded(plain) == a_manifest()


@pytest.mark.parametrize("files", [None, {"added": []}, [{"name": "offsets/1"}]])
def test_one_of_the_format_before_is_read_as_strictly(files: object) -> None:
    plain = as_json()
    plain["format"] = 2
    for stage in plain["stages"].values():
        stage["files"] = files
    with pytest.raises(DamagedCheckpoint, match=f"{NAME} cannot be read"):
        decoded(plain)


def test_a_report_says_what_the_snapshot_says() -> None:
    report = as_report("joined", a_snapshot(), checkpoint_id=7, attempt=1, generation=2, has_event_time=True)
    assert (report.stage, report.checkpoint_id, report.attempt, report.generation) == ("joined", 7, 1, 2)
    assert (report.cut, report.positions, report.output_sequence) == (12, {"orders": 4, "payments": 9}, 11)
    flying = [file.path for sequence in (5, 6) for file in a_segment(sequence).files]
    assert report.files == tuple(flying), "the rest is known otherwise"
    assert report.in_flight == (InFlight("orders", 4, 6, 105 + 106),)
    assert report.source_position is None
    assert (report.has_event_time, report.watermark_ms) == (True, 1_700_000_000_000)
    assert (report.cause, report.over_bound, report.alignment_ms) == (CutCause.TIMEOUT, True, 20)


def test_a_source_reports_where_it_has_read_to() -> None:
    snapshot = msgspec.structs.replace(a_snapshot(), source_positions=('{"logOffset":3}', '{"logOffset":4}'))
    report = as_report("orders", snapshot, 7, 1, 2, has_event_time=False)
    assert report.source_position == '{"logOffset":3}, {"logOffset":4}'
