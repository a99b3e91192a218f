"""Which instances have failed with a request, who may be asked again, and how often: pure."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvferry.router.commands import Command, Count, Counted
from kvferry.router.events import PREFILL_GONE
from kvferry.router.policy.records import Instance, Role
from kvferry.router.upstream.failures import GONE

MAX_GONE: Final = 4
"""So many instances of a role that cannot be reached do not use up its second try: a rack is gone at once."""


class Attempts:
    """The tries of one request. Instances that have `failed` are not chosen again, unless they are acquitted."""

    def __init__(self) -> None:
        self.failed: frozenset[Instance] = frozenset()
        self._suspected: frozenset[Instance] = frozenset()
        self._retried: set[Role] = set()
        self._num_gone: Counter[Role] = Counter()
        # Why the next request of a role is a second try; taken out when that request is sent.
        self._second_try: dict[Role, str] = {}

    def lose(self, instance: Instance) -> None:
        """Note that an instance has failed."""
        self.failed |= {instance}

    def suspect(self, *instances: Instance) -> None:
        """Note that each of these may be at fault. One that turns out to be the only one of its role is asked again."""
        self._suspected = frozenset(instances)

    def acquit(self, role: Role) -> bool:
        """Let the suspects of this role be chosen again. Return whether there are any."""
        suspects = frozenset(one for one in self._suspected if one.role is role)
        self.failed, self._suspected = self.failed - suspects, self._suspected - suspects
        return bool(suspects)

    def may_try_again(self, role: Role, reason: str, culprit: Instance) -> bool:
        """Note that `culprit` has failed, and why. Return whether the role may be tried again, once per request.

        An instance that nobody could reach does not use that try up, unless a decode instance says so of a prefill one.
        """
        self.lose(culprit)
        is_gone = reason == PREFILL_GONE or (culprit.role is role and reason in GONE)
        if is_gone and self._num_gone[culprit.role] < MAX_GONE:
            self._num_gone[culprit.role] += 1
        elif role in self._retried:
            return False
        else:
            self._retried.add(role)
        self._second_try[role] = reason
        return True

    def count(self, role: Role) -> list[Command]:
        """Return the count of a request of this role that is about to be sent, if it is a second try."""
        reason = self._second_try.pop(role, "")
        return [Count(Counted.RETRY, role, reason)] if reason else []
