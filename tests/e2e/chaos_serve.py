"""`kvferry` whose tcp transport waits at a gate: `python chaos_serve.py GATE serve …`."""

import sys
from pathlib import Path

from kvferry.cli.main import main
from kvferry.transport import registry

sys.path.insert(0, str(Path(__file__).parents[1]))

from faulty_transport import GatedTransport

gate = Path(sys.argv.pop(1))
open_tcp = registry.OPENERS["tcp"]
registry.OPENERS["tcp"] = lambda *settings: GatedTransport(open_tcp(*settings), gate.exists)
main()
