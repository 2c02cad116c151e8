"""What was written in a scenario, in which order, in a form in which Spark's and the played one's can be compared.

A recording is a text. Each step of a scenario is a line `> step`, followed by what happened in it:

    + name      a file is there, whole; its contents follow, indented
    - name      it was deleted
    ~ name      it was begun, and whoever wrote it was killed
    ! message   the query failed

What differs from run to run is replaced: times, sizes, ids (that of a state's version by partition and version), in how
many tasks a batch has written, and how RocksDB lays out its files. What tasks of one batch write at the same time
stands in order of its names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from tests.played.scenarios import Scenario

Sign = Literal["+", "-", "~", "!"]

_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_STATE: Final = re.compile(rf"(.*state/\d+/(\d+))/(\d+)_({_UUID})\.(changelog|zip)")
_SST: Final = re.compile(r"(.*/SSTs)/.*")
_PART: Final = re.compile(r"(.*)/part-[^/]*\.parquet")
_OF_TASKS: Final = re.compile(r".*/(state/\d+/\d+/[^_].*|part)")
_TEMPORARY: Final = "_temporary"
_LOGS: Final = ("offsets", "commits", "sources", "_spark_metadata")


class Event(msgspec.Struct, frozen=True):
    sign: Sign
    name: str
    content: str = ""

    def lines(self) -> Iterator[str]:
        yield f"{self.sign} {self.name}"
        for line in self.content.splitlines():
            yield f"    {line}"


class Normalizer:
    """Of one scenario: what it has replaced in names it replaces in contents."""

    def __init__(self, settings: dict[str, str]) -> None:
        """`settings`: those that Spark keeps in every entry of its offset log, and that are given once."""
        self._settings = settings
        self._ids: dict[str, str] = {}

    def events(self, found: Iterable[Event]) -> list[Event]:
        """In their order, with what tasks do at the same time sorted by task."""
        events: list[Event] = []
        tasks: dict[Event, None] = {}
        named = [(event, self._name(event.name)) for event in found if _is_compared(event)]
        for event, name in named:
            normal = Event(event.sign, name, self._content(name, event.content) if event.sign == "+" else "")
            if _OF_TASKS.fullmatch(name):
                tasks[normal] = None
                continue
            events += sorted(tasks, key=_task)
            tasks.clear()
            events.append(normal)
        return events + sorted(tasks, key=_task)

    def _name(self, name: str) -> str:
        if match := _STATE.fullmatch(name):
            folder, partition, version, unique, suffix = match.groups()
            if unique not in self._ids:
                known = self._ids.values()
                tries = (f"{partition}.{version}" + "'" * number for number in range(99))
                self._ids[unique] = next(each for each in tries if each not in known)
            return f"{folder}/{version}_{self._ids[unique]}.{suffix}"
        if match := _SST.fullmatch(name):
            return f"{match[1]}/any"
        if match := _PART.fullmatch(name):
            return f"{match[1]}/part"
        return name

    def _content(self, name: str, content: str) -> str:
        if name.endswith((".zip", ".sst", "/part", "/schema")) or not content:
            return ""
        for unique, known in self._ids.items():
            content = content.replace(unique, known)
        content = re.sub(r'"(id|runId)":"[^"]*"', r'"\1":"I"', content)
        content = re.sub(r'"(batchTimestampMs)":\d+', r'"\1":T', content)
        if "/_spark_metadata/" in name:
            content = re.sub(r'"(modificationTime|size)":\d+', r'"\1":N', content)
            content = re.sub(r'"path":"[^"]*/output-(\d)/([^"]*/)?part-[^"]*"', r'"path":"output-\1/part"', content)
            content = "\n".join(dict.fromkeys(content.splitlines()))
        if "/sources/" in name:
            content = re.sub(r'"path":"[^"]*/(in/[^"]*)"', r'"path":"\1"', content)
        return content.replace(f'"conf":{_encoded(self._settings)}', '"conf":C')


def _encoded(settings: dict[str, str]) -> str:
    return msgspec.json.encode(settings).decode()


def _task(event: Event) -> tuple[bool, str, bool, str]:
    """Each task does its own in order: its change log is there before its output. What maintenance deletes, while it
    stores something else, stands before that."""
    name = event.name
    if name.endswith("/part"):
        return True, name, False, ""
    folder = name.rpartition("/SSTs/")[0] or name.rpartition("/")[0]
    numbered = re.sub(r"\d+", lambda number: number[0].zfill(9), name) if event.sign == "-" else ""
    return False, folder, event.sign != "-", numbered


def told(scenario: Scenario, events: Iterable[Event]) -> Iterable[Event]:
    """What is recorded of a scenario."""
    if not scenario.deletions_only:
        return events
    # When RocksDB merges its own files, and leaves the old ones to be deleted, is a matter of chance.
    return [each for each in events if (each.sign != "+" or each.name.endswith(".zip")) and "/SSTs/" not in each.name]


def _is_compared(event: Event) -> bool:
    parts = event.name.split("/")
    return not parts[-1].startswith(".") and _TEMPORARY not in parts


class Step(msgspec.Struct, frozen=True):
    step: str
    events: tuple[Event, ...]

    def text(self) -> str:
        return "\n".join([f"> {self.step}", *(line for event in self.events for line in event.lines())])


class Recording(msgspec.Struct, frozen=True):
    version: str
    settings: dict[str, str]
    scenarios: dict[str, tuple[Step, ...]]

    def write(self, path: Path) -> None:
        lines = [f"# Spark {self.version}, by tests/played/record.py", f"# {_encoded(self.settings)}"]
        for name, steps in self.scenarios.items():
            lines += ["", f"== {name}"]
            lines += [step.text() for step in steps]
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def read_recording(path: Path) -> Recording:
    first, second, *lines = path.read_text(encoding="utf-8").splitlines()
    scenarios: dict[str, list[tuple[str, list[Any]]]] = {}
    steps: list[tuple[str, list[Any]]] = []
    for line in filter(None, lines):
        mark, rest = line[:2].strip(), line[2:].strip()
        if mark == "==":
            steps = scenarios[line[3:]] = []
        elif mark == ">":
            steps.append((rest, []))
        elif mark:
            steps[-1][1].append((mark, rest, []))
        else:
            steps[-1][1][-1][2].append(line[4:])
    return Recording(
        first.split()[2].rstrip(","),
        msgspec.json.decode(second[2:]),
        {
            name: tuple(
                Step(step, tuple(Event(sign, at, "\n".join(content)) for sign, at, content in events))
                for step, events in steps
            )
            for name, steps in scenarios.items()
        },
    )
