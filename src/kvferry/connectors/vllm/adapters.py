"""What identifies a LoRA adapter: the content of its files. Names and paths differ from engine to engine."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from vllm.lora.request import LoRARequest

from kvferry.errors import RequestError

__all__ = ["Adapters"]

CONFIG = "adapter_config.json"
# In vLLM's order: it loads the first that is there.
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# A gigabyte takes about a second. Requests wait for it once per adapter, and not longer than this.
WAIT_S = 5.0
# Adapters that are loaded and unloaded all the time have a new number each time.
MAX_KNOWN = 1024

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Content:
    """A digest of an adapter's files, and what they looked like when they were read."""

    digest: str
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class _Reading:
    """Content that is being read, or has been; who needs it waits until `deadline`."""

    content: Future[_Content]
    deadline: float


class Adapters:
    """Reads the files of each adapter once, in a thread of its own."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, "kvferry-adapters")
        self._readings: dict[tuple[int, str], _Reading] = {}

    def is_ready(self, adapter: LoRARequest) -> bool:
        """Whether `digest` would not wait. The files are being read from now on, if they have not been before."""
        reading = self._reading(adapter)
        return reading.content.done() or time.monotonic() >= reading.deadline

    def _reading(self, adapter: LoRARequest) -> _Reading:
        key = adapter.lora_int_id, adapter.lora_path
        if key not in self._readings:
            if len(self._readings) >= MAX_KNOWN:
                del self._readings[next(iter(self._readings))]
            content = self._reader.submit(_read, adapter.lora_path)
            self._readings[key] = _Reading(content, time.monotonic() + WAIT_S)
        return self._readings[key]

    def digest(self, adapter: LoRARequest) -> str:
        """Equal for adapters with equal files. Raises RequestError where that is not known (yet), and where files have
        been replaced since they were read: which of the two vLLM has loaded is not known either."""
        reading = self._reading(adapter)
        try:
            content = reading.content.result(max(0.0, reading.deadline - time.monotonic()))
            stamp = _stamp(_files(adapter.lora_path))
        except FutureTimeoutError as error:
            raise RequestError("the adapter's files are still being read", found=f"after {WAIT_S:.0f} s") from error
        except OSError as error:
            raise RequestError("the adapter's files cannot be read", found=str(error)) from error
        if stamp != content.stamp:
            hint = "load a changed adapter under a new path"
            raise RequestError("the adapter's files have changed since they were read", hint=hint)
        return f"{content.digest}:{adapter.is_3d_lora_weight}"

    def close(self) -> None:
        """Nothing that has not been begun is read any more."""
        self._reader.shutdown(wait=False, cancel_futures=True)


def _read(path: str) -> _Content:
    files = _files(path)
    # Whatever is written from now on shows in another stamp.
    stamp, digest = _stamp(files), hashlib.blake2b(digest_size=32)
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return _Content(digest.hexdigest(), stamp)


def _files(path: str) -> list[Path]:
    """The configuration and the weights that vLLM loads. Raises OSError for a folder without them."""
    folder = _folder(path)
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / CONFIG, folder / name]
    raise FileNotFoundError(f"{folder} holds none of {', '.join(WEIGHTS)}")


def _folder(path: str) -> Path:
    """As vLLM resolves it, but for a repository that is not on this machine: nothing is downloaded here."""
    if os.path.isabs(path) or path.startswith("~") or os.path.exists(path):
        return Path(path).expanduser()
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        raise FileNotFoundError(f"{path} is neither a folder nor a repository in the cache: {error}") from error


def _stamp(files: list[Path]) -> Stamp:
    # When an inode has changed nobody can set: whoever copies or unpacks into a file may set when it was modified.
    return tuple((status.st_ino, status.st_size, status.st_ctime_ns) for status in (file.stat() for file in files))
