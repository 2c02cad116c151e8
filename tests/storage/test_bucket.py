"""Files in a bucket pass the tests that all files must pass, also where the store fails now and then; and what a bucket
has besides."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import random
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from tests.s3_proxy import Fault, Plan, S3Proxy
from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.storage.insisting import Insisting, insist
from tidegate.errors import BucketUnfit, NoRoot, StoreUnavailable
from tidegate.storage import bucket_access
from tidegate.storage.bucket import PART_BYTES, Bucket, BucketPlace
from tidegate.storage.bucket_access import open_bucket
from tidegate.storage.bucket_probe import probe
from tidegate.storage.files import Files, checksum
from tidegate.storage.folder import Folder
from tidegate.storage.memory import Memory
from tidegate.testing.files import ODD_NAMES, FilesConformance, at_once


@pytest.fixture(autouse=True)
def without_settings_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(bucket_access, "RETRY_S", 5)
    monkeypatch.setattr(bucket_access, "PAUSE_MS", (5, 50))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is opened from then on."""
    monkeypatch.setattr(bucket_access, "RETRY_S", 0.3)


@pytest.fixture
def url(s3_server: S3Server) -> str:
    return s3_server.make_bucket(f"tests-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def bucket(s3_server: S3Server, url: str) -> Bucket:
    return open_bucket(f"{url}/some/prefix", s3_server.options())


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def through(s3_server: S3Server, url: str, proxy: S3Proxy) -> Bucket:
    return open_bucket(f"{url}/some/prefix", s3_server.options(proxy.endpoint))


class TestBucketInMemory(FilesConformance):
    """obstore's own, which needs no server: what Tidegate makes of it is the same."""

    @pytest.fixture(autouse=True)
    def given(self) -> None:
        self.store = MemoryStore()

    def make_files(self, name: str) -> Files:
        return Bucket(self.store, BucketPlace("s3://bucket/", "s3a://bucket/"), name)


@pytest.mark.s3
class TestBucket(FilesConformance):
    @pytest.fixture(autouse=True)
    def given(self, s3_server: S3Server, url: str) -> None:
        self.server, self.url = s3_server, url

    def make_files(self, name: str) -> Files:
        return open_bucket(f"{self.url}/{name}", self.server.options())


NOW_AND_THEN = {
    Fault.CONFLICT: 0.01,
    Fault.ERROR: 0.01,
    Fault.BUSY: 0.01,
    Fault.DONE_BUT_ERROR: 0.02,
    Fault.DONE_BUT_CUT: 0.02,
    Fault.CUT: 0.01,
    Fault.CUT_IN_BODY: 0.02,
    Fault.SLOW: 0.01,
}


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
class TestBucketThatFailsNowAndThen(FilesConformance):
    @pytest.fixture(autouse=True)
    def given(self, s3_server: S3Server, url: str, proxy: S3Proxy) -> Iterator[None]:
        self.url, self.options = url, s3_server.options(proxy.endpoint)
        self.proxy = proxy
        proxy.plan = Plan(seed=1, faults=NOW_AND_THEN)
        yield
        proxy.plan = None

    def make_files(self, name: str) -> Files:
        return Insisting(open_bucket(f"{self.url}/{name}", self.options))

    def test_a_reader_sees_all_of_one_version(self) -> None:
        """No body is cut here. A client goes on where one was, if the ETag is still the same; and versitygw, which
        keeps ETags beside the files, tells that of the next version with the content of the one before, where it is
        overwritten all the time (seen with a quarter of all reads, of this server alone)."""
        self.proxy.plan = Plan(
            seed=1, faults={each: NOW_AND_THEN[each] for each in NOW_AND_THEN if each is not Fault.CUT_IN_BODY}
        )
        super().test_a_reader_sees_all_of_one_version()


# -- creating where the store fails ---------------------------------------------------------------------


@pytest.mark.s3
@pytest.mark.parametrize("fault", [Fault.DONE_BUT_ERROR, Fault.DONE_BUT_CUT])
def test_a_create_that_is_made_again_meets_itself(through: Bucket, proxy: S3Proxy, fault: Fault) -> None:
    """So is what `False` means: nothing, until it is read back."""
    proxy.plan = Plan(seed=1, faults={fault: 1}, at_most=1)
    created = through.create("decisions/1", b"mine")
    assert proxy.plan.happened[fault] == 1
    assert created is False
    assert through.read("decisions/1") == b"mine"


@pytest.mark.s3
def test_a_conflict_is_a_create_that_may_have_failed_for_all(through: Bucket, proxy: S3Proxy) -> None:
    proxy.plan = Plan(seed=1, faults={Fault.CONFLICT: 1}, at_most=1)
    assert through.create("decisions/1", b"mine") is False
    assert through.read("decisions/1") is None
    assert through.create("decisions/1", b"mine") is True


@pytest.mark.s3
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.BUSY, Fault.CUT, Fault.DONE_BUT_CUT])
def test_what_always_fails_is_an_unavailable_store_and_says_why(through: Bucket, proxy: S3Proxy, fault: Fault) -> None:
    through.write("there", b"content")
    proxy.plan = Plan(seed=1, faults={fault: 1})
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: through.write("a", b"content"),
        "read": lambda: through.read("there"),
        "list": through.list,
        "delete": lambda: through.delete(["there"]),
        "copy": lambda: through.copy("b", through, "there"),
    }
    for doing, call in calls.items():
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=rf"could not {doing} s3://tests-\w+/some/prefix") as failed:
            call()
        assert time.monotonic() - started < 10
        assert "\n" not in str(failed.value)
        assert failed.value.retry_helps


