"""The tests that files under a root must pass (`tidegate.storage.files`), whoever wrote them.

Subclass `FilesConformance` in a pytest file, under a name that starts with `Test`, and say how to make them:

    class TestMyFiles(FilesConformance):
        def make_files(self, name):
            return MyFiles(BUCKET, prefix=name)

Each test uses roots of its own names. `make_files` with the same name gives another handle on the same files, as
another process would have it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from tidegate.errors import StoreUnavailable
from tidegate.protocol.decision_log import ClaimAnswer, DecisionLog, judge_claim
from tidegate.storage.decisions import StoredDecisions
from tidegate.storage.files import Files, checksum, clear
from tidegate.storage.memory import Memory

T = TypeVar("T")

ODD_NAMES = (
    "a b",
    "50%",
    "50%25",
    "a+b&c=d",
    "c#d",
    "e?f",
    "g*h[i]{j}",
    "k:l;m,n@o!",
    'quote\'d "twice"',
    "back\\slash",
    "~tilde",
    ".hidden",
    "..dots",
    "größe",
    "潮",
    "🌊",
    "x" * 200,
    "k=v/part-00000-1a.c000.snappy.parquet",
    "deep/er/and/deep/er",
)


class LosesAnAnswer:
    """Files of which the first `create` takes effect and seems to fail."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._is_lost = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._files, name)

    def create(self, name: str, data: bytes) -> bool:
        created = self._files.create(name, data)
        if not self._is_lost:
            self._is_lost = True
            raise StoreUnavailable("the answer was lost")
        return created


