"""`python -m tidegate` is the `tidegate` command."""

from tidegate.cli.app import main

main()
