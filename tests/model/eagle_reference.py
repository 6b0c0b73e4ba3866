"""EAGLE-1 and EAGLE-3 in plain PyTorch, read from the published files by their own names, with no code of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class EagleReference:
    """A head of EAGLE-3 and the stock model that it belongs to; every text is computed as a whole, without a cache of keys.

    Args:
        folder: Of the head.
        model: The stock model of transformers.
    """

    def __init__(self, folder: str, model: Any) -> None:
        mapping = json.loads((Path(folder) / "config.json").read_text())
        self.layer = mapping.get("transformer_layer_config", mapping)
        self.flags = mapping
        self.first_position = 0 if mapping is self.layer else 1  # of the row of token 1
        self.weights = {name: w.double() for name, w in load_file(Path(folder) / "model.safetensors").items()}
        self.prefix = "midlayer." if "midlayer.hidden_norm.weight" in self.weights else "layers.0."
        self.model = model
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        count = model.config.num_hidden_layers
        outputs = mapping.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        inputs = mapping.get("eagle_aux_hidden_state_layer_ids") or [2, count // 2, count - 3]
        self.layers = [i + 1 for i in outputs] if outputs else inputs

    @torch.no_grad()
    def logits(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """Logits [vocab_size] of the token behind a text that the target has computed but for its last token, and a path
        that was drafted behind it."""
        own = self._logits(self._left(text, path)[-1])
        if "d2t" not in self.weights:
            return own
        wide = torch.full((self.layer["vocab_size"],), float("-inf"), dtype=torch.float64)
        for i, value in enumerate(own):
            wide[i + int(self.weights["d2t"][i])] = value
        return wide

    def _left(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """What the layer leaves of every token but the first."""
        if (text, path) not in self._known:
            self._known[text, path] = self._run(torch.tensor([*text[1:], *path]), self._features(text, path))
        return self._known[text, path]

    def _features(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """What each of them reads: the target's features, then what the layer left of the token before."""
        if path:
            left = self._left(text, path[:-1])[-1:]
            behind = self._norm(left, "norm.weight") if self.flags.get("norm_output") else left
            return torch.cat([self._features(text, path[:-1]), behind])
        states = self.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        return self._fuse([states[layer][0].double() for layer in self.layers])

    def _logits(self, left: Tensor) -> Tensor:
        states = self._norm(left, "norm.weight")
        if "lm_head.weight" in self.weights:
            return states @ self.weights["lm_head.weight"].T
        head: Tensor = self.model.get_output_embeddings()(states)
        return head

    def _fuse(self, states: list[Tensor]) -> Tensor:
        if self.flags.get("fc_norm"):
            states = [self._norm(each, f"fc_norm.{i}.weight") for i, each in enumerate(states)]
        joined = torch.cat(states, -1)
        if self.flags.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm.weight")
        return joined @ self.weights["fc.weight"].T

    def _run(self, tokens: Tensor, features: Tensor) -> Tensor:
        normed = self._norm(features, f"{self.prefix}hidden_norm.weight")
        residual = normed if self.flags.get("norm_before_residual") else features
        read = torch.cat([self._norm(self._table()[tokens], f"{self.prefix}input_layernorm.weight"), normed], -1)
        return self._finished(residual + self._attend(read))

    def _table(self) -> Tensor:
        own = self.weights.get("embed_tokens.weight")
        return self.model.get_input_embeddings().weight.double() if own is None else own

    def _finished(self, states: Tensor) -> Tensor:
        inner = self._norm(states, f"{self.prefix}post_attention_layernorm.weight")
        gate, up = self._product(inner, "mlp.gate_proj"), self._product(inner, "mlp.up_proj")
        return states + self._product(torch.nn.functional.silu(gate) * up, "mlp.down_proj")

    def _attend(self, read: Tensor) -> Tensor:
        n, dim = len(read), self.layer["head_dim"]
        q, k, v = (self._product(read, f"self_attn.{name}_proj").view(n, -1, dim) for name in "qkv")
        if self.layer["model_type"] == "qwen3":
            q = self._norm(q, f"{self.prefix}self_attn.q_norm.weight")
            k = self._norm(k, f"{self.prefix}self_attn.k_norm.weight")
        q, k = self._turned(q), self._turned(k)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        out = torch.einsum("hij,jhd->ihd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
        return self._product(out.reshape(n, -1), "self_attn.o_proj")

    def _turned(self, rows: Tensor) -> Tensor:
        half = rows.shape[-1] // 2
        theta = float(self.layer.get("rope_theta", 10000.0))
        steps = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(len(rows), dtype=torch.float64) + self.first_position)[:, None, None] * steps
        first, second = rows[..., :half], rows[..., half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)

    def _product(self, rows: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{self.prefix}{name}.bias")
        out = rows @ self.weights[f"{self.prefix}{name}.weight"].T
        return out if bias is None else out + bias

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        scale = (rows.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt()
        return rows * scale * self.weights[name]


class Eagle1Reference(EagleReference):
    """A head of the first format.

    Args:
        folder: Of the head.
        model: The stock model of transformers.
    """

    def __init__(self, folder: str, model: Any) -> None:
        super().__init__(folder, model)
        self.prefix = "layers.0."
        self.layers = [-1]  # behind the final norm

    def _fuse(self, states: list[Tensor]) -> Tensor:
        return states[0]

    def _run(self, tokens: Tensor, features: Tensor) -> Tensor:
        read = torch.cat([self._table()[tokens], features], -1) @ self.weights["fc.weight"].T
        if "fc.bias" in self.weights:
            read = read + self.weights["fc.bias"]
        return self._finished(read + self._attend(read))

    def _logits(self, left: Tensor) -> Tensor:
        head: Tensor = self.model.get_output_embeddings()(left)
        return head
