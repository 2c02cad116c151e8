"""`./dev demo --bucket`: the demo on a root in a bucket, of an S3 server that is started for it and stopped then."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.s3_server import NONE_HERE, S3Server, find_program


def main() -> int:
    program = find_program()
    if program is None:
        print(NONE_HERE, file=sys.stderr)
        return 1
    server = S3Server(program)
    try:
        root = f"{server.make_bucket('demo')}/orders"
        command = [sys.executable, "-m", "tidegate", "demo", "--root", root, *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, **server.environment()}, check=False).returncode
    finally:
        server.remove()


if __name__ == "__main__":
    sys.exit(main())
