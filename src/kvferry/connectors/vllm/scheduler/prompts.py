"""What identifies the prompt of a vLLM request, for agents that compare it with what they have computed.

Whatever vLLM itself tells apart in its prefix cache is a part of the name, read from the inputs of its own block hash.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.request import Request

from kvferry import TOKEN_BYTES, Prompt, PromptInput
from kvferry.connectors.vllm.features import hash_inputs
from kvferry.connectors.vllm.scheduler.adapters import AdapterFiles, AdapterNumbers, tell_of_loads
from kvferry.errors import RequestError

EMBEDDING_BYTES = 16
# The id of a token that is an embedding. vLLM's own stand-in is the id of a token.
EMBEDDED = (1 << 32) - 1
MEDIA_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")


def media_are_identified(config: VllmConfig) -> bool:
    """Whether vLLM's identifiers of images and the like are digests of their content. With both of its caches off it
    numbers them instead, and two engines give the same numbers to different images."""
    multimodal = config.model_config.multimodal_config
    is_cached = multimodal is not None and multimodal.mm_processor_cache_gb > 0
    return is_cached or bool(config.cache_config.enable_prefix_caching)


def adapted_modules(config: VllmConfig) -> str:
    """The modules to which an engine limits its adapters (`--lora-target-modules`), however they are listed."""
    limits = config.lora_config.target_modules if config.lora_config is not None else None
    return "" if limits is None else f":only {sorted(set(limits))}"


def media_options(config: VllmConfig) -> str:
    """An engine's own options of how media become embeddings. vLLM's identifiers hold those of a request only."""
    multimodal = config.model_config.multimodal_config
    if multimodal is None:
        return ""
    given = {name: value for name in MEDIA_OPTIONS if (value := getattr(multimodal, name))}
    if multimodal.video_pruning_rate:
        given["video_pruning_method"] = multimodal.video_pruning_method
    return json.dumps(given, sort_keys=True, default=str) if given else ""


class Prompts:
    """Names the prompts of one engine. Nothing is kept but what its adapters are. `adapted_modules` says what these may
    change here, and `media_options` what becomes of media."""

    def __init__(self, media_are_identified: bool = True, adapted_modules: str = "", media_options: str = "") -> None:
        self._media_are_identified = media_are_identified
        self._adapted_modules = adapted_modules
        self._media_options = media_options
        self._adapters = AdapterFiles()
        self._numbers = AdapterNumbers()

    @contextmanager
    def loading(self, adapter: LoRARequest) -> Iterator[None]:
        """A context that is open while vLLM reads an adapter's files."""
        is_new = self._adapters.see(adapter)
        try:
            yield
        except BaseException:
            if is_new:
                # They may be half written, and whole the next time.
                self._adapters.forget(adapter)
            raise
        # A repository's files may be on this machine only now.
        self._adapters.see(adapter)
        self._numbers.load(adapter)

    def begin(self, request: Request) -> None:
        """Note that a request has arrived, even if its cache is not to be transferred: vLLM may load its adapter."""
        if request.lora_request is not None:
            self._adapters.see(request.lora_request)
            self._numbers.begin(request.request_id, request.lora_request)

    def end(self, request: Request) -> None:
        """Note that a request has ended. Unknown ones are fine."""
        if request.lora_request is not None:
            self._numbers.end(request.request_id, request.lora_request)

    def is_certain(self, request: Request) -> bool:
        """Whether the adapter of a request whose prompt was named is still the one that it was."""
        try:
            return request.lora_request is None or bool(self._adapter(request.lora_request))
        except RequestError:
            return False

    def is_ready(self, request: Request) -> bool:
        """Whether `of` would not wait, as it does while the files of a new adapter are read."""
        return request.lora_request is None or self._adapters.is_ready(request.lora_request)

    def of(self, request: Request, num_tokens: int) -> Prompt:
        """A request's first `num_tokens` tokens, those of its answer included, and what else their cache depends on.

        Raises RequestError for a prompt that another engine could not tell from another one.
        """
        inputs = tuple(self._inputs(request, num_tokens))
        if request.prompt_embeds is not None:
            tokens = _with_embeddings(request, request.prompt_embeds, num_tokens)
            return Prompt(tokens, inputs, TOKEN_BYTES + EMBEDDING_BYTES)
        return Prompt.of(request.all_token_ids[:num_tokens], inputs)

    def close(self) -> None:
        """Stop reading the files of adapters."""
        self._adapters.close()

    def _inputs(self, request: Request, num_tokens: int) -> Iterator[PromptInput]:
        keys = hash_inputs(_WithoutEmbeddings(request), num_tokens)
        media = [key for key in keys if key[0] == "mm"]
        yield from self._media(request, num_tokens, media)
        for key in keys:
            match key:
                case ("mm", *_):
                    continue
                case ("lora", *_) if request.lora_request is not None:
                    yield PromptInput("adapter", self._adapter(request.lora_request))
                case ("cache_salt", str(salt)):
                    yield PromptInput("salt", salt)
                case _:
                    # A later vLLM may tell prompts apart by something that kvferry does not know.
                    what = "this version of kvferry does not know an input that vLLM's prefix cache depends on"
                    raise RequestError(what, found=repr(key[0]), hint="use a kvferry that supports this vLLM")

    def _adapter(self, adapter: LoRARequest) -> str:
        self._numbers.check(adapter)
        return self._adapters.digest(adapter) + self._adapted_modules

    def _media(self, request: Request, num_tokens: int, keys: Sequence[Any]) -> Iterator[PromptInput]:
        """Images and the like that begin within these tokens."""
        features = [feature for feature in request.mm_features if feature.mm_position.offset < num_tokens]
        if features and not self._media_are_identified:
            what = "images and other media have no identifiers that two engines share"
            hint = "leave vLLM's prefix cache or --mm-processor-cache-gb on"
            raise RequestError(what, found="both caches off", hint=hint)
        if [(feature.identifier, feature.mm_position.offset) for feature in features] != [key[1:] for key in keys]:
            # Such as the sound that an encoder hears: vLLM's prefix cache is off there.
            raise RequestError(
                "vLLM's prefix cache does not cover some of the prompt's media", found=f"{len(features)}"
            )
        if features and self._media_options:
            yield PromptInput("media options", self._media_options, features[0].mm_position.offset)
        for feature in features:
            yield PromptInput(feature.modality, _identifier(request, feature), feature.mm_position.offset)


