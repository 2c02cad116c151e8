"""The OpenAPI document against the server: schemathesis makes up requests by it, and looks at every answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import FailureGroup

from benchmarks.dashboard_root import LongPast
from tests.dashboard.harness import BEARER, Client, served
from tidegate.dashboard.openapi import document


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    past = LongPast(tmp_path_factory.mktemp("past"), 60, retained=10, chains=1)
    with served(past.root, allow_actions=True) as found:
        yield found


def known(client: Client) -> dict[str, Any]:
    """The document, with a pipeline and checkpoints that are there as examples of what to name: else nothing but what
    is not found would be looked at."""
    found = client.get("/api/v1/openapi.json").value
    assert found == document()
    named = {"key": [client.key], "name": ["ckpt-000060", "ckpt-000025"], "a": ["ckpt-000055"], "b": ["ckpt-000060"]}
    for path in found["paths"].values():
        for operation in path.values():
            for parameter in operation["parameters"]:
                if parameter["name"] in named:
                    parameter["schema"]["enum"] = named[parameter["name"]]
    return found  # type: ignore[no-any-return]


OPERATIONS = [
    (path, method)
    for path, operations in document()["paths"].items()
    for method in operations
    if not path.endswith("/live")  # which does not end: tests/dashboard/test_live.py
]


@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda each: each.removeprefix("/api/v1"))
def test_nothing_is_found(client: Client, path: str, method: str) -> None:
    config = SchemathesisConfig.from_dict({"base-url": client.board.url.rstrip("/")})
    schema = schemathesis.openapi.from_dict(known(client), config=config)
    operation = schema[path][method]

    modes = [schemathesis.GenerationMode.POSITIVE]
    if document()["paths"][path][method]["parameters"]:  # else there is nothing that could be wrong
        modes.append(schemathesis.GenerationMode.NEGATIVE)
    for mode in modes:

        @hypothesis.settings(
            max_examples=8,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def attempt(case: Any) -> None:
            case.call_and_validate(headers=BEARER)

        attempt()


def test_the_check_finds_what_is_wrong(client: Client) -> None:
    """Else the test above could not fail."""
    wrong = known(client)
    listed = wrong["components"]["schemas"]["Pipelines"]
    listed["required"] = [*listed["required"], "nothing"]
    config = SchemathesisConfig.from_dict({"base-url": client.board.url.rstrip("/")})
    operation = schemathesis.openapi.from_dict(wrong, config=config)["/api/v1/pipelines"]["get"]
    with pytest.raises(FailureGroup):
        operation.Case().call_and_validate(headers=BEARER)
