"""`python -m tidegate` is the `tidegate` command."""

from tidegate.cli import interrupts


def main() -> None:
    interrupts.expect()
    # Not above: it takes a while, in which somebody may have thought better of it.
    from tidegate.cli.app import main as command

    command()


if __name__ == "__main__":
    main()
