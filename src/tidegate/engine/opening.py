"""Opening a generation on a root: carrying out what recovery asks for, and seeing to it that what is to run fits."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Protocol

import msgspec

from tidegate.engine.bringing import Bringing
from tidegate.engine.carrier import Clock, Handlers, Now, carry_out
from tidegate.engine.leading import deciding
from tidegate.engine.root import Root, SeenRoot, check_staged
from tidegate.engine.setting_back import PipelineTables, known_tables, manifest_to_set_back_to
from tidegate.errors import DamagedCheckpoint, RecoveryRefused, TidegateError
from tidegate.flows import requests
from tidegate.flows.opening import Above, Judgement, Opened, Opening, set_tables_back
from tidegate.flows.requests import Patience
from tidegate.protocol.decision_log import CheckpointCompleted, DecisionLog, GenerationOpened
from tidegate.protocol.names import checkpoint_name
from tidegate.protocol.recovery import Refuse, Restore, SinkFacts, in_words
from tidegate.sinks.contract import BoundSink
from tidegate.storage.inspection import look_through
from tidegate.storage.manifest import Manifest
from tidegate.storage.paths import RootPaths

_log = logging.getLogger("tidegate")

# What fails at first is told at once, and what fails later is tried again by the run as a whole.
_AT_ONCE = Patience(give_up_ms=2_000)


class Fitting(Protocol):
    """What is to run."""

    def fits(self, log: DecisionLog, base: Manifest | None) -> bool:
        """Check that it fits the checkpoint and the tables, and create those that are yet to be. Answers whether the
        generation may be opened now: else everything is to be looked at again."""
        ...


class RootOpening:
    """Of one try to open a generation. What was looked through once is not looked through again."""

    def __init__(
        self,
        root: SeenRoot,
        sinks: Mapping[str, BoundSink],
        examined: dict[int, Manifest] | None = None,
        claimant: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`examined`: checkpoints that were looked through a moment ago, and found whole."""
        self._root = root
        self._sinks = sinks
        self._manifests: dict[int, Manifest] = {} if examined is None else examined
        self._clock = Clock() if clock is None else clock
        self._fenced_at = 0
        self._only_looks = False
        self.skipped: tuple[int, ...] = ()
        """The newer checkpoints that were passed over, because they are damaged."""
        host = Now(self._clock, lambda why: _log.warning("%s; it is tried again", why))
        self._flow = Opening(host, claimant or uuid.uuid4().hex, _AT_ONCE)

    def foreseen(self) -> tuple[DecisionLog, Manifest | None]:
        """What `open` will start from, as far as nothing has to be changed for that."""
        judgement = self.judged()
        return judgement.log, self.base(judgement.base)

    def judged(self, *, as_if_fenced: bool = False) -> Judgement:
        """What recovery decides, where nothing is changed. `as_if_fenced`: where tables would be fenced, as if they had
        been; otherwise it ends there."""
        self._only_looks = as_if_fenced
        judgement = carry_out(self._flow.recover(may_change=as_if_fenced), self._handlers(None), self._clock)
        if isinstance(judgement.decision, Refuse):
            raise _refusal(judgement.decision)
        return judgement

    def open(self, fitting: Fitting) -> tuple[Opened, Manifest | None]:
        self._only_looks = False
        opened = carry_out(self._flow.open(), self._handlers(fitting), self._clock)
        if isinstance(opened, Refuse):
            raise _refusal(opened)
        self._clear_lost(opened.generation)
        return opened, self.base(opened.base)

    def _clear_lost(self, generation: int) -> None:
        """Remove what there is by the number of a generation that was opened a moment ago, and has written nothing.

        There is none, but where somebody was killed who had brought files and not decided it; and where the log was put
        back from a backup: a generation that it has lost had this number. In its folders Spark would go on as its logs
        say; and what is kept there stays as it is, whatever is kept anew.
        """
        store, folder = self._root.store, RootPaths.generation(generation)
        lost = store.list(folder)
        if not lost:
            return
        _log.warning(
            "%s has %d files of a generation that the decision log does not know, as when whoever brought them was "
            "killed, or the log was put back from a backup: they are removed",
            store.location(folder),
            len(lost),
        )
        store.delete(lost)
        store.prune_above(lost, folder)

    def base(self, record: CheckpointCompleted | None) -> Manifest | None:
        return None if record is None else self._manifests[record.checkpoint_id]

    def _handlers(self, fitting: Fitting | None) -> Handlers:
        return {
            **deciding(self._root.decisions),
            requests.ReadSinks: lambda _: self._read_sinks,
            requests.HasLeftovers: lambda _: lambda: bool(self._root.store.list(RootPaths.GENERATIONS)),
            requests.Examine: lambda request: lambda: self._examine(request.record),
            requests.Fence: lambda request: lambda: self._fence(request.generation),
            requests.SetTablesBack: lambda request: lambda: self._set_tables_back(request),
            requests.Fit: lambda request: lambda: fitting is not None and self._fit(request, fitting),
        }

    def set_back(self, checkpoint_id: int, *, discards_others: bool = False, left: tuple[str, ...] = ()) -> None:
        """Decide that the pipeline and its tables go to a checkpoint, and see to it."""
        flow = self._flow.set_back(checkpoint_id, discards_others=discards_others, left=left)
        carry_out(flow, self._handlers(None), self._clock)

    def bring(
        self, bringing: Bringing, above: Above, *, discards_others: bool = False, left: tuple[str, ...] = ()
    ) -> GenerationOpened:
        """Decide that the pipeline and its tables go to a checkpoint from elsewhere, and see to it."""
        handlers: Handlers = {
            **self._handlers(None),
            requests.Bring: lambda request: lambda: bringing.store(self._root.store, request),
        }
        above = self._above_leftovers(above)
        return carry_out(self._flow.bring(above, discards_others=discards_others, left=left), handlers, self._clock)

    def _above_leftovers(self, above: Above) -> Above:
        """Somebody may have been killed who was about to bring another one, by a larger generation: what that has left
        is looked through only by those that come after."""
        names = self._root.store.names_in(RootPaths.GENERATIONS)
        left = (int(name) for name in names if name.isdigit())
        return Above(above.checkpoint_id, max(above.generation, *left, 0))

    def finish(self) -> None:
        """See to it that every table is where the log says, if that may not be done yet."""
        log = self._root.decisions.read()
        if (decided := log.setting_back) is not None:
            flow = set_tables_back(self._flow.store, log, decided)
            carry_out(flow, self._handlers(None), self._clock)

    def _set_tables_back(self, request: requests.SetTablesBack) -> None:
        log, root = self._root.decisions.read(), self._root
        to = manifest_to_set_back_to(root.store, log, request.checkpoint.checkpoint_id)
        if self._only_looks:
            self._check_set_back(to)
            return
        PipelineTables(root.store, root.pipeline, root.id, known_tables(root.store, log), self._sinks).set_back(
            to, request.decided
        )
        if request.decided.brings is not None and request.decided.brings.ends_fork:
            root.store.delete([RootPaths.FORK])

    def _check_set_back(self, to: Manifest) -> None:
        """Refuse where that is yet to be done: what comes of it cannot be told before."""
        name = checkpoint_name(to.checkpoint_id)
        for sink, facts in self._read_sinks().items():
            if facts.committed_epoch > to.epoch:
                raise RecoveryRefused(
                    f"it was decided to bring the tables back to {name}, and {self._sinks[sink].describe()} of sink "
                    f"{sink!r} is yet to be; a run does that first. What to do: finish it with `tidegate restore --to "
                    f"{name}`, and ask again"
                )

    def _fit(self, request: requests.Fit, fitting: Fitting) -> bool:
        self._tell(request)
        if not fitting.fits(request.log, self.base(request.base)):
            return False
        self.skipped = tuple(request.skipped)
        if isinstance(self._root, Root):
            self._root.claim_anew()
        return True

    def _tell(self, request: requests.Fit) -> None:
        for slot in request.log.undecided:
            _log.warning(
                "%s is empty or torn, as a loss of power leaves it: it was never decided, and is passed over",
                self._root.store.location(RootPaths.decision(slot)),
            )
        if request.base is not None and request.skipped:
            decision = Restore(request.base, tuple(request.skipped))
            _log.warning("this run %s; no table shows rows past it", in_words(decision, request.skipped))

    def _read_sinks(self) -> dict[str, SinkFacts]:
        facts: dict[str, SinkFacts] = {}
        for name, sink in self._sinks.items():
            try:
                facts[name] = sink.facts()
            except TidegateError:
                raise
            except Exception as error:
                raise RecoveryRefused(
                    f"could not read {sink.describe()}: {error}. What to do: make it readable and start again; nothing "
                    f"was changed"
                ) from error
        return {name: self._as_fenced(name, each) for name, each in facts.items()}

    def _as_fenced(self, sink: str, facts: SinkFacts) -> SinkFacts:
        """One that is new has no table yet that could keep a fence, and no old run that could commit to it."""
        is_new = not any(sink in each.stages for each in self._manifests.values())
        if self._only_looks:
            return msgspec.structs.replace(facts, fence=max(facts.fence, self._fenced_at))
        if is_new and not facts.committed_epoch and facts.fence < self._fenced_at:
            return msgspec.structs.replace(facts, fence=self._fenced_at)
        return facts

    def _examine(self, record: CheckpointCompleted) -> str | None:
        checkpoint_id = record.checkpoint_id
        if checkpoint_id in self._manifests:
            return None
        try:
            manifest = look_through(self._root.store, record)
            check_staged(manifest, self._sinks)
        except DamagedCheckpoint as damage:
            return str(damage)
        self._manifests[checkpoint_id] = manifest
        return None

    def _fence(self, generation: int) -> None:
        if self._only_looks:
            self._fenced_at = generation
            return
        for sink in self._sinks.values():
            sink.fence(generation)
        self._fenced_at = generation
        # A table that is gone has nothing to keep a fence in, and another time it would not have either.
        for name, facts in self._read_sinks().items():
            if facts.fence < generation:
                raise RecoveryRefused(
                    f"the newest checkpoint is damaged, and {self._sinks[name].describe()} of sink {name!r} is gone or "
                    f"keeps no fence, so an old run could still commit to it what is lost. What to do: restore the "
                    f"table, or start the pipeline on a new root with new tables; no checkpoint was restored"
                )


def _refusal(refused: Refuse) -> RecoveryRefused:
    return RecoveryRefused(f"{refused.why}. What to do: {refused.way_out}")
