"""The threads that send and hear: what passes is tried again, and what does not is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tidegate.cluster.exchange import LEADER, Exchange, Profile
from tidegate.cluster.kv import MAX_VALUE_BYTES
from tidegate.cluster.memory import MemoryKV, MemorySession
from tidegate.cluster.post import Post
from tidegate.engine.company import Company
from tidegate.errors import CoordinationUnavailable, InstanceFailed, StageFailed, TidegateError
from tidegate.flows.boards import MemberBoard
from tidegate.storage.memory import Memory
from tidegate.testing.kv import eventually

CHANNEL = (3, "orders")
TOO_LARGE = b"x" * (MAX_VALUE_BYTES + 1)


class Here:
    def __init__(self) -> None:
        self.kv = MemoryKV(lambda: 0)
        self.session: MemorySession = self.kv.open()
        # As large as nothing is: so what should lie in the root is refused by what is shared.
        self.exchange = Exchange(self.session, Memory(), "a", "a1", Profile(), most_bytes=10**9)
        self.exchange.join()

    @contextmanager
    def open(self) -> Iterator[Exchange]:
        post = Post(self.exchange, self.session, 0.01)
        post.open()
        try:
            yield self.exchange
        finally:
            post.close()


def fails(exchange: Exchange) -> TidegateError:
    """What it fails with, in the end."""
    found: list[TidegateError] = []

    def has_failed() -> bool:
        try:
            exchange.check()
        except TidegateError as error:
            found.append(error)
        return bool(found)

    eventually(has_failed)
    return found[0]


def test_an_entry_that_cannot_be_sent_fails_its_stage_and_the_rest_is_sent_when_its_channel_is_over() -> None:
    here = Here()
    with here.open() as exchange:
        woken: list[int] = []
        exchange.on_heard = lambda: woken.append(1)
        exchange.append(CHANNEL, 0, TOO_LARGE)
        exchange.follow_up(MemberBoard(3, "a", "a1", failed="so that others hear of it"))
        error = fails(exchange)
        assert isinstance(error, StageFailed)
        assert error.stage == "orders"
        assert "channels/000003/orders/000000000000" in str(error)
        assert str(MAX_VALUE_BYTES) in str(error)
        assert woken
        assert not here.kv.keys_in("boards")
        exchange.follow(())
        exchange.check()
        eventually(lambda: here.kv.keys_in("boards") == ["boards/a"])
        exchange.check()


def test_what_cannot_be_heard_fails_the_instance_also_between_generations() -> None:
    here = Here()
    here.session.create(LEADER, b"nothing that anybody could have claimed")
    with here.open() as exchange:
        company = Company(exchange, how_many=1, grace_ms=0)
        assert isinstance(fails(exchange), InstanceFailed)
        with pytest.raises(InstanceFailed, match="instance 'a' failed: what the others say cannot be heard"):
            company.cue(0)


@pytest.mark.parametrize("passes", [True, False])
def test_an_error_that_nobody_has_foreseen_may_pass(
    passes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "tidegate")
    here, tries = Here(), 0
    write = here.session.write

    def fails_at_first(key: str, value: bytes) -> None:
        nonlocal tries
        tries += 1
        if not passes or tries == 1:
            raise RuntimeError("of a client's own")
        write(key, value)

    monkeypatch.setattr(here.session, "write", fails_at_first)
    with here.open() as exchange:
        exchange.follow_up(MemberBoard(3, "a", "a1"))
        if passes:
            eventually(lambda: here.kv.keys_in("boards") == ["boards/a"])
            exchange.check()
        else:
            assert "of a client's own" in str(fails(exchange))
    assert len(caplog.records) == 1, "it is told once, however often it is tried"


def test_what_does_not_answer_is_tried_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here()
    with here.open() as exchange:
        tried: list[int] = []
        send: Callable[[str, bytes], None] = here.session.write

        def cut_off(key: str, value: bytes) -> None:
            tried.append(1)
            if len(tried) < 15:
                raise CoordinationUnavailable("it does not answer")
            send(key, value)

        monkeypatch.setattr(here.session, "write", cut_off)
        monkeypatch.setattr("tidegate.cluster.post._PAUSE_S", 0.001)
        exchange.follow_up(MemberBoard(3, "a", "a1"))
        eventually(lambda: here.kv.keys_in("boards") == ["boards/a"])
        exchange.check()
