"""`kvferry up` starts again what dies, and what does not come up keeps nothing else from serving."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.cli.child_processes import STOP_S
from kvferry.cli.up import fleet as module
from kvferry.cli.up.fleet import MAX_RESTARTS, Fleet, FleetOptions
from kvferry.errors import ConfigurationError


class ScriptedChild:
    """Of a process only what a fleet sees. What it announces is its URL or why it cannot start, once it has spoken."""

    def __init__(self, name, arguments, log, port, variables):
        self.name, self.arguments, self.log, self.variables, self.port = name, arguments, log, variables, port
        self.running, self.ending, self.said, self.pid, self.is_told = True, "killed", None, 1, False

    def has_spoken(self):
        return self.said is not None

    def wait_until_ready(self, deadline):
        if not isinstance(self.said, dict):
            raise ConfigurationError(f"{self.name}: {self.said or 'did not become ready in time'}")
        return self.said

    def serve(self, port=5):
        self.said = {"url": f"http://127.0.0.1:{port}", "model": "tiny"}

    def die(self, why=""):
        self.running, self.said = False, why

    def terminate(self):
        """It hangs."""
        self.is_told = True

    def stop(self, within_s=None):
        assert within_s == 0.0
        self.running = False


@pytest.fixture
def scene(monkeypatch):
    """A fleet of one prefill and two decode engines that serve; a clock that the test moves."""
    found = SimpleNamespace(now=100.0, said=[], started=[])

    def start_child(*words):
        child = ScriptedChild(*words)
        found.started.append(child)
        if len(found.started) <= 4:
            child.serve(len(found.started))
        return child

    monkeypatch.setattr(module.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(module.console, "say", found.said.append)
    monkeypatch.setattr(module.listening, "listen", lambda host, port: SimpleNamespace(close=lambda: None))
    found.fleet = Fleet(FleetOptions(1, 2, (), 16, 16, 0, 0, ready_s=60.0), Path("logs"), start_child)
    found.fleet.start()
    return found


def look(scene, after_s=0.0):
    scene.now += after_s
    scene.fleet.restart_exited()


def test_what_dies_is_started_again_at_its_port_and_nobody_waits_for_it(scene):
    prefill, decode, other, _ = scene.started
    for child in (prefill, decode):
        child.die()
    look(scene)
    assert [(child.name, child.port) for child in scene.started[4:]] == [("prefill-0", 1), ("decode-0", 2)]
    look(scene, 1.0)
    scene.started[5].serve()
    other.die()
    look(scene, 1.0)
    assert scene.said[-1].startswith("decode-0 is ready")
    assert scene.started[-1].name == "decode-1"
    assert "prefill-0" in scene.fleet.names


def test_what_does_not_come_up_is_tried_again_later_and_the_others_go_on(scene):
    """Its port may be somebody else's for a while."""
    decode, pauses = scene.started[1], []
    decode.die()
    look(scene)
    for _ in range(7):
        scene.started[-1].die("cannot listen")
        look(scene)
        tried, since = len(scene.started), scene.now
        while len(scene.started) == tried:
            look(scene, 0.5)
        pauses.append(scene.now - since)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert "decode-0: cannot listen; trying it again in 30 s" in scene.said
    assert all(child.running for child in (scene.started[0], scene.started[2], scene.started[3]))
    scene.started[-1].serve()
    look(scene)
    # Once it is there again, its next end is a first one.
    scene.started[-1].die()
    look(scene)
    assert scene.started[-1].running


def test_what_is_not_ready_in_time_is_ended_and_tried_again(scene):
    scene.started[1].die()
    look(scene)
    hanging = scene.started[-1]
    look(scene, 59.0)
    assert (scene.started[-1] is hanging, hanging.is_told) == (True, False)
    look(scene, 1.0)
    assert hanging.is_told
    assert "did not become ready in time" in scene.said[-1]
    # It may have a server to end, and has its time for that.
    look(scene, STOP_S - 0.5)
    assert (hanging.running, scene.started[-1] is hanging) == (True, True)
    look(scene, 0.5)
    assert (hanging.running, scene.started[-1] is hanging) == (False, False)


def test_what_ends_when_it_is_told_to_is_tried_again_at_once_and_holds_up_nobody(scene):
    scene.started[1].die()
    look(scene)
    hanging = scene.started[-1]
    look(scene, 60.0)
    other = scene.started[2]
    other.die()
    look(scene, 3.0)
    assert (scene.started[-1].name, hanging.running) == ("decode-1", True)
    hanging.die()
    look(scene)
    assert scene.started[-1].name == "decode-0"


def test_a_fleet_whose_engines_keep_exiting_ends(scene):
    for _ in range(MAX_RESTARTS):
        scene.started[-1].die()
        look(scene)
        scene.started[-1].serve()
        look(scene, 1.0)
    scene.started[-1].die()
    with pytest.raises(ConfigurationError, match="keep exiting"):
        look(scene)


def test_whoever_waits_hears_when_all_serve_and_who_does_not(scene, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda s: scene.started[-1].serve())
    scene.started[1].die()
    scene.fleet.restart_and_wait()
    assert scene.said[-1].startswith("decode-0 is ready")

    def sleep(seconds):
        scene.now += 20.0

    monkeypatch.setattr(module.time, "sleep", sleep)
    scene.started[0].die()
    with pytest.raises(ConfigurationError, match="prefill-0 did not come up again in time"):
        scene.fleet.restart_and_wait()
