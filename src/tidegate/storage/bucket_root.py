"""The files of a root in a bucket, for the run that lives on it.

Spark lives in a work folder on this machine, which holds nothing that a restart elsewhere needs. By its name a file is
- *working*: under a stage's folder of a generation. It lies in the work folder, and only there it is listed by such a
  folder; in the bucket too, once it was synced: what is in flight when a checkpoint captures it.
- *kept*: of a snapshot, or brought from elsewhere. Keeping one makes a hard link in the work folder, at once, so that
  Spark cannot delete it, and `sync` sends it. It stays in the work folder as long as in the bucket, so that a restart
  here fetches nothing of it. One that was fetched lies there as well.
- *told*: all else. It is in the bucket alone.

Where Spark is on a cluster, executors share nothing with this machine; nor do the drivers of several instances with one
another. There, what executors read and write, state above all, is in the bucket alone, and a checkpoint refers to it
where it lies. What the driver reads and writes, the batch log, the sink log and gates, is here as ever
(`is_for_executors`).

Guarantees:
- What `sync` returns from is in the bucket, and so is all that a decision names.
- What is asked of a kept file is answered by the bucket: whether it is there, and how large. Read is the one on this
  machine, if there is one that is as large; where that turns out to be damaged, the one in the bucket.
- What was here before this machine started is not trusted: a loss of power may have torn it. Nor is what is of a
  generation that the log does not know: it is of a log that was since put back from a backup.

What is in the bucket is listed when the run begins, and remembered: nobody else changes it meanwhile, but for instances
that run the same pipeline together. So what is not known here is asked for.
"""

from __future__ import annotations

import copy
import logging
import threading
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Final, Self

import msgspec

from tidegate.errors import DamagedLog, StoreUnavailable
from tidegate.storage.bucket import Bucket
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files, checksum, clear
from tidegate.storage.folder import Folder
from tidegate.storage.paths import RootPaths
from tidegate.storage.transfer import download, upload
from tidegate.storage.transfers import Progress, Transfers

_log = logging.getLogger("tidegate")

_KEPT: Final = ("snapshots", RootPaths.IN_FLIGHT)
_WORKING: Final = "stages"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_SINCE: Final = "work.json"
_DELETED_AT_ONCE: Final = 1000


