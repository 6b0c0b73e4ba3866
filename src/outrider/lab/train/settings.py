"""Settings of a training, the interface of what is trained, and the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from outrider.config import Frozen
from outrider.lab.train.batches import Batch
from outrider.lab.train.target import FrozenTarget, LogitsOf
from outrider.records import Manifest, read_records

TeacherSource = Literal["forward", "hidden_states", "top_k"]
Precision = Literal["bf16", "fp32"]
#: What PyTorch calls products of bf16 in the processors that have them.
_BF16_PRODUCTS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


def fast_precision() -> Precision:
    """The precision in which this machine multiplies fastest: bf16 where the device has such products, else fp32."""
    import torch

    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    found: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # an older PyTorch does not tell
    return "bf16" if any(found.get(name) for name in _BF16_PRODUCTS) else "fp32"


class TrainSettings(Frozen):
    """Says how a training runs."""

    steps: int = Field(1000, ge=1, description="Use 1 or more.")  # steps of the optimiser
    batch_size: int = Field(16, ge=1, description="Use 1 or more.")  # texts in a batch, on each device
    accumulation: int = Field(1, ge=1, description="Use 1 or more.")  # batches in a step
    length: int = Field(512, ge=2, description="Use 2 or more.")  # longest text in tokens; longer ones are cut
    lr: float = Field(2e-3, gt=0.0, allow_inf_nan=False, description="Use a number above 0.")  # highest learning rate
    #: Share of the steps in which the rate rises to it.
    warmup: float = Field(0.05, ge=0.0, le=1.0, description="Use a share of the steps, 0 to 1.")
    #: Share of the steps, the last ones, in which the rate falls to 2% of it.
    decay: float = Field(0.5, ge=0.0, le=1.0, description="Use a share of the steps, 0 to 1.")
    weight_decay: float = Field(0.05, ge=0.0, description="Use 0 or more.")  # of matrices
    clip: float = Field(1.0, gt=0.0, description="Use a number above 0.")  # longest gradient
    #: Of the order of texts and of whatever is drawn.
    seed: int = Field(0, ge=0, lt=2**31, description="Use 0 to 2**31 - 1.")
    #: What products are computed in, those of the target too unless its dtype is given; weights and their sums of gradients
    #: are float32. Unless it is given, the processor decides.
    precision: Precision = Field(default_factory=fast_precision, description="Use bf16 or fp32.")
    evaluate_every: int = Field(100, ge=1, description="Use 1 or more.")  # steps between measurements on held-out texts
    #: Most pieces of held-out texts that a measurement reads.
    held_out_texts: int = Field(64, ge=1, description="Use 1 or more.")
    #: Measurements without a gain after which the training ends; 0 always runs to the end.
    patience: int = Field(0, ge=0, description="Use 0 or more.")
    #: Most steps between checkpoints. Each measurement is followed by one too.
    save_every: int = Field(100, ge=1, description="Use 1 or more.")
    #: Steps between runs of the real engine with what is trained; 0 runs it before and after alone.
    engine_every: int = Field(0, ge=0, description="Use 0 or more.")
    #: Held-out prompts that such a run writes; 0 never runs it.
    engine_prompts: int = Field(16, ge=0, description="Use 0 or more.")
    engine_tokens: int = Field(64, ge=1, description="Use 1 or more.")  # tokens that it writes behind each
    #: Draft tokens in a step that tau is measured and estimated for.
    num_draft_tokens: int = Field(5, ge=1, le=32, description="Use 1 to 32.")
    #: Where the target's probabilities come from.
    teacher: TeacherSource = Field("forward", description="Use forward, hidden_states or top_k.")

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0: up, level, and down in a straight line."""
        rising = (step + 1) / max(1.0, self.warmup * self.steps)
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.lr * min(1.0, rising, max(0.02, left))


# --- The interface of what is trained: a draft model, or heads.


class Tally(NamedTuple):
    """Says how often draft tokens stand, by their place in a draft. Each draft begins behind what the one before it
    brought, as in the engine: behind refused tokens more often than elsewhere, where texts are hard to guess."""

    stood: Tensor  # [depth] draft tokens that the token rule is expected to accept
    tried: Tensor  # [depth] draft tokens behind which the earlier ones of their drafts stood


