"""`kvferry` on a host whose clock is wrong: `python late_serve.py GATE serve …`. It is an hour late."""

import sys
import time

OFF_S = 3600.0
now, now_ns = time.time, time.time_ns
time.time = lambda: now() - OFF_S
time.time_ns = lambda: now_ns() - int(OFF_S * 1e9)
sys.argv.pop(1)

from kvferry.cli.main import main  # noqa: E402

main()
