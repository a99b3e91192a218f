"""Steps of a runner and copies of transfers, which use the same arrays; and what several ranks say with one voice."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from engine_server import is_installed

if not is_installed("tpu_inference"):
    pytest.skip("tpu-inference is not installed: see make test-vllm-tpu", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from kvferry import AgentConfig, Memory
from kvferry.connectors.vllm.features import TransferResults
from kvferry.connectors.vllm.metadata import LeaseOrder, Orders
from kvferry.connectors.vllm.settings import Settings
from kvferry.connectors.vllm_tpu.features import check_engine
from kvferry.connectors.vllm_tpu.ranks import Ranks
from kvferry.connectors.vllm_tpu.steps import Steps
from kvferry.errors import ConfigurationError
from kvferry.jax_caches import FIRST_ADDRESS, JaxCaches
from kvferry.layout import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import plain

LAYOUTS = describe(attention(1, 1, 8, "float32", 4), EngineShape(1, 1, 4, 6, "token-major"), FIRST_ADDRESS)
donating = jax.jit(lambda arrays: [array + 1 for array in arrays], donate_argnums=0)


def zeros():
    return [jnp.zeros((6, 4, 1, 8), jnp.float32) for _ in LAYOUTS[0].regions]


class Runner:
    """Has its arrays where tpu-inference's runner has them."""

    def __init__(self) -> None:
        self.kv_caches = zeros()
        self.caches = JaxCaches(self.kv_caches, LAYOUTS)
        self.steps = Steps(self, self.caches)

    def step(self) -> None:
        self.steps.begin()
        self.kv_caches = donating(self.kv_caches)
        self.steps.end()

    def newest(self) -> float:
        """The first element of what copies of transfers would read."""
        with self.caches.turn() as turn:
            return float(turn.arrays[0][0, 0, 0, 0])

    def received(self, value: float) -> None:
        """As a copy does it, between two steps: the runner's own arrays are deleted."""
        with self.caches.turn() as turn:
            turn.arrays = tuple(jax.jit(lambda array: array + value, donate_argnums=0)(one) for one in turn.arrays)


@pytest.fixture
def runner():
    return Runner()


def test_copies_get_what_the_last_step_has_made(runner):
    runner.step()
    runner.step()
    assert runner.newest() == 2


def test_a_step_gets_what_copies_have_made(runner):
    runner.step()
    runner.received(10)
    assert all(array.is_deleted() for array in runner.kv_caches)
    assert not runner.steps.adopt()
    runner.step()
    assert runner.newest() == 12


def put(caches: JaxCaches, address: int, host: np.ndarray) -> None:
    """As a transfer does it."""
    ended = threading.Event()
    mover = caches.cache(0).mover([Memory(host.ctypes.data, host.nbytes, -1)], ended.set)
    columns = (np.array([number], np.uint64) for number in (host.ctypes.data, address, host.nbytes))
    mover.start("key", plain(Copies(*columns, pieces=1)))
    assert ended.wait(60)
    mover.close()


