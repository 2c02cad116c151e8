"""Taking possession of a root."""

from __future__ import annotations

import pytest

from tests.storage.test_files import Unsure
from tidegate.engine.root import Root
from tidegate.errors import ForeignRoot
from tidegate.storage.inspection import read_owner
from tidegate.storage.memory import Memory


@pytest.mark.parametrize("does", [False, True])
def test_a_root_is_ours_though_the_store_has_said_that_it_is_there_already(*, does: bool) -> None:
    files = Unsure(1, does=does)
    root = Root(files, "orders", root_id="ours")
    owner = read_owner(files)
    assert owner is not None
    assert (root.id, owner.root_id) == ("ours", "ours")


def test_a_root_that_another_run_has_claimed_first_has_that_one_s_id_or_is_refused() -> None:
    files = Memory()
    Root(files, "orders", root_id="theirs")
    assert Root(files, "orders", root_id="ours").id == "theirs"
    with pytest.raises(ForeignRoot, match="belongs to pipeline 'orders'"):
        Root(files, "payments")
