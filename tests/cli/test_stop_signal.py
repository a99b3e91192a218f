"""Signals that come at any moment of a wait."""

import signal
import subprocess
import sys
import time

STORM = """
import os, signal
from kvferry.cli.server.stop_signal import StopSignal

class Storm(StopSignal):
    '''Forgets, so that it can be told again and again.'''
    def wait(self, timeout_s):
        told, self._has_come = super().wait(timeout_s), False
        return told

told = Storm()
told.listen()
print("listening", flush=True)
num_told = 0
while num_told < 3000:
    num_told += told.wait(0.0001)
os._exit(0)
"""
DEADLINE_S = 60.0


def test_no_moment_of_a_wait_is_a_bad_one_for_a_signal():
    with subprocess.Popen([sys.executable, "-c", STORM], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None and time.monotonic() < deadline:
                process.send_signal(signal.SIGTERM)
            assert process.poll() == 0
        finally:
            process.kill()


def test_it_is_told_once_and_stays_told():
    code = """
import os, signal
from kvferry.cli.server.stop_signal import StopSignal
told = StopSignal()
told.listen()
assert not told.wait(0.0)
os.kill(os.getpid(), signal.SIGINT)
assert told.wait(5.0) and told.wait(0.0)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False).returncode == 0
