"""Addresses of what driver processes share."""

from __future__ import annotations

import sys

import pytest

from tidegate.cluster.connect import connect
from tidegate.errors import InvalidConfig
from tidegate.storage.memory import Memory


@pytest.mark.parametrize("address", [None, "files"])
def test_without_an_address_it_is_files_under_the_root(address: str | None) -> None:
    files = Memory()
    session = connect(address, files)
    session.create("leader", b"")
    session.close()
    assert files.list() == ["coordination/leader@1"]


@pytest.mark.parametrize(
    "address",
    [
        "",
        "file",
        "zk",
        "zk:host:1",
        "zk://",
        "zk:///path",
        "zk://host",
        "zk://host:port",
        "zk://host:1,/path",
        "zk://host:1/a//b",
        "zk://host:1/../b",
        "zk://host:1/path?secret=1",
        "zk://host:1#secret",
        "zk://secret@host:1",
        "zk://secret:@host:1",
        "zk://:secret@host:1",
        "zk://me:secret@",
        "zk://[secret@host:1",
        "etcd://me:secret@host:1",
    ],
)
def test_what_is_no_address_is_refused_without_repeating_it(address: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        connect(address, Memory())
    assert "zk://" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_without_its_client_zookeeper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tidegate.cluster.zookeeper", raising=False)
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'tidegate\[zookeeper\]'"):
        connect("zk://127.0.0.1:1", Memory())
