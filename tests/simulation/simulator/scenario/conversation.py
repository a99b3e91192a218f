"""One request's life: prefilled on a source engine, leased, fetched by a target engine, decoded, freed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvferry.plan.description.prompt import Prompt
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.events import Ahead, HoldRequest, LeaseWithdrawn
from kvferry.wire.messages import Reference
from simulator.context import RunContext
from simulator.engines.engine import Engine
from simulator.engines.node import Node
from simulator.scenario.attempt import Attempt
from simulator.scenario.client import Client
from simulator.state.prompts import PrefillRequest, PromptSpec
from simulator.state.rank import LeasedBlocks, WantedCache
from simulator.state.shapes import MAX_TOKENS

MAX_PATIENCE = 12
WAIT_S = 0.4
MAX_LATE_S = 2.0
MAX_LINGER_S = 8.0
MAX_HOLD_S = 15.0
MAX_STEP_S = 1.5


class Conversation:
    """`outcome` says how it ended; empty while it goes on."""

    def __init__(self, context: RunContext, client: Client, source: Engine, target: Engine, rival: Engine) -> None:
        self.outcome = ""
        self.reference: Reference | None = None
        self._context, self._scheduler, self._faults = context, context.scheduler, context.faults
        self._client, self._name = client, client.name
        self._source, self._target, self._rival = source, target, rival
        self._spec = PromptSpec.drawn(context.scheduler.rng, MAX_TOKENS, context.has_names)
        self._naming = context.defect.naming(context.has_names)
        self._num_tokens = self._spec.num_tokens
        self._salt = self._spec.salt(context.shape.has_fixed_states)
        self._patience = MAX_PATIENCE
        self._leased_at = 0.0
        self._disturbed = self._is_held = False

    # --- prefill ---

    def start(self) -> None:
        """Prefill when there is room; give up after a while."""
        tables = self._source.take(self._num_tokens) if self._source.runs else ()
        if not tables:
            self._wait(self.start, "no prefill")
            return
        is_growing = self._scheduler.chance(self._faults.grow)
        request = PrefillRequest(self._prompt(self._num_tokens), self._num_tokens, self._salt)
        self.reference = self._source.lease_blocks(request, tables, is_growing)
        self._leased_at = self._scheduler.now
        self._context.log.note(self._name, f"{self._num_tokens} tokens prefilled:", self.reference)
        for node in self._source.nodes:
            late_s = self._scheduler.between(0.0, MAX_LATE_S) if self._scheduler.chance(self._faults.late) else 0.0
            if late_s:
                self._context.log.fault("late lease", node.rank.name, self.reference.request_id)
            leased = node.rank.leased[self.reference.request_id]
            node.wanted(partial(node.handle_source, leased.wanted), late_s)
            if is_growing:
                self._grow(node, leased, late_s)
        if self._scheduler.chance(self._faults.withdraw):
            self._scheduler.after(self._scheduler.between(0.0, 3.0), partial(self._withdraw, self._source.nodes))
        if self._target.runs and self._scheduler.chance(self._faults.hold):
            self._hold(self._reference())
            return
        lingers = self._scheduler.chance(self._faults.linger)
        self._scheduler.after(self._scheduler.between(0.0, MAX_LINGER_S if lingers else 0.05), self._fetch)

    def _grow(self, node: Node, leased: LeasedBlocks, late_s: float) -> None:
        """The rest of the prefill, in a few steps."""
        self._context.log.fault("growing lease", node.rank.name, leased.wanted.request_id)
        rng, time = self._scheduler.rng, self._scheduler.now + late_s
        num_before, by_state = 0, self._scheduler.chance(self._faults.tell_states)
        if by_state:
            self._context.log.fault("told by state", node.rank.name, leased.wanted.request_id)
        for num_ready in sorted({*(rng.randint(1, self._num_tokens) for _ in range(2)), self._num_tokens}):
            for num_states in sorted({rng.randint(1, node.num_states) for _ in range(2 * by_state)}):
                time += self._scheduler.between(0.0, MAX_STEP_S)
                ahead = Ahead(num_ready, num_states)
                self._scheduler.at(time, partial(node.get_ahead, leased, self._salt, num_before, ahead))
            time += self._scheduler.between(0.0, MAX_STEP_S)
            self._scheduler.at(time, partial(node.grow, leased, self._salt, num_ready))
            num_before = num_ready

    def _hold(self, reference: Reference) -> None:
        """The request waits for its turn, longer than a lease lasts that nobody renews."""
        self._is_held = True
        self._context.log.fault("waiting request", self._name, reference)
        for node in self._target.nodes:
            node.wanted(partial(node.handle_target, HoldRequest(reference, self._source.addresses)))
        self._scheduler.after(self._scheduler.between(0.0, MAX_HOLD_S), self._fetch)

    def _withdraw(self, nodes: tuple[Node, ...]) -> None:
        """The engine takes its blocks back, where they are still leased for this request."""
        reference = self._reference()
        for node in nodes:
            leased = node.rank.leased.get(reference.request_id)
            if leased is not None and leased.wanted.lease_id == reference.lease_id and node.rank.alive:
                self._disturbed = True
                self._context.log.fault("withdrawn lease", node.rank.name, reference.request_id)
                node.wanted(partial(self._withdrawn, node))

    def _withdrawn(self, node: Node) -> None:
        leased = node.rank.leased.get(self._reference().request_id)
        if leased is not None and leased.wanted.lease_id == self._reference().lease_id:
            node.handle_source(LeaseWithdrawn(leased.wanted.request_id))

    # --- fetch ---

    def _fetch(self) -> None:
        self._fetch_by(self._target, self._ended)
        if not self.outcome and self._client.asks_two():
            self._fetch_by(self._rival, self._rival_ended)

    def _fetch_by(self, target: Engine, then: Callable[[str], None]) -> None:
        release = self._scheduler.chance(self._faults.release)
        last = 0 if release else self._client.tokens(self._last_token())
        tables = target.take(last) if target.runs else ()
        if not tables:
            if target is self._target:
                self._wait(self._fetch, "no room to decode")
            return
        first = self._scheduler.rng.randint(0, last) if self._scheduler.chance(0.4) else 0
        attempt = Attempt(self._context, self._wanted_cache(target, TokenRange(first, last)), target.nodes, then)
        self._context.log.note(
            self._name, attempt.wanted.request_id, "fetches", attempt.wanted.reference, (first, last)
        )
        attempt.start(((),) * len(tables) if release else tables)
        if self._scheduler.chance(self._faults.abort):
            self._scheduler.after(self._scheduler.between(0.0, 3.0), partial(self._abort, attempt))

    def _last_token(self) -> int:
        """A state of fixed size is that after the last token."""
        if self._context.shape.has_fixed_states or self._scheduler.chance(0.7):
            return self._num_tokens
        return self._scheduler.rng.randint(1, self._num_tokens)

    def _wanted_cache(self, target: Engine, tokens: TokenRange) -> WantedCache:
        reference = self._client.reference(self._reference(), self._source)
        punctual = self._is_held or self._scheduler.now - self._leased_at < self._context.timing.lease_s / 2
        return WantedCache(
            target.next_fetch_id(),
            reference,
            self._client.addresses(self._source),
            (tokens,) * len(self._context.shape.target.layouts[0].groups),
            self._salt,
            self._prompt(tokens.last).name(reference.lease_id),
            punctual and not self._disturbed and not self._client.has_tampered,
        )

    def _abort(self, attempt: Attempt) -> None:
        if not attempt.is_over:
            self._context.log.fault("client abort", self._name, attempt.wanted.request_id)
            attempt.abort("aborted by the client")

    def _prompt(self, num_tokens: int) -> Prompt:
        return self._naming.prompt(self._spec, num_tokens)

    # --- the end ---

    def _ended(self, outcome: str) -> None:
        self._context.log.note(self._name, outcome)
        for node in self._target.nodes:
            node.prefix_cache.check(node.rank.name, self._salt)
        self._disturbed = True
        if outcome.startswith("failed") and self._scheduler.chance(self._faults.retry):
            self._context.log.fault("another attempt", self._name)
            self._scheduler.after(self._scheduler.between(0.0, 0.5), self._fetch)
        else:
            self.outcome = outcome

    def _rival_ended(self, outcome: str) -> None:
        self._context.log.note(self._name, "the other engine:", outcome)
        self._context.checks.outcomes[f"rival {outcome}"] += 1

    def _wait(self, again: Callable[[], None], otherwise: str) -> None:
        self._patience -= 1
        if self._patience < 0:
            self.outcome = otherwise
        else:
            self._scheduler.after(WAIT_S, again)

    def _reference(self) -> Reference:
        if self.reference is None:
            raise ValueError("nothing has been prefilled yet")
        return self.reference
