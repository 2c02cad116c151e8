"""What the next run does is told from outside as a run then decides it, by every command in the same words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import deltalake
import pytest
from deltalake import CommitProperties, Transaction

import tidegate as tg
from tests.cli.harness import tidegate
from tests.cli.test_checkpoints import snapshot_file
from tests.spark.played import open_next, played
from tidegate.engine.outlook import next_run
from tidegate.engine.root import Root
from tidegate.errors import DamagedCheckpoint, RecoveryRefused, UnknownCheckpoint
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import SinkPlace
from tidegate.storage.inspection import InspectedRoot


class Made(NamedTuple):
    root: Path
    table: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A root with the checkpoints 3 to 5, whose table is there and shows nothing of them yet."""
    folder = tmp_path_factory.mktemp("made")
    deltalake.DeltaTable.create(folder / "lake" / "table", deltalake.Schema.from_json(_COLUMNS))
    with played(folder) as pipeline:
        for _ in range(5):
            for _ in range(_BATCHES):  # so that each has files of its own
                pipeline.one_batch_each()
            pipeline.checkpoint()
        return Made(pipeline.root.paths.root, folder / "lake" / "table")


_BATCHES = 3
_COLUMNS = '{"type": "struct", "fields": [{"name": "id", "type": "long", "nullable": true, "metadata": {}}]}'


@pytest.fixture
def root(made: Made, tmp_path: Path) -> Path:
    """A copy that a test may damage. The table that its manifests name is put back afterwards."""
    return Path(shutil.copytree(made.root, tmp_path / "root"))


@pytest.fixture
def table(made: Made, tmp_path: Path) -> Path:
    """The table, that a test may change."""
    shutil.copytree(made.table, tmp_path / "kept")
    return made.table


@pytest.fixture(autouse=True)
def _put_back(made: Made, tmp_path: Path) -> object:
    yield
    if (tmp_path / "kept").exists():
        shutil.rmtree(made.table)
        shutil.move(tmp_path / "kept", made.table)


def show(table: Path, epoch: int) -> None:
    """Let the table say that it shows an epoch."""
    found = deltalake.DeltaTable(table)
    records = CommitProperties(
        app_transactions=[
            Transaction("tidegate/flat/table/epoch", epoch),
            Transaction("tidegate/flat/table/batch", epoch * _BATCHES),
        ]
    )
    found.create_write_transaction([], "append", found.schema(), commit_properties=records)


def manifest_gone(root: Path, checkpoint_id: int) -> None:
    next(root.glob(f"generations/*/manifests/{checkpoint_name(checkpoint_id)}.json")).unlink()


def file_gone(root: Path, checkpoint_id: int) -> None:
    snapshot_file(root, checkpoint_id).unlink()


def file_cut(root: Path, checkpoint_id: int) -> None:
    path = snapshot_file(root, checkpoint_id)
    path.unlink()  # it may be a link
    path.write_bytes(b"")


def file_changed(root: Path, checkpoint_id: int) -> None:
    """In its content, not in its size."""
    path = snapshot_file(root, checkpoint_id)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def decided(root: Path, table: Path) -> str:
    """What a run decides when it starts."""
    opened = Root(root, "flat")
    sink = tg.DeltaTable(table).bind(SinkPlace("flat", "table", opened.store.at("sinks/table"), root=opened.id))
    try:
        _, base = open_next(opened, {"table": sink})
    except RecoveryRefused as refused:
        return f"refuses to start: {refused}"
    assert base is not None
    return f"goes on from {checkpoint_name(base.checkpoint_id)}"


@pytest.mark.parametrize("shown", [4, 5, 6])
@pytest.mark.parametrize("victims", [(), (4,), (5,), (4, 5), (3, 4, 5)])
@pytest.mark.parametrize("damage", [manifest_gone, file_gone, file_cut, file_changed])
def test_what_is_told_from_outside_is_what_a_run_decides(
    root: Path, table: Path, damage: Callable[[Path, int], None], victims: tuple[int, ...], shown: int
) -> None:
    if shown:
        show(table, shown)
    if damage is manifest_gone and len(victims) == 3:
        victims = victims[1:]
    for victim in victims:
        damage(root, victim)
    inspected = InspectedRoot(root)
    read = {each.checkpoint_id: inspected.damage_of(each, reads=True) for each in inspected.retained()}
    by_reading, by_size = next_run(inspected, read), next_run(inspected)
    will = decided(root, table)
    assert by_reading.is_refused is will.startswith("refuses")
    if len(victims) == 3 and shown > 5:
        return  # there are two reasons to refuse, and of the tables nobody is asked where no checkpoint is whole
    assert will in str(by_reading)
    if damage is file_changed and shown <= 5:
        assert str(by_size).startswith("the next run goes on from ckpt-000005 (whose files are there, by their sizes;")
    else:
        assert will in str(by_size)


