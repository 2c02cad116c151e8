"""The decision log: the total order of generations opened and checkpoints completed. Its order is the truth.

A record takes effect by being created, if absent, in the slot behind the last one. Nothing else completes a
checkpoint or opens a generation; no clock and no lease is trusted.

Guarantees, checked when a record is proposed and when it is read:
- Slots follow one another without gaps, but for those that the opening of a generation says it skips.
- Each generation is its predecessor plus one; a checkpoint is completed only by the generation that is open.
- Checkpoint ids and epochs only grow, over all generations and lineages.
- A generation is opened from a checkpoint that is retained; from nothing only if none is. One that sets tables back to
  an older checkpoint is a decision like any other: it is in the log before the first table changes, so whoever comes
  next finishes it. So is one that *brings* a checkpoint from elsewhere (a savepoint, another root, or this one for
  other tables): it completes that checkpoint by the very record that opens a generation from it.
- Each record says which checkpoints are *retained* after it, all of one lineage. Only what no record retains may be
  deleted, and a run deletes only by records that it knows to be in the log. So whatever an old run still deletes, a
  newer generation cannot be built on it.

Each record also says at which slot the log *starts* after it: old records are trimmed, so that the log stays short
however far back a retained checkpoint lies. Below the start only the records of retained checkpoints count; they are
known by their ids, and whatever else lies there is not part of the log. A run that slept through that can create a
record in a trimmed slot. It means nothing, and the run must not take it for a success: a claim counts only when the
record is read back as part of the log (`judge_claim`).

A record at the end of the log that is empty or torn was never decided: a record has its content on the disk before it
gets its name, and only then anybody acts on it, so power was lost before that, or the run took the risk. Its slot is
not used again, because whoever would free it could hit a record that another run has just put there: the next opening
takes the slot behind it and says so. It counts as many more generations as it skips slots: each of them may have opened
one, whose folders are no longer fresh. A torn record that others follow is damage.

Each record ends with a checksum of the rest of it, so one that was changed since is damage, wherever it stands and
though it may make sense. Records of before have none, and are read as they are. A record that has its end, but not what
belongs before it, is not torn: power is lost at the end of what is written.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from tidegate.errors import DamagedLog, InvariantViolation, Superseded


class Copied(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """That a sink's table is to show what another one does. `source`: the address of that. `replaces`: whatever it
    shows itself; else it is yet to be made. `since`: the version of it that none but the pipeline may have followed by
    others; None: that is not known, or does not matter."""

    source: str
    replaces: bool = False
    since: int | None = None


class Brought(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint that was not taken by a run on this root, under numbers of its own.

    `copies`: the sinks whose tables are not set back to it, but show a copy of others. `ends_fork`: from then on the
    pipeline is no fork any more, and writes to the tables that it was forked from.
    """

    checkpoint_id: int
    epoch: int
    manifest: str
    manifest_sha256: str
    aligned: bool
    at_ms: int = 0
    copies: dict[str, Copied] = {}
    ends_fork: bool = False


class GenerationOpened(msgspec.Struct, frozen=True, tag="generation_opened", forbid_unknown_fields=True):
    """A run took over. `base` is the checkpoint that it restores; None where none was ever completed.

    `skipped`: how many slots right before it hold records that were never decided. `sets_back`: it was opened to bring
    the tables back to its base, or forward: nothing else is done in it, and nobody goes on before that is done.
    `discards_others`: also what others have written to them since. `left`: sinks whose tables are left as they are.
    `brings`: the base is none that was retained before; its generation may be larger than the next, because tables may
    know larger ones. `takes_over`: tables may be another root's still, because it follows one that brings a checkpoint
    and may not be done.
    """

    slot: int
    claimant: str
    generation: int
    base: int | None
    retained: tuple[int, ...]
    log_start: int
    skipped: int = 0
    sets_back: bool = False
    discards_others: bool = False
    left: tuple[str, ...] = ()
    brings: Brought | None = None
    takes_over: bool = False


