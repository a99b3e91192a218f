"""The messages of the control channel.

A conversation has two steps. `Hello` and `Welcome` compare versions and identities; only then does the source send its
`Offer` (layout and transports). A target that wants to be written to makes a `TargetOffer` of its own, which is
answered with `Reached`. After that, per request: `Claim` → `Grant`, bytes move, `Landed` → `Valid`. A source that
writes all bytes says `Written`, and then `Valid` without a `Landed`. One that writes a share of them says `Written`,
and the target still says `Landed` when it has read the rest. Every request can be answered with a `Refusal`; every
message may arrive twice.
"""

from __future__ import annotations

from enum import StrEnum
from math import isnan
from typing import Annotated

from msgspec import Meta, Struct

from kvferry.plan.description.layout import Layout
from kvferry.plan.description.prompt import UNNAMED, PromptName
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import NOTHING, Subject
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy

WIRE_VERSION = 10

Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 16)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
# Of the host's memory, and of any: Intel's GPUs have addresses with the highest of 64 bits. No longer number has a form
# on the wire.
HostAddress = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Address = Annotated[int, Meta(ge=0)]
MAX_SLOT_BYTES = 1 << 32
# More than a jumbo frame, 9,000 bytes.
MAX_PADDING_BYTES = 1 << 14
Padding = Annotated[bytes, Meta(max_length=MAX_PADDING_BYTES)]
SlotBytes = Annotated[int, Meta(ge=0, le=MAX_SLOT_BYTES)]
Value = Annotated[bytes, Meta(min_length=8, max_length=8)]
BlockId = Annotated[int, Meta(ge=0, lt=1 << 48)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
# A target's table may hold anything where nothing is looked at.
AnyBlockId = Annotated[int, Meta(ge=-(1 << 48), lt=1 << 48)]


class Reason(StrEnum):
    """Why something was refused or failed: stable labels, used on the wire and in counters."""

    MALFORMED = "malformed"
    WIRE_VERSION = "wire_version"
    WRONG_ENGINE = "wrong_engine"
    WRONG_EPOCH = "wrong_epoch"
    WRONG_PROMPT = "wrong_prompt"
    UNKNOWN_LEASE = "unknown_lease"
    EXPIRED = "expired"
    OUT_OF_RANGE = "out_of_range"
    NOT_CLAIMED = "not_claimed"
    ALREADY_CLAIMED = "already_claimed"
    INCOMPATIBLE = "incompatible"
    UNREACHABLE = "unreachable"
    PEER_LOST = "peer_lost"
    DEADLINE = "deadline"
    TRANSPORT = "transport"
    ABORTED = "aborted"
    DIGEST = "digest"
    # An engine's own decision: it computes such a prompt itself, and asks nobody for its cache.
    UNNAMED_PROMPT = "unnamed_prompt"


class Party(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of one incarnation of an engine; `epoch` is new at every start."""

    engine_id: Name
    epoch: Name
    rank: Rank


class Reference(Struct, frozen=True, forbid_unknown_fields=True):
    """What names a request's cache. It may come from anybody; the source's own record of the lease decides."""

    engine_id: Name
    epoch: Name
    request_id: Name
    lease_id: Name


class Hello(Struct, frozen=True, tag="hello"):
    """First message of a target. Unknown fields are tolerated, so that versions can be compared at all.

    Without an engine and an epoch that it expects, it asks who is there.
    """

    wire_version: int
    product_version: Name
    party: Party
    expects_engine_id: Name
    expects_epoch: Name


class Welcome(Struct, frozen=True, tag="welcome"):
    """The source's answer to `Hello`: who it is. `fingerprint` names its layout. `addresses` are the control addresses
    of all ranks of its engine, in their order; empty where its engine has not named them.

    A server with data parallelism is `data_parallel_size` engines, which share its requests: rank 0 of number d listens
    d ports above rank 0 of number 0.
    """

    wire_version: int
    product_version: Name
    party: Party
    num_ranks: Rank
    fingerprint: Name
    addresses: Annotated[tuple[Name, ...], Meta(max_length=1 << 12)] = ()
    data_parallel_size: Annotated[int, Meta(ge=1, le=1 << 12)] = 1


class OfferRequest(Struct, frozen=True, tag="offer_request", forbid_unknown_fields=True):
    """Second step of the target: send me your layout."""

    party: Party


class TransportOffer(Struct, frozen=True, forbid_unknown_fields=True):
    """One transport of the source. `unavailable` is the reason why it cannot be used, empty when it can."""

    name: Name
    descriptor: Annotated[bytes, Meta(max_length=1 << 20)]
    unavailable: Text


class Probe(Struct, frozen=True, forbid_unknown_fields=True):
    """Memory with a known pattern that a peer may read to test and measure a transport.

    It may also write the pattern where it is, and what it likes into the `num_marks` pages behind it. `host` is equal
    for peers on one host, and empty where the system does not say.
    """

    address: HostAddress
    size_bytes: Count
    seed: Count
    num_marks: Count = 0
    host: Name = ""


class Offer(Struct, frozen=True, tag="offer", forbid_unknown_fields=True):
    """The source's layout and the ways to reach its memory; with `is_staged` that is its staging memory only, which has
    room for some slots of `slot_bytes`."""

    party: Party
    layout: Layout
    transports: Annotated[tuple[TransportOffer, ...], Meta(max_length=16)]
    probe: Probe
    is_staged: bool = False
    slot_bytes: Annotated[int, Meta(ge=1, le=MAX_SLOT_BYTES)] = MAX_SLOT_BYTES


class TargetOffer(Struct, frozen=True, tag="target_offer", forbid_unknown_fields=True):
    """A target rank asks to be written to: the layouts of all ranks of its engine, as the route depends on them, and
    the ways to reach its own memory. `staging` is what a process of the same host needs to attach its staging memory,
    empty where nobody can. `handshake` counts the target's handshakes: access that an earlier one gave may be void."""

    party: Party
    layouts: Annotated[tuple[Layout, ...], Meta(min_length=1, max_length=1 << 12)]
    transports: Annotated[tuple[TransportOffer, ...], Meta(max_length=16)]
    probe: Probe
    staging: Annotated[bytes, Meta(max_length=1 << 12)] = b""
    handshake: Count = 0


class Reached(Struct, frozen=True, tag="reached", forbid_unknown_fields=True):
    """The source has connected to the target's memory, as the offer of this `handshake` says; `choice` says over what,
    and why. With `reaches_staging` it can also gather straight into the target's slots, as in memory that both share;
    otherwise each slot is written."""

    transport: Name
    choice: Text
    reaches_staging: bool = False
    handshake: Count = 0


class Claim(Struct, frozen=True, tag="claim", forbid_unknown_fields=True):
    """A target rank wants `num_tokens` tokens; `readers` are all ranks of its engine that want some of this rank.

    `claim_id` is new for every attempt: two attempts must never be taken for one that was repeated. With the direction
    `write` the source may write to the target's blocks from now on, one table and one range per cache group. With
    `read` it may do so only to what lies before the token `read_from`; the target reads the rest. With the strategy
    `pack` it writes to slots of the target's staging memory, at most `slot_bytes` each, when it is asked to (`Pack`).
    It writes over the connection that it has told of in this `handshake`, or not at all. `subject` is what both sides
    digest. `prompt` names the tokens that the target takes the cache to be of.
    """

    party: Party
    claim_id: Name
    reference: Reference
    num_tokens: Count
    readers: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=1 << 12)]
    direction: Direction = Direction.READ
    block_tables: tuple[tuple[AnyBlockId, ...], ...] = ()
    ranges: tuple[TokenRange, ...] = ()
    strategy: Strategy = Strategy.DIRECT
    slot_bytes: SlotBytes = 0
    read_from: Count = 0
    subject: Subject = NOTHING
    prompt: PromptName = UNNAMED
    handshake: Count = 0


