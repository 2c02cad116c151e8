"""Where traces go: as an option says, or the standard variables of OpenTelemetry. Importing this brings none of it."""

from __future__ import annotations

import logging
import os
from typing import Final
from urllib.parse import urlsplit

import msgspec

from tidegate.errors import InvalidConfig

_log = logging.getLogger("tidegate")

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN: Final = "http/protobuf"
_PATH: Final = "/v1/traces"


class Destination(msgspec.Struct, frozen=True):
    """Who gets them."""

    url: str | None
    """None: as the variables say, which OpenTelemetry reads itself."""
    asked_by: str
    """The option or the variable that asks for traces."""

    @property
    def is_asked_for(self) -> bool:
        """By an option: then it is an error if they cannot be sent. A variable may be meant for somebody else."""
        return self.url is not None


def wanted(traces: str | None) -> Destination | None:
    """Where to, if anywhere. `traces`: the option."""
    if traces is not None:
        if _is_disabled():
            raise InvalidConfig("traces is given, but OTEL_SDK_DISABLED says that there are to be none; unset it")
        return Destination(url_of(traces), "traces")
    variable = next((each for each in _ENDPOINTS if os.environ.get(each, "").strip()), None)
    exporters = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    if variable is None or _is_disabled() or "otlp" not in exporters.split(","):
        return None
    protocol = next((os.environ[each].strip() for each in _PROTOCOLS if os.environ.get(each, "").strip()), _SPOKEN)
    if protocol != _SPOKEN:
        _log.warning("no traces are sent: %s is set, but for %s, and only %s is spoken", variable, protocol, _SPOKEN)
        return None
    return Destination(None, variable)


def _is_disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def url_of(traces: str) -> str:
    """The address that traces are sent to, by that of a collector."""
    try:
        parts = urlsplit(traces)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise _no_url() from None
    if not is_url or parts.query or parts.fragment:
        raise _no_url()
    if parts.username is not None or parts.password is not None:
        raise InvalidConfig(
            "traces holds a name or a password, which others could read; give these in OTEL_EXPORTER_OTLP_HEADERS"
        )
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith(_PATH) else path + _PATH}"


def _no_url() -> InvalidConfig:
    """Without what was given: nobody knows what it holds."""
    return InvalidConfig("traces is not the address of a collector of OTLP over HTTP, such as http://127.0.0.1:4318")