class CheckpointCompleted(msgspec.Struct, frozen=True, tag="checkpoint_completed", forbid_unknown_fields=True):
    """A checkpoint is complete. `parent` is the one that it follows in its lineage.

    `content` is the same as its parent's if nothing has changed between them; empty: that is not known. `at_ms` is when
    it was triggered, by a clock that may jump: it decides nothing but which old checkpoints are retained.
    """

    slot: int
    claimant: str
    generation: int
    checkpoint_id: int
    epoch: int
    parent: int | None
    manifest: str
    manifest_sha256: str
    aligned: bool
    retained: tuple[int, ...]
    log_start: int
    content: str = ""
    at_ms: int = 0


Decision = GenerationOpened | CheckpointCompleted

_decoder: Final = msgspec.json.Decoder(Decision)

# How many slots the log reaches back at most when it is trimmed.
_LONGEST: Final = 8


_CHECKSUM: Final = b',"sha256":"'


def encode_decision(decision: Decision) -> bytes:
    return _sealed(msgspec.json.encode(decision))


def _sealed(content: bytes) -> bytes:
    """A JSON object with its checksum as a last field: cut off anywhere, it is no JSON any more."""
    return b'%s%s%s"}' % (content[:-1], _CHECKSUM, hashlib.sha256(content).hexdigest().encode())


def _unsealed(data: bytes) -> tuple[bytes, bool]:
    """A record without its checksum, and whether that fits, or is not there, as in records of before."""
    content, found, _ = data.rpartition(_CHECKSUM)
    return (content + b"}", data == _sealed(content + b"}")) if found else (data, True)


def is_torn(data: bytes) -> bool:
    """Whether a record was not written to its end. One that is whole but strange is not torn: it was decided; nor is
    one that has its end and makes no sense before it, or that lacks no more than its last byte: it was changed."""
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        mended = data[:-1] + b"}"
        is_changed_last = not data.endswith(b"\0") and _CHECKSUM in mended and _unsealed(mended)[1]
        return not (data.endswith(b"}") or is_changed_last)
    return False


def decode_decision(data: bytes, name: str) -> Decision:
    content, fits = _unsealed(data)
    if not fits:
        raise DamagedLog(
            f"the decision log's record {name} cannot be read: it is not what was decided, its checksum differs"
        )
    try:
        decision: Decision = _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedLog(f"the decision log's record {name} cannot be read: {error}") from error
    return decision


