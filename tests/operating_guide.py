"""The commands of docs/operating.md, by its sections."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "operating.md"


def commands_of(section: str) -> list[str]:
    """Those of a section of the guide, by its heading."""
    _, _, text = GUIDE.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    assert text, section
    fenced = re.findall(r"```sh\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
    return [line for block in fenced for line in block.splitlines() if line]


def sections() -> list[str]:
    return re.findall(r"^## (.*)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
