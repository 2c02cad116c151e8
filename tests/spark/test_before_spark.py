"""What is wrong and can be seen without Spark is refused before Spark is started, and nothing is left behind."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pytest

import tidegate as tg
from tests.cli.harness import make_root
from tests.spark.played import AlwaysFits, CountingTable, open_next, played
from tests.spark.test_wrong_pipelines import called
from tidegate.cli.checkpoints import checkpoints_command
from tidegate.cli.status import status_command
from tidegate.cli.verify import verify_command
from tidegate.engine import leading
from tidegate.engine.opening import RootOpening
from tidegate.engine.root import Root
from tidegate.engine.run import run_pipeline
from tidegate.errors import (
    ForeignRoot,
    ForeignTable,
    InvalidConfig,
    InvalidPipeline,
    PipelineChanged,
    RecoveryRefused,
    SinkFailed,
)
from tidegate.protocol.decision_log import CheckpointCompleted
from tidegate.sinks.contract import Sink, SinkPlace
from tidegate.spark.session import RunSession, check_java
from tidegate.storage.files import Files
from tidegate.storage.inspection import look_through
from tidegate.storage.manifest import FORMAT, Manifest
from tidegate.storage.memory import Memory
from tidegate.storage.places import as_given

# In the place of a session where none is needed: what is wrong is found before.
NO_SESSION: Any = object()


def flat(
    sink: Sink, middle: str = "middle", reads: str = "", table: str = "table", output_mode: Any = "append"
) -> tg.Pipeline:
    """As the one that has left a root, with a change or two."""
    pipeline = tg.Pipeline("flat")
    pipeline.source(called("rows"))
    pipeline.stage(output_mode=output_mode)(called(middle, "rows"))
    more = [] if reads in ("", middle) else [reads]
    pipeline.sink(sink)(called(table, middle, *more))
    return pipeline


def files(folder: Path) -> list[tuple[str, bytes]]:
    """All that is kept there, but for who runs and what it says."""
    said = ("lock", "status.json", "status.reserve")
    kept = [path for path in folder.rglob("*") if path.is_file() and path.name not in said]
    return sorted((str(path.relative_to(folder)), path.read_bytes()) for path in kept)


def test_a_root_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, and whoever looks at it, says so: it is no damage, of which a backup would help."""
    monkeypatch.setattr(leading, "FORMAT", FORMAT + 1)
    root = make_root(tmp_path, checkpoints=2)
    before = files(root)
    said = (
        rf"ckpt-000002.json is of another version of Tidegate: it has format {FORMAT + 1}, this version reads formats "
        rf"2 to {FORMAT}\. What to do: go on with the version that wrote it, or start the pipeline on a "
        rf"new root"
    )
    with pytest.raises(ForeignRoot, match=said):
        run_pipeline(flat(tg.DeltaTable(tmp_path / "lake" / "table")), root, NO_SESSION)
    assert files(root) == before
    for look in (status_command, checkpoints_command, verify_command):
        with pytest.raises(ForeignRoot, match="is of another version of Tidegate"):
            look(as_given(root))


def test_a_pipeline_that_no_longer_fits_its_checkpoint(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=2)
    before = files(root)
    table = tg.DeltaTable(tmp_path / "lake" / "table")
    said = "ckpt-000002: stage 'middle' had output_mode append, now update.*change it back"
    with pytest.raises(PipelineChanged, match=said):
        run_pipeline(flat(table, output_mode="update"), root, NO_SESSION)
    with pytest.raises(InvalidConfig, match=r"ckpt-000002 knows no stage 'nothing' \(it knows: rows, mid"):
        run_pipeline(flat(table, middle="between"), root, NO_SESSION, rename={"nothing": "between"})
    with pytest.raises(PipelineChanged, match="ckpt-000002 knows 'rows' too"):
        run_pipeline(flat(table, middle="between"), root, NO_SESSION, rename={"middle": "rows"})
    assert files(root) == before


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        (lambda folder: tg.DeltaTable(folder / "lake" / "table"), "Delta table .* of sink 'table' is gone"),
        (
            lambda folder: tg.DeltaTable(folder / "lake" / "new"),
            "would write to Delta table .*/new, where there is none",
        ),
        (
            lambda _: tg.ForeachBatch(print),
            "'table' wrote to Delta table .*/lake/table.* Now it would write to function print",
        ),
    ],
)
def test_a_table_that_the_checkpoint_does_not_go_with(tmp_path: Path, sink: Callable[[Path], Sink], said: str) -> None:
    root = make_root(tmp_path, checkpoints=1)
    with pytest.raises(RecoveryRefused, match=f"{said}.*ckpt-000001 .*What to do: "):
        run_pipeline(flat(sink(tmp_path)), root, NO_SESSION)


