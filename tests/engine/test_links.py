"""What comes from another process, as a channel here takes it."""

from __future__ import annotations

import pytest

from tidegate.engine.channel import Channel
from tidegate.engine.links import _append
from tidegate.errors import ProtocolViolation
from tidegate.protocol.messages import Barrier, Message, Segment, encode


def test_what_another_instance_has_appended_is_taken_in_order() -> None:
    channel = Channel("orders", 4)
    messages: list[Message] = [Segment(5, 0, ()), Barrier(1, 1), Segment(6, 1, ())]
    for message in messages:
        _append(channel, encode(message))
    assert [channel.at(each) for each in range(3)] == messages


@pytest.mark.parametrize("sequence", [4, 6])
def test_a_gap_in_what_another_instance_has_appended_is_told_with_its_channel(sequence: int) -> None:
    channel = Channel("orders", 4)
    with pytest.raises(
        ProtocolViolation, match=f"channel of 'orders' something is missing.*segment {sequence} .*after 4"
    ):
        _append(channel, encode(Segment(sequence, 0, ())))
    assert channel.end == 0


def test_what_cannot_be_understood_is_told_with_its_channel() -> None:
    with pytest.raises(ProtocolViolation, match="channel of 'orders' cannot be understood"):
        _append(Channel("orders", 0), b"{}")
