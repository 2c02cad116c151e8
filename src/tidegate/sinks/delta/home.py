"""Where a Delta table is: in a folder, or in a bucket of S3. All that knows the difference.

In a bucket, deltalake writes a version of the table's log by a put that the bucket refuses if there is one of that name
already (`conditional_put`), so that no lock is needed. Its data files are uploaded as Tidegate uploads all files.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote

import deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from tidegate.errors import InvalidConfig, SinkFailed, first_line
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder, near
from tidegate.storage.mounted import is_local
from tidegate.storage.transfers import Transfers
from tidegate.storage.user_paths import bucket_kind, plain_path

if TYPE_CHECKING:
    from tidegate.sinks.contract import SinkPlace
    from tidegate.storage.bucket import Bucket

LOG: Final = "_delta_log"
_PLAIN: Final = re.compile(r"[A-Za-z0-9._=/-]+")
"""What is in a URL as it is. deltalake escapes anything else twice, and then does not find what it has written."""
_CUT: Final = ("error reading a body", "error decoding response body")
_TRIES: Final = 3
_TIDIED_EVERY: Final = 100
"""As many versions."""
_DRAWN: Final = re.compile(r"\x1b\[[0-9;]*m|\s*↳\s*")

Options = Mapping[str, str]
T = TypeVar("T")


def name_of(version: int) -> str:
    """The file of a version, in a table's folder."""
    return f"{LOG}/{version:020d}.json"


