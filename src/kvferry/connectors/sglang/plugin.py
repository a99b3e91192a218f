"""What makes SGLang know the backend: the choice `kvferry`, and which request or queue a new object belongs to.

SGLang has no registry of transfer backends. What is needed of it is checked first, because SGLang swallows what a
plug-in raises, and would say only that `kvferry` is no valid choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvferry import WIRE_VERSION
from kvferry.connectors.sglang.construction import note_queue, note_request
from kvferry.connectors.sglang.features import TESTED, check_calls
from kvferry.connectors.sglang.settings import settings_from
from kvferry.errors import ConfigurationError

NAME = "kvferry"
_UTILS = "sglang.srt.disaggregation.utils"
_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_QUEUES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")
"""A scheduler's, of which it has the one of its mode."""
_MAKERS = (
    (_PREFILL, "_init_kv_manager"),
    (_DECODE, "_init_kv_manager"),
    (_PREFILL, "create_sender"),
    (_DECODE, "_create_receiver_and_enqueue"),
)
"""Where SGLang makes managers, senders and receivers."""


def register() -> None:
    """The entry point of the group `sglang.srt.plugins`: runs in every process of SGLang, before its options are read.

    Raises ConfigurationError for an SGLang without what is needed; SGLang logs that and goes on without us.
    """
    try:
        _register()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            "kvferry's transfer backend does not fit this SGLang",
            found=f"{type(error).__name__}: {error}",
            expected=f"SGLang {TESTED}",
            hint="install that SGLang, or a kvferry that supports this one",
        ) from error


def check_loaded() -> None:
    """Have SGLang load its plug-ins, and see whether it would use this backend. Raises ConfigurationError with the
    reason why not, which SGLang itself would only log."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if _is_used():
        return
    register()
    raise ConfigurationError(
        "SGLang does not load kvferry's plug-in",
        found=f"SGLANG_PLUGINS={os.environ.get('SGLANG_PLUGINS', '')}",
        expected="kvferry among them, or no SGLANG_PLUGINS",
        hint="without that variable kvferry is missing among this environment's packages: pip install it there",
    )


def _is_used() -> bool:
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    from kvferry.connectors.sglang.manager import FerryManager

    try:
        manager = get_kv_class(TransferBackend(NAME), KVClassType.MANAGER)
    except ValueError:
        return False
    return NAME in DISAGG_TRANSFER_BACKEND_CHOICES and manager is FerryManager


def _register() -> None:
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for queue, method in _MAKERS:
        _check_method(queue, method)
    check_calls(_classes().values())
    _add_member(TransferBackend)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _class_of, HookType.AROUND)
    for queue, method in _MAKERS:
        note = note_queue if method == "_init_kv_manager" else note_request
        HookRegistry.register(f"{queue}.{method}", note, HookType.AROUND)
    # A router can do without.
    HookRegistry.register(f"{_SCHEDULER}.get_init_info", introduce, HookType.AFTER)
    if _has_method(_CONTROLLER, "get_init_info"):
        HookRegistry.register(f"{_CONTROLLER}.get_init_info", introduce_engines, HookType.AFTER)
    if NAME not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([NAME])


def _check_method(owner: str, method: str) -> None:
    module, _, name = owner.rpartition(".")
    getattr(getattr(import_module(module), name), method)


def _has_method(owner: str, method: str) -> bool:
    try:
        _check_method(owner, method)
    except (ImportError, AttributeError):
        return False
    return True


def _add_member(backends: Any) -> None:
    """A member more of an enumeration that SGLang looks names up in."""
    if NAME in backends._value2member_map_:
        return
    member = object.__new__(backends)
    member._name_, member._value_, member.__objclass__ = NAME.upper(), NAME, backends
    type.__setattr__(backends, NAME.upper(), member)
    backends._member_map_[NAME.upper()] = member
    backends._member_names_.append(NAME.upper())
    backends._value2member_map_[NAME] = member


def introduce(told: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Add what is kvferry's to what a scheduler process reports to the HTTP server, which shows it in `/server_info`.
    A router learns from it where a prefill is reached, which agents understand it, and which engines keep the same of a
    request."""
    queues = (getattr(scheduler, queue, None) for queue in _QUEUES)
    found = (getattr(getattr(queue, "kv_manager", None), "cache", "") for queue in queues)
    name = next(filter(None, found), "")
    backend = {"host": settings_from(os.environ).host, "wire_version": str(WIRE_VERSION), "cache": name}
    return {**told, NAME: backend} if name else told


def introduce_engines(told: dict[str, Any], controller: Any) -> dict[str, Any]:
    """The same of a server with data parallelism, whose engines keep the same: SGLang would pass nothing of it on."""
    infos = getattr(controller, "_scheduler_init_infos", ())
    return next(({**told, NAME: info[NAME]} for info in infos if NAME in info), told)


def _class_of(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    if transfer_backend.value != NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    return _classes()[class_type.value]


def _classes() -> dict[str, type]:
    """Ours, by SGLang's words for them."""
    from kvferry.connectors.sglang.manager import FerryBootstrapServer, FerryManager
    from kvferry.connectors.sglang.receiver import FerryReceiver
    from kvferry.connectors.sglang.sender import FerrySender

    return {
        "manager": FerryManager,
        "sender": FerrySender,
        "receiver": FerryReceiver,
        "bootstrap_server": FerryBootstrapServer,
    }
