"""What differs between the versions of vLLM, played here with whichever is installed."""

import importlib
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

from test_vllm_worker import LOST, REFERENCE, Rank

from kvferry.connectors.vllm import features
from kvferry.connectors.vllm.metadata import FetchOrder, Orders
from kvferry.connectors.vllm.worker import open_requests
from kvferry.errors import ConfigurationError, RequestError
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import BlocksReleased, FetchFailed

CACHED, WANTED, BLOCK = (3, 4), (7, 8, 9), 16


def told_by_blocks(monkeypatch):
    """A rank of a vLLM that hears which blocks of a request did not come."""
    monkeypatch.setattr(open_requests, "FAILS_BY_BLOCKS", True)
    rank = Rank()
    rank.worker._config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1))
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))
    rank.worker._kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
    return rank


def fetch(error=""):
    tokens = TokenRange(BLOCK * len(CACHED), BLOCK * 5 - 1)
    return FetchOrder("a", REFERENCE, ("tcp://127.0.0.1:1",), ((*CACHED, *WANTED),), (tokens,), True, error)


@pytest.mark.parametrize("error", ["", "malformed"])
def test_blocks_that_did_not_come_are_told_once_and_cached_ones_are_not(monkeypatch, error):
    rank = told_by_blocks(monkeypatch)
    rank.worker.obey(Orders(fetches=[fetch(error)]))
    assert rank.says(*(() if error else (FetchFailed("a", LOST), BlocksReleased("a"))))[1] == {"a"}
    assert rank.worker.failed_blocks() == set(WANTED)
    assert rank.worker.failed_blocks() == set()


def test_a_vllm_that_hears_of_requests_hears_of_no_blocks(monkeypatch):
    rank = told_by_blocks(monkeypatch)
    monkeypatch.setattr(open_requests, "FAILS_BY_BLOCKS", False)
    rank.worker.obey(Orders(fetches=[fetch("malformed")]))
    assert rank.told() == (set(), {"a"}, {"a"})
    assert rank.worker.failed_blocks() == set()


@pytest.mark.parametrize("fails_by_blocks", [True, False])
def test_windows_and_states_need_a_vllm_that_hears_of_requests(monkeypatch, fails_by_blocks):
    monkeypatch.setattr(features, "FAILS_BY_BLOCKS", fails_by_blocks)
    config = SimpleNamespace(cache_config=SimpleNamespace())
    features.check_caches(config, forgets=False)
    if fails_by_blocks:
        with pytest.raises(ConfigurationError, match=r"0\.30 or later"):
            features.check_caches(config, forgets=True)
    else:
        features.check_caches(config, forgets=True)


def test_states_of_every_block_are_refused():
    config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="all"))
    with pytest.raises(ConfigurationError, match="--mamba-cache-mode align"):
        features.check_caches(config, forgets=False)


def asked(**more):
    return SimpleNamespace(**{"lora_request": None} | more)


def without_kinds(monkeypatch, *keys):
    """A vLLM whose prefix cache does not say what an input is."""
    monkeypatch.setattr(features, "_names_kinds", lambda: False)
    monkeypatch.setattr(features, "generate_block_hash_extra_keys", lambda *_: (keys or None, 0))


def test_inputs_without_a_kind_get_it(monkeypatch):
    without_kinds(monkeypatch, ("cat", 2), ("dog", 7), "salt")
    found = features.hash_inputs(asked(), 8)
    assert found == [("mm", "cat", 2), ("mm", "dog", 7), ("cache_salt", "salt")]
    without_kinds(monkeypatch, b"digest")
    assert features.hash_inputs(asked(), 8) == [("unknown", b"digest")]
    without_kinds(monkeypatch)
    assert features.hash_inputs(asked(), 8) == []


def test_an_adapter_that_is_only_a_name_is_none(monkeypatch):
    without_kinds(monkeypatch, "tuned", "salt")
    with pytest.raises(RequestError, match="adapters of one name"):
        features.hash_inputs(asked(lora_request=SimpleNamespace(lora_name="tuned")), 8)


def test_blocks_of_a_request_are_asked_for_or_listed():
    asks = SimpleNamespace(get_block_ids=lambda name: ([1, 2],) if name == "a" else None)
    lists = SimpleNamespace(block_ids={"a": ([1, 2],)})
    assert [features.blocks_of(state, "a") for state in (asks, lists)] == [([1, 2],)] * 2
    assert [features.blocks_of(state, "b") for state in (asks, lists)] == [None] * 2


def test_what_a_version_does_not_say_is_what_it_always_was():
    nothing = SimpleNamespace()
    assert features.is_in_device_memory(nothing, nothing)
    assert features.is_divided_by_tokens(nothing)
    assert not features.scores_prompt_tokens(nothing)
    assert [features.is_indexer(nothing, name) for name in ("DEEPSEEK_V32_INDEXER", "FLASHMLA")] == [True, False]


@pytest.mark.parametrize("returned", [True, False])
def test_routed_experts_are_an_option_of_the_model_or_of_the_outputs(returned):
    options = SimpleNamespace(enable_return_routed_experts=returned)
    assert features.returns_routed_experts(SimpleNamespace(model_config=options)) == returned
    later = SimpleNamespace(aux_output_config=options, model_config=SimpleNamespace())
    assert features.returns_routed_experts(later) == returned


def test_a_vllm_without_something_that_is_imported_is_refused_when_the_connector_is():
    gone = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats"
    code = f"import sys; sys.modules[{gone!r}] = None; import kvferry.connectors.vllm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert "ConfigurationError: this vLLM's connector interface is not supported" in said
    assert gone in said
