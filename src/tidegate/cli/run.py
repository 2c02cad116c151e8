"""`tidegate run`: run the pipeline that a Python file defines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, chdir, suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tidegate.cli.answers import EndedEvent
from tidegate.cli.exits import Exit
from tidegate.cli.options import (
    Conf,
    DroppedState,
    PipelineFile,
    PipelineName,
    Renames,
    RootPlace,
    of_run,
    renames_in,
    settings_in,
)
from tidegate.cli.speech import say
from tidegate.engine.options import DEFAULTS
from tidegate.engine.status import RunStatus, StartingStep, now
from tidegate.storage.places import place_of

if TYPE_CHECKING:
    from tidegate.cli.view import View


def run_command(
    file: PipelineFile,
    root: RootPlace,
    pipeline: PipelineName = None,
    checkpoint_interval: Annotated[str | None, of_run("checkpoint_interval")] = DEFAULTS.checkpoint_interval,
    min_pause: Annotated[str | None, of_run("min_pause")] = DEFAULTS.min_pause,
    checkpoint_timeout: Annotated[str | None, of_run("checkpoint_timeout")] = DEFAULTS.checkpoint_timeout,
    tolerable_failures: Annotated[int | None, of_run("tolerable_failures", min=0)] = DEFAULTS.tolerable_failures,
    max_concurrent: Annotated[int | None, of_run("max_concurrent", min=1)] = DEFAULTS.max_concurrent,
    retain: Annotated[str | None, of_run("retain")] = None,
    full_snapshots: Annotated[bool, of_run("full_snapshots", "--full-snapshots")] = DEFAULTS.full_snapshots,
    unaligned_after: Annotated[str | None, of_run("unaligned_after")] = DEFAULTS.unaligned_after,
    max_inflight: Annotated[str | None, of_run("max_inflight")] = DEFAULTS.max_inflight,
    max_backlog: Annotated[str, of_run("max_backlog")] = DEFAULTS.max_backlog,
    max_backlog_segments: Annotated[int, of_run("max_backlog_segments", min=1)] = DEFAULTS.max_backlog_segments,
    max_watermark_drift: Annotated[str | None, of_run("max_watermark_drift")] = DEFAULTS.max_watermark_drift,
    commit_timeout: Annotated[str, of_run("commit_timeout")] = DEFAULTS.commit_timeout,
    available_now: Annotated[bool, of_run("available_now", "--available-now")] = DEFAULTS.available_now,
    up_to: Annotated[str | None, of_run("up_to", metavar="ROOT[@ID]")] = DEFAULTS.up_to,
    take_over: Annotated[bool, of_run("take_over", "--take-over")] = DEFAULTS.take_over,
    work: Annotated[str | None, of_run("work", metavar="FOLDER")] = DEFAULTS.work,
    restarts: Annotated[int, of_run("restarts", min=0)] = DEFAULTS.restarts,
    restart_pause: Annotated[str, of_run("restart_pause")] = DEFAULTS.restart_pause,
    chain: Annotated[bool, of_run("chain", "--chain/--no-chain")] = DEFAULTS.chain,
    history_age: Annotated[str, of_run("history_age")] = DEFAULTS.history_age,
    history_count: Annotated[int, of_run("history_count", min=1)] = DEFAULTS.history_count,
    fsync: Annotated[bool, of_run("fsync", "--fsync/--no-fsync")] = DEFAULTS.fsync,
    rename: Renames = [],  # noqa: B006 - typer copies it
    allow_dropped_state: DroppedState = [],  # noqa: B006 - the same
    instance: Annotated[str | None, of_run("instance", metavar="NAME")] = DEFAULTS.instance,
    stages: Annotated[str, of_run("stages", metavar="A,B")] = "",
    instances: Annotated[int, of_run("instances", min=1)] = DEFAULTS.instances,
    coordination: Annotated[str | None, of_run("coordination", metavar="ADDRESS")] = DEFAULTS.coordination,
    grace: Annotated[str, of_run("grace")] = DEFAULTS.grace,
    lease: Annotated[str, of_run("lease")] = DEFAULTS.lease,
    metrics_port: Annotated[int | None, of_run("metrics_port", metavar="PORT")] = DEFAULTS.metrics_port,
    metrics_host: Annotated[str, of_run("metrics_host", metavar="ADDRESS")] = DEFAULTS.metrics_host,
    traces: Annotated[str | None, of_run("traces", metavar="URL")] = DEFAULTS.traces,
    master: Annotated[str | None, of_run("master", metavar="URL")] = DEFAULTS.master,
    conf: Conf = [],  # noqa: B006 - the same
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per event instead of text.")] = False,
) -> None:
    """Run a pipeline until it is stopped, or until all its input is consumed.

    Relative paths in the file are taken from its folder, those of options from where you are.

    Ctrl-C, SIGTERM or `tidegate stop` stops it after a last checkpoint; a second signal at once. Started again, it goes
    on from the newest checkpoint, whatever ended it.

    Example: tidegate run orders.py --root state/orders --checkpoint-interval 5s

    Example: tidegate run orders.py --root state/try --up-to state/orders

    Example: tidegate run orders.py --root state/orders --instances 3

    Example: tidegate run orders.py --root state/orders --instance b --stages totals --coordination zk://zoo:2181

    Example: tidegate run orders.py --root state/orders --conf spark.jars=kafka.jar --conf spark.driver.memory=4g

    Example: tidegate run orders.py --root state/orders --metrics-port 9464

    Example: tidegate run orders.py --root /shared/orders --master spark://head:7077 --conf spark.executor.memory=4g
    """
    settings, renames = settings_in(conf), renames_in(rename)
    if instances > 1 and instance is None:
        if metrics_port:
            raise typer.BadParameter(
                f"the instances cannot share port {metrics_port}: start each with --instance and a port of its own, or "
                f"give 0",
                param_hint="--metrics-port",
            )
        from tidegate.cli.instances import run_instances

        run_instances(root, instances, as_json)
    # Not above: other commands need not wait for these.
    from rich.console import Console

    from tidegate.cli.load import load_pipeline
    from tidegate.cli.view import JsonView, LiveView, LogView
    from tidegate.engine.run import run_pipeline
    from tidegate.engine.up_to import in_full
    from tidegate.spark.session import in_place

    given = in_place(settings)
    root = place_of(root)
    up_to = None if up_to is None else in_full(up_to)
    view = JsonView() if as_json else LiveView(Console()) if sys.stdout.isatty() else LogView()
    try:
        with view, ExitStack() as here:
            show = _shown(view)
            show(StartingStep(step="loading", since=now()))
            chosen = load_pipeline(file, pipeline, to_run=True)
            here.enter_context(chdir(chosen.folder))
            run_pipeline(
                chosen,
                root,
                view=show,
                on_step=show,
                checkpoint_interval=checkpoint_interval,
                min_pause=min_pause,
                checkpoint_timeout=checkpoint_timeout,
                tolerable_failures=tolerable_failures,
                max_concurrent=max_concurrent,
                retain=retain,
                full_snapshots=full_snapshots,
                unaligned_after=unaligned_after,
                max_inflight=max_inflight,
                max_backlog=max_backlog,
                max_backlog_segments=max_backlog_segments,
                max_watermark_drift=max_watermark_drift,
                commit_timeout=commit_timeout,
                available_now=available_now,
                up_to=up_to,
                take_over=take_over,
                work=work,
                restarts=restarts,
                restart_pause=restart_pause,
                chain=chain,
                history_age=history_age,
                history_count=history_count,
                fsync=fsync,
                instance=instance,
                stages=[name for name in stages.split(",") if name],
                instances=instances,
                coordination=coordination,
                grace=grace,
                lease=lease,
                rename=renames,
                allow_dropped_state=allow_dropped_state,
                metrics_port=metrics_port,
                metrics_host=metrics_host,
                traces=traces,
                master=master,
                conf=given,
            )
    except KeyboardInterrupt as interrupt:
        _end_at_once(str(interrupt) or "stopped while it was starting", as_json)


def _end_at_once(why: str, as_json: bool) -> NoReturn:
    """Without waiting for threads, as Python does before it ends: what hangs in one was the reason to interrupt."""
    with suppress(OSError):
        if as_json:
            say(EndedEvent(state="interrupted", why=why, exit=Exit.INTERRUPTED))
        sys.stdout.flush()
        typer.echo(f"{why}; the next run goes on from the newest checkpoint, if there is one", err=True)
    os._exit(Exit.INTERRUPTED)


def _shown(view: View) -> Callable[[RunStatus | StartingStep], None]:
    """The view of a run, which goes on if what it does cannot be shown."""
    has_failed = False

    def show(what: RunStatus | StartingStep) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            if isinstance(what, StartingStep):
                view.starting(what)
            else:
                view.update(what)
        except OSError:
            raise  # there is nowhere to show it any more
        except Exception:
            has_failed = True
            logging.getLogger("tidegate").exception("what the run does cannot be shown any more; it goes on")

    return show
