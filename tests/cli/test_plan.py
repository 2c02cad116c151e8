"""`tidegate plan`: how it looks, for people and for scripts. What it finds out is in tests/spark/test_changes.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidegate.cli.app import app
from tidegate.cli.exits import Exit
from tidegate.cli.plan import _answer
from tidegate.engine.changes import StageChange
from tidegate.engine.preview import Preview, TablePreview
from tidegate.errors import PipelineChanged
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.protocol.recovery import Restore
from tidegate.storage.manifest import TableAddress
from tidegate.storage.places import as_given

RECORD = CheckpointCompleted(
    slot=3, claimant="x", generation=1, checkpoint_id=42, epoch=42, parent=None, manifest="m", manifest_sha256="",
    aligned=True, retained=(42,), log_start=1,
)  # fmt: skip


def found(**given: Any) -> Preview:
    whole: dict[str, Any] = {
        "start": Restore(RECORD),
        "starts": "goes on from ckpt-000042",
        "stages": (
            StageChange("rows", "source", "same", "rows"),
            StageChange("large", "stage", "renamed", "big", has_state=True),
            StageChange("extra", "sink", "new", None),
            StageChange("old", "stage", "removed", "old", has_state=True),
        ),
        "tables": {"extra": TablePreview(TableAddress("delta", "/lake/extra"), "new")},
        "chains": {"extra": ("large",)},
        "told": ("stage 'old' is gone since ckpt-000042: its state is dropped, as it was allowed",),
        **given,
    }
    return Preview("orders", is_alive=False, **whole)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command with a preview that is given."""
    file = tmp_path / "orders.py"
    file.write_text("import tidegate as tg\npipeline = tg.Pipeline('orders')\n", encoding="utf-8")

    def plan(preview: Preview, *arguments: str) -> Any:
        given: dict[str, Any] = {}

        def previewed(_pipeline: Any, _root: Any, _scratch: Path, **options: Any) -> Preview:
            given.update(options)
            return preview

        monkeypatch.setattr("tidegate.engine.preview.preview", previewed)
        done = CliRunner().invoke(app, ["plan", str(file), "--root", str(tmp_path / "root"), *arguments])
        return done, given

    return plan


def test_what_would_happen_is_told_in_plain_words(planned: Any) -> None:
    done, given = planned(found(), "--rename", "big=large", "--allow-dropped-state", "old", "--no-chain")
    assert done.exit_code == 0, done.output
    for line in (
        "a run goes on from ckpt-000042",
        "goes on as what was big",
        "starts empty",
        "is gone",
        "table of extra: delta /lake/extra, no table yet: it would be created",
        "one query: large, extra",
        "stage 'old' is gone since ckpt-000042: its state is dropped, as it was allowed",
    ):
        assert line in done.output
    assert given == {"rename": {"big": "large"}, "allow_dropped_state": ["old"], "chain": False, "conf": {}}


def test_what_would_be_refused_is_told_with_the_code_of_the_run(planned: Any) -> None:
    refused = found(refused=PipelineChanged("stage 'old' is gone"), stages=(), tables={}, chains={}, told=())
    done, _ = planned(refused)
    assert done.exit_code == Exit.UNUSABLE_ROOT
    assert "a run goes on from ckpt-000042, but refuses to start: stage 'old' is gone" in done.output


def test_a_script_gets_the_same(tmp_path: Path) -> None:
    answer = _answer(as_given(tmp_path), found())
    assert [(each.name, each.change, each.was, each.state) for each in answer.stages] == [
        ("rows", "same", "rows", "none"),
        ("large", "renamed", "big", "kept"),
        ("extra", "new", None, "none"),
        ("old", "removed", "old", "dropped"),
    ]
    assert (answer.start.decision, answer.start.checkpoint) == ("goes_on", "ckpt-000042")
    refused = _answer(as_given(tmp_path), found(refused=PipelineChanged("stage 'old' is gone")))
    assert (refused.start.decision, refused.start.why) == ("refuses", "stage 'old' is gone")
    assert refused.refused is not None
    assert refused.refused.exit == Exit.UNUSABLE_ROOT


def test_a_wrong_pair_and_one_that_is_given_twice_are_refused(planned: Any) -> None:
    for wrong in (["--rename", "big"], ["--rename", "big=a", "--rename", "big=b"]):
        done, given = planned(found(), *wrong)
        assert done.exit_code == Exit.WRONG_USAGE
        assert not given