class _Known:
    """What is in the bucket of generations, with sizes; for all handles on one root."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._etags: dict[str, str] = {}
        self.unsent: set[str] = set()
        """What was kept here, and is yet to be sent."""
        self._begun: set[str] = set()
        """What somebody has begun to send. It is not known to be there, and may be, though its sender has failed."""
        self._changing = threading.Lock()

    def size(self, name: str) -> int | None:
        return self._sizes.get(name)

    def etag(self, name: str) -> tuple[int, str] | None:
        size, etag = self._sizes.get(name), self._etags.get(name)
        return None if size is None or etag is None else (size, etag)

    def note_unsent(self, name: str) -> None:
        with self._changing:
            if name not in self._sizes:
                self.unsent.add(name)

    def begin(self, names: Iterable[str]) -> None:
        """To send these."""
        with self._changing:
            self._begun.update(names)

    def add(self, sizes: Mapping[str, int], etags: Mapping[str, str] | None = None) -> None:
        with self._changing:
            self._sizes.update(sizes)
            self._etags.update(etags or {})
            self.unsent.difference_update(sizes)
            self._begun.difference_update(sizes)

    def replace_in(self, folder: str, found: Mapping[str, tuple[int, str]]) -> None:
        with self._changing:
            for name in [each for each in self._sizes if each.startswith(f"{folder}/")]:
                del self._sizes[name]
                self._etags.pop(name, None)
            for name, (size, etag) in found.items():
                self._sizes[name], self._etags[name] = size, etag

    def drop(self, names: Iterable[str]) -> None:
        with self._changing:
            for name in names:
                self._sizes.pop(name, None)
                self._etags.pop(name, None)
                self.unsent.discard(name)
                self._begun.discard(name)

    def is_there(self, name: str, unless_unsent: bool) -> bool:
        """Whether it may be in the bucket. `unless_unsent`: also where that is not known, but for what is unsent."""
        return name in self._sizes or name in self._begun or (unless_unsent and name not in self.unsent)


def trust_only(work: Folder, root_id: str, bucket: Files) -> None:
    """Forget what is in a work folder unless it is of this root, and from since this machine has started. Else files of
    another root would be taken for those of this one, by their names; and nothing here is forced to the disk, so that
    after a loss of power a file may be as large as it was, and hold nothing. The same of generations that the log does
    not know: it was put back from a backup, and what it has lost is still here."""
    try:
        booted = _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # of another system: then it is never trusted
        booted = uuid.uuid4().hex
    since = msgspec.json.encode({"root_id": root_id, "booted": booted})
    if work.read(_SINCE) != since:
        clear(work, RootPaths.GENERATIONS)
        work.write(_SINCE, since)
    here = [int(name) for name in work.names_in(RootPaths.GENERATIONS) if name.isdigit()]
    known = _newest_generation(bucket) if here else None
    for generation in here:
        if known is not None and generation > known:
            clear(work, RootPaths.generation(generation))


def _newest_generation(bucket: Files) -> int | None:
    """None: the log tells of none, and no run goes on before it does."""
    try:
        return StoredDecisions(bucket).read().generation or None
    except DamagedLog:
        return None


class BucketRoot:
    """`Files` of a root in a bucket, with a work folder."""

    def __init__(
        self, bucket: Bucket, work: Folder, transfers: Transfers | None = None, *, in_bucket: bool = False
    ) -> None:
        """`transfers`: what is told how far those of it are. `in_bucket`: what executors read and write is in the
        bucket alone."""
        self._bucket = bucket
        self._work = work
        self._transfers = Transfers() if transfers is None else transfers
        self._in_bucket = in_bucket
        self._known = _Known()
        self._folder = ""
        self._look()

    def __repr__(self) -> str:
        return f"BucketRoot({self.location()!r}, {self._work.location()!r})"

    def _look(self) -> None:
        self._known.replace_in(RootPaths.GENERATIONS, self._bucket.etags_in(RootPaths.GENERATIONS))

    @property
    def fsync(self) -> bool:
        return True

    @property
    def here(self) -> Folder:
        """The same names, in the work folder."""
        return self._work.at(self._folder.rstrip("/"), durable=False)

    @property
    def _there(self) -> Bucket:
        """The same names, in the bucket."""
        return self._bucket.at(self._folder.rstrip("/"))

    def at(self, folder: str, *, durable: bool = True) -> Self:  # noqa: ARG002 - all of it is as durable
        below = copy.copy(self)
        if folder:
            below._folder = f"{self._folder}{folder}/"
        return below

    def _named(self, name: str) -> str:
        """Its name in the root."""
        return self._folder + name

    def _is_here_too(self, own: str) -> bool:
        """Whether a file of that name may lie in the work folder."""
        return _is_remembered(own) and not self._is_theirs(own)

    def _is_theirs(self, own: str) -> bool:
        """Whether it is for executors that share nothing with this machine."""
        return self._in_bucket and is_for_executors(own)

    # -- reading ----------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        own = self._named(name)
        if not self._is_here_too(own):
            return self._bucket.read(own)
        opened = self.open(name)
        if opened is None:
            return None
        try:
            with opened as file:
                return file.read()
        except OSError as error:
            raise StoreUnavailable(f"could not read {self.location(name)}: {error}") from error

    def open(self, name: str) -> BufferedIOBase | None:
        own = self._named(name)
        if not self._is_here_too(own):
            return self._bucket.open(own)
        if _is_kept(own) and not self._is_here(own):
            if self._size(own) is None:
                return None
            self._fetch([own])
        found = self._work.open(own)
        return self._bucket.open(own) if found is None else found

    def exists(self, name: str) -> bool:
        own = self._named(name)
        if self._is_theirs(own):
            return self._bucket.exists(own)  # whoever asks wants to know whether somebody else has deleted it
        return self._size(own) is not None

    def size(self, name: str) -> int | None:
        return self._size(self._named(name))

    def _size(self, own: str) -> int | None:
        if not self._is_here_too(own):
            known = self._known.size(own) if _is_remembered(own) else None
            return known if known is not None else self._bucket.size(own)
        if _is_kept(own):
            if own in self._known.unsent:
                return self._work.size(own)
            known = self._known.size(own)
            return known if known is not None else self._asked_size(own)
        here = self._work.size(own)
        return here if here is not None else self._known.size(own)

    def etag(self, name: str) -> tuple[int, str] | None:
        own = self._named(name)
        known = self._known.etag(own)
        if known is None and (known := self._bucket.etag(own)) is not None and _is_remembered(own):
            self._known.add({own: known[0]}, {own: known[1]})
        return known

    def described(self, name: str) -> tuple[int, str] | None:
        return self.etag(name) if self._is_theirs(self._named(name)) else checksum(self, name)

    def _asked_size(self, own: str) -> int | None:
        found = self._bucket.size(own)
        if found is not None:
            self._known.add({own: found})
        return found

    def _is_here(self, own: str) -> bool:
        """And is as large as the one in the bucket, if that is kept there."""
        here = self._work.size(own)
        if here is None or own in self._known.unsent:
            return here is not None
        there = self._known.size(own)
        return here == there if there is not None else not _is_kept(own)

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """As the bucket has them: what is here may be lost."""
        wanted = list(names)
        known = {name: size for name in wanted if (size := self._known.size(self._named(name))) is not None}
        return {**known, **self._there.sizes([name for name in wanted if name not in known])}

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted = list(names)
        if any(self._is_here_too(self._named(name)) for name in wanted):
            return {name: data for name in wanted if (data := self.read(name)) is not None}
        return self._there.read_all(wanted)

    def names_in(self, folder: str = "") -> list[str]:
        own = self._named(folder).rstrip("/")
        is_here, is_there = self._sides(own)
        here = self._work.names_in(own) if is_here else []
        return sorted({*here, *(self._bucket.names_in(own) if is_there else ())})

    def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
        own = self._named(folder).rstrip("/")
        is_here, is_there = self._sides(own)
        names = {name for name in self._work.list(own, but=but) if self._is_here_too(name)} if is_here else set[str]()
        if is_there:
            there = self._bucket.etags_in(own)
            if own.startswith(RootPaths.GENERATIONS):
                self._known.replace_in(own, {name: found for name, found in there.items() if _is_remembered(name)})
            below = len(own) + 1 if own else 0
            names |= {name for name in there if not but or not set(name[below:].split("/")[:-1]) & set(but)}
        return [name.removeprefix(self._folder) for name in sorted(names)]

    def _sides(self, own: str) -> tuple[bool, bool]:
        """Whether what is under a folder may lie in the work folder, and whether in the bucket."""
        if not _leads_here(own):
            return False, True
        if not _is_working(f"{own}/"):
            return True, True
        if not self._in_bucket:
            return True, False  # what of it is in the bucket too lies here
        return not is_for_executors(f"{own}/file") or _is_output(own), may_be_for_executors(own)

    # -- writing ----------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        own = self._named(name)
        if _is_working(own) and self._is_here_too(own):
            self._work.write(own, data)
        else:
            self._bucket.write(own, data)

    def create(self, name: str, data: bytes) -> bool:
        return self._bucket.create(self._named(name), data)

    def overwrite(self, name: str, data: bytes) -> None:
        self._bucket.overwrite(self._named(name), data)

    def keep(self, name: str, source: Files, source_name: str) -> None:
        own = self._named(name)
        near = self._near(source, source_name)
        if self._is_here_too(own) and near is not None:
            self._work.keep(own, *near)
            self._known.note_unsent(own)
        elif (self._known.size(own) if self._is_theirs(own) else self._size(own)) is None:
            self._copy_there(own, source, source_name)

    def hold(self, name: str, source: Files, source_name: str) -> str:
        if isinstance(source, BucketRoot) and source._bucket is self._bucket:
            lies_at = source._named(source_name)
            if not source._is_here_too(lies_at):
                return lies_at.removeprefix(self._folder)
        self.keep(name, source, source_name)
        return name

    def copy(self, name: str, source: Files, source_name: str) -> None:
        own = self._named(name)
        near = self._near(source, source_name)
        if self._is_here_too(own) and near is not None:
            self._work.copy(own, *near)
            self._known.drop([own])  # what was there of that name, if anything, is to be sent again
            self._known.note_unsent(own)
        else:
            self._known.drop([own])  # what was known of one of that name is not so of this one
            self._copy_there(own, source, source_name)

    def _near(self, source: Files, source_name: str) -> tuple[Folder, str] | None:
        """Where it lies on this machine, if it does."""
        if isinstance(source, Folder):
            return source, source_name
        if isinstance(source, BucketRoot) and source._is_here(own := source._named(source_name)):
            return source._work, own
        return None

    def _copy_there(self, own: str, source: Files, source_name: str) -> None:
        if isinstance(source, BucketRoot):
            own_there = source._named(source_name)
            if source._known.size(own_there) is None and (near := self._near(source, source_name)) is not None:
                self._bucket.copy(own, *near)  # it was not sent yet
            else:
                self._bucket.copy(own, source._bucket, own_there)
        else:
            self._bucket.copy(own, source, source_name)
        if self._is_here_too(own) and (size_bytes := self._bucket.size(own)) is not None:
            with suppress(StoreUnavailable):
                self._work.delete([own])
            self._known.add({own: size_bytes})

    def delete(self, names: Iterable[str]) -> None:
        """In the bucket first: what is here is found again by whoever looks through what is left, and is only here."""
        wanted = [self._named(name) for name in names]
        near = [name for name in wanted if self._is_here_too(name)]
        # What is kept another instance may have sent.
        there = [name for name in wanted if not self._is_here_too(name) or self._known.is_there(name, _is_kept(name))]
        with self._transfers.under_way("deleting", len(there)) as told:
            for start in range(0, len(there), _DELETED_AT_ONCE):
                self._bucket.delete(there[start : start + _DELETED_AT_ONCE])
                told(Progress(min(start + _DELETED_AT_ONCE, len(there)), len(there)))
        self._known.drop(wanted)
        self._work.delete(near)

    def forget_here(self, before: int) -> None:
        """What lies here of generations before one, whose queries are stopped. What is kept is in the bucket, and is
        fetched where it is needed again."""
        for name in self._work.names_in(RootPaths.GENERATIONS):
            if name.isdigit() and int(name) < before:
                folder = RootPaths.generation(int(name))
                self._known.unsent.difference_update(self._work.list(folder))
                clear(self._work, folder)

    def make_folder(self, folder: str) -> None:
        if _leads_here(own := self._named(folder)):
            self._work.make_folder(own)

    def prune(self, folder: str) -> None:
        self._work.prune(self._named(folder))

    def prune_above(self, names: Iterable[str], top: str) -> None:
        self._work.prune_above(map(self._named, names), self._named(top))

    def forget_unwritten(self) -> None:
        self._work.forget_unwritten()

    def sync(
        self, names: Iterable[str], known: Collection[object] = frozenset(), *, missing_ok: bool = False
    ) -> frozenset[object]:
        """Send what is here, and not there yet."""
        wanted = list(dict.fromkeys(self._named(name) for name in names))
        near = [name for name in wanted if self._is_here_too(name)]
        found = ((name, self._work.size(name)) for name in near if self._known.size(name) is None)
        unsent = {name: size for name, size in found if size is not None}
        if unsent:
            paths = {name: Path(self._work.location(name)) for name in unsent}
            self._known.begin(unsent)
            try:
                with self._transfers.under_way("uploading", len(unsent), sum(unsent.values())) as told:
                    upload(self._bucket, paths.items(), told)
            except StoreUnavailable:
                if not (missing_ok and any(not path.exists() for path in paths.values())):
                    raise
                return self.sync(names, known, missing_ok=missing_ok)  # without what is gone by now
            self._known.add(unsent)
        for name in near:
            # One that was kept here, and not sent, is nowhere else: what names it must not be decided.
            must_be_there = not missing_ok or name in self._known.unsent
            if must_be_there and self._known.size(name) is None and self._asked_size(name) is None:
                raise StoreUnavailable(f"could not sync {self._bucket.location(name)}: there is no such file")
        far = [name for name in wanted if not self._is_here_too(name) and self._known.size(name) is None]
        self._bucket.sync(far, known, missing_ok=missing_ok)
        return frozenset(wanted)

    # -- what lies here ---------------------------------------------------------------------------

    def bring(self, names: Iterable[str]) -> None:
        wanted = (own for name in names if self._is_here_too(own := self._named(name)))
        self._fetch([own for own in dict.fromkeys(wanted) if not self._is_here(own)])

    def _fetch(self, wanted: Sequence[str]) -> None:
        if wanted:
            paths = ((own, Path(self._work.location(own))) for own in wanted)
            of_bytes = sum(self._known.size(own) or 0 for own in wanted)
            with self._transfers.under_way("downloading", len(wanted), of_bytes) as told:
                download(self._bucket, paths, told)
            self._known.add({own: size for own in wanted if (size := self._work.size(own)) is not None})

    def has_another(self, name: str) -> bool:
        own = self._named(name)
        if not self._is_here_too(own) or self._work.size(own) is None or self._asked_size(own) is None:
            return False
        _log.warning("%s is damaged, and is fetched again from the bucket", self._work.location(own))
        self._work.delete([own])
        return True

    # -- where they are ---------------------------------------------------------------------------

    def location(self, name: str = "") -> str:
        return self._bucket.location(self._named(name).rstrip("/"))

    def name_at(self, location: str) -> str | None:
        found = self._bucket.name_at(location) or self._work.name_at(location)
        return _below(found, self._folder)

    def uri(self, name: str) -> str:
        """Spark reads what lies in the work folder."""
        return self._work.uri(self._named(name))

    def name_of(self, uri: str) -> str | None:
        return _below(self._work.name_of(uri), self._folder)

    def strays(self, names: Iterable[str]) -> frozenset[str]:
        own = {self._named(name): name for name in names if self._is_here_too(self._named(name))}
        return frozenset(own[each] for each in self._work.strays(own))


def _below(found: str | None, folder: str) -> str | None:
    return found.removeprefix(folder) if found is not None and found.startswith(folder) else None


def _part(own: str) -> str:
    parts = own.split("/", 3)
    return parts[2] if len(parts) > 3 and parts[0] == RootPaths.GENERATIONS else ""


def _is_kept(own: str) -> bool:
    return _part(own) in _KEPT


def _is_working(own: str) -> bool:
    return _part(own) == _WORKING


def _is_remembered(own: str) -> bool:
    """Whether it is known without asking if a file of that name is in the bucket."""
    return _is_kept(own) or _is_working(own)


def is_for_executors(own: str) -> bool:
    """Whether what reads or writes a file of that name, in a root, are Spark's executors: state, what a stage writes,
    what is in flight. The batch log, the sink log and gates are the driver's own."""
    _, _, part, _, *inside = (own.split("/", 5) + [""] * 5)[:6]
    folder, name = inside
    if part == RootPaths.IN_FLIGHT:
        return True
    if part == "snapshots":  # inside of the folder of a checkpoint
        return name.removeprefix("full/").startswith("state/")
    if part != _WORKING:
        return False
    if folder.startswith("spark"):
        return name.startswith("state/")
    if folder.startswith("output"):
        return bool(name) and not f"{name}/".startswith("_spark_metadata/")
    return folder == "nothing.parquet"


def _is_output(own: str) -> bool:
    """Whether a folder is that of what a stage writes, in which its sink log lies too."""
    parts = own.split("/")
    return len(parts) == 5 and parts[4].startswith("output")


def may_be_for_executors(own: str) -> bool:
    """Whether there may be such a file under a folder of stages."""
    _, _, _, *inside = own.split("/", 4)
    if len(inside) < 2:
        return True
    folder, _, below = inside[1].partition("/")
    if folder.startswith("spark"):
        return not below or f"{below}/".startswith("state/")
    return folder.startswith("output") and not f"{below}/".startswith("_spark_metadata/")


def _leads_here(own: str) -> bool:
    """Whether a folder is one of those, or leads to one."""
    parts = own.split("/")
    if not own or parts[0] != RootPaths.GENERATIONS:
        return not own
    return len(parts) < 3 or parts[2] in (*_KEPT, _WORKING)
