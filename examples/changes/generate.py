"""Writes changes of customers as files of JSON, bit by bit, after those that are there already.

As a capture of a database does that retries: some changes come later than newer ones, some come twice.
"""

import argparse
import json
import random
import time
from pathlib import Path

INPUT = Path(__file__).parent / "input" / "changes"
ROWS = 100
CUSTOMERS = 300


def changes(number: int) -> list[dict[str, object]]:
    """Those of a file, with sequence numbers of their own, the same whenever they are asked for."""
    chance = random.Random(number)
    rows: list[dict[str, object]] = []
    for seq in range(number * ROWS, (number + 1) * ROWS):
        row: dict[str, object] = {"seq": seq, "op": chance.choice(["update"] * 8 + ["insert", "delete"])}
        row["id"] = chance.randrange(CUSTOMERS)
        if row["op"] != "delete":
            row |= {"name": f"customer {row['id']}", "city": chance.choice(["Bremen", "Lyon", "Turin", "Gdansk"])}
            row["credit"] = chance.randint(0, 1000)
        rows.append(row)
    return rows


def delivered(number: int) -> list[dict[str, object]]:
    """What a file brings: of its own changes those with an even number, the odd ones of the file before, some again."""
    late = [row for row in changes(number - 1) if number and int(str(row["seq"])) % 2]
    rows = [row for row in changes(number) if int(str(row["seq"])) % 2 == 0] + late
    chance = random.Random(-number)
    rows += chance.sample(rows, ROWS // 10)
    chance.shuffle(rows)
    return rows


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
