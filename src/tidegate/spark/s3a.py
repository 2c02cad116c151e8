"""Executors that read and write a bucket: the jars of s3a, its settings, and the mounts by which Spark's folders lie
half there and half on the driver's machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from pyspark.find_spark_home import _find_spark_home

from tidegate.errors import InvalidConfig
from tidegate.spark.jvm import java_class
from tidegate.storage.files import Files
from tidegate.storage.folder import near
from tidegate.storage.mounted import Mounted
from tidegate.storage.paths import RootPaths

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

PACKAGES: Final = "spark.jars.packages"
_EXCLUDED: Final = "spark.jars.excludes"
# By the version of Hadoop that Spark has: that of Amazon's client, of which s3a needs these parts. It asks for all of
# them in one jar of 700 MB.
_SDK: Final = {"3.5.0": "2.35.4"}
_PARTS: Final = ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")
_NOT_NEEDED: Final = (
    "software.amazon.awssdk:bundle",
    "org.wildfly.openssl:wildfly-openssl",
    "io.netty:*",
    "org.apache.httpcomponents:*",
    "org.slf4j:*",
    "commons-logging:*",
    "commons-codec:*",
)
"""What Spark has itself, or s3a can do without."""


def with_s3a(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings of a session of our own, with the packages that s3a needs, unless its jars are there."""
    jars = Path(_find_spark_home()) / "jars"
    named = " ".join((settings.get("spark.jars", ""), settings.get(PACKAGES, "")))
    if any(jars.glob("hadoop-aws-*.jar")) or "hadoop-aws" in named:
        return dict(settings)
    hadoop = next((found[1] for each in jars.iterdir() if (found := _HADOOP.fullmatch(each.name))), None)
    sdk = _SDK.get(hadoop or "")
    if sdk is None:
        raise InvalidConfig(
            f"executors need s3a, Hadoop's file system for S3, which this Spark does not have; for its Hadoop {hadoop} "
            f"give --conf spark.jars.packages=org.apache.hadoop:hadoop-aws:{hadoop}"
        )
    wanted = [f"org.apache.hadoop:hadoop-aws:{hadoop}", *(f"software.amazon.awssdk:{each}:{sdk}" for each in _PARTS)]
    return {
        **settings,
        PACKAGES: ",".join([*filter(None, [settings.get(PACKAGES)]), *wanted]),
        _EXCLUDED: ",".join([*filter(None, [settings.get(_EXCLUDED)]), *_NOT_NEEDED]),
    }


_HADOOP: Final = re.compile(r"hadoop-client-api-([0-9.]+)\.jar")


_PREFIX: Final = "fs.s3a.bucket."
_ALWAYS: Final = ".performance.flags"
_PROVIDER: Final = "aws.credentials.provider"
_KEYS: Final = ("access.key", "secret.key", "session.token", "endpoint")


