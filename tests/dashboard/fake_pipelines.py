"""Pipelines that are made up from a seed, for work on the dashboard's page: their past, and what they do now.

One is well, one of 100 stages is held back, one was killed, one restarts, one has yet to begin. The values are the
engine's own structs, so that what the page is shown is what it is shown by a run. Names have HTML in them, which the
page has to show as text.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from tidegate.dashboard.alerts import alerts_of
from tidegate.engine import events
from tidegate.engine.chronicle import ended
from tidegate.engine.control import Life
from tidegate.engine.status import (
    CheckpointStatus,
    DueCheckpoint,
    InstanceStatus,
    NoBatch,
    RunStatus,
    SinkCommit,
    StagePart,
    StageStatus,
    StartingStep,
    StepName,
    as_moment,
)

HTML_NAME: Final = "<img src=x onerror=alert(1)>"
_CYCLE: Final = 14  # steps from one checkpoint to the next

Shape = dict[str, tuple[str, tuple[str, ...]]]  # by the name of a stage: its kind, what it reads

ORDERS: Final[Shape] = {
    "orders": ("source", ()),
    "payments": ("source", ()),
    "large": ("stage", ("orders",)),
    "paid": ("stage", ("orders", "payments")),
    "order_log": ("sink", ("large",)),
    "paid_orders": ("sink", ("paid",)),
    "revenue": ("sink", ("paid",)),
}


def fleet(seed: int) -> Shape:
    """A hundred stages in eight layers."""
    chance = random.Random(seed)
    layers = [[f"sensor_{i:02}" for i in range(12)]]
    shape: Shape = dict.fromkeys(layers[0], ("source", ()))
    for depth in range(1, 7):
        layers.append([f"step_{depth}_{i:02}" for i in range(12)])
        for i, name in enumerate(layers[-1]):
            near = [layers[-2][i], layers[-2][(i + 1) % 12]]
            shape[name] = ("stage", tuple(near[: 1 + (chance.random() < 0.35)]))
    sinks = [HTML_NAME, *(f"table_{i:02}" for i in range(15))]
    shape |= {name: ("sink", (layers[-1][i % 12],)) for i, name in enumerate(sinks)}
    return shape


class FakePipeline:
    """One pipeline of the world, its past, and what it is doing."""

    def __init__(self, name: str, root: str, shape: Shape, seed: int, past: int, **how: Any) -> None:
        self.name, self.root, self.shape = name, root, shape
        self.key = hashlib.sha256(root.encode()).hexdigest()[:12]
        self.chance = random.Random(seed)
        self.life = how.get("life", "alive")
        self.state = how.get("state", "running")
        self.why: str | None = how.get("why")
        self.is_held = how.get("is_held", False)
        self.step: StepName = how.get("step", "loading")
        self.instances: tuple[InstanceStatus, ...] = how.get("instances", ())
        self.interval_s = 10
        self.generation = 3
        self.ticks = 0
        self.rows = dict.fromkeys(shape, 0)
        self.depth = dict.fromkeys(shape, 0)
        for each, (_, inputs) in shape.items():
            self.depth[each] = max((self.depth[i] + 1 for i in inputs), default=0)
        self.past: list[CheckpointStatus] = []
        self.events: list[events.AnyEvent] = []
        self.savepoints: set[str] = set()
        self.known_shape: Shape | None = None
        """As at the last checkpoint, by which a root knows it; None: there was none yet."""
        self.chains: dict[str, tuple[str, ...]] = {}
        """Stages that run as one query: by the last one, those before it."""
        self.versions: dict[str, dict[str, tuple[int, int | None]]] = {}
        self._live: CheckpointStatus | None = None
        self.now = datetime.now(UTC) - (timedelta(minutes=47) if self.life == "stopped" else timedelta())
        self._remember(past)

    @property
    def chained_into(self) -> dict[str, str]:
        return {each: last for last, before in self.chains.items() for each in before}

    @property
    def newest_event(self) -> str:
        return str(len(self.events))

    @property
    def mark(self) -> str:
        return hashlib.sha256(repr((self.life, self.generation, self.known_shape, self.outlook)).encode()).hexdigest()

    @property
    def outlook(self) -> str | None:
        return f"the next run goes on from {self.past[-1].checkpoint}" if self.past else None

    @property
    def sinks(self) -> list[str]:
        return [name for name, (kind, _) in self.shape.items() if kind == "sink"]

    # -- the past -----------------------------------------------------------------------------------

    def _remember(self, past: int) -> None:
        begun = self.now - timedelta(seconds=self.interval_s * past + 3)
        generation = 1
        if past:
            self._start("first", begun, None, generation)
        for number in range(1, past + 1):
            at = begun + timedelta(seconds=self.interval_s * number)
            if number % 97 == 30:
                why = f"stage {list(self.shape)[len(self.shape) // 2]}: Connection reset by peer (java.io.IOException)"
                self.events.append(
                    events.Failed(
                        at=as_moment(at), why=why, stage=list(self.shape)[-1], retried_in_ms=2000, id=f"f{number}"
                    )
                )
                generation += 1
                base = next((each.checkpoint for each in reversed(self.past) if each.state == "complete"), None)
                self._start("failure", at + timedelta(seconds=3), why, generation, base)
            self._end(self._checkpoint(number, at, generation, is_aborted=number % 23 == 9, is_done=True))
            if number % 40 == 20:
                self._savepoint(f"ckpt-{number:06}", at)
        if self.life == "stopped" and self.past:
            killed = self._checkpoint(past + 1, self.now, generation, is_aborted=True, is_done=True)
            why = "the run was killed while stages stored their parts"
            self._end(msgspec.structs.replace(killed, why=why))

    def _start(self, because: Any, at: datetime, why: str | None, generation: int, base: str | None = None) -> None:
        steps = [("loading", 140), ("starting_spark", 2900), ("reading_checkpoint", 80), ("laying_out", 310)]
        taken = tuple(events.StepTaken(name, ms) for name, ms in [*steps, ("starting_queries", 1200)])  # type: ignore[arg-type]
        self.events.append(
            events.Started(
                at=as_moment(at),
                id=f"s{generation}",
                because=because,
                why=why,
                base=base,
                steps=taken,
                took_ms=4630,
                generation=generation,
                host="driver-1",
                pid=4711,
                settings={"interval": "10s", "max-inflight": "64MB"},
                changes=("sink revenue is new: it starts empty",) if generation == 2 else (),
            )
        )

    def _savepoint(self, checkpoint: str, at: datetime) -> None:
        self.savepoints.add(checkpoint)
        place = f"{self.root}-savepoints/{checkpoint}"
        self.events.append(
            events.SavepointTaken(
                at=as_moment(at), id=f"p{checkpoint}", checkpoint=checkpoint, name=checkpoint, place=place
            )
        )

    def _checkpoint(
        self,
        number: int,
        at: datetime,
        generation: int,
        *,
        is_aborted: bool = False,
        is_done: bool = False,
        at_step: int = 0,
    ) -> CheckpointStatus:
        """As it is `at_step` steps after its trigger, or as it was when it had ended."""
        chance = random.Random(f"{self.name} {number}")
        deepest = max(self.depth.values())
        slow = self.sinks[number % len(self.sinks)]
        stages: dict[str, StagePart] = {}
        cut_ms = 0
        for name, (kind, inputs) in self.shape.items():
            if name in self.chained_into:
                continue  # the last of its query takes part
            barrier = 0 if kind == "source" else 60 * self.depth[name] + chance.randrange(40)
            alignment = (
                0 if kind == "source" else chance.randrange(30, 300) + (2400 if name == slow and number % 5 == 0 else 0)
            )
            snapshot = chance.randrange(20, 120)
            is_late = is_aborted and name == slow
            at_depth = at_step - self.depth[name]
            total = (hash_of(name) % 90 + 10) * 100_000 + number * (hash_of(name) % 900)
            done = StagePart(
                progress="done",
                cut=number * 12,
                cut_because="aligned",
                barrier_ms=barrier,
                alignment_ms=alignment,
                aligned_ms=barrier + alignment // 3,
                caught_up_segments=0 if kind == "source" else alignment // 60,
                last_barrier_from=inputs[-1] if inputs else None,
                snapshot_ms=snapshot,
                new_bytes=total // 14,
                total_bytes=total,
                in_flight_bytes=chance.randrange(40_000) if number % 11 == 0 and kind != "source" else 0,
                has_event_time=True,
                watermark_ms=int(at.timestamp() * 1000) - 30_000 - self.depth[name] * 900,
            )
            if is_late:
                stages[name] = StagePart(progress="aligning", waits_for=inputs, barrier_ms=barrier, alignment_ms=60_000)
            elif is_done or at_depth >= 3:
                stages[name] = done
                cut_ms = max(cut_ms, barrier + alignment + snapshot)
            elif at_depth < 0:
                stages[name] = StagePart(progress="waiting")
            else:
                progress: Any = ("aligning" if len(inputs) > 1 else "catching_up", "storing", "storing")[at_depth]
                waits = inputs[1:] if progress == "aligning" else ()
                stages[name] = StagePart(
                    progress=progress, waits_for=waits, barrier_ms=barrier, alignment_ms=barrier + 90
                )
        is_prepared = all(part.progress == "done" for part in stages.values())
        took = 60_000 if is_aborted else cut_ms + 35
        is_complete = is_done and not is_aborted
        commits = {
            sink: SinkCommit(begun_ms=took + 8, took_ms=chance.randrange(80, 900), failures=int(number % 17 == 0))
            for sink in self.sinks
            if is_complete
        }
        late = f"stage {slow} took part too late, after 60 s" if is_aborted else None
        longest = max(stages, key=lambda name: stages[name].alignment_ms or 0)
        part = stages[longest]
        worked = f"{self.shape[longest][0]} {longest} working off {part.caught_up_segments or 0} segments"
        return CheckpointStatus(
            checkpoint=f"ckpt-{number:06}",
            state="aborted" if is_aborted else "complete" if is_done else "committing" if is_prepared else "preparing",
            aligned=number % 11 != 0 if is_prepared else None,
            full=number % 50 == 1,
            drain=False,
            generation=generation,
            epoch=number,
            attempt=1,
            triggered_at=as_moment(at),
            duration_ms=took,
            alignment_ms=max(each.alignment_ms or 0 for each in stages.values()),
            new_bytes=sum(each.new_bytes or 0 for each in stages.values()),
            total_bytes=sum(each.total_bytes or 0 for each in stages.values()),
            in_flight_bytes=sum(each.in_flight_bytes or 0 for each in stages.values()),
            min_watermark_ms=int(at.timestamp() * 1000) - 34_000 - deepest * 900,
            why=f"timeout: {late}" if late else None,
            stages=stages,
            prepared_ms=cut_ms if is_complete else None,
            commits=commits,
            shown_ms=max((each.begun_ms + (each.took_ms or 0) for each in commits.values()), default=None),
            waited_for=f"{(part.alignment_ms or 0) / 1000:.1f} s of {took / 1000:.1f} s: {worked}",
        )

    def _end(self, checkpoint: CheckpointStatus) -> None:
        self.past.append(checkpoint)
        self.events.append(ended(checkpoint, at=checkpoint.triggered_at))
        if checkpoint.state == "complete":
            self.known_shape = self.shape
            number = checkpoint.epoch
            self.versions[checkpoint.checkpoint] = {
                sink: (number, hash_of(f"{sink}{number}") % 4000 if number % 7 else 0) if i % 4 != 3 else (number, None)
                for i, sink in enumerate(self.sinks)
            }

    # -- now ----------------------------------------------------------------------------------------

    def advance(self) -> None:
        """A step of half a second, for whom lives."""
        if self.life != "alive" or self.state != "running":
            return
        self.ticks += 1
        self.now = datetime.now(UTC)
        for name in self.shape:
            self.rows[name] += self.rate(name)
        step = self.ticks % _CYCLE
        if step == 2:
            self._begun = self.now
        if step >= 2 and not (self.is_held and step > 5):
            self._live = self._checkpoint(len(self.past) + 1, self._begun, 3, at_step=step - 2)
        elif self._live is not None and step < 2:
            self._end(self._checkpoint(len(self.past) + 1, self._begun, 3, is_done=True))
            self._live = None

    def finish(self, *, is_aborted: bool = False) -> str:
        """A checkpoint that begins and ends now."""
        self._end(self._checkpoint(len(self.past) + 1, datetime.now(UTC), 3, is_aborted=is_aborted, is_done=True))
        self._live = None
        return self.past[-1].checkpoint

    def rate(self, name: str) -> int:
        return (
            0 if self.state != "running" or self.life != "alive" else 200 + hash_of(f"{name}{self.ticks // 2}") % 1800
        )

    def status(self) -> RunStatus:
        stages = {}
        now_ms = int(self.now.timestamp() * 1000)
        names = list(self.shape)
        for name, (kind, inputs) in self.shape.items():
            lags = {each: hash_of(f"{each} to {name}{self.ticks}") % 5 for each in inputs}
            if self.is_held and name == self.sinks[0]:
                lags = dict.fromkeys(inputs, 64 // len(inputs))
            held = self.is_held and name in self.shape[self.sinks[0]][1]
            stages[name] = StageStatus(
                kind=kind,  # type: ignore[arg-type]
                batch=self.ticks + 40,
                rows=self.rows[name] + 100_000,
                rows_per_s=float(0 if held else self.rate(name)),
                lag=sum(lags.values()) if inputs else None,
                lags=lags if len(inputs) > 1 else {},
                watermark_ms=now_ms - 30_000 - self.depth[name] * 900,
                has_event_time=True,
                held_back_by=self.sinks[0] if held else None,
                chained_into=self.chained_into.get(name),
                no_batch=NoBatch(as_moment(self.now - timedelta(seconds=41)), "Kafka's brokers do not answer")
                if self.is_held and name == names[1]
                else None,
            )
        due = None
        if self.is_held:
            why = f"ckpt-{len(self.past) + 1:06} is under way, waiting for {self.sinks[0]}"
            due = DueCheckpoint(as_moment(self.now - timedelta(seconds=23)), "in_progress", why)
        began = self.state in {"starting", "restarting"}
        return RunStatus(
            self.name,
            4711,
            "driver-1",
            as_moment(self.now - timedelta(hours=3)),
            as_moment(self.now),
            self.state,
            self.why,
            StartingStep(step=self.step, since=as_moment(self.now), stage="clean", number=2, of=5) if began else None,
            self.generation,
            {} if self.state == "starting" else stages,
            (self._live,) if self._live else (),
            now_ms - 34_000,
            due,
            tuple(self.past[-8:]),
            instances=self.instances,
        )

    def summary(self) -> dict[str, Any]:
        status = self.status()
        last = next((each for each in reversed(self.past) if each.state == "complete"), None)
        alerts = alerts_of(Life(self.life), status, self.past[::-1], {}, None, f"{self.interval_s}s")
        is_known = status.stages and self.life == "alive" and self.state == "running"
        return {
            "key": self.key,
            "pipeline": self.name,
            "root": self.root,
            "life": self.life,
            "state": self.state,
            "why": self.why,
            "last_checkpoint": None
            if last is None
            else {
                "checkpoint": last.checkpoint,
                "at": last.triggered_at,
                "duration_ms": last.duration_ms,
                "state": last.state,
                "age_ms": int(
                    (datetime.now(UTC) - datetime.fromisoformat(last.triggered_at or "")).total_seconds() * 1000
                ),
            },
            "rows_per_s": sum(s.rows_per_s for s in status.stages.values() if s.kind == "sink") if is_known else None,
            "lag": sum(s.lag or 0 for s in status.stages.values()) if is_known else None,
            "watermark_ms": status.min_watermark_ms if is_known else None,
            "alerts": msgspec.to_builtins(alerts),
        }


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


class World:
    """All pipelines, and who waits for a change of them."""

    def __init__(self, seed: int = 7, many: int = 40) -> None:
        """`many`: how many checkpoints the large pipeline has taken."""
        instances = (
            InstanceStatus(name="a", leads=True, host="driver-1", pid=41, stages=("sensor_00",), missing_since=None),
            InstanceStatus(
                name="b",
                leads=False,
                host=None,
                pid=None,
                stages=("sensor_01",),
                missing_since=as_moment(datetime.now(UTC)),
            ),
        )
        killed = {name: part for name, part in ORDERS.items() if name not in {"order_log", "large"}}
        fresh: Shape = {"clicks": ("source", ()), "clean": ("stage", ("clicks",)), "visits": ("sink", ("clean",))}
        reset = "stage clean: Connection reset by peer"
        self.pipelines = [
            FakePipeline("orders", "state/orders", ORDERS, seed, 60),
            FakePipeline(
                "fleet <b>north</b>", "s3://lake/fleet", fleet(seed), seed, many, is_held=True, instances=instances
            ),
            FakePipeline("payments", "state/payments", killed, seed, 34, life="stopped"),
            FakePipeline(
                "clicks", "state/clicks", fresh, seed, 12, state="restarting", why=reset, step="starting_queries"
            ),
            FakePipeline("visits", "state/visits", fresh, seed, 0, state="starting", step="starting_spark"),
        ]
        self.by_key = {each.key: each for each in self.pipelines}
        self.changed = threading.Condition()
        self.count = 0
        self.allows_actions = True
        self.is_down = False
        self.posted: list[tuple[str, str, str | None]] = []
        self.is_slow: Callable[[str], bool] = lambda _: False
        """Whether what is asked for at an address is answered only when `may_answer`, though it is as it was before."""
        self.may_answer = threading.Event()

    def named(self, name: str) -> FakePipeline:
        return next(each for each in self.pipelines if each.name == name)

    def advance(self, steps: int = 1) -> None:
        with self.changed:
            for _ in range(steps):
                for each in self.pipelines:
                    each.advance()
            self.tell()

    def tell(self) -> None:
        with self.changed:
            self.count += 1
            self.changed.notify_all()
