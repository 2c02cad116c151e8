"""Answers and events, decoded strictly: no field too many, none too few, none of another kind than is documented."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from tidegate.cli.answers import Answer, Event
from tools.reference import schema

_SCHEMA: Final = schema()
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def answered(stdout: str) -> Answer:
    """All that a command has printed is its answer."""
    (line,) = stdout.splitlines()
    return _decoded(line, Answer)  # type: ignore[no-any-return]


def told(stdout: str) -> list[Event]:
    """All that a run has printed is its events."""
    return [_decoded(line, Event) for line in stdout.splitlines()]


def _decoded(line: str, union: Any) -> Any:
    value = msgspec.json.decode(line, type=union)
    raw = json.loads(line)
    assert json.loads(msgspec.json.encode(value)) == raw, "a field is not documented, or is left out"
    problems = _problems(raw, _SCHEMA, "answer")
    assert not problems, problems
    return value


def _problems(value: Any, wanted: dict[str, Any], where: str) -> list[str]:
    """What of a value is not as the schema wants it. Of the schema's words all that ours uses are understood."""
    if "$ref" in wanted:
        return _problems(value, _SCHEMA["$defs"][wanted["$ref"].rsplit("/", 1)[-1]], where)
    if "anyOf" in wanted:
        found = [_problems(value, each, where) for each in wanted["anyOf"]]
        return [] if [] in found else min(found, key=len)
    if "enum" in wanted:
        return [] if value in wanted["enum"] else [f"{where} is {value!r}"]
    if type(value) not in _KINDS[wanted["type"]]:
        return [f"{where} is {value!r}, no {wanted['type']}"]
    if wanted.get("format") == "date-time":
        return [] if datetime.fromisoformat(value).utcoffset() == timedelta(0) else [f"{where} is {value!r}, not UTC"]
    return _problems_inside(value, wanted, where)


def _problems_inside(value: Any, wanted: dict[str, Any], where: str) -> list[str]:
    if wanted["type"] == "array":
        parts = {f"[{number}]": (item, wanted["items"]) for number, item in enumerate(value)}
    elif "properties" in wanted:
        fields = wanted["properties"]
        if not value.keys() == fields.keys() == set(wanted["required"]):
            return [f"{where} has {sorted(value)}, not {sorted(fields)}"]
        parts = {f".{name}": (item, fields[name]) for name, item in value.items()}
    elif "additionalProperties" in wanted:  # else it is of the user's own columns
        parts = {f".{name}": (item, wanted["additionalProperties"]) for name, item in value.items()}
    else:
        parts = {}
    return [found for name, (item, part) in parts.items() for found in _problems(item, part, f"{where}{name}")]
