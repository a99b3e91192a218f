"""What is read from the kernel and the file system, on made-up machines and on this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.transport.machine.facts import UNLIMITED, NicKind, UcxBuild
from kvferry.transport.machine.hardware import accelerators, nics
from kvferry.transport.machine.process_limits import process_limits
from kvferry.transport.ucx.builds import build_at, build_to_load, installed_builds, loaded_directories

GPU_BUS = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0"
NIC_BUS = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0"
FAR_BUS = "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def card(root: Path, name: str, bus: str, state: str, layer: str, node: int) -> None:
    port = f"sys/class/infiniband/{name}/ports/1"
    write(root, **{f"{port}/state": state, f"{port}/link_layer": layer, f"{port}/rate": "400 Gb/sec (4X NDR)"})
    write(root, **{f"{bus}/numa_node": str(node)})
    link(root / f"sys/class/infiniband/{name}/device", root / bus)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two RDMA cards, one of them down and on the other memory node, an Ethernet card, and a GPU."""
    card(tmp_path, "mlx5_0", NIC_BUS, "4: ACTIVE", "InfiniBand", 0)
    card(tmp_path, "mlx5_1", FAR_BUS, "1: DOWN", "Ethernet", 1)
    write(tmp_path, **{"sys/class/net/eth0/operstate": "up", "sys/class/net/eth0/speed": "25000"})
    write(tmp_path, **{"sys/class/net/eth1/operstate": "down", "sys/class/net/eth1/speed": "-1"})
    write(tmp_path, **{f"{GPU_BUS}/vendor": "0x10de", f"{GPU_BUS}/class": "0x030200", f"{GPU_BUS}/numa_node": "0"})
    link(tmp_path / "sys/bus/pci/devices/0000:03:00.0", tmp_path / GPU_BUS)
    write(tmp_path, **{"sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086"})
    write(tmp_path, **{"sys/bus/pci/devices/0000:00:1f.0/class": "0x060100"})
    return tmp_path


def test_cards_with_their_state_speed_and_place(machine: Path) -> None:
    near, far, up, down = nics(machine)
    assert (near.name, near.kind, near.is_up, near.numa_node) == ("mlx5_0:1", NicKind.INFINIBAND, True, 0)
    assert near.bus == ("pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0")
    assert near.gigabits_per_s == 400
    assert (far.name, far.kind, far.is_up, far.state, far.numa_node) == ("mlx5_1:1", NicKind.ROCE, False, "down", 1)
    assert (up.name, up.kind, up.is_up, up.gigabits_per_s, up.numa_node) == ("eth0", NicKind.ETHERNET, True, 25, -1)
    assert (down.name, down.is_up, down.gigabits_per_s) == ("eth1", False, 0)


def test_a_device_and_the_card_next_to_it(machine: Path) -> None:
    (gpu,) = accelerators(machine)
    assert (gpu.name, gpu.kind, gpu.numa_node) == ("0000:03:00.0", "cuda", 0)
    assert [nic.name for nic in gpu.nearest([nic for nic in nics(machine) if nic.is_rdma])] == ["mlx5_0:1"]


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    assert nics(tmp_path) == ()
    assert accelerators(tmp_path) == ()
    found = process_limits(tmp_path)
    assert (found.container, found.ptrace_scope, found.may_trace, found.shm_bytes) == ("", 0, False, 0)
    assert found.may_attach


@pytest.mark.parametrize("mark", [(".dockerenv", "docker"), ("run/.containerenv", "podman")])
def test_containers_and_what_they_forbid(tmp_path: Path, mark: tuple[str, str]) -> None:
    write(tmp_path, **{mark[0]: "", "proc/sys/kernel/yama/ptrace_scope": "1"})
    write(tmp_path, **{"proc/self/status": "Name:\tx\nCapEff:\t00000000a80425fb"})
    found = process_limits(tmp_path)
    assert (found.container, found.ptrace_scope, found.may_attach) == (mark[1], 1, False)
    (tmp_path / "var/run/secrets/kubernetes.io").mkdir(parents=True)
    write(tmp_path, **{"proc/self/status": "CapEff:\t000001ffffffffff"})
    found = process_limits(tmp_path)
    assert (found.container, found.may_attach, found.locked_bytes) == ("kubernetes", True, UNLIMITED)


def test_this_machine_can_be_read() -> None:
    found = process_limits()
    assert found.pid_namespace.isdecimal()
    assert found.shm_bytes > 0
    assert any(nic.name == "lo" for nic in nics())
    assert all(each.kind for each in accelerators())


def build(folder: Path, **modules: str) -> None:
    write(folder, **{"libucp-0123.so.0.0.0": ""})
    for name, content in modules.items():
        write(folder, **{f"ucx/libuct_{name}.so.0.0.0": content})


def test_a_build_has_what_its_modules_hold(tmp_path: Path) -> None:
    build(
        tmp_path / "nixl_xpu.libs",
        cma="..cma..",
        ze="ze_copy\0ze_ipc",
        ib="rc_verbs\0ud_verbs",
        ib_mlx5_gdp="cuda_copy",
    )
    build(tmp_path / "usr/lib", ze="ze_copy")
    both = installed_builds([str(tmp_path)], tmp_path)
    assert [each.owner for each in both] == ["nixl_xpu", "the system"]
    core = {"self", "tcp", "posix", "sysv"}
    assert both[0].transports == core | {"cma", "ze_copy", "ze_ipc", "rc_verbs", "ud_verbs"}
    assert both[1].transports == core | {"ze_copy"}
    assert build_to_load(both, ["nixl_cu13", "nixl_xpu"]) == both[0]
    assert build_to_load(both, ["nixl_cu13"]) == both[1]
    assert build_to_load((), ["nixl_cu13"]) == UcxBuild()
    assert installed_builds([str(tmp_path), str(tmp_path / ".")], tmp_path) == both
    assert build_at(tmp_path / "usr/lib").is_known


def test_what_is_loaded_is_read_from_the_map_of_the_process(tmp_path: Path) -> None:
    lines = [
        "7f00-7f01 r-xp 00000000 fe:00 12 /a/nixl_cu13.libs/libucp-b39b3ed9.so.0.0.0",
        "7f01-7f02 r--p 00000000 fe:00 12 /a/nixl_cu13.libs/libucp-b39b3ed9.so.0.0.0",
        "7f02-7f03 r--p 00000000 fe:00 13 /usr/lib/libucp.so.0",
        "7f03-7f04 rw-p 00000000 00:00 0",
        "7f04-7f05 r--p 00000000 fe:00 14 /usr/lib/libucpsomething.so",
    ]
    write(tmp_path, maps="\n".join(lines))
    assert loaded_directories(tmp_path / "maps") == (Path("/a/nixl_cu13.libs"), Path("/usr/lib"))
    assert loaded_directories(tmp_path / "none") == ()
