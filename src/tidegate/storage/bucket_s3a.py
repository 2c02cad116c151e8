"""What Hadoop's file system for S3, s3a, has to be told to reach a bucket as this process does.

Each setting is of that one bucket: whatever else a session reads from S3 is its user's business.
"""

from __future__ import annotations

from typing import Final

from tidegate.errors import InvalidConfig
from tidegate.storage.bucket_access import Options, credentials_of, endpoint_of

_KEYS: Final = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_KEYS_FOR_A_WHILE: Final = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"


def s3a_settings(url: str, options: Options | None = None) -> dict[str, str]:
    """Those of Hadoop. `options`: those that the bucket is opened with. Where this process has the role of its machine,
    executors have that of theirs."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("s3", "s3a"):
        raise InvalidConfig(
            f"on a cluster, and of several instances, a root in a bucket is one of S3, or of what speaks its protocol, "
            f"not {scheme}://: executors read and write there by s3a"
        )
    found = {"performance.flags": "create,mkdir,delete"}
    endpoint, region = endpoint_of(options)
    if endpoint is not None:
        found |= {
            "endpoint": endpoint,
            "path.style.access": "true",
            "connection.ssl.enabled": str(endpoint.startswith("https://")).lower(),
        }
    if region is not None:
        found["endpoint.region"] = region
    keys = credentials_of(options)
    if keys is not None:
        access, secret, token = keys
        found |= {"access.key": access, "secret.key": secret, "aws.credentials.provider": _KEYS}
        if token is not None:
            found |= {"session.token": token, "aws.credentials.provider": _KEYS_FOR_A_WHILE}
    bucket = rest.partition("/")[0]
    return {f"fs.s3a.bucket.{bucket}.{key}": value for key, value in found.items()}
