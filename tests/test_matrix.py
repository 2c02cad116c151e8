"""`./dev matrix`: every version of Spark that is supported is in it, and none of them passes by running nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.played.recording import read_recording
from tidegate.errors import InvalidConfig
from tidegate.spark.session import StageSessions
from tidegate.spark.versions import NEWEST, OLDEST, check_spark, requirement

ROOT = Path(__file__).parents[1]
VERSIONS = [f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]


def pinned() -> dict[str, str]:
    """Of each version of Spark, the release that `./dev` installs."""
    files = [ROOT / "constraints.txt", *ROOT.glob("constraints-spark-*.txt")]
    releases = [re.findall(r"^pyspark==(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE) for path in files]
    assert all(len(each) == 1 for each in releases)
    return {release.rpartition(".")[0]: release for (release,) in releases}


# -- what is supported ---------------------------------------------------------------------------------


def test_pip_is_asked_for_the_versions_that_a_run_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert requirement() in project["dependencies"]


def test_every_version_is_pinned_named_and_recorded() -> None:
    assert sorted(pinned()) == VERSIONS
    recorded = {read_recording(path).version for path in (ROOT / "tests" / "played").glob("spark-*.txt")}
    assert recorded == set(pinned().values())
    for document in ("README.md", "docs/limits.md"):
        assert f"Spark {VERSIONS[0]} to {VERSIONS[-1]}" in (ROOT / document).read_text(encoding="utf-8"), document


@pytest.mark.parametrize("version", [*VERSIONS, "4.1.0", "4.2.0", "4.3.0-vendor-1", "4.3.1.dev2"])
def test_a_spark_that_is_supported(version: str) -> None:
    check_spark(version)


@pytest.mark.parametrize("version", ["3.5.9", "4.0.5", "4.4.0", "4.4.0.dev1", "5.2.0", "5.3", "other"])
def test_a_spark_that_is_not(version: str) -> None:
    said = rf"Spark 4\.\d to 4\.\d, and PySpark here is {re.escape(version)}\. What to do: pip install 'pyspark>="
    with pytest.raises(InvalidConfig, match=said):
        check_spark(version)


def test_a_run_on_a_spark_that_is_not_ends_before_spark_is_started(tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(
        "import tidegate as tg\n"
        "pipeline = tg.Pipeline('rows')\n"
        "@pipeline.source\n"
        "def rows(spark):\n"
        "    return spark.readStream.format('rate').load()\n"
        "@pipeline.sink(tg.DeltaTable('lake/rows'))\n"
        "def table(rows):\n"
        "    return rows\n",
        encoding="utf-8",
    )
    program = (
        "import sys, pyspark\n"
        "pyspark.__version__ = '4.9.0'\n"  # what pip would not have installed
        "from tidegate.__main__ import main\n"
        "sys.argv = ['tidegate', 'run', 'pipeline.py', '--root', 'root']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode not in {0, 1}, done.stderr
    assert "and PySpark here is 4.9.0" in done.stderr
    assert not list(tmp_path.rglob("spark.log"))


def test_a_session_of_a_spark_that_is_not_runs_no_stages() -> None:
    """PySpark may be told to start another Spark than its own."""
    session: Any = SimpleNamespace(version="4.9.0")
    with pytest.raises(InvalidConfig, match=r"and Spark here is 4\.9\.0"):
        StageSessions(session)


# -- what is run ---------------------------------------------------------------------------------------


@pytest.mark.soak  # it takes long; only the matrix needs it
def test_the_tests_of_the_matrix_are_of_every_kind() -> None:
    (expression,) = re.findall(r"^ *set -- pytest .* -m '([^']+)'", (ROOT / "dev").read_text("utf-8"), re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", expression]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    for kind in ("filelog", "gate", "snapshot", "plan", "causes", "shapes", "kills", "kept_state"):
        assert f"tests/spark/test_{kind}.py" in found
    assert "tests/played/test_recorded.py" in found
    assert "test_runs_that_are_killed_at_many_steps" in done.stdout


# Stands for Python, pip and pytest: an environment is a folder, what is installed the constraints that it was given.
PLAYED_PYTHON = r"""#!/usr/bin/env bash
here=$(dirname "$(dirname "$0")")
case "$*" in
    '-m venv '*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/pytest" ;;
    '-m pip install '*hatchling*) ;;
    '-m pip install '*) grep -q 'pyspark==4.2.7' "$here/.dev-constraints" && exit 1
        cp "$here/.dev-constraints" "$here/installed" ;;
    *'import pyspark'*) sed -n 's/^pyspark==//p' "$here/installed" ;;
    *'-m matrix and not soak'*)
        echo "on $(sed -n 's/^pyspark==//p' "$here/installed") with $(sed -n 's/^py4j==//p' "$here/installed")"
        if grep -q 'pyspark==4.2' "$here/installed"; then
            echo '==== 1 failed, 4 passed in 2.00s ====' && exit 1
        fi
        echo '==== 5 passed in 1.00s ====' ;;
    -ISc*) echo 3.11 ;;
