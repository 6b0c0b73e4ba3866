"""Losses between a draft's and a target's probabilities, as DistillSpec (Zhou et al. 2023) uses them.

All take raw logits and divide them by the temperature that the texts are written at, since acceptance is decided between
the probabilities of that temperature. With greedy decoding only the most likely token counts; the loss then compares the
probabilities of temperature 1, whose order is the same.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

LossName = Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "cross_entropy"]
LOSSES: tuple[str, ...] = get_args(LossName)
#: Those that are infinite where the target's probability is known to be 0, as outside its most likely tokens.
NEEDS_ALL_TOKENS = ("reverse_kl",)


def divergence(
    name: str, target: Tensor, draft: Tensor, token_ids: Tensor, temperature: float, tokens: Tensor | None = None
) -> Tensor:
    """The loss of each row.

    A draft that knows some of the tokens only is compared with the target's probabilities of these, which are made to add
    up to 1. "total_variation" takes them as they are, since what the draft cannot write is lost to it.

    Args:
        name: One of LOSSES.
        target: [num_rows, vocab_size] logits of the target; minus infinity is a probability of 0.
        draft: [num_rows, draft_vocab_size] logits of what is trained.
        token_ids: [num_rows] the token that stands there; only "cross_entropy" looks at it, and counts 0 where the draft
            does not know it.
        temperature: Of decoding; 0 is greedy.
        tokens: [draft_vocab_size] the target's token for each of the draft's, in ascending order; None where they are the
            same.

    Returns:
        [num_rows], not negative; in nats, but for "total_variation", which is between 0 and 1.
    """
    scale = temperature or 1.0
    log_q = F.log_softmax(draft.float() / scale, -1)
    if name == "cross_entropy":
        return _cross_entropy(log_q, token_ids, tokens)
    if name == "total_variation":
        p, q = _law(target, scale, tokens), log_q.exp()
        return 0.5 * ((p - q).abs().sum(-1) + _lost(p, tokens))
    log_p = F.log_softmax((target if tokens is None else target[:, tokens]).float() / scale, -1)
    if name == "forward_kl":
        return _kl(log_p, log_q)
    if name == "reverse_kl":
        return _kl(log_q, log_p)
    assert name == "jsd", name
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * (_kl(log_p, log_m) + _kl(log_q, log_m))


def overlap(target: Tensor, draft: Tensor, temperature: float, tokens: Tensor | None = None) -> Tensor:
    """The chance that the token rule accepts a token drawn from the draft: sum of min(p, q) (Leviathan et al. 2023).

    Args:
        target: [num_rows, vocab_size] logits.
        draft: [num_rows, draft_vocab_size] logits.
        temperature: Of decoding; with 0 it is 1 where both have the same most likely token, and 0 elsewhere.
        tokens: As in `divergence`.

    Returns:
        [num_rows]
    """
    if temperature == 0.0:
        likeliest = draft.argmax(-1)
        return (target.argmax(-1) == (likeliest if tokens is None else tokens[likeliest])).float()
    return torch.minimum(_law(target, temperature, tokens), F.softmax(draft.float() / temperature, -1)).sum(-1)


def _law(target: Tensor, temperature: float, tokens: Tensor | None) -> Tensor:
    """The target's probabilities of the tokens that the draft knows."""
    law = F.softmax(target.float() / temperature, -1)
    return law if tokens is None else law[:, tokens]


def _lost(p: Tensor, tokens: Tensor | None) -> Tensor | float:
    """What the target gives to tokens that the draft does not know."""
    return 0.0 if tokens is None else 1.0 - p.sum(-1)


def _cross_entropy(log_q: Tensor, token_ids: Tensor, tokens: Tensor | None) -> Tensor:
    if tokens is None:
        return -log_q.gather(-1, token_ids[:, None])[:, 0]
    columns = torch.searchsorted(tokens, token_ids).clamp(max=len(tokens) - 1)
    known = tokens[columns] == token_ids
    return torch.where(known, -log_q.gather(-1, columns[:, None])[:, 0], 0.0)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each row; a token that p never writes counts nothing."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