def test_a_checkpoint_that_is_damaged(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    (manifest,) = root.rglob("manifests/*")
    manifest.write_bytes(b"{}")
    with pytest.raises(RecoveryRefused, match="no retained checkpoint is intact: ckpt-000001 is damaged"):
        run_pipeline(flat(tg.DeltaTable(tmp_path / "lake" / "table")), root, NO_SESSION)


def a_table(path: Path, **properties: str) -> tg.DeltaTable:
    schema = deltalake.Schema.from_json(
        '{"type":"struct","fields":[{"name":"id","type":"long","nullable":true,"metadata":{}}]}'
    )
    deltalake.DeltaTable.create(path, schema, configuration=dict(properties))
    return tg.DeltaTable(path)


def demanding(folder: Path) -> Sink:
    a_table(folder / "table", **{"delta.enableChangeDataFeed": "true"})
    return tg.DeltaTable(folder / "table", key="id")


def forgetful(folder: Path) -> Sink:
    return a_table(folder / "table", **{"delta.setTransactionRetentionDuration": "interval 1 days"})


def partitioned_otherwise(folder: Path) -> Sink:
    a_table(folder / "table")
    return tg.DeltaTable(folder / "table", partition_by="id")


def of_another_root(folder: Path) -> Sink:
    table = a_table(folder / "table")
    table.bind(SinkPlace("flat", "table", Memory(), root="another")).claim()
    return table


class Unfinished(tg.DeltaTable):
    """What it is bound to can neither stage files nor rows."""

    def bind(self, place: SinkPlace) -> Any:
        return SimpleNamespace(place=place, sink=self)


def of_the_users_own(folder: Path) -> Sink:
    return Unfinished(folder / "table")


def out_of_reach(_folder: Path) -> Sink:
    return tg.PostgresTable("shop.orders", "host=127.0.0.1 port=1 user=me password=very-secret")


@pytest.mark.parametrize(
    ("sink", "kind", "said"),
    [
        (demanding, SinkFailed, "/table has the property delta.enableChangeDataFeed.*take it off"),
        (forgetful, SinkFailed, "/table has the property delta.setTransactionRetentionDuration.*take the property off"),
        (partitioned_otherwise, SinkFailed, "/table is partitioned by nothing, not by .*id"),
        (of_another_root, ForeignTable, "/table"),
        (of_the_users_own, InvalidPipeline, "/table of sink 'table' was bound to SimpleNamespace, which has not all"),
        (out_of_reach, SinkFailed, r"PostgreSQL table shop\.orders: connection failed"),
    ],
)
def test_a_table_that_cannot_take_rows_whatever_they_are(
    tmp_path: Path, sink: Callable[[Path], Sink], kind: type[Exception], said: str
) -> None:
    pipeline = flat(sink(tmp_path))
    before = files(tmp_path)
    with pytest.raises(kind, match=said) as refused:
        run_pipeline(pipeline, tmp_path / "root", NO_SESSION)
    assert "very-secret" not in str(refused.value)
    assert files(tmp_path) == before
    assert not (tmp_path / "root").exists()


def test_a_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tidegate.sinks.postgres.connection", None)
    with pytest.raises(InvalidPipeline, match=r"pip install 'tidegate\[postgres\]'"):
        run_pipeline(flat(out_of_reach(tmp_path)), tmp_path / "root", NO_SESSION)


# -- what it costs, and what it may not do -------------------------------------------------------------


def test_files_of_a_checkpoint_are_read_once_for_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with played(tmp_path) as pipeline:
        pipeline.one_batch_each()
        pipeline.checkpoint()
    root = Root(tmp_path / "root", "flat")
    examined: list[int] = []

    def counted(files: Files, record: CheckpointCompleted) -> Manifest:
        examined.append(record.checkpoint_id)
        return look_through(files, record)

    monkeypatch.setattr("tidegate.engine.opening.look_through", counted)
    found: dict[int, Manifest] = {}
    _, foreseen = RootOpening(root, {}, found).foreseen()
    assert RootOpening(root, {}, found).open(AlwaysFits())[1] == foreseen is not None
    assert examined == [1]
    assert open_next(root)[1] == foreseen
    assert examined == [1, 1], "a restart looks again: files may have been damaged meanwhile"


def test_no_sink_is_fenced_before_it_is_known_that_the_pipeline_can_start(tmp_path: Path) -> None:
    root_folder = make_root(tmp_path, checkpoints=2)
    max(root_folder.rglob("manifests/*")).write_bytes(b"{}")
    a_table(tmp_path / "lake" / "kept")
    root = Root(root_folder, "flat")
    sink = CountingTable(tmp_path / "lake" / "kept").bind(SinkPlace("flat", "table", Memory(), root=root.id))
    assert RootOpening(root, {"table": sink}).foreseen()[1] is None
    assert sink.facts().fence == 0
    _, base = open_next(root, {"table": sink})
    assert base is not None
    assert base.checkpoint_id == 1
    assert sink.facts().fence == 2


# -- Java ----------------------------------------------------------------------------------------------


def a_java(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    shutil.copy("/bin/true", folder / "bin" / "java")
    (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n', encoding="utf-8")
    return folder


@pytest.mark.parametrize("version", ["17.0.12", "21", "25.0.1"])
def test_a_java_that_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("JAVA_HOME", str(a_java(tmp_path / "java", version)))
    check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "java" / "bin"))
    check_java()


@pytest.mark.parametrize(("version", "said"), [("1.8.0_392", "which is Java 8"), ("11.0.2", "which is Java 11")])
def test_a_java_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, said: str) -> None:
    monkeypatch.setenv("JAVA_HOME", str(a_java(tmp_path / "java", version)))
    with pytest.raises(InvalidConfig, match=f"java, {said}. It needs Java 17 or 21. What to do: install one"):
        check_java()


def test_a_java_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(InvalidConfig, match=r"JAVA_HOME is .*/nowhere, which has no bin/java. It needs Java 17 or 21"):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidConfig, match=r"JAVA_HOME is not set, nor is java on the PATH"):
        check_java()
    RunSession(NO_SESSION, lambda: NO_SESSION).check_can_start()  # which is there already


def test_a_java_that_sparks_own_settings_may_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-env.sh").write_text("export JAVA_HOME=/somewhere\n", encoding="utf-8")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    check_java()
