"""Members without Spark, for the benchmark of several drivers: each acknowledges what is announced, as fast as it can.

`python -m benchmarks.cluster_members ADDRESS ROOT FIRST COUNT` runs so many of them until its input ends. They have
their flows and boards as any driver has; their stages have nothing to store.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tidegate.cluster.connect import connect
from tidegate.cluster.exchange import Exchange, Profile
from tidegate.cluster.kv import Session
from tidegate.cluster.post import Post
from tidegate.engine.carrier import Carrier
from tidegate.errors import StoreUnavailable, TidegateError
from tidegate.flows import requests
from tidegate.flows.boards import MemberSays
from tidegate.flows.leader import Announced, Visible
from tidegate.flows.member import Member, ToLeader
from tidegate.flows.requests import Flow, Patience, Request, Standing, StartOrder, Stored
from tidegate.flows.stage import StageCheckpoints, StartsAt
from tidegate.protocol.config import CheckpointConfig
from tidegate.protocol.messages import Barrier
from tidegate.protocol.quorum import Announcement
from tidegate.storage.folder import Folder

LEASE_S: Final = 30.0
CONFIG: Final = CheckpointConfig(interval_ms=10**9, timeout_ms=60_000)
_LOOK_EVERY_S: Final = 0.05


def stage_of(member: str) -> str:
    return f"stage-{member}"


def opened_exchange(address: str, root: Folder, name: str, on_heard: Callable[[], None]) -> tuple[Exchange, Post]:
    session: Session = connect(None if address == "files" else address, root, LEASE_S)
    exchange = Exchange(session, root.at("coordination", durable=False), name, f"{name}-1", Profile())
    exchange.on_heard = on_heard
    exchange.join()
    post = Post(exchange, session)
    post.open()
    return exchange, post


class _Query:
    """Of a source that has nothing to do."""

    def standing(self) -> Standing:
        return Standing(output_sequence=0)

    def append_barrier(self, barrier: Barrier) -> None: ...

    def on_open(self, name: str) -> None: ...

    def on_keeps_aligning(self, checkpoint_id: int, inflight_bytes: int) -> None: ...


class Host:
    """Carries out what flows ask for."""

    def __init__(self) -> None:
        self.carrier = Carrier()

    @property
    def now_ms(self) -> int:
        return self.carrier.clock.now_ms

    def start(self, flow: Flow[None], on_failed: Callable[[TidegateError], None]) -> None:
        self.carrier.start(flow, on_failed)

    def on_unanswered(self, request: Request[Any], error: StoreUnavailable, failures: int) -> None:
        print(f"{type(request).__name__}: {error} ({failures})", file=sys.stderr)


class BenchMember(Host):
    def __init__(self, address: str, root: Folder, name: str, woken: threading.Event) -> None:
        super().__init__()
        self.name = name
        self.carrier.woken = woken
        self.carrier.handle(
            {
                requests.RunStages: lambda request: lambda: self._stages(request.order),
                requests.StoreSnapshot: lambda _: lambda: Stored(files=()),
                requests.StoreInFlight: lambda _: requests.StoredInFlight,
            }
        )
        self._member = Member(self, name)
        self._says = MemberSays(0, name, self.incarnation)
        self.exchange, self.post = opened_exchange(address, root, name, woken.set)
        self.exchange.listen_to(())

    @property
    def incarnation(self) -> str:
        return f"{self.name}-1"

    def _stages(self, order: StartOrder) -> dict[str, StageCheckpoints]:
        start = StartsAt(order.generation, order.after_checkpoint)
        return {
            name: StageCheckpoints(name, (), self, _Query(), CONFIG, Patience(), start, is_sink=False)
            for name in order.stages
        }

    def send(self, _leader: str, message: ToLeader) -> None:
        self._says.say(message)

    def on_announced(self, announcement: Announcement) -> None: ...

    def on_failed(self, error: TidegateError) -> None:
        raise error

    def poll(self) -> None:
        for board in self.exchange.heard.leaders.values():
            for message in board.for_member(self.name):
                match message:
                    case StartOrder():
                        if message.generation > self._member.generation:
                            self._says = MemberSays(message.generation, self.name, self.incarnation)
                            self._member.on_start(message)
                    case Announced(_, announcements):
                        if announcements[-1].sequence > self._member.seen:
                            self._member.on_announced(message)
                    case Visible():
                        continue
        self._member.on_time()
        self.carrier.poll()
        self._says.forget_but(self._member.under_way)
        self.exchange.follow_up(self._says.board())


def _wait_for_the_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def main() -> None:
    address, root, first, count = sys.argv[1], Folder(Path(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
    woken, ended = threading.Event(), threading.Event()
    members = [BenchMember(address, root, f"m{number:03d}", woken) for number in range(first, first + count)]
    threading.Thread(target=_wait_for_the_end, args=(ended,), daemon=True).start()
    print("joined", flush=True)
    while not ended.is_set():
        woken.wait(_LOOK_EVERY_S)
        woken.clear()
        for member in members:
            member.poll()
    for member in members:
        member.post.close()


if __name__ == "__main__":
    main()
