"""Scratch folders: where what a checkpoint holds is laid out to be looked into, beside the root and never in it.

They lie where the system has room for such things (TMPDIR). On the file system of the root nothing is copied there: a
file that does not change gets one more name.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.errors import StoreUnavailable
from tidegate.storage.folder import Folder
from tidegate.storage.system import told


class Scratch:
    """A fresh folder that is removed by whoever made it."""

    def __init__(self) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix="tidegate-"))
        except OSError as error:
            raise StoreUnavailable(f"no folder can be made to look into the checkpoint: {told(error)}") from error
        self.files = Folder(self.path, fsync=False)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_at_exit(self) -> None:
        """When this process ends."""
        atexit.register(self.remove)


@contextmanager
def scratch() -> Iterator[Folder]:
    """A scratch folder that is gone in the end, however that comes."""
    made = Scratch()
    try:
        yield made.files
    finally:
        made.remove()