class DecisionLog:
    """The log as far as it is known. Grows by `append`, never changes otherwise."""

    def __init__(self) -> None:
        self._records: list[Decision] = []
        self._completed: dict[int, CheckpointCompleted] = {}
        self._newest: CheckpointCompleted | None = None
        self._last_completed: CheckpointCompleted | None = None
        self._undecided = 0

    @classmethod
    def from_records(cls, records: Iterable[Decision], torn: Collection[int] = ()) -> DecisionLog:
        """Build the log from the records that the store holds, in any order. `torn`: slots whose record is torn."""
        by_slot: dict[int, Decision] = {}
        for record in records:
            if by_slot.setdefault(record.slot, record) is not record:
                raise DamagedLog(f"the decision log has two records for slot {record.slot}")
        log = cls()
        if by_slot:
            log._append_all(by_slot, torn)
        undecided = sorted(slot for slot in torn if slot >= log.next_slot)
        for expected, slot in enumerate(undecided, log.next_slot):
            if slot != expected:
                raise DamagedLog(f"the decision log lacks slot {expected}; its last slot is {undecided[-1]}")
        log._undecided = len(undecided)
        return log

    def _append_all(self, by_slot: Mapping[int, Decision], torn: Collection[int]) -> None:
        last = max(by_slot)
        log_start = by_slot[last].log_start
        if not 1 <= log_start <= last:
            raise DamagedLog(f"slot {last} of the decision log starts the log at slot {log_start}")
        for record in by_slot.values():
            completion = _completion_in(record)
            if record.slot < log_start and completion and completion.checkpoint_id in by_slot[last].retained:
                self._completed[completion.checkpoint_id] = completion
        # Whatever lies there, as below the start.
        skipped = {slot for record in by_slot.values() for slot in _skipped_by(record)}
        for slot in range(log_start, last + 1):
            if slot in skipped:
                continue
            if slot in torn:
                raise DamagedLog(f"slot {slot} of the decision log is empty or torn, but slot {last} follows it")
            if slot not in by_slot:
                # One that was written down makes earlier ones needless: if it is torn since, these are missed.
                after = "".join(f", and slot {each} after it is empty or torn" for each in sorted(torn) if each > last)
                raise DamagedLog(f"the decision log lacks slot {slot}; its last slot is {last}{after}")
            self.append(by_slot[slot])
        lost = [kept for kept in self.retained if kept not in self._completed]
        if lost:
            raise DamagedLog(f"the decision log retains checkpoint {lost[0]}, but its record is missing")

    def append(self, record: Decision) -> None:
        """Take the record of the next slot. Raises without change if it cannot stand there."""
        self._check_follows(record)
        self._records.append(record)
        self._undecided = 0
        completion = _completion_in(record)
        if completion is not None:
            # Another one, because the thread that cleans up may be looking through this one.
            self._completed = {**self._completed, completion.checkpoint_id: completion}
            self._newest = self._last_completed = completion
        elif isinstance(record, GenerationOpened):
            self._newest = None if record.base is None else self._completed.get(record.base)
        self._trim(record)

    def _trim(self, by: Decision) -> None:
        self._records = [record for record in self._records if record.slot >= by.log_start]
        self._completed = {
            checkpoint_id: record
            for checkpoint_id, record in self._completed.items()
            if record.slot >= by.log_start or checkpoint_id in by.retained
        }

    # -- what one may ask -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._records)

    @property
    def first_slot(self) -> int:
        """Where the log starts. Of lower slots it has the records of retained checkpoints alone."""
        return self._records[0].slot if self._records else 1

    @property
    def kept_before_start(self) -> frozenset[int]:
        """The slots before its start whose records still count: those of retained checkpoints."""
        return frozenset(record.slot for record in self._completed.values() if record.slot < self.first_slot)

    def has_dropped(self, slot: int) -> bool:
        """Whether what is stored in a slot is not part of the log any more, and may be deleted."""
        return slot < self.first_slot and slot not in self.kept_before_start

    @property
    def next_slot(self) -> int:
        return self._end + self._undecided + 1

    @property
    def undecided(self) -> range:
        """The slots at the end whose records are torn: never decided, and never used again."""
        return range(self._end + 1, self.next_slot)

    @property
    def _end(self) -> int:
        return self._records[-1].slot if self._records else 0

    @property
    def generation(self) -> int:
        """The generation that is open; 0 before the first."""
        return self._records[-1].generation if self._records else 0

    @property
    def claimant(self) -> str:
        """By what name the newest generation was opened; empty: none was."""
        return self._records[-1].claimant if self._records else ""

    @property
    def next_generation(self) -> int:
        """Greater than any that was ever open, also by a record that is torn."""
        return self.generation + self._undecided + 1

    @property
    def setting_back(self) -> GenerationOpened | None:
        """The last record, if tables are to be set back by it: that may not be done yet."""
        last = self._records[-1] if self._records else None
        return last if isinstance(last, GenerationOpened) and last.sets_back else None

    @property
    def retained(self) -> tuple[int, ...]:
        return self._records[-1].retained if self._records else ()

    @property
    def newest(self) -> CheckpointCompleted | None:
        """The newest complete checkpoint of the current lineage."""
        return self._newest

    @property
    def last_checkpoint_id(self) -> int:
        """The largest id that was completed in any lineage, as far as the log goes back."""
        return 0 if self._last_completed is None else self._last_completed.checkpoint_id

    @property
    def last_epoch(self) -> int:
        return 0 if self._last_completed is None else self._last_completed.epoch

    def at(self, slot: int) -> Decision | None:
        return next((record for record in self._records if record.slot == slot), None)

    def completed(self, checkpoint_id: int) -> CheckpointCompleted | None:
        return self._completed.get(checkpoint_id)

    def lineage(self) -> list[CheckpointCompleted]:
        """Retained checkpoints that the current state descends from, newest first."""
        if self._newest is None:
            return []
        # What a checkpoint retains is of its lineage, and what is retained now was retained then.
        kept = set(self.retained) & set(self._newest.retained)
        return [self._completed[checkpoint_id] for checkpoint_id in sorted(kept & self._completed.keys(), reverse=True)]

    # -- proposals --------------------------------------------------------------------------------

    def opening(
        self,
        claimant: str,
        base: int | None,
        *,
        sets_back: bool = False,
        discards_others: bool = False,
        left: tuple[str, ...] = (),
        brings: Brought | None = None,
        generation: int = 0,
    ) -> GenerationOpened:
        """The record that opens the next generation. `generation`: the number that one which brings a checkpoint has at
        least."""
        pending = self.setting_back
        proposed = GenerationOpened(
            self.next_slot,
            claimant,
            max(self.next_generation, generation),
            base,
            self.retained if brings is None else (*self.retained, brings.checkpoint_id),
            self.first_slot,
            self._undecided,
            sets_back,
            discards_others,
            left,
            brings,
            sets_back and (brings is not None or (pending is not None and pending.takes_over)),
        )
        self._check_follows(proposed)
        return proposed

    def completing(
        self,
        claimant: str,
        generation: int,
        *,
        checkpoint_id: int,
        epoch: int,
        manifest: str,
        manifest_sha256: str,
        aligned: bool,
        retained: tuple[int, ...],
        content: str = "",
        at_ms: int = 0,
    ) -> CheckpointCompleted:
        """The record that completes a checkpoint of this generation."""
        if self.generation > generation:
            raise Superseded(generation, self.generation)
        proposed = CheckpointCompleted(
            self.next_slot,
            claimant,
            generation,
            checkpoint_id,
            epoch,
            self._end_of_lineage,
            manifest,
            manifest_sha256,
            aligned,
            retained,
            self._start_after(retained),
            content,
            at_ms,
        )
        self._check_follows(proposed)
        return proposed

    def _start_after(self, retained: tuple[int, ...]) -> int:
        """Where the log is to start: at the oldest retained checkpoint, unless that lies too far back."""
        slots = (record.slot for kept in retained if (record := self._completed.get(kept)))
        earliest = max(min(slots, default=self.next_slot), self.first_slot, self.next_slot - _LONGEST)
        completed = (record.slot for record in self._records if isinstance(record, CheckpointCompleted))
        return min((slot for slot in completed if slot >= earliest), default=self.next_slot)

    # -- invariants -------------------------------------------------------------------------------

    @property
    def _end_of_lineage(self) -> int | None:
        """The checkpoint that the next one follows, also where its record was trimmed."""
        if not self._records:
            return None
        last = self._records[-1]
        return last.checkpoint_id if isinstance(last, CheckpointCompleted) else last.base

    def _check_follows(self, record: Decision) -> None:
        follows = _skipped_by(record).start - 1
        if not self._records and follows > 0:
            wrong = _wrong_first(record)
        elif follows != self._end:
            raise InvariantViolation(f"slot {record.slot} does not follow slot {self._end}")
        elif isinstance(record, GenerationOpened):
            wrong = self._wrong_opening(record)
        else:
            wrong = self._wrong_completion(record)
        wrong = wrong or self._wrong_start(record)
        if wrong:
            raise DamagedLog(f"the decision log's slot {record.slot} cannot stand: {wrong}")

    def _wrong_start(self, record: Decision) -> str | None:
        earliest = self._records[-1].log_start if self._records else 1
        if not earliest <= record.log_start <= record.slot:
            return f"it starts the log at slot {record.log_start}, but slot {record.slot - 1} at {earliest}"
        return None

    def _wrong_opening(self, record: GenerationOpened) -> str | None:
        expected = self.generation + record.skipped + 1
        if record.skipped < 0 or record.generation < expected or (record.generation > expected and not record.brings):
            return f"generation {record.generation} follows generation {self.generation}"
        if record.brings is not None and (wrong := self._wrong_bringing(record, record.brings)) is not None:
            return wrong
        brought = () if record.brings is None else (record.brings.checkpoint_id,)
        if record.retained != (*self.retained, *brought):
            return "opening a generation changes what is retained"
        if record.base is None and self.retained:
            return "it starts from nothing although checkpoints are retained"
        if record.base is not None and record.base not in record.retained:
            return f"it restores checkpoint {record.base}, which is not retained"
        if record.base is None and record.sets_back:
            return "it sets tables back to no checkpoint"
        return None

    def _wrong_bringing(self, record: GenerationOpened, brought: Brought) -> str | None:
        if record.base != brought.checkpoint_id:
            return f"it brings checkpoint {brought.checkpoint_id}, but opens from {record.base}"
        if not (record.sets_back and record.takes_over):
            return "it brings a checkpoint and leaves the tables where they were"
        return self._wrong_numbers(brought)

    def _wrong_numbers(self, record: CheckpointCompleted | Brought) -> str | None:
        if record.checkpoint_id <= self.last_checkpoint_id:
            return f"checkpoint {record.checkpoint_id} comes after {self.last_checkpoint_id}"
        if record.epoch <= self.last_epoch:
            return f"epoch {record.epoch} comes after {self.last_epoch}"
        return None

    def _wrong_completion(self, record: CheckpointCompleted) -> str | None:
        if record.generation != self.generation or not self._records:
            return f"generation {record.generation} is not open (generation {self.generation} is)"
        if (wrong := self._wrong_numbers(record)) is not None:
            return wrong
        if record.checkpoint_id not in record.retained:
            return "it does not retain itself"
        older = set(record.retained) - {record.checkpoint_id}
        if not older <= set(self.retained):
            return "it retains what was dropped before"
        # Where the record of the newest one is gone, it was not retained, and what was of its lineage is not known.
        if self._newest is not None and not older <= set(self._newest.retained):
            return f"it retains checkpoint {min(older - set(self._newest.retained))}, which it does not descend from"
        if record.parent != self._end_of_lineage:
            return f"its parent is {record.parent}, but the lineage ends in {self._end_of_lineage}"
        return None