class _Told:
    """What Hadoop was told by us in one session, by bucket: that is ours to change."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, str]] = {}
        self.renewed: set[str] = set()
        """Buckets that Hadoop may have opened with what it was told before."""
        self.for_folder: dict[str, tuple[str, Callable[[], dict[str, str]]]] = {}
        """By bucket: the folder that it was last told of one for, since no query ran, and how that is reached."""
        self.links: dict[str, set[str]] = {}
        """By stage: what leads Spark to the folders of its last attempt."""


_told: WeakKeyDictionary[SparkContext, _Told] = WeakKeyDictionary()
_telling: Final = Lock()


def prepare(session: SparkSession, settings: Mapping[str, str]) -> None:
    """Let executors reach a bucket, before any query of a generation runs. What its user has set of s3a stays.

    Keys may have been renewed since the generation before. Hadoop opens a bucket once in each process, and keeps what
    it has opened, with the keys of then: so here, where no query uses it now, it is closed. Executors elsewhere keep
    theirs as long as they live.
    """
    if not java_class(session, "org.apache.spark.util.Utils").classIsLoadable("org.apache.hadoop.fs.s3a.S3AFileSystem"):
        raise InvalidConfig(
            "the Spark session has no s3a, Hadoop's file system for S3, by which executors reach the bucket: start it "
            "with the package org.apache.hadoop:hadoop-aws of its version of Hadoop"
        )
    told = _tell(session, settings)
    told.for_folder.clear()  # what a run before this one was told may be of other keys
    while told.renewed:
        uri = java_class(session, "java.net.URI").create(f"s3a://{told.renewed.pop()}/")
        java_class(session, "org.apache.hadoop.fs.FileSystem").get(uri, _hadoop(session)).close()


def mount(session: SparkSession, checkpoint: Files, *others: Files) -> None:
    """Let Spark find the folders of an attempt of a stage, Spark's checkpoint and others, that lie half in a bucket.
    Nothing to do for those that do not.

    What led to those of the stage's attempt before is forgotten: its query has ended, and every batch of every query
    would carry it along. Who still tidies up there, as Spark's upkeep of state does, has settings of its own. That file
    system is not closed: it would close those that its names lead to, which are everybody's.
    """
    hadoop, links = _hadoop(session), dict[str, str]()
    for folder in (checkpoint, *others):
        if isinstance(folder, Mounted):
            folder.make_near()
            settings = folder.settings()
            _check_same_keys(session, settings, folder.location(), folder.settings)
            _tell(session, settings)  # and nothing is closed: other queries run by now
            links |= folder.links()
    for key, target in links.items():
        hadoop.set(key, target)
    with _telling:
        told = _told.setdefault(session.sparkContext, _Told())
        before = told.links.pop(stage := _stage_of(checkpoint), set())
        if links:
            told.links[stage] = set(links)
    for key in before - links.keys():
        hadoop.unset(key)


def _stage_of(checkpoint: Files) -> str:
    """By what all attempts of a stage on this machine are known, in whatever generation."""
    location = near(checkpoint).location()
    root, _, inside = location.rpartition(f"/{RootPaths.GENERATIONS}/")
    return f"{root}/{RootPaths.stage_of(f'{RootPaths.GENERATIONS}/{inside}')}" if root else location


def _check_same_keys(
    session: SparkSession, settings: Mapping[str, str], folder: str, asked_again: Callable[[], dict[str, str]]
) -> None:
    """Refuse two folders of one bucket, a root's and a table's, that are reached with different keys: Hadoop opens a
    bucket once in each process, so that one of them would be read and written with those of the other."""
    hadoop, bucket = _hadoop(session), _bucket_of(settings)
    with _telling:
        told = _told.setdefault(session.sparkContext, _Told())
        before = told.for_folder.get(bucket)
        told.for_folder[bucket] = (folder, asked_again)
        ours = told.of.get(bucket, {})
    provider = f"{_PREFIX}{bucket}.{_PROVIDER}"
    if before is None or hadoop.get(provider) != ours.get(provider):
        return  # its user has said how keys are found, for all folders of it
    other, ask_other = before
    # Asked at the same moment: keys may have been renewed since the other was told.
    theirs, own = ask_other(), asked_again()
    for key in (f"{_PREFIX}{bucket}.{each}" for each in _KEYS):
        if hadoop.get(key) == ours.get(key) and theirs.get(key) != own.get(key):
            raise InvalidConfig(
                f"{folder} and {other} are in one bucket and are reached with different keys, or at different "
                f"endpoints: executors open a bucket once, with those of either. What to do: give both the same, or "
                f"put them into two buckets"
            )


def _hadoop(session: SparkSession) -> Any:
    return session.sparkContext._jsc.hadoopConfiguration()


def _tell(session: SparkSession, settings: Mapping[str, str]) -> _Told:
    """Tell Hadoop what it was not told of a bucket, and anew what it was told by us."""
    hadoop = _hadoop(session)
    bucket = _bucket_of(settings)
    with _telling:
        # Else each mount would have a client of its own, with all its threads.
        hadoop.set("fs.viewfs.enable.inner.cache", "false")
        told = _told.setdefault(session.sparkContext, _Told())
        before = told.of.get(bucket)
        ours: dict[str, str] = {}
        for key in {**(before or {}), **settings}:
            found, value = hadoop.get(key), settings.get(key)
            if found is not None and found != (before or {}).get(key):
                continue  # its user has set it
            if value is None:
                hadoop.unset(key)  # such as a token, where there are keys for good by now
            else:
                hadoop.set(key, value)
                ours[key] = value
        told.of[bucket] = ours
        if before is not None and ours != before:
            told.renewed.add(bucket)
    return told


def _bucket_of(settings: Mapping[str, str]) -> str:
    (bucket,) = (key.removeprefix(_PREFIX).removesuffix(_ALWAYS) for key in settings if key.endswith(_ALWAYS))
    return bucket
