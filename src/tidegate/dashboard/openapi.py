"""The OpenAPI document of the dashboard's API, made from its routes and its values."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from tidegate import __version__
from tidegate.dashboard import values
from tidegate.dashboard.routes import API, ROUTES

_PATHS: Final[dict[str, dict[str, Any]]] = {
    "key": {
        "schema": {"type": "string", "pattern": "^[0-9a-f]{12}$"},
        "description": "of a pipeline, as the list has it",
    },
    "name": {"schema": {"type": "string", "pattern": "^ckpt-[0-9]{6,15}$"}, "description": "of a checkpoint"},
    "a": {"schema": {"type": "string", "pattern": "^ckpt-[0-9]{6,15}$"}, "description": "the first checkpoint"},
    "b": {"schema": {"type": "string", "pattern": "^ckpt-[0-9]{6,15}$"}, "description": "the second checkpoint"},
    "action": {
        "schema": {"type": "string", "enum": ["checkpoint", "savepoint", "cancel", "stop"]},
        "description": "which",
    },
}
_ERRORS: Final = {
    "400": "what was asked for cannot be",
    "401": "the token is missing, or is another one",
    "403": "a request from another site; or actions are not allowed",
    "404": "there is no such pipeline, checkpoint or action",
    "405": "that method does nothing here",
    "421": "the dashboard is not known by that name",
    "503": "the root cannot be read now",
}


def document() -> dict[str, Any]:
    types = [values.Problem, values.ActionTaken, values.Live, *(route.type for route in ROUTES)]
    schemas, parts = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    problem, taken, _ = schemas[:3]
    paths: dict[str, Any] = {
        route.path: {
            "get": _get(route.about, schema, [*_in_path(route.path), *map(_in_query, route.parameters)], problem)
        }
        for route, schema in zip(ROUTES, schemas[3:], strict=True)
    }
    one = f"{API}/pipelines/{{key}}"
    paths[f"{API}/live"] = {
        "get": _stream(
            "All pipelines, whenever one has changed: `event: pipelines` with what /pipelines answers.", [], problem
        )
    }
    paths[f"{one}/live"] = {
        "get": _stream("A pipeline, whenever it has changed: `event: status` with a `Live`.", _in_path(one), problem)
    }
    act = f"{one}/actions/{{action}}"
    paths[act] = {
        "post": {
            **_get("Have it done. It takes the token, and --allow-actions.", taken, _in_path(act), problem),
            "security": [{"token": []}],
        }
    }
    paths[f"{API}/openapi.json"] = {"get": _get("This document.", {"type": "object"}, [], problem)}
    for part in parts.values():
        if "properties" in part:  # every field is always there
            part["required"] = list(part["properties"])
            for field in part["properties"].values():
                field.pop("default", None)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidegate's dashboard",
            "version": __version__,
            "description": "What the dashboard shows of the roots that it was started with. GET changes nothing.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": parts,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(
    about: str, schema: dict[str, Any], parameters: list[dict[str, Any]], problem: dict[str, Any]
) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "200": {"description": "the answer", "content": {"application/json": {"schema": schema}}}
    }
    return {"summary": about, "parameters": parameters, "responses": {**answers, **_errors(problem)}}


def _stream(about: str, parameters: list[dict[str, Any]], problem: dict[str, Any]) -> dict[str, Any]:
    answers = {
        "200": {"description": "server-sent events", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    }
    return {"summary": about, "parameters": parameters, "responses": {**answers, **_errors(problem)}}


def _errors(problem: dict[str, Any]) -> dict[str, Any]:
    return {
        code: {"description": about, "content": {"application/json": {"schema": problem}}}
        for code, about in _ERRORS.items()
    }


def _in_path(path: str) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, **_PATHS[name]} for name in re.findall(r"{(\w+)}", path)]


def _in_query(parameter: Any) -> dict[str, Any]:
    found = {
        "name": parameter.name,
        "in": "query",
        "description": parameter.about,
        "schema": parameter.schema,
        "required": False,
    }
    return {**found, "style": "form", "explode": False} if parameter.schema["type"] == "array" else found
