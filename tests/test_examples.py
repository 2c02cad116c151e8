"""The examples, run as their pages say, killed and started again; their tables against what the input demands."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pytest

import tidegate
from tests.cli.harness import tidegate as tidegate_command
from tidegate.engine.kill_points import VARIABLE as KILL_VARIABLE
from tidegate.engine.status_files import read_status
from tidegate.errors import CheckpointNotVisible
from tidegate.sinks.delta.reading import TablesAt
from tidegate.storage.folder import Folder

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/pipeline.py"))
_SECONDS = 300

Rows = list[dict[str, Any]]


def commands_of(page: Path) -> list[str]:
    """The lines of its blocks of shell commands, without what is said of them."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


class Visitor:
    """Somebody who has copied an example and does what its page says, and nothing else."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder / name
        unwanted = shutil.ignore_patterns("input", "lake", "state", "outbox", "__pycache__")
        shutil.copytree(EXAMPLES / name, self.folder, ignore=unwanted)
        self.root = self.folder / "state"
        self._left = set(commands_of(self.folder / "README.md"))
        self._environment = {**os.environ, **(environment or {})}
        self._environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), self._environment["PATH"]])
        self._environment.pop(KILL_VARIABLE, None)

    def _take(self, command: str, instead: str | None) -> str:
        assert command in commands_of(self.folder / "README.md"), f"the page does not say: {command}"
        self._left.discard(command)
        return instead or command

    def do(self, command: str, *, instead: str | None = None, code: int = 0) -> str:
        """Run a command of the page to its end; `instead` is the same with less to do."""
        done = subprocess.run(
            self._take(command, instead),
            shell=True,
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        said = done.stdout + done.stderr
        print(f"$ {command}\n{said}")
        assert done.returncode == code, said
        return said

    @contextmanager
    def doing(
        self, command: str, *, instead: str | None = None, kill_at: str = ""
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A command of the page in a terminal of its own."""
        environment = {**self._environment, **({KILL_VARIABLE: kill_at} if kill_at else {})}
        said = self.folder / "said"
        with said.open("wb") as output:
            command = f"exec {self._take(command, instead)}"  # so that the process is the command's, not the shell's
            process = subprocess.Popen(
                command, shell=True, cwd=self.folder, env=environment, stdout=output, stderr=output
            )
        try:
            yield process
            process.wait(_SECONDS)
        except BaseException:
            process.kill()
            process.wait()
            print(said.read_text(encoding="utf-8"))
            raise

    def await_rows(self, process: subprocess.Popen[bytes]) -> None:
        """Until a checkpoint of this run holds rows."""

        def has_some() -> bool:
            assert process.poll() is None, (self.folder / "said").read_text(encoding="utf-8")
            status = read_status(Folder(self.root))
            ours = status.checkpoints if status is not None and status.pid == process.pid else ()
            return any(each.state == "complete" and each.new_bytes for each in ours)

        deadline = time.monotonic() + _SECONDS
        while not has_some():
            assert time.monotonic() < deadline, (self.folder / "said").read_text(encoding="utf-8")
            time.sleep(0.05)

    def check_that_all_was_done(self) -> None:
        assert not self._left, "commands of the page that no test runs"

    # -- what is there ----------------------------------------------------------------------------

    def input(self, name: str) -> Rows:
        files = sorted((self.folder / "input" / name).glob("*.json"))
        return [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]

    def table(self, name: str) -> Rows:
        rows: Rows = deltalake.DeltaTable(self.folder / "lake" / name).to_pyarrow_table().to_pylist()
        return rows


def counted(rows: Rows, *columns: str) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.get(column) for column in columns) for row in rows)


def with_times(rows: Rows, *columns: str) -> Rows:
    return [row | {column: datetime.fromisoformat(row[column]) for column in columns} for row in rows]


def killed_once(visitor: Visitor, run: str, generate: str, less: str, step: str) -> None:
    """The page's live run, killed at a step after it has shown that it works, while there is more input."""
    armed = visitor.folder / "armed"
    with visitor.doing(run, kill_at=f"{step}@{armed}") as process:
        visitor.await_rows(process)
        visitor.do(generate, instead=less)
        assert "is running in process" in visitor.do("tidegate status --root state")
        armed.touch()
        assert process.wait(_SECONDS) == -signal.SIGKILL, (visitor.folder / "said").read_text(encoding="utf-8")
    visitor.do(KILL, instead="true")  # it has killed itself, at a worse moment than anybody could find
    assert "was killed" in visitor.do("tidegate status --root state", code=6)


