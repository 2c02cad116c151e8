"""Writes orders and payments as files of JSON, bit by bit, after those that are there already.

Orders come one a second, a hundred to a file. Nine of ten are paid, up to half an hour later, and their payments come
with the file after theirs.
"""

import argparse
import json
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

INPUT = Path(__file__).parent / "input"
START = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = 100


def orders(number: int) -> list[dict[str, object]]:
    """Those of a file, the same whenever they are asked for."""
    chance = random.Random(number)
    return [
        {
            "id": each,
            "ts": (START + timedelta(seconds=each)).isoformat(),
            "country": chance.choice(["DE", "FR", "IT", "PL"]),
            "amount": chance.randint(1, 500),
        }
        for each in range(number * ROWS, (number + 1) * ROWS)
    ]


def payments(number: int) -> list[dict[str, object]]:
    chance = random.Random(-number)
    return [
        {"order_id": each, "paid_at": (START + timedelta(seconds=each + chance.randint(1, 1800))).isoformat()}
        for each in range((number - 1) * ROWS, number * ROWS)
        if each >= 0 and chance.random() < 0.9
    ]


def write(folder: Path, number: int, rows: list[dict[str, object]]) -> None:
    """Whole: Spark does not look at a name with a dot, and must not see half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{number:06d}.json"
    hidden.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    hidden.rename(folder / f"{number:06d}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20, help="how many to write (%(default)s)")
    parser.add_argument("--every", type=float, default=0, help="seconds between two of them (%(default)s)")
    options = parser.parse_args()
    first = len(list(INPUT.glob("orders/*.json")))
    for number in range(first, first + options.files):
        write(INPUT / "orders", number, orders(number))
        write(INPUT / "payments", number, payments(number))
        # Spark takes files in the order of their times, which it knows to the millisecond.
        time.sleep(max(options.every, 0.01))
    print(f"{options.files * ROWS:,} orders written, {(first + options.files) * ROWS:,} in all")


if __name__ == "__main__":
    main()
