"""Environments of peers that need their own: made on the first run, in `.venv/peers`, which `./dev` may delete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[2] / ".venv" / "peers"
_INSTALL_S: Final = 900.0
_ASK_S: Final = 60.0


class CannotRun(Exception):
    """Why a peer is left out: it cannot be installed here, or cannot do this work."""


def say(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)


def python_of(name: str, requirements: Sequence[str], versions: Sequence[str]) -> Path:
    """The interpreter of a peer's environment, made now if it was not before. `versions` of Python, best first."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    stamp = folder / ".made-of"  # written last: the environment is whole
    wanted = "\n".join(requirements)
    if stamp.exists() and stamp.read_text("utf-8") == wanted and python.exists():
        return python
    interpreters = [found for version in versions if (found := _find(version)) is not None]
    if not interpreters:
        raise CannotRun(f"it needs Python {' or '.join(versions)}, and none of these was found")
    reason = ""
    for interpreter in interpreters:
        say(f"installing {name} ({' '.join(requirements)}), once…")
        shutil.rmtree(folder, ignore_errors=True)
        reason = _run([interpreter, "-m", "venv", str(folder)]) or _run(
            [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *requirements]
        )
        if not reason:
            stamp.write_text(wanted, "utf-8")
            return python
    shutil.rmtree(folder, ignore_errors=True)
    raise CannotRun(f"it could not be installed: {reason}")


def jar_of(name: str, artifact: str) -> Path:
    """A jar of Maven's, by group:artifact:version, without what it depends on."""
    _, identifier, version = artifact.split(":")
    jar = FOLDER / f"{name}-jars" / f"{identifier}-{version}.jar"
    if jar.exists():
        return jar
    maven = shutil.which("mvn")
    if maven is None:
        raise CannotRun(f"Maven fetches {artifact}: install it (on Debian and Ubuntu: apt-get install maven)")
    say(f"fetching {artifact}, once…")
    jar.parent.mkdir(parents=True, exist_ok=True)
    command = [maven, "-B", "-q", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={jar.parent}"]
    reason = _run(command)
    if reason or not jar.exists():
        raise CannotRun(f"Maven could not fetch {artifact}: {reason}")
    return jar


def need_java() -> None:
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise CannotRun("it needs Java, and none was found: ./dev bench finds or installs one")


def version_in(python: Path, package: str) -> str:
    command = [str(python), "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_S).stdout.strip()


def _find(version: str) -> str | None:
    """An interpreter of this version that can make environments."""
    for candidate in (sys.executable, f"python{version}"):
        code = "import ensurepip, sys, venv; print('.'.join(map(str, sys.version_info[:2])))"
        try:
            asked = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False, timeout=_ASK_S)
        except OSError:
            continue
        if asked.returncode == 0 and asked.stdout.strip() == version:
            return candidate
    return None


def _run(command: Sequence[str]) -> str:
    """The reason why it failed, or nothing."""
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_INSTALL_S,
            env={**os.environ, "PIP_USER": "0"},
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ran.returncode == 0:
        return ""
    said = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    return next((line for line in said if "ERROR" in line), (said or ["it said nothing"])[-1])[:300]
