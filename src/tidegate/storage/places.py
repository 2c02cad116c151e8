"""Where a root is, as its user names it, and what whoever comes there has to know: its files, who holds it, what is on
this machine of it."""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.errors import InvalidConfig, NoRoot
from tidegate.storage import lease
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.lock import INSTANCES, InstanceLock, RootLock, holder, is_held
from tidegate.storage.paths import RootPaths
from tidegate.storage.requests import Requests
from tidegate.storage.system import reason
from tidegate.storage.transfers import Transfers
from tidegate.storage.user_paths import is_bucket_url, local_path, plain_path

if TYPE_CHECKING:
    from tidegate.storage.bucket import Bucket

_PATTERN_CHARACTERS: Final = frozenset("*?[]{}\\")
_IS_ROOT: Final = "a root is what `tidegate run` was given as --root"


class Pace(msgspec.Struct, frozen=True):
    """How often what runs and commands say to each other, through files, is written and looked for."""

    look_every_s: float = 0.2
    """How often a run looks for requests."""
    say_every_ms: int = 1_000
    """How often a run says what it does."""
    ask_every_s: float = 0.05
    """How often whoever has asked looks for the answer."""
    deletes_from: int = 1
    """How many files are worth a deletion, while a run goes on: fewer wait until there are more."""
    between_looks_s: tuple[float, float] = (0.005, 0.025)
    """How long one of several instances lets pass between two looks at what the others say, at first and at most."""
    tell_every_ms: int = 50
    """How often one of them says how far it has come with what it reads."""
    tell_status_every_ms: int = 250
    """How often it says what the one that leads shows of its stages."""
    record_every_s: float = 1.0
    """How soon what has happened is in the history. What matters more than one more checkpoint is there at once."""


class Place(ABC):
    """One for all that is done there. Nothing is asked of it before something is."""

    pace = Pace()
    is_far = False
    """Whether it is elsewhere than on a file system."""
    transfers: Transfers
    """Of the run that lives there: between this machine and buckets, of the root and of tables."""
    counts: Requests
    """What was asked for there, by whoever uses this place."""
    paths: RootPaths
    """What lies on this machine: locks, and what Spark says."""

    @abstractmethod
    def __str__(self) -> str:
        """As people name it."""

    @property
    @abstractmethod
    def files(self) -> Files:
        """For whoever looks at the root, or changes it in one go."""

    @abstractmethod
    def for_run(self, *, fsync: bool, in_bucket: bool = False) -> tuple[Files, Files]:
        """The root's files for the run that lives on it, and those by the same names in which Spark lives.
        `in_bucket`: what Spark's executors read and write is in the bucket, where the root is in one: they are on other
        machines, or so are those of other instances."""

    def claimed(self, root_id: str) -> None:  # noqa: B027 - most need not know
        """By whom `for_run` was asked: the root is the one with this id."""

    @abstractmethod
    def check_is_there(self) -> None:
        """`NoRoot`, in words for people, if there can be no root here."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing is there."""

    @abstractmethod
    def remove(self) -> None:
        """All that is there, as far as it can be."""

    @abstractmethod
    def is_same_as(self, other: Place) -> bool: ...

    # -- who holds it -----------------------------------------------------------------------------

    @abstractmethod
    def is_held(self) -> bool:
        """Whether a run is alive there."""

    @abstractmethod
    def holder(self) -> str:
        """The process that holds it, or held it last."""

    @abstractmethod
    def held_since(self) -> datetime:
        """When that has taken it."""

    @abstractmethod
    def lock(self, *, take_over: bool = False) -> RootLock:
        """As a context: it is held by this process alone."""

    @abstractmethod
    def lock_of(self, instance: str, *, take_over: bool = False) -> RootLock:
        """The same, together with other instances."""

    def spark_log_of(self, instance: str | None) -> Path:
        """Of Spark where one of several instances has started it, if that is given."""
        return self.paths.spark_log_of(instance)

    # -- beside it --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def beside(self) -> Path | None:
        """The folder of its savepoints, unless their user says otherwise; None: that has to be said."""

    def savepoints(self) -> Path:
        """The same, where it has to be known."""
        if self.beside is None:
            raise InvalidConfig(f"no folder is beside {self}: say which one the savepoint is in, with --to or --in")
        return self.beside


