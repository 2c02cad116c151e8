"""The store of control records, on a local folder."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidegate.errors import StoreUnavailable
from tidegate.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "root")


def test_what_was_put_is_got(store: Store) -> None:
    store.put("generations/000001/manifests/ckpt-000001.json", b"\x00\xff")
    assert store.get("generations/000001/manifests/ckpt-000001.json") == b"\x00\xff"


def test_a_put_replaces(store: Store) -> None:
    store.put("a", b"one")
    store.put("a", b"two")
    assert store.get("a") == b"two"


def test_what_is_not_there_is_none(store: Store) -> None:
    assert store.get("a") is None
    assert store.get("folder/a") is None


def test_a_folder_is_no_object(store: Store) -> None:
    store.put("folder/a", b"")
    assert store.get("folder") is None


def test_create_writes_only_where_nothing_is(store: Store) -> None:
    assert store.create("decisions/1", b"mine") is True
    assert store.create("decisions/1", b"theirs") is False
    assert store.get("decisions/1") == b"mine"


def test_create_after_a_delete_writes_again(store: Store) -> None:
    store.create("a", b"one")
    store.delete(["a"])
    assert store.create("a", b"two") is True
    assert store.get("a") == b"two"


def test_of_many_that_create_one_name_exactly_one_wins(tmp_path: Path) -> None:
    racers = 8
    for round_number in range(25):
        name = f"decisions/{round_number}"
        together = threading.Barrier(racers)

        def create(racer: int, name: str = name, together: threading.Barrier = together) -> bool:
            mine = Store(tmp_path)  # as another process would have one of its own
            together.wait()
            return mine.create(name, str(racer).encode())

        with ThreadPoolExecutor(racers) as threads:
            won = list(threads.map(create, range(racers)))
        assert won.count(True) == 1
        assert Store(tmp_path).get(name) == str(won.index(True)).encode()


def test_a_kill_leaves_what_it_had_not_finished_to_the_next_run(store: Store, tmp_path: Path) -> None:
    store.put("decisions/1", b"whole")
    hidden = tmp_path / "root" / "writing" / "unfinished"
    hidden.write_bytes(b"half of i")
    store.forget_unwritten()
    assert not hidden.exists()
    assert store.get("decisions/1") == b"whole"


@pytest.mark.parametrize("write", [Store.create, Store.put])
def test_an_object_has_its_content_on_the_disk_before_its_name_and_its_name_before_the_call_returns(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Store, str, bytes], object]
) -> None:
    target = tmp_path / "root" / "decisions" / "1"
    happened: list[tuple[str, bool]] = []
    forced = os.fsync

    def fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        happened.append((path.parent.name if path.is_file() else path.name, target.exists()))
        forced(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write(store, "decisions/1", b"content")
    assert happened[0] == ("writing", False)
    assert ("decisions", True) in happened
    assert ("root", True) in happened, "the folder is new: its name must be on the disk too"
    happened.clear()
    write(store, "decisions/2", b"content")
    assert [folder for folder, _ in happened] == ["writing", "decisions"]


def test_without_fsync_nothing_is_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", None)
    store = Store(tmp_path / "root", fsync=False)
    store.put("a", b"one")
    assert store.create("b", b"two")
    store.sync(["a", "b"])


def test_a_disk_that_fails_is_an_unavailable_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreUnavailable, match="could not create decisions/1"):
        store.create("decisions/1", b"content")
    assert store.get("decisions/1") is None
    with pytest.raises(StoreUnavailable):
        store.sync(["decisions"])


def test_list_names_everything_under_a_folder_in_order(store: Store) -> None:
    for name in ("ids/3", "ids/1", "ids/deep/er/2", "decisions/1", "idset/1"):
        store.put(name, b"")
    assert store.list("ids") == ["ids/1", "ids/3", "ids/deep/er/2"]


def test_list_of_a_folder_that_is_not_there_is_empty(store: Store) -> None:
    assert store.list("decisions") == []


def test_an_object_that_is_being_written_is_not_listed(store: Store, tmp_path: Path) -> None:
    store.put("decisions/1", b"")
    (tmp_path / "root" / "decisions" / "2#1").write_bytes(b"half of i")  # how obstore names what is not yet whole
    assert store.list("decisions") == ["decisions/1"]


def test_names_may_hold_any_letters(store: Store) -> None:
    names = ["snapshots/größe/a b", "snapshots/50%/a+b", "snapshots/k=v/c#d"]
    for name in names:
        store.put(name, name.encode())
    assert store.list("snapshots") == sorted(names)
    assert [store.get(name) for name in names] == [name.encode() for name in names]


def test_deleting_what_is_not_there_is_no_error(store: Store) -> None:
    store.put("a", b"")
    store.put("c", b"")
    store.delete(["a", "b", "c"])
    assert store.list("") == []


# As root, which tests may run as, no folder is unwritable; but nothing can be written below a file.
BELOW_A_FILE: dict[str, Callable[[Store], object]] = {
    "create": lambda store: store.create("file/a", b""),
    "write": lambda store: store.put("file/a", b""),
    "read": lambda store: store.get("file/a"),
    "list": lambda store: store.list("file/a"),
    "delete": lambda store: store.delete(["file/a"]),
}


@pytest.mark.parametrize("what", BELOW_A_FILE)
def test_a_store_that_fails_is_unavailable_and_says_what_failed(store: Store, what: str) -> None:
    store.put("file", b"")
    with pytest.raises(StoreUnavailable, match=f"could not {what} file/a: ") as failed:
        BELOW_A_FILE[what](store)
    assert failed.value.retry_helps
    assert "\n" not in str(failed.value)


def test_a_root_that_cannot_be_a_folder_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StoreUnavailable, match="file/root"):
        Store(tmp_path / "file" / "root")
