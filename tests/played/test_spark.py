"""What a played query makes of rows, wherever it is killed, and what becomes of its files."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable

import pytest

from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.spark.filelog import METADATA, StageSource, restart_source_logs
from tidegate.spark.gate import Gate
from tidegate.spark.output import restore_output, written_files
from tidegate.spark.snapshot import files_at
from tidegate.storage.memory import Memory
from tidegate.storage.parquet import count_rows, write_nothing
from tidegate.testing.played import (
    GateSource,
    Plan,
    PlayedQuery,
    PlayedRows,
    PlayedSource,
    PlayedStream,
    Step,
    StreamSource,
    TopicSource,
    decode_rows,
    encode_rows,
)
from tidegate.testing.simulator.dag import Ranges

STATELESS = Plan()
COUNTING = Plan(has_state=True)
HOLDING = Plan(has_state=True, holds_back=True)
UPDATING = Plan(has_state=True, writes="folders")
STAGING = Plan(writes="rows")
PLANS = {"stateless": STATELESS, "counting": COUNTING, "holding": HOLDING, "updating": UPDATING, "staging": STAGING}


class Stage:
    """A query that reads one gate, in a memory."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.files = Memory("root")
        self.plan = plan
        self.staged: dict[int, PlayedRows] = {}
        self.attempt = 0
        self.sequence = 0
        self.rows = 0
        self._collected = 0
        self._counts = {0: 0, 1: 0}
        self._random = random.Random(seed)
        self.gate = self.lay_gate()
        self.query = self.start()

    def lay_gate(self, position: int = 0) -> Gate:
        return Gate(self.files.at(f"gate-{self.attempt}"), self.files, position)

    def start(self) -> PlayedQuery:
        """Anew, on what is there."""
        self.query = PlayedQuery(
            self.files.at(f"spark-{self.attempt}"),
            self.files.at(f"output-{self.attempt}"),
            [GateSource(self.files.at(f"gate-{self.attempt}"), self.files)],
            self.plan,
            new_id=lambda: str(uuid.UUID(int=self._random.getrandbits(128))),
            stage_rows=lambda rows, batch: self.staged.update({batch: rows}),
        )
        return self.query

    def feed(self, count: int = 3) -> str:
        """A segment with the next rows of two paths."""
        ranges = tuple((path, self.rows, self.rows + count) for path in range(2))
        self.rows += count
        self.sequence += 1
        name = f"in/{self.sequence}.parquet"
        data = encode_rows(PlayedRows(ranges))
        self.files.write(name, data)
        self.gate.release(Segment(self.sequence, self.sequence, (SegmentFile(name, len(data)),)))
        self.gate.flush()
        return name

    def run(self) -> None:
        """Until it waits for data."""
        self.query.run()
        assert self.query.error is None, self.query.error

    def restore(self) -> None:
        """In fresh folders, behind its last commit, where nothing is in flight."""
        self.handed_on()
        batch = self.query.batch
        old = self.files.at(f"spark-{self.attempt}")
        self.attempt += 1
        new = self.files.at(f"spark-{self.attempt}")
        for name in dict.fromkeys(files_at(old, batch, reads_gates=True)):
            new.keep(name, old, name)
        restart_source_logs(new, batch, [StageSource("in", 0)])
        restore_output(self.files.at(f"output-{self.attempt}"), batch)
        self.gate = self.lay_gate(self.sequence)
        self.start()

    def written(self, batch: int) -> Ranges:
        """What a committed batch has handed on."""
        if self.plan.writes == "rows":
            return self.staged[batch].ranges
        output = self.files.at(f"output-{self.attempt}")
        files = written_files(output, batch, "append" if self.plan.writes == "files" else "update")
        for name, size in files:
            assert output.size(name) == size
        rows = [decode_rows(output.read(name) or b"") for name, _ in files]
        assert [each.count for each in rows] == [count_rows(output, name) for name, _ in files]
        return tuple(each for one in rows for each in one.ranges)

    def handed_on(self) -> dict[int, int]:
        """How many rows of each path, if each was handed on once and in order."""
        for batch in range(self._collected, self.query.batch + 1):
            for path, first, after in self.written(batch):
                assert first == self._counts[path]
                self._counts[path] = after
        self._collected = self.query.batch + 1
        return self._counts