@pytest.mark.s3
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(3))
def test_of_many_that_claim_one_name_of_a_store_that_fails_one_reads_itself_back(
    s3_server: S3Server, url: str, proxy: S3Proxy, seed: int
) -> None:
    racers = [open_bucket(url, s3_server.options(proxy.endpoint)) for _ in range(8)]
    proxy.plan = Plan(seed, {fault: 3 * chance for fault, chance in NOW_AND_THEN.items()})

    def claim(racer: Bucket, name: str, mine: bytes) -> bool | None:
        try:
            return racer.create(name, mine)
        except StoreUnavailable:
            return None

    for number in range(20):
        name = f"decisions/{number}"
        claims = [f"racer {each}".encode() for each in range(8)]
        told = at_once(partial(claim, racer, name, mine) for racer, mine in zip(racers, claims, strict=True))
        found = {insist(partial(racer.read, name)) for racer in racers}
        assert len(found) == 1, "all read the same"
        (claimed,) = found
        winners = [mine for mine, won in zip(claims, told, strict=True) if won]
        assert winners in ([], [claimed]), "who was told that it has created it has"
        if claimed is None:
            assert not any(told)
    assert proxy.plan.happened.total() > 20


class History:
    """What may be there of each name: of what failed, both."""

    def __init__(self, files: Bucket, names: list[str], seed: int) -> None:
        self.files = files
        self.chance = random.Random(seed)
        self.may_be: dict[str, set[bytes | None]] = {name: {None} for name in names}
        self.acts = [self.write, self.create, self.delete, self.copy, self.read, self.list]

    def go_on(self, step: int) -> None:
        name, other = self.chance.sample([*self.may_be], 2)
        with suppress(StoreUnavailable):
            self.chance.choice(self.acts)(name, other, f"{step}".encode() * self.chance.choice([1, 1000]))

    def write(self, name: str, _: str, data: bytes) -> None:
        self.may_be[name] |= {data}
        self.files.write(name, data)
        self.may_be[name] = {data}

    def create(self, name: str, _: str, data: bytes) -> None:
        may_be_new = None in self.may_be[name]
        self.may_be[name] |= {data} if may_be_new else set()
        if self.files.create(name, data):
            assert may_be_new
            self.may_be[name] = {data}

    def delete(self, name: str, _: str, __: bytes) -> None:
        self.may_be[name] |= {None}
        self.files.delete([name])
        self.may_be[name] = {None}

    def copy(self, name: str, source: str, _: bytes) -> None:
        self.may_be[name] |= self.may_be[source] - {None}
        self.files.copy(name, self.files, source)
        self.may_be[source] -= {None}
        self.may_be[name] = self.may_be[source].copy()
        found = insist(partial(self.files.read, source))  # of what it may have been, both are the same
        assert found in self.may_be[source]
        self.may_be[source], self.may_be[name] = {found}, {found}

    def read(self, name: str, _: str, __: bytes) -> None:
        found = self.files.read(name)
        assert found in self.may_be[name]
        self.may_be[name] = {found}

    def list(self, _: str, __: str, ___: bytes) -> None:
        listed = self.files.list()
        for name, may_be in self.may_be.items():
            assert (name in listed) in {found is not None for found in may_be}


