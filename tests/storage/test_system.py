"""What the operating system refuses is told as what it is."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.full_disk import needs_a_small_disk, on_small_disk
from tidegate.storage.system import explained, told


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space there"),
        (errno.EDQUOT, "have the quota raised"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "mount that file system so that it can be written"),
        (errno.EIO, "see what the system's log says of it"),
        (errno.EMFILE, "ulimit -n (now "),
        (errno.ENAMETOOLONG, "take a shorter path"),
        (errno.EACCES, "may not use it: change its permissions, or run as a user who may"),
        (errno.ENOENT, "something has removed it, or a folder above it"),
    ],
)
def test_an_error_is_told_with_what_happened_to_which_file_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    usage = shutil.disk_usage(tmp_path)  # of a disk that others write to, it is another one each time
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    file = tmp_path / "decisions" / "5.json"
    said = told(OSError(number, os.strerror(number), str(file)))
    assert said.startswith(f"{file}: {os.strerror(number)}")
    assert advice in said
    assert said == told(OSError(number, os.strerror(number)), file)


def test_a_full_disk_is_told_with_what_is_free_on_it(tmp_path: Path) -> None:
    said = told(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "of"), None, str(tmp_path / "to")))
    assert said.startswith(f"{tmp_path / 'to'}: No space left on device (")
    assert " MB free on the disk at /" in said


@pytest.mark.parametrize(
    ("text", "is_the_systems"),
    [
        ("stage 'rows' failed: java.io.IOException: No space left on device", True),
        ("Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)", True),
        ("java.io.FileNotFoundException: /lake/_delta_log (Permission denied)", True),
        ("java.nio.file.FileSystemException: /lake/x: Too many open files", True),
        ('permission denied for table "orders"', False),
        ("the key 3 stands in two rows", False),
    ],
)
def test_a_text_that_passes_on_an_error_of_the_systems_is_told_with_what_to_do_once(
    tmp_path: Path, text: str, is_the_systems: bool
) -> None:
    said = explained(text, [tmp_path, tmp_path / "not-there-yet"])
    assert said.startswith(text)
    assert (said != text) is is_the_systems
    assert ("MB free on the disk at" in said) is ("space" in text)
    assert said.count("MB free") <= 1, "one disk, told once"
    assert explained(said, [tmp_path]) == said


@needs_a_small_disk
def test_whatever_meets_a_full_disk_or_another_limit_of_the_system_says_so(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    found = on_small_disk(disk, "1m", "tests.storage.refused")
    full = f"No space left on device (0.0 MB free on the disk at {disk}); free some space there"
    assert found["write"] == f"could not write {disk}/root/decisions/1: {full}"
    assert found["claim"] == f"could not create {disk}/root/decisions/000000000001.json: {full}"
    assert found["copy"] == f"could not copy {disk}/root/copied: {full}"
    assert "No space left on device" in found["delta"]
    assert found["delta"].endswith(f"(0.0 MB free on the disk at {disk}); free some space there")
    assert found["lock"] == f"the root {disk} cannot be used: {disk / 'new-lock'}: {full}"
    assert (found["overwritten"], found["lock that was there"]) == ("last words", "True")
    assert found["left behind"] == "", "half of a file keeps its room"
    read_only = "Read-only file system; mount that file system so that it can be written"
    assert found["read-only"] == f"could not write {disk}/root/decisions/1: {read_only}"
    assert found["keep on a read-only disk"] == f"could not keep {disk}/root/other: {read_only}"
    assert found["link on a read-only disk"] == f"{disk / 'other'}: {read_only}"
    assert found["files"].startswith(f"{disk / 'overwritten'}: Too many open files; let this process have more")
    assert found["name"].endswith("File name too long; take a shorter path")
