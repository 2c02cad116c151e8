"""What has happened to a pipeline, as values: what is kept in the history of a root, counted, traced and shown.

A run makes an event of every checkpoint that has ended, of every start, failure and end, and commands make one of what
they have done to a root. Everybody who wants to know is given the same ones: `engine/history.py` keeps them in the
root, metrics count them, traces are made of them.

What is described here of each field is what docs/reference/json.md tells users: `./dev docs` writes it.

Importing this brings no PySpark.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidegate.engine.status import CheckpointStatus, Moment, RunState, StepName

StartedBecause = Literal["first", "again", "killed", "failure", "instances", "windows"]


class StepTaken(msgspec.Struct, frozen=True):
    """A step of a start."""

    step: Annotated[StepName, Meta(description="which one, as a run that starts tells them")]
    took_ms: Annotated[int, Meta(description="how long it took, of whatever stages")]


def new_id() -> str:
    """Of what happens within one millisecond, what was told later comes later."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Something that has happened."""

    at: Annotated[Moment, Meta(description="when, by the clock of whoever tells it")]
    id: Annotated[
        str, Meta(description="tells it from all others of the root; of two that have the same, the later one counts")
    ] = msgspec.field(default_factory=new_id)
    generation: Annotated[int | None, Meta(description="the generation that it is of; null: of none")] = None
    instance: Annotated[
        str | None, Meta(description="the driver process that tells it, where several run the pipeline")
    ] = None


class CheckpointEnded(Event, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint was shown by all tables, or was aborted, or the run that took it was killed."""

    checkpoint: Annotated[CheckpointStatus, Meta(description="how it went")]


class Started(Event, frozen=True, kw_only=True, tag="start"):
    """Stages were started: by a run that starts, or one that goes back to a checkpoint."""

    because: Annotated[
        StartedBecause,
        Meta(
            description="`first`: nothing had run here before; `again`: the run before had ended; `killed`: it had "
            "not, as far as anybody knows; `failure`: of a stage, a table or Spark, after which this very run goes on; "
            "`instances`: one came, left or was lost; `windows`: to close what is open"
        ),
    ]
    why: Annotated[str | None, Meta(description="what had failed, or changed; null: nothing")] = None
    base: Annotated[str | None, Meta(description="the checkpoint that it goes on from; null: from the beginning")] = (
        None
    )
    skipped: Annotated[
        tuple[str, ...], Meta(description="newer checkpoints that are damaged, and were passed over")
    ] = ()
    steps: Annotated[tuple[StepTaken, ...], Meta(description="what was done, in order")] = ()
    took_ms: Annotated[int, Meta(description="all of it, until all queries ran")] = 0
    changes: Annotated[tuple[str, ...], Meta(description="what is not as it was at that checkpoint")] = ()
    host: Annotated[str, Meta(description="where it runs")] = ""
    pid: Annotated[int, Meta(description="its process")] = 0
    settings: Annotated[
        dict[str, str], Meta(description="the options that it runs with, as `tidegate run` names them; no secrets")
    ] = {}


class Failed(Event, frozen=True, kw_only=True, tag="failure"):
    """A generation could not go on."""

    why: Annotated[str, Meta(description="what was said of it")]
    stage: Annotated[str | None, Meta(description="the stage that failed, if one did")] = None
    retried_in_ms: Annotated[
        int | None, Meta(description="after which pause the run goes back to the last checkpoint; null: it gives up")
    ] = None


class Ended(Event, frozen=True, kw_only=True, tag="end"):
    """A run has ended."""

    state: Annotated[RunState, Meta(description="`finished`, `interrupted` or `failed`")]
    why: Annotated[str | None, Meta(description="why")] = None


class SavepointTaken(Event, frozen=True, kw_only=True, tag="savepoint"):
    """A checkpoint was copied out of the root."""

    checkpoint: Annotated[str, Meta(description="which one")]
    name: Annotated[str, Meta(description="what it is called there")]
    place: Annotated[str, Meta(description="where it is")]


class Rewound(Event, frozen=True, kw_only=True, tag="rewind"):
    """The pipeline and its tables were set back, or brought to a checkpoint from elsewhere."""

    checkpoint: Annotated[str, Meta(description="the checkpoint that the next run goes on from")]
    how: Annotated[
        Literal["restore", "savepoint", "fork", "promote"],
        Meta(description="`restore` to an earlier one, from a `savepoint`, as a `fork`, or by a fork's `promote`"),
    ]
    source: Annotated[str | None, Meta(description="where it came from, if from elsewhere")] = None


AnyEvent = CheckpointEnded | Started | Failed | Ended | SavepointTaken | Rewound
