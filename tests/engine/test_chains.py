"""Chains in checkpoints: what is split by stages and put together by queries, however it was run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.engine.chains import as_queries, by_query, by_stage, cannot_join, chains_of, may_join
from tidegate.protocol.aligner import CutCause
from tidegate.spark.definition import StageDefinition
from tidegate.storage.file_lists import SnapshotFile, SnapshotFiles
from tidegate.storage.manifest import Manifest, StageSnapshot


def stage(name: str, *inputs: str, **given: Any) -> StageDefinition:
    def nothing() -> None:
        raise AssertionError("no function is called here")

    kind: Any = "stage" if inputs else "source"
    return StageDefinition(name, kind, nothing, inputs, inputs, **given)


def snapshot(**given: Any) -> StageSnapshot:
    file = SnapshotFile("offsets/7", "generations/000001/snapshots/a/ckpt-000001/offsets/7", 3, "ab")
    files = SnapshotFiles(added=(file,))
    whole = StageSnapshot(
        cut=7, cause=CutCause.ALIGNED, over_bound=False, files=files, positions={}, output_sequence=5, in_flight={},
        source_positions=("{}",), watermark_ms=None, committable=None, barrier_ms=1, alignment_ms=2, snapshot_ms=3,
        new_bytes=3, total_bytes=3,
    )  # fmt: skip
    return msgspec.structs.replace(whole, **given)


def manifest(stages: dict[str, StageSnapshot]) -> Manifest:
    return Manifest(2, "orders", 1, 1, 1, 1, 0, True, "2026-01-01", 1, None, {}, stages)


LINE = [stage("a"), stage("b", "a"), stage("c", "b"), stage("d", "c")]


@pytest.mark.parametrize(
    ("definitions", "joined"),
    [
        (LINE, {"b", "c", "d"}),
        ([stage("a"), stage("b", "a"), stage("c", "a")], set()),
        ([stage("a"), stage("b"), stage("c", "a", "b")], set()),
        ([stage("a", chain=False), stage("b", "a"), stage("c", "b")], {"c"}),
        ([stage("a"), stage("b", "a", chain=False), stage("c", "b")], set()),
        ([stage("a"), stage("b", "a", output_mode="update"), stage("c", "b")], set()),
    ],
    ids=["a line", "two readers", "two inputs", "a source alone", "a stage alone", "another mode"],
)
def test_a_stage_may_be_joined_to_its_only_input_whose_only_reader_it_is(
    definitions: list[StageDefinition], joined: set[str]
) -> None:
    assert may_join(definitions) == joined


def test_a_chain_has_the_inputs_of_its_first_stage_and_the_output_of_its_last() -> None:
    definitions = [stage("s"), stage("a", "s"), stage("b", "a"), stage("c", "b"), stage("d", "c")]
    queries = as_queries(definitions, {"b", "c"})
    assert [(each.name, each.head, each.inputs) for each in queries] == [
        ("s", "s", ()), ("c", "a", ("s",)), ("d", "d", ("c",)),
    ]  # fmt: skip
    assert chains_of(queries) == {"c": ("a", "b")}


@given(st.sets(st.sampled_from("bcd")), st.sets(st.sampled_from("bcd")))
def test_what_one_way_of_chaining_has_stored_another_goes_on_from(then: set[str], now: set[str]) -> None:
    """The first stage has what Spark keeps, the last what was written; what lies between two queries is at rest."""
    before = as_queries(LINE, then)
    stored = {
        each.name: snapshot(
            files=snapshot().files if number == 0 else SnapshotFiles(),
            positions=dict.fromkeys(each.inputs, 5),
            committable="sealed" if each.name == "d" else None,
        )
        for number, each in enumerate(before)
    }
    stages = by_stage(stored, chains_of(before))
    assert set(stages) == set("abcd")
    queries = as_queries(LINE, now)
    assert cannot_join(manifest(stages), chains_of(queries)) == frozenset()
    starts = by_query(stages, queries)
    assert starts["d" if "d" in starts else queries[-1].name].committable == "sealed"
    assert all(each.cut == 7 for each in starts.values())
    assert starts[queries[0].name].files == snapshot().files
    assert starts[queries[0].name].source_positions == ("{}",)
    assert by_query(by_stage(starts, chains_of(queries)), queries) == starts
    for query in queries:  # each stands where what it reads has come to
        assert all(starts[query.name].positions[name] == starts[name].output_sequence for name in query.inputs)


def test_stages_with_something_in_flight_between_them_cannot_be_joined() -> None:
    stages = {"a": snapshot(), "b": snapshot(positions={"a": 4}), "c": snapshot(positions={"b": 5})}
    queries = as_queries(LINE[:3], {"b", "c"})
    assert cannot_join(manifest(stages), chains_of(queries)) == {"b"}


def test_a_sink_that_has_counted_further_than_what_it_reads_cannot_be_joined_to_it() -> None:
    """Its table would take the next batches for some that it shows."""
    stages = {
        "a": snapshot(cut=2), "b": snapshot(cut=None, positions={"a": 5}), "c": snapshot(cut=3, positions={"b": 5}),
    }  # fmt: skip
    assert cannot_join(manifest(stages), {"c": ("a", "b")}) == {"c"}
    assert cannot_join(manifest({**stages, "c": snapshot(cut=2, positions={"b": 5})}), {"c": ("a", "b")}) == frozenset()
