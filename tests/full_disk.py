"""A disk that is really full: a small file system in memory, which only the test's own process sees."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_REPOSITORY = Path(__file__).parents[1]
_ALONE = ("unshare", "--user", "--map-root-user", "--mount")


def can_mount() -> bool:
    """Whether this machine lets anybody mount what nobody else sees."""
    return shutil.which("unshare") is not None and not subprocess.run([*_ALONE, "true"], check=False).returncode


needs_a_small_disk = pytest.mark.skipif(not can_mount(), reason="no user namespaces here: no small disk can be mounted")


def on_small_disk(folder: Path, size: str, module: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run a module of the tests with an empty disk mounted at a folder. Returns the JSON that it prints last."""
    folder.mkdir()
    program = f"{sys.executable} -m {module} {folder} {' '.join(arguments)}"
    done = subprocess.run(
        [*_ALONE, "sh", "-c", f"mount -t tmpfs -o size={size} tmpfs {folder} && exec {program}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=_REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def fill(folder: Path) -> Path:
    """Take all that is free on the disk of a folder. Returns the file that has it."""
    filler = folder / "filler"
    block = b"x" * 4096
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                if file.write(block) < len(block):
                    return filler
            except OSError:
                return filler