def test_what_a_file_holds_can_be_counted_by_its_footer() -> None:
    files = Memory()
    files.write("rows.parquet", encode_rows(PlayedRows(((3, 10, 17), (4, 0, 2)), 5)))
    assert count_rows(files, "rows.parquet") == 9
    assert decode_rows(files.read("rows.parquet") or b"") == PlayedRows(((3, 10, 17), (4, 0, 2)), 5)
    write_nothing(files, "nothing.parquet")
    assert decode_rows(files.read("nothing.parquet") or b"") == PlayedRows()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_rows_are_handed_on_once_and_in_order(plan: Plan) -> None:
    stage = Stage(plan)
    for number in range(30):
        stage.feed(1 + number % 4)
        if number % 3:
            stage.run()
    stage.run()
    assert stage.handed_on() == dict.fromkeys(range(2), stage.rows)


def killed_after(stage: Stage, steps: int) -> Step:
    last = Step.WAITS
    for _ in range(steps):
        last = stage.query.step()
    stage.start()
    return last


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_query_that_is_killed_at_any_step_goes_on_as_if_it_were_not(plan: Plan) -> None:
    """But where the sink's log has a batch whose state is not committed: there Spark cannot go on, nor can this."""
    seen: set[Step] = set()
    for steps in range(1, 40):
        stage = Stage(plan)
        stage.feed()
        stage.run()
        for _ in range(3):
            stage.feed()
        last = killed_after(stage, steps)
        seen.add(last)
        stage.feed()
        if last is Step.LOGGED and plan.has_state:
            stage.query.run()
            assert "CheckpointInfo" in str(stage.query.error)
            continue
        stage.run()
        assert stage.handed_on() == dict.fromkeys(range(2), stage.rows), last
    assert {Step.TOOK_UP, Step.BEGAN, Step.WROTE, Step.COMMITTED} <= seen


@pytest.mark.parametrize("plan", [STATELESS, COUNTING, HOLDING, UPDATING], ids=["none", "counts", "windows", "updates"])
def test_a_query_goes_on_from_what_a_snapshot_has_kept(plan: Plan) -> None:
    stage = Stage(plan)
    for _ in range(3):
        for number in range(25):
            stage.feed()
            stage.run()
            if number % 7 == 6:
                list(stage.query.maintain())
        stage.restore()
    stage.feed()
    stage.run()
    assert stage.handed_on() == dict.fromkeys(range(2), stage.rows)


def test_a_batch_without_data_hands_on_what_the_watermark_has_closed_but_not_as_the_first_one() -> None:
    stage = Stage(HOLDING)
    stage.feed()
    assert stage.query.run_batch() is Step.COMMITTED
    assert stage.written(0) == ()
    stage.start()
    assert stage.query.run_batch() is Step.WAITS, "it waits for data, though the watermark has moved"
    stage.gate.nudge(SegmentFile("nothing.parquet", write_nothing(stage.files, "nothing.parquet")))
    assert stage.query.run_batch() is Step.COMMITTED
    assert stage.written(1) == ((0, 0, 3), (1, 0, 3))


def test_of_a_task_that_is_tried_twice_only_the_last_try_counts() -> None:
    stage = Stage(COUNTING)
    stage.feed()
    stage.query.task_fails = 1
    stage.run()
    tried = [name for name in stage.files.names_in("spark-0/state/0/0") if name.endswith(".changelog")]
    assert sorted(name.partition("_")[0] for name in tried) == ["1", "1"], "the first try's stays beside it"
    assert stage.written(0) == ((0, 0, 3), (1, 0, 3))
    stage.restore()
    stage.feed()
    stage.run()


def test_a_full_snapshot_of_a_try_in_vain_lies_beside_the_one_that_counts() -> None:
    stage = Stage(COUNTING)
    for number in range(12):
        stage.query.task_fails = int(number == 9)
        stage.feed()
        stage.run()
    list(stage.query.maintain())
    full = [name for name in stage.files.list("spark-0/state/0/0") if "/10_" in name and name.endswith(".zip")]
    assert len(full) == 2
    kept = files_at(stage.files.at("spark-0"), stage.query.batch, reads_gates=True)
    assert len([name for name in full if name.removeprefix("spark-0/") in kept]) == 1
    stage.restore()
    stage.feed()
    stage.run()
    assert stage.handed_on() == dict.fromkeys(range(2), stage.rows)


