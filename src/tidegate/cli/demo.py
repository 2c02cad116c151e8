"""`tidegate demo`: a real pipeline on Spark that is killed twice, and a verdict on what its tables hold."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.rule import Rule

from tidegate.cli.answers import ComparedTable, DemoAnswer, ErrorAnswer
from tidegate.cli.checkpoints import newest_manifest
from tidegate.cli.demo_drivers import DemoDrivers
from tidegate.cli.exits import Exit
from tidegate.cli.options import AsJson, check_writable
from tidegate.cli.speech import say
from tidegate.cli.tables import run_lines
from tidegate.cli.text import plain_table
from tidegate.engine.kill_points import VARIABLE as KILL_VARIABLE
from tidegate.engine.status_files import read_status
from tidegate.errors import InvalidConfig
from tidegate.storage.places import Place, RootInFolder, as_given

_PIPELINE: Final = Path(__file__).parent / "demo_pipeline" / "orders.py"
_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_COUNTRIES: Final = ("DE", "FR", "IT", "PL")
# The last order is far in the future, so that the windows before it close. Its own never does.
_FUTURE: Final = timedelta(days=10)
_WINDOW: Final = timedelta(minutes=1)
_LEAVE_THE_VIEW: Final = "\x1b[?25h\n"  # a run that was killed has left the cursor hidden, at the end of its table
_PICTURE_WIDTH: Final = 100

# Fonts that would be fetched from elsewhere, where they came from, and a clipping path for every line.
_NEEDLESS_IN_PICTURES: Final = (
    re.compile(r"@font-face \{.*?\}\s*", re.DOTALL),
    re.compile(r"<!--.*?-->\s*", re.DOTALL),
    re.compile(r'<clipPath id="[^"]*-line-\d+">.*?</clipPath>\s*', re.DOTALL),
    re.compile(r' clip-path="url\([^"]*-line-\d+\)"'),
)

# A step of the protocol, and which one since the run has shown that it works; and what a kill there means.
_KILLS: Final = (
    ("manifest_written:1", "when a checkpoint is written down but not decided yet"),
    ("sink_committed:1", "as soon as the first of three tables shows a checkpoint"),
)
_FEED_EVERY_S: Final = 0.6
# Four JVMs live for half a minute each: what the second compiler would gain them comes too late.
_WARM_SOON: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
_ARM_AT_LATEST_S: Final = 120
_ENDS_IN_S: Final = 120

Rows = Counter[tuple[Any, ...]]


def demo_command(
    files: Annotated[int, typer.Option(min=3, help="How many files of orders to generate.")] = 36,
    rows: Annotated[int, typer.Option(min=1, help="Rows in each.")] = 250,
    drivers: Annotated[
        int, typer.Option(min=1, help="How many drivers run it; with several, the one that leads is killed.")
    ] = 1,
    root: Annotated[
        Place | None,
        typer.Option(
            metavar="PLACE",
            parser=as_given,
            help="Where its checkpoints go: nothing may be there. By default a folder that is removed in the end.",
        ),
    ] = None,
    svg: Annotated[Path | None, typer.Option(dir_okay=False, help="Write what is seen to this picture.")] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show it in a browser too, and go on after the verdict, until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline on Spark, kill it twice at bad moments, and compare its tables with a batch job.

    Orders and payments come in all the time and meet in a join; an aggregation over windows follows; three Delta
    tables come out of it. A checkpoint is taken every three seconds. The process is killed with SIGKILL after it has
    written a manifest but not decided the checkpoint, and again as soon as the first of the tables shows one. In the
    end a batch job over the same input says what the tables must hold.

    With --drivers 3, three processes run it together, the one that leads is killed, and another takes over. With --root
    s3://bucket/demo, its checkpoints go to a bucket, and the last run goes on from them as if on another machine.

    With --dashboard, it says where a browser shows all of it; after the verdict the pipeline goes on with new orders,
    until you press Ctrl-C.

    Takes a minute or two. Exits with 0 if no row is lost and none is there twice.

    Example: tidegate demo

    Example: tidegate demo --drivers 3

    Example: tidegate demo --root s3://bucket/demo
    """
    if root is not None and not root.is_empty():
        raise InvalidConfig(f"something is in {root} already; the demo wants a root of its own")
    if svg is not None:
        check_writable("--svg", svg)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # which would leave its runs behind
        signal.signal(signal.SIGTERM, _on_told_to_end)
    teller = _Teller()
    try:
        verdict = _show(files, rows, drivers, teller, root, with_dashboard=dashboard)
    except typer.Exit as ended:
        if as_json:
            why = f"a run of the demo ended with {ended.exit_code}; it says why on stderr"
            say(ErrorAnswer(error="RunFailed", message=why, retry_helps=False, exit=ended.exit_code))
        raise
    if svg is not None:
        teller.draw(svg)
    if as_json:
        say(verdict)
    raise typer.Exit(Exit.FINE if _is_right(verdict) else Exit.FAILED)


