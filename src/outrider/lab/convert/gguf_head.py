"""Heads of EAGLE-3 as GGUF files, in the layout of llama.cpp; `heads/formats/gguf.py` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.heads.features import FeatureHeadConfig, FeatureNorm
from outrider.heads.formats.folder import renamed
from outrider.heads.formats.gguf import GGUF_EAGLE3, LAYERS
from outrider.heads.formats.published import PublishedHead, read_head
from outrider.lab.convert.gguf import check_describable, frequency_factors, write_file
from outrider.lab.convert.gguf_families import FAMILIES, Paired
from outrider.lab.convert.gguf_vocabulary import WriteVocabulary, own_vocabulary
from outrider.loading.exclusive import attempt

#: The types of weights that a file holds with all their bits, with their names in the gguf package.
_STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
#: Layers of the target that llama.cpp reads.
_NUM_LAYERS = 3
_OTHERS = "Write it in the format of speculators."


def write_gguf_head(
    source: str, path: Path, target: str | None = None, vocabulary: WriteVocabulary | None = None
) -> PublishedHead:
    """Write a head as a file, and return it. All weights keep their bits."""
    import gguf

    head = read_head(source)
    config, named, form = head.config, target or head.config.verifier, GGUF_EAGLE3
    _check_known(head)
    if not named and (vocabulary is None or config.aux_layers is None):
        problem = "the head does not name the model that it was made for, whose vocabulary a file holds"
        raise InvalidParameterError("target", None, problem, "Name it.")
    layers = config.aux_layers or config.layers_of(_num_layers(named))
    writer = gguf.GGUFWriter(None, form.method)
    FAMILIES[config.layer.model_type].describe(writer, config.layer)
    writer.add_array(f"{form.method}.{LAYERS[0]}", list(layers))
    writer.add_uint32(f"{form.method}.target_hidden_size", config.target_hidden_size)
    writer.add_bool(f"{form.method}.norm_before_residual", config.norm_before_residual)
    (vocabulary or own_vocabulary(named))(writer, config.vocab_size)
    for name, factors in frequency_factors(config.layer).items():
        writer.add_tensor(name, factors)
    names = form.published(config)
    for name, weight in head.network.state_dict().items():
        _add(writer, source, renamed(name, names), _arranged(config, name, weight))
    if head.tokens is not None:
        writer.add_tensor("d2t", head.tokens.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
    write_file(writer, path)
    return head


def _check_known(head: PublishedHead) -> None:
    """Raise UnsupportedModelError where llama.cpp would compute something else, or would not load the file."""
    config, layer = head.config, head.config.layer
    if config.method != GGUF_EAGLE3.method:
        raise UnsupportedModelError(head.folder, f"the layout of GGUF has no heads of {config.method}", _OTHERS)
    biases = ("attention_bias", "mlp_bias", "qkv_bias")
    special = {
        "norms of its features": config.feature_norm is not FeatureNorm.NONE,
        "norm_output": config.norm_output,
        f"a layer of {layer.model_type}": layer.model_type != "llama",
        "biases": any(getattr(layer, name, False) for name in biases),
        f"{config.num_features} layers of the target": config.num_features != _NUM_LAYERS,
    }
    for name in (name for name, found in special.items() if found):
        raise UnsupportedModelError(head.folder, f"it has {name}, which llama.cpp's heads do not have", _OTHERS)
    check_describable(head.folder, layer)


def _num_layers(target: str) -> int:
    """Layers of a model."""
    from transformers import AutoConfig

    load = AutoConfig.from_pretrained
    config = attempt(target, "its configuration cannot be read", load, target, local_files_only=True)
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def _arranged(config: FeatureHeadConfig, name: str, weight: Tensor) -> Tensor:
    """The rows of a tensor in the order of files: llama.cpp rotates neighbours."""
    heads = {"q_proj": config.layer.num_attention_heads, "k_proj": config.layer.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return weight
    order = Paired(count)(np.arange(len(weight)))
    return weight[torch.from_numpy(order)]


def _add(writer: Any, source: str, name: str, weight: Tensor) -> None:
    import gguf

    stored = _STORED_AS.get(weight.dtype)
    if stored is None:
        problem = f"its {name} is of {str(weight.dtype).removeprefix('torch.')}, which would lose bits in a file"
        raise UnsupportedModelError(source, problem, "Save the head in float32.")
    kind = gguf.GGMLQuantizationType[stored if weight.dim() > 1 else "F32"]  # vectors are always F32 in files
    rows = np.ascontiguousarray(weight.float().numpy())
    writer.add_tensor(name, rows if kind.name == "F32" else gguf.quants.quantize(rows, kind), raw_dtype=kind)
