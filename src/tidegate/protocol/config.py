"""Every knob of checkpointing, validated once, honoured everywhere."""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

import msgspec

from tidegate.errors import InvalidConfig

UnalignedMode = Literal["never", "on_timeout", "always"]

_UNITS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

_TIME: Final = re.compile(r"(\d+)\s*(ms|s|m|h|d)")

_SIZES: Final = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def as_ms(name: str, text: str) -> int:
    """A time as users write it, in milliseconds."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise InvalidConfig(f"{name} is {text!r}; write a number and a unit, such as 500ms, 10s, 5m, 1h or 7d")
    return int(match[1]) * _UNITS[match[2]]


def size_in_bytes(name: str, text: str) -> int:
    """A size as users write it, in bytes."""
    match = re.fullmatch(r"(\d+)\s*(B|KB|MB|GB)", text.strip().upper())
    if match is None:
        raise InvalidConfig(f"{name} is {text!r}; write a number and a unit, such as 500KB, 256MB or 1GB")
    return int(match[1]) * _SIZES[match[2]]


def time_as_text(ms: int) -> str:
    """A time as users write it, in the largest unit that fits."""
    unit = next(unit for unit in reversed(_UNITS) if ms % _UNITS[unit] == 0 and (ms or unit == "s"))
    return f"{ms // _UNITS[unit]}{unit}"


def size_as_text(size: int) -> str:
    """A size as users write it, in the largest unit that fits."""
    unit = next(unit for unit in reversed(_SIZES) if size % _SIZES[unit] == 0 and (size or unit == "B"))
    return f"{size // _SIZES[unit]}{unit}"


def retention(text: str) -> dict[str, int]:
    """How many checkpoints to retain, or for how long, as users write it: the settings that say so."""
    if text.strip().isdecimal():
        found = {"max_retained": int(text)}
    elif _TIME.fullmatch(text.strip()):
        found = {"retain_ms": as_ms("retain", text)}
    else:
        raise InvalidConfig(f"retain is {text!r}; write how many checkpoints, such as 3, or for how long, such as 24h")
    if not all(found.values()):
        raise InvalidConfig(f"retain is {text!r}; it must be at least 1 checkpoint, or 1ms")
    return found


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidConfig(f"{name} is {value}; it must be at least {least}")


class AlignmentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a stage may cut without having aligned its inputs. Sinks never do, whatever this says."""

    unaligned: UnalignedMode = "never"
    timeout_ms: int = 10_000
    max_inflight_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.unaligned not in get_args(UnalignedMode):
            raise InvalidConfig(f"unaligned is {self.unaligned!r}, not one of {', '.join(get_args(UnalignedMode))}")
        _at_least("timeout_ms", self.timeout_ms, 0)
        _at_least("max_inflight_bytes", self.max_inflight_bytes, 0)


class CheckpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often checkpoints are taken, how long they may take, and how many are kept, and for how long (see
    `retention.py`)."""

    interval_ms: int = 10_000
    min_pause_ms: int = 0
    timeout_ms: int = 600_000
    tolerable_failures: int = 3
    max_concurrent: int = 1
    max_retained: int = 3
    retain_ms: int = 0
    incremental: bool = True
    alignment: AlignmentConfig = AlignmentConfig()

    def __post_init__(self) -> None:
        _at_least("interval_ms", self.interval_ms, 1)
        _at_least("min_pause_ms", self.min_pause_ms, 0)
        _at_least("timeout_ms", self.timeout_ms, 1)
        _at_least("tolerable_failures", self.tolerable_failures, 0)
        _at_least("max_concurrent", self.max_concurrent, 1)
        _at_least("max_retained", self.max_retained, 1)
        _at_least("retain_ms", self.retain_ms, 0)