def _on_told_to_end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(Exit.INTERRUPTED)


def _show(
    files: int, rows: int, drivers: int, teller: _Teller, given: Place | None, *, with_dashboard: bool
) -> DemoAnswer:
    with tempfile.TemporaryDirectory(prefix="tidegate-demo-") as name, ExitStack() as stack:
        folder = Path(name)
        root = as_given(folder / "root") if given is None else given
        if with_dashboard:
            stack.enter_context(_dashboard(root, folder, teller))
        is_folder = isinstance(root, RootInFolder)
        machines = [[] if is_folder else ["--work", str(folder / f"machine-{number}")] for number in (1, 1, 2)]
        os.environ["TIDEGATE_DEMO_FOLDER"] = name
        os.environ.setdefault("JAVA_TOOL_OPTIONS", _WARM_SOON)
        feed = _Feed(folder, files, rows)
        teller.say(f"{files * rows:,} orders and as many payments are on their way")
        if drivers > 1:
            with DemoDrivers(folder, _command(root), drivers, feed, teller, root) as together:
                kills = together.show()
                verdict = _judge(folder, root, teller, kills=kills)
            if with_dashboard:
                _go_on(root, feed, machines[-1], teller)
            return verdict
        for number, (step, when) in enumerate(_KILLS, start=1):
            teller.say(Rule(f"run {number}: to be killed {when}"))
            feed.share(number, len(_KILLS) + 1)
            _run_until_killed(root, feed, step, folder / f"armed-{number}", machines[number - 1])
            teller.show_the_end_of_run(root)
            teller.say("[yellow]killed with SIGKILL[/]")
        feed.put_all()
        where = "" if is_folder else ", with nothing of the others but the bucket"
        teller.say(Rule(f"run {len(_KILLS) + 1}: to the end of the input{where}"))
        _run_to_the_end(root, machines[-1])
        teller.show_the_end_of_run(root)
        verdict = _judge(folder, root, teller, kills=len(_KILLS))
        if with_dashboard:
            _go_on(root, feed, machines[-1], teller)
        return verdict


@contextmanager
def _dashboard(root: Place, folder: Path, teller: _Teller) -> Iterator[None]:
    """On the port that it has by default, or any other."""
    from tidegate.cli.dashboard import PORT, open_dashboard

    token = folder / "dashboard.token"
    try:
        board, _ = open_dashboard([root], port=PORT, allow_actions=True, token_file=token)
    except InvalidConfig:
        board, _ = open_dashboard([root], port=0, allow_actions=True, token_file=token)
    with board:
        teller.say(f"the dashboard is at {board.url}; for its actions, the token is in {token}")
        yield


def _go_on(root: Place, feed: _Feed, arguments: Sequence[str], teller: _Teller) -> None:
    """With new input, for whoever looks at it, until Ctrl-C, which the run hears too."""
    teller.say(Rule("the pipeline goes on, for you to look at; Ctrl-C ends it"))
    feed.put_for_ever()
    with _running(root, *arguments) as process:
        try:
            while process.poll() is None:
                feed.put_if_due()
                time.sleep(0.05)
        except KeyboardInterrupt:
            process.wait(_ENDS_IN_S)


