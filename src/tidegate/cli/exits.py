"""What the `tidegate` command ends with: one exit code per kind of outcome, the same for every command."""

from __future__ import annotations

import enum
from typing import Final

from tidegate.errors import (
    DamagedCheckpoint,
    DamagedLog,
    Fenced,
    ForeignRoot,
    InvalidConfig,
    InvalidPipeline,
    NoCommonPosition,
    NoRoot,
    NotRunning,
    PipelineChanged,
    RecoveryRefused,
    RootInUse,
    Superseded,
    TidegateError,
    UnknownState,
)


class Exit(enum.IntEnum):
    """docs/commands.md has the same table for users."""

    FINE = 0
    FAILED = 1
    WRONG_USAGE = 2
    UNUSABLE_ROOT = 3
    DAMAGE = 4
    SUPERSEDED = 5
    NOT_RUNNING = 6
    HANGING = 7
    INTERRUPTED = 130  # as shells tell that a command was ended by Ctrl-C


# Subclasses before their parents; what is not here is FAILED.
_CODES: Final[tuple[tuple[type[TidegateError], Exit], ...]] = (
    (InvalidConfig, Exit.WRONG_USAGE),
    (InvalidPipeline, Exit.WRONG_USAGE),
    (UnknownState, Exit.WRONG_USAGE),
    (RootInUse, Exit.UNUSABLE_ROOT),
    (NoRoot, Exit.UNUSABLE_ROOT),
    (ForeignRoot, Exit.UNUSABLE_ROOT),
    (PipelineChanged, Exit.UNUSABLE_ROOT),
    (RecoveryRefused, Exit.UNUSABLE_ROOT),
    (NoCommonPosition, Exit.UNUSABLE_ROOT),
    (DamagedCheckpoint, Exit.DAMAGE),
    (DamagedLog, Exit.DAMAGE),
    (Superseded, Exit.SUPERSEDED),
    (Fenced, Exit.SUPERSEDED),
    (NotRunning, Exit.NOT_RUNNING),
)


def code_of(error: TidegateError) -> Exit:
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.FAILED)
