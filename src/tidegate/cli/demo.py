"""`tidegate demo`: a real pipeline on Spark that is killed twice, and a verdict on what its tables hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table

_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_COUNTRIES: Final = ("DE", "FR", "IT", "PL")
# A row far in the future lets the windows before it close; it is in no window that closes itself.
_FUTURE: Final = timedelta(days=10)
_KILLS: Final = ("manifest_written:3", "sink_committed:7")

Rows = Counter[tuple[Any, ...]]


def demo_command(
    files: Annotated[int, typer.Option(min=2, help="How many files of orders to generate.")] = 40,
    rows: Annotated[int, typer.Option(min=1, help="Rows in each.")] = 200,
) -> None:
    """Run a pipeline on Spark, kill it twice at bad moments, and count what its tables hold in the end.

    Orders and payments meet in a join; an aggregation follows; three Delta tables come out of it. A checkpoint is
    taken every two seconds. The process is killed with SIGKILL after it has written a manifest but not decided the
    checkpoint, and again when one of the tables is committed but not the others.

    Example: tidegate demo
    """
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="tidegate-demo-") as name:
        folder = Path(name)
        expected = _generate(folder, files, rows)
        killed = sum(_run(folder, console, kill_at) for kill_at in (*_KILLS, None))
        ok = _judge(folder, console, expected, killed)
    raise typer.Exit(0 if ok else 1)


def _generate(folder: Path, files: int, rows: int) -> dict[str, Rows]:
    """Write the input, and work out what each table must hold, as a batch job would."""
    for name in ("orders", "payments"):
        (folder / name).mkdir()
    total = files * rows
    revenue: Counter[tuple[datetime, str]] = Counter()
    for number in range(files):
        orders, payments = [], []
        for each in range(number * rows, (number + 1) * rows):
            moment = _START + timedelta(seconds=each) + (_FUTURE if each == total - 1 else timedelta())
            country = _COUNTRIES[each % len(_COUNTRIES)]
            orders.append({"id": each, "ts": moment.isoformat(), "country": country, "amount": each})
            payments.append({"order_id": each, "paid_at": (moment + timedelta(minutes=each % 50)).isoformat()})
            if each != total - 1:
                revenue[moment.replace(second=0), country] += each
        for name, found in (("orders", orders), ("payments", payments)):
            path = folder / name / f"{number:05d}.json"
            path.write_text("\n".join(json.dumps(row) for row in found), encoding="utf-8")
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    order_rows = Counter({(each, _COUNTRIES[each % len(_COUNTRIES)], each): 1 for each in range(total)})
    return {
        "order_log": order_rows,
        "paid_orders": order_rows,
        "revenue": Counter({(minute, country, amount): 1 for (minute, country), amount in revenue.items()}),
    }


def _run(folder: Path, console: Console, kill_at: str | None) -> bool:
    """Run the pipeline in a process of its own. Tells whether it was killed."""
    how = "to its end" if kill_at is None else f"until it is killed at {kill_at.split(':')[0].replace('_', ' ')}"
    console.rule(f"run {how}")
    environment = {**os.environ, "TIDEGATE_DEMO_FOLDER": str(folder)}
    environment.pop("TIDEGATE_KILL_AT", None)
    if kill_at is not None:
        environment["TIDEGATE_KILL_AT"] = kill_at
    command = [sys.executable, "-m", "tidegate", "run", str(Path(__file__).with_name("demo_pipeline.py"))]
    command += ["--root", str(folder / "root"), "--available-now", "--checkpoint-interval", "2s"]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code == -signal.SIGKILL:
        console.print("[yellow]killed[/]")
        return True
    if code != 0:
        raise typer.Exit(code)
    return False


def _judge(folder: Path, console: Console, expected: dict[str, Rows], killed: int) -> bool:
    from tidegate.storage.decisions import StoredDecisions
    from tidegate.storage.store import Store

    console.rule("verdict")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("table")
    for heading in ("rows expected", "found", "lost", "doubled"):
        table.add_column(heading, justify="right")
    ok = True
    for name, wanted in expected.items():
        found = _rows(folder / "lake" / name)
        lost, doubled = wanted - found, found - wanted
        ok = ok and not lost and not doubled
        counts = [sum(each.values()) for each in (wanted, found, lost, doubled)]
        table.add_row(name, *(f"{count:,}" for count in counts))
    console.print(table)
    log = StoredDecisions(Store(folder / "root")).read()
    console.print(f"{killed} kills survived, {log.last_checkpoint_id} checkpoints begun, {log.generation} generations")
    console.print("[green]nothing lost, nothing twice" if ok else "[red]rows are missing or doubled")
    return ok


def _rows(path: Path) -> Rows:
    import deltalake

    table = deltalake.DeltaTable(path)
    columns = [field.name for field in table.schema().fields]
    return Counter(tuple(row[name] for name in columns) for row in table.to_pyarrow_table().to_pylist())
