"""The checks of transports, of what UCX is told, and of fetches, over real processes; and with what they must find."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from faulty_transport import Fault, FaultKind, FaultyTransport, ForwardingTransport

from kvferry.errors import TransportError
from kvferry.layout import attention
from kvferry.qualify.checks import device_transports, fetches, host_transports, machine, ucx_settings
from kvferry.qualify.fetching import engine_rank
from kvferry.qualify.outcome import Result
from kvferry.qualify.torch_device import TorchDevice
from kvferry.transport.machine.facts import Accelerator, Nic, NicKind, Place, SystemFacts, UcxBuild
from kvferry.transport.machine.finding import Finding, Severity
from kvferry.transport.machine.process_limits import process_limits
from kvferry.transport.registry import OPENERS

CORE = frozenset({"self", "tcp", "sysv", "posix", "cma"})
ZE = UcxBuild("the system", "/z", CORE | {"ze_copy", "ze_ipc"})
IN_HOST = TorchDevice("cpu")


def refused(host):
    raise TransportError("not here")


def flipping(opener, post=0):
    return lambda host: FaultyTransport(opener(host), [Fault(post, FaultKind.FLIP, bit=12345)])


def test_one_transport_that_works_is_enough():
    found = host_transports.check({"tcp": OPENERS["tcp"], "shm": refused})
    assert found.result is Result.PASSED
    assert found.words == "1 of 2 move every byte; shm does not work: not here"
    assert [figure.name for figure in found.figures] == ["tcp, read, 4 KiB rows", "tcp, write, 4 KiB rows"]


def test_settings_of_ucx_that_cannot_be_leave_the_other_transports(monkeypatch):
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", "16k")
    found = host_transports.run("cpu")
    assert found.result is Result.PASSED, found.words
    assert "nixl does not work: UCX would write behind the buffer" in found.words


def test_another_process_that_says_something_else_first_is_a_failure(monkeypatch):
    monkeypatch.setattr("kvferry.testing.transports.peer.ChildProcess.read_line", lambda *_: b"[1.0] UCX  WARN\n")
    found = host_transports.check({"tcp": OPENERS["tcp"]})
    assert (found.result, "no JSON; found: b'[1.0] UCX" in found.words) == (Result.FAILED, True), found.words


def test_none_that_works_is_a_failure():
    found = host_transports.check({"tcp": refused, "shm": refused})
    assert (found.result, found.words) == (
        Result.FAILED,
        "tcp does not work: not here; shm does not work: not here",
    )


def test_one_wrong_bit_is_a_failure_whatever_else_works():
    found = host_transports.check({"tcp": OPENERS["tcp"], "cma": flipping(OPENERS["cma"])})
    assert (found.result, "bytes are wrong" in found.words) == (Result.FAILED, True)


@pytest.fixture
def nixl(monkeypatch):
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed")
    monkeypatch.setattr(device_transports, "TOTAL_BYTES", 8 << 20)
    return OPENERS["nixl"]


def test_device_memory_is_read_and_written_with_its_carrier(nixl):
    """Memory of the host stands for that of a device: NIXL has no other here."""
    found = device_transports.check(IN_HOST, 0, nixl)
    assert found.result in (Result.PASSED, Result.SLOW), found.words
    assert found.words.startswith("every byte arrives; carried by ")
    names = [figure.name for figure in found.figures]
    assert names == ["read, one row", "read, 4 KiB rows", "write, one row", "write, 4 KiB rows"]
    assert dict(found.facts)["carriers"]


@pytest.mark.parametrize(
    ("post", "words"), [(2, "READ between devices brings wrong bytes"), (6, "the self-test fails")]
)
def test_one_wrong_bit_between_devices_is_a_failure(nixl, post, words):
    """The last of three reads of one row, and the first of the self-test."""
    found = device_transports.check(IN_HOST, 0, flipping(nixl, post))
    assert (found.result, words in found.words) == (Result.FAILED, True), found.words


# The first of one row, the last of many.
@pytest.mark.parametrize("which", [1, 6])
@pytest.mark.parametrize("forgotten", list(device_transports.Direction))
def test_a_copy_that_brings_nothing_is_a_failure(nixl, forgotten, which):
    class Forgetful(ForwardingTransport):
        """Says that one copy in a direction has ended; nothing is moved."""

        num_copies = 0

        def post(self, peer, copies, direction):
            if direction is forgotten and copies.num_bytes == device_transports.TOTAL_BYTES:
                self.num_copies += 1
                copies = copies.select(slice(0, 0)) if self.num_copies == which else copies
            return self._inner.post(peer, copies, direction)

    found = device_transports.check(IN_HOST, 0, lambda host: Forgetful(nixl(host)))
    assert (found.result, found.words) == (Result.FAILED, f"{forgotten.name} between devices brings wrong bytes")


def test_a_carrier_that_is_a_detour_is_called_slow(nixl, monkeypatch):
    detour = Finding(Severity.WARNING, "transfers use a slower transport", "nixl over tcp/lo", "cuda_ipc")
    monkeypatch.setattr(device_transports, "diagnose", lambda *_: (detour,))
    found = device_transports.check(IN_HOST, 0, nixl)
    assert (found.result, "transfers use a slower transport; found: nixl over tcp/lo" in found.words) == (
        Result.SLOW,
        True,
    )


def test_what_is_wrong_with_the_machine_is_a_failure_before_anything_is_moved(monkeypatch):
    wrong = Finding(Severity.ERROR, "the limit on locked memory is too low", "64 KiB", "unlimited")
    prepared = SimpleNamespace(environment=SimpleNamespace(warnings=(replace(wrong, severity=Severity.NOTE), wrong)))
    for name, value in (("has_nixl", True), ("reaches_device", True), ("prepare", prepared)):
        monkeypatch.setattr(device_transports, name, lambda *_, value=value: value)
    found = device_transports.run("cuda")
    assert (found.result, found.words) == (Result.FAILED, str(wrong))


def test_a_copy_that_never_ends_is_a_failure(nixl, monkeypatch):
    monkeypatch.setattr(device_transports, "DEADLINE_S", 0.2)
    found = device_transports.check(IN_HOST, 0, lambda host: FaultyTransport(nixl(host), [Fault(0, FaultKind.DROP)]))
    assert (found.result, "READ between devices does not end" in found.words) == (Result.FAILED, True)


def test_reading_far_slower_than_writing_is_called_slow():
    seconds = {("one row", device_transports.READ): 7.0, ("one row", device_transports.WRITE): 1.0}
    slow = device_transports._figure("one row", device_transports.READ, seconds)
    assert (slow.is_slow, slow.of) == (True, "writing")
    seconds[("one row", device_transports.READ)] = 5.0
    assert not device_transports._figure("one row", device_transports.READ, seconds).is_slow


def xpu(build=ZE, nics=(), **user):
    return SystemFacts(
        device="xpu",
        buffer_device="xpu",
        place=Place.SAME_HOST,
        nics=nics,
        accelerator=Accelerator("0000:3a:00.0", "xpu"),
        build=build,
        limits=process_limits(),
        user=user,
    )


def test_one_node_with_intel_gpus_and_no_rdma():
    """Seed S1: what is chosen by itself, and the two sets that were tried and do not work."""
    found = ucx_settings.check(xpu())
    assert found.result is Result.PASSED
    assert found.words == "UCX_TLS=ze_ipc,ze_copy,tcp; 2 sets that cannot work are refused"
    assert {name for name, _ in found.facts} == {
        "UCX_TLS=ze_ipc,ze_copy,tcp",
        "UCX_TLS=ze_copy,cma is refused",
        "UCX_TLS=ze_ipc,ze_copy,sm is refused",
    }
    # What the user has set is another matter.
    assert ucx_settings.check(xpu(UCX_TLS="ze_copy,cma")) == found


def test_a_wrong_set_that_is_not_refused_is_a_failure(monkeypatch):
    choose = ucx_settings.choose_environment
    monkeypatch.setattr(ucx_settings, "choose_environment", lambda system: choose(replace(system, user={})))
    found = ucx_settings.check(xpu())
    assert (found.result, "UCX_TLS=ze_copy,cma is not refused" in found.words) == (Result.FAILED, True)


@pytest.mark.parametrize("build", [UcxBuild(), UcxBuild("nixl_cu13", "/n", CORE), replace(ZE, transports=CORE)])
def test_a_ucx_without_level_zero_leaves_memory_of_the_host(build):
    found = ucx_settings.check(xpu(build))
    assert (found.result, "caches go through memory of the host" in found.words) == (Result.SKIPPED, True)
    assert not ucx_settings.reaches_device(xpu(build))


def test_too_little_memory_that_may_be_locked_is_a_failure():
    port = Nic("mlx5_0:1", NicKind.INFINIBAND, is_up=True, state="active")
    build = replace(ZE, transports=ZE.transports | {"rc_mlx5"})
    limits = replace(process_limits(), locked_bytes=1 << 16)
    found = ucx_settings.check(replace(xpu(build, (port,)), limits=limits))
    assert (found.result, "locked memory is too low" in found.words) == (Result.FAILED, True)


def test_without_nixl_device_memory_is_left_out(monkeypatch):
    monkeypatch.setattr(fetches, "has_nixl", lambda: False)
    monkeypatch.setattr(fetches, "reaches_device", lambda system: True)
    assert [way.buffer_device for way in fetches.paths("cuda")] == ["cpu"]
    monkeypatch.setattr(device_transports, "has_nixl", lambda: False)
    found = device_transports.run("cuda")
    assert (found.result, found.words.startswith("NIXL is not installed: pip install")) == (Result.SKIPPED, True)


def test_a_device_that_torch_does_not_see_is_a_failure_with_what_to_install():
    if torch.accelerator.is_available():
        pytest.skip("there is a device here")
    found = machine.run("xpu")
    assert (found.result, "sees no xpu device" in found.words) == (Result.FAILED, True)
    assert "torch" in dict(found.facts)
    assert machine.run("cpu").result is Result.PASSED


# --- fetches ---

LITTLE = engine_rank.Geometry(attention(2, 4, 16, "bfloat16", 2), head_dim=16, block_tokens=16, num_tokens=64)


@pytest.fixture
def once(monkeypatch):
    monkeypatch.setattr(fetches, "REPEATS", 1)
    monkeypatch.setattr(fetches, "STRATEGIES", ("auto", "pack"))


@pytest.mark.slow
def test_every_way_brings_every_byte(once):
    found = fetches.check(IN_HOST, LITTLE)
    assert found.result in (Result.PASSED, Result.SLOW), found.words
    names = [f"{pair}, {way}, host memory" for pair in ("2 to 1", "1 to 2") for way in ("auto", "pack")]
    assert [figure.name for figure in found.figures] == names
    assert dict(found.facts)["1 to 2, pack, host memory"].startswith("pack over ")


@pytest.mark.parametrize(
    ("side", "words"),
    [("target", "auto, host memory: 1 elements are wrong"), ("others", "blocks of others were touched")],
)
@pytest.mark.slow
def test_one_wrong_byte_after_a_fetch_is_a_failure(once, monkeypatch, side, words):
    ranks = []

    class Spoiled(engine_rank.EngineRank):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            ranks.append(self)

    def spoiled_notice(notices):
        notice = engine_rank.next_notice(notices)
        blocks = ranks[0].memory.view(2 * 2, LITTLE.num_blocks, -1)
        table = LITTLE.table("target")
        others = sorted(set(range(LITTLE.num_blocks)) - set(table))
        blocks[1, table[1] if side == "target" else others[0], 0] ^= 1
        return notice

    monkeypatch.setattr(fetches, "EngineRank", Spoiled)
    monkeypatch.setattr(fetches, "next_notice", spoiled_notice)
    found = fetches.check(IN_HOST, LITTLE)
    assert (found.result, words in found.words) == (Result.FAILED, True), found.words


@pytest.mark.slow
def test_a_cache_that_does_not_arrive_is_a_failure(once, monkeypatch):
    monkeypatch.setattr(fetches, "next_notice", lambda notices: SimpleNamespace())
    found = fetches.check(IN_HOST, LITTLE)
    assert (found.result, "the cache did not arrive" in found.words) == (Result.FAILED, True)


def test_a_source_that_cannot_start_is_a_failure(once, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = fetches.check(IN_HOST, LITTLE)
    assert (found.result, "the other process has ended; found: exit code 1" in found.words) == (Result.FAILED, True)


@pytest.mark.parametrize(("rate", "is_slow"), [(4.0, True), (6.0, False)])
def test_what_auto_takes_must_not_be_far_slower_than_the_best(rate, is_slow):
    auto, *others = fetches.paths("cpu")
    rates = {auto: rate, **dict.fromkeys(others, 1.0), others[0]: 10.0}
    slow = [figure.name for figure in fetches._figures(fetches.Parallel(2, 1), rates) if figure.is_slow]
    assert slow == (["2 to 1, auto, host memory"] if is_slow else [])


def test_the_only_way_is_not_as_fast_as_is_expected_because_it_is_as_fast_as_itself():
    (figure,) = fetches._figures(fetches.Parallel(2, 1), {fetches.paths("cpu")[0]: 4.0})
    assert (figure.gigabytes_per_s, figure.share, figure.of, figure.expected, figure.least) == (4.0, 0.0, "", 0.0, 0.0)


@pytest.mark.slow
def test_fetches_through_memory_of_the_device_that_cannot_be_are_told(once, monkeypatch):
    """Host memory stands for that of a device which neither NIXL nor UCX reaches."""
    ways = fetches.paths("cpu")[:1]
    monkeypatch.setattr(fetches, "paths", lambda kind: ways)
    assert fetches.check(IN_HOST, LITTLE).left_out == ()
    device = TorchDevice("cpu")
    device.kind = "cuda"
    monkeypatch.setattr(fetches, "number_of", lambda kind: 1)
    monkeypatch.setattr(fetches, "_Target", lambda *_: Measured())
    found = fetches.check(device, LITTLE)
    assert (found.result, found.left_out) == (Result.PASSED, ("fetches through memory of the device",))
    assert found.words.endswith("not through memory of the device, which no NIXL and UCX here reach")
    assert not any(figure.least for figure in found.figures)


class Measured:
    """A target whose fetches are right."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def measured(self, path):
        return 1.0, SimpleNamespace(num_bytes=1, strategy="pack", transport="shm", choice="")


