"""What is in ops/: well-formed, of metrics and labels that a run exports; alerts fire when they should."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.watching.told import ended, stage, status
from tidegate.engine.options import RunOptions
from tidegate.engine.status import SinkCommit, now
from tidegate.engine.watching.watchers import watching
from tidegate.storage.places import place_of

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
METRIC = re.compile(r"\btidegate_[a-z_]+\b")
# What Prometheus adds to what it scrapes, and what a histogram has.
OTHER_LABELS = {"le", "instance", "job"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OPS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((OPS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Every expression there is, with where it stands."""
    for panel in dashboard()["panels"]:
        yield from ((panel["title"], each["expr"]) for each in panel.get("targets", ()))
    for each in dashboard()["annotations"]["list"]:
        yield each["name"], each["expr"]
    for each in dashboard()["templating"]["list"][1:]:
        yield each["name"], each["definition"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names that a run exports, with the labels of each, as they are scraped."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tidegate")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    place = place_of(tmp_path_factory.mktemp("root"))
    place.files.write("a", b"1")
    try:
        with watching(RunOptions(metrics_port=0), "orders", place) as watchers:
            stages = {"totals": stage(1, lag=1, watermark_ms=1), "paid": stage(1, kind="sink")}
            watchers.on_status(status(1, updated_at=now(), stages=stages))
            commits = {"paid": SinkCommit(begun_ms=0, took_ms=1)}
            watchers.on_event(ended(1, duration_ms=1, alignment_ms=1, new_bytes=1, total_bytes=1, commits=commits))
            with urllib.request.urlopen(told[0].rpartition(" ")[2], timeout=10) as answer:
                text = answer.read().decode()
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize(("where", "query"), [pytest.param(*each, id=str(n)) for n, each in enumerate(queries())])
def test_every_metric_of_a_query_is_exported_with_its_labels(
    where: str, query: str, exported: dict[str, set[str]]
) -> None:
    names = METRIC.findall(query)
    assert names, where
    assert set(names) <= exported.keys(), where
    labels = set().union(*(exported[name] for name in names)) | OTHER_LABELS
    matched = re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"", query)
    grouped = [name for each in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query) for name in re.split(r"[,\s]+", each)]
    assert {*matched, *grouped} <= labels, where


def test_every_metric_that_a_run_exports_is_looked_at_by_somebody(exported: dict[str, set[str]]) -> None:
    looked_at = {name for _, query in queries() for name in METRIC.findall(query)}
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in looked_at}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in exported} == families


def test_every_alert_says_how_bad_it_is_what_has_happened_and_what_to_do() -> None:
    names = [each["alert"] for each in rules()]
    assert len(names) == len(set(names))
    for each in rules():
        assert each["alert"].startswith("Tidegate")
        assert each["labels"]["severity"] in ("critical", "warning")
        assert set(each["annotations"]) == {"summary", "description"}


def test_panels_have_their_own_ids_and_do_not_lie_on_each_other() -> None:
    panels = dashboard()["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (each["gridPos"] for each in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_a_legend_names_only_labels_that_its_query_has() -> None:
    for panel in dashboard()["panels"]:
        for each in panel.get("targets", ()):
            kept = re.findall(r"\bby\s*\(([^)]*)\)", each["expr"])
            if kept:
                assert set(re.findall(r"{{(\w+)}}", each["legendFormat"])) <= {
                    name.strip() for group in kept for name in group.split(",")
                }, panel["title"]


def test_every_metric_and_alert_is_in_the_guide(exported: dict[str, set[str]]) -> None:
    guide = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(tidegate_[a-z_]+)", guide))
    assert told == {re.sub("_(bucket|sum|count)$", "", name) for name in exported}
    assert set(re.findall(r"`(Tidegate[A-Za-z]+)`", guide)) == {each["alert"] for each in rules()}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (on Debian: prometheus)")
def test_alerts_fire_when_they_should() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", Path(__file__).with_name("alerts_test.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
