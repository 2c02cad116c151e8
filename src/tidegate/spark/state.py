"""Whether a stage can go on with the state that a checkpoint holds, and what it means where it goes on with something
changed.

What the state was made of and what it would be made of now are both described (see `plan`). Where Spark could not go
on, or would take what is stored for something else, it is refused before anything is started. What Spark goes on with
rightly, but not as one might think, is told at the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from tidegate.errors import PipelineChanged
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks.sessions import PARTITIONS
from tidegate.spark.filelog import kept_settings
from tidegate.spark.plan import AGGREGATION, CONSTANT, JOIN, TRANSFORM
from tidegate.storage.file_lists import find_file
from tidegate.storage.files import Files
from tidegate.storage.manifest import Manifest, StageShape, StageState, StateColumn, StateOperator, WatermarkDelay

_MISMATCH: Final = re.compile(
    r"\[(STATE_STORE_(KEY|VALUE)_SCHEMA_NOT_COMPATIBLE|STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION|"
    r"STATE_STORE_INVALID_(VARIABLE_TYPE_CHANGE|CONFIG_AFTER_RESTART)|"
    r"STREAMING_STATEFUL_OPERATOR_(NOT_MATCH_IN_STATE_METADATA|MISSING_STATE_DIRECTORY))\]"
)
_SCHEMAS: Final = re.compile(r"_schema=|perators in|Cannot change")
_SCHEMAS_SHOWN: Final = re.compile(r"^\[[A-Z_]+\] ")

_HINT: Final = (
    "What to do: change it back, or start the changed pipeline on a new root with new tables; nothing was changed"
)


def check_state(base: Manifest, shape: Mapping[str, StageShape]) -> list[str]:
    """Refuse a pipeline whose state would be taken for something else. Returns what else has changed, and its meaning.

    A stage that no checkpoint has seen a batch of has no state, and may become what it likes.
    """
    told: list[str] = []
    for name, now in shape.items():
        then = base.shape[name].state
        if then is not None and now.state is not None and base.stages[name].cut is not None:
            told.extend(_Comparison(name, checkpoint_name(base.checkpoint_id)).changes(then, now.state))
    return told


def state_mismatch(stage: str, error: object) -> PipelineChanged | None:
    """What Spark says when it finds, at the first batch, that the state is not what the query keeps.

    That is what could not be known before the start: of a processor whose `init` tells its variables to Spark only.
    """
    said = str(error)
    if (named := _MISMATCH.search(said)) is None:
        return None
    whole = [line.strip() for line in said[named.start() :].splitlines()]
    schemas = next((line for line in whole if _SCHEMAS.search(line)), whole[0])
    return PipelineChanged(
        f"stage {stage!r} cannot go on with the state of its checkpoint: {_SCHEMAS_SHOWN.sub('', schemas)} None of its "
        f"batches was run. What to do: change it back, or start the changed pipeline on a new root with new tables"
    )


_KEPT: Final = {
    PARTITIONS: "state stays in as many parts as it has",
    "spark.sql.streaming.multipleWatermarkPolicy": "the watermark of several goes on as it was",
}


def settings_not_taken(
    root: Files, base: Manifest, shape: Mapping[str, StageShape], setting: Callable[[str], str | None]
) -> list[str]:
    """What the session sets and Spark does not take, because it goes on with what the checkpoint has. `setting`: the
    session's. Another number of parts of the state is refused: who sets it believes that it counts."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, now in shape.items():
        cut = base.stages[name].cut
        if cut is None or now.state is None or not now.state.operators:
            continue
        entry = find_file(root, name, base.stages[name].files, f"offsets/{cut}")
        kept = {} if entry is None else kept_settings(root, entry.stored)
        for key in _KEPT:
            wanted = setting(key)
            if key in kept and wanted is not None and kept[key] != wanted:
                found.setdefault((key, kept[key], wanted), []).append(name)
    for (key, then, wanted), names in found.items():
        if key == PARTITIONS:
            raise PipelineChanged(
                f"{_stages(names)} cannot go on with {key}={wanted}: state of {checkpoint_name(base.checkpoint_id)} is "
                f"in {then} parts, and stays so. Then: {then}. Now: {wanted}. What to do: set it to {then} or leave it "
                f"out, or start the pipeline on a new root with new tables; nothing was changed"
            )
    return [
        f"{key} stays at {kept}, as in {checkpoint_name(base.checkpoint_id)}, for {_stages(names)}: {_KEPT[key]}; the "
        f"new {wanted} counts from a new root with new tables on"
        for (key, kept, wanted), names in found.items()
    ]


