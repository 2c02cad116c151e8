"""Every command of docs/operating.md, one after the other, while orders come in: the tables end up as they should."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import deltalake
import pytest

from tests.operating_guide import commands_of, sections
from tests.test_documents import example
from tidegate.protocol.names import checkpoint_name
from tidegate.storage.inspection import InspectedRoot

TIDEGATE = str(Path(sys.executable).with_name("tidegate"))
_RUNS_ON = re.compile(r"tidegate run \S+ --root \S+")
"""A run that ends only when it is told to."""


class Operator:
    """Somebody who follows the guide, while orders come in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = 0
        self._runs: list[subprocess.Popen[str]] = []
        (folder / "orders").mkdir()
        (folder / "orders.py").write_text(example(), encoding="utf-8")
        # The same said otherwise: what comes of it must not differ.
        newer = example().replace('"amount >= 100"', '"amount >= 100 and country is not null"')
        (folder / "orders_v2.py").write_text(newer, encoding="utf-8")
        self.orders_come()

    def orders_come(self) -> None:
        """A file of orders, written whole."""
        first = self._files * 50
        rows = [
            {"id": n, "ts": f"2026-01-01T{n // 60:02d}:{n % 60:02d}:00Z", "country": "DE", "amount": n % 200}
            for n in range(first, first + 50)
        ]
        hidden = self.folder / "orders" / f".{self._files}"
        hidden.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        hidden.rename(self.folder / "orders" / f"{self._files:04d}.json")
        self._files += 1

    @property
    def large_orders(self) -> Counter[int]:
        """Those that have come."""
        return Counter(n for n in range(self._files * 50) if n % 200 >= 100)

    def shown(self) -> Counter[int]:
        table = deltalake.DeltaTable(self.folder / "lake" / "large_orders").to_pyarrow_table(columns=["id"])
        return Counter(row["id"] for row in table.to_pylist())

    def follow(self, commands: list[str]) -> None:
        for command in commands:
            self._type(command)
            self.orders_come()

    def _type(self, command: str) -> None:
        arguments = [TIDEGATE, *shlex.split(self._with_a_checkpoint(command))[1:]]
        if _RUNS_ON.fullmatch(command):
            with (self.folder / f"run-{len(self._runs)}.log").open("w", encoding="utf-8") as log:
                self._runs.append(subprocess.Popen(arguments, cwd=self.folder, text=True, stdout=log, stderr=log))
            self.await_all(self.folder / shlex.split(command)[4])
            return
        done = subprocess.run(arguments, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    def _with_a_checkpoint(self, command: str) -> str:
        """With the oldest one of those that there are in the place of the guide's."""
        if "--to 42" not in command:
            return command
        oldest = InspectedRoot(self.folder / "state" / "orders").current()[0].checkpoint_id
        return command.replace("--to 42", f"--to {checkpoint_name(oldest)}")

    def await_all(self, root: Path) -> None:
        """Until the run on a root has taken one that holds all that has come."""
        deadline = time.monotonic() + 240
        while True:
            assert time.monotonic() < deadline, "the run takes no checkpoint"
            assert self._runs[-1].poll() is None, "the run has ended"
            asked = subprocess.run(
                [TIDEGATE, "checkpoint", "--root", str(root)], capture_output=True, text=True, timeout=120, check=False
            )
            if asked.returncode == 0 and self.shown() == self.large_orders:
                return
            time.sleep(0.5)

    def kill(self) -> None:
        for run in self._runs:
            if run.poll() is None:
                run.kill()
                run.wait()


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    made = Operator(tmp_path)
    try:
        yield made
    finally:
        made.kill()


def test_every_section_of_the_guide_is_followed_here() -> None:
    assert sections() == [
        "A new version beside the old one",
        "Going back after a bad deploy",
        "Stopping for maintenance",
        "Moving to another machine",
        "Savepoints",
        "A damaged checkpoint",
    ]


@pytest.mark.soak  # it takes long; its parts are in CI
@pytest.mark.slow
@pytest.mark.spark
def test_a_new_version_is_tried_promoted_and_taken_back(operator: Operator) -> None:
    root = operator.folder / "state" / "orders"
    operator.follow(["tidegate run orders.py --root state/orders"])
    try_it, *rest = _parts(commands_of("A new version beside the old one"), at=["tidegate savepoint", "tidegate stop"])
    assert len(try_it) == 3
    operator.follow(try_it)
    operator.await_all(root)
    upgrade, undo = rest
    operator.follow(upgrade)
    operator.await_all(operator.folder / "state" / "orders-next")
    operator.follow(undo)
    operator.await_all(root)


@pytest.mark.slow
@pytest.mark.spark
def test_a_pipeline_goes_back_rests_and_moves(operator: Operator) -> None:
    root = operator.folder / "state" / "orders"
    operator.follow(["tidegate run orders.py --root state/orders"])
    operator.follow(commands_of("Going back after a bad deploy"))
    assert operator.shown() < operator.large_orders
    operator.follow(["tidegate run orders.py --root state/orders", *commands_of("Savepoints")])
    operator.await_all(root)
    operator.follow(commands_of("Stopping for maintenance"))
    there, here = _parts(commands_of("Moving to another machine"), at=["tidegate restore"])
    operator.follow(there)
    shutil.rmtree(root)
    operator.follow(here)
    operator.await_all(root)


def _parts(commands: list[str], at: list[str]) -> list[list[str]]:
    """Commands, from each of these on apart."""
    found: list[list[str]] = [[]]
    for command in commands:
        if any(command.startswith(each) for each in at):
            found.append([])
        found[-1].append(command)
    return found


def test_the_way_out_of_damage_is_the_way_back() -> None:
    """What it says is shown by tests/cli/test_damage.py, with each kind of damage."""
    verify, restore = commands_of("A damaged checkpoint")
    assert verify == "tidegate verify --root state/orders"
    assert restore in commands_of("Going back after a bad deploy")
