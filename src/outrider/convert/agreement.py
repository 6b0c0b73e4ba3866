"""What rounding a checkpoint costs in quality, on a text."""

from __future__ import annotations

import torch

from outrider.convert.compressed_tensors import as_written
from outrider.errors import InvalidParameterError
from outrider.kernels.formats.format import WeightFormat
from outrider.measure.agreement import Agreement, agreement, read
from outrider.model.loading.exclusive import exclusive_transformers


@torch.inference_mode()
def agreement_of_checkpoint(checkpoint: str, fmt: WeightFormat, layers: dict[str, int], text: str) -> Agreement:
    """Read a text with a model, round the weights of these layers, and read it again.

    Raises:
        InvalidParameterError: The text has fewer than two tokens.
    """
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
