"""The store of control records: decisions, marks and manifests, over obstore.

What it needs of the object store, and nothing more: read-after-write consistency of get and list, and
create-if-absent. A local folder, S3, GCS and Azure all give both.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore

from tidegate.errors import StoreUnavailable, first_line


class Store:
    """Small objects by name. Every failure of the store itself is `StoreUnavailable`."""

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._store = LocalStore(str(root))
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"{root} cannot be used as a folder: {first_line(error)}") from error

    def create(self, name: str, data: bytes) -> bool:
        """Write it if there is none of that name. Tells whether it did."""
        try:
            obstore.put(self._store, name, data, mode="create")
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"could not create {name}: {first_line(error)}") from error
        return True

    def put(self, name: str, data: bytes) -> None:
        try:
            obstore.put(self._store, name, data)
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"could not write {name}: {first_line(error)}") from error

    def get(self, name: str) -> bytes | None:
        """Its content, or None if there is none of that name."""
        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"could not read {name}: {first_line(error)}") from error

    def list(self, folder: str) -> list[str]:
        """The names of all objects under a folder, at any depth."""
        try:
            found = [str(item["path"]) for chunk in obstore.list(self._store, prefix=folder) for item in chunk]
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"could not list {folder}: {first_line(error)}") from error
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        """Delete what is there of these; what is not is no error."""
        for name in names:
            try:
                obstore.delete(self._store, name)
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as error:
                raise StoreUnavailable(f"could not delete {name}: {first_line(error)}") from error
