"""What stages that are new start from, of a checkpoint that does not know them."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.engine.test_chains import manifest, snapshot
from tidegate.engine.chains import as_queries, by_query, cannot_join, chains_of
from tidegate.engine.changes import check_shape, new_stages, told_of_new, with_new_stages
from tidegate.sinks.contract import Committable, decode_committable
from tidegate.spark.definition import StageDefinition
from tidegate.storage.manifest import Manifest, StageShape

SOURCE = StageShape("source", (), "append", "struct<id:bigint>")
SHAPE = {
    "rows": SOURCE,
    "middle": StageShape("stage", ("rows",), "append", "struct<id:bigint>"),
    "table": StageShape("sink", ("middle",), "append", "struct<id:bigint>"),
}
MORE = {
    **SHAPE,
    "other": SOURCE,
    "more": StageShape("stage", ("middle", "other"), "append", "struct<id:bigint>"),
    "more_table": StageShape("sink", ("more",), "append", "struct<id:bigint>"),
}


def base() -> Manifest:
    stages = {
        "rows": snapshot(output_sequence=9),
        "middle": snapshot(positions={"rows": 9}, output_sequence=5),
        "table": snapshot(positions={"middle": 5}, output_sequence=0, committable=Committable(3).encode()),
    }
    return msgspec.structs.replace(manifest(stages), shape=SHAPE)


def test_a_new_stage_stands_behind_the_barrier_in_what_the_checkpoint_knows_and_before_all_of_the_rest() -> None:
    check_shape(base(), MORE)
    found = with_new_stages(base(), MORE)
    assert found.stages["more"].positions == {"middle": 5, "other": 0}
    assert found.stages["more_table"].positions == {"more": 0}
    new = {name: found.stages[name] for name in ("other", "more", "more_table")}
    assert all(each.cut is None and each.files.is_empty and not each.in_flight for each in new.values())
    assert not new["other"].knows_position, "a new source starts where it says itself"
    assert {name: found.stages[name] for name in SHAPE} == base().stages, "what was known stays as it was"
    assert {name: each for name, each in found.shape.items() if name not in SHAPE} == {
        name: each for name, each in MORE.items() if name not in SHAPE
    }


def test_nothing_was_sealed_for_a_new_table() -> None:
    sealed = with_new_stages(base(), MORE).stages["more_table"].committable
    assert sealed is not None
    assert decode_committable(sealed) == Committable(-1)


def test_of_a_pipeline_that_has_not_changed_the_checkpoint_stays_as_it_is() -> None:
    assert new_stages(base(), SHAPE) == []
    assert told_of_new(base(), SHAPE) == []
    assert with_new_stages(base(), SHAPE) == base()


def test_what_is_new_is_told_in_the_order_of_the_pipeline() -> None:
    assert new_stages(base(), MORE) == ["other", "more", "more_table"]
    told = told_of_new(base(), MORE)
    assert told[0] == "source 'other' is new since ckpt-000001: it starts where it says itself"
    assert told[2] == "sink 'more_table' is new since ckpt-000001: it gets what its inputs write behind that"


def test_stages_that_are_new_can_be_chained_to_one_another() -> None:
    def nothing() -> None:
        raise AssertionError("no function is called here")

    def defined(name: str, shape: StageShape) -> StageDefinition:
        mode: Any = shape.output_mode
        return StageDefinition(name, shape.kind, nothing, shape.inputs, shape.inputs, mode)

    queries = as_queries([defined(name, each) for name, each in MORE.items()], {"more_table"})
    found = with_new_stages(base(), MORE)
    assert cannot_join(found, chains_of(queries)) == frozenset()
    start = by_query(found.stages, queries)["more_table"]
    assert start.positions == {"middle": 5, "other": 0}
    assert start.committable == Committable(-1).encode()
