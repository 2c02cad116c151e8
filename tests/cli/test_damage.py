"""Damage of every kind to every file of a checkpoint: always noticed, named, and undone by putting the file back.

The root is made once, by a played Spark, with all kinds of files: a manifest, lists, files of snapshots with and
without state, segments in flight, rows staged for a table that does not show them yet, and the decision log. Each case
damages one file, asks `tidegate verify` and what a start decides, puts the file back, and asks both again.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import deltalake
import pytest
import typer
from deltalake import CommitProperties, Transaction

import tidegate as tg
from tests.cli.test_outlook import _COLUMNS
from tests.mutants.played_properties import run_ahead
from tests.spark import played as playing
from tests.spark.played import Queries, played
from tidegate.cli.exits import code_of
from tidegate.cli.verify import verify_command
from tidegate.engine.generation import Ground
from tidegate.engine.opening import RootOpening
from tidegate.engine.root import Root
from tidegate.engine.tables import address_of, check_goes_on
from tidegate.errors import DamagedLog, RecoveryRefused, TidegateError
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.contract import SinkPlace, decode_committable
from tidegate.storage.inspection import InspectedRoot, references
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import as_given
from tidegate.testing.played import Plan

_EACH = 3  # batches before each checkpoint


class Made(NamedTuple):
    root: Path
    table: Path
    newest: int
    shown_batches: dict[int, int]
    """How many batches of the sink each checkpoint has cut."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A root whose newest checkpoint is unaligned, and shown by no table yet."""
    folder = tmp_path_factory.mktemp("made")
    live, aside = folder / "live", folder / "aside"
    table = live / "lake" / "table"
    deltalake.DeltaTable.create(table, deltalake.Schema.from_json(_COLUMNS))
    config = CheckpointConfig(interval_ms=3_600_000, alignment=AlignmentConfig("always"))
    queries = Queries({"middle": Plan(has_state=True, partitions=1)})
    shown: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playing, "Ground", partial(Ground, most_in_a_manifest=4))  # so that there are lists
        with played(live, config=config, queries=queries) as pipeline:
            for number in range(1, 5):
                for _ in range(_EACH):
                    pipeline.one_batch_each()
                for _ in pipeline.played["middle"].query.maintain():  # full snapshots of its state
                    pass
                if number == 4:
                    pipeline.table.may_commit.clear()
                    run_ahead(pipeline, 2)
                    pipeline.generation.poll()
                    newest = pipeline.generation.trigger()
                    pipeline.poll_until(partial(pipeline.generation.completed, newest))
                else:
                    pipeline.checkpoint()
                manifest = pipeline.newest()
                shown[manifest.checkpoint_id] = (manifest.stages["table"].cut or 0) + 1
            shutil.copytree(live, aside)  # before the table takes what is staged for it
    shutil.rmtree(live)
    aside.rename(live)
    show(table, newest - 1, shown[newest - 1])
    return Made(live / "root", table, newest, shown)


def show(table: Path, epoch: int, next_batch: int) -> None:
    """Let the table say that it shows an epoch."""
    found = deltalake.DeltaTable(table)
    records = [Transaction(f"tidegate/flat/table/{what}", n) for what, n in (("epoch", epoch), ("batch", next_batch))]
    properties = CommitProperties(app_transactions=records)
    found.create_write_transaction([], "append", found.schema(), commit_properties=properties)


# -- every file -------------------------------------------------------------------------------------


def needed(made: Made) -> dict[Path, str]:
    """The files that the newest checkpoint needs, and what each is."""
    inspected = InspectedRoot(made.root)
    record = inspected.find(made.newest)
    manifest = inspected.manifest(record)
    in_flight = {name for stage in manifest.stages.values() for name in stage.in_flight_files()}
    found = {made.root / record.manifest: "manifest"}
    for name in sorted(references(inspected.files, manifest)):
        kind = "in flight" if name in in_flight else "list" if "/lists/" in name else _kind_of_snapshot(name)
        found[made.root / name] = kind
    sealed = manifest.stages["table"].committable
    assert sealed is not None
    shown = made.shown_batches[made.newest - 1]
    found |= {Path(each.path): "staged" for each in decode_committable(sealed).files if each.batch >= shown}
    return found