def test_every_command_says_the_same_of_a_damaged_checkpoint_that_will_be_skipped(root: Path, table: Path) -> None:
    show(table, 4)
    file_gone(root, 5)
    before = sorted(path for path in root.rglob("*"))
    says = "the next run skips ckpt-000005, which is damaged (generations/"
    goes_on = "and goes on from ckpt-000004"
    for arguments, code in ((["status"], 6), (["checkpoints"], 4), (["checkpoints", "5"], 4), (["verify"], 4)):
        done = tidegate(*arguments, "--root", root)
        assert done.returncode == code, arguments
        assert says in done.stdout
        assert goes_on in done.stdout
        assert ("`tidegate verify` reads them" in done.stdout) is (arguments != ["verify"])
    assert sorted(path for path in root.rglob("*")) == before
    for command in ("status", "checkpoints", "verify"):
        found = json.loads(tidegate(command, "--root", root, "--json").stdout)["next_start"]
        assert (found["decision"], found["checkpoint"]) == ("skips", "ckpt-000004")
        assert found["why"].startswith(says)


def test_a_start_that_will_be_refused_is_foretold_with_why_and_what_to_do(root: Path, table: Path) -> None:
    show(table, 5)
    file_gone(root, 5)
    done = tidegate("status", "--root", root)
    assert done.returncode == 4
    assert json.loads(tidegate("status", "--root", root, "--json").stdout)["next_start"]["decision"] == "refuses"
    assert "the next run refuses to start: ckpt-000005 is damaged (" in done.stdout
    assert "and sink 'table' shows rows past ckpt-000004" in done.stdout
    assert "What to do: restore the damaged files from a backup, or set the pipeline and its tables" in done.stdout


def test_a_root_that_is_older_than_its_tables_is_foretold_to_be_refused(root: Path, table: Path) -> None:
    """As one that was restored from a backup: its files are all there."""
    show(table, 9)
    for command in ("status", "checkpoints", "verify"):
        done = tidegate(command, "--root", root)
        assert done.returncode == 4, command
        assert "refuses to start: sink 'table' holds epoch 9, but the decision log ends at 5" in done.stdout
        found = json.loads(tidegate(command, "--root", root, "--json").stdout)["next_start"]
        assert (found["decision"], found["checkpoint"]) == ("refuses", None)


def test_a_manifest_that_cannot_be_trusted_is_told_once_and_with_what_to_do(root: Path, table: Path) -> None:
    show(table, 5)
    (damaged,) = root.glob("generations/*/manifests/ckpt-000005.json")
    damaged.write_bytes(damaged.read_bytes()[:100])
    for arguments in (("checkpoints", "5"), ("graph",)):
        done = tidegate(*arguments, "--root", root)
        assert done.returncode == 4
        assert done.stderr.count("is not the manifest that was decided") == 1
        assert "ckpt-000005 is damaged (" in done.stderr
        assert "What to do: restore the damaged files from a backup" in done.stderr


def test_where_a_table_cannot_be_asked_from_outside_that_is_said(root: Path, table: Path) -> None:
    (table / "_delta_log" / f"{1:020d}.json").write_text("no json", encoding="utf-8")
    file_gone(root, 5)
    done = tidegate("checkpoints", "--root", root)
    assert (
        "goes on from ckpt-000004, if the table of 'table' shows no rows past it, which is asked at its start; else"
        in (done.stdout)
    )


def test_a_damaged_or_vanished_checkpoint_is_refused_by_read_with_those_that_can_be_read(
    root: Path, table: Path
) -> None:
    for epoch in (3, 4, 5):
        show(table, epoch)
    manifest_gone(root, 5)
    for named in (5, None):
        with pytest.raises(
            DamagedCheckpoint,
            match=r"ckpt-000005 is damaged: .* is gone; what can be read: ckpt-000003, ckpt-000004$",
        ):
            tg.read(root, named)
    with pytest.raises(
        UnknownCheckpoint, match=r"no ckpt-000001; it retains .*; what can be read: ckpt-000003, ckpt-000004$"
    ):
        tg.read(root, 1)
    assert tg.read(root, 4).checkpoint == "ckpt-000004"
