"""Where a bucket is, and whose credentials are used."""

from __future__ import annotations

import os
import traceback
import uuid
from pathlib import Path

import pytest

from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tidegate.errors import InvalidConfig, StoreUnavailable
from tidegate.storage import bucket_access
from tidegate.storage.bucket_access import credentials_of, open_bucket
from tidegate.storage.user_paths import is_bucket_url


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [*os.environ]:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(bucket_access, "RETRY_S", 0.5)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".aws").mkdir(parents=True)
    return tmp_path / "home"


@pytest.fixture
def url(s3_server: S3Server) -> str:
    return s3_server.make_bucket(f"tests-{uuid.uuid4().hex[:12]}")


def test_each_kind_has_its_url() -> None:
    azure = {"account_name": "account", "account_key": "c29tZSBrZXk="}
    opened = {
        url: open_bucket(url, azure if url.startswith("az") else None)
        for url in (
            "s3://bucket/a/root",
            "s3a://bucket/a/root/",
            "gs://bucket/a/root",
            "az://container/a/root",
            "abfss://container@account.dfs.core.windows.net/a/root",
        )
    }
    assert [files.location() for files in opened.values()] == [
        "s3://bucket/a/root",
        "s3://bucket/a/root",
        "gs://bucket/a/root",
        "az://container/a/root",
        "az://container/a/root",
    ]
    assert [files.uri("a b") for files in opened.values()] == [
        "s3a://bucket/a/root/a%20b",
        "s3a://bucket/a/root/a%20b",
        "gs://bucket/a/root/a%20b",
        "abfss://container@account.dfs.core.windows.net/a/root/a%20b",
        "abfss://container@account.dfs.core.windows.net/a/root/a%20b",
    ]
    for url, files in opened.items():
        assert is_bucket_url(url)
        assert files.name_at(f"{url.rstrip('/')}/a") == files.name_of(files.uri("a")) == "a"
    assert not is_bucket_url("/var/lib/root")
    assert not is_bucket_url("s3")
    assert not is_bucket_url("file:///root")


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("http://bucket/a", {}, "is not the URL of a bucket: that starts with one of s3://"),
        ("s3://", {}, "is not the URL of a bucket"),
        ("s3://some-id:some-secret@bucket/a", {}, "s3://bucket/a: credentials are given as options, not in a URL"),
        ("s3://bucket/a//b", {}, "no part of a bucket's prefix may be empty"),
        ("s3://bucket/a/../b", {}, "no part of a bucket's prefix may be empty"),
        ("s3://bucket/a", {"nonsense": "some-secret"}, "s3://bucket/ cannot be opened: .*nonsense"),
        ("s3://bucket/a", {"secret_access_key": "some-secret"}, "s3://bucket/ cannot be opened: .*AccessKeyId"),
        ("s3://bucket/a", {"profile": "nobody"}, "no profile 'nobody' is in "),
        ("az://container/a", {}, "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("gs://bucket/a", {"service_account_key": '{"private_key": "some-secret'}, "gs://bucket/ cannot be opened"),
        ("az://container/a", {"account_name": "a", "account_key": "some-secret!"}, "az://container/ cannot be opened"),
    ],
)
def test_what_cannot_be_is_said_without_secrets(url: str, options: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidConfig, match=why) as refused:
        open_bucket(url, options)
    assert "some-secret" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.s3
def test_what_no_option_says_is_taken_from_the_environment(
    s3_server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in s3_server.options().items():
        monkeypatch.setenv(f"AWS_{key.upper()}", value)
    files = open_bucket(f"{url}/root")
    files.write("a", b"content")
    assert files.read("a") == b"content"
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable, match="it cannot be reached"):
        open_bucket(url).read("a")
    assert open_bucket(f"{url}/root", {"AWS_ENDPOINT": s3_server.endpoint}).read("a") == b"content"


