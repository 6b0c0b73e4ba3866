"""The losses of a training: how far a draft's probabilities are from the target's, depth by depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.lab.train.batches import Batch
from outrider.lab.train.target import LogitsOf

# --- Losses between a draft's and a target's probabilities, as DistillSpec (Zhou et al. 2023) uses them.
#
# All take raw logits and divide them by the temperature that the texts are written at, since acceptance is decided
# between the probabilities of that temperature. With greedy decoding only the most likely token counts; the loss then
# compares the probabilities of temperature 1, whose order is the same.


LossName = Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "cross_entropy"]
LOSSES: tuple[str, ...] = get_args(LossName)
#: Most logits whose losses are computed at once. A processor keeps so many in its cache, and a GPU needs more to be busy.
_PIECE = {"cpu": 1 << 19, "other": 1 << 26}
#: Those that are infinite where the target's probability is known to be 0, as outside its most likely tokens.
NEEDS_ALL_TOKENS = ("reverse_kl",)


class Law(NamedTuple):
    """What the target says of rows, for the tokens that a draft knows."""

    logits: Tensor  # [num_rows, draft_vocab_size] of these tokens; minus infinity is a probability of 0
    # [num_rows] logarithm of the sum of exponentials of all logits, divided by the temperature, and the target's most
    # likely token. None where the draft knows all tokens, or where nobody asks for what the others have.
    total: Tensor | None = None
    likeliest: Tensor | None = None

    def probabilities(self, scale: float) -> Tensor:
        """[num_rows, draft_vocab_size] of these tokens among all of the target's, at a temperature."""
        scaled = self.logits.float() / scale
        return scaled.softmax(-1) if self.total is None else (scaled - self.total[:, None]).exp()


def divergence(
    name: str, target: Law, draft: Tensor, token_ids: Tensor, temperature: float, tokens: Tensor | None = None
) -> Tensor:
    """The loss of each row.

    A draft that knows some of the tokens only is compared with the target's probabilities of these, which are made to add
    up to 1. "total_variation" takes them as they are, since what the draft cannot write is lost to it.

    Args:
        target: What the target says; with its totals for "total_variation".
        draft: [num_rows, draft_vocab_size] logits of what is trained.
        token_ids: [num_rows] the token that stands there; only "cross_entropy" looks at it, and counts 0 where the draft
            does not know it.
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
        p, q = target.probabilities(scale), log_q.exp()
        lost = 0.0 if tokens is None else 1.0 - p.sum(-1)  # what the target gives to tokens that the draft does not know
        return 0.5 * ((p - q).abs().sum(-1) + lost)
    log_p = F.log_softmax(target.logits.float() / scale, -1)
    if name == "forward_kl":
        return _kl(log_p, log_q)
    if name == "reverse_kl":
        return _kl(log_q, log_p)
    assert name == "jsd", name
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * (_kl(log_p, log_m) + _kl(log_q, log_m))


def in_pieces(logits: Tensor, losses_of: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """The losses of rows, computed with their gradients for a few rows at a time.

    A loss over a vocabulary makes half a dozen tensors of the logits' size. Whole ones go through memory again and again,
    and took more of a step than the products did; pieces stay in the processor's cache.

    Args:
        logits: [num_rows, draft_vocab_size]
        losses_of: The losses of some rows, given their logits and which rows they are.

    Returns:
        [num_rows]
    """
    found: Tensor = _InPieces.apply(logits, losses_of)  # type: ignore[no-untyped-call]
    return found


class _InPieces(torch.autograd.Function):
    """Holds the gradients of rows' losses from the moment at which these are computed."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, losses_of: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Compute both; see `in_pieces`."""
        size = max(1, _PIECE["cpu" if logits.device.type == "cpu" else "other"] // logits.shape[1])
        losses, gradients = logits.new_empty(len(logits), dtype=torch.float32), torch.empty_like(logits)
        for first in range(0, len(logits), size):
            rows = slice(first, first + size)
            piece = logits[rows].detach().requires_grad_()
            with torch.enable_grad():
                found = losses_of(piece, rows)
                (gradients[rows],) = torch.autograd.grad(found.sum(), piece)
            losses[rows] = found.detach()
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None]:
        """Weigh the gradients of the rows."""
        (gradients,) = ctx.saved_tensors
        return gradients * weights[:, None].to(gradients.dtype), None


def overlap(target: Law, draft: Tensor, temperature: float, tokens: Tensor | None = None) -> Tensor:
    """The chance that the token rule accepts a token drawn from the draft: sum of min(p, q) (Leviathan et al. 2023).

    Args:
        target: What the target says, with its totals and most likely tokens.
        draft: [num_rows, draft_vocab_size] logits.

    Returns:
        [num_rows]
    """
    if temperature == 0.0:
        drafted = draft.argmax(-1)
        likeliest = target.logits.argmax(-1) if target.likeliest is None else target.likeliest
        return (likeliest == (drafted if tokens is None else tokens[drafted])).float()
    return torch.minimum(target.probabilities(temperature), F.softmax(draft.float() / temperature, -1)).sum(-1)


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


# --- Draft tokens of several depths, compared with what the target says there, within a draft vocabulary.


#: The loss that looks at all depths of a draft together.
ACCEPTED_LENGTH = "accepted_length"
#: Keeps the logarithm finite where two laws have nothing in common.
_LEAST = 1e-6


#: All rows of a depth.
_ALL = slice(None)


