"""Fields that no reader has asked for: they mean nothing to a cache, or they are a reason to doubt the figures.

Decided by what a field's name means, never by the model that it belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kvferry.catalog.config.fields import Fields, short
from kvferry.catalog.records import Options
from kvferry.errors import ConfigurationError

MAX_NAMED = 6
"""More fields than that are not listed in one sentence."""


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


NO_INFLUENCE: Mapping[str, re.Pattern[str]] = {
    "whose model it is, and who wrote the file": _any_of(
        "_.*|architectures|auto_map|name_or_path|transformers_version"
    ),
    "which tokens there are": _any_of(".*_token(_id|_ids|_index|_idx)?"),
    "how answers are sampled and returned": _any_of(
        "output_.*|return_dict.*|use_cache|keys_to_ignore_at_inference|num_beam_groups"
    ),
    "how weights are stored, tied and looked up": _any_of(
        "(torch_|expert_)?dtype|quant.*|tie_.*|.*_tied|use_embedding_sharing|num_mem_blocks|(hidden|vocab)_size_per_layer_input"
    ),
    "which experts a token is given to": _any_of(
        "n_group|topk_group|num_expert_group|topk_method|scoring_func|use_grouped_topk|num_hash_layers"
    ),
    "how numbers are normed, scaled and bounded": _any_of(
        ".*norm(s|alize|alization)?(_.*)?|.*eps(ilon)?|.*bias(es)?|.*softcap.*|.*_act(_fn|_func)?|.*activation.*",
        "lm_head.*|(attention|key|ssm)_(in_|out_)?multipliers?|query_pre_attn_scalar|attention_(value_)?scal(e|ing)",
        "attn_(scale|temperature_.*)|scale_attn_.*|reorder_and_upcast_attn|(full|linear)_attn_(alpha|beta)_factor|linear_a_log_.*|.*eigval",
        "(mamba_|linear_)?(dt|time_step)_(min|max|init.*|floor|limit|rank)",
    ),
    "how it was trained": _any_of(
        ".*drop(out)?(_.*)?|.*[a-z]pdrop|.*_init(ializer)?(_.*)?|init.*|.*_std|.*_loss(_.*)?|ignore_index"
    ),
    # hc: hyper-connections
    "what a layer adds to": _any_of(
        ".*residual.*|hc_.*|attn_res_.*|(use_)?parallel_attn|use_parallel_(block|embedding)|use_(head_wise_)?(attn|attention)_gate"
    ),
    "where tokens lie": _any_of(
        "rope_.*|(use_|no_)?m?rope(_layers?|_layer_interval)?|.*(rotary|_theta).*|.*rope_interleaved?"
    ),
    "how it is computed": _any_of(
        ".*attn_implementation.*|cache_implementation|(mamba_)?chunk_size(_feed_forward)?|use_.*_kernels?|.*_in_fp32",
        "use_bidirectional_attention|(router|gate|moe_router)_dtype|block_(multiple_of|auto_adjust_ff_dim|use_.*|dim)",
    ),
    "what encodes images, sounds and other inputs": _any_of(
        "mm_.*|img_.*|num_query_tokens|insert_layer_id|vit_.*|vq_.*|qformer_.*|spatial_.*",
        ".*(vision|visual|image|video|audio|speech|sound|pixel|patch|projector|multimodal|tower).*",
    ),
}
"""What these names say is certain, whatever else they are made of."""

LIKELY_NO_INFLUENCE: Mapping[str, re.Pattern[str]] = {
    "whose model it is": _any_of(
        "model_type|.*_version|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params",
        "classifier_.*|summary_.*",
    ),
    "which tokens there are": _any_of("tokenizer_.*|.*_vocab_.*|vocab_.*|sep_.*|prefix"),
    "how answers are sampled": _any_of(
        ".*_penalty|.*beams?|(bad|begin|forced|suppress)_.*|do_sample|early_stopping|temperature|typical_p",
        "top_[kp]|(max|min)_length|num_return_sequences|(encoder_)?no_repeat_ngram_size|remove_invalid_values",
        "num_logits_to_keep",
    ),
    "how weights are stored": _any_of(".*quant.*|torchscript|use_bfloat16|pruned_.*|pretraining_tp|ep_size"),
    "how it was trained": _any_of(".*aux_.*|gradient_.*|.*jitter.*|seed"),
    "where tokens lie": _any_of(
        ".*_rope|.*yarn.*|(.*_)?nope(_.*)?|(use_)?alibi.*|.*position(s|al)?(_.*)?|n_ctx|model_max_length",
        "(max_|original_max_|train_)?(seq|sequence|ctx|context)(_.*)?",
    ),
    "how numbers are scaled": _any_of(
        ".*_?rms.*|.*scal(e|es|ing|ar).*|.*multipliers?|.*clip.*|.*_factor|.*_limits?(_.*)?|.*logits?(_.*)?",
        ".*_(alpha|beta|gamma)|.*temperature.*|.*overlap.*|(use_)?(.*_)?gate(_.*)?",
    ),
    "how it is computed": _any_of("use_flash.*|.*fused.*|.*_backend|use_grouped.*|use_associative_scan"),
}
"""What these say counts only for names without a word of caches."""

# With the lists that have an entry for each layer, and nested objects: what may change a cache.
_OF_CACHES = re.compile(
    "compress|window|lora|head|kv|cache|layer|state|shar(e|ing)|attn|attention|key|value|query|sliding|swa|ssm|mamba|conv|"
    "linear|recurr|hybrid|index|chunk|latent|block|group|pattern|interval|period|stride|sink|memory|depth|meta_tok"
)
# An MLP keeps nothing; what is not known of it makes the estimate of active parameters wrong.
_OF_MLPS = re.compile("expert|moe|mlp|ffn|ff_dim|dense_layers|dense_replace|feed_forward|router|routing")
_NOT_OF_MLPS = re.compile("attn|attention|head|kv|cache|window|state|index(er)?_|compress")


OF_DRAFTS = re.compile("mtp|nextn|draft|eagle|medusa")


def check_unused(read: Sequence[Fields], num_layers: int, options: Options) -> tuple[str, ...]:
    """What is to be said of fields that nobody has `read`.

    Raises ConfigurationError for one that looks as if it changed the cache, unless `options` say to take the cache for
    one without it.
    """
    unused = (one for fields in read for one in fields.unused())
    unknown = [(name, value) for name, value in unused if _is_on(value) and not _means_nothing(name)]
    if not options.draft_layers:
        unknown = [(name, value) for name, value in unknown if not OF_DRAFTS.search(name)]
    doubtful = [(name, value) for name, value in unknown if _may_change_cache(name, value, num_layers)]
    if doubtful and not options.assume_standard:
        (name, value), *others = doubtful
        raise ConfigurationError(
            f"{read[0].source}: field {name} may change what a cache holds, and the catalog does not know it",
            found=_listed([f"{name}: {short(value)}", *(other for other, _ in others)]),
            hint="--assume-standard plans as if it were not there; the figures may then be wrong",
        )
    if not unknown:
        return ()
    return (f"nobody has read {_listed(name for name, _ in unknown)}: figures may be wrong",)


def _is_on(value: object) -> bool:
    """Nothing, no, 0 and an empty list say that a thing is not there."""
    return value not in (None, False, 0, "", "auto") and value != [] and value != {}


def _means_nothing(path: str) -> bool:
    """Whether a field, or an object around it, has no influence on a cache."""
    return any(_matches(part, NO_INFLUENCE) or _is_likely(part) for part in path.lower().split("."))


def _is_likely(name: str) -> bool:
    return not _OF_CACHES.search(name) and _matches(name, LIKELY_NO_INFLUENCE)


def _matches(name: str, meanings: Mapping[str, re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(name) for pattern in meanings.values())


def _may_change_cache(path: str, value: object, num_layers: int) -> bool:
    name = path.lower()
    if _OF_MLPS.search(name) and not _NOT_OF_MLPS.search(name):
        return False
    is_per_layer = isinstance(value, list) and len(value) >= num_layers > 1
    return is_per_layer or isinstance(value, Mapping) or bool(_OF_CACHES.search(name))


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more
