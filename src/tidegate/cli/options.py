"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tidegate.engine.options import DEFAULTS, default_of, description_of
from tidegate.errors import InvalidConfig, TidegateError
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.places import Place, as_given

LATEST: Final = "latest"
_ROOT: Final = typer.Option(
    "--root", metavar="PLACE", parser=as_given, help="The folder that holds the pipeline's checkpoints."
)
RootPlace = Annotated[Place, _ROOT]
RootPlaceIfAny = Annotated[Place | None, _ROOT]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text, for scripts.")]


def of_run(option: str, *names: str, **more: Any) -> Any:
    """An option of a run, as `tidegate.engine.options` has it."""
    is_shown = getattr(DEFAULTS, option) is None and default_of(option)
    return typer.Option(*names, help=description_of(option), show_default=is_shown or True, **more)


def as_pairs(option: str, given: list[str], written: str, such_as: str) -> dict[str, str]:
    """What was given as `written`, each once at most."""
    found: dict[str, str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not (key and equals):
            raise typer.BadParameter(f"write {written}, such as {such_as}", param_hint=option)
        if found.get(key, value) != value:
            raise typer.BadParameter(f"{key} is given twice, as {found[key]} and as {value}", param_hint=option)
        found[key] = value
    return found


PipelineFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The Python file that defines it.")]
PipelineFileIfAny = Annotated[
    Path | None,
    typer.Option(
        "--file",
        exists=True,
        dir_okay=False,
        help="The Python file that defines the pipeline, for tables that only it can reach (PostgreSQL).",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
PipelineName = Annotated[str | None, typer.Option(help="Which one, if the file defines several.")]
Conf = Annotated[
    list[str],
    typer.Option(metavar="KEY=VALUE", help="A setting of Spark's, such as spark.jars.packages; may be repeated."),
]
Renames = Annotated[
    list[str],
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="The new name of a stage that the checkpoint knows by its old one, and goes on from; may be repeated.",
    ),
]
DroppedState = Annotated[list[str], of_run("allow_dropped_state", "--allow-dropped-state", metavar="NAME")]


def settings_in(conf: list[str]) -> dict[str, str]:
    return as_pairs("--conf", conf, "KEY=VALUE", "spark.driver.memory=4g")


def renames_in(rename: list[str]) -> dict[str, str]:
    return as_pairs("--rename", rename, "OLD=NEW", "large=large_orders")


def check_writable(option: str, path: Path) -> None:
    """Asked of the file system itself, which leaves an empty file where there was none."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidConfig(f"{option} {path} cannot be written: {error.strerror}") from error


def refuse_to_ask(*, as_json: bool, is_answered: bool) -> None:
    if as_json and not is_answered:
        raise InvalidConfig("with --json nothing is asked: give --yes, or --dry-run to see what would be done")


def parse_checkpoint(text: str) -> int:
    found = checkpoint_id_of(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} names no checkpoint; write 42 or {checkpoint_name(42)}")
    return found


def parse_checkpoint_or_latest(text: str) -> str:
    if text.strip().lower() == LATEST:
        return LATEST
    found = checkpoint_id_of(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} names no checkpoint; write 42, {checkpoint_name(42)} or {LATEST}")
    return checkpoint_name(found)


def complete_checkpoint(context: typer.Context, incomplete: str) -> list[str]:
    """The shell offers the names of the checkpoints that the root retains."""
    root = context.params.get("root")
    if root is None:
        return []
    try:
        names = [checkpoint_name(record.checkpoint_id) for record in InspectedRoot(as_given(root)).retained()]
    except TidegateError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def complete_stage(context: typer.Context, incomplete: str) -> list[str]:
    """The shell offers the names of the stages that the newest checkpoint has."""
    root = context.params.get("root")
    if root is None:
        return []
    try:
        inspected = InspectedRoot(as_given(root))
        names = list(inspected.manifest(inspected.newest()).shape)
    except TidegateError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def checkpoint_or_latest() -> Any:
    """An argument that names a checkpoint to look into."""
    return typer.Argument(
        metavar="ID",
        parser=parse_checkpoint_or_latest,
        autocompletion=complete_checkpoint,
        help=f"Such as ckpt-000042, 42 or {LATEST}.",
    )


OperatorNumber = Annotated[
    int | None, typer.Option("--operator", min=0, help="Whose state, where the stage has several operators with state.")
]

CheckpointId = Annotated[
    int | None,
    typer.Argument(
        metavar="ID", parser=parse_checkpoint, autocompletion=complete_checkpoint, help="Such as ckpt-000042 or 42."
    ),
]
