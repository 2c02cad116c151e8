"""A Kafka broker of the tests' own, on loopback, and Spark's connector: `./dev kafka` runs what needs them.

Their jars come from Maven, once per environment, by the names of their artifacts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

_SECONDS = 60
_FETCH_SECONDS = 300
_SMALL = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]

BROKER = ("org.apache.kafka:kafka_2.13:4.2.0",)
TOOLS = ("org.apache.kafka:kafka-tools:4.2.0",)  # those of its command line; with what the broker needs it is whole
# The newest that can be had, with the Kafka client that it was made for; of what Spark has itself it needs nothing.
CONNECTOR = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.12.1",
)


def jars(artifacts: Iterable[str], *, transitive: bool) -> list[Path]:
    """The jars of these artifacts, and of what they need, out of the environment's cache or with Maven."""
    pom = _pom(artifacts, transitive=transitive)
    folder = Path(sys.prefix) / ".dev-jars" / hashlib.sha256(pom.encode()).hexdigest()[:12]
    if not folder.exists():
        maven = shutil.which("mvn")
        assert maven, "Maven fetches the jars of Kafka: install it (on Debian and Ubuntu: apt-get install maven)"
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=folder.name, dir=folder.parent) as unfinished:
            Path(unfinished, "pom.xml").write_text(pom, encoding="utf-8")
            command = [maven, "-B", "-q", "dependency:copy-dependencies", "-DincludeScope=runtime"]
            # Not through the user's own cache: of what is not fetched whole there, Ivy thinks that it is.
            command += [f"-Dmaven.repo.local={unfinished}/cache", f"-DoutputDirectory={unfinished}/jars"]
            done = subprocess.run(
                command, cwd=unfinished, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False
            )
            assert done.returncode == 0, f"Maven could not fetch {list(artifacts)}:\n{done.stdout[-2000:]}"
            Path(unfinished, "jars").rename(folder)
    return sorted(folder.glob("*.jar"))


def _pom(artifacts: Iterable[str], *, transitive: bool) -> str:
    nothing_else = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
        f"{'' if transitive else nothing_else}</dependency>"
        for group, name, version in (each.split(":") for each in artifacts)
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>jars</groupId>'
        f"<artifactId>jars</artifactId><version>1</version><packaging>pom</packaging><dependencies>{dependencies}"
        "</dependencies></project>"
    )


def connector_jars() -> str:
    """What `spark.jars` of a session has to be."""
    return ",".join(map(str, jars(CONNECTOR, transitive=False)))


def _free_ports(count: int) -> list[int]:
    with closing(socket.socket()) as first, closing(socket.socket()) as second:
        found = []
        for each in (first, second)[:count]:
            each.bind(("127.0.0.1", 0))
            found.append(int(each.getsockname()[1]))
        return found


class KafkaBroker:
    """One broker, which is its own controller. Its clients are those of the connector, in the JVM of `spark`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-kafka-"))
        self._classes = os.pathsep.join(map(str, jars(BROKER, transitive=True)))
        self._process: subprocess.Popen[bytes] | None = None
        port, controller = _free_ports(2)
        self.servers = f"127.0.0.1:{port}"
        self._settings = self.folder / "server.properties"
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "listeners": f"PLAINTEXT://{self.servers},CONTROLLER://127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
            "log.dirs": str(self.folder / "log"),
            "offsets.topic.replication.factor": "1",
            "auto.create.topics.enable": "false",
        }
        self._settings.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8")
        form = ["kafka.tools.StorageTool", "format", "--standalone", "-t", "dGlkZWdhdGUtdGVzdHMtMQ"]
        command = [*self._java(), *form, "-c", str(self._settings)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        self.start()

    def _java(self) -> list[str]:
        home = os.environ.get("JAVA_HOME")
        return [f"{home}/bin/java" if home else "java", *_SMALL, "-cp", self._classes]

    def start(self) -> None:
        with (self.folder / "messages").open("ab") as messages:
            command = [*self._java(), "kafka.Kafka", str(self._settings)]
            self._process = subprocess.Popen(command, stdout=messages, stderr=messages, cwd=self.folder)
        deadline = time.monotonic() + _SECONDS
        host, port = self.servers.split(":")
        while True:
            try:
                socket.create_connection((host, int(port)), 1).close()
                return
            except OSError:
                said = (self.folder / "messages").read_text(encoding="utf-8", errors="replace")
                assert self._process.poll() is None, said[-3000:]
                assert time.monotonic() < deadline, said[-3000:]
                time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SECONDS)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class KafkaClient:
    """What the tests do to a broker's topics, with the Kafka client in the session's JVM."""

    def __init__(self, servers: str, jvm: Any) -> None:
        self._jvm = jvm
        settings = {"bootstrap.servers": servers, "default.api.timeout.ms": 30_000, "request.timeout.ms": 30_000}
        self._admin = jvm.org.apache.kafka.clients.admin.Admin.create(settings)
        text = "org.apache.kafka.common.serialization.StringSerializer"
        serialised = {"key.serializer": text, "value.serializer": text}
        self._producer = jvm.org.apache.kafka.clients.producer.KafkaProducer({**settings, **serialised})

    def create(self, *topics: str) -> None:
        kind = self._jvm.org.apache.kafka.clients.admin.NewTopic
        self._admin.createTopics([kind(each, 1, 1) for each in topics]).all().get()

    def delete(self, topic: str) -> None:
        self._admin.deleteTopics([topic]).all().get()
        deadline = time.monotonic() + _SECONDS
        while self._admin.listTopics().names().get().contains(topic):
            assert time.monotonic() < deadline, f"{topic} is not gone"
            time.sleep(0.1)

    def delete_before(self, topic: str, offset: int) -> None:
        """As a topic's retention does, in its only partition."""
        jvm = self._jvm
        partition = jvm.org.apache.kafka.common.TopicPartition(topic, 0)
        # Not called by name: Py4J does not find a static method beside one that is not.
        kind = self._admin.getClass().getClassLoader().loadClass("org.apache.kafka.clients.admin.RecordsToDelete")
        (made,) = (each for each in kind.getDeclaredConstructors())
        made.setAccessible(True)
        arguments = jvm.java.util.ArrayList([jvm.java.lang.Long.valueOf(offset)]).toArray()
        self._admin.deleteRecords({partition: made.newInstance(arguments)}).all().get()

    def send(self, topic: str, values: Iterable[object]) -> None:
        kind = self._jvm.org.apache.kafka.clients.producer.ProducerRecord
        for value in values:
            self._producer.send(kind(topic, str(value)))
        self._producer.flush()

    def close(self) -> None:
        nothing = self._jvm.java.time.Duration.ZERO
        self._producer.close(nothing)
        self._admin.close(nothing)
