"""A bucket by its URL: where it is, whose credentials are used, and how long is waited for it.

    s3://bucket/prefix      S3, and what speaks its protocol at another `endpoint`; `s3a://` is the same
    gs://bucket/prefix      Google Cloud Storage
    az://container/prefix   Azure, of the account that an option or the environment names
    abfss://container@account.dfs.core.windows.net/prefix

Options are those of obstore and of delta-rs: `access_key_id` or `AWS_ACCESS_KEY_ID`, `endpoint`, `region`, … What no
option says is taken from the environment, under the names that the programs of Amazon, Google and Azure use, and for S3
from the profile of AWS's own files, which obstore does not read: AWS_PROFILE, AWS_SHARED_CREDENTIALS_FILE and
AWS_CONFIG_FILE are heeded. Where nothing has credentials, obstore asks for those of the machine's role.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as IniError
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from tidegate.errors import InvalidConfig, StoreUnavailable
from tidegate.storage.bucket import Bucket, BucketPlace
from tidegate.storage.bucket_errors import Teller
from tidegate.storage.user_paths import BUCKETS

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Credential

CONNECT_S: Final = 5
RETRY_S: Final = 10
"""What failed is tried again for so long, and not for obstore's three minutes: a run has to say that its store is away,
and to try again by its own rules. A server that is started anew is back by then."""
ANSWER_S: Final = 30
"""For a request as a whole, so that a part of a large object has time on a slow line. One that was not answered by then
is not made again: a store that stands still is told of after so long, at the latest."""
PAUSE_MS: Final = (100, 2000)
"""Between two tries, at first and at the most: longer each time, and by chance, so that not all come back at once."""
_MAX_RETRIES: Final = 100
"""It is the time that ends it."""
_REREAD_S: Final = 300
"""How long credentials from a file are used before the file is read again: others may renew them."""

_AZURE_HOST: Final = re.compile(r"(?P<container>[^@/]+)@(?P<account>[^./]+)\.(?:dfs|blob)\.core\.windows\.net")
_CLIENT_OPTIONS: Final = frozenset(("allow_http", "allow_invalid_certificates", "proxy_url", "user_agent"))
_SECRET: Final = re.compile(r"(?i)secret|token|key|password|sas|credential|service_account")
_TRUE: Final = frozenset(("1", "true", "yes", "on"))

Options = Mapping[str, str]


def open_bucket(url: str, options: Options | None = None) -> Bucket:
    """The files below a URL's path. Nothing is asked of the bucket yet: `bucket_probe.probe` does that.

    `InvalidConfig` if the URL or an option cannot be.
    """
    given = _lowered(options)
    kind, bucket, prefix, account = _parse(url)
    teller = Teller(_secrets(given))
    open_kind = {"s3": _open_s3, "gs": _open_gs, "az": _open_az}[kind]
    try:
        store, place = open_kind(bucket, account, given, teller)
    except (BaseError, ValueError, TypeError) as error:
        why = teller.why(error)
    else:
        return Bucket(store, place, prefix, teller)
    raise InvalidConfig(f"{_location(kind, bucket)} cannot be opened: {why}")


def delta_options(bucket: Bucket, options: Options | None = None) -> dict[str, str]:
    """What deltalake has to be told to open a table in a bucket of S3 as `open_bucket` does with the same options.

    What is not among these it takes from the environment itself. A version of the table is put only where there is none
    of its name: of two that write one at the same time, one does.
    """
    given = _lowered(options)
    config, profile, uses_profile, endpoint = _s3_config(given, Teller())
    found = {f"AWS_{key.upper()}": value for key, value in config.items() if key not in _ENDPOINTS}
    for key in _CLIENT_OPTIONS:
        if (value := given.get(key, given.get(f"aws_{key}"))) is not None:
            found[f"AWS_{key.upper()}" if key == "allow_http" else key] = value
    if endpoint is not None:
        found["AWS_ENDPOINT_URL"] = endpoint
        if endpoint.startswith("http://"):
            found.setdefault("AWS_ALLOW_HTTP", "true")
    if uses_profile:
        credentials = profile.credentials()
        found["AWS_ACCESS_KEY_ID"] = credentials["access_key_id"]
        found["AWS_SECRET_ACCESS_KEY"] = credentials["secret_access_key"]
        if token := credentials.get("token"):
            found["AWS_SESSION_TOKEN"] = token
    bucket.hide(value for key, value in found.items() if _SECRET.search(key))
    first, longest = (f"{pause}ms" for pause in PAUSE_MS)
    return {
        "timeout": f"{ANSWER_S}s",
        "connect_timeout": f"{CONNECT_S}s",
        "max_retries": str(_MAX_RETRIES),
        "retry_timeout": f"{RETRY_S}s",
        "backoff_config.init_backoff": first,
        "backoff_config.max_backoff": longest,
        "AWS_CONDITIONAL_PUT": "etag",
        **found,
    }


def _parse(url: str) -> tuple[str, str, str, str | None]:
    """Its kind, bucket, prefix, and the account if it names one."""
    scheme, _, rest = url.partition("://")
    kind = BUCKETS.get(scheme)
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if kind is None or not bucket:
        schemes = ", ".join(f"{each}://" for each in BUCKETS)
        raise InvalidConfig(f"{_without_secrets(url)} is not the URL of a bucket: that starts with one of {schemes}")
    account = None
    if "@" in bucket:
        named = _AZURE_HOST.fullmatch(bucket)
        if kind != "az" or named is None:
            raise InvalidConfig(f"{_without_secrets(url)}: credentials are given as options, not in a URL")
        bucket, account = named["container"], named["account"]
    if prefix and not all(part not in ("", ".", "..") for part in prefix.split("/")):
        raise InvalidConfig(f"{url}: no part of a bucket's prefix may be empty, '.' or '..'")
    return kind, bucket, prefix, account


def _without_secrets(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if rest else url


def _location(kind: str, bucket: str) -> str:
    return f"{kind}://{bucket}/"


# -- each kind ----------------------------------------------------------------------------------------


def _s3_config(given: dict[str, str], teller: Teller) -> tuple[dict[str, str], _Profile, bool, str | None]:
    """What was given, with what a profile says besides; the profile, whether it is its credentials that are used, and
    who has the bucket."""
    config = _named("aws_", given)
    profile = _Profile(config.pop("profile", None) or os.environ.get("AWS_PROFILE"), teller)
    uses_profile = profile.has_credentials and not _says("AWS_", config, *_OWN_CREDENTIALS)
    if not _says("AWS_", config, "region", "default_region"):
        config |= profile.setting("region", "region")
    if not _says("AWS_", config, *_ENDPOINTS):
        config |= profile.setting("endpoint_url", "endpoint")
    return config, profile, uses_profile, _says("AWS_", config, *_ENDPOINTS)


def _open_s3(bucket: str, _: str | None, given: dict[str, str], teller: Teller) -> tuple[ObjectStore, BucketPlace]:
    config, profile, uses_profile, endpoint = _s3_config(given, teller)
    store = S3Store(
        bucket,
        config=_prefixed("aws_", config),
        client_options=_client_options(given, endpoint),
        retry_config=_retries(),
        credential_provider=profile.credentials if uses_profile else None,
    )
    # Hadoop's file system for S3 is s3a; those of Amazon's clusters call theirs s3, and old ones s3n.
    return store, BucketPlace(_location("s3", bucket), f"s3a://{bucket}/", (f"s3n://{bucket}/",), endpoint)


def endpoint_of(options: Options | None = None) -> tuple[str | None, str | None]:
    """Where S3 is, and in which region, as far as options, the environment or a profile say."""
    config, _, _, endpoint = _s3_config(_lowered(options), Teller())
    return endpoint, _says("AWS_", config, "region", "default_region")


def credentials_of(options: Options | None = None) -> tuple[str, str, str | None] | None:
    """The keys that S3 is asked with, and the token that comes with them for a while. None: those of a role."""
    config, profile, uses_profile, _ = _s3_config(_lowered(options), Teller())
    if uses_profile:
        found = profile.credentials()
        return found["access_key_id"], found["secret_access_key"], found.get("token")
    access, secret = _says("AWS_", config, "access_key_id"), _says("AWS_", config, "secret_access_key")
    token = _says("AWS_", config, "session_token", "token")
    return None if access is None or secret is None else (access, secret, token)


def _lowered(options: Options | None) -> dict[str, str]:
    return {key.lower(): str(value) for key, value in (options or {}).items()}


def _open_gs(bucket: str, _: str | None, given: dict[str, str], __: Teller) -> tuple[ObjectStore, BucketPlace]:
    store = GCSStore(
        bucket,
        config=_prefixed("google_", _named("google_", given)),
        client_options=_client_options(given, None),
        retry_config=_retries(),
    )
    location = _location("gs", bucket)
    return store, BucketPlace(location, location, deletes_at_once=False)


def _open_az(container: str, account: str | None, given: dict[str, str], _: Teller) -> tuple[ObjectStore, BucketPlace]:
    config = _named("azure_storage_", _named("azure_", given))
    account = account or _says("AZURE_STORAGE_", config, "account_name")
    if account is None:
        raise InvalidConfig(
            f"{_location('az', container)}: set AZURE_STORAGE_ACCOUNT_NAME to the account that it is of"
        )
    store = AzureStore(
        container,
        config=_prefixed("azure_storage_", config | {"account_name": account}),
        client_options=_client_options(given, _says("AZURE_STORAGE_", config, "endpoint")),
        retry_config=_retries(),
    )
    spark = f"abfss://{container}@{account}.dfs.core.windows.net/"
    return store, BucketPlace(
        _location("az", container), spark, (spark.replace("abfss:", "abfs:"),), deletes_at_once=False
    )


_ENDPOINTS: Final = ("endpoint_url_s3", "endpoint", "endpoint_url")
_OWN_CREDENTIALS: Final = (
    "access_key_id",
    "skip_signature",
    "web_identity_token_file",
    "container_credentials_relative_uri",
    "container_credentials_full_uri",
)
"""With any of these no profile is asked. Amazon's programs ask a profile before they ask a container: whoever runs in
one that has a role, and has a profile too, names the profile."""


def _says(start: str, config: Mapping[str, str], *keys: str) -> str | None:
    """The first of these that an option or the environment has. obstore takes from there what no option says."""
    found = (config.get(key) or os.environ.get(f"{start}{key.upper()}") for key in keys)
    return next((value for value in found if value), None)


def _named(start: str, given: dict[str, str]) -> dict[str, str]:
    """Options by the names that obstore has for them; one that it does not know is refused by it."""
    return {
        key.removeprefix(start): value for key, value in given.items() if key.removeprefix(start) not in _CLIENT_OPTIONS
    }


def _prefixed(start: str, config: dict[str, str]) -> Any:
    """obstore's types name each key; it is obstore that judges these."""
    return {f"{start}{key}": value for key, value in config.items()}


