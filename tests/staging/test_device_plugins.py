"""Devices of other packages become known by an entry point, and a broken one is named."""

import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from kvferry import AgentConfig, Cache, open_agent
from kvferry.errors import ConfigurationError
from kvferry.staging.device import table as table
from kvferry.staging.device.table import check_pair, devices, load_devices, register_device
from kvferry.transport import memory_kind
from kvferry.transport.memory_kind import MemoryKind, kind_of, register_kind


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package that brings a device by this function."""
    monkeypatch.setattr(table, "_registered", {})
    monkeypatch.setattr(memory_kind, "KINDS", dict(memory_kind.KINDS))

    def install(function):
        module = ModuleType("abacus_for_kvferry")
        module.bring = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        folder = tmp_path / "abacus_for_kvferry-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus-for-kvferry\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("[kvferry.devices]\nabacus = abacus_for_kvferry:bring\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def bring():
    register_device("abacus", ("abacus", "cpu"))
    register_kind("abacus", MemoryKind.VRAM)


def test_a_package_brings_a_device(package):
    package(bring)
    assert "abacus" not in devices()
    for _ in range(2):
        assert "abacus" in load_devices()
    check_pair("abacus", "abacus")
    assert kind_of("abacus") is MemoryKind.VRAM


@pytest.mark.parametrize("broken", ["not a function", lambda: register_device("", ())])
def test_a_broken_package_is_named(package, broken):
    package(broken)
    assert entry_points(group="kvferry.devices")
    with pytest.raises(ConfigurationError, match=r"'abacus' .* abacus_for_kvferry:bring"):
        load_devices()


def test_an_agent_makes_the_devices_of_packages_known_before_it_registers_anything(package, monkeypatch):
    package(bring)
    kinds = []

    def opening(*_):
        kinds.append(kind_of("abacus"))
        raise ConfigurationError("no further")

    monkeypatch.setattr("kvferry.agent.loop.agent.open_transports", opening)
    with pytest.raises(ConfigurationError, match="no further"):
        open_agent(AgentConfig("a"), Cache((), (), device="abacus", buffer_device="abacus"), print)
    assert kinds == [MemoryKind.VRAM]


def test_an_agent_does_not_start_on_a_device_that_nobody_has_brought():
    with pytest.raises(ConfigurationError, match=r"unknown device.*abacus"):
        open_agent(AgentConfig("a"), Cache((), (), device="abacus", buffer_device="abacus"), print)
