"""The pieces of `./dev bench peers`: its works and their oracle, outputs, processes, report. Nothing is timed here."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.measure import Benchmark, Case, Derived, Result, WrongWork, measure_rounds, summarize
from benchmarks.peers import benchmark as peers
from benchmarks.peers import environments
from benchmarks.peers.environments import CannotRun
from benchmarks.peers.flink import Flink
from benchmarks.peers.job import CHAIN, COUNTS, Job, read_job
from benchmarks.peers.life import Measured
from benchmarks.peers.outputs import Shown, read_counts, read_ids, read_totals
from benchmarks.peers.peer import Peer, Taken
from benchmarks.peers.plain_spark import read_sink_log
from benchmarks.peers.processes import Processes
from benchmarks.peers.report import print_matrix
from benchmarks.peers.tidegate import Tidegate
from benchmarks.peers.work import (
    KEYS,
    Answer,
    Feed,
    Work,
    columns,
    compare_counts,
    compare_paid,
    compare_totals,
    shown_rows,
    true_counts,
    true_totals,
    write_closing_file,
    write_files,
)

pa: Any = importlib.import_module("pyarrow")  # it has no types
pq: Any = importlib.import_module("pyarrow.parquet")

TINY = Work(COUNTS, rows_per_file=100, files_per_batch=1, warm_up_files=1, measured_files=2, killed_files=1)


def job_in(folder: Path, work: str = COUNTS) -> Job:
    return Job(
        work=work,
        input=str(folder / "input"),
        output=str(folder / "output"),
        state=str(folder / "state"),
        record=str(folder / "log"),
        files_per_batch=1,
        cores=2,
        checkpoint_s=1,
        port=0,
    )


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("peers", "--peer", "storm"), "there is no peer 'storm'; there is: tidegate, spark, flink"),
        (("protocol", "--peer", "flink"), "--peer chooses among those of the benchmark peers"),
        (("--peer", "flink"), "--peer chooses among those of the benchmark peers"),
    ],
)
def test_a_peer_that_cannot_be_chosen_is_refused(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_only_the_peers_that_were_chosen_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "make_peers", lambda: [Played("flink"), Played("spark")])
    monkeypatch.setattr("benchmarks.peers.life.live", live_at_once)
    assert main(["peers", "--peer", "flink", "--quick", "--json"]) == 0
    names = {json.loads(line)["name"].split(": ")[1] for line in capsys.readouterr().out.splitlines()}
    assert names == {"flink"}


def test_every_peer_has_the_name_that_it_is_chosen_by() -> None:
    assert tuple(peer.name for peer in peers.make_peers()) == peers.NAMES


# -- input and oracle ------------------------------------------------------------------------------


def test_input_is_the_same_whoever_reads_it(tmp_path: Path) -> None:
    files = write_files(TINY, tmp_path)
    assert len(files) == TINY.files == 5
    rows = pq.ParquetFile(files[2]).read()
    again = columns(200, 100)
    assert rows.column("id").to_pylist() == list(range(200, 300))
    assert rows.column("key").to_pylist() == list(again["key"])
    assert rows.column("amount").to_pylist() == list(again["amount"])


def test_the_oracle_counts_what_the_files_hold(tmp_path: Path) -> None:
    counts = np.zeros(KEYS, dtype="int64")
    for file in write_files(TINY, tmp_path):
        for key in pq.ParquetFile(file).read().column("key").to_pylist():
            counts[key] += 1
    assert list(true_counts(TINY.files, TINY.rows_per_file)) == list(counts)


def test_the_oracle_totals_what_the_files_hold(tmp_path: Path) -> None:
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for file in write_files(TINY, tmp_path):
        for row in pq.ParquetFile(file).read().to_pylist():
            price = round(row["amount"] * 1.19, 2)
            group = row["country"], "high" if price > 500 else "low"
            orders, revenue = totals.get(group, (0, 0.0))
            if row["id"] % 10 != 9:
                totals[group] = orders + 1, revenue + price
    expected = true_totals(TINY.files, TINY.rows_per_file)
    assert expected.keys() == totals.keys()
    assert all(totals[group] == pytest.approx(expected[group]) for group in totals)


def test_a_closing_file_has_every_country_and_band_long_after_the_rest(tmp_path: Path) -> None:
    *_, last = write_files(TINY, tmp_path)
    closing = pq.ParquetFile(write_closing_file(TINY, tmp_path)).read()
    assert closing.num_rows == 40
    assert closing.column("id")[0].as_py() == TINY.files * TINY.rows_per_file
    before = pq.ParquetFile(last).read().column("ts")[-1].as_py()
    assert (closing.column("ts")[0].as_py() - before).days >= 1


def test_counts_that_are_too_low_or_too_high_are_told_apart() -> None:
    found = compare_counts(np.array([5, 3, 9]), np.array([5, 4, 7]))
    assert found == Answer(lost=1, doubled=2)


def test_rows_that_are_missing_or_come_twice_are_told_apart() -> None:
    wanted = [number for number in range(140) if number % 10 != 9]
    assert compare_paid(np.array(wanted), 100) == Answer(0, 0)
    assert compare_paid(np.array([*wanted[1:], 7, 7]), 100) == Answer(lost=1, doubled=2)
    assert compare_paid(np.array([], dtype="int64"), 100) == Answer(lost=126, doubled=0)


def test_totals_that_are_missing_or_too_high_are_told_apart() -> None:
    expected = {("a", "low"): (3, 1.0), ("b", "low"): (2, 1.0)}
    assert compare_totals({("a", "low"): (5, 1.0)}, expected) == Answer(lost=2, doubled=2)


def test_a_share_of_a_work_is_made_of_its_first_files() -> None:
    part = Work(CHAIN, 100, 4, warm_up_files=10, measured_files=40, killed_files=10).part(0.1)
    assert (part.rows_per_file, part.warm_up_files, part.measured_files, part.killed_files) == (100, 2, 4, 2)
    assert shown_rows(CHAIN, 100) == 90
    assert shown_rows(COUNTS, 100) == 100


def test_files_are_offered_whole_and_once(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "input", write_files(TINY, tmp_path / "files"))
    feed.offer(2)
    feed.offer(1)
    feed.close(write_closing_file(TINY, tmp_path))
    names = sorted(path.name for path in feed.folder.iterdir())
    assert names == ["000000.parquet", "000001.parquet", "000002.parquet", "999999.parquet"]


# -- outputs ---------------------------------------------------------------------------------------


def debezium(key: int, count: int, operation: str = "c") -> str:
    row = {"key": key, "n": count}
    before, after = (None, row) if operation == "c" else (row, None)
    return json.dumps({"before": before, "after": after, "op": operation}) + "\n"


def test_counts_are_read_from_parquet_and_from_changes(tmp_path: Path) -> None:
    batch = tmp_path / "batch=1" / "part.parquet"
    batch.parent.mkdir()
    pq.write_table(pa.table({"key": [0, 1], "n": [5, 6]}), batch)
    changes = tmp_path / "part-0"
    changes.write_text(debezium(1, 6, "d") + debezium(1, 9), "utf-8")
    counts = read_counts([batch, changes])
    assert list(counts[:3]) == [5, 9, 0]


def test_an_output_is_followed_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    shown = Shown(COUNTS, lambda _: [path])
    path.write_text('{"key":1,"n":5}\n{"key":2,"n":', "utf-8")
    assert shown.rows() == 5
    path.write_text('{"key":1,"n":5}\n{"key":2,"n":7}\n', "utf-8")
    assert shown.rows() == 12


def test_an_output_that_its_writer_truncates_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    shown = Shown(COUNTS, lambda _: [path])
    path.write_text('{"key":1,"n":5}\n{"key":2,"n":7}\n', "utf-8")
    assert shown.rows() == 12
    path.write_text('{"key":1,"n":5}\n{"key":2,"n":10}\n{"key":1,"n":8}\n', "utf-8")
    assert shown.rows() == 18
    path.write_text("", "utf-8")
    assert shown.rows() == 18
    rows = Shown(CHAIN, lambda _: [path])
    path.write_text('{"id":1}\n{"id":2}\n', "utf-8")
    assert rows.rows() == 2
    path.write_text('{"id":1}\n', "utf-8")
    assert rows.rows() == 1
    assert list(read_ids([path])) == [1]


def test_rows_and_totals_are_read_from_both_kinds_of_files(tmp_path: Path) -> None:
    parquet, lines = tmp_path / "part-0", tmp_path / "0.jsonl"
    totals = {"country": ["a", "a"], "band": ["low", "low"], "orders": [1, 2], "revenue": [0.5, 1.0]}
    pq.write_table(pa.table({"id": [1, 2], **totals}), parquet)
    lines.write_text('{"id":3,"country":"a","band":"low","orders":4,"revenue":2.0}\n', "utf-8")
    assert sorted(read_ids([parquet, lines])) == [1, 2, 3]
    assert read_totals([parquet, lines]) == {("a", "low"): (7, 3.5)}
    assert Shown(CHAIN, lambda _: [parquet, lines]).rows() == 3


def test_a_log_of_sparks_file_sink_names_what_is_committed(tmp_path: Path) -> None:
    def entry(name: str, *files: str) -> None:
        lines = ["v1", *(json.dumps({"path": f"file:///out/{file}"}) for file in files)]
        (tmp_path / name).write_text("\n".join(lines), "utf-8")

    entry("8", "a")
    entry("9.compact", "a", "b")
    entry("10", "c")
    (tmp_path / ".10.crc").write_text("", "utf-8")
    assert read_sink_log(tmp_path) == [Path("/out/a"), Path("/out/b"), Path("/out/c")]
    assert read_sink_log(tmp_path / "none") == []


# -- what peers record -----------------------------------------------------------------------------


def test_tidegates_checkpoints_are_those_that_were_decided(tmp_path: Path) -> None:
    def event(name: str, state: str) -> str:
        told = {"checkpoint": name, "state": state, "triggered_at": "2026-01-01T00:00:00+00:00", "duration_ms": 50}
        return json.dumps({"event": "checkpoint", "checkpoint": told})

    job = job_in(tmp_path)
    lines = ["Spark says something", event("ckpt-000001", "committing"), event("ckpt-000001", "complete")]
    lines += [event("ckpt-000002", "aborted"), json.dumps({"event": "stages"})]
    Path(job.record).write_text("\n".join(lines), "utf-8")
    assert Tidegate().checkpoints(job) == [Taken(1767225600050, 50)]


def test_flink_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert Flink().restored(job).restore == ""
    for age, name in ((30, "a/chk-7"), (20, "b/chk-2")):
        metadata = Path(job.state, "checkpoints", name, "_metadata")
        metadata.parent.mkdir(parents=True)
        metadata.touch()
        os.utime(metadata, (time.time() - age,) * 2)
    Path(job.state, "checkpoints", "b", "chk-3").mkdir()
    assert Flink().restored(job).restore == Path(job.state, "checkpoints/b/chk-2").as_uri()


def test_a_job_is_the_same_in_a_peers_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(tmp_path)
    for name, value in job.environment().items():
        monkeypatch.setenv(name, value)
    assert read_job() == job


# -- processes -------------------------------------------------------------------------------------


def test_cpu_time_is_that_of_all_descendants_and_a_kill_ends_them(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # A grandchild that has left the session, and is all that works.
    busy = f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}], start_new_session=True)"
    processes = Processes([[sys.executable, "-c", child]], {}, tmp_path, tmp_path / "log")
    try:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and processes.cpu_s() > 0.5) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert processes.cpu_s() > 0.5
        processes.check()
    finally:
        processes.kill()
    assert processes.cpu_s() == 0
    stat = Path("/proc", pid_file.read_text(), "stat")
    # Whoever inherits it may not have reaped it yet.
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_process_that_ended_is_told_with_its_last_words(tmp_path: Path) -> None:
    script = "print('a line'); raise ValueError('no such table')"
    processes = Processes([[sys.executable, "-c", script]], {}, tmp_path, tmp_path / "log")
    deadline = time.monotonic() + 60
    while not processes.ended() and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(WrongWork, match="its process ended: ValueError: no such table"):
        processes.check()
    processes.kill()


# -- environments ----------------------------------------------------------------------------------


def test_a_peer_without_its_python_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    with pytest.raises(CannotRun, match=r"it needs Python 2\.5, and none of these was found"):
        environments.python_of("antique", ["antique"], ["2.5"])


def test_a_peer_that_pip_cannot_install_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # A path that is not there: pip needs no network to refuse it.
    with pytest.raises(CannotRun, match=r"it could not be installed: .*no/such/package"):
        environments.python_of("nothing", [str(tmp_path / "no/such/package")], [version])
    assert not (tmp_path / "nothing").exists()


def test_without_maven_a_jar_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotRun, match=r"Maven fetches a:b:1: install it"):
        environments.jar_of("flink", "a:b:1")


# -- rounds and report -----------------------------------------------------------------------------


class Played(Peer):
    """A peer whose numbers are known."""

    version_text: ClassVar = "1.0"

    def __init__(self, name: str, *, missing: str = "", refused: str | None = None) -> None:
        self.name = name  # type: ignore[misc]  # each of a class of its own would be the same
        self._missing, self._refused = missing, refused

    def install(self) -> None:
        if self._missing:
            raise CannotRun(self._missing)

    def version(self) -> str:
        return self.version_text

    def settings(self) -> str:
        return f"the settings of {self.name}"

    def refuses(self, work: str) -> str | None:
        return self._refused if work == COUNTS else None

    def commands(self, job: Job) -> list[list[str]]:
        raise AssertionError(job)

    def visible(self, job: Job, table: str) -> list[Path]:
        raise AssertionError(job, table)

    def checkpoints(self, job: Job) -> list[Taken] | None:
        raise AssertionError(job)


RATES = {"tidegate": 4_000, "flink": 1_000, "spark": 2_000}


def live_at_once(peer: Peer, work: Work, folder: Path, files: Path) -> Measured:
    assert folder.is_dir()
    del files
    if peer.name not in RATES:
        raise WrongWork("its process ended: of old age")
    rows = work.measured_files * work.rows_per_file
    times: list[float] | None = None if peer.name == "spark" else [10.0, 20.0, 30.0]
    return Measured(rows, rows / 500, rows / RATES[peer.name], times, 2.5, 0, 3 if peer.name == "spark" else 0)


def played(monkeypatch: pytest.MonkeyPatch, *those: Peer) -> Benchmark:
    monkeypatch.setattr("benchmarks.peers.life.live", live_at_once)
    monkeypatch.setattr(peers, "make_peers", lambda: list(those))
    benchmark = peers.of_peers(())
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {"peers": benchmark})
    return benchmark


def test_the_report_has_a_line_per_peer_and_says_what_was_skipped_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(
        monkeypatch,
        Played("tidegate"),
        Played("spark", refused="it does not count"),
        Played("flink"),
        Played("bytewax", missing="it needs another Python"),
    )
    assert main(["peers", "--rounds", "2"]) == 0
    told = capsys.readouterr()
    for text in (
        "counts: tidegate / flink, rows/CPU s: 4 (4 … 4)",
        "tidegate (1.0): the settings of tidegate",
        "bytewax is skipped: it needs another Python",
        "spark (counts) is skipped: it does not count",
        "Medians of 2 rounds",
        "All 1 targets are met.",
    ):
        assert text in told.out
    assert told.out.count("│ tidegate ") == 2
    assert told.out.count("│ spark ") == 1
    assert "peers: bytewax is skipped: it needs another Python" in told.err


def test_a_peer_that_fails_costs_no_other_its_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, Played("tidegate"), Played("wanderer"))
    assert main(["peers", "--rounds", "2"]) == 0
    told = capsys.readouterr().out
    assert "counts: wanderer failed in 2 rounds: its process ended: of old age" in told
    assert "│ tidegate " in told
    assert "│ wanderer " not in told


def test_where_no_peer_can_run_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, Played("flink", missing="no Java"))
    assert main(["peers"]) == 1
    assert "peers was not measured: no case has a value" in capsys.readouterr().err


def test_flink_is_the_measure_and_a_missed_target_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RATES, "tidegate", 2_500)
    played(monkeypatch, Played("tidegate"), Played("flink"), Played("spark"))
    assert main(["peers", "--rounds", "1"]) == 0
    told = capsys.readouterr().out
    assert "1 of 1 targets are NOT met" in told
    assert "counts: tidegate / flink, rows/CPU s: 2.5 ratio, wanted ≥ 3" in told


def test_results_as_json_have_a_line_per_peer_and_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, Played("spark"))
    assert main(["peers", "--rounds", "1", "--json"]) == 0
    found = {result["name"]: result for result in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["chain: spark: rows/CPU s"]["median"] == pytest.approx(2_000)
    assert found["chain: spark: doubled"]["median"] == 3
    assert found["chain: spark: rows/s"]["parameters"] == {"rows": 4_000_000}
    assert "chain: spark: checkpoint p50" not in found


def test_a_case_without_a_value_in_a_round_is_told_by_the_others() -> None:
    values: list[float | None] = [None, 2.0, 4.0]
    case = Case("ebb", {}, "s", lambda: values.pop(0))
    never = Derived("never", {}, "s", lambda _: None)
    (result,) = summarize("tides", "a machine", list(measure_rounds([case, never], 3)))
    assert (result.median, result.rounds) == (3.0, 2)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 201)]
    assert peers.percentile(values, 99) == 198.0
    assert peers.percentile([5.0], 99) == 5.0
    assert peers.percentile([1.0, 3.0], 50) == 2.0
    assert peers.percentile([], 50) is None
    assert peers.percentile(None, 99) is None


def test_jobs_need_nothing_but_the_standard_library_to_be_read() -> None:
    code = "import sys, benchmarks.peers.job as job; print('msgspec' in sys.modules, 'numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["False", "False"]


def test_the_matrix_can_be_printed_of_recorded_results(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("counts: flink: rows/s", {"rows": 100}, "rows/s", lambda: 5.0)
    recorded = summarize("peers", "a machine", [{case: 1_000.0}, {case: 3_000.0}])
    read_again = msgspec.json.decode(msgspec.json.encode(recorded), type=list[Result])
    print_matrix(read_again, "notes", "header", Console(width=120))
    told = capsys.readouterr().out
    assert "2,000" in told
    assert "1,000 … 3,000" in told
