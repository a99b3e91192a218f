"""What names a request's cache, so that one prompt's is never taken for another's."""

from __future__ import annotations

from typing import Any

from kvferry import Prompt, PromptInput, Reason
from kvferry.errors import RequestError, TransferError


def prompt_of(request: Any) -> Prompt:
    """A request's tokens, and what else SGLang keys its prefix cache by.

    Raises TransferError for a request of which more would have to travel than a cache and a token, and RequestError for
    a prompt without tokens: SGLang would take it on, and end when it finds that nothing of it was computed.
    """
    what = ""
    embeds = request.input_embeds, getattr(request, "positional_embed_overrides", None)
    if request.multimodal_inputs is not None or any(given is not None for given in embeds):
        what = "the cache of images and embeddings has no name that another SGLang would know"
    elif request.return_sampling_mask:
        what = "the sampling mask of the first token does not travel"
    if what:
        hint = "send the request to an engine that is not divided"
        raise TransferError(Reason.UNNAMED_PROMPT, what, hint=hint)
    if not request.origin_input_ids:
        what = "a prompt without tokens has no cache that could travel"
        hint = "send a prompt: not every tokenizer begins an empty text with a token"
        raise RequestError(what, found="no tokens", expected="a prompt of one token or more", hint=hint)
    kinds = (("extra_key", request.extra_key), ("salt", request.cache_salt))
    return Prompt.of(request.origin_input_ids, [PromptInput(kind, value) for kind, value in kinds if value])
