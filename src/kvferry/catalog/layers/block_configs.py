"""Layers of which each has a description of its own (`block_configs`): how many query heads share a key, or that there
is no attention; and how large its MLP is."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.catalog.config.fields import Fields

FIELD = "block_configs"
_KNOWN = {"attention": {"n_heads_in_group", "no_op"}, "ffn": {"ffn_mult", "intermediate_size", "no_op"}}
_MULTIPLE_OF = 256


def attention_words(fields: Fields) -> tuple[str, ...]:
    """The word of each layer; none where the config does not describe them one by one."""
    return tuple(
        "no_attention" if own.flag("no_op", False) else "full_attention" for own in _parts(fields, "attention")
    )


def key_heads(fields: Fields) -> Iterator[int]:
    """How many heads each layer's keys and values have; 0 without attention."""
    for own in _parts(fields, "attention"):
        if own.flag("no_op", False):
            yield 0
        else:
            heads = fields.number("num_attention_heads")
            yield fields.quotient(heads, own.number("n_heads_in_group"), "the number of query heads per key head")


def mlp_sizes(fields: Fields) -> tuple[int, ...]:
    """The intermediate size of each layer's MLP; 0 without one."""
    return tuple(_size(fields, own) for own in _parts(fields, "ffn"))


def _size(fields: Fields, own: Fields) -> int:
    if own.flag("no_op", False):
        return 0
    if own.has("intermediate_size"):
        return own.number("intermediate_size")
    times = own.raw("ffn_mult")
    if isinstance(times, bool) or not isinstance(times, int | float) or not 0 < times < 1000:
        raise own.wrong("ffn_mult", times, "a number above 0")
    # As vLLM 0.32 rounds it.
    return -(-int(2 * times * fields.number("hidden_size") / 3) // _MULTIPLE_OF) * _MULTIPLE_OF


def _parts(fields: Fields, name: str) -> Iterator[Fields]:
    """The objects of one name of all layers, in which nothing unknown may be said."""
    for own in fields.inners(FIELD):
        part = own.inner(name)
        for key, value in part.values.items():
            if key not in _KNOWN[name] and value not in (None, False):
                raise part.wrong(key, value, "nothing: the catalog does not know what a layer keeps then")
        yield part