def _kind_of_snapshot(name: str) -> str:
    below = name.split("/")[5:]
    if below[0] == "state":
        last = below[-1]
        return f"state: {'metadata' if '_metadata' in below or 'metadata' in below else last.rpartition('.')[2]}"
    return below[0]


def records(made: Made) -> dict[Path, str]:
    """The records of the decision log that count."""
    log = InspectedRoot(made.root).log()
    slots = [*log.kept_before_start, *(each.slot for each in log)]
    last = log.next_slot - 1
    return {
        made.root / RootPaths.decision(slot): "decision, the last" if slot == last else "decision"
        for slot in sorted(slots)
    }


# -- every kind of damage ---------------------------------------------------------------------------


def missing(path: Path, _other: Path) -> None:
    path.unlink()


def emptied(path: Path, _other: Path) -> None:
    path.write_bytes(b"")


def cut_in_half(path: Path, _other: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_by_a_byte(path: Path, _other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def a_byte_longer(path: Path, _other: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def zeroed(path: Path, _other: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flipped(where: float, path: Path, _other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(len(data) * where))] ^= 1
    path.write_bytes(data)


def swapped(path: Path, other: Path) -> None:
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


def a_number_edited(path: Path, _other: Path) -> None:
    """In JSON that stays valid and says something else."""
    text = path.read_text(encoding="utf-8")
    numbers = list(re.finditer(r"(?<=[:\[,])(\s*)(\d+)(?=[,}\]\s])", text))
    number = numbers[len(numbers) // 2]
    edited = f"{text[: number.start(2)]}{int(number[2]) + 1}{text[number.end(2) :]}"
    assert json.loads(edited) != json.loads(text)
    path.write_text(edited, encoding="utf-8")


Damage = Callable[[Path, Path], None]
KINDS: dict[str, Damage] = {
    "missing": missing,
    "emptied": emptied,
    "cut in half": cut_in_half,
    "cut by a byte": cut_by_a_byte,
    "a byte longer": a_byte_longer,
    "zeroed": zeroed,
    "one bit, first byte": partial(flipped, 0.0),
    "one bit, in the middle": partial(flipped, 0.5),
    "one bit, last byte": partial(flipped, 1.0),
    "swapped with another": swapped,
    "a number edited": a_number_edited,
}
_SAME_SIZE = ("zeroed", "one bit, first byte", "one bit, in the middle", "one bit, last byte", "swapped with another")


def can_hit(damage: str, kind: str, path: Path, other: Path) -> bool:
    """Of an empty file there is nothing to cut or flip. Staged files are known by their sizes alone."""
    if damage == "a number edited":
        return kind in ("manifest", "list") or kind.startswith("decision")
    if damage == "swapped with another" and (path == other or path.read_bytes() == other.read_bytes()):
        return False
    if kind == "staged" and damage in _SAME_SIZE:
        return damage == "swapped with another" and path.stat().st_size != other.stat().st_size
    return path.stat().st_size > 0 or damage in ("missing", "a byte longer")


# -- what notices it --------------------------------------------------------------------------------


def verified(made: Made, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of `tidegate verify`, and what it says."""
    capsys.readouterr()
    try:
        verify_command(as_given(made.root))
    except typer.Exit as ended:
        return ended.exit_code, capsys.readouterr().out
    except TidegateError as error:
        return code_of(error), str(error)
    return 0, capsys.readouterr().out


def decided(made: Made) -> tuple[str, str]:
    """What a run that starts now decides, and why. Nothing is changed by asking."""
    root = Root(made.root, "flat")
    sink = tg.DeltaTable(made.table).bind(SinkPlace("flat", "table", root.store.at("sinks/table"), root=root.id))
    opening = RootOpening(root, {"table": sink})
    try:
        log, base = opening.foreseen()
        if base is not None:
            check_goes_on(sink, address_of(sink), base, log, root.store)
    except (RecoveryRefused, DamagedLog) as refused:
        return "refuses", str(refused)
    why = "; ".join(filter(None, opening._flow.health.values()))
    if base is None:
        return "falls back, behind a fence", why
    return f"goes on from {checkpoint_name(base.checkpoint_id)}", why


def check_whole(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = verified(made, capsys)
    assert code == 0, said
    assert decided(made) == (f"goes on from {checkpoint_name(made.newest)}", "")


def named(path: Path, made: Made) -> set[str]:
    """By what people are told of it. A slot is a file of the log's folder."""
    names = {str(path), path.name}
    if path.is_relative_to(made.root):
        names = {path.relative_to(made.root).as_posix()}
    if path.parent.name == RootPaths.DECISIONS:
        slot = RootPaths.slot_of(path.name)
        names |= {f"slot {slot} ", f"slot {slot};", "the decision log ends at", "its record is missing"}
    return names


def put_back(files: dict[Path, bytes]) -> None:
    for path, data in files.items():
        path.write_bytes(data)


def tried(
    made: Made, files: dict[Path, str], damage: str, capsys: pytest.CaptureFixture[str]
) -> Iterator[tuple[str, str]]:
    """Each file that the damage can hit, by what it is, and what a start then decides."""
    paths, whole_again = list(files), set[str]()
    for index, (path, kind) in enumerate(files.items()):
        same = [each for each in paths if files[each].split(",")[0] == kind.split(",")[0] and each != path]
        other = same[0] if same else paths[index - 1]
        if not can_hit(damage, kind, path, other):
            continue
        before = {each: each.read_bytes() for each in (path, other)}
        # What is kept may be one file by several names: the damage is to this one.
        for each in before:
            each.unlink()
        put_back(before)
        KINDS[damage](path, other)
        what = f"{damage}: {kind}, {path}"
        try:
            code, said = verified(made, capsys)
            decision, why = decided(made)
            assert code == 4, f"{what} is not noticed: {said}"
            assert decision != f"goes on from {checkpoint_name(made.newest)}", f"{what} is not noticed by a start"
            both = before if damage == "swapped with another" else [path]
            for told in (said, why):
                assert any(name in told for each in both for name in named(each, made)), f"{what} is told as: {told}"
        finally:
            put_back(before)
        if kind not in whole_again:
            whole_again.add(kind)
            check_whole(made, capsys)
        yield kind, decision
    check_whole(made, capsys)


KINDS_OF_FILES = {
    "manifest", "list", "in flight", "staged", "commits", "metadata", "offsets", "sources",
    "state: metadata", "state: changelog", "state: zip", "state: sst", "decision", "decision, the last",
}  # fmt: skip


def test_the_root_has_files_of_every_kind(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    check_whole(made, capsys)
    assert {*needed(made).values(), *records(made).values()} == KINDS_OF_FILES


@pytest.mark.slow
@pytest.mark.parametrize("damage", KINDS)
def test_damage_to_a_file_of_the_newest_checkpoint_is_noticed_named_and_undone_by_putting_it_back(
    made: Made, damage: str, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    cases = Counter(kind for kind, _ in tried(made, needed(made), damage, capsys))
    record_property(f"{damage}: cases", cases.total())
    print(f"{damage}: {cases.total()} cases ({dict(cases)})")
    assert cases.total()


@pytest.mark.slow
@pytest.mark.parametrize("damage", KINDS)
def test_damage_to_a_record_of_the_decision_log_is_noticed_named_and_undone_by_putting_it_back(
    made: Made, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table shows the newest checkpoint: only then can it tell that the log has lost its last record."""
    log = made.table / "_delta_log"
    before = set(log.iterdir())
    show(made.table, made.newest, made.shown_batches[made.newest])
    try:
        found = list(tried(made, records(made), damage, capsys))
    finally:
        for path in set(log.iterdir()) - before:
            path.unlink()
    print(f"{damage}: {len(found)} cases")
    assert found
    assert {decision for _, decision in found} == {"refuses"}
