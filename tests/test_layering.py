"""What each layer may import (DESIGN: "Layers, and what each may import")."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tidegate

SOURCE = Path(tidegate.__file__).parent
ROOT = "tidegate"  # the package's own __init__: the public names

ANY = None
CORE = {"errors", "protocol"}
BELOW_SPARK = CORE | {"scrubbing", "storage", "cluster"}
BELOW_ENGINE = BELOW_SPARK | {"spark", "sinks"}
BELOW_TOP = BELOW_ENGINE | {"engine"}


class Layer(NamedTuple):
    layers: set[str]
    """The other layers that it may import."""
    packages: set[str] | None
    """The packages from outside, beside the standard library, that it may import."""
    is_pure: bool = False


LAYERS = {
    "errors": Layer(layers=set(), packages=set()),
    "scrubbing": Layer(layers=set(), packages={"msgspec"}, is_pure=True),
    "protocol": Layer(layers={"errors"}, packages={"msgspec"}, is_pure=True),
    "flows": Layer(layers=CORE, packages={"msgspec"}, is_pure=True),
    "testing": Layer(
        layers=CORE | {"flows", "cluster", "storage", "testing.pipelines"}, packages={"msgspec"}
    ),  # the last is of its public names
    "testing.files": Layer(layers=CORE | {"storage"}, packages={"msgspec"}),  # the conformance suite of files
    "testing.kv": Layer(
        layers=CORE | {"cluster", "testing.files"}, packages={"msgspec"}
    ),  # the conformance suite of KVs
    "testing.played": Layer(layers=BELOW_ENGINE | {"testing"}, packages=ANY),  # what Spark and tables would write
    "testing.simulator.whole": Layer(layers=BELOW_TOP | {"flows", "testing", "testing.played"}, packages=ANY),
    "testing.pipelines": Layer(layers=BELOW_TOP, packages=ANY),  # a user's pipeline in a user's test
    "testing.sinks": Layer(layers=CORE | {"sinks", "storage"}, packages=ANY),  # the conformance suite of sinks
    "storage": Layer(layers=CORE, packages=ANY),
    "cluster": Layer(layers=CORE | {"flows", "storage"}, packages=ANY),
    "spark": Layer(layers=BELOW_SPARK | {"sinks"}, packages=ANY),  # it drives sinks; a sink knows nothing of it
    "engine": Layer(layers=BELOW_ENGINE | {"flows"}, packages=ANY),
    "sinks": Layer(layers=BELOW_SPARK, packages=ANY),
    ROOT: Layer(layers=BELOW_TOP, packages=ANY),
    "cli": Layer(layers=BELOW_TOP | {"testing", "testing.simulator.whole", "dashboard", ROOT}, packages=ANY),
    "__main__": Layer(layers={"cli"}, packages=set()),  # `python -m tidegate`
    "dashboard": Layer(layers=BELOW_TOP | {ROOT}, packages=ANY),
}

# What a pure layer may not know of, though the standard library has it.
IMPURE = {
    "clocks": {"datetime", "sched", "time", "zoneinfo"},
    "chance": {"random", "secrets", "uuid"},
    "threads": {"_thread", "asyncio", "concurrent", "queue", "threading"},
    "processes": {"ctypes", "multiprocessing", "os", "platform", "signal", "subprocess", "sys"},
    "files": {"fcntl", "glob", "io", "mmap", "pathlib", "shelve", "shutil", "sqlite3", "tempfile"},
    "the network": {"http", "select", "selectors", "socket", "socketserver", "ssl", "urllib"},
    "what lies around": {"importlib", "locale", "logging", "warnings"},
}

UNKNOWABLE = "<a name that is computed>"


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What this source, as this module, imports against the table."""
    own = _layer_of(module)
    layer = LAYERS[own]
    found = []
    for line, imported in _imports(source, module if is_package else module.rpartition(".")[0]):
        top = imported.partition(".")[0]
        if top == ROOT:
            target = _layer_of(imported)
            wrong = target != own and target not in layer.layers
        elif imported == UNKNOWABLE:
            wrong = layer.packages is not ANY
        elif top in sys.stdlib_module_names:
            wrong = layer.is_pure and any(top in kind for kind in IMPURE.values())
        else:
            wrong = layer.packages is not ANY and top not in layer.packages
        if wrong:
            found.append(f"{module}:{line}: {own} may not import {imported}")
    return found


