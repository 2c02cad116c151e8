"""The store of control records: decisions, marks and manifests.

What it needs of the object store, and nothing more: read-after-write consistency of get and list, and
create-if-absent. A local folder, S3, GCS and Azure all give both.

Reading goes over obstore. Writing does not: obstore leaves it to the system when a file reaches the disk. Here an
object has its content on the disk before it gets its name, so that no loss of power can leave a name with half of it,
and the name is on the disk when the call returns, so that what is done next cannot outlive it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore

from tidegate.errors import StoreUnavailable, first_line
from tidegate.storage.disk import force, sync, sync_names
from tidegate.storage.paths import RootPaths
from tidegate.storage.system import explained, naming, reason, told


class Store:
    """Small objects by name. Every failure of the store itself is `StoreUnavailable`.

    Without `fsync` it is the system that chooses when objects reach the disk.
    """

    def __init__(self, root: Path, *, fsync: bool = True) -> None:
        self._root = root
        self.fsync = fsync
        self._folders: set[Path] = set()
        """Those that are known to be on the disk."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._store = LocalStore(str(root))
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"{root} cannot be used as a folder: {self._reason(error, '')}") from error

    def create(self, name: str, data: bytes) -> bool:
        """Write it if there is none of that name. Tells whether it did."""
        target = self._root / name
        try:
            with self._written(target, data) as hidden:
                try:
                    os.link(hidden, target)  # of all that try at the same time, one does
                except FileExistsError:
                    return False
            self._sync_name(target)
        except OSError as error:
            raise StoreUnavailable(f"could not create {name}: {reason(error, target)}") from error
        return True

    def put(self, name: str, data: bytes) -> None:
        target = self._root / name
        try:
            with self._written(target, data) as hidden:
                hidden.replace(target)
            self._sync_name(target)
        except OSError as error:
            raise StoreUnavailable(f"could not write {name}: {reason(error, target)}") from error

    @contextmanager
    def _written(self, target: Path, data: bytes) -> Iterator[Path]:
        """A file that has the content, and no name yet that anybody looks for."""
        writing = self._root / RootPaths.WRITING
        for folder in (writing, target.parent):
            if not folder.is_dir():
                self._folders.clear()  # what is made anew is not on the disk, whatever was there before
                folder.mkdir(parents=True, exist_ok=True)
        hidden = writing / uuid.uuid4().hex
        try:
            with naming(target), hidden.open("xb") as file:
                file.write(data)
                file.flush()
                if self.fsync and data:
                    force(file.fileno())
            yield hidden
        finally:
            hidden.unlink(missing_ok=True)

    def _reason(self, error: Exception, name: str) -> str:
        """obstore passes on what the system says in a text of its own."""
        at = self._root / name
        return reason(error, at) if isinstance(error, OSError) else explained(first_line(error), [at])

    def _sync_name(self, target: Path) -> None:
        if self.fsync:
            self._folders |= sync_names([target], self._folders)

    def sync(self, names: Iterable[str]) -> None:
        """Force objects to the disk that somebody may have written without."""
        if not self.fsync:
            return
        try:
            sync([self._root / name for name in names], missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"what is in {self._root} cannot be forced to the disk: {told(error)}") from error

    def forget_unwritten(self) -> None:
        """Remove what runs that were killed have left half written. One that is alive writes it again."""
        for path in (self._root / RootPaths.WRITING).glob("*"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreUnavailable(f"could not remove {told(error, path)}") from error

    def get(self, name: str) -> bytes | None:
        """Its content, or None if there is none of that name."""
        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"could not read {name}: {self._reason(error, name)}") from error

    def list(self, folder: str) -> list[str]:
        """The names of all objects under a folder, at any depth."""
        try:
            found = [str(item["path"]) for chunk in obstore.list(self._store, prefix=folder) for item in chunk]
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"could not list {folder}: {self._reason(error, folder)}") from error
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        """Delete what is there of these; what is not is no error."""
        for name in names:
            try:
                obstore.delete(self._store, name)
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as error:
                raise StoreUnavailable(f"could not delete {name}: {self._reason(error, name)}") from error