esac
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A repository with nothing in it but `./dev`, for which nothing is installed."""
    root = tmp_path / "a repository"
    root.mkdir()
    for name in ("dev", "pyproject.toml", *(path.name for path in ROOT.glob("constraints*.txt"))):
        (root / name).write_bytes((ROOT / name).read_bytes())
    java = tmp_path / "java"
    (java / "bin").mkdir(parents=True)
    (java / "release").write_text('JAVA_VERSION="17.0.1"\n', encoding="utf-8")
    programs = tmp_path / "programs"
    programs.mkdir()
    for path in (java / "bin" / "java", programs / "initdb", programs / "strace", programs / "python", root / "dev"):
        if not path.exists():
            path.write_text(PLAYED_PYTHON, encoding="utf-8")
        path.chmod(0o755)
    return root


def dev(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    programs = root.parent / "programs"
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(root),
        "PYTHON": str(programs / "python"),
        "JAVA_HOME": str(root.parent / "java"),
    }
    return subprocess.run(
        [str(root / "dev"), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_version_that_nobody_has_tried_is_refused_before_anything_is_made(elsewhere: Path) -> None:
    for command in (["matrix", "4.2", "9.9"], ["exec", "--spark", "9.9", "true"]):
        done = dev(elsewhere, *command)
        assert done.returncode == 1, done.stdout + done.stderr
        assert f"there is no Spark 9.9 here; ./dev matrix knows {' '.join(VERSIONS)}, and releases" in done.stderr
    assert not list(elsewhere.glob(".venv*"))


def test_each_version_has_an_environment_of_its_own_and_a_line_in_the_table(elsewhere: Path) -> None:
    done = dev(elsewhere, "matrix")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    said, (head, *table) = lines[: -len(VERSIONS) - 1], lines[-len(VERSIONS) - 1 :]
    assert head.split() == ["Spark", "result", "tests"]
    assert [line.split(maxsplit=2) for line in table] == [
        [pinned()[each], "FAILED", "1 failed, 4 passed in 2.00s"]
        if each == "4.2"
        else [pinned()[each], "passed", "5 passed in 1.00s"]
        for each in VERSIONS
    ]
    (py4j,) = re.findall(r"^py4j==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert [line for line in said if line.startswith("on ")] == [
        f"on {pinned()[each]} with {py4j}" for each in VERSIONS
    ]
    assert f"on Spark {' '.join(VERSIONS)}: formats, recorded folders" in done.stderr
    assert done.stderr.count("making the environment") == len(VERSIONS)
    assert {path.name for path in elsewhere.glob(".venv*")} == {".venv", *(f".venv-{each}" for each in VERSIONS[:-1])}
    again = dev(elsewhere, "matrix", "4.3")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "making" not in again.stderr
    assert pinned()["4.2"] not in again.stdout


def test_a_release_may_be_named_and_one_that_cannot_be_installed_fails_alone(elsewhere: Path) -> None:
    done = dev(elsewhere, "matrix", "4.2.7", "4.3.9", "-k", "some")
    assert done.returncode == 1, done.stdout + done.stderr
    *_, old, new = done.stdout.splitlines()
    assert old.split(maxsplit=2) == ["4.2.7", "FAILED", "its environment could not be made"]
    assert new.split(maxsplit=2) == ["4.3.9", "passed", "5 passed in 1.00s"]
    assert "-k some" in done.stderr


def test_an_environment_with_another_spark_than_was_asked_for_is_not_taken_for_it(elsewhere: Path) -> None:
    assert dev(elsewhere, "matrix", "4.3").returncode == 0
    installed = elsewhere / ".venv" / "installed"
    installed.write_text(installed.read_text(encoding="utf-8").replace("pyspark==4.3", "pyspark==4.30"))
    done = dev(elsewhere, "matrix", "4.3")
    assert done.returncode == 1
    assert "the environment of Spark 4.3 has Spark 4.30" in done.stderr
