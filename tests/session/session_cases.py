"""The two ranks of these tests, one of a source and one of a target, and what they say to each other."""

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import fingerprint
from kvferry.plan.description.model import attention
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange
from kvferry.plan.digests.subject import DigestPolicy, Part, Subject
from kvferry.session.commands import FetchFailed, Reply, Send
from kvferry.session.events import AnswerArrived, FrameArrived
from kvferry.session.keys import PeerKey
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceSession
from kvferry.wire import messages as m

MODEL = attention(2, 2, 4, "float32", 4)
SOURCE_LAYOUT = describe(MODEL, EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)[0]
TARGET_LAYOUTS = describe(MODEL, EngineShape(1, 1, 8, 4, "head-major"), 1 << 30)
SOURCE, TARGET = m.Party("p0", "epoch-1", 0), m.Party("d0", "epoch-9", 0)
# Another rank of the same engine.
OTHER_TARGET = m.Party("d0", "epoch-9", 1)
PEER = PeerKey("tcp://127.0.0.1:1", "p0", "epoch-1")
REFERENCE = m.Reference("p0", "epoch-1", "r1", "l1")
TRANSPORTS, PROBE = (m.TransportOffer("shm", b"here", ""),), m.Probe(4096, 64, 7)
WELCOME = m.Welcome(m.WIRE_VERSION, "0.1.0", SOURCE, 1, fingerprint(SOURCE_LAYOUT))
OFFER = m.Offer(SOURCE, SOURCE_LAYOUT, (), m.Probe(0, 0, 0))
TARGET_OFFER = m.TargetOffer(TARGET, TARGET_LAYOUTS, TRANSPORTS, PROBE)
# What the target of the fetch q1 says.
HELLO, OURS = (
    Send(PEER, m.Hello(m.WIRE_VERSION, "0.1.0", TARGET, "p0", "epoch-1")),
    Send(PEER, TARGET_OFFER, access=SOURCE),
)
LANDED, ABORT = Send(PEER, m.Landed(TARGET, "q1", "l1")), Send(PEER, m.Abort(TARGET, "q1", "l1"))
RENEW = Send(PEER, m.Renew(TARGET, ("l1",)))
LONG_RENEW = Send(PEER, m.Renew(TARGET, ("l1",), bytes(m.MAX_PADDING_BYTES)))
# How a source answers long heartbeats.
ALIVE = m.Renewed((), b"long")
# What is digested of six tokens, and what comes of it.
STATES = ("model.layers.0.k", "model.layers.0.v", "model.layers.1.k", "model.layers.1.v")
PART = Part(STATES, (Span(0, 2), Span(0, 4)), ALL_TOKENS, TokenRange(0, 6))
SUBJECT = Subject(DigestPolicy.SAMPLED, 3, (PART,))
VALUES = tuple(bytes([number] * 8) for number in range(4))


def answer(message):
    """What the target hears of its source."""
    return AnswerArrived(PEER, message)


def said(message, peer="x"):
    """What the source hears of a target."""
    return FrameArrived(peer, message)


def source_session(timing):
    """One that nobody has spoken to."""
    return SourceSession(SourceIdentity(SOURCE, "0.1.0", (SOURCE_LAYOUT,), (), m.Probe(0, 0, 0)), timing)


def failure(commands):
    """Why a fetch has failed."""
    return next(command.error for command in commands if isinstance(command, FetchFailed))


def phases(fetched):
    """How long each part of a fetch took."""
    return {name: round(value, 6) for name, value in fetched.report.phases_s.items()}


def reason(commands):
    """Why a source has refused."""
    (refusal,) = (each.message for each in commands if isinstance(each, Reply) and isinstance(each.message, m.Refusal))
    return str(refusal.reason)
