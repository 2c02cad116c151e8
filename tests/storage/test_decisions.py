"""The decision log in the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidegate.engine.carrier import Clock, Now, carry_out
from tidegate.engine.leading import deciding
from tidegate.errors import DamagedLog, StoreUnavailable
from tidegate.flows.requests import Asker, Patience
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.decision_log import CheckpointCompleted, ClaimAnswer, Decision, DecisionLog, encode_decision
from tidegate.protocol.retention import retained_after
from tidegate.storage import decisions as stored_decisions
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.folder import Folder
from tidegate.storage.paths import RootPaths


@pytest.fixture
def store(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "root")


@pytest.fixture
def decisions(store: Folder) -> StoredDecisions:
    return StoredDecisions(store)


class Hurried(Clock):
    def sleep(self, delay_ms: int) -> None: ...


def claim(decisions: StoredDecisions, proposed: Decision, give_up_ms: int = 30_000) -> tuple[ClaimAnswer, DecisionLog]:
    """As a leader does it, but that no pause takes any time."""
    clock = Hurried()
    asker = Asker(Now(clock, lambda _: None), Patience(give_up_ms=give_up_ms))
    return carry_out(asker.claim(proposed), deciding(decisions), clock)


def trim(decisions: StoredDecisions, log: DecisionLog) -> None:
    decisions.trim(log.first_slot, log.kept_before_start)


def opened(decisions: StoredDecisions, claimant: str = "me") -> DecisionLog:
    log = decisions.read()
    newest = log.newest
    answer, log = claim(decisions, log.opening(claimant, None if newest is None else newest.checkpoint_id))
    assert answer is ClaimAnswer.WON
    return log


def completing(log: DecisionLog, claimant: str = "me", max_retained: int = 2) -> CheckpointCompleted:
    checkpoint_id = log.last_checkpoint_id + 1
    return log.completing(
        claimant,
        log.generation,
        checkpoint_id=checkpoint_id,
        epoch=checkpoint_id,
        manifest=RootPaths.manifest(log.generation, checkpoint_id),
        manifest_sha256="00" * 32,
        aligned=True,
        retained=retained_after(log, checkpoint_id, CheckpointConfig(max_retained=max_retained)),
    )


def completed(decisions: StoredDecisions, log: DecisionLog) -> DecisionLog:
    answer, log = claim(decisions, completing(log))
    assert answer is ClaimAnswer.WON
    return log


# -- claiming ---------------------------------------------------------------------------------------


def test_a_new_root_has_an_empty_log(decisions: StoredDecisions) -> None:
    assert len(decisions.read()) == 0


def test_a_record_that_was_claimed_is_read_back(decisions: StoredDecisions) -> None:
    log = completed(decisions, opened(decisions))
    found = decisions.read()
    assert list(found) == list(log)
    assert found.generation == 1
    assert found.newest is not None
    assert found.newest.checkpoint_id == 1


def test_a_generation_that_lost_its_slot_to_another_is_superseded(decisions: StoredDecisions) -> None:
    empty = decisions.read()
    opened(decisions, "theirs")
    answer, log = claim(decisions, empty.opening("mine", None))
    assert answer is ClaimAnswer.SUPERSEDED
    first = next(iter(log))
    assert first.claimant == "theirs"


def test_an_opening_that_lost_its_slot_to_a_checkpoint_is_reconsidered(decisions: StoredDecisions) -> None:
    log = opened(decisions)
    late = log.opening("theirs", None)
    completed(decisions, log)
    answer, log = claim(decisions, late)
    assert answer is ClaimAnswer.RECONSIDER
    assert log.last_checkpoint_id == 1


def test_a_checkpoint_of_a_run_that_was_superseded_is_not_completed(decisions: StoredDecisions) -> None:
    log = opened(decisions)
    late = completing(log)
    opened(decisions, "theirs")
    answer, found = claim(decisions, late)
    assert answer is ClaimAnswer.SUPERSEDED
    assert found.last_checkpoint_id == 0


def test_a_claim_may_be_made_again(decisions: StoredDecisions) -> None:
    proposed = decisions.read().opening("me", None)
    assert claim(decisions, proposed)[0] is ClaimAnswer.WON
    assert claim(decisions, proposed)[0] is ClaimAnswer.WON
    assert len(decisions.read()) == 1


def exactly_one_of_many_opens(folder: Path, racers: int = 6) -> None:
    """All of them claim the next generation at the same time."""
    together = threading.Barrier(racers)

    def race(racer: int) -> ClaimAnswer:
        mine = StoredDecisions(Folder(folder))
        log = mine.read()
        together.wait()
        return claim(mine, log.opening(f"racer-{racer}", None))[0]

    with ThreadPoolExecutor(racers) as threads:
        answers = list(threads.map(race, range(racers)))
    assert answers.count(ClaimAnswer.WON) == 1
    assert answers.count(ClaimAnswer.SUPERSEDED) == racers - 1


def test_of_many_that_claim_one_slot_exactly_one_wins(tmp_path: Path) -> None:
    for round_number in range(5):
        exactly_one_of_many_opens(tmp_path)
        assert StoredDecisions(Folder(tmp_path)).read().generation == round_number + 1


class FailingStore(Folder):
    """Raises from `create`, after or instead of doing it, as often as it is told to."""

    def __init__(self, root: Path, failures: int, *, writes: bool) -> None:
        super().__init__(root)
        self.failures = failures
        self.writes = writes

    def create(self, name: str, data: bytes) -> bool:
        if self.failures == 0:
            return super().create(name, data)
        self.failures -= 1
        if self.writes:
            super().create(name, data)
        raise StoreUnavailable(f"could not create {name}")


def test_a_write_that_failed_but_took_effect_is_won(tmp_path: Path) -> None:
    decisions = StoredDecisions(FailingStore(tmp_path, 1, writes=True))
    assert claim(decisions, decisions.read().opening("me", None))[0] is ClaimAnswer.WON


def test_a_write_that_failed_without_effect_is_made_again(tmp_path: Path) -> None:
    decisions = StoredDecisions(FailingStore(tmp_path, 3, writes=False))
    assert claim(decisions, decisions.read().opening("me", None))[0] is ClaimAnswer.WON


def test_a_store_that_never_writes_is_given_up(tmp_path: Path) -> None:
    decisions = StoredDecisions(FailingStore(tmp_path, 1_000_000, writes=False))
    with pytest.raises(StoreUnavailable, match=r"could not create decisions/0+1.json \(tried \d times\)"):
        claim(decisions, decisions.read().opening("me", None), give_up_ms=3_000)


# -- reading ----------------------------------------------------------------------------------------


def test_a_record_that_cannot_be_read_is_named(store: Folder, decisions: StoredDecisions) -> None:
    opened(decisions)
    store.write(RootPaths.decision(2), b'{"type": "surprise"}')
    with pytest.raises(DamagedLog, match=RootPaths.decision(2)):
        decisions.read()


def test_a_gap_is_damage(store: Folder, decisions: StoredDecisions) -> None:
    log = opened(decisions)
    for _ in range(2):
        log = completed(decisions, log)
    store.delete([RootPaths.decision(2)])
    with pytest.raises(DamagedLog, match=r"lacks slot 2.*folder decisions.* What to do: restore that folder"):
        decisions.read()


def test_records_that_lie_in_each_others_slots_are_damage(store: Folder, decisions: StoredDecisions) -> None:
    completed(decisions, completed(decisions, opened(decisions)))
    first, second = (store.read(RootPaths.decision(slot)) for slot in (2, 3))
    assert first is not None
    assert second is not None
    store.write(RootPaths.decision(2), second)
    store.write(RootPaths.decision(3), first)
    with pytest.raises(DamagedLog, match=r"record decisions/0+2\.json is that of slot 3: it was put into its place"):
        StoredDecisions(store).read()


# As a loss of power leaves it: its name is on the disk, its content is not, or as zeros.
TORN = [b"", b'{"type":"checkpoint_completed","slot":3,', bytes(200)]


@pytest.mark.parametrize("left", TORN)
def test_a_record_that_is_torn_at_the_end_was_never_decided(
    store: Folder, decisions: StoredDecisions, left: bytes
) -> None:
    log = completed(decisions, opened(decisions))
    store.write(RootPaths.decision(3), left)
    found = decisions.read()
    assert list(found) == list(log)
    assert store.read(RootPaths.decision(3)) == left, "whoever reads changes nothing"
    log = completed(decisions, opened(decisions, "theirs"))
    assert (log.generation, log.next_slot) == (3, 6)
    assert store.read(RootPaths.decision(3)) == left
    for _ in range(5):
        log = completed(decisions, log)
    trim(decisions, log)
    assert RootPaths.decision(3) not in store.list(RootPaths.DECISIONS)


@pytest.mark.parametrize("left", TORN)
def test_a_record_that_is_torn_and_followed_by_another_is_damage(
    store: Folder, decisions: StoredDecisions, left: bytes
) -> None:
    completed(decisions, completed(decisions, opened(decisions)))
    store.write(RootPaths.decision(2), left)
    with pytest.raises(DamagedLog, match="slot 2 of the decision log is empty or torn, but slot 3 follows"):
        StoredDecisions(store).read()


def test_of_many_that_find_a_torn_record_exactly_one_goes_on_behind_it(tmp_path: Path) -> None:
    for round_number in range(5):
        last = StoredDecisions(Folder(tmp_path)).read().next_slot
        Folder(tmp_path).write(RootPaths.decision(last), b"")
        exactly_one_of_many_opens(tmp_path)
        log = StoredDecisions(Folder(tmp_path)).read()
        assert log.generation == 2 * (round_number + 1), "one for the torn record, which may have opened it"


class TrimmingStore(Folder):
    """Something happens between the listing of the log and the reading of its records, once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.meanwhile: Callable[[], None] | None = None

    def read(self, name: str) -> bytes | None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().read(name)


