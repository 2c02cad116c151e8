"""An S3 server of the tests' own, on loopback: versitygw over a private folder, or moto in memory.

`./dev test` builds versitygw once, where there is Go, into the user's cache; where there is none, it installs moto
there (find_s3 in ./dev says how). Moto is ten times slower, checks no credentials and forgets all when it is stopped:
tests of these are skipped with it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

import obstore
from obstore.store import S3Store

VERSION: Final = "1.8.0"
MOTO_VERSION: Final = "5.2.5"
ACCESS_KEY: Final = "tester-of-tidegate"
SECRET_KEY: Final = "very-secret-key-of-the-tests"
NONE_HERE: Final = "there is no S3 server here (./dev test builds versitygw where there is Go, else installs moto)"
_SECONDS: Final = 30


def find_program() -> Path | None:
    """Where `./dev` puts it; `TIDEGATE_S3_SERVER` names another one, by a file called as one of these is."""
    named = os.environ.get("TIDEGATE_S3_SERVER")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate"
    built = [cache / f"versitygw-{VERSION}", cache / f"moto-{MOTO_VERSION}" / "bin" / "moto_server"]
    programs = [Path(named)] if named else built
    return next((each for each in programs if os.access(each, os.X_OK)), None)


class S3Server:
    def __init__(self, program: Path) -> None:
        self.program = program
        self.is_moto = program.name == "moto_server"
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-s3-"))
        for folder in ("buckets", "metadata"):
            (self.folder / folder).mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def options(self, endpoint: str | None = None) -> dict[str, str]:
        """What a bucket of it is opened with. `endpoint`: of a proxy in front of it."""
        return {
            "endpoint": endpoint or self.endpoint,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "region": "us-east-1",
        }

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The same, for processes."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> str:
        """Its URL. It is empty, whatever a test before had in one of that name."""
        if self.is_moto:
            self._make_bucket_of_moto(name)
            return f"s3://{name}"
        for folder in ("buckets", "metadata"):
            shutil.rmtree(self.folder / folder / name, ignore_errors=True)
        (self.folder / "buckets" / name).mkdir()  # to versitygw each folder is a bucket
        return f"s3://{name}"

    def _make_bucket_of_moto(self, name: str) -> None:
        making = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT", headers={"Content-Length": "0"})
        with urllib.request.urlopen(making, timeout=_SECONDS):
            pass  # one that is there already stays, with all that is in it
        bucket = S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        for found in obstore.list(bucket):
            bucket.delete([each["path"] for each in found])

    def _command(self) -> list[str]:
        if self.is_moto:
            return [str(self.program), "--host", "127.0.0.1", "--port", str(self.port)]
        command = [str(self.program), "--port", f"127.0.0.1:{self.port}", "--keep-alive", "--quiet"]
        # Metadata lies beside the files: not every file system that holds /tmp has room for attributes.
        return [*command, "posix", "--sidecar", str(self.folder / "metadata"), str(self.folder / "buckets")]

    def start(self) -> None:
        secrets = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
        with (self.folder / "messages").open("ab") as messages:
            self._process = subprocess.Popen(
                self._command(), stdout=messages, stderr=messages, cwd=self.folder, env=os.environ | secrets
            )
        deadline = time.monotonic() + _SECONDS
        while not self._is_serving():
            said = (self.folder / "messages").read_text(encoding="utf-8", errors="replace")
            assert self._process.poll() is None, said[-3000:]
            assert time.monotonic() < deadline, said[-3000:]
            time.sleep(0.05)

    def _is_serving(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as asked:
                asked.sendall(b"GET / HTTP/1.1\r\nHost: tests\r\nConnection: close\r\n\r\n")
                return asked.recv(8) == b"HTTP/1.1"
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
