"""Who may ask the dashboard for what. It stands before everything else.

- The `Host` of every request must be one by which the dashboard is reached: else a page from elsewhere could have its
  own name lead here, and read what we answer. A browser's `Origin`, where it is sent, must be our own.
- Off loopback every request needs the token, the page too; an action needs it wherever it comes from. Where it is known
  by other names, something stands before it that others reach, and every request needs it as well: all of these come
  from this machine then, and their `Host` is what somebody elsewhere has written. It is a header, never a cookie and
  never in an address. A browser that opens the page can only send it as a password (`Basic`), which it then sends by
  itself: so that is good for looking, and no action takes it.
- Every answer says that it is no script, style or frame of anybody else's.
"""

from __future__ import annotations

import binascii
import ipaddress
import re
import socket
from base64 import b64decode
from collections.abc import Collection
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate.dashboard.token import Token
from tidegate.dashboard.values import Problem

_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "[::1]")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_open(host: str, more_hosts: Collection[str] = ()) -> bool:
    """Whether whoever reaches it may look without the token: nobody can but from this machine."""
    return is_loopback(host) and not more_hosts


class Guard:
    """As an ASGI application around another one."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, token: Token | None, more_hosts: Collection[str] = ()
    ) -> None:
        """`host`, `port`: where it listens. `more_hosts`: other names by which it is reached."""
        self._app = app
        self._port = port
        self._is_on_loopback = is_loopback(host)
        self._is_open = is_open(host, more_hosts)
        self._token = token
        names = set(_LOOPBACK_NAMES) | {_bracketed(host.lower())}
        if not self._is_on_loopback:
            names.add(socket.gethostname().lower())
        self._names = names
        self._more = {name.lower() for name in more_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_guarded)
        else:
            await _refuse(send_guarded, *refusal)

    def _refusal(self, scope: Scope) -> tuple[int, str, bytes | None] | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return 421, "this dashboard is not known by that name; --allow-host adds one", None
        origins = [value for name, value in headers if name == b"origin"]
        if any(not _is_of(origin, hosts[0]) for origin in origins):
            return 403, "the request comes from a page of another site", None
        if not self._is_open and not self.knows(headers, may_be_basic=scope["method"] in ("GET", "HEAD")):
            return (
                401,
                "it takes the token that the dashboard was started with",
                b'Basic realm="tidegate", charset="UTF-8"',
            )
        return None

    def knows(self, headers: Collection[tuple[bytes, bytes]], *, may_be_basic: bool = False) -> bool:
        """Whether the token is among the headers of a request."""
        given = [value for name, value in headers if name == b"authorization"]
        if self._token is None or len(given) != 1:
            return False
        kind, _, secret = given[0].partition(b" ")
        if kind.lower() == b"basic" and may_be_basic:
            try:
                secret = b64decode(secret, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif kind.lower() != b"bearer":
            return False
        return self._token.is_(secret.strip())

    def _is_ours(self, given: bytes) -> bool:
        try:
            name, port = _parted(given.decode("ascii").lower())
        except ValueError:
            return False
        if name in self._more:
            return True
        if port != self._port:
            return False
        # An address cannot be made to lead here by anybody: only names can.
        return name in self._names or (not self._is_on_loopback and _is_address(name))


def _parted(host: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::([0-9]{1,5}))?", host)
    if found is None:
        raise ValueError(host)
    return found[1], int(found[2] or 80)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_of(origin: bytes, host: bytes) -> bool:
    return origin.lower() in (b"http://" + host.lower(), b"https://" + host.lower())


async def _refuse(send: Send, code: int, why: str, challenge: bytes | None) -> None:
    body = msgspec.json.encode(Problem(why))
    headers: list[tuple[bytes, Any]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if challenge is not None:
        headers.append((b"www-authenticate", challenge))
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
