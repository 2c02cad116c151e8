"""How times look, also those that no calendar has."""

from __future__ import annotations

import pytest

from tidegate.cli.tables import run_lines
from tidegate.cli.text import as_time
from tidegate.engine.status import RunStatus, StageStatus

SECONDS_FOR_MILLISECONDS = 1_700_000_000_000_000
"""What a watermark becomes if a source takes milliseconds for seconds."""


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        (0, "1970-01-01 00:00:00"),
        (1_767_323_045_999, "2026-01-02 03:04:05"),
        ("2026-01-02T03:04:05.678+00:00", "2026-01-02 03:04:05"),
        (253_402_300_799_999, "9999-12-31 23:59:59"),
        (253_402_300_800_000, "about year 9999"),
        (SECONDS_FOR_MILLISECONDS, "about year 55840"),
        (2**63 - 1, "about year 292278994"),
        (-(2**63), "about year -292275055"),
        ("yesterday", "yesterday"),
    ],
)
def test_any_moment_can_be_shown(moment: str | int, said: str) -> None:
    assert as_time(moment) == said


def test_a_watermark_far_in_the_future_does_not_end_the_view_of_a_run() -> None:
    now = "2026-01-02T03:04:05+00:00"
    stage = StageStatus("source", 1, 1, 1.0, None, SECONDS_FOR_MILLISECONDS)
    lines = run_lines(RunStatus("orders", 1, "host", now, now, "running", stages={"rows": stage}), 80)
    assert any("about year 55840" in line.plain for line in lines)
