"""A scenario, played: what is written, in the form of a recording."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Final

import msgspec

from tests.played.recording import Event, Normalizer, told
from tests.played.recording import Step as RecordedStep
from tests.played.scenarios import DELAY_S, Scenario
from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.spark.filelog import StageSource, restart_source_logs
from tidegate.spark.gate import Gate
from tidegate.spark.output import restore_output
from tidegate.spark.snapshot import files_at
from tidegate.storage.memory import Memory
from tidegate.testing.played.rows import PlayedRows, encode_rows
from tidegate.testing.played.sources import GateSource, PlayedSource, PlayedStream, StreamSource
from tidegate.testing.played.spark import SETTINGS, Plan, PlayedQuery, Step

_BASE_MS: Final = 1_767_225_600_000
_FIRST_FILE_MS: Final = 1_700_000_001_000

PLANS: Final = {
    "source": Plan(),
    "stateless": Plan(),
    "union": Plan(),
    "rows": Plan(writes="rows"),
    "totals": Plan(has_state=True, holds_back=True, delay_ms=1000 * DELAY_S),
    "updates": Plan(has_state=True, writes="folders"),
}
_DONE: Final = (Step.WAITS, Step.ENDED, Step.FAILED)


class NotedFiles(Memory):
    """What is written and deleted, in order."""

    def __init__(self) -> None:
        super().__init__("played")
        self.events: list[Event] = []

    def write(self, name: str, data: bytes) -> None:
        super().write(name, data)
        whole = self._folder + name
        begun = Event("~", whole)
        if begun in self.events:
            self.events.remove(begun)
        self.events.append(Event("+", whole, content_of(whole, data)) if data else begun)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if self.exists(name):
                super().delete([name])
                self.events.append(Event("-", self._folder + name))


def content_of(name: str, data: bytes) -> str:
    """What is compared of a played file. A change log has a last line of its own, in place of Spark's rows."""
    if name.endswith(".changelog"):
        return b"\n".join(data.split(b"\n")[:2]).decode()
    if name.endswith(".zip"):
        with zipfile.ZipFile(BytesIO(data)) as zipped:
            return zipped.read("metadata").decode()
    return "" if name.endswith((".parquet", ".sst")) else data.decode()


class Player:
    def __init__(self, scenario: Scenario, *, stores_first: bool = False) -> None:
        self._scenario = scenario
        self._plan = msgspec.structs.replace(PLANS[scenario.kind], stores_first=stores_first)
        self._files = NotedFiles()
        self._fed = 0
        self._rows = [0, 0]
        self._sequences = [0, 0]
        self._attempt = 1
        self._stream = PlayedStream(self._files.uri("in/0/"))
        self._gates = self._lay_gates()
        self._query: PlayedQuery | None = None

    def _lay_gates(self) -> list[Gate]:
        if self._scenario.kind == "source":
            return []
        count = 2 if self._scenario.kind == "union" else 1
        self._sequences = [0, 0]
        return [Gate(self._files.at(f"gate-{self._attempt}-{number}"), self._files, 0) for number in range(count)]

    def steps(self) -> Iterator[RecordedStep]:
        normalizer = Normalizer(SETTINGS)
        for step in self._scenario.steps:
            self._files.events.clear()
            self._do(step)
            if self._query is not None and self._query.error is not None:
                self._files.events.append(Event("!", str(self._query.error)))
            own = [
                each for each in self._files.events if each.sign == "!" or each.name.startswith(("spark-", "output-"))
            ]
            yield RecordedStep(step, tuple(told(self._scenario, normalizer.events(own))))

    def _do(self, step: str) -> None:
        word, *arguments = step.split()
        if word == "feed":
            self._feed(*map(int, arguments))
        elif word == "start":
            self._start(*arguments)
        elif word == "restored":
            self._restore()
        elif word == "killed":
            self._kill(arguments[-1])
        else:
            assert self._query is not None
            {"idle": self._idle, "maintain": self._maintain, "stop": self._query.stop}[word]()

    def _feed(self, number: int, seconds: int, rows: int) -> None:
        self._fed += 1
        first = self._rows[number]
        self._rows[number] += rows
        # Two paths of each input: so both partitions of a state have some.
        ranges = tuple((2 * number + each, first, first + rows) for each in range(2)) if rows else ()
        fed = PlayedRows(ranges, _BASE_MS + 1000 * seconds if rows else None)
        if self._scenario.kind == "source":
            self._stream.append(fed)
            return
        name = f"in/{number}/{self._fed:06d}.parquet"
        data = encode_rows(fed)
        self._files.write(name, data)
        self._sequences[number] += 1
        sequence = self._sequences[number]
        self._gates[number].release(Segment(sequence, sequence, (SegmentFile(name, len(data)),)))
        self._gates[number].flush()

    def _start(self, how: str = "") -> None:
        sources: list[PlayedSource] = (
            [StreamSource(self._stream, max_files=1, since=_FIRST_FILE_MS)]
            if self._scenario.kind == "source"
            else [
                GateSource(self._files.at(f"gate-{self._attempt}-{number}"), self._files, number)
                for number in range(len(self._gates))
            ]
        )
        self._query = PlayedQuery(
            self._files.at(f"spark-{self._attempt}"),
            self._files.at(f"output-{self._attempt}"),
            sources,
            msgspec.structs.replace(self._plan, empty_batches=how != "without-empty-batches"),
            available_now=how == "available-now",
            stage_rows=lambda _rows, _batch: None,
        )
        if not self._files.exists(f"spark-{self._attempt}/metadata"):
            assert self._query.step() is Step.STARTED

    def _idle(self) -> None:
        assert self._query is not None
        self._step_until(lambda step: step in _DONE)

    def _step_until(self, is_reached: Callable[[Step], bool]) -> None:
        assert self._query is not None
        while not is_reached(self._query.step()):
            pass

    def _maintain(self) -> None:
        assert self._query is not None
        for _ in self._query.maintain():
            pass

    def _kill(self, place: str) -> None:
        if place == "tasks":
            self._feed(0, 40, 3)
            last = Step.BEGAN if self._plan.has_state else Step.OPENED
        else:
            self._feed(0, 70, 3)
            last = Step.LOGGED if self._plan.writes == "files" else Step.WROTE
        self._step_until(lambda step: step is last)
        self._query = None

    def _restore(self) -> None:
        old = self._files.at(f"spark-{self._attempt}")
        batch = max(int(name) for name in old.names_in("commits") if name.isdigit())
        self._attempt += 1
        new = self._files.at(f"spark-{self._attempt}")
        for name in dict.fromkeys(files_at(old, batch, reads_gates=bool(self._gates))):
            new.keep(name, old, name)
        if self._gates:
            restart_source_logs(new, batch, [StageSource(str(number), number) for number in range(len(self._gates))])
            self._gates = self._lay_gates()
        restore_output(self._files.at(f"output-{self._attempt}"), batch)
        self._files.events.clear()
