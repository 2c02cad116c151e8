"""What a run writes to the history of its root, and what is read there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from tidegate.engine.events import (
    AnyEvent,
    CheckpointEnded,
    Ended,
    Failed,
    Rewound,
    SavepointTaken,
    Started,
    StepTaken,
    new_id,
)
from tidegate.engine.history import Bounds, Past, Recorder, as_data, record
from tidegate.engine.status import CheckpointStatus, SinkCommit, StagePart
from tidegate.errors import StoreUnavailable
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder
from tidegate.storage.history import StoredHistory
from tidegate.storage.memory import Memory


def at(second: int) -> str:
    return f"2030-05-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.000+00:00"


def ended(number: int, second: int | None = None, **given: object) -> CheckpointEnded:
    name = f"ckpt-{number:06d}"
    fields: dict[str, object] = {"state": "complete", "generation": 1, "epoch": number, **given}
    status = msgspec.convert({"checkpoint": name, **fields}, CheckpointStatus)
    return CheckpointEnded(at=at(number if second is None else second), id=f"{name}.1", checkpoint=status)


def names(events: Iterable[AnyEvent]) -> list[str]:
    return [each.checkpoint.checkpoint if isinstance(each, CheckpointEnded) else type(each).__name__ for each in events]


EVERY: list[AnyEvent] = [
    msgspec.structs.replace(
        ended(7),
        checkpoint=CheckpointStatus(
            checkpoint="ckpt-000007",
            state="aborted",
            generation=3,
            epoch=7,
            why="timed out: no report from join",
            stages={
                "a": StagePart(progress="done", cut=0, barrier_ms=0, has_event_time=False, over_bound=False),
                "join": StagePart(progress="aligning", waits_for=("b",), alignment_ms=0),
            },
            commits={"paid": SinkCommit(begun_ms=12, failures=2, why="locked")},
            shown_ms=0,
        ),
    ),
    Started(
        at=at(0),
        because="killed",
        base="ckpt-000006",
        steps=(StepTaken("starting_spark", 3000),),
        skipped=("ckpt-000007",),
        settings={"retain": "3"},
        generation=3,
        host="h",
        pid=1,
    ),
    Failed(at=at(1), why="stage 'join' failed: boom", stage="join", retried_in_ms=0),
    Ended(at=at(2), state="interrupted", why="stopped"),
    SavepointTaken(at=at(3), checkpoint="ckpt-000006", name="before", place="/s/before"),
    Rewound(at=at(4), checkpoint="ckpt-000006", how="restore"),
]


@pytest.mark.parametrize("event", EVERY, ids=lambda each: type(each).__name__)
def test_what_is_kept_is_what_happened(event: AnyEvent) -> None:
    files = Memory()
    record(files, event)
    assert Past(files).everything() == [event]
    assert b"null" not in as_data(event), "what is not known takes no room"


def test_ids_are_in_order() -> None:
    made = [new_id() for _ in range(100)]
    assert len(set(made)) == 100
    assert [each[:16] for each in made] == sorted(each[:16] for each in made)


def waited(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(params=["memory", "folder"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return Memory() if request.param == "memory" else Folder(tmp_path / "root", fsync=False)


class TestRecorder:
    def test_it_writes_nothing_before_it_may(self) -> None:
        files = Memory()
        recorder = Recorder(files, every_s=0.01)
        recorder.note(ended(1))
        recorder.forget()
        recorder.note(Ended(at=at(2), state="failed", why="no such table"))
        recorder.close()
        assert files.list() == []
        assert Past(files).newest(5) == ([], None)

    def test_what_is_no_checkpoint_is_there_at_once(self, files: Files) -> None:
        recorder = Recorder(files, every_s=3600)
        recorder.begin()
        recorder.note(ended(1))
        assert Past(files).everything() == []
        recorder.note(Started(at=at(2), because="first"))
        waited(lambda: len(Past(files).everything()) == 2)
        recorder.note(ended(3))
        recorder.close()
        assert names(Past(files).everything()) == ["ckpt-000003", "Started", "ckpt-000001"]

    def test_checkpoints_are_there_in_time(self, files: Files) -> None:
        recorder = Recorder(files, every_s=0.01)
        recorder.begin()
        recorder.note(ended(1))
        waited(lambda: names(Past(files).everything()) == ["ckpt-000001"])
        recorder.close()

    def test_a_run_that_was_refused_before_it_began_writes_nothing(self, files: Files) -> None:
        recorder = Recorder(files, every_s=3600)
        recorder.note(Ended(at=at(1), state="failed", why="no such table"))
        recorder.close()
        assert files.list() == []

    def test_pages_are_turned_and_all_is_in_order(self, files: Files) -> None:
        recorder = Recorder(files, Bounds(age_ms=10**13), every_s=3600)
        for number in range(1, 201):
            recorder.note(ended(number))
            recorder.flush()
        pages = StoredHistory(files).pages()
        assert [page.count for page in pages] == [64, 64, 64, None]
        past = Past(files)
        assert names(past.everything()) == [f"ckpt-{number:06d}" for number in range(200, 0, -1)]
        recorder.compact()
        assert len(StoredHistory(files).pages()) == 2
        assert names(past.everything()) == [f"ckpt-{number:06d}" for number in range(200, 0, -1)]

    def test_what_comes_from_before_is_told_first(self, files: Files) -> None:
        recorder = Recorder(files, every_s=3600)
        recorder.note(ended(9))
        recorder.begin(lambda: [ended(4), ended(5)])
        recorder.close()
        assert names(Past(files).everything()) == ["ckpt-000009", "ckpt-000005", "ckpt-000004"]

    def test_a_look_back_that_fails_is_a_line(self, files: Files, caplog: pytest.LogCaptureFixture) -> None:
        def fails() -> list[AnyEvent]:
            raise StoreUnavailable("no list")

        recorder = Recorder(files, every_s=3600)
        recorder.note(ended(9))
        recorder.begin(fails)
        recorder.close()
        assert names(Past(files).everything()) == ["ckpt-000009"]
        assert "no list" in caplog.text

    def test_a_look_back_that_failed_is_tried_again(self, files: Files, caplog: pytest.LogCaptureFixture) -> None:
        answers = [StoreUnavailable("no list"), StoreUnavailable("no list"), None]

        def fails_at_first() -> Iterator[AnyEvent]:
            yield ended(4)
            if (error := answers.pop(0)) is not None:
                raise error
            yield ended(5)

        recorder = Recorder(files, every_s=0.01)
        recorder.begin(fails_at_first)
        waited(lambda: not answers)
        recorder.close()
        assert names(Past(files).everything()) == ["ckpt-000005", "ckpt-000004"]
        assert caplog.text.count("no list") == 1, "it is told once"

    def test_it_is_bounded_by_count(self, files: Files) -> None:
        recorder = Recorder(files, Bounds(age_ms=10**13, count=40), every_s=3600)
        for number in range(1, 121):
            recorder.note(ended(number))
            recorder.flush()
            recorder.compact()
            kept = names(Past(files).everything())
            assert len(kept) <= 40
            assert kept == [f"ckpt-{each:06d}" for each in range(number, number - len(kept), -1)]
        assert len(kept) >= 20

    def test_it_is_bounded_by_age(self, files: Files) -> None:
        recorder = Recorder(files, Bounds(age_ms=60_000), every_s=3600)
        recorder.note(msgspec.structs.replace(ended(1), at="2001-01-01T00:00:00.000+00:00"))
        recorder.note(ended(2))
        recorder.flush()
        recorder.close()
        Recorder(files, Bounds(age_ms=60_000)).compact()
        assert names(Past(files).everything()) == ["ckpt-000002"]

    def test_a_store_that_fails_is_a_line_and_nothing_is_lost(self, caplog: pytest.LogCaptureFixture) -> None:
        class Failing(Memory):
            fails = True
            tries = 0

            def write(self, name: str, data: bytes) -> None:
                self.tries += 1
                if self.fails:
                    raise StoreUnavailable("the disk is full")
                super().write(name, data)

        files = Failing()
        recorder = Recorder(files, every_s=0.005)
        recorder.begin()
        for number in range(1, 71):
            recorder.note(ended(number))
        waited(lambda: files.tries >= 5)
        assert [each.levelname for each in caplog.records if "history" in each.getMessage()] == ["WARNING"], "once"
        assert files.tries < 50_000
        files.fails = False
        waited(lambda: len(Past(files).everything()) == 70)
        files.fails, files.tries = True, 0
        recorder.note(ended(71))
        waited(lambda: files.tries)
        files.fails = False
        recorder.close()
        assert len([each for each in caplog.records if "history" in each.getMessage()]) == 2, "once each time"
        assert names(Past(files).everything()) == [f"ckpt-{number:06d}" for number in range(71, 0, -1)]

    def test_what_waits_is_bounded(self) -> None:
        class Failing(Memory):
            fails = True

            def write(self, name: str, data: bytes) -> None:
                if self.fails:
                    raise StoreUnavailable("the disk is full")
                super().write(name, data)

        files = Failing()
        recorder = Recorder(files, every_s=3600)
        for number in range(1, 3001):
            recorder.note(ended(number))
            if number % 100 == 0:
                with pytest.raises(StoreUnavailable):
                    recorder.flush()
        files.fails = False
        recorder.flush()
        assert names(Past(files).everything()) == [f"ckpt-{number:06d}" for number in range(3000, 2000, -1)]

    def test_a_store_that_hangs_does_not_hold_up_the_end(self, caplog: pytest.LogCaptureFixture) -> None:
        let_go = threading.Event()

        class Hanging(Memory):
            def write(self, name: str, data: bytes) -> None:
                let_go.wait(60)
                super().write(name, data)

        recorder = Recorder(Hanging(), every_s=0.01)
        recorder.begin()
        began = time.monotonic()
        for number in range(100):
            recorder.note(ended(number))
        recorder.close(patience_s=0.05)
        assert time.monotonic() - began < 10
        assert "not in the history yet" in caplog.text
        let_go.set()

    def test_killed_while_a_page_is_turned_it_leaves_each_event_once(self) -> None:
        class Killed(BaseException):
            pass

        class KilledFiles(Memory):
            is_killed = False

            def delete(self, names: Iterable[str]) -> None:
                if self.is_killed:
                    raise Killed
                super().delete(names)

        files = KilledFiles()
        recorder = Recorder(files, every_s=3600)
        for number in range(1, 65):
            recorder.note(ended(number))
        recorder.flush()
        files.is_killed = True
        recorder.note(ended(65))
        with pytest.raises(Killed):
            recorder.flush()
        assert len(StoredHistory(files).pages()) == 3, "the page that was added to is there too"
        files.is_killed = False
        past = Past(files)
        assert names(past.everything()) == [f"ckpt-{number:06d}" for number in range(65, 0, -1)]
        Recorder(files, Bounds(age_ms=10**13)).compact()
        assert names(past.everything()) == [f"ckpt-{number:06d}" for number in range(65, 0, -1)]


class TestPast:
    def test_there_is_none_on_a_root_of_before(self, files: Files) -> None:
        past = Past(files)
        assert past.newest(10) == ([], None)
        assert past.everything() == []
        assert past.checkpoint("ckpt-000001") is None

    def test_it_is_read_piece_by_piece(self, files: Files) -> None:
        recorder = Recorder(files)
        for number in range(1, 151):
            recorder.note(ended(number))
        recorder.flush()
        past, cursor, read = Past(files), None, list[str]()
        while True:
            events, cursor = past.newest(40, cursor)
            read += names(events)
            recorder.note(ended(1000 + len(read)))
            recorder.flush()  # what comes meanwhile shifts nothing
            if cursor is None:
                break
        assert read == [f"ckpt-{number:06d}" for number in range(150, 0, -1)]

    def test_only_what_is_asked_for(self, files: Files) -> None:
        for each in EVERY:
            record(files, each)
        past = Past(files)
        assert names(past.newest(10, kinds=(Failed, Ended))[0]) == ["Ended", "Failed"]
        found, cursor = past.newest(1, kinds=(Failed, Ended))
        assert names(found) == ["Ended"]
        assert names(past.newest(1, cursor, (Failed, Ended))[0]) == ["Failed"]
        assert past.newest(1, cursor, (Failed, Ended))[1] is None

    def test_writers_beside_each_other_are_told_in_order(self, files: Files) -> None:
        one, other = Recorder(files), Recorder(files)
        for number in range(1, 301):
            (one if number % 3 else other).note(ended(number))
            if number % 7 == 0:
                one.flush()
                other.flush()
        one.flush()
        other.flush()
        record(files, SavepointTaken(at=at(100), checkpoint="ckpt-000100", name="x", place="/x"))
        told = Past(files).everything()
        assert [each.at for each in told] == sorted((each.at for each in told), reverse=True)
        assert len(told) == 301

    def test_the_later_word_of_a_checkpoint_counts(self, files: Files) -> None:
        record(files, ended(5, 10, state="committing"))
        record(files, ended(5, 20))
        (found,) = Past(files).everything()
        assert isinstance(found, CheckpointEnded)
        assert found.checkpoint.state == "complete"

    def test_pages_that_never_change_are_read_once(self) -> None:
        class Counting(Memory):
            reads = 0

            def read(self, name: str) -> bytes | None:
                self.reads += 1
                return super().read(name)

        files = Counting()
        recorder = Recorder(files)
        for number in range(1, 201):
            recorder.note(ended(number))
        recorder.flush()
        past = Past(files)
        past.everything()
        assert files.reads == 4
        past.everything()
        past.newest(10)
        assert files.reads == 6, "but the one that is added to"

    def test_few_are_read_for_the_newest_ones(self) -> None:
        class Counting(Memory):
            reads = 0

            def read(self, name: str) -> bytes | None:
                self.reads += 1
                return super().read(name)

        files = Counting()
        recorder = Recorder(files)
        for number in range(1, 1001):
            recorder.note(ended(number))
        recorder.flush()
        assert names(Past(files).newest(20)[0])[0] == "ckpt-001000"
        assert files.reads <= 3
        files.reads = 0
        found = Past(files).checkpoint("ckpt-000500", since=at(499))
        assert found is not None
        assert found.checkpoint.epoch == 500
        assert files.reads <= 2

    def test_what_is_put_in_order_while_it_is_read_is_found_all_the_same(self) -> None:
        class Moving(Memory):
            then: Callable[[], None] | None = None

            def read(self, name: str) -> bytes | None:
                if self.then is not None:
                    act, self.then = self.then, None
                    act()
                return super().read(name)

        files = Moving()
        for number in range(1, 21):
            record(files, ended(number))
        files.then = Recorder(files, Bounds(age_ms=10**13)).compact
        assert names(Past(files).everything()) == [f"ckpt-{number:06d}" for number in range(20, 0, -1)]
        assert len(StoredHistory(files).pages()) == 1

    def test_an_event_of_a_later_version_is_passed_over(self, files: Files) -> None:
        record(files, ended(1))
        files.write(
            "history/1900000000000-0000aaaa.json", b'[{"event": "merger", "id": "m", "at": "2030-01-01T00:00:00Z"}]'
        )
        later = b'[{"event": "end", "id": "n", "at": "2030-01-01T00:00:00Z", "state": "finished", "mood": "good"}]'
        files.write("history/1900000000001-0000aaaa.json", later)
        assert names(Past(files).everything()) == ["ckpt-000001", "Ended"], "but not one that only tells more"

    def test_a_command_that_cannot_record_goes_on(self, caplog: pytest.LogCaptureFixture) -> None:
        class Failing(Memory):
            def write(self, name: str, data: bytes) -> None:
                raise StoreUnavailable(f"may not write {name} {data!r:.0}")

        record(Failing(), EVERY[-1])
        assert "it is done, but could not be written" in caplog.text
