"""The first token travels with the word that a cache is valid: from the lease, or from its last step."""

import pytest
from playbook import play
from session_cases import OFFER, PEER, REFERENCE, TARGET_LAYOUTS, WELCOME, answer, said, source_session
from session_cases import TARGET as US

from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.session.commands import Connect, Fetched, LeaseEnded, Post, Reply, Send
from kvferry.session.events import FetchRequest, LeaseProgress, LeaseRequest, PeerConnected, TicketEnded
from kvferry.session.source.session import SourceSession
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

FIRST = m.FirstToken(17, -0.5, ((17, -0.5), (3, -1.5)))
CLAIM, LANDED = m.Claim(US, "c1", REFERENCE, 7, (0,)), m.Landed(US, "c1", "l1")
GRANT = Reply("x", m.Grant("c1", ((3, 5),)))
VALID = [Reply("x", m.Valid("c1", (), FIRST)), LeaseEnded("r1", "done")]


@pytest.fixture
def source() -> SourceSession:
    return source_session(Timing())


def test_a_finished_prompt_has_it_from_the_beginning(source):
    play(source, [(0, LeaseRequest("r1", "l1", ((3, 5),), 7, first_token=FIRST), [])])
    play(source, [(1, said(CLAIM), [GRANT]), (2, said(LANDED), VALID), (3, said(LANDED), VALID[:1])])


def test_a_growing_prompt_has_it_with_its_last_tokens(source):
    play(
        source,
        [
            (0, LeaseRequest("r1", "l1", ((),), 7, is_growing=True), []),
            (1, LeaseProgress("r1", ((3,),), 4), []),
            (2, said(CLAIM), [Reply("x", m.Queued("c1"))]),
            (3, LeaseProgress("r1", ((3, 5),), 7, first_token=FIRST), [GRANT]),
            (4, said(LANDED), VALID),
        ],
    )


def test_a_reader_of_fewer_tokens_is_told_none(source):
    """Another one may follow the tokens that it has asked for."""
    play(source, [(0, LeaseRequest("r1", "l1", ((3, 5),), 7, first_token=FIRST), [])])
    play(source, [(1, said(m.Claim(US, "c1", REFERENCE, 6, (0,))), [GRANT])])
    play(source, [(2, said(LANDED), [Reply("x", m.Valid("c1")), LeaseEnded("r1", "done")])])


@pytest.mark.parametrize("first", [FIRST, None])
def test_a_fetch_reports_it(first):
    target = TargetSession(TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, digest=DigestPolicy.OFF), Timing())
    wanted = FetchRequest("q1", REFERENCE, (PEER.address,), ((0,),), (TokenRange(0, 6),))
    *_, post = play(
        target,
        [
            (0.0, wanted, [Send]),
            (0.1, answer(WELCOME), [Send]),
            (0.2, answer(OFFER), [Connect]),
            (0.3, PeerConnected(PEER, "shm", "shm"), [Send]),
            (0.4, answer(m.Grant("q1", ((3, 5),))), [Post]),
        ],
    )
    ended = TicketEnded(post.key, "")
    *_, fetched = play(target, [(0.5, ended, [Send]), (0.6, answer(m.Valid("q1", (), first)), [Fetched])])
    assert fetched.report.first_token == first
