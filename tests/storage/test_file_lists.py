"""Lists of a snapshot's files: what they tell is what was changed, in few lists, and damage of one is found."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.test_manifest import a_manifest
from tidegate.errors import DamagedCheckpoint
from tidegate.storage.file_lists import FileLists, SnapshotFile, SnapshotFiles, files_of, find_file
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import check_files, references
from tidegate.storage.manifest import Manifest
from tidegate.storage.memory import Memory

NAMES = [f"state/{number}" for number in range(12)]


def a_file(name: str, checkpoint_id: int) -> SnapshotFile:
    return SnapshotFile(name, f"generations/000001/snapshots/joined/ckpt-{checkpoint_id:06d}/{name}", 1, "ab" * 32)


def kept(root: Files, most: int = 2) -> FileLists:
    return FileLists(root, 1, "joined", SnapshotFiles(), most)


@given(st.lists(st.frozensets(st.sampled_from(NAMES)), max_size=25), st.integers(0, 5), st.integers(0, 24))
def test_whatever_changes_each_checkpoint_tells_its_files(
    snapshots: list[frozenset[str]], most: int, restored_after: int
) -> None:
    """As those after a restore do, and lists that a later one does not name are told once."""
    root = Memory()
    lists = kept(root, most)
    held: dict[str, SnapshotFile] = {}
    named: set[str] = set()
    for number, names in enumerate(snapshots, start=1):
        dropped = held.keys() - names
        added = {name: a_file(name, number) for name in sorted(names - held.keys())}
        held = {name: file for name, file in held.items() if name in names} | added
        taken, unnamed = lists.change(number, dropped, added)
        assert {file.name: file for file in files_of(root, "joined", taken)} == held == lists.files
        assert len(taken.dropped) + len(taken.added) <= most
        for name in NAMES:
            assert find_file(root, "joined", taken, name) == held.get(name)
        now = {each.stored for each in taken.lists}
        assert named - now == {each.stored for each in unnamed}
        assert {*lists.paths()} == now | {file.stored for file in held.values()}
        named = now
        if number == restored_after:
            lists = FileLists(root, 2, "joined", taken, most)


def test_a_file_that_stays_is_written_down_a_few_times_however_many_change() -> None:
    root = Memory()
    lists = kept(root, most=20)
    rng = random.Random(7)
    held: list[str] = []
    written = longest = 0
    for number in range(1, 501):
        added = {name: a_file(name, number) for name in (f"state/{number}-{each}" for each in range(10))}
        dropped = [held.pop(rng.randrange(len(held))) for _ in range(8)] if len(held) > 1_000 else []
        held += added
        taken, unnamed = lists.change(number, dropped, added)
        written += sum(each.size_bytes for each in taken.lists if f"ckpt-{number:06d}" in each.stored)
        longest = max(longest, len(taken.lists))
        root.delete(each.stored for each in unnamed)
    assert {file.name for file in files_of(root, "joined", taken)} == set(held), "what is unnamed is not needed"
    assert longest <= 8
    assert written < 6 * 500 * 18 * 150, "each of the changes was written no more than six times"


def test_a_snapshot_that_has_nothing_of_the_one_before_has_one_list_or_none() -> None:
    root = Memory()
    lists = kept(root)
    first, _ = lists.change(1, (), {name: a_file(name, 1) for name in NAMES})
    anew = {name: a_file(name, 2) for name in NAMES}
    second, unnamed = lists.replace(2, anew)
    assert unnamed == list(first.lists)
    assert [each.stored for each in second.lists] == ["generations/000001/lists/joined/ckpt-000002.json"]
    assert set(files_of(root, "joined", second)) == set(anew.values())
    third, unnamed = lists.replace(3, {NAMES[0]: a_file(NAMES[0], 3)})
    assert (third.lists, unnamed) == ((), list(second.lists))


def test_a_list_that_could_not_be_written_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Memory()
    lists = kept(root)
    lists.change(1, (), {NAMES[0]: a_file(NAMES[0], 1)})
    before = dict(lists.files)
    added = {name: a_file(name, 2) for name in NAMES[1:]}
    with monkeypatch.context() as patch:
        patch.setattr(Memory, "write", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            lists.change(2, [NAMES[0]], added)
    assert lists.files == before
    taken, _ = lists.change(2, [NAMES[0]], added)
    assert set(files_of(root, "joined", taken)) == set(added.values())


# -- damage -----------------------------------------------------------------------------------------


def with_lists(root: Files) -> tuple[Manifest, str]:
    """A checkpoint whose stage has a list. Returns the list's path besides."""
    lists = kept(root)
    added = {name: a_file(name, 1) for name in NAMES}
    for file in added.values():
        root.write(file.stored, b"1")
    files, _ = lists.change(1, (), added)
    snapshot = msgspec.structs.replace(a_manifest().stages["joined"], files=files, in_flight={})
    manifest = msgspec.structs.replace(a_manifest(), stages={"joined": snapshot})
    return manifest, files.lists[0].stored


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (None, "is gone"),
        (b"cut", "is not what it was: size differs"),
        ("one bit", "is not what it was: checksum differs"),
    ],
    ids=["gone", "cut off", "one bit"],
)
def test_a_damaged_list_is_found_and_named(damage: bytes | str | None, told: str) -> None:
    root = Memory()
    manifest, path = with_lists(root)
    assert next(each.path for each in check_files(root, manifest, reads=False)) == path
    assert references(root, manifest) >= {path, a_file(NAMES[0], 1).stored}
    data = root.read(path) or b""
    if damage is None:
        root.delete([path])
    else:
        root.write(path, damage if isinstance(damage, bytes) else data.replace(b"a", b"b", 1))
    for reads in (False, True):
        found = [each.damage for each in check_files(root, manifest, reads=reads)]
        assert found == [f"{path}, a list of files of stage 'joined', {told}"]
    with pytest.raises(DamagedCheckpoint, match=f"{path}.*{told}"):
        references(root, manifest)


def test_a_list_that_leads_elsewhere_is_damage(tmp_path: Path) -> None:
    root = Folder(tmp_path / "root")
    manifest, path = with_lists(root)
    listed = tmp_path / "root" / path
    listed.rename(tmp_path / "elsewhere")
    listed.symlink_to(tmp_path / "elsewhere")
    assert f"{path} of stage 'joined' is a link that leads elsewhere" in [
        each.damage for each in check_files(root, manifest)
    ]


def test_a_list_that_names_what_is_not_of_the_root_is_damage() -> None:
    root = Memory()
    evil = {name: msgspec.structs.replace(a_file(name, 1), stored="../../victim") for name in NAMES}
    files, _ = kept(root).change(1, (), evil)
    with pytest.raises(DamagedCheckpoint, match="leads outside of where it belongs"):
        files_of(root, "joined", files)
