"""`tidegate history` and `checkpoints --summary`: what is in the root, in words and as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.cli.harness import ended_checkpoint, make_root, tidegate
from tests.cli.strict import answered
from tidegate.cli.answers import CheckpointAnswer, HistoryAnswer, SummaryAnswer
from tidegate.cli.history import told
from tidegate.engine.chronicle import ended
from tidegate.engine.events import CheckpointEnded, Ended, Failed, Rewound, SavepointTaken, Started, StepTaken
from tidegate.engine.history import record
from tidegate.engine.status import SinkCommit, StagePart
from tidegate.storage.folder import Folder


def at(second: int) -> str:
    return f"2030-01-02T03:04:{second:02d}.000+00:00"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two checkpoints, and a history."""
    root = make_root(tmp_path_factory.mktemp("made"), checkpoints=2)
    files = Folder(root)
    commits = {"table": SinkCommit(begun_ms=3_000, took_ms=400, failures=1, why="it is locked")}
    second = msgspec.structs.replace(
        ended_checkpoint(2),
        duration_ms=3_000,
        shown_ms=3_400,
        commits=commits,
        waited_for="2.9 s of 3.4 s: sink table working off 41 segments",
        stages={"table": StagePart(progress="done", caught_up_segments=41, last_barrier_from="middle")},
    )
    aborted = ended_checkpoint(3, "aborted", "timed out: no report from middle")
    steps = (StepTaken("starting_spark", 3_000), StepTaken("checking", 10))
    for event in (
        Started(at=at(1), because="first", generation=1, took_ms=3_100, steps=steps),
        ended(ended_checkpoint(1), at=at(2)),
        ended(second, at=at(3)),
        ended(aborted, at=at(4)),
        Failed(at=at(5), why="stage 'middle' failed: boom", stage="middle", retried_in_ms=1_000),
        Started(at=at(6), because="failure", why="stage 'middle' failed: boom", base="ckpt-000002", generation=2),
        SavepointTaken(at=at(7), checkpoint="ckpt-000002", name="before", place="/savepoints/before"),
        Ended(at=at(8), state="finished", why="it was told to stop"),
        Rewound(at=at(9), checkpoint="ckpt-000001", how="restore"),
    ):
        record(files, event)
    return root


def test_what_has_happened_is_told_newest_first(root: Path) -> None:
    done = tidegate("history", "--root", root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "2030-01-02 03:04:09  restored to ckpt-000001",
        "2030-01-02 03:04:08  finished: it was told to stop",
        "2030-01-02 03:04:07  savepoint before of ckpt-000002 was made",
        "                     /savepoints/before",
        "2030-01-02 03:04:06  recovered from a failure from ckpt-000002 in 0 ms, generation 2",
        "                     stage 'middle' failed: boom",
        "2030-01-02 03:04:05  failed: stage 'middle' failed: boom; again in 1.0 s",
        "2030-01-02 03:04:04  ckpt-000003 aborted after 10 ms: timed out: no report from middle",
        "2030-01-02 03:04:03  ckpt-000002 complete in 3.0 s, 1 B new of 1 B",
        "                     2.9 s of 3.4 s: sink table working off 41 segments",
        "                     table failed 1 time: it is locked",
        "2030-01-02 03:04:02  ckpt-000001 complete in 10 ms, 1 B new of 1 B",
        "2030-01-02 03:04:01  started from the beginning in 3.1 s, generation 1",
        "                     starting spark 3.0 s, checking 10 ms",
    ]


