"""What a source rank tells targets about itself before they claim anything."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import TransferError
from kvferry.plan.description.layout import Layout, fingerprint
from kvferry.wire import messages as m
from kvferry.wire.messages import MAX_SLOT_BYTES, WIRE_VERSION, Party, Probe, Reason, TransportOffer

# Offers are asked for by whoever can connect: only so many are remembered.
MAX_OFFERED = 512


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """Who this rank is and what it tells peers about itself. `layouts` are those of all ranks of its engine.

    With `is_staged` no transport reaches its blocks, and whoever wants something of it has it packed. Its staging
    memory has room for some slots of `slot_bytes`.
    """

    party: Party
    product_version: str
    layouts: tuple[Layout, ...]
    transports: tuple[TransportOffer, ...]
    probe: Probe
    is_staged: bool = False
    slot_bytes: int = MAX_SLOT_BYTES

    @property
    def layout(self) -> Layout:
        """This rank's own."""
        return self.layouts[self.party.rank]


class SourceHandshake:
    """Answers `Hello` and `OfferRequest`. A target that has the offer may be testing our memory for `handshake_s`.

    `addresses` are those of all ranks of our engine, once they are known, `data_parallel_size` counts our server's
    engines.
    """

    def __init__(self, identity: SourceIdentity, handshake_s: float) -> None:
        self._identity = identity
        self._handshake_s = handshake_s
        self._offered: dict[Party, float] = {}
        self.addresses: tuple[str, ...] = ()
        self.data_parallel_size = 1

    def hello(self, hello: m.Hello) -> m.Welcome:
        """Who we are. Raises TransferError if the target means somebody else."""
        identity, ours = self._identity, self._identity.party
        engine_id, epoch = hello.expects_engine_id or ours.engine_id, hello.expects_epoch or ours.epoch
        checks = (
            (Reason.WIRE_VERSION, "wire versions differ", str(hello.wire_version), str(WIRE_VERSION)),
            (Reason.WRONG_ENGINE, "another engine listens here", engine_id, ours.engine_id),
            (Reason.WRONG_EPOCH, "the engine has restarted", epoch, ours.epoch),
        )
        for reason, what, found, expected in checks:
            if found != expected:
                raise TransferError(reason, what, found=found, expected=expected)
        name = fingerprint(identity.layout)
        who = (WIRE_VERSION, identity.product_version, ours, len(identity.layouts), name)
        return m.Welcome(*who, self.addresses, self.data_parallel_size)

    def offer(self, request: m.OfferRequest, now: float) -> m.Offer:
        """Where our memory is, and how it is reached."""
        identity = self._identity
        self._offered = {party: until for party, until in self._offered.items() if until > now}
        if len(self._offered) < MAX_OFFERED:
            self._offered[request.party] = now + self._handshake_s
        return m.Offer(
            identity.party,
            identity.layout,
            identity.transports,
            identity.probe,
            identity.is_staged,
            identity.slot_bytes,
        )

    def end_test(self, party: Party) -> None:
        """A target that claims something, or says that it claims nothing, has finished its self-test."""
        self._offered.pop(party, None)

    def is_tested(self, now: float) -> bool:
        """Whether a target may be testing our memory."""
        return any(until > now for until in self._offered.values())
