"""What users say: vLLM's own transfer configuration, its extra keys, and the variables that they set already."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import vllm
import vllm.envs
from vllm.config import VllmConfig

from kvferry import DigestPolicy, Direction, StagingPolicy
from kvferry.errors import ConfigurationError
from kvferry.options import (
    STAGING_BYTES,
    StagingMemory,
    digest_policy_named,
    direction_named,
    may_turn,
    staging_memory_named,
    staging_named,
)

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 32), (0, 32)
KNOWN_KEYS = (
    "backends",
    "digest",
    "host",
    "kv_lease_duration",
    "layer_wise",
    "port",
    "staging_bytes",
    "staging_memory",
    "strategy",
    "token_file",
    "transfer_direction",
    "transport",
)
# Keys of the stock connector whose meaning does not exist here: accepted, so that a configuration can stay as it is.
IGNORED_KEYS = ("enforce_handshake_compat", "engine_ttl", "num_threads", "push_registration_timeout")
DEFAULT_LEASE_S = 30


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's settings. `port` is that of rank 0; the others follow it; 0 lets the system choose them all.

    Without a shared token `token_file` is empty. `direction` and `may_turn` are what `transfer_direction` says.
    `is_loss_fatal` says that a request whose cache did not arrive ends with an error and is not computed here.
    """

    engine_id: str
    host: str
    port: int
    transport: str
    lease_s: float
    token_file: str
    buffer_device: str = "cpu"
    digest: DigestPolicy = DigestPolicy.SAMPLED
    staging: StagingPolicy = field(default_factory=lambda: staging_named("auto"))
    staging_bytes: int = STAGING_BYTES
    staging_memory: StagingMemory = StagingMemory.HOST
    direction: Direction = Direction.READ
    may_turn: bool = True
    is_loss_fatal: bool = False
    layer_wise: bool = False


def check_version() -> None:
    """Raises ConfigurationError for a vLLM whose connector interface we have not been tested with."""
    words = vllm.__version__.split("+", 1)[0].split(".")
    found = tuple(int(word) if word.isdecimal() else 0 for word in words[:2])
    if not OLDEST <= found <= NEWEST:
        raise ConfigurationError(
            "this vLLM's connector interface is not supported",
            found=vllm.__version__,
            expected=f"a version from {_words(OLDEST)} to {_words(NEWEST)}",
            hint="install another vLLM, or a kvferry that supports this one",
        )


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
    extra: dict[str, Any] = transfer.kv_connector_extra_config
    _check_keys(extra)
    _check_outputs(config)
    _check_memory(config)
    direction = str(extra.get("transfer_direction", "auto"))
    lease_s = extra.get("kv_lease_duration", DEFAULT_LEASE_S)
    if isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not lease_s > 0:
        raise ConfigurationError("kv_lease_duration is invalid", found=repr(lease_s), expected="seconds above 0")
    staging_bytes = _staging_bytes(extra)
    return Settings(
        engine_id=transfer.engine_id,
        host=str(extra.get("host", vllm.envs.VLLM_NIXL_SIDE_CHANNEL_HOST)),
        port=_port(extra, config),
        transport=_transport(extra),
        lease_s=float(lease_s),
        token_file=_token_file(extra),
        buffer_device=transfer.kv_buffer_device or "cpu",
        digest=digest_policy_named(str(extra.get("digest", DigestPolicy.SAMPLED))),
        staging=staging_named(str(extra.get("strategy", "auto")), staging_bytes),
        staging_bytes=staging_bytes,
        staging_memory=staging_memory_named(str(extra.get("staging_memory", StagingMemory.HOST))),
        direction=direction_named(direction),
        may_turn=may_turn(direction),
        is_loss_fatal=transfer.kv_load_failure_policy == "fail",
        layer_wise=_layer_wise(extra, config),
    )


def layer_wise_of(extra: dict[str, Any]) -> bool:
    """Raises ConfigurationError for what is neither true nor false."""
    found = extra.get("layer_wise", False)
    if not isinstance(found, bool):
        raise ConfigurationError("layer_wise is invalid", found=repr(found), expected="true or false")
    return found


def _layer_wise(extra: dict[str, Any], config: VllmConfig) -> bool:
    """Only where a layer that has ended has ended for all tokens of the step."""
    wanted = layer_wise_of(extra)
    several = (
        (config.speculative_config is not None, "speculative decoding"),
        (config.parallel_config.use_ubatching, "dual-batch overlap"),
    )
    for is_so, what in several if wanted else ():
        if is_so:
            raise ConfigurationError(
                "layer_wise does not work with layers that run more than once per step",
                found=what,
                expected="neither --speculative-config nor --enable-dbo",
            )
    return wanted


def _check_keys(extra: dict[str, Any]) -> None:
    unknown = sorted(set(extra) - {*KNOWN_KEYS, *IGNORED_KEYS})
    if unknown:
        raise ConfigurationError(
            "unknown keys in kv_connector_extra_config",
            found=", ".join(unknown),
            expected=f"some of {', '.join(KNOWN_KEYS)}",
        )
    for key in sorted(set(extra) & set(IGNORED_KEYS)):
        logger.info("kvferry ignores %s: it has no effect here", key)


def _check_outputs(config: VllmConfig) -> None:
    """vLLM refuses this for the connectors that it knows by name."""
    if config.aux_output_config.enable_return_routed_experts:
        raise ConfigurationError(
            "routed experts cannot be returned: those of a prompt exist only where it was computed",
            found="--enable-return-routed-experts",
            hint="leave it out",
        )


def _check_memory(config: VllmConfig) -> None:
    """Engines that sleep give away the memory of their caches, which others may be reading, and get it back empty."""
    if config.model_config.enable_sleep_mode:
        raise ConfigurationError(
            "an engine that can be put to sleep cannot let others read its caches",
            found="--enable-sleep-mode",
            hint="leave it out",
        )


def _port(extra: dict[str, Any], config: VllmConfig) -> int:
    """Ours if given; else the one of the stock connector where somebody has set it; else the system chooses."""
    if vllm.envs.is_set("VLLM_NIXL_SIDE_CHANNEL_PORT"):
        port = extra.get("port", vllm.envs.VLLM_NIXL_SIDE_CHANNEL_PORT)
    else:
        port = extra.get("port", 0)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
        raise ConfigurationError("port is invalid", found=repr(port), expected="0 to 65535; 0 lets the system choose")
    ranks_per_engine = config.parallel_config.world_size
    return port + config.parallel_config.data_parallel_index * ranks_per_engine if port else 0


def _staging_bytes(extra: dict[str, Any]) -> int:
    found = extra.get("staging_bytes", STAGING_BYTES)
    if isinstance(found, bool) or not isinstance(found, int):
        raise ConfigurationError("staging_bytes is invalid", found=repr(found), expected="a number of bytes")
    return found


def _token_file(extra: dict[str, Any]) -> str:
    path = extra.get("token_file", "")
    if not isinstance(path, str):
        raise ConfigurationError("token_file is invalid", found=type(path).__name__, expected="the path of a file")
    return path


def _transport(extra: dict[str, Any]) -> str:
    """`transport` is ours; `backends` is the stock connector's and can only ask for what NIXL gives us: UCX."""
    backends = extra.get("backends", ["UCX"])
    if backends != ["UCX"]:
        raise ConfigurationError("kvferry uses only NIXL's UCX backend", found=repr(backends), expected='["UCX"]')
    return str(extra.get("transport", "auto"))


def _words(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)
