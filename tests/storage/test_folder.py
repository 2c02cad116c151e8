"""Files in a folder and in memory pass the tests that all files must pass; and what a folder has besides."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from io import BufferedIOBase, BytesIO
from pathlib import Path

import pytest

from tidegate.errors import StoreUnavailable
from tidegate.storage.files import Files, NotDurable
from tidegate.storage.folder import Folder
from tidegate.storage.memory import Memory
from tidegate.testing.files import FilesConformance


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "root")


class TestFolder(FilesConformance):
    @pytest.fixture(autouse=True)
    def given(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_files(self, name: str) -> Files:
        return Folder(self.folder / name)


class TestFolderWithoutLinks(TestFolder):
    """As on a file system that has none: what is kept is copied. To create, it needs them all the same."""

    @pytest.fixture(autouse=True)
    def given_no_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        linked = os.link

        def link(source: str | Path, target: str | Path) -> None:
            if Path(source).parent.name != "writing":
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
            linked(source, target)

        monkeypatch.setattr(os, "link", link)


class TestMemory(FilesConformance):
    @pytest.fixture(autouse=True)
    def given(self) -> None:
        self.memories: dict[str, Memory] = {}

    def make_files(self, name: str) -> Files:
        return self.memories.setdefault(name, Memory(name)).at("")


def test_a_kill_leaves_what_it_had_not_finished_to_the_next_run(files: Folder, tmp_path: Path) -> None:
    files.write("decisions/1", b"whole")
    hidden = tmp_path / "root" / "writing" / "unfinished"
    hidden.write_bytes(b"half of i")
    files.forget_unwritten()
    assert not hidden.exists()
    assert files.read("decisions/1") == b"whole"


@pytest.mark.parametrize("write", [Folder.create, Folder.write])
def test_an_object_has_its_content_on_the_disk_before_its_name_and_its_name_before_the_call_returns(
    files: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Folder, str, bytes], object]
) -> None:
    target = tmp_path / "root" / "decisions" / "1"
    happened: list[tuple[str, bool]] = []
    forced = os.fsync

    def fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        happened.append((path.parent.name if path.is_file() else path.name, target.exists()))
        forced(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write(files, "decisions/1", b"content")
    assert happened[0] == ("writing", False)
    assert ("decisions", True) in happened
    assert ("root", True) in happened, "the folder is new: its name must be on the disk too"
    happened.clear()
    write(files, "decisions/2", b"content")
    assert [folder for folder, _ in happened] == ["writing", "decisions"]


def test_without_fsync_nothing_is_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", None)
    files = Folder(tmp_path / "root", fsync=False)
    files.write("a", b"one")
    assert files.create("b", b"two")
    files.sync(["a", "b"])


def test_a_disk_that_fails_is_an_unavailable_store(files: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    files.write("there", b"content")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreUnavailable, match=r"could not create /.*/root/decisions/1"):
        files.create("decisions/1", b"content")
    assert files.read("decisions/1") is None
    with pytest.raises(NotDurable, match="cannot be forced to the disk: "):
        files.sync(["there"])


# As root, which tests may run as, no folder is unwritable; but nothing can be written below a file.
BELOW_A_FILE: dict[str, Callable[[Folder], object]] = {
    "create": lambda files: files.create("file/a", b""),
    "write": lambda files: files.write("file/a", b""),
    "read": lambda files: files.read("file/a"),
    "list": lambda files: files.list("file/a"),
    "delete": lambda files: files.delete(["file/a"]),
}


@pytest.mark.parametrize("what", BELOW_A_FILE)
def test_a_store_that_fails_is_unavailable_and_says_what_failed(files: Folder, what: str) -> None:
    files.write("file", b"")
    with pytest.raises(StoreUnavailable, match=f"could not {what} /.*/root/file/a: ") as failed:
        BELOW_A_FILE[what](files)
    assert failed.value.retry_helps
    assert "\n" not in str(failed.value)


def test_a_folder_is_made_when_something_is_written(tmp_path: Path) -> None:
    Folder(tmp_path / "root").list()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StoreUnavailable, match=r"could not write /.*/file/root/a: Not a directory"):
        Folder(tmp_path / "file" / "root").write("a", b"")


def test_what_is_being_written_is_not_listed(files: Folder, tmp_path: Path) -> None:
    files.write("decisions/1", b"")
    (tmp_path / "root" / "writing" / "unfinished").write_bytes(b"half of i")
    assert files.list() == ["decisions/1"]
    assert files.names_in() == ["decisions"]


def test_a_folder_that_was_removed_is_made_again_and_forced_again(
    files: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("decisions/1", b"")
    shutil.rmtree(tmp_path / "root")
    forced: list[str] = []
    force = os.fsync

    def fsync(handle: int) -> None:
        forced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        force(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write("decisions/1", b"")
    assert {"decisions", "root"} <= set(forced)


def test_a_folder_that_was_pruned_is_forced_again(files: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write("generations/1/a", b"")
    files.delete(["generations/1/a"])
    files.prune("generations/1")
    files.write("elsewhere", b"")
    files.make_folder("generations/1")
    forced = []
    monkeypatch.setattr(os, "fsync", lambda handle: forced.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    files.write("generations/1/b", b"")
    assert "generations" in forced, "there is the name of the folder that is new"


def test_what_spark_lives_on_is_not_forced(files: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", None)
        below = files.at("stages/orders", durable=False)
        below.at("spark").write("a", b"content")
        below.create("b", b"content")
        below.keep("c", below, "b")
    monkeypatch.setattr(os, "fsync", lambda _: os.strerror(0))
    assert files.sync(["stages/orders/c"])


def test_a_name_that_leads_elsewhere_strays(files: Folder, tmp_path: Path) -> None:
    files.write("generations/1/a", b"")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "b").write_bytes(b"")
    (tmp_path / "root" / "generations" / "2").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "generations" / "1" / "c").symlink_to(tmp_path / "outside" / "b")
    (tmp_path / "root" / "generations" / "3").symlink_to(tmp_path / "root" / "generations" / "1")
    names = ["generations/1/a", "generations/2/b", "generations/1/c", "generations/3/a"]
    assert files.strays(names) == {"generations/2/b", "generations/1/c"}


def test_spark_may_write_one_slash_or_three(files: Folder, tmp_path: Path) -> None:
    assert files.name_of(f"file://{tmp_path}/root/a%20b") == "a b"
    assert files.name_of(f"file:{tmp_path}/root/a%20b") == "a b"
    assert files.name_of(f"file:{tmp_path}/rooted/a") is None
    assert files.name_of("s3a://bucket/a") is None


def test_what_comes_from_elsewhere_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    content = os.urandom(3 << 20) * 7
    asked: list[int] = []

    class Large(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(-1 if size is None else size)
            return super().read(size)

    class Elsewhere(Memory):
        def open(self, name: str) -> BufferedIOBase | None:
            return Large(content) if name == "large" else super().open(name)

    elsewhere = Elsewhere("elsewhere")
    Folder(tmp_path).copy("a/large", elsewhere, "large")
    assert (tmp_path / "a" / "large").read_bytes() == content
    assert 0 < max(asked) <= len(content) // 2
    assert min(asked) > 0
    with pytest.raises(StoreUnavailable, match=r"could not copy memory://elsewhere/small to .*/a/small: it is gone"):
        Folder(tmp_path).copy("a/small", elsewhere, "small")
    assert list((tmp_path / "writing").iterdir()) == []