class RootInFolder(Place):
    """A folder of this machine, or of one that several share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = RootPaths(folder)
        self.transfers = Transfers()
        self.counts = Requests()

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def files(self) -> Files:
        return Folder(self.folder, counts=self.counts)

    def for_run(self, *, fsync: bool, in_bucket: bool = False) -> tuple[Files, Files]:  # noqa: ARG002 - they share it
        files = Folder(self.folder, fsync=fsync, counts=self.counts)
        return files, files

    def check_is_there(self) -> None:
        folder = self.folder
        try:
            is_there = folder.is_dir()
        except OSError as error:
            raise NoRoot(f"{folder} cannot be a root, or is out of reach: {reason(error, folder)}") from error
        if not is_there:
            what = f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}"
            raise NoRoot(f"{what}; {_IS_ROOT}")

    def is_empty(self) -> bool:
        if not os.path.exists(self.folder):  # noqa: PTH110 - of a name that is too long it says no; the lock says why
            return True
        return self.folder.is_dir() and not any(self.folder.iterdir())

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_same_as(self, other: Place) -> bool:
        return isinstance(other, RootInFolder) and self.folder.resolve() == other.folder.resolve()

    def is_held(self) -> bool:
        return is_held(self.paths.lock)

    def holder(self) -> str:
        return holder(self.paths.lock)

    def held_since(self) -> datetime:
        lock = self.paths.lock
        return datetime.fromtimestamp(lock.stat().st_mtime if lock.exists() else 0, UTC)

    def lock(self, *, take_over: bool = False) -> RootLock:
        return RootLock(self.paths.lock, take_over=take_over)

    def lock_of(self, instance: str, *, take_over: bool = False) -> RootLock:
        return InstanceLock(self.folder, instance, take_over=take_over)

    @property
    def beside(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.savepoints"


class RootInBucket(Place):
    """Of whatever kind, with a work folder on this machine for the run that lives on it."""

    is_far = True

    # With the lease, and with a checkpoint every 10 s, less than a request a second.
    pace = Pace(
        look_every_s=5.0,
        say_every_ms=4_000,
        ask_every_s=1.0,
        deletes_from=24,
        between_looks_s=(0.2, 1.0),
        tell_every_ms=1_000,
        tell_status_every_ms=10_000,
        record_every_s=30.0,
    )

    def __init__(self, url: str, work: Path | None = None, instance: str | None = None) -> None:
        """`instance`: which of several it is that works there. Each has a folder of its own in the work folder."""
        self.url = url
        self.work = _work_folder(url) if work is None else work
        if instance is not None:
            self.work = self.work / INSTANCES / instance
        self.paths = RootPaths(self.work)
        self.transfers = Transfers()
        self.counts = Requests()
        self._bucket: Bucket | None = None

    def __str__(self) -> str:
        return self.bucket.location()

    @property
    def bucket(self) -> Bucket:
        if self._bucket is None:
            self._bucket = _opened(self.url)
            self._bucket.counts = self.counts
        return self._bucket

    @property
    def files(self) -> Files:
        return self.bucket

    def for_run(
        self,
        *,
        fsync: bool,  # noqa: ARG002 - what a bucket has taken is durable
        in_bucket: bool = False,
    ) -> tuple[Files, Files]:
        from tidegate.storage.bucket_probe import probe
        from tidegate.storage.bucket_root import BucketRoot
        from tidegate.storage.cluster_work import ClusterWork

        if not self.bucket.exists(RootPaths.PIPELINE):
            probe(self.bucket)
        work = Folder(self.work, fsync=False)
        root = BucketRoot(self.bucket, work, self.transfers, in_bucket=in_bucket)
        return root, ClusterWork.of(root) if in_bucket else work

    def claimed(self, root_id: str) -> None:
        from tidegate.storage.bucket_root import trust_only

        trust_only(Folder(self.work, fsync=False), root_id, self.bucket)

    def check_is_there(self) -> None:
        """It is only a name, until something is there."""

    def is_empty(self) -> bool:
        return not self.bucket.names_in()

    def remove(self) -> None:
        """Nothing but what a root has: others may have put something beside it."""
        files = self.bucket
        folders = (
            RootPaths.REQUESTS,
            RootPaths.IDS,
            RootPaths.PINS,
            RootPaths.GENERATIONS,
            RootPaths.COORDINATION,
            RootPaths.HISTORY,
            "sinks",
        )
        names = [name for folder in folders for name in files.list(folder)]
        alone = (RootPaths.STATUS, RootPaths.STATUS_RESERVE, lease.NAME, RootPaths.FORK, RootPaths.PIPELINE)
        files.delete([*names, *alone])

    def is_same_as(self, other: Place) -> bool:
        return isinstance(other, RootInBucket) and str(self) == str(other)

    def is_held(self) -> bool:
        return lease.SeenLease(self.bucket).is_held()

    def holder(self) -> str:
        return lease.SeenLease(self.bucket).holder()

    def held_since(self) -> datetime:
        return lease.SeenLease(self.bucket).held_since()

    def lock(self, *, take_over: bool = False) -> RootLock:
        return lease.LeaseLock(self.bucket, self.work, take_over=take_over)

    def lock_of(self, instance: str, *, take_over: bool = False) -> RootLock:
        return lease.InstanceLease(self.bucket, self.work, instance, take_over=take_over)

    def spark_log_of(self, instance: str | None) -> Path:  # noqa: ARG002 - its work folder is its own
        return self.paths.spark_log

    @property
    def beside(self) -> None:
        return None


def files_at(where: Path | str) -> Files:
    """What is in a folder, or, by its URL, in a bucket."""
    return _opened(where) if isinstance(where, str) else Folder(where)


def _opened(url: str) -> Bucket:
    try:
        from tidegate.storage.bucket_access import open_bucket
    except ImportError as error:
        raise InvalidConfig(
            "for a root in a bucket install Tidegate with it: pip install 'tidegate[bucket]'"
        ) from error
    return open_bucket(url)


def _work_folder(url: str) -> Path:
    """One for each root, under the user's cache: nothing in it is needed but by a run that is alive."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    url = url.rstrip("/")
    return (
        Path(cache) / "tidegate" / "work" / f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    )


