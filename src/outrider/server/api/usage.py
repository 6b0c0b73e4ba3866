"""Reports the cost of a response, and what speculation did for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outrider.params import CompletionOutput
from outrider.propose.speculation import SpeculationConfig
from outrider.stats import FORCED, RequestStats


def usage(num_prompt_tokens: int, outputs: Iterable[CompletionOutput], *, predicted: bool) -> dict[str, Any]:
    """OpenAI's usage object. Drafts count in it only where the caller predicted the text.

    Args:
        num_prompt_tokens: Of all prompts.
        outputs: All samples.
        predicted: Whether the request brought a prediction.
    """
    found = tuple(outputs)
    num_tokens, stats = sum(len(output.token_ids) for output in found), total(found)
    answer: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": min(stats.num_cached_tokens, num_prompt_tokens)},
    }
    if predicted:  # and what a structure forces is predicted by nobody
        drafted = stats.num_draft_tokens - stats.drafted_by_method.get(FORCED, 0)
        accepted = stats.num_accepted_tokens - stats.accepted_by_method.get(FORCED, 0)
        answer["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return answer


def speculation(config: SpeculationConfig, outputs: Iterable[CompletionOutput]) -> dict[str, Any]:
    """What was drafted for a response and what stood: by position of a draft, by method, and inside stages."""
    stats = total(outputs)
    return {
        "method": config.name,
        "target_passes": stats.num_target_passes,
        "drafts": stats.num_drafts,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "drafted_per_position": stats.drafted_per_position,
        "accepted_per_position": stats.accepted_per_position,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "by_method": {
            name: {"draft_tokens": drafted, "accepted_tokens": stats.accepted_by_method[name]}
            for name, drafted in stats.drafted_by_method.items()
        },
        "stages": {
            name: {
                "passes": passes,
                "draft_tokens": stats.drafted_by_stage[name],
                "accepted_tokens": stats.accepted_by_stage[name],
            }
            for name, passes in stats.passes_by_stage.items()
        },
        "proposer_faults": stats.num_proposer_faults,
    }


def total(outputs: Iterable[CompletionOutput]) -> RequestStats:
    """The counts of several samples together."""
    found = RequestStats()
    for output in outputs:
        found.add(output.stats)
    return found