class _Teller:
    """Speaks to the terminal, and keeps all of it for a picture."""

    def __init__(self) -> None:
        self._screen = Console(highlight=False)
        self._picture = Console(record=True, file=io.StringIO(), width=_PICTURE_WIDTH, highlight=False)

    @property
    def width(self) -> int:
        """What fits both."""
        return min(self._screen.width, self._picture.width)

    def say(self, what: RenderableType) -> None:
        self._screen.print(what)
        self._picture.print(what)

    def show_the_end_of_run(self, root: Place) -> None:
        """The run itself has shown it on the terminal, if there is one."""
        if sys.stdout.isatty():
            sys.stdout.write(_LEAVE_THE_VIEW)
            sys.stdout.flush()
        status = read_status(root.files)
        if status is not None:
            self._picture.print(Group(*run_lines(status, self._picture.width)))

    def draw(self, path: Path) -> None:
        picture = self._picture.export_svg(title="tidegate demo")
        for needless in _NEEDLESS_IN_PICTURES:
            picture = needless.sub("", picture)
        path.write_text(picture, encoding="utf-8")


class _Feed:
    """The input: orders, a second apart, and a payment within the hour for each. It comes file by file."""

    def __init__(self, folder: Path, files: int, rows: int) -> None:
        self._folder = folder
        self._files = files
        self._rows = rows
        self._put = 0
        self._put_s = 0.0
        self._share = 1
        for name in ("orders", "payments"):
            (folder / name).mkdir()
        self._put_next()  # a source wants to find something when it starts

    def share(self, run: int, runs: int) -> None:
        """A run gets its part and no more, however slow it is: the next ones need something new too."""
        self._share = self._files * run // runs

    def put_if_due(self) -> None:
        if self._put < self._share and time.monotonic() - self._put_s >= _FEED_EVERY_S:
            self._put_next()

    def put_for_ever(self) -> None:
        """From now on there is always more."""
        self._share = sys.maxsize

    def put_all(self) -> None:
        while self._put < self._files:
            self._put_next()

    def _put_next(self) -> None:
        orders, payments = [], []
        for each in range(self._put * self._rows, (self._put + 1) * self._rows):
            is_last = each >= self._files * self._rows - 1  # or after that
            moment = _START + timedelta(seconds=each) + (_FUTURE if is_last else timedelta())
            country = _COUNTRIES[each % len(_COUNTRIES)]
            orders.append({"id": each, "ts": moment.isoformat(), "country": country, "amount": each})
            payments.append({"order_id": each, "paid_at": (moment + timedelta(minutes=each % 50)).isoformat()})
        for name, found in (("orders", orders), ("payments", payments)):
            hidden = self._folder / name / f".{self._put:05d}.tmp"
            hidden.write_text("\n".join(json.dumps(row) for row in found), encoding="utf-8")
            # Spark takes files in the order of their times.
            os.utime(hidden, (1_700_000_000 + self._put, 1_700_000_000 + self._put))
            hidden.rename(self._folder / name / f"{self._put:05d}.json")
        self._put += 1
        self._put_s = time.monotonic()


