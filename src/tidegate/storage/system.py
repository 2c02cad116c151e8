"""What the operating system refuses, told for people: what happened, to which file, and what to do.

An error of the system's comes as an `OSError`, or inside a text of Spark's or delta-rs's. Whoever passes one
on says it in the words of this module, so that a full disk is called one wherever it is met.
"""

from __future__ import annotations

import errno
import getpass
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tidegate.errors import first_line

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_ADVICE: Final = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or have the quota raised",
    errno.EFBIG: "let this process write larger files: ulimit -f",
    errno.EROFS: "mount that file system so that it can be written",
    errno.EIO: "the disk, or the network behind it, fails: see what the system's log says of it",
    errno.EMFILE: "let this process have more files open: ulimit -n",
    errno.ENFILE: "the whole system has too many files open: end what holds them, or raise fs.file-max",
    errno.ENAMETOOLONG: "take a shorter path",
    errno.ESTALE: "the network file system has lost it: mount it again",
    errno.EACCES: "may not use it: change its permissions, or run as a user who may",
    errno.EPERM: "may not use it: change its permissions, or run as a user who may",
    errno.ENOENT: "something has removed it, or a folder above it",
}
# Those whose text means the same wherever it stands.
_FOUND_IN_TEXTS: Final = tuple(_ADVICE.keys() - {errno.EPERM, errno.ENOENT})


def told(error: OSError, at: Path | None = None) -> str:
    """What happened, to which file, and what to do. `at`: the file, where the error would name another or none."""
    path = at or _path_of(error)
    return reason(error, path) if path is None else f"{path}: {reason(error, path)}"


def reason(error: OSError, at: Path | None = None) -> str:
    """The same without the file's name, for a message that has it."""
    if error.errno is None:
        return first_line(error)
    path = at or _path_of(error)
    said = error.strerror or os.strerror(error.errno)
    disks = _room_on([path]) if error.errno in _NO_ROOM and path is not None else ""
    advice = _advice(error.errno)
    return f"{said}{disks}{'' if advice is None else f'; {advice}'}"


def say(error: BaseException, folders: Iterable[str | Path] = ()) -> str:
    """Any error, in one line. `folders`: those that it may be about, if it turns out to be the system's."""
    return told(error) if isinstance(error, OSError) else explained(first_line(error), folders)


def explained(said: str, folders: Iterable[str | Path] = ()) -> str:
    """What a text says that passes an error of the system's on: with what to do, and how full the disks of the folders
    are. Which of their files it was is often left out."""
    number = next((each for each in _FOUND_IN_TEXTS if os.strerror(each) in said), None)
    if number is None:
        return said
    advice = _advice(number)
    if advice is None or advice in said:
        return said  # it is told already
    return f"{said}{_room_on(folders) if number in _NO_ROOM else ''}; {advice}"


def refusal_in(trace: str) -> str | None:
    """The last line of a JVM's trace that passes on an error of the system's: the one that caused the others."""
    lines = [line.strip() for line in trace.splitlines()]
    found = [line for line in lines if any(os.strerror(number) in line for number in _FOUND_IN_TEXTS)]
    return found[-1].removeprefix("Caused by: ")[:400] if found else None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of writing to an open file does not say to which: let it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _path_of(error: OSError) -> Path | None:
    """Of two names, it is the new one that could not be made."""
    name = error.filename if error.filename2 is None else error.filename2
    return Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None


def _advice(number: int) -> str | None:
    advice = _ADVICE.get(number)
    if number in (errno.EACCES, errno.EPERM):
        return f"{_user()} {advice}"
    if number == errno.EMFILE:
        return f"{advice} (now {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return advice


def _user() -> str:
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):  # without a name, as in some containers
        return f"user {os.getuid()}"


def _room_on(folders: Iterable[str | Path]) -> str:
    """How much is free on the disks of these, each once."""
    found: dict[Path, str] = {}
    for folder in folders:
        with suppress(OSError):
            mount = _mount_of(Path(folder))
            found.setdefault(mount, f"{_free_on(mount)} on the disk at {mount}")
    return f" ({', '.join(found.values())})" if found else ""


def _free_on(mount: Path) -> str:
    usage = os.statvfs(mount)
    if usage.f_files and not usage.f_favail:
        return "no inode is free, so that no file can be made,"
    return f"{shutil.disk_usage(mount).free / 1e6:,.1f} MB free"


def _mount_of(path: Path) -> Path:
    """Where the disk is mounted that a path lies on, or would."""
    there = path.absolute()
    while not there.is_mount():
        there = there.parent
    return there
