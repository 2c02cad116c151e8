"""Where instances share keys: in memory, in the files of a root, and in files where each call is a request."""

from __future__ import annotations

from typing import Final

from tidegate.cluster.exchange import Exchange, Profile
from tidegate.cluster.files import FilesSession
from tidegate.cluster.kv import Session
from tidegate.cluster.memory import MemoryKV
from tidegate.storage.memory import Memory

KINDS: Final = ("memory", "files", "bucket")


class Place:
    """Where instances share keys, and a root."""

    def __init__(self, kind: str, most_bytes: int = 200) -> None:
        self.root = Memory("root")
        self.most_bytes = most_bytes
        self._kind = kind
        self._memory = MemoryKV(lambda: 0)
        self._sessions: list[Session] = []

    def session(self) -> Session:
        if self._kind == "memory":
            made: Session = self._memory.open()
        else:
            made = FilesSession(self.root, poll_s=(0.0, 0.0), is_far=self._kind == "bucket")
        self._sessions.append(made)
        return made

    def joined(self, name: str, incarnation: str = "1") -> Exchange:
        files = self.root.at("")
        exchange = Exchange(self.session(), files, name, f"{name}{incarnation}", Profile(), self.most_bytes)
        exchange.join()
        return exchange

    def spilled(self, folder: str) -> list[str]:
        """The files of keys in it."""
        return self.root.list(f"spilled/{folder}")

    def keys(self, folder: str) -> list[str]:
        kept = self._memory.keys_in(folder) if self._kind == "memory" else self.root.list(folder)
        return sorted({name.partition("@")[0] for name in kept})

    def close(self) -> None:
        for each in self._sessions:
            each.close()
