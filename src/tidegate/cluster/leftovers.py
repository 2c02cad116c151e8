"""Boards of instances that do not come back. Where names are made up anew for each process, there would be ever more of
them, and whoever comes would read them all.

Whoever leads looks now and then, at least a grace apart. What was nobody's when it last looked, and is still the same,
is deleted.

Guarantees:
- Nothing is deleted that was written since the look before, or whose writer was seen at either of the two.
- Files go before the keys that name them. So who was taken for gone, and is not, finds that its key is missing, and has
  then to write both.
- Files that no key names, of who was killed before it wrote one, go by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tidegate.cluster.kv import Session
from tidegate.cluster.spills import Spills


class Leftovers:
    def __init__(self, session: Session, spills: Spills, folders: Collection[str]) -> None:
        """`folders`: where the boards are."""
        self._session = session
        self._spills = spills
        self._folders = folders
        self._nobodys: Mapping[str, tuple[int | None, tuple[str, ...]]] = {}
        """At the last look: the version of each key, and its files."""

    def look(self, versions: Mapping[str, int], is_needed: Callable[[str], bool]) -> None:
        """`versions`: of all boards that are there, by their keys. `is_needed`: whether somebody may need one, or write
        it."""
        found: dict[str, tuple[int | None, tuple[str, ...]]] = {key: (each, ()) for key, each in versions.items()}
        for folder in self._folders:
            for name, files in self._spills.files_in(folder).items():
                key = f"{folder}/{name}"
                found[key] = versions.get(key), files
        before, self._nobodys = self._nobodys, {key: each for key, each in found.items() if not is_needed(key)}
        gone = [key for key, each in self._nobodys.items() if before.get(key) == each]
        if gone:
            self._spills.delete_files(file for key in gone for file in self._nobodys[key][1])
            self._session.delete(gone)
