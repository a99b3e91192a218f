"""LoRA adapters: what identifies one, which one each of vLLM's numbers stands for, and when vLLM loads one.

An adapter is the content of its files: names and paths differ from engine to engine. Of a path only the first content
has a name. vLLM's prefix cache knows an adapter by its name and path, and so takes blocks of the first content for the
second one's, also when the adapter was unloaded in between.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from vllm.lora.request import LoRARequest

from kvferry.errors import RequestError

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

CONFIG = "adapter_config.json"
# In vLLM's order: it loads the first that is there.
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# A gigabyte takes about a second. Requests that come meanwhile wait for it once per adapter, and not longer than this.
WAIT_S = 5.0
# Who trains adapters loads a new path for each version.
MAX_KNOWN = 16_384

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class _Reading:
    """The files of an adapter when they had this `stamp`, and their digest, which may still be under way. Whoever needs
    it waits until `deadline`, which is set when somebody does."""

    stamp: Stamp
    digest: Future[str]
    deadline: float = 0.0


class AdapterFiles:
    """Reads the files of each path once, in a thread of its own."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, "kvferry-adapters")
        self._readings: dict[str, _Reading] = {}

    def see(self, adapter: LoRARequest) -> bool:
        """Notice from now on whatever is written to an adapter's files: vLLM is going to load it, or is asked for it.

        Return whether its path is new. Files that are not there yet may be seen another time.
        """
        path = adapter.lora_path
        if path in self._readings:
            return False
        try:
            stamp = _stamp(_files(path))
        except OSError:
            return False
        if len(self._readings) >= MAX_KNOWN:
            del self._readings[next(iter(self._readings))]
        self._readings[path] = _Reading(stamp, self._reader.submit(_digest, path))
        return True

    def forget(self, adapter: LoRARequest) -> None:
        """Forget the files of an adapter that vLLM could not load."""
        self._readings.pop(adapter.lora_path, None)

    def is_ready(self, adapter: LoRARequest) -> bool:
        """Whether nobody has to wait for its files: all is known of them, none are there, or reading takes too long."""
        self.see(adapter)
        reading = self._readings.get(adapter.lora_path)
        if reading is None or reading.digest.done():
            return True
        reading.deadline = reading.deadline or time.monotonic() + WAIT_S
        return time.monotonic() >= reading.deadline

    def digest(self, adapter: LoRARequest) -> str:
        """Return a text that is equal for equal files. Raises RequestError where it is not known (yet), and where files
        have been replaced since they were seen: which of the two vLLM has loaded, and keeps blocks of, is not known."""
        self.see(adapter)
        try:
            stamp = _stamp(_files(adapter.lora_path))
            reading = self._readings[adapter.lora_path]
            digest = reading.digest.result(0)
        except TimeoutError as error:
            raise RequestError("the adapter's files are still being read") from error
        except (OSError, KeyError) as error:
            raise RequestError("the adapter's files cannot be read", found=str(error)) from error
        if stamp != reading.stamp:
            hint = "load a changed adapter under a new path"
            raise RequestError("the adapter's files have changed since they were first seen", hint=hint)
        return f"{digest}:{adapter.is_3d_lora_weight}"

    def close(self) -> None:
        """Stop reading: files that have not been begun are not read any more."""
        self._reader.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _Number:
    """One of vLLM's numbers, which stands for the adapter at `path`. `current` and `stale` are the ids of the requests
    that go on, with the adapter and with one that had the number before."""

    path: str
    current: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)


class AdapterNumbers:
    """Knows which adapter each of vLLM's numbers stands for. It hears of what is loaded, and of requests.

    vLLM gives an adapter that is loaded in place of another one the same number. Requests that came before go on with
    the new weights, whatever path they name, and some of their cache is of the old ones.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, _Number] = {}

    def load(self, adapter: LoRARequest) -> None:
        """Note that vLLM is told to load an adapter."""
        number = self._of(adapter)
        if number.path != adapter.lora_path:
            number.path = adapter.lora_path
            number.stale |= number.current
            number.current = set()

    def begin(self, request_id: str, adapter: LoRARequest) -> None:
        """Note that a request with this adapter has arrived."""
        number = self._of(adapter)
        (number.current if number.path == adapter.lora_path else number.stale).add(request_id)

    def end(self, request_id: str, adapter: LoRARequest) -> None:
        """Note that a request with this adapter has ended. Unknown ones are fine."""
        number = self._of(adapter)
        number.current.discard(request_id)
        number.stale.discard(request_id)

    def check(self, adapter: LoRARequest) -> None:
        """Raises RequestError where it is not known whose weights vLLM computes with. A request that came before
        another adapter was loaded in place may have vLLM load its own again, for all that share a step with it."""
        number = self._of(adapter)
        if number.stale or number.path != adapter.lora_path:
            what = "another adapter has been loaded in its place"
            raise RequestError(what, found=f"{len(number.stale)} requests of one before", hint="try again later")

    def _of(self, adapter: LoRARequest) -> _Number:
        known = self._numbers
        if adapter.lora_int_id not in known and len(known) >= MAX_KNOWN:
            # The oldest one that nobody uses, or else the oldest of all.
            del known[next((key for key, number in known.items() if not number.current), next(iter(known)))]
        return known.setdefault(adapter.lora_int_id, _Number(adapter.lora_path))


class LoadListener(Protocol):
    """An object that wants to know which adapters vLLM loads."""

    def loading(self, adapter: LoRARequest) -> AbstractContextManager[None]:
        """Return a context that is open while the adapter's files are read, if all goes well."""


AddLora = Callable[["EngineCore", LoRARequest], bool]

_listeners: WeakSet[LoadListener] = WeakSet()


def tell_of_loads(listener: LoadListener) -> None:
    """Tell a listener, for as long as it lives, which adapters vLLM loads, before it loads them: when its server starts
    or is told to, which may be long before the first request. No hook of connectors does. This works in the process of
    vLLM's engine core, while that is being made."""
    # Imported here, since only that process needs it, and has it.
    from vllm.v1.engine.core import EngineCore

    _listeners.add(listener)
    if not hasattr(EngineCore.add_lora, "__wrapped__"):
        EngineCore.add_lora = _told(EngineCore.add_lora)


def _told(add_lora: AddLora) -> AddLora:
    @functools.wraps(add_lora)
    def told(engine_core: EngineCore, lora_request: LoRARequest) -> bool:
        with ExitStack() as loading:
            for listener in list(_listeners):
                loading.enter_context(listener.loading(lora_request))
            return add_lora(engine_core, lora_request)

    return told


def _digest(path: str) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for file in _files(path):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest()


def _files(path: str) -> list[Path]:
    """The configuration and the weights that vLLM loads. Raises OSError for a folder without them."""
    folder = _folder(path)
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / CONFIG, folder / name]
    raise FileNotFoundError(f"{folder} holds none of {', '.join(WEIGHTS)}")


def _folder(path: str) -> Path:
    """Return the folder that vLLM resolves a path to. Nothing is downloaded: a repository has to be on this machine."""
    if os.path.isabs(path) or path.startswith("~") or os.path.exists(path):
        # As vLLM does: it leaves the home of somebody who is unknown as it is.
        return Path(os.path.expanduser(path))
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        raise FileNotFoundError(f"{path} is neither a folder nor a repository in the cache: {error}") from error


def _stamp(files: list[Path]) -> Stamp:
    # Nobody can set when an inode has changed. Whoever copies or unpacks into a file may set when it was modified.
    return tuple((status.st_ino, status.st_size, status.st_ctime_ns) for status in (file.stat() for file in files))
