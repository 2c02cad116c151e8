"""Whether an object is, all the way down, as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec


def state_of(value: object) -> object:
    """A copy of all that an object holds, comparable, with the order of what has one."""
    if isinstance(value, Mapping):
        return {
            "keys": [state_of(key) for key in value],
            "values": [state_of(each) for each in value.values()],
        }
    if isinstance(value, list | tuple | deque):
        return [type(value).__name__, *(state_of(each) for each in value)]
    if isinstance(value, set | frozenset):
        return {state_of(each) for each in value}
    names = _attributes(value)
    if not names:
        return value
    return {"type": type(value).__name__} | {name: state_of(getattr(value, name)) for name in names}


def _attributes(value: object) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    if not type(value).__module__.startswith("tidegate.") or hasattr(type(value), "__members__"):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(value, "__dict__", {})]


@contextmanager
def unchanged(*objects: object) -> Iterator[None]:
    """What happens inside leaves these objects as they were."""
    before = [state_of(each) for each in objects]
    yield
    after = [state_of(each) for each in objects]
    if after != before:
        raise AssertionError(f"changed from\n{before}\nto\n{after}")
