"""Facts about a loaded target: its kernels, its memory, and how many requests fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.library import kernels_problem
from outrider.measure import machine
from outrider.model.loading.available import available_bytes
from outrider.model.processor import device_name
from outrider.model.runner import ModelRunner

#: Lengths of requests, in tokens, for which it is said how many fit.
LENGTHS = (256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class ModelFacts:
    """A model that is loaded.

    Attributes:
        name: Path or hub id.
        dtype: Of its weights.
        device: Where it lies; of a GPU its name, too.
        backend: Which way its passes are driven.
        kernels: The instruction set of our kernels in use, or "triton" on a GPU; None where stock operators compute.
        invariant: Whether greedy and seeded requests may be sped up under `auto`: what is written for a row does not depend
            on the other rows of its pass.
        weight_bytes: That a pass reads; None for a mixture of experts, whose passes read a part.
        context: Longest text, in tokens.
        kv_tokens: Tokens of keys and values that there is room for.
        free_bytes: Memory that is free beside all this; None where the system does not say.
        requests: How many requests of each length fit into the KV memory at a time.
        text_bytes: Memory that the running states of a text take at most; 0 for a model without them.
        kernels_problem: What is wrong with the compiled kernels, so that they are not used, and the remedy.
    """

    name: str
    dtype: str
    device: str
    backend: str
    kernels: str | None
    invariant: bool
    weight_bytes: int | None
    context: int
    kv_tokens: int
    free_bytes: int | None
    requests: dict[int, int]
    text_bytes: int = 0
    kernels_problem: str | None = None


def model_facts(runner: ModelRunner) -> ModelFacts:
    """The facts of the model of a runner."""
    loaded, blocks = runner.loaded, runner.blocks
    context = loaded.max_model_len
    lengths = sorted({*(n for n in LENGTHS if n < context), context})
    return ModelFacts(
        name=loaded.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=_shown(loaded.device),
        backend=runner.backend.name,
        kernels=runner.backend.instruction_set(loaded.model),
        invariant=runner.invariant,
        weight_bytes=runner.backend.weight_bytes(loaded.model) or machine.weight_bytes(loaded.model),
        context=context,
        kv_tokens=blocks.num_blocks * blocks.block_size,
        free_bytes=available_bytes(loaded.device),
        requests={length: blocks.num_blocks // blocks.blocks_for(length) for length in lengths},
        text_bytes=runner.text_bytes,
        kernels_problem=kernels_problem(),
    )


def _shown(device: torch.device) -> str:
    return f"{device_name(device)} ({device})" if device.type == "cuda" else str(device)
