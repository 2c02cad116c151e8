"""`tidegate diff`: how the state of a stage differs from one checkpoint to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from tidegate.cli.answers import ChangedKey, DiffAnswer
from tidegate.cli.options import AsJson, OperatorNumber, RootPlace, checkpoint_or_latest, complete_stage
from tidegate.cli.speech import say
from tidegate.cli.text import console, counted
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import Place, place_of
from tidegate.storage.scratch import scratch

if TYPE_CHECKING:
    from tidegate.engine.inspecting import CheckpointInside

_UTC: Final = "UTC"
_TOLD: Final = {"added": "+", "removed": "-", "changed": "~"}


def diff_command(
    before: Annotated[str, checkpoint_or_latest()],
    after: Annotated[str, checkpoint_or_latest()],
    root: RootPlace,
    stage: Annotated[str, typer.Option(autocompletion=complete_stage, help="The stage whose state is compared.")],
    operator: OperatorNumber = None,
    part: Annotated[
        str | None,
        typer.Option(help="Which part: left or right of a join; a state variable of a transformWithState, or timers."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many keys of each kind to show.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Compare the state of a stage at two checkpoints: keys added, removed and changed.

    First how many there are of each, then some of them, with what was stored and what is: + added, - removed,
    ~ changed. Where a key has several rows, as in a join, all of them are what is stored for it, in whatever order.

    Times are in UTC. Starts Spark; changes nothing in the root, and works beside a run that is alive. Exits with 0
    whether they differ or not, with 2 if the stage keeps no state, with 4 if a file of it is damaged.

    Example: tidegate diff 41 42 --root state/orders --stage revenue

    Example: tidegate diff 41 latest --root state/orders --stage paid --part left --json
    """
    # Not above: other commands need not wait for these.
    from tidegate.engine.inspecting import CheckpointInside

    inspected = InspectedRoot(place_of(root))
    first, second = CheckpointInside(inspected, before), CheckpointInside(inspected, after)
    for each in (first, second):
        each.check_has_state(stage)
    answer = _compared(root, first, second, _Asked(stage, operator, part, limit))
    if as_json:
        say(answer)
    else:
        _print(answer)


class _Asked(msgspec.Struct, frozen=True):
    """What is to be compared, and how many keys are to be told."""

    stage: str
    operator: int | None
    part: str | None
    limit: int


def _compared(root: Place, before: CheckpointInside, after: CheckpointInside, asked: _Asked) -> DiffAnswer:
    from tidegate.engine.inspecting import chosen_operator, reading_session
    from tidegate.spark.state_diff import difference
    from tidegate.spark.stored_state import told_of

    stage = asked.stage
    session = reading_session(time_zone=_UTC)
    with scratch() as old, scratch() as new, told_of(stage):
        stored = before.stored(stage, session, old), after.stored(stage, session, new)
        frames = []
        for each, name in zip(stored, (before.name, after.name), strict=True):
            of = f"stage {stage!r} at {name}"
            operator, part = chosen_operator(each, asked.operator, asked.part, of)
            frames.append(each.frame(operator, part, flat=not part.is_list))
        found = difference(frames[0], frames[1], asked.limit)
    return DiffAnswer(
        root=str(root),
        pipeline=after.pipeline,
        before=before.name,
        after=after.name,
        stage=stage,
        held_by=after.holder_of(stage),
        operator=operator.number,
        part=part.name,
        added=found.added,
        removed=found.removed,
        changed=found.changed,
        unchanged=found.unchanged,
        some={
            kind: tuple(ChangedKey(each.key, each.before, each.after) for each in changes)
            for kind, changes in found.some.items()
        },
    )


def _print(answer: DiffAnswer) -> None:
    out = console()
    of = f"state of {answer.held_by}{'' if answer.part is None else f' ({answer.part})'}"
    out.print(f"{of} from {answer.before} to {answer.after}", style="bold", markup=False)
    if answer.held_by != answer.stage:
        out.print(f"{answer.stage} ran in one query with {answer.held_by}, which holds its state", markup=False)
    out.print(
        f"{counted(answer.added, 'key')} added, {answer.removed:,} removed, {answer.changed:,} changed, "
        f"{answer.unchanged:,} unchanged"
    )
    for kind, sign in _TOLD.items():
        changes = answer.some.get(kind, ())
        for each in changes:
            out.print(f"{sign} {_shown(each.key)}: {_change(each)}", markup=False, soft_wrap=True)
        more = getattr(answer, kind) - len(changes)
        if changes and more:
            out.print(f"  and {more:,} more {kind}; --limit shows more", markup=False)


def _change(change: ChangedKey) -> str:
    stored = [" | ".join(map(_shown, rows)) for rows in (change.before, change.after) if rows is not None]
    return " → ".join(stored)


def _shown(columns: dict[str, Any]) -> str:
    """A row on one line."""
    return ", ".join(f"{name} {_value(value)}" for name, value in columns.items()) or "nothing but the key"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
