"""What `inspect`, `diff` and `verify --deep` refuse, and answer, before Spark is started.

tests/spark/test_inspecting.py has the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.harness import make_root, tidegate
from tests.cli.strict import answered
from tidegate.cli.answers import ErrorAnswer, InspectAnswer
from tidegate.cli.inspect import Format, inspect_command
from tidegate.cli.options import parse_checkpoint_or_latest
from tidegate.storage.places import as_given


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("made"), checkpoints=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operator": 0}, "name it with --stage"),
        ({"in_flight": True}, "name it with --stage"),
        ({"form": Format.CSV}, "name it with --stage"),
        ({"stage": "middle", "form": Format.PARQUET}, "needs --out PATH"),
        ({"stage": "middle", "out": Path("rows")}, "--out is for --format csv and parquet"),
        ({"stage": "middle", "form": Format.CSV, "as_json": True}, "cannot both be on stdout"),
        ({"stage": "middle", "in_flight": True, "operator": 1}, "rows in flight are of no operator"),
    ],
)
def test_what_does_not_go_together_is_refused(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        inspect_command(as_given(root), **options)


def test_a_checkpoint_is_named_in_every_way() -> None:
    for text in ("42", "ckpt-000042", " 42 "):
        assert parse_checkpoint_or_latest(text) == "ckpt-000042"
    assert parse_checkpoint_or_latest("Latest") == "latest"
    with pytest.raises(typer.BadParameter, match="'newest' names no checkpoint; write 42, ckpt-000042 or latest"):
        parse_checkpoint_or_latest("newest")


def test_stages_without_state_are_listed_without_spark(root: Path) -> None:
    answer = answered(tidegate("inspect", "--root", root, "--json").stdout)
    assert isinstance(answer, InspectAnswer)
    assert answer.checkpoint == "ckpt-000002"
    assert {name: (stage.kind, stage.state, stage.in_flight) for name, stage in answer.stages.items()} == {
        "rows": ("source", (), {}),
        "middle": ("stage", (), {}),
        "table": ("sink", (), {}),
    }
    done = tidegate("inspect", "1", "--root", root)
    assert done.stdout.splitlines()[0] == "ckpt-000001 of pipeline flat"
    assert done.stdout.splitlines()[3].split() == ["rows", "no", "state"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["inspect", "--stage", "middle"], "UnknownState", "stage 'middle' keeps no state at ckpt-000002"),
        (["inspect", "--stage", "muddle"], "UnknownState", "ckpt-000002 has no stage 'muddle'; it has: rows, middle"),
        (["inspect", "--stage", "middle", "--in-flight"], "UnknownState", "nothing was in flight to stage 'middle'"),
        (["inspect", "7"], "UnknownCheckpoint", "retains no ckpt-000007; it retains ckpt-000001, ckpt-000002"),
        (["diff", "1", "2", "--stage", "table"], "UnknownState", "stage 'table' keeps no state at ckpt-000001"),
        (["verify", "--conf", "spark.x=1"], "WrongUsage", "--pipeline and --conf are for --deep FILE"),
    ],
)
def test_what_is_not_there_is_told_without_spark(root: Path, arguments: list[str], error: str, message: str) -> None:
    done = tidegate(*arguments, "--root", root, "--json")
    answer = answered(done.stdout)
    assert isinstance(answer, ErrorAnswer)
    assert answer.error == error
    assert message in answer.message
    assert done.returncode == answer.exit == (1 if error == "UnknownCheckpoint" else 2)


def test_a_file_of_another_pipeline_is_not_tried_on_a_root(root: Path, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("import tidegate as tg\npipeline = tg.Pipeline('other')\n", encoding="utf-8")
    done = tidegate("verify", "--root", root, "--deep", tmp_path / "other.py")
    assert done.returncode == 3
    assert "is the root of pipeline 'flat', not of 'other'" in done.stderr
