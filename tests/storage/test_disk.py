"""Forcing files to the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tidegate.storage.disk import NotForced, sync


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was forced, in order."""
    paths: list[Path] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        paths.append(Path(f"/proc/self/fd/{handle}").readlink())
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def make(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"content")


def test_a_file_is_forced_and_its_folder_and_all_above_it(tmp_path: Path, forced: list[Path]) -> None:
    file = tmp_path / "a" / "b" / "file"
    make(file)
    on_disk = sync([file])
    assert {file, tmp_path / "a" / "b", tmp_path / "a", tmp_path} <= set(forced)
    assert {file, tmp_path / "a" / "b", tmp_path / "a", tmp_path} <= on_disk
    assert len(forced) == len(set(forced))


def test_what_is_known_to_be_there_is_not_forced_again(tmp_path: Path, forced: list[Path]) -> None:
    old, new = tmp_path / "a" / "old", tmp_path / "a" / "b" / "new"
    make(old)
    known = sync([old])
    forced.clear()
    assert sync([old], known) == known
    assert forced == []
    make(new)
    known = sync([old, new], known)
    assert set(forced) == {new, tmp_path / "a" / "b", tmp_path / "a"}
    assert {old, new} <= known


def test_a_file_that_is_gone_is_an_error_unless_it_may_be(tmp_path: Path) -> None:
    gone = tmp_path / "folder" / "gone"
    with pytest.raises(FileNotFoundError):
        sync([gone])
    sync([gone], missing_ok=True)


def test_a_disk_that_fails_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").is_file():
            raise OSError(errno.EIO, "Input/output error")

    make(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(NotForced, match=r"Input/output error: .*/file"):
        sync([tmp_path / "file"])