def _completion_in(record: Decision) -> CheckpointCompleted | None:
    """The checkpoint that a record completes: of each there is but one, for its id is used once. One that is brought
    descends from none of this root."""
    if isinstance(record, CheckpointCompleted) or record.brings is None:
        return record if isinstance(record, CheckpointCompleted) else None
    brought = record.brings
    return CheckpointCompleted(
        record.slot,
        record.claimant,
        record.generation,
        brought.checkpoint_id,
        brought.epoch,
        None,
        brought.manifest,
        brought.manifest_sha256,
        brought.aligned,
        (brought.checkpoint_id,),
        record.log_start,
        at_ms=brought.at_ms,
    )


def _skipped_by(record: Decision) -> range:
    """The slots before a record that are not part of the log; where there are none, it still starts at the record."""
    return range(record.slot - (record.skipped if isinstance(record, GenerationOpened) else 0), record.slot)


def _wrong_first(record: Decision) -> str | None:
    """What can be told of the first record of a trimmed log: what it follows is gone."""
    if isinstance(record, GenerationOpened):
        return "a log is trimmed up to a completed checkpoint"
    if record.checkpoint_id not in record.retained:
        return "it does not retain itself"
    return None


class ClaimAnswer(enum.Enum):
    """How a claim of a slot ended, in one sentence each."""

    WON = "The record is in the log: it has taken effect."
    RETRY = "The slot is still free: claim it again with the very same record."
    RECONSIDER = "A checkpoint was completed meanwhile: recover anew from the longer log."
    SUPERSEDED = "A newer generation is open: decide, commit and delete nothing more, and stop."


def judge_claim(proposed: Decision, log: DecisionLog) -> ClaimAnswer:
    """What became of a claim, from the log read *after* the claim was made, however the claim itself ended.

    A store that failed may have written the record nevertheless, a slow one may do it yet. The log tells, as
    long as every run claims under a name of its own: that is all that tells its record from another run's that
    proposes the same.
    """
    found = log.at(proposed.slot)
    is_opening = isinstance(proposed, GenerationOpened)
    # An opening of which a newer one has taken over: what it was to go on from may not be retained any more.
    if found == proposed and not (is_opening and log.generation > proposed.generation):
        return ClaimAnswer.WON
    if found is None and proposed.slot == log.next_slot:
        return ClaimAnswer.RETRY
    if is_opening and log.generation < proposed.generation:
        return ClaimAnswer.RECONSIDER
    if log.generation > proposed.generation or is_opening:
        return ClaimAnswer.SUPERSEDED
    raise InvariantViolation(
        f"generation {proposed.generation} lost slot {proposed.slot} to itself: two leaders of one generation"
    )
