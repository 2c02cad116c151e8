"""What is on the disk, by the system calls of a run; and what a loss of power leaves of it, at the worst.

Only the Python process is traced: what Spark writes counts as not being on the disk until that process has forced it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

CALLS = "fsync,fdatasync,rename,renameat,renameat2,link,linkat,mkdir,mkdirat,openat"
STRACE = ("strace", "-f", "-b", "execve", "-qq", "-y", "-s", "4096", "-e", f"trace={CALLS}", "-o")
"""Follows threads, and lets go of a child that starts a program: the JVM is not traced, which would be slow."""

_CALL = re.compile(r"(?P<thread>\d+) +(?P<name>\w+)\((?P<arguments>.*)")
_RESUMED = re.compile(r"(?P<thread>\d+) +<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)")
_UNFINISHED = " <unfinished ...>"
_HANDLE = re.compile(r"\d+<(?P<path>.*)>")
_PATH = re.compile(r'"(?P<path>(?:[^"\\]|\\.)*)"')


class Call:
    """One that succeeded. It took effect between `began` and `ended`, which count the lines of the trace."""

    def __init__(self, name: str, paths: list[Path], began: int, ended: int) -> None:
        self.name = name
        self.paths = paths
        self.began = began
        self.ended = ended


def read_trace(lines: Iterable[str]) -> Iterator[Call]:
    """In the order in which they ended."""
    begun: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines):
        if match := _RESUMED.match(line):
            began, text = begun.pop(match["thread"])
            text += match["rest"]
        elif match := _CALL.match(line):
            began, text = number, f"{match['name']}({match['arguments']}"
            if text.rstrip().endswith(_UNFINISHED):
                begun[match["thread"]] = number, text.rstrip().removesuffix(_UNFINISHED)
                continue
        else:
            continue
        name, _, rest = text.partition("(")
        arguments, _, result = rest.rpartition(" = ")
        if not result.startswith("-"):
            pattern = _HANDLE if name.endswith("sync") else _PATH
            yield Call(name, [Path(found["path"]) for found in pattern.finditer(arguments)], began, number)


class Disk:
    """What is on it under a folder, at any line of a trace."""

    def __init__(self, folder: Path, calls: Iterable[Call]) -> None:
        self._folder = folder
        self.named: dict[Path, Call] = {}
        """By which call a path got its name."""
        self._forced: dict[Path, list[Call]] = {}
        self._also: dict[Path, Path] = {}
        self._seen: dict[Path, int] = {}
        """When a path was first seen to be there, which somebody else had made."""
        for call in calls:
            if call.name.endswith("sync"):
                self._forced.setdefault(call.paths[0], []).append(call)
            elif call.name == "openat":
                self._see(call)
            else:
                self.named[call.paths[-1]] = call
                if len(call.paths) == 2:
                    self._also[call.paths[-1]] = call.paths[0]

    def _see(self, call: Call) -> None:
        for path in (call.paths[0], *call.paths[0].parents):
            if not path.is_relative_to(self._folder) or path in self._seen:
                return
            self._seen[path] = call.ended

    def has(self, path: Path, by: int | None = None) -> bool:
        """Whether a file's content is on the disk, and its name, and those of the folders that lead to it."""
        return self.has_content(path, by) and all(
            self.has_name(each, by) for each in (path, *path.parents) if each.is_relative_to(self._folder)
        )

    def has_content(self, path: Path, by: int | None = None) -> bool:
        """By whatever name it was forced."""
        return any(_is_by(call, by) for name in self._names(path) for call in self._forced.get(name, ()))

    def has_name(self, path: Path, by: int | None = None) -> bool:
        """Whether the folder was forced after the name was there: was given, or else was seen."""
        if path == self._folder:
            return True
        since = self.named[path].ended if path in self.named else self._seen.get(path)
        return since is not None and any(
            call.began > since and _is_by(call, by) for call in self._forced.get(path.parent, ())
        )

    def _names(self, path: Path) -> set[Path]:
        """All names that the file of this name has, or had."""
        names = {path}
        while True:
            more = {old for new, old in self._also.items() if new in names}
            more |= {new for new, old in self._also.items() if old in names}
            if more <= names:
                return names
            names |= more


def _is_by(call: Call, by: int | None) -> bool:
    return by is None or call.ended < by


def lose_power(disk: Disk, folder: Path) -> int:
    """Take away all that is not on the disk: the content of files, and names. Returns how much that was."""
    lost = 0
    for path in list(folder.iterdir()):
        if not disk.has_name(path):
            lost += 1
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        elif path.is_dir():
            lost += lose_power(disk, path)
        elif not disk.has_content(path):
            lost += 1
            path.write_bytes(b"")
    return lost
