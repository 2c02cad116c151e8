"""What is made of files, whatever holds them."""

from __future__ import annotations

import pytest

from tidegate.errors import StoreUnavailable
from tidegate.storage.files import claim
from tidegate.storage.memory import Memory


class Unsure(Memory):
    """As a bucket may be: some creates are said to have met another. `does`: though they have created it themselves."""

    def __init__(self, times: int, *, does: bool = False) -> None:
        super().__init__("unsure")
        self._times = times
        self._does = does

    def create(self, name: str, data: bytes) -> bool:
        if self._times == 0:
            return super().create(name, data)
        self._times -= 1
        if self._does:
            super().create(name, data)
        return False


def test_a_claim_is_ours_though_the_answer_was_lost_and_a_second_try_met_the_first() -> None:
    assert claim(Unsure(1, does=True), "name", b"ours") == b"ours"


def test_what_two_were_refused_for_and_neither_has_created_is_claimed_again() -> None:
    files = Unsure(2)
    assert claim(files, "name", b"ours") == b"ours"
    assert files.read("name") == b"ours"


def test_a_claim_of_another_is_told() -> None:
    files = Memory()
    files.write("name", b"theirs")
    assert claim(files, "name", b"ours") == b"theirs"


def test_a_store_that_never_says_who_was_first_is_not_asked_for_ever() -> None:
    with pytest.raises(StoreUnavailable, match="memory://unsure/name is said to be there already, and is not"):
        claim(Unsure(1_000), "name", b"ours")
