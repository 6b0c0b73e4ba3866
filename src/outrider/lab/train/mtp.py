"""Trains layers that predict several tokens (Gloeckle et al. 2024; DeepSeek-V3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.errors import UnsupportedModelError
from outrider.files import write_tensors
from outrider.heads.formats.mtp import (
    MtpConfig,
    MtpTensors,
    carries_mtp,
    name_mtp,
    new_mtp_config,
    read_mtp,
    read_mtp_config,
)
from outrider.heads.lone import SeenContext, new_tensors
from outrider.heads.mtp import MtpLayer, load_mtp_layer
from outrider.heads.networks import TargetHead
from outrider.lab.train.depths import shifted
from outrider.lab.train.eagle import Design, FeatureHeadSettings
from outrider.lab.train.target import FrozenTarget
from outrider.loading.sources import WHOLE
from outrider.records import Manifest

#: Standard deviation of the weights with which a new layer meets the embedding.
_SPREAD = 0.02


class MtpSettings(FeatureHeadSettings):
    """Layers that predict several tokens."""

    method: Literal["mtp"] = "mtp"
    # Folder with the layers that training begins with. None takes those of the target's checkpoint, and one new layer where
    # it has none.
    init: str | None = Field(None, min_length=1, description="Use a local folder, or None.")
    # Draft tokens behind each token of a text that they learn.
    unroll: int = Field(4, ge=1, le=16, description="Use 1 to 16.")

    def design(self, target: FrozenTarget, manifest: Manifest, data: Path) -> Design:
        whole = target.model.config.get_text_config(decoder=True)
        folder = self._begins_with(target, whole)
        if folder is None:
            config, tensors = _new(target, whole)
        else:
            config, tensors = read_mtp_config(folder, whole), read_mtp(folder, whole)
        layers = [load_mtp_layer(folder or target.name, config, each, torch.float32, target.device) for each in tensors]
        _let_learn(layers, shared=config.shared)
        facts = {"layers": len(layers), "begun with": "a new layer" if folder is None else "layers that were there"}
        return Design(
            method=self.method,
            layers=(target.num_layers,),
            tokens=None,
            module=UnrolledMtp(layers, config.window),
            save=partial(_save, layers=layers, config=whole, folder=folder),
            learnt=self.unroll,
            most=None,
            rows=None,
            facts=facts,
        )

    def _begins_with(self, target: FrozenTarget, config: Any) -> str | None:
        """The folder with the layers that training begins with; None for a new one."""
        if self.init is not None:
            return self.init
        own = target.folder()
        return own if own is not None and carries_mtp(own, config) else None


def _new(target: FrozenTarget, whole: Any) -> tuple[MtpConfig, list[MtpTensors]]:
    """A new layer of the target's type. It begins with what the target's final norm leaves, to which little of the token's
    embedding is added, and ends with a copy of that norm."""
    norm = getattr(target.model.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    if not isinstance(norm, nn.Module) or not isinstance(weight, Tensor):
        problem = f"decoder layers of {whole.model_type} do not end with a norm that a layer of its own could have"
        raise UnsupportedModelError(target.name, problem, "Train eagle3 or eagle1 for it.")
    config = new_mtp_config(whole)
    decoder = {name: weight.float() for name, weight in new_tensors(target.name, config.layer).items()}
    plain, size = decoder["norm.weight"], int(whole.hidden_size)
    fc = torch.cat([_SPREAD * torch.randn(size, size), torch.eye(size)], 1)
    own = {"norm.weight": weight.detach().float().cpu().clone()}  # a copy, since the target does not learn
    return config, [MtpTensors(fc, plain.clone(), plain.clone(), {**decoder, **own})]


def _let_learn(layers: Sequence[MtpLayer], *, shared: bool) -> None:
    """Let all weights learn; where layers share what is beside their decoder layers, they go on to share it."""
    first = layers[0]
    for layer in layers:
        layer.requires_grad_(True)
        layer.decoder.stack.get_input_embeddings().requires_grad_(False)  # which nothing reads
        if shared:
            layer.fc, layer.embedding_norm, layer.hidden_norm = first.fc, first.embedding_norm, first.hidden_norm
            layer.decoder.stack.norm = first.decoder.stack.norm


def _save(path: Path, layers: Sequence[MtpLayer], config: Any, folder: str | None) -> None:
    """Write the layers as one file, by the names that they had in `folder`. Raises StorageError."""
    tensors = [_tensors(layer) for layer in layers]
    write_tensors(path / WHOLE, name_mtp(tensors, config, folder), {"format": "pt"})


def _tensors(layer: MtpLayer) -> MtpTensors:
    own: dict[str, Tensor] = {"fc": layer.fc.weight}
    own |= {name: getattr(layer, name).weight for name in ("embedding_norm", "hidden_norm")}
    return MtpTensors(**own, decoder=layer.decoder.tensors())


# --- UnrolledMtp: layers for the prediction of several tokens that draft behind every token of a text at once.
#
# Layer d of them, from 0, drafts token i + d + 1 behind token i, and the last layer goes on alone, as it will in the
# engine. The row of token i reads, in the first layer, the token beside what the target's final norm left of token i -
# 1; in layer d it reads token i + d beside what layer d - 1 left in this row. A row sees the first rows of its text up
# to its own, and its own later rows in the same layer. Tokens that were drafted are those of the text, as in
# `UnrolledHead`.


class UnrolledMtp(nn.Module):
    """Such layers in training. Their rows look so many tokens back as the window has; None for all."""

    def __init__(self, layers: Sequence[MtpLayer], window: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._window = window

    def forward(
        self, embeddings: Tensor, hidden: list[Tensor], wanted: Sequence[Tensor], target_head: TargetHead
    ) -> list[Tensor]:
        """Logits [n, vocab_size] of the draft tokens of each depth; see `Design`."""
        (states,) = hidden
        features = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        logits = []
        kept: list[tuple[Tensor, Tensor]] = []
        for depth, rows in enumerate(wanted):
            if depth < len(self.layers):
                layer, kept = self.layers[depth], []
            assert isinstance(layer, MtpLayer)
            features = self._through(layer, shifted(embeddings, depth), features, depth, kept)
            logits.append(target_head(features[rows]))
        return logits

    def _through(
        self, layer: MtpLayer, embeddings: Tensor, features: Tensor, depth: int, kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Returns what a layer leaves [num_texts, num_tokens, hidden_size], behind its norm. What it keeps of the rows is
        added to `kept`."""
        texts, length = embeddings.shape[:2]
        rows = layer.enter(embeddings, features).flatten(0, 1).float()
        positions = [depth + place for place in range(length)] * texts
        left: Tensor = layer.decoder(rows, positions, partial(self._look, texts, kept))
        return left.reshape(embeddings.shape)

    def _look(self, texts: int, kept: list[tuple[Tensor, Tensor]], keys: Tensor, values: Tensor) -> list[SeenContext]:
        """Returns what the rows of each text see in a layer, of keys and values [num_texts * num_tokens, num_kv_heads,
        dim]."""
        kept.append((keys, values))
        length = len(keys) // texts
        mask = self._mask(length, len(kept), keys)
        spans = [slice(text * length, (text + 1) * length) for text in range(texts)]
        return [SeenContext(span, *_joined(kept, span), mask) for span in spans]

    def _mask(self, length: int, depths: int, like: Tensor) -> Tensor:
        """[length, depths * length] additive: a row sees the first rows up to its own, and its own later rows. Row 0, which
        nobody may look at, sees itself, to be a number."""
        places = torch.arange(length, device=like.device)
        own = places == places[:, None]
        first = (places <= places[:, None]) & (places > 0) | own
        seen = torch.cat([first, *[own] * (depths - 1)], 1)
        if self._window is not None:
            positions = torch.cat([places + depth for depth in range(depths)])
            seen &= places[:, None] + depths - 1 - positions < self._window
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))


def _joined(kept: Sequence[tuple[Tensor, Tensor]], rows: slice) -> tuple[Tensor, Tensor]:
    """The keys and values of some rows of all depths, one depth behind the other."""
    return torch.cat([keys[rows] for keys, _ in kept]), torch.cat([values[rows] for _, values in kept])
