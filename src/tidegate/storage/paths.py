"""Every path under a root, built in one place.

<root>/
  pipeline.json                          whose root this is
  lock                                   held by the run that lives
  instances/<name>.lock                  held by each of several instances, while they live
  instances/<name>.spark.log             Spark's own messages there
  coordination/…                         what instances say to each other; nothing that a restart needs
  status.json                            what the run is doing, or how it ended
  status.reserve                         room to say that where the disk is full
  requests/<id>.request, .answer         what a live run is asked for, and what it answered
  spark.log                              Spark's own messages, where Tidegate started it
  decisions/000000000017.json            the decision log, one record a slot
  ids/000000000042                       checkpoint ids that were used
  history/<first>-<writer>….json         what has happened, in pages; nothing that a restart needs
  writing/                               what of these is not whole yet; nothing that a restart needs
  pins/<id>/…                            second names of a checkpoint's files while it is copied to elsewhere
  fork.json                              of a fork: what it was made from, and its own tables
  coordination/<key>@<version>           what driver processes share, where they share nothing but the root
  sinks/<stage>/                         what a sink without a table of its own remembers
  generations/000003/
    briefing.json                        what each instance runs of it, where there are several
    manifests/ckpt-000042.json
    snapshots/<stage>/ckpt-000042/…      files of Spark's checkpoint folder, by their path in it, since that checkpoint
    snapshots/<stage>/ckpt-000042/full/… the same, stored anew by a full snapshot
    lists/<stage>/ckpt-000042.json       which files snapshots have, by what has changed since a list before it
    in-flight/<stage>/ckpt-000042/…      what was in flight from a stage, of one that was brought from elsewhere
    stages/<stage>/spark/                Spark's checkpoint folder (the batch log and state)
    stages/<stage>/gates/<input>/        what the stage may read of an input
    stages/<stage>/output/               the Parquet files of the stage's channel
    stages/<stage>/spark-2/, output-2/   the same of a second attempt, after the stage was paused
    stages/<stage>/streams.json          what a source reads
    stages/<stage>/nothing.parquet       no rows: makes a reader that was restored run a batch
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tidegate.protocol.names import checkpoint_id_of, checkpoint_name

_NO_PARTS: Final = frozenset(("", ".", ".."))


class RootPaths:
    """Paths under one root. Names relative to the root use `/` and are what manifests hold."""

    def __init__(self, root: Path) -> None:
        self.root = root

    PIPELINE = "pipeline.json"
    STATUS = "status.json"
    STATUS_RESERVE = "status.reserve"
    REQUESTS = "requests"
    DECISIONS = "decisions"
    IDS = "ids"
    WRITING = "writing"
    PINS = "pins"
    FORK = "fork.json"
    COORDINATION = "coordination"
    HISTORY = "history"
    LAST_WORDS = f"{HISTORY}/last-words.json"
    """What the run before said, of which the history may not have all."""
    GENERATIONS = "generations"
    IN_FLIGHT = "in-flight"

    @staticmethod
    def is_inside(name: str) -> bool:
        """Whether a name, taken from a folder, stays below it: as it is written, whatever links there are."""
        return _NO_PARTS.isdisjoint(name.split("/")) and "\0" not in name

    def absolute(self, name: str) -> Path:
        return self.root / name

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    def spark_log_of(self, instance: str | None) -> Path:
        """Of Spark where one of several instances has started it, if that is given."""
        return self.spark_log if instance is None else self.root / "instances" / f"{instance}.spark.log"

    @property
    def spark_log(self) -> Path:
        return self.root / "spark.log"

    @staticmethod
    def decision(slot: int) -> str:
        return f"{RootPaths.DECISIONS}/{slot:012d}.json"

    @staticmethod
    def slot_of(decision: str) -> int:
        return int(decision.rpartition("/")[2].removesuffix(".json"))

    @staticmethod
    def used_id(checkpoint_id: int) -> str:
        return f"{RootPaths.IDS}/{checkpoint_id:012d}"

    @staticmethod
    def generation(generation: int) -> str:
        return f"{RootPaths.GENERATIONS}/{generation:06d}"

    @staticmethod
    def briefing(generation: int) -> str:
        return f"{RootPaths.generation(generation)}/briefing.json"

    @staticmethod
    def manifest(generation: int, checkpoint_id: int) -> str:
        return f"{RootPaths.generation(generation)}/manifests/{checkpoint_name(checkpoint_id)}.json"

    @staticmethod
    def snapshot_file(generation: int, stage: str, checkpoint_id: int, file: str) -> str:
        return f"{RootPaths.generation(generation)}/snapshots/{stage}/{checkpoint_name(checkpoint_id)}/{file}"

    @staticmethod
    def full_snapshot_file(generation: int, stage: str, checkpoint_id: int, file: str) -> str:
        return RootPaths.snapshot_file(generation, stage, checkpoint_id, f"full/{file}")

    @staticmethod
    def file_list(generation: int, stage: str, checkpoint_id: int) -> str:
        return f"{RootPaths.generation(generation)}/lists/{stage}/{checkpoint_name(checkpoint_id)}.json"

    @staticmethod
    def kept_for(name: str) -> int | None:
        """The checkpoint that a manifest is of, that a list or a file of a snapshot was kept for, or with which one in
        flight was brought; None: it is none of these."""
        parts = name.split("/")
        of = (
            {"manifests": 3, "snapshots": 4, "lists": 4, RootPaths.IN_FLIGHT: 4}.get(parts[2])
            if len(parts) > 3
            else None
        )
        return None if of is None or of >= len(parts) else checkpoint_id_of(parts[of].removesuffix(".json"))

    @staticmethod
    def is_of_snapshot(name: str) -> bool:
        return name.split("/")[2] == "snapshots"

    @staticmethod
    def is_working(name: str) -> bool:
        """Whether it is where Spark works, and was not kept from there."""
        return name.split("/")[2] == "stages"

    @staticmethod
    def kept_folder(name: str) -> str:
        """The folder of all that was kept for the same checkpoint as this file of a snapshot."""
        return "/".join(name.split("/")[:5])

    @staticmethod
    def generation_of(name: str) -> int:
        """The one whose folder a name leads through."""
        return int(name.split("/")[1])

    @staticmethod
    def carried_in_flight(generation: int, checkpoint_id: int, name: str) -> str:
        """Where a file in flight is when its checkpoint was brought from elsewhere. Not where a run of the generation
        writes: who is killed before the generation is decided leaves it to another one."""
        _, _, folder, stage, *rest = name.split("/")
        inside = rest[1:] if folder == RootPaths.IN_FLIGHT else rest
        top = f"{RootPaths.generation(generation)}/{RootPaths.IN_FLIGHT}/{stage}/{checkpoint_name(checkpoint_id)}"
        return "/".join((top, *inside))

    @staticmethod
    def stage_of(name: str) -> str:
        """The stage whose folder in a generation a name leads through."""
        return name.split("/")[3]

    @staticmethod
    def sink(stage: str) -> str:
        return f"sinks/{stage}"

    @staticmethod
    def stage(generation: int, stage: str) -> str:
        return f"{RootPaths.generation(generation)}/stages/{stage}"

    @staticmethod
    def gate(generation: int, stage: str, input_name: str) -> str:
        return f"{RootPaths.stage(generation, stage)}/gates/{input_name}"

    @staticmethod
    def nothing(generation: int, stage: str) -> str:
        return f"{RootPaths.stage(generation, stage)}/nothing.parquet"

    @staticmethod
    def source_streams(generation: int, stage: str) -> str:
        return f"{RootPaths.stage(generation, stage)}/streams.json"

    @staticmethod
    def spark_checkpoint(generation: int, stage: str, attempt: int = 1) -> str:
        return f"{RootPaths.stage(generation, stage)}/spark{_suffix(attempt)}"

    @staticmethod
    def output(generation: int, stage: str, attempt: int = 1) -> str:
        return f"{RootPaths.stage(generation, stage)}/output{_suffix(attempt)}"


def _suffix(attempt: int) -> str:
    """The first attempt of a stage in a generation is all that most have."""
    return "" if attempt == 1 else f"-{attempt}"


def attempt_of(folder: str) -> int | None:
    """The attempt whose folder in the stage's has this name; None: it is of none."""
    name, _, number = folder.partition("-")
    return int(number or 1) if name in ("spark", "output") else None
