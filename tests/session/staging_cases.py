"""The two ranks of the tests of staging memory, how far they are when a test begins, and what they say."""

from dataclasses import replace

from session_cases import PEER, PROBE, REFERENCE, SOURCE, TRANSPORTS, answer, said
from session_cases import TARGET as US

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Acquire, Connect, Post, Reply, Send, Stage
from kvferry.session.events import Acquired, FetchRequest, LeaseProgress, LeaseRequest, PeerConnected, Staged
from kvferry.session.keys import ClaimKey, ReadKey, SlotKey
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceSession
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(heartbeat_s=1e6, resend_s=0.5, handshake_s=5.0, transfer_s=20.0, fence_s=4.0)
MODEL = attention(1, 2, 4, "float32", 4)
SOURCE_LAYOUT = describe(MODEL, EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)[0]
TARGET_LAYOUTS = describe(MODEL, EngineShape(1, 1, 4, 8, "block-head-major"), 1 << 30)
NUM_TOKENS = 16
STRETCH_BYTES = 4 * MODEL.bytes_per_token
SOURCE_TABLES, TABLES, RANGES = ((6, 1, 4, 3),), ((0, 5, 2, 7),), (TokenRange(0, NUM_TOKENS),)
WANTED = FetchRequest("q1", REFERENCE, (PEER.address,), TABLES, RANGES)
TARGET_OFFER = m.TargetOffer(US, TARGET_LAYOUTS, TRANSPORTS, PROBE)
CLAIM = m.Claim(US, "q1", REFERENCE, NUM_TOKENS, (0,), Direction.WRITE, TABLES, RANGES, Strategy.PACK, STRETCH_BYTES)
ARENA = 1 << 40


def key(stretch, number=0):
    return SlotKey(ReadKey("q1", PEER), stretch, number)


def at(stretch):
    return ARENA + stretch * STRETCH_BYTES


def acquired(stretch):
    return Acquired(key(stretch), at(stretch))


def acquire(stretch):
    return Acquire(key(stretch), STRETCH_BYTES)


def pack(stretch):
    return Send(PEER, m.Pack(US, "q1", "l1", stretch, 0, at(stretch)))


def packed(stretch, num_missing=0):
    return answer(m.Packed("q1", stretch, 0, num_missing))


def target(*allowed, direction=Direction.READ):
    staging = StagingPolicy(allowed, STRETCH_BYTES)
    ours = TargetIdentity(
        US, "0.1.0", TARGET_LAYOUTS, direction=direction, transports=TRANSPORTS, probe=PROBE, staging=staging
    )
    return TargetSession(ours, TIMING)


def met(wanted=WANTED):
    """The handshake of a target that reads, up to the offer."""
    offer = m.Offer(SOURCE, SOURCE_LAYOUT, (), m.Probe(0, 0, 0))
    return [
        (0.0, wanted, [Send]),
        (0.1, answer(m.Welcome(m.WIRE_VERSION, "0.1.0", SOURCE, 1, fingerprint(SOURCE_LAYOUT))), [Send]),
        (0.2, answer(offer), [Connect]),
    ]


CONNECTED = PeerConnected(PEER, "shm", "shm")
WINDOW = [acquire(0), acquire(1), acquire(2)]
READ_CLAIM = Send(PEER, m.Claim(US, "q1", REFERENCE, NUM_TOKENS, (0,)))
OFFERING = [*met(), (0.3, CONNECTED, [Send(PEER, TARGET_OFFER, access=SOURCE)])]
REACHED = answer(m.Reached("shm", "shm"))
PACKING = [*OFFERING, (0.4, REACHED, [Send(PEER, CLAIM)]), (0.5, answer(m.Grant("q1", ())), WINDOW)]


def source():
    return SourceSession(SourceIdentity(SOURCE, "0.1.0", (SOURCE_LAYOUT,), (), m.Probe(0, 0, 0)), TIMING)


def asked(stretch, number=0, address=ARENA):
    return m.Pack(US, "q1", "l1", stretch, number, address)


def own(stretch, number=0):
    return SlotKey(ClaimKey("l1", US, "q1"), stretch, number)


OWN = 1 << 35
LEASE = LeaseRequest("r1", "l1", SOURCE_TABLES, NUM_TOKENS)
CLAIMED = [
    (0, LEASE, []),
    (0, said(TARGET_OFFER), [Connect]),
    (0, PeerConnected(US, "shm", "shm"), [Reply]),
    (0, said(CLAIM), [Reply("x", m.Grant("q1", ()))]),
]
OWN_ACQUIRE = Acquire(own(0), STRETCH_BYTES, ARENA)
ABORT_SAID = said(m.Abort(US, "q1", "l1"))
LANDED_SAID, VALID = said(m.Landed(US, "q1", "l1")), Reply("x", m.Valid("q1"))
CLEAN, UNCLEAN = m.Aborted("q1", "epoch-1"), m.Aborted("q1", "epoch-1", is_clean=False)


def reasons(commands):
    return [str(each.message.reason) for each in commands if isinstance(each, Reply)]


GROWING = replace(LEASE, block_tables=((),), is_growing=True)
DIRECT_CLAIM = m.Claim(US, "q1", REFERENCE, NUM_TOKENS, (0,), Direction.WRITE, TABLES, RANGES)


def written(stretch):
    """A slot is asked for, gathered and written."""
    steps = [(3, said(asked(stretch)), [Acquire]), (3, Acquired(own(stretch), OWN), [Stage])]
    return [*steps, (4, Staged(own(stretch), ""), [Post])]


def grown(num_ready):
    return LeaseProgress("r1", (SOURCE_TABLES[0][: -(-num_ready // 4)],), num_ready)
