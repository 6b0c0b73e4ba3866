"""Candidate settings of a tuning: methods, lengths and trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.llm import LLM
from outrider.measure.decoding_config import DecodingConfig, parse_ways

#: Ways that are tried unless others are asked for. Those with a draft model need one.
USUAL = (
    "draft_model:2",
    "draft_model:3",
    "draft_model:4",
    "draft_model:6",
    "draft_model:8",
    "draft_model:best_first:8",
    "ngram:5",
    "suffix:8",
    "suffix:16",
    "suffix-tree:16",
    "token_recycling:10",
    "auto",
)


def candidates(llm: LLM, names: Sequence[str], draft_model: str | None) -> list[DecodingConfig]:
    """The ways to try, plain decoding first.

    Args:
        llm: The target.
        names: As in the benchmark; empty takes the usual ones. "auto" chooses from the draft model and from `suffix`.
        draft_model: For the ways that need one and name none; None where there is none.

    Raises:
        InvalidParameterError: A way is unknown, or needs a draft model.
    """
    chosen = names or [name for name in USUAL if draft_model is not None or not name.startswith("draft_model")]
    return [_resolved(llm, way) for way in parse_ways(chosen, draft_model)]


def _resolved(llm: LLM, way: DecodingConfig) -> DecodingConfig:
    return replace(way, config=llm.resolve(way.config))