def at_once(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make calls on a thread each, all of them at the same moment."""
    waiting = list(calls)
    together = threading.Barrier(len(waiting))

    def make(call: Callable[[], T]) -> T:
        together.wait()
        return call()

    with ThreadPoolExecutor(len(waiting)) as threads:
        return list(threads.map(make, waiting))


class FilesConformance:
    def make_files(self, name: str) -> Files:
        """A handle on the files of a root, of which there are none before a test uses it."""
        raise NotImplementedError

    # -- reading and writing ----------------------------------------------------------------------

    def test_what_is_written_is_read_by_everybody(self) -> None:
        files = self.make_files("written")
        files.write("generations/000001/manifests/ckpt-000001.json", b"\x00\xff")
        for each in (files, self.make_files("written")):
            assert each.read("generations/000001/manifests/ckpt-000001.json") == b"\x00\xff"
            assert each.size("generations/000001/manifests/ckpt-000001.json") == 2
            assert each.exists("generations/000001/manifests/ckpt-000001.json")

    def test_what_is_written_again_is_as_it_was_written_last(self) -> None:
        files = self.make_files("again")
        files.write("a", b"one, which is longer")
        files.write("a", b"two")
        assert files.read("a") == b"two"
        assert files.size("a") == 3
        files.write("a", b"")
        assert files.read("a") == b""
        assert files.exists("a"), "a file without content is one"

    def test_what_is_not_there_is_not_there(self) -> None:
        files = self.make_files("nothing")
        files.write("folder/a", b"")
        for name in ("a", "folder", "folder/b", "another/folder/a"):
            assert files.read(name) is None
            assert files.open(name) is None
            assert files.size(name) is None
            assert not files.exists(name)
            assert checksum(files, name) is None

    def test_parts_of_a_file_can_be_read(self) -> None:
        files = self.make_files("parts")
        data = bytes(range(256)) * 20_000
        files.write("large", data)
        opened = files.open("large")
        assert opened is not None
        with opened as file:
            file.seek(-10, 2)
            assert file.read() == data[-10:]
            file.seek(1000)
            assert file.read(5) == data[1000:1005]
        assert checksum(files, "large") == (len(data), hashlib.sha256(data).hexdigest())

    def test_a_reader_sees_all_of_one_version(self) -> None:
        files, reader = self.make_files("versions"), self.make_files("versions")
        versions = [bytes([number]) * (50_000 + number) for number in range(4)]
        files.write("a", versions[0])
        is_done = threading.Event()

        def write() -> None:
            for number in range(20):
                files.write("a", versions[number % 4])
            is_done.set()

        def read() -> None:
            while not is_done.is_set():
                assert reader.read("a") in versions

        at_once([write, read, read])

    def test_names_may_hold_any_letters(self) -> None:
        files = self.make_files("odd").at("snapshots")
        for name in ODD_NAMES:
            files.write(name, name.encode())
        assert files.list() == sorted(ODD_NAMES)
        assert [files.read(name) for name in ODD_NAMES] == [name.encode() for name in ODD_NAMES]
        assert [files.create(name, b"another") for name in ODD_NAMES] == [False] * len(ODD_NAMES)
        for name in ODD_NAMES:
            files.at("kept").keep(name, files, name)
        files.delete(ODD_NAMES)
        assert files.list() == sorted(f"kept/{name}" for name in ODD_NAMES)

    def test_a_file_is_found_by_where_it_is(self) -> None:
        files, other = self.make_files("found"), self.make_files("found elsewhere")
        below = files.at("generations/000001")
        for name in ODD_NAMES:
            assert below.name_of(below.uri(name)) == name
            assert below.name_at(below.location(name)) == name
            assert files.name_of(below.uri(name)) == f"generations/000001/{name}"
            assert files.location(f"generations/000001/{name}") == below.location(name)
            assert other.name_of(below.uri(name)) is None
            assert other.name_at(below.location(name)) is None
        assert files.at("generations/000002").name_of(below.uri("a")) is None
        assert len({below.uri(name) for name in ODD_NAMES}) == len(ODD_NAMES)
        assert all(below.uri(name).isascii() and " " not in below.uri(name) for name in ODD_NAMES)

    def test_the_same_files_are_seen_from_a_folder_below(self) -> None:
        files = self.make_files("below")
        below = files.at("stages/orders").at("spark", durable=False)
        below.write("commits/0", b"v1")
        assert files.read("stages/orders/spark/commits/0") == b"v1"
        files.write("stages/orders/spark/offsets/0", b"v1")
        files.write("stages/orders/output/a", b"")
        assert below.list() == ["commits/0", "offsets/0"]
        assert below.list("commits") == ["commits/0"]
        assert below.names_in() == ["commits", "offsets"]
        assert files.at("").list() == files.list()
        assert below.create("commits/0", b"v2") is False
        below.delete(["commits/0"])
        assert not files.exists("stages/orders/spark/commits/0")

    def test_the_first_bytes_of_a_file_can_be_replaced(self) -> None:
        files = self.make_files("overwritten")
        files.write("status.reserve", b" " * 100)
        files.overwrite("status.reserve", b"last words")
        assert files.read("status.reserve") == b"last words".ljust(100)
        refuses(lambda: files.overwrite("another", b"last words"))
        assert not files.exists("another")

    # -- creating ---------------------------------------------------------------------------------

    def test_create_writes_only_where_nothing_is(self) -> None:
        files = self.make_files("created")
        assert files.create("decisions/1", b"mine") is True
        assert self.make_files("created").create("decisions/1", b"theirs") is False
        assert files.read("decisions/1") == b"mine"
        files.delete(["decisions/1"])
        assert files.create("decisions/1", b"theirs") is True
        assert files.read("decisions/1") == b"theirs"

    def test_of_many_that_create_one_name_exactly_one_does(self) -> None:
        racers = [self.make_files("raced") for _ in range(8)]
        for number in range(15):
            name = f"decisions/{number}"

            won = at_once(partial(racer.create, name, str(each).encode()) for each, racer in enumerate(racers))
            assert won.count(True) == 1
            assert self.make_files("raced").read(name) == str(won.index(True)).encode()

    def test_of_many_that_claim_a_slot_of_the_decision_log_one_wins_and_all_agree(self) -> None:
        racers = [StoredDecisions(self.make_files("claimed")) for _ in range(4)]
        proposed = [DecisionLog().opening(f"racer {each}", None) for each in range(4)]
        at_once(partial(racer.create, record) for racer, record in zip(racers, proposed, strict=True))
        answers = [judge_claim(record, racer.read()) for racer, record in zip(racers, proposed, strict=True)]
        assert answers.count(ClaimAnswer.WON) == 1
        (record,) = list(racers[0].read())
        assert record.claimant == f"racer {answers.index(ClaimAnswer.WON)}"

    def test_a_claim_whose_answer_is_lost_is_read_back(self) -> None:
        files = self.make_files("lost")
        loses: Files = LosesAnAnswer(files)  # type: ignore[assignment]
        proposed = DecisionLog().opening("me", None)
        with suppress(StoreUnavailable):  # it says so, and has done it
            StoredDecisions(loses).create(proposed)
        log = StoredDecisions(files).read()
        assert judge_claim(proposed, log) is ClaimAnswer.WON
        assert log.generation == 1
        assert len(files.list("decisions")) == 1

    # -- listing ----------------------------------------------------------------------------------

    def test_all_names_under_a_folder_are_listed_in_order(self) -> None:
        files = self.make_files("listed")
        for name in ("ids/3", "ids/1", "ids/deep/er/2", "ids/.1.crc", "decisions/1", "idset/1"):
            files.write(name, b"")
        assert files.list("ids") == ["ids/.1.crc", "ids/1", "ids/3", "ids/deep/er/2"]
        assert files.names_in("ids") == [".1.crc", "1", "3", "deep"]
        assert files.names_in() == ["decisions", "ids", "idset"]
        assert files.list("nothing") == files.names_in("nothing") == []
        assert self.make_files("listed elsewhere").list() == self.make_files("listed elsewhere").names_in() == []

    def test_a_list_has_what_was_written_a_moment_ago_and_not_what_was_deleted(self) -> None:
        writer, reader = self.make_files("consistent"), self.make_files("consistent")
        for number in range(50):
            writer.write(f"decisions/{number:03d}", b"")
            if number >= 5:
                writer.delete([f"decisions/{number - 5:03d}"])
            expected = [f"{each:03d}" for each in range(max(0, number - 4), number + 1)]
            assert reader.names_in("decisions") == expected
            assert reader.list() == [f"decisions/{name}" for name in expected]

    def test_many_are_asked_for_at_once(self) -> None:
        files = self.make_files("at once")
        there = {f"generations/{each % 3:06d}/manifests/{each}": b"x" * each for each in range(1, 30)}
        for name, data in there.items():
            files.write(name, data)
        for names in ([*there], [*there][:2], []):
            asked = [*names, "generations/000001/manifests/none", "none"]
            assert files.read_all(asked) == {name: there[name] for name in names}
            assert files.sizes(asked) == {name: len(there[name]) for name in names}
        below = files.at("generations")
        assert below.sizes(["000001/manifests/1", "none"]) == {"000001/manifests/1": 1}
        assert below.read_all(["000001/manifests/1", "none"]) == {"000001/manifests/1": b"x"}

    def test_what_is_there_can_be_brought_and_is_as_it_was(self) -> None:
        files = self.make_files("brought")
        files.write("snapshots/1", b"state")
        files.bring(["snapshots/1"])
        assert files.read("snapshots/1") == b"state"
        assert not files.has_another("snapshots/none")

    def test_many_files_are_no_matter(self) -> None:
        files = self.make_files("many").at("state", durable=False)
        names = [f"0/{number % 8}/{number:05d}.changelog" for number in range(1500)]

        def write(names: list[str]) -> None:
            for name in names:
                files.write(name, b"x")

        at_once(partial(write, names[part::4]) for part in range(4))
        assert files.list() == sorted(names)
        assert len(files.names_in("0/3")) == len(files.list("0/3"))
        clear(files, "0/3")
        assert files.names_in("0") == ["0", "1", "2", "4", "5", "6", "7"]
        clear(files, "")
        assert files.list() == []

    # -- keeping and deleting ---------------------------------------------------------------------

    def test_what_is_kept_outlives_what_it_was_kept_from(self) -> None:
        files = self.make_files("kept")
        spark = files.at("stages/orders/spark")
        spark.write("commits/0", b"v1")
        spark.write("commits/1", b"v1")
        files.keep("snapshots/orders/commits/0", spark, "commits/0")
        files.keep("snapshots/orders/commits/1", spark, "commits/1")
        spark.delete(["commits/0"])
        spark.write("commits/1", b"written anew")
        assert files.read("snapshots/orders/commits/0") == b"v1"
        assert files.read("snapshots/orders/commits/1") == b"v1"
        files.sync(["snapshots/orders/commits/0", "snapshots/orders/commits/1"])
        files.delete(["snapshots/orders/commits/1"])
        assert spark.read("commits/1") == b"written anew"

    def test_what_is_kept_already_is_left_as_it_is(self) -> None:
        files = self.make_files("kept twice")
        files.write("a", b"one")
        files.write("b", b"two")
        files.keep("kept", files, "a")
        files.keep("kept", files, "b")
        assert files.read("kept") == b"one"
        files.delete(["a"])
        files.keep("kept", files, "a")
        assert files.read("kept") == b"one"

    def test_what_is_not_there_cannot_be_kept(self) -> None:
        files = self.make_files("kept in vain")
        refuses(lambda: files.keep("kept", files, "gone"))
        assert not files.exists("kept")

    def test_a_copy_shares_nothing_with_what_it_was_made_of(self) -> None:
        files = self.make_files("copied")
        files.write("a", b"one")
        files.write("copies/a", b"what was there before")
        files.copy("copies/a", files, "a")
        files.overwrite("a", b"two")
        assert (files.read("copies/a"), files.read("a")) == (b"one", b"two")
        refuses(lambda: files.copy("copies/b", files, "gone"))
        assert files.list("copies") == ["copies/a"]

    def test_what_lies_elsewhere_can_be_kept(self) -> None:
        files, elsewhere = self.make_files("kept from elsewhere"), Memory("elsewhere")
        elsewhere.write("a", b"content")
        files.keep("folder/a", elsewhere, "a")
        elsewhere.keep("b", files, "folder/a")
        assert files.read("folder/a") == elsewhere.read("b") == b"content"
        refuses(lambda: files.keep("kept", elsewhere, "gone"))
        refuses(lambda: elsewhere.keep("kept", files, "gone"))

    def test_deleting_what_is_not_there_is_no_error(self) -> None:
        files = self.make_files("deleted")
        files.write("a", b"")
        files.write("c", b"")
        files.delete(["a", "b", "folder/d", "c", "a"])
        assert files.list() == []

    def test_empty_folders_do_not_matter(self) -> None:
        files = self.make_files("empty")
        files.write("stages/orders/batch-1/k=v/a", b"")
        files.write("stages/orders/batch-2/b", b"")
        files.delete(["stages/orders/batch-1/k=v/a"])
        assert files.list("stages") == ["stages/orders/batch-2/b"]
        assert files.list("stages/orders/batch-1") == []
        files.prune("stages")
        assert files.names_in("stages/orders") == ["batch-2"], "what holds a file stays, and nothing else"
        files.prune("nothing/there")
        files.make_folder("stages/orders/gates/rows")
        files.make_folder("stages/orders/gates/rows")
        assert files.list("stages/orders/gates") == []
        files.prune("stages/orders/gates")
        files.write("stages/orders/batch-1", b"a file, where a folder was")
        files.delete(["stages/orders/batch-2/b"])
        files.write("stages/orders/batch-2/c", b"")
        assert files.list() == ["stages/orders/batch-1", "stages/orders/batch-2/c"]

    def test_folders_that_lead_to_what_was_deleted_go_and_nothing_beside_them(self) -> None:
        files = self.make_files("above")
        for name in ("kept/one/SSTs/a", "kept/one/SSTs/b", "kept/one/c", "kept/two/SSTs/a"):
            files.write(name, b"")
        files.delete(["kept/one/SSTs/a", "kept/two/SSTs/a"])
        files.prune_above(["kept/one/SSTs/a", "kept/two/SSTs/a", "kept/three/gone"], "kept")
        assert files.list() == ["kept/one/SSTs/b", "kept/one/c"]
        assert files.names_in("kept") == ["one"]
        files.delete(["kept/one/SSTs/b", "kept/one/c"])
        files.prune_above(["kept/one/SSTs/b", "kept/one/c"], "kept/one")
        assert files.names_in("kept") == []
        files.write("kept/one", b"a file, where a folder was")

    def test_folders_can_be_left_out_of_a_list(self) -> None:
        files = self.make_files("left out")
        for name in ("state/0/SSTs/a", "state/0/logs/b", "state/0/c", "state/SSTs", "SSTs/state/d"):
            files.write(name, b"")
        assert files.list("state", but=("SSTs", "logs")) == ["state/0/c", "state/SSTs"], "folders, not files"
        assert files.list("SSTs", but=("SSTs",)) == ["SSTs/state/d"], "those below it"

    # -- durable ----------------------------------------------------------------------------------

    def test_what_others_have_written_is_made_durable_if_it_is_there(self) -> None:
        files = self.make_files("synced")
        files.at("spark", durable=False).write("a", b"one")
        known = files.sync(["spark/a"])
        files.at("spark", durable=False).write("b", b"two")
        files.sync(["spark/a", "spark/b"], known)
        files.sync(["spark/a", "spark/gone"], known, missing_ok=True)
        if files.fsync:
            refuses(lambda: files.sync(["spark/gone"]))

    def test_nothing_that_is_whole_is_forgotten(self) -> None:
        files = self.make_files("unwritten")
        files.forget_unwritten()
        files.write("decisions/1", b"whole")
        self.make_files("unwritten").forget_unwritten()
        assert files.read("decisions/1") == b"whole"

    def test_files_lie_where_their_names_say(self) -> None:
        files = self.make_files("at home")
        files.write("folder/a", b"")
        assert files.strays(["folder/a", "folder/gone"]) == frozenset()


def refuses(call: Callable[[], object]) -> None:
    """As a failure of the store, in one line."""
    said = ""
    try:
        call()
    except StoreUnavailable as error:
        said = str(error)
    assert said, "it has not failed, or has not said why"
    assert "\n" not in said
