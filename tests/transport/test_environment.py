"""Which settings UCX gets in which system: the whole table. No hardware of these kinds is needed, or used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.errors import ConfigurationError
from kvferry.transport.machine.facts import Accelerator, Nic, NicKind, Place, ProcessLimits, SystemFacts, UcxBuild
from kvferry.transport.machine.finding import Severity
from kvferry.transport.ucx.settings import Environment, Origin, choose_environment

CORE = frozenset({"self", "tcp", "posix", "sysv"})
WHEEL = UcxBuild("nixl_cu13", "/w", CORE | {"cma", "cuda_copy", "cuda_ipc", "rc_verbs", "rc_mlx5", "ud_verbs", "srd"})
ZE = UcxBuild("the system", "/z", CORE | {"cma", "ze_copy", "ze_ipc", "rc_verbs", "rc_mlx5"})
ZE_COPY = replace(ZE, transports=ZE.transports - {"ze_ipc"})
ZE_TCP = replace(ZE, transports=ZE.transports - {"rc_verbs", "rc_mlx5"})
ROCM = UcxBuild("the system", "/r", CORE | {"cma", "rocm_copy", "rocm_ipc", "rc_verbs"})
UNKNOWN = UcxBuild()

SWITCH = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
UP = Nic("mlx5_0:1", NicKind.INFINIBAND, True, "active", 0, (*SWITCH, "0000:02:00.0"), 400.0)
DOWN = replace(UP, is_up=False, state="down")
FAR = Nic("mlx5_1:1", NicKind.ROCE, True, "active", 1, ("pci0000:80", "0000:80:01.0", "0000:81:00.0"), 400.0)
ETHERNET = Nic("eth0", NicKind.ETHERNET, True, "up")
GPU = Accelerator("0000:03:00.0", "cuda", 0, (*SWITCH, "0000:03:00.0"))

SAME, OTHER, ANY = Place.SAME_HOST, Place.OTHER_HOST, Place.UNKNOWN


def xpu(build: UcxBuild, place: Place, *nics: Nic, **user: str) -> SystemFacts:
    return SystemFacts("xpu", "xpu", place, nics, Accelerator("0000:03:00.0", "xpu"), build, user=user)


def cuda(build: UcxBuild, place: Place, *nics: Nic, **user: str) -> SystemFacts:
    return SystemFacts("cuda", "cuda", place, nics, GPU, build, user=user)


def host(device: str, place: Place, *nics: Nic, **user: str) -> SystemFacts:
    return SystemFacts(device, "cpu", place, nics, build=WHEEL, user=user)


def value(environment: Environment, name: str) -> str:
    return {each.name: each.value for each in environment.settings}.get(name, "absent")


@pytest.mark.parametrize(
    ("system", "transports"),
    [
        (xpu(ZE, SAME, ETHERNET), "ze_ipc,ze_copy,tcp"),
        (xpu(ZE, ANY, ETHERNET), "ze_ipc,ze_copy,tcp"),
        (xpu(ZE, SAME, DOWN), "ze_ipc,ze_copy,tcp"),
        (xpu(UNKNOWN, SAME), "ze_ipc,ze_copy,tcp"),
        (xpu(ZE, OTHER), "ze_copy,tcp"),
        (xpu(ZE_COPY, SAME), "ze_copy,tcp"),
        (xpu(ZE_COPY, ANY, ETHERNET), "ze_copy,tcp"),
        (xpu(WHEEL, SAME), ""),
        (xpu(ZE, SAME, UP), "ib,rc,ze_copy,ze_ipc"),
        (xpu(ZE, ANY, UP), "ib,rc,ze_copy,ze_ipc"),
        (xpu(ZE, OTHER, UP), "ib,rc,ze_copy"),
        (xpu(ZE_COPY, SAME, UP), "ib,rc,ze_copy"),
        (xpu(ZE_TCP, SAME, UP), "ze_ipc,ze_copy,tcp"),
        (cuda(WHEEL, SAME), ""),
        (cuda(WHEEL, OTHER, UP), ""),
        (SystemFacts("rocm", "rocm", SAME, build=ROCM), ""),
        *[(host(device, place), "") for device in ("cpu", "cuda", "rocm", "xpu", "tpu") for place in Place],
    ],
)
def test_the_set_of_transports(system: SystemFacts, transports: str) -> None:
    environment = choose_environment(system)
    assert value(environment, "UCX_TLS") == transports
    assert environment.chosen.get("UCX_TLS", "") == transports


@pytest.mark.parametrize(
    ("system", "memory_types", "reads"),
    [
        (xpu(ZE, SAME), "n", "absent"),
        (host("xpu", SAME), "absent", "absent"),
        (cuda(WHEEL, SAME), "absent", "on"),
        (cuda(WHEEL, ANY), "absent", "on"),
        (cuda(WHEEL, OTHER, UP), "absent", "absent"),
        (host("cuda", SAME), "absent", "absent"),
        (host("cpu", SAME), "absent", "absent"),
    ],
)
def test_settings_of_one_kind_of_device_are_for_that_one_only(
    system: SystemFacts, memory_types: str, reads: str
) -> None:
    environment = choose_environment(system)
    assert value(environment, "UCX_MEMTYPE_CACHE") == memory_types
    assert value(environment, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY") == reads
    assert value(environment, "UCX_RCACHE_MAX_UNRELEASED") == "1024"


@pytest.mark.parametrize(
    ("system", "cards"),
    [
        (cuda(WHEEL, OTHER, UP, FAR, ETHERNET), "mlx5_0:1"),
        (cuda(WHEEL, ANY, UP, FAR), "mlx5_0:1"),
        (cuda(WHEEL, OTHER, UP), "absent"),
        (cuda(WHEEL, OTHER, DOWN, FAR), "absent"),
        (cuda(WHEEL, OTHER, UP, replace(UP, name="mlx5_2:1"), FAR), "mlx5_0:1,mlx5_2:1"),
        (host("cpu", OTHER, UP, FAR), "absent"),
        (replace(cuda(WHEEL, OTHER, UP, FAR), accelerator=Accelerator("", "cuda")), "absent"),
        (replace(cuda(WHEEL, OTHER, UP, FAR), accelerator=Accelerator("a", "cuda", 1)), "mlx5_1:1"),
        (cuda(WHEEL, OTHER, UP, FAR, UCX_NET_DEVICES="mlx5_1:1"), "mlx5_1:1"),
        (cuda(WHEEL, SAME, UP, FAR, ETHERNET), "mlx5_0:1,lo"),
        (cuda(WHEEL, SAME, UP), "mlx5_0:1,lo"),
        (cuda(WHEEL, SAME, UP, FAR, UCX_TLS="rc,cuda"), "mlx5_0:1"),
        (xpu(ZE, SAME, ETHERNET), "lo"),
        (xpu(ZE, SAME, UP), "absent"),
        (host("cpu", SAME, UP, ETHERNET), "lo"),
        (host("cpu", ANY, UP, ETHERNET), "absent"),
        (host("cpu", SAME, ETHERNET, UCX_TLS="^tcp"), "absent"),
        (host("cpu", SAME, ETHERNET, UCX_TLS="^ib"), "lo"),
        (host("cpu", SAME, ETHERNET, UCX_NET_DEVICES="eth0"), "eth0"),
    ],
)
def test_device_memory_gets_the_nearest_cards_and_one_host_its_loopback(system: SystemFacts, cards: str) -> None:
    assert value(choose_environment(system), "UCX_NET_DEVICES") == cards


@pytest.mark.parametrize(
    ("system", "pieces"),
    [
        (host("cpu", OTHER), "64k"),
        (host("cpu", SAME, UP), "64k"),
        (cuda(WHEEL, ANY, UCX_TLS="rc,tcp"), "64k"),
        (host("cpu", OTHER, UP, UCX_TLS="rc"), "absent"),
        (host("cpu", OTHER, UCX_TLS="^tcp"), "absent"),
    ],
)
def test_every_engine_sends_and_receives_the_same_at_once_over_sockets(system: SystemFacts, pieces: str) -> None:
    environment = choose_environment(system)
    assert [value(environment, f"UCX_TCP_{way}_SEG_SIZE") for way in ("RX", "TX")] == [pieces, pieces]


@pytest.mark.parametrize("received", ["64k", "64KB", " 65536 ", "65536b", "1m", "2G"])
@pytest.mark.parametrize("sent", ["8k", "64k", "65536"])
def test_whoever_receives_more_at_once_over_sockets_or_sends_less_may(received: str, sent: str) -> None:
    environment = choose_environment(host("cpu", OTHER, UCX_TCP_RX_SEG_SIZE=received, UCX_TCP_TX_SEG_SIZE=sent))
    assert value(environment, "UCX_TCP_RX_SEG_SIZE") == received
    assert value(environment, "UCX_TCP_TX_SEG_SIZE") == sent


@pytest.mark.parametrize(
    ("name", "size", "part"),
    [
        *(("RX", size, "than this process receives.*64k or more") for size in ("63k", "16K", "16kb", "65535", "0")),
        *(("TX", size, "than peers receive.*64k or less") for size in ("65k", "256K", "65537", "1m")),
        *(
            (name, size, "no size")
            for name in ("RX", "TX")
            for size in ("+16k", "16kbytes", "inf", "auto", "0x10000", "")
        ),
    ],
)
def test_whoever_would_get_more_at_once_over_sockets_than_there_is_room_for_does_not_start(
    name: str, size: str, part: str
) -> None:
    variable = {f"UCX_TCP_{name}_SEG_SIZE": size}
    with pytest.raises(ConfigurationError, match=part):
        choose_environment(host("cpu", OTHER, **variable))
    choose_environment(host("cpu", OTHER, UP, UCX_TLS="rc", **variable))


def test_nearness_is_bridges_in_common_then_memory_nodes() -> None:
    same_root = replace(FAR, bus=("pci0000:00", "0000:00:09.0"))
    assert GPU.nearest([FAR, same_root, UP]) == (UP,)
    assert GPU.nearest([FAR, same_root]) == (same_root,)
    assert GPU.nearest([FAR]) == (FAR,)
    assert GPU.nearest([]) == ()
    assert Accelerator("", "").nearest([FAR, UP]) == (FAR, UP)


def test_what_the_user_has_set_stays_and_is_told() -> None:
    system = xpu(ZE, SAME, UCX_TLS="tcp,ze_copy", UCX_MEMTYPE_CACHE="n", UCX_LOG_LEVEL="info")
    environment = choose_environment(system)
    settings = {each.name: each for each in environment.settings}
    assert settings["UCX_TLS"].value == "tcp,ze_copy"
    assert settings["UCX_TLS"].origin is Origin.USER
    assert "would have chosen ze_ipc,ze_copy,tcp" in settings["UCX_TLS"].reason
    assert "chosen the same" in settings["UCX_MEMTYPE_CACHE"].reason
    assert settings["UCX_LOG_LEVEL"].origin is Origin.USER
    assert environment.chosen == {
        "UCX_NET_DEVICES": "lo",
        "UCX_TCP_RX_SEG_SIZE": "64k",
        "UCX_TCP_TX_SEG_SIZE": "64k",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        "UCX_LOG_FILE": "stderr",
    }
    left = {each.name: each for each in choose_environment(host("cpu", SAME, UCX_TLS="tcp")).settings}
    assert "left it to UCX" in left["UCX_TLS"].reason


@pytest.mark.parametrize("value_set", ["cma", "ze_copy,cma", "ze_ipc,ze_copy,sm", "self", "posix,sysv", "^tcp,ib"])
def test_a_set_without_active_messages_is_refused_with_the_explanation(value_set: str) -> None:
    with pytest.raises(ConfigurationError, match=r"active messages.*UCX_TLS=.*hint: "):
        choose_environment(xpu(ZE, SAME, UCX_TLS=value_set))


@pytest.mark.parametrize(
    "value_set", ["all", "tcp,cma", "ze_ipc,ze_copy,tcp", "^cma", "^tcp", "\\tcp", "rc,tcp", "IB,tcp"]
)
def test_a_set_with_active_messages_is_not(value_set: str) -> None:
    choose_environment(xpu(ZE, SAME, UP, UCX_TLS=value_set))


LOCKED = ProcessLimits(ptrace_scope=1, may_trace=False)
CONTAINER = ProcessLimits(container="docker", pid_namespace="7", ipc_namespace="8")
SMALL_LOCK = ProcessLimits(locked_bytes=8 << 20)


@pytest.mark.parametrize(
    ("system", "severity", "part"),
    [
        (xpu(WHEEL, SAME), Severity.ERROR, "cannot reach xpu memory"),
        (xpu(ZE_COPY, SAME), Severity.WARNING, "goes through host memory"),
        (cuda(ZE, SAME), Severity.ERROR, "cannot reach cuda memory"),
        (SystemFacts("rocm", "rocm", SAME, build=WHEEL), Severity.ERROR, "--with-rocm"),
        (replace(cuda(WHEEL, SAME), limits=CONTAINER), Severity.NOTE, "silently fall back to tcp"),
        (replace(host("cpu", SAME), limits=LOCKED), Severity.WARNING, "ptrace_scope = 1"),
        (replace(host("cpu", SAME), build=UcxBuild("old", "/o", CORE)), Severity.WARNING, "nixl goes through tcp"),
        (host("cpu", OTHER, DOWN, ETHERNET), Severity.WARNING, "mlx5_0:1 down"),
        (cuda(WHEEL, OTHER, DOWN), Severity.WARNING, "between hosts without it, choose --buffer-device cpu"),
        (cuda(WHEEL, OTHER, ETHERNET), Severity.NOTE, "install a card, or choose --buffer-device cpu"),
        (cuda(WHEEL, OTHER, DOWN, FAR), Severity.WARNING, "a farther one is used"),
        (replace(host("cpu", OTHER, UP), limits=SMALL_LOCK), Severity.ERROR, "ulimit -l unlimited"),
        (xpu(ZE_COPY, SAME, UCX_TLS="ze_ipc,ze_copy,tcp"), Severity.WARNING, "does not have"),
        (host("cpu", SAME, UCX_TLS="rc"), Severity.ERROR, "need an RDMA port"),
        (xpu(ZE, SAME, UCX_MEMTYPE_CACHE="y"), Severity.WARNING, "UCX_MEMTYPE_CACHE=y"),
        (host("cpu", SAME, ETHERNET, UCX_NET_DEVICES="lo, eth0"), Severity.WARNING, "UCX_NET_DEVICES=lo, eth0"),
        (host("cpu", SAME, ETHERNET, UCX_NET_DEVICES="all"), Severity.WARNING, "UCX_NET_DEVICES=all"),
    ],
)
def test_what_would_go_wrong_silently_is_said(system: SystemFacts, severity: Severity, part: str) -> None:
    found = [each for each in choose_environment(system).warnings if part in str(each)]
    assert [each.severity for each in found] == [severity]
    assert all(each.hint for each in found)


@pytest.mark.parametrize(
    "system",
    [
        host("cpu", SAME),
        host("cpu", SAME, ETHERNET, UCX_NET_DEVICES="lo"),
        host("cpu", ANY, ETHERNET, UCX_NET_DEVICES="eth0"),
        host("cpu", SAME, ETHERNET, UP, UCX_NET_DEVICES="eth0", UCX_TLS="cma,rc,ud"),
        host("cpu", ANY, ETHERNET, UCX_TLS="^cma"),
        host("cpu", OTHER, UCX_TCP_TX_SEG_SIZE="64k"),
        host("cpu", OTHER, UP, UCX_TCP_TX_SEG_SIZE="256k", UCX_TLS="rc"),
        host("tpu", OTHER, UP),
        xpu(ZE, SAME),
        xpu(ZE, OTHER, UP),
        cuda(WHEEL, SAME),
        cuda(WHEEL, OTHER, UP, FAR),
        replace(host("cpu", SAME), limits=replace(LOCKED, may_trace=True)),
        replace(host("cpu", OTHER), limits=LOCKED),
        replace(host("cpu", SAME), limits=CONTAINER),
    ],
)
def test_nothing_is_said_about_what_is_fine(system: SystemFacts) -> None:
    assert choose_environment(system).warnings == ()
