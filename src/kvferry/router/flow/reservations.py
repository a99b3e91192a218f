"""The instances that one request has reserved: at most one of each role."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.router.commands import Pick
from kvferry.router.events import PREFILL_FAILS, Event
from kvferry.router.fleet.instance import InstanceRequest, Reservation
from kvferry.router.flow.outcomes import OutcomeRecorder
from kvferry.router.policy.records import Instance, RequestCost, Role, SkipPrefill


class Reservations:
    """`reserve` chooses an instance, or says why there is none."""

    def __init__(
        self, outcomes: OutcomeRecorder, cost: RequestCost, reserve: Callable[[InstanceRequest], Reservation | Event]
    ) -> None:
        self._outcomes = outcomes
        self._cost = cost
        self._reserve = reserve
        self._by_role: dict[Role, Reservation] = {}

    def __getitem__(self, role: Role) -> Reservation:
        return self._by_role[role]

    def pick(self, command: Pick) -> tuple[Instance, tuple[Instance, ...]] | Event:
        """Reserve an instance in place of another one of its role. Return it and its partners, or why there is none."""
        if command.role is Role.PREFILL and not self._outcomes.may_prefill():
            return SkipPrefill(PREFILL_FAILS)
        self.release(command.role)
        decode = self._by_role.get(Role.DECODE)
        partners = command.partners(decode.instance if decode else None)
        found = self._reserve(InstanceRequest(command.role, self._cost, command.excluded, partners, command.alone))
        if not isinstance(found, Reservation):
            return found
        self._by_role[command.role] = found
        self._outcomes.chosen(found.instance, partners)
        return found.instance, partners

    def release(self, *roles: Role) -> None:
        """Release the instances of these roles that are reserved."""
        for role in roles:
            if reservation := self._by_role.pop(role, None):
                reservation.release()
