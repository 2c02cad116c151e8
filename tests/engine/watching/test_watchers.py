"""Those who watch a run: what the options ask for, what is refused before anything is changed, and what fails."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tidegate as tg
from tests.cli.harness import make_root, wait_until
from tests.engine.watching.told import AT, ended, samples_in, stage, status
from tests.spark.played import played
from tidegate.cli.app import app
from tidegate.engine.control import Remote
from tidegate.engine.events import AnyEvent
from tidegate.engine.options import RunOptions
from tidegate.engine.run import run_pipeline
from tidegate.engine.status import RunStatus, StartingStep, now, status_in
from tidegate.engine.watching.counts import decided_s
from tidegate.engine.watching.watchers import Watchers, watching
from tidegate.errors import InvalidConfig, StoreUnavailable
from tidegate.storage.folder import Folder
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.lock import RootLock
from tidegate.storage.places import place_of


class Noting:
    def __init__(self, failing: str | None = None) -> None:
        self.calls: list[str] = []
        self._failing = failing

    def on_status(self, status: RunStatus | None) -> None:  # noqa: ARG002
        self._note("status")

    def on_event(self, event: AnyEvent) -> None:  # noqa: ARG002
        self._note("event")

    def close(self, patience_s: float) -> None:  # noqa: ARG002
        self._note("close")

    def _note(self, what: str) -> None:
        self.calls.append(what)
        if what == self._failing:
            raise ValueError("cannot be")


@pytest.mark.parametrize("failing", ["status", "event", "close"])
def test_one_that_fails_is_told_once_and_left_out(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Noting(failing), Noting()
    watchers = Watchers([bad, good])
    for _ in range(2):
        watchers.on_status(None)
        watchers.on_event(ended(1))
    watchers.close()
    assert good.calls == ["status", "event", "status", "event", "close"]
    assert bad.calls == good.calls[: good.calls.index(failing) + 1]
    assert caplog.text.count("has failed, and is left out") == 1


def pipeline() -> tg.Pipeline:
    made = tg.Pipeline("orders")

    @made.source
    def rows() -> None: ...

    @made.sink(tg.Console())
    def shown(rows: Any) -> Any:
        return rows

    return made


def url_told(caplog: pytest.LogCaptureFixture) -> str:
    (told,) = [each.getMessage() for each in caplog.records if "metrics are at" in each.getMessage()]
    return told.rpartition(" ")[2]


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text: str = answer.read().decode()
        return text


def test_metrics_are_served_while_the_run_lasts_and_no_longer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = place_of(tmp_path)
    place.files.write("a", b"1")
    before = threading.active_count()
    with (
        caplog.at_level(logging.INFO, logger="tidegate"),
        watching(RunOptions(metrics_port=0, checkpoint_interval="3s"), "orders", place) as watchers,
    ):
        url = url_told(caplog)
        assert url.startswith("http://127.0.0.1:")
        watchers.on_status(status(1, updated_at=now(), stages={"totals": stage(12)}))
        watchers.on_event(ended(1, duration_ms=5))
        text = scraped(url)
    samples = samples_in(text)
    assert samples["tidegate_run_alive", ()] == 1
    assert samples["tidegate_stage_rows_total", (("stage", "totals"),)] == 12
    assert samples["tidegate_checkpoints_total", (("outcome", "complete"),)] == 1
    assert samples["tidegate_checkpoint_interval_seconds", ()] == 3
    assert samples["tidegate_store_requests_total", (("operation", "write"),)] == 1
    assert 0 < samples["tidegate_disk_free_bytes", ()] <= samples["tidegate_disk_size_bytes", ()]
    assert f'root="{tmp_path}"' in text
    with pytest.raises(urllib.error.URLError):
        scraped(url)
    wait_until(lambda: threading.active_count() == before)


def test_a_run_whose_control_thread_hangs_is_not_alive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever answers here is another thread."""
    long_ago = "2026-01-02T03:04:05.000+00:00"
    options = RunOptions(metrics_port=0)
    with caplog.at_level(logging.INFO, logger="tidegate"), watching(options, "orders", place_of(tmp_path)) as watchers:
        alive = []
        for updated_at in (now(), long_ago, now()):
            watchers.on_status(status(1, updated_at=updated_at, stages={"totals": stage(12, lag=3)}))
            samples = samples_in(scraped(url_told(caplog)))
            has_lag = ("tidegate_stage_lag_segments", (("stage", "totals"),)) in samples
            alive.append((samples["tidegate_run_alive", ()], has_lag))
    assert alive == [(1, True), (0, False), (1, True)]