@contextmanager
def _running(root: Place, *arguments: str, kill_at: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The pipeline in a process of its own, with its own view. Whatever ends the demo ends it, too."""
    environment = {key: value for key, value in os.environ.items() if key != KILL_VARIABLE}
    if kill_at is not None:
        environment[KILL_VARIABLE] = kill_at
    with subprocess.Popen([*_command(root), *arguments], env=environment) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def _command(root: Place) -> list[str]:
    command = [sys.executable, "-m", "tidegate", "run", str(_PIPELINE), "--root", str(root)]
    return [*command, "--checkpoint-interval", "3s"]


def _run_until_killed(root: Place, feed: _Feed, step: str, armed: Path, arguments: Sequence[str]) -> None:
    """Let it work until a checkpoint of it holds new rows; then it kills itself at the step."""
    started = looked = time.monotonic()
    with _running(root, *arguments, kill_at=f"{step}@{armed}") as process:
        while process.poll() is None:
            feed.put_if_due()
            now = time.monotonic()
            if now - looked >= root.pace.ask_every_s:
                looked = now
                if _has_worked(root, process.pid) or now - started > _ARM_AT_LATEST_S:
                    armed.touch()
            time.sleep(0.05)
    if process.returncode != -signal.SIGKILL:
        raise typer.Exit(process.returncode or Exit.FAILED)


def _has_worked(root: Place, pid: int) -> bool:
    status = read_status(root.files)
    if status is None or status.pid != pid:
        return False
    return any(
        each.state == "complete" and each.new_bytes and each.generation == status.generation
        for each in status.checkpoints
    )


def _run_to_the_end(root: Place, arguments: Sequence[str]) -> None:
    with _running(root, *arguments, "--available-now") as process:
        code = process.wait()
    if code != 0:
        raise typer.Exit(code)


# -- the verdict ----------------------------------------------------------------------------------


def _judge(folder: Path, root: Place, teller: _Teller, kills: int) -> DemoAnswer:
    teller.say(Rule("verdict: the tables against a batch job over the same input"))
    inspected, manifest = newest_manifest(root)
    assert manifest is not None
    expected = _expected(folder)
    still_open = take_open_windows(expected["revenue"], manifest.stages["revenue"].watermark_ms or 0)
    tables = {name: compare(wanted, _found(folder / "lake" / name)) for name, wanted in expected.items()}
    log = inspected.log()
    # Every slot of the log is a generation that was opened or a checkpoint that was completed.
    verdict = DemoAnswer(tables=tables, checkpoints=log.next_slot - 1 - log.generation, kills=kills)
    _tell(verdict, still_open, teller)
    return verdict


def _tell(verdict: DemoAnswer, still_open: int, teller: _Teller) -> None:
    table = plain_table(("table",), ("rows expected", "rows found", "lost", "duplicated"))
    for name, each in verdict.tables.items():
        counts = (each.expected, each.found, each.lost, each.duplicated)
        table.add_row(name, *(f"{count:,}" for count in counts))
    teller.say(table)
    if still_open:
        teller.say(f"{still_open} window of revenue is still open: a stream writes a window when its time is over")
    kills = "1 kill" if verdict.kills == 1 else f"{verdict.kills} kills"
    teller.say(f"{verdict.checkpoints} checkpoints taken, {kills} survived")
    if unexpected := sum(each.unexpected for each in verdict.tables.values()):
        teller.say(f"[red]{unexpected:,} rows are in a table that no batch job would write")
    is_right = _is_right(verdict)
    teller.say("[green]nothing lost, nothing twice" if is_right else "[red]rows are missing, or are there twice")


def _is_right(verdict: DemoAnswer) -> bool:
    return not any(each.lost or each.duplicated or each.unexpected for each in verdict.tables.values())


def compare(wanted: Rows, found: Rows) -> ComparedTable:
    more = found - wanted
    duplicated = sum(count for row, count in more.items() if row in wanted)
    lost = (wanted - found).total()
    return ComparedTable(wanted.total(), found.total(), lost, duplicated, more.total() - duplicated)


def _expected(folder: Path) -> dict[str, Rows]:
    """What the same functions give as a batch job, in Spark, over the same input."""
    from tidegate.cli.load import load_pipeline
    from tidegate.engine.batch_job import batch_job
    from tidegate.spark.session import own_session

    session = own_session("tidegate demo, the batch job", folder / "batch.log")
    try:
        return {
            name: _rows(frame.toArrow())
            for name, frame in batch_job(load_pipeline(_PIPELINE, None, to_run=True), session).items()
        }
    finally:
        session.stop()


def take_open_windows(revenue: Rows, watermark_ms: int) -> int:
    """Take out the windows that had not ended by the stream's watermark: the stream holds them open, rightly."""
    watermark = datetime.fromtimestamp(watermark_ms / 1000, UTC)
    still_open = [row for row in revenue if row[0] + _WINDOW > watermark]
    for row in still_open:
        del revenue[row]
    return len(still_open)


def _found(path: Path) -> Rows:
    import deltalake

    from tidegate.sinks.delta.reading import TableAt

    return _rows(TableAt(path, deltalake.DeltaTable(path).version()).to_arrow())


def _rows(table: Any) -> Rows:
    """The rows of a pyarrow table, each with how often it is there."""
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))
