"""What was last read here, by which a wait tells whether something has changed since.

Keys that are read one by one are remembered for as long as they are among the last few of their folder. What is
forgotten, or was never read, counts as changed only where it changes during the wait itself: that costs time at most.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

_ABSENT: Final = 0
_MOST_KEYS: Final = 16

Versions = Mapping[str, int]
"""Of the keys of a folder, by their last parts."""
Present = Mapping[str, str]
"""Incarnations, by name."""


class Seen:
    def __init__(self) -> None:
        self._folders: dict[str, dict[str, int]] = {}
        self._keys: dict[str, dict[str, int]] = {}
        self._present: Present | None = None
        self._changing = threading.Lock()

    def folder(self, folder: str, versions: Versions) -> None:
        with self._changing:
            self._folders[folder] = dict(versions)
            self._keys.pop(folder, None)

    def key(self, folder: str, name: str, version: int | None) -> None:
        with self._changing:
            whole = self._folders.get(folder)
            if whole is None:
                keys = self._keys.setdefault(folder, {})
                keys.pop(name, None)  # so that it is the last one
                keys[name] = version or _ABSENT
                if len(keys) > _MOST_KEYS:
                    del keys[next(iter(keys))]
            elif version is None:
                whole.pop(name, None)
            else:
                whole[name] = version

    def present(self, present: Present) -> None:
        self._present = present

    def is_news(self, found: Mapping[str, Versions], present: Present) -> bool:
        """Whether it differs from what was read. Of a key that was read by itself this is told once."""
        with self._changing:
            told = [self._is_news_of(folder, versions) for folder, versions in found.items()]
        return any(told) or (self._present is not None and self._present != present)

    def _is_news_of(self, folder: str, versions: Versions) -> bool:
        whole = self._folders.get(folder)
        if whole is not None:
            return whole != versions
        keys = self._keys.get(folder, {})
        changed = [name for name, version in keys.items() if versions.get(name, _ABSENT) != version]
        for name in changed:
            del keys[name]
        return bool(changed)
