"""A decoder layer that stands alone, as heads have one: what transformers knows of it, and what its rows see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.model.backends.paged import Scores, attend
from outrider.model.context import SeenPart


class SeenRows(NamedTuple):
    """What some rows of a layer look at.

    Attributes:
        rows: Which rows.
        keys, values: [num_slots, num_kv_heads, dim]
        mask: [num_rows, num_slots] additive; None where every row sees everything.
    """

    rows: slice
    keys: Tensor
    values: Tensor
    mask: Tensor | None


#: Keeps the keys and values of all rows of a layer, [n, num_kv_heads, dim] each, and says what these rows see, in their
#: order.
Look = Callable[[Tensor, Tensor], Sequence[SeenRows]]


def attend_alone(queries: Tensor, seen: Sequence[SeenRows], scores: Scores) -> Tensor:
    """What rows find [n, num_heads, value_dim], of their queries [n, num_heads, head_dim]."""
    parts = [(each, SeenPart(slice(0, len(each.keys)), causal=False, mask=each.mask)) for each in seen]
    return torch.cat(
        [attend(queries[each.rows].transpose(0, 1), each.keys, each.values, part, scores) for each, part in parts]
    )


def layer_config(kind: str, fields: Mapping[str, Any]) -> Any:
    """The configuration of a model with such layers; what the fields leave out has transformers' defaults. It raises
    whatever transformers raises for a field that it cannot use."""
    return AutoConfig.for_model(kind, **fields)


def knows_activation(name: object) -> bool:
    """Whether there is an activation of this name."""
    return isinstance(name, str) and name in ACT2FN


def activation(name: str) -> nn.Module:
    """The activation of a name."""
    found: nn.Module = ACT2FN[name]
    return found


class RotaryFactors:
    """Cosines and sines of a layer by position.

    Args:
        config: Of the layer, from `layer_config`.
        device: Where they are made.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        self._module = LlamaRotaryEmbedding(config).to(device)
        self._device = device

    def at(self, positions: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[n, head_dim] each."""
        like = torch.empty(0, dtype=dtype, device=self._device)
        cosines, sines = self._module(like, torch.tensor([list(positions)], device=self._device))
        return cosines[0], sines[0]


def model_class(model_type: str) -> str | None:
    """The class of causal language models of a type; None for a type that transformers does not know."""
    found: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return found


def is_model_class(name: str) -> bool:
    """Whether transformers has a causal language model of this class."""
    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
