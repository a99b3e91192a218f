"""The engine for `asyncio`: requests in, tokens out, and the blocks of each request.

It belongs to one event loop. The engine's thread reports through `call_soon_threadsafe`; nothing here blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from kvferry import Cache, Memory
from kvferry.connectors.jobs import BlockTables, Event, Freed, Job, Produced, Settings, Stopped
from kvferry.connectors.transformers import Core
from kvferry.embedded.engine.admission import Admission, BlockUsage, blocks_for, longest
from kvferry.embedded.engine.limits import Limits
from kvferry.embedded.engine.records import Entry, Grown, Prefilled, Request, Token
from kvferry.errors import ConfigurationError, FerryError, PromptTooLongError, RequestError
from kvferry.layout import Layout

Item = TypeVar("Item")
# Some models are loaded by transformers, and end the thread of its continuous batching with their first step. This has
# a step of several tokens and one of a single token.
TRIAL = Request("kvferry-trial", prompt=(0, 0), max_new_tokens=2, stop_token_ids=frozenset())


class Engine:
    """A model that answers, computes prompts for others, and goes on from prompts that others computed."""

    def __init__(self, settings: Settings) -> None:
        """Load the model and make the cache; takes seconds. Raises ConfigurationError."""
        self._core = Core(settings, self._post)
        self.tokenizer = self._core.tokenizer
        # What the model ends its answers with, and how tokens are chosen where a request says nothing.
        self.stop_token_ids, self.default_sampling = self._core.stop_token_ids, self._core.default_sampling
        self._groups = self._core.group_sizes()
        self._admission = Admission(self._groups, self._core.num_sectors, self._core.num_held_sectors)
        context = self._core.context
        self.max_tokens, limit = longest(self._groups, self._core.num_sectors, context.max_tokens), context.reason
        if self.max_tokens < context.max_tokens:
            limit = "this is the size of the cache (--num-blocks of serve, --cache-tokens of up)"
        self.limits = Limits(self._core.vocab_size, self.max_tokens, limit)
        self._entries: dict[str, Entry] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._over = asyncio.Event()
        self._failure = "it has not been started"

    @property
    def failure(self) -> str:
        """Why the engine does not run; empty while it does."""
        return self._failure

    def layout(self) -> Layout:
        """Where every element of the cache lies; valid as long as the engine exists."""
        return self._core.layout()

    def memory(self) -> Memory:
        """The cache's memory, shared by descriptor. It must not be used after `close`."""
        return self._core.memory()

    def cache(self) -> Cache:
        """How an agent gets at the cache."""
        return self._core.cache()

    def block_usage(self) -> BlockUsage:
        """The blocks in use: none are granted, allocated, awaited or held while the engine has no request."""
        return BlockUsage(
            capacity=self._admission.capacity,
            granted=self._admission.granted,
            allocated=self._core.num_allocated_blocks(),
            num_waiting=self._admission.num_waiting,
            num_leased=sum(entry.is_leased for entry in self._entries.values()),
        )

    async def start(self) -> None:
        """Start the engine's thread, whose events come to the running loop, and let it compute a short answer.

        Raises ConfigurationError for a model that it does not compute.
        """
        self._loop = asyncio.get_running_loop()
        self._failure = ""
        self._core.start()
        try:
            async for _ in self.generate(TRIAL):
                pass
        except PromptTooLongError as error:
            await self.close()
            what, hint = (
                "the cache is too small for any request",
                "more blocks (--num-blocks; kvferry up: --cache-tokens)",
            )
            raise ConfigurationError(what, found=f"room for {self.max_tokens} tokens", hint=hint) from error
        except FerryError as error:
            await self.close()  # by its end the thread has said why
            raise ConfigurationError(
                "transformers' continuous batching does not run this model",
                found=self._failure,
                hint="another model, or another engine (--engine vllm); the log above has a traceback",
            ) from error

    async def wait_until_over(self) -> None:
        """Returns when the thread has ended, whether by `close` or by an error; `failure` says why."""
        await self._over.wait()

    async def close(self) -> None:
        """Stop the thread; open requests end with an error. Whoever reads or fills the cache must have stopped."""
        await asyncio.to_thread(self._core.stop)
        self._stopped("it was closed")

    async def prefill(self, request: Request) -> Prefilled:
        """Compute a prompt and its first token; the blocks are held until `release`.

        Raises PromptTooLongError, RequestError, or FerryError when the engine has stopped.
        """
        entry = await self._admit(request, len(request.prompt), is_leased=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release, request.request_id)
            self._core.admit(_job(request, 1, num_cached=0, hold=True))
            first, held = await _next(entry.tokens), await _next(entry.grown)
            undo.pop_all()
        return Prefilled(first, held.num_tokens, held.block_tables)

    async def begin(self, request: Request, announce: Callable[[], Awaitable[object]] | None = None) -> None:
        """Begin what `prefill` does and return when it has room; `finish` goes on. Blocks are held until `release`.

        `announce` is called before it waits for room: the request is known by its id. Raises as `prefill` and
        `announce`, and RequestError for a request that is released while it waits.
        """
        entry = await self._admit(request, len(request.prompt), is_leased=True, announce=announce)
        if entry.freeing:
            raise _ended(request.request_id)
        self._core.admit(replace(_job(request, 1, num_cached=0, hold=True), tells_progress=True))

    async def finish(self, request_id: str, tell: Callable[[Grown], None]) -> Prefilled:
        """Wait for a prompt that has begun. `tell` hears where it is and how much of it is computed and stays
        as it is, whenever that is more; for some models there is nothing to tell before the end.

        Raises RequestError for a request that has not begun or is released meanwhile, FerryError when the engine
        cannot answer.
        """
        entry = self._lent(request_id)
        while (grown := await _next(entry.grown)).num_tokens < len(entry.request.prompt):
            tell(grown)
        return Prefilled(await _next(entry.tokens), grown.num_tokens, grown.block_tables)

    async def generate(self, request: Request) -> AsyncGenerator[Token, None]:
        """Answer a request with nothing but this engine. Closing the iterator frees the blocks. Raises as `prefill`."""
        entry = await self._admit(request, _num_cached_at_end(request), is_leased=False)
        async for token in self._answer(entry, 0):
            yield token

    async def reserve(self, request: Request) -> BlockTables:
        """Room for a whole request, and blocks for its prompt that a transfer may fill until `release` or `resume`.

        Returns one block table per cache group. Raises as `prefill`.
        """
        entry = await self._admit(request, _num_cached_at_end(request), is_leased=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release, request.request_id)
            self._core.allocate(request.request_id, len(request.prompt))
            reserved = await _next(entry.grown)
            undo.pop_all()
        return reserved.block_tables

    async def resume(self, request_id: str, num_received: int) -> AsyncGenerator[Token, None]:
        """Go on after the first `num_received` tokens of a reserved request's prompt: their cache has landed.

        From now on the blocks are the engine's again. Raises RequestError for a request that is not reserved, and
        for a number that leaves no token to compute.
        """
        entry = self._lent(request_id)
        if not 0 <= num_received < len(entry.request.prompt):
            raise RequestError(
                "at least the last token of a prompt must be computed here",
                found=f"{num_received} tokens received",
                expected=f"0 <= received < {len(entry.request.prompt)}",
            )
        entry.is_leased = False
        async for token in self._answer(entry, num_received):
            yield token

    async def idle(self) -> None:
        """Wait until no request is in the engine: every block is free then."""
        await self._idle.wait()

    def release(self, request_id: str) -> None:
        """End a request, whatever it does, and free its blocks. From any thread, at any time, any number of times."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: so is the engine
                self._loop.call_soon_threadsafe(self._release, request_id)

    async def _admit(
        self,
        request: Request,
        num_tokens: int,
        is_leased: bool,
        announce: Callable[[], Awaitable[object]] | None = None,
    ) -> Entry:
        """`num_tokens` is how many tokens of the sequence will be in the cache at most."""
        self._check(request)
        entry = Entry(request, is_leased)
        self._entries[request.request_id] = entry
        self._idle.clear()
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget, request.request_id)
            if announce is not None:
                await announce()
            await self._admission.acquire(request.request_id, blocks_for(self._groups, num_tokens))
            undo.pop_all()
        return entry

    def _lent(self, request_id: str) -> Entry:
        """A request that has begun or is reserved. Raises RequestError when there is none."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.is_leased or entry.freeing:
            raise RequestError("nothing is reserved for this request", found=request_id)
        return entry

    def _check(self, request: Request) -> None:
        if self._failure:
            raise FerryError("the engine is not running", found=self._failure, hint="restart this process")
        if request.request_id in self._entries:
            raise RequestError("a request id is in use", found=request.request_id, hint="use each id once")
        self.limits.check(request)

    async def _answer(self, entry: Entry, num_cached: int) -> AsyncGenerator[Token, None]:
        request = entry.request
        try:
            self._core.admit(_job(request, request.max_new_tokens, num_cached, hold=False))
            while True:
                token = await _next(entry.tokens)
                yield token
                if token.finish_reason:
                    return
        finally:
            self._release(request.request_id)

    def _release(self, request_id: str) -> None:
        entry = self._entries.get(request_id)
        if entry is None or entry.freeing:
            return
        entry.freeing = True
        entry.fail(_ended(request_id))
        if self._failure:
            self._forget(request_id)
        else:
            self._core.free(request_id)

    def _forget(self, request_id: str) -> None:
        """The blocks are really free: somebody else may have them."""
        if self._entries.pop(request_id, None) is not None:
            self._admission.refuse(request_id, _ended(request_id))
        if not self._entries:
            self._idle.set()

    def _post(self, event: Event) -> None:
        """Called in the engine's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._handle, event)

    def _handle(self, event: Event) -> None:
        match event:
            case Stopped(reason):
                self._stopped(reason or "it was stopped")
            case Freed(request_id):
                self._forget(request_id)
            case _ if entry := self._entries.get(event.request_id):
                entry.hear(event)
                if isinstance(event, Produced) and event.finished and not entry.is_leased:
                    self._forget(event.request_id)

    def _stopped(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._over.set()
        for request_id, entry in tuple(self._entries.items()):
            error = FerryError("the engine has stopped", found=self._failure, hint="restart this process")
            entry.fail(error)
            self._admission.refuse(request_id, error)
            self._forget(request_id)


def _ended(request_id: str) -> RequestError:
    return RequestError("the request was ended", found=request_id)


def _job(request: Request, max_new_tokens: int, num_cached: int, hold: bool) -> Job:
    stops, sampling = request.stop_token_ids, request.sampling
    return Job(request.request_id, request.prompt, max_new_tokens, stops, num_cached, hold, sampling=sampling)


def _num_cached_at_end(request: Request) -> int:
    """The last token of an answer is never fed back, so it takes no room."""
    return len(request.prompt) + request.max_new_tokens - 1


async def _next(items: asyncio.Queue[Item | FerryError]) -> Item:
    item = await items.get()
    if isinstance(item, FerryError):
        raise item
    return item
