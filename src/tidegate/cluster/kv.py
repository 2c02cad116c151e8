"""Keys and values that several processes share: the contract that a memory, files and ZooKeeper fulfil.

A key is a string of parts with `/` between them, such as `boards/a`: no part is empty, `.` or `..`, none holds an `@`.
Folders are no more than what keys have in common. A value is at most `MAX_VALUE_BYTES` long.

Nothing of it has to be durable: all that counts is in the root. What is here says who is alive, and carries what they
say to each other; whoever believes something that is not true any more is told so by the decision log.

Guarantees:
- A value is seen whole, as it was or as it is. Who reads a key again never sees an older version than before, and who
  has written it sees that. Others may see for a moment more what was there before.
- Versions of a key grow with every change; an own one's also where it was deleted meanwhile.
- An *own* key is written by one process only, with `write`; a *shared* one with `create` and `swap`, and of all that do
  so at the same time exactly one does. Nobody makes a shared key again that was deleted: callers see to that.
- What fails says what is known of it: `NotWritten` has changed nothing; `MaybeWritten` may have, now or later, so it is
  read back. Reads that fail are `CoordinationUnavailable`.
- Who has joined is present for as long as its process is seen to live, and for at most about the lease longer. Nobody's
  clock is compared with anybody else's. Whoever was not present for others, for however short a time, hears of it: each
  further call is `SessionLost`, and it has to join anew, as another incarnation.
- A notice may come late, more than once, and for nothing. One that is missed costs time: `wait` returns in time.

`tidegate.testing.kv` has the tests of all this, for whoever writes one more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, Protocol

import msgspec

MAX_VALUE_BYTES: Final = 512 * 1024
"""What ZooKeeper takes, with room to spare."""


class Entry(msgspec.Struct, frozen=True):
    value: bytes
    version: int


class Presence(msgspec.Struct, frozen=True):
    """Somebody who has joined. Of one name the last one who has joined is present; who had it before is not."""

    instance: str
    incarnation: str
    value: bytes
    is_sure: bool = True
    """Whether it was seen to live. If not, it is not known yet whether it still does: that takes a lease at most."""


class Session(Protocol):
    """What one process has to do with the others. The calls may come from several threads at a time."""

    # -- who is there -----------------------------------------------------------------------------

    def join(self, instance: str, incarnation: str, value: bytes) -> None:
        """Be present from now on, as a new incarnation. What was present by this name is not any more."""
        ...

    def leave(self) -> None:
        """Be present no longer, so that others need not wait until that is seen."""
        ...

    def present(self) -> Mapping[str, Presence]:
        """Who is seen to live, by name."""
        ...

    # -- keys -------------------------------------------------------------------------------------

    def read(self, key: str) -> Entry | None: ...

    def read_folder(self, folder: str) -> Mapping[str, Entry]:
        """All keys directly in a folder, by their last parts. What has not changed since the last time costs little."""
        ...

    def write(self, key: str, value: bytes) -> None:
        """An own key, whether or not it was there."""
        ...

    def create(self, key: str, value: bytes) -> bool:
        """Write it if there is none. Tells whether it did. False does not prove that it was somebody else's try."""
        ...

    def swap(self, key: str, value: bytes, version: int) -> bool:
        """Write it if it is there in this very version. Tells whether it did, in the same sense."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete what is there of these."""
        ...

    def folders(self, folder: str) -> list[str]:
        """The last parts of all folders directly in a folder, in order. One may be among them that holds no key any
        more."""
        ...

    def clear(self, folder: str) -> None:
        """Delete all keys in a folder, and in those below it. Nobody may be about to make one there."""
        ...

    # -- changes ----------------------------------------------------------------------------------

    def wait(self, folders: Collection[str], timeout_s: float) -> None:
        """Return as soon as something in these folders may have changed since it was last read here, or who is present;
        at the latest when the time is over. A key in a folder below is none of it."""
        ...

    def close(self) -> None:
        """Leave, and let go of everything. Whoever waits returns."""
        ...