LAST = ("tidegate_last_checkpoint_timestamp_seconds", ())
IN_A_ROW = ("tidegate_checkpoints_aborted_in_a_row", ())


def test_only_whoever_leads_tells_of_the_last_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else an alert on what it saw while it led would never end, though all is well with whoever leads now."""
    with (
        caplog.at_level(logging.INFO, logger="tidegate"),
        watching(RunOptions(metrics_port=0), "orders", place_of(tmp_path)) as watchers,
    ):
        watchers.on_status(None)
        assert not {LAST, IN_A_ROW} & samples_in(scraped(url_told(caplog))).keys()
        watchers.on_status(status(1, updated_at=now(), stages={"totals": stage(12)}))
        for event in (ended(1, new_bytes=5), ended(2, "aborted")):
            watchers.on_event(event)
        assert samples_in(scraped(url_told(caplog)))[IN_A_ROW] == 1
        watchers.on_status(None)
        samples = samples_in(scraped(url_told(caplog)))
        names = {name for name, _ in samples}
        assert not {LAST[0], IN_A_ROW[0], "tidegate_checkpoint_bytes"} & names
        assert samples["tidegate_run_alive", ()] == 1
        assert samples["tidegate_checkpoints_total", (("outcome", "aborted"),)] == 1


def test_whoever_begins_to_lead_knows_the_last_checkpoint_of_whoever_led_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a process that is old, and leads since a moment, would seem to have taken none for as long as it is old."""
    root = make_root(tmp_path, checkpoints=2)
    inspected = InspectedRoot(root)
    newest = decided_s(status_in(inspected.manifest(inspected.newest())))
    with (
        caplog.at_level(logging.INFO, logger="tidegate"),
        watching(RunOptions(metrics_port=0), "flat", place_of(root)) as watchers,
    ):
        for _ in range(2):
            watchers.on_status(None)
            assert LAST not in samples_in(scraped(url_told(caplog)))
            watchers.on_status(status(None, updated_at=now(), state="starting"))
            wait_until(lambda: LAST in samples_in(scraped(url_told(caplog))))
            samples = samples_in(scraped(url_told(caplog)))
            assert samples[LAST] == newest
            assert samples["tidegate_checkpoints_total", (("outcome", "complete"),)] == 0


def test_a_root_that_cannot_be_read_is_no_failure_of_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def refuse(_: object) -> None:
        asked.set()
        raise StoreUnavailable("the bucket is away")

    monkeypatch.setattr(InspectedRoot, "log", refuse)
    root = make_root(tmp_path, checkpoints=1)
    with (
        caplog.at_level(logging.INFO, logger="tidegate"),
        watching(RunOptions(metrics_port=0), "flat", place_of(root)) as watchers,
    ):
        watchers.on_status(status(None, updated_at=now(), state="starting"))
        assert asked.wait(20)
        assert LAST not in samples_in(scraped(url_told(caplog)))
    assert "has failed" not in caplog.text


def test_a_client_that_never_asks_holds_up_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="tidegate"),
        watching(RunOptions(metrics_port=0), "orders", place_of(tmp_path)),
    ):
        url = url_told(caplog)
        port = int(url.rpartition(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(b"GET /metr")
            assert "tidegate_run_alive" in scraped(url)


def test_a_run_whose_port_is_taken_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"metrics_port is {port}, .*; give another port, or 0"):
            run_pipeline(pipeline(), tmp_path / "root", metrics_port=port)
    assert not (tmp_path / "root").exists()


def test_a_host_that_is_not_this_one_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"metrics_port is 0, and 192\.0\.2\.1 cannot be listened on"):
        run_pipeline(pipeline(), tmp_path / "root", metrics_port=0, metrics_host="192.0.2.1")
    assert not (tmp_path / "root").exists()


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("families", "traces"):
        monkeypatch.delitem(sys.modules, f"tidegate.engine.watching.{name}", raising=False)


