"""DFlash and DSpark in plain PyTorch, read from the published files by their own names, with no code of the package."""

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
        nested = mapping.get("dflash_config", mapping)
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
        sequential = "markov_rank" in mapping
        self.from_anchor = mapping.get("sample_from_anchor", sequential)
        self.markov = mapping.get("markov_head_type", "vanilla") if mapping.get("markov_rank") else None
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def logits(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """Logits [vocab_size] of the token behind a text that the target has computed but for its last token, and a path
        that was drafted behind it, of which only the length counts unless the head is sequential."""
        own = self._rows(text)[1][len(path)]
        if self.markov is not None:
            own = own + self._bias(text, path)[0]
        if "d2t" not in self.weights:
            return own
        wide = torch.full((self.sizes["vocab_size"],), float("-inf"), dtype=torch.float64)
        for i, value in enumerate(own):
            wide[i + int(self.weights["d2t"][i])] = value
        return wide

    @torch.no_grad()
    def chance(self, text: tuple[int, ...], path: tuple[int, ...]) -> float:
        """The chance that the token behind a text and a path stands, as the head guesses it."""
        read = self._rows(text)[0][len(path)]
        if self.weights["confidence_head.proj.weight"].shape[1] > len(read):
            read = torch.cat([read, self._bias(text, path)[1]])
        weight, bias = (self.weights[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        return float(torch.sigmoid(weight[0] @ read + bias[0]))

    def _bias(self, text: tuple[int, ...], path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The bias of the place behind a text and a path, and the embedding of the token before it."""
        first, second = (self.weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        tokens, states = (text[-1], *path), self._rows(text)[0]
        embedding = first[tokens[-1]]
        if self.markov == "vanilla":
            return second @ embedding, embedding
        if self.markov == "gated":
            weight, bias = (self.weights[f"markov_head.gate_proj.{name}"] for name in ("weight", "bias"))
            gate = torch.sigmoid(weight @ torch.cat([states[len(path)], embedding]) + bias)
            return second @ (gate * embedding), embedding
        weight, bias = (self.weights[f"markov_head.joint_proj.{name}"] for name in ("weight", "bias"))
        state, rank = torch.zeros_like(embedding), len(embedding)
        for place, token in enumerate(tokens):
            found = weight @ torch.cat([state, first[token], states[place]]) + bias
            gate = torch.sigmoid(found[:rank])
            state = gate * state + (1 - gate) * torch.tanh(found[rank : 2 * rank])
        return second @ torch.tanh(found[2 * rank :]), embedding

    def _rows(self, text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The states and the logits of the places of the block behind a text."""
        if text not in self._known:
            states, logits = self._block(text)
            ahead = 0 if self.from_anchor else 1
            self._known[text] = states[ahead:], logits[ahead:]
        return self._known[text]

    def _block(self, text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The states and the logits of all rows of the block behind a text."""
        states = self.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        joined = torch.cat([states[i][0].double() for i in self.states], -1)
        context = self._norm(joined @ self.weights["fc.weight"].T, "hidden_norm.weight")
        tokens = torch.tensor([text[-1]] + [self.mask] * (self.block_size - 1))
        rows = self._embedded(tokens)
        for number in range(len(self.windows)):
            rows = self._layer(number, rows, context)
        left = self._norm(rows, "norm.weight")
        return left, self._output(left)

    def _embedded(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model.get_input_embeddings().weight.double()[tokens]
        return found

    def _output(self, left: Tensor) -> Tensor:
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
