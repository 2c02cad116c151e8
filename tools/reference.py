"""Writes docs/reference: what `--json` answers, from the structs of `tidegate.cli.answers`, and every option of every
command, from the commands themselves: `./dev docs`.

`--check` changes nothing and exits with 1 if a file is not what it should be.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import json
import sys
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import typer

from tidegate.cli import answers
from tidegate.cli.app import app
from tidegate.engine.options import RunOptions, default_of, description_of

FOLDER: Final = Path(__file__).parents[1] / "docs" / "reference"
_MADE: Final = "<!-- made by ./dev docs -->"
_IN_EVERY: Final = ("answer", "event", "version", "at")

_JSON_HEAD: Final = f"""{_MADE}

# What `--json` answers

Every command has `--json`. It then prints one JSON object to stdout, its answer, and ends with the same exit code as
without (see [commands](../commands.md)); `tidegate run` prints one object per line, its events. Nothing else goes to
stdout: what the functions of a pipeline print goes to stderr, and so does an error for people.

A command that cannot do what it was asked for answers with [`error`](#answer-error), also where its options are wrong;
a run tells it as its last event. Of a command that is killed, or interrupted before it has begun, nothing is told.

Every answer has `answer` (which one it is, as below) and `version`, which is {answers.VERSION}. Every event has
`event`, `version` and `at`, the time when it was told. Every field is always there; null means what is said of it.
Times are RFC 3339, in UTC, to the millisecond; names of checkpoints are such as `ckpt-000042`.

Fields, values of enumerations, answers and events may be added within a version: ignore what you do not know. A field
that is removed, renamed, or given another type or meaning raises it. [answers.schema.json](answers.schema.json) is the
same as a JSON Schema.
"""

_OPTIONS_HEAD: Final = f"""{_MADE}

# Options

Every command with its arguments and options, as `tidegate COMMAND --help` tells them.
"""

_KEYWORDS_HEAD: Final = """## pipeline.run

The same as keywords of `pipeline.run(root, spark, …)`. Beside them it takes `stop`, a `threading.Event` that ends the
run, after a last checkpoint, when it is set.
"""


# -- the schema -----------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """The JSON Schema of all answers and events. Every field is always there, so all are required."""
    (answer, event), parts = msgspec.json.schema_components([answers.Answer, answers.Event])
    for part in parts.values():
        for field in part.get("properties", {}).values():
            field.pop("default", None)
        if "properties" in part:
            part["required"] = list(part["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What tidegate answers with --json: an answer, or an event of a run",
        "anyOf": [answer, event],
        "$defs": parts,
    }


def json_reference() -> str:
    parts = schema()["$defs"]
    told = [kind.__name__ for union in (answers.Answer, answers.Event) for kind in get_args(union)]
    pieces = [_JSON_HEAD, "## Answers\n"]
    pieces += [_described(_heading(kind), parts[kind.__name__], parts) for kind in get_args(answers.Answer)]
    pieces.append("## Events of a run\n")
    pieces += [_described(_heading(kind), parts[kind.__name__], parts) for kind in get_args(answers.Event)]
    pieces.append("## What they consist of\n")
    others = [name for name, part in parts.items() if name not in told and "properties" in part]
    pieces += [_described(name, parts[name], parts) for name in others]
    return "\n".join(pieces)


def _heading(kind: Any) -> str:
    config = kind.__struct_config__
    return f"{config.tag_field}: {config.tag}"


def _described(heading: str, part: dict[str, Any], parts: dict[str, Any]) -> str:
    rows = [
        f"| `{name}` | {_type(field, parts)} | {_in_a_cell(field.get('description') or _said_of(field, parts))} |"
        for name, field in part["properties"].items()
        if name not in _IN_EVERY
    ]
    table = ["| field | type | what it is |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join([f"### {heading}\n", " ".join(part["description"].split()) + "\n", *table])


def _said_of(field: dict[str, Any], parts: dict[str, Any]) -> str:
    """Of a part that needs no words of its own: its own first sentence."""
    said: str = parts[_name(field)]["description"].split(". ")[0].rstrip(".")
    return said[0].lower() + said[1:]


def _type(field: dict[str, Any], parts: dict[str, Any]) -> str:
    if "$ref" in field:
        part = parts[_name(field)]
        return f"[{_name(field)}](#{_name(field).lower()})" if "properties" in part else _type(part, parts)
    if "anyOf" in field:
        return " or ".join(_type(each, parts) for each in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if field["type"] == "array":
        return f"array of {_type(field['items'], parts)}"
    if field["type"] == "object":
        if "additionalProperties" not in field:
            return "object"
        return f"object of {_type(field['additionalProperties'], parts)}"
    return "time" if field.get("format") == "date-time" else str(field["type"])


def _name(field: dict[str, Any]) -> str:
    return str(field["$ref"]).rsplit("/", 1)[-1]


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- options --------------------------------------------------------------------------------------


def options_reference() -> str:
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - of a class without a name
    return "\n".join([_OPTIONS_HEAD, *(_command(name, command) for name, command in commands.items()), _keywords()])


def _keywords() -> str:
    rows = [
        f"| `{field.name}` | {f'`{default}`' if (default := default_of(field.name)) else ''} "
        f"| {_in_a_cell(description_of(field.name))} |"
        for field in msgspec.structs.fields(RunOptions)
    ]
    return "\n".join([_KEYWORDS_HEAD, "| keyword | default | what it is |", "|---|---|---|", *rows, ""])


def _command(name: str, command: Any) -> str:
    said = inspect.cleandoc(command.help or "").split("\n\n")[0]
    rows = [_option(each) for each in command.params if not each.hidden]
    table = ["| option | default | what it is |", "|---|---|---|", *rows, ""]
    return "\n".join([f"## tidegate {name}\n", f"{' '.join(said.split())}\n", *table])


def _option(option: Any) -> str:
    is_argument = option.param_type_name == "argument"
    names = [option.metavar or option.name.upper()] if is_argument else [*option.opts, *option.secondary_opts]
    default = "required" if option.required else _default(option)
    is_choice = isinstance(option.default, enum.Enum)
    one_of = " One of " + ", ".join(f"`{each.value}`" for each in type(option.default)) + "." if is_choice else ""
    return f"| {', '.join(f'`{name}`' for name in names)} | {default} | {_in_a_cell(option.help or '')}{one_of} |"


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):  # what None stands for
        return f"`{option.show_default}`"
    if option.default in (None, (), []) or option.default is False:
        return ""
    if option.default is True:
        return f"`{option.opts[0]}`"
    return f"`{getattr(option.default, 'value', option.default)}`"


# -- the files ------------------------------------------------------------------------------------


def files() -> dict[str, str]:
    """Every file of the reference, by its name, as it should be."""
    return {
        "json.md": json_reference(),
        "answers.schema.json": json.dumps(schema(), indent=1) + "\n",
        "options.md": options_reference(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/reference.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if something would")
    arguments = parser.parse_args()
    wanted = files()
    if arguments.check:
        return int(any((FOLDER / name).read_text(encoding="utf-8") != text for name, text in wanted.items()))
    FOLDER.mkdir(exist_ok=True)
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
