"""Reads the tables at the newest checkpoint that is aligned and that they show, and what was sent."""

import json
import sys
from pathlib import Path

import tidegate
from tidegate.errors import UnknownCheckpoint

FOLDER = Path(__file__).parent

try:
    tables = tidegate.read(FOLDER / "state")
except UnknownCheckpoint as none_is_aligned:
    sys.exit(str(none_is_aligned))
readings, scores = tables["readings"].to_pandas(), tables["scores"].to_pandas()
print(f"{tables.checkpoint}: {len(readings):,} readings, {len(scores):,} of them scored")
epochs = sorted((FOLDER / "outbox").glob("*.json"))
sent = [alert["number"] for path in epochs for alert in json.loads(path.read_text(encoding="utf-8"))]
print(f"{len(sent):,} alerts sent in {len(epochs)} epochs, {len(sent) - len(set(sent))} of them twice")
