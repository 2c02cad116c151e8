"""Carrying out what the leader of a generation asks for, and telling people what it does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tidegate.engine.carrier import Clock, Handlers
from tidegate.engine.chains import by_query, by_stage, chains_of
from tidegate.engine.cleaning import Cleaning
from tidegate.engine.kill_points import Step, reached
from tidegate.engine.stage.running import AsOfCut
from tidegate.engine.status import SinkCommit, as_moment, moment_ms
from tidegate.engine.tables import what_would_fit
from tidegate.errors import (
    CheckpointsFailed,
    DamagedCheckpoint,
    SinkFailed,
    StoreUnavailable,
    Superseded,
    TablePutBack,
    TidegateError,
)
from tidegate.flows import requests
from tidegate.flows.leader import FINAL
from tidegate.protocol.commit import CommitPermit
from tidegate.protocol.coordinator import Checkpoint, StageReport
from tidegate.protocol.decision_log import DecisionLog, GenerationOpened
from tidegate.protocol.messages import Segment
from tidegate.protocol.names import checkpoint_name
from tidegate.sinks import function
from tidegate.sinks.contract import BoundSink, decode_committable
from tidegate.spark.definition import StageDefinition
from tidegate.spark.session import is_of_the_connection
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.file_lists import SnapshotFiles
from tidegate.storage.files import Files
from tidegate.storage.inspection import read_manifest
from tidegate.storage.manifest import FORMAT, Manifest, StageShape, StageSnapshot, as_report, encode_manifest
from tidegate.storage.paths import RootPaths
from tidegate.storage.system import explained, say, told
from tidegate.storage.user_paths import is_bucket_url

_log = logging.getLogger("tidegate")


def deciding(decisions: StoredDecisions) -> Handlers:
    """What is asked of the decision log and of the marks of ids."""

    def claim(request: requests.Claim) -> Callable[[], bool]:
        def act() -> bool:
            is_ours = decisions.create(request.record)
            is_opening = isinstance(request.record, GenerationOpened)
            reached(Step.GENERATION_OPENED if is_opening else Step.SLOT_CLAIMED)
            return is_ours

        return act

    def mark(request: requests.Mark) -> Callable[[], None]:
        def act() -> None:
            decisions.mark_used(request.checkpoint_id)
            reached(Step.ID_MARKED)

        return act

    return {
        requests.ReadLog: lambda _: decisions.read,
        requests.Claim: claim,
        requests.Force: lambda request: lambda: decisions.force(request.record),
        requests.Trim: lambda request: lambda: decisions.trim(request.start, request.but),
        requests.Mark: mark,
        requests.LargestMarked: lambda _: decisions.largest_used,
    }


def reports_in(manifest: Manifest) -> dict[str, StageReport]:
    """What the stages had reported for a checkpoint."""
    return {
        name: as_report(
            name,
            each,
            manifest.checkpoint_id,
            manifest.attempt,
            manifest.generation,
            has_event_time=manifest.shape[name].has_event_time,
        )
        for name, each in manifest.stages.items()
    }


def reports_at_start(manifest: Manifest, queries: Iterable[StageDefinition]) -> dict[str, StageReport]:
    """The same as if these queries had reported it."""
    return reports_in(msgspec.structs.replace(manifest, stages=by_query(manifest.stages, queries)))


def with_snapshot(report: StageReport) -> StageReport:
    """A report as it is sent to whoever leads: with the stage's part of the manifest."""
    at: AsOfCut
    at, files, in_flight = report.detail
    return msgspec.structs.replace(report, detail=_snapshot_in(report, at, files, in_flight or {}))


def _snapshot_in(
    report: StageReport, at: AsOfCut, files: SnapshotFiles, in_flight: dict[str, tuple[Segment, ...]]
) -> StageSnapshot:
    return StageSnapshot(
        cut=report.cut,
        files=files,
        positions=report.positions,
        output_sequence=report.output_sequence,
        in_flight=in_flight,
        source_positions=at.source_positions,
        watermark_ms=report.watermark_ms,
        committable=report.committable,
        barrier_ms=report.barrier_ms,
        alignment_ms=report.alignment_ms,
        cause=report.cause,
        over_bound=report.over_bound,
        snapshot_ms=report.snapshot_ms,
        new_bytes=report.new_bytes,
        total_bytes=report.total_bytes,
    )


