"""Slices of threads on the system at hand; where it knows none, that nothing else happens."""

import json
import os
import subprocess
import sys
import threading

import pytest

from kvferry.agent.control import time_slice
from kvferry.agent.control.time_slice import SLICE_NS, Scheduling, short_slices

found = Scheduling.of()
sliced = pytest.mark.skipif(
    found is None or found.runtime_ns == 0 or found.policy not in (os.SCHED_OTHER, os.SCHED_BATCH),
    reason="this kernel knows no slices of threads, or the tests do not run with one",
)
# In a process of its own, where nobody else starts threads or changes what they have.
CARRYING = """
import os
from kvferry.agent.control.channel import ControlChannel
from kvferry.agent.control.shared_token import NO_TOKEN, SharedToken
from kvferry.agent.control.time_slice import Scheduling
before = set(os.listdir("/proc/self/task"))
channel = ControlChannel("127.0.0.1", 0, {token})
started = set(os.listdir("/proc/self/task")) - before
print(*(Scheduling.of(int(thread_id)).runtime_ns for thread_id in started), ";", Scheduling.of().runtime_ns)
channel.close()
"""
AROUND = """
import json, os
from kvferry.agent.control.time_slice import Scheduling, short_slices
def seen():
    found = Scheduling.of()
    return {{"runtime_ns": found.runtime_ns, "rest": [found.policy, found.nice, found.flags, found.priority]}}
{change}
before = seen()
with short_slices():
    inside = seen()
print(json.dumps([before, inside, seen()]))
"""
# A thread that is promised so much time in every period: what is a slice to others is the promise to this one.
PROMISED = """
import sys
from kvferry.agent.control.time_slice import _call
import ctypes
promised = Scheduling.of()
promised.policy, promised.nice = 6, 0
promised.runtime_ns, promised.deadline_ns, promised.period_ns = 2_000_000, 50_000_000, 50_000_000
if not _call("sched_setattr", 0, ctypes.byref(promised), 0):
    sys.exit("refused")
"""
CHANGES = {
    "nothing": "",
    "nicer": "os.nice(3)",
    "a slice of its own": "Scheduling.of().apply(3_000_000)",
    "batch": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    "reset on fork": "os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))",
}


def printed_by(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def around(change):
    """What a process has before, inside and after."""
    return json.loads(printed_by(AROUND.format(change=change)))


def slice_of_a_new_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(Scheduling.of()))
    thread.start()
    thread.join()
    return seen[0].runtime_ns


@sliced
def test_threads_that_are_started_inside_have_short_slices_and_nobody_else():
    own_ns = Scheduling.of().runtime_ns
    with short_slices():
        assert slice_of_a_new_thread() == SLICE_NS == 100_000
    assert Scheduling.of().runtime_ns == own_ns > SLICE_NS
    assert slice_of_a_new_thread() == own_ns


@sliced
def test_one_s_own_slice_is_back_after_an_error():
    own_ns = Scheduling.of().runtime_ns
    with pytest.raises(KeyError), short_slices():
        raise KeyError
    assert Scheduling.of().runtime_ns == own_ns


@sliced
@pytest.mark.parametrize("token", ["NO_TOKEN", "SharedToken(bytes(range(32)))"])
def test_threads_that_carry_messages_have_short_slices(token):
    slices, own = printed_by(CARRYING.format(token=token)).split(";")
    assert set(slices.split()) == {str(SLICE_NS)}
    assert int(own) > SLICE_NS


@sliced
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_all_else_that_a_thread_has_stays_and_its_slice_comes_back(change):
    before, inside, after = around(change)
    assert inside == {**before, "runtime_ns": SLICE_NS}
    assert after == before


@sliced
def test_policies_that_mean_something_else_by_it_are_left_alone():
    try:
        before, inside, after = around(PROMISED)
    except subprocess.CalledProcessError as error:
        if "refused" not in error.stderr:
            raise
        pytest.skip("the system promises us no time: that needs rights")
    assert before == inside == after
    assert (before["runtime_ns"], before["rest"][0]) == (2_000_000, 6)


@pytest.mark.parametrize(
    "calls",
    [{}, {os.uname().machine: {"sched_setattr": -1, "sched_getattr": -1}}],
    ids=["a processor we do not know", "a call that does not exist"],
)
def test_where_the_system_knows_nothing_of_it_nothing_happens(calls, monkeypatch):
    monkeypatch.setattr(time_slice, "_CALLS", calls)
    assert Scheduling.of() is None
    with short_slices():
        thread = threading.Thread(target=os.getpid)
        thread.start()
        thread.join()


@sliced
def test_a_slice_that_is_refused_is_no_error(monkeypatch):
    own_ns, call = Scheduling.of().runtime_ns, time_slice._call
    monkeypatch.setattr(time_slice, "_call", lambda name, *rest: name != "sched_setattr" and call(name, *rest))
    with short_slices():
        assert slice_of_a_new_thread() == own_ns
