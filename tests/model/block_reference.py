"""DFlash in plain PyTorch, read from the published files by their own names, with no code of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class BlockReference:
    """A block drafter and the stock model that it belongs to; every block is computed from its whole text, with no cache.

    Args:
        folder: Of the head.
        model: The stock model of transformers.
    """

    def __init__(self, folder: str, model: Any) -> None:
        mapping = json.loads((Path(folder) / "config.json").read_text())
        nested = mapping.get("dflash_config", {})
        self.sizes = mapping.get("transformer_layer_config", mapping)
        self.weights = {name: w.double() for name, w in load_file(Path(folder) / "model.safetensors").items()}
        self.model = model
        self.block_size = nested.get("block_size") or mapping["block_size"]
        self.mask = mapping["mask_token_id"] if "mask_token_id" in mapping else nested["mask_token_id"]
        outputs = nested.get("target_layer_ids")
        self.states = mapping["aux_hidden_state_layer_ids"] if outputs is None else [i + 1 for i in outputs]
        kinds = self.sizes.get("layer_types") or ["full_attention"] * self.sizes["num_hidden_layers"]
        self.windows = [self.sizes["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
        self.causal = [window is not None and not mapping.get("sliding_window_non_causal") for window in self.windows]
        if "is_causal" in mapping:
            self.causal = [mapping["is_causal"]] * len(kinds)
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def logits(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """Logits [vocab_size] of the token behind a text that the target has computed but for its last token, and a path
        that was drafted behind it, of which only the length counts."""
        if text not in self._known:
            self._known[text] = self._block(text)
        own = self._known[text][1 + len(path)]
        if "d2t" not in self.weights:
            return own
        wide = torch.full((self.sizes["vocab_size"],), float("-inf"), dtype=torch.float64)
        for i, value in enumerate(own):
            wide[i + int(self.weights["d2t"][i])] = value
        return wide

    def _block(self, text: tuple[int, ...]) -> Tensor:
        """Logits of all rows of the block behind a text."""
        states = self.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        joined = torch.cat([states[i][0].double() for i in self.states], -1)
        context = self._norm(joined @ self.weights["fc.weight"].T, "hidden_norm.weight")
        tokens = torch.tensor([text[-1]] + [self.mask] * (self.block_size - 1))
        rows = self.model.get_input_embeddings().weight.double()[tokens]
        for number in range(len(self.windows)):
            rows = self._layer(number, rows, context)
        left = self._norm(rows, "norm.weight")
        if "lm_head.weight" in self.weights:
            return left @ self.weights["lm_head.weight"].T
        head: Tensor = self.model.get_output_embeddings()(left)
        return head

    def _layer(self, number: int, rows: Tensor, context: Tensor) -> Tensor:
        prefix = f"layers.{number}."
        rows = rows + self._attend(number, self._norm(rows, f"{prefix}input_layernorm.weight"), context)
        inner = self._norm(rows, f"{prefix}post_attention_layernorm.weight")
        gate, up = (inner @ self.weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return rows + (torch.nn.functional.silu(gate) * up) @ self.weights[f"{prefix}mlp.down_proj.weight"].T

    def _attend(self, number: int, rows: Tensor, context: Tensor) -> Tensor:
        prefix, dim, start = f"layers.{number}.self_attn.", self.sizes["head_dim"], len(context)
        read = torch.cat([context, rows])
        q, k, v = (
            (each @ self.weights[f"{prefix}{name}_proj.weight"].T).view(len(each), -1, dim)
            for name, each in (("q", rows), ("k", read), ("v", read))
        )
        q = self._turned(self._norm(q, f"{prefix}q_norm.weight"), start)
        k = self._turned(self._norm(k, f"{prefix}k_norm.weight"), 0)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        for i in range(len(rows)):
            for j in range(len(read)):
                window = self.windows[number]
                too_far = window is not None and abs(start + i - j) >= window
                if too_far or (self.causal[number] and j > start + i):
                    scores[:, i, j] = float("-inf")
        out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
        return out.reshape(len(rows), -1) @ self.weights[f"{prefix}o_proj.weight"].T

    def _turned(self, rows: Tensor, start: int) -> Tensor:
        half = rows.shape[-1] // 2
        steps = float(self.sizes["rope_theta"]) ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(len(rows), dtype=torch.float64) + start)[:, None, None] * steps
        first, second = rows[..., :half], rows[..., half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        scale = (rows.pow(2).mean(-1, keepdim=True) + self.sizes["rms_norm_eps"]).rsqrt()
        return rows * scale * self.weights[name]
