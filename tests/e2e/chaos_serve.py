"""`kvferry` whose tcp transport waits at a gate: `python chaos_serve.py GATE serve …`."""

import sys
from pathlib import Path

from kvferry.cli.main import main
from kvferry.transport import registry
from kvferry.transport.tcp.transport import TcpTransport

sys.path.insert(0, str(Path(__file__).parents[1]))

from faulty_transport import GatedTransport

gate = Path(sys.argv.pop(1))
registry.OPENERS["tcp"] = lambda *_: GatedTransport(TcpTransport(), gate.exists)
main()
