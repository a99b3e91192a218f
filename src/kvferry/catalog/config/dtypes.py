"""The element types of a cache: names as PyTorch spells them, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.catalog.config.fields import Fields
from kvferry.catalog.records import Options
from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Item:
    """One element of a state."""

    dtype: str
    num_bytes: int


FLOAT32 = Item("float32", 4)
FLOAT8 = Item("float8_e4m3fn", 1)

PACKED_ROW = Item("uint8", 1)
PACKED_LATENT = "fp8_ds_mla"
"""vLLM's name for latent rows of 8-bit floats with their scales and the 16-bit rotary part in one row of bytes."""

_MODEL = {
    "float32": FLOAT32,
    "float": FLOAT32,
    "float16": Item("float16", 2),
    "half": Item("float16", 2),
    "bfloat16": Item("bfloat16", 2),
}
_CACHE = _MODEL | {
    "float8_e4m3fn": FLOAT8,
    "float8_e5m2": Item("float8_e5m2", 1),
    "fp8": FLOAT8,
    "fp8_e4m3": FLOAT8,
    "fp8_e5m2": Item("float8_e5m2", 1),
    "int8": Item("int8", 1),
    PACKED_LATENT: PACKED_ROW,
}


def model_item(fields: Fields) -> Item:
    """The model's own element; bfloat16 where the config does not say."""
    return _named(fields, "bfloat16", "dtype", "torch_dtype")


def recurrent_item(fields: Fields) -> Item:
    """The element of a recurrent state: as the config says, otherwise the model's own (as vLLM 0.32 chooses)."""
    if fields.has("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        return _named(fields, "", "mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    return model_item(fields)


def cache_item(fields: Fields, options: Options) -> Item:
    """The element of keys, values and latents."""
    if options.cache_dtype == "auto":
        return model_item(fields)
    if options.cache_dtype not in _CACHE:
        raise ConfigurationError(
            "unknown dtype of the cache",
            found=options.cache_dtype,
            expected="auto or " + ", ".join(_CACHE),
            hint="auto takes the model's own dtype",
        )
    return _CACHE[options.cache_dtype]


def _named(fields: Fields, absent: str, *names: str) -> Item:
    word = (fields.word(*names) or absent).removeprefix("torch.")
    if word not in _MODEL:
        raise fields.wrong(" or ".join(names), word, ", ".join(_MODEL))
    return _MODEL[word]
