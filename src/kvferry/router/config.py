"""What a router is told: its instances, its limits, and how it chooses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.errors import ConfigurationError
from kvferry.http.access import check_key
from kvferry.http.registration import is_base_url
from kvferry.router.policy.balanced import balanced
from kvferry.router.policy.records import NO_LIMITS, Instance, Limits, Policy, Role

# The fields of RouterConfig that must be above 0.
LIMITS = (
    "connect_timeout_s",
    "prefill_timeout_s",
    "decode_timeout_s",
    "stall_timeout_s",
    "probe_interval_s",
    "probe_timeout_s",
    "max_body_bytes",
    "max_answer_bytes",
)


class PrefillFallback(StrEnum):
    """What to do if no prefill instance is available. DECODE: the decode instance computes the prompt. REFUSE: nobody
    does, and the client is told to come back."""

    DECODE = "decode"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How a router chooses. `clock` gives seconds of a monotonic clock for all that is measured. `seed` is for the
    draws among very many instances. With None they differ every time."""

    policy: Policy = balanced
    limits: Limits = NO_LIMITS
    clock: Callable[[], float] = time.monotonic
    seed: int | None = None


DEFAULT_POLICY = PolicySettings()


@dataclass(frozen=True, slots=True)
class Registration:
    """Whether engines may register themselves, and the `keys` of which they must know one. Without keys only engines on
    this host may.

    A registration that is not renewed for `lease_s` is over.
    """

    is_open: bool = False
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    lease_s: float = 15.0


NO_REGISTRATION = Registration()


@dataclass(frozen=True, slots=True)
class PodSelection:
    """Pods of a Kubernetes cluster that are instances: those with the labels of `selector`, as kubectl writes it. The
    label `role_label` of each is `prefill` or `decode`, and `port` the name or the number of the port where it serves.
    An empty `namespace` is the router's own."""

    selector: str
    namespace: str = ""
    role_label: str = "kvferry.io/role"
    port: str = "http"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The addresses of the engines, and how long and how large anything may get.

    `prefill_urls` may be empty: then decode instances serve alone. With `instances_may_join` both may be empty.
    `prefill_timeout_s` is for a whole prefill; `decode_timeout_s` ends with the first byte of the answer's body, which
    without streaming is the whole generation. After it only silence is limited: `stall_timeout_s` between two pieces,
    as it is in the body of a request.
    With `require_prefill` the router is not ready while no pair of instances is; with a `prefill_fallback` of REFUSE it
    does not let a decode instance compute what a prefill instance should, either. If a prompt has `early_from_tokens`
    or more, decode begins together with prefill where the prefill instance can do that. With 0 it never does.
    `max_metric_labels` instances, and a quarter as many pairs, have metrics of their own, and the others share theirs.
    `engine_api_key` is shown to the engines in place of what clients show; empty: theirs is passed on.
    Raises ConfigurationError.
    """

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    connect_timeout_s: float = 5.0
    prefill_timeout_s: float = 300.0
    decode_timeout_s: float = 1800.0
    stall_timeout_s: float = 120.0
    probe_interval_s: float = 2.0
    probe_timeout_s: float = 5.0
    max_body_bytes: int = 32 * 2**20
    max_answer_bytes: int = 32 * 2**20
    members_file: str = ""
    registration: Registration = NO_REGISTRATION
    pods: PodSelection | None = None
    policy_settings: PolicySettings = DEFAULT_POLICY
    require_prefill: bool = False
    prefill_fallback: PrefillFallback = PrefillFallback.DECODE
    early_from_tokens: int = 0
    max_metric_labels: int = 1024
    engine_api_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.engine_api_key:
            check_key(self.engine_api_key)
        if not self.decode_urls and not self.instances_may_join:
            raise ConfigurationError(
                "the router needs a decode engine",
                found="no decode URL",
                expected="one or more, such as http://127.0.0.1:8200",
                hint="prefill engines are optional; or let engines join: --members-file, --accept-registrations, "
                "--kubernetes-selector",
            )
        _ = self.instances
        for name in LIMITS:
            if not (value := getattr(self, name)) > 0:
                raise ConfigurationError(f"{name} must be positive", found=str(value), expected="a number above 0")

    @property
    def needs_pair(self) -> bool:
        """Whether the router is not ready while no pair of instances is."""
        return self.require_prefill or self.prefill_fallback is PrefillFallback.REFUSE

    @property
    def instances_may_join(self) -> bool:
        """Whether instances may come while the router serves."""
        return bool(self.members_file) or self.registration.is_open or self.pods is not None

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances, prefill first, in the order given."""
        return (*instances_of(Role.PREFILL, self.prefill_urls), *instances_of(Role.DECODE, self.decode_urls))


def instances_of(role: Role, urls: tuple[str, ...]) -> tuple[Instance, ...]:
    """The instances with these URLs. Raises ConfigurationError."""
    found: dict[str, Instance] = {}
    for url in urls:
        plain = url.rstrip("/")
        if plain in found:
            raise ConfigurationError(f"the same {role} instance is given twice", found=url, expected="every URL once")
        found[plain] = Instance(plain, role)
        if not is_base_url(plain):
            raise ConfigurationError(
                f"invalid URL of a {role} instance",
                found=url,
                expected="http://host:port, or https",
                hint="give the server's base URL without /v1, a query or a fragment",
            )
    return tuple(found.values())
