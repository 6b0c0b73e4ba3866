"""Layers that predict several tokens, in plain PyTorch, read from the published files, with no code of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

_NAMES = {
    "qwen3_next": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "post_attention_layernorm"),
    "deepseek_v3": ("eh_proj", "enorm", "hnorm", "shared_head.norm", "post_attention_layernorm"),
    "mimo_7b": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", "post_attention_layernorm"),
    "speculators": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", "post_attention_layernorm"),
    "mimo_v2": ("eh_proj", "enorm", "hnorm", "final_layernorm", "pre_mlp_layernorm"),
}
#: A text that the target has computed but for its last token, and a path that was drafted behind it.
_Text = tuple[tuple[int, ...], tuple[int, ...]]


class MtpReference:
    """The layers of a checkpoint and its stock model; every text is computed as a whole, without a cache of keys.

    Args:
        folder: Of the checkpoint.
        layout: A key of `_NAMES`.
        num_layers: How many layers it has.
        model: The stock model of transformers.
    """

    def __init__(self, folder: str, layout: str, num_layers: int, model: Any) -> None:
        self.weights = {name: w.double() for name, w in load_file(Path(folder) / "model.safetensors").items()}
        self.model, self.config = model, model.config
        self.layout, self.num_layers = layout, num_layers
        self._known: dict[tuple[int, _Text], Tensor] = {}

    @torch.no_grad()
    def logits(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """Logits [vocab_size] of the token behind the path."""
        left = self._left(min(len(path), self.num_layers - 1), (text, path))[-1]
        head: Tensor = self.model.get_output_embeddings()(left)
        return head

    def _left(self, layer: int, at: _Text) -> Tensor:
        """What a layer leaves, behind its norm, of the tokens from layer + 1 on."""
        if (layer, at) not in self._known:
            tokens = torch.tensor([*at[0], *at[1]][layer + 1 :])
            self._known[layer, at] = self._run(layer, tokens, self._features(layer, at))
        return self._known[layer, at]

    def _features(self, layer: int, at: _Text) -> Tensor:
        """What it reads beside each of these tokens."""
        text, path = at
        last = self.num_layers - 1
        if layer == last and len(path) > last:
            before = (text, path[:-1])
            return torch.cat([self._features(layer, before), self._left(layer, before)[-1:]])
        if layer == 0:
            states = self.model(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
            normed: Tensor = states[-1][0].double()
            return normed
        return self._left(layer - 1, (text, path[:-1])) if path else self._left(layer - 1, at)[:-1]

    def _run(self, layer: int, tokens: Tensor, features: Tensor) -> Tensor:
        fc, embedding, hidden, norm, behind = _NAMES[self.layout]
        both = [
            self._norm(self.model.get_input_embeddings().weight.double()[tokens], self._beside(layer, embedding)),
            self._norm(features, self._beside(layer, hidden)),
        ]
        read = torch.cat(both[::-1] if self.layout == "mimo_7b" else both, -1)
        states = read @ self._beside(layer, fc).T
        states = states + self._attend(layer, self._norm(states, self._of(layer, "input_layernorm.weight")))
        states = states + self._feed(layer, self._norm(states, self._of(layer, f"{behind}.weight")))
        return self._norm(states, self._beside(layer, norm))

    def _beside(self, layer: int, name: str) -> Tensor:
        return self.weights[f"mtp.{name}.weight"] if self.layout == "qwen3_next" else self._of(layer, f"{name}.weight")

    def _prefix(self, layer: int) -> str:
        first = self.config.num_hidden_layers
        return {
            "qwen3_next": f"mtp.layers.{layer}.",
            "deepseek_v3": f"model.layers.{first + layer}.",
            "mimo_7b": f"model.mtp_layers.{layer}.",
            "speculators": f"mtp_layers.{layer}.",
            "mimo_v2": f"model.mtp.layers.{layer}.",
        }[self.layout]

    def _of(self, layer: int, name: str) -> Tensor:
        return self.weights[self._prefix(layer) + name]

    def _norm(self, rows: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        eps = self.config.rms_norm_eps if eps is None else eps
        scale = (rows.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        return rows * scale * (weight + 1.0 if self.layout == "qwen3_next" else weight)

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attend(self, layer: int, rows: Tensor) -> Tensor:
        if self._prefix(layer) + "self_attn.kv_b_proj.weight" in self.weights:
            queries, keys, values = self._latent(layer, rows)
            gate = None
        else:
            queries, keys, values, gate = self._plain(layer, rows)
        n, groups = len(rows), queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = torch.einsum("ihd,jhd->hij", queries, keys) / queries.shape[-1] ** 0.5
        distance = torch.arange(n)[:, None] - torch.arange(n)
        window = self.config.sliding_window if self.layout == "mimo_v2" else n
        scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
        sinks = self.weights.get(self._prefix(layer) + "self_attn.attention_sink_bias")
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], -1)
        found = torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :n], values).flatten(1)
        return (found if gate is None else found * gate.sigmoid()) @ self._of(layer, "self_attn.o_proj.weight").T

    def _plain(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        n, dim = len(rows), self._head_dim()
        queries, keys, values = (self._projected(layer, name, rows) for name in "qkv")
        gate = None
        if self.layout == "qwen3_next":
            both = queries.view(n, -1, 2 * dim)
            queries, gate = both[..., :dim], both[..., dim:].flatten(1)
        queries, keys = queries.reshape(n, -1, dim), keys.view(n, -1, dim)
        if self._prefix(layer) + "self_attn.q_norm.weight" in self.weights:
            queries = self._norm(queries, self._of(layer, "self_attn.q_norm.weight"))
            keys = self._norm(keys, self._of(layer, "self_attn.k_norm.weight"))
        scale = self.config.attention_value_scale if self.layout == "mimo_v2" else 1.0
        values = values.view(n, keys.shape[1], -1) * scale
        return self._turned(queries), self._turned(keys), values, gate

    def _projected(self, layer: int, name: str, rows: Tensor) -> Tensor:
        found = rows @ self._of(layer, f"self_attn.{name}_proj.weight").T
        bias = self.weights.get(f"{self._prefix(layer)}self_attn.{name}_proj.bias")
        return found if bias is None else found + bias

    def _latent(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, n = self.config, len(rows)
        weights = {name: self._of(layer, f"self_attn.{name}.weight") for name in ("q_a_proj", "q_b_proj", "kv_b_proj")}
        inner = self._norm(rows @ weights["q_a_proj"].T, self._of(layer, "self_attn.q_a_layernorm.weight"), 1e-6)
        queries = (inner @ weights["q_b_proj"].T).view(n, c.num_attention_heads, -1)
        both = rows @ self._of(layer, "self_attn.kv_a_proj_with_mqa.weight").T
        latent = self._norm(both[:, : c.kv_lora_rank], self._of(layer, "self_attn.kv_a_layernorm.weight"), 1e-6)
        wide = (latent @ weights["kv_b_proj"].T).view(n, c.num_attention_heads, -1)
        turned = self._turned_pairs(both[:, None, c.kv_lora_rank :]).expand(-1, c.num_attention_heads, -1)
        plain = c.qk_nope_head_dim
        queries = torch.cat([queries[..., :plain], self._turned_pairs(queries[..., plain:])], -1)
        return queries, torch.cat([wide[..., :plain], turned], -1), wide[..., plain:]

    def _head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads)

    def _angles(self, rows: Tensor, size: int) -> Tensor:
        rope = self.config.rope_parameters
        theta = rope.get("sliding_attention", rope)["rope_theta"]
        steps = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        return torch.arange(len(rows), dtype=torch.float64)[:, None, None] * steps

    def _turned(self, rows: Tensor) -> Tensor:
        rope = self.config.rope_parameters
        share = rope.get("sliding_attention", rope).get("partial_rotary_factor", 1.0)
        size = int(rows.shape[-1] * share)
        angles = self._angles(rows, size)
        first, second, rest = rows[..., : size // 2], rows[..., size // 2 : size], rows[..., size:]
        turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
        return torch.cat([*turned, rest], -1)

    def _turned_pairs(self, rows: Tensor) -> Tensor:
        angles = self._angles(rows, rows.shape[-1])
        first, second = rows[..., ::2], rows[..., 1::2]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)

    # -- what comes behind attention -----------------------------------------------------------------------------------

    def _feed(self, layer: int, rows: Tensor) -> Tensor:
        if self._prefix(layer) + "mlp.gate.weight" not in self.weights:
            return self._gated(layer, "mlp", rows)
        logits = rows @ self._of(layer, "mlp.gate.weight").T
        count, qwen = self.config.num_experts_per_tok, self.layout == "qwen3_next"
        chances = logits.softmax(-1) if qwen else logits.sigmoid()
        chosen = chances if qwen else chances + self._of(layer, "mlp.gate.e_score_correction_bias")
        groups = 1 if qwen else self.config.n_group
        best = chosen.view(len(rows), groups, -1).topk(2, -1).values.sum(-1).topk(1 if qwen else self.config.topk_group, -1)
        allowed = (
            torch.zeros(len(rows), groups).scatter_(1, best.indices, 1.0).repeat_interleave(chosen.shape[1] // groups, 1)
        )
        picked = chosen.masked_fill(allowed == 0, float("-inf")).topk(count, -1).indices
        weights = chances.gather(1, picked)
        weights = weights / weights.sum(-1, keepdim=True) if getattr(self.config, "norm_topk_prob", True) else weights
        weights = weights if qwen else weights * self.config.routed_scaling_factor
        out = torch.stack(
            [
                sum(w * self._gated(layer, f"mlp.experts.{int(i)}", row) for w, i in zip(own, which, strict=True))
                for row, own, which in zip(rows, weights, picked, strict=True)
            ]
        )
        if qwen:
            share = (rows @ self._of(layer, "mlp.shared_expert_gate.weight").T).sigmoid()
            return out + share * self._gated(layer, "mlp.shared_expert", rows)
        return out + self._gated(layer, "mlp.shared_experts", rows)

    def _gated(self, layer: int, part: str, rows: Tensor) -> Tensor:
        gate, up, down = (self._of(layer, f"{part}.{name}_proj.weight") for name in ("gate", "up", "down"))
        return (F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