def test_it_is_told_piece_by_piece_and_by_kind(root: Path) -> None:
    first = answered(tidegate("history", "--root", root, "--limit", "2", "--json").stdout)
    assert isinstance(first, HistoryAnswer)
    assert [type(each) for each in first.events] == [Rewound, Ended]
    assert first.next is not None
    rest = answered(tidegate("history", "--root", root, "--before", first.next, "--json").stdout)
    assert isinstance(rest, HistoryAnswer)
    assert [each.at for each in rest.events] == [at(second) for second in range(7, 0, -1)]
    assert rest.next is None
    only = answered(
        tidegate("history", "--root", root, "--only", "aborts", "--only", "recoveries", "--limit", "1", "--json").stdout
    )
    assert isinstance(only, HistoryAnswer)
    (recovery,) = only.events
    assert isinstance(recovery, Started)
    only = answered(
        tidegate("history", "--root", root, "--only", "aborts", "--before", only.next or "", "--json").stdout
    )
    assert isinstance(only, HistoryAnswer)
    (abort,) = only.events
    assert isinstance(abort, CheckpointEnded)
    assert abort.checkpoint.checkpoint == "ckpt-000003"


def test_what_cannot_be_asked_for_is_refused(root: Path, tmp_path: Path) -> None:
    wrong = tidegate("history", "--root", root, "--only", "weddings")
    assert wrong.returncode == 2
    assert "weddings" in wrong.stderr
    wrong = tidegate("history", "--root", root, "--before", "yesterday")
    assert wrong.returncode != 0
    assert "it is what an earlier answer said" in wrong.stderr
    assert tidegate("history", "--root", tmp_path).returncode == 3


def test_checkpoints_are_summed_up(root: Path) -> None:
    done = answered(tidegate("checkpoints", "--root", root, "--summary", "--json").stdout)
    assert isinstance(done, SummaryAnswer)
    assert (done.summary.complete, done.summary.aborted) == (2, 1)
    assert done.summary.duration_ms is not None
    assert (done.summary.duration_ms.min, done.summary.duration_ms.max) == (10, 3_000)
    shown = tidegate("checkpoints", "--root", root, "--summary").stdout
    assert "2 complete, 1 aborted" in shown
    (line,) = [line for line in shown.splitlines() if "until it was decided" in line]
    assert line.split()[4:] == ["10", "ms", "1.5", "s", "3.0", "s", "10", "ms", "3.0", "s", "3.0", "s", "3.0", "s"]


def test_one_checkpoint_is_told_with_how_it_went(root: Path) -> None:
    shown = tidegate("checkpoints", "2", "--root", root).stdout
    assert "what it waited for: 2.9 s of 3.4 s: sink table working off 41 segments" in shown
    assert "table committed it in 400 ms, after 1 failure: it is locked" in shown
    answer = answered(tidegate("checkpoints", "2", "--root", root, "--json").stdout)
    assert isinstance(answer, CheckpointAnswer)
    assert answer.checkpoint.shown_ms == 3_400
    assert answer.checkpoint.stages["table"].caught_up_segments == 41
    assert answer.checkpoint.stages["rows"].last_barrier_from is None
    assert answer.critical_path[-1].to_ms == 3_400
    assert answer.positions.keys() == {"rows"}


def test_a_root_of_before_has_no_history(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    assert not (root / "history").exists()
    assert tidegate("history", "--root", root).stdout == "the history of pipeline flat has nothing\n"
    assert "0 complete, 0 aborted" in tidegate("checkpoints", "--root", root, "--summary").stdout
    (root / "history").mkdir()
    (root / "history" / "1900000000000-0000aaaa.json").write_bytes(b"\x00torn")
    damaged = tidegate("history", "--root", root)
    assert (damaged.returncode, damaged.stdout) == (0, "the history of pipeline flat has nothing\n")
    assert "1900000000000-0000aaaa.json is damaged, and is passed over" in damaged.stderr


def test_every_kind_is_told() -> None:
    for how in ("restore", "savepoint", "fork", "promote"):
        assert "ckpt-000001" in told(Rewound(at=at(1), checkpoint="ckpt-000001", how=how))[0]
    for because in ("first", "again", "killed", "failure", "instances", "windows"):
        assert "generation 3" in told(Started(at=at(1), because=because, generation=3))[0]
