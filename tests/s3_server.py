"""An S3 server of the tests' own: versitygw on loopback, over a private folder.

`./dev test` builds it once, where there is Go (find_s3 there), into the user's cache. Where there is none the tests are
skipped: moto's server would do, but brings some fifty packages and takes ten times as long.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

VERSION: Final = "1.8.0"
ACCESS_KEY: Final = "tester-of-tidegate"
SECRET_KEY: Final = "very-secret-key-of-the-tests"
_SECONDS: Final = 30


def find_program() -> Path | None:
    """Where `./dev` puts it; `TIDEGATE_S3_SERVER` names another one."""
    named = os.environ.get("TIDEGATE_S3_SERVER")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = Path(named) if named else cache / "tidegate" / f"versitygw-{VERSION}"
    return program if os.access(program, os.X_OK) else None


class S3Server:
    def __init__(self, program: Path) -> None:
        self.program = program
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
        """Its URL. To this server each folder is one. It is empty, whatever a test before had in one of that name."""
        for folder in ("buckets", "metadata"):
            shutil.rmtree(self.folder / folder / name, ignore_errors=True)
        (self.folder / "buckets" / name).mkdir()
        return f"s3://{name}"

    def start(self) -> None:
        command = [str(self.program), "--port", f"127.0.0.1:{self.port}", "--keep-alive", "--quiet"]
        # Metadata lies beside the files: not every file system that holds /tmp has room for attributes.
        command += ["posix", "--sidecar", str(self.folder / "metadata"), str(self.folder / "buckets")]
        secrets = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
        with (self.folder / "messages").open("ab") as messages:
            self._process = subprocess.Popen(
                command, stdout=messages, stderr=messages, cwd=self.folder, env=os.environ | secrets
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
