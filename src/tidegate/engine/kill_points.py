"""The named steps of a run, at which a test can kill it.

`TIDEGATE_KILL_AT=manifest_written:2` kills the process with SIGKILL when it reaches that step the second time. With
`manifest_written:2@FILE` it counts only from when the file is there.
"""

from __future__ import annotations

import enum
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Final

VARIABLE: Final = "TIDEGATE_KILL_AT"


class Step(enum.Enum):
    GENERATION_OPENED = "generation_opened"
    STAGE_RESTORED = "stage_restored"
    QUERIES_STARTED = "queries_started"
    ID_MARKED = "id_marked"
    BARRIER_INJECTED = "barrier_injected"
    STAGE_CUT = "stage_cut"
    STAGE_REPORTED = "stage_reported"
    MANIFEST_WRITTEN = "manifest_written"
    SLOT_CLAIMED = "slot_claimed"
    SINK_COMMITTED = "sink_committed"
    ALL_SINKS_COMMITTED = "all_sinks_committed"
    CLEANED_UP = "cleaned_up"
    CHECKPOINT_BROUGHT = "checkpoint_brought"
    TABLE_SET_BACK = "table_set_back"
    SOURCE_PAUSED = "source_paused"
    SOURCE_GOES_ON = "source_goes_on"


UNDER_BACKPRESSURE: Final = frozenset({Step.SOURCE_PAUSED, Step.SOURCE_GOES_ON})
"""Steps that a run may never come to."""
WHEN_SET_BACK: Final = frozenset({Step.CHECKPOINT_BROUGHT, Step.TABLE_SET_BACK})
"""Steps of `tidegate restore`, `fork` and `promote`, and of a run that finishes one."""


_times: Counter[str] = Counter()


def reached(step: Step) -> None:
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    counted, _, armed_by = wanted.partition("@")
    name, _, count = counted.partition(":")
    if name == step.value and (not armed_by or Path(armed_by).exists()):
        _times[name] += 1
        if _times[name] >= int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
