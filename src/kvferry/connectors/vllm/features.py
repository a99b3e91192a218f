"""What differs between the versions of vLLM that the connector works with, found by looking and not by the version.

No other file of the connector asks which vLLM this is. docs/vllm.md has the table of what each version lacks;
tests/vllm/test_vllm_interface.py reads the sources of a version that cannot be run, and says what is new in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvferry.errors import ConfigurationError, RequestError

OLDEST, NEWEST = (0, 29), (0, 33)

Tables = Sequence[Sequence[int]]

# What the connector cannot do without: module, class, and the attributes that the class must have.
NEEDED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA"): ("request_finished_all_groups",),
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1"): (
        "bind_connector_metadata",
        "build_connector_meta",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "get_finished",
        "get_handshake_metadata",
        "get_kv_connector_stats",
        "get_num_new_matched_tokens",
        "handle_preemptions",
        "on_new_request",
        "register_kv_caches",
        "request_finished",
        "requires_piecewise_for_cudagraph",
        "save_kv_layer",
        "set_xfer_handshake_metadata_pp_aware",
        "shutdown",
        "update_connector_output",
        "update_state_after_alloc",
    ),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): (
        "needs_kv_cache_zeroing",
        "select_transfer_block_ids",
        "transfer_group_ids",
        "transfer_groups",
    ),
    ("vllm.v1.kv_cache_interface", "AttentionSpec"): (
        "head_size_v",
        "kv_quant_mode",
        "num_head_slots",
        "num_heads",
        "state_content_bytes",
        "tokens_per_state",
    ),
    ("vllm.v1.kv_cache_interface", "MambaSpec"): ("mamba_type", "num_speculative_blocks", "tp_replicated"),
    ("vllm.v1.core.sched.output", "SchedulerOutput"): ("kv_connector_block_state", "preempted_req_ids"),
}


def check_version() -> None:
    """Raises ConfigurationError for a vLLM that the connector has not been tried with, or that lacks what it needs."""
    words = vllm.__version__.split("+", 1)[0].split(".")
    found = tuple(int(word) if word.isdecimal() else 0 for word in words[:2])
    lacks = missing()
    if lacks or not OLDEST <= found <= NEWEST:
        raise unsupported(f"it has no {', '.join(lacks)}" if lacks else "")


def unsupported(why: str) -> ConfigurationError:
    """The error for a vLLM that is not supported."""
    return ConfigurationError(
        "this vLLM's connector interface is not supported",
        found=f"{vllm.__version__}: {why}" if why else vllm.__version__,
        expected=f"a version from {_words(OLDEST)} to {_words(NEWEST)}",
        hint="install another vLLM, or a kvferry that supports this one",
    )


def missing() -> list[str]:
    """What this vLLM lacks of what is needed."""
    return [
        f"{name}.{attribute}"
        for (module, name), attributes in NEEDED.items()
        for attribute in attributes
        if attribute not in _attributes(getattr(importlib.import_module(module), name, None))
    ]


def _attributes(found: Any) -> set[str]:
    """Return all attributes of a class. `dir` does not list a dataclass's fields that have no default."""
    return {*dir(found), *(one.name for one in fields(found))} if is_dataclass(found) else set(dir(found))


def _words(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)


# --- where a hit of the prefix cache came from: since 0.32 ---


def _cache_hit_source() -> Any:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


CACHE_HIT_SOURCE = _cache_hit_source()


# --- how vLLM hears of a transfer that has failed: by its request since 0.30, before by the blocks ---


@dataclass
class _Results:
    """The results of transfers, in the form that vLLM has had since 0.30."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


FAILS_BY_BLOCKS = not hasattr(base, "KVConnectorTransferResults")
TransferResults: Any = getattr(base, "KVConnectorTransferResults", _Results)


def failed_blocks(tables: Tables, first: int, size: int) -> set[int]:
    """The blocks, of `size` tokens, into which the tokens from `first` on should have come. Those before are of vLLM's
    own prefix cache, and other requests may be reading them."""
    return {block for table in tables for block in table[first // size :]}


def block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many tokens vLLM's scheduler counts for one block of a model with one cache group."""
    divided = vllm_config.parallel_config.decode_context_parallel_size
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size * divided)


