"""A fleet whose engines and router are each on a host of their own, and the test beside them: `make e2e-hosts`."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from pathlib import Path

from hosts import Network

from kvferry.cli.child_processes import Child
from kvferry.cli.up.fleet import Fleet, FleetOptions

# Several fleets may be there at a time, each in a network of its own.
numbers = itertools.count()
# Where caches move inside one host, something else has to do it here.
INSIDE = ("shm", "cma")


class FleetOnHosts(Fleet):
    """Started, read and ended like any other."""

    def __init__(self, options: FleetOptions, logs: Path) -> None:
        super().__init__(options, logs, self._child_on_its_host)
        engines = [f"prefill-{number}" for number in range(options.num_prefill)]
        engines += [f"decode-{number}" for number in range(options.num_decode)]
        self._token = logs / "token"
        self._token.touch(0o600)
        self._token.write_text(secrets.token_hex(32))
        number = next(numbers)
        self._network = Network("switch", *engines, "router", prefix=f"10.77.{number}.")
        self._network.join_home(f"fleet{number}", f"10.77.{number}.200")

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._network.close()

    def _child_on_its_host(
        self, name: str, arguments: tuple[str, ...], log: Path, port: int, variables: Mapping[str, str] | None
    ) -> Child:
        host = self._network.hosts[name]
        if "--host" not in arguments:
            arguments = tuple("auto" if word in INSIDE else word for word in arguments)
            arguments += ("--host", host.address)
            if name != "router":
                arguments += ("--transfer-host", host.address, "--token-file", str(self._token))
        return host.do(lambda: Child(name, arguments, log, port, variables))
