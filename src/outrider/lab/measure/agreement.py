"""Measures what rounding costs in quality: perplexities, how far two laws agree, and the card of a rounded checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidParameterError
from outrider.kernels.formats import WeightFormat
from outrider.lab.convert.compressed_tensors import as_written
from outrider.llm import LLM
from outrider.loading.exclusive import exclusive_transformers
from outrider.model.batch import Segment
from outrider.model.memory import PassTimer
from outrider.model.runner import ModelRunner

#: Tokens that are read together.
WINDOW = 512
#: Windows whose perplexity is taken. The laws of the first ones are compared, since those of all might not fit in memory.
_MOST_WINDOWS = 8
#: Seconds after which the model as it was begins no further window: with weights in floats a window may take half a minute.
_PATIENCE = 10.0
#: Passes of one row that are timed, with rounding and without it in turn.
_PAIRS = 40


@dataclass(frozen=True)
class Agreement:
    """Says how a rounded model compares with the original on a text."""

    tokens: int  # predicted tokens behind the perplexities
    original: float  # perplexities
    rounded: float  # perplexities
    compared: int  # tokens whose laws were compared
    distance: float  # the mean total variation of the two laws, from 0 to 1
    worst_distance: float  # the largest one
    divergence: float  # the mean Kullback-Leibler divergence of the rounded law from the original one, in nats
    same_choice: float  # how often both hold the same token likeliest

    def __str__(self) -> str:
        return (
            f"the perplexity of {self.tokens} tokens is {self.rounded:.3f}, and {self.original:.3f} without rounding; "
            f"the laws of {self.compared} tokens lie {self.distance:.3f} apart on average and {self.worst_distance:.3f} at "
            f"most (total variation), and hold the same token likeliest in {self.same_choice:.1%} of all places"
        )


@dataclass(frozen=True)
class MeasuredLaws:
    """Holds what a model says to a text."""

    scores: Tensor  # the log-probabilities of its tokens, [n]
    laws: Tensor  # the log-probabilities of all tokens in the first places, [some, vocab_size]
    windows: int  # how many were read


@torch.inference_mode()
def read(
    texts: Sequence[Sequence[int]],
    forward: Callable[[Tensor], Tensor],
    most: int = _MOST_WINDOWS,
    patience: float = math.inf,
) -> MeasuredLaws:
    """Returns what a model, token ids [n] to logits [n, vocab_size], says to the beginning of texts, each in windows of its
    own: to `most` windows, and to no more after `patience` seconds."""
    windows = (w for text in texts for w in torch.split(torch.tensor(text), WINDOW) if len(w) > 1)
    scores: list[Tensor] = []
    laws: list[Tensor] = []
    began = monotonic()
    for window in islice(windows, most):
        law = forward(window)[:-1].float().log_softmax(-1)
        scores.append(law.gather(1, window[1:, None])[:, 0])
        if sum(len(each) for each in laws) < WINDOW // 2:
            laws.append(law)
        if monotonic() - began > patience:
            break
    return MeasuredLaws(torch.cat(scores), torch.cat(laws), len(scores))


def agreement(original: MeasuredLaws, rounded: MeasuredLaws) -> Agreement:
    """Returns how two readings of the same texts compare."""
    law, other = original.laws, rounded.laws
    distances = (law.exp() - other.exp()).abs().sum(-1) / 2
    return Agreement(
        tokens=len(original.scores),
        original=float(original.scores.mean().neg().exp()),
        rounded=float(rounded.scores.mean().neg().exp()),
        compared=len(law),
        distance=float(distances.mean()),
        worst_distance=float(distances.max()),
        divergence=float((law.exp() * (law - other)).sum(-1).mean()),
        same_choice=float((law.argmax(-1) == other.argmax(-1)).float().mean()),
    )


@dataclass(frozen=True)
class Rounding:
    """Holds what rounding costs and gains."""

    agreement: Agreement  # with the model as it was
    speed: float  # how many times as fast a pass of one row is, a median of pairs

    def __str__(self) -> str:
        return f"{self.agreement}; a pass of one row is {self.speed:.2f} times as fast"


def measure_rounding(llm: LLM, texts: Sequence[Sequence[int]]) -> Rounding:
    """Compare a loaded model, which is rounded, with the same checkpoint as it is. That one is in memory meanwhile."""
    with _beside(llm, activations="none") as whole:
        return _compared(whole.engine.runner, llm.engine.runner, texts)


def measure_rounded_rows(llm: LLM, quantization: str | None, texts: Sequence[Sequence[int]]) -> Rounding:
    """Returns what `activations="int8"` would cost and gain, beside the same weights with rows that are not rounded. The
    model that rounds them is in memory meanwhile. The weights were rounded at load as `quantization` says; with None their
    files bring them so."""
    with _beside(llm, quantization=quantization, activations="int8") as rounded:
        return _compared(llm.engine.runner, rounded.engine.runner, texts)


def _beside(llm: LLM, **how: Any) -> LLM:
    """The checkpoint of a loaded model once more, loaded in another way."""
    loaded = llm.engine.runner.loaded
    settings: dict[str, Any] = {"dtype": loaded.dtype, "device": str(loaded.device), "kv_cache_tokens": 2 * WINDOW, **how}
    return LLM(loaded.name, speculation="none", **settings)


def _compared(original: ModelRunner, rounded: ModelRunner, texts: Sequence[Sequence[int]]) -> Rounding:
    before = read(texts, partial(_logits, original), patience=_PATIENCE)
    after = read(texts, partial(_logits, rounded), before.windows)
    timers = [PassTimer(runner, 1) for runner in (original, rounded)]
    # The first pair warms up.
    pairs = [[timer.seconds(0, 1, logits=True) for timer in timers] for _ in range(1 + _PAIRS)][1:]
    return Rounding(agreement(before, after), median(first / second for first, second in pairs))


def _logits(runner: ModelRunner, window: Tensor) -> Tensor:
    """[len(window), vocab_size] of a pass that leaves nothing in the runner's own memory."""
    own = runner.with_own_memory(len(window))
    blocks = own.blocks.allocate(own.blocks.blocks_for(len(window)))
    return own.forward([Segment(window.tolist(), 0, blocks)]).logits


