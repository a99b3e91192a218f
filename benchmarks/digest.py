"""What a digest of one request costs one rank, beside memcpy and beside hashing the same number of bytes in one piece.

    python benchmarks/digest.py > benchmarks/results/digest.json

`sampled` and `full` are all that a rank does per request: say what is digested, find where it lies, gather it, hash it.
`memcpy` and `hash` work on one contiguous buffer of as many bytes: the limit. Prints JSON; times are medians of
interleaved repeats, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import xxhash
from measuring import Work, interleaved, machine, say

from kvferry.agent.memory.digests import Digester, HostBytes
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.model import CacheModel, attention, latent
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.digests.subject import DigestPolicy, PartTemplate, Subject, subject_of, templates_of
from kvferry.plan.routing.route import route
from kvferry.transport.base import Memory

NUM_TOKENS, BLOCK_TOKENS = 8192, 16
NUM_BLOCKS = NUM_TOKENS // BLOCK_TOKENS
DENSE = attention(32, 8, 128, "bfloat16", 2)
LATENT = latent(61, 576, "bfloat16", 2)
STEP_BYTES = 1 << 20
ALL_AT_ONCE = 1 << 62


@dataclass(frozen=True, slots=True)
class Case:
    """A source rank in `format`; its reader has `readers` ranks, and its box is what one of them reads."""

    name: str
    model: CacheModel
    format: str
    readers: int


CASES = (
    Case("token-major", DENSE, "token-major", 1),
    Case("head-major", DENSE, "head-major", 1),
    Case("token-major, half of the heads", DENSE, "token-major", 2),
    Case("keys column by column", DENSE, "LKBHDN", 1),
    Case("latent", LATENT, "token-major", 1),
)


class Rank:
    """One rank whose cache is a real buffer, its blocks in random order."""

    def __init__(self, case: Case, memory: np.ndarray) -> None:
        shape = EngineShape(1, 1, BLOCK_TOKENS, NUM_BLOCKS, case.format)
        (self.layout,) = describe(case.model, shape, memory.ctypes.data)
        self.templates = _portions(case, self.layout)
        self.extractor = Extractor(self.layout, "source")
        self.digester = Digester(HostBytes([Memory(memory.ctypes.data, memory.size, -1)], self.layout.regions))
        self._seeds = count()
        self.tables = [np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()]

    def subject(self, policy: DigestPolicy) -> Subject:
        """Other tokens every time: those of the last time are still in the caches."""
        return subject_of(self.templates, [TokenRange(0, NUM_TOKENS)], policy, next(self._seeds))

    def find(self, policy: DigestPolicy) -> None:
        self.extractor.extracts(self.subject(policy), self.tables, NUM_TOKENS)

    def digest(self, policy: DigestPolicy) -> None:
        extracts = self.extractor.extracts(self.subject(policy), self.tables, NUM_TOKENS)
        self.digester.start("benchmark", extracts)
        self.digester.run(ALL_AT_ONCE)

    def num_bytes(self, policy: DigestPolicy) -> int:
        extracts = self.extractor.extracts(self.subject(policy), self.tables, NUM_TOKENS)
        return sum(extract.num_bytes for extract in extracts)


def _portions(case: Case, layout: Layout) -> Sequence[PartTemplate]:
    reader = EngineShape(case.readers, 1, BLOCK_TOKENS, NUM_BLOCKS, case.format)
    targets = describe(case.model, reader, 1 << 46)
    return templates_of(route([layout], targets).between(0, 0), targets[0])


def copied(source: np.ndarray, target: np.ndarray) -> None:
    target[:] = source


def hashed(source: np.ndarray) -> None:
    whole = xxhash.xxh3_64()
    for first in range(0, source.size, STEP_BYTES):
        whole.update(source[first : first + STEP_BYTES])


def measured(rank: Rank, memory: np.ndarray, copy: np.ndarray, policy: DigestPolicy, repeats: int) -> dict[str, Any]:
    num_bytes = rank.num_bytes(policy)
    work: dict[str, Work] = {
        "digest": partial(rank.digest, policy),
        "find": partial(rank.find, policy),
        "memcpy": partial(copied, memory[:num_bytes], copy[:num_bytes]),
        "hash": partial(hashed, memory[:num_bytes]),
    }
    ms = interleaved(work, repeats)
    return {
        "bytes": num_bytes,
        "ms": {name: round(value, 4) for name, value in ms.items()},
        "gigabytes_per_s": {name: round(num_bytes / value / 1e6, 2) for name, value in ms.items() if name != "find"},
        "memcpy / digest": round(ms["memcpy"] / ms["digest"], 2),
        "hash / digest": round(ms["hash"] / ms["digest"], 2),
    }


def run_case(case: Case, memory: np.ndarray, copy: np.ndarray, repeats: int) -> dict[str, Any]:
    say(case.name)
    rank = Rank(case, memory)
    off = interleaved({"off": lambda: rank.subject(DigestPolicy.OFF)}, repeats)
    return {
        "case": case.name,
        "off_ms": round(off["off"], 4),
        "sampled": measured(rank, memory, copy, DigestPolicy.SAMPLED, repeats),
        "full": measured(rank, memory, copy, DigestPolicy.FULL, max(3, repeats // 20)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100, help="of a sample; a full digest is repeated less")
    repeats = parser.parse_args().repeats
    size_bytes = max(case.model.bytes_per_token for case in CASES) * NUM_TOKENS
    memory = np.arange(size_bytes // 8, dtype=np.uint64).view(np.uint8)
    copy = np.ones_like(memory)
    cases = [run_case(case, memory, copy, repeats) for case in CASES]
    command = f"python benchmarks/digest.py --repeats {repeats}"
    about = {"tokens": NUM_TOKENS, "block_tokens": BLOCK_TOKENS, "dense": "32 layers, 8 heads of 128, bfloat16"}
    about |= {"latent": "61 layers of 576, bfloat16", "hash": f"xxh3_64, xxhash {xxhash.VERSION}"}
    print(json.dumps({"command": command, "machine": machine(), **about, "cases": cases}, indent=2))


if __name__ == "__main__":
    main()
