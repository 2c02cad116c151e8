"""What a run can be asked for from the dashboard: as the commands `checkpoint`, `savepoint`, `cancel` and `stop` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_args

from tidegate.dashboard.values import Action, ActionName, Actions, ActionTaken
from tidegate.engine.control import Life
from tidegate.engine.requests import StopRun, ask_for_checkpoint, ask_to_cancel, ask_to_stop
from tidegate.engine.status import RunStatus
from tidegate.engine.stopping import before_the_end
from tidegate.errors import TidegateError
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import Place

_TIMEOUT_S: Final = 60.0
_SAVEPOINT_TIMEOUT_S: Final = 600.0
_NO_RUN: Final = "no run is alive here, so there is none to ask"
_NOT_ALLOWED: Final = "the dashboard was started without --allow-actions"


def offered(place: Place, life: Life, status: RunStatus | None, *, is_allowed: bool) -> Actions:
    """What each of them would do now, and whether it can be asked for."""
    found = []
    for name in get_args(ActionName):
        why_not = _NOT_ALLOWED if not is_allowed else _why_not(name, place, life, status)
        says = _says(name, place, life, status)
        found.append(Action(name=name, allowed=why_not is None, says=says, why_not=why_not))
    return Actions(tuple(found))


def _why_not(name: ActionName, place: Place, life: Life, status: RunStatus | None) -> str | None:
    if name == "savepoint":
        return f"no folder is beside {place}; use tidegate savepoint --to PLACE" if place.beside is None else None
    if life is Life.STOPPED:
        return _NO_RUN
    if name == "cancel" and (status is None or not status.in_progress):
        return "no checkpoint is in progress"
    if name == "stop" and status is not None and status.state == "stopping":
        return "it is stopping already"
    return None


def _says(name: ActionName, place: Place, life: Life, status: RunStatus | None) -> str:
    match name:
        case "checkpoint":
            return "Have the run take a checkpoint now, and wait until all tables show it"
        case "cancel":
            names = "" if status is None else ", ".join(each.checkpoint for each in status.in_progress)
            return (
                f"Cancel {names or 'the checkpoint that is in progress'}; the run goes on, and takes the next when due"
            )
        case "stop":
            return "Stop the run after a last checkpoint, as Ctrl-C does; it stays stopped until somebody starts it"
        case "savepoint":
            first = (
                "Copy the newest checkpoint"
                if life is Life.STOPPED
                else "Have the run take a full checkpoint, and copy it when all tables show it; the run goes on"
            )
            return f"{first}, to {place.beside}; nothing ever deletes it there but you"


def act(name: ActionName, place: Place) -> ActionTaken:
    """Do it. What a run, or the root, refuses is no failure of ours."""
    try:
        return ActionTaken(True, _ACTS[name](place))
    except TidegateError as error:
        return ActionTaken(False, str(error))


def _checkpoint(place: Place) -> str:
    taken = ask_for_checkpoint(place, _TIMEOUT_S)
    return f"{taken.checkpoint} is complete, and all tables show it ({taken.duration_ms or 0} ms)"


def _cancel(place: Place) -> str:
    names = ", ".join(each.checkpoint for each in ask_to_cancel(place, _TIMEOUT_S).checkpoints)
    return f"{names} cancelled; the run goes on" if names else "no checkpoint is in progress, so none was cancelled"


def _stop(place: Place) -> str:
    wanted = StopRun()
    ask_to_stop(place, _TIMEOUT_S, wanted, is_awaited=False)
    return f"the run is stopping, after {before_the_end(wanted)}"


def _savepoint(place: Place) -> str:
    # It brings deltalake.
    from tidegate.engine.savepoints import make_savepoint

    made = make_savepoint(InspectedRoot(place), timeout_s=_SAVEPOINT_TIMEOUT_S)
    return f"savepoint {made.record.name} of {checkpoint_name(made.record.checkpoint_id)} is yours: {made.folder}"


_ACTS: Final[dict[ActionName, Callable[[Place], str]]] = {
    "checkpoint": _checkpoint,
    "savepoint": _savepoint,
    "cancel": _cancel,
    "stop": _stop,
}