@pytest.mark.s3
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(4))
def test_after_any_faults_what_was_acknowledged_is_read(through: Bucket, proxy: S3Proxy, seed: int) -> None:
    """What failed may have been done, or not; what was acknowledged has been."""
    proxy.plan = Plan(seed, {fault: 2 * chance for fault, chance in NOW_AND_THEN.items()})
    history = History(through, [f"folder/{number}" for number in range(4)], seed)
    for step in range(150):
        history.go_on(step)
    assert proxy.plan.happened.total() > 10
    proxy.plan = None
    for name in history.may_be:
        history.read(name, "", b"")


@pytest.mark.s3
@pytest.mark.usefixtures("impatient")
def test_a_body_that_is_cut_is_never_taken_for_the_whole(through: Bucket, proxy: S3Proxy) -> None:
    data = os.urandom(3_000_000)
    through.write("a", data)
    proxy.plan = Plan(seed=1, faults={Fault.CUT_IN_BODY: 0.5}, methods=frozenset({"GET"}))
    read = 0
    for _ in range(10):
        with suppress(StoreUnavailable):
            assert through.read("a") == data
            read += 1
        with suppress(StoreUnavailable):
            assert checksum(through, "a") == (len(data), hashlib.sha256(data).hexdigest())
    assert proxy.plan.happened.total()
    assert read


# -- whether it is fit ------------------------------------------------------------------------------------


@pytest.mark.s3
def test_a_bucket_that_creates_once_is_fit_and_keeps_nothing_of_the_probe(bucket: Bucket) -> None:
    bucket.write("pipeline.json", b"")
    probe(bucket)
    assert bucket.list() == ["pipeline.json"]


@pytest.mark.s3
def test_a_bucket_that_loses_answers_is_fit(through: Bucket, proxy: S3Proxy) -> None:
    for seed in range(5):
        proxy.plan = Plan(seed, {Fault.DONE_BUT_ERROR: 0.2, Fault.CONFLICT: 0.1}, methods=frozenset({"PUT"}))
        probe(through)
    proxy.plan = None
    assert through.list() == []


class HeedsNoCondition(Memory):
    def create(self, name: str, data: bytes) -> bool:
        self.write(name, data)
        return True


class RefusesAndWrites(Memory):
    def create(self, name: str, data: bytes) -> bool:
        is_new = super().create(name, data)
        self.write(name, data)
        return is_new


class LooksFirst(Memory):
    def create(self, name: str, data: bytes) -> bool:
        if self.exists(name):
            return False
        time.sleep(0.01)
        self.write(name, data)
        return True


@pytest.mark.parametrize(
    ("unfit", "why"),
    [
        (HeedsNoCondition, "it created an object that was there already"),
        (RefusesAndWrites, "wrote it all the same"),
        (LooksFirst, r"of 8 that created one object at the same time, \d were told that they had"),
    ],
)
def test_a_store_whose_create_is_not_atomic_is_refused(unfit: type[Memory], why: str) -> None:
    files = unfit()
    with pytest.raises(BucketUnfit, match=rf"memory://root cannot hold a root: .*{why}") as refused:
        probe(files)
    assert isinstance(refused.value, NoRoot)
    assert not refused.value.retry_helps
    assert files.list() == []


# -- what is said -------------------------------------------------------------------------------------------


