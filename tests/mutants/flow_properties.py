"""What holds of single flows, whose requests are answered by hand, and not of a mutant. See `properties.py`."""

from __future__ import annotations

from tests.flows.by_hand import PATIENCE, ByHand, Heard, Led, Query, running_member, stage
from tidegate.errors import CheckpointsFailed, SinkFailed, StageFailed
from tidegate.flows.member import MemberFailed
from tidegate.flows.requests import CheckSealed, CommitSink, Stored, StoreSnapshot
from tidegate.protocol.messages import Barrier


def a_sink_is_tried_again_with_pauses_until_the_leader_steps_down() -> None:
    led = Led()
    led.complete()
    for failures in range(1, PATIENCE.sink_tries + 1):
        assert not led.host.of("stepped down")
        led.host.fail(CommitSink)
        assert not led.host.asked(CommitSink), "it is not tried again at once"
        led.host.now_ms += PATIENCE.sink_pause.after(failures)
        led.leader.on_time()
    assert [why for why, _ in led.host.of("stepped down")] == [CheckpointsFailed]


def what_gets_lost_is_said_again() -> None:
    host = ByHand()
    failing = running_member(host, stage(host))
    failing.on_failed(StageFailed("stage", "its query died"))
    failing.on_time()
    failing.on_time()
    said = [message for message in host.sent if isinstance(message, MemberFailed)]
    assert said == [MemberFailed(1, "member", "stage 'stage' failed: its query died")] * 3
    assert len(host.of("failed")) == 1


def what_a_table_refuses_is_declined() -> None:
    host = ByHand()
    sink = stage(host, Query(committable="rows"), "sink")
    heard = Heard(sink)
    sink.inject(Barrier(1, 1))
    host.answer(StoreSnapshot, Stored(("state",)))
    assert host.asked(CheckSealed), "it reports before its table was asked"
    host.fail(CheckSealed, SinkFailed("a column is missing"))
    assert heard.declined == [(1, "a column is missing")]
    assert not heard.reports


def snapshots_are_stored_one_after_the_other() -> None:
    host = ByHand()
    source = stage(host)
    heard = Heard(source)
    for number in (1, 2):
        source.inject(Barrier(number, number))
    for number in (1, 2):
        assert [asked.cut.barrier.checkpoint_id for asked in host.asked(StoreSnapshot)] == [number]
        host.answer(StoreSnapshot, Stored((f"state-{number}",)))
    assert [report.checkpoint_id for report in heard.reports] == [1, 2]
    assert host.is_idle
