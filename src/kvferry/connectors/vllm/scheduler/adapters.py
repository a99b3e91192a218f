"""What identifies a LoRA adapter: the content of its files. Names and paths differ from engine to engine.

Of a path only the first content has a name. vLLM's prefix cache knows an adapter by its name and path, and so takes
blocks of the first content for the second one's, also when the adapter was unloaded in between.
"""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from vllm.lora.request import LoRARequest

from kvferry.errors import RequestError

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
    """Files that were seen when they had this `stamp`, and their digest, which may still be read. Who needs it waits
    until `deadline`, which is set when somebody does."""

    stamp: Stamp
    digest: Future[str]
    deadline: float = 0.0


class Adapters:
    """Reads the files of each path once, in a thread of its own."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, "kvferry-adapters")
        self._readings: dict[str, _Reading] = {}

    def see(self, adapter: LoRARequest) -> bool:
        """vLLM is going to load it, or is asked for it: whatever is written to its files from now on is noticed.

        Whether its path is new. Files that are not there yet may be seen another time.
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
        """vLLM could not load what is there."""
        self._readings.pop(adapter.lora_path, None)

    def is_ready(self, adapter: LoRARequest) -> bool:
        """Whether all is known of its files, or they take too long to read."""
        self.see(adapter)
        reading = self._readings.get(adapter.lora_path)
        if reading is None or reading.digest.done():
            return True
        reading.deadline = reading.deadline or time.monotonic() + WAIT_S
        return time.monotonic() >= reading.deadline

    def digest(self, adapter: LoRARequest) -> str:
        """Equal for adapters with equal files. Raises RequestError where that is not known (yet), and where files have
        been replaced since they were seen: which of the two vLLM has loaded, and keeps blocks of, is not known."""
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
        """Nothing that has not been begun is read any more."""
        self._reader.shutdown(wait=False, cancel_futures=True)


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
