"""What a bucket refuses, told for people: why, and what to do. No secrets: neither those that are known, nor what was
signed, which some answers repeat."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

_NO_OBJECT: Final = frozenset(("NoSuchKey", "BlobNotFound", "ResourceNotFound"))
_DEBUG: Final = "\n\nDebug source:"
_CODE: Final = re.compile(r"<Code>\s*([A-Za-z0-9.]+)\s*</Code>")
_MESSAGE: Final = re.compile(r"<Message>\s*([^<]*?)\s*</Message>", re.DOTALL)
_STATUS: Final = re.compile(r"status code: (\d{3}[^:\n]*)")
_HTTP_KIND: Final = re.compile(r"\bkind: (Connect|Timeout|Interrupted|Request)\b")
_SYSTEM: Final = re.compile(r'message: "([^"]+)"')
_HOST: Final = re.compile(r"Error performing \w+ (https?://[^/?#\s@]+)[/?#\s]")
_METADATA: Final = (
    "169.254.169.254",
    "fd00:ec2::254",
    "metadata.google.internal",
    "169.254.170.2",
    "/latest/api/token",
)
_SIGNED: Final = re.compile(r"(?i)\b(x-amz-[a-z-]+|authorization|signature|sig|sv|se|token)\s*[=:]\s*[^\s&,;<>\"']+")
_SHORTEST_SECRET: Final = 6
"""What is shorter would be found in words too."""
_LONGEST: Final = 400

_CREDENTIALS: Final = "see whether the credentials are right, and still valid"
_REGION: Final = "set AWS_REGION to the region that the bucket is in"
_ADVICE: Final = {
    "NoSuchBucket": "make the bucket, or correct its name",
    "ContainerNotFound": "make the container, or correct its name",
    "AccessDenied": "these credentials may not do that: let them read, write, delete and list there",
    "AuthorizationPermissionMismatch": "these credentials may not do that: let them read, write, delete and list there",
    "InvalidAccessKeyId": _CREDENTIALS,
    "XAdminUserNotFound": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "AuthenticationFailed": _CREDENTIALS,
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NotImplemented": "this store cannot do what Tidegate needs",
    "SlowDown": "it has too much to do: others use it, or it is being made larger",
}
_REACHED: Final = "see whether its address is right, and can be reached from here"


class Teller:
    """Says why a call has failed, in one line."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: set[str] = set()
        self.hide(secrets)

    def hide(self, secrets: Iterable[str]) -> None:
        self._secrets.update(each for each in secrets if len(each) >= _SHORTEST_SECRET)

    @staticmethod
    def is_absent(error: Exception) -> bool:
        """Whether it is the object that is not there. Of a bucket that is not, and to a user whom they do not know,
        servers answer 404 as well."""
        if not isinstance(error, FileNotFoundError):
            return False
        said = str(error)
        code = _CODE.search(said)
        return "bucket does not exist" not in said if code is None else code[1] in _NO_OBJECT

    @staticmethod
    def is_too_large(error: Exception) -> bool:
        """To be copied with one request."""
        return "larger than the maximum allowable size" in str(error)

    def why(self, error: Exception) -> str:
        text, _, debug = str(error).partition(_DEBUG)
        if any(address in text for address in _METADATA):
            return (
                "no credentials were found; for S3 set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
                "for Google GOOGLE_APPLICATION_CREDENTIALS, for Azure AZURE_STORAGE_ACCOUNT_NAME and "
                "AZURE_STORAGE_ACCOUNT_KEY, or give this machine a role"
            )
        said, advice = _judged(text, debug)
        return self._scrubbed(said) + (f"; {advice}" if advice else "")

    def _scrubbed(self, said: str) -> str:
        for secret in sorted(self._secrets, key=len, reverse=True):
            said = said.replace(secret, "…")
        return _SIGNED.sub(r"\1=…", " ".join(said.split()))[:_LONGEST]


def _judged(text: str, debug: str) -> tuple[str, str | None]:
    """What was said, and what to do."""
    code = _CODE.search(text)
    if code is not None:
        message = _MESSAGE.search(text)
        said = (
            f"{html.unescape(message[1]).rstrip('. ')} ({code[1]})" if message is not None and message[1] else code[1]
        )
        return said, _ADVICE.get(code[1])
    status = _STATUS.search(text)
    if status is not None:
        advice = {"401": _CREDENTIALS, "403": _ADVICE["AccessDenied"], "301": _REGION}.get(status[1][:3])
        return f"it answered {status[1].strip()}", advice
    if "incorrectly configured region" in text:
        return "it is in another region", _REGION
    kind = _HTTP_KIND.search(debug)
    if kind is not None:
        host = _HOST.search(text)
        return _unreached(kind[1], debug, "" if host is None else f" at {host[1]}"), _REACHED
    return text.split("\n", 1)[0].strip() or "it did not say why", None


def _unreached(kind: str, debug: str, at: str) -> str:
    if kind == "Timeout":
        return f"it did not answer in time{at}"
    if kind != "Connect":
        return f"the connection was cut{at}"
    if "dns error" in debug or "failed to lookup" in debug:
        return f"there is no such host{at}"
    system = _SYSTEM.search(debug)
    return f"it cannot be reached{at}{'' if system is None else f': {system[1]}'}"