def tally(chances: Tensor, drafted: Tensor) -> Tally:
    """Follows the drafts of texts. Behind the draft tokens that stand comes a token of the target, and there the next draft
    begins.

    Args:
        chances: [depth, num_texts, num_tokens] the chance that the token rule accepts the token that a draft behind a row
            has there, where its earlier tokens stand.
        drafted: [depth, num_texts, num_tokens] whether the text goes on so far; the first draft begins at the first row.
    """
    depth = len(chances)
    stood, tried = [0.0] * depth, [0.0] * depth
    for chance, known in zip(chances.transpose(0, 1).tolist(), drafted.transpose(0, 1).tolist(), strict=True):
        begun = [0.0] * (len(known[0]) + depth + 1)  # by row, the probability that a draft begins there
        if True in known[0]:
            begun[known[0].index(True)] = 1.0
        for row in range(len(known[0])):
            left = begun[row]  # the probability that all tokens of the draft so far stand
            for place in range(depth):
                here = left if known[place][row] else 0.0
                kept = here * chance[place][row]
                tried[place], stood[place] = tried[place] + here, stood[place] + kept
                begun[row + place + 1] += left - kept
                left = kept
            begun[row + depth + 1] += left
    return Tally(torch.tensor(stood), torch.tensor(tried))


def tally_of_each(chances: Tensor, rows: Tensor, num_draft_tokens: int) -> Tally:
    """The same where a draft token is made as the first one behind its row is.

    Args:
        chances: [n] of the first draft tokens behind so many rows.
        rows: [num_texts, num_tokens] which rows these are.
    """
    grid = chances.new_zeros(rows.shape).masked_scatter(rows, chances)
    places = range(num_draft_tokens)
    known = torch.stack([rows & shifted(rows, place) for place in places])
    return tally(torch.stack([shifted(grid, place) for place in places]), known)


class Trainee:
    """Something that learns to draft; a subclass for each kind."""

    module: nn.Module  # what is optimised
    rows: tuple[str, ...] = ()  # names of what the data must hold of the target's passes
    reach: int = 1  # tokens by which the last draft token is ahead of the row that it is made from
    draft_vocab_size: int | None = None  # tokens that it drafts, where these are not all of the target's

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch; `module` is the one to call, wrapped for several devices where there are some."""
        raise NotImplementedError

    def tally(self, module: nn.Module, batch: Batch) -> Tally:
        """Returns how often its draft tokens would be accepted in these texts, where the target wrote them."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write it as a folder that loads as a method. Raises StorageError."""
        raise NotImplementedError

    def speculation(self, folder: Path) -> dict[str, Any]:
        """The settings that draft with what `save` wrote there."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Returns what the model card says of it, by name."""
        raise NotImplementedError


class HeadLearning(Frozen):
    """Which heads are trained on a frozen target, and what they learn; a subclass for each kind."""

    def trainee(self, target: FrozenTarget, manifest: Manifest, data: Path, settings: TrainSettings) -> Trainee:
        """Returns what learns."""
        raise NotImplementedError


# --- Losses between a draft's and a target's probabilities, as DistillSpec (Zhou et al. 2023) uses them.
#
# All take raw logits and divide them by the temperature that the texts are written at, since acceptance is decided
# between the probabilities of that temperature. With greedy decoding only the most likely token counts; the loss then
# compares the probabilities of temperature 1, whose order is the same.


LossName = Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "cross_entropy"]
LOSSES: tuple[str, ...] = get_args(LossName)
#: Most numbers in a piece of logits whose loss is computed at once: as fit in a cache, and as keep a GPU busy.
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


