"""A Spark cluster of the tests' own: a standalone master and workers on loopback, from the jars that come with PySpark.

Where the tests are run by root the workers, and so all executors, are another user, who can read nothing that is the
driver's alone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final

import pyspark

ON_CLUSTER: Final = "TIDEGATE_TEST_CLUSTER"
"""The settings of Spark by which tests are to run on a cluster, as JSON."""
IN_BUCKET: Final = "TIDEGATE_TEST_BUCKET"
"""Where their roots are to be then."""
_SECONDS: Final = 60
_SMALL: Final = ("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_NOBODY: Final = 65534
_EXECUTOR: Final = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_SOURCES: Final = Path(__file__).parents[1] / "src"
_OWN: Final = ("SPARK", "PYSPARK", "AWS", "PY", "LOG4J", "JDK_JAVA_OPTIONS")
"""What of the environment is of the process of the tests: where its Spark logs to, how its JVM is started."""
_HOME: Final = Path(pyspark.__file__).parent


def user_of_executors() -> int | None:
    """Another user than that of the tests, where these may choose one, who can read Spark and these sources."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return None
    looked = 'ls "$0" "$1" && test -r "$0"'
    look = ["sh", "-c", looked, str(_HOME / "jars"), str(_SOURCES)]
    return _NOBODY if subprocess.run(_as(_NOBODY, look), capture_output=True, check=False).returncode == 0 else None


def _as(user: int | None, command: list[str]) -> list[str]:
    if user is None:
        return command
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]


class SparkCluster:
    """`workers` each have two cores. `user` is whose processes the workers are; None: the tests' own."""

    def __init__(self, workers: int = 2, user: int | None = None) -> None:
        self.user = user
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-cluster-"))
        self.folder.chmod(0o755)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        try:
            said = self._started("master", ["deploy.master.Master", "--host", "127.0.0.1", "--port", "0"])
            self.master = _found(r"Starting Spark master at (spark://\S+)", said)
            for number in range(workers):
                self.start_worker(number)
        except BaseException:
            self.remove()
            raise

    # -- what a driver has to know ----------------------------------------------------------------

    @property
    def settings(self) -> dict[str, str]:
        """For small executors, one a worker."""
        return {
            "spark.executor.memory": "512m",
            "spark.executor.cores": "2",
            "spark.cores.max": "4",
            "spark.sql.shuffle.partitions": "3",
            "spark.driver.host": "127.0.0.1",
            "spark.executor.extraJavaOptions": "-XX:+UseSerialGC",
            "spark.executorEnv.PYTHONPATH": os.pathsep.join([str(_SOURCES), sysconfig.get_path("purelib")]),
            # Those that are lost are no longer waited for.
            "spark.network.timeout": "20s",
            "spark.network.timeoutInterval": "5s",
            "spark.executor.heartbeatInterval": "2s",
        }

    @property
    def options(self) -> list[str]:
        """The same, of `tidegate run`."""
        return ["--master", self.master, *(f"--conf={key}={value}" for key, value in self.settings.items())]

    @cached_property
    def python(self) -> str:
        """A Python that executors may start, of the version that the tests have."""
        for each in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
            # By a shell: setpriv itself may start more than the user may.
            started = _as(self.user, ["sh", "-c", 'exec "$0" -c ""', each])
            if subprocess.run(started, capture_output=True, check=False).returncode == 0:
                return each
        raise AssertionError(f"the user {self.user} can start no Python 3.{sys.version_info.minor} here")

    # -- processes --------------------------------------------------------------------------------

    def start_worker(self, number: int) -> None:
        folder = self.folder / f"worker-{number}"
        folder.mkdir(exist_ok=True)
        if self.user is not None:
            os.chown(folder, self.user, self.user)
        options = ["--host", "127.0.0.1", "--cores", "2", "--memory", "1g", "--work-dir", str(folder), self.master]
        said = self._started(f"worker-{number}", ["deploy.worker.Worker", *options])
        _found("Successfully registered with master", said)
        self._workers[number] = self._processes[-1]

    def _started(self, name: str, arguments: list[str]) -> Iterable[str]:
        """What it says, until it has said enough."""
        home = os.environ.get("JAVA_HOME")
        command = [f"{home}/bin/java" if home else "java", *_SMALL, "-cp", str(_HOME / "jars" / "*")]
        command += [f"org.apache.spark.{arguments[0]}", "--webui-port", "0", *arguments[1:]]
        variables = {
            **{key: value for key, value in os.environ.items() if not key.startswith(_OWN)},
            "SPARK_HOME": str(_HOME),
            "SPARK_SCALA_VERSION": "2.13",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self.folder / name / "scratch"),
        }
        messages = self.folder / f"{name}.log"
        with messages.open("wb") as said:
            process = subprocess.Popen(
                _as(self.user, command) if name != "master" else command,
                stdout=said,
                stderr=said,
                cwd=self.folder,
                env=variables,
            )
        self._processes.append(process)
        return _following(messages, process)

    def executors(self) -> list[int]:
        """The processes of all executors that are alive."""
        return [pid for pid, command in _processes() if _EXECUTOR in command and str(self.folder) in command]

    def kill_executors(self, most: int = 1) -> int:
        """Without a word. Returns how many there were."""
        killed = self.executors()[:most]
        for pid in killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(killed)

    def kill_worker(self, number: int) -> None:
        """As a machine that is lost: with its executors."""
        folder = str(self.folder / f"worker-{number}")
        self._workers[number].kill()
        self._workers.pop(number).wait(_SECONDS)
        for pid, command in _processes():
            if folder in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        for each in self._processes:
            each.kill()
            each.wait(_SECONDS)
        for pid, command in _processes():
            if str(self.folder) in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def _processes() -> list[tuple[int, str]]:
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with suppress(OSError):
                where = (each / "cwd").readlink()
                command = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(each.name), f"{command} in {where}"))
    return found


def _following(messages: Path, process: subprocess.Popen[bytes]) -> Iterable[str]:
    deadline = time.monotonic() + _SECONDS
    while True:
        said = messages.read_text(encoding="utf-8", errors="replace")
        yield said
        assert process.poll() is None, said[-3000:]
        assert time.monotonic() < deadline, said[-3000:]
        time.sleep(0.1)


def _found(pattern: str, told: Iterable[str]) -> str:
    for said in told:
        if (found := re.search(pattern, said)) is not None:
            return found[found.lastindex or 0]
    raise AssertionError