def test_state_that_lacks_a_file_is_not_loaded() -> None:
    for lost, said in ((".changelog", "changelog does not exist"), (".sst", "sst does not exist")):
        stage = Stage(COUNTING)
        for _ in range(13):
            stage.feed()
            stage.run()
        assert list(stage.query.maintain())
        folder = "spark-0/state/0/1"
        names = [name for name in stage.files.list(folder) if name.endswith(lost)]
        stage.files.delete(names[-1:] if lost == ".sst" else [name for name in names if "/12_" in name])
        stage.start()
        stage.feed()
        assert stage.query.run_batch() is Step.FAILED
        assert said in str(stage.query.error)


def test_a_query_that_runs_away_leaves_no_more_than_a_hundred_batches() -> None:
    stream = PlayedStream()
    files = Memory()
    for number in range(150):
        stream.append(PlayedRows(((0, number, number + 1),)))
    query = PlayedQuery(
        files.at("spark"), files.at("output"), [StreamSource(stream, max_files=1)], STATELESS, available_now=True
    )
    assert query.run() == 150
    assert not query.isActive
    assert query.exception() is None
    for log in ("offsets", "commits"):
        numbers = [int(name) for name in files.names_in(f"spark/{log}") if name.isdigit()]
        assert (min(numbers), max(numbers)) == (49, 149)
    assert len([name for name in files.names_in(f"output/{METADATA}") if name.isdigit()]) == 150


@pytest.mark.parametrize("kind", [StreamSource, TopicSource])
def test_a_source_that_is_killed_at_any_step_reads_on_where_it_stood(
    kind: Callable[[PlayedStream, int, int], PlayedSource],
) -> None:
    for steps in range(1, 25):
        files, stream = Memory(), PlayedStream()
        batches: list[int] = []
        for number in range(5):
            stream.append(PlayedRows(((0, number, number + 1),)))
        for limit in (steps, 100):
            query = PlayedQuery(files.at("spark"), files.at("output"), [kind(stream, 0, 2)], STATELESS)
            batches += [query.batch for _ in range(limit) if query.step() is Step.COMMITTED]
            stream.append(PlayedRows(((0, len(stream.files), len(stream.files) + 1),)))
        names = [
            name for batch in range(query.batch + 1) for name, _ in written_files(files.at("output"), batch, "append")
        ]
        rows = [decode_rows(files.read(f"output/{name}") or b"").ranges for name in names]
        assert [first for each in rows for _, first, _ in each] == list(range(6)), steps
        assert batches == list(range(query.batch + 1))
        kept = files_at(files.at("spark"), query.batch, reads_gates=False)
        assert "sources/0/0" in kept


def test_rows_of_a_segment_that_is_gone_are_missed_by_the_state() -> None:
    """Spark reads on without a word."""
    stage = Stage(COUNTING)
    stage.feed()
    stage.run()
    stage.files.delete([stage.feed()])
    stage.run()
    stage.feed()
    with pytest.raises(AssertionError, match="3 rows of path 0 were consumed, and now those from 6: lost"):
        stage.run()


def test_a_gate_whose_log_has_a_hole_fails_the_query() -> None:
    stage = Stage(STATELESS)
    stage.feed()
    stage.feed()
    stage.files.delete([f"gate-0/{METADATA}/10"])
    assert stage.query.run_batch() is Step.FAILED
    assert "10 doesn't exist" in str(stage.query.error)


def test_a_query_that_is_stopped_in_a_batch_leaves_it_as_it_is() -> None:
    stage = Stage(COUNTING)
    stage.feed()
    while stage.query.step() is not Step.OPENED:
        pass
    before = stage.files.list()
    stage.query.stop()
    assert stage.query.step() is Step.ENDED
    assert stage.files.list() == before


def test_the_same_seed_writes_the_same_files() -> None:
    def files(seed: int) -> dict[str, bytes | None]:
        stage = Stage(HOLDING, seed)
        for _ in range(12):
            stage.feed()
            stage.run()
        list(stage.query.maintain())
        return {name: stage.files.read(name) for name in stage.files.list()}

    assert files(1) == files(1)
    assert files(1) != files(2)
