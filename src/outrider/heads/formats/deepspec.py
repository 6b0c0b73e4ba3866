"""The format of DeepSpec's DSpark and DFlash heads, and what formats of sequential block drafters share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.block_networks import (
    BlockHeadConfig,
    BlockHeadNetwork,
    JudgeInput,
    MarkovKind,
    MarkovShape,
)
from outrider.heads.formats.folder import Format, read_flag, read_layer_ids, read_layers, refused, widths
from outrider.heads.formats.zlab import read_block_size, read_mask_token, read_reaches

# --- The format of DeepSpec (deepseek-ai): one configuration of Qwen3, with the fields of the head at its top.
#
# `target_layer_ids` name layers whose *outputs* are read, counted from 0, and -1 is what the embeddings leave. The last
# token of the text drafts, too, so that a block drafts `block_size` tokens. Files bring copies of the target's embeddings
# and output layer. A head without the two small heads of DSpark is one of DFlash, and is called so.


_RANK, _KIND = "markov_rank", "markov_head_type"
_JUDGED, _JUDGED_WITH_TOKEN = "enable_confidence_head", "confidence_head_with_markov"


def _read(folder: str, mapping: Mapping[str, Any]) -> BlockHeadConfig:
    kind = str(mapping.get("model_type"))
    if kind != "qwen3":
        raise refused(folder, "model_type", kind, "heads with layers of Qwen3 are read", "Use such a head.")
    layers = read_layers(folder, mapping, "qwen3")
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
    )


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
