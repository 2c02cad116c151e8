"""Times as they are told in roots, read by whoever cannot be sure that one is whole."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(told: str | None) -> datetime | None:
    """None: there is none, or it is no time."""
    try:
        found = None if told is None else datetime.fromisoformat(told)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found is not None and found.tzinfo is None else found


def apart_ms(earlier: str | None, later: str | None) -> int | None:
    """None: one of them is not known."""
    first, second = moment(earlier), moment(later)
    return None if first is None or second is None else round((second - first).total_seconds() * 1000)


def age_ms(told: str | None) -> int | None:
    """How long ago it was, by this machine's clock."""
    found = moment(told)
    return None if found is None else max(0, round((datetime.now(UTC) - found).total_seconds() * 1000))