def check_caches(vllm_config: Any, forgets: bool) -> None:
    """Raises ConfigurationError for caches that this version of vLLM cannot get from elsewhere. `forgets` says that
    some group gives up what it knows before its request ends."""
    if FAILS_BY_BLOCKS and forgets:
        # This vLLM goes on behind the last block before the failed ones, with a missing window or state. With
        # several groups the first failure ends the engine.
        raise ConfigurationError(
            "this vLLM cannot go on when a cache with a window, chunks or states of fixed size does not arrive",
            found=vllm.__version__,
            expected="vLLM 0.30 or later, or a model whose layers all have full attention",
        )
    if getattr(vllm_config.cache_config, "mamba_cache_mode", "none") == "all":
        # Gone in 0.32. Every block has a state there, and nobody has tried which one is the running one.
        hint = "use --mamba-cache-mode align"
        raise ConfigurationError("states of every block cannot be transferred", found="mamba_cache_mode all", hint=hint)


def neighbours(vllm_config: Any) -> list[str]:
    """The connectors that a server has beside ours, as far as a worker knows them."""
    transfer = _whole_transfer_config()
    named = (transfer.kv_connector_extra_config or {}).get("connectors") if transfer is not None else None
    return [str(one["kv_connector"]) for one in named or () if one["kv_connector"] != _ours(vllm_config)]


def _ours(vllm_config: Any) -> str:
    return str(vllm_config.kv_transfer_config.kv_connector)


def _whole_transfer_config() -> Any:
    """What MultiConnector was given, or ours; None where that is not known. MultiConnector shows each connector itself
    alone: vLLM says what there is altogether only in a worker while that starts."""
    whole = get_current_vllm_config_or_none()
    return whole.kv_transfer_config if whole is not None else None


def check_role(vllm_config: Any) -> None:
    """Raises ConfigurationError where ours is to fetch on a server that is not: vLLM hands out blocks there which a
    step under way still writes to."""
    whole, ours = _whole_transfer_config(), vllm_config.kv_transfer_config
    if whole is not None and ours.is_kv_consumer and not whole.is_kv_consumer:
        raise ConfigurationError(
            f"{ours.kv_connector} is to fetch, and its server is not",
            found=f"kv_role {ours.kv_role} among connectors whose kv_role is {whole.kv_role}",
            expected="the same kv_role for both",
        )


LOAD_BEFORE_STEPS = frozenset({"NixlConnector", "OffloadingConnector"})
"""Connectors that have a request wait until what they load is there. What others load is used by the step in which it
is loaded, and they say after it what has not come: vLLM computes that again, in the same blocks."""


def check_windows(vllm_config: Any) -> None:
    """Raises ConfigurationError where vLLM would serve blocks to later prompts which a fetch fills in part. They are
    such of layers with windows or chunks."""
    if not vllm_config.kv_transfer_config.is_kv_consumer:
        return
    if others := neighbours(vllm_config):
        raise ConfigurationError(
            "a server that fetches caches of layers with windows or chunks has no other connector",
            found=", ".join(others),
            expected=f"{_ours(vllm_config)} alone, or kv_role kv_producer",
            hint="leave the others out: they would keep blocks that a fetch fills in part, for later prompts",
        )
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        # A request whose cache has come and whose image has not waits on with its blocks in the prefix cache, and
        # others are looked at before it.
        raise ConfigurationError(
            "a server that fetches caches of layers with windows or chunks cannot wait for encoders elsewhere",
            found="an ec_transfer_config",
            expected="none, or kv_role kv_producer",
        )


