"""Layers for the prediction of several tokens (MTP) that a checkpoint itself carries, beside those of the model.

transformers leaves these tensors out when it loads the model. They are read here, in five layouts:

- Qwen3-Next and Qwen3.5: `mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.norm`, `mtp.layers.i.*`. The
  layers share all but themselves.
- DeepSeek-V3 and GLM-4.5: `model.layers.{L + i}.*` behind the L layers of the model, with `eh_proj`, `enorm`, `hnorm` and
  `shared_head.norm` in each. Copies of the embeddings and of the output layer are not used: the target lends its own.
- MiMo-V2-Flash: `model.mtp.layers.i.*` with `eh_proj`, `enorm`, `hnorm`, `final_layernorm` and `pre_mlp_layernorm`, a dense
  layer that looks back over a window.
- MiMo-7B: `model.mtp_layers.i.*` with `input_proj`, `token_layernorm`, `hidden_layernorm` and `final_layernorm`.
- speculators, in a folder beside the checkpoint: `mtp_layers.0.*` with the same names.

GGUF files have them as `blk.{L + i}.*` with `nextn.*`, and are read as the second layout is.

All of them read [embedding, hidden state], each behind a norm of its own, but MiMo-7B reads [hidden state, embedding]; the
halves of its projection are exchanged here. The hidden state is what the target's final norm leaves. What the next token
reads, and the output layer too, is what the layer leaves behind its own norm. vLLM gives the next token what lies before
that norm in the second layout. SGLang does as is done here, since the layer was trained to read what has been normed. vLLM
also reads zeros in place of the embedding of the second token of a text in that layout, and neither SGLang nor the report
on DeepSeek-V3 does so, and nor is it done here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.heads.formats.folder import HeadTensor, list_tensors, read_tensors
from outrider.heads.lone import lone_config
from outrider.loading.gguf.header import is_gguf
from outrider.loading.gguf.prediction import PredictionLayers, carries_prediction_layers, holds_prediction_layers_alone

_DOWNLOAD = "Download or save the checkpoint again."
#: Types of models in whose checkpoints such a layer is two: attention, and behind it experts.
_OF_TWO_LAYERS = ("nemotron_h",)


class _Layout(NamedTuple):
    """Says how a family names these tensors."""

    prefix: str  # what comes before the names in a layer, with {} for its number
    own: Mapping[str, str]  # names here of tensors beside the decoder layer, by theirs
    first: int | None = 0  # number of the first layer; None for the number of the model's layers
    shared: str | None = None  # what comes before names that all layers share; None where each has its own
    renamed: Mapping[str, str] = MappingProxyType({})  # names of the model's layers, by other names of the same tensors
    unused: tuple[str, ...] = ()  # copies of the target's tensors
    layer_type: str = "full_attention"  # kind of attention, where the model has several
    hidden_first: bool = False  # whether the hidden state comes before the embedding

    @property
    def layer(self) -> re.Pattern[str]:
        """Matches the names in a layer: its number, then the name."""
        return re.compile(re.escape(self.prefix).replace(r"\{\}", r"(\d+)") + "(.+)")


_QWEN = {
    "fc.weight": "fc",
    "pre_fc_norm_embedding.weight": "embedding_norm",
    "pre_fc_norm_hidden.weight": "hidden_norm",
    "norm.weight": "norm",
}
_DEEPSEEK = {"eh_proj.weight": "fc", "enorm.weight": "embedding_norm", "hnorm.weight": "hidden_norm"}
_MIMO = {
    "input_proj.weight": "fc",
    "token_layernorm.weight": "embedding_norm",
    "hidden_layernorm.weight": "hidden_norm",
    "final_layernorm.weight": "norm",
}
_SPECULATORS = _Layout("mtp_layers.{}.", _MIMO)
_LAYOUTS = (
    _Layout("mtp.layers.{}.", _QWEN, shared="mtp."),
    _Layout(
        "model.mtp.layers.{}.",
        {**_DEEPSEEK, "final_layernorm.weight": "norm"},
        renamed={"pre_mlp_layernorm.weight": "post_attention_layernorm.weight"},
        layer_type="sliding_attention",
    ),
    _Layout("model.mtp_layers.{}.", _MIMO, hidden_first=True),
    _SPECULATORS,
    _Layout(
        "model.layers.{}.",
        {**_DEEPSEEK, "shared_head.norm.weight": "norm"},
        first=None,
        unused=("shared_head.head.weight", "embed_tokens.weight"),
    ),
)


class MtpTensors(NamedTuple):
    """One layer, as its file has it."""

    fc: Tensor  # [hidden_size, 2 * hidden_size]
    embedding_norm: Tensor  # [hidden_size] of what is read
    hidden_norm: Tensor
    #: Tensors of the decoder layer and of the norm behind it, as `load_lone_decoder` takes them.
    decoder: Mapping[str, Tensor]


class MtpConfig(NamedTuple):
    """A checkpoint says this of such layers."""

    num_layers: int  # how many there are
    layer: Any  # transformers' configuration of one
    window: int | None  # how many tokens back its rows look; None for all
    shared: bool  # whether all layers have the same projection and norms beside their decoder layer


def read_mtp_config(folder: str, config: Any) -> MtpConfig:
    """Reads what a folder or a GGUF file says of its layers, without their numbers, given the model's configuration."""
    _check_kind(folder, config)
    file = PredictionLayers(folder, config) if is_gguf(folder) else None
    layout, names = _found(folder, config, list_tensors(folder) if file is None else file.names)
    layers = sorted({int(match[1]) for each in names if (match := layout.layer.fullmatch(each))})
    first = _first(layout, config)
    missing = sorted({*range(first, layers[-1])} - {*layers})
    if missing:
        problem = f"of its layers that predict several tokens, number {missing[0]} is missing"
        raise ModelLoadError(folder, problem, _DOWNLOAD)
    experts = any(".mlp.experts." in each for each in names)
    layer_type = layout.layer_type if file is None else file.layer_type
    layer = lone_config(config, experts=experts, layer_type=layer_type)
    windowed = layer_type == "sliding_attention" and getattr(layer, "layer_types", None) is not None
    shared = layout.shared is not None if file is None else file.shared
    return MtpConfig(len(layers), layer, layer.sliding_window if windowed else None, shared)


