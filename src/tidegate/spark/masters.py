"""Where Spark does its work: in the driver's process, or on a cluster.

Importing this brings no PySpark.
"""

from __future__ import annotations

from typing import Final

MASTER: Final = "spark.master"
HERE: Final = "local[*]"
