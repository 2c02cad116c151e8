"""What a peer is: a system that can be installed, started on a job, watched from outside, killed and started again."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from benchmarks.peers.job import Job

ROOT: Final = Path(__file__).parents[2]
CHECKPOINT_S: Final = 1


def cores() -> int:
    return len(os.sched_getaffinity(0))


class Taken(msgspec.Struct, frozen=True):
    """A checkpoint, as the peer recorded it."""

    ended_ms: float
    took_ms: float


class Peer(ABC):
    """`share`: of the files, where all of them would take minutes."""

    name: ClassVar[str]
    share: ClassVar[float] = 1.0

    @abstractmethod
    def install(self) -> None:
        """Make it ready to be started. Raises `CannotRun` with the reason if it cannot be."""

    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def settings(self) -> str:
        """How it is set up, where it reads and writes, and what its checkpoint times are, for the report."""

    def refuses(self, work: str) -> str | None:
        """Why it cannot do a work, or None."""
        del work
        return None

    def prepare(self, job: Job) -> None:
        """Before the first start."""
        Path(job.state).mkdir(parents=True, exist_ok=True)

    def restored(self, job: Job) -> Job:
        """The job with which it goes on after a kill."""
        return job

    @abstractmethod
    def commands(self, job: Job) -> list[list[str]]: ...

    def environment(self, job: Job) -> dict[str, str]:
        return job.environment()

    @abstractmethod
    def visible(self, job: Job, table: str) -> list[Path]:
        """The files whose rows a reader of the table would see now."""

    @abstractmethod
    def checkpoints(self, job: Job) -> list[Taken] | None:
        """What it has recorded since its last start; None if it keeps no such record."""
