"""What holds for every struct of the protocol, whichever file it is in."""

from __future__ import annotations

import importlib
import pkgutil

import msgspec
import pytest

from tidegate import protocol
from tidegate.protocol.aligner import InFlight
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig
from tidegate.protocol.coordinator import Checkpoint, StageDecline, StageReport
from tidegate.protocol.decision_log import CheckpointCompleted, GenerationOpened
from tidegate.protocol.messages import Barrier, Segment, SegmentFile, Watermark
from tidegate.protocol.quorum import Ack, Announcement

MODULES = [
    importlib.import_module(f"{protocol.__name__}.{each.name}") for each in pkgutil.iter_modules(protocol.__path__)
]
STRUCTS = {
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
}
# What is stored, sent to another process or written by a user.
STORED_OR_SENT: list[type[msgspec.Struct]] = [
    Ack,
    AlignmentConfig,
    Announcement,
    Barrier,
    CheckpointCompleted,
    CheckpointConfig,
    GenerationOpened,
    InFlight,
    Segment,
    SegmentFile,
    StageDecline,
    StageReport,
    Watermark,
]


def test_everything_but_the_coordinators_own_record_of_a_checkpoint_is_immutable() -> None:
    assert len(STRUCTS) > 30
    assert {kind for kind in STRUCTS if not kind.__struct_config__.frozen} == {Checkpoint}


@pytest.mark.parametrize("kind", STORED_OR_SENT)
def test_what_is_stored_or_sent_refuses_fields_that_it_does_not_know(kind: type[msgspec.Struct]) -> None:
    assert kind in STRUCTS
    assert kind.__struct_config__.forbid_unknown_fields