def read_mtp(folder: str, config: Any) -> list[MtpTensors]:
    """The layers of a folder; the arguments and errors are those of `read_mtp_config`."""
    layout, names = _found(folder, config, list_tensors(folder))
    tensors = read_tensors(folder, names)
    first, count = _first(layout, config), read_mtp_config(folder, config).num_layers
    return [_layer(folder, layout, tensors, number) for number in range(first, first + count)]


def carries_mtp(folder: str, config: Any) -> bool:
    """Tells if a checkpoint has such layers."""
    if is_gguf(folder):
        return carries_prediction_layers(folder, config)
    return _layout_of(config, list_tensors(folder)) is not None


def holds_mtp_alone(path: str) -> bool:
    """Tells if a folder or a GGUF file holds such layers and no model beside them, which would have a configuration.
    Raises ModelError for what cannot be read."""
    if is_gguf(path):
        return holds_prediction_layers_alone(path)
    if not Path(path).is_dir() or (Path(path) / "config.json").exists():
        return False
    names = list_tensors(path)
    found = ((layout, layout.layer.fullmatch(name)) for layout in _LAYOUTS for name in names)
    return any(match and (layout.shared is not None or match[2] in layout.own) for layout, match in found)


def new_mtp_config(config: Any) -> MtpConfig:
    """Describes one new layer for a model: it is like the model's own layers that see the whole text."""
    experts = getattr(config, "num_experts_per_tok", None) is not None
    return MtpConfig(1, lone_config(config, experts=experts, layer_type="full_attention"), None, shared=False)


