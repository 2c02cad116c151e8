"""A pipeline on Spark, scraped as Prometheus does and traced to a collector while it runs, fails and recovers."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.harness import TIDEGATE, tidegate, wait_until
from tests.engine.watching.collecting import Collected, collecting, values_of
from tests.engine.watching.told import Samples, samples_in
from tests.ops.test_ops import METRIC, queries
from tests.spark.harness import write_input
from tidegate.engine.watching.families import NAMES

REPOSITORY = Path(__file__).parents[2]
STAGES = {"orders", "totals", "told", "order_table"}


class Watched:
    """A run in a process of its own. What is scraped of it is held against what was scraped before."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = ""
        self.said: list[str] = []
        self.text = ""
        self.samples: Samples = {}
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"metrics are at (\S+)", line):
                self.url = found[1]

    def scrape(self) -> Samples:
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            self.text = answer.read().decode()
        counters = {
            sample.name
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
            if family.type in ("counter", "histogram", "summary")
        }
        found = samples_in(self.text)
        back = {key: (self.samples[key], found.get(key)) for key in self.samples if key[0] in counters}
        assert all(now is not None and now >= before for before, now in back.values()), back
        self.samples = found
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """No more often than it takes to scrape, on a machine that has other things to do."""
        deadline = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < deadline, "".join(self.said) + self.text
            time.sleep(0.1)

    def value(self, name: str, **labels: str) -> float:
        assert self.process.poll() is None, "".join(self.said)
        return self.scrape().get((name, tuple(sorted(labels.items()))), 0.0)


@contextmanager
def watched(folder: Path, *options: str) -> Iterator[Watched]:
    environment = {**os.environ, "TIDEGATE_TEST_FOLDER": str(folder), "PYTHONPATH": str(REPOSITORY)}
    command = [TIDEGATE, "run", "tests/spark/watched_pipeline.py", "--root", str(folder / "root"), *options]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Watched(process)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.spark
def test_a_run_is_scraped_and_traced_while_it_runs_fails_and_recovers(tmp_path: Path) -> None:
    write_input(tmp_path / "orders", 2, 10)
    options = ("--checkpoint-interval", "500ms", "--restart-pause", "100ms", "--metrics-port", "0", "--no-fsync")
    with collecting() as collected, watched(tmp_path, *options, "--traces", collected.url) as run:
        wait_until(lambda: bool(run.url) or run.process.poll() is not None)
        assert run.url, "".join(run.said)
        run.wait_for(lambda: run.value("tidegate_run_state", state="starting") == 1)
        run.wait_for(lambda: run.value("tidegate_stage_rows_total", stage="order_table") == 20)
        run.wait_for(lambda: run.value("tidegate_checkpoints_total", outcome="complete") >= 2)

        (tmp_path / "fail-commit").touch()
        write_input(tmp_path / "orders", 1, 10, first_file=2)
        run.wait_for(lambda: run.value("tidegate_sink_commits_total", sink="told", outcome="failed") == 1)

        (tmp_path / "fail-stage").touch()
        write_input(tmp_path / "orders", 1, 10, first_file=3)
        run.wait_for(lambda: run.value("tidegate_recoveries_total", because="failure") == 1)
        complete = run.value("tidegate_checkpoints_total", outcome="complete")
        run.wait_for(lambda: run.value("tidegate_checkpoints_total", outcome="complete") >= complete + 2)
        run.wait_for(lambda: run.value("tidegate_stage_watermark_seconds", stage="orders") > 0)
        # Checkpoints of nothing may complete before the first batch of stages that were started again.
        run.wait_for(lambda: run.value("tidegate_stage_rows_total", stage="order_table") >= 40)
        _check_scraped(run)

        stopped = tidegate("stop", "--root", tmp_path / "root")
        assert stopped.returncode == 0, stopped.stderr
        assert run.process.wait(60) == 0, "".join(run.said)
        with pytest.raises(urllib.error.URLError):
            run.scrape()
        _check_traces(collected, run)


