"""Layers for the prediction of several tokens (Gloeckle et al. 2024; DeepSeek-V3) that are to be trained."""

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
from outrider.heads.mtp_head import MtpLayer, load_mtp_layer
from outrider.model.loading.files import WHOLE
from outrider.model.lone_decoder import new_tensors
from outrider.train.feature_heads import Design, FeatureHeadSettings
from outrider.train.manifest import Manifest
from outrider.train.target import FrozenTarget
from outrider.train.unrolled_mtp import UnrolledMtp

#: Standard deviation of the weights with which a new layer meets the embedding.
_SPREAD = 0.02


class MtpSettings(FeatureHeadSettings):
    """Layers that predict several tokens.

    Attributes:
        init: Folder with the layers that training begins with. None takes those of the target's checkpoint, and one new
            layer where it has none.
        unroll: Draft tokens behind each token of a text that they learn.
    """

    method: Literal["mtp"] = "mtp"
    init: str | None = Field(None, min_length=1, description="Use a local folder, or None.")
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
    embedding is added, and ends with a copy of that norm.

    Raises:
        UnsupportedModelError: The type has no decoder layers that can stand alone.
    """
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
