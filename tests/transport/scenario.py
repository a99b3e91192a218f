"""One scenario of the matrix: test transports to a peer that may live elsewhere, and diagnose what was found.

`python scenario.py JSON` prints JSON: per transport its error, its carriers and the findings about it, and where the
peer is. `prefix` is the command that runs the peer, `host` where its sockets are. Without `may_trace` there can be only
one name: the capability is gone then for the next peer, too.
"""

from __future__ import annotations

import ctypes
import json
import sys

from kvferry.errors import FerryError
from kvferry.plan.programs.copies import Direction
from kvferry.testing.transports.peer import PeerProcess, make_transport
from kvferry.transport.selection.diagnosis import diagnose, local_context
from kvferry.transport.selection.self_test import measure

VERSION_3 = 0x20080522
CAP_SYS_PTRACE = 1 << 19
EFFECTIVE, PERMITTED = 0, 1


def give_up_tracing() -> None:
    """From now on this thread lacks a capability that the peer has, and so may not read its memory."""
    library = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if library.capget(header, data) == 0:
        for word in (EFFECTIVE, PERMITTED):
            data[word] &= ~CAP_SYS_PTRACE
        library.capset(header, data)


def main(names: list[str], prefix: list[str], host: str, may_trace: bool) -> None:
    rows = {}
    for name in names:
        with PeerProcess(name, 1 << 20, 5, prefix, host) as peer:
            if not may_trace:
                give_up_tracing()
            context, transport = local_context("auto"), make_transport(name)
            place = context.place_of(peer.host)
            try:
                transport.connect("peer", peer.descriptor)
            except FerryError as error:
                rows[name] = {"error": str(error), "carriers": [], "findings": []}
                continue
            found = measure(transport, "peer", peer.probe)
            findings = [str(finding) for finding in diagnose(found, Direction.READ, place, context)]
            error = found.error or found.writing.error
            rows[name] = {"error": error, "carriers": found.carriers, "findings": findings}
        transport.close()
    print(json.dumps({"place": place, "rows": rows}))


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    main(wanted["names"], wanted["prefix"], wanted["host"], wanted["may_trace"])
