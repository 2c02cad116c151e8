"""A PostgreSQL server of the tests' own: a private data folder, a unix socket, no network."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

_SECONDS = 30
_CREDENTIALS = "dbname=postgres user=tester password=very-secret"


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
        return f"host={self.folder} {_CREDENTIALS}"

    @property
    def socket(self) -> str:
        return str(self.folder / ".s.PGSQL.5432")

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
        """SIGINT shuts down; SIGQUIT is a crash: what is not on disk by then never will be."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(_SECONDS)
            self._process = None

    def crash(self) -> None:
        self.stop(signal.SIGQUIT)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Link:
    """A link to a server that can be dropped: both sides stay connected, and nothing comes through any more."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peers: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_dropped = self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def dsn(self) -> str:
        host, port = self._listener.getsockname()
        return f"host={host} port={port} sslmode=disable gssencmode=disable {_CREDENTIALS}"

    def drop(self) -> None:
        self._is_dropped = True

    def restore(self) -> None:
        """For new connections; what was in the old ones is lost."""
        for each in tuple(self._peers):
            self._forget(each)
        self._is_dropped = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._thread.join(_SECONDS)
        for each in (*self._peers, self._listener):
            each.close()

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(0.02):
                with suppress(OSError):
                    self._forward(key.fileobj)

    def _forward(self, source: object) -> None:
        assert isinstance(source, socket.socket)
        if source is self._listener:
            client, server = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
            server.connect(self._server.socket)
            self._peers |= {client: server, server: client}
            for each in (client, server):
                self._selector.register(each, selectors.EVENT_READ)
        elif self._is_dropped:
            self._selector.unregister(source)
        elif data := source.recv(1 << 16):
            self._peers[source].sendall(data)
        else:
            self._forget(self._peers[source])
            self._forget(source)

    def _forget(self, each: socket.socket) -> None:
        with suppress(KeyError):
            self._selector.unregister(each)
        self._peers.pop(each, None)
        each.close()
