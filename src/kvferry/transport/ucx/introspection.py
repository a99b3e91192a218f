"""UCX's own information about the endpoints of one NIXL agent: which transports carry the bytes of each.

The UCX library that NIXL has loaded has a virtual file system of its objects, with an entry per endpoint, and can
describe an endpoint in text. Both are functions of its public API, called in this process: no setting, log file or
other program is needed. Nothing is reported by a UCX that lacks them.

Only the thread that drives the agent may use this: its endpoints come and go in its calls. Other agents of the process
have threads of their own, so nothing of them may be listed. And UCX holds a lock of the whole process while it lists:
what it calls then must not wait for Python's, whose owner may be waiting for UCX's.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvferry.transport.machine.hardware import ROOT
from kvferry.transport.ucx.builds import loaded_files

LANE: Final = re.compile(r"lane\[\d+\]:\s+\d+:([\w-]+/[\w.:-]+?)\.\d+\s.*?->\s*\S+(?:\s+seg\s+\d+)?(.*)$")
"""Such as `lane[1]:  5:cma/memory.0 md[4] -> md[4]/cma/sysdev[255] seg 42 rma_bw#0`: transport, device, uses."""
OK: Final = 0
MAX_NAME: Final = 31
"""NIXL calls the context and the worker of an agent like the agent; UCX keeps so many characters."""
BEFORE_ADDRESS: Final = "0x"


def carriers_in(text: str) -> tuple[str, ...]:
    """The transports and devices that carry bytes, by an endpoint's description; empty when it has no lanes yet.

    Without a lane for remote memory access, UCX sends the bytes in active messages.
    """
    lanes = [match for line in text.splitlines() if (match := LANE.search(line))]
    for use in ("rma", " am"):
        if found := [match[1] for match in lanes if use in match[2]]:
            return tuple(dict.fromkeys(found))
    return ()


@dataclass(frozen=True, slots=True)
class _Libraries:
    """The libraries of the loaded UCX, and the C library, which gives memory for text."""

    services: Any
    protocols: Any
    system: Any

    def text_of(self, write: Callable[[int], int | None]) -> str:
        """What a function writes into a stream of the C library; empty where it fails."""
        text, size = ctypes.c_void_p(), ctypes.c_size_t()
        stream = self.system.open_memstream(ctypes.byref(text), ctypes.byref(size))
        if not stream:
            return ""
        is_written = write(stream) in (None, OK)
        self.system.fclose(stream)
        found = ctypes.string_at(text, size.value).decode(errors="replace") if is_written else ""
        self.system.free(text)
        return found


class UcxIntrospection:
    """Queries the loaded UCX about the NIXL agent of this name. Every answer is empty where it cannot be queried."""

    def __init__(self, agent: str = "", maps: Path = ROOT / "proc/self/maps") -> None:
        self._name = agent[:MAX_NAME]
        self._libraries = tuple(_libraries(maps))

    @property
    def version(self) -> str:
        """The version of the loaded UCX, such as 1.23.0."""
        for libraries in self._libraries:
            libraries.protocols.ucp_get_version_string.restype = ctypes.c_char_p
            return str(libraries.protocols.ucp_get_version_string().decode())
        return ""

    def endpoints(self) -> frozenset[int]:
        """The addresses of the agent's endpoints that exist now."""
        context = f"/ucp/context/{self._name}"
        worker = f"{context}/worker/{self._name}"
        # UCX fills the folder of an object when it is listed.
        for folder in (context, worker):
            self._names(folder)
        return frozenset(int(name, 16) for name in self._names(f"{worker}/ep").split(BEFORE_ADDRESS) if name)

    def carriers(self, endpoint: int) -> tuple[str, ...]:
        """What carries the bytes of an endpoint, such as `cma/memory`; empty for one that does not exist any more."""
        if endpoint not in self.endpoints():
            return ()
        return carriers_in(self._describe(endpoint))

    def _names(self, folder: str) -> str:
        """The names in a folder, one behind the other; none where there is no such folder."""
        found = ""
        for libraries in self._libraries:
            # The C library itself takes each name: nothing of Python runs while UCX lists.
            each = ctypes.cast(libraries.system.fputs, ctypes.c_void_p)
            found = libraries.text_of(partial(libraries.services.ucs_vfs_path_list_dir, folder.encode(), each))
        return found

    def _describe(self, endpoint: int) -> str:
        found = ""
        for libraries in self._libraries:
            found = libraries.text_of(partial(libraries.protocols.ucp_ep_print_info, endpoint))
        return found


def _libraries(maps: Path) -> Iterator[_Libraries]:
    """Yield the loaded libraries: nothing where none is loaded, several are, or functions are missing."""
    services, protocols = loaded_files("libucs", maps), loaded_files("libucp", maps)
    if len(services) != 1 or len(protocols) != 1:
        return
    found = _Libraries(ctypes.CDLL(str(services[0])), ctypes.CDLL(str(protocols[0])), ctypes.CDLL(None))
    try:
        found.services.ucs_vfs_path_list_dir.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
        found.protocols.ucp_ep_print_info.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        found.protocols.ucp_ep_print_info.restype = None
        found.system.open_memstream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        found.system.open_memstream.restype = ctypes.c_void_p
        found.system.fclose.argtypes = [ctypes.c_void_p]
        found.system.free.argtypes = [ctypes.c_void_p]
    except AttributeError:
        return
    yield found