def _client_options(given: dict[str, str], endpoint: str | None) -> ClientConfig:
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=ANSWER_S),
    }
    for key in _CLIENT_OPTIONS:
        value = given.get(key, given.get(f"aws_{key}"))
        if value is not None:
            options[key] = value.lower() in _TRUE if key.startswith("allow_") else value
    if endpoint is not None and endpoint.startswith("http://"):
        options.setdefault("allow_http", True)  # whoever writes http:// has said so
    return options  # type: ignore[return-value]


def _retries() -> RetryConfig:
    first, longest = (timedelta(milliseconds=pause) for pause in PAUSE_MS)
    return {
        "max_retries": _MAX_RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_S),
        "backoff": {"init_backoff": first, "max_backoff": longest, "base": 2},
    }


def _secrets(given: Mapping[str, str]) -> list[str]:
    found = [(key, value) for key, value in os.environ.items() if key.startswith(("AWS_", "GOOGLE_", "AZURE_"))]
    return [value for key, value in (*found, *given.items()) if _SECRET.search(key)]


# -- AWS's own files ----------------------------------------------------------------------------------


class _Profile:
    """What a profile of the AWS files says, if there is one."""

    def __init__(self, named: str | None, teller: Teller) -> None:
        self.name = named or "default"
        self._teller = teller
        self._credentials = _path("AWS_SHARED_CREDENTIALS_FILE", "credentials")
        self._config = _path("AWS_CONFIG_FILE", "config")
        settings = self._read()
        if named is not None and not settings:
            raise InvalidConfig(f"no profile {named!r} is in {self._credentials} or {self._config}")
        self._settings = settings
        if named is not None and not self.has_credentials:
            elsewhere = sorted(settings.keys() & {"sso_session", "sso_start_url", "role_arn", "credential_process"})
            if elsewhere:
                raise InvalidConfig(
                    f"profile {named!r} has its credentials by {elsewhere[0]}, which Tidegate does not follow; "
                    f"put them into the environment: aws configure export-credentials --profile {named} --format env"
                )

    @property
    def has_credentials(self) -> bool:
        return {"aws_access_key_id", "aws_secret_access_key"} <= self._settings.keys()

    def setting(self, key: str, wanted: str) -> dict[str, str]:
        return {wanted: self._settings[key]} if key in self._settings else {}

    def credentials(self) -> S3Credential:
        settings = self._read()
        if not {"aws_access_key_id", "aws_secret_access_key"} <= settings.keys():
            raise StoreUnavailable(f"the credentials of profile {self.name!r} are gone from {self._credentials}")
        found = {key: settings.get(f"aws_{key}") for key in ("access_key_id", "secret_access_key", "session_token")}
        self._teller.hide(value for value in found.values() if value)
        return {
            "access_key_id": settings["aws_access_key_id"],
            "secret_access_key": settings["aws_secret_access_key"],
            "token": found["session_token"],
            "expires_at": datetime.now(UTC) + timedelta(seconds=_REREAD_S),
        }

    def _read(self) -> dict[str, str]:
        in_config = "default" if self.name == "default" else f"profile {self.name}"
        return _section(self._config, in_config) | _section(self._credentials, self.name)


def _path(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or f"~/.aws/{usual}").expanduser()


def _section(path: Path, name: str) -> dict[str, str]:
    """Empty if there is none. What is wrong with the file is said without its lines, which hold secrets."""
    parser = ConfigParser(interpolation=None, default_section="\0")
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = type(error).__name__
    except IniError as error:
        why = f"{type(error).__name__}, line {getattr(error, 'lineno', '?')}"
    else:
        return dict(parser[name]) if parser.has_section(name) else {}
    raise InvalidConfig(f"{path} cannot be read: {why}")
