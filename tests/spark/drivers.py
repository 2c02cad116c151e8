"""Several drivers that run one pipeline together, in processes of their own: killed, stopped for a while, cut off."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Final, Self

from tests.namespaces import Namespace
from tests.spark.kills import ROOT, KilledRuns
from tests.zookeeper_server import ZooKeeperServer
from tidegate.engine.events import CheckpointEnded, Ended, Started
from tidegate.engine.history import Past
from tidegate.engine.kill_points import VARIABLE
from tidegate.engine.status import RunStatus
from tidegate.engine.status_files import read_status
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.storage.decisions import StoredDecisions

NAMES: Final = ("a", "b", "c")
_PATIENCE_S: Final = 240.0
# As short as a busy machine lets it be: what is lost is found soon, and a spurious loss costs a restart.
_LEASE: Final = "4s"
_GRACE: Final = "3s"
_SLEEPS_S: Final = 7.0


class Drivers(KilledRuns):
    """As a context: all of them are gone in the end."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        names: Sequence[str] = NAMES,
        lease: str = _LEASE,
        grace: str = _GRACE,
        coordination: str | None = None,
    ) -> None:
        super().__init__(folder, *arguments, environment=environment)
        self.names = names
        self.within: dict[str, list[str]] = {}
        """What instances are started by, if not by themselves."""
        self.happens: dict[str, Callable[[], None]] = {}
        """Faults that are not of an instance, by their names."""
        self._together = ["--instances", str(len(names)), "--lease", lease, "--grace", grace]
        if coordination is not None:
            self._together += ["--coordination", coordination]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._said: dict[str, IO[bytes]] = {}
        self.generations: set[int] = set()
        self.leaders: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        for said in self._said.values():
            said.close()

    def begin(self, name: str, kill_at: str | None = None) -> None:
        """Start an instance. What it says goes to a file."""
        environment = {**os.environ, **self._environment, "TIDEGATE_TEST_FOLDER": str(self.folder)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        environment.pop(VARIABLE, None)
        if kill_at is not None:
            environment[VARIABLE] = kill_at
        file = Path(__file__).with_name(f"{self.pipeline}_pipeline.py")
        command = [*self.within.get(name, ()), sys.executable, "-m", "tidegate", "run", str(file)]
        command += [
            "--root",
            str(self.root),
            "--instance",
            name,
            *self._together,
            "--checkpoint-interval",
            "700ms",
            *self.arguments,
        ]
        if name not in self._said:
            self._said[name] = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=self._said[name], stderr=subprocess.STDOUT
        )

    def begin_all(self) -> None:
        for name in self.names:
            self.begin(name)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def all_said(self) -> str:
        return "\n".join(f"{name}:\n{self.said(name)[-3000:]}" for name in self.processes)

    # -- what is seen -----------------------------------------------------------------------------

    def status(self) -> RunStatus | None:
        status = read_status(self.store)
        if status is not None and status.generation is not None and status.instances:
            self.generations.add(status.generation)
            self.leaders.update(each.name for each in status.instances if each.leads)
        return status

    def leader(self) -> str | None:
        status = self.status()
        leads = None if status is None else next((each.name for each in status.instances if each.leads), None)
        return leads if leads is not None and self.processes[leads].poll() is None else None

    def completed(self) -> int:
        """The newest checkpoint that all tables show."""
        status = self.status()
        done = [] if status is None else [each.checkpoint for each in status.checkpoints if each.state == "complete"]
        return max((int(each.removeprefix("ckpt-")) for each in done), default=0)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, f"{what}, in vain\n{self.all_said()}"
            time.sleep(0.05)

    def feed_until_shown(self) -> None:
        """More input, and a checkpoint that has shown some: those of nothing come first, where a machine is slow."""
        before = self.epochs_shown()
        self.feed()
        self.wait_until(lambda: self.epochs_shown() > before, "waited for rows")

    def wait_for_leader(self) -> str:
        self.wait_until(lambda: self.leader() is not None, "waited for somebody who leads")
        leader = self.leader()
        assert leader is not None
        return leader

    # -- faults -----------------------------------------------------------------------------------

    def some(self, rng: random.Random, who: str) -> str:
        leader = self.wait_for_leader()
        return leader if who == "leader" else rng.choice([name for name in self.names if name != leader])

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        assert self.processes[name].wait() == -signal.SIGKILL, self.said(name)[-3000:]

    def kill_at(self, name: str, step: str) -> None:
        """Start it again so that it kills itself at a step, and wait for that."""
        self.kill(name)
        self.begin(name, kill_at=step)
        self.feed()
        self.wait_until(lambda: self.processes[name].poll() is not None, f"waited for {name} to be killed at {step}")
        assert self.processes[name].returncode == -signal.SIGKILL, self.said(name)[-3000:]

    def put_to_sleep(self, name: str) -> None:
        """For longer than its lease."""
        self.processes[name].send_signal(signal.SIGSTOP)
        time.sleep(_SLEEPS_S)
        self.processes[name].send_signal(signal.SIGCONT)

    def fault(self, what: str, rng: random.Random) -> None:
        """One fault, with input before and after it; then all go on."""
        self.feed()
        kind, _, who = what.partition(" ")
        kinds: dict[str, Callable[[str, random.Random], None]] = {
            "kill": self._kill_and_start,
            "lose": self._lose,
            "sleep": lambda who, rng: self.put_to_sleep(self.some(rng, who)),
            "leave": self._leave,
            "lead": self._kill_while_it_leads,
            "all": self._kill_all,
        }
        if what in self.happens:
            self.wait_for_all()  # one that is just being started, and finds that nobody answers, ends at once
            self.happens[what]()
        elif kind in kinds:
            kinds[kind](who, rng)
        else:
            name = self.some(rng, rng.choice(["leader", "member"]))
            self.kill_at(name, what)
            self.begin(name)
        self.feed_until_shown()

    def _kill_and_start(self, who: str, rng: random.Random) -> None:
        name = self.some(rng, who)
        self.kill(name)
        self.feed()
        self.begin(name)

    def _lose(self, who: str, rng: random.Random) -> None:
        """For longer than the grace: others run its stages, until it comes back."""
        name = self.some(rng, who)
        self.kill(name)
        self.wait_until(lambda: self._runs_without(name), f"waited for others to run what {name} ran")
        self.feed_until_shown()
        self.begin(name)

    def _leave(self, who: str, rng: random.Random) -> None:
        name = self.some(rng, who)
        self.wait_until(lambda: self._is_present(name), f"waited for {name}, which is started again, to be there")
        self.processes[name].terminate()
        assert self.processes[name].wait(_PATIENCE_S) == 0, self.said(name)[-3000:]
        self.begin(name)

    def _kill_while_it_leads(self, step: str, rng: random.Random) -> None:
        """The one that leads kills itself at a step: it is the first to be there, so it leads."""
        for each in self.names:
            self.kill(each)
        time.sleep(_SLEEPS_S)  # until nobody of before seems to lead
        name, *others = rng.sample(self.names, len(self.names))
        before = len(self.said(name))
        self.begin(name, kill_at=step)
        self.wait_until(lambda: "joining the other" in self.said(name)[before:], f"waited for {name} to join")
        for each in others:
            self.begin(each)
        self.wait_until(lambda: self.processes[name].poll() is not None, f"waited for {name} to die at {step}")
        assert self.processes[name].returncode == -signal.SIGKILL, self.said(name)[-3000:]
        self.begin(name)

    def _kill_all(self, _who: str, _rng: random.Random) -> None:
        for name in self.names:
            self.kill(name)
        self.begin_all()

    def wait_for_all(self) -> None:
        for name in self.names:
            self.wait_until(partial(self._is_present, name), f"waited for {name} to be there")

    def _is_present(self, name: str) -> bool:
        """As the process that it is now."""
        status, process = self.status(), self.processes[name].pid
        found = [] if status is None else [each for each in status.instances if each.name == name and each.stages]
        return any(each.pid == process or name in self.within for each in found)

    def _runs_without(self, name: str) -> bool:
        status = self.status()
        if status is None or status.state != "running":
            return False
        given = {each.name: each.stages for each in status.instances}
        return not given.get(name) and sum(map(len, given.values())) == len(status.stages)

    def stop(self) -> None:
        """The pipeline, whichever leads: all of them end well."""
        self.status()  # by now it tells who leads since the last fault
        command = [sys.executable, "-m", "tidegate", "stop", "--root", str(self.root), "--timeout", "4m"]
        environment = {**os.environ, **self._environment}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        stopped = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert stopped.returncode == 0, f"{stopped.stdout}{stopped.stderr}\n{self.all_said()}"
        self._await_ends()

    def stop_each(self) -> None:
        """By a signal to each of them at once, as when a machine is shut down: nobody is left to leave it to."""
        self.wait_for_all()  # one that is started again may still be starting, and would say so
        for process in self.processes.values():
            process.terminate()
        self._await_ends()
        assert "nobody has let it go" not in self.all_said()

    def check_history(self) -> None:
        """Whoever led, and however it ended: each checkpoint is told of once, as the log tells it; so is each start,
        by the one that led it."""
        log = StoredDecisions(self.store).read()
        told = Past(self.store).everything()
        ended = [each.checkpoint for each in told if isinstance(each, CheckpointEnded)]
        assert sorted(each.checkpoint for each in ended) == [checkpoint_name(n) for n in range(1, len(ended) + 1)]
        for each in ended:
            checkpoint_id = checkpoint_id_of(each.checkpoint)
            is_decided = checkpoint_id is not None and log.completed(checkpoint_id) is not None
            # One that was decided and is not retained is not in the log any more: then it may be told as complete.
            assert each.state == "complete" if is_decided else each.state in ("complete", "aborted"), each
            assert each.state != "aborted" or each.why, each
        assert any(each.state == "complete" and len(each.stages) > 1 for each in ended), "with what each stage did"
        starts = [each for each in told if isinstance(each, Started) and each.instance is not None]
        assert len({each.generation for each in starts}) == len(starts), "one of each generation tells that it started"
        assert {each.instance for each in starts} >= self.leaders
        assert any(each.because == "instances" for each in starts), "a change of instances is why it started anew"
        alone, first = told[0], starts[-1]
        assert isinstance(alone, Ended)
        assert (alone.instance, alone.state, first.because) == (None, "finished", "first")

    def _await_ends(self) -> None:
        for name, process in self.processes.items():
            assert process.wait(_PATIENCE_S) == 0, self.said(name)[-3000:]