def _identifier(request: Request, feature: MultiModalFeatureSpec) -> str:
    """A medium's identifier without the adapter's name, which vLLM adds where the adapter changes its embedding."""
    name = request.lora_request.lora_name if request.lora_request is not None else ""
    is_adapted = feature.mm_hash is not None and feature.identifier == f"{name}:{feature.mm_hash}"
    return f"adapted:{feature.mm_hash}" if is_adapted else feature.identifier


def prompts_of(config: VllmConfig) -> Prompts:
    """Return the `Prompts` of this process's engine, which hear of the adapters that it loads."""
    prompts = Prompts(media_are_identified(config), adapted_modules(config), media_options(config))
    tell_of_loads(prompts)
    return prompts


class _WithoutEmbeddings:
    """A request as the block hash sees it, but for the embeddings: they are digested token by token."""

    prompt_embeds = None

    def __init__(self, request: Request) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _with_embeddings(request: Request, embeddings: torch.Tensor, num_tokens: int) -> bytes:
    """An id and a digest of its embedding for each token; zeros for the digest of a token that has none."""
    rows = np.ascontiguousarray(embeddings.contiguous().view(torch.uint8).numpy())
    are_ids = request.prompt_is_token_ids or [False] * len(rows)
    width = TOKEN_BYTES + EMBEDDING_BYTES
    named = np.zeros((num_tokens, width), np.uint8)
    ids = array("I", Prompt.of(request.all_token_ids[:num_tokens]).tokens)
    for at, row in enumerate(rows[:num_tokens]):
        if not are_ids[at]:
            ids[at] = EMBEDDED
            named[at, TOKEN_BYTES:] = np.frombuffer(blake2b(row, digest_size=EMBEDDING_BYTES).digest(), np.uint8)
    named[:, :TOKEN_BYTES] = np.frombuffer(ids, np.uint8).reshape(num_tokens, TOKEN_BYTES)
    return named.tobytes()
