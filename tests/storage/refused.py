"""What parts of Tidegate say when the system refuses them: on a disk that is full, and by the limits of a process."""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import deltalake

from tests.full_disk import fill
from tidegate.protocol.decision_log import DecisionLog
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder, link
from tidegate.storage.lock import RootLock, holder
from tidegate.storage.system import say


def said(act: Callable[[], object], *folders: Path) -> str:
    try:
        act()
    except Exception as error:
        return say(error, folders)
    return "nothing"


def locked(path: Path) -> str:
    with RootLock(path):
        return holder(path)


def main(disk: Path) -> None:
    store = Folder(disk / "root")
    store.write("kept", b" " * 4096)
    decisions = StoredDecisions(store)
    overwritten = disk / "overwritten"
    overwritten.write_bytes(b" " * 4096)
    before = disk / "lock"
    before.write_text("123456789", encoding="utf-8")
    rows = importlib.import_module("pyarrow").table({"id": list(range(1000))})
    deltalake.write_deltalake(disk / "table", rows)
    filler = fill(disk)
    (disk / "linked").hardlink_to(overwritten)
    found = {
        "write": said(lambda: store.write("decisions/1", b"y" * 10_000)),
        "copy": said(lambda: store.copy("copied", store, "kept")),
        "claim": said(lambda: decisions.create(DecisionLog().opening("me", None))),
        "delta": said(lambda: deltalake.write_deltalake(disk / "table", rows, mode="append"), disk / "table"),
        "lock": said(lambda: locked(disk / "new-lock")),
    }
    store.overwrite("kept", b"last words")
    found["overwritten"] = (store.read("kept") or b"")[:10].decode()
    found["lock that was there"] = str(locked(before) == str(os.getpid()))
    found["left behind"] = ",".join(sorted(path.name for path in (disk / "root" / "writing").iterdir()))
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    found["read-only"] = said(lambda: store.write("decisions/1", b"some more"))
    found["keep on a read-only disk"] = said(lambda: store.keep("other", store, "kept"))
    found["link on a read-only disk"] = said(lambda: link(overwritten, disk / "other"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(20, 4000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, hard))
    found["files"] = said(lambda: [(disk / "overwritten").open("rb") for _ in range(30)])
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    found["name"] = said((disk / ("n" * 300)).read_bytes)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
