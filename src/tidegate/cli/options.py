"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tidegate.engine.options import DEFAULTS, default_of, description_of
from tidegate.errors import InvalidConfig, TidegateError
from tidegate.protocol.names import checkpoint_id_of, checkpoint_name
from tidegate.storage.inspection import InspectedRoot
from tidegate.storage.user_paths import local_path

LATEST: Final = "latest"
_ROOT: Final = typer.Option(
    "--root", metavar="PATH", parser=local_path, help="The folder that holds the pipeline's checkpoints."
)
RootFolder = Annotated[Path, _ROOT]
RootFolderIfAny = Annotated[Path | None, _ROOT]
SparkSettings = Annotated[
    list[str],
    typer.Option(
        "--conf", metavar="KEY=VALUE", help="A setting of Spark's, such as spark.jars.packages; may be repeated."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text, for scripts.")]


def of_run(option: str, *names: str, **more: Any) -> Any:
    """An option of a run, as `tidegate.engine.options` has it."""
    is_shown = getattr(DEFAULTS, option) is None and default_of(option)
    return typer.Option(*names, help=description_of(option), show_default=is_shown or True, **more)


def settings_given(conf: list[str]) -> dict[str, str]:
    """The settings of Spark's that were given."""
    settings = [each.partition("=") for each in conf]
    if not all(key and equals for key, equals, _ in settings):
        raise typer.BadParameter("write KEY=VALUE, such as spark.driver.memory=4g", param_hint="--conf")
    return {key: value for key, _, value in settings}


def check_writable(option: str, path: Path) -> None:
    """Asked of the file system itself, which leaves an empty file where there was none."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidConfig(f"{option} {path} cannot be written: {error.strerror}") from error


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
        names = [checkpoint_name(record.checkpoint_id) for record in InspectedRoot(Path(root)).retained()]
    except TidegateError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def complete_stage(context: typer.Context, incomplete: str) -> list[str]:
    """The shell offers the names of the stages that the newest checkpoint has."""
    root = context.params.get("root")
    if root is None:
        return []
    try:
        inspected = InspectedRoot(Path(root))
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
