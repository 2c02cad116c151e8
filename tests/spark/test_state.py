"""What a stage kept as state against what it would keep now: what is refused, what is told, what is neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidegate.errors import PipelineChanged
from tidegate.protocol.aligner import CutCause
from tidegate.spark.plan import AGGREGATION, DEDUPLICATION, JOIN, TRANSFORM
from tidegate.spark.state import check_state, settings_not_taken, state_mismatch
from tidegate.storage.file_lists import SnapshotFile, SnapshotFiles
from tidegate.storage.folder import Folder
from tidegate.storage.manifest import (
    FORMAT,
    Manifest,
    StageShape,
    StageSnapshot,
    StageState,
    StateColumn,
    StateOperator,
    WatermarkDelay,
)

C = StateColumn
WINDOW = C("window(ts)", "struct<start:timestamp,end:timestamp>", "1 minute")
COUNTRY, CITY = C("country", "string"), C("city", "string")
SUM, MAX = C("sum(amount)", "bigint"), C("max(amount)", "bigint")
AGGREGATE = StateOperator(AGGREGATION, (WINDOW, COUNTRY), (SUM, MAX))
DISTINCT = StateOperator(DEDUPLICATION, (C("id", "bigint"), COUNTRY))
TAX = C("left orders.tax", "bigint")
JOINED = StateOperator(
    JOIN,
    (),
    (C("left orders.id", "bigint"), C("left orders.amount", "bigint"), C("right paid.id", "bigint")),
    {"type": "Inner", "on": "orders.id = paid.id"},
    {"condition": "(paid.ts <= (orders.ts + 3600000000))"},
)
TOTAL = C("total", "value of n:bigint", "")
LIVING = C("seen", "list of id:bigint, with a time to live", "1000 ms")
TRANSFORMED = StateOperator(TRANSFORM, (COUNTRY,), (LIVING, TOTAL), {"time mode": "EventTime", "output mode": "Append"})
LATE = (WatermarkDelay("ts", "5 minutes"),)


def state(*operators: StateOperator, watermarks: tuple[WatermarkDelay, ...] = LATE, **fields: Any) -> StageState:
    return StageState("4.3.0", operators, watermarks, **fields)


def of(operator: StateOperator, **fields: Any) -> StateOperator:
    return msgspec.structs.replace(operator, **fields)


def snapshot(cut: int | None, files: tuple[SnapshotFile, ...] = ()) -> StageSnapshot:
    return StageSnapshot(
        cut, CutCause.ALIGNED, False, SnapshotFiles(added=files), {}, 0, {}, (), None, None, 0, 0, 0, 0, 0
    )


def compared(then: StageState | None, now: StageState | None, cut: int | None = 7) -> list[str]:
    shapes = [{"counts": StageShape("stage", ("rows",), "append", "struct<>", state=each)} for each in (then, now)]
    base = Manifest(FORMAT, "p", 3, 3, 1, 1, 0, True, "2026-01-01", 1, None, shapes[0], {"counts": snapshot(cut)})
    return check_state(base, shapes[1])


REFUSED = {
    "key added": (state(AGGREGATE), state(of(AGGREGATE, keys=(WINDOW, COUNTRY, CITY))), "key city: string in addition"),
    "key removed": (state(AGGREGATE), state(of(AGGREGATE, keys=(WINDOW,))), "key country: string no more"),
    "key replaced": (
        state(AGGREGATE),
        state(of(AGGREGATE, keys=(WINDOW, CITY))),
        "key city: string in the place of country: string",
    ),
    "key of another type": (
        state(AGGREGATE),
        state(of(AGGREGATE, keys=(WINDOW, C("country", "int")))),
        "another type of key country",
    ),
    "keys in another order": (
        state(of(DISTINCT, keys=(CITY, COUNTRY))),
        state(of(DISTINCT, keys=(COUNTRY, CITY))),
        "its keys in another order",
    ),
    "another function of the same type": (
        state(of(AGGREGATE, values=(MAX,))),
        state(of(AGGREGATE, values=(C("min(amount)", "bigint"),))),
        "aggregate min(amount): bigint in the place of max(amount): bigint",
    ),
    "another type of sum": (
        state(of(AGGREGATE, values=(SUM,))),
        state(of(AGGREGATE, values=(C("sum(amount)", "decimal(20,2)"),))),
        "another type of aggregate sum(amount)",
    ),
    "of another column": (
        state(of(AGGREGATE, values=(SUM,))),
        state(of(AGGREGATE, values=(C("sum(tax)", "bigint"),))),
        "aggregate sum(tax): bigint in the place of sum(amount): bigint",
    ),
    "aggregates in another order": (
        state(AGGREGATE),
        state(of(AGGREGATE, values=(MAX, SUM))),
        "its aggregates in another order",
    ),
    "another operator": (state(AGGREGATE), state(DISTINCT), "it keeps something else"),
    "an operator in addition": (state(AGGREGATE), state(AGGREGATE, DISTINCT), "it keeps something else"),
    "operators swapped": (state(AGGREGATE, DISTINCT), state(DISTINCT, AGGREGATE), "it keeps something else"),
    "state no more": (state(AGGREGATE), state(), "Now: no state"),
    "state at last": (state(), state(AGGREGATE), "Then: no state"),
    "join of another type": (
        state(JOINED),
        state(of(JOINED, settings={**JOINED.settings, "type": "LeftOuter"})),
        "another type",
    ),
    "join on other keys": (
        state(JOINED),
        state(of(JOINED, settings={**JOINED.settings, "on": "orders.id = paid.order"})),
        "other keys",
    ),
    "join of other columns": (
        state(JOINED),
        state(of(JOINED, values=(C("left orders.id", "bigint"), TAX, C("right paid.id", "bigint")))),
        "stored column left orders.tax: bigint in the place of left orders.amount: bigint",
    ),
    "variable of another type": (
        state(TRANSFORMED),
        state(of(TRANSFORMED, values=(LIVING, C("total", "value of n:string")))),
        "another type of state variable total",
    ),
    "variable that lives for ever": (
        state(TRANSFORMED),
        state(of(TRANSFORMED, values=(C("seen", "list of id:bigint"), TOTAL))),
        "another type of state variable seen",
    ),
    "time mode": (
        state(TRANSFORMED),
        state(of(TRANSFORMED, settings={**TRANSFORMED.settings, "time mode": "ProcessingTime"})),
        "another time mode",
    ),
    "watermark of another column": (
        state(AGGREGATE),
        state(AGGREGATE, watermarks=(WatermarkDelay("arrived", "5 minutes"),)),
        "its watermark is of another column",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("then", "now", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_be_taken_for_something_else_is_refused(then: StageState, now: StageState, why: str) -> None:
    with pytest.raises(PipelineChanged) as refused:
        compared(then, now)
    said = str(refused.value)
    assert said.startswith("stage 'counts' cannot go on with its state of ckpt-000003: ")
    assert why in said
    assert "Then: " in said
    assert "Now: " in said
    assert said.endswith(
        "What to do: change it back, or start the changed pipeline on a new root with new tables; nothing was changed"
    )


def test_a_refusal_shows_both_as_people_read_them() -> None:
    with pytest.raises(PipelineChanged) as refused:
        compared(state(AGGREGATE), state(of(AGGREGATE, keys=(WINDOW, COUNTRY, CITY))))
    assert (
        "Then: aggregation by window(ts) of 1 minute, country: string storing sum(amount): bigint, max(amount): "
        "bigint. Now: aggregation by window(ts) of 1 minute, country: string, city: string storing sum(amount): "
        "bigint, max(amount): bigint." in str(refused.value)
    )


TOLD = {
    "window": (
        state(AGGREGATE),
        state(of(AGGREGATE, keys=(msgspec.structs.replace(WINDOW, detail="5 minutes"), COUNTRY))),
        "window(ts) is 5 minutes, was 1 minute at ckpt-000003: windows that are open keep their length",
    ),
    "session": (
        state(of(AGGREGATE, keys=(C("session_window(ts)", "struct<>", "10 minutes"),))),
        state(of(AGGREGATE, keys=(C("session_window(ts)", "struct<>", "5 minutes"),))),
        "session_window(ts) ends after a gap of 5 minutes, was 10 minutes at ckpt-000003",
    ),
    "delay": (
        state(AGGREGATE),
        state(AGGREGATE, watermarks=(WatermarkDelay("ts", "1 hour"),)),
        "rows may be 1 hour late by ts, were 5 minutes at ckpt-000003",
    ),
    "no watermark": (state(DISTINCT), state(DISTINCT, watermarks=()), "there is no watermark of ts since ckpt-000003"),
    "a watermark": (state(DISTINCT, watermarks=()), state(DISTINCT), "the watermark of ts is new since ckpt-000003"),
    "the same column otherwise": (
        state(of(AGGREGATE, values=(SUM,))),
        state(of(AGGREGATE, values=(C("sum(amount)", "bigint", "sum(coalesce(amount, 0))"),))),
        "sum(coalesce(amount, 0)) was sum(amount) at ckpt-000003",
    ),
    "condition of a join": (
        state(JOINED),
        state(of(JOINED, details={"condition": "(paid.ts <= (orders.ts + 7200000000))"})),
        "its join is now on (paid.ts <= (orders.ts + 7200000000)), was on (paid.ts",
    ),
    "time to live": (
        state(TRANSFORMED),
        state(of(TRANSFORMED, values=(msgspec.structs.replace(LIVING, detail="2000 ms"), TOTAL))),
        "state variable 'seen' lives for 2000 ms, was 1000 ms at ckpt-000003",
    ),
    "variable gone": (
        state(TRANSFORMED),
        state(of(TRANSFORMED, values=(LIVING,))),
        "state variable 'total' is gone since ckpt-000003",
    ),
    "variable new": (
        state(of(TRANSFORMED, values=(LIVING,))),
        state(TRANSFORMED),
        "state variable 'total' is new since ckpt-000003",
    ),
    "time zone": (
        state(AGGREGATE, time_zone="UTC"),
        state(AGGREGATE, time_zone="Europe/Berlin"),
        "spark.sql.session.timeZone is Europe/Berlin, was UTC at ckpt-000003",
    ),
    "other words of another Spark": (
        state(AGGREGATE),
        msgspec.structs.replace(state(of(AGGREGATE, keys=(WINDOW, C("upper_case(country)", "string")))), spark="4.4.0"),
        "Spark is another version than at ckpt-000003, and tells its aggregation in other words",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("then", "now", "what"), TOLD.values(), ids=TOLD.keys())
def test_what_is_taken_though_it_changes_something_is_told(then: StageState, now: StageState, what: str) -> None:
    (told,) = compared(then, now)
    assert told.startswith(f"stage 'counts': {what}")


def test_what_another_spark_stores_otherwise_is_refused_all_the_same() -> None:
    with pytest.raises(PipelineChanged):
        compared(state(AGGREGATE), msgspec.structs.replace(state(of(AGGREGATE, keys=(COUNTRY,))), spark="4.4.0"))


@pytest.mark.parametrize(
    ("then", "now", "cut"),
    [
        (state(AGGREGATE, JOINED), state(AGGREGATE, JOINED), 7),
        (state(AGGREGATE), state(DISTINCT), None),
        (None, state(AGGREGATE), 7),
        (state(AGGREGATE), None, 7),
        (state(), state(watermarks=()), 7),
        (state(of(TRANSFORMED, values=None)), state(TRANSFORMED), 7),
        (state(TRANSFORMED), state(of(TRANSFORMED, values=None)), 7),
    ],
    ids=["the same", "no batch yet", "not known then", "not known now", "no state", "no variables then", "none now"],
)
def test_of_what_has_not_changed_or_is_not_known_nothing_is_said(
    then: StageState | None, now: StageState | None, cut: int | None
) -> None:
    assert compared(then, now, cut) == []


KEYS_DIFFER = """[STREAM_FAILED] Query [id = 1] terminated with exception: [STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] \
Provided key schema does not match existing state key schema.
Please check number and type of fields.
Existing key_schema=StructType(StructField(key,StringType,true)) and new key_schema=StructType().
If you want to force running the query without schema validation, please set … to false. SQLSTATE: XXKST"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            KEYS_DIFFER,
            "Existing key_schema=StructType(StructField(key,StringType,true)) and new key_schema=StructType(",
        ),
        (
            "[STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE] Cannot change total to ListState between query restarts. …",
            "Cannot change total to ListState between query restarts.",
        ),
    ],
    ids=["key", "variable"],
)
def test_what_spark_finds_at_the_first_batch_is_told_with_both_and_what_to_do(said: str, told: str) -> None:
    found = str(state_mismatch("counts", RuntimeError(said)))
    assert found.startswith(f"stage 'counts' cannot go on with the state of its checkpoint: {told}")
    assert found.endswith("What to do: change it back, or start the changed pipeline on a new root with new tables")
    assert state_mismatch("counts", RuntimeError("[DIVIDE_BY_ZERO] Division by zero.")) is None


