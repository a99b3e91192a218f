"""SGLang's own launcher, once it is certain that our backend is used: SGLang only logs what a plug-in raises."""

from __future__ import annotations

import runpy
import sys

from kvferry.cli import console, environment
from kvferry.connectors.sglang.plugin import check_loaded
from kvferry.errors import FerryError


def main() -> None:
    """Takes SGLang's options. Ends with code 2 and the reason where our backend would not be used."""
    try:
        check_loaded()
    except FerryError as error:
        console.print_error(error)
        raise SystemExit(2) from None
    # Everybody on this host can read command lines. Options of the user's own come last, and so they count.
    sys.argv[1:1] = [word for key in environment.api_keys() for word in ("--api-key", key)]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


# The processes that SGLang starts import this file once more.
if __name__ == "__main__":
    main()
