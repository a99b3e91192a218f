"""`kvferry` whose caches are worth nothing: `python spoiling_serve.py FILE serve …`. All bytes land at the target.

What it offers is noise. FILE says what becomes of it when it has landed: `revoked`, its lease ends before the target is
told that it was valid; `digest`, its digest is another one; `valid`, it is called valid: what a target makes of it then
is wrong, which shows that the others would be noticed.
"""

import mmap
import os
import sys
from pathlib import Path

import numpy as np

from kvferry.cli.main import main
from kvferry.embedded.transfer.agent_transfer import AgentTransfer
from kvferry.session.refusals import refuse
from kvferry.session.source.completed_reads import CompletedReads

way = Path(sys.argv.pop(1))
begin, offer, landed, written, complete = (
    AgentTransfer.__init__,
    AgentTransfer.offer,
    CompletedReads.landed,
    CompletedReads.written,
    CompletedReads._complete,
)


def begin_with_memory(self, config, cache, release):
    begin(self, config, cache, release)
    (memory,) = cache.memories
    with mmap.mmap(os.dup(memory.shared_fd), memory.size_bytes) as mapping:
        self.noise = np.random.default_rng(1).standard_normal(len(mapping) // 4, np.float32).tobytes()
    self.fd = os.dup(memory.shared_fd)


async def offer_noise(self, *arguments):
    with mmap.mmap(self.fd, len(self.noise)) as mapping:
        mapping[:] = self.noise
    return await offer(self, *arguments)


def revoke(self, lease, asked, now):
    ended = self._leases.end(lease, "withdraw", "withdrawn", now)
    return [*ended, *(each for peer, claim_id in asked for each in refuse(peer, lease.ended_error, claim_id))]


def land(self, peer, message, now):
    lease = self._leases.get(message.lease_id)
    if way.read_text() == "revoked" and lease is not None and lease.live:
        return revoke(self, lease, [(peer, message.claim_id)], now)
    return landed(self, peer, message, now)


def write_out(self, lease, now):
    """What the source writes itself, as it does where a self-test on busy cores says so, nobody asks about."""
    asked = [(write.peer, key.claim_id) for key, write in lease.writes.items() if write.is_written]
    if way.read_text() == "revoked" and lease.live and asked:
        return revoke(self, lease, asked, now)
    return written(self, lease, now)


def complete_wrongly(self, peer, key, lease, digests, now):
    if way.read_text() == "digest":
        digests = tuple(bytes(byte ^ 1 for byte in digest) for digest in digests)
    return complete(self, peer, key, lease, digests, now)


AgentTransfer.__init__, AgentTransfer.offer = begin_with_memory, offer_noise
CompletedReads.landed, CompletedReads.written, CompletedReads._complete = land, write_out, complete_wrongly
main()