PROFILES = f"""
[default]
aws_access_key_id = of-nobody
aws_secret_access_key = a-secret-of-nobody

[tester]
aws_access_key_id = {ACCESS_KEY}
aws_secret_access_key = {SECRET_KEY}
"""


@pytest.mark.s3
def test_a_profile_of_the_usual_files_is_used(
    s3_server: S3Server, url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".aws" / "credentials").write_text(PROFILES, encoding="utf-8")
    (home / ".aws" / "config").write_text(
        f"[profile tester]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint}\n", encoding="utf-8"
    )
    with pytest.raises(StoreUnavailable):
        open_bucket(url, {"endpoint": s3_server.endpoint}).write("a", b"")
    open_bucket(url, {"profile": "tester"}).write("a", b"by an option")
    monkeypatch.setenv("AWS_PROFILE", "tester")
    assert open_bucket(url).read("a") == b"by an option"
    elsewhere = home / "elsewhere"
    (home / ".aws" / "credentials").rename(elsewhere)
    with pytest.raises(StoreUnavailable, match="no credentials were found"):
        open_bucket(url, {"metadata_endpoint": "http://127.0.0.1:9"}).read("a")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "~/elsewhere")
    assert open_bucket(url).read("a") == b"by an option"


@pytest.mark.s3
def test_keys_in_the_environment_go_before_a_profile(
    s3_server: S3Server, url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".aws" / "credentials").write_text(PROFILES, encoding="utf-8")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    open_bucket(url, {"endpoint": s3_server.endpoint}).write("a", b"")


@pytest.mark.s3
def test_credentials_that_somebody_renews_in_their_file_are_read_again(
    s3_server: S3Server, url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_access, "_REREAD_S", 0)
    (home / ".aws" / "credentials").write_text(PROFILES, encoding="utf-8")
    files = open_bucket(url, {"endpoint": s3_server.endpoint, "profile": "tester"})
    files.write("a", b"")
    wrong = PROFILES.replace(SECRET_KEY, "a-secret-that-was-renewed")
    (home / ".aws" / "credentials").write_text(wrong, encoding="utf-8")
    with pytest.raises(StoreUnavailable, match="see whether the credentials are right") as failed:
        files.read("a")
    assert "a-secret-that" not in "".join(traceback.format_exception(failed.value))
    (home / ".aws" / "credentials").write_text("[tester]\n", encoding="utf-8")
    with pytest.raises(StoreUnavailable, match="the credentials of profile 'tester' are gone") as failed:
        files.read("a")
    assert "a-secret-that" not in "".join(traceback.format_exception(failed.value))
    (home / ".aws" / "credentials").write_text(PROFILES, encoding="utf-8")
    assert files.read("a") == b""


def test_a_profile_that_is_followed_elsewhere_is_refused_with_what_to_do(home: Path) -> None:
    (home / ".aws" / "config").write_text("[profile work]\nsso_session = us\nregion = eu-west-1\n", encoding="utf-8")
    with pytest.raises(InvalidConfig, match=r"by sso_session, which Tidegate does not follow; .*export-credentials"):
        open_bucket("s3://bucket", {"profile": "work"})


def test_a_file_that_cannot_be_read_is_said_without_its_lines(home: Path) -> None:
    (home / ".aws" / "credentials").write_text("[default]\nsome-secret\n", encoding="utf-8")
    with pytest.raises(InvalidConfig, match=r"\.aws/credentials cannot be read: ") as refused:
        open_bucket("s3://bucket")
    assert "some-secret" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("name", ["session_token", "token", "AWS_SESSION_TOKEN", "aws_token"])
def test_a_token_is_known_by_every_name_that_obstore_has_for_it(name: str) -> None:
    options = {"access_key_id": "key", "secret_access_key": "secret", name: "for a while"}
    assert credentials_of(options) == ("key", "secret", "for a while")
    open_bucket("s3://bucket/root", options)
