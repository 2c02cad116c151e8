"""Where Spark works on a cluster, or in one of several drivers, for a root in a bucket: one folder to Spark, that lies
half in the bucket.

Executors share nothing with the driver's machine, and drivers nothing with each other. What executors read and write is
in the bucket; the batch log, the sink log and gates, which only the driver reads and writes, are in its work folder,
where to look at one costs no request. Spark knows folders of both halves by names of Hadoop's viewfs, which leads each
to where it is (`links`). Hadoop remembers a file system by the authority of its names: so each attempt of a stage has
an authority of its own.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final, Self
from urllib.parse import unquote

from tidegate.storage.bucket_root import BucketRoot
from tidegate.storage.bucket_s3a import s3a_settings
from tidegate.storage.mounted import VIEWFS, Mounted, mounted_name
from tidegate.storage.paths import attempt_of

_ODD: Final = re.compile(r"[^A-Za-z0-9]")


class ClusterWork(BucketRoot, Mounted):
    """The same files as those of the root, by the names that Spark knows them by."""

    @classmethod
    def of(cls, root: BucketRoot) -> Self:
        """Of a root on a cluster: what the one knows, the other does too. `InvalidConfig` if executors cannot reach
        it."""
        work = cls.__new__(cls)
        vars(work).update(vars(root))
        work.settings()
        return work

    def for_spark(self, name: str = "") -> str:
        own = self._named(name).rstrip("/")
        authority = self._authority(own)
        return f"file://{self._work.location(own)}" if authority is None else f"{VIEWFS}{authority}/{own}"

    def uri(self, name: str) -> str:
        """Executors read what is in the bucket."""
        return self._bucket.uri(self._named(name))

    def name_of(self, uri: str) -> str | None:
        if not uri.startswith(VIEWFS):
            return self.name_at(unquote(uri))
        return mounted_name(uri, self._folder)

    def settings(self) -> dict[str, str]:
        return s3a_settings(self._bucket.location())

    def links(self) -> dict[str, str]:
        """Of Spark's checkpoint folder, and of a stage's output."""
        own = self._folder.rstrip("/")
        authority = self._authority(own)
        if authority is None:
            return {}
        here, there = Path(self._work.location(own)), self._bucket.uri(own)
        is_output = own.split("/")[4].startswith("output")
        inside = "_spark_metadata" if is_output else "state"
        found = {f"/{own}": there, f"/{own}/{inside}": (here / inside).as_uri()}
        if not is_output:
            found = {f"/{own}": here.as_uri(), f"/{own}/{inside}": f"{there}/{inside}"}
        return {f"fs.viewfs.mounttable.{authority}.link.{path}": target for path, target in found.items()}

    def make_near(self) -> None:
        own = self._folder.rstrip("/")
        inside = f"{own}/_spark_metadata" if own.split("/")[4].startswith("output") else own
        self._work.make_folder(inside)

    def _authority(self, own: str) -> str | None:
        """None: it is on this machine, all of it."""
        parts = own.split("/")
        attempt = attempt_of(parts[4]) if len(parts) > 4 else None
        if attempt is None:
            return None
        stage = parts[3]
        plain = _ODD.sub("-", stage)
        # Two stages must not get one name, nor two roots, nor one that is made anew with another work folder.
        names = f"{self._bucket.location()}\n{self._work.location()}\n{stage}"
        told_apart = hashlib.sha256(names.encode()).hexdigest()[:8]
        return f"tidegate-{int(parts[1])}-{plain}-{attempt}-{told_apart}"
