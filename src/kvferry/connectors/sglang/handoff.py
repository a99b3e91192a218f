"""What a prefill hands to a decode beside the cache: the first token, in the rows of SGLang's own buffers."""

from __future__ import annotations

from typing import Any

from kvferry import FirstToken
from kvferry.errors import RequestError


def num_logprobs_wanted(request: Any, buffers: Any) -> int:
    """How many log-probabilities the first token has to come with: its own, and those of the likeliest tokens. Raises
    RequestError for more of these than a row has places: SGLang's prefill would end when it fills the row."""
    if not request.return_logprob:
        return 0
    wanted, most = int(request.logprob.top_logprobs_num), int(buffers.output_top_logprobs_val.shape[1])
    if wanted > most:
        raise RequestError(
            "so many log-probabilities of a token do not go from prefill to decode",
            found=f"top_logprobs_num {wanted}",
            expected=f"at most {most}",
        )
    return 1 + wanted


def num_logprobs_of(first: FirstToken) -> int:
    """How many it comes with."""
    return 0 if first.logprob is None else 1 + len(first.top_logprobs)


def read(buffers: Any, row: int, num_logprobs: int) -> FirstToken:
    """What SGLang has put into a row for a request whose forward has ended, and that wants so many of them."""
    token_id = int(buffers.output_ids[row, 0])
    if not num_logprobs:
        return FirstToken(token_id)
    count = num_logprobs - 1
    ids = buffers.output_top_logprobs_idx[row, :count].tolist()
    logprobs = buffers.output_top_logprobs_val[row, :count].tolist()
    top = tuple(zip(ids, logprobs, strict=True))
    return FirstToken(token_id, float(buffers.output_token_logprobs_val[row, 0]), top)


def write(buffers: Any, row: int, first: FirstToken, room: int) -> None:
    """Fill a decode's row as a prefill of SGLang would. The room comes last: with it the row is complete.

    Raises RuntimeError, ValueError or OverflowError for a number that has no place there.
    """
    buffers.output_ids[row, 0] = first.token_id
    buffers.cached_tokens[row] = 0
    buffers.output_token_logprobs_idx[row, 0] = first.token_id
    buffers.output_token_logprobs_val[row, 0] = first.logprob or 0.0
    buffers.output_top_logprobs_idx[row] = buffers.output_top_logprobs_val[row] = 0
    most = buffers.output_top_logprobs_idx.shape[1]
    for place, (token_id, logprob) in enumerate(first.top_logprobs[:most]):
        buffers.output_top_logprobs_idx[row, place] = token_id
        buffers.output_top_logprobs_val[row, place] = logprob
    buffers.bootstrap_room[row, 0] = room