def test_a_step_is_not_compiled_again_for_what_copies_have_made():
    """tpu-inference's arrays are those of a mesh, also on one device, and its program is compiled for that."""
    where = NamedSharding(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model")), PartitionSpec("data"))
    step = jax.jit(lambda arrays: [array + 1 for array in arrays], donate_argnums=0, out_shardings=where)
    caches = JaxCaches(jax.device_put(zeros(), where), LAYOUTS)
    (region, *_), host = LAYOUTS[0].regions, np.ones(512, np.uint8)
    with caches.turn() as turn:
        turn.arrays = tuple(step(list(turn.arrays)))
    put(caches, region.address, host)
    with caches.turn() as turn:
        turn.arrays = tuple(step(list(turn.arrays)))
    assert step._cache_size() == 1


def test_a_step_that_computes_nothing_leaves_everything(runner):
    runner.received(3)
    runner.steps.begin()
    runner.steps.end()
    assert runner.newest() == 3
    runner.steps.end()


def test_what_compiling_has_made_before_the_first_step_is_taken_in(runner):
    runner.kv_caches = donating(runner.kv_caches)
    assert not runner.steps.adopt()
    assert runner.newest() == 1
    runner.step()
    assert runner.newest() == 2


def test_new_arrays_after_a_step_are_taken_in_and_said_to_be_new(runner):
    runner.step()
    runner.kv_caches = zeros()
    assert runner.steps.adopt()
    assert not runner.steps.adopt()
    assert runner.newest() == 0


def test_a_runner_without_arrays_has_no_turn(runner):
    """New weights are on their way."""
    runner.step()
    runner.kv_caches = []
    assert not runner.steps.adopt()
    runner.steps.begin()
    runner.steps.end()
    runner.kv_caches = zeros()
    assert runner.steps.adopt()


def test_copies_wait_for_no_step_that_has_failed(runner):
    runner.steps.begin()
    for array in runner.kv_caches:
        array.delete()
    runner.steps.end()
    with runner.caches.turn() as turn:
        assert turn.arrays[0].is_deleted()


# --- several ranks ---


class Half:
    """A worker's half that says what a test wants."""

    def __init__(self) -> None:
        self.says: list[TransferResults] = []
        self.obeyed: list[Orders] = []
        self.withdrawn = 0

    def results(self) -> TransferResults:
        return self.says.pop(0) if self.says else TransferResults()

    def obey(self, orders: Orders) -> None:
        self.obeyed.append(orders)

    def withdraw_all(self) -> None:
        self.withdrawn += 1


@pytest.fixture
def ranks():
    config = SimpleNamespace(sharding_config=SimpleNamespace(total_devices=2))
    made = Ranks(config, Settings(AgentConfig("ours")), None)
    made._workers = [Half(), Half()]
    return made


def told(ranks):
    results = ranks.results()
    return results.finished_sending, results.finished_recving, results.failed_recving


NOTHING = (set(), set(), set())


def test_a_request_has_ended_when_it_has_on_all_devices_and_once(ranks):
    first, second = ranks._workers
    first.says.append(TransferResults({"sent"}, {"received", "lost"}, set()))
    assert told(ranks) == NOTHING
    second.says.append(TransferResults({"sent"}, {"received", "lost"}, {"lost"}))
    assert told(ranks) == ({"sent"}, {"received", "lost"}, {"lost"})
    assert told(ranks) == NOTHING


def test_nothing_that_vllm_shares_is_written_to(ranks):
    told(ranks)
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None


def test_all_devices_are_told_and_the_first_one_waits(ranks):
    ranks.obey(Orders(leases=[LeaseOrder("a", "lease", ((1,),), 4)], is_idle=True))
    first, second = (half.obeyed[0] for half in ranks._workers)
    assert first.leases == second.leases
    assert (first.is_idle, second.is_idle) == (True, False)


def test_leases_end_with_the_arrays_that_they_were_in(ranks, runner):
    ranks._steps.append(runner.steps)
    runner.step()
    ranks.look_for_new_arrays()
    assert [half.withdrawn for half in ranks._workers] == [0, 0]
    runner.kv_caches = zeros()
    ranks.look_for_new_arrays()
    assert [half.withdrawn for half in ranks._workers] == [1, 1]


# --- what is refused ---


def config(**changes):
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    found = {
        "parallel_config": SimpleNamespace(**parallel),
        "sharding_config": SimpleNamespace(total_dp_size=1),
        "speculative_config": None,
        "additional_config": {},
        "kv_transfer_config": SimpleNamespace(kv_buffer_device="cpu", kv_connector_extra_config={}),
    }
    return SimpleNamespace(**{**found, **changes})


def test_one_process_with_tensor_parallelism_is_supported():
    check_engine(config())


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"speculative_config": object()}, "--speculative-config"),
        ({"sharding_config": SimpleNamespace(total_dp_size=2)}, "data parallelism of 2"),
        ({"additional_config": {"enable_continue_decode": True}}, "enable_continue_decode"),
        ({"kv_transfer_config": SimpleNamespace(kv_buffer_device="tpu", kv_connector_extra_config={})}, '"tpu"'),
        (
            {
                "parallel_config": SimpleNamespace(
                    pipeline_parallel_size=2, decode_context_parallel_size=1, prefill_context_parallel_size=1
                )
            },
            "--pipeline-parallel-size 2",
        ),
        (
            {
                "parallel_config": SimpleNamespace(
                    pipeline_parallel_size=1, decode_context_parallel_size=2, prefill_context_parallel_size=1
                )
            },
            "context parallelism",
        ),
        (
            {
                "kv_transfer_config": SimpleNamespace(
                    kv_buffer_device="cpu", kv_connector_extra_config={"layer_wise": True}
                )
            },
            "layer_wise",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused_before_the_engine_starts(changes, found):
    with pytest.raises(ConfigurationError, match=r"cannot be moved|can register") as raised:
        check_engine(config(**changes))
    assert found in raised.value.found