class Said:
    """Holds what the target says of a batch.

    What is said of a large vocabulary fills gigabytes and takes most of the time of a step. So only the tokens that a draft
    knows are computed, unless somebody asks for more.

    Args:
        batch: The texts.
        logits: Those [num_texts, num_tokens, n] of some tokens or of all; row i speaks of token i + 1.
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
        known, *others = (_taken(values, depth, rows) for values in (self._known, self._total, self._likeliest))
        return Law(known, *others)

    def overlap(self, depth: Depth) -> Tensor:
        """[n] the chance that the token rule accepts."""
        return overlap(self.among_all(depth), depth.logits, self.temperature, self.tokens)

    @cached_property
    def _all(self) -> Tensor:
        return self._logits(None)

    @cached_property
    def _known(self) -> Tensor:
        return self._all if self.tokens is None else self._logits(self.tokens)

    @cached_property
    def _total(self) -> Tensor:
        """[num_texts, num_tokens] as in `Law`; greedy decoding has the order of temperature 1."""
        return torch.stack([(text.float() / (self.temperature or 1.0)).logsumexp(-1) for text in self._all])

    @cached_property
    def _likeliest(self) -> Tensor:
        return self._all.argmax(-1)


def _taken(values: Tensor, depth: Depth, rows: slice) -> Tensor:
    """Those of values [num_texts, num_tokens, ...] that speak of the draft tokens of a depth, in some of its n rows."""
    texts, places = (each[rows] for each in depth.rows.nonzero(as_tuple=True))
    return values[texts, (places + depth.ahead - 1).clamp(max=values.shape[1] - 1)]


class HeadTrainee(Trainee):
    """Heads on the frozen target, whose draft tokens are compared with what the target says, depth by depth."""

    loss_name: str  # how far its probabilities are from the target's
    decay: float  # what the loss of a draft token counts, relative to the one before
    method: str  # that will draft with them

    def drafted(self, module: nn.Module, batch: Batch, *, learn: bool) -> tuple[list[Depth], Said]:
        """Draft tokens of several depths, and what the target says, in rows to learn from or as the engine drafts."""
        raise NotImplementedError

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return depth_loss(self.loss_name, *self.drafted(module, batch, learn=True), self.decay)

    def tally(self, module: nn.Module, batch: Batch) -> Tally:
        depths, said = self.drafted(module, batch, learn=False)
        none = torch.zeros(batch.token_ids.shape, device=batch.token_ids.device)
        chances = [none.masked_scatter(depth.rows, said.overlap(depth).float()) for depth in depths]
        return tally(torch.stack(chances), torch.stack([depth.rows for depth in depths]))

    def speculation(self, folder: Path) -> dict[str, Any]:
        return {"method": self.method, "model": str(folder)}


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


# --- The tokens that a head drafts: those that the training texts hold most often.


class DraftVocabulary(NamedTuple):
    """Some of the target's tokens."""

    tokens: Tensor | None  # [size]; None for all
    share: float  # how many of the tokens to be learnt are among them

    def size(self, target: FrozenTarget) -> int:
        """How many they are."""
        return target.vocab_size if self.tokens is None else len(self.tokens)

    def facts(self, target: FrozenTarget) -> dict[str, Any]:
        """What the model card says of them."""
        share = f"{self.share:.4f}"
        return {"tokens that it drafts": self.size(target), "share of the training texts that these make up": share}


def frequent_tokens(folder: Path, manifest: Manifest, size: int) -> DraftVocabulary:
    """The most frequent tokens of what the target wrote in texts that are not held out. Of tokens that are equally frequent
    the smaller number goes first."""
    vocab_size = manifest.target.vocab_size
    if size >= vocab_size:
        return DraftVocabulary(None, 1.0)
    counts = token_counts(folder, manifest)
    chosen = torch.sort(counts, descending=True, stable=True).indices[:size]
    return _with_share(chosen.sort().values, counts)


def known_tokens(folder: Path, manifest: Manifest, tokens: Tensor | None) -> DraftVocabulary:
    """The tokens that a head drafts already, [size], and how many of what it is to learn they are; None for all."""
    return DraftVocabulary(None, 1.0) if tokens is None else _with_share(tokens, token_counts(folder, manifest))


def _with_share(tokens: Tensor, counts: Tensor) -> DraftVocabulary:
    return DraftVocabulary(tokens, float(counts[tokens].sum() / counts.sum().clamp(min=1)))


def token_counts(folder: Path, manifest: Manifest) -> Tensor:
    """[vocab_size] how often the target wrote each token in texts that are not held out."""
    counts = torch.zeros(manifest.target.vocab_size, dtype=torch.long)
    for record in read_records(folder, manifest):
        if not record.held_out:
            first = record.num_prompt_tokens if manifest.settings.max_tokens else 1
            counts += torch.bincount(record.token_ids[first:], minlength=len(counts))
    return counts
