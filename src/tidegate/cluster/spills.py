"""Values that are too large for what processes share: they lie in the root, and their keys say where.

A file is named after its key and after the incarnation that has written it: nobody writes over what another one says.
A key that says where its value lies also says which value that is, so that no two values look the same in what is
shared.

Guarantees:
- A file is there before its key names it. Who finds such a key and no file finds nothing: what it named was deleted,
  or there is a newer one by now.
- Nothing here is deleted for its age. A file goes with its key, or with the generation or the instance that the key is
  of: whoever deletes these also deletes what a process has written that was killed before it wrote the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from tidegate.storage.files import Files, clear

MOST_BYTES: Final = 128 * 1024
"""What is shared need not take more than small values."""

_NAMED: Final = b"@"
_TOP: Final = "spilled"
_ENDING: Final = ".json"


class Spills:
    """As one incarnation writes them, and reads those of all."""

    def __init__(self, files: Files, incarnation: str, most_bytes: int = MOST_BYTES) -> None:
        self._files = files
        self._incarnation = incarnation
        self._most_bytes = most_bytes
        self._own: set[str] = set()
        """The keys whose values were too large, and may have a file."""

    def put(self, key: str, value: bytes) -> bytes:
        """What the key is to hold, for a value. The same each time, so that a try which was not answered is known for
        one's own."""
        if len(value) <= self._most_bytes and not value.startswith(_NAMED):
            return value
        name = self._name(key)
        self._own.add(key)
        self._files.write(name, value)
        return _NAMED + f"{name}#{hashlib.sha256(value).hexdigest()[:16]}".encode()

    def get(self, held: bytes) -> bytes | None:
        """The value, by what its key holds. None: there is no such file any more."""
        if not is_named(held):
            return held
        return self._files.read(held.removeprefix(_NAMED).decode().rpartition("#")[0])

    def delete(self, keys: Iterable[str]) -> None:
        """What this incarnation has written for these, if it was too large."""
        large = [key for key in keys if key in self._own]
        if large:
            self._files.delete(map(self._name, large))
            self._own.difference_update(large)

    def delete_but_last(self, key: str, *, but_own: bool) -> None:
        """What other incarnations have written for a key that is written by one of them at a time; also what this one
        has, unless that counts."""
        folder, _, name = key.rpartition("/")
        own = self._name(key) if but_own else None
        self.delete_files(each for each in self.files_in(folder).get(name, ()) if each != own)

    def delete_files(self, files: Iterable[str]) -> None:
        if there := list(files):
            self._files.delete(there)

    def files_in(self, folder: str) -> Mapping[str, tuple[str, ...]]:
        """The files of keys directly in a folder, by the last parts of these."""
        found: dict[str, tuple[str, ...]] = {}
        for each in self._files.names_in(f"{_TOP}/{folder}"):
            name, is_file, _ = each.removesuffix(_ENDING).rpartition("-")
            if is_file and each.endswith(_ENDING):
                found[name] = (*found.get(name, ()), f"{_TOP}/{folder}/{each}")
        return found

    def folders(self, folder: str) -> list[str]:
        """The last parts of all that is directly in a folder."""
        return self._files.names_in(f"{_TOP}/{folder}")

    def clear(self, folder: str) -> None:
        """Delete what all have written for keys in a folder, and in those below it. Who writes more there at the same
        time may have to try again."""
        if self._files.names_in(f"{_TOP}/{folder}"):
            clear(self._files, f"{_TOP}/{folder}")
        self._own = {key for key in self._own if not key.startswith(f"{folder}/")}

    def _name(self, key: str) -> str:
        return f"{_TOP}/{key}-{self._incarnation}{_ENDING}"


def is_named(held: bytes) -> bool:
    """Whether a key holds where its value lies."""
    return held.startswith(_NAMED)
