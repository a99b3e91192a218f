"""The contract of a connector, as checks that every engine must pass, whatever its cache looks like.

Hand each check a function that makes an engine: its cache as it describes it, and the engine's own way to write and
read it. The checks are the cases of a test, as in `tests/connectors/test_contract_of_engines.py`. One that fails raises
AssertionError, or `queue.Empty` when an agent has said nothing for a minute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import closing

from kvferry.testing.elements import value_of
from kvferry.testing.engine_under_test import EngineUnderTest as EngineUnderTest
from kvferry.testing.engine_under_test import MakeEngine as MakeEngine
from kvferry.testing.engine_under_test import expect_filled, fill
from kvferry.testing.source_and_targets import source_and_targets
from kvferry.wire.messages import Reason

SHORT_LEASE_S = 0.2

Check = Callable[[MakeEngine], None]


def what_the_engine_writes_lies_where_it_is_described(make: MakeEngine) -> None:
    """The engine writes its cache; every byte must lie where the description says.

    A failure means that the description is wrong (an offset, a stride, the order of dimensions, the size of a block)
    or that `write` is: peers would read other bytes than the engine's. The message names the first such number.
    """
    with closing(make()) as engine:
        fill(engine)
        for state, token, coordinate, address in engine.described():
            found, wanted = ctypes.string_at(address, state.item_bytes), value_of(state, token, coordinate)
            assert found == wanted, f"{state.name}, token {token}, {coordinate}: other bytes where it is described"


def what_lies_where_it_is_described_is_what_the_engine_reads(make: MakeEngine) -> None:
    """The cache is filled where the description says; the engine must read exactly that.

    A failure means the same as in the check before, for caches that arrive: the engine would decode with wrong numbers.
    Where only this one fails, `read` and `write` do not agree.
    """
    with closing(make()) as engine:
        for state, token, coordinate, address in engine.described():
            ctypes.memmove(address, value_of(state, token, coordinate), state.item_bytes)
        expect_filled(engine)


def what_is_leased_arrives(make: MakeEngine) -> None:
    """A second engine fetches what the first has leased, and reads the same; the lease ends as done.

    If the checks before pass, a failure means that the agent was given other memory than the description's, or that
    the engine used its blocks although they were leased or fetched into.
    """
    with source_and_targets(make) as (source, target):
        target.fetch(source, source.lease())
        target.expect_arrived()
        source.expect_ended("done")


def a_wrong_byte_is_found(make: MakeEngine) -> None:
    """One byte changes on its way: the fetch fails, and its blocks are released afterwards.

    A failure means that a damaged cache would be decoded. An engine must not touch blocks that it fetches into before
    it hears `Fetched`: what it writes there would be taken for damage, or would hide it.
    """
    with source_and_targets(make, spoils=True) as (source, target):
        target.fetch(source, source.lease())
        target.expect_failed(Reason.DIGEST)


def a_lease_that_nobody_claims_ends(make: MakeEngine) -> None:
    """The source hears that its lease has expired; a later fetch of it is refused.

    A failure means that blocks stay leased for ever, or that a cache is read whose blocks have another owner by now.
    """
    with source_and_targets(make, lease_s=SHORT_LEASE_S) as (source, target):
        reference = source.lease()
        source.expect_ended("expired")
        target.fetch(source, reference)
        target.expect_failed(Reason.EXPIRED, Reason.UNKNOWN_LEASE)


def a_lease_is_claimed_once(make: MakeEngine) -> None:
    """Two engines fetch with the same reference: the first gets the cache, the second is refused.

    A failure means that the second would read blocks that were freed after the first.
    """
    with source_and_targets(make, num_targets=2) as (source, first, second):
        reference = source.lease()
        first.fetch(source, reference)
        first.expect_arrived()
        second.fetch(source, reference)
        second.expect_failed(Reason.ALREADY_CLAIMED, Reason.UNKNOWN_LEASE, Reason.EXPIRED)


def a_source_that_is_gone_is_an_error(make: MakeEngine) -> None:
    """The source ends with a lease open, killed where it is a process of its own: the fetch fails.

    A failure means that requests wait for an engine that has crashed, or that their blocks are lost.
    """
    with source_and_targets(make) as (source, target):
        reference = source.lease()
        source.agent.close()
        target.fetch(source, reference)
        target.expect_failed(Reason.UNREACHABLE, Reason.PEER_LOST, Reason.DEADLINE)


CONTRACT: tuple[Check, ...] = (
    what_the_engine_writes_lies_where_it_is_described,
    what_lies_where_it_is_described_is_what_the_engine_reads,
    what_is_leased_arrives,
    a_wrong_byte_is_found,
    a_lease_that_nobody_claims_ends,
    a_lease_is_claimed_once,
    a_source_that_is_gone_is_an_error,
)
