"""`tidegate dashboard`, as a user runs it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.harness import TIDEGATE, make_root, tidegate
from tests.cli.strict import answered
from tidegate.cli.answers import DashboardAnswer

GUIDE = Path(__file__).parents[2] / "docs" / "dashboard.md"


@contextmanager
def running(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    command = [TIDEGATE, "dashboard", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "state").mkdir()
    make_root(folder / "played", checkpoints=2).rename(folder / "state" / "orders")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", re.findall(r"^tidegate dashboard .*$", GUIDE.read_text("utf-8"), re.MULTILINE))
def test_a_command_of_the_guide_serves_until_it_is_stopped(workplace: Path, command: str) -> None:
    with running(*shlex.split(command)[2:], "--port", "0", cwd=workplace) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.fullmatch(r"the dashboard is at (http://127\.0\.0\.1:\d+/)\n", said)
        assert found is not None, said
        with urllib.request.urlopen(f"{found[1]}api/v1/pipelines", timeout=30) as answer:
            assert json.load(answer)["pipelines"][0]["pipeline"] == "flat"
        if "--allow-actions" in command:
            assert process.stdout.readline() == "its token is in dashboard.token\n"
            assert stat.S_IMODE((workplace / "dashboard.token").stat().st_mode) == 0o600
        process.send_signal(signal.SIGTERM if "--allow-actions" in command else signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.slow
def test_it_tells_scripts_where_it_is_and_brings_no_spark(workplace: Path) -> None:
    with running("--root", "state/orders", "--port", "0", "--json", cwd=workplace) as process:
        assert process.stdout is not None
        answer = answered(process.stdout.readline())
        assert isinstance(answer, DashboardAnswer)
        assert list(answer.roots.values()) == ["state/orders"]
        assert (answer.actions_allowed, answer.token) == (False, None)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    program = "import sys, tidegate.dashboard.server; print({'pyspark', 'deltalake', 'pandas'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_for_another_name_there_is_a_token_which_everything_needs(workplace: Path) -> None:
    arguments = (
        "--root",
        "state/orders",
        "--port",
        "0",
        "--allow-host",
        "board.example",
        "--token-file",
        "proxied.token",
    )
    with running(*arguments, "--json", cwd=workplace) as process:
        assert process.stdout is not None
        answer = answered(process.stdout.readline())
        assert isinstance(answer, DashboardAnswer)
        assert (answer.actions_allowed, answer.token) == (False, "proxied.token")
        secret = (workplace / "proxied.token").read_text().strip()
        asked = urllib.request.Request(f"{answer.url}api/v1/pipelines", headers={"Host": "board.example"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(asked, timeout=30)
        asked.add_header("Authorization", f"Bearer {secret}")
        with urllib.request.urlopen(asked, timeout=30) as found:
            assert json.load(found)["pipelines"][0]["pipeline"] == "flat"


def test_a_port_that_is_taken_is_refused_in_one_line(workplace: Path) -> None:
    with running("--root", "state/orders", "--port", "0", "--json", cwd=workplace) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["url"].rstrip("/").rpartition(":")[2]
        done = tidegate("dashboard", "--root", "state/orders", "--port", port, cwd=workplace)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: the dashboard cannot listen on 127.0.0.1:{port}: ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--token-file", "token"), "--token-file has no effect"),
        (("--host", "no-such-host.invalid", "--token-file", "token"), "cannot listen on"),
        (("--allow-actions", "--token-file", "state"), "is a directory"),
    ],
)
def test_what_cannot_be_is_wrong_usage(workplace: Path, arguments: tuple[str, ...], said: str) -> None:
    done = tidegate("dashboard", "--root", "state/orders", *arguments, cwd=workplace)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_without_its_extra_it_says_what_to_install(workplace: Path) -> None:
    program = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv = ['tidegate', 'dashboard', '--root', 'state/orders']; "
        "from tidegate.cli.app import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=workplace, check=False
    )
    assert done.returncode == 2
    assert "pip install 'tidegate[dashboard]'" in done.stderr
