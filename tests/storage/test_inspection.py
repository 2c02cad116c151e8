"""Looking at a root from outside. `tests/cli/test_checkpoints.py` has what is seen of one that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.test_manifest import a_manifest
from tidegate.errors import NoRoot, StoreUnavailable
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import InspectedRoot, check_files


def test_what_the_file_system_will_not_look_at_is_no_root(tmp_path: Path) -> None:
    with pytest.raises(NoRoot):
        InspectedRoot(tmp_path / ("a" * 300))


def in_flight(root: Path) -> Path:
    """The first file in flight of a manifest, in its place."""
    path = next(file.path for file in check_files(Folder(root), a_manifest()) if file.path.endswith(".parquet"))
    (root / path).parent.mkdir(parents=True)
    return root / path


def test_a_file_in_flight_is_checked_by_its_size(tmp_path: Path) -> None:
    path = in_flight(tmp_path)

    def damage() -> str | None:
        return next(file.damage for file in check_files(Folder(tmp_path), a_manifest()) if tmp_path / file.path == path)

    found = damage()
    assert found is not None
    assert found.endswith("is gone")
    path.write_bytes(b"cut off")
    found = damage()
    assert found is not None
    assert found.endswith("is not what it was: size differs")


def test_a_file_in_flight_that_the_run_deletes_under_our_eyes_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_file", lambda _: True)  # so it was, a moment ago
    assert all(file.damage for file in check_files(Folder(tmp_path), a_manifest()))


def test_a_file_in_flight_that_cannot_be_looked_at_is_not_called_damaged(tmp_path: Path) -> None:
    path = in_flight(tmp_path)
    path.parent.rmdir()
    path.parent.symlink_to(path.parent)
    with pytest.raises(StoreUnavailable, match=f"could not read {path}: "):
        list(check_files(Folder(tmp_path), a_manifest()))
