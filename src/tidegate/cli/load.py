"""Finding the pipeline that a Python file defines."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from contextlib import chdir
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from tidegate.engine.pipeline import Pipeline
from tidegate.errors import InvalidPipeline, TidegateError
from tidegate.storage.places import Place

if TYPE_CHECKING:
    from tidegate.sinks.contract import Sink

_NO_SPARK_YET: Final = "SESSION_OR_CONTEXT_NOT_EXISTS"


def load_pipeline(file: Path, name: str | None, *, to_run: bool = False) -> Pipeline:
    """The pipeline that a file defines, which is loaded in its own folder: relative paths in it mean that.

    `to_run`: on Spark, whose workers then get the functions of the file too.
    """
    module = _load(file)
    if to_run:
        _give_to_workers(module, file)
    found: dict[str, Pipeline] = {}
    for value in vars(module).values():
        if isinstance(value, Pipeline) and found.setdefault(value.name, value) is not value:
            raise InvalidPipeline(f"{file} defines two pipelines called {value.name!r}; give one of them another name")
    if name is not None:
        if name not in found:
            raise InvalidPipeline(f"{file} defines no pipeline {name!r} (it defines: {', '.join(found) or 'none'})")
        return found[name]
    if not found:
        raise InvalidPipeline(
            f"{file} defines no pipeline; define one with tidegate.Pipeline(name), outside of functions"
        )
    if len(found) > 1:
        raise InvalidPipeline(f"{file} defines {len(found)} pipelines ({', '.join(found)}); name one with --pipeline")
    return next(iter(found.values()))


def sinks_in(file: Path | None, name: str | None, root: Place) -> dict[str, Sink]:
    """The sinks of the pipeline that a file defines, as they are on a root, whose tables nobody reaches without it;
    none without a file. What can be reached by what the root knows is: the file may say otherwise by now."""
    if file is None:
        return {}
    from tidegate.engine.forks import as_run_on
    from tidegate.sinks import outside

    sinks = as_run_on(load_pipeline(file, name), root.files).sinks
    return {name: sink for name, sink in sinks.items() if sink.table.kind not in outside.REACHED}


def _give_to_workers(module: ModuleType, file: Path) -> None:
    """No worker could import the file under the name that it has here, so its functions and classes travel whole.

    Modules beside it are imported by their names, which workers can do as well: they search where Spark's process does.
    """
    # Not above: who only looks at the file need not wait for it.
    cloudpickle: Any = importlib.import_module("pyspark.cloudpickle")
    cloudpickle.register_pickle_by_value(module)
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    folder = str(file.parent.absolute())
    if folder not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *known])


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tidegate_pipeline_{file.stem}", file.absolute())
    if spec is None or spec.loader is None:
        raise InvalidPipeline(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent.absolute()))
    try:
        with chdir(file.absolute().parent):
            spec.loader.exec_module(module)
    except TidegateError:
        raise
    except (Exception, SystemExit) as error:
        # Python names the file by its absolute path, however it was given.
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        where = f" at line {own[-1]}" if own else ""
        raise InvalidPipeline(f"{file} cannot be loaded{where}: {_what_is_wrong(error)}") from error
    return module


def _what_is_wrong(error: BaseException) -> str:
    if _needs_spark(error):
        return (
            "this needs Spark, which is started after the file is loaded. Make columns and UDFs inside the function of "
            "a stage; a UDF may stay where it is if its type is an object, such as LongType() instead of 'long'"
        )
    return f"{type(error).__name__}: {error}"


def _needs_spark(error: BaseException) -> bool:
    """PySpark says so of a UDF; of a column it only asserts, without a word."""
    if isinstance(error, AssertionError):
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        return "pyspark" in Path(raised_in).parts
    return _NO_SPARK_YET in str(error)
