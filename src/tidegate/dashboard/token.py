"""The secret by which somebody shows that he may act: in a file that nobody else can read, or in the environment."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

import msgspec

from tidegate.errors import InvalidConfig

VARIABLE: Final = "TIDEGATE_DASHBOARD_TOKEN"
_SHORTEST: Final = 16
_LONGEST: Final = 4096
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Token(msgspec.Struct, frozen=True):
    """`source`: where somebody who may have it finds it, for people."""

    secret: bytes
    source: str

    def __repr__(self) -> str:
        return f"Token({self.source})"

    def is_(self, given: bytes) -> bool:
        """However many bytes are right, it takes as long."""
        return secrets.compare_digest(given, self.secret)


def token_in(file: Path | None) -> Token:
    """The one in a file, which is made if it is not there; without a file, of the environment, or in one under the
    user's own folder."""
    if file is None and (given := os.environ.get(VARIABLE)):
        return Token(_checked(given.encode(), f"the environment variable {VARIABLE}"), f"the variable {VARIABLE}")
    path = _default() if file is None else file
    try:
        return Token(_made(path) or _read(path), str(path))
    except OSError as error:
        raise InvalidConfig(f"the token file {path} cannot be used: {error.strerror}") from error


def _default() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "tidegate" / "dashboard.token"


def _made(path: Path) -> bytes | None:
    """None: there is one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = secrets.token_urlsafe(32).encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, 0o600)  # whatever the umask says
        file.write(secret + b"\n")
    return secret


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidConfig(f"the token file {path} is no file")
        if found.st_mode & _OTHERS:
            raise InvalidConfig(f"others can read the token file {path}: chmod 600 {path}, or name another one")
        return _checked(file.read(_LONGEST), f"the token file {path}")


def _checked(secret: bytes, where: str) -> bytes:
    secret = secret.strip()
    if len(secret) < _SHORTEST or not secret.isascii() or b" " in secret:
        raise InvalidConfig(f"{where} holds no token: at least {_SHORTEST} characters of ASCII, without spaces")
    return secret
