"""Keys of a bucket that are renewed while a session lives: it reads with those that it was last told. Prints what it
has read of an object with keys that are wrong, and then with those that are right."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.s3_server import ACCESS_KEY, SECRET_KEY
from tidegate.spark.s3a import prepare, with_s3a
from tidegate.spark.session import own_session
from tidegate.storage.bucket_s3a import s3a_settings


def main(url: str, endpoint: str, log: Path) -> None:
    session = own_session("keys", log, with_s3a({}))
    for secret in ("one-that-has-expired", SECRET_KEY):
        options = {
            "access_key_id": ACCESS_KEY,
            "secret_access_key": secret,
            "endpoint": endpoint,
            "region": "us-east-1",
        }
        prepare(session, s3a_settings(url, options))
        print(_read(session, url.replace("s3://", "s3a://")), flush=True)
    session.stop()


def _read(session: SparkSession, url: str) -> str:
    try:
        return ",".join(row.value for row in session.read.text(url).collect())
    except PySparkException as error:
        return type(error).__name__
    except Exception as error:
        return "refused" if "403" in str(error) or "AccessDenied" in str(error) else str(error)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
