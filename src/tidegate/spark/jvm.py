"""Classes of the JVM by their full names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_py4j: Any = importlib.import_module("py4j.java_gateway")  # it has no types


def java_class(session: SparkSession, name: str) -> Any:
    """`session._jvm` asks the JVM, for each part of a name, whether it is a package or a class."""
    context: Any = session.sparkContext
    return _py4j.JavaClass(name, context._gateway._gateway_client)
