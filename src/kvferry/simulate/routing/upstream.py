"""A request to an engine that is modelled: what the engine does for it, and what is heard of that."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from kvferry.plan.description.tokens import TokenRange
from kvferry.router.answers.engine_response import CACHE, CACHE_REASON
from kvferry.router.events import INSTANCE_DOWN, Answered, Ended, Event, Failed, Opened
from kvferry.router.policy.records import Instance
from kvferry.router.request.headers import Headers
from kvferry.router.upstream.failures import CONNECT_TIMEOUT, MESSAGES, REFUSED, RESET
from kvferry.simulate.fleet.engine import Engine
from kvferry.simulate.fleet.hardware import Hardware
from kvferry.simulate.fleet.work import EngineState, Watcher, Work
from kvferry.simulate.load import PREFIX_TOKENS, Arrival
from kvferry.simulate.settings import Setting
from kvferry.wire.messages import Reason

REFERENCE = b'{"kv_transfer_params": {"kvferry": {}}}'
RECOMPUTED: Headers = [(CACHE, b"recomputed"), (CACHE_REASON, str(Reason.PEER_LOST).encode())]


class Upstream:
    """`event` is the next thing that is heard of it, `headers` are its answer's. `progress` is told of tokens."""

    def __init__(
        self, env: simpy.Environment, arrival: Arrival, engine: Engine, progress: Callable[[int], None]
    ) -> None:
        self.engine, self.event, self._number = engine, env.event(), next(engine.serials)
        self.headers: Headers = []
        self._keeps = False
        self._env, self._cost, self._names, self._epoch = env, arrival.cost, arrival.names, engine.epoch
        self._watcher = Watcher(self._first, lambda: self._hear(Ended()), lambda: self._fail(RESET), progress)
        self._work = Work(0, 0, 0, self._watcher)

    def __hash__(self) -> int:
        """The same number in each run, so that sets of them have the same order."""
        return self._number

    @property
    def instance(self) -> Instance:
        return self.engine.instance

    @property
    def num_slow(self) -> int:
        """Steps that took longer than they should."""
        return self._work.num_slow

    def instance_is_down(self) -> None:
        """Fail, unless the engine serves: its tokens refute the probe."""
        if not self.engine.serves:
            self._fail(INSTANCE_DOWN)

    def connect_in_vain(self, timeout_s: float) -> None:
        """Fail to connect to an engine that does not serve: after `timeout_s` if it is silent, else at once."""
        if self.engine.state is EngineState.SILENT:
            self._after(timeout_s, lambda: self._fail(CONNECT_TIMEOUT))
        else:
            self._fail(REFUSED)

    def compute(self) -> None:
        """Compute a prompt, and keep its cache."""
        watcher = Watcher(_nothing, self._keep, lambda: self._fail(RESET), lambda _: None)
        self.engine.begin(Work(self._uncached(), 0, self._cost.prompt_tokens, watcher))

    def answer(self) -> None:
        """Compute what is not cached of the prompt, and write the answer."""
        self._write(self._uncached())

    def fetch(self, prefill: Upstream, hardware: Hardware, setting: Setting) -> None:
        """Fetch the cache that the prefill has left, then write the answer. If that cache is gone, the prompt is
        computed here, when that has been noticed."""
        source = prefill.engine
        missing = TokenRange(self.engine.num_cached(self._names) * PREFIX_TOKENS, self._cost.prompt_tokens)

        def arrived() -> None:
            if prefill.is_kept:
                prefill.let_go()
                self._write(0)
            else:
                self._after(setting.times.silence_s, self._recompute)

        def begin() -> None:
            ends = (source.instance, source.rack), (self.instance, self.engine.rack)
            hardware.network.move(*ends, missing).callbacks.append(lambda _: arrived())

        self._after(setting.wires.handover_s, begin)

    @property
    def is_kept(self) -> bool:
        """Whether the cache of its prompt is there to be fetched."""
        return self._keeps and self.engine.serves and self.engine.epoch == self._epoch

    def let_go(self) -> None:
        """Nobody will fetch the cache any more. May be called again."""
        if self.is_kept:
            self.engine.let_go()
        self._keeps = False

    def _recompute(self) -> None:
        self.headers = RECOMPUTED
        self._write(self._uncached())

    def _write(self, left: int) -> None:
        if not self.engine.serves or self.engine.epoch != self._epoch:
            return
        cost = self._cost
        self._work = Work(left, cost.new_tokens, cost.prompt_tokens + cost.new_tokens // 2, self._watcher)
        self.engine.begin(self._work)

    def _keep(self) -> None:
        self.engine.remember(self._names)
        self.engine.keep()
        self._keeps = True
        self._hear(Answered(200, REFERENCE))

    def _first(self) -> None:
        self.engine.remember(self._names)
        self._hear(Opened(can_append=True))
        self.event = self._env.event()

    def _fail(self, reason: str) -> None:
        self._hear(Failed(reason, MESSAGES[reason]))

    def _hear(self, event: Event) -> None:
        """Take an event. Only the first one counts."""
        if not self.event.triggered:
            self.event.succeed(event)

    def _uncached(self) -> int:
        """Tokens of the prompt that it has to compute: the last one in any case."""
        return max(self._cost.prompt_tokens - self.engine.num_cached(self._names) * PREFIX_TOKENS, 1)

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _: then())


def _nothing() -> None:
    """Ignore the first token of a prompt alone, which nobody reads."""
