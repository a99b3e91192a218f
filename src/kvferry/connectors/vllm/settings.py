"""What users say: vLLM's own transfer configuration, its extra keys, and the variables that they set already."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import vllm.envs
from vllm.config import VllmConfig

from kvferry import AgentConfig, read_token
from kvferry.connectors.timing import timing_of
from kvferry.connectors.vllm.features import SAYS_WHEN_IT_SLEEPS, returns_routed_experts
from kvferry.connectors.vllm_keys import DraftLayers, ExtraConfig, IgnoredKeys
from kvferry.errors import ConfigurationError
from kvferry.options import (
    StagingMemory,
    digest_policy_named,
    direction_named,
    may_switch_direction,
    staging_memory_named,
    staging_named,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's settings. `agent` is that of rank 0, without an epoch of its own.

    `is_loss_fatal` says that a request whose cache did not arrive ends with an error and is not computed here.
    `draft_layers` says whether a speculator's own cache moves.
    """

    agent: AgentConfig
    buffer_device: str = "cpu"
    staging_memory: StagingMemory = StagingMemory.HOST
    is_loss_fatal: bool = False
    layer_wise: bool = False
    draft_layers: DraftLayers = True


def speak_like_vllm() -> None:
    """Send kvferry's words where vLLM's go: it sets up its own loggers and no others."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    ours.handlers, ours.propagate = list(theirs.handlers), False
    ours.setLevel(theirs.getEffectiveLevel())


def settings_of(config: VllmConfig) -> Settings:
    """The settings of an engine. Raises ConfigurationError naming the key that is wrong."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.engine_id is None:
        raise ConfigurationError("vLLM was started without a transfer configuration", expected="--kv-transfer-config")
    extra = _extra_config(transfer.kv_connector_extra_config)
    _check_kind(config)
    _check_layer_wise(extra, config)
    _check_outputs(config)
    _check_memory(config)
    _check_encoder(config)
    timing = timing_of(extra.kv_lease_duration)
    agent = AgentConfig(
        engine_id=transfer.engine_id,
        host=vllm.envs.VLLM_NIXL_SIDE_CHANNEL_HOST if extra.host is None else extra.host,
        port=_port(extra, config),
        transport=extra.transport,
        timing=timing,
        token=read_token(extra.token_file),
        digest=digest_policy_named(extra.digest),
        direction=direction_named(extra.transfer_direction),
        may_switch_direction=may_switch_direction(extra.transfer_direction),
        staging_bytes=extra.staging_bytes,
        staging=staging_named(extra.strategy, extra.staging_bytes),
    )
    return Settings(
        agent,
        buffer_device=transfer.kv_buffer_device or "cpu",
        staging_memory=staging_memory_named(extra.staging_memory),
        is_loss_fatal=transfer.kv_load_failure_policy == "fail",
        layer_wise=extra.layer_wise,
        draft_layers=extra.transfer_draft_layers,
    )


def _extra_config(given: dict[str, Any]) -> ExtraConfig:
    try:
        extra = msgspec.convert(given, ExtraConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(sorted(set(ExtraConfig.__struct_fields__) - set(IgnoredKeys.__struct_fields__)))
        expected = f"some of {known}" if "unknown field" in str(error) else ""
        hint = "docs/vllm.md says what each key is, and in which unit"
        what = "kv_connector_extra_config is invalid"
        raise ConfigurationError(what, found=str(error), expected=expected, hint=hint) from error
    if extra.backends != ["UCX"]:
        raise ConfigurationError("kvferry uses only NIXL's UCX backend", found=repr(extra.backends), expected='["UCX"]')
    for key in sorted(set(given) & set(IgnoredKeys.__struct_fields__)):
        logger.info("kvferry ignores %s: it has no effect here", key)
    return extra


def _check_kind(config: VllmConfig) -> None:
    """Before anything else: what can never work here is not asked for its other settings."""
    if config.model_config.runner_type != "generate":
        raise ConfigurationError(
            "only a model that generates text has a cache that another engine goes on from",
            found=f"--runner {config.model_config.runner_type}",
            expected="--runner generate",
            hint="serve a pooling model without --kv-transfer-config: its answer is computed with its prompt",
        )
    if config.parallel_config.enable_elastic_ep:
        # Its ranks come and go in process groups that are not PyTorch's: the ranks of an engine could not meet.
        raise ConfigurationError(
            "the ranks of an engine must stay the same while it runs",
            found="--enable-elastic-ep",
            hint="leave it out; kvferry's router takes and drops whole engines while it serves",
        )


def _check_layer_wise(extra: ExtraConfig, config: VllmConfig) -> None:
    """Only where a layer that has ended has ended for all tokens of the step."""
    several = (
        (config.speculative_config is not None, "speculative decoding"),
        (config.parallel_config.use_ubatching, "dual-batch overlap"),
    )
    found = [what for is_so, what in several if is_so]
    if extra.layer_wise and found:
        raise ConfigurationError(
            "layer_wise does not work with layers that run more than once per step",
            found=", ".join(found),
            expected="neither --speculative-config nor --enable-dbo",
        )


def _check_outputs(config: VllmConfig) -> None:
    """vLLM refuses this for the connectors that it knows by name."""
    if returns_routed_experts(config):
        raise ConfigurationError(
            "routed experts cannot be returned: those of a prompt exist only where it was computed",
            found="--enable-return-routed-experts",
            hint="leave it out",
        )


def _check_memory(config: VllmConfig) -> None:
    """Engines that sleep give away the memory of their caches, which others may be reading, and get it back empty."""
    if config.model_config.enable_sleep_mode and not SAYS_WHEN_IT_SLEEPS:
        raise ConfigurationError(
            "this vLLM does not tell a connector when it sleeps, and others may be reading its caches",
            found="--enable-sleep-mode",
            hint="leave it out, or use vLLM 0.33 or later",
        )


def _check_encoder(config: VllmConfig) -> None:
    """vLLM's own scheduler takes no connector for these, and says so without a way out."""
    if config.model_config.is_encoder_decoder:
        raise ConfigurationError(
            "what a decoder sees of its encoder is not a part of the cache that vLLM lets others have",
            found="an encoder-decoder model",
            expected="a decoder-only model",
            hint="serve it without --kv-transfer-config",
        )


def _port(extra: ExtraConfig, config: VllmConfig) -> int:
    """Ours if given; else the one of the stock connector where somebody has set it; else the system chooses."""
    port = extra.port
    if port is None:
        port = vllm.envs.VLLM_NIXL_SIDE_CHANNEL_PORT if vllm.envs.is_set("VLLM_NIXL_SIDE_CHANNEL_PORT") else 0
    ranks_per_engine = config.parallel_config.world_size
    return port + config.parallel_config.data_parallel_index * ranks_per_engine if port else 0