class _Commit(msgspec.Struct, frozen=True):
    """A commit that is under way."""

    permit: CommitPermit
    since_ms: int


class Course(msgspec.Struct):
    """How a checkpoint went, in ms after its trigger, as far as it has come. `since_ms`: that, by the run's clock."""

    since_ms: int
    begun_ms: int | None = None
    prepared_ms: int | None = None
    decided_ms: int | None = None
    shown_ms: int | None = None
    acks: dict[str, int] = msgspec.field(default_factory=dict)
    commits: dict[str, SinkCommit] = msgspec.field(default_factory=dict)


class Leading:
    def __init__(
        self,
        pipeline: str,
        generation: int,
        shape: Mapping[str, StageShape],
        files: Files,
        sinks: Mapping[str, BoundSink],
        queries: Sequence[StageDefinition],
        cleaning: Cleaning,
        clock: Clock,
        commit_ms: int,
    ) -> None:
        """`shape`: looked at for each manifest, because topics may come to a source. `queries`: all of the generation,
        wherever they run."""
        self._pipeline = pipeline
        self._generation = generation
        self._shape = shape
        self._files = files
        self._decisions = StoredDecisions(files)
        self._sinks = sinks
        self._queries = queries
        self._clock = clock
        self._commit_ms = commit_ms
        self.committing: dict[str, _Commit] = {}
        self._triggered_at: dict[int, datetime] = {}
        self._durations: dict[int, int] = {}
        self._courses: dict[int, Course] = {}
        self._cleaning = cleaning

    def handlers(self) -> Handlers:
        return {
            **deciding(self._decisions),
            requests.WriteManifest: self._write_manifest,
            requests.ReadReports: self._read_reports,
            requests.CommitSink: self._commit_sink,
            **cleaning_up(self._cleaning),
            requests.ForgetMarks: self._forget_marks,
            requests.ForgetStaged: self._forget_staged,
        }

    # -- manifests --------------------------------------------------------------------------------

    def triggered_at(self, checkpoint: Checkpoint) -> datetime:
        """When a checkpoint was begun: the clock is looked at once, so that everybody tells the same."""
        checkpoint_id = checkpoint.checkpoint_id
        if checkpoint_id not in self._triggered_at:
            ago = timedelta(milliseconds=max(0, self._clock.now_ms - checkpoint.triggered_ms))
            self._triggered_at[checkpoint_id] = self._clock.utc() - ago
        return self._triggered_at[checkpoint_id]

    def duration_ms(self, checkpoint: Checkpoint) -> int:
        """How long a checkpoint took: of one that was decided, as its manifest has it; else until it ended, or now."""
        until_ms = self._clock.now_ms if checkpoint.ended_ms is None else checkpoint.ended_ms
        return self._durations.get(checkpoint.checkpoint_id, until_ms - checkpoint.triggered_ms)

    def forget_but(self, known: set[int]) -> None:
        """What is told of a checkpoint is kept as long as the coordinator knows it."""
        for told_of in (self._triggered_at, self._durations, self._courses):
            for forgotten in told_of.keys() - known:
                del told_of[forgotten]

    def course_of(self, checkpoint: Checkpoint) -> Course:
        return self._courses.setdefault(checkpoint.checkpoint_id, Course(checkpoint.triggered_ms))

    def course_of_base(self, manifest: Manifest) -> Course:
        """Of the one that the generation starts from: by the clock on the wall, since another process may have begun
        it."""
        ago_ms = int(self._clock.utc().timestamp() * 1000) - moment_ms(manifest.triggered_at)
        since_ms = self._clock.now_ms - max(0, ago_ms)
        return self._courses.setdefault(manifest.checkpoint_id, Course(since_ms))

    def _write_manifest(self, request: requests.WriteManifest) -> Callable[[], requests.Written]:
        checkpoint = request.checkpoint
        chains = chains_of(self._queries)
        at = self.triggered_at(checkpoint)
        duration_ms = self._durations.setdefault(checkpoint.checkpoint_id, self.duration_ms(checkpoint))
        self.course_of(checkpoint).prepared_ms = duration_ms
        manifest = Manifest(
            format=FORMAT,
            pipeline=self._pipeline,
            checkpoint_id=checkpoint.checkpoint_id,
            epoch=checkpoint.barrier.epoch,
            generation=self._generation,
            attempt=checkpoint.attempt,
            flags=checkpoint.barrier.flags,
            aligned=checkpoint.is_aligned,
            triggered_at=as_moment(at),
            duration_ms=duration_ms,
            min_watermark_ms=request.min_watermark_ms,
            shape=dict(self._shape),
            stages=by_stage({each.name: checkpoint.reports[each.name].detail for each in self._queries}, chains),
            chains=chains,
        )
        name = RootPaths.manifest(self._generation, checkpoint.checkpoint_id)
        self._cleaning.on_manifest(name, checkpoint.checkpoint_id, is_last=checkpoint.barrier.is_drain)

        def write() -> requests.Written:
            data, sha256 = encode_manifest(manifest)
            self._files.write(name, data)
            reached(Step.MANIFEST_WRITTEN)
            return requests.Written(name, sha256, int(at.timestamp() * 1000))

        return write

    def _read_reports(self, request: requests.ReadReports) -> Callable[[], dict[str, StageReport] | None]:
        def read() -> dict[str, StageReport] | None:
            try:
                return reports_in(read_manifest(self._files, request.record))
            except DamagedCheckpoint:
                return None

        return read

    def retained_manifests(self) -> list[Manifest]:
        """Of all checkpoints that the log retains. It comes from another thread, and reads what is stored."""
        while True:
            log: DecisionLog = self._decisions.read()
            if log.generation > self._generation:
                raise Superseded(self._generation, log.generation)
            records = [record for each in log.retained if (record := log.completed(each)) is not None]
            try:
                return [read_manifest(self._files, record) for record in records]
            except DamagedCheckpoint:
                if self._decisions.read().retained == log.retained:
                    raise  # else it was removed meanwhile, and newer ones have taken its place

    # -- sinks ------------------------------------------------------------------------------------

    def _commit_sink(self, request: requests.CommitSink) -> Callable[[], None]:
        sink, name = self._sinks[request.sink], request.sink
        self.committing[name] = _Commit(request.permit, self._clock.now_ms)
        course = self._courses.setdefault(request.permit.checkpoint_id, Course(self._clock.now_ms))
        course.commits.setdefault(name, SinkCommit(begun_ms=self._clock.now_ms - course.since_ms))

        def commit() -> None:
            try:
                sink.commit(request.permit, decode_committable(request.committable))
            except Exception as error:
                failure = self._as_failure(name, error)
                told, count = course.commits[name], course.commits[name].failures + 1
                course.commits[name] = msgspec.structs.replace(told, failures=count, why=str(failure))
                raise failure from (error if failure is not error else error.__cause__)
            finally:
                self.committing.pop(name, None)
            told, ended_ms = course.commits[name], self._clock.now_ms - course.since_ms
            course.commits[name] = msgspec.structs.replace(told, took_ms=max(0, ended_ms - told.begun_ms))
            reached(Step.SINK_COMMITTED)

        return commit

    def _as_failure(self, name: str, error: Exception) -> TidegateError:
        if isinstance(error, TablePutBack):
            would_fit = what_would_fit(name, error.epoch, error.next_batch, self._decisions.read(), self._files)
            return TablePutBack(f"{error}; {would_fit}", error.epoch, error.next_batch)
        if isinstance(error, FINAL):
            return error
        why = self._told_of_table(name, error)
        if isinstance(error, TidegateError):
            error.args = (why,)
            return error
        return CheckpointsFailed(why)

    def _told_of_table(self, name: str, error: BaseException) -> str:
        """Why a commit failed. What a database says of its disk is of another machine's, perhaps."""
        if isinstance(error, OSError):
            return told(error)
        why = str(error) if isinstance(error, TidegateError) else f"{type(error).__name__}: {error}"
        table = self._sinks[name].table
        if table.kind != "delta" or is_bucket_url(table.address):
            return why
        return explained(why, [table.address, self._files.location()])

    def tell_commit_failed(self, sink: str, permit: CommitPermit, failures: int, error: TidegateError) -> None:
        # Where a function of the user's own failed is seen in the trace alone.
        cause = error.__cause__
        is_users = self._sinks[sink].table.kind in function.KINDS or not isinstance(cause, OSError)
        is_ours = cause is None or isinstance(cause, TidegateError)
        trace = None if is_ours or cause is None or is_of_the_connection(cause) or not is_users else cause
        _log.warning("sink %s: commit of epoch %d failed (%d): %s", sink, permit.epoch, failures, error, exc_info=trace)

    def check_commits(self) -> None:
        """Raise if one takes longer than it may."""
        for name, each in tuple(self.committing.items()):
            if self._clock.now_ms - each.since_ms >= self._commit_ms:
                raise SinkFailed(
                    f"{self._sinks[name].describe()}: the commit of epoch {each.permit.epoch} has not ended in "
                    f"{self._commit_ms / 1000:g} s; see what it waits for, or give it longer: --commit-timeout"
                )

    def commit_ends_in_s(self, sink: str) -> float:
        """How soon the one that is under way counts as overdue."""
        commit = self.committing.get(sink)
        return 0 if commit is None else max(0, commit.since_ms + self._commit_ms - self._clock.now_ms) / 1000

    def what_sinks_lack(self, pending: Mapping[str, tuple[int, str]]) -> list[str]:
        said: list[str] = []
        for name, (epoch, why) in pending.items():
            commit = self.committing.get(name)
            if commit is not None:
                since_s = (self._clock.now_ms - commit.since_ms) / 1000
                checkpoint = checkpoint_name(commit.permit.checkpoint_id)
                said.append(f"the commit of {checkpoint} to {name} is under way for {since_s:.0f} s")
            else:
                failed = f" has failed and is tried again: {why}" if why else " is about to begin"
                said.append(f"the commit of epoch {epoch} to {name}{failed}")
        return said

    # -- cleaning up ------------------------------------------------------------------------------

    def _forget_marks(self, request: requests.ForgetMarks) -> Callable[[], None]:
        at_least = self._cleaning.deletes_from(request.below)
        return lambda: self._decisions.forget_marks_below(request.below, at_least)

    def _forget_staged(self, request: requests.ForgetStaged) -> Callable[[], None]:
        def forget() -> None:
            for sink in self._sinks.values():
                sink.forget_staged(request.before_generation)
            reached(Step.CLEANED_UP)

        return _telling(forget)


