"""Exit codes, help, and what a command may import."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.harness import TIDEGATE, make_root, tidegate
from tidegate import errors
from tidegate.cli.exits import Exit, code_of
from tidegate.errors import TidegateError
from tidegate.storage.lock import RootLock
from tidegate.storage.paths import RootPaths

GUIDE = Path(__file__).parents[2] / "docs" / "commands.md"
COMMANDS = (
    "run",
    "status",
    "checkpoint",
    "checkpoints",
    "verify",
    "inspect",
    "diff",
    "compare",
    "graph",
    "demo",
    "simulate",
)

PIPELINE = """
import tidegate as tg

pipeline = tg.Pipeline("orders")

@pipeline.source
def rows(spark): ...

@pipeline.sink(tg.DeltaTable("lake/kept"))
def kept(rows): ...
"""

CODES = {
    "InvalidConfig": 2,
    "InvalidPipeline": 2,
    "UnknownState": 2,
    "RootInUse": 3,
    "NoRoot": 3,
    "BucketUnfit": 3,
    "ForeignRoot": 3,
    "PipelineChanged": 3,
    "RecoveryRefused": 3,
    "NoCommonPosition": 3,
    "DamagedLog": 4,
    "DamagedCheckpoint": 4,
    "Superseded": 5,
    "Fenced": 5,
    "NotRunning": 6,
}


def test_every_error_has_its_exit_code() -> None:
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, TidegateError):
            error = kind.__new__(kind)
            assert code_of(error) == CODES.get(name, 1), name


def test_the_guide_has_every_exit_code() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == {int(each) for each in Exit}


def test_the_help_lists_every_command() -> None:
    said = tidegate("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^│ {command} ", said, re.MULTILINE), command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = tidegate(command, "--help")
    assert done.returncode == 0
    assert f"Example: tidegate {command}" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("frobnicate",), ("status",), ("verify", "--root"), ("graph", "missing.py"), ("run", "missing.py")]
)
def test_wrong_usage_is_2(arguments: tuple[str, ...]) -> None:
    done = tidegate(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_an_answer_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    for command in ("status", "checkpoints --json"):
        done = in_a_shell(f"{TIDEGATE} {command} --root {root} >/dev/full")
        assert done.returncode == Exit.FAILED
        assert done.stderr == "error: the answer could not be written to stdout: No space left on device\n"


def test_without_stdout_the_exit_code_is_the_answer(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    for command, code in (("status", Exit.NOT_RUNNING), ("checkpoints", Exit.FINE)):
        done = in_a_shell(f"{TIDEGATE} {command} --root {root} >&-")
        assert (done.returncode, done.stderr) == (code, "")
    assert in_a_shell(f"{TIDEGATE} status --root {tmp_path / 'none'} >&- 2>&-").returncode == Exit.UNUSABLE_ROOT


def test_what_the_terminal_cannot_show_is_replaced() -> None:
    done = in_a_shell(f"PYTHONIOENCODING=ascii {TIDEGATE} simulate --seed 1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout


def in_a_shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)


def test_a_command_that_only_looks_brings_in_neither_spark_nor_delta(tmp_path: Path) -> None:
    """What keeps them quick: importing these takes longer than all that such a command does. What the next run does
    depends on its tables, so that is asked of them, unless a run is alive."""
    root = make_root(tmp_path, checkpoints=1)
    foretelling = [[command, "--root", str(root)] for command in ("checkpoints", "verify", "status")]
    for arguments in (
        ["checkpoints", "1", "--root", str(root)],
        ["checkpoint", "--root", str(root)],
        ["graph", "--root", str(root)],
        ["--help"],
    ):
        assert heavy_modules(arguments) == [], arguments
    for arguments in foretelling:
        assert heavy_modules(arguments) == ["deltalake"], arguments
    with RootLock(RootPaths(root).lock):
        for arguments in foretelling:
            assert heavy_modules(arguments) == [], arguments


def heavy_modules(arguments: list[str]) -> list[str]:
    program = f"""
import json, sys
sys.argv = ["tidegate", *{arguments!r}]
from tidegate.cli.app import main
try:
    main()
except SystemExit:
    pass
heavy = ("pyspark", "py4j", "deltalake", "pyarrow", "pandas", "numpy")
print()
print(json.dumps([name for name in heavy if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_public_names_are_there_though_they_are_loaded_late() -> None:
    program = """
import sys
import tidegate
assert not {"deltalake", "pyspark"} & sys.modules.keys()
assert {"AlignmentConfig", "CheckpointConfig", "DeltaTable", "Pipeline", "__version__"} <= set(dir(tidegate))
from tidegate import Pipeline
assert tidegate.Pipeline is Pipeline
assert tidegate.DeltaTable.__name__ == "DeltaTable"
assert not hasattr(tidegate, "Nonsense")
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("spark.sql.streaming.pollingDelay=1s", "spark.sql.streaming.pollingDelay is set by Tidegate"),
        ("driver.memory=4g", "'driver.memory' is no setting of Spark's"),
        ("secret-without-a-key", "write KEY=VALUE"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused_before_anything_is_made(
    tmp_path: Path, setting: str, message: str
) -> None:
    pipeline = tmp_path / "orders.py"
    pipeline.write_text("import tidegate as tg\npipeline = tg.Pipeline('orders')\n")
    done = tidegate("run", str(pipeline), "--root", str(tmp_path / "root"), "--conf", setting)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "secret" not in done.stderr
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("command", ["status", "checkpoint", "checkpoints", "verify", "run"])
def test_a_root_that_nobody_knows_how_to_reach_is_refused_by_every_command_and_nothing_is_made(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "orders.py").write_text("import tidegate as tg\npipeline = tg.Pipeline('orders')\n", encoding="utf-8")
    file = ["orders.py"] if command == "run" else []
    done = tidegate(command, *file, "--root", "hdfs://host/orders", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: hdfs://host/orders is not a local folder; write a path such as")
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["orders.py"]


def test_a_root_may_be_given_as_a_file_url(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    for command in ("checkpoints", "verify"):
        assert "ckpt-000001" in tidegate(command, "--root", root.as_uri()).stdout


def test_a_root_that_is_a_file_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(PIPELINE, encoding="utf-8")
    (tmp_path / "root").write_text("kept", encoding="utf-8")
    done = tidegate("run", "orders.py", "--root", "root", cwd=tmp_path)
    assert done.returncode == Exit.UNUSABLE_ROOT
    assert "cannot be a folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_interval_that_cannot_be_is_told_by_the_name_of_its_option(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(PIPELINE, encoding="utf-8")
    done = tidegate("run", "orders.py", "--root", "root", "--checkpoint-interval", "0s", cwd=tmp_path)
    assert done.returncode == Exit.WRONG_USAGE
    assert done.stderr == "error: checkpoint_interval is '0s'; it must be at least 1ms, such as 10s\n"
