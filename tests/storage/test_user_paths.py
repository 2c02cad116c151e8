"""Paths as users write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tidegate.errors import InvalidConfig, NoRoot
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.user_paths import local_path, plain_path


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("/data/orders", "/data/orders"),
        ("data/orders", "data/orders"),
        ("data/a:b/%20", "data/a:b/%20"),
        ("./a:/b", "a:/b"),
        ("file:///data/orders", "/data/orders"),
        ("file:/data/orders", "/data/orders"),
        ("FILE://localhost/data/orders", "/data/orders"),
        ("file:///data/a%20b/100%25/%C3%BC", "/data/a b/100%/ü"),
    ],
)
def test_a_path_is_taken_as_it_is_and_a_file_url_for_the_path_that_it_names(given: str, meant: str) -> None:
    assert local_path(given) == Path(meant)


def test_the_url_that_python_gives_a_path_leads_back_to_it(tmp_path: Path) -> None:
    odd = tmp_path / "größe 50% a+b #1?"
    assert plain_path(odd.as_uri()) == odd
    assert plain_path(Path(odd.as_uri())) == odd


@pytest.mark.parametrize("given", ["/data/orders/", "//data/orders", "/data/./x/../orders"])
def test_a_plain_path_is_as_spark_names_it(given: str) -> None:
    assert str(plain_path(given)) == "/data/orders"


BUCKETS = ["s3://bucket/orders", "gs://bucket", "abfss://c@a.dfs.core.windows.net/x"]
OTHERS = ["hdfs:///x", "dbfs:/x"]


@pytest.mark.parametrize("url", [*BUCKETS, *OTHERS])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_url_of_anything_else_is_refused_wherever_it_comes_in(
    url: str, kind: type[str] | type[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = tg.Pipeline("orders")
    pipeline.source(rows)
    pipeline.sink(tg.DeltaTable("lake"))(table)
    takers: list[Callable[[Any], object]] = [] if url.startswith("s3:") and kind is str else [tg.DeltaTable]
    if url in OTHERS or kind is Path:  # a root may be in a bucket, but no path names one: it has lost a slash
        takers += [pipeline.run, lambda root: InspectedRoot(root).files.names_in()]
    for take in takers:
        with pytest.raises(InvalidConfig, match=r"is not a local folder|is not the URL of a bucket|only those of S3"):
            take(kind(url))
    assert list(tmp_path.iterdir()) == []


def rows() -> None: ...


def table(rows: object) -> None: ...


@pytest.mark.parametrize("url", ["file://data/orders", "file:////host/share"])
def test_a_file_url_of_another_machine_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match=r"write file:///folder"):
        local_path(url)


def test_an_empty_path_is_not_the_current_folder() -> None:
    """It is what is left of a variable that is not set."""
    with pytest.raises(InvalidConfig, match="the path of a root or table is empty"):
        local_path("")
    assert local_path(".") == Path()


def test_a_file_that_is_given_as_a_root_is_called_no_folder(tmp_path: Path) -> None:
    (tmp_path / "orders.py").touch()
    with pytest.raises(NoRoot, match=r"/orders\.py is no folder; a root is what `tidegate run`"):
        InspectedRoot(tmp_path / "orders.py")
    with pytest.raises(NoRoot, match=r"there is no folder .*/none; a root is what `tidegate run`"):
        InspectedRoot(tmp_path / "none")
