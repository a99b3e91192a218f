"""`python -m kvferry`: the same as the command `kvferry`."""

from kvferry.cli.main import main

__all__: list[str] = []

main()
