"""Files in a bucket: of S3, of what speaks its protocol, of Google Cloud Storage or of Azure.

A file is one object, and its name the object's key below a prefix, letter for letter. What `Files` promises is had so:
- An object is put whole or not at all, and a put that was acknowledged is durable: there is nothing to sync.
- `create` is a put that the bucket refuses if there is an object of that key. Of all that try, it lets one.
- A large object is read in parts, each of them only if the object is still the one that was opened.

What fails is tried again for a few seconds before it is `StoreUnavailable` (`tidegate.storage.bucket_access`): what the
bucket answers with 5xx, and where the connection was refused or cut. **So a `create` may meet what it has itself
created**: the answer of the first try was lost, the second is told that the object is there. `False` is returned for
that as for the claim of another, and a 409 of two that try at the same moment is one more `False`, though both may
have failed. Whoever has to know reads back, as `Files` says.

Folders are but names. Spark's file system makes objects for some all the same, whose keys end with `/`: they are no
files, and are not listed.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, Self, TypeAlias, TypeVar
from urllib.parse import quote, unquote

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, PreconditionError

from tidegate.errors import StoreUnavailable
from tidegate.storage.bucket_errors import Teller
from tidegate.storage.files import ETAG, Files, checksum
from tidegate.storage.folder import Folder
from tidegate.storage.requests import Requests
from tidegate.storage.system import reason, told

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from obstore import GetResult, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")
Objects: TypeAlias = "list[ObjectMeta]"

PART_BYTES: Final = 8 << 20
"""What is larger is sent and fetched in parts of this size: each has its own time to arrive in."""
PARTS_AT_ONCE: Final = 4
"""So that no file takes more memory than a few parts."""
_BUFFER_BYTES: Final = 1 << 20
"""What is no larger is fetched as a whole when it is opened: one request instead of two."""
_AT_ONCE: Final = 16
_FEW: Final = 4
_READING: Final = frozenset(("get", "head", "list"))
_PAUSES_S: Final = (0.05, 0.3)
_SOON_S: Final = 1.0
_PAGE: Final = 1000
"""As many names as S3 lists, or deletes, with one request."""
_AS_IN_A_URI: Final = "/-_.!~'()*,;:$&+=@"
"""What Java leaves as it is in the path of a URI, and so Hadoop."""

# What obstore raises: its own errors, those of Python for what is not there, and for names that cannot be.
_FAILURES: Final = (BaseError, OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class BucketPlace:
    """Where a bucket is. Two that are equal are the same bucket."""

    location: str
    """How people name it, with a slash at the end: `s3://bucket/`."""
    uri: str
    """How Spark does: `s3a://bucket/`."""
    others: tuple[str, ...] = ()
    """What names it besides these."""
    endpoint: str | None = None
    """Who has it, if it is not whom all know by that name."""
    deletes_at_once: bool = True
    """Whether many objects can be deleted with one request."""


class Bucket:
    """`Files` in a bucket, below a prefix. `tidegate.storage.bucket_access.open_bucket` makes one from a URL."""

    def __init__(self, store: ObjectStore, place: BucketPlace, prefix: str = "", teller: Teller | None = None) -> None:
        self._store = store
        self._place = place
        self._teller = teller or Teller()
        self.counts = Requests()
        """Of all handles on it that `at` gives."""
        self._base = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def __repr__(self) -> str:
        return f"Bucket({self.location()!r})"

    @property
    def fsync(self) -> bool:
        return True

    @property
    def requests(self) -> Counter[str]:
        """How many requests were made so far, by kind: get, put, head, list, delete, copy. What was tried again is
        counted once."""
        return self.counts.counted()

    def at(self, folder: str, *, durable: bool = True) -> Self:  # noqa: ARG002 - all of it is as durable
        below = copy.copy(self)
        if folder:
            below._base = f"{self._base}{folder}/"
        return below

    # -- reading ----------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        found = self._get(name)
        return None if found is None else self._content(name, found)

    def open(self, name: str) -> BufferedIOBase | None:
        found = self._get(name)
        if found is None:
            return None
        if found.meta["size"] <= _BUFFER_BYTES:
            return BytesIO(self._content(name, found))
        return BufferedReader(self._parts_of(name, found), _BUFFER_BYTES)

    def fetch(self, name: str, path: Path) -> int | None:
        """Write its content to a new file on the disk, part by part. Tells how many bytes these are, or None if there
        is none of that name. The disk's failures are `StoreUnavailable` too, and leave half a file."""
        found = self._get(name)
        if found is None:
            return None
        try:
            with path.open("xb") as file:
                if found.meta["size"] <= PART_BYTES:
                    file.write(self._content(name, found))
                else:
                    parts = self._parts_of(name, found)
                    while data := parts.read(PART_BYTES):
                        file.write(data)
                return file.tell()
        except OSError as error:
            raise StoreUnavailable(f"could not fetch {self.location(name)}: {told(error)}") from error

    def _get(self, name: str) -> GetResult | None:
        try:
            return self._ask("get", lambda: obstore.get(self._store, self._base + name))
        except _FAILURES as error:
            if Teller.is_absent(error):
                return None
            self._fail("read", name, error)

    def _content(self, name: str, found: GetResult) -> bytes:
        try:
            data = bytes(found.bytes())
        except _FAILURES as error:
            self._fail("read", name, error)
        if len(data) != found.meta["size"]:
            self.counts.add_failed()
            raise StoreUnavailable(f"could not read {self.location(name)}: only {len(data)} bytes of it came")
        return data

    def _parts_of(self, name: str, found: GetResult) -> _Parts:
        def get(start: int, end: int) -> bytes:
            options: obstore.GetOptions = {"range": (start, end), "if_match": found.meta["e_tag"]}
            try:
                return bytes(
                    self._ask("get", lambda: obstore.get(self._store, self._base + name, options=options)).bytes()
                )
            except PreconditionError:
                why = "it was written anew while it was read"
            except _FAILURES as error:
                why = "it was deleted while it was read" if Teller.is_absent(error) else self._teller.why(error)
            self.counts.add_failed()
            raise OSError(f"could not read {self.location(name)}: {why}")

        return _Parts(found.meta["size"], get)

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        """Of a bucket that is gone it knows no more than of an object that is: the answer has no text."""
        found = self.etag(name)
        return None if found is None else found[0]

    def etag(self, name: str) -> tuple[int, str] | None:
        try:
            found = self._ask("head", lambda: obstore.head(self._store, self._base + name))
        except _FAILURES as error:
            if Teller.is_absent(error):
                return None
            self._fail("read", name, error)
        return found["size"], f"{ETAG}{found['e_tag']}"

    def described(self, name: str) -> tuple[int, str] | None:
        return checksum(self, name)

    # -- listing ----------------------------------------------------------------------------------

    def names_in(self, folder: str = "") -> list[str]:
        objects, folders = self._list_one(folder)
        return sorted({*objects, *folders})

    def _list_one(self, folder: str) -> tuple[set[str], set[str]]:
        """The last parts of the names of the objects and of the folders that are directly in a folder."""
        top = self._top(folder)
        try:
            found = self._ask("list", lambda: obstore.list_with_delimiter(self._store, top.rstrip("/") or None))
        except _FAILURES as error:
            self._fail("list", folder, error)
        objects = {each["path"].removeprefix(top) for each in found["objects"] if each["path"].startswith(top)}
        folders = {each.rstrip("/").removeprefix(top) for each in found["common_prefixes"]}
        self.counts.add("list", max(0, math.ceil((len(objects) + len(folders)) / _PAGE) - 1))
        return objects - folders, folders

    def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
        return sorted(self.sizes_in(folder, but=but))

    def sizes_in(self, folder: str = "", *, but: Collection[str] = ()) -> dict[str, int]:
        """What `list` lists, with the bytes of each."""
        return {name: size for name, (size, _) in self.etags_in(folder, but=but).items()}

    def etags_in(self, folder: str = "", *, but: Collection[str] = ()) -> dict[str, tuple[int, str]]:
        """The same with what `etag` says of each."""
        top, start = self._top(folder), len(self._base)
        found = {each["path"]: (each["size"], f"{ETAG}{each['e_tag']}") for each in self._objects(folder)}
        names = {key[start:] for key in found if not but or _leads_around(key[len(top) :], but)}
        names -= self._markers({name for name in names if not found[self._base + name][0]}, names)
        return {name: found[self._base + name] for name in names}

    def changed_in(self, folder: str = "") -> dict[str, float]:
        """When each file under a folder was written, by the bucket's clock."""
        start = len(self._base)
        return {each["path"][start:]: each["last_modified"].timestamp() for each in self._objects(folder)}

    def _objects(self, folder: str) -> Objects:
        """All below a folder, at any depth."""
        top = self._top(folder)

        def listed() -> Objects:
            found: Objects = []
            for number, page in enumerate(obstore.list(self._store, top.rstrip("/") or None, chunk_size=_PAGE)):
                self.counts.add("list", min(number, 1))
                # What is the prefix itself, or only begins as it does, is not below it.
                found += [each for each in page if each["path"].startswith(top)]
            return found

        try:
            return self._ask("list", listed)
        except _FAILURES as error:
            self._fail("list", folder, error)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """A few are asked for one by one; of many, the folders are listed that generations have."""
        wanted = list(dict.fromkeys(names))
        if len(wanted) <= _FEW:
            with ThreadPoolExecutor(max(1, len(wanted))) as threads:
                asked = zip(wanted, threads.map(self.size, wanted), strict=True)
                return {name: size for name, size in asked if size is not None}
        found: dict[str, int] = {}
        for folder in {"/".join(name.split("/")[:-1][:2]) for name in wanted}:
            found.update(self.sizes_in(folder))
        return {name: found[name] for name in wanted if name in found}

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted = list(dict.fromkeys(names))
        if not wanted:
            return {}
        with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as threads:
            read = zip(wanted, threads.map(self.read, wanted), strict=True)
            return {name: data for name, data in read if data is not None}

    def _markers(self, empty: set[str], names: set[str]) -> set[str]:
        """Those of the empty ones that are but folders: obstore leaves out the slash that their keys end with."""
        folders = {parent for name in names for parent in _folders_above(name)}
        found = empty & folders
        for parent in {name.rpartition("/")[0] for name in empty - found}:
            _, inside = self._list_one(parent)
            found |= empty & {f"{parent}/{each}" if parent else each for each in inside}
        return found

    def _top(self, folder: str) -> str:
        return f"{self._base}{folder}/" if folder else self._base

    # -- writing ----------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        try:
            if len(data) > PART_BYTES:
                self._put_parts(name, BytesIO(data), len(data))
            else:
                self._ask("put", lambda: obstore.put(self._store, self._base + name, data, use_multipart=False))
        except _FAILURES as error:
            self._fail("write", name, error)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._ask("put", lambda: obstore.put(self._store, self._base + name, data, mode="create"))
        except AlreadyExistsError:
            return False
        except _FAILURES as error:
            self._fail("create", name, error)
        return True

    def overwrite(self, name: str, data: bytes) -> None:
        """Nothing can be replaced in place: it is read, and written anew."""
        before = self.read(name)
        if before is None:
            raise StoreUnavailable(f"could not write {self.location(name)}: there is no such file")
        self.write(name, data + before[len(data) :])

    def keep(self, name: str, source: Files, source_name: str) -> None:
        if not self.exists(name):
            self.copy(name, source, source_name)

    def hold(self, name: str, source: Files, source_name: str) -> str:
        self.keep(name, source, source_name)
        return name

    def copy(self, name: str, source: Files, source_name: str) -> None:
        """Within a bucket nothing goes over the network; from a folder, and from elsewhere, part by part."""
        if isinstance(source, Bucket) and source._place == self._place and self._copy_inside(name, source, source_name):
            return
        if isinstance(source, Folder):
            self.send(name, Path(source.location(source_name)))
            return
        opened = source.open(source_name)
        if opened is None:
            self._fail_as_gone(name, source, source_name)
        with opened:
            try:
                first = opened.read(PART_BYTES)
                if len(first) < PART_BYTES:
                    self.write(name, first)
                else:
                    self._write_parts(name, first, opened)
            except _FAILURES as error:
                self._fail("copy", name, error)

    def _write_parts(self, name: str, first: bytes, rest: BufferedIOBase) -> None:
        """As `_put_parts`, of what may come from a bucket too: obstore cannot be asked by what it has asked itself."""
        writer = obstore.open_writer(
            self._store, self._base + name, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
        )
        data, count = first, 0
        while data:
            writer.write(data)
            count += 1
            data = rest.read(PART_BYTES)
        writer.close()  # not if it has failed: what is closed has its name
        self.counts.add("put", count + 2)

    def _copy_inside(self, name: str, source: Bucket, source_name: str) -> bool:
        """Whether it did: S3 copies nothing that is larger than 5 GiB."""
        try:
            self._ask("copy", lambda: obstore.copy(self._store, source._base + source_name, self._base + name))
        except _FAILURES as error:
            if Teller.is_absent(error):
                self._fail_as_gone(name, source, source_name)
            if Teller.is_too_large(error):
                return False
            self._fail("copy", name, error)
        return True

    def send(self, name: str, path: Path) -> None:
        """Write it with what a file on the disk holds, which must not change meanwhile, part by part."""
        try:
            with path.open("rb") as file:
                size_bytes = path.stat().st_size
                if size_bytes > PART_BYTES:
                    failed = self._try(lambda: self._put_parts(name, file, size_bytes))
                else:
                    data = file.read()
                    failed = self._try(lambda: self.write(name, data))
        except OSError as error:
            raise StoreUnavailable(f"could not copy {path} to {self.location(name)}: {reason(error)}") from error
        if failed is not None:
            self._fail("write", name, failed)

    @staticmethod
    def _try(call: Callable[[], None]) -> Exception | None:
        """What obstore raises may be an OSError, which is not one of the disk's."""
        try:
            call()
        except _FAILURES as error:
            return error
        return None

    def _put_parts(self, name: str, file: BytesIO | BufferedReader, size_bytes: int) -> None:
        """An upload that ends early leaves no object, but parts that cost money until the bucket is told to drop
        them: a rule of its life cycle does."""
        self.counts.add("put", math.ceil(size_bytes / PART_BYTES) + 1)
        self._ask(
            "put",
            lambda: obstore.put(
                self._store,
                self._base + name,
                file,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            ),
        )

    def delete(self, names: Iterable[str]) -> None:
        keys = [self._base + name for name in dict.fromkeys(names)]
        if not keys:
            return
        try:
            self.counts.add("delete", math.ceil(len(keys) / _PAGE) if self._place.deletes_at_once else len(keys))
            obstore.delete(self._store, keys)
        except _FAILURES as error:
            if not Teller.is_absent(error):
                self._fail("delete", keys[0].removeprefix(self._base), error)
            for key in keys:  # some stores fail for what is not there, and leave the rest
                self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        try:
            self._ask("delete", lambda: obstore.delete(self._store, key))
        except _FAILURES as error:
            if not Teller.is_absent(error):
                self._fail("delete", key.removeprefix(self._base), error)

    def make_folder(self, folder: str) -> None:
        """Folders are but names."""

    def prune(self, folder: str) -> None:
        """Folders are but names."""

    def prune_above(self, names: Iterable[str], top: str) -> None:
        """Folders are but names."""

    def forget_unwritten(self) -> None:
        """Nothing is ever half written that has a name."""

    def sync(
        self, names: Iterable[str], known: Collection[object] = frozenset(), *, missing_ok: bool = False
    ) -> frozenset[object]:
        """What is there is durable: it is only asked whether it is there, many at once."""
        wanted = frozenset(names)
        asked = [] if missing_ok else sorted(name for name in wanted if name not in known)
        if asked:
            with ThreadPoolExecutor(min(_AT_ONCE, len(asked))) as threads:
                there = list(threads.map(self.exists, asked))
            gone = [name for name, is_there in zip(asked, there, strict=True) if not is_there]
            if gone:
                raise StoreUnavailable(f"could not sync {self.location(gone[0])}: there is no such file")
        return wanted

    # -- where they are ---------------------------------------------------------------------------

    def location(self, name: str = "") -> str:
        return (self._place.location + self._base + name).rstrip("/")

    def name_at(self, location: str) -> str | None:
        for top in (self._place.location, self._place.uri, *self._place.others):
            if location.startswith(top + self._base):
                return location.removeprefix(top + self._base)
        return None

    def uri(self, name: str) -> str:
        return self._place.uri + quote(self._base + name, safe=_AS_IN_A_URI)

    def name_of(self, uri: str) -> str | None:
        return self.name_at(unquote(uri))

    def strays(self, names: Iterable[str]) -> frozenset[str]:  # noqa: ARG002 - there are no links
        return frozenset()

    def bring(self, names: Iterable[str]) -> None:
        """Whoever reads here has no place of its own."""

    def has_another(self, name: str) -> bool:  # noqa: ARG002 - there is but one
        return False

    # -- what fails -------------------------------------------------------------------------------

    def why(self, error: Exception) -> str:
        """Why another client of this bucket has failed, in one line without secrets."""
        return self._teller.why(error)

    def hide(self, secrets: Iterable[str]) -> None:
        """What is never told."""
        self._teller.hide(secrets)

    def _ask(self, kind: str, call: Callable[[], T]) -> T:
        """What only reads is asked again where it has failed soon: obstore does so itself but for an answer that is cut
        in its text. What has failed after a while it has tried for long enough."""
        for pause_s in _PAUSES_S if kind in _READING else ():
            began_s = time.monotonic()
            self.counts.add(kind)
            try:
                return call()
            except GenericError:
                if time.monotonic() - began_s > _SOON_S:
                    raise
                time.sleep(pause_s)
        self.counts.add(kind)
        return call()

    def _fail_as_gone(self, name: str, source: Files, source_name: str) -> NoReturn:
        raise StoreUnavailable(f"could not copy {source.location(source_name)} to {self.location(name)}: it is gone")

    def _fail(self, doing: str, name: str, error: Exception) -> NoReturn:
        """Not `from` the error: its text may hold what was signed, and a trace would show it."""
        self.counts.add_failed()
        raise StoreUnavailable(f"could not {doing} {self.location(name)}: {self._teller.why(error)}") from None


class _Parts(RawIOBase):
    """An object that is read in parts."""

    def __init__(self, size_bytes: int, get: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._get = get
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        start = (0, self._position, self._size_bytes)[whence]
        if start + offset < 0:
            raise OSError("nothing is before the first byte")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        into = memoryview(buffer).cast("B")
        end = min(self._position + len(into), self._size_bytes)
        if end <= self._position:
            return 0
        data = self._get(self._position, end)
        if len(data) != end - self._position:
            raise OSError(f"only {len(data)} of {end - self._position} bytes came")
        into[: len(data)] = data
        self._position = end
        return len(data)


def _folders_above(name: str) -> Iterator[str]:
    at = name.rfind("/")
    while at > 0:
        yield name[:at]
        at = name.rfind("/", 0, at)


def _leads_around(below: str, but: Collection[str]) -> bool:
    return not any(part in but for part in below.split("/")[:-1])