class Shelf:
    """Where Spark, and whoever else reads files of this machine, finds the files of a table."""

    def __init__(self, folder: Path, bucket: Bucket | None = None, transfers: Transfers | None = None) -> None:
        self._transfers = Transfers() if transfers is None else transfers
        self.folder = folder
        self._bucket = bucket
        self._fetched: set[str] = set()

    def at(self, name: str) -> str:
        """How Spark names a file."""
        return str(self.folder / name)

    def known_as(self, name: str) -> str:
        """What `path_of` says of it."""
        return self.at(name)

    def bring(self, names: Iterable[str]) -> None:
        """Fetch those that are not there yet; in a folder, all are."""
        if self._bucket is None:
            return
        from tidegate.storage.transfer import download

        wanted = [name for name in dict.fromkeys(names) if name not in self._fetched]
        with self._transfers.under_way("downloading", len(wanted)) as told:
            download(self._bucket, ((name, self.folder / name) for name in wanted), told)
        self._fetched.update(wanted)

    def remove(self) -> None:
        if self._bucket is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class FarShelf(Shelf):
    """The bucket itself, for executors of a cluster: they share nothing with this machine."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(Path())
        self._there = unquote(bucket.uri("")).rstrip("/")

    def at(self, name: str) -> str:
        return f"{self._there}/{name}"

    def known_as(self, name: str) -> str:
        return f"/{self._there.partition('://')[2].partition('/')[2]}/{name}"


class Home(ABC):
    """Of one table."""

    address: str
    """As people name it, without credentials."""

    @abstractmethod
    def files(self, place: SinkPlace | None = None) -> Files:
        """All that lies in its folder. `place`: of the stage that writes there, which has room on this machine."""

    def __str__(self) -> str:
        return self.address

    def name_at(self, location: str) -> str | None:
        """The name in its folder of what is at a location. None: it is not there."""
        start = f"{self.address.rstrip('/')}/"
        return location.removeprefix(start) if location.startswith(start) else None

    @abstractmethod
    def put_on_shelf(self, files: Files | None = None, *, on_cluster: bool = False) -> Shelf:
        """A shelf for its files, which somebody removes in the end. `files`: beside which there is room for it.
        `on_cluster`: who reads them are executors on other machines."""

    @contextmanager
    def shelf(self, files: Files | None = None, *, on_cluster: bool = False) -> Iterator[Shelf]:
        """The same for a while."""
        found = self.put_on_shelf(files, on_cluster=on_cluster)
        try:
            yield found
        finally:
            found.remove()

    @property
    @abstractmethod
    def options(self) -> dict[str, str] | None:
        """What deltalake needs to know."""

    @property
    @abstractmethod
    def same(self) -> str:
        """By what one is known to be another."""

    @abstractmethod
    def why(self, error: Exception) -> str:
        """What deltalake says of a failure, in one line and without secrets."""

    @abstractmethod
    def changed_at(self, names: Iterable[str]) -> dict[str, float]:
        """When each of these files, or one of its names, was last changed; those that are there."""

    @abstractmethod
    def touch(self, files: Files, name: str) -> None:
        """Note the time by a file that has this name among some that lie in its folder."""

    @abstractmethod
    def touched_at(self, files: Files, name: str) -> float | None:
        """What was noted; None: nothing."""

    @abstractmethod
    def versions_at(self) -> Iterator[tuple[int, float]]:
        """The versions that its log has, each with when it was written."""

    @property
    @abstractmethod
    def failures(self) -> tuple[type[Exception], ...]:
        """What deltalake raises where it cannot do what it was asked to."""

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Say what cannot be done where deltalake has failed."""
        try:
            yield
        except self.failures as error:
            raise SinkFailed(f"Delta table {self.address} cannot {what}: {self.why(error)}") from self.cause(error)

    def is_passing(self, error: Exception) -> bool:  # noqa: ARG002 - of a folder none is
        """Whether what has failed is worth a second try at once: then nobody else has tried again."""
        return False

    def patiently(self, call: Callable[[], T]) -> T:
        """What changes nothing, or may be done twice."""
        for _ in range(_TRIES):
            try:
                return call()
            except self.failures as error:
                if not self.is_passing(error):
                    raise
        return call()

    def prepare(self) -> None:  # noqa: B027 - a folder needs nothing
        """Before the first version is written here by a root: refuse what cannot keep versions apart."""

    def open(self, version: int | None = None) -> deltalake.DeltaTable | None:
        """None: there is no table."""
        try:
            return self.opened(version)
        except TableNotFoundError:
            return None

    def can_be_read(self, version: int) -> bool:
        """Whether anybody can read a version whose file is there. What fails in a bucket may work soon after, so it is
        no answer: for want of this version files would be deleted."""
        with self.telling("be opened"):
            self.opened(version)
        return True

    def opened(self, version: int | None = None) -> deltalake.DeltaTable:
        """The same; what fails is raised as deltalake does."""
        return self.patiently(lambda: deltalake.DeltaTable(self.address, version=version, storage_options=self.options))

    properties: Mapping[str, str] = {}
    """Those of a table that is made here, unless others are wanted."""

    def create(
        self,
        schema: deltalake.Schema,
        partition_by: list[str],
        *,
        configuration: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        """Unless it is there."""
        with self.telling("be created"):
            self.patiently(
                lambda: deltalake.DeltaTable.create(
                    self.address,
                    schema=schema,
                    partition_by=partition_by,
                    mode="ignore",
                    configuration={**self.properties, **(configuration or {})} or None,
                    storage_options=self.options,
                    **more,
                )
            )

    def after_version(self, version: int) -> deltalake.PostCommitHookProperties | None:  # noqa: ARG002
        """What deltalake does when a version was written, if not what it does by itself."""
        return None

    @abstractmethod
    def cause(self, error: Exception) -> Exception | None:
        """What a trace may show of it: the text of a bucket's may hold what was signed."""


class InFolder(Home):
    options = None
    failures = (DeltaError,)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.address = str(path)

    def files(self, place: SinkPlace | None = None) -> Files:
        return Folder(self.path, fsync=place is None or place.fsync)

    def put_on_shelf(self, files: Files | None = None, *, on_cluster: bool = False) -> Shelf:  # noqa: ARG002 - they lie there
        return Shelf(self.path)

    @property
    def same(self) -> str:
        return os.path.realpath(self.path)

    def can_be_read(self, version: int) -> bool:
        try:
            self.opened(version)
        except DeltaError:
            return False
        return True

    def opened(self, version: int | None = None) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(self.path, version=version)

    def why(self, error: Exception) -> str:
        return first_line(error)

    def cause(self, error: Exception) -> Exception | None:
        return error

    def changed_at(self, names: Iterable[str]) -> dict[str, float]:
        """By all that has happened to it: a link does not change a file's own time, but that of its names."""
        found: dict[str, float] = {}
        for name in names:
            try:
                status = (self.path / name).stat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                found[name] = max(status.st_mtime, status.st_ctime)
        return found

    def touch(self, files: Files, name: str) -> None:
        path = Path(files.location(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def touched_at(self, files: Files, name: str) -> float | None:
        try:
            return Path(files.location(name)).stat().st_mtime
        except FileNotFoundError:
            return None

    def versions_at(self) -> Iterator[tuple[int, float]]:
        for file in (self.path / LOG).glob("*.json"):
            if file.stem.isdigit():
                yield int(file.stem), file.stat().st_mtime


class InBucket(Home):
    failures = (DeltaError, OSError)
    # Each record of a table is looked for in all versions since the last checkpoint of its log, one request for each:
    # deltalake makes one every 100 versions, unless it is told otherwise.
    properties: Mapping[str, str] = {"delta.checkpointInterval": "10"}

    def __init__(self, url: str, given: Options | None = None) -> None:
        self._given = dict(given or {})
        self._bucket: Bucket | None = None
        bucket, _, prefix = url.partition("://")[2].partition("/")
        prefix = prefix.strip("/")
        if "@" in url:
            raise InvalidConfig(
                "credentials of a table are given as storage_options, or in the environment, not in a URL"
            )
        self.address = f"s3://{bucket}/{prefix}"
        if not bucket or not prefix:
            raise InvalidConfig(f"{self.address} is a bucket, and a table is a folder in one: s3://bucket/lake/orders")
        if not _PLAIN.fullmatch(prefix):
            raise InvalidConfig(
                f"{self.address}: the folder of a table in a bucket may have letters, digits and . _ = - in its name"
            )

    def bucket(self) -> Bucket:
        if self._bucket is None:
            self._bucket = _access().open_bucket(self.address, self._given)
        return self._bucket

    def files(self, place: SinkPlace | None = None) -> Files:
        from tidegate.storage.cluster_outbox import ClusterOutbox
        from tidegate.storage.outbox import Outbox

        here = None if place is None else near(place.files)
        if place is None or not isinstance(here, Folder):
            return self.bucket()
        if place.session is None or is_local(str(place.session.sparkContext.master)):
            return Outbox(self.bucket(), here, place.transfers)
        return ClusterOutbox(self.bucket(), here, self._given, place.transfers)

    def put_on_shelf(self, files: Files | None = None, *, on_cluster: bool = False) -> Shelf:
        from tidegate.storage.outbox import Outbox

        if on_cluster:
            return FarShelf(self.bucket())
        here = None if files is None else near(files)
        beside = here.location() if isinstance(here, Folder) else None
        if beside is not None:
            Path(beside).mkdir(parents=True, exist_ok=True)
        transfers = files.transfers if isinstance(files, Outbox) else None
        return Shelf(Path(tempfile.mkdtemp(prefix="fetched-", dir=beside)), self.bucket(), transfers)

    @property
    def options(self) -> dict[str, str]:
        """Asked for each time: those of a profile may have been renewed."""
        found: dict[str, str] = _access().delta_options(self.bucket(), self._given)
        return found

    @property
    def same(self) -> str:
        return self.address

    def why(self, error: Exception) -> str:
        lines = (line.strip() for line in _DRAWN.sub("\n", str(error)).splitlines())
        return self.bucket().why(type(error)(": ".join(line for line in lines if line)))

    def is_passing(self, error: Exception) -> bool:
        """deltalake tries again what was not answered, but not where the answer's body was cut; nor where a bucket has
        refused a version for one that two were about to write, and then nobody did."""
        return isinstance(error, CommitFailedError) or any(each in str(error) for each in _CUT)

    def cause(self, error: Exception) -> Exception | None:  # noqa: ARG002 - none
        return None

    def changed_at(self, names: Iterable[str]) -> dict[str, float]:
        wanted = list(names)
        folders = {name.rpartition("/")[0] for name in wanted}
        found: dict[str, float] = {}
        for folder in folders:
            found.update(self.bucket().changed_in(folder))
        return {name: found[name] for name in wanted if name in found}

    def touch(self, files: Files, name: str) -> None:
        """By our own clock, which is the one that it is compared with."""
        files.write(name, str(time.time_ns() // 1_000_000).encode())

    def touched_at(self, files: Files, name: str) -> float | None:
        written = files.read(name)
        return int(written) / 1000 if written is not None and written.isdigit() else None

    def versions_at(self) -> Iterator[tuple[int, float]]:
        for name, at_s in self.bucket().changed_in(LOG).items():
            stem, _, kind = name.rpartition("/")[2].partition(".")
            if kind == "json" and stem.isdigit():
                yield int(stem), at_s

    def after_version(self, version: int) -> deltalake.PostCommitHookProperties | None:
        """To look for versions that are too old, the whole log is listed, a request for each thousand names."""
        return deltalake.PostCommitHookProperties(cleanup_expired_logs=None if version % _TIDIED_EVERY == 0 else False)

    def create(self, schema: deltalake.Schema, partition_by: list[str], **more: Any) -> None:
        for _ in range(_TRIES):
            try:
                return super().create(schema, partition_by, **more)
            except SinkFailed:
                # Where the answer was lost, and a second try met the first, it is there all the same. Where two were
                # refused for one another, nobody has made it.
                with self.telling("be opened"):
                    if self.open() is not None:
                        return None
        return super().create(schema, partition_by, **more)

    def prepare(self) -> None:
        from tidegate.storage.bucket_probe import probe

        probe(self.bucket().at("_tidegate"))


def _access() -> Any:
    try:
        from tidegate.storage import bucket_access
    except ImportError as error:
        raise InvalidConfig(
            "for a table in a bucket install Tidegate with it: pip install 'tidegate[bucket]'"
        ) from error
    return bucket_access


def home_of(address: str | os.PathLike[str] | Home, options: Options | None = None) -> Home:
    """By what a user has written, or a manifest knows. `options`: whose credentials are used in a bucket, and where it
    is; what they leave out comes from the environment and the AWS files."""
    if isinstance(address, Home):
        return address
    text = os.fspath(address)
    kind = bucket_kind(text)
    if kind == "s3":
        return InBucket(text, options)
    if kind is not None:
        raise InvalidConfig(f"{text}: of tables in a bucket only those of S3 are supported, s3://bucket/lake/orders")
    if options:
        raise InvalidConfig(f"storage_options are for a table in a bucket, and {text} is a folder")
    return InFolder(plain_path(address))
