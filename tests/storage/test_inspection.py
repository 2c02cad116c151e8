"""Looking at a root from outside. `tests/cli/test_checkpoints.py` has what is seen of one that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import NoRoot
from tidegate.storage.inspection import InspectedRoot


def test_what_the_file_system_will_not_look_at_is_no_root(tmp_path: Path) -> None:
    with pytest.raises(NoRoot):
        InspectedRoot(tmp_path / ("a" * 300))
