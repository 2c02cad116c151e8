"""`tidegate demo`: an example DAG on a simulated cluster, its faults, and its checkpoints as a table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.recovery import checkpoint_name
from tidegate.testing.simulator import Outcome, Scenario, example_dag, simulate
from tidegate.testing.simulator.world import Faults


def demo_scenario() -> Scenario:
    """Three driver processes, two crashes, a leader that is paused and comes back, an unreliable store."""
    return Scenario(
        dag=example_dag(),
        config=CheckpointConfig(
            interval_ms=150,
            timeout_ms=400,
            max_retained=3,
            alignment=AlignmentConfig(unaligned="on_timeout", timeout_ms=30),
        ),
        instances=3,
        rows={"orders": 600, "payments": 600},
        faults=Faults(lose_message=0.1, store_fails=0.05, store_fails_after_writing=0.05, store_is_slow=0.03),
        fault_phase_ms=3_000,
        crashes=2,
        pauses=1,
        spurious_elections=1,
        drains=0,
        damages=0,
    )


def demo_command(
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another run.")] = 7,
) -> None:
    """Show checkpoints of an example pipeline on a simulated cluster with faults.

    Orders and payments meet in a join; its output goes to one table, and through an aggregation to another.
    Nothing here is Spark yet: batches, crashes and the store are simulated, the checkpoint protocol is real.

    Example: tidegate demo --seed 3
    """
    scenario = demo_scenario()
    outcome = simulate(seed, scenario)
    console = Console(highlight=False)
    console.print("A simulated pipeline on 3 driver processes, with crashes and an unreliable store\n")
    for name, spec in scenario.dag.stages.items():
        kind = "source" if spec.is_source else "sink" if spec.is_sink else "stage"
        console.print(f"  {kind:<7} {name:<15} {'← ' + ', '.join(spec.inputs) if spec.inputs else ''}")
    console.print()
    console.print(_table(outcome))
    console.print("orders, payments: rows that the source had read at the cut\n")
    for sink, expected in outcome.expected.items():
        console.print(f"{sink}: {expected} rows expected, {outcome.visible[sink]} found")
    console.print(
        f"{len(outcome.completions)} checkpoints completed, {outcome.aborted} aborted, "
        f"{outcome.crashes} crashes survived, {outcome.generations} generations"
    )
    if outcome.failure is not None:
        console.print(f"[red]{outcome.failure}")
        raise typer.Exit(1)
    console.print("[green]nothing lost, nothing twice")


def _table(outcome: Outcome) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("checkpoint", "kind"):
        table.add_column(heading, no_wrap=True)
    for heading in ("gen.", "at", "alignment", "in flight", "orders", "payments"):
        table.add_column(heading, justify="right", no_wrap=True)
    for completion in outcome.completions:
        reports = completion.manifest.values()
        inflight_bytes = sum(flying.size_bytes for report in reports for flying in report.in_flight)
        table.add_row(
            checkpoint_name(completion.record.checkpoint_id),
            "aligned" if completion.record.aligned else "unaligned",
            str(completion.record.generation),
            f"{completion.completed_ms / 1000:.2f} s",
            f"{max(report.alignment_ms for report in reports)} ms",
            f"{inflight_bytes} B" if inflight_bytes else "",
            str(completion.manifest["orders"].source_position),
            str(completion.manifest["payments"].source_position),
        )
    return table
