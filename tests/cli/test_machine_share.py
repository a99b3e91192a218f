"""What the engines of a fleet on one machine get of it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.cli.up import job
from kvferry.cli.up.command import PlaceOptions, UpOptions
from kvferry.cli.up.fleet import Fleet, FleetOptions
from kvferry.cli.up.machine_share import Machine, Share, free_memory, machine_here, shares
from kvferry.errors import ConfigurationError

GPUS = Machine("cuda", tuple("0123"))


def visible(machine, num_engines, *arguments, engine="vllm", is_limited=False):
    found = shares(machine, engine, num_engines, arguments, is_limited)
    assert all(not share.arguments for share in found)
    return [next(iter(share.environment.values()), None) for share in found]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_each_engine_has_devices_of_its_own(engine):
    assert visible(GPUS, 3, engine=engine) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tensor-parallel-size", "2"),
        ("--tensor-parallel-size=2", "--seed", "3"),
        ("--tensor_parallel_size", "2"),
        ("-tp=4", "-tp=2"),
        ("-pcp", "2"),
        ("-tp", "2"),
        ("--tp", "2"),
        ("--pipeline-parallel-size", "2"),
        ("--data-parallel-size=2", "-tp", "1"),
        ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
    ],
)
def test_engines_of_several_devices_have_as_many(arguments):
    assert visible(GPUS, 2, *arguments) == ["0,1", "2,3"]


def test_only_devices_that_this_process_may_use_are_given_away():
    assert visible(Machine("cuda", ("5", "MIG-7")), 2) == ["5", "MIG-7"]


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("cuda", ("CUDA_VISIBLE_DEVICES",)),
        ("rocm", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
        ("xpu", ("ZE_AFFINITY_MASK",)),
    ],
)
def test_each_kind_of_device_has_its_variables(kind, variables):
    (share,) = shares(Machine(kind, ("0",)), "vllm", 1, (), is_limited=False)
    assert share == Share(dict.fromkeys(variables, "0"), words=f"uses {kind} device 0")


def test_two_servers_on_one_device_are_refused_before_the_second_finds_no_memory():
    with pytest.raises(ConfigurationError, match="each; found: cuda devices: 1, for 2 engines that take 1 each"):
        visible(Machine("cuda", ("0",)), 2)
    with pytest.raises(ConfigurationError, match="expected: 6 devices"):
        visible(GPUS, 2, "-tp", "3")


@pytest.mark.parametrize("option", ["--gpu-memory-utilization", "--kv-cache-memory-bytes=9", "--mem-fraction-static"])
def test_whoever_says_how_much_memory_they_take_may_share(option):
    assert visible(Machine("cuda", tuple("01")), 3, option, "0.4") == ["0", "1", "0"]
    assert visible(Machine("cuda", tuple("012")), 2, option, "0.4", "-tp", "2") == ["0,1", "0,1"]
    assert visible(Machine("cuda", ("0",)), 2, option, "0.4", "-tp", "2") == [None, None]


def test_engines_of_ours_take_no_more_than_they_need_and_share():
    assert visible(Machine("cuda", ("0",)), 2, engine="transformers") == ["0", "0"]


def test_a_kind_that_has_no_variable_is_left_alone():
    assert visible(Machine("tpu", tuple("01")), 2) == [None, None]


def test_without_devices_servers_of_vllm_divide_the_memory_that_is_free():
    def part(machine, num_engines, *arguments):
        (found,) = {share.arguments for share in shares(machine, "vllm", num_engines, arguments, is_limited=False)}
        return found

    assert part(Machine(), 2) == ("--gpu-memory-utilization", "0.40")
    assert part(Machine(free_memory=0.5), 2) == ("--gpu-memory-utilization", "0.20")
    assert part(Machine(), 2, "-tp", "2") == ("--gpu-memory-utilization", "0.20")
    assert part(Machine(), 2, "--kv-cache-memory-bytes", "9") == ()
    assert shares(Machine(), "vllm", 2, (), is_limited=True) == (Share(), Share())
    assert shares(Machine(), "sglang", 2, (), is_limited=False) == (Share(), Share())
    assert shares(Machine(), "vllm", 1, (), False)[0].words == "takes at most 80% of the memory"


def test_whoever_chooses_devices_or_has_options_in_a_file_is_left_alone():
    for words in (("--config", "f.yaml"), ("--config=f.yaml",), ("--device", "cpu"), ("--base-gpu-id", "1")):
        assert shares(Machine("cuda", ("0",)), "sglang", 2, words, is_limited=False) == (Share(), Share())
        assert shares(Machine(), "vllm", 2, words, is_limited=False) == (Share(), Share())


def test_a_machine_that_is_full_is_told_before_an_engine_starts():
    with pytest.raises(ConfigurationError, match="found: 2% of it is free, for 2 engines of 1 workers"):
        shares(Machine(free_memory=0.02), "vllm", 2, (), is_limited=False)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_hint_is_of_the_engine(engine):
    with pytest.raises(ConfigurationError) as caught:
        visible(Machine("cuda", ("0",)), 2, engine=engine)
    assert ("--mem-fraction-static" in caught.value.hint) is (engine == "sglang")


MEMORY = "MemTotal:       1000 kB\nMemFree:  9 kB\nMemAvailable:    250 kB\nHugePages_Total:       0\n"


@pytest.mark.parametrize(
    ("text", "limit", "used", "part"),
    [
        (MEMORY, "", "", 0.25),
        # A container of 500 kB, of which 100 are taken; there are no more on the host.
        (MEMORY, str(500 << 10), str(100 << 10), 0.5),
        (MEMORY, str(500 << 10), str(600 << 10), 0.0),
        ("MemTotal:\n\n", "", "", 1.0),
    ],
)
def test_the_part_of_the_memory_that_is_free(tmp_path, text, limit, used, part):
    for name, content in {
        "proc/meminfo": text,
        "sys/fs/cgroup/memory.max": limit,
        "sys/fs/cgroup/memory.current": used,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert free_memory(tmp_path) == part


@pytest.mark.parametrize(
    ("variables", "version", "kind", "devices"),
    [
        ({}, None, "cuda", ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "3, 5"}, None, "cuda", ("3", "5")),
        # The third is not there, and ends the list.
        ({"CUDA_VISIBLE_DEVICES": "3,5,9"}, None, "cuda", ("3", "5")),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c"}, None, "cuda", ("MIG-a", "MIG-b", "MIG-c")),
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, "7.0", "rocm", ("3", "5")),
        ({"HIP_VISIBLE_DEVICES": "2,1"}, "7.0", "rocm", ("2", "1")),
    ],
)
def test_the_devices_of_this_machine_are_those_that_torch_reaches(monkeypatch, variables, version, kind, devices):
    accelerator = SimpleNamespace(
        current_accelerator=lambda check_available: SimpleNamespace(type="cuda"), device_count=lambda: 2
    )
    torch = SimpleNamespace(accelerator=accelerator, version=SimpleNamespace(hip=version))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert machine_here(variables) == Machine(kind, devices)


def test_a_machine_without_devices_says_what_memory_is_free(monkeypatch):
    accelerator = SimpleNamespace(current_accelerator=lambda check_available: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=accelerator))
    found = machine_here({})
    assert (found.kind, found.devices) == ("cpu", ())
    assert 0 < found.free_memory < 1


def test_each_engine_is_started_with_its_share():
    started = {}

    def start_child(name, arguments, log, port, variables):
        started[name] = (arguments, variables)
        if name == "decode-0":
            raise InterruptedError

    own = (
        Share({"A": "0"}),
        Share({"A": "1"}),
        Share(arguments=("--gpu-memory-utilization", "0.2"), words="takes 20%"),
    )
    options = FleetOptions(2, 1, ("--model", "m"), 0, 0, 0, 0, passed=("--seed", "1"), shares=own)
    with pytest.raises(InterruptedError):
        Fleet(options, Path("logs"), start_child).start()
    assert [variables for _, variables in started.values()] == [{"A": "0"}, {"A": "1"}, {}]
    assert started["prefill-1"][0][-3:] == ("--", "--seed", "1")
    # The user's own words come last, and win.
    assert started["decode-0"][0][-5:] == ("--", "--gpu-memory-utilization", "0.2", "--seed", "1")


@pytest.mark.parametrize(
    ("changes", "num_shares"),
    [
        ({"engine": "vllm", "prefill": 2}, 3),
        ({"engine": "sglang"}, 2),
        ({"device": "cuda"}, 2),
        ({}, 0),
        ({"device": "cuda:1"}, 0),
        ({"engine": "vllm", "place": PlaceOptions(on="ray")}, 0),
    ],
)
def test_who_shares(monkeypatch, changes, num_shares):
    monkeypatch.setattr(job, "machine_here", lambda _: GPUS)
    assert len(job._fleet_options(UpOptions(**changes), "folder", "tiny").shares) == num_shares
