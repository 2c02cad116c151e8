"""What a member does after its own stages, where another process leads."""

from __future__ import annotations

import pytest

from tests.flows.by_hand import PATIENCE, ByHand
from tests.protocol.logs import complete, log_with, open_generation
from tidegate.flows.cleaning import clean_up_own
from tidegate.flows.requests import Asker, Delete, ListStored, ReadLog, ReadReports
from tidegate.protocol.retention import StoredFile


def cleaning(visible: int, generation: int = 1) -> ByHand:
    host = ByHand()
    host.start(clean_up_own(Asker(host, PATIENCE), generation, visible), host.on_failed)
    return host


def test_a_member_deletes_what_no_retained_checkpoint_refers_to() -> None:
    host = cleaning(3)
    host.answer(ReadLog, log_with(1, 2, 3, max_retained=1))
    for _ in range(2):  # of what all tables show, and of what is retained
        host.answer(ReadReports, {})
    free = StoredFile("generations/000001/snapshots/a/ckpt-000001/x", 1, 1, 3)
    host.answer(ListStored, [free, StoredFile("generations/000001/snapshots/a/ckpt-000003/y", 1, 3, 4)])
    assert host.asked(Delete) == [Delete((free,))]


def test_a_member_whose_generation_is_over_deletes_nothing() -> None:
    log = log_with(1, 2)
    open_generation(log, 2)
    complete(log, 3, max_retained=1)
    host = cleaning(2)
    host.answer(ReadLog, log)
    assert host.is_idle


@pytest.mark.parametrize("visible", [2, 7], ids=["what it starts from", "what is gone"])
def test_nothing_is_done_behind_what_is_not_its_own(visible: int) -> None:
    log = log_with(1, 2)
    open_generation(log, 2)
    host = cleaning(visible, generation=2)
    host.answer(ReadLog, log)
    assert host.is_idle


def test_what_cannot_be_read_is_left_to_the_next_time() -> None:
    host = cleaning(2)
    host.answer(ReadLog, log_with(1, 2))
    host.answer(ReadReports, None)
    assert host.is_idle
