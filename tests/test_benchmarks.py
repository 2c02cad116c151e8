"""That the benchmarks run and report what they promise. What they measure is no business of a test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.bucket_runs import Kind, Measured, purposes_of
from benchmarks.measure import Benchmark, Case, Derived, Target, WrongWork, measure_rounds, summarize
from benchmarks.unaligned_runs import Behind
from tests.dashboard.browser import find_chromium

ROOT = Path(__file__).parent.parent
TINY = ("--rounds", "1", "--scale", "0.01")
PROTOCOL_CASES = {
    "aligner": 3,
    "aligner barriers": 1,
    "injector poll": 1,
    "coordinator": 3,
    "coordinator per stage": 3,
    "coordinator growth": 3,
    "quorum": 3,
    "quorum per instance": 3,
    "quorum growth": 3,
    "simulator": 1,
}


SPARK_CASES = {
    **{
        f"{batches} batches: {what}": 1
        for batches in ("large", "small")
        for what in (
            "plain, default settings",
            "plain, tuned settings",
            "tidegate",
            "tidegate, chained",
            "tidegate, no fsync",
            "tidegate / plain, default settings",
            "tidegate / plain, tuned settings",
            "tidegate, chained / plain, tuned settings",
            "tidegate / tidegate, no fsync",
            "control thread",
        )
    },
    **{
        f"latency per hop: {what}": 1
        for what in ("plain, tuned settings", "tidegate", "tidegate, chained", "added", "added, chained")
    },
    **{
        f"restart: {what}": 1
        for what in (
            "plain, tuned settings",
            "tidegate",
            "tidegate, chained",
            "tidegate / plain",
            "tidegate, chained / plain",
        )
    },
    **{f"idle: {what}": 1 for what in ("plain, tuned settings", "tidegate", "tidegate / plain")},
    "batch": 2,
    "batch time growth": 1,
    "checkpoint": 3,
    "checkpoint, no fsync": 1,
    "checkpoint, fsync adds": 1,
    "checkpoint time growth": 1,
    "checkpoint, longest": 3,
    "snapshot": 3,
    "written per checkpoint": 3,
    "checkpoint written / changed": 3,
}


_OF_A_CHECKPOINT = ("checkpoint", "bytes", "requests", "memory")
SCALE_CASES = {
    **{f"{what}: {name}": 3 for what in ("files", "stages", "segments") for name in _OF_A_CHECKPOINT},
    **{f"files: {name}": 3 for name in ("restart", "restart requests", "first checkpoint")},
    **{f"stages: {name}": 3 for name in ("poll", "status", "queries")},
    "unchanged files add": 2,
}


UNALIGNED_CASES = {
    **{f"checkpoint: {what}": 3 for what in ("aligned", "unaligned", "unaligned / aligned")},
    **{f"stages: {what}": 3 for what in ("aligned", "unaligned", "unaligned / aligned")},
    **{f"{what}: {how}": 3 for what in ("sinks add", "rows") for how in ("aligned", "unaligned")},
    "in flight": 3,
}


def run(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def parse(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def check_protocol_results(results: list[dict[str, Any]]) -> None:
    assert Counter(result["name"] for result in results) == PROTOCOL_CASES
    for result in results:
        assert result["benchmark"] == "protocol"
        assert result["rounds"] == 1
        assert result["unit"]
        assert result["clock"]
        assert result["machine"]
        assert all(isinstance(value, int) for value in result["parameters"].values())
        assert result["min"] == result["median"] == result["max"]
        assert (result["target"] is None) == (result["met"] is None)
    assert sum(result["target"] is not None for result in results) == 6


def test_a_tiny_run_yields_a_json_line_for_every_case_and_exits_0() -> None:
    ran = run("protocol", *TINY, "--json")
    assert ran.returncode == 0, ran.stderr
    check_protocol_results(parse(ran.stdout))


@pytest.mark.slow
@pytest.mark.soak
def test_the_dashboard_is_measured_route_by_route_and_page_by_page() -> None:
    ran = run("dashboard", *TINY, "--json")
    assert ran.returncode == 0, ran.stderr
    results = parse(ran.stdout)
    routes = [each for each in results if each["name"].startswith("GET ")]
    pages = [each for each in results if each["name"].startswith("page ")]
    assert (len(routes), len(pages)) == (16, 11 if find_chromium() else 0)
    assert len(results) == len(routes) + len(pages)
    assert {each["unit"] for each in results} == {"ms"}
    assert all(each["median"] > 0 for each in results)
    for result in routes:
        assert result["target"] == {"at_most": 100.0}
        assert result["parameters"] == {"attempts": 100}
    for result in pages:
        assert result["target"] == {"at_most": 50.0}
        assert result["parameters"] == {"checkpoints": 20}


@pytest.mark.slow
@pytest.mark.soak
def test_without_a_name_all_benchmarks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ("spark", "unaligned", "bucket", "cluster", "peers")
    quick = {name: benchmark for name, benchmark in BENCHMARKS.items() if name not in slow}
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", quick)
    out = tmp_path / "results.jsonl"
    assert main([*TINY, "--out", str(out)]) == 0
    results = parse(out.read_text("utf-8"))
    check_protocol_results([line for line in results if line["benchmark"] == "protocol"])
    assert Counter(line["name"] for line in results if line["benchmark"] == "scale") == SCALE_CASES
    table = capsys.readouterr().out
    for name in quick:
        assert f"{name}: " in table
    assert "aligner, 100 inputs" in table
    assert "scale 0.01" in table
    assert "cores, CPython" in table


def test_a_quick_run_is_one_round_of_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    scales: list[float] = []

    def cases(scale: float) -> list[Case | Derived]:
        scales.append(scale)
        return [Case("ebb", {}, "ms", lambda: 1.0)]

    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {"tides": Benchmark("about tides", "how", 5, cases)})
    assert main(["tides", "--quick", "--scale", "0.5"]) == 0
    assert scales == [0.05]


def test_what_a_backlog_costs_is_told_for_stages_and_for_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def behind(backlog_s: int, *, unaligned: bool) -> Behind:
        waited_ms = 20 if unaligned else 1_000 * backlog_s
        return Behind(waited_ms + 10, waited_ms, 19.0, 4_000 * backlog_s if unaligned else 0)

    monkeypatch.setattr("benchmarks.unaligned_runs.measure_behind", behind)
    out = tmp_path / "results.jsonl"
    assert main(["unaligned", "--rounds", "1", "--out", str(out)]) == 0
    results = parse(out.read_text("utf-8"))
    assert Counter(line["name"] for line in results) == UNALIGNED_CASES
    (held,) = [line for line in results if line["target"] is not None]
    assert (held["name"], held["parameters"]) == ("stages: unaligned / aligned", {"s of work": 60})
    assert (held["median"], held["met"]) == (20 / 60_000, True)
    assert {line["median"] for line in results if line["name"].startswith("sinks add")} == {10}
    assert "sinks add: unaligned, 60 s of work" in capsys.readouterr().out


def of_a_bucket(kind: Kind, scale: float) -> Measured:
    assert scale == 1
    match kind:
        case "state":
            return Measured(uploaded_bytes=120, changed_bytes=100)
        case "local":
            return Measured(300, 50)
        case "bucket":
            return Measured(200, 50, 10)
        case "bucket, not chained":
            return Measured(140, 50, 10)
        case "plain":
            return Measured(100, 0, 10)
        case "cluster":
            return Measured(50, 900, 300, 20, {"state": 150, "rows handed on": 90, "the rest": 60}, 10)
        case "cluster, not chained":
            return Measured(40, 900, 1_200, 40, {"state": 300, "rows handed on": 600, "the rest": 300}, 10)
        case "cluster, plain":
            return Measured(25, 0, 2_000, 20, {"state": 100, "rows handed on": 1_500, "the rest": 400}, 10)


def test_a_root_in_a_bucket_is_compared_with_plain_spark_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.bucket_runs.measure", of_a_bucket)
    out = tmp_path / "results.jsonl"
    assert main(["bucket", "--rounds", "1", "--out", str(out)]) == 0
    results = parse(out.read_text("utf-8"))
    held = {line["name"]: (line["median"], line["met"]) for line in results if line["target"]}
    on_cluster = {name: held.pop(name) for name in list(held) if name.startswith("per batch: cluster")}
    assert held == {
        "small batches: bucket / plain": (2.0, True),
        "small batches: bucket, not chained / plain": (1.4, False),
        "bytes: uploaded / changed": (1.2, True),
    }
    assert len(on_cluster) == 4, "the part on a cluster comes after it"
    assert "checkpoint: bucket, not chained" in capsys.readouterr().out


def test_on_a_cluster_requests_per_batch_are_compared_with_those_of_plain_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.bucket_runs.measure", of_a_bucket)
    out = tmp_path / "results.jsonl"
    assert main(["bucket", "--cluster", "--rounds", "1", "--out", str(out)]) == 0
    results = {line["name"]: line for line in parse(out.read_text("utf-8"))}
    assert {name: (line["median"], line["met"]) for name, line in results.items() if line["target"]} == {
        "per batch: cluster / plain": (0.15, True),
        "per batch: cluster, not chained / plain": (0.3, True),
        "per batch: cluster / plain's checkpoints": (0.6, True),
        "per batch: cluster, not chained / plain's checkpoints": (1.2, False),
    }
    found = {name: line["median"] for name, line in results.items() if not line["target"]}
    assert found == {
        "small batches: cluster": 50,
        "small batches: cluster, not chained": 40,
        "small batches: cluster, plain": 25,
        "small batches: cluster / cluster, plain": 2,
        "small batches: cluster, not chained / cluster, plain": 1.6,
        "checkpoint: cluster": 900,
        "checkpoint: cluster, not chained": 900,
        "per batch: cluster": 15,
        "per batch: cluster, state": 7.5,
        "per batch: cluster, rows handed on": 4.5,
        "per batch: cluster, the rest": 3,
        "per batch: cluster, not chained": 30,
        "per batch: cluster, not chained, state": 7.5,
        "per batch: cluster, not chained, rows handed on": 15,
        "per batch: cluster, not chained, the rest": 7.5,
        "per batch: cluster, plain": 100,
        "per batch: cluster, plain, state": 5,
        "per batch: cluster, plain, rows handed on": 75,
        "per batch: cluster, plain, the rest": 20,
        "per file: cluster": 30,
        "per file: cluster, not chained": 120,
        "per file: cluster, plain": 200,
        "batches: cluster": 20,
        "batches: cluster, not chained": 40,
        "batches: cluster, plain": 20,
    }
    assert "two workers" in capsys.readouterr().out


def test_requests_are_told_apart_by_the_folder_that_they_name() -> None:
    stages = "/bench/cluster-30/generations/000001/stages"
    assert purposes_of(
        [
            ("PUT", f"{stages}/totals/spark/state/0/1/2_aa.changelog"),
            ("GET", "/bench?list-type=2&delimiter=%2F&prefix=plain%2Ftotals%2Fstate%2F0%2F1%2F&max-keys=2"),
            ("HEAD", f"{stages}/orders/output/part-00000.parquet"),
            ("GET", "/bench?list-type=2&prefix=plain%2Foutput%2Forders%2F_spark_metadata%2F"),
            ("PUT", "/bench/plain/orders/offsets/3"),
            ("POST", "/bench?delete"),
            ("GET", "/bench?list-type=2&prefix=cluster-30%2Fdecisions%2F"),
        ]
    ) == {"state": 2, "rows handed on": 2, "the rest": 3}


@pytest.mark.slow
@pytest.mark.soak  # of minutes
@pytest.mark.s3
@pytest.mark.spark
@pytest.mark.usefixtures("s3_server", "s3a")
def test_a_quick_run_on_a_cluster_finds_every_number(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    ran = run("bucket", "--cluster", "--quick", "--out", str(out), timeout_s=3_000)
    assert ran.returncode == 0, ran.stderr
    assert all(line["median"] > 0 for line in parse(out.read_text("utf-8")))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    ran = run("tides")
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "no benchmark 'tides'; there is: protocol" in ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rounds", "0"),
        ("--scale", "0"),
        ("--scale", "nan"),
        ("--scale", "inf"),
        ("--out", "no/such/folder/file"),
        ("--cluster", "--quick"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_measured(arguments: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["protocol", *arguments])
    assert ended.value.code == 2


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(name in told for name in BENCHMARKS)


def test_rounds_are_interleaved_and_told_by_their_median() -> None:
    order: list[str] = []

    def measure(name: str, values: list[float]) -> float:
        order.append(name)
        return values.pop(0)

    firsts, seconds = [4.0, 1.0, 2.0], [8.0, 3.0, 2.0]
    first = Case("first", {}, "ns", lambda: measure("first", firsts), Target(at_most=2))
    second = Case("second", {}, "ns", lambda: measure("second", seconds), Target(at_least=4))
    ratio = Derived("ratio", {}, "ratio", lambda values: values[second] / values[first])
    results = summarize("tides", "a machine", list(measure_rounds([first, second, ratio], 3)))
    assert order == ["first", "second", "second", "first", "first", "second"]
    assert [(each.median, each.min, each.max, each.met) for each in results] == [
        (2.0, 1.0, 4.0, True),
        (3.0, 2.0, 8.0, False),
        (2.0, 1.0, 3.0, None),
    ]


def register(monkeypatch: pytest.MonkeyPatch, measure: Callable[[], float]) -> None:
    case = Case("ebb", {"inputs": 1_000}, "messages/s", measure, Target(at_least=200_000))
    monkeypatch.setattr(
        "benchmarks.__main__.BENCHMARKS", {"tides": Benchmark("about tides", "how", 2, lambda _: [case])}
    )


def test_a_missed_target_is_said_plainly_and_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, lambda: 150_000.0)
    assert main(["tides"]) == 0
    told = capsys.readouterr().out
    assert "MISSED" in told
    assert "1 of 1 targets are NOT met" in told
    assert "ebb, 1,000 inputs: 150,000 messages/s, wanted ≥ 200,000" in told


def test_work_that_went_wrong_yields_no_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> float:
        raise WrongWork("nothing was cut")

    register(monkeypatch, measure)
    assert main(["tides"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "tides was not measured: nothing was cut" in told.err


def test_an_interrupted_run_reports_the_rounds_that_are_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [150_000.0]

    def measure() -> float:
        if not values:
            raise KeyboardInterrupt
        return values.pop()

    register(monkeypatch, measure)
    assert main(["tides", "--rounds", "3"]) == 0
    told = capsys.readouterr()
    assert "tides: interrupted after 1 of 3 rounds" in told.err
    assert "Median of 1 interleaved rounds" in told.out
    assert main(["tides"]) == 130
    assert "tides was interrupted before a round was whole" in capsys.readouterr().err
