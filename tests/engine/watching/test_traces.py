"""Traces as a collector gets them, over OTLP, and who asks for them."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.engine.watching.collecting import collecting, values_of
from tests.engine.watching.told import AT, AT_S, ended
from tidegate.engine.events import Ended, Started, StepTaken
from tidegate.engine.status import SinkCommit, StagePart
from tidegate.engine.watching.otlp import Destination, url_of, wanted
from tidegate.engine.watching.traces import Traces
from tidegate.errors import InvalidConfig

AT_NS = int(AT_S) * 1_000_000_000
MS = 1_000_000
DONE = StagePart(progress="done", cut=1, cut_because="aligned", barrier_ms=5, alignment_ms=0, snapshot_ms=20)


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL", "HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


# -- what is sent -----------------------------------------------------------------------------------


def test_a_collector_gets_one_trace_of_a_checkpoint_and_one_of_a_start() -> None:
    commits = {"paid": SinkCommit(begun_ms=50, took_ms=30)}
    with collecting() as collected:
        sending = Traces(Destination(url_of(collected.url), "traces"), "orders", "/state")
        sending.on_event(Started(at=AT, because="first", took_ms=10, steps=(StepTaken("laying_out", 10),)))
        sending.on_event(
            ended(1, duration_ms=40, prepared_ms=30, decided_ms=40, stages={"read": DONE}, commits=commits)
        )
        sending.on_event(ended(2, "aborted", duration_ms=40, why="timeout: read", stages={"read": DONE}))
        sending.on_event(Ended(at=AT, state="finished"))
        sending.close(10)
        assert set(collected.paths) == {"/v1/traces"}
        assert collected.resource["service.name"] == "tidegate"
        assert collected.resource["tidegate.pipeline"] == "orders"
        assert len({each.trace_id for each in collected.spans}) == 3
        (start,) = collected.roots("start")
        assert (start.start_time_unix_nano, start.end_time_unix_nano) == (AT_NS - 10 * MS, AT_NS)
        assert [each.name for each in collected.children(start)] == ["laying out"]
        complete, aborted = sorted(
            collected.roots("checkpoint"), key=lambda each: str(values_of(each.attributes)["tidegate.checkpoint"])
        )
        below = collected.children(complete)
        assert [(each.name, each.start_time_unix_nano, each.end_time_unix_nano) for each in below] == [
            ("stage read", AT_NS, AT_NS + 25 * MS),
            ("quorum", AT_NS + 25 * MS, AT_NS + 30 * MS),
            ("deciding", AT_NS + 30 * MS, AT_NS + 40 * MS),
            ("commit paid", AT_NS + 50 * MS, AT_NS + 80 * MS),
        ]
        phases = collected.children(below[0])
        assert [(each.name, each.start_time_unix_nano - AT_NS) for each in phases] == [
            ("waiting for a barrier", 0),
            ("storing", 5 * MS),
        ]
        assert complete.status.code == Status.STATUS_CODE_UNSET
        assert (aborted.status.code, aborted.status.message) == (Status.STATUS_CODE_ERROR, "timeout: read")
        assert values_of(aborted.attributes)["tidegate.state"] == "aborted"


def test_the_standard_variables_say_where_to_and_by_which_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
        destination = wanted(None)
        assert destination is not None
        sending = Traces(destination, "orders", "/state")
        sending.on_event(ended(1, duration_ms=40))
        sending.close(10)
        assert collected.paths == ["/v1/traces"]
        assert {key.lower(): each for key, each in collected.headers[0].items()}["authorization"] == "Bearer secret"
        assert collected.resource["service.name"] == "shop"


def test_every_span_of_a_thousand_stages_arrives() -> None:
    stages = {f"s{number}": DONE for number in range(1_000)}
    with collecting() as collected:
        sending = Traces(Destination(url_of(collected.url), "traces"), "orders", "/state")
        began = time.monotonic()
        sending.on_event(ended(1, duration_ms=40, stages=stages))
        handed_over_s = time.monotonic() - began
        sending.close(10)
        assert len(collected.spans) == 1 + 3 * 1_000
    assert handed_over_s < 0.05  # the control thread makes none of them itself


def test_a_collector_that_is_not_there_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that takes connections and never answers is the worst of them."""
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING, logger="tidegate"):
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        sending = Traces(Destination(url_of(url), "traces"), "orders", "/state")
        sending.on_event(ended(1, duration_ms=40))
        sending.close(0.2)
        assert "may be lost" in caplog.text
        sending._thread.join(30)
        assert not sending._thread.is_alive()


# -- who asks for them ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://otlp.example/otlp", "https://otlp.example/otlp/v1/traces"),
        ("https://otlp.example/otlp/v1/traces", "https://otlp.example/otlp/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_an_option_names_a_collector(given: str, url: str) -> None:
    assert wanted(given) == Destination(url, "traces")


@pytest.mark.parametrize(
    "given",
    ["", "127.0.0.1:4318", "ftp://a", "http://", "http://a:port", "http://a?b=secret", "http://a:0", "http://["],
)
def test_what_is_no_address_is_refused_without_being_repeated(given: str) -> None:
    with pytest.raises(InvalidConfig, match="not the address of a collector") as refused:
        url_of(given)
    assert "secret" not in str(refused.value)


def test_a_password_in_an_address_is_refused_without_being_repeated() -> None:
    with pytest.raises(InvalidConfig, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        url_of("http://user:secret@127.0.0.1:4318")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("variables", "is_wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "console,otlp"}, True),
    ],
)
def test_variables_ask_for_traces_or_forbid_them(
    variables: dict[str, str], is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, each in variables.items():
        monkeypatch.setenv(name, each)
    assert (wanted(None) is not None) == is_wanted


def test_a_protocol_that_is_not_spoken_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert wanted(None) is None
    assert "only http/protobuf is spoken" in caplog.text


def test_an_option_against_what_the_variables_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(InvalidConfig, match="OTEL_SDK_DISABLED"):
        wanted("http://127.0.0.1:4318")


def imported_by(code: str) -> set[str]:
    """The packages that are loaded after some code, in a process of its own."""
    told = "import sys; print(' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{told}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_who_asks_for_neither_metrics_nor_traces_imports_neither() -> None:
    code = """
from tidegate.engine.options import RunOptions
from tidegate.engine.watching.watchers import watching
from tidegate.storage.places import place_of
with watching(RunOptions(), "orders", place_of("/nowhere")) as watchers:
    watchers.on_status(None)
"""
    assert not imported_by(code) & {"prometheus_client", "opentelemetry", "requests"}
