"""The files of a root in a bucket, with a work folder: the contract, and what of it lies where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from tidegate.errors import StoreUnavailable
from tidegate.storage import bucket_root
from tidegate.storage.bucket import Bucket, BucketPlace
from tidegate.storage.bucket_root import BucketRoot, trust_only
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files, checksum, clear
from tidegate.storage.folder import Folder
from tidegate.storage.paths import RootPaths
from tidegate.storage.transfers import Doing, OnProgress, Progress, Transfers
from tidegate.testing.files import FilesConformance

KEPT = "generations/000001/snapshots/totals/ckpt-000001/state/0/0/1.delta"
SEGMENT = "generations/000001/stages/orders/output/part-00000.parquet"
PLACE = BucketPlace("s3://bucket/", "s3a://bucket/")


class TestToldFiles(FilesConformance):
    """What is neither kept nor Spark's is in the bucket alone, and passes what all files must."""

    @pytest.fixture(autouse=True)
    def given(self, tmp_path: Path) -> None:
        self.store, self.folder = MemoryStore(), tmp_path
        self.handles = 0

    def make_files(self, name: str) -> Files:
        self.handles += 1
        return BucketRoot(Bucket(self.store, PLACE, name), Folder(self.folder / f"{self.handles}", fsync=False))


class Told(Transfers):
    """Notes what it is told."""

    def __init__(self, told: list[tuple[str, Progress]]) -> None:
        super().__init__()
        self._told = told

    @contextmanager
    def under_way(self, doing: Doing, of_files: int, of_bytes: int = 0) -> Iterator[OnProgress]:
        with super().under_way(doing, of_files, of_bytes):
            yield lambda progress: self._told.append((doing, replace(progress, of_bytes=of_bytes)))


class Machines:
    """On one bucket. `stage`: where Spark writes."""

    def __init__(self, folder: Path) -> None:
        self.bucket = Bucket(MemoryStore(), PLACE, "orders")
        self.folder = folder
        self.stage = Folder(folder / "spark")
        self.told: list[tuple[str, Progress]] = []

    def on(self, machine: str) -> BucketRoot:
        work = Folder(self.folder / machine, fsync=False)
        return BucketRoot(self.bucket, work, Told(self.told))

    def requests(self, kind: str) -> int:
        return self.bucket.requests[kind]


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def keep(machines: Machines, root: BucketRoot, data: bytes = b"state", name: str = KEPT) -> None:
    machines.stage.write("1.delta", data)
    root.keep(name, machines.stage, "1.delta")
    machines.stage.delete(["1.delta"])  # as Spark does with what it no longer needs


def test_what_is_kept_is_spark_s_no_more_and_is_sent_when_it_is_synced(machines: Machines) -> None:
    root = machines.on("here")
    keep(machines, root)
    assert (root.read(KEPT), root.size(KEPT), root.exists(KEPT)) == (b"state", 5, True)
    assert machines.bucket.read(KEPT) is None
    assert root.sizes([KEPT]) == {}, "whoever comes from elsewhere finds none"
    root.sync([KEPT])
    assert machines.bucket.read(KEPT) == b"state"
    assert root.sizes([KEPT]) == {KEPT: 5}
    assert machines.told == [("uploading", Progress(1, 1, 5, 5))]


def test_what_was_sent_is_not_sent_again(machines: Machines) -> None:
    root = machines.on("here")
    keep(machines, root)
    known = root.sync([KEPT])
    before = machines.requests("put")
    root.sync([KEPT])
    root.sync([KEPT], known)
    keep(machines, root, b"other", f"{KEPT}.2")
    root.sync([KEPT, f"{KEPT}.2"])
    assert machines.requests("put") == before + 1


def test_what_cannot_be_sent_is_sent_by_the_next_try(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machines.on("here")
    keep(machines, root)
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "send", _unreachable)
        with pytest.raises(StoreUnavailable, match="no way there"):
            root.sync([KEPT], missing_ok=True)
    assert root.sizes([KEPT]) == {}
    root.sync([KEPT], missing_ok=True)
    assert machines.bucket.read(KEPT) == b"state"


def _unreachable(_bucket: Bucket, name: str, _path: Path) -> None:
    raise StoreUnavailable(f"could not write {name}: no way there")


def test_what_is_gone_is_not_waited_for_unless_it_has_to_be_there(machines: Machines) -> None:
    root = machines.on("here")
    root.sync([KEPT, SEGMENT], missing_ok=True)
    with pytest.raises(StoreUnavailable, match="there is no such file"):
        root.sync([KEPT])


def test_what_was_kept_and_has_vanished_unsent_is_said_though_others_may_be_gone(machines: Machines) -> None:
    """Else a checkpoint would be decided that names what is nowhere."""
    root = machines.on("here")
    keep(machines, root)
    (machines.folder / "here" / KEPT).unlink()
    with pytest.raises(StoreUnavailable, match=r"could not sync .*1.delta: there is no such file"):
        root.sync([KEPT, SEGMENT], missing_ok=True)
    root.delete([KEPT])
    root.sync([KEPT, SEGMENT], missing_ok=True)


