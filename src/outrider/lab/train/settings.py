"""Settings of a training, and the interface of what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.config import Frozen
from outrider.lab.train.batches import Batch
from outrider.lab.train.losses import Depth, Said, depth_loss, shifted
from outrider.lab.train.target import FrozenTarget
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
