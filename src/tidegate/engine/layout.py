"""Where the stages of a DAG stand in a drawing: layers from left to right, and rows in each of them.

1. A stage's layer is the longest way to it from a source.
2. An edge that passes layers gets a *bend* in each of them, so that every edge leads from one layer to the next.
3. The places of a layer are ordered so that few edges cross: by the mean of their neighbours, sweep after sweep.
4. Rows are chosen so that edges are as straight as the order allows.

Rows are lines of text. A stage takes two lines for its border and one for each of its inputs; a bend takes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

_SWEEPS: Final = 8


class DrawnStage(msgspec.Struct, frozen=True):
    """What a drawing says of a stage. `note` is a second word on it, such as the mode of its output.

    `chained_into`: the last of those that run in one query with it, if it is not the last itself.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    note: str = ""
    chained_into: str | None = None


class Place(msgspec.Struct, eq=False):
    """A stage, or a bend of an edge that passes this layer, and its first row. `stage` is None for a bend.

    `output_of` names the stage whose output leaves here: the stage itself, or the one whose edge bends.
    """

    layer: int
    output_of: str
    stage: DrawnStage | None
    inputs: list[Place] = []
    outputs: list[Place] = []
    row: int = 0

    @property
    def height(self) -> int:
        return 1 if self.stage is None else 2 + max(1, len(self.inputs))

    @property
    def exit_row(self) -> int:
        """Where its output leaves."""
        return self.row + self.height // 2

    def entry_row(self, source: Place) -> int:
        """Where this input enters: every input has a row of its own, so that no two edges ever share one."""
        index = self.inputs.index(source)
        return self.row + (0 if self.stage is None else 1 + index)


Layers = list[list[Place]]


def layered(stages: Sequence[DrawnStage]) -> Layers:
    """The places of a DAG, layer by layer, each in the order of its rows. Stages come after those they read."""
    layers = _places(stages)
    _order(layers)
    for place in (place for layer in layers for place in layer):
        # Inputs enter in the order in which they stand: then they do not cross right in front of the stage.
        place.inputs.sort(key=layers[place.layer - 1].index)
    _choose_rows(layers)
    return layers


def _places(stages: Sequence[DrawnStage]) -> Layers:
    depth: dict[str, int] = {}
    for stage in stages:
        depth[stage.name] = max((depth[name] + 1 for name in stage.inputs), default=0)
    layers: Layers = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    # The places of one output, layer by layer: the stage itself, then its bends, which all its readers share.
    tracks: dict[str, list[Place]] = {}
    for stage in stages:
        place = Place(depth[stage.name], stage.name, stage)
        layers[place.layer].append(place)
        tracks[stage.name] = [place]
        for name in stage.inputs:
            track = tracks[name]
            while track[-1].layer < place.layer - 1:
                bend = Place(track[-1].layer + 1, name, None)
                layers[bend.layer].append(bend)
                _connect(track[-1], bend)
                track.append(bend)
            source = next(each for each in track if each.layer == place.layer - 1)
            _connect(source, place)
    return layers


def _connect(source: Place, target: Place) -> None:
    source.outputs.append(target)
    target.inputs.append(source)


def _order(layers: Layers) -> None:
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for layer in layers if forward else reversed(layers):
            places = {id(place): index for each in layers for index, place in enumerate(each)}
            means = {
                id(place): _mean((places[id(each)] for each in (place.inputs if forward else place.outputs)), index)
                for index, place in enumerate(layer)
            }
            layer.sort(key=lambda place: means[id(place)])


def _choose_rows(layers: Layers) -> None:
    wanted: Mapping[int, float] = {id(place): 0.0 for layer in layers for place in layer}
    for layer in layers:
        _stack(layer, wanted)
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for layer in layers if forward else reversed(layers):
            wanted = {id(place): _wanted_row(place, forward=forward) for place in layer}
            _stack(layer, wanted)
    top = min((place.row for layer in layers for place in layer), default=0)
    for place in (place for layer in layers for place in layer):
        place.row -= top


def _wanted_row(place: Place, *, forward: bool) -> float:
    """The row at which its edges on one side would be straight, in the mean."""
    if forward:
        return _mean((place.row + each.exit_row - place.entry_row(each) for each in place.inputs), place.row)
    return _mean((place.row + each.entry_row(place) - place.exit_row for each in place.outputs), place.row)


def _mean(values: Iterable[float], default: float) -> float:
    found = list(values)
    return sum(found) / len(found) if found else default


def _stack(layer: Sequence[Place], wanted: Mapping[int, float]) -> None:
    """Give each place a row below the one before it, as near as possible to where it wants to be.

    Places that push one another form a block, which stands at the mean of what its members want.
    """
    blocks: list[tuple[list[Place], float]] = []
    for place in layer:
        members, at = [place], wanted[id(place)]
        while blocks and blocks[-1][1] + _height(blocks[-1][0]) > at:
            before, before_at = blocks.pop()
            shifted = at - _height(before)
            at = (before_at * len(before) + shifted * len(members)) / (len(before) + len(members))
            members = before + members
        blocks.append((members, at))
    last = None
    for members, at in blocks:
        row = round(at) if last is None else max(round(at), last)
        for place in members:
            place.row = row
            row += place.height
        last = row


def _height(places: Sequence[Place]) -> int:
    return sum(place.height for place in places)