LIVE = "tidegate run pipeline.py --root state --checkpoint-interval 2s"
TO_THE_END = "tidegate run pipeline.py --root state --available-now"
BIT_BY_BIT = "python generate.py --files 100 --every 0.5"
KILL = "kill -9 PID"


@pytest.mark.soak  # it takes long; kills are in CI
@pytest.mark.slow
@pytest.mark.spark
def test_orders_and_payments_are_joined_and_all_tables_agree_though_the_run_was_killed(tmp_path: Path) -> None:
    visitor = Visitor("orders", tmp_path)
    visitor.do("python generate.py", instead="python generate.py --files 12")
    killed_once(visitor, LIVE, BIT_BY_BIT, "python generate.py --files 4", "sink_committed:1")
    visitor.do(TO_THE_END)
    said = visitor.do("python look.py")
    assert "paid_orders and by_country agree" in said
    assert "twice: 0" in said

    orders = with_times(visitor.input("orders"), "ts")
    assert len(orders) == 1600
    payments = {row["order_id"] for row in visitor.input("payments")}
    paid = [row for row in orders if row["id"] in payments]
    columns = ("id", "ts", "country", "amount")
    assert counted(visitor.table("all_orders"), *columns) == counted(orders, *columns)
    assert counted(visitor.table("paid_orders"), *columns) == counted(paid, *columns)
    assert countries(visitor.table("by_country")) == totals(paid, "country")
    # A window is written when the watermark, ten minutes before the last order that was paid, has passed its end.
    passed = max(row["ts"] for row in paid) - timedelta(minutes=10)
    windows: Counter[tuple[datetime, str]] = Counter()
    for row in paid:
        minute = row["ts"].replace(second=0)
        if minute + timedelta(minutes=1) <= passed:
            windows[minute, row["country"]] += row["amount"]
    assert windows
    assert counted(visitor.table("revenue"), "minute", "country", "amount") == Counter(
        (*window, amount) for window, amount in windows.items()
    )
    for tables in at_every_checkpoint(visitor):
        paid_then = tables["paid_orders"].to_arrow().to_pylist()
        assert countries(tables["by_country"].to_arrow().to_pylist()) == totals(paid_then, "country")
    visitor.check_that_all_was_done()


def countries(rows: Rows) -> dict[str, tuple[int, int]]:
    return {row["country"]: (row["orders"], row["amount"]) for row in rows}


