"""Signals to commands that have started others."""

from __future__ import annotations

import signal


def end_as_ctrl_c() -> None:
    """Have every signal that asks a command to end raise KeyboardInterrupt: what it has started ends with it then."""
    # A shell without job control has its background jobs ignore SIGINT: whoever ends the script means this, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    # It comes when the terminal is closed, and nohup has it ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
