"""A pipeline whose disk is filled while it runs, and freed again. Prints what was said, and what came of it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake

import tidegate as tg
from tests.full_disk import fill
from tidegate.engine.control import look
from tidegate.engine.run import run_pipeline
from tidegate.errors import TidegateError
from tidegate.storage.folder import Folder
from tidegate.storage.paths import RootPaths
from tidegate.storage.places import as_given

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidegate.engine.status import RunStatus

ROWS = 40


def make_pipeline(disk: Path, rows_folder: Path) -> tg.Pipeline:
    pipeline = tg.Pipeline("orders")

    @pipeline.source
    def rows(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(str(rows_folder))

    @pipeline.sink(tg.DeltaTable(disk / "table"))
    def kept(rows: DataFrame) -> DataFrame:
        return rows

    return pipeline


def status_of(root: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tidegate", "status", "--root", str(root)], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


class Watcher(threading.Thread):
    """Notes whatever is to be seen of a run from outside."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self._paths = RootPaths(root)
        self._files = Folder(root)
        self.seen: set[tuple[str, str, str]] = set()
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            life, status = look(as_given(self._paths.root))
            if status is not None:
                self.seen.add((life.value, status.state, status.why or ""))
            time.sleep(0.02)


def main(disk: Path, rows_folder: Path) -> None:
    root = disk / "root"
    for number in range(ROWS):
        (rows_folder / f"{number:03d}.json").write_text(json.dumps({"id": number}), encoding="utf-8")
    pipeline = make_pipeline(disk, rows_folder)
    told: list[str] = []
    logs = logging.Handler(logging.WARNING)
    logs.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tidegate").addHandler(logs)
    filler: list[Path] = []

    def view(status: RunStatus) -> None:
        if not filler and any(each.state == "complete" and each.new_bytes for each in status.checkpoints):
            filler.append(fill(disk))

    watcher = Watcher(root)
    found: dict[str, Any] = {"error": "none"}
    try:
        root.mkdir()
        watcher.start()
        run_pipeline(
            pipeline,
            root,
            view=view,
            checkpoint_interval="300ms",
            restarts=1,
            restart_pause="1500ms",
            available_now=True,
        )
    except TidegateError as error:
        found["error"] = str(error)
    watcher.is_over = True
    watcher.join()
    found |= {"told": told, "seen": sorted(watcher.seen), "status": status_of(root)}
    filler[0].unlink()
    run_pipeline(pipeline, root, available_now=True)
    found["ids"] = sorted(deltalake.DeltaTable(disk / "table").to_pyarrow_table()["id"].to_pylist())
    found["status after"] = status_of(root)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
