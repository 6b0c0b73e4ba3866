"""Heads of DSpark with layers of Gemma 4: random ones in DeepSpec's layout, and what transformers' layers make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
    Gemma4TextScaledWordEmbedding,
)

from tests.model.block_reference import BlockReference

_RANK, _FULL = 8, "full_attention"


def save_gemma_head(
    folder: Path, target: str, seed: int = 7, *, inputs: tuple[int, ...] = (1, 2), scale: float = 0.3, **fields: Any
) -> str:
    """Write a head with random weights for a checkpoint of Gemma 4; returns its folder."""
    theirs = json.loads((Path(target) / "config.json").read_text())
    hidden, vocab_size = theirs["hidden_size"], theirs["vocab_size"]
    mapping = {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "vocab_size": vocab_size,
        "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6,
        "num_global_key_value_heads": 2, "global_head_dim": 16, "attention_k_eq_v": True, "rms_norm_eps": 1e-6,
        "layer_types": [_FULL, _FULL], "rope_parameters": theirs["rope_parameters"], "final_logit_softcapping": 4.0,
        "hidden_size_per_layer_input": 0, "pad_token_id": None, "target_layer_ids": [i - 1 for i in inputs],
        "block_size": 5, "mask_token_id": vocab_size - 1, "markov_rank": _RANK, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True, **fields,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(mapping), "utf-8")
    shapes = {
        "fc.weight": (hidden, len(inputs) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
        "lm_head.weight": (vocab_size, hidden), "markov_head.markov_w1.weight": (vocab_size, _RANK),
        "markov_head.markov_w2.weight": (vocab_size, _RANK), "confidence_head.proj.weight": (1, hidden + _RANK),
        "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    for number, layer in enumerate(_layers(mapping)):
        shapes |= {f"layers.{number}.{name}": tuple(weight.shape) for name, weight in layer.state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    around = ("norm", "layer_scalar")
    tensors = {
        name: torch.randn(shape, generator=generator) * scale + float(any(part in name for part in around))
        for name, shape in shapes.items()
    }
    copied = load_file(Path(target) / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors | {"embed_tokens.weight": copied.clone()}, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def _config(mapping: dict[str, Any]) -> Any:
    config = Gemma4TextConfig(**{name: value for name, value in mapping.items() if name != "model_type"})
    config._attn_implementation = "eager"
    return config


def _layers(mapping: dict[str, Any]) -> list[Any]:
    config = _config(mapping)
    return [Gemma4TextDecoderLayer(config, number).double().eval() for number in range(config.num_hidden_layers)]


class GemmaReference(BlockReference):
    """A head whose layers, embeddings and rotary factors are transformers' own."""

    def __init__(self, folder: str, model: Any) -> None:
        super().__init__(folder, model)
        self._decoder, self._rotary = _layers(self.sizes), Gemma4TextRotaryEmbedding(_config(self.sizes))
        for number, layer in enumerate(self._decoder):
            start = f"layers.{number}."
            own = {name.removeprefix(start): w for name, w in self.weights.items() if name.startswith(start)}
            layer.load_state_dict(own)
        table = self.weights["embed_tokens.weight"]
        self._table = Gemma4TextScaledWordEmbedding(*table.shape, None, table.shape[1] ** 0.5).double()
        self._table.load_state_dict({"weight": table})

    def _embedded(self, tokens: Tensor) -> Tensor:
        found: Tensor = self._table(tokens)
        return found

    def _layer(self, number: int, rows: Tensor, context: Tensor) -> Tensor:
        layer = self._decoder[number]
        read = torch.cat([context, layer.input_layernorm(rows)])[None]
        tables = self._rotary(read, torch.arange(read.shape[1])[None], _FULL)
        found, _ = layer.self_attn(read, tables, None, {})
        rows = rows + layer.post_attention_layernorm(found[0, len(context) :])
        inner = layer.mlp(layer.pre_feedforward_layernorm(rows))
        left: Tensor = (rows + layer.post_feedforward_layernorm(inner)) * layer.layer_scalar
        return left

    def _output(self, left: Tensor) -> Tensor:
        logits, cap = super()._output(left), self.sizes["final_logit_softcapping"]
        return logits if cap is None else torch.tanh(logits / cap) * cap