@pytest.mark.s3
def test_what_is_wrong_with_the_access_is_said_with_what_to_do_and_without_secrets(
    s3_server: S3Server, url: str
) -> None:
    if s3_server.is_moto:
        pytest.skip("moto checks no credentials")
    nowhere = "s3://nobody-made-this"
    wrong: list[tuple[str, dict[str, str], str]] = [
        (nowhere, {}, r"\(NoSuchBucket\); make the bucket, or correct its name"),
        (url, {"secret_access_key": "another-secret-key"}, r"\(SignatureDoesNotMatch\); see whether the credentials"),
        (url, {"access_key_id": "another-access-key"}, "see whether the credentials are right"),
        (url, {"session_token": "a-token-that-is-none"}, r"\(InvalidToken\); see whether the credentials"),
        (url, {"region": "eu-west-1"}, r"expecting \"us-east-1\" .*; set AWS_REGION"),
    ]
    for at, options, why in wrong:
        files = open_bucket(f"{at}/root", s3_server.options() | options)
        for call in (
            lambda files=files: files.read("a"),
            lambda files=files: files.write("a", b""),
            lambda files=files: files.create("a", b""),
            lambda files=files: files.list(),
            lambda files=files: files.names_in(),
            lambda files=files: files.delete(["a"]),
            lambda files=files: files.open("a"),
            lambda files=files: probe(files),
        ):
            with pytest.raises(StoreUnavailable, match=why) as failed:
                call()
            said = "".join(traceback.format_exception(failed.value)) + repr(files) + str(failed.value)
            secrets = {SECRET_KEY, *(value for key, value in options.items() if key != "region")}
            assert not [secret for secret in secrets if secret in said]
            assert "AWS4-HMAC" not in said
            assert "Signature" not in said.replace("SignatureDoesNotMatch", "")


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_told_of_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with what is waited in earnest
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"endpoint": f"http://127.0.0.1:{port}", "access_key_id": "an-id", "secret_access_key": "a-secret"}
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"could not read s3://bucket/a: it cannot be reached at http://127\.0"):
        open_bucket("s3://bucket", options).read("a")
    assert 5 < time.monotonic() - started < bucket_access.RETRY_S + 5


@pytest.mark.usefixtures("impatient")
def test_a_store_that_stands_still_is_told_of_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_access, "ANSWER_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {
            "endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "access_key_id": "i",
            "secret_access_key": "s",
        }
        files = open_bucket("s3://bucket", options)
        for call in (lambda: files.read("a"), lambda: files.write("a", b""), lambda: files.create("a", b"")):
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match="it did not answer in time"):
                call()
            assert time.monotonic() - started < 5


@pytest.mark.s3
def test_a_store_that_is_started_anew_is_waited_for(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_access, "RETRY_S", 20)
    if s3_server.is_moto:
        pytest.skip("moto forgets all when it is stopped")
    server = S3Server(s3_server.program)
    try:
        files = open_bucket(server.make_bucket("restarted"), server.options())
        files.write("a", b"content")
        server.stop()
        starting = threading.Timer(0.5, server.start)
        starting.start()
        assert files.read("a") == b"content"
        starting.join()
        server.stop()
        starting = threading.Timer(0.5, server.start)
        starting.start()
        files.write("b", b"content")
        starting.join()
        assert files.list() == ["a", "b"]
    finally:
        server.remove()


@pytest.mark.usefixtures("impatient")
def test_a_host_that_there_is_none_of_is_said() -> None:
    """Where nobody answers for names at all, it is only late."""
    options = {"endpoint": "http://nowhere.invalid", "access_key_id": "an-id", "secret_access_key": "a-secret"}
    with pytest.raises(StoreUnavailable, match=r"(no such host|in time) at http://nowhere\.invalid; see whether"):
        open_bucket("s3://bucket", options).read("a")


@pytest.mark.usefixtures("impatient")
def test_that_there_are_no_credentials_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(StoreUnavailable, match="no credentials were found; for S3 set AWS_ACCESS_KEY_ID"):
        open_bucket("s3://bucket", {"metadata_endpoint": f"http://127.0.0.1:{port}"}).read("a")


# -- where they are -------------------------------------------------------------------------------------------