def _stages(names: Sequence[str]) -> str:
    return f"stage{'' if len(names) == 1 else 's'} {', '.join(map(repr, names))}"


class _Comparison:
    """Of one stage's state."""

    def __init__(self, stage: str, since: str) -> None:
        self._stage = stage
        self._since = since

    def changes(self, then: StageState, now: StageState) -> Iterator[str]:
        if [each.kind for each in then.operators] != [each.kind for each in now.operators]:
            raise self._refusal("it keeps something else", _kinds(then.operators), _kinds(now.operators))
        is_other_spark = then.spark != now.spark
        for number, (old, new) in enumerate(zip(then.operators, now.operators, strict=True), 1):
            what = f"its {old.kind}" if len(then.operators) == 1 else f"its {old.kind} (operator {number})"
            for change in self._of_operator(what, old, new, is_other_spark=is_other_spark):
                yield f"stage {self._stage!r}: {change}"
        if not now.operators:
            return
        for change in self._of_watermarks(then.watermarks, now.watermarks):
            yield f"stage {self._stage!r}: {change}"
        if then.time_zone is not None and now.time_zone is not None and then.time_zone != now.time_zone:
            yield (
                f"stage {self._stage!r}: spark.sql.session.timeZone is {now.time_zone}, was {then.time_zone} at "
                f"{self._since}: days and times that its groups are made of are those of the new zone from now on, "
                f"beside the groups of the old one"
            )

    def _refusal(self, what: str, then: str, now: str) -> PipelineChanged:
        return PipelineChanged(
            f"stage {self._stage!r} cannot go on with its state of {self._since}: {what}. Then: {then}. Now: {now}. "
            f"{_HINT}"
        )

    def _of_operator(self, what: str, old: StateOperator, new: StateOperator, *, is_other_spark: bool) -> Iterator[str]:
        if is_other_spark and _types(old) == _types(new):
            # Another version may put the same in other words.
            if _shown(old) != _shown(new):
                yield (
                    f"Spark is another version than at {self._since}, and tells {what} in other words: then "
                    f"{_shown(old)}; now {_shown(new)}. If that is not the same to you, stop the run, and start it on "
                    f"a new root with new tables"
                )
            return
        if (why := _meaning_changed(old, new)) is not None:
            raise self._refusal(f"{what} has {why}", _shown(old), _shown(new))
        for then, now in zip(old.keys, new.keys, strict=True):
            if then.detail != now.detail:
                yield self._of_constant(what, then, now) if then.name == CONSTANT else self._of_window(then, now)
        if old.values is None or new.values is None:
            pass  # nothing can be said of what is not known
        elif old.kind == TRANSFORM:
            yield from self._of_variables(old.values, new.values)
        else:
            yield from self._of_stored(old.kind, old.values, new.values)
        if old.details != new.details:
            then_on, now_on = (each.details.get("condition", "nothing more") for each in (old, new))
            yield (
                f"{what} is now on {now_on}, was on {then_on} at {self._since}: stored rows that the old condition has "
                f"let go by then find no partner any more"
            )

    def _of_constant(self, what: str, then: StateColumn, now: StateColumn) -> str:
        return (
            f"{what} has the constant {now.detail} in its key, was {then.detail} at {self._since}: no row finds what "
            f"is stored with the old one"
        )

    def _of_window(self, then: StateColumn, now: StateColumn) -> str:
        if then.name.startswith("session"):
            return (
                f"{then.name} ends after a gap of {now.detail}, was {then.detail} at {self._since}: a session that is "
                f"open keeps the end that it has until a row joins it"
            )
        return (
            f"{then.name} is {now.detail}, was {then.detail} at {self._since}: windows that are open keep their length "
            f"and are written when they are over, without the rows that come from now on; these count in the new ones "
            f"only, which lack what was counted before. In a table whose key is only where a window starts, one takes "
            f"the place of the other"
        )

    def _of_stored(self, kind: str, then: Sequence[StateColumn], now: Sequence[StateColumn]) -> Iterator[str]:
        keep = (
            "rows that are stored keep what they have"
            if kind == JOIN
            else "groups that are open go on from what was counted so"
        )
        for old, new in zip(then, now, strict=True):
            if old.detail != new.detail:
                yield f"{new.detail or new.name} was {old.detail or old.name} at {self._since}: {keep}"

    def _of_variables(self, then: Sequence[StateColumn], now: Sequence[StateColumn]) -> Iterator[str]:
        before, after = ({each.name: each for each in columns} for columns in (then, now))
        for name in sorted(before.keys() - after.keys()):
            yield f"state variable {name!r} is gone since {self._since}: what it holds is dropped"
        for name in sorted(after.keys() - before.keys()):
            yield f"state variable {name!r} is new since {self._since}: it is empty for every key"
        for name in sorted(before.keys() & after.keys()):
            if before[name].detail != after[name].detail:
                yield (
                    f"state variable {name!r} lives for {after[name].detail}, was {before[name].detail} at "
                    f"{self._since}: what is stored keeps its time until it is written again"
                )

    def _of_watermarks(self, then: Sequence[WatermarkDelay], now: Sequence[WatermarkDelay]) -> Iterator[str]:
        before, after = ([each.column for each in delays] for delays in (then, now))
        gone = [column for column in before if column not in after]
        new = [column for column in after if column not in before]
        if gone and new:
            raise self._refusal(
                "its watermark is of another column, and rows before the one that was reached would be dropped",
                f"watermark of {', '.join(before)}",
                f"watermark of {', '.join(after)}",
            )
        if gone:
            yield f"there is no watermark of {', '.join(gone)} since {self._since}: what it closed is kept for ever now"
        if new:
            yield f"the watermark of {', '.join(new)} is new since {self._since}: from now on it closes what is stored"
        if before != after:
            return
        for old, changed in zip(then, now, strict=True):
            if old.delay != changed.delay:
                yield (
                    f"rows may be {changed.delay} late by {changed.column}, were {old.delay} at {self._since}: the "
                    f"watermark goes on from where it is and never back, so with a longer delay rows before it are "
                    f"dropped until it moves again, with a shorter one it jumps ahead"
                )


