"""Files of a store that fails now and then, used as the contract of `Files` permits: what failed is done again, and who
created what is read back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from io import BufferedIOBase
from typing import Final, Self, TypeVar

from tidegate.errors import StoreUnavailable
from tidegate.storage.bucket import Bucket
from tidegate.storage.files import Files

T = TypeVar("T")
_TRIES: Final = 12


def insist(call: Callable[[], T]) -> T:
    for _ in range(_TRIES):
        try:
            return call()
        except StoreUnavailable as error:
            if "gone" in str(error) or "no such file" in str(error):
                raise
            time.sleep(0.01)
    return call()


class Insisting(Bucket):
    """What is created has to differ from what others create there."""

    def __init__(self, bucket: Bucket) -> None:
        self.__dict__.update(vars(bucket))

    def read(self, name: str) -> bytes | None:
        return insist(lambda: Bucket.read(self, name))

    def open(self, name: str) -> BufferedIOBase | None:
        return insist(lambda: Bucket.open(self, name))

    def size(self, name: str) -> int | None:
        return insist(lambda: Bucket.size(self, name))

    def names_in(self, folder: str = "") -> list[str]:
        return insist(lambda: Bucket.names_in(self, folder))

    def write(self, name: str, data: bytes) -> None:
        insist(lambda: Bucket.write(self, name, data))

    def create(self, name: str, data: bytes) -> bool:
        while True:
            try:
                if Bucket.create(self, name, data):
                    return True
            except StoreUnavailable:
                pass
            found = self.read(name)
            if found is not None:
                return found == data

    def copy(self, name: str, source: Files, source_name: str) -> None:
        insist(lambda: Bucket.copy(self, name, source, source_name))

    def delete(self, names: Iterable[str]) -> None:
        wanted = list(names)
        insist(lambda: Bucket.delete(self, wanted))

    def at(self, folder: str, *, durable: bool = True) -> Self:
        return type(self)(Bucket.at(self, folder, durable=durable))

    def list(self, folder: str = "", *, but: Collection[str] = ()) -> list[str]:
        return insist(lambda: Bucket.list(self, folder, but=but))