def _check_scraped(run: Watched) -> None:
    samples = run.samples
    assert samples["tidegate_run_alive", ()] == 1
    assert samples["tidegate_run_state", (("state", "running"),)] == 1
    assert samples["tidegate_failures_total", ()] == 1
    assert samples["tidegate_checkpoint_interval_seconds", ()] == 0.5
    for stage in STAGES:
        of_stage = (("stage", stage),)
        assert samples["tidegate_stage_rows_total", of_stage] > 0
        batches = samples["tidegate_stage_batch_duration_seconds_count", of_stage]
        assert 0 < samples["tidegate_stage_batch_duration_seconds_sum", of_stage] / batches < 60
        assert (("tidegate_stage_lag_segments", of_stage) in samples) == (stage != "orders")
    assert samples["tidegate_stage_rows_total", (("stage", "order_table"),)] >= 40
    complete = samples["tidegate_checkpoints_total", (("outcome", "complete"),)]
    assert samples["tidegate_checkpoint_duration_seconds_count", ()] == complete
    assert samples["tidegate_checkpoint_bytes", (("kind", "total"),)] > 0
    for sink in ("told", "order_table"):
        committed = samples["tidegate_sink_commits_total", (("outcome", "committed"), ("sink", sink))]
        assert committed == samples["tidegate_sink_commit_duration_seconds_count", (("sink", sink),)] == complete
    assert samples["tidegate_store_requests_total", (("operation", "write"),)] > complete
    assert samples["tidegate_store_errors_total", ()] == 0
    _check_names(run.text)


def _check_names(text: str) -> None:
    """All that ops/ looks at is there, and labels are of what the pipeline has."""
    families = list(text_string_to_metric_families(text))
    assert {family.name for family in families} == NAMES
    exported = {sample.name for family in families for sample in family.samples}
    assert {name for _, query in queries() for name in METRIC.findall(query)} <= exported
    labels: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    assert labels.keys() == {
        *("pipeline", "root", "state", "outcome", "kind", "stage", "sink", "because", "operation", "le")
    }
    assert labels["pipeline"] == {"watched"}
    assert labels["stage"] == STAGES
    assert labels["sink"] == {"told", "order_table"}
    assert labels["operation"] <= {"read", "write", "list", "link", "copy", "delete", "sync"}


def _check_traces(collected: Collected, run: Watched) -> None:
    (start,) = collected.roots("start")
    (recovery,) = collected.roots("recovery")
    assert values_of(start.attributes)["tidegate.because"] == "first"
    assert "fail-stage wants it" in values_of(recovery.attributes)["tidegate.why"]
    for each in (start, recovery):
        steps = collected.children(each)
        assert "starting queries" in {step.name for step in steps}
    checkpoints = collected.roots("checkpoint")
    complete = [each for each in checkpoints if values_of(each.attributes)["tidegate.state"] == "complete"]
    assert len(complete) >= run.samples["tidegate_checkpoints_total", (("outcome", "complete"),)]
    names = [values_of(each.attributes)["tidegate.checkpoint"] for each in checkpoints]
    assert len(names) == len(set(names)) == len({each.trace_id for each in checkpoints})
    for checkpoint in complete:
        children = collected.children(checkpoint)
        wanted = {*(f"stage {stage}" for stage in STAGES), "deciding", "commit told", "commit order_table"}
        assert {each.name for each in children} >= wanted
        for each in (*children, *(below for child in children for below in collected.children(child))):
            assert checkpoint.start_time_unix_nano <= each.start_time_unix_nano <= each.end_time_unix_nano
            assert each.end_time_unix_nano <= checkpoint.end_time_unix_nano
        phases = {each.name for child in children for each in collected.children(child)}
        assert "storing" in phases
    failures = [
        values_of(each.attributes)["tidegate.failures"] for each in collected.spans if each.name == "commit told"
    ]
    assert sum(failures) == 1