# --- drafters that read ahead: known since 0.32 ---


def num_recomputed(vllm_config: Any) -> int:
    """How many of a prompt's last tokens the decode side computes itself.

    Each of several modules for multi-token prediction reads one token further ahead than the one before it. What they
    keep of the last tokens depends on guesses, which nobody corrects elsewhere.
    """
    return max(1, getattr(vllm_config, "num_prefill_lookahead_tokens", 0) - 1)


# --- the blocks of a request that is being computed: asked for since 0.30, before all were listed ---


def blocks_of(state: Any, request_id: str) -> tuple[list[int], ...] | None:
    """The block tables of a request that a step computes; None where vLLM says nothing of it."""
    found = state.get_block_ids(request_id) if hasattr(state, "get_block_ids") else state.block_ids.get(request_id)
    return found if found is None else tuple(found)


# --- engines that sleep: a connector hears of it since 0.33 ---

SAYS_WHEN_IT_SLEEPS = hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")


# --- cache specifications ---


def is_indexer(spec: Any, backend: str) -> bool:
    """Whether a latent cache is that of a sparse attention's indexer. Before 0.30, and in DeepSeek V4, only its backend
    says so."""
    roles = getattr(kv_cache_interface, "SparseCacheRole", None)
    has_role = roles is not None and getattr(spec, "cache_role", None) == roles.INDEXER
    return has_role or backend.endswith("_INDEXER")


def is_in_device_memory(group: Any, spec: Any) -> bool:
    """Whether a layer has a tensor of its own where the model computes. Before 0.30 all have."""
    return not getattr(group, "host_resident", False) and getattr(spec, "has_layer_views", True)


def is_divided_by_tokens(spec: Any) -> bool:
    """Whether decode context parallelism divides an attention layer's tokens. Before 0.31 it divides all."""
    return bool(getattr(spec, "dcp_sharded", True))


# --- requests ---


def returns_routed_experts(vllm_config: Any) -> bool:
    """Whether answers name the experts that have computed them. An option of the model before 0.31."""
    options = getattr(vllm_config, "aux_output_config", vllm_config.model_config)
    return bool(options.enable_return_routed_experts)


def scores_prompt_tokens(sampling: Any) -> bool:
    """Whether an answer scores tokens at places of the prompt, which a request can ask for since 0.31."""
    return getattr(sampling, "prompt_logprob_token_ids", None) is not None


def hash_inputs(request: Any, num_tokens: int) -> list[tuple[Any, ...]]:
    """What vLLM's prefix cache tells prompts apart by, beside their tokens: kind (`mm`, `lora`, `cache_salt`), value,
    and of media the place.

    Raises RequestError for an adapter before 0.31: the prefix cache knows it by its name only, and takes the blocks of
    one for those of the next one of that name, wherever that was loaded from.
    """
    keys, _ = generate_block_hash_extra_keys(request, 0, num_tokens, 0)
    if _names_kinds():
        return list(keys or ())
    if request.lora_request is not None:
        what = "this vLLM's prefix cache cannot tell apart adapters of one name"
        raise RequestError(what, found=request.lora_request.lora_name, hint="use vLLM 0.31 or later")
    return list(_kinds(keys or ()))


@lru_cache
def _names_kinds() -> bool:
    """Whether this vLLM names the kind of each input. It is asked with a request that has nothing but a salt."""
    plain = SimpleNamespace(mm_features=[], lora_request=None, cache_salt="salt", prompt_embeds=None)
    keys, _ = generate_block_hash_extra_keys(plain, 0, 1, 0)
    return bool(keys == (("cache_salt", "salt"),))


def _kinds(keys: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield each key with its kind. Without an adapter only media are pairs, and only a salt is a string."""
    for key in keys:
        match key:
            case (str(identifier), int(offset)):
                yield "mm", identifier, offset
            case str(salt):
                yield "cache_salt", salt
            case _:
                yield "unknown", key
