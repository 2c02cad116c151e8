"""Whether a bucket can hold a root: it must let one of many create an object, and say so to that one alone.

Some that speak S3's protocol do not heed the condition of a put, or look first and write then. Two runs would both hold
a slot of the decision log there. So a bucket is asked before it is trusted: two that create one name, one after the
other; then eight at the same moment, three times. It is a test, and no proof: a race may be won by chance.
"""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from tidegate.errors import BucketUnfit, StoreUnavailable
from tidegate.storage.files import Files

RACERS: Final = 8
ROUNDS: Final = 3
_TRIES: Final = 5


def probe(files: Files) -> None:
    """Raises `BucketUnfit` if the bucket was seen to fail, and `StoreUnavailable` if it could not be asked. What it
    writes, below a name of its own, it deletes."""
    folder = f"probe-{uuid.uuid4().hex}"
    names = [f"{folder}/one-by-one", *(f"{folder}/race-{number}" for number in range(ROUNDS))]
    try:
        _one_by_one(files, names[0])
        for name in names[1:]:
            _race(files, name)
        if files.list(folder) != sorted(names):
            raise BucketUnfit(f"{files.location()} cannot hold a root: what was written there is not listed")
    finally:
        with suppress(StoreUnavailable):  # what went wrong before is what matters
            files.delete(names)


def _one_by_one(files: Files, name: str) -> None:
    """What the first call returns proves nothing: it may have met itself, or a conflict with nobody. What is read back
    does."""
    for _ in range(_TRIES):
        files.create(name, b"first")
        if files.exists(name):
            break
    else:
        raise StoreUnavailable(f"could not try {files.location()}: no object could be created there")
    if files.create(name, b"second"):
        raise _unfit(files, "it created an object that was there already")
    if files.read(name) != b"first":
        raise _unfit(files, "it refused to create an object that was there, and wrote it all the same")


def _race(files: Files, name: str) -> None:
    together = threading.Barrier(RACERS)

    def create(number: int) -> bool | None:
        together.wait()
        try:
            return files.create(name, str(number).encode())
        except StoreUnavailable:
            return None  # it may have

    with ThreadPoolExecutor(RACERS) as threads:
        answers = list(threads.map(create, range(RACERS)))
    found = files.read(name)
    winners = [str(number).encode() for number, won in enumerate(answers) if won]
    if len(winners) > 1:
        raise _unfit(
            files, f"of {RACERS} that created one object at the same time, {len(winners)} were told that they had"
        )
    if winners and found != winners[0]:
        raise _unfit(files, "what one had created was written over by another")
    if not winners and found is None:
        raise StoreUnavailable(f"could not try {files.location()}: none of {RACERS} could create an object there")


def _unfit(files: Files, why: str) -> BucketUnfit:
    return BucketUnfit(
        f"{files.location()} cannot hold a root: {why}; take a store whose conditional puts (If-None-Match) are atomic"
    )
