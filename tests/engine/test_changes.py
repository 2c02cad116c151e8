"""What a pipeline that has changed since its checkpoint starts from, and what of it is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.engine.test_chains import manifest, snapshot
from tidegate.engine.chains import as_queries, by_query, cannot_join, chains_of
from tidegate.engine.changes import Meant, TakenUp, take_up
from tidegate.errors import InvalidConfig, PipelineChanged
from tidegate.protocol.messages import Segment, SegmentFile
from tidegate.sinks.contract import Committable, decode_committable
from tidegate.spark.definition import StageDefinition
from tidegate.storage.file_lists import SnapshotFile, SnapshotFiles
from tidegate.storage.manifest import Manifest, SourceStream, StageShape, StageSnapshot, StageState, StateOperator
from tidegate.storage.memory import Memory

COLUMNS = "struct<id:bigint>"
STREAM = SourceStream("json", {"path": "/in"})
STATELESS = StageState("4.3.0")
SOURCE = StageShape("source", (), "append", COLUMNS, state=STATELESS)


def reading(*inputs: str, kind: Any = "stage", **given: Any) -> StageShape:
    return StageShape(kind, inputs, "append", COLUMNS, **{"state": STATELESS, **given})


SHAPE = {
    "rows": msgspec.structs.replace(SOURCE, streams=(STREAM,)),
    "middle": reading("rows"),
    "table": reading("middle", kind="sink"),
}
MORE = {
    **SHAPE,
    "other": SOURCE,
    "more": reading("middle", "other"),
    "more_table": reading("more", kind="sink"),
}
COUNTS = StageState("4.3.0", (StateOperator("aggregation"),))


def base(shape: dict[str, StageShape] = SHAPE, **stages: StageSnapshot) -> Manifest:
    known = {
        "rows": snapshot(output_sequence=9),
        "middle": snapshot(positions={"rows": 9}, output_sequence=5),
        "table": snapshot(positions={"middle": 5}, output_sequence=0, committable=Committable(3).encode()),
        **stages,
    }
    return msgspec.structs.replace(manifest({name: known[name] for name in shape}), shape=shape)


def taken_up(then: Manifest, shape: dict[str, StageShape], **meant: Any) -> TakenUp:
    return take_up(Memory("root"), then, shape, Meant(**meant))


def in_flight(after: int, through: int, of: str = "rows") -> tuple[Segment, ...]:
    path = f"generations/000001/stages/{of}/output/part-{{}}.parquet"
    return tuple(
        Segment(number, 1, (SegmentFile(path.format(number), 10),)) for number in range(after + 1, through + 1)
    )


# -- what is new -------------------------------------------------------------------------------------


def test_a_new_stage_stands_behind_the_barrier_in_what_the_checkpoint_knows_and_before_all_of_the_rest() -> None:
    found = taken_up(base(), MORE).base
    assert found.stages["more"].positions == {"middle": 5, "other": 0}
    assert found.stages["more_table"].positions == {"more": 0}
    new = {name: found.stages[name] for name in ("other", "more", "more_table")}
    assert all(each.cut is None and each.files.is_empty and not each.in_flight for each in new.values())
    assert not new["other"].knows_position, "a new source starts where it says itself"
    assert {name: found.stages[name] for name in SHAPE} == base().stages, "what was known stays as it was"
    assert found.shape == MORE


def test_nothing_was_sealed_for_a_new_table() -> None:
    sealed = taken_up(base(), MORE).base.stages["more_table"].committable
    assert sealed is not None
    assert decode_committable(sealed) == Committable(-1)


def test_of_a_pipeline_that_has_not_changed_the_checkpoint_stays_as_it_is() -> None:
    taken = taken_up(base(), SHAPE)
    assert (taken.base, taken.told) == (base(), ())
    assert [(each.name, each.change, each.was) for each in taken.stages] == [(name, "same", name) for name in SHAPE]


def test_what_is_new_is_told_in_the_order_of_the_pipeline() -> None:
    taken = taken_up(base(), MORE)
    assert taken.new == ["other", "more", "more_table"]
    assert taken.told[0] == "source 'other' is new since ckpt-000001: it starts where it says itself"
    assert taken.told[2] == "sink 'more_table' is new since ckpt-000001: it gets what its inputs write behind that"


def test_stages_that_are_new_can_be_chained_to_one_another() -> None:
    queries = as_queries(definitions(MORE), {"more_table"})
    found = taken_up(base(), MORE).base
    assert cannot_join(found, chains_of(queries)) == frozenset()
    start = by_query(found.stages, queries)["more_table"]
    assert start.positions == {"middle": 5, "other": 0}
    assert start.committable == Committable(-1).encode()


def definitions(shape: dict[str, StageShape]) -> list[StageDefinition]:
    def nothing() -> None:
        raise AssertionError("no function is called here")

    def defined(name: str, each: StageShape) -> StageDefinition:
        mode: Any = each.output_mode
        return StageDefinition(name, each.kind, nothing, each.inputs, each.inputs, mode)

    return [defined(name, each) for name, each in shape.items()]


# -- what is gone ------------------------------------------------------------------------------------


def test_a_stage_without_state_may_go_with_its_source_and_its_table_and_what_is_in_flight_to_it() -> None:
    flying = snapshot(positions={"middle": 2, "other": 0}, in_flight={"middle": in_flight(2, 5, "middle")})
    then = base(MORE, other=snapshot(), more=flying, more_table=snapshot(positions={"more": 5}))
    taken = taken_up(then, SHAPE)
    assert taken.base == msgspec.structs.replace(base(), chains=then.chains)
    assert [each.name for each in taken.those("removed")] == ["other", "more", "more_table"]
    assert taken.told == (
        "source 'other' is gone since ckpt-000001: where it stood is forgotten",
        "stage 'more' is gone since ckpt-000001: it has no state, what was in flight to it is dropped",
        "sink 'more_table' is gone since ckpt-000001: its table stays as it is",
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_one_with_state_goes_only_if_that_is_allowed(is_known: bool) -> None:
    """Also where a manifest does not say what is kept: then its files tell."""
    shape = {**MORE, "more": reading("middle", "other", state=COUNTS if is_known else None)}
    stored = "generations/000001/snapshots/more/ckpt-000001/state/0/1/1.delta"
    files = snapshot().files if is_known else SnapshotFiles(added=(SnapshotFile("state/0/1/1.delta", stored, 1, "ab"),))
    then = base(shape, other=snapshot(), more=snapshot(files=files), more_table=snapshot())
    renamed = {**SHAPE, "sums": reading("middle"), "sums_table": reading("sums", kind="sink")}
    with pytest.raises(PipelineChanged) as refused:
        taken_up(then, renamed)
    for words in ("stage 'more' is gone", "has state of it", "--allow-dropped-state more", "--rename more=sums"):
        assert words in str(refused.value)
    told = taken_up(then, SHAPE, dropped_state=("more",)).told
    assert "stage 'more' is gone since ckpt-000001: its state is dropped, as it was allowed" in told
    without = base(shape, other=snapshot(), more=snapshot(cut=None), more_table=snapshot())
    assert not any(each.has_state for each in taken_up(without, SHAPE).stages), "it has run no batch"


def test_an_allowance_that_is_done_or_not_needed_is_told_and_does_no_harm() -> None:
    taken = taken_up(base(), SHAPE, dropped_state=("more",))
    assert taken.base == base()
    assert taken.told == ("allow_dropped_state more has no effect: ckpt-000001 has no state of 'more'",)
    with pytest.raises(InvalidConfig, match="allow_dropped_state is given, which has no effect: the root has no check"):
        Meant(dropped_state=("more",)).check_has_effect()


def test_a_source_that_would_read_the_same_again_under_another_name_is_refused() -> None:
    again = {
        "orders": SHAPE["rows"],
        "middle": reading("orders"),
        "table": SHAPE["table"],
    }
    with pytest.raises(PipelineChanged, match=r"'rows' is gone, and 'orders', which is new, would read.*rows=orders"):
        taken_up(base(), again)
    elsewhere = {**again, "orders": msgspec.structs.replace(SOURCE, streams=(SourceStream("json", {"path": "/b"}),))}
    assert taken_up(base(), elsewhere).base.stages["middle"].positions == {"orders": 0}


# -- what reads something else ------------------------------------------------------------------------


def test_a_stage_that_is_put_between_two_gets_what_comes_and_the_one_behind_it_what_that_writes() -> None:
    between = {**SHAPE, "picked": reading("rows"), "middle": reading("picked")}
    taken = taken_up(base(), between)
    found = taken.base.stages
    assert found["picked"].positions == {"rows": 9}
    assert found["middle"].positions == {"picked": 0}
    assert found["middle"].cut == base().stages["middle"].cut, "a batch that comes again would be taken for shown"
    assert found["middle"].files.is_empty, "its query reads other sources, so it begins anew"
    assert found["table"] == base().stages["table"]
    assert taken.rewired == {"middle"}
    assert taken.told[0] == (
        "stage 'middle' reads picked since ckpt-000001, before rows: it goes on behind what it has read"
    )


def test_a_stage_that_is_taken_out_between_two_is_passed_by() -> None:
    without = {"rows": SHAPE["rows"], "table": reading("rows", kind="sink")}
    found = taken_up(base(), without).base.stages
    assert found["table"].positions == {"rows": 9}
    assert found["table"].committable == Committable(3).encode(), "what was sealed stays so"


def test_what_another_stage_has_written_before_is_not_read_and_what_it_read_before_goes_on() -> None:
    more = snapshot(positions={"middle": 5, "other": 7})
    then = base(MORE, other=snapshot(output_sequence=7), more=more, more_table=snapshot(positions={"more": 5}))
    joined = {**MORE, "table": reading("middle", "other", kind="sink")}
    assert taken_up(then, joined).base.stages["table"].positions == {"middle": 5, "other": 7}


BETWEEN = {**SHAPE, "picked": reading("rows"), "middle": reading("picked")}
WITHOUT = {"rows": SHAPE["rows"], "table": reading("rows", kind="sink")}


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (BETWEEN, "stage 'middle' had inputs rows, now picked, and at ckpt-000001 something was in flight from 'rows'"),
        (WITHOUT, "stage 'table' had inputs middle, now rows, and at ckpt-000001 something was in flight from 'rows' "),
    ],
    ids=["put between", "taken out"],
)
def test_nothing_may_be_on_its_way_to_a_stage_that_it_would_not_get_any_more(
    shape: dict[str, StageShape], words: str
) -> None:
    flying = snapshot(positions={"rows": 4}, output_sequence=5, in_flight={"rows": in_flight(4, 9)})
    with pytest.raises(PipelineChanged, match=words) as refused:
        taken_up(base(middle=flying), shape)
    assert "to 'middle', which it would never get" in str(refused.value)
    assert "aligned checkpoint" in str(refused.value)


def test_what_is_in_flight_to_a_branch_that_goes_stops_nobody() -> None:
    """The join goes on from the input that stays, with what is in flight from there."""
    flying = snapshot(positions={"middle": 3, "other": 0}, in_flight={"middle": in_flight(3, 5, "middle")})
    then = base(MORE, other=snapshot(output_sequence=0), more=flying, more_table=snapshot(positions={"more": 5}))
    alone = {name: each for name, each in MORE.items() if name != "other"} | {"more": reading("middle")}
    found = taken_up(then, alone).base.stages["more"]
    assert found.positions == {"middle": 3}
    assert found.in_flight == {"middle": in_flight(3, 5, "middle")}


def test_a_stage_with_state_cannot_read_something_else() -> None:
    shape = {**SHAPE, "middle": reading("rows", state=COUNTS)}
    with pytest.raises(PipelineChanged, match="stage 'middle' had inputs rows, now picked, and it keeps state"):
        taken_up(base(shape), BETWEEN)


# -- other columns ------------------------------------------------------------------------------------


def test_new_columns_are_taken_wherever_they_stand_and_told() -> None:
    wider = "struct<new:array<struct<a:int,b:decimal(9,3)>>,id:bigint,last:map<string,int>>"
    taken = taken_up(base(), {**SHAPE, "middle": msgspec.structs.replace(SHAPE["middle"], schema=wider)})
    (told,) = taken.told
    assert told == (
        "stage 'middle' has new:array<struct<a:int,b:decimal(9,3)>>, last:map<string,int> in addition since "
        "ckpt-000001: what was written before is null there"
    )
    assert taken.base == base()


@pytest.mark.parametrize("schema", ["struct<id:int>", "struct<>", "struct<other:bigint>", "struct<id:bigint,id2:int>"])
def test_any_other_change_of_columns_is_refused_with_both_shown(schema: str) -> None:
    then = base({**SHAPE, "middle": msgspec.structs.replace(SHAPE["middle"], schema="struct<id:bigint,name:string>")})
    now = {**SHAPE, "middle": msgspec.structs.replace(SHAPE["middle"], schema=schema)}
    with pytest.raises(PipelineChanged) as refused:
        taken_up(then, now)
    for words in ("stage 'middle' had schema struct<id:bigint,name:string>", f"now {schema}", "change it back"):
        assert words in str(refused.value)


def test_a_stage_whose_state_is_not_known_keeps_its_columns() -> None:
    stored = SnapshotFiles(added=(SnapshotFile("state/0/1/1.delta", "generations/000001/x", 1, "ab"),))
    shape = {**SHAPE, "middle": reading("rows", state=None)}
    now = {**shape, "middle": msgspec.structs.replace(shape["middle"], schema="struct<id:bigint,more:int>")}
    with pytest.raises(PipelineChanged, match="keeps state of which the checkpoint does not tell"):
        taken_up(base(shape, middle=snapshot(positions={"rows": 9}, files=stored)), now)


# -- other names --------------------------------------------------------------------------------------

NAMED = {
    "orders": SHAPE["rows"],
    "large": reading("orders"),
    "table": reading("large", kind="sink"),
}
NAMES = {"rows": "orders", "middle": "large"}


def test_a_stage_keeps_all_that_is_its_under_another_name() -> None:
    flying = snapshot(positions={"rows": 4}, output_sequence=5, in_flight={"rows": in_flight(4, 9)})
    then = msgspec.structs.replace(base(middle=flying), chains={"table": ("middle",)})
    taken = taken_up(then, NAMED, renames=NAMES)
    found = taken.base
    assert list(found.stages) == list(NAMED)
    assert found.stages["orders"] == then.stages["rows"]
    assert found.stages["large"] == msgspec.structs.replace(
        flying, positions={"orders": 4}, in_flight={"orders": in_flight(4, 9)}
    )
    assert found.stages["table"].positions == {"large": 5}
    assert found.chains == {"table": ("large",)}
    assert [(each.name, each.change, each.was) for each in taken.stages][:2] == [
        ("orders", "renamed", "rows"),
        ("large", "renamed", "middle"),
    ]
    assert taken.told[0] == "source 'orders' goes on as what was 'rows' at ckpt-000001"
    assert taken.rewired == frozenset()


def test_a_rename_that_is_done_is_told_and_does_no_harm() -> None:
    then = taken_up(base(), NAMED, renames=NAMES).base
    taken = taken_up(then, NAMED, renames=NAMES)
    assert taken.base == then
    assert taken.told[0] == "rename rows=orders is done: ckpt-000001 knows 'orders', so it may be left out"


@pytest.mark.parametrize(
    ("renames", "shape", "words"),
    [
        ({"nothing": "orders"}, {**SHAPE, "orders": SOURCE}, "ckpt-000001 knows no stage 'nothing'"),
        ({"rows": "other"}, {name: each for name, each in MORE.items() if name != "rows"}, "knows 'other' too"),
    ],
    ids=["of nothing", "to one that is known"],
)
def test_a_rename_that_cannot_be_meant_is_refused(
    renames: dict[str, str], shape: dict[str, StageShape], words: str
) -> None:
    then = base(MORE, other=snapshot(), more=snapshot(), more_table=snapshot())
    with pytest.raises((InvalidConfig, PipelineChanged), match=words):
        taken_up(then, shape, renames=renames)


# -- all else -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), [("output_mode", "update"), ("kind", "sink")], ids=["output mode", "kind"])
def test_what_a_stage_is_never_changes(field: str, value: Any) -> None:
    now = {**SHAPE, "middle": msgspec.structs.replace(SHAPE["middle"], **{field: value})}
    with pytest.raises(PipelineChanged, match=f"stage 'middle' had {field} .*, now {value}") as refused:
        taken_up(base(), now)
    for words in ("ckpt-000001", "a new root with new tables, or change it back", "nothing was changed"):
        assert words in str(refused.value)