def test_a_log_that_is_trimmed_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    """As `tidegate checkpoints` sees it when the run completes a checkpoint and cleans up at this moment."""
    theirs = StoredDecisions(Folder(tmp_path))
    log = opened(theirs)
    for _ in range(4):
        log = completed(theirs, log)
    slow = TrimmingStore(tmp_path)

    def complete_and_trim() -> None:
        now = theirs.read()
        for _ in range(2):
            now = completed(theirs, now)
        trim(theirs, now)

    slow.meanwhile = complete_and_trim
    assert list(StoredDecisions(slow).read()) == list(theirs.read())


# -- trimming ---------------------------------------------------------------------------------------


def test_trimming_deletes_what_lies_below_the_start_and_nothing_else(store: Folder, decisions: StoredDecisions) -> None:
    log = opened(decisions)
    for _ in range(5):
        log = completed(decisions, log)
    before = list(log)
    assert log.first_slot > 1
    trim(decisions, log)
    assert store.list(RootPaths.DECISIONS) == [RootPaths.decision(record.slot) for record in before]
    assert list(decisions.read()) == before


def test_a_record_that_appears_in_a_trimmed_slot_means_nothing(store: Folder, decisions: StoredDecisions) -> None:
    log = opened(decisions)
    asleep = completing(log)
    for _ in range(5):
        log = completed(decisions, log)
    trim(decisions, log)
    assert store.create(RootPaths.decision(asleep.slot), encode_decision(asleep))
    assert list(decisions.read()) == list(log)
    trim(decisions, log)
    assert RootPaths.decision(asleep.slot) not in store.list(RootPaths.DECISIONS)


