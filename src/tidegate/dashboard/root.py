"""A root as the dashboard shows it: what was read of it, kept for a while.

Whatever can be told is told: a root whose log is damaged still has a status and a history, and a checkpoint whose
manifest is gone still has what the history says of it. What is missing is named among the `problems` of an answer.
Nothing is locked, claimed or written.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from tidegate.dashboard.alerts import alerts_of
from tidegate.dashboard.attempts import Attempts, Happened
from tidegate.dashboard.comparing import compared
from tidegate.dashboard.kept import Kept
from tidegate.dashboard.moments import age_ms, moment
from tidegate.dashboard.phases import spans_of
from tidegate.dashboard.tables import Decided, ShownTables, sealed_in
from tidegate.dashboard.values import (
    Alert,
    CheckpointDetail,
    Checkpoints,
    CheckpointsSummary,
    Comparison,
    History,
    LastCheckpoint,
    Layout,
    LayoutEdge,
    LayoutNode,
    LayoutPoint,
    Live,
    PipelineDetail,
    PipelineSummary,
    ShownVersion,
    StageFiles,
    Tables,
)
from tidegate.engine.control import Life, look
from tidegate.engine.events import AnyEvent, CheckpointEnded
from tidegate.engine.graph import GraphStage, drawn_stage, graph_of
from tidegate.engine.history import Past
from tidegate.engine.layout import Place as DrawnPlace
from tidegate.engine.layout import layered
from tidegate.engine.outlook import next_run, next_start
from tidegate.engine.positions import positions_of
from tidegate.engine.status import CheckpointState, CheckpointStatus, RunStatus, status_in
from tidegate.errors import DamagedCheckpoint, StoreUnavailable, TidegateError, UnknownCheckpoint
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.disk import room
from tidegate.storage.file_lists import files_of
from tidegate.storage.inspection import InspectedRoot, Outlook, read_owner
from tidegate.storage.manifest import Manifest, decode_manifest
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import Place, RootInBucket
from tidegate.storage.system import say

_LOOKED_AT: Final = 50
"""How many of the last checkpoints alerts are made of."""
_MOST_FOR_TABLES: Final = 1_000
"""Checkpoints that are looked for in tables."""
_MOST_IN_FULL: Final = 64
"""Checkpoints of which all is kept that was read."""
T = TypeVar("T")


class Pace(msgspec.Struct, frozen=True):
    """After how many seconds what was read is read again."""

    word_s: float = 0.4
    known_s: float = 1.0
    damage_s: float = 60.0
    outlook_s: float = 5.0
    tables_s: float = 2.0
    full_s: float = 30.0


_NEAR: Final = Pace()
# Requests are paid for there, and a run says something every four seconds.
_FAR: Final = Pace(word_s=4.0, known_s=15.0, damage_s=600.0, outlook_s=60.0, tables_s=30.0, full_s=600.0)
_STALE_TIMES: Final = 5


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a root holds: of which pipeline it is, and the checkpoints that its log retains."""

    pipeline: str
    root_id: str
    retained: dict[int, CheckpointCompleted] = {}
    kept: dict[int, CheckpointStatus] = {}
    """The same, by their manifests."""
    sealed: dict[int, dict[str, int]] = {}
    """Of those whose manifests can be read, what their tables have to show (`sealed_in`)."""
    left_behind: frozenset[int] = frozenset()
    """Those from which the pipeline has not come: it was set back behind them."""
    newest: CheckpointCompleted | None = None
    """Of the lineage that the next run goes on from."""
    manifest: Manifest | None = None
    """Of that one, or of the newest one that can be read."""
    graph: dict[str, GraphStage] = {}
    layout: Layout = Layout(0, 0, (), ())
    problems: tuple[str, ...] = ()


class _Stored(msgspec.Struct, frozen=True):
    """What is kept of a manifest that was read."""

    status: CheckpointStatus
    sealed: dict[str, int] | None = None
    """None: the manifest is damaged."""


class _Foreseen(msgspec.Struct, frozen=True):
    """What the next run does, as it was told last."""

    told: str
    newest: CheckpointCompleted | None
    """Which checkpoint was the newest then."""
    at_s: float

    def is_due(self, newest: CheckpointCompleted | None, fresh_s: float) -> bool:
        """Whether it is to be told anew, and would be read anew if it were asked for."""
        return newest != self.newest and time.monotonic() - self.at_s > fresh_s


