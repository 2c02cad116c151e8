"""A ZooKeeper server of the tests' own, from the jars that come with PySpark: a private data folder, loopback only."""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyspark

_SECONDS: Final = 30
_TICK_MS: Final = 400
"""A session's timeout is at least two of them."""
_SMALL: Final = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.forceSync=no")


class ZooKeeperServer:
    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-zookeeper-"))
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server((address, 0)) as free:
            self.port = int(free.getsockname()[1])
        settings = {
            "clientPort": self.port,
            "clientPortAddress": address,
            "dataDir": self.folder / "data",
            "tickTime": _TICK_MS,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
        }
        lines = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self.folder / "zoo.cfg").write_text(lines, encoding="utf-8")
        self.start()

    @property
    def servers(self) -> str:
        return f"{self.address}:{self.port}"

    def start(self) -> None:
        home = os.environ.get("JAVA_HOME")
        classes = str(Path(pyspark.__file__).parent / "jars" / "*")
        command = [f"{home}/bin/java" if home else "java", *_SMALL, "-cp", classes]
        command += ["org.apache.zookeeper.server.ZooKeeperServerMain", str(self.folder / "zoo.cfg")]
        with (self.folder / "messages").open("ab") as messages:
            self._process = subprocess.Popen(command, stdout=messages, stderr=messages, cwd=self.folder)
        deadline = time.monotonic() + _SECONDS
        while True:
            if self._is_serving():
                return
            said = (self.folder / "messages").read_text(encoding="utf-8", errors="replace")
            assert self._process.poll() is None, said[-3000:]
            assert time.monotonic() < deadline, said[-3000:]
            time.sleep(0.05)

    def _is_serving(self) -> bool:
        """It answers calls a while before it takes sessions."""
        try:
            with socket.create_connection((self.address, self.port), 1) as asked:
                asked.sendall(b"srvr")
                return b"Mode:" in b"".join(iter(lambda: asked.recv(4096), b""))
        except OSError:
            return False

    def stop(self) -> None:
        """As a crash: nothing is said to anybody."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SECONDS)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Link:
    """A link to a server that can be dropped: both sides stay connected, and nothing comes through any more."""

    def __init__(self, server: ZooKeeperServer) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.servers = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_dropped = self._is_restored = self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def drop(self) -> None:
        self._is_dropped = True

    def restore(self) -> None:
        """For new connections; what was in the old ones is lost."""
        self._is_restored = True

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(_SECONDS)
        for each in (*self._peers, self._listener):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(0.02):
                with suppress(OSError):
                    self._forward(key.fileobj)
            if self._is_restored:
                self._is_dropped = self._is_restored = False
                for each in tuple(self._peers):
                    self._forget(each)

    def _forward(self, source: object) -> None:
        assert isinstance(source, socket.socket)
        if source is self._listener:
            client = self._listener.accept()[0]
            try:
                server = socket.create_connection(("127.0.0.1", self._server.port), 1)
            except OSError:
                client.close()
                return
            self._peers |= {client: server, server: client}
            for each in (client, server):
                self._selector.register(each, selectors.EVENT_READ)
        elif source not in self._peers:
            return  # its other end was closed in the same moment
        elif self._is_dropped:
            self._selector.unregister(source)
        elif data := self._received(source):
            self._peers[source].sendall(data)
        else:
            self._forget(self._peers[source])
            self._forget(source)

    @staticmethod
    def _received(source: socket.socket) -> bytes:
        try:
            return source.recv(1 << 16)
        except OSError:
            return b""

    def _forget(self, each: socket.socket) -> None:
        with suppress(KeyError):
            self._selector.unregister(each)
        self._peers.pop(each, None)
        each.close()
