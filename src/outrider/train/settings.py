"""Settings of a training; the same for every method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from outrider.validation import Frozen

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
    """How a training runs.

    Attributes:
        steps: Steps of the optimiser.
        batch_size: Texts in a batch, on each device.
        accumulation: Batches in a step.
        length: Longest text in tokens; longer ones are cut.
        lr: Highest learning rate.
        warmup: Share of the steps in which the rate rises to it.
        decay: Share of the steps, the last ones, in which the rate falls to 2% of it.
        weight_decay: Of matrices.
        clip: Longest gradient.
        seed: Of the order of texts and of whatever is drawn.
        precision: What products are computed in; weights and their sums of gradients are float32. Unless it is given, the
            processor decides.
        evaluate_every: Steps between measurements on held-out texts.
        held_out_texts: Most pieces of held-out texts that a measurement reads.
        patience: Measurements without a gain after which the training ends; 0 always runs to the end.
        save_every: Most steps between checkpoints. Each measurement is followed by one too.
        engine_every: Steps between runs of the real engine with what is trained; 0 runs it before and after alone.
        engine_prompts: Held-out prompts that such a run writes; 0 never runs it.
        engine_tokens: Tokens that it writes behind each.
        num_draft_tokens: Draft tokens in a step that tau is measured and estimated for.
        teacher: Where the target's probabilities come from.
    """

    steps: int = Field(1000, ge=1, description="Use 1 or more.")
    batch_size: int = Field(16, ge=1, description="Use 1 or more.")
    accumulation: int = Field(1, ge=1, description="Use 1 or more.")
    length: int = Field(512, ge=2, description="Use 2 or more.")
    lr: float = Field(2e-3, gt=0.0, allow_inf_nan=False, description="Use a number above 0.")
    warmup: float = Field(0.05, ge=0.0, le=1.0, description="Use a share of the steps, 0 to 1.")
    decay: float = Field(0.5, ge=0.0, le=1.0, description="Use a share of the steps, 0 to 1.")
    weight_decay: float = Field(0.05, ge=0.0, description="Use 0 or more.")
    clip: float = Field(1.0, gt=0.0, description="Use a number above 0.")
    seed: int = Field(0, ge=0, lt=2**31, description="Use 0 to 2**31 - 1.")
    precision: Precision = Field(default_factory=fast_precision, description="Use bf16 or fp32.")
    evaluate_every: int = Field(100, ge=1, description="Use 1 or more.")
    held_out_texts: int = Field(64, ge=1, description="Use 1 or more.")
    patience: int = Field(0, ge=0, description="Use 0 or more.")
    save_every: int = Field(100, ge=1, description="Use 1 or more.")
    engine_every: int = Field(0, ge=0, description="Use 0 or more.")
    engine_prompts: int = Field(16, ge=0, description="Use 0 or more.")
    engine_tokens: int = Field(64, ge=1, description="Use 1 or more.")
    num_draft_tokens: int = Field(5, ge=1, le=32, description="Use 1 to 32.")
    teacher: TeacherSource = Field("forward", description="Use forward, hidden_states or top_k.")

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0: up, level, and down in a straight line."""
        rising = (step + 1) / max(1.0, self.warmup * self.steps)
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.lr * min(1.0, rising, max(0.02, left))