def test_settings_that_spark_does_not_take_are_told_once_for_all_stages_but_for_the_parts_of_state_which_are_refused(
    tmp_path: Path,
) -> None:
    kept = {"spark.sql.shuffle.partitions": "4", "spark.sql.streaming.multipleWatermarkPolicy": "min"}
    entry = tmp_path / "offsets-7"
    entry.write_text(
        "v1\n" + json.dumps({"batchWatermarkMs": 5, "batchTimestampMs": 6, "conf": kept}) + '\n{"logOffset":0}'
    )
    file = SnapshotFile("offsets/7", "offsets-7", 1, "")
    with_state = StageShape("stage", ("rows",), "append", "struct<>", state=state(AGGREGATE))
    shape = {"a": with_state, "b": with_state, "c": msgspec.structs.replace(with_state, state=state())}
    stages = {name: snapshot(7, (file,)) for name in shape}
    base = Manifest(FORMAT, "p", 3, 3, 1, 1, 0, True, "2026-01-01", 1, None, shape, stages)

    now = {**kept, "spark.sql.streaming.multipleWatermarkPolicy": "max"}
    (told,) = settings_not_taken(Folder(tmp_path), base, shape, now.get)
    assert told == (
        "spark.sql.streaming.multipleWatermarkPolicy stays at min, as in ckpt-000003, for stages 'a', 'b': the "
        "watermark of several goes on as it was; the new max counts from a new root with new tables on"
    )
    parts = {**now, "spark.sql.shuffle.partitions": "8"}
    with pytest.raises(PipelineChanged) as refused:
        settings_not_taken(Folder(tmp_path), base, shape, parts.get)
    for words in (
        "stages 'a', 'b' cannot go on with spark.sql.shuffle.partitions=8",
        "Then: 4. Now: 8.",
        "set it to 4",
    ):
        assert words in str(refused.value)
    assert settings_not_taken(Folder(tmp_path), base, shape, kept.get) == []
