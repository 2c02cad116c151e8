"""Who may ask the dashboard for what: names, origins, tokens, methods, paths."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
from base64 import b64encode
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.harness import ended_checkpoint, make_root
from tests.dashboard.harness import BEARER, TOKEN, Client, note, served
from tidegate.dashboard import server
from tidegate.dashboard.guard import is_loopback
from tidegate.dashboard.page import PageFile, page_files
from tidegate.dashboard.routes import ROUTES
from tidegate.dashboard.server import Dashboard
from tidegate.dashboard.token import VARIABLE, token_in
from tidegate.engine.events import CheckpointEnded, Failed
from tidegate.errors import InvalidConfig
from tidegate.scrubbing import json_without_secrets
from tidegate.storage.places import as_given

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "BREW")
PAGE = {
    "index.html": PageFile(b"<!doctype html>the page", "text/html; charset=utf-8", '"1"'),
    "app.js": PageFile(b"start()", "text/javascript; charset=utf-8", '"2"'),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("made"), checkpoints=2)


@pytest.fixture(scope="module")
def client(made: Path) -> Iterator[Client]:
    with patch.object(server, "page_files", lambda: PAGE), served(made) as found:
        yield found


@pytest.fixture(scope="module")
def acting(made: Path) -> Iterator[Client]:
    with served(made, allow_actions=True) as found:
        yield found


@pytest.fixture(scope="module")
def open_to_all(made: Path) -> Iterator[Client]:
    """Off loopback."""
    with patch.object(server, "page_files", lambda: PAGE), served(made, host="0.0.0.0", allow_actions=True) as found:
        yield found


def addresses(key: str) -> dict[str, set[str]]:
    """Every address, with the methods that do something there."""
    parts = {"{key}": key, "{name}": "ckpt-000001", "{a}": "ckpt-000001", "{b}": "ckpt-000002"}
    found = {}
    for route in ROUTES:
        path = route.path
        for part, value in parts.items():
            path = path.replace(part, value)
        found[path] = {"GET", "HEAD"}
    for path in ("/", "/static/app.js", "/metrics", "/api/v1/openapi.json"):
        found[path] = {"GET", "HEAD"}
    for path in ("/api/v1/live", f"/api/v1/pipelines/{key}/live"):
        found[path] = {"HEAD"}  # and GET, which does not end: tests/dashboard/test_live.py
    found[f"/api/v1/pipelines/{key}/actions/checkpoint"] = {"POST"}
    return found


def test_every_method_does_something_where_it_should_and_nothing_elsewhere(client: Client) -> None:
    for path, allowed in addresses(client.key).items():
        for method in METHODS:
            if method == "GET" and path.endswith("/live"):
                continue
            found = client.ask(method, path)
            if method in allowed:
                assert found.code == (403 if method == "POST" else 200), (method, path)
            else:
                assert found.code == 405, (method, path)
                assert found.headers["allow"]
            check_headers(found.headers)


def check_headers(headers: object) -> None:
    found = dict(headers)  # type: ignore[call-overload]
    assert "default-src 'self'" in found["content-security-policy"]
    assert "unsafe" not in found["content-security-policy"]
    assert "frame-ancestors 'none'" in found["content-security-policy"]
    assert found["x-content-type-options"] == "nosniff"
    assert found["x-frame-options"] == "DENY"
    assert found["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in found
    assert not [name for name in found if name.startswith("access-control")]
    assert "server" not in found


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost.evil.example:{port}",
        "",
        "[::1",
        "a b",
        "127.0.0.1:{port}@evil.example",
        "1.2.3.4:{port}",
    ],
)
def test_a_foreign_host_is_refused_by_every_method_everywhere(client: Client, host: str) -> None:
    given = {"Host": host.format(port=client.board.port)}
    for path in addresses(client.key):
        for method in ("GET", "HEAD", "POST", "OPTIONS"):
            found = client.ask(method, path, given)
            assert found.code in (400, 421), (method, path)  # the server itself refuses what is no header
            if found.code == 421:
                check_headers(found.headers)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_it_is_known_by_the_names_of_loopback(client: Client, name: str) -> None:
    assert client.get("/api/v1/pipelines", {"Host": f"{name}:{client.board.port}"}).code == 200


def test_two_hosts_are_refused(client: Client) -> None:
    port = client.board.port
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        raw.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nHost: evil\r\nConnection: close\r\n\r\n".encode())
        assert raw.makefile("rb").readline().split()[1] in (b"400", b"421")


PROXIED = {"Host": "Board.example"}


@pytest.fixture(scope="module")
def proxied(made: Path) -> Iterator[Client]:
    """On loopback, and reached through a proxy by another name."""
    places = [as_given(made)]
    with (
        patch.object(server, "page_files", lambda: PAGE),
        Dashboard(places, port=0, token=TOKEN, more_hosts=["board.example"]) as board,
    ):
        yield Client(board)


def test_another_name_can_be_allowed(proxied: Client) -> None:
    assert proxied.get("/api/v1/pipelines", {**PROXIED, **BEARER}).code == 200
    assert proxied.get("/api/v1/pipelines", {"Host": "board.example:443", **BEARER}).code == 200
    assert proxied.get("/", {**PROXIED, **basic(TOKEN.secret)}).code == 200
    for host in ("evil.example", f"{socket.gethostname()}:{proxied.board.port}", f"10.0.0.1:{proxied.board.port}"):
        assert proxied.get("/api/v1/pipelines", {"Host": host, **BEARER}).code == 421


@pytest.mark.parametrize("host", ["board.example", "127.0.0.1:{port}", "localhost:{port}"])
def test_where_a_proxy_stands_before_it_everything_needs_the_token(proxied: Client, host: str) -> None:
    """Whatever name is asked for: who reaches the proxy can name any, and all come from this machine."""
    given = {"Host": host.format(port=proxied.board.port)}
    for path in (*addresses(proxied.key), "/nothing"):
        for method in METHODS:
            found = proxied.ask(method, path, given)
            assert found.code == 401, (method, path)
            assert b"flat" not in found.data


def test_where_a_proxy_stands_before_it_nobody_gets_in_without_any_token(made: Path) -> None:
    with pytest.raises(InvalidConfig, match="without a token"):
        Dashboard([as_given(made)], port=0, more_hosts=["board.example"])


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost", "file://"]
)
def test_a_foreign_origin_is_refused_with_the_token_too(acting: Client, origin: str) -> None:
    for method, path in (("GET", acting.one), ("POST", f"{acting.one}/actions/checkpoint")):
        assert acting.ask(method, path, {"Origin": origin, **BEARER}).code == 403


def test_our_own_origin_is_none_of_others(acting: Client) -> None:
    assert acting.get(acting.one, {"Origin": f"http://127.0.0.1:{acting.board.port}"}).code == 200


# -- the token --------------------------------------------------------------------------------------

WRONG: tuple[dict[str, str], ...] = (
    {},
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer wrong"},
    {"Authorization": TOKEN.secret.decode()},
    {"Authorization": f"Bearer {TOKEN.secret.decode()[:-1]}"},
    {"Authorization": f"Bearer {TOKEN.secret.decode()}x"},
    {"Authorization": "Bearer \xff\xfe"},
    {"Authorization": f"Digest {TOKEN.secret.decode()}"},
    {"Cookie": f"token={TOKEN.secret.decode()}"},
    {"X-Token": TOKEN.secret.decode()},
)


def basic(secret: bytes) -> dict[str, str]:
    return {"Authorization": f"Basic {b64encode(b'me:' + secret).decode()}"}


@pytest.mark.parametrize("given", [*WRONG, basic(TOKEN.secret)], ids=str)
def test_an_action_without_the_token_is_refused_and_not_done(acting: Client, given: dict[str, str]) -> None:
    for action in ("checkpoint", "savepoint", "cancel", "stop"):
        found = acting.ask("POST", f"{acting.one}/actions/{action}", given)
        assert found.code == 401
        assert found.value["error"]
    assert acting.ask("POST", f"{acting.one}/actions/stop?token={TOKEN.secret.decode()}", given).code == 401


def test_an_action_with_the_token_is_heard_but_not_where_actions_are_not_allowed(
    acting: Client, client: Client
) -> None:
    heard = acting.ask("POST", f"{acting.one}/actions/checkpoint", BEARER)
    assert (heard.code, heard.value["done"]) == (200, False)  # no run is alive
    assert client.ask("POST", f"{client.one}/actions/checkpoint", BEARER).code == 403
    assert acting.ask("POST", f"{acting.one}/actions/restore", BEARER).code == 404
    assert acting.ask("POST", "/api/v1/pipelines/000000000000/actions/stop", BEARER).code == 404


@pytest.mark.parametrize("given", [*WRONG, basic(b"wrong"), {"Authorization": "Basic %%%"}], ids=str)
def test_off_loopback_everything_needs_the_token(open_to_all: Client, given: dict[str, str]) -> None:
    for path in (*addresses(open_to_all.key), "/nothing"):
        for method in METHODS:
            found = open_to_all.ask(method, path, given)
            assert found.code == 401, (method, path)
            assert b"flat" not in found.data


def test_off_loopback_the_token_opens_everything_and_a_password_what_is_read(open_to_all: Client) -> None:
    for path, allowed in addresses(open_to_all.key).items():
        if "POST" not in allowed and not path.endswith("/live"):
            assert open_to_all.get(path, BEARER).code == 200, path
            assert open_to_all.get(path, basic(TOKEN.secret)).code == 200, path
    act = f"{open_to_all.one}/actions/checkpoint"
    assert open_to_all.ask("POST", act, basic(TOKEN.secret)).code == 401
    assert open_to_all.ask("POST", act, BEARER).code == 200
    refused = open_to_all.get("/")
    assert refused.headers["www-authenticate"].startswith("Basic ")
    name = {"Host": f"{socket.gethostname()}:{open_to_all.board.port}"}
    assert open_to_all.get("/", {**BEARER, **name}).code == 200
    assert open_to_all.get("/", {**BEARER, "Host": f"evil.example:{open_to_all.board.port}"}).code == 421


def test_without_a_token_it_neither_acts_nor_leaves_loopback(made: Path) -> None:
    for host, allow_actions in (("0.0.0.0", False), ("127.0.0.1", True)):
        with pytest.raises(InvalidConfig, match="without a token"):
            Dashboard([as_given(made)], host, 0, allow_actions=allow_actions)
    assert [is_loopback(each) for each in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(each) for each in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5


def test_the_token_file_is_made_for_its_user_alone_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = token_in(tmp_path / "below" / "token")
    finally:
        os.umask(before)
    path = tmp_path / "below" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes().strip() == made.secret
    assert len(made.secret) >= 40
    assert token_in(path) == made
    assert made.secret.decode() not in repr(made)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "token").write_text("x" * 40)
    (tmp_path / "token").chmod(mode)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        token_in(tmp_path / "token")


@pytest.mark.parametrize("text", ["", "short", "two words of a token", "über" * 10])
def test_a_token_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(InvalidConfig, match="holds no token"):
        token_in(tmp_path / "token")
    with pytest.raises(InvalidConfig):
        token_in(tmp_path)


def test_the_token_may_be_in_the_environment_and_a_file_that_is_named_counts_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "t" * 20)
    assert token_in(None).secret == b"t" * 20
    assert token_in(tmp_path / "token").secret != b"t" * 20
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert token_in(None).source == str(tmp_path / "state" / "tidegate" / "dashboard.token")


# -- paths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/%2e%2e/errors.py",
        "/static/....//server.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/..\\server.py",
        "/static/app.js%00.html",
        "/static/",
        "/static/index.html/../../token.py",
        "/../../../../etc/passwd",
        "//etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/v1/pipelines/..%2f..%2fetc%2fpasswd",
        "/api/v1/pipelines/{key}/checkpoints/..%2f..%2fpipeline.json",
        "/api/v1/pipelines/{key}/checkpoints/../../../../etc/passwd",
        "/api/v1/pipelines/{key}/compare/..%2f/..",
        "/api/v1/pipelines/{root}",
        "/api/v1/pipelines/{key}/",
        "/index.html",
    ],
)
def test_no_path_leads_to_a_file(client: Client, made: Path, path: str) -> None:
    found = client.get(path.format(key=client.key, root=str(made).replace("/", "%2f")))
    assert found.code == 404, found
    assert b"root:" not in found.data
    assert b"import" not in found.data


def test_the_page_is_served_from_what_the_package_holds(client: Client) -> None:
    index = client.get("/")
    assert (index.code, index.data) == (200, b"<!doctype html>the page")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    script = client.get("/static/app.js")
    assert (script.data, script.headers["content-type"]) == (b"start()", "text/javascript; charset=utf-8")
    assert client.get("/static/app.js", {"If-None-Match": script.headers["etag"]}).code == 304
    packaged = files("tidegate.dashboard") / "static"
    for name, file in page_files().items():
        assert packaged.joinpath(name).read_bytes() == file.data


# -- what is said -----------------------------------------------------------------------------------


def test_names_with_html_in_them_stay_words_of_json(made: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made, tmp_path / "<img src=x onerror=alert(1)>"))
    evil = "</script><script>alert('x')</script>"
    aborted = msgspec.structs.replace(ended_checkpoint(9, "aborted", evil), stages={})
    note(
        root,
        CheckpointEnded(at="2026-01-02T03:04:05.000+00:00", checkpoint=aborted),
        Failed(at="2026-01-02T03:05:05.000+00:00", why=evil, stage=evil),
    )
    with served(root) as client:
        for path in ("", "/checkpoints", "/checkpoints/ckpt-000009", "/history", "/tables"):
            found = client.get(client.one + path)
            assert found.headers["content-type"] == "application/json"
            check_headers(found.headers)
        assert client.value("/history")["events"][0]["why"] == evil
        assert client.value()["summary"]["root"] == str(root)
        for target in ("/<script>", "/api/v1/pipelines/%3Cscript%3E", f"{client.one}/checkpoints/%3Cb%3E"):
            refused = client.get(target)
            assert refused.code in (400, 404)
            assert b"<script>" not in refused.data


def test_credentials_that_somebody_has_quoted_are_not_shown(made: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made, tmp_path / "root"))
    why = "cannot connect to postgresql://orders:hunter2@db/lake, nor with 'host=db password=hunter3'"
    aborted = ended_checkpoint(9, "aborted", why)
    note(root, CheckpointEnded(at="2026-01-02T03:04:05.000+00:00", checkpoint=aborted))
    with served(root) as client:
        for path in ("", "/checkpoints", "/checkpoints/ckpt-000009", "/history", "/checkpoints/summary"):
            assert b"hunter" not in client.get(client.one + path).data
        (event,) = client.value("/history")["events"]
        assert "postgresql://...@db/lake" in event["checkpoint"]["why"]
        assert b"hunter" not in client.get("/metrics").data


def shown(message: str) -> str:
    """What is left of a message that is in an answer."""
    data = json_without_secrets(msgspec.json.encode({"why": message, "next": "stage"}))
    found = msgspec.json.decode(data, type=dict[str, str])  # it is an answer still
    assert found["next"] == "stage"
    return found["why"]


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("s3://k:s@b/x token=abc&y", "s3://...@b/x token=...&y"),
        ("at postgresql://me:hun@ter2@db/lake", "at postgresql://...@db/lake"),
        ('{"password": "hunter 2", "user": "me"}', '{"password": ..., "user": "me"}'),
        ('{"db.password":"hunter \\"2\\" x"}', '{"db.password":...}'),
        ("{'clientSecret': 'hunter2', 'user': 'me'}", "{'clientSecret': ..., 'user': 'me'}"),
        ('password="hunter2" user="me"', 'password=... user="me"'),
        ("host=db password='hunter 2' user=me", "host=db password=... user=me"),
        (r"password = 'hun\'ter 2' user=me", "password = ... user=me"),
        ("password='hun''ter 2' user=me", "password=... user=me"),
        ("password='' user=me", "password=... user=me"),
        (r"password=hunter\2\ user=me", "password=... user=me"),
        ("password=hunter2\nuser=me", "password=...\nuser=me"),
        ("password='hunter 2, cut off", "password=..."),
        ("password: hunter2, user: me", "password: ..., user: me"),
        ("Passwort, password: 'hunter 2'.", "Passwort, password: ...."),
        ("sslpassword=hunter2", "sslpassword=..."),
        ("PGPASSWORD=hunter2 psql", "PGPASSWORD=... psql"),
        ("aws_secret_access_key=hun/ter+2= x", "aws_secret_access_key=... x"),
        ("AWS_SECRET_ACCESS_KEY: hunter2 x", "AWS_SECRET_ACCESS_KEY: ... x"),
        ("fs.s3a.secret.key=hunter2, fs.s3a.access.key=hunter3", "fs.s3a.secret.key=..., fs.s3a.access.key=..."),
        ("fs.azure.account.key.a.dfs.core.windows.net=hunter2==", "fs.azure.account.key.a.dfs.core.windows.net=..."),
        ("AccountName=a;AccountKey=hunter2==;Suffix=core", "AccountName=a;AccountKey=...;Suffix=core"),
        ("SharedAccessKey=hunter2;x", "SharedAccessKey=...;x"),
        ("https://b/x?X-Amz-Credential=hunter1&X-Amz-Signature=hunter2&y=1", None),
        ("https://a/b?sv=2024&sig=hunter2%3D&se=1", "https://a/b?sv=2024&sig=...&se=1"),
        ("Authorization: Bearer hunter2.x-y z", "Authorization: ... z"),
        ('{"Authorization": "Basic aHVudGVyMg=="}', '{"Authorization": ...}'),
        ("authorization=Basic aHVudGVyMg== z", "authorization=... z"),
        ("sent Bearer hunter2.eyJhbGciOiJIUzI1NiJ9 to it", "sent Bearer ... to it"),
        ("x-amz-security-token: hunter2hunter2/x y", "x-amz-security-token: ... y"),
        ("api_key=hunter2 apikey=hunter3 private-key=hunter4", "api_key=... apikey=... private-key=..."),
        ('required username="me" password="hunter2";', 'required username="me" password=...;'),
        ("passphrase=hunter2 credentials=hunter3", "passphrase=... credentials=..."),
    ],
)
def test_a_secret_that_somebody_has_quoted_is_left_out(message: str, left: str | None) -> None:
    found = shown(message)
    assert "hunter" not in found
    assert "ter 2" not in found
    if left is not None:
        assert found == left


@pytest.mark.parametrize(
    "message",
    [
        "s3://bucket/a@b at 12:00, offset=3, mail a@b.c, http://h:80/x",
        "abfss://container@account.dfs.core.windows.net/x",
        "FATAL: password authentication failed for user 'orders'",
        "unexpected token: '}' in line 3",
        "the token is in dashboard.token; tokens=5, max_tokens: 7",
        "key=5, keys: 6, primary key: id, partition_key: country",
        "stage parse_token: waiting for rows",
        "spark.hadoop.fs.s3a.aws.credentials.provider is set",
        "no credentials were found; for S3 set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        "Basic authentication and Bearer authentication are known",
        "secretary=me, design=x, sig: 3, compass=north, password",
        "it ends with password=",
        "it ends with password: ",
    ],
)
def test_what_is_no_secret_stays_as_it_is(message: str) -> None:
    assert shown(message) == message


def test_the_fields_of_an_answer_are_not_taken_for_secrets() -> None:
    value = {
        "token": "the variable X",
        "password": None,
        "needs_token": True,
        "secrets": [1],
        "api_key": {"why": "token", "secret": 3},
        "authorization": "x",
    }
    assert msgspec.json.decode(json_without_secrets(msgspec.json.encode(value))) == value


SECRETS = st.text(st.characters(codec="utf-8", exclude_characters="'\""), min_size=1)
NAMES = st.sampled_from(("password", "PGPASSWORD", "aws_secret_access_key", "fs.s3a.secret.key", "AccountKey", "token"))


@given(
    before=st.text(st.characters(codec="utf-8"), max_size=30).filter(lambda text: not re.search("['\"\\\\]", text)),
    name=NAMES,
    secret=SECRETS.map(lambda text: f"hunter2{text}"),
    quote=st.sampled_from(("'", '"')),
    between=st.sampled_from(("=", " = ", ": ", ":")),
    after=st.text("abc xyz,;.", max_size=30),
)
def test_whatever_is_in_quotes_after_the_name_of_a_secret_is_left_out(
    before: str, name: str, secret: str, quote: str, between: str, after: str
) -> None:
    written = secret.replace("\\", "\\\\")
    data_quote = quote if between.startswith(":") else ""
    message = f"{before} {data_quote}{name}{data_quote}{between}{quote}{written}{quote} {after}"
    found = shown(message)
    assert "hunter2" not in found
    assert found.endswith(f"{name}{data_quote}{between}... {after}")


@given(st.text(st.characters(codec="utf-8")).filter(lambda text: "=" not in text and ":" not in text))
def test_a_text_without_any_setting_in_it_stays_as_it_is(text: str) -> None:
    assert shown(text) == text


@given(
    st.recursive(
        st.text() | st.sampled_from(("password=", "token='", 'secret: "', "Authorization: Bearer", "://a:b@")),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | NAMES, inner, max_size=3),
        max_leaves=10,
    )
)
def test_an_answer_stays_one_whatever_is_in_it(value: object) -> None:
    def shape(of: object) -> object:
        if isinstance(of, dict):
            return [shape(each) for each in of.values()]
        return [shape(each) for each in of] if isinstance(of, list) else type(of)

    assert shape(msgspec.json.decode(json_without_secrets(msgspec.json.encode(value)))) == shape(value)


def test_get_changes_nothing(made: Path) -> None:
    def seen() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in sorted(made.rglob("*"))}

    before = seen()
    with served(made) as client:
        for path, allowed in addresses(client.key).items():
            if "GET" in allowed:
                client.get(path)
                client.ask("HEAD", path)
    assert seen() == before


def test_a_connection_for_something_else_is_refused(client: Client) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    found = client.get("/api/v1/pipelines", headers)
    assert found.code == 200  # as if it had not been asked for
    assert re.fullmatch(rb'\{"pipelines":.*\}', found.data)
