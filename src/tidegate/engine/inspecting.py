"""Looking into a checkpoint: what its stages have stored, and what was in flight to them.

The snapshot of a stage is restored into a scratch folder, where Spark reads it. Nothing in the root is changed, claimed
or locked: it works beside a run that is alive. Every file is read against its checksum before Spark sees it, so that
damage is told by the name of the file, and not by whatever Spark then makes of it.

What Spark keeps for a chain belongs to its first stage (see `chains`), so that is looked into for all stages of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.errors import DamagedCheckpoint, StoreUnavailable, UnknownCheckpoint, UnknownState
from tidegate.protocol.messages import Segment
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.spark.session import StageSessions, check_java, check_settings, existing_session, own_session
from tidegate.spark.snapshot import STATE_FOLDER, restore_checkpoint
from tidegate.spark.stored_state import StatePart, StoredOperator, StoredState
from tidegate.spark.versions import check_spark
from tidegate.storage.file_lists import SnapshotFile, SnapshotFiles, files_of
from tidegate.storage.files import Files
from tidegate.storage.inspection import InspectedRoot, check_files
from tidegate.storage.manifest import Manifest, StageSnapshot, StateOperator
from tidegate.storage.places import place_of
from tidegate.storage.scratch import Scratch

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

LATEST: Final = "latest"
_ZONE: Final = "spark.sql.session.timeZone"


class CheckpointInside:
    """A retained checkpoint, to be looked into."""

    def __init__(self, root: InspectedRoot, checkpoint: str | int) -> None:
        """`checkpoint`: such as 42, "ckpt-000042" or "latest"."""
        self._root = root
        number = root.newest().checkpoint_id if checkpoint == LATEST else checkpoint_id_of(str(checkpoint))
        if number is None:
            raise UnknownCheckpoint(
                f"{checkpoint!r} names no checkpoint; write 42, {checkpoint_name(42)!r} or {LATEST!r}"
            )
        self._id = number
        self.name = checkpoint_name(number)
        with self._unless_removed():
            self.manifest: Manifest = root.manifest(root.find(number))

    @property
    def pipeline(self) -> str:
        return self.manifest.pipeline

    @property
    def stages(self) -> list[str]:
        """In the order of the pipeline."""
        return list(self.manifest.shape)

    def holder_of(self, stage: str) -> str:
        """The stage that holds what Spark kept for the query that a stage ran in: itself, or the first of its chain."""
        if stage not in self.manifest.stages:
            raise UnknownState(f"{self.name} has no stage {stage!r}; it has: {', '.join(self.stages)}")
        chains = ((*before, last) for last, before in self.manifest.chains.items())
        return next((chain[0] for chain in chains if stage in chain), stage)

    # -- state ------------------------------------------------------------------------------------

    def described(self, stage: str) -> Mapping[int, StateOperator]:
        """What its plan said that it keeps, by the number of the operator, as far as that is known."""
        known = self.manifest.shape[self.holder_of(stage)].state
        return {} if known is None else dict(enumerate(known.operators))

    def has_state(self, stage: str) -> bool:
        return any(each.name.startswith(STATE_FOLDER) for each in self._files(self.holder_of(stage)))

    def check_has_state(self, stage: str) -> None:
        """Refuse a stage without any, before Spark is started for it."""
        holder = self.holder_of(stage)
        if not self.has_state(stage):
            whose = f"{stage!r}" if holder == stage else f"{stage!r}, which ran in one query with {holder!r},"
            raise UnknownState(f"stage {whose} keeps no state at {self.name}")

    def stored(self, stage: str, session: SparkSession, scratch: Files) -> StoredState:
        """What a stage has stored. `scratch`: an empty folder that stays as long as that is read."""
        self.check_has_state(stage)
        holder = self.holder_of(stage)
        snapshot = self.manifest.stages[holder]
        assert snapshot.cut is not None  # what is stored was so by a batch
        self._check(holder, msgspec.structs.replace(snapshot, in_flight={}))
        with self._unless_removed():
            restore_checkpoint(self._root.files, self._files(holder), scratch)
        return StoredState(session, scratch, snapshot.cut)

    def _files(self, holder: str) -> list[SnapshotFile]:
        with self._unless_removed():
            return list(files_of(self._root.files, holder, self.manifest.stages[holder].files))

    # -- what was in flight -----------------------------------------------------------------------

    def in_flight(self, stage: str) -> dict[str, tuple[Segment, ...]]:
        """The segments that were captured on their way to a stage, by the input that they are of."""
        found = self.manifest.stages[self.holder_of(stage)].in_flight
        return {name: segments for name, segments in found.items() if segments}

    def input_in_flight(self, stage: str, source: str | None) -> str:
        """The input of which rows were in flight to a stage: the one that is named, or the only one."""
        found = self.in_flight(stage)
        if not found:
            raise UnknownState(f"nothing was in flight to stage {stage!r} at {self.name}")
        if source is None and len(found) > 1:
            raise UnknownState(f"rows were in flight to {stage!r} from several stages; name one of: {', '.join(found)}")
        if source is not None and source not in found:
            raise UnknownState(f"nothing was in flight to {stage!r} from {source!r}, but from: {', '.join(found)}")
        return source or next(iter(found))

    def rows_in_flight(self, stage: str, source: str, session: SparkSession, scratch: Files) -> DataFrame:
        """The rows that were in flight to a stage from one of its inputs. `scratch`: as in `stored`."""
        holder = self.holder_of(stage)
        segments = self.in_flight(stage)[source]
        snapshot = self.manifest.stages[holder]
        self._check(holder, msgspec.structs.replace(snapshot, files=SnapshotFiles(), in_flight={source: segments}))
        files = [file.path for segment in segments for file in segment.files]
        with self._unless_removed():
            for number, path in enumerate(files):
                scratch.keep(f"{number:06d}.parquet", self._root.files, path)
        # All files there are meant, whatever the names of folders above them look like.
        return session.read.option("recursiveFileLookup", "true").parquet(scratch.location())

    # -- damage -----------------------------------------------------------------------------------

    def _check(self, stage: str, snapshot: StageSnapshot) -> None:
        """Read what is needed of a stage against what the manifest says of it."""
        only = msgspec.structs.replace(self.manifest, stages={stage: snapshot})
        with self._unless_removed():
            for file in check_files(self._root.files, only):
                if file.damage is not None:
                    raise DamagedCheckpoint(file.damage)

    @contextmanager
    def _unless_removed(self) -> Iterator[None]:
        """Tell damage from what the run that is alive has removed: it takes a checkpoint out of its log first."""
        try:
            yield
        except (DamagedCheckpoint, StoreUnavailable) as error:
            self._root.find(self._id)
            if isinstance(error, DamagedCheckpoint):
                raise self._damaged(str(error)) from error
            raise

    def _damaged(self, damage: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self.name} is damaged: {damage}; `tidegate verify --root {self._root.place}` tells which "
            f"checkpoints are whole"
        )


def session_beside_runs(
    settings: Mapping[str, str] | None = None, folder: Path | None = None, name: str = "tidegate"
) -> SparkSession:
    """The session that this process has, or one that is made, whose messages go to no root: to a file that is gone when
    the process ends, unless it does not even start."""
    check_settings(settings or {}, None)
    existing = existing_session()
    if existing is not None:
        return existing
    check_spark()
    check_java()
    messages = Scratch()
    session = own_session(name, messages.path / "spark.log", settings, folder)
    messages.remove_at_exit()
    return session


def reading_session(spark: SparkSession | None = None, *, time_zone: str | None = None) -> SparkSession:
    """A session derived from that one, which reads state as stages have written it."""
    derived = StageSessions(spark or session_beside_runs()).of_stages
    if time_zone is not None:
        derived.conf.set(_ZONE, time_zone)
    return derived


def chosen_operator(
    stored: StoredState, operator: int | None, part: str | None, of: str
) -> tuple[StoredOperator, StatePart]:
    """An operator and its part, or the only ones. `of`: whose, for people."""
    found = {each.number: each for each in stored.operators()}
    if not found:
        raise UnknownState(f"Spark has noted no operator that keeps state of {of}, though it has stored some")
    if operator is None and len(found) == 1:
        operator = next(iter(found))
    if operator not in found:
        asked = "keeps state in several operators" if operator is None else f"has no operator {operator}"
        told = ", ".join(f"{each.number} ({each.name})" for each in found.values())
        raise UnknownState(f"{of} {asked}; name one of: {told}")
    return found[operator], found[operator].part(part)


def state(
    root: str | os.PathLike[str],
    checkpoint: str | int,
    stage: str,
    operator: int | None = None,
    part: str | None = None,
    *,
    spark: SparkSession | None = None,
) -> DataFrame:
    """What a stage has stored at a checkpoint, as a DataFrame: `key`, what is stored for it, and `partition_id`.

    `checkpoint` is an id that the root retains, such as 42 or "ckpt-000042", or "latest". Of a stage that ran in a
    chain it is the state of the chain's query, which is that of the first stage in it. `operator` is the number of the
    one whose state is wanted, where the stage has several (a join after a deduplication); `part` is "left" or "right"
    of a join, and of a `transformWithState` the name of a state variable, or "timers". Where there is a choice and none
    is made, `UnknownState` says what there is.

    `spark` is the session to read with; left out, it is the one that the process has, or one that is made. The frame is
    of a session derived from it: yours stays as it is.

    Spark reads the state anew for each action, from a copy of the stage's files in a scratch folder (links, where
    TMPDIR is on the file system of the root). That is removed when this process ends, not before: nothing need be
    closed, and the frame may be read for as long as the process lives, whatever becomes of the checkpoint. Each call
    makes a folder of its own: a process that lives for long, and looks at large state again and again, needs the room.
    """
    inside = CheckpointInside(InspectedRoot(place_of(root)), checkpoint)
    inside.check_has_state(stage)
    session = reading_session(spark)
    scratch = Scratch()
    scratch.remove_at_exit()
    stored = inside.stored(stage, session, scratch.files)
    return stored.frame(*chosen_operator(stored, operator, part, f"stage {stage!r}"))