class _InFull(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest tells of a checkpoint, and the tables of it."""

    positions: dict[str, tuple[str, ...]] = {}
    files: dict[str, StageFiles] = {}
    chains: dict[str, tuple[str, ...]] = {}
    """By the last of stages that ran as one query, those before it."""
    tables: dict[str, ShownVersion] = {}
    problems: tuple[str, ...] = ()


class ShownRoot:
    """One of those that the dashboard was started with. For any thread."""

    def __init__(self, place: Place, beside: Executor) -> None:
        self.place = place
        self._beside = beside
        self.given = place.url if isinstance(place, RootInBucket) else str(place)
        where = self.given if isinstance(place, RootInBucket) else str(place.paths.root.resolve())
        self.key = hashlib.sha256(where.encode()).hexdigest()[:12]
        self._pace = pace = _FAR if place.is_far else _NEAR
        self._past = Past(place.files)
        self._inspected: dict[Callable[[], object], InspectedRoot] = {}
        """Whoever looks has one of its own: each is for one thread at a time."""
        self._stored: dict[str, _Stored] = {}
        """Of manifests that were read, by their checksums."""
        self._shown_tables = ShownTables()
        self._full: OrderedDict[str, Kept[_InFull]] = OrderedDict()
        self._full_lock = threading.Lock()
        self._happened = Happened(())
        self._known_last: Known | None = None
        self._foreseen: _Foreseen | None = None
        self._word: Kept[tuple[Life, RunStatus | None]] = self._kept(lambda: look(place), pace.word_s)
        self._known: Kept[Known] = self._kept(self._read_known, pace.known_s)
        self._events: Kept[Happened] = self._kept(self._read_events, pace.known_s)
        self._damage: Kept[dict[int, str]] = self._kept(self._read_damage, pace.damage_s)
        self._outlook: Kept[Outlook] = self._kept(self._read_outlook, pace.outlook_s)
        # Who asks for it when something has happened, and then no more, is not given what was before.
        self._tables: Kept[Tables] = self._kept(self._read_tables, pace.tables_s, stale_times=1)
        self._summary: Kept[CheckpointsSummary] = self._kept(lambda: self.attempts().summary(), pace.known_s)

    def _kept(self, read: Callable[[], T], fresh_s: float, stale_times: int = _STALE_TIMES) -> Kept[T]:
        return Kept(lambda: _told(read), self._beside, fresh_s, fresh_s * stale_times)

    def warm_up(self) -> None:
        """Read what takes long, beside, before somebody asks for it."""
        with suppress(TidegateError):
            self.detail(actions_allowed=False)
            self.summary()
            self._tables.get()

    # -- what is read -----------------------------------------------------------------------------

    def _read_known(self) -> Known:
        inspected = self._inspect(self._read_known)
        problems: list[str] = []
        log = _read_or_noted(inspected.log, problems)
        if log is None:
            return Known(pipeline=inspected.pipeline, root_id=inspected.id, problems=tuple(problems))
        records = {each: found for each in sorted(log.retained) if (found := log.completed(each)) is not None}
        stored, new = self._read_manifests(records, problems)
        manifest = self._newest_manifest(log, records, new, problems)
        graph = {} if manifest is None else graph_of(manifest)
        before = self._known_last
        self._known_last = now = Known(
            pipeline=inspected.pipeline,
            root_id=inspected.id,
            retained=records,
            kept={number: each.status for number, each in stored.items()},
            sealed={number: each.sealed for number, each in stored.items() if each.sealed is not None},
            left_behind=frozenset(records).difference(each.checkpoint_id for each in log.lineage()),
            newest=log.newest,
            manifest=manifest,
            graph=graph,
            layout=before.layout if before is not None and before.graph == graph else layout_of(graph),
            problems=tuple(problems),
        )
        return now

    def _inspect(self, looks: Callable[[], object]) -> InspectedRoot:
        """One for as long as it is the same root: it keeps what it has read of the log."""
        found = self._inspected.get(looks)
        if found is not None:
            self.place.check_is_there()
            owner = read_owner(found.files)
            if owner is not None and (owner.root_id, owner.pipeline) == (found.id, found.pipeline):
                return found
        self._inspected[looks] = found = InspectedRoot(self.place)
        return found

    def _read_manifests(
        self, records: Mapping[int, CheckpointCompleted], problems: list[str]
    ) -> tuple[dict[int, _Stored], Mapping[str, bytes]]:
        """Each of them once; also what was read of those that are new."""
        new = {each.manifest: each for each in records.values() if each.manifest_sha256 not in self._stored}
        names = [name for name in new if RootPaths.is_inside(name)]
        found = _read_or_noted(lambda: self.place.files.read_all(names), problems) or {}
        whole = {
            each.manifest_sha256: self._stored[each.manifest_sha256]
            for each in records.values()
            if each.manifest_sha256 in self._stored
        }
        stored: dict[int, _Stored] = {}
        for number, record in records.items():
            read = whole.get(record.manifest_sha256)
            if read is None:
                read = _stored_in(record, found.get(record.manifest))
                if read.sealed is not None:
                    whole[record.manifest_sha256] = read
            stored[number] = read
        self._stored = whole
        return stored, found

    def _newest_manifest(
        self,
        log: DecisionLog,
        records: Mapping[int, CheckpointCompleted],
        new: Mapping[str, bytes],
        problems: list[str],
    ) -> Manifest | None:
        """`new`: those that were just read."""
        before = self._known_last
        wanted = [] if log.newest is None else [log.newest]
        wanted += [records[number] for number in sorted(records, reverse=True) if records[number] not in wanted][:3]
        for record in wanted:
            if before is not None and before.manifest is not None and before.newest == record == log.newest:
                return before.manifest
            with suppress(TidegateError):
                data = new.get(record.manifest)
                if data is None and RootPaths.is_inside(record.manifest):
                    data = self.place.files.read(record.manifest)
                if data is not None:
                    return decode_manifest(data, record.manifest_sha256, record.manifest)
        if wanted:
            problems.append("no manifest can be read, so the pipeline's graph is not known")
        return None

    def _read_events(self) -> Happened:
        events = self._past.everything()
        if not self._happened.is_of(events):
            self._happened = Happened(events)
        return self._happened

    def _read_damage(self) -> dict[int, str]:
        """What is wrong with checkpoints, by the sizes of their files: it takes its time, where there are many."""
        inspected = self._inspect(self._read_damage)
        records = inspected.retained()
        inspected.look_ahead(records)
        found: dict[int, str] = {}
        for record in records:
            with suppress(UnknownCheckpoint):  # removed by the run meanwhile
                damage = inspected.damage_of(record)
                if damage is not None:
                    found[record.checkpoint_id] = damage
        return found

    def _read_outlook(self) -> Outlook:
        newest, at_s = self._known.get().newest, time.monotonic()
        is_alive = self._word.get()[0] is not Life.STOPPED
        found = next_run(self._inspect(self._read_outlook), is_alive=is_alive)
        self._foreseen = _Foreseen(str(found), newest, at_s)
        return found

    def _read_tables(self) -> Tables:
        known = self._known.get()
        attempts = self.attempts()
        completed = dict(islice(attempts.completed(), _MOST_FOR_TABLES))
        newest = max(completed, default=0) if known.newest is None else known.newest.checkpoint_id
        left_behind = {number for number in completed if number > newest or number in known.left_behind}
        lineage = [number for number in completed if number not in left_behind]
        complete = [number for number in lineage if completed[number].state == "complete"]
        told = next((number for number in complete if not attempts.is_in_doubt(number)), None)
        decided = Decided(
            newest_first=list(completed.values()),
            lineage=[completed[number] for number in lineage],
            left_behind=[completed[number] for number in completed if number in left_behind],
            shown=None if told is None else completed[told],
            in_doubt=completed[complete[0]] if complete and complete[0] != told else None,
            sealed={checkpoint_name(number): each for number, each in known.sealed.items()},
        )
        return self._shown_tables.look(known.manifest, known.root_id, decided)

    # -- what is told -----------------------------------------------------------------------------

    def word(self) -> tuple[Life, RunStatus | None]:
        """Whether a run is alive, and what it says."""
        return self._word.get()

    def has_changed(self) -> None:
        """By something that was just done here: what was read is read again."""
        self._word.forget()
        self._known.forget()
        self._events.forget()

    def attempts(self) -> Attempts:
        """All checkpoints. Raises where neither the root nor a run on it tells anything."""
        life, status = _read_or_noted(self._word.get) or (Life.STOPPED, None)
        happened = _read_or_noted(self._events.get) or Happened(())
        known = self.known()
        damage = {number: each.why or "" for number, each in known.kept.items() if each.state == "damaged"}
        looked_at = {number: text for number, text in self._damage.peek({}).items() if number in known.retained}
        return Attempts(happened, life, status, known.kept, {**looked_at, **damage})

    def known(self) -> Known:
        return self._known.get()

    def pipeline_summary(self) -> PipelineSummary:
        try:
            known = self.known()
            life, status = self._word.get()
            attempts = self.attempts()
        except TidegateError as error:
            return PipelineSummary(
                key=self.key,
                pipeline=None,
                root=self.given,
                life="unreadable",
                state=None,
                why=str(error),
                last_checkpoint=None,
                rows_per_s=None,
                lag=None,
                watermark_ms=None,
                alerts=(Alert("error", str(error)),),
            )
        is_alive = life is not Life.STOPPED and status is not None and bool(status.stages)
        last = next(iter(attempts.completed()), None)
        return PipelineSummary(
            key=self.key,
            pipeline=known.pipeline,
            root=self.given,
            life=life.value,
            state=None if status is None else status.state,
            why=None if status is None else status.why,
            last_checkpoint=None if last is None else _last(last[1]),
            rows_per_s=_rows_per_s(status) if is_alive and status is not None else None,
            lag=sum(each.lag or 0 for each in status.stages.values()) if is_alive and status is not None else None,
            watermark_ms=None if status is None else status.min_watermark_ms,
            alerts=(
                *self._alerts(life, status, attempts),
                *(Alert("error", each) for each in known.problems),
            ),
        )

    def _alerts(self, life: Life, status: RunStatus | None, attempts: Attempts) -> tuple[Alert, ...]:
        ended = ("aborted", "committing", "complete", "damaged")
        numbers = list(islice(attempts.newest_first(ended), _LOOKED_AT))
        newest = [found for number in numbers if (found := attempts.get(number)) is not None]
        outlook = _read_or_noted(self._outlook.get) if life is Life.STOPPED else None
        interval = self._settings().get("checkpoint-interval")
        return alerts_of(life, status, newest, attempts.damage, outlook, interval)

    def _settings(self) -> dict[str, str]:
        happened = _read_or_noted(self._events.get)
        return {} if happened is None or happened.start is None else dict(happened.start.settings)

    def live(self) -> Live:
        word = _read_or_noted(self._word.get)
        return Live(
            self.pipeline_summary(),
            None if word is None else word[1],
            newest_event=self._newest_event(),
            mark=self._mark(),
        )

    def _newest_event(self) -> str | None:
        happened = _read_or_noted(self._events.get)
        return None if happened is None else happened.newest

    def _mark(self) -> str:
        """Of what `detail` is made of, as it was read last: who asks for that whenever this changes is not left with
        what was before. Nothing is read for it that whoever looks does not need anyway."""
        life, status = _read_or_noted(self._word.get) or (Life.STOPPED, None)
        known = _read_or_noted(self._known.get)
        newest = None if known is None else known.newest
        foreseen = self._foreseen
        of = (
            life,
            None if status is None else (status.generation, *status.stages),
            newest,
            None if known is None else known.problems,
            None if foreseen is None else foreseen.told,
            foreseen is not None and foreseen.is_due(newest, self._pace.outlook_s),
            self._settings(),
        )
        return hashlib.sha256(repr(of).encode()).hexdigest()[:12]

    def detail(self, *, actions_allowed: bool) -> PipelineDetail:
        mark = self._mark()  # before all that it is of: what changes meanwhile is told again
        known = self.known()
        problems = list(known.problems)
        word = _read_or_noted(self._word.get, problems)
        status = None if word is None else word[1]
        outlook = _read_or_noted(self._outlook.get, problems)
        _read_or_noted(self._events.get, problems)
        graph, layout = known.graph, known.layout
        if not graph and status is not None:
            graph = {
                name: GraphStage(each.kind, (), "append", None, each.chained_into)
                for name, each in status.stages.items()
            }
            layout = layout_of(graph)
        return PipelineDetail(
            summary=self.pipeline_summary(),
            status=status,
            graph=graph,
            layout=layout,
            outlook=None if outlook is None else next_start(outlook),
            outlook_told=None if outlook is None else str(outlook),
            settings=self._settings(),
            actions_allowed=actions_allowed,
            problems=tuple(dict.fromkeys(problems)),
            newest_event=self._newest_event(),
            mark=mark,
        )

    def checkpoints(self, states: Collection[CheckpointState] | None, before: int | None, limit: int) -> Checkpoints:
        return self.attempts().page(states, before, limit)

    def summary(self) -> CheckpointsSummary:
        return self._summary.get()

    def checkpoint(self, number: int) -> CheckpointDetail:
        row = self.attempts().row(number)
        if row is None:
            raise UnknownCheckpoint(f"{self.given} knows no {checkpoint_name(number)}, and its history tells of none")
        full = self._in_full(number)
        return CheckpointDetail(
            checkpoint=row.checkpoint,
            retained=row.retained,
            is_savepoint=row.is_savepoint,
            positions=full.positions,
            files=_files_of(row.checkpoint.stages.keys(), full.files, full.chains),
            tables=full.tables,
            gantt=spans_of(row.checkpoint),
            problems=full.problems,
        )

    def compare(self, a: int, b: int) -> Comparison:
        first, second = self.checkpoint(a), self.checkpoint(b)
        problems = tuple(dict.fromkeys((*first.problems, *second.problems)))
        return compared(first.checkpoint, second.checkpoint, first.positions, second.positions, problems)

    def tables(self) -> Tables:
        self.known()
        return self._tables.get()

    def history(self, kinds: Collection[type[Any]] | None, before: str | None, limit: int) -> History:
        self.known()
        events, cursor = _told(partial(self._events.get().page, kinds, before, limit))
        return History(tuple(events), cursor)

    def seen(self) -> tuple[str, bool, RunStatus | None, list[AnyEvent]]:
        """For metrics: the pipeline, whether a run is alive and says so, what it says, and all that has happened."""
        life, status = self._word.get()
        return self.known().pipeline, life is Life.ALIVE, status, list(filter(_has_time, self._events.get().events))

    def room(self) -> tuple[int, int] | None:
        """What is left on the disk that it is on; None: nobody knows, as of a bucket."""
        return None if self.place.is_far else room(self.place.paths.root)

    # -- one in full ------------------------------------------------------------------------------

    def _in_full(self, number: int) -> _InFull:
        record = self.known().retained.get(number)
        if record is None:
            return _InFull()
        with self._full_lock:
            found = self._full.get(record.manifest_sha256)
            if found is None:
                read = partial(self._read_in_full, record)
                # What it consists of never changes; the tables may be read by somebody else, or be set back.
                found = self._full[record.manifest_sha256] = Kept(
                    lambda: _told(read), self._beside, self._pace.full_s, 3_600.0
                )
            self._full.move_to_end(record.manifest_sha256)
            while len(self._full) > _MOST_IN_FULL:
                self._full.popitem(last=False)
        try:
            return found.get()
        except TidegateError as error:
            return _InFull(problems=(str(error),))

    def _read_in_full(self, record: CheckpointCompleted) -> _InFull:
        problems: list[str] = []
        data = self.place.files.read(record.manifest) if RootPaths.is_inside(record.manifest) else None
        if data is None:
            return _InFull(problems=(f"{record.manifest} is gone",))
        manifest = decode_manifest(data, record.manifest_sha256, record.manifest)
        files: dict[str, StageFiles] = {}
        for name, stage in manifest.stages.items():
            found = _read_or_noted(partial(files_of, self.place.files, name, stage.files), problems)
            if found is not None:
                files[name] = StageFiles(len(found), sum(each.size_bytes for each in found))
        return _InFull(
            positions={
                name: tuple(each.words for each in found)
                for name, found in positions_of(self.place.files, manifest).items()
            },
            files=files,
            chains=manifest.chains,
            tables={name: self._version_of(name, manifest) for name in manifest.shape if _table(manifest, name)},
            problems=tuple(problems),
        )

    def _version_of(self, sink: str, manifest: Manifest) -> ShownVersion:
        table = manifest.shape[sink].table
        assert table is not None
        version: int | None = None
        why: str | None = None
        if table.kind == "delta":
            try:
                version = self._shown_tables.version_of(sink, table, manifest, self.known().root_id)
            except (TidegateError, OSError) as error:
                why = str(error) if isinstance(error, TidegateError) else say(error)
        return ShownVersion(kind=table.kind, address=table.address, version=version, why=why)


def _has_time(event: AnyEvent) -> bool:
    """What has none cannot be counted: nobody writes that, but a damaged file may say it."""
    if not isinstance(event, CheckpointEnded) or event.checkpoint.triggered_at is None:
        return True
    return moment(event.checkpoint.triggered_at) is not None


def _files_of(
    told: Collection[str], files: Mapping[str, StageFiles], chains: Mapping[str, tuple[str, ...]]
) -> dict[str, StageFiles]:
    """By the stages that are `told` of. What Spark keeps for a chain is stored for the first of its stages, while a run
    tells of the last one only: that one has the files of all."""
    found = dict(files)
    for last, before in chains.items():
        if not any(each in told for each in before):
            of = [found.pop(each) for each in (*before, last) if each in found]
            found[last] = StageFiles(sum(each.count for each in of), sum(each.bytes for each in of))
    return found


def _table(manifest: Manifest, name: str) -> bool:
    return manifest.shape[name].table is not None


def _told(read: Callable[[], T]) -> T:
    """Whatever a damaged root leads to is an error of ours, in one line."""
    try:
        return read()
    except TidegateError:
        raise
    except OSError as error:
        raise StoreUnavailable(say(error)) from error
    except Exception as error:
        raise StoreUnavailable(f"it cannot be understood ({type(error).__name__}: {say(error)})") from error


def _read_or_noted(read: Callable[[], T], problems: list[str] | None = None) -> T | None:
    """What there is, or None, and why it cannot be told."""
    try:
        return read()
    except TidegateError as error:
        why = str(error)
    except OSError as error:
        why = say(error)
    if problems is not None:
        problems.append(why)
    return None


def _stored_in(record: CheckpointCompleted, data: bytes | None) -> _Stored:
    """What its manifest tells, or that this is damaged."""
    try:
        if data is None:
            raise DamagedCheckpoint(f"{record.manifest}, which {RootPaths.decision(record.slot)} names, is gone")
        manifest = decode_manifest(data, record.manifest_sha256, record.manifest)
        return _Stored(status_in(manifest), sealed_in(manifest))
    except TidegateError as damaged:
        return _Stored(
            CheckpointStatus(
                checkpoint=checkpoint_name(record.checkpoint_id),
                state="damaged",
                aligned=record.aligned,
                generation=record.generation,
                epoch=record.epoch,
                why=str(damaged),
            )
        )


def _last(checkpoint: CheckpointStatus) -> LastCheckpoint:
    return LastCheckpoint(
        checkpoint=checkpoint.checkpoint,
        at=checkpoint.triggered_at,
        age_ms=age_ms(checkpoint.triggered_at),
        duration_ms=checkpoint.duration_ms,
        state=checkpoint.state,
    )


def _rows_per_s(status: RunStatus) -> float:
    """Of its sources; one that runs in the query of another is counted there."""
    sources = {each.chained_into or name for name, each in status.stages.items() if each.kind == "source"}
    return round(sum(status.stages[name].rows_per_s for name in sources if name in status.stages), 1)


def layout_of(graph: Mapping[str, GraphStage]) -> Layout:
    layers = layered([drawn_stage(name, each) for name, each in graph.items()])
    places = [place for layer in layers for place in layer]
    stages = [place for place in places if place.stage is not None]
    return Layout(
        columns=len(layers),
        rows=max((place.row + place.height for place in places), default=0),
        nodes=tuple(
            LayoutNode(place.stage.name, graph[place.stage.name].kind, place.layer, place.row, place.height)
            for place in stages
            if place.stage is not None
        ),
        edges=tuple(_edge(source, place) for place in stages for source in place.inputs),
    )


def _edge(source: DrawnPlace, target: DrawnPlace) -> LayoutEdge:
    """From the stage that writes it, which may be several bends away."""
    points = [LayoutPoint(target.layer, target.entry_row(source))]
    while source.stage is None:
        points.append(LayoutPoint(source.layer, source.row))
        (source,) = source.inputs
    points.append(LayoutPoint(source.layer, source.exit_row))
    assert target.stage is not None
    return LayoutEdge(source.stage.name, target.stage.name, tuple(reversed(points)))