def test_what_an_upload_has_sent_before_it_failed_is_deleted_with_the_rest(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what has arrived though its answer was lost."""
    root, send = machines.on("here"), Bucket.send
    root.write(SEGMENT, b"rows")
    names = [SEGMENT, *(f"{KEPT}.{number}" for number in range(3))]
    for name in names[1:]:
        keep(machines, root, name=name)

    def loses_an_answer(bucket: Bucket, name: str, path: Path) -> None:
        send(bucket, name, path)
        if name == names[2]:
            raise StoreUnavailable("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "send", loses_an_answer)
        with pytest.raises(StoreUnavailable, match="the answer was lost"):
            root.sync(names)
    assert names[2] in machines.bucket.list()
    root.delete(names)
    assert machines.bucket.list() == []


def test_a_restart_here_fetches_nothing_and_one_elsewhere_all(machines: Machines) -> None:
    keep(machines, root := machines.on("here"))
    root.sync([KEPT])
    again, elsewhere = machines.on("here"), machines.on("elsewhere")
    before = machines.requests("get")
    again.bring([KEPT])
    assert again.read(KEPT) == b"state"
    assert machines.requests("get") == before
    elsewhere.bring([KEPT])
    assert machines.requests("get") == before + 1
    assert (machines.folder / "elsewhere" / KEPT).read_bytes() == b"state"
    rebuilt = Folder(machines.folder / "elsewhere").at("generations/000002/stages/totals/spark")
    rebuilt.keep("state/0/0/1.delta", elsewhere, KEPT)
    assert (machines.folder / "elsewhere" / KEPT).stat().st_nlink == 2, "a link is enough for Spark"
    assert machines.requests("get") == before + 1


def test_many_are_fetched_side_by_side_and_told_of(machines: Machines) -> None:
    root = machines.on("here")
    names = [f"{KEPT}.{number}" for number in range(40)]
    for name in names:
        keep(machines, root, name.encode(), name)
    root.sync(names)
    machines.told.clear()
    elsewhere = machines.on("elsewhere")
    elsewhere.bring(names)
    assert [elsewhere.read(name) for name in names] == [name.encode() for name in names]
    assert machines.told[-1] == ("downloading", Progress(40, 40, sum(map(len, names)), sum(map(len, names))))


def test_a_copy_here_that_is_damaged_gives_way_to_the_one_in_the_bucket(machines: Machines) -> None:
    keep(machines, root := machines.on("here"))
    root.sync([KEPT])
    intact = checksum(root, KEPT)
    here = machines.folder / "here" / KEPT
    here.chmod(0o644)
    here.write_bytes(b"stale")
    again = machines.on("here")
    assert checksum(again, KEPT) != intact
    assert again.has_another(KEPT)
    assert checksum(again, KEPT) == intact
    machines.bucket.delete([KEPT])
    assert not machines.on("here").has_another(KEPT)


def test_a_copy_here_of_another_size_is_none(machines: Machines) -> None:
    keep(machines, root := machines.on("here"))
    root.sync([KEPT])
    here = machines.folder / "here" / KEPT
    here.write_bytes(b"torn")
    assert machines.on("here").read(KEPT) == b"state"


def test_what_the_bucket_has_lost_is_gone_though_it_is_here(machines: Machines) -> None:
    keep(machines, root := machines.on("here"))
    root.sync([KEPT])
    machines.bucket.delete([KEPT])
    again = machines.on("here")
    assert again.sizes([KEPT]) == {}
    assert not again.exists(KEPT)


def test_what_a_killed_run_kept_and_never_sent_is_none_but_is_found_to_be_left(machines: Machines) -> None:
    keep(machines, machines.on("here"))
    again = machines.on("here")
    assert not again.exists(KEPT)
    assert again.list("generations") == again.list("generations/000001") == [KEPT]
    again.delete([KEPT])
    assert again.list("generations") == []
    assert not (machines.folder / "here" / KEPT).exists()


def test_what_spark_writes_is_here_alone_until_a_checkpoint_captures_it(machines: Machines) -> None:
    root = machines.on("here")
    work = Folder(machines.folder / "here")
    work.write(SEGMENT, b"rows")
    assert (root.read(SEGMENT), root.size(SEGMENT)) == (b"rows", 4)
    assert root.uri(SEGMENT) == work.uri(SEGMENT)
    assert root.name_of(work.uri(SEGMENT)) == SEGMENT
    assert machines.bucket.list() == []
    root.sync([SEGMENT])
    elsewhere = machines.on("elsewhere")
    elsewhere.bring([SEGMENT])
    assert (machines.folder / "elsewhere" / SEGMENT).read_bytes() == b"rows"
    assert root.names_in("generations/000001/stages/orders/output") == ["part-00000.parquet"]
    root.delete([SEGMENT])
    assert machines.bucket.list() == []
    assert not root.exists(SEGMENT)


def test_what_never_left_this_machine_is_deleted_without_a_request(machines: Machines) -> None:
    root = machines.on("here")
    Folder(machines.folder / "here").write(SEGMENT, b"rows")
    before = machines.bucket.requests.total()
    root.delete([SEGMENT])
    root.write(f"{SEGMENT}.json", b"{}")
    assert root.read(f"{SEGMENT}.json") == b"{}"
    assert machines.bucket.requests.total() == before


def test_many_are_deleted_by_one_request(machines: Machines) -> None:
    root = machines.on("here")
    names = [f"{KEPT}.{number}" for number in range(40)]
    for name in names:
        keep(machines, root, name.encode(), name)
    root.sync(names)
    before = machines.requests("delete")
    root.delete([*names, "status.json"])
    assert machines.requests("delete") == before + 1
    assert machines.bucket.list() == []


def test_a_second_name_of_what_is_in_the_bucket_is_made_there(machines: Machines) -> None:
    keep(machines, root := machines.on("here"))
    root.sync([KEPT])
    pins = machines.on("elsewhere").at("pins/1", durable=False)
    before = machines.requests("get")
    pins.keep(KEPT, machines.on("elsewhere"), KEPT)
    assert machines.bucket.read(f"pins/1/{KEPT}") == b"state"
    assert machines.requests("get") == before + 1, "only the one above"


def test_a_full_snapshot_is_a_copy_of_its_own(machines: Machines) -> None:
    keep(machines, root := machines.on("here"))
    root.sync([KEPT])
    full = KEPT.replace("ckpt-000001", "ckpt-000002/full")
    root.copy(full, root, KEPT)
    assert (machines.folder / "here" / full).stat().st_nlink == 1
    root.sync([full])
    assert machines.bucket.read(full) == b"state"


def test_a_work_folder_of_another_root_or_of_before_a_restart_of_the_machine_is_not_trusted(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Folder(machines.folder / "here", fsync=False)
    trust_only(work, "one", machines.bucket)
    work.write(KEPT, b"state")
    trust_only(work, "one", machines.bucket)
    assert work.exists(KEPT)
    trust_only(work, "another", machines.bucket)
    assert not work.exists(KEPT)
    work.write(KEPT, b"state")
    monkeypatch.setattr(bucket_root, "_BOOT", tmp_path / "boot")
    (tmp_path / "boot").write_text(str(time.time()))
    trust_only(work, "another", machines.bucket)
    assert not work.exists(KEPT)
    work.write(KEPT, b"state")
    (tmp_path / "boot").unlink()
    trust_only(work, "another", machines.bucket)
    assert not work.exists(KEPT), "who cannot tell trusts nothing"


def test_generations_in_a_work_folder_that_the_log_does_not_know_are_not_trusted(machines: Machines) -> None:
    """The log was put back from a backup: the next generation gets the number of one that is here."""
    work = Folder(machines.folder / "here", fsync=False)
    lost = KEPT.replace("000001", "000002")
    trust_only(work, "one", machines.bucket)
    for name in (KEPT, lost):
        work.write(name, b"state")
    trust_only(work, "one", machines.bucket)
    assert work.exists(lost), "without a log nobody can tell, and no run begins"
    decisions = StoredDecisions(machines.bucket)
    opened = decisions.read().opening("run", None)
    assert decisions.create(opened)
    machines.bucket.write(RootPaths.decision(opened.slot + 1), b'{"type":"?"}')
    trust_only(work, "one", machines.bucket)
    assert work.exists(lost), "one that is damaged does not tell either"
    machines.bucket.delete([RootPaths.decision(opened.slot + 1)])
    trust_only(work, "one", machines.bucket)
    assert work.exists(KEPT)
    assert not work.exists(lost)


def test_what_is_in_a_generation_is_removed_here_and_in_the_bucket_also_what_executors_of_a_cluster_wrote(
    machines: Machines,
) -> None:
    lost, before = (f"generations/00000{number}/stages/totals/spark" for number in (2, 1))
    machines.bucket.write(f"{lost}/state/0/0/1.changelog", b"written by executors")
    machines.bucket.write(f"{before}/state/0/0/1.changelog", b"named by a checkpoint")
    work = Folder(machines.folder / "here", fsync=False)
    work.write(f"{lost}/offsets/0", b"written by the driver")
    root = BucketRoot(machines.bucket, work, in_bucket=True)
    assert root.list("generations/000002") == [f"{lost}/offsets/0", f"{lost}/state/0/0/1.changelog"]
    clear(root, "generations/000002")
    assert machines.bucket.list("generations") == [f"{before}/state/0/0/1.changelog"]
    assert not work.list("generations")