def cleaning_up(cleaning: Cleaning) -> Handlers:
    """What is asked by whoever cleans up."""
    return {
        requests.ListStored: lambda request: _telling(
            cleaning.listing(request.visible, request.reports, request.retained)
        ),
        requests.Delete: lambda request: _telling(cleaning.deleting(request.files)),
    }


def following(files: Files, generation: int, queries: Sequence[StageDefinition], cleaning: Cleaning) -> Handlers:
    """What a member asks for that does not lead: it cleans up after its own stages."""

    def read_reports(request: requests.ReadReports) -> Callable[[], dict[str, StageReport] | None]:
        def read() -> dict[str, StageReport] | None:
            try:
                manifest = read_manifest(files, request.record)
            except DamagedCheckpoint:
                return None
            # Those of older ones tell nothing but which files they refer to.
            return reports_at_start(manifest, queries) if manifest.generation == generation else reports_in(manifest)

        return read

    return {
        requests.ReadLog: lambda _: StoredDecisions(files).read,
        requests.ReadReports: read_reports,
        **cleaning_up(cleaning),
    }


def _telling(act: Callable[[], Any]) -> Callable[[], Any]:
    """What fails beneath it is a failure of the store."""

    def telling() -> Any:
        try:
            return act()
        except TidegateError:
            raise
        except Exception as error:
            raise StoreUnavailable(say(error)) from error

    return telling
