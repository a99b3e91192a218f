"""The prompts of requests whose cache another engine has: what is fetched has to be theirs."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry import Prompt, Reason
from kvferry.connectors.vllm.features import scores_prompt_tokens
from kvferry.connectors.vllm.scheduler.prompts import Prompts
from kvferry.connectors.vllm.scheduler.skipped_transfers import Declined
from kvferry.errors import RequestError
from kvferry.http.disaggregation import needs_prompt_logits
from kvferry.http.request_fields import DecodeOnlyReason


class Expected:
    """The expected prompts by the id of the request, until its fetch has begun. vLLM asks for each of them often."""

    def __init__(self, prompts: Prompts, declined: Declined) -> None:
        self._prompts = prompts
        self._declined = declined
        self._found: dict[str, tuple[Prompt, ...]] = {}

    def prompt(self, request: Request) -> tuple[Prompt, ...]:
        """All tokens but the last, or an empty tuple for a request whose prompt has to be computed here."""
        request_id = request.request_id
        if request_id not in self._found:
            self._found[request_id] = self._look(request)
        return self._found[request_id]

    def forget(self, request_id: str) -> None:
        """Forget a request. Unknown ones are fine."""
        self._found.pop(request_id, None)

    def _look(self, request: Request) -> tuple[Prompt, ...]:
        request_id = request.request_id
        if _needs_prompt_logits(request.sampling_params):
            self._declined.fetch(
                request_id, DecodeOnlyReason.PROMPT_LOGPROBS, "its answer needs the logits of the prompt"
            )
            return ()
        try:
            return (self._prompts.of(request, max(0, request.num_prompt_tokens - 1)),)
        except RequestError as error:
            self._declined.fetch(request_id, Reason.UNNAMED_PROMPT, str(error))
            return ()


def _needs_prompt_logits(sampling: SamplingParams | None) -> bool:
    if sampling is None:
        return False
    return needs_prompt_logits(sampling.prompt_logprobs) or scores_prompt_tokens(sampling)