@pytest.mark.s3
def test_roots_in_one_bucket_do_not_see_each_other(s3_server: S3Server, url: str) -> None:
    one, two, inner = (open_bucket(f"{url}/{prefix}", s3_server.options()) for prefix in ("root", "root2", "root/in"))
    for files in (one, two, inner):
        files.write("a", files.location().encode())
    assert one.list() == ["a", "in/a"]
    assert two.list() == inner.list() == ["a"]
    assert one.names_in() == ["a", "in"]
    assert inner.read("a") == one.read("in/a")
    assert two.name_at(one.location("a")) is None
    assert open_bucket(url, s3_server.options()).list() == ["root/a", "root/in/a", "root2/a"]
    one.delete(one.list())
    assert two.list() == ["a"]


def test_spark_names_an_object_as_hadoop_writes_it() -> None:
    files = Bucket(MemoryStore(), BucketPlace("s3://bucket/", "s3a://bucket/", ("s3n://bucket/",)), "some/root")
    assert files.location("k=v/a b") == "s3://bucket/some/root/k=v/a b"
    assert files.uri("k=v/a b+c%41") == "s3a://bucket/some/root/k=v/a%20b+c%2541"
    assert files.name_of("s3a://bucket/some/root/gr%C3%B6%C3%9Fe") == "größe"
    assert files.name_of("s3a://bucket/some/root/größe") == "größe", "Java leaves such letters as they are"
    assert files.name_of("s3n://bucket/some/root/a") == files.name_at("s3a://bucket/some/root/a") == "a"
    assert files.name_of("s3a://bucket2/some/root/a") is None
    assert files.name_of("file:/bucket/some/root/a") is None
    assert repr(files) == "Bucket('s3://bucket/some/root')"


@pytest.mark.s3
def test_an_object_has_the_key_that_its_name_says(s3_server: S3Server, url: str, bucket: Bucket) -> None:
    """Letter for letter: Spark has to find it by another client."""
    for name in ODD_NAMES:
        bucket.write(name, name.encode())
    others = _pyarrow(s3_server)
    top = f"{url.removeprefix('s3://')}/some/prefix/"
    for name in ODD_NAMES:
        with others.open_input_file(top + name) as file:
            assert file.read() == name.encode()


@pytest.mark.s3
def test_folders_that_others_have_made_objects_for_are_no_files(s3_server: S3Server, url: str, bucket: Bucket) -> None:
    others = _pyarrow(s3_server)
    top = f"{url.removeprefix('s3://')}/some/prefix"
    for folder in ("state/0/empty", "state/full", "state/1"):
        others.create_dir(f"{top}/{folder}")
    bucket.write("state/full/a", b"x")
    bucket.write("state/0/nothing in it", b"")
    assert bucket.list() == ["state/0/nothing in it", "state/full/a"]
    assert bucket.list("state/full") == ["state/full/a"]
    assert bucket.list("state/0/empty") == []
    assert bucket.names_in("state") == ["0", "1", "full"]
    assert bucket.names_in("state/0") == ["empty", "nothing in it"]
    assert bucket.names_in("state/0/empty") == []
    assert bucket.read("state/1") is None


def _pyarrow(server: S3Server) -> Any:
    return importlib.import_module("pyarrow.fs").S3FileSystem(
        access_key=ACCESS_KEY, secret_key=SECRET_KEY, endpoint_override=server.endpoint, region="us-east-1"
    )


# -- large and many ---------------------------------------------------------------------------------------------


