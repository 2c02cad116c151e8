"""Processes that share a folder, and are killed or stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate.cluster.files import FilesSession
from tidegate.cluster.kv import Presence
from tidegate.storage.folder import Folder
from tidegate.testing.kv import eventually

LEASE_S = 1.5
MEMBER = """
import sys
from tidegate.cluster.files import FilesSession
from tidegate.errors import SessionLost
from tidegate.storage.folder import Folder

session = FilesSession(Folder(sys.argv[1]), lease_s=float(sys.argv[2]))
for incarnation in ("1", "2"):
    session.join("member", incarnation, b"")
    print("joined", flush=True)
    try:
        while True:
            session.wait([], 60)
            session.present()
    except SessionLost:
        print("lost", flush=True)
"""


@pytest.fixture
def member(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", MEMBER, str(tmp_path), str(LEASE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def watcher(tmp_path: Path) -> FilesSession:
    return FilesSession(Folder(tmp_path), lease_s=LEASE_S)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_that_is_killed_is_not_present_after_a_lease(
    member: subprocess.Popen[str], watcher: FilesSession
) -> None:
    assert said(member) == "joined"
    assert {name: each.incarnation for name, each in watcher.present().items()} == {"member": "1"}
    member.kill()
    while watcher.present():
        watcher.wait([], 30)


def test_a_process_that_is_stopped_for_longer_than_its_lease_hears_of_it(
    member: subprocess.Popen[str], watcher: FilesSession
) -> None:
    assert said(member) == "joined"
    assert watcher.present().keys() == {"member"}
    member.send_signal(signal.SIGSTOP)
    eventually(lambda: not watcher.present())
    member.send_signal(signal.SIGCONT)
    assert said(member) == "lost"
    assert said(member) == "joined"
    eventually(lambda: watcher.present() == {"member": Presence("member", "2", b"")})
