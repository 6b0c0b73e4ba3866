"""Acceptance rules on chains as pure functions of probabilities; no random numbers, no sequences.

Shapes: b drafts of k tokens each over a vocabulary of v. target_probs [b, k + 1, v] holds the target's probabilities at
every draft row and after the last; draft_probs [b, k, v] those that each draft token was really drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import sampling


def token_acceptance(target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor) -> Tensor:
    """Rule R1 (Leviathan et al. 2023; Chen et al. 2023): the chance [b, k] that each draft token stands.

    The accepted length is the number of leading coins that fall True.

    Args:
        target_probs: [b, k + 1, v]
        draft_probs: [b, k, v]
        draft_token_ids: [b, k]
    """
    return _ratios(target_probs, draft_probs, draft_token_ids).clamp(max=1.0)


def block_acceptance(target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rule R3, block verification (Sun et al. 2024).

    The accepted length is the *largest* i whose coin falls True, 0 if none does.

    Args:
        target_probs: [b, k + 1, v]
        draft_probs: [b, k, v]
        draft_token_ids: [b, k]

    Returns:
        The chance of each coin [b, k], and the weights [b, k + 1] by which `residual` scales the target's
        probabilities when the accepted length is i.
    """
    ratios = _ratios(target_probs, draft_probs, draft_token_ids)
    weights = [torch.ones_like(ratios[:, 0])]
    for i in range(ratios.shape[1]):
        weights.append((weights[-1] * ratios[:, i]).clamp(max=1.0))
    weight = torch.stack(weights, 1)  # [b, k + 1]
    # Mass that the target still has to place after stopping at i; only rows 1 to k - 1 have a draft token behind them.
    inner = weight[:, 1:-1]
    excess = owed_mass(target_probs[:, 1:-1], draft_probs[:, 1:], inner)
    denominator = excess + (1.0 - inner)  # in this order: a coin is exactly 1 where the weight is, and never above
    coins = torch.where(denominator > 0, excess / denominator.clamp(min=torch.finfo(ratios.dtype).tiny), 1.0)
    return torch.cat([coins, weight[:, -1:]], 1), weight


def residual(target_row: Tensor, draft_row: Tensor, weight: Tensor) -> Tensor:
    """What the target still owes after a rejection: (weight * p - q)+ normalised, [b, v]; p itself where that is empty.

    Args:
        target_row: [b, v] at the row after the last accepted token.
        draft_row: [b, v] there; zeros after full acceptance.
        weight: [b] 1 under R1, the prefix weight of the accepted length under R3.
    """
    if sampling.usable(target_row, draft_row):
        return sampling.owed_probs(target_row[:, None], draft_row[:, None], weight[:, None]).squeeze(1)
    owed = (weight[:, None] * target_row - draft_row).clamp(min=0.0)
    total = owed.sum(-1, keepdim=True)
    return torch.where(total > 0, owed / total.clamp(min=torch.finfo(owed.dtype).tiny), target_row)


def owed_mass(target_row: Tensor, draft_row: Tensor, weight: Tensor) -> Tensor:
    """Sums [b, n] of (weight * p - q)+ over rows of probabilities [b, n, v], weights [b, n]."""
    if sampling.usable(target_row, draft_row):
        return sampling.owed_mass(target_row, draft_row, weight)
    return (weight[..., None] * target_row - draft_row).clamp(min=0.0).sum(-1)


def _ratios(target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor) -> Tensor:
    """p(x) / q(x) of each draft token [b, k]. A token of q = 0 cannot have been drawn from q and gets 0."""
    index = draft_token_ids[..., None]
    p = target_probs[:, :-1].gather(-1, index).squeeze(-1)
    q = draft_probs.gather(-1, index).squeeze(-1)
    largest = torch.finfo(q.dtype).max  # instead of infinity, which times a weight of 0 would not be 0
    return torch.where(q > 0, (p / q).clamp(max=largest), 0.0)
