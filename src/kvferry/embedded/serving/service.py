"""Answers requests: whole ones, prefill requests for another engine, and decode requests after another engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from kvferry import Prompt, PromptInput, Reason
from kvferry.connectors.sampling import Sampling
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.engine.detokenizer import TextStream
from kvferry.embedded.engine.records import Grown, Prefilled, Request, Token
from kvferry.embedded.request.parse import GenerationRequest, check_room
from kvferry.embedded.request.prompts import Prompts
from kvferry.embedded.serving.chunks import AnswerChunk, interleaved, scored_token
from kvferry.embedded.serving.metrics import Metrics, Report
from kvferry.embedded.transfer.agent_transfer import AgentTransfer
from kvferry.embedded.transfer.readiness import Readiness
from kvferry.errors import RequestError, TransferError, choice_named

SEEDS = 2**63
POLICIES = ("recompute", "fail")


@dataclass(frozen=True, slots=True)
class ServeInfo:
    """How an engine process presents itself.

    `policy` says what happens to a request whose cache does not arrive: `recompute` here, or `fail`. `epoch` is new at
    every start; `cache` names what is kept of a request.
    """

    model: str
    engine_id: str
    created: int
    policy: str = "recompute"
    epoch: str = ""
    cache: str = ""

    def __post_init__(self) -> None:
        choice_named("policy", self.policy, dict.fromkeys(POLICIES))


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A client's request on its way through the service: one request to the engine for each choice of the answer, in
    their order. Each has an id that this process uses once. A prefill or decode request has exactly one. `echoes` are
    the texts that go before the answers, one for each choice, or none. `leased` are the ids of those whose cache has
    been offered.
    """

    requests: tuple[Request, ...]
    ask: GenerationRequest
    echoes: tuple[str, ...] = ()
    leased: list[str] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of all prompts, each counted once, however many choices it has."""
        return sum(len(request.prompt) for request in self.requests[:: self.ask.num_choices])

    def prompt(self, num_tokens: int) -> Prompt:
        """The first tokens of the prompt, as other engines name them: what a cache here depends on are tokens
        alone, and a salt says who may use it."""
        salt = self.ask.cache_salt
        return Prompt.of(self.requests[0].prompt[:num_tokens], [PromptInput("salt", salt)] if salt else [])


class Service:
    """Answers calls with an engine and a transfer, which its caller starts and closes, as it closes `prompts`."""

    def __init__(self, engine: Engine, transfer: AgentTransfer, info: ServeInfo) -> None:
        self.engine = engine
        self.info = info
        self.metrics = Metrics(engine, lambda: not self.not_ready)
        self._draining = False
        self.transfer = transfer
        self._numbers = itertools.count()
        self._readiness = Readiness()
        self.prompts = Prompts(engine)

    @property
    def failure(self) -> str:
        """Why this process cannot do its whole job; empty while it can."""
        return self.engine.failure or self.transfer.failure

    @property
    def not_ready(self) -> str:
        """Why no new request should be sent here; empty when one may be. What comes nevertheless is answered."""
        draining = "it is draining: it finishes open requests, then exits" if self._draining else ""
        return self.failure or draining or self._readiness.problem(time.monotonic())

    def drain(self) -> None:
        """The process has been told to end: from now on it is not ready, but it answers what comes."""
        self._draining = True

    def client_left(self, call: TokenizedRequest) -> None:
        """Drop the cache of a prefill request whose client has left: nobody knows the reference to it."""
        for request_id in call.leased:
            self.transfer.abort(request_id)

    async def call(self, request_id: str, ask: GenerationRequest) -> TokenizedRequest:
        """Tokenise the prompts. Raises RequestError, PromptTooLongError."""
        prompts = [await self.prompts.token_ids(prompt, is_limited=True) for prompt in ask.prompts]
        bad_words_ids = await self.prompts.bad_words_ids(ask.sampling.bad_words)
        sampling = ask.sampling.over(self.engine.default_sampling, bad_words_ids)
        # As in vLLM, the choices of one prompt are drawn with neighbouring seeds.
        samplings = [replace(sampling, seed=(sampling.seed + i) % SEEDS) for i in range(ask.num_choices)]
        requests = [self._request(request_id, ids, ask, one) for ids in prompts for one in samplings]
        texts = [await self.prompts.text_of(prompt) for prompt in ask.prompts] if ask.echoes else []
        return TokenizedRequest(tuple(requests), ask, tuple(text for text in texts for _ in samplings))

    def _request(self, request_id: str, prompt: tuple[int, ...], ask: GenerationRequest, sampling: Sampling) -> Request:
        max_new_tokens = self._max_new_tokens(ask, len(prompt))
        if sampling.min_tokens > max_new_tokens and ask.role.kind != "prefill":
            raise RequestError(
                "min_tokens is more than the answer may have",
                found=f"min_tokens {sampling.min_tokens}, at most {max_new_tokens} tokens",
                expected="min_tokens <= max_tokens",
                param="min_tokens",
            )
        own = frozenset() if ask.ignores_eos else self.engine.stop_token_ids
        return Request(
            # A client may repeat its ids, and its rooms: what ends late must not end another request.
            request_id=f"{request_id}-{next(self._numbers):x}",
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            stop_token_ids=own | ask.stop_token_ids,
            sampling=sampling,
        )

    async def answer(self, call: TokenizedRequest) -> AsyncGenerator[AnswerChunk, None]:
        """The pieces of an answer; closing the iterator ends the request. Raises FerryError."""
        match call.ask.role.kind:
            case "prefill" if call.ask.role.is_early or call.ask.role.room is not None:
                pieces = self._prefill_early(call)
            case "prefill":
                yield await self._prefill(call)
                return
            case "decode":
                pieces = self._decode(call)
            case _ if len(call.requests) == 1:
                pieces = self._whole(call, 0)
            case _:
                pieces = interleaved([self._whole(call, index) for index in range(len(call.requests))])
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    def _whole(self, call: TokenizedRequest, index: int) -> AsyncGenerator[AnswerChunk, None]:
        """One choice, computed by nothing but this engine."""
        return self._pieces(call, self.engine.generate(call.requests[index]), Report(), index)

    async def _prefill(self, call: TokenizedRequest) -> AnswerChunk:
        request_id = call.requests[0].request_id
        prefilled = await self.engine.prefill(replace(call.requests[0], max_new_tokens=1))
        with ExitStack() as undo:
            # Nobody has seen the reference yet, so nobody can be reading these blocks.
            undo.callback(self.engine.release, request_id)
            undo.callback(self.transfer.abort, request_id)
            prompt = call.prompt(prefilled.num_tokens)
            first = prefilled.first.to_send()
            reference = await self.transfer.offer(request_id, prefilled.block_tables, prompt, first)
            call.leased.append(request_id)
            undo.pop_all()
        return self._prefilled(call, prefilled.first, reference)

    async def _prefill_early(self, call: TokenizedRequest) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the reference first. From then on the blocks come back through the transfer only, however this ends."""
        request_id = call.requests[0].request_id
        reference = await (self._begin if call.ask.role.room is None else self._begin_in_room)(call)
        with ExitStack() as undo:
            undo.callback(self.transfer.abort, request_id)
            yield AnswerChunk("", (), "", reference=reference)
            prefilled = await self._finish(request_id)
            grown = Grown(prefilled.num_tokens, prefilled.block_tables)
            self.transfer.grow(request_id, grown, prefilled.first.to_send())
            undo.pop_all()
        yield self._prefilled(call, prefilled.first, reference)

    async def _begin(self, call: TokenizedRequest) -> dict[str, object]:
        """Promise a prompt's cache when there is room for it."""
        request = replace(call.requests[0], max_new_tokens=1)
        await self.engine.begin(request)
        with ExitStack() as undo:
            undo.callback(self.engine.release, request.request_id)
            reference = await self._promise(call)
            undo.pop_all()
        return reference

    async def _begin_in_room(self, call: TokenizedRequest) -> dict[str, object]:
        """Promise a prompt's cache before there is room for it: its reader has been asked as well, and does not wait
        long for a lease that does not exist."""
        promised: list[dict[str, object]] = []

        async def promise() -> None:
            promised.append(await self._promise(call))

        with ExitStack() as undo:
            undo.callback(self.client_left, call)
            try:
                await self.engine.begin(replace(call.requests[0], max_new_tokens=1), promise)
            except RequestError as error:
                if not promised:
                    raise
                raise _unwanted(error) from error
            undo.pop_all()
        return promised[0]

    async def _promise(self, call: TokenizedRequest) -> dict[str, object]:
        request = call.requests[0]
        reference = await self.transfer.promise(
            request.request_id, call.prompt(len(request.prompt)), call.ask.role.room
        )
        call.leased.append(request.request_id)
        return reference

    async def _finish(self, request_id: str) -> Prefilled:
        """Wait until a promised cache is computed. Raises TransferError when it is not wanted any more before that."""
        try:
            return await self.engine.finish(request_id, partial(self.transfer.grow, request_id))
        except RequestError as error:
            raise _unwanted(error) from error

    def _prefilled(self, call: TokenizedRequest, first: Token, reference: dict[str, object]) -> AnswerChunk:
        report = Report(tokens_computed=first.num_computed)
        self.metrics.count_answer(report, 1)
        text = TextStream(self.engine.tokenizer, call.ask.text, call.requests[0].prompt).push(
            first.token_id, last=True, is_stop=first.finish_reason == "stop"
        )
        return AnswerChunk(text, (first.token_id,), first.finish_reason, report, reference)

    async def _decode(self, call: TokenizedRequest) -> AsyncGenerator[AnswerChunk, None]:
        began = time.perf_counter()
        with ExitStack() as undo:
            try:
                report = await self._fetch(call)
            except TransferError as error:
                lost_s = time.perf_counter() - began
                self.metrics.count_failure(error.reason, lost_s)
                self._readiness.failed(error.reason, time.monotonic())
                if self.info.policy == "fail":
                    raise
                # The first blocks are in quarantine until the transfer says that nothing can land in them.
                again = replace(call.requests[0], request_id=f"{call.requests[0].request_id}-again")
                report = Report(recomputed=error.reason, phases_s={"lost": lost_s})
                tokens = self.engine.generate(again)
            else:
                self._readiness.succeeded()
                undo.callback(self.engine.release, call.requests[0].request_id)
                tokens = self.engine.resume(call.requests[0].request_id, report.tokens_received)
            async with aclosing(self._pieces(call, tokens, report)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _fetch(self, call: TokenizedRequest) -> Report:
        request_id, params = call.requests[0].request_id, call.ask.role.params
        with ExitStack() as undo:
            # Refused, or left by the client while it waited for room: the source need not keep the cache any longer.
            undo.callback(self.transfer.decline, request_id, params)
            try:
                remote = await self.transfer.hold(request_id, params)
            except TransferError:
                undo.pop_all()  # nobody has it, or nobody knows who
                raise
            began = time.perf_counter()
            tables = await self.engine.reserve(call.requests[0])
            prompt = call.prompt(len(call.requests[0].prompt) - 1)
            undo.pop_all()
        queue_s = time.perf_counter() - began
        with ExitStack() as undo:
            undo.callback(self.transfer.abort, request_id)
            try:
                received = await self.transfer.fetch(request_id, remote, tables, prompt)
            except TransferError:
                undo.pop_all()  # it has ended by itself
                raise
            undo.pop_all()
        self.metrics.observe_transfer(received, queue_s)
        got = received.report
        return Report(
            tokens_received=got.tokens,
            bytes=got.num_bytes,
            descriptors=got.num_rows,
            transport=got.transport,
            strategy=got.strategy,
            verified=got.verified,
            phases_s={"queue": queue_s, **got.phases_s},
        )

    async def _pieces(
        self, call: TokenizedRequest, tokens: AsyncGenerator[Token, None], report: Report, index: int = 0
    ) -> AsyncGenerator[AnswerChunk, None]:
        text = TextStream(self.engine.tokenizer, call.ask.text, call.requests[index].prompt)
        num_tokens, offset, before = 0, 0, call.requests[index].prompt[-1:]
        # The echo does not come before the first token: until then an error has a status of its own.
        echo = call.echoes[index] if call.echoes else ""
        try:
            async with aclosing(tokens):
                async for token in tokens:
                    num_tokens += 1
                    report = replace(report, tokens_computed=token.num_computed)
                    is_stop = token.finish_reason == "stop"
                    shown = echo + text.push(token.token_id, last=bool(token.finish_reason), is_stop=is_stop)
                    echo = ""
                    finish_reason = "stop" if text.stopped else token.finish_reason
                    found = token.scored
                    scored = () if found is None else (scored_token(self.engine.tokenizer, found, offset, before),)
                    before = (token.token_id,)
                    offset += sum(len(one.chosen.text) for one in scored)
                    yield AnswerChunk(shown, (token.token_id,), finish_reason, report, index=index, scored=scored)
                    if finish_reason:
                        return
        finally:
            self.metrics.count_answer(report, num_tokens)

    def _max_new_tokens(self, ask: GenerationRequest, num_prompt_tokens: int) -> int:
        if ask.max_new_tokens > 0:
            return ask.max_new_tokens
        check_room(num_prompt_tokens, self.engine.max_tokens)
        return min(ask.default_new_tokens, self.engine.max_tokens - num_prompt_tokens)


def _unwanted(error: RequestError) -> TransferError:
    return TransferError(
        Reason.ABORTED,
        "no decode engine waits for this prompt's cache any more",
        found=str(error),
        hint="the decode request has given up, or the reference was released",
    )
