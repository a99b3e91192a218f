"""One request's life: prefilled on a source engine, lent, fetched by a target engine, decoded, freed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvferry.plan.description.prompt import Prompt
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.events import Ahead, HoldRequest, LeaseWithdrawn
from kvferry.testing.simulation.attempt import Attempt, Wish
from kvferry.testing.simulation.client import Client
from kvferry.testing.simulation.engine import Engine
from kvferry.testing.simulation.node import Lent, Node
from kvferry.testing.simulation.prompts import Asked, Question
from kvferry.testing.simulation.shapes import MAX_TOKENS
from kvferry.testing.simulation.site import Site
from kvferry.wire.messages import Reference

MAX_PATIENCE = 12
WAIT_S = 0.4
MAX_LATE_S = 2.0
MAX_LINGER_S = 8.0
MAX_HOLD_S = 15.0
MAX_STEP_S = 1.5


class Conversation:
    """`outcome` says how it ended; empty while it goes on."""

    def __init__(self, site: Site, client: Client, source: Engine, target: Engine, rival: Engine) -> None:
        self.outcome = ""
        self.reference: Reference | None = None
        self._site, self._world, self._faults = site, site.world, site.faults
        self._client, self._name = client, client.name
        self._source, self._target, self._rival = source, target, rival
        self._question = Question.drawn(site.world.dice, MAX_TOKENS, site.has_names)
        self._naming = site.plant.naming(site.has_names)
        self._num_tokens = self._question.num_tokens
        self._salt = self._question.salt(site.shape.has_fixed_states)
        self._patience = MAX_PATIENCE
        self._lent_at = 0.0
        self._disturbed = self._is_held = False

    # --- prefill ---

    def start(self) -> None:
        """Prefill when there is room; give up after a while."""
        tables = self._source.take(self._num_tokens) if self._source.runs else ()
        if not tables:
            self._wait(self.start, "no prefill")
            return
        is_growing = self._world.chance(self._faults.grow)
        asked = Asked(self._prompt(self._num_tokens), self._num_tokens, self._salt)
        self.reference = self._source.lend(asked, tables, is_growing)
        self._lent_at = self._world.now
        self._site.story.say(self._name, f"{self._num_tokens} tokens prefilled:", self.reference)
        for node in self._source.nodes:
            late_s = self._world.between(0.0, MAX_LATE_S) if self._world.chance(self._faults.late) else 0.0
            if late_s:
                self._site.story.fault("late lease", node.name, self.reference.request_id)
            lent = node.lent[self.reference.request_id]
            node.wish(partial(node.handle_source, lent.wanted), late_s)
            if is_growing:
                self._grow(node, lent, late_s)
        if self._world.chance(self._faults.withdraw):
            self._world.after(self._world.between(0.0, 3.0), partial(self._withdraw, self._source.nodes))
        if self._target.runs and self._world.chance(self._faults.hold):
            self._hold(self._reference())
            return
        lingers = self._world.chance(self._faults.linger)
        self._world.after(self._world.between(0.0, MAX_LINGER_S if lingers else 0.05), self._fetch)

    def _grow(self, node: Node, lent: Lent, late_s: float) -> None:
        """The rest of the prefill, in a few steps."""
        self._site.story.fault("growing lease", node.name, lent.wanted.request_id)
        dice, time = self._world.dice, self._world.now + late_s
        num_before, is_told = 0, self._world.chance(self._faults.tell_states)
        if is_told:
            self._site.story.fault("told by state", node.name, lent.wanted.request_id)
        for num_ready in sorted({*(dice.randint(1, self._num_tokens) for _ in range(2)), self._num_tokens}):
            for num_states in sorted({dice.randint(1, node.num_states) for _ in range(2 * is_told)}):
                time += self._world.between(0.0, MAX_STEP_S)
                ahead = Ahead(num_ready, num_states)
                self._world.at(time, partial(node.get_ahead, lent, self._salt, num_before, ahead))
            time += self._world.between(0.0, MAX_STEP_S)
            self._world.at(time, partial(node.grow, lent, self._salt, num_ready))
            num_before = num_ready

    def _hold(self, reference: Reference) -> None:
        """The request waits for its turn, longer than a lease lasts that nobody renews."""
        self._is_held = True
        self._site.story.fault("waiting request", self._name, reference)
        for node in self._target.nodes:
            node.wish(partial(node.handle_target, HoldRequest(reference, self._source.addresses)))
        self._world.after(self._world.between(0.0, MAX_HOLD_S), self._fetch)

    def _withdraw(self, nodes: tuple[Node, ...]) -> None:
        """The engine takes its blocks back, where they are still lent for this request."""
        reference = self._reference()
        for node in nodes:
            lent = node.lent.get(reference.request_id)
            if lent is not None and lent.wanted.lease_id == reference.lease_id and node.alive:
                self._disturbed = True
                self._site.story.fault("withdrawn lease", node.name, reference.request_id)
                node.wish(partial(self._withdrawn, node))

    def _withdrawn(self, node: Node) -> None:
        lent = node.lent.get(self._reference().request_id)
        if lent is not None and lent.wanted.lease_id == self._reference().lease_id:
            node.handle_source(LeaseWithdrawn(lent.wanted.request_id))

    # --- fetch ---

    def _fetch(self) -> None:
        self._fetch_by(self._target, self._ended)
        if not self.outcome and self._client.asks_two():
            self._fetch_by(self._rival, self._rival_ended)

    def _fetch_by(self, target: Engine, then: Callable[[str], None]) -> None:
        release = self._world.chance(self._faults.release)
        last = 0 if release else self._client.tokens(self._last_token())
        tables = target.take(last) if target.runs else ()
        if not tables:
            if target is self._target:
                self._wait(self._fetch, "no room to decode")
            return
        first = self._world.dice.randint(0, last) if self._world.chance(0.4) else 0
        attempt = Attempt(self._site, self._wish(target, TokenRange(first, last)), target.nodes, then)
        self._site.story.say(self._name, attempt.wish.request_id, "fetches", attempt.wish.reference, (first, last))
        attempt.start(((),) * len(tables) if release else tables)
        if self._world.chance(self._faults.abort):
            self._world.after(self._world.between(0.0, 3.0), partial(self._abort, attempt))

    def _last_token(self) -> int:
        """A state of fixed size is that after the last token."""
        if self._site.shape.has_fixed_states or self._world.chance(0.7):
            return self._num_tokens
        return self._world.dice.randint(1, self._num_tokens)

    def _wish(self, target: Engine, tokens: TokenRange) -> Wish:
        reference = self._client.reference(self._reference(), self._source)
        punctual = self._is_held or self._world.now - self._lent_at < self._site.timing.lease_s / 2
        return Wish(
            target.next_fetch_id(),
            reference,
            self._client.addresses(self._source),
            (tokens,) * len(self._site.shape.target.layouts[0].groups),
            self._salt,
            self._prompt(tokens.last).name(reference.lease_id),
            punctual and not self._disturbed and not self._client.has_meddled,
        )

    def _abort(self, attempt: Attempt) -> None:
        if not attempt.is_over:
            self._site.story.fault("client abort", self._name, attempt.wish.request_id)
            attempt.abort("aborted by the client")

    def _prompt(self, num_tokens: int) -> Prompt:
        return self._naming.prompt(self._question, num_tokens)

    # --- the end ---

    def _ended(self, outcome: str) -> None:
        self._site.story.say(self._name, outcome)
        for node in self._target.nodes:
            node.prefix_cache.check(node.name, self._salt)
        self._disturbed = True
        if outcome.startswith("failed") and self._world.chance(self._faults.retry):
            self._site.story.fault("another attempt", self._name)
            self._world.after(self._world.between(0.0, 0.5), self._fetch)
        else:
            self.outcome = outcome

    def _rival_ended(self, outcome: str) -> None:
        self._site.story.say(self._name, "the other engine:", outcome)
        self._site.checks.outcomes[f"rival {outcome}"] += 1

    def _wait(self, again: Callable[[], None], otherwise: str) -> None:
        self._patience -= 1
        if self._patience < 0:
            self.outcome = otherwise
        else:
            self._world.after(WAIT_S, again)

    def _reference(self) -> Reference:
        if self.reference is None:
            raise ValueError("nothing has been prefilled yet")
        return self.reference
