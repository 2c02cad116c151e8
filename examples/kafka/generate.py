"""Prints payments, one a line, for Kafka's console producer; one of fifty is broken."""

import argparse
import json
import random
import time


def message(number: int) -> str:
    chance = random.Random(number)
    payment = {"id": number, "account": f"account {chance.randrange(20)}", "amount": chance.randint(-500, 500)}
    text = json.dumps(payment)
    return text if number % 50 else text[:-10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (%(default)s)")
    parser.add_argument("--every", type=float, default=0, help="seconds between two of them (%(default)s)")
    options = parser.parse_args()
    for number in range(options.first, options.first + options.count):
        print(message(number), flush=bool(options.every))
        time.sleep(options.every)


if __name__ == "__main__":
    main()