class Grant(Struct, frozen=True, tag="grant", forbid_unknown_fields=True):
    """The source lets the target read: one block table per cache group, for as long as the lease is renewed.

    Where the source writes: it has begun. There are no tables then. `num_missing_tokens` of what was claimed are not
    computed yet.
    """

    claim_id: Name
    block_tables: tuple[tuple[BlockId, ...], ...]
    num_missing_tokens: Count = 0


class Pack(Struct, frozen=True, tag="pack", forbid_unknown_fields=True):
    """Gather one slot of a claim, and write it to an address in the target's staging memory."""

    party: Party
    claim_id: Name
    lease_id: Name
    stretch: Count
    number: Count
    address: Address


class Packed(Struct, frozen=True, tag="packed", forbid_unknown_fields=True):
    """A slot has been written, and the lease was live all the time. `num_missing_tokens` are not computed yet."""

    claim_id: Name
    stretch: Count
    number: Count
    num_missing_tokens: Count = 0


class Queued(Struct, frozen=True, tag="queued", forbid_unknown_fields=True):
    """Nothing is wrong with what was asked for: it waits for its turn, or for its tokens. A slot of which tokens are
    missing has to be asked for again."""

    claim_id: Name


class Written(Struct, frozen=True, tag="written", forbid_unknown_fields=True):
    """The source has written everything that was its own to write, and its lease was live all the time."""

    claim_id: Name
    num_bytes: Count
    num_rows: Count


