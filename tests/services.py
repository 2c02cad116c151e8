"""A Kafka broker and a PostgreSQL server for trying things out, with their command line tools.

`python -m tests.services` starts both and says how they are reached; Ctrl-C stops them and removes what was in them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kafka_broker import BROKER, TOOLS, KafkaBroker, connector_jars, jars
from tests.postgres_server import PostgresServer, find_programs

_TOOLS = {"kafka-topics.sh": "TopicCommand", "kafka-console-producer.sh": "ConsoleProducer"}


class Services:
    def __init__(self) -> None:
        programs = find_programs()
        assert programs, "there is no PostgreSQL server here (on Debian and Ubuntu: apt-get install postgresql)"
        self._tools = Path(tempfile.mkdtemp(prefix="tidegate-tools-"))
        self._broker = KafkaBroker()
        self._server = PostgresServer(programs)
        classes = os.pathsep.join(map(str, [*jars(BROKER, transitive=True), *jars(TOOLS, transitive=False)]))
        home = os.environ.get("JAVA_HOME")
        java = f"{home}/bin/java" if home else "java"
        for name, tool in _TOOLS.items():
            script = f'#!/bin/sh\nexec {java} -cp {shlex.quote(classes)} org.apache.kafka.tools.{tool} "$@"\n'
            (self._tools / name).write_text(script, encoding="utf-8")
            (self._tools / name).chmod(0o755)
        self.environment = {
            "KAFKA_SERVERS": self._broker.servers,
            "CONNECTOR": f"spark.jars={connector_jars()}",
            "PGHOST": str(self._server.folder),
            "PGDATABASE": "postgres",
            "PGUSER": "tester",
            "PATH": os.pathsep.join([str(self._tools), str(programs), os.environ["PATH"]]),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._broker.remove()
        self._server.remove()
        shutil.rmtree(self._tools, ignore_errors=True)


def main() -> None:
    print("starting a Kafka broker and a PostgreSQL server…", file=sys.stderr)
    with Services() as services:
        for name, value in services.environment.items():
            print(f"export {name}={shlex.quote(value)}", flush=True)
        print("they run until Ctrl-C", file=sys.stderr)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
