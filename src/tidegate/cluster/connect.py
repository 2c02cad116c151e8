"""Where driver processes share keys and values: said by an address."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote, urlsplit

from tidegate.cluster.files import BETWEEN_LOOKS_S, FilesSession
from tidegate.cluster.kv import Session
from tidegate.errors import InvalidConfig
from tidegate.storage.files import Files
from tidegate.storage.paths import RootPaths

_FILES: Final = "files"
_ZOOKEEPER: Final = "zk"
_POSSIBLE: Final = "write files, for files under the root, or zk://host:port,host:port/path, for ZooKeeper"


def is_in_files(address: str | None) -> bool:
    """Whether it means the files of the root."""
    return address is None or address == _FILES


def check_address(address: str | None) -> None:
    """Refuse one that cannot be, before anything is done. Of a password in it nothing is said."""
    if address is None or is_in_files(address):
        return
    if address.partition("://")[0] != _ZOOKEEPER:
        raise InvalidConfig(f"that is no address of what driver processes share: {_POSSIBLE}")
    _read_zookeeper(address)


def connect(
    address: str | None,
    files: Files,
    lease_s: float = 10.0,
    *,
    between_looks_s: tuple[float, float] = BETWEEN_LOOKS_S,
    is_far: bool = False,
) -> Session:
    """`files`: those of the root. None is the same as `files`. What is wrong with an address is said without it, as a
    password may be in it. `between_looks_s`, `is_far`: of files, see `FilesSession`."""
    if is_in_files(address):
        shared = files.at(RootPaths.COORDINATION, durable=False)
        return FilesSession(shared, lease_s=lease_s, poll_s=between_looks_s, is_far=is_far)
    assert address is not None
    check_address(address)
    servers, path, credentials = _read_zookeeper(address)
    try:
        from tidegate.cluster.zookeeper import ZooKeeperSession
    except ImportError as error:
        raise InvalidConfig("for ZooKeeper install Tidegate with it: pip install 'tidegate[zookeeper]'") from error
    return ZooKeeperSession(servers, path, lease_s=lease_s, credentials=credentials)


def _read_zookeeper(address: str) -> tuple[str, str, str | None]:
    """The servers, the path, and `user:password`."""
    try:
        parts = urlsplit(address)
    except ValueError:
        raise InvalidConfig(f"the address of ZooKeeper cannot be read: {_POSSIBLE}") from None
    login, has_login, servers = parts.netloc.rpartition("@")
    if parts.query or parts.fragment or not all(map(_is_server, servers.split(","))):
        raise InvalidConfig(f"the address of ZooKeeper has no servers, or more than servers and a path: {_POSSIBLE}")
    path = unquote(parts.path).rstrip("/")
    if any(part in ("", ".", "..") for part in path.split("/")[1:]):
        raise InvalidConfig(f"the path in the address of ZooKeeper has a part that cannot be: {_POSSIBLE}")
    user, _, password = login.partition(":")
    if has_login and not (user and password):
        raise InvalidConfig(
            "the address of ZooKeeper has a user without a password: write zk://user:password@host:port"
        )
    return servers, path, f"{unquote(user)}:{unquote(password)}" if has_login else None


def _is_server(server: str) -> bool:
    host, _, port = server.rpartition(":")
    return bool(host) and port.isdigit()
