"""All checks: the module of each, how long it may take, and of which kinds of device it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvferry.qualify.expected import GPUS

IN_HOST: Final = {"cpu": "the device is the host: see the check of its memory"}
NO_UCX: Final = {
    "cpu": "for memory of the host, UCX chooses by itself",
    "tpu": "no transport registers memory of a TPU: caches go through memory of the host",
}
NO_KERNELS: Final = {
    "cpu": "memory of the host needs no kernels",
    "tpu": "programs of XLA copy there: see the check of arrays of JAX",
}
NO_TORCH: Final = {"tpu": "torch does not reach the device: see the check of arrays of JAX"}
NO_ENGINE: Final = {"tpu": "kvferry's own engine computes with torch, which does not reach the device"}
NO_ARRAYS: Final = dict.fromkeys(("cpu", *GPUS), "engines whose caches are arrays of JAX run on TPUs")


@dataclass(frozen=True, slots=True)
class Check:
    """`run(kind)` of a module, in a process of its own, which is ended after `limit_s`. `not_for` has kinds of device,
    and why it says nothing of them."""

    name: str
    module: str
    limit_s: float
    not_for: Mapping[str, str] = field(default_factory=dict)


CHECKS: Final = (
    Check("machine", "kvferry.qualify.checks.machine", 60.0),
    Check("UCX settings", "kvferry.qualify.checks.ucx_settings", 30.0, NO_UCX),
    Check("kernels", "kvferry.qualify.checks.kernels", 120.0, NO_KERNELS),
    Check("copy rates", "kvferry.qualify.checks.copy_rates", 90.0, NO_KERNELS),
    Check("transports in host memory", "kvferry.qualify.checks.host_transports", 60.0),
    Check("transports in device memory", "kvferry.qualify.checks.device_transports", 90.0, IN_HOST | NO_TORCH),
    Check("fetches", "kvferry.qualify.checks.fetches", 150.0, NO_TORCH),
    Check("arrays of JAX", "kvferry.qualify.checks.arrays_of_jax", 150.0, NO_ARRAYS),
    Check("answers", "kvferry.cli.qualify.answers", 180.0, NO_ENGINE),
    Check("restart", "kvferry.cli.qualify.restart", 150.0, NO_ENGINE),
)