def name_mtp(layers: Sequence[MtpTensors], config: Any, folder: str | None) -> dict[str, Tensor]:
    """Names the tensors of layers as the checkpoint in a folder does; new ones, without a folder, get speculators'
    names."""
    layout = _SPECULATORS if folder is None else _found(folder, config, list_tensors(folder))[0]
    theirs = {ours: name for name, ours in layout.own.items()}
    renamed = {ours: name for name, ours in layout.renamed.items()}
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(layers, _first(layout, config)):
        start = layout.prefix.format(number)
        decoder = {name.removeprefix("layers.0."): weight for name, weight in layer.decoder.items()}
        beside = {
            "fc": _exchanged(layer.fc) if layout.hidden_first else layer.fc,
            "embedding_norm": layer.embedding_norm,
            "hidden_norm": layer.hidden_norm,
            "norm": decoder.pop("norm.weight"),
        }
        found |= {(layout.shared or start) + theirs[name]: weight for name, weight in beside.items()}
        found |= {start + renamed.get(name, name): weight for name, weight in decoder.items()}
    return found


def _check_kind(folder: str, config: Any) -> None:
    """Raise UnsupportedModelError for layers that are not computed."""
    if config.model_type in _OF_TWO_LAYERS:
        problem = f"a layer that predicts several tokens is two layers in a {config.model_type}, which is not computed"
        raise UnsupportedModelError(folder, problem, "Use another method.")


def _found(folder: str, config: Any, names: list[str]) -> tuple[_Layout, list[str]]:
    """The layout that a checkpoint has, and its tensors of that layout. Raises UnsupportedModelError."""
    found = _layout_of(config, names)
    if found is None:
        problem = "its checkpoint carries no layers that predict several tokens, in no layout that is known"
        raise UnsupportedModelError(folder, problem, "Use another method.")
    return found


def _layout_of(config: Any, names: list[str]) -> tuple[_Layout, list[str]] | None:
    for layout in _LAYOUTS:
        first = _first(layout, config)
        matches = [match for each in names if (match := layout.layer.fullmatch(each)) and int(match[1]) >= first]
        if any(layout.shared is not None or match[2] in layout.own for match in matches):
            found = [match[0] for match in matches]
            return layout, found + [each for each in names if layout.shared and each.startswith(layout.shared)]
    return None


def _first(layout: _Layout, config: Any) -> int:
    return int(config.num_hidden_layers) if layout.first is None else layout.first


def _layer(folder: str, layout: _Layout, tensors: Mapping[str, HeadTensor], number: int) -> MtpTensors:
    own: dict[str, Tensor] = {}
    decoder: dict[str, Tensor] = {}
    for key, (tensor, _) in tensors.items():
        match = layout.layer.fullmatch(key)
        if match is None and layout.shared is not None:
            inner = key.removeprefix(layout.shared)
        elif match is not None and int(match[1]) == number:
            inner = match[2]
        else:
            continue
        if inner in layout.own:
            own[layout.own[inner]] = tensor
        elif inner not in layout.unused:
            decoder[f"layers.0.{layout.renamed.get(inner, inner)}"] = tensor
    for wanted in sorted({*layout.own.values()} - own.keys()):
        theirs = next(each for each, ours in layout.own.items() if ours == wanted)
        raise ModelLoadError(folder, f"its layer {number} that predicts several tokens has no {theirs}", _DOWNLOAD)
    fc = _exchanged(own["fc"]) if layout.hidden_first else own["fc"]
    return MtpTensors(fc, own["embedding_norm"], own["hidden_norm"], decoder | {"norm.weight": own["norm"]})


def _exchanged(fc: Tensor) -> Tensor:
    """A projection of [hidden state, embedding] as one of [embedding, hidden state], or the other way round."""
    return fc.roll(fc.shape[-1] // 2, -1)
