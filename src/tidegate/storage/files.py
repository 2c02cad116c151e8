"""Files under a root: the contract that a folder, a memory and a bucket fulfil, and all that is asked of them.

A name is a string of parts with `/` between them, such as `decisions/000000000017.json`: no part is empty, `.` or `..`.
Folders are no more than what names have in common: there is one where a name leads through it, and nobody makes any. No
name is of a file and of a folder at the same time.

Guarantees:
- A file is seen whole or not at all, as it was or as it is, by whoever reads it, also after a kill.
- What was written is read, listed and told the size of from then on, by everybody.
- Of all that create one name at the same time exactly one does. Whoever hears of a failure does not know whether it
  did, nor does `False` prove that somebody else did. So a claim holds what tells it from others, and is read back.
- What `write` and `create` return from is durable: it outlives a loss of power, name and content. What `keep` and
  `copy` return from, and what others write there, Spark above all, is so after `sync`.

Every failure of the store itself is `StoreUnavailable`. That something is not there is none, but for `keep` and `copy`.

`tidegate.testing.files` has the tests of all this, for whoever writes one more.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Mapping
from io import BufferedIOBase
from typing import Final, Protocol

from tidegate.errors import StoreUnavailable
from tidegate.storage.system import say

ETAG: Final = "etag:"
_AT_ONCE_BYTES: Final = 1 << 20
_PAUSES_S: Final = (0.0, 0.0, 0.05, 0.1, 0.2)


class NotDurable(StoreUnavailable):
    """The disk has not taken what was written. A second try would seem to succeed, and mean nothing: the system has let
    go of what it could not write."""


class AtHand:
    """Of files that are asked for one by one as well as all at once, and that lie where they are read."""

    def sizes(self: Files, names: Iterable[str]) -> Mapping[str, int]:
        return {name: size for name in names if (size := self.size(name)) is not None}

    def read_all(self: Files, names: Iterable[str]) -> Mapping[str, bytes]:
        return {name: data for name in names if (data := self.read(name)) is not None}

    def bring(self, names: Iterable[str]) -> None:
        """They are there."""

    def has_another(self, name: str) -> bool:  # noqa: ARG002 - there is but one
        return False

    def hold(self: Files, name: str, source: Files, source_name: str) -> str:
        self.keep(name, source, source_name)
        return name

    def etag(self, name: str) -> tuple[int, str] | None:  # noqa: ARG002 - only what it holds tells
        return None

    def described(self: Files, name: str) -> tuple[int, str] | None:
        return checksum(self, name)


class Files(Protocol):
    """Names in, bytes out. Of one object the calls may come from several threads at a time."""

    @property
    def fsync(self) -> bool:
        """Whether anything is made durable. If not, the system chooses when what is written reaches the disk."""
        ...

    def at(self, folder: str, *, durable: bool = True) -> Files:
        """The same files, named from a folder below. Neither makes it nor asks whether it is there.

        `durable` false: what is written through these need not outlive a loss of power, unless it is synced. So it is
        with what Spark lives on between checkpoints.
        """
        ...

    def read(self, name: str) -> bytes | None:
        """Its content, or None if there is none of that name."""
        ...

    def open(self, name: str) -> BufferedIOBase | None:
        """The same, to read parts of it: what fails while it is read is an OSError. None if there is none."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name. The cheapest of all calls: of a folder, one `stat`."""
        ...

    def size(self, name: str) -> int | None:
        """Its bytes, or None if there is none of that name."""
        ...

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """The bytes of those of these files that are there, for whoever comes from elsewhere too. Of many, it takes few
        requests."""
        ...

    def read_all(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """The content of those of these files that are there, asked for side by side where that takes time."""
        ...

    def names_in(self, folder: str = "") -> list[str]:
        """The last parts of all names directly in a folder, of files and of folders, in order.

        A folder may be among them that holds nothing any more and was not pruned.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write it whole, whether or not there is one of that name."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write it if there is none of that name. Tells whether it did."""
        ...

    def overwrite(self, name: str, data: bytes) -> None:
        """Replace the first bytes of a file. Where that can be done in place, it takes no room on a disk that is full,
        and a reader may see half of it."""
        ...

    def keep(self, name: str, source: Files, source_name: str) -> None:
        """A second name for a file that does not change any more: it outlives the first. One of that name that is there
        is whole, and left as it is. That the first is not there is `StoreUnavailable`."""
        ...

    def hold(self, name: str, source: Files, source_name: str) -> str:
        """Make sure that a file of Spark's stays though Spark no longer needs it. Returns its name here: the one that
        was given, by which it is kept, unless it is among these files already, and nobody deletes it there but us."""
        ...

    def described(self, name: str) -> tuple[int, str] | None:
        """A file's size and SHA-256; or its `etag`, where it is not for this process to read. None: there is no such
        file."""
        ...

    def etag(self, name: str) -> tuple[int, str] | None:
        """A file's size, and what the store itself tells one content from another by, after `ETAG`. None: there is no
        such file, or nobody does."""
        ...

    def copy(self, name: str, source: Files, source_name: str) -> None:
        """A file of its own with what another holds, whatever was there of that name: what damages the one leaves the
        other whole. That the other is not there is `StoreUnavailable`."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete what is there of these; what is not is no error."""
        ...

    def make_folder(self, folder: str) -> None:
        """Make a folder that Spark has to find though nothing is in it. Nothing to do where folders are but names."""
        ...

    def prune(self, folder: str) -> None:
        """Remove what is left of folders that hold no file: those below a folder, and it too. Nobody else may be about
        to write there. Nothing to do where folders are but names."""
        ...

    def prune_above(self, names: Iterable[str], top: str) -> None:
        """The same of the folders that lead to names which were deleted, from a folder on, it too: only these are
        looked at, however much there is beside them."""
        ...

    def sync(
        self, names: Iterable[str], known: Collection[object] = frozenset(), *, missing_ok: bool = False
    ) -> frozenset[object]:
        """Make files durable that somebody has written or kept. `NotDurable` if the disk has not taken them.

        `known` is what the last call has returned: what of it was made durable then, and has not changed since, is not
        again. With `missing_ok` a file may be gone.
        """
        ...

    def strays(self, names: Iterable[str]) -> frozenset[str]:
        """Those of these names whose files lie elsewhere, because a link leads there."""
        ...

    def bring(self, names: Iterable[str]) -> None:
        """Make sure that files lie where Spark reads them (`uri`). Nothing to do where they always do."""
        ...

    def has_another(self, name: str) -> bool:
        """What was read of a file is not what it was. Whether there is another copy, which is read from now on."""
        ...

    def location(self, name: str = "") -> str:
        """Where it is, for people and for Spark's options."""
        ...

    def name_at(self, location: str) -> str | None:
        """The name of what is at a location. None: it is not among these files."""
        ...

    def uri(self, name: str) -> str:
        """How Spark's logs name it."""
        ...

    def name_of(self, uri: str) -> str | None:
        """The name of what Spark's logs name so. None: it is not among these files."""
        ...

    def forget_unwritten(self) -> None:
        """Remove what processes that were killed have left half written. One that is alive has to write it again."""
        ...

    def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
        """The names of all files under a folder, at any depth, in order; without what is in folders below it whose last
        part is one of `but`, which are not looked into."""
        ...


def checksum(files: Files, name: str) -> tuple[int, str] | None:
    """A file's size and SHA-256; None if there is none of that name."""
    opened = files.open(name)
    if opened is None:
        return None
    try:
        with opened as file:
            data = file.read(_AT_ONCE_BYTES)
            digest, size_bytes = hashlib.sha256(data), len(data)
            while len(data) == _AT_ONCE_BYTES:
                data = file.read(_AT_ONCE_BYTES)
                digest.update(data)
                size_bytes += len(data)
            return size_bytes, digest.hexdigest()
    except OSError as error:
        raise StoreUnavailable(f"could not read {name}: {say(error)}") from error


def is_same(found: tuple[int, str], size_bytes: int, digest: str) -> bool:
    """Whether what was read of a file, its size and SHA-256, is what it was. `digest`: what it had then; where that is
    an ETag, of a file that nobody has read before, only its size tells."""
    return found[0] == size_bytes and (digest.startswith(ETAG) or found[1] == digest)


def is_as_it_was(files: Files, name: str, size_bytes: int, digest: str) -> bool:
    """Whether a file has the content that it had. `digest`: its SHA-256; or what `etag` said of it, where nobody has
    read it."""
    return (files.etag(name) if digest.startswith(ETAG) else checksum(files, name)) == (size_bytes, digest)


def claim(files: Files, name: str, data: bytes) -> bytes:
    """Create it unless it is there, and tell what is there: `data`, which nobody else writes, if the claim is ours.

    That it was there already may have been said of what a first try has itself created, whose answer was lost; and of
    nothing at all, where two tried at the same moment and neither did: then it is tried again.
    """
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        if files.create(name, data):
            return data
        if (found := files.read(name)) is not None:
            return found
    raise StoreUnavailable(f"{files.location(name)} is said to be there already, and is not; try again")


def clear(files: Files, folder: str) -> None:
    """Remove a folder with all that is in it."""
    files.delete([*files.list(folder)])
    files.prune(folder)
