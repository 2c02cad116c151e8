"""The file of Spark's own messages, kept short while it is written to.

All that Spark's process and its Python workers say on stderr is appended to it, so it cannot be renamed: they would go
on writing to the old one. When it is too long it is copied to a file beside it and emptied; whoever appends goes on at
its start. What is written between the copy's end and that is lost.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

LONGEST: Final = 20 << 20
_KEPT: Final = 2
_LOOK_EVERY_S: Final = 2.0


def keep_short(log: Path) -> None:
    """Look at the file's size now and then, for as long as this process lives."""

    def watch() -> None:
        never = threading.Event()
        while not never.wait(_LOOK_EVERY_S):
            with suppress(OSError):  # a full disk, a root that is gone: what stands on it tells that
                rotate(log)

    threading.Thread(target=watch, name=f"tidegate-log-{log}", daemon=True).start()


def rotate(log: Path, longest: int = LONGEST) -> None:
    """Empty the file if it is too long. What it held is kept as `spark.log.1`, and what was that as the next."""
    with log.open("rb+") as file:
        # Two runs may look at once, where one has taken over from another.
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_size <= longest:
            return
        kept = [log.with_name(f"{log.name}.{number}") for number in range(1, _KEPT + 1)]
        for newer, older in zip(reversed(kept[:-1]), reversed(kept[1:]), strict=True):
            with suppress(FileNotFoundError):
                newer.replace(older)
        with kept[0].open("wb") as copy:
            shutil.copyfileobj(file, copy)
        file.truncate(0)
