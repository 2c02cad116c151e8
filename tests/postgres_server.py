"""A PostgreSQL server of the tests' own: a private data folder, a unix socket, no network."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

_SECONDS = 30


def find_programs() -> Path | None:
    """The folder of `initdb` and `postgres`; Debian keeps it out of the path."""
    places = [Path(found).resolve().parent for found in (shutil.which("initdb"),) if found]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "postgres").exists() and (place / "initdb").exists()), None)


class PostgresServer:
    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-pg-"))
        # The server refuses to run as root: Debian's package has a user for it.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self.folder, self._user, self._user)
        self.folder.chmod(0o755)
        self._process: subprocess.Popen[bytes] | None = None
        initdb = [str(programs / "initdb"), "-D", str(self.folder / "data"), "-U", "tester", "--auth=trust"]
        subprocess.run([*initdb, "--no-sync", "-E", "UTF8"], check=True, capture_output=True, user=self._user, cwd="/")
        self.start()

    @property
    def dsn(self) -> str:
        return f"host={self.folder} dbname=postgres user=tester password=very-secret"

    def start(self) -> None:
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder)]
        command += ["-c", "listen_addresses=", "-c", "fsync=off"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, user=self._user, cwd="/")
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                psycopg.connect(self.dsn).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT shuts down; SIGQUIT is a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(_SECONDS)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
