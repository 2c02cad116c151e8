"""Writes clicks of visitors as files of JSON, bit by bit, after those that are there already.

A file has the clicks of five minutes, in no order, and a few of the five minutes before. Every visitor comes, looks
around, and is gone for a while.
"""

import argparse
import json
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

INPUT = Path(__file__).parent / "input" / "clicks"
START = datetime(2026, 1, 1, tzinfo=UTC)
SECONDS = 300
VISITORS = 20
VISIT_EVERY = 3600
VISIT_LASTS = 900


def clicks(number: int) -> list[dict[str, object]]:
    """Those of a file's five minutes, the same whenever they are asked for."""
    chance = random.Random(number)
    rows: list[dict[str, object]] = []
    for visitor in range(VISITORS):
        for second in range(number * SECONDS, (number + 1) * SECONDS, 60):
            is_here = (second + visitor * VISIT_EVERY // VISITORS) % VISIT_EVERY < VISIT_LASTS
            if is_here and chance.random() < 0.7:
                moment = START + timedelta(seconds=second + chance.randrange(60))
                page = chance.choice(["/", "/shop", "/cart", "/help"])
                rows.append({"visitor": f"visitor {visitor}", "ts": moment.isoformat(), "page": page})
    chance.shuffle(rows)
    return rows


def delivered(number: int) -> list[dict[str, object]]:
    """What a file brings: every fifth click comes with the next one."""
    late = clicks(number - 1)[::5] if number else []
    return [row for each, row in enumerate(clicks(number)) if each % 5] + late


def write(number: int) -> None:
    """Whole: Spark does not look at a name with a dot, and must not see half a file."""
    INPUT.mkdir(parents=True, exist_ok=True)
    hidden = INPUT / f".{number:06d}.json"
    hidden.write_text("\n".join(json.dumps(row) for row in delivered(number)), encoding="utf-8")
    hidden.rename(INPUT / f"{number:06d}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20, help="how many to write (%(default)s)")
    parser.add_argument("--every", type=float, default=0, help="seconds between two of them (%(default)s)")
    options = parser.parse_args()
    first = len(list(INPUT.glob("*.json")))
    for number in range(first, first + options.files):
        write(number)
        # Spark takes files in the order of their times, which it knows to the millisecond.
        time.sleep(max(options.every, 0.01))
    print(f"{options.files} files written, {first + options.files} in all")


if __name__ == "__main__":
    main()