def test_a_run_that_slept_through_a_trim_is_superseded_though_it_could_write(decisions: StoredDecisions) -> None:
    asleep = completing(opened(decisions))
    log = opened(decisions, "theirs")
    for _ in range(5):
        log = completed(decisions, log)
    trim(decisions, log)
    assert log.first_slot > asleep.slot
    assert claim(decisions, asleep)[0] is ClaimAnswer.SUPERSEDED


# -- ids that were used -----------------------------------------------------------------------------


def test_the_largest_id_that_was_used_is_remembered(decisions: StoredDecisions) -> None:
    assert decisions.largest_used() == 0
    for checkpoint_id in (1, 2, 999_999, 1_000_000, 10):
        decisions.mark_used(checkpoint_id)
    assert decisions.largest_used() == 1_000_000


def test_an_id_may_be_marked_twice(decisions: StoredDecisions) -> None:
    decisions.mark_used(5)
    decisions.mark_used(5)
    assert decisions.largest_used() == 5


def test_marks_below_an_id_are_forgotten_but_not_its_own(store: Folder, decisions: StoredDecisions) -> None:
    for checkpoint_id in range(1, 8):
        decisions.mark_used(checkpoint_id)
    decisions.forget_marks_below(5)
    assert store.list(RootPaths.IDS) == [RootPaths.used_id(each) for each in (5, 6, 7)]
    assert decisions.largest_used() == 7


def test_few_marks_are_left_where_a_deletion_is_to_be_worth_it(store: Folder, decisions: StoredDecisions) -> None:
    for checkpoint_id in (1, 2, 3):
        decisions.mark_used(checkpoint_id)
    decisions.forget_marks_below(3, at_least=3)
    assert len(store.list(RootPaths.IDS)) == 3
    decisions.mark_used(4)
    decisions.forget_marks_below(4, at_least=3)
    assert store.list(RootPaths.IDS) == [RootPaths.used_id(4)]


def test_a_record_that_was_created_here_is_not_read(tmp_path: Path) -> None:
    class Unread(Folder):
        def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
            wanted = list(names)
            assert not wanted, wanted
            return {}

    decisions = StoredDecisions(Unread(tmp_path))
    opened(decisions)
    assert decisions.read().generation == 1


def test_a_record_that_is_listed_and_cannot_be_read_is_not_looked_for_for_ever(
    decisions: StoredDecisions, store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_decisions, "_PAUSES_S", (0.0, 0.0))
    opened(decisions)
    record = Path(store.location(RootPaths.decision(1)))
    record.rename(record.with_name("elsewhere"))
    record.symlink_to("nowhere")
    record.with_name("elsewhere").unlink()
    with pytest.raises(
        StoreUnavailable, match=r"000000000001.json, a record of the decision log, is listed and cannot"
    ):
        StoredDecisions(store).read()


def test_a_list_that_is_late_is_asked_for_again(
    decisions: StoredDecisions, store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a shared file system may be: it still names what was trimmed."""
    monkeypatch.setattr(stored_decisions, "_PAUSES_S", (0.0, 0.0))
    opened(decisions)
    names, late = store.list(RootPaths.DECISIONS), 3

    class Late(Folder):
        def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
            nonlocal late
            late -= 1
            return [RootPaths.decision(0), *names] if late > 0 else super().list(folder, but=but)

    assert StoredDecisions(Late(store.location())).read().generation == 1
