"""Writes readings of sensors as files of JSON, bit by bit, after those that are there already."""

import argparse
import json
import random
import time
from pathlib import Path

INPUT = Path(__file__).parent / "input" / "readings"
ROWS = 50


def readings(number: int) -> list[dict[str, object]]:
    chance = random.Random(number)
    return [
        {"sensor": f"sensor {chance.randrange(10)}", "number": each, "value": chance.randrange(1000)}
        for each in range(number * ROWS, (number + 1) * ROWS)
    ]


def write(number: int) -> None:
    """Whole: Spark does not look at a name with a dot, and must not see half a file."""
    INPUT.mkdir(parents=True, exist_ok=True)
    hidden = INPUT / f".{number:06d}.json"
    hidden.write_text("\n".join(json.dumps(row) for row in readings(number)), encoding="utf-8")
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
    print(f"{options.files * ROWS:,} readings written, {(first + options.files) * ROWS:,} in all")


if __name__ == "__main__":
    main()
