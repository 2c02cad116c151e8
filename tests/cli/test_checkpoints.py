"""`tidegate checkpoints` and `tidegate verify`, as a user runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.cli.harness import (
    TIDEGATE,
    ended_checkpoint,
    in_terminal,
    live_run,
    make_root,
    said,
    tidegate,
    wait_until,
)
from tests.cli.strict import answered
from tests.mutants.played_properties import backlogged
from tests.spark.played import Queries, played
from tidegate.cli.answers import CheckpointAnswer
from tidegate.cli.checkpoints import checkpoints_command
from tidegate.cli.verify import verify
from tidegate.engine.chronicle import ended
from tidegate.engine.critical_path import critical_path
from tidegate.engine.history import record
from tidegate.engine.root import Root
from tidegate.engine.status import CheckpointStatus, Observer, SinkCommit, StagePart
from tidegate.errors import UnknownCheckpoint
from tidegate.protocol.decision_log import DecisionLog
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import InspectedRoot, references
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import as_given
from tidegate.testing.played import Plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("made"), checkpoints=5)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "root"))


def snapshot_file(root: Path, checkpoint_id: int) -> Path:
    """A file that this checkpoint alone refers to."""
    inspected = InspectedRoot(root)
    named = {
        record.checkpoint_id: references(inspected.files, inspected.manifest(record)) for record in inspected.retained()
    }
    others = frozenset().union(*(names for each, names in named.items() if each != checkpoint_id))
    return root / min(named[checkpoint_id] - others)


# -- checkpoints ------------------------------------------------------------------------------------


def test_the_list_shows_what_can_be_restored(made: Path) -> None:
    done = tidegate("checkpoints", "--root", made)
    assert done.returncode == 0
    assert re.findall(r"ckpt-\d+", done.stdout) == ["ckpt-000003", "ckpt-000004", "ckpt-000005"]
    for heading in ("kind", "time (UTC)", "duration", "alignment", "new", "total", "in flight", "state"):
        assert heading in done.stdout
    assert done.stdout.count("complete") == 3


def test_who_looks_takes_a_torn_last_record_for_none_and_leaves_it_there(root: Path) -> None:
    before = {name: tidegate(name, "--root", root).stdout for name in ("checkpoints", "verify", "status")}
    torn = root / RootPaths.decision(StoredDecisions(Folder(root)).read().next_slot)
    torn.write_bytes(b"")
    for name, told in before.items():
        done = tidegate(name, "--root", root)
        assert done.stdout == told
        assert "torn" not in done.stderr
    assert torn.read_bytes() == b""


def test_the_list_for_scripts_has_the_same_in_bytes_and_milliseconds(made: Path) -> None:
    found = json.loads(tidegate("checkpoints", "--root", made, "--json").stdout)
    assert found["pipeline"] == "flat"
    last = found["checkpoints"][-1]
    assert last["checkpoint"] == "ckpt-000005"
    assert (last["aligned"], last["full"], last["drain"]) == (True, False, False)
    assert last["state"] == "complete"
    assert last["new_bytes"] < last["total_bytes"]
    assert last["in_flight_bytes"] == 0
    assert last["duration_ms"] >= 0


@pytest.mark.parametrize("name", ["4", "ckpt-000004", "000004"])
def test_one_checkpoint_is_shown_stage_by_stage_however_it_is_named(made: Path, name: str) -> None:
    done = tidegate("checkpoints", name, "--root", made)
    assert done.returncode == 0
    assert "ckpt-000004 of pipeline flat" in done.stdout
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    for stage in (["rows", "source"], ["middle", "stage"], ["table", "sink"]):
        assert stage in rows
    assert 'source rows stands at: offset {"played":{"0":4}}' in done.stdout


def test_one_checkpoint_for_scripts_has_its_stages_and_the_positions_of_its_sources(made: Path) -> None:
    found = json.loads(tidegate("checkpoints", "5", "--root", made, "--json").stdout)
    assert found["checkpoint"]["checkpoint"] == "ckpt-000005"
    assert found["checkpoint"]["stages"]["rows"]["cut"] == 4
    assert found["source_positions"] == {"rows": ['{"played":{"0":5}}']}
    assert found["graph"]["table"]["inputs"] == ["middle"]
    assert (made / found["manifest"]).is_file()


def test_why_a_checkpoint_is_unaligned_what_was_in_flight_and_the_pipelines_watermark_are_told(tmp_path: Path) -> None:
    with backlogged("on_timeout", queries=Queries({"table": Plan(has_state=True, holds_back=True)})) as (
        pipeline,
        path,
    ):
        pipeline.generation.trigger()
        pipeline.poll_until(lambda: pipeline.generation.is_settled)
        size = f"{path.stat().st_size} B"
        root = Path(shutil.copytree(pipeline.root.paths.root, tmp_path / "root"))
    listed = tidegate("checkpoints", "--root", root).stdout
    assert re.search(rf"ckpt-000001 +unaligned \(timeout at middle\) .* {size} +not set yet +complete", listed)
    told = tidegate("checkpoints", "1", "--root", root).stdout
    assert "unaligned (timeout at middle), epoch 1" in told
    assert "the pipeline's watermark: not set yet" in told
    assert re.search(r"middle was cut unaligned after \d+ ms: it was not aligned by then \(--unaligned-after\)", told)
    assert f"in flight from rows to middle: 1 segment, {size}" in told
    narrow = in_terminal("checkpoints", "--root", root, width=70).stdout
    assert "ckpt-000001 is unaligned (timeout at middle)" in narrow


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(made: Path) -> None:
    done = tidegate("checkpoints", "99", "--root", made)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "retains no ckpt-000099; it retains ckpt-000003, ckpt-000004, ckpt-000005" in done.stderr


def test_an_aborted_checkpoint_is_shown_as_the_history_has_it(root: Path) -> None:
    stages = {
        "rows": StagePart(progress="done", cut=4, cut_because="aligned", barrier_ms=0, alignment_ms=0, snapshot_ms=30),
        "middle": StagePart(progress="catching_up", barrier_ms=40, alignment_ms=9_000),
        "table": StagePart(progress="aligning", waits_for=("middle",), barrier_ms=70, alignment_ms=8_970),
    }
    why = "timed out: no report from [middle]"
    waited = "8.9 s of 9.1 s: middle working off 41 segments"
    aborted = msgspec.structs.replace(
        ended_checkpoint(9, "aborted", why), aligned=None, duration_ms=9_100, stages=stages, waited_for=waited
    )
    record(Folder(root), ended(aborted))
    done = tidegate("checkpoints", "9", "--root", root)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "ckpt-000009 of pipeline flat",
        "aborted, epoch 9, generation 1, attempt 1",
        "begun at 2026-01-02 03:04:05 UTC, aborted after 9.1 s; 1 B new of 1 B",
        f"why: {why}",
    ]
    assert f"what it waited for: {waited}" in lines
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith(tuple(stages))}
    assert rows == {
        "rows": "done 4 0 ms 0 ms 30 ms",
        "middle": "catching up 40 ms 9.0 s",
        "table": "waiting for middle 70 ms 9.0 s",
    }
    assert lines[-1] == (
        "it was aborted, so nothing can be restored from it; what is shown is what the history has of it"
    )
    answer = answered(tidegate("checkpoints", "ckpt-000009", "--root", root, "--json").stdout)
    assert isinstance(answer, CheckpointAnswer)
    assert answer.checkpoint == aborted
    assert answer.critical_path == critical_path(aborted)
    assert answer.manifest is None
    assert not answer.graph


def test_a_checkpoint_that_is_no_longer_retained_is_shown_as_the_history_has_it(root: Path) -> None:
    commits = {"table": SinkCommit(begun_ms=3_000, took_ms=400, failures=1, why="it is locked")}
    record(Folder(root), ended(msgspec.structs.replace(ended_checkpoint(2), commits=commits)))
    done = tidegate("checkpoints", "2", "--root", root)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "ckpt-000002 of pipeline flat",
        "aligned, epoch 2, generation 1, attempt 1",
        "taken at 2026-01-02 03:04:05 UTC in 10 ms; 1 B new of 1 B",
    ]
    assert "table committed it in 400 ms, after 1 failure: it is locked" in lines
    assert lines[-1] == (
        "it is no longer retained, so nothing can be restored from it; what is shown is what the history has of it"
    )
    answer = answered(tidegate("checkpoints", "2", "--root", root, "--json").stdout)
    assert isinstance(answer, CheckpointAnswer)
    assert (answer.checkpoint.state, answer.manifest) == ("complete", None)


def test_one_of_which_only_the_mark_of_its_id_was_left_is_shown_with_what_is_known(root: Path) -> None:
    bare = CheckpointStatus(checkpoint="ckpt-000009", state="aborted", generation=1, epoch=9, why="killed")
    record(Folder(root), ended(bare))
    done = tidegate("checkpoints", "9", "--root", root)
    assert done.stdout.splitlines()[:3] == [
        "ckpt-000009 of pipeline flat",
        "aborted, epoch 9, generation 1",
        "why: killed",
    ]
    assert len(done.stdout.splitlines()) == 4


def test_one_in_progress_is_shown_as_the_run_tells_it(tmp_path: Path) -> None:
    with live_run(tmp_path, checkpoints=1) as run:
        run.hold_up()
        run.in_its_thread(run.pipeline.generation.trigger)
        wait_until(lambda: bool((status := said(run.root)) and status.in_progress))
        done = tidegate("checkpoints", "2", "--root", run.root)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^in progress, epoch 2, generation 1, attempt 1$", done.stdout, re.MULTILINE)
    assert re.search(r"^begun at .* UTC, .* ago", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "it is in progress; what is shown is what the run says of it"


@pytest.mark.parametrize("name", ["latest", "-1", "0", "ckpt-", "4.5"])
def test_what_names_no_checkpoint_is_wrong_usage(made: Path, name: str) -> None:
    assert tidegate("checkpoints", "--root", made, "--", name).returncode == 2


def test_a_root_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    Root(tmp_path / "root", "flat")
    done = tidegate("checkpoints", "--root", tmp_path / "root")
    assert done.returncode == 0
    assert "no checkpoint yet" in done.stdout


@pytest.mark.parametrize("command", ["checkpoints", "verify", "status", "checkpoint"])
def test_a_folder_that_is_no_root_is_refused_and_left_as_it_was(tmp_path: Path, command: str) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        done = tidegate(command, "--root", folder)
        assert done.returncode == 3
        assert done.stderr.startswith("error: ")
        assert "tidegate run" in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_manifest_is_listed_as_such(root: Path) -> None:
    (root / "generations" / "000001" / "manifests" / "ckpt-000004.json").write_bytes(b"{}")
    done = tidegate("checkpoints", "--root", root)
    assert done.returncode == 4
    assert "damaged: " in done.stdout
    one = tidegate("checkpoints", "4", "--root", root)
    assert one.returncode == 4
    assert "is not the manifest that was decided" in one.stderr
    assert "the next run goes on from ckpt-000005" in one.stderr


def test_a_reason_with_brackets_is_shown_as_it_is(root: Path) -> None:
    why = "could not store [/data/x] of [state]"
    aborted = ended_checkpoint(9, "aborted", why)
    status = msgspec.structs.replace(Observer("flat").status, checkpoints=(aborted,))
    (root / RootPaths.STATUS).write_bytes(msgspec.json.encode(status))
    done = tidegate("checkpoints", "--root", root)
    assert done.returncode == 0
    assert f"aborted: {why}" in " ".join(done.stdout.split())


def test_a_damaged_log_is_told_in_one_line(root: Path) -> None:
    last = max((root / "decisions").iterdir())
    last.write_bytes(b"nonsense")
    for command in ("checkpoints", "verify", "status"):
        done = tidegate(command, "--root", root)
        assert done.returncode == 4
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1


def test_a_log_that_is_gone_is_damage_and_not_a_root_without_a_checkpoint(root: Path) -> None:
    shutil.rmtree(root / "decisions")
    for command in ("checkpoints", "verify", "status", "graph"):
        done = tidegate(command, "--root", root)
        assert done.returncode == 4
        assert done.stdout == ""
        assert done.stderr.startswith(f"error: {root} holds files of pipeline 'flat' but no decision log")
        assert len(done.stderr.splitlines()) == 1


def test_a_run_that_was_killed_before_its_first_generation_has_damaged_nothing(tmp_path: Path) -> None:
    Root(tmp_path, "flat")
    (tmp_path / "generations" / "000001" / "stages" / "middle" / "gates" / "rows").mkdir(parents=True)
    assert InspectedRoot(tmp_path).retained() == []


def test_a_run_that_opens_its_first_generation_meanwhile_has_damaged_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with played(tmp_path) as pipeline:
        inspected = InspectedRoot(pipeline.root.paths.root)
        answers = iter([DecisionLog(), pipeline.root.decisions.read()])  # before it was opened, and after
        monkeypatch.setattr(StoredDecisions, "read", lambda _: next(answers))
        assert inspected.log().generation == 1


def test_checkpoints_stand_in_the_order_of_their_numbers_also_when_these_have_more_digits(tmp_path: Path) -> None:
    StoredDecisions(Folder(tmp_path / "root")).mark_used(999_998)
    root = make_root(tmp_path, checkpoints=3)
    listed = json.loads(tidegate("checkpoints", "--root", root, "--json").stdout)["checkpoints"]
    assert [each["checkpoint"] for each in listed] == ["ckpt-999999", "ckpt-1000000", "ckpt-1000001"]


def test_the_shell_completes_commands_and_checkpoints(made: Path) -> None:
    for words, offered in (
        ("tidegate checkp", {"checkpoint", "checkpoints"}),
        (f"tidegate verify --root {made} ckpt-", {"ckpt-000003", "ckpt-000004", "ckpt-000005"}),
    ):
        assert completions(words) == offered


def completions(words: str) -> set[str]:
    environment = {
        **os.environ,
        "_TIDEGATE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run([TIDEGATE], env=environment, capture_output=True, text=True, timeout=60, check=False)
    return set(done.stdout.split())


# -- verify -----------------------------------------------------------------------------------------


def test_an_intact_root_is_verified_file_by_file(made: Path) -> None:
    done = tidegate("verify", "--root", made)
    assert done.returncode == 0
    assert done.stdout.count("intact") == 3
    found = json.loads(tidegate("verify", "5", "--root", made, "--json").stdout)
    inspected = InspectedRoot(made)
    named = references(inspected.files, inspected.manifest(inspected.find(5)))
    assert found["checkpoints"] == [
        {
            "checkpoint": "ckpt-000005",
            "state": "intact",
            "files": len(named),
            "bytes": sum((made / name).stat().st_size for name in named),
            "damage": [],
        }
    ]


def test_a_file_that_was_changed_or_deleted_is_named(root: Path) -> None:
    changed, deleted = snapshot_file(root, 3), snapshot_file(root, 5)
    # A new file in its place: the old one may have other names.
    content = changed.read_bytes()
    changed.unlink()
    changed.write_bytes(content[:-1] + b"!")
    deleted.unlink()
    done = tidegate("verify", "--root", root)
    assert done.returncode == 4
    assert done.stdout.count("intact") == 1
    assert f"ckpt-000003: {changed.relative_to(root)} of stage" in done.stdout
    assert "checksum differs" in done.stdout
    assert f"ckpt-000005: {deleted.relative_to(root)} of stage" in done.stdout
    assert tidegate("verify", "4", "--root", root).returncode == 0
    assert tidegate("verify", "5", "--root", root).returncode == 4


def test_a_quick_look_reads_no_file_and_finds_what_is_gone_or_cut(root: Path) -> None:
    changed, deleted = snapshot_file(root, 3), snapshot_file(root, 5)
    content = changed.read_bytes()
    changed.unlink()
    changed.write_bytes(content[:-1] + b"!")
    done = tidegate("verify", "--quick", "--root", root)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("there, not read") == 3
    changed.write_bytes(content[:-1])
    deleted.unlink()
    done = tidegate("verify", "--quick", "--root", root, "--json")
    assert done.returncode == 4
    assert [each["state"] for each in json.loads(done.stdout)["checkpoints"]] == ["damaged", "there", "damaged"]
    refused = tidegate("verify", "--quick", "--deep", __file__, "--root", root)
    assert refused.returncode == 2
    assert "--deep reads what --quick leaves out" in refused.stderr


def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    with played(tmp_path) as pipeline:
        for _ in range(3):
            pipeline.one_batch_each()
            pipeline.checkpoint()
        inspected = InspectedRoot(pipeline.root.paths.root)
        oldest = inspected.retained()[0]
        assert verify(inspected, oldest, is_alive=True).state == "intact"
        pipeline.one_batch_each()
        pipeline.checkpoint()
        found = verify(inspected, oldest, is_alive=True)
        assert found.damage
        assert found.state == "removed"


def test_one_checkpoint_that_the_run_removes_meanwhile_is_unknown_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with played(tmp_path) as pipeline:
        for _ in range(3):
            pipeline.one_batch_each()
            pipeline.checkpoint()
        root = pipeline.root.paths.root
        found, find = [InspectedRoot(root).find(1)], InspectedRoot.find
        pipeline.one_batch_each()
        pipeline.checkpoint()
    # As it was found before the run removed it.
    monkeypatch.setattr(InspectedRoot, "find", lambda each, number: found.pop() if found else find(each, number))
    with pytest.raises(UnknownCheckpoint, match="retains no ckpt-000001; it retains ckpt-000002"):
        checkpoints_command(as_given(root), 1)
    assert not found


def test_looking_changes_nothing(root: Path) -> None:
    def seen() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (root, *root.rglob("*"))}

    before = seen()
    for arguments in (("checkpoints",), ("checkpoints", "5"), ("verify",), ("status",), ("graph",)):
        tidegate(*arguments, "--root", root)
    assert seen() == before