RootGiven = str | os.PathLike[str] | Place
"""As a user names one, or where it was found to be."""


def as_given(root: RootGiven) -> Place:
    """Where a root is, by what a user has written: a path stays as it is, relative to where the user stands."""
    if isinstance(root, Place):
        return root
    return RootInBucket(os.fspath(root)) if is_bucket_url(root) else RootInFolder(local_path(root))


def place_of(root: RootGiven) -> Place:
    """The same, wherever anybody stands, and as Spark names in its logs what lies there."""
    if isinstance(root, RootInFolder):
        return RootInFolder(plain_path(root.folder))
    return as_given(root) if isinstance(root, Place) or is_bucket_url(root) else RootInFolder(plain_path(root))


def place_for_spark(
    root: RootGiven, *, work: str | None = None, fsync: bool = True, instance: str | None = None
) -> Place:
    """The same, of one that a run is to live on. `work`: where Spark is to work, if the root is in a bucket.
    `instance`: which of several that is."""
    place = place_of(root)
    if isinstance(place, RootInBucket):
        if not fsync:
            raise InvalidConfig(f"fsync is for a root in a folder: what {place} has taken is durable")
        if work is not None or instance is not None:
            place = RootInBucket(place.url, place.work if work is None else plain_path(work), instance)
    elif work is not None:
        raise InvalidConfig(f"work is for a root in a bucket: on {place}, Spark works in the root")
    if found := set(str(place.paths.root)) & _PATTERN_CHARACTERS:
        what = "root" if isinstance(place, RootInFolder) else "work folder"
        raise InvalidConfig(
            f"the {what} {place.paths.root} holds {min(found)!r}, which Spark takes for a pattern; rename the folder"
        )
    return place
