"""What a request will cost, from the bytes of its body: pure.

The router has no tokenizer. A token of text is about four bytes; token ids are counted. That is wrong by some tens of
per cent for single requests, and right enough to say which of two instances has more to do.
"""

from __future__ import annotations

import hashlib
import re

from kvferry.router.policy.records import RequestCost
from kvferry.router.request.client_request import NULL, ClientRequest
from kvferry.router.request.lenient_json import Value, decoded

BYTES_PER_TOKEN = 4
# A prompt has one prefix, with a name, for every so many bytes.
PREFIX_BYTES = 1024
MAX_PREFIXES = 64
# The length of an answer for which the client gives none: most answers end by themselves before.
DEFAULT_NEW_TOKENS = 256
# More than any model writes. Clients may ask for a number with hundreds of digits.
MAX_NEW_TOKENS = 1 << 20
# What an image, a sound or another file in a message counts, whatever it weighs: a URL that holds it, or a field that
# does. Embeddings in place of a prompt as well.
EMBEDDED = re.compile(rb'"data:[^"]{256,}"|"(?:data|[a-z]{1,16}_embeds)"\s*:\s*(?:\[\s*)?"[^"]{256,}"')
TOKENS_OF_EMBEDDED = 1024
# A header that Claude Code changes with each request, and that engines leave out of the prompt.
BILLING = re.compile(rb'"x-anthropic-billing-header[^"\\]*(?:\\.[^"\\]*)*"')
# As above, two runs of blanks have something between them: a body of blanks would take days.
TOKEN_IDS = re.compile(rb"\s*\[\s*(?:\[\s*)?-?\d")


def cost_of(request: ClientRequest) -> RequestCost:
    """The estimated cost of a request. Never raises: the request has been checked."""
    content, tools = _content(request), request.given("tools")
    model = _given(request, "model", str) or ""
    num_prefixes = min(len(content) // PREFIX_BYTES, MAX_PREFIXES)
    # Agents send more of tools than of anything else, and the same with each turn: templates put them first.
    prompt_tokens = _num_tokens(content) + len(tools) // BYTES_PER_TOKEN
    salt = model + (_given(request, "cache_salt", str) or "") + (hashlib.blake2b(tools).hexdigest() if tools else "")
    return RequestCost(
        prompt_tokens=prompt_tokens,
        new_tokens=_new_tokens(request),
        prefixes=_prefixes(content, num_prefixes, salt),
        prefix_tokens=prompt_tokens * PREFIX_BYTES // max(len(content), 1),
        model=model,
        is_divisible=not request.undivided_reason,
    )


def _content(request: ClientRequest) -> bytes:
    """What decides the prompt; embeddings with the name of their field, which says what they are."""
    dialect = request.dialect
    if content := request.given(dialect.content.field):
        return BILLING.sub(b'""', request.given(dialect.before)) + content
    return b'"%b":%b' % (dialect.or_else.encode(), request.given(dialect.or_else))


def _num_tokens(content: bytes) -> int:
    if TOKEN_IDS.match(content):
        return content.count(b",") + 1
    has_embedded = b'"data' in content or b'_embeds"' in content
    plain, num_embedded = EMBEDDED.subn(b"", content) if has_embedded else (content, 0)
    return max(len(plain) // BYTES_PER_TOKEN, 1) + num_embedded * TOKENS_OF_EMBEDDED


def _new_tokens(request: ClientRequest) -> int:
    return min(_tokens_of_sample(request) * _num_samples(request), MAX_NEW_TOKENS)


def _tokens_of_sample(request: ClientRequest) -> int:
    for field in reversed(request.dialect.lengths):
        if max_tokens := _given(request, field, int):
            return max_tokens
    return DEFAULT_NEW_TOKENS


def _num_samples(request: ClientRequest) -> int:
    # Where the API has no such field, nobody has checked it.
    return max(_given(request, "n", int) or 1, 1)


def _given(request: ClientRequest, field: str, kind: type[Value]) -> Value | None:
    return decoded(request.fields.get(field, NULL), kind)


def _prefixes(content: bytes, num: int, salt: str) -> tuple[int, ...]:
    """Each name covers everything before it; prompts of different models, salts or tools share none."""
    digest, names = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8), []
    for i in range(num):
        digest.update(content[i * PREFIX_BYTES : (i + 1) * PREFIX_BYTES])
        names.append(int.from_bytes(digest.digest(), "big"))
    return tuple(names)