class Landed(Struct, frozen=True, tag="landed", forbid_unknown_fields=True):
    """All bytes of a claim have arrived at the target; may it use them?"""

    party: Party
    claim_id: Name
    lease_id: Name


class FirstToken(Struct, frozen=True, forbid_unknown_fields=True):
    """The token that a prefill has sampled, for engines that compute no token of a prompt. Where they were asked for:
    the natural logarithm of its probability, and the most likely tokens with theirs. Raises ValueError for what is no
    number."""

    token_id: TokenId
    logprob: float | None = None
    top_logprobs: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=1 << 12)] = ()

    def __post_init__(self) -> None:
        if any(isnan(logprob) for logprob in (self.logprob or 0.0, *(logprob for _, logprob in self.top_logprobs))):
            raise ValueError("a logarithm of a probability is not a number")


class Valid(Struct, frozen=True, tag="valid", forbid_unknown_fields=True):
    """The lease was live during the whole transfer: the bytes are the request's own.

    `digests` has a value per state of the claim's subject, in its order. Where the source writes all, it knows itself
    when that is over, and says this when its last ticket has ended, unasked. `first_token` is there for a claim of all
    tokens, if the source has sampled what follows them.
    """

    claim_id: Name
    digests: Annotated[tuple[Value, ...], Meta(max_length=1 << 20)] = ()
    first_token: FirstToken | None = None


class Renew(Struct, frozen=True, tag="renew", forbid_unknown_fields=True):
    """Heartbeat of a target for the leases it is using; without any, it has met this source and wants nothing of it.

    While a read makes no progress, `padding` makes it as long as what is read, and its answer, too: what passes short
    messages on may lose long ones, as a tunnel does, and then nobody tells of it.
    """

    party: Party
    lease_ids: Annotated[tuple[Name, ...], Meta(max_length=1 << 16)]
    padding: Padding = b""


class Renewed(Struct, frozen=True, tag="renewed", forbid_unknown_fields=True):
    """The source is alive; `gone` are the leases that are not live any more, `padding` is that of the heartbeat."""

    gone: tuple[Name, ...]
    padding: Padding = b""


class Abort(Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """The target does not want the cache any more."""

    party: Party
    claim_id: Name
    lease_id: Name


class Aborted(Struct, frozen=True, tag="aborted", forbid_unknown_fields=True):
    """The source has noted the end of a claim, and no ticket of it is open.

    `epoch` is that of who answers, which may be the next incarnation. `is_clean` is false when a write of it has ended
    badly: what it had sent by then may still be under way.
    """

    claim_id: Name
    epoch: Name
    is_clean: bool = True


class Refusal(Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """No, and why. `claim_id` is empty when it is not about a claim."""

    reason: Reason
    what: Text
    found: Text
    expected: Text
    claim_id: Name


_OfTarget = Hello | OfferRequest | TargetOffer | Claim | Pack | Landed | Renew | Abort
_OfSource = Welcome | Offer | Reached | Grant | Packed | Queued | Written | Valid | Renewed | Aborted | Refusal
Message = _OfTarget | _OfSource