@pytest.mark.parametrize(("num_devices", "source"), [(1, 2), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_as_many_devices_take_part_as_there_are(num_devices, source):
    assert fetches.pairs_for(num_devices) == (fetches.Parallel(source, 1), fetches.Parallel(1, 2))


@pytest.mark.parametrize(("num_devices", "numbers"), [(1, [0, 0]), (2, [1, 0]), (3, [1, 2])])
def test_source_ranks_are_on_other_devices_as_far_as_there_are(monkeypatch, num_devices, numbers):
    monkeypatch.setattr(fetches, "number_of", lambda kind: num_devices)
    target = fetches._Target(IN_HOST, LITTLE, fetches.Parallel(2, 1))
    assert [(setup.rank, setup.number) for setup in target._setups("epoch")] == list(enumerate(numbers))


@pytest.mark.parametrize(
    ("is_reached", "names"), [(True, ["device", "device", "device", "device", "host"]), (False, ["host"])]
)
def test_ways_through_device_memory_need_a_ucx_that_reaches_it(monkeypatch, is_reached, names):
    monkeypatch.setattr(fetches, "has_nixl", lambda: True)
    monkeypatch.setattr(fetches, "reaches_device", lambda system: is_reached)
    assert [way.name.split(", ")[1].split()[0] for way in fetches.paths("xpu")] == names
