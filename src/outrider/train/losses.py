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


def divergence(name: str, target: Tensor, draft: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """The loss of each row.

    Args:
        name: One of LOSSES.
        target: [num_rows, vocab_size] logits of the target; minus infinity is a probability of 0.
        draft: [num_rows, vocab_size] logits of what is trained.
        token_ids: [num_rows] the token that stands there; only "cross_entropy" looks at it.
        temperature: Of decoding; 0 is greedy.

    Returns:
        [num_rows], not negative; in nats, but for "total_variation", which is between 0 and 1.
    """
    scale = temperature or 1.0
    log_q = F.log_softmax(draft.float() / scale, -1)
    if name == "cross_entropy":
        return -log_q.gather(-1, token_ids[:, None])[:, 0]
    log_p = F.log_softmax(target.float() / scale, -1)
    if name == "forward_kl":
        return _kl(log_p, log_q)
    if name == "reverse_kl":
        return _kl(log_q, log_p)
    if name == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
        return 0.5 * (_kl(log_p, log_m) + _kl(log_q, log_m))
    assert name == "total_variation", name
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def overlap(target: Tensor, draft: Tensor, temperature: float) -> Tensor:
    """The chance that the token rule accepts a token drawn from the draft: sum of min(p, q) (Leviathan et al. 2023).

    Args:
        target, draft: [num_rows, vocab_size] logits.
        temperature: Of decoding; with 0 it is 1 where both have the same most likely token, and 0 elsewhere.

    Returns:
        [num_rows]
    """
    if temperature == 0.0:
        return (target.argmax(-1) == draft.argmax(-1)).float()
    p, q = (F.softmax(logits.float() / temperature, -1) for logits in (target, draft))
    return torch.minimum(p, q).sum(-1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each row; a token that p never writes counts nothing."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
