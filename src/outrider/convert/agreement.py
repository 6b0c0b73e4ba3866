"""What rounding costs in quality: the perplexity of a text before and after it, and how far the two laws agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.convert.compressed_tensors import as_written
from outrider.errors import InvalidParameterError
from outrider.kernels.formats.format import WeightFormat
from outrider.model.loading.exclusive import exclusive_transformers

#: Tokens that are read together.
_WINDOW = 512
#: Windows whose perplexity is taken. The laws of the first one are compared, since those of all might not fit in memory.
_MOST_WINDOWS = 8


@dataclass(frozen=True)
class Agreement:
    """How a rounded model compares with the original on a text.

    Attributes:
        tokens: Predicted tokens behind the perplexities.
        original, rounded: Perplexities.
        compared: Tokens whose laws were compared.
        overlap: The mean of the probability that the two laws have in common, from 0 to 1.
        divergence: The mean Kullback-Leibler divergence of the rounded law from the original one, in nats.
        same_choice: How often both hold the same token likeliest.
    """

    tokens: int
    original: float
    rounded: float
    compared: int
    overlap: float
    divergence: float
    same_choice: float


@torch.inference_mode()
def agreement(checkpoint: str, fmt: WeightFormat, layers: dict[str, int], text: str) -> Agreement:
    """Read a text with a model, round the weights of these layers, and read it again.

    Raises:
        InvalidParameterError: The text has fewer than two tokens.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with exclusive_transformers():
        ids = torch.tensor(AutoTokenizer.from_pretrained(checkpoint).encode(text))
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    windows = [w for w in torch.split(ids, _WINDOW)[:_MOST_WINDOWS] if len(w) > 1]
    if not windows:
        raise InvalidParameterError("text", text, "it has fewer than two tokens", "Give a longer text.")
    before, law = _read(model, windows)
    for name, in_features in layers.items():
        weight, written = model.get_parameter(name), as_written(fmt, in_features)
        weight.copy_(written.dequantise(written.store(weight.data), weight.dtype))
    after, rounded_law = _read(model, windows)
    return Agreement(
        tokens=len(before),
        original=float(before.mean().neg().exp()),
        rounded=float(after.mean().neg().exp()),
        compared=len(law),
        overlap=float(torch.minimum(law.exp(), rounded_law.exp()).sum(-1).mean()),
        divergence=float((law.exp() * (law - rounded_law)).sum(-1).mean()),
        same_choice=float((law.argmax(-1) == rounded_law.argmax(-1)).float().mean()),
    )


def _read(model: torch.nn.Module, windows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the tokens [n], and the whole laws of the first window [first, vocab_size]."""
    found, first = [], None
    for window in windows:
        law = model(window[None]).logits[0, :-1].float().log_softmax(-1)  # [len(window) - 1, vocab_size]
        found.append(law.gather(1, window[1:, None])[:, 0])
        first = law if first is None else first
    assert first is not None, "there are windows"
    return torch.cat(found), first
