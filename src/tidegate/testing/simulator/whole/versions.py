"""The versions of a simulated pipeline: which stages it has, by which names, and what each of them reads.

Somebody changes it while it runs: a table comes, another one goes, a stage is put between two others, stages get other
names. A change that is refused, because something is in flight or a table is late, is taken back and made again later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tidegate.engine.changes import Meant
from tidegate.testing.simulator.dag import Dag, StageSpec


class Changes(msgspec.Struct, frozen=True):
    """What becomes of a pipeline while it runs, by the names of the DAG, which has all that it ever has."""

    late: tuple[str, ...] = ()
    """Stages that it does not have at first."""
    gone: tuple[str, ...] = ()
    """Stages that it has at first only."""
    between: tuple[str, str] | None = None
    """A stage that it does not have at first, and the one that reads it then, instead of what that reads."""
    renamed: Mapping[str, str] = {}
    """Other names of stages."""

    @property
    def new(self) -> frozenset[str]:
        """Those that start behind rows."""
        return frozenset((*self.late, *(self.between[:1] if self.between is not None else ())))

    def __bool__(self) -> bool:
        return bool(self.late or self.gone or self.between or self.renamed)


class Versions:
    def __init__(self, dag: Dag, changes: Changes) -> None:
        self._dag = dag
        self._changes = changes
        self.has_late = not changes.late
        self.has_gone = bool(changes.gone)
        """Whether those are still there that are to go."""
        self.has_between = False
        self.has_renamed = False
        self._own = {new: old for old, new in changes.renamed.items()}

    def change(self, what: str) -> None:
        match what:
            case "late":
                self.has_late = True
            case "gone":
                self.has_gone = False
            case "between":
                self.has_between = self._changes.between is not None
            case "renamed":
                self.has_renamed = bool(self._changes.renamed)

    def change_all(self) -> None:
        for what in Changes.__struct_fields__:
            self.change(what)

    def take_back(self, refusal: str) -> None:
        """What was refused, for now."""
        if "is gone since" in refusal:
            self.has_gone = True
        elif "had inputs" in refusal:
            self.has_between = not self.has_between
        else:
            self.has_renamed = not self.has_renamed

    def own(self, name: str) -> str:
        """What a stage is called in the DAG."""
        return self._own.get(name, name)

    def names_of(self, own: str) -> tuple[str, ...]:
        """All that a stage of the DAG is ever called."""
        return (own, *(new for old, new in self._changes.renamed.items() if old == own))

    def _now(self, own: str) -> str:
        return self._changes.renamed.get(own, own) if self.has_renamed else own

    def specs(self) -> dict[str, StageSpec]:
        """The stages that the pipeline has now, as they are called now, each after those that it reads."""
        found = (self._spec(spec) for spec in self._dag.stages.values() if self._has(spec.name))
        return {spec.name: spec for spec in found}

    def _has(self, own: str) -> bool:
        changes = self._changes
        if changes.between is not None and own == changes.between[0]:
            return self.has_between
        return self.has_late if own in changes.late else self.has_gone or own not in changes.gone

    def _spec(self, spec: StageSpec) -> StageSpec:
        inputs: Iterable[str] = spec.inputs
        if self._changes.between is not None and spec.name == self._changes.between[1] and self.has_between:
            inputs = (self._changes.between[0],)
        return msgspec.structs.replace(
            spec,
            name=self._now(spec.name),
            inputs=tuple(map(self._now, inputs)),
            twice=tuple(map(self._now, spec.twice)),
        )

    @property
    def meant(self) -> Meant:
        """What is said of the pipeline by whoever starts it: also that what goes may go, and that names go back."""
        renames = self._changes.renamed if self.has_renamed else self._own
        gone = () if self.has_gone else self._changes.gone
        between = () if self._changes.between is None or self.has_between else self._changes.between[:1]
        return Meant(dict(renames), (*gone, *between))