def totals(rows: Rows, column: str) -> dict[str, tuple[int, int]]:
    """How many rows there are, and the sum of their amounts, for each value of the column."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        found[row[column]].append(row["amount"])
    return {value: (len(amounts), sum(amounts)) for value, amounts in found.items()}


def at_every_checkpoint(visitor: Visitor) -> list[TablesAt]:
    """The tables as they were at each that is kept, but for those that a kill left to be shown with a later one."""
    kept = re.findall(r"ckpt-\d+", visitor.do("tidegate checkpoints --root state"))
    assert len(kept) >= 2
    shown = [tidegate.read(visitor.root, max(kept))]
    for checkpoint in set(kept) - {max(kept)}:
        try:
            shown.append(tidegate.read(visitor.root, checkpoint))
        except CheckpointNotVisible as error:
            assert "together with a later one" in str(error)  # noqa: PT017  # only a few runs are killed between two
    return shown


@pytest.mark.soak  # it takes long; kills are in CI
@pytest.mark.slow
@pytest.mark.spark
def test_of_every_customer_the_newest_change_is_shown_though_the_run_was_killed(tmp_path: Path) -> None:
    visitor = Visitor("changes", tmp_path)
    visitor.do("python generate.py", instead="python generate.py --files 12")
    killed_once(visitor, LIVE, BIT_BY_BIT, "python generate.py --files 4", "manifest_written:1")
    visitor.do(TO_THE_END)
    assert "customers is what the log of changes gives" in visitor.do("python look.py")

    changes = visitor.input("changes")
    columns = ("seq", "op", "id", "name", "city", "credit")
    assert counted(visitor.table("change_log"), *columns) == counted(changes, *columns)
    assert len({row["seq"] for row in changes}) < len(changes), "none came twice"
    assert customers_of(visitor.table("customers")) == newest(changes)
    assert {row["deleted"] for row in visitor.table("customers")} == {True, False}
    for tables in at_every_checkpoint(visitor):
        log, customers = (tables[name].to_arrow().to_pylist() for name in ("change_log", "customers"))
        assert customers_of(customers) == newest(log)
    visitor.check_that_all_was_done()


def newest(changes: Rows) -> dict[int, tuple[Any, ...]]:
    found: dict[int, tuple[Any, ...]] = {}
    for row in sorted(changes, key=lambda row: row["seq"]):
        found[row["id"]] = (row["seq"], row["op"] == "delete", row.get("name"), row.get("city"), row.get("credit"))
    return found


def customers_of(rows: Rows) -> dict[int, tuple[Any, ...]]:
    found = {row["id"]: (row["seq"], row["deleted"], row["name"], row["city"], row["credit"]) for row in rows}
    assert len(found) == len(rows), "a key is there twice"
    return found


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.soak  # the shapes have timers and state too
def test_visits_are_made_of_clicks_with_timers_and_state_that_survive_a_kill(tmp_path: Path) -> None:
    # Elsewhere than in UTC: a processor gets times without a zone.
    visitor = Visitor("sessions", tmp_path, {"TZ": "Asia/Tokyo"})
    visitor.do("python generate.py", instead="python generate.py --files 12")
    with visitor.doing(LIVE) as process:
        visitor.await_rows(process)
        visitor.do(BIT_BY_BIT, instead="python generate.py --files 12")
        found = re.search(r"is running in process (\d+)", visitor.do("tidegate status --root state"))
        assert found
        visitor.do(KILL, instead=f"kill -9 {found[1]}")
        assert process.wait(_SECONDS) == -signal.SIGKILL
    visitor.do(TO_THE_END)
    assert "sessions and visitors agree" in visitor.do("python look.py")
    visitor.check_that_all_was_done()

    clicks = with_times(visitor.input("clicks"), "ts")
    passed = max(row["ts"] for row in clicks) - timedelta(minutes=5)
    expected = visits(clicks, passed)
    assert max(row[1] for row in expected) >= 2, "nobody came twice: state has nothing to carry on"
    shown = visitor.table("sessions")
    assert counted(shown, "visitor", "visit", "started", "ended", "clicks") == expected
    last = {row["visitor"]: (row["visit"], row["ended"]) for row in sorted(shown, key=lambda row: row["visit"])}
    assert {row["visitor"]: (row["visit"], row["ended"]) for row in visitor.table("visitors")} == last


def visits(clicks: Rows, passed: datetime) -> Counter[tuple[Any, ...]]:
    """Those that were over when the watermark stood there."""
    silence = timedelta(minutes=10)
    found: Counter[tuple[Any, ...]] = Counter()
    for visitor in {row["visitor"] for row in clicks}:
        moments = sorted(row["ts"] for row in clicks if row["visitor"] == visitor)
        ends = [
            each
            for each, after in zip(moments, [*moments[1:], None], strict=True)
            if not after or after - each > silence
        ]
        started = moments[0]
        for number, ended in enumerate(ends, start=1):
            during = [each for each in moments if started <= each <= ended]
            if ended + silence <= passed:
                found[visitor, number, started, ended, len(during)] += 1
            started = next((each for each in moments if each > ended), ended)
    return found


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.soak  # test_backpressure.py has it too
def test_a_slow_sink_holds_the_source_back_and_checkpoints_do_not_wait_for_it(tmp_path: Path) -> None:
    visitor = Visitor("backpressure", tmp_path)
    visitor.do("python generate.py", instead="python generate.py --files 14")
    bounded = f"{LIVE} --max-backlog-segments 3 --unaligned-after 1s"
    with visitor.doing(bounded, instead=f"{bounded} --available-now") as process:
        visitor.await_rows(process)
        assert "pipeline backpressure" in visitor.do("tidegate status --root state")
    said = (visitor.folder / "said").read_text(encoding="utf-8")
    assert process.returncode == 0, said
    assert "measured is held back by" in said
    assert re.search(r"ckpt-\d+ complete in .*, unaligned", said)
    assert "700 readings, 700 of them scored" in visitor.do("python look.py")
    assert "unaligned" in visitor.do("tidegate checkpoints --root state") + said
    visitor.check_that_all_was_done()

    readings = visitor.input("readings")
    columns = ("sensor", "number", "value")
    assert counted(visitor.table("readings"), *columns) == counted(readings, *columns)
    scored = [row | {"score": row["value"] % 100} for row in readings]
    assert counted(visitor.table("scores"), *columns, "score") == counted(scored, *columns, "score")
    sent = [row for path in (visitor.folder / "outbox").glob("*.json") for row in json.loads(path.read_bytes())]
    alerts = [row for row in scored if row["score"] >= 50]
    assert counted(sent, *columns, "score") == counted(alerts, *columns, "score")


# -- Kafka: its broker is there for `./dev kafka` only ----------------------------------------------


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.spark
def test_payments_come_out_of_kafka_once_in_delta_and_in_postgresql_though_the_run_was_killed(tmp_path: Path) -> None:
    from tests.services import Services

    with Services() as services:
        visitor = Visitor("kafka", tmp_path, services.environment)
        for command in (
            "export KAFKA_SERVERS",
            "export PGHOST",
            "export CONNECTOR",
            "./dev exec python -m tests.services",
        ):
            (given,) = [each for each in commands_of(visitor.folder / "README.md") if each.startswith(command)]
            visitor.do(given, instead="true")  # what they would give is in the environment
        topics = "--bootstrap-server $KAFKA_SERVERS"
        send = f"kafka-console-producer.sh {topics} --topic payments"
        visitor.do(f"kafka-topics.sh {topics} --create --topic payments --partitions 2")
        visitor.do(f"python generate.py | {send}")
        run = "tidegate run pipeline.py --root state --conf $CONNECTOR"
        more = f"python generate.py --first 1000 --count 5000 --every 0.01 | {send}"
        less = f"python generate.py --first 1000 --count 700 | {send}"
        killed_once(visitor, f"{run} --checkpoint-interval 2s", more, less, "sink_committed:1")
        visitor.do(f"{run} --available-now")
        said = visitor.do("python look.py")
        assert "1,666 payments, 34 messages refused" in said
        assert "payments and balances agree" in said
        kept = re.findall(r"ckpt-0*(\d+)", visitor.do("tidegate checkpoints --root state"))
        one = f"tidegate checkpoints {kept[-1]} --root state"
        offsets = re.search(
            r"stands at: topic payments: partition 0 at offset (\d+), partition 1 at offset (\d+)",
            visitor.do("tidegate checkpoints 8 --root state", instead=one),
        )
        assert offsets
        assert int(offsets[1]) + int(offsets[2]) == 1700
        assert "account 0" in visitor.do('psql -c "SELECT * FROM balances ORDER BY account LIMIT 3"')
        visitor.check_that_all_was_done()

        sent = visitor.do(f"python generate.py | {send}", instead="python generate.py --count 1700").splitlines()
        good = [json.loads(line) for line in sent if line.endswith("}")]
        assert counted(visitor.table("payments"), "id", "account", "amount") == counted(good, "id", "account", "amount")
        assert counted(visitor.table("refused"), "text") == Counter((line,) for line in sent if not line.endswith("}"))
        at = counted(visitor.table("payments") + visitor.table("refused"), "partition", "offset")
        assert set(at.values()) == {1}
        where = services.environment
        with psycopg.connect(host=where["PGHOST"], dbname=where["PGDATABASE"], user=where["PGUSER"]) as connection:
            rows = connection.execute("SELECT account, payments, balance::bigint FROM balances").fetchall()
        assert {account: (count, balance) for account, count, balance in rows} == totals(good, "account")
        assert len(rows) == len(totals(good, "account"))


# -- what needs no Spark --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_example_can_be_drawn(name: str) -> None:
    drawing = tidegate_command("graph", EXAMPLES / name / "pipeline.py")
    assert drawing.returncode == 0, drawing.stderr
    assert "sink" in drawing.stdout


def test_every_option_that_a_page_names_is_one_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # so that the help has room for them
    named: dict[str, set[str]] = defaultdict(set)
    for name in NAMES:
        for command in commands_of(EXAMPLES / name / "README.md"):
            if command.startswith("tidegate "):
                named[command.split()[1]] |= set(re.findall(r"--[a-z-]+", command))
    for command, options in named.items():
        assert options <= set(re.findall(r"--[a-z-]+", tidegate_command(command, "--help").stdout)), command


def test_the_page_of_all_examples_lists_each_and_says_how_to_begin_anew() -> None:
    page = EXAMPLES / "README.md"
    listed = re.findall(r"^\| \[(\w+)\]\(\1/README.md\) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == NAMES
    enter, shell, remove = commands_of(page)
    assert (ROOT / enter.removeprefix("cd ")).is_dir()
    assert (ROOT / enter.removeprefix("cd ") / shell.split()[0]).resolve() == ROOT / "dev"
    ignored = re.findall(r"^/examples/\*/(\w+)/$", (ROOT / ".gitignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(remove.removeprefix("rm -rf ").split()) == sorted(ignored)