@pytest.mark.s3
def test_a_large_file_goes_in_parts(s3_server: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 17 + b"the end"
    folder = Folder(tmp_path / "folder", fsync=False)
    folder.write("large", data)
    bucket.copy("from a folder", folder, "large")
    bucket.write("from memory", data)
    before = bucket.requests
    bucket.copy("from itself", bucket, "from memory")
    assert bucket.requests - before == {"copy": 1}
    elsewhere = Memory()
    elsewhere.write("large", data)
    bucket.copy("from elsewhere", elsewhere, "large")
    expected = (len(data), hashlib.sha256(data).hexdigest())
    for name in bucket.list():
        assert checksum(bucket, name) == expected, name
    assert len(bucket.list()) == 4
    again = open_bucket(bucket.location(), s3_server.options())
    again.copy("from another handle", bucket, "from memory")
    assert again.requests == {"copy": 1}, "it is the same bucket"
    other = open_bucket(f"{s3_server.make_bucket('another-bucket')}/root", s3_server.options())
    other.copy("from another bucket", bucket, "from memory")
    assert checksum(other, "from another bucket") == expected
    assert bucket.fetch("from a folder", tmp_path / "fetched") == len(data)
    assert (tmp_path / "fetched").read_bytes() == data


def test_what_is_too_large_to_be_copied_by_the_store_is_copied_through_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = Bucket(MemoryStore(), BucketPlace("s3://bucket/", "s3a://bucket/"), "root")
    files.write("a", b"content")

    def copy(*_: object) -> None:
        said = "The specified copy source is larger than the maximum allowable size for a copy source: 5368709120"
        raise GenericError(f"<Error><Code>InvalidRequest</Code><Message>{said}</Message></Error>")

    monkeypatch.setattr(obstore, "copy", copy)
    files.copy("b", files, "a")
    assert files.read("b") == b"content"


@pytest.mark.s3
def test_parts_of_one_version_are_read_or_none(bucket: Bucket) -> None:
    bucket.write("a", b"1" * (3 << 20))
    opened = bucket.open("a")
    assert opened is not None
    with opened as file:
        assert file.read(10) == b"1" * 10
        bucket.write("a", b"2" * (3 << 20))
        file.seek(-10, 2)
        with pytest.raises(OSError, match=r"could not read s3://.*: it was written anew while it was read"):
            file.read()
    opened = bucket.open("a")
    assert opened is not None
    bucket.delete(["a"])
    with opened as file, pytest.raises(OSError, match="it was deleted while it was read"):
        file.read()


@pytest.mark.s3
@pytest.mark.usefixtures("impatient")
def test_what_fails_while_it_is_read_is_an_os_error(through: Bucket, proxy: S3Proxy) -> None:
    through.write("a", b"1" * (3 << 20))
    opened = through.open("a")
    assert opened is not None
    proxy.plan = Plan(seed=1, faults={Fault.BUSY: 1})
    with opened as file, pytest.raises(OSError, match=r"could not read s3://.*/a: .*\(SlowDown\)"):
        file.read()


class BreaksOff(Memory):
    """Of which half can be read."""

    def open(self, name: str) -> io.BufferedIOBase | None:
        class Broken(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                if self.tell() >= PART_BYTES:
                    raise OSError("Input/output error")
                return super().read(size)

        return Broken(self.read(name) or b"")


@pytest.mark.s3
def test_an_upload_that_breaks_off_leaves_nothing_under_its_name(bucket: Bucket) -> None:
    source = BreaksOff()
    source.write("a", b"x" * (3 * PART_BYTES))
    with pytest.raises(StoreUnavailable, match=r"could not copy s3://.*/b: "):
        bucket.copy("b", source, "a")
    assert bucket.list() == []


@pytest.mark.s3
def test_requests_are_counted(s3_server: S3Server, url: str, proxy: S3Proxy, tmp_path: Path) -> None:
    files = open_bucket(f"{url}/root", s3_server.options(proxy.endpoint))
    below = files.at("state")
    for number in range(1100):
        below.write(f"{number:04d}", b"x")
    (tmp_path / "large").write_bytes(b"x" * (2 * PART_BYTES + 1))
    below.send("large", tmp_path / "large")
    below.list()
    files.names_in("state")
    files.read("state/0001")
    files.read("state/gone")
    files.exists("state/0001")
    files.keep("kept", below, "0001")
    assert files.create("kept", b"") is False
    files.delete(below.list())
    counted = files.requests
    assert counted == {"put": 1100 + 1 + 5, "list": 6, "get": 2, "head": 2, "copy": 1, "delete": 2}
    sent = proxy.counts
    assert sent.total() == counted.total()
    assert sent["HEAD"] == counted["head"]
    assert sent["GET"] == counted["get"] + counted["list"]


@pytest.mark.s3
def test_nothing_is_asked_where_there_is_nothing_to_ask(bucket: Bucket) -> None:
    bucket.delete([])
    bucket.make_folder("a")
    bucket.prune("a")
    bucket.prune_above(["a/b"], "a")
    bucket.forget_unwritten()
    bucket.strays(["a"])
    bucket.sync(["a", "b"], missing_ok=True)
    bucket.sync(["a"], {"a"})
    assert not bucket.requests
