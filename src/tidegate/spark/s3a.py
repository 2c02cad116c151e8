"""Executors that read and write a bucket: the jars of s3a, its settings, and the mounts by which Spark's folders lie
half there and half on the driver's machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.find_spark_home import _find_spark_home

from tidegate.errors import InvalidConfig
from tidegate.spark.jvm import java_class
from tidegate.storage.files import Files
from tidegate.storage.mounted import Mounted

if TYPE_CHECKING:
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


def prepare(session: SparkSession, settings: Mapping[str, str]) -> None:
    """Let executors reach a bucket. What its user has set of s3a stays."""
    if not java_class(session, "org.apache.spark.util.Utils").classIsLoadable("org.apache.hadoop.fs.s3a.S3AFileSystem"):
        raise InvalidConfig(
            "the Spark session has no s3a, Hadoop's file system for S3, by which executors reach the bucket: start it "
            "with the package org.apache.hadoop:hadoop-aws of its version of Hadoop"
        )
    hadoop = session.sparkContext._jsc.hadoopConfiguration()
    # Else each mount would have a client of its own, with all its threads.
    hadoop.set("fs.viewfs.enable.inner.cache", "false")
    for key, value in settings.items():
        if hadoop.get(key) is None:
            hadoop.set(key, value)


def mount(session: SparkSession, *folders: Files) -> None:
    """Let Spark find folders that lie half in a bucket. Nothing to do for others."""
    for folder in folders:
        if isinstance(folder, Mounted):
            folder.make_near()
            prepare(session, folder.settings())
            hadoop = session.sparkContext._jsc.hadoopConfiguration()
            for key, target in folder.links().items():
                hadoop.set(key, target)