def _layer_of(name: str) -> str:
    parts = name.split(".")[1:4]
    layers = (".".join(parts[:depth]) for depth in (3, 2, 1))
    return next((layer for layer in layers if layer in LAYERS), ROOT)


def _imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Every name that is imported anywhere in the source, absolute, with its line."""
    tree = ast.parse(source)
    importing = {"import_module", "__import__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            importing |= {name.asname for name in node.names if name.asname and name.name in importing}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = _absolute("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, f"{start}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Call) and _called(node) in importing:
            yield node.lineno, _dynamic(node, package)


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _dynamic(call: ast.Call, package: str) -> str:
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "name")]
    if given and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str):
        return _absolute(given[0].value, package)
    return UNKNOWABLE


def _absolute(name: str, package: str) -> str:
    stripped = name.lstrip(".")
    level = len(name) - len(stripped)
    if level == 0:
        return name
    start = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*start, stripped] if stripped else start)


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    path = MODULES[module]
    source = path.read_text(encoding="utf-8")
    assert violations(module, source, is_package=path.name == "__init__.py") == []


def test_every_package_of_the_source_is_a_layer_of_the_table() -> None:
    assert {"tidegate", "tidegate.errors", "tidegate.protocol.aligner"} <= MODULES.keys()
    found = {module.split(".")[1] for module in MODULES if "." in module}
    assert found <= LAYERS.keys()


def test_nobody_imports_the_command_line_and_only_that_the_dashboard() -> None:
    tops = {"cli", "dashboard"}
    found = {name: layer.layers & tops for name, layer in LAYERS.items() if layer.layers & tops}
    assert found == {"__main__": {"cli"}, "cli": {"dashboard"}}


def test_the_table_has_no_cycle() -> None:
    below = {name: set(layer.layers) for name, layer in LAYERS.items()}
    while below:
        lowest = {name for name, layers in below.items() if not layers & below.keys()}
        assert lowest, f"these import each other: {sorted(below)}"
        below = {name: layers for name, layers in below.items() if name not in lowest}


# Above storage/, files are reached over `tidegate.storage.files`: else neither a memory nor a bucket could take the
# folder's place. What is not under a root may be reached as it likes, and so may a process.
FILE_SYSTEM = ("os", "shutil", "tempfile", "glob", "fcntl", "mmap", "pathlib.Path", "pathlib.PosixPath")
BESIDE_THE_ROOT = {
    "tidegate.cli": "what commands are given, and what they write",
    "tidegate.dashboard.token": "the file of the secret, which is the user's own",
    "tidegate.engine.comparing": "two roots as a user names them",
    "tidegate.engine.inspecting": "the root as a user names it, and the folder of a pipeline's file",
    "tidegate.engine.kill_points": "its own process, which it kills when a file of a test's is there",
    "tidegate.engine.pipeline": "the file that a pipeline is written in",
    "tidegate.engine.forking": "roots as a user names them",
    "tidegate.engine.restoring": "the root as a user names it",
    "tidegate.engine.savepoints": "the root and the savepoint's folder as a user names them",
    "tidegate.engine.preview": "the root as a user names it, and a folder for nothing else",
    "tidegate.engine.root": "a root in a folder",
    "tidegate.engine.run": "the root as a user names it",
    "tidegate.engine.status": "the number of its process",
    "tidegate.engine.watching.otlp": "variables of OpenTelemetry",
    "tidegate.engine.watching.traces": "the same",
    "tidegate.sinks": "tables, which lie where their users want them",
    "tidegate.spark.definition": "the folder of the file that a pipeline is written in",
    "tidegate.spark.modules": "modules beside the file that a pipeline is written in",
    "tidegate.spark.s3a": "Spark's own jars",
    "tidegate.spark.sharing": "folders that executors are to share with the driver",
    "tidegate.spark.session": "Spark's own process: its programs, settings and scratch folders",
    "tidegate.spark.sources": "paths that users read, relative to where they are",
    "tidegate.spark.spark_log": "the messages of Spark's process",
    "tidegate.testing.pipelines": "the temporary folder of a test",
    "tidegate.testing.sinks": "the folder of a test's tables",
}


def reaches_for_files(module: str, source: str) -> list[str]:
    """What of the file system this source, as this module, imports."""
    package = module.rpartition(".")[0]
    return [imported for _, imported in _imports(source, package) if _is_of_the_file_system(imported)]


def _is_of_the_file_system(imported: str) -> bool:
    names = imported.split(".")
    return imported == "pathlib" or any(".".join(names[:depth]) in FILE_SYSTEM for depth in (1, 2))


def _is_beside_the_root(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:depth]) in BESIDE_THE_ROOT for depth in range(2, len(parts) + 1))


@pytest.mark.parametrize("module", [each for each in MODULES if _layer_of(each) != "storage"])
def test_what_lies_under_a_root_is_reached_over_files(module: str) -> None:
    found = reaches_for_files(module, MODULES[module].read_text(encoding="utf-8"))
    assert not found or _is_beside_the_root(module), f"{module} imports {found}; go over tidegate.storage.files"


def test_whatever_may_reach_beside_the_root_does() -> None:
    found = {name for name, path in MODULES.items() if reaches_for_files(name, path.read_text(encoding="utf-8"))}
    idle = [each for each in BESIDE_THE_ROOT if not any(f"{name}.".startswith(f"{each}.") for name in found)]
    assert idle == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os", ["os"]),
        ("from os import path", ["os.path"]),
        ("import shutil, json", ["shutil"]),
        ("import pathlib", ["pathlib"]),
        ("from pathlib import Path, PurePosixPath", ["pathlib.Path"]),
        ("def look():\n    from os.path import exists", ["os.path.exists"]),
        ("from tidegate.storage.files import Files\nimport ossify", []),
    ],
)
def test_the_check_finds_what_reaches_for_files(source: str, found: list[str]) -> None:
    assert reaches_for_files("tidegate.engine.stage", source) == found


@pytest.mark.parametrize(
    ("module", "source", "imported"),
    [
        ("tidegate.protocol.aligner", "import time", "time"),
        ("tidegate.protocol.aligner", "from datetime import datetime", "datetime.datetime"),
        ("tidegate.protocol.aligner", "import os.path as paths", "os.path"),
        ("tidegate.protocol.aligner", "import enum, random", "random"),
        ("tidegate.protocol.aligner", "def cut():\n    import threading", "threading"),
        ("tidegate.protocol.aligner", "class Aligner:\n    from pathlib import Path", "pathlib.Path"),
        ("tidegate.protocol.aligner", "try:\n    import asyncio\nexcept ImportError:\n    pass", "asyncio"),
        ("tidegate.protocol.aligner", "if TYPE_CHECKING:\n    import subprocess", "subprocess"),
        ("tidegate.protocol.aligner", "import socket", "socket"),
        ("tidegate.protocol.aligner", "import pyspark", "pyspark"),
        ("tidegate.protocol.aligner", "from pyspark.sql import types", "pyspark.sql.types"),
        ("tidegate.protocol.aligner", "import tidegate.storage.paths as p", "tidegate.storage.paths"),
        ("tidegate.protocol.aligner", "from tidegate.storage import paths", "tidegate.storage.paths"),
        ("tidegate.protocol.aligner", "from tidegate import storage", "tidegate.storage"),
        ("tidegate.protocol.aligner", "from tidegate import Pipeline", "tidegate.Pipeline"),
        ("tidegate.protocol.aligner", "import tidegate", "tidegate"),
        ("tidegate.protocol.aligner", "from ..storage import paths", "tidegate.storage.paths"),
        ("tidegate.protocol.aligner", "from .. import storage", "tidegate.storage"),
        ("tidegate.protocol.aligner", "from ..testing import simulator", "tidegate.testing.simulator"),
        ("tidegate.protocol.aligner", 'importlib.import_module("time")', "time"),
        ("tidegate.protocol.aligner", 'loader.import_module(name="tidegate.cli")', "tidegate.cli"),
        ("tidegate.protocol.aligner", 'import_module("..storage", "tidegate.protocol")', "tidegate.storage"),
        ("tidegate.protocol.aligner", '__import__("random")', "random"),
        ("tidegate.protocol.aligner", 'builtins.__import__("random").random()', "random"),
        ("tidegate.protocol.aligner", "__import__(name)", UNKNOWABLE),
        ("tidegate.protocol.aligner", 'import_module(f"ti{me}")', UNKNOWABLE),
        ("tidegate.flows.leader", "import time", "time"),
        ("tidegate.flows.leader", "import asyncio", "asyncio"),
        ("tidegate.flows.leader", "from tidegate.storage import files", "tidegate.storage.files"),
        ("tidegate.flows.leader", "from tidegate.testing import simulator", "tidegate.testing.simulator"),
        ("tidegate.errors", "import msgspec", "msgspec"),
        ("tidegate.errors", "from tidegate.protocol import messages", "tidegate.protocol.messages"),
        ("tidegate.errors", "from .protocol import messages", "tidegate.protocol.messages"),
        ("tidegate.testing.simulator.world", "import pyspark", "pyspark"),
        ("tidegate.testing.simulator.world", "from ...cli import app", "tidegate.cli.app"),
        ("tidegate.storage.manifest", "from tidegate.spark import gate", "tidegate.spark.gate"),
        ("tidegate.cluster.kv", "from tidegate.spark import gate", "tidegate.spark.gate"),
        ("tidegate.spark.runner", "from tidegate.cli import app", "tidegate.cli.app"),
        ("tidegate.sinks.delta.bound", "from tidegate.dashboard import server", "tidegate.dashboard.server"),
        ("tidegate.engine.run", "from tidegate.dashboard import server", "tidegate.dashboard.server"),
        ("tidegate.dashboard.server", "from tidegate.cli import text", "tidegate.cli.text"),
    ],
)
def test_the_check_finds_a_forbidden_import_wherever_it_stands(module: str, source: str, imported: str) -> None:
    found = violations(module, source)
    assert [each.partition(" may not import ")[2] for each in found] == [imported]


def test_the_check_sees_through_a_renamed_import_function() -> None:
    source = 'from importlib import import_module as load\nload("tidegate.cli")'
    assert violations("tidegate.spark.runner", source) == ["tidegate.spark.runner:2: spark may not import tidegate.cli"]


def test_the_check_resolves_relative_imports_of_a_package_from_the_package_itself() -> None:
    assert violations("tidegate.protocol", "from . import messages", is_package=True) == []
    assert violations("tidegate", "from .cli import app", is_package=True) == [
        "tidegate:1: tidegate may not import tidegate.cli.app"
    ]
    assert violations("tidegate.protocol", "from .. import cli", is_package=True) == [
        "tidegate.protocol:1: protocol may not import tidegate.cli"
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tidegate.protocol.aligner", "import enum, msgspec\nfrom collections import deque"),
        ("tidegate.protocol.aligner", "from tidegate.errors import ProtocolViolation"),
        ("tidegate.protocol.aligner", "from tidegate import errors"),
        ("tidegate.protocol.aligner", "from .messages import Barrier\nfrom . import config"),
        ("tidegate.protocol.aligner", "from ..errors import ProtocolViolation"),
        ("tidegate.flows.leader", "import msgspec\nfrom tidegate.protocol import commit"),
        ("tidegate.errors", "from typing import ClassVar"),
        ("tidegate.testing.simulator.world", "import random, msgspec\nfrom tidegate.protocol import commit"),
        ("tidegate.storage.manifest", "import obstore, os, time\nfrom tidegate.errors import DamagedLog"),
        ("tidegate.spark.runner", "import pyspark\nfrom tidegate.storage import paths"),
        ("tidegate.sinks.delta.bound", "import deltalake\nfrom tidegate.cluster import election"),
        ("tidegate.cli.app", "import typer\nimport tidegate\nfrom tidegate.testing import simulator"),
        ("tidegate.cli.app", "import_module(name)"),
    ],
)
def test_the_check_lets_what_is_allowed_pass(module: str, source: str) -> None:
    assert violations(module, source) == []
