"""`kvferry doctor --peer`: ask a running engine how its memory is reached, and test every way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from ipaddress import ip_address
from socket import SOCK_STREAM, create_connection, getaddrinfo
from typing import Final
from urllib.parse import urlsplit

from kvferry import new_epoch
from kvferry.agent.control.channel import ControlChannel
from kvferry.agent.control.shared_token import SharedToken
from kvferry.cli.doctor.transport_tests import Trials, verdict
from kvferry.errors import ConfigurationError, FerryError, TransportError
from kvferry.plan.programs.copies import Direction
from kvferry.session.keys import PeerKey
from kvferry.transport.machine.finding import Finding, Severity
from kvferry.transport.registry import Opened, open_transports
from kvferry.transport.selection.candidates import AUTO, TCP_NEEDS, candidates
from kvferry.transport.selection.diagnosis import LocalContext, diagnose, local_context
from kvferry.transport.selection.measurement import Measurement
from kvferry.transport.selection.self_test import Probe, measure
from kvferry.wire.codec import decode, encode
from kvferry.wire.messages import Offer, OfferRequest, Party, Refusal

ANSWER_S: Final = 5.0
# ZeroMQ speaks first, with a byte that no text begins with.
GREETING_S: Final = 2.0
GREETING: Final = b"\xff"
ASK_AGAIN_S: Final = 1.0
TURN_S: Final = 0.05
PEER: Final = "peer"
EXPECTED: Final = (
    "the address in the engine's log after `transfers at`, `listens at` (vLLM) or `moves caches of rank 0` (SGLang)"
)


def try_peer(address: str, token: SharedToken, say: Callable[[str], None]) -> Trials:
    """Test every transport to the engine whose control channel is at `host:port`.

    Raises ConfigurationError for an address that makes no sense, TransportError when nobody answers there.
    """
    party = Party("kvferry-doctor", new_epoch(), 0)
    endpoint = endpoint_of(address, token)
    say(f"asking the engine at {address}")
    here = _check_greeting(endpoint)
    with closing(ControlChannel("127.0.0.1", 0, token)) as channel:
        asking = _Asking(channel, PeerKey(endpoint, "", ""), party)
        offer = asking.offer()
        context = local_context(AUTO)
        opened = open_transports(AUTO, here)
        try:
            measurements = tuple(_measurements(asking, offer, opened, say))
        finally:
            for transport in opened.transports:
                transport.close()
    findings = tuple(_findings(measurements, context, offer))
    return Trials(context.place_of(offer.probe.host), measurements, findings)


class _Asking:
    """The conversation with one engine."""

    def __init__(self, channel: ControlChannel, peer: PeerKey, party: Party) -> None:
        self._channel, self._peer, self._party = channel, peer, party

    def offer(self) -> Offer:
        """How its memory is reached; it also goes on making progress for us for some seconds. Raises TransportError."""
        began, asked = time.monotonic(), -math.inf
        while (now := time.monotonic()) - began < ANSWER_S:
            if now - asked > ASK_AGAIN_S:
                asked = now
                self._channel.send(self._peer, encode(OfferRequest(self._party)))
            if self._channel.refused_by():
                raise TransportError(
                    f"the engine at {self._peer.address} has ended the handshake",
                    hint="does it have the same --token-file?",
                )
            for arrival in self._channel.receive(TURN_S):
                message = decode(arrival.frame)
                if isinstance(message, Offer):
                    return message
                if isinstance(message, Refusal):
                    raise TransportError(message.what, found=message.found, expected=message.expected)
        raise TransportError(
            f"no engine answers at {self._peer.address} within {ANSWER_S:g} s",
            expected=EXPECTED,
            hint="is the engine suspended or overloaded?",
        )


def _measurements(asking: _Asking, offer: Offer, opened: Opened, say: Callable[[str], None]) -> Iterator[Measurement]:
    offered = {each.name: each for each in offer.transports}
    available = dict.fromkeys((transport.name for transport in opened.transports), "") | opened.unavailable
    for transport in opened.transports:
        say(f"trying {transport.name} to the peer")
        try:
            reasons = {name: each.unavailable for name, each in offered.items()}
            candidates(transport.name, reasons, available)
            # Asked again, so that it makes progress for us during this test, too.
            asking.offer()
            transport.connect(PEER, offered[transport.name].descriptor)
        except FerryError as error:
            yield Measurement.failed(transport.name, error.found or error.what)
            continue
        probe = offer.probe
        yield measure(transport, PEER, Probe(probe.address, probe.size_bytes, probe.seed, probe.num_marks))
        transport.disconnect(PEER)
    for name, reason in opened.unavailable.items():
        yield Measurement.failed(name, reason)


def _findings(measurements: tuple[Measurement, ...], context: LocalContext, offer: Offer) -> Iterator[Finding]:
    """About the transport that an engine here would take; nixl is told of in any case, as others may ask for it."""
    if all(found.error for found in measurements):
        found = "; ".join(f"{each.name}: {each.error}" for each in measurements)
        hint = TCP_NEEDS
        yield Finding(Severity.ERROR, "no transport reaches the peer", found, "a transport that does", hint)
        return
    chosen, place = verdict(measurements), context.place_of(offer.probe.host)
    for each in measurements:
        if not each.error and each.name in (chosen, "nixl"):
            for finding in diagnose(each, Direction.READ, place, context):
                yield finding if each.name == chosen else replace(finding, severity=Severity.NOTE)


def _check_greeting(endpoint: str) -> str:
    """Hear who listens there before anything is said: a web server would take our question for a hundred broken ones.

    Returns the address of this host on the way to it. Raises TransportError when it is nobody, or no control channel.
    """
    parts = urlsplit(endpoint)
    try:
        with create_connection((parts.hostname or "", parts.port or 0), GREETING_S) as connection:
            connection.settimeout(GREETING_S)
            here: str = connection.getsockname()[0]
            said = connection.recv(len(GREETING))
    except TimeoutError:
        found = f"nothing was said within {GREETING_S:g} s"
        hint = "is this the engine's HTTP port, or is the engine suspended or overloaded?"
    except OSError as error:
        found, hint = error.strerror or str(error), "is the engine running?"
    else:
        if said == GREETING:
            return here
        found = f"it answers with {said!r}" if said else "the connection was closed"
        hint = "is this the port of another program?"
    raise TransportError(f"no engine answers at {endpoint}", found=found, expected=EXPECTED, hint=hint)


def endpoint_of(address: str, token: SharedToken) -> str:
    """`tcp://IP:port` of `host:port`, with or without the scheme."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        host, port = parts.hostname or "", parts.port or 0
        found = getaddrinfo(host, port, type=SOCK_STREAM)[0][4][0] if host and port else ""
    except (OSError, ValueError):
        found = ""
    if not found:
        expected, hint = "host:port, with a port from 1 to 65535", "such as 127.0.0.1:41234"
        raise ConfigurationError("invalid --peer address", found=address, expected=expected, hint=hint)
    if not token and not ip_address(found).is_loopback:
        what, hint = "engines on other hosts need a shared token", "pass the engine's --token-file"
        raise ConfigurationError(what, found=address, hint=hint)
    return f"tcp://[{found}]:{port}" if ":" in str(found) else f"tcp://{found}:{port}"
