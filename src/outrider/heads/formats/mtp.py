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

All of them read [embedding, hidden state], each behind a norm of its own, but MiMo-7B reads [hidden state, embedding]; the
halves of its projection are exchanged here. The hidden state is what the target's final norm leaves. What the next token
reads, and the output layer too, is what the layer leaves behind its own norm. vLLM gives the next token what lies before
that norm in the second layout. SGLang does as is done here, since the layer was trained to read what has been normed. vLLM
also reads zeros in place of the embedding of the second token of a text in that layout, and neither SGLang nor the report
on DeepSeek-V3 does so, and nor is it done here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.heads.formats.folder import HeadTensor, list_tensors, read_tensors
from outrider.model.lone_decoder import lone_config

_DOWNLOAD = "Download or save the checkpoint again."


class _Layout(NamedTuple):
    """How a family names these tensors.

    Attributes:
        layer: Pattern of the names in a layer: its number, then the name.
        first: Number of the first layer; None for the number of the model's layers.
        shared: What comes before names that all layers share; None where each has its own.
        own: Names here of tensors beside the decoder layer, by theirs.
        renamed: Names of the model's layers, by other names of the same tensors.
        unused: Copies of the target's tensors.
        layer_type: Kind of attention, where the model has several.
        hidden_first: Whether the hidden state comes before the embedding.
    """

    layer: re.Pattern[str]
    first: int | None
    shared: str | None
    own: Mapping[str, str]
    renamed: Mapping[str, str]
    unused: tuple[str, ...]
    layer_type: str
    hidden_first: bool = False


_OWN = {"eh_proj.weight": "fc", "enorm.weight": "embedding_norm", "hnorm.weight": "hidden_norm"}
_MIMO = {
    "input_proj.weight": "fc",
    "token_layernorm.weight": "embedding_norm",
    "hidden_layernorm.weight": "hidden_norm",
    "final_layernorm.weight": "norm",
}
_LAYOUTS = (
    _Layout(
        re.compile(r"mtp\.layers\.(\d+)\.(.+)"),
        0,
        "mtp.",
        {
            "fc.weight": "fc",
            "pre_fc_norm_embedding.weight": "embedding_norm",
            "pre_fc_norm_hidden.weight": "hidden_norm",
            "norm.weight": "norm",
        },
        {},
        (),
        "full_attention",
    ),
    _Layout(
        re.compile(r"model\.mtp\.layers\.(\d+)\.(.+)"),
        0,
        None,
        {**_OWN, "final_layernorm.weight": "norm"},
        {"pre_mlp_layernorm.weight": "post_attention_layernorm.weight"},
        (),
        "sliding_attention",
    ),
    _Layout(re.compile(r"model\.mtp_layers\.(\d+)\.(.+)"), 0, None, _MIMO, {}, (), "full_attention", hidden_first=True),
    _Layout(re.compile(r"mtp_layers\.(\d+)\.(.+)"), 0, None, _MIMO, {}, (), "full_attention"),
    _Layout(
        re.compile(r"model\.layers\.(\d+)\.(.+)"),
        None,
        None,
        {**_OWN, "shared_head.norm.weight": "norm"},
        {},
        ("shared_head.head.weight", "embed_tokens.weight"),
        "full_attention",
    ),
)


class MtpTensors(NamedTuple):
    """One layer, as its file has it.

    Attributes:
        fc: [hidden_size, 2 * hidden_size]
        embedding_norm, hidden_norm: [hidden_size] of what is read.
        decoder: Tensors of the decoder layer and of the norm behind it, as `load_lone_decoder` takes them.
    """

    fc: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    decoder: Mapping[str, Tensor]


class MtpConfig(NamedTuple):
    """What a checkpoint says of such layers.

    Attributes:
        num_layers: How many there are.
        layer: transformers' configuration of one.
        window: How many tokens back its rows look; None for all.
    """

    num_layers: int
    layer: Any
    window: int | None


def read_mtp_config(folder: str, config: Any) -> MtpConfig:
    """What a checkpoint says of its layers, without their numbers.

    Args:
        folder: Of the checkpoint.
        config: transformers' configuration of the model.

    Raises:
        InvalidParameterError: No such folder.
        UnsupportedModelError: It has no such layers.
        ModelLoadError: They are not complete, or the files cannot be read.
    """
    layout, names = _found(folder, config, list_tensors(folder))
    layers = sorted({int(match[1]) for each in names if (match := layout.layer.fullmatch(each))})
    first = _first(layout, config)
    missing = sorted({*range(first, layers[-1])} - {*layers})
    if missing:
        problem = f"of its layers that predict several tokens, number {missing[0]} is missing"
        raise ModelLoadError(folder, problem, _DOWNLOAD)
    experts = any(".mlp.experts." in each for each in names)
    layer = lone_config(config, experts=experts, layer_type=layout.layer_type)
    windowed = layout.layer_type == "sliding_attention" and getattr(layer, "layer_types", None) is not None
    return MtpConfig(len(layers), layer, layer.sliding_window if windowed else None)


def read_mtp(folder: str, config: Any) -> list[MtpTensors]:
    """The layers of a checkpoint; the arguments and errors are those of `read_mtp_config`."""
    layout, names = _found(folder, config, list_tensors(folder))
    tensors = read_tensors(folder, names)
    first, count = _first(layout, config), read_mtp_config(folder, config).num_layers
    return [_layer(folder, layout, tensors, number) for number in range(first, first + count)]


def _found(folder: str, config: Any, names: list[str]) -> tuple[_Layout, list[str]]:
    """The layout that a checkpoint has, and its tensors of that layout."""
    for layout in _LAYOUTS:
        first = _first(layout, config)
        matches = [match for each in names if (match := layout.layer.fullmatch(each)) and int(match[1]) >= first]
        if any(layout.shared is not None or match[2] in layout.own for match in matches):
            found = [match[0] for match in matches]
            return layout, found + [each for each in names if layout.shared and each.startswith(layout.shared)]
    problem = "its checkpoint carries no layers that predict several tokens, in no layout that is known"
    raise UnsupportedModelError(folder, problem, "Use another method.")


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
    fc = own["fc"].roll(own["fc"].shape[-1] // 2, -1) if layout.hidden_first else own["fc"]
    return MtpTensors(fc, own["embedding_norm"], own["hidden_norm"], decoder | {"norm.weight": own["norm"]})