@pytest.mark.parametrize(
    ("package", "options", "extra"),
    [
        ("prometheus_client", {"metrics_port": 0}, "metrics"),
        ("opentelemetry", {"traces": "http://127.0.0.1:4318"}, "otel"),
    ],
)
def test_an_extra_that_is_missing_is_named_and_nothing_is_left(
    package: str, options: dict[str, Any], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(package, monkeypatch)
    with pytest.raises(InvalidConfig, match=rf"pip install 'tidegate\[{extra}\]'"):
        run_pipeline(pipeline(), tmp_path / "root", **options)
    assert not (tmp_path / "root").exists()


def test_variables_without_the_extra_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be meant for other programs that run here."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    without("opentelemetry", monkeypatch)
    with watching(RunOptions(), "orders", place_of(tmp_path)) as watchers:
        watchers.on_event(ended(1))
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but no traces are sent" in caplog.text


def test_what_was_begun_ends_when_the_next_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without("opentelemetry", monkeypatch)
    settings = RunOptions(metrics_port=0, traces="http://127.0.0.1:4318")
    with (
        caplog.at_level(logging.INFO, logger="tidegate"),
        pytest.raises(InvalidConfig),
        watching(settings, "orders", place_of(tmp_path)),
    ):
        pass
    with pytest.raises(urllib.error.URLError):
        scraped(url_told(caplog))


def test_an_instance_that_does_not_lead_tells_nothing_of_stages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, logger="tidegate"),
        watching(RunOptions(metrics_port=0), "orders", place_of(tmp_path)) as watchers,
    ):
        url = url_told(caplog)
        watchers.on_status(status(1, updated_at=now(), stages={"totals": stage(12, lag=3)}))
        assert ("tidegate_stage_lag_segments", (("stage", "totals"),)) in samples_in(scraped(url))
        watchers.on_status(None)
        samples = samples_in(scraped(url))
    assert ("tidegate_stage_lag_segments", (("stage", "totals"),)) not in samples
    assert samples["tidegate_run_alive", ()] == 1


def test_an_interrupted_run_waits_less_for_those_who_watch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(
        "tidegate.engine.watching.serving.Server.close", lambda _, patience_s: waited.append(patience_s)
    )
    with pytest.raises(KeyboardInterrupt), watching(RunOptions(metrics_port=0), "orders", place_of(tmp_path)):
        raise KeyboardInterrupt
    with watching(RunOptions(metrics_port=0), "orders", place_of(tmp_path)):
        pass
    assert waited == [2.0, 10.0]


def test_what_a_run_says_reaches_those_who_watch_it_while_it_speaks(tmp_path: Path) -> None:
    said: list[RunStatus | None] = []
    with played(tmp_path) as pipeline:
        root = pipeline.root.paths
        with (
            RootLock(root.lock) as lock,
            Remote(Folder(root.root), "played", lock, on_status=said.append) as remote,
        ):
            remote.begin(StartingStep(step="checking", since=AT))
            remote.update(pipeline.generation)
            remote.speak(False)
            remote.update(pipeline.generation)
            remote.speak(True)
            remote.restarting("no room")
    assert [None if each is None else each.state for each in said] == [
        *("starting", "running", None, "restarting", "finished")
    ]


def test_instances_of_one_command_cannot_share_a_port(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text("", encoding="utf-8")
    arguments = ["run", str(tmp_path / "orders.py"), "--root", str(tmp_path / "root"), "--instances", "3"]
    done = CliRunner().invoke(app, [*arguments, "--metrics-port", "9464"])
    assert done.exit_code == 2
    assert "cannot share port 9464" in " ".join(done.output.split())
    assert not (tmp_path / "root").exists()
