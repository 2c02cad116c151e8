"""Finding the pipeline that a Python file defines."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from tidegate.errors import InvalidPipeline, TidegateError
from tidegate.spark.pipeline import Pipeline


def load_pipeline(file: Path, name: str | None) -> Pipeline:
    """The pipeline that a file defines."""
    module = _load(file)
    found = {value.name: value for value in vars(module).values() if isinstance(value, Pipeline)}
    if name is not None:
        if name not in found:
            raise InvalidPipeline(f"{file} defines no pipeline {name!r} (it defines: {', '.join(found) or 'none'})")
        return found[name]
    if len(found) != 1:
        raise InvalidPipeline(
            f"{file} defines {len(found)} pipelines ({', '.join(found) or 'none'}); "
            + ("name one with --pipeline" if found else "define one with tidegate.Pipeline(name)")
        )
    return next(iter(found.values()))


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tidegate_pipeline_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InvalidPipeline(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent.absolute()))
    try:
        spec.loader.exec_module(module)
    except TidegateError:
        raise
    except (Exception, SystemExit) as error:
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" at line {own[-1]}" if own else ""
        raise InvalidPipeline(f"{file} cannot be loaded{where}: {type(error).__name__}: {error}") from error
    return module
