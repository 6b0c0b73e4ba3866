"""The format of DeepSpec's DSpark and DFlash heads, and what formats of sequential block drafters share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.block_networks import (
    BlockHeadConfig,
    BlockHeadNetwork,
    GemmaShape,
    JudgeInput,
    MarkovKind,
    MarkovShape,
)
from outrider.heads.formats.folder import (
    FULL,
    Format,
    described,
    read_flag,
    read_layer_ids,
    read_layers,
    refused,
    widths,
)
from outrider.heads.formats.zlab import read_block_size, read_mask_token, read_reaches
from outrider.loading.hf_modules import key_heads

# --- The format of DeepSpec (deepseek-ai): one configuration of Qwen3 or Gemma 4, with the fields of the head at its top.
#
# `target_layer_ids` name layers whose *outputs* are read, counted from 0, and -1 is what the embeddings leave. The last
# token of the text drafts, too, so that a block drafts `block_size` tokens. Files bring copies of the target's embeddings
# and output layer. A head without the two small heads of DSpark is one of DFlash, and is called so.


_RANK, _KIND = "markov_rank", "markov_head_type"
_JUDGED, _JUDGED_WITH_TOKEN = "enable_confidence_head", "confidence_head_with_markov"


def _read(folder: str, mapping: Mapping[str, Any]) -> BlockHeadConfig:
    kind = str(mapping.get("model_type"))
    if kind != "qwen3" and kind not in _GEMMA:
        raise refused(folder, "model_type", kind, "heads with layers of Qwen3 or Gemma 4 are read", "Use such a head.")
    layers, gemma = _read_gemma(folder, mapping, kind) if kind in _GEMMA else (read_layers(folder, mapping, kind), None)
    ids = read_layer_ids(folder, mapping.get("target_layer_ids"), "target_layer_ids", least=-1)
    markov, judge = read_sequential_heads(folder, mapping, rank=0, judged=False)
    return BlockHeadConfig(
        method=method_of(markov, judge),
        **widths(mapping, layers, layers.vocab_size),
        aux_layers=tuple(i + 1 for i in ids),
        block_size=read_block_size(folder, mapping.get("block_size")),
        mask_token_id=read_mask_token(folder, mapping.get("mask_token_id"), layers.vocab_size),
        reaches=read_reaches(folder, layers, causal=False, causal_in_windows=False),
        from_anchor=True,
        markov=markov,
        judge=judge,
        gemma=gemma,
    )


# Layers of Gemma 4 are those without a window, whatever the target's are. Their sizes, activation and rotary factors are
# said here as layers of Qwen3 have them, which norm their queries and keys as well.


_GEMMA = ("gemma4_text", "gemma4_unified_text")
_SAME = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("rms_norm_eps", "max_position_embeddings", "attention_bias"),
)
_CAP = "final_logit_softcapping"


def _read_gemma(folder: str, mapping: Mapping[str, Any], kind: str) -> tuple[Any, GemmaShape]:
    """The sizes of layers of Gemma 4, and what they have besides."""
    gemma = described(folder, mapping, kind)
    kinds = list(gemma.layer_types)
    if set(kinds) != {FULL}:
        raise refused(folder, "layer_types", kinds, "such heads have layers without a window", "Use another head.")
    for name in ("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp"):
        if found := getattr(gemma, name, None):
            raise refused(folder, name, found, "this version does not compute it", "Use another head.")
    cap = gemma.final_logit_softcapping
    if cap is not None and not cap > 0:
        raise refused(folder, _CAP, cap, "no bound", "Write the number that the head was trained with, or null.")
    rotary = (gemma.rope_parameters or {}).get(FULL)
    if not isinstance(rotary, Mapping):
        problem = f"it says nothing of {FULL}"
        raise refused(folder, "rope_parameters", gemma.rope_parameters, problem, "Write those that it was trained with.")
    heads = key_heads(gemma)[0]
    sizes = {
        **{name: getattr(gemma, name) for name in _SAME},
        "num_key_value_heads": heads.num,
        "head_dim": heads.width,
        "hidden_act": gemma.hidden_activation,
        "rope_parameters": dict(rotary),
    }
    return read_layers(folder, sizes, "qwen3"), GemmaShape(bool(gemma.attention_k_eq_v), cap)


DEEPSPEC = Format(
    name="DeepSpec",
    family="deepspec",
    method="dspark",
    network=BlockHeadNetwork,
    prefixes={},
    fits=lambda mapping: _RANK in mapping and "target_layer_ids" in mapping and "speculators_model_type" not in mapping,
    read=_read,
)


# --- The small heads of DSpark, as several formats describe them.


def method_of(markov: MarkovShape | None, judge: JudgeInput | None) -> str:
    """The method of a head that drafts blocks, by the small heads that it has."""
    return "dflash" if markov is None and judge is None else "dspark"


def read_sequential_heads(
    folder: str, mapping: Mapping[str, Any], *, rank: int, judged: bool
) -> tuple[MarkovShape | None, JudgeInput | None]:
    """The sequential head and the input of the confidence head. Where a file does not say it, the first has this rank, and
    the second is there as `judged` says."""
    found = mapping.get(_RANK, rank)
    if type(found) is not int or found < 0:
        raise refused(folder, _RANK, found, "no rank", "Write that of markov_w1, or 0 where there is none.")
    kind = str(mapping.get(_KIND, MarkovKind.VANILLA)).lower()
    if kind not in set(MarkovKind):
        problem = "no such head is known"
        raise refused(folder, _KIND, kind, problem, f"Use a head with one of {', '.join(MarkovKind)}.")
    markov = MarkovShape(MarkovKind(kind), found) if found else None
    if not read_flag(folder, mapping, _JUDGED, judged):
        return markov, None
    with_token = read_flag(folder, mapping, _JUDGED_WITH_TOKEN, judged)
    if with_token and markov is None:
        problem = "it reads the token before a place by markov_w1, and markov_rank is 0"
        raise refused(folder, _JUDGED_WITH_TOKEN, with_token, problem, "Use the head as it was published.")
    return markov, JudgeInput.STATE_AND_TOKEN if with_token else JudgeInput.STATE


def sequential_fields(config: BlockHeadConfig) -> dict[str, Any]:
    """The fields that describe them."""
    markov = {} if config.markov is None else {_KIND: str(config.markov.kind)}
    return {
        _RANK: 0 if config.markov is None else config.markov.rank,
        **markov,
        _JUDGED: config.judge is not None,
        _JUDGED_WITH_TOKEN: config.judge is JudgeInput.STATE_AND_TOKEN,
    }
