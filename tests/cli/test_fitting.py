"""What a run shows of itself fits every terminal, and what matters most is always there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from tests.cli.harness import ended_checkpoint, in_terminal, live_run, said, tidegate, wait_until
from tidegate.cli.fitting import Column, cut_off, fitted, shortened, wrapped
from tidegate.cli.tables import run_lines
from tidegate.engine.status import (
    CheckpointState,
    CheckpointStatus,
    HeldInput,
    Observer,
    RunStatus,
    StagePart,
    StageStatus,
)

# -- names --------------------------------------------------------------------------------------------

NAMES = st.lists(st.from_regex(r"[a-c][a-c_]{0,50}", fullmatch=True), unique=True, min_size=1, max_size=12)


@given(NAMES, st.integers(10, 40))
def test_a_shortened_name_fits_and_stands_for_no_other(names: list[str], width: int) -> None:
    short = shortened(names, width)
    assert len(set(short)) == len(names)
    for name, each in zip(names, short, strict=True):
        assert len(each) <= width
        if len(name) <= width:
            assert each == name
        start, _, end = each.partition("…")
        if not re.fullmatch(r"\d+", end):  # then it is told by its place
            matching = [other for other in names if other.startswith(start) and other.endswith(end or start)]
            assert matching == [name] or each == name


def test_a_name_is_cut_in_its_middle_and_elsewhere_if_names_differ_there() -> None:
    names = ["large_orders_of_all_countries", "small_orders_of_all_countries", "orders"]
    assert shortened(names, 15) == ["large_o…untries", "small_o…untries", "orders"]
    assert shortened(["all_of_de_this_month", "all_of_at_this_month"], 10) == ["all_of_d…h", "all_of_a…h"]


# -- tables -------------------------------------------------------------------------------------------


def test_columns_are_left_out_whole_the_least_important_first() -> None:
    columns = [
        Column("rows", [Text("1,234,567")], 2),
        Column("lag", [Text("12")], 1),
        Column("state", [Text("waiting for orders")], 3, is_number=False, short=[Text("waiting")]),
    ]
    told = {
        width: [line.plain for line in fitted("stage", ["orders_of_today"], columns, width).lines()]
        for width in (None, 60, 50, 45, 35, 25)
    }
    assert told[None] == told[60]
    assert told[60] == [
        "stage                 rows  lag  state",
        "─" * 51,
        "orders_of_today  1,234,567   12  waiting for orders",
    ]
    assert told[50] == [
        "stage                rows lag state",
        "─" * 48,
        "orders_of_today 1,234,567  12 waiting for orders",
    ]
    assert told[45] == ["stage                rows lag state", "─" * 37, "orders_of_today 1,234,567  12 waiting"]
    assert told[35] == ["stage              rows lag state", "─" * 35, "orders…_today 1,234,567  12 waiting"]
    assert told[25] == ["stage         lag state", "─" * 25, "orders…_today  12 waiting"]


@given(st.text(alphabet="ab 漢", max_size=80), st.integers(10, 40), st.integers(1, 4))
def test_a_text_is_wrapped_and_cut_off_between_words(text: str, width: int, count: int) -> None:
    lines = wrapped(Text(text), width)
    assert "".join("".join(line.plain for line in lines).split()) == "".join(text.split())
    shown = cut_off(lines, count, width)
    assert len(shown) <= count
    for line in (*lines, *shown):
        assert cell_len(line.plain) <= width


# -- a run --------------------------------------------------------------------------------------------

STAGE_NAMES = st.lists(st.from_regex(r"[a-z][a-z_]{0,60}", fullmatch=True), unique=True, min_size=1, max_size=20)
PARTS = (
    StagePart(progress="waiting"),
    StagePart(progress="aligning", waits_for=("orders_of_all_countries", "payments")),
    StagePart(progress="catching_up", alignment_ms=12_345, in_flight_bytes=1_234_567, over_bound=True),
    StagePart(progress="recording", waits_for=("payments",), cut_because="timeout", in_flight_bytes=10**12),
    StagePart(progress="done", cut_because="timeout", in_flight_bytes=5),
)


@st.composite
def statuses(draw: st.DrawFn) -> RunStatus:
    names = draw(STAGE_NAMES)
    stages = {
        name: StageStatus(
            "stage",
            draw(st.none() | st.integers(0, 10**9)),
            draw(st.integers(0, 10**12)),
            draw(st.floats(0, 10**7)),
            draw(st.none() | st.integers(0, 10**5)),
            draw(st.none() | st.integers(0, 4 * 10**12)),
            draw(st.none() | st.none() | st.sampled_from([*names, "its table"])),
            has_event_time=draw(st.booleans()),
            held=(HeldInput(names[0], names[-1], draw(st.none() | st.integers(1, 10**12))),) * draw(st.integers(0, 1)),
        )
        for name in names
    }
    last = draw(st.integers(8, 10**7))
    ended = [a_checkpoint(draw, number) for number in range(last - draw(st.integers(0, 8)), last)]
    active = (a_checkpoint(draw, last, dict.fromkeys(names, draw(st.sampled_from(PARTS)))),) * draw(st.integers(0, 1))
    return msgspec.structs.replace(
        Observer(draw(st.from_regex(r"[a-z]{1,60}", fullmatch=True))).status,
        state=draw(st.sampled_from(["running", "stopping"])),
        generation=draw(st.integers(1, 10**4)),
        stages=stages,
        in_progress=active,
        checkpoints=tuple(ended),
    )


def a_checkpoint(draw: st.DrawFn, number: int, stages: dict[str, StagePart] | None = None) -> CheckpointStatus:
    ended: CheckpointState = draw(st.sampled_from(["complete", "committing", "aborted"]))
    state: CheckpointState = ended if stages is None else "preparing"
    why = draw(st.sampled_from(["timeout: stage orders has not stored its part in 10 min 0 s", "failed"]))
    return msgspec.structs.replace(
        ended_checkpoint(number, state, why if state == "aborted" else None),
        aligned=draw(st.booleans()),
        duration_ms=draw(st.integers(0, 10**7)),
        alignment_ms=draw(st.integers(0, 10**7)),
        in_flight_bytes=draw(st.integers(0, 10**13)),
        new_bytes=draw(st.integers(0, 10**13)),
        total_bytes=draw(st.integers(0, 10**13)),
        stages=stages or {},
    )


@settings(max_examples=300, deadline=None)
@given(statuses(), st.integers(40, 160), st.integers(10, 60))
def test_every_run_fits_every_terminal(status: RunStatus, width: int, height: int) -> None:
    lines = [line.plain for line in run_lines(status, width, height)]
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    shown = "\n".join(lines)
    for checkpoint in (*status.in_progress, *status.checkpoints[-1:]):
        assert checkpoint.checkpoint in shown
    if any(stage.held_back_by or stage.held for stage in status.stages.values()):
        assert "is held" in " ".join(shown.split()) or "…" in shown
    if status.state == "stopping":
        assert "stopping after a last checkpoint" in " ".join(shown.split())
    whole = " ".join(line.plain for line in run_lines(status, None))
    known = set(re.findall(r"[\d.,:-]*\d", whole)) | {str(number) for number in range(len(status.stages) + 1)}
    for line in lines:
        if not line.startswith(("and ", "+")):  # a sum
            assert set(re.findall(r"[\d.,:-]*\d", line)) <= known, "a number that is not whole"


def many_stages(count: int = 13) -> RunStatus:
    names = [f"stage_{number:02d}" for number in range(count)]
    stages = {
        name: StageStatus("stage", 1_000 + number, 1_234_567, 100.0, number % 3, 1_767_225_600_000)
        for number, name in enumerate(names)
    }
    ended = tuple(
        msgspec.structs.replace(ended_checkpoint(number), duration_ms=90, new_bytes=5_000, total_bytes=90_000)
        for number in range(41, 49)
    )
    return msgspec.structs.replace(
        Observer("orders").status, state="running", generation=3, stages=stages, checkpoints=ended
    )


def test_thirteen_stages_and_the_last_checkpoints_fit_a_terminal_of_the_usual_size() -> None:
    lines = [line.plain for line in run_lines(many_stages(), 80, 24)]
    assert len(lines) <= 24
    assert [line.split()[0] for line in lines if line.startswith("stage_")] == list(many_stages().stages)
    assert lines[-1].startswith("ckpt-000048")
    assert len([line for line in lines if line.startswith("ckpt-")]) == 5


def test_what_has_something_to_tell_is_shown_before_others_which_are_summed_up() -> None:
    status = many_stages()
    held = msgspec.structs.replace(status.stages["stage_07"], held_back_by="stage_11")
    late = msgspec.structs.replace(status.stages["stage_09"], lag=500)
    parts = dict.fromkeys(status.stages, StagePart(progress="done"))
    active = msgspec.structs.replace(
        ended_checkpoint(49, "preparing"),
        duration_ms=900,
        stages={**parts, "stage_12": StagePart(progress="catching_up")},
    )
    status = msgspec.structs.replace(
        status, stages={**status.stages, "stage_07": held, "stage_09": late}, in_progress=(active,)
    )
    lines = [line.plain for line in run_lines(status, 80, 14)]
    assert len(lines) == 14
    shown = [line.split()[0] for line in lines if line.startswith("stage_") and "held back" not in line]
    assert shown == ["stage_00", "stage_01", "stage_07", "stage_09", "stage_11", "stage_12"]
    assert "and 7 more stages, 700 rows/s; tidegate status shows all" in lines
    assert "stage_07 is held back by stage_11" in lines
    assert "ckpt-000049 in progress for 900 ms: preparing" in lines
    assert lines[-1].startswith("ckpt-000048")


def test_in_the_smallest_terminal_there_is_what_matters_most() -> None:
    assert [line.plain for line in run_lines(many_stages(), 40, 10)] == [
        "pipeline orders, generation 3",
        "stage    rows/s batch lag checkpoint",
        "stage_00    100 1,000   0",
        "stage_01    100 1,001   1",
        "stage_02    100 1,002   2",
        "stage_03    100 1,003   0",
        "and 9 more stages, 900 rows/s",
        "no checkpoint in progress",
        "checkpoint  duration    new state",
        "ckpt-000048    90 ms 5.0 kB complete",
    ]


# -- the commands -----------------------------------------------------------------------------------------


def test_every_command_that_shows_a_table_fits_a_narrow_terminal_and_is_whole_in_a_pipe(tmp_path: Path) -> None:
    with live_run(tmp_path, checkpoints=3) as run:
        wait_until(lambda: (status := said(run.root)) is not None and status.state == "running")
        for command in (("status",), ("checkpoints",), ("checkpoints", "2"), ("verify",)):
            piped = tidegate(*command, "--root", run.root)
            narrow = in_terminal(*command, "--root", run.root, width=50)
            assert (narrow.returncode, piped.returncode) == (0, 0), narrow.stdout + piped.stderr
            known = {word.strip(",;:()") for word in piped.stdout.split()}
            tables = re.sub(r"\x1b\[[\d;]*m", "", narrow.stdout).split("source rows stands")[0]
            for line in tables.splitlines():
                assert len(line) <= 50, line
                assert "…" not in line
                for number in re.findall(r"(?<!\S)[\d,.]+(?!\S)", line):
                    assert number.strip(".,") in known or "status" in command, line
            assert "ckpt-00000" in tables