class Depth(NamedTuple):
    """Draft tokens that stand equally far ahead."""

    logits: Tensor  # [n, draft_vocab_size] of what drafts
    rows: Tensor  # [num_texts, num_tokens] whether a draft is made from this row; n of them
    # Tokens by which the draft token is ahead of its row. What the target says of it stands ahead - 1 rows later.
    ahead: int


#: Rows of which the logits of all tokens are computed at once. Fewer rows take longer, since an output layer that is stored
#: in a few bits is unpacked for each product. These logits are then read so many rows at a time.
_ROWS, _READ = 1024, 64


class Said:
    """Holds what the target says of a batch.

    What is said of a large vocabulary fills gigabytes and takes most of the time of a step. So only the tokens that a draft
    knows are computed, unless somebody asks for more.

    Args:
        batch: The texts.
        logits: Those of some tokens or of all, in rows [num_texts * num_tokens]; row i of a text speaks of token i + 1.
        temperature: That the texts are written at.
        tokens: [draft_vocab_size] the target's token for each of the draft's; None where they are the same.
    """

    def __init__(self, batch: Batch, logits: LogitsOf, temperature: float, tokens: Tensor | None = None) -> None:
        self.batch, self.temperature, self.tokens = batch, temperature, tokens
        self._logits = logits

    def at(self, depth: Depth, rows: slice = _ALL) -> Law:
        """What the draft tokens of a depth are compared with, in some of its n rows, among the tokens that the draft
        knows."""
        return Law(_taken(self._known, depth, rows))

    def among_all(self, depth: Depth, rows: slice = _ALL) -> Law:
        """The same, among all of the target's tokens."""
        if self.tokens is None:
            return self.at(depth, rows)
        known, *others = (_taken(values, depth, rows) for values in (self._known, *self._among_all))
        return Law(known, *others)

    def overlap(self, depth: Depth) -> Tensor:
        """[n] the chance that the token rule accepts."""
        return overlap(self.among_all(depth), depth.logits, self.temperature, self.tokens)

    @cached_property
    def _known(self) -> Tensor:
        return self._logits(_ALL, self.tokens).reshape(*self.batch.token_ids.shape, -1)

    @cached_property
    def _among_all(self) -> tuple[Tensor, Tensor]:
        """[num_texts, num_tokens] each, as in `Law`; greedy decoding has the order of temperature 1. The logits of all
        tokens are there for a few rows at a time."""
        shape, scale = self.batch.token_ids.shape, self.temperature or 1.0
        totals, likeliest = list[Tensor](), list[Tensor]()
        for first in range(0, shape.numel(), _ROWS):
            for logits in torch.split(self._logits(slice(first, first + _ROWS), None), _READ):
                totals.append((logits.float() / scale).logsumexp(-1))
                likeliest.append(logits.argmax(-1))
        return torch.cat(totals).reshape(shape), torch.cat(likeliest).reshape(shape)


def _taken(values: Tensor, depth: Depth, rows: slice) -> Tensor:
    """Those of values [num_texts, num_tokens, ...] that speak of the draft tokens of a depth, in some of its n rows."""
    texts, places = (each[rows] for each in depth.rows.nonzero(as_tuple=True))
    return values[texts, (places + depth.ahead - 1).clamp(max=values.shape[1] - 1)]


def depth_loss(name: str, depths: Sequence[Depth], said: Said, decay: float) -> Tensor:
    """The loss of a draft."""
    if name == ACCEPTED_LENGTH:
        return _accepted_length(depths, said)
    total, weight = depths[0].logits.new_zeros((), dtype=torch.float32), 1.0
    for depth in depths:
        if len(depth.logits):
            total = total + weight * in_pieces(depth.logits, partial(_divergence, name, depth, said)).mean()
        weight *= decay
    return total


def _divergence(name: str, depth: Depth, said: Said, logits: Tensor, rows: slice) -> Tensor:
    """The losses of some rows of a depth."""
    law = said.among_all(depth, rows) if name == "total_variation" else said.at(depth, rows)
    tokens = shifted(said.batch.token_ids, depth.ahead)[depth.rows][rows]
    return divergence(name, law, logits, tokens, said.temperature, said.tokens)


def _accepted_length(depths: Sequence[Depth], said: Said) -> Tensor:
    """Minus the logarithm of the share of its draft tokens that a draft is expected to bring through: a1 + a1 a2 + ..., as
    Leviathan et al. (2023) add them up, over their number. With one depth this is a loss of Samarin et al. (2026)."""
    rows = depths[0].rows
    stands = torch.ones(rows.shape, device=rows.device)
    expected, reached = torch.zeros_like(stands), torch.zeros_like(stands)
    for depth in depths:
        chances = in_pieces(depth.logits, partial(_chances, depth, said))
        stands = stands * torch.zeros_like(stands).masked_scatter(depth.rows, chances)
        expected, reached = expected + stands, reached + depth.rows
    return -torch.log(expected[rows] / reached[rows] + _LEAST).mean()


def _chances(depth: Depth, said: Said, logits: Tensor, rows: slice) -> Tensor:
    """The chances that the token rule accepts, in some rows of a depth. Greedy decoding gives no gradient; at temperature 1
    the order of tokens is the same."""
    return overlap(said.among_all(depth, rows), logits, said.temperature or 1.0, said.tokens)


def shifted(values: Tensor, by: int) -> Tensor:
    """Column i holds what column i + by held; the last columns, which nobody may read, repeat the last one."""
    length = values.shape[1]
    columns = torch.arange(length, device=values.device) + by
    return values[:, columns.clamp(max=length - 1)]
