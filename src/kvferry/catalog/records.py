"""What the catalog is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.plan.description.model import CacheModel


@dataclass(frozen=True, slots=True)
class Options:
    """How the engine serves the model.

    `cache_dtype` is `auto` (the model's own dtype) or the name of a dtype such as `float8_e4m3fn` or the packed
    `fp8_ds_mla`; recurrent states keep theirs. `draft_layers` adds the caches of the model's own draft layers. With
    `assume_standard` fields that nobody knows, and that may change a cache, are taken for ones that do not.
    """

    cache_dtype: str
    draft_layers: bool
    assume_standard: bool = False


@dataclass(frozen=True, slots=True)
class FieldRead:
    """A field of the config that counted: its name (of nested objects with dots), its value, what it decides, and who
    says it: the config itself, its class in transformers, or a table of ours."""

    name: str
    value: object
    decides: tuple[str, ...]
    said_by: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One model: its name, what it keeps of a request, and how much it computes per token.

    `num_active_parameters` estimates the weights that one token of a prompt is multiplied with: all mixers and MLPs
    it passes, shared and chosen experts, and one matrix of vocabulary times hidden size (looking an embedding up
    multiplies nothing). Norms and biases are left out. `notes` says what the config left open and what was assumed,
    `fields` what was read of it.
    """

    name: str
    cache: CacheModel
    num_active_parameters: int
    notes: tuple[str, ...]
    fields: tuple[FieldRead, ...] = ()
