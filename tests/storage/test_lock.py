"""The lock of a root, where it cannot be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.errors import NoRoot, StoreUnavailable
from tidegate.storage.lock import RootLock, is_held


def test_a_root_whose_lock_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(NoRoot, match=f"the root {tmp_path} cannot be used: {tmp_path}/lock: Is a directory"):
        RootLock(tmp_path / "lock").__enter__()


def test_a_lock_that_cannot_be_written_is_not_held_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "lock"
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(NoRoot, match="No space left on device"):
            RootLock(path).__enter__()
    assert not is_held(path)


def test_whether_a_lock_that_cannot_be_read_is_held_is_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.symlink_to(path)
    with pytest.raises(StoreUnavailable, match=f"cannot be told: {path}: "):
        is_held(path)