def fault_often(drivers: Drivers, faults: Sequence[str], seed: int) -> int:
    """Start them, let all of these happen in some order, then let a run alone consume the rest. Returns how many.

    With an odd seed they are stopped by a command, with an even one by signals."""
    rng = random.Random(seed)
    plan = [*faults]
    rng.shuffle(plan)
    drivers.begin_all()
    drivers.feed_until_shown()
    for number, each in enumerate(plan, 1):
        started = time.monotonic()
        drivers.fault(each, rng)
        print(f"fault {number}/{len(plan)}: {each}, {time.monotonic() - started:.1f} s in all", flush=True)
    if seed % 2:
        drivers.stop()
    else:
        drivers.stop_each()
    drivers.run_to_the_end()
    return len(plan)


@contextmanager
def on_zookeeper(folder: Path, *arguments: str) -> Iterator[Drivers]:
    """Their server is killed and started again, and one of them has a link of its own that is cut, if that can be."""
    why_not = Namespace.why_not()
    with ExitStack() as stack:
        link = stack.enter_context(Namespace()) if why_not is None else None
        server = ZooKeeperServer(Namespace.HOST if link is not None else "127.0.0.1")
        stack.callback(server.remove)
        address = f"zk://{server.servers}/tests"
        drivers = stack.enter_context(Drivers(folder, *arguments, coordination=address))
        drivers.happens["zookeeper"] = lambda: _start_again(server)
        if link is None:
            print(f"no link is cut: {why_not}")
        else:
            drivers.within[drivers.names[-1]] = link.command
            drivers.happens["cut"] = lambda: _cut(link)
        yield drivers


def _start_again(server: ZooKeeperServer) -> None:
    server.stop()
    time.sleep(1)
    server.start()


def _cut(link: Namespace) -> None:
    """For longer than the lease."""
    link.cut()
    time.sleep(_SLEEPS_S)
    link.mend()