# --- What rounding a checkpoint costs in quality, on a text.


@torch.inference_mode()
def agreement_of_checkpoint(checkpoint: str, fmt: WeightFormat, layers: dict[str, int], text: str) -> Agreement:
    """Read a text with a model, round the weights of these layers, and read it again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with exclusive_transformers():
        ids = AutoTokenizer.from_pretrained(checkpoint).encode(text)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    if len(ids) < 2:
        raise InvalidParameterError("text", text, "it has fewer than two tokens", "Give a longer text.")
    before = read([ids], lambda window: model(window[None]).logits[0])
    for name, in_features in layers.items():
        weight, written = model.get_parameter(name), as_written(fmt, in_features)
        weight.copy_(written.dequantise(written.store(weight.data), weight.dtype))
    return agreement(before, read([ids], lambda window: model(window[None]).logits[0]))


# --- The card of a checkpoint with rounded weights.


def rounded_card(name: str, fmt: WeightFormat, num_layers: int, found: Agreement | None) -> str:
    """Returns what the folder holds, and what rounding costs where that was measured."""
    scales = "a scale for each output" if fmt.group is None else f"a scale for each group of {fmt.group} inputs"
    lines = f"""# {name} in {fmt.name}

The weights of {num_layers} linear layers are rounded to {fmt.bits} bits with {scales}.
Embeddings, norms and the head are those of the original. Activations are not rounded. The scale of a group is the one of a
few candidates that leaves the least squared error, and no text was needed to find it. The format is "pack-quantized" of
compressed-tensors.

## What rounding costs

"""
    if found is None:
        return lines + "This was not measured. `outrider quantize --text FILE` measures it.\n"
    return (
        lines
        + f"""| on a text that the user gave | original | rounded |
|---|---|---|
| perplexity of {found.tokens} tokens | {found.original:.3f} | {found.rounded:.3f} |

The laws of {found.compared} tokens lie {found.distance:.3f} apart on average and {found.worst_distance:.3f} at most (total
variation). The mean divergence of the rounded law from the original one is {found.divergence:.4f} nats. Both hold the same
token likeliest in {found.same_choice:.1%} of all places.
"""
    )
