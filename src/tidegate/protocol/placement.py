"""Which instance runs which query of a generation.

Guarantees:
- Every query is given to exactly one instance.
- A query with a stage that an instance has asked for goes there; of several that ask for the same, to the first by
  name.
- What nobody has asked for is spread: no instance is given more of it while another has fewer queries in all, but for
  what was asked for. Where there is a choice, a query goes where its neighbours are.
- The same queries and instances give the same placement, in whichever order the instances are named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec


class Placeable(msgspec.Struct, frozen=True):
    """A query: the stages that it runs, and the queries that it reads."""

    name: str
    stages: tuple[str, ...]
    inputs: tuple[str, ...]


def place(queries: Sequence[Placeable], instances: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """By instance, the names of its queries. `queries`: each after those it reads. `instances`: at least one, and the
    stages that each has asked for."""
    wanted = _wanted(instances)
    placed: dict[str, str] = {}
    for query in queries:
        asking = [wanted[stage] for stage in query.stages if stage in wanted]
        if asking:
            placed[query.name] = asking[0]
    _spread([each for each in queries if each.name not in placed], queries, sorted(instances), placed)
    return {
        instance: tuple(each.name for each in queries if placed[each.name] == instance)
        for instance in sorted(instances)
    }


def _wanted(instances: Mapping[str, Collection[str]]) -> dict[str, str]:
    """By stage, who gets it of those who ask for it."""
    wanted: dict[str, str] = {}
    for instance in sorted(instances):
        for stage in instances[instance]:
            wanted.setdefault(stage, instance)
    return wanted


def _spread(
    free: Sequence[Placeable], queries: Sequence[Placeable], instances: Sequence[str], placed: dict[str, str]
) -> None:
    neighbours: dict[str, set[str]] = {each.name: set(each.inputs) for each in queries}
    for each in queries:
        for read in each.inputs:
            neighbours[read].add(each.name)
    rooms = _rooms(len(free), instances, list(placed.values()))
    for query in free:

        def nearness(instance: str, query: Placeable = query) -> int:
            return sum(placed.get(each) == instance for each in neighbours[query.name])

        # One that was begun is filled up first: so what is next to each other in the pipeline stays together.
        open_ones = [each for each in instances if rooms[each]]
        chosen = max(open_ones, key=lambda each: (nearness(each), -instances.index(each)))
        rooms[chosen] -= 1
        placed[query.name] = chosen


def _rooms(free: int, instances: Sequence[str], taken: Sequence[str]) -> dict[str, int]:
    """How many more each gets, so that all have as many as can be."""
    counts = {each: taken.count(each) for each in instances}
    rooms = dict.fromkeys(instances, 0)
    for _ in range(free):
        fewest = min(instances, key=lambda each: (counts[each] + rooms[each], instances.index(each)))
        rooms[fewest] += 1
    return rooms


def kept_apart(inputs: Mapping[str, tuple[str, ...]], instances: Mapping[str, Collection[str]]) -> frozenset[str]:
    """The stages that cannot run in the query of their input, because instances have asked for them apart. `inputs`: of
    each stage, each after those it reads."""
    wanted = _wanted(instances)
    bound: dict[str, str] = {}
    apart: set[str] = set()
    for name, reads in inputs.items():
        asked, read = wanted.get(name), bound.get(reads[0]) if reads else None
        if asked is not None and read is not None and asked != read:
            apart.add(name)
        if (owner := asked or read) is not None:
            bound[name] = owner
    return frozenset(apart)
