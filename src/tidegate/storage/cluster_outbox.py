"""Files of a table in a bucket that executors of a cluster write there themselves.

Only the log by which Spark's file sink tells what a batch has written is on this machine, where nobody but the driver
reads and writes it. Spark knows both by names of viewfs (`storage/cluster_work.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Final

from tidegate.storage.bucket import Bucket
from tidegate.storage.bucket_s3a import s3a_settings
from tidegate.storage.folder import Folder
from tidegate.storage.mounted import VIEWFS, Mounted, mounted_name
from tidegate.storage.outbox import Outbox
from tidegate.storage.transfers import Transfers

_LOG: Final = "_spark_metadata"


class ClusterOutbox(Outbox, Mounted):
    """`options`: those that the bucket was opened with."""

    def __init__(
        self, there: Bucket, here: Folder, options: Mapping[str, str], transfers: Transfers | None = None
    ) -> None:
        super().__init__(there, here, transfers)
        self._options = dict(options)

    # -- the log of the file sink -----------------------------------------------------------------

    def _is_here(self, name: str) -> bool:
        return _LOG in f"{self._folder}{name}".split("/")

    def read(self, name: str) -> bytes | None:
        return self._here.read(name) if self._is_here(name) else self._there.read(name)

    def open(self, name: str) -> BufferedIOBase | None:
        return self._here.open(name) if self._is_here(name) else self._there.open(name)

    def size(self, name: str) -> int | None:
        return self._here.size(name) if self._is_here(name) else self._there.size(name)

    def names_in(self, folder: str = "") -> list[str]:
        return self._here.names_in(folder) if self._is_here(folder) else super().names_in(folder)

    def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
        return self._here.list(folder, but=but) if self._is_here(folder) else super().list(folder, but=but)

    def write(self, name: str, data: bytes) -> None:
        (self._here if self._is_here(name) else self._there).write(name, data)

    def delete(self, names: Iterable[str]) -> None:
        wanted = list(names)
        with self.transfers.under_way("deleting", len(wanted)):
            self._there.delete([name for name in wanted if not self._is_here(name)])
        self._here.delete(wanted)

    def bring(self, names: Iterable[str]) -> None:
        """Executors read what is in the bucket."""

    # -- as Spark names it ------------------------------------------------------------------------

    def for_spark(self, name: str = "") -> str:
        return f"{VIEWFS}{self._authority}/{self._folder}{name}".rstrip("/")

    def uri(self, name: str) -> str:
        return self._there.uri(name)

    def name_of(self, uri: str) -> str | None:
        if not uri.startswith(VIEWFS):
            return self._there.name_of(uri)
        return mounted_name(uri, self._folder)

    def settings(self) -> dict[str, str]:
        return s3a_settings(self._there.location(), self._options)

    def links(self) -> dict[str, str]:
        own = f"/{self._folder}".rstrip("/")
        found = {own: self._there.uri("").rstrip("/"), f"{own}/{_LOG}": Path(self._here.location(_LOG)).as_uri()}
        return {f"fs.viewfs.mounttable.{self._authority}.link.{path}": target for path, target in found.items()}

    def make_near(self) -> None:
        self._here.make_folder(_LOG)

    @property
    def _authority(self) -> str:
        """One for each folder of each table, and each machine: Hadoop remembers where its names lead to."""
        told_apart = f"{self._there.location()}\n{self._here.location()}"
        return f"tidegate-table-{hashlib.sha256(told_apart.encode()).hexdigest()[:16]}"
