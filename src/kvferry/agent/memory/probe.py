"""This rank's probe: the memory with which peers test and measure transports."""

from __future__ import annotations

import secrets

import numpy as np

from kvferry.agent.memory.shared_regions import LentMemory
from kvferry.transport.process_identity import host_here
from kvferry.transport.selection.probe import NUM_MARKS, PROBE_BYTES, allocation_bytes, fill_probe
from kvferry.wire.messages import Probe


def allocate_probe() -> LentMemory:
    """Memory for a probe. Raises TransportError when there is not enough."""
    return LentMemory(allocation_bytes(), "kvferry-probe")


def describe_probe(memory: LentMemory) -> Probe:
    """Fill it, and say what peers need to know of it."""
    seed = secrets.randbits(32)
    fill_probe(np.frombuffer(memory.buffer, np.uint8)[:PROBE_BYTES], seed)
    return Probe(memory.memory.address, PROBE_BYTES, seed, NUM_MARKS, host_here())