def _meaning_changed(old: StateOperator, new: StateOperator) -> str | None:
    """What makes the state of one something else to the other."""
    if _named(old.keys) != _named(new.keys):
        return _difference("key", old.keys, new.keys)
    for name in sorted(old.settings.keys() | new.settings.keys()):
        if old.settings.get(name) != new.settings.get(name):
            return "other keys" if name == "on" else f"another {name}"
    if old.values is None or new.values is None:
        return None
    if old.kind == TRANSFORM:  # there they go by their names, and may come and go
        types = {each.name: each.type for each in old.values}
        retyped = [each.name for each in new.values if types.get(each.name, each.type) != each.type]
        return f"another type of state variable {retyped[0]}" if retyped else None
    if _named(old.values) != _named(new.values):
        return _difference("aggregate" if old.kind == AGGREGATION else "stored column", old.values, new.values)
    return None


def _named(columns: Sequence[StateColumn]) -> list[tuple[str, str]]:
    return [(each.name, each.type) for each in columns]


def _types(operator: StateOperator) -> tuple[list[str], list[str]]:
    return [each.type for each in operator.keys], [each.type for each in operator.values or ()]


def _difference(unit: str, then: Sequence[StateColumn], now: Sequence[StateColumn]) -> str:
    """What is different, in a few words: both are shown whole besides."""
    before, after = _named(then), _named(now)
    if sorted(before) == sorted(after):
        return f"its {unit}s in another order, and what is stored goes by their order"
    gone = [column for column in then if (column.name, column.type) not in after]
    new = [column for column in now if (column.name, column.type) not in before]
    retyped = [old.name for old in gone if any(old.name == each.name for each in new)]
    if retyped:
        return f"another type of {unit} {retyped[0]}"
    if gone and new:
        return f"{unit} {_column(new[0])} in the place of {_column(gone[0])}"
    return f"{unit} {_column((gone or new)[0])} {'no more' if gone else 'in addition'}"


def _column(column: StateColumn) -> str:
    if "window(" in column.name:
        return f"{column.name} of {column.detail}"
    return f"{column.name}: {column.type}"


def _shown(operator: StateOperator) -> str:
    """As people read it: of what it is, by which keys, and what it stores."""
    parts = [operator.kind]
    if operator.keys:
        parts.append("by " + ", ".join(map(_column, operator.keys)))
    parts.extend(f"{name} {value}" for name, value in operator.settings.items() if value)
    if operator.values:
        parts.append("storing " + ", ".join(map(_column, operator.values)))
    return " ".join(parts)


def _kinds(operators: Sequence[StateOperator]) -> str:
    return "; ".join(map(_shown, operators)) or "no state"
