"""Writes into ARCHITECTURE.md what the protocol's own tables say: `./dev docs`.

A part between `<!-- made from NAME -->` and `<!-- end -->` is replaced. `--check` changes nothing and exits
with 1 if a part is not what it should be.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from tidegate.protocol import aligner, backpressure, commit, coordinator, decision_log, recovery

_DOCUMENT = Path(__file__).parents[1] / "ARCHITECTURE.md"
_PART = re.compile(r"<!-- made from (?P<name>\w+) -->\n.*?<!-- end -->", re.DOTALL)


def state_diagram(table: Mapping[tuple[Any, Any], Any], start: Enum) -> str:
    """A Mermaid diagram of a table of transitions. States without a way out are final."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {start.name}"]
    for (state, event), target in table.items():
        lines.append(f"    {state.name} --> {target.name}: {event.value}")
    leaves = {state for state, _ in table}
    reached = dict.fromkeys(table.values())
    lines += [f"    {state.name} --> [*]" for state in reached if state not in leaves]
    return "\n".join([*lines, "```"])


def variants(union: object) -> str:
    """One sentence per variant of a decision type: the first sentence of its docstring."""
    rows = ["| decision | what is done |", "|---|---|"]
    for variant in get_args(union):
        said = " ".join((inspect.getdoc(variant) or "").split())
        rows.append(f"| `{variant.__name__}` | {said} |")
    return "\n".join(rows)


def answers(kind: type[Enum]) -> str:
    rows = ["| answer | what it means |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{answer.name}` | {answer.value} |" for answer in kind)])


PARTS: dict[str, Callable[[], str]] = {
    "coordinator": lambda: state_diagram(coordinator.TRANSITIONS, coordinator.Phase.PREPARING),
    "aligner": lambda: state_diagram(aligner.TRANSITIONS, aligner.AlignmentPhase.ALIGNING),
    "backpressure": lambda: state_diagram(backpressure.TRANSITIONS, backpressure.WriterPhase.FLOWING),
    "commit": lambda: state_diagram(commit.TRANSITIONS, commit.SinkPhase.SETTLED),
    "recovery": lambda: variants(recovery.RecoveryDecision),
    "decision_log": lambda: answers(decision_log.ClaimAnswer),
}


def rendered(text: str) -> str:
    """The document with every part as it should be. All parts must be in it."""
    found = [match["name"] for match in _PART.finditer(text)]
    if sorted(found) != sorted(PARTS):
        raise SystemExit(f"ARCHITECTURE.md has the parts {sorted(found)}, but should have {sorted(PARTS)}")

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- made from {match['name']} -->\n{PARTS[match['name']]()}\n<!-- end -->"

    return _PART.sub(replaced, text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Redraw the generated parts of ARCHITECTURE.md.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if something would")
    arguments = parser.parse_args()
    text = _DOCUMENT.read_text(encoding="utf-8")
    wanted = rendered(text)
    if arguments.check:
        return int(text != wanted)
    _DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
