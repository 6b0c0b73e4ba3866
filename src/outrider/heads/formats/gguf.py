"""The formats of llama.cpp for heads of EAGLE-3, DFlash and DSpark, and for assistants of Gemma 4: one GGUF file each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.heads.block_networks import (
    BlockHeadConfig,
    BlockHeadNetwork,
    BlockReach,
    JudgeInput,
    MarkovKind,
    MarkovShape,
)
from outrider.heads.features import Eagle3Network, FeatureHeadConfig
from outrider.heads.formats.deepspec import method_of
from outrider.heads.formats.folder import FULL, SLIDING, Format, HeadTensor, read_layer, read_layers, widths
from outrider.loading.gguf import gemma
from outrider.loading.gguf.architecture import ARCHITECTURES, PREDICTED, Architecture, read_shape
from outrider.loading.gguf.arrangement import row_order
from outrider.loading.gguf.header import AGAIN, GgufFile, read_gguf
from outrider.loading.gguf.names import GEMMA_4, LAYER, stock_names
from outrider.loading.gguf.rotary import FREQUENCY_FACTORS
from outrider.loading.gguf.values import Values

# --- What GGUF files of all heads have in common: tensors by llama.cpp's names, an absolute d2t, and numbers of layers.
#
# `d2t` holds the target's token for each of the head's own, and not how far it lies away. Weights in blocks become
# float32.


#: What to do with a file that computes something else.
ORIGINAL = "Use the head as it was published in safetensors."


#: Where the name of the kind of model that a file gives stands in the mapping of `Format.fits`.
ARCHITECTURE = "architecture"


def _read_tensors(
    file: GgufFile, unused: tuple[str, ...] = (), order: Callable[[str], Tensor | None] = lambda name: None
) -> dict[str, HeadTensor]:
    """The tensors of a file by llama.cpp's names, with a d2t that says how far the target's token lies away, as the formats
    in folders have it. `order` gives the rows of a tensor in the order that they have here, or None."""
    found: dict[str, Tensor] = {}
    for key, tensor in file.tensors.items():
        if key == "d2t":
            if tensor.type != "I64":
                raise ModelLoadError(file.path, f"d2t is of type {tensor.type}, and I64 is needed", AGAIN)
            found[key] = tensor.integers() - torch.arange(tensor.shape[0])
        elif key not in unused:
            rows, places = tensor.floats(), order(key)
            found[key] = rows if places is None or len(places) != len(rows) else rows[places]
            if not found[key].isfinite().all():
                raise ModelLoadError(file.path, f"{key} holds NaN or infinity", AGAIN)
    return {key: HeadTensor(tensor, Path(file.path).name) for key, tensor in found.items()}


def _vocab_size(values: Values) -> int:
    """Width of the target's logits, which the file's vocabulary names too."""
    tokens = values.file.metadata.get("tokenizer.ggml.tokens")
    return values.count("vocab_size", len(tokens) if isinstance(tokens, list) and tokens else None)


def _read_fields(values: Values, layer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The layer of a head, the widths around it, and the target's layers whose inputs it reads, which stand under one of
    these names: as `FeatureHeadConfig` has them."""
    drafted = values.file.tensors.get("d2t")
    ids: Any = next((found for name in names if (found := values.get(name)) is not None), None)
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids) or ids != sorted(set(ids)):
        problem = f"its {values.architecture}.{names[0]} is {ids!r}, and no list of the target's layers from low to high"
        raise ModelLoadError(values.file.path, problem, AGAIN)
    wide = {"target_hidden_size": values.count("target_hidden_size", layer.hidden_size)}
    return {"aux_layers": tuple(ids)} | widths(wide, layer, layer.vocab_size if drafted is None else drafted.shape[0])


# --- The format of llama.cpp's EAGLE-3 heads: one GGUF file, with llama.cpp's names and an absolute d2t.
#
# `target_layers` (`extract_layers` in older files) name the layers whose inputs are read, as files of SafeAILab do.
# Rows of queries and keys are interleaved for neighbours that turn together, and are put back here. The residual is the
# feature before its norm, unless `norm_before_residual` is true, and the next token reads what the layer left before
# the norm of the output layer.


#: Names of tensors in files, and here.
_EAGLE3_PREFIXES = {
    "token_embd.": "embed_tokens.",
    "output_norm.": "norm.",
    "output.": "lm_head.",
    "blk.0.attn_norm_2.": "layer.hidden_norm.",
    **{f"blk.0.{name}.": f"layer.{own}." for name, own in LAYER.items()},
}
_EAGLE3 = "eagle3"
#: Its layer is one of Llama, and is written as one.
_EAGLE3_LAYER = ARCHITECTURES["llama"]
#: Names of the list of the target's layers; the first is written.
LAYERS = ("target_layers", "extract_layers")
#: Flags of forks that llama.cpp does not know.
_FOREIGN_TO_EAGLE3 = ("fc_norm", "norm_before_fc", "norm_output")


def _read_eagle3(path: str, _: object = None) -> FeatureHeadConfig:
    file = read_gguf(path)
    values = Values(file)
    for name in _FOREIGN_TO_EAGLE3:
        if values.get(name):
            raise UnsupportedModelError(path, f"it has {_EAGLE3}.{name}, which is not known", ORIGINAL)
    shape = read_shape(values, _EAGLE3_LAYER) | {"vocab_size": _vocab_size(values)}
    layer = read_layer(path, shape, "llama")
    if FREQUENCY_FACTORS in file.tensors:
        layer.rope_parameters = _scaled(file, layer)
    normed = bool(values.get("norm_before_residual"))
    return FeatureHeadConfig(method="eagle3", **_read_fields(values, layer, LAYERS), norm_before_residual=normed)


def _read_eagle3_tensors(path: str) -> dict[str, HeadTensor]:
    """The tensors of a file by llama.cpp's names, rows of queries and keys in order."""
    layer = _read_eagle3(path).layer

    def order(name: str) -> Tensor | None:
        stock = stock_names(LAYER, name)
        return row_order(_EAGLE3_LAYER.arranged, stock[0], layer) if stock else None

    return _read_tensors(read_gguf(path), (FREQUENCY_FACTORS,), order)


def _scaled(file: GgufFile, layer: Any) -> dict[str, Any]:
    """Rotary positions whose frequencies are divided by the factors of a file, whatever the length of a text."""
    factors = file.tensors[FREQUENCY_FACTORS].floats()
    if factors.shape != (layer.head_dim // 2,) or not bool((factors > 0).all() and factors.isfinite().all()):
        problem = f"its {FREQUENCY_FACTORS} are no factors of {layer.head_dim // 2} frequencies"
        raise ModelLoadError(file.path, problem, AGAIN)
    told = factors.tolist()
    return {
        "rope_type": "longrope", "rope_theta": layer.rope_parameters["rope_theta"], "short_factor": told,
        "long_factor": told, "attention_factor": 1.0, "factor": 1.0,
        "original_max_position_embeddings": layer.max_position_embeddings,
    }  # fmt: skip


GGUF_EAGLE3 = Format(
    name="llama.cpp EAGLE-3",
    family="gguf",
    method="eagle3",
    network=Eagle3Network,
    prefixes=_EAGLE3_PREFIXES,
    fits=lambda mapping: mapping[ARCHITECTURE] == _EAGLE3,
    read=_read_eagle3,
    tensors=_read_eagle3_tensors,
)


# --- The format of llama.cpp's DFlash and DSpark heads: one GGUF file with its names, and the target's embeddings.
#
# `target_layers` name the layers whose *inputs* are read, one more than z-lab's ids of the same layers, and
# `block_size` counts the last token of the text too. The mask token stands among the values of the tokenizer. Norms are
# stored as they are. Rows see their block both ways unless `attention.causal` is true. For layers with a window
# llama.cpp and z-lab take different values where it is left out, so it is needed there.


_DFLASH = "dflash"
_WINDOW, _PATTERN, _CAUSAL = "attention.sliding_window", "attention.sliding_window_pattern", "attention.causal"
_ANCHOR = "sample_from_anchor"
#: Its layers are those of Qwen3, and are written as such.
_DFLASH_LAYERS = Architecture("Qwen3Config", knows=(_WINDOW, _CAUSAL))
_MASK = "tokenizer.ggml.mask_token_id"
#: What DFlash 2 adds.
_FOREIGN_TO_DFLASH = ("selector_rank", "conv_kernel_size", "hyper_connection_count")
#: The small heads of DSpark.
_MARKOV, _JUDGE = "markov_w1.weight", "conf_proj.weight"
_OUTSIDE = {
    "token_embd.": "embed_tokens.",
    "enc.output_norm.": "hidden_norm.",
    "output_norm.": "norm.",
    "output.": "lm_head.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "conf_proj.": "confidence_head.proj.",
}


def _read_dflash(path: str, _: object) -> BlockHeadConfig:
    values = Values(read_gguf(path))
    for name in _FOREIGN_TO_DFLASH:
        if values.get(name):
            raise UnsupportedModelError(path, f"it has {_DFLASH}.{name}, which is not computed", ORIGINAL)
    shape = read_shape(values, _DFLASH_LAYERS)
    reaches = _reaches(values, shape["num_hidden_layers"])
    layers = read_layers(path, shape | _windows(reaches) | {"vocab_size": _vocab_size(values)}, "qwen3")
    size, mask = values.count("block_size"), values.file.metadata.get(_MASK)
    if size < 2:
        raise ModelLoadError(path, f"its {_DFLASH}.block_size is {size}, and one row drafts nothing", AGAIN)
    if type(mask) is not int or not 0 <= mask < layers.vocab_size:
        raise ModelLoadError(path, f"its {_MASK} is {mask!r}, and no token of {layers.vocab_size}", AGAIN)
    markov, judge = _sequential_heads(values, layers.hidden_size)
    return BlockHeadConfig(
        method=method_of(markov, judge),
        **_read_fields(values, layers, LAYERS[:1]),
        block_size=size,
        mask_token_id=mask,
        reaches=reaches,
        from_anchor=_flag(values, _ANCHOR, markov is not None),
        markov=markov,
        judge=judge,
    )


def _sequential_heads(values: Values, hidden_size: int) -> tuple[MarkovShape | None, JudgeInput | None]:
    """The small heads of DSpark, by the shapes of their tensors: in files, sequential heads are of the first kind."""
    markov, judge = (values.file.tensors.get(name) for name in (_MARKOV, _JUDGE))
    shape = None if markov is None else MarkovShape(MarkovKind.VANILLA, markov.shape[-1])
    if judge is None:
        return shape, None
    return shape, JudgeInput.STATE if judge.shape[-1] == hidden_size else JudgeInput.STATE_AND_TOKEN


def _flag(values: Values, name: str, default: bool) -> bool:
    """A flag of a file."""
    found = values.get(name)
    if found is not None and not isinstance(found, bool):
        raise ModelLoadError(values.file.path, f"its {_DFLASH}.{name} is {found!r}, and neither true nor false", AGAIN)
    return default if found is None else found


def _dflash_prefixes(config: FeatureHeadConfig) -> dict[str, str]:
    """Names of tensors in files, and here."""
    layers = range(config.layer.num_hidden_layers)
    return _OUTSIDE | {f"blk.{i}.{name}.": f"layers.{i}.{own}." for i in layers for name, own in LAYER.items()}


def _reaches(values: Values, num_layers: int) -> tuple[BlockReach, ...]:
    """Returns how far rows see, by layer."""
    causal, path = _flag(values, _CAUSAL, False), values.file.path
    if not values.get(_WINDOW):
        return (BlockReach(None, causal),) * num_layers
    window, kinds = values.count(_WINDOW), values.get(_PATTERN)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(type(kind) is not bool for kind in kinds):
        problem = f"its {_DFLASH}.{_PATTERN} is {kinds!r}, and does not say which of {num_layers} layers have a window"
        raise ModelLoadError(path, problem, AGAIN)
    if values.get(_CAUSAL) is None and any(kinds):
        problem = f"it has layers with a window and no {_DFLASH}.{_CAUSAL}, and engines take different values then"
        raise ModelLoadError(path, problem, ORIGINAL)
    return tuple(BlockReach(window if kind else None, causal) for kind in kinds)


def _windows(reaches: tuple[BlockReach, ...]) -> dict[str, Any]:
    """The windows as transformers' configuration has them."""
    windows = [reach.window for reach in reaches]
    if not any(windows):
        return {}
    kinds = [SLIDING if window else FULL for window in windows]
    return {"layer_types": kinds, "sliding_window": max(filter(None, windows)), "use_sliding_window": True}


GGUF_DFLASH = Format(
    name="llama.cpp DFlash",
    family="gguf",
    method="dflash",
    network=BlockHeadNetwork,
    prefixes=_dflash_prefixes,
    fits=lambda mapping: mapping[ARCHITECTURE] == _DFLASH,
    read=_read_dflash,
    tensors=lambda path: _read_tensors(read_gguf(path)),
)


# --- The format of llama.cpp's assistants of Gemma 4: its names and values of that family, and two projections.
#
# All layers count as such that predict tokens. The converter leaves clusters of the vocabulary out, so that all tokens
# are scored, and it does not tell unified models from the others.


_ASSISTANT = "gemma4-assistant"


def is_gguf_assistant(path: str) -> bool:
    """Tells if a GGUF file holds an assistant of Gemma 4."""
    return Values(read_gguf(path)).architecture == _ASSISTANT


def read_gguf_assistant(path: str) -> dict[str, Any]:
    """What the configuration of an assistant says in a folder, from a GGUF file."""
    file = read_gguf(path)
    if (kind := Values(file).architecture) != _ASSISTANT:
        problem = f"its architecture is {kind}, and assistants in GGUF files are of {_ASSISTANT}"
        raise UnsupportedModelError(path, problem, ORIGINAL)
    own = {key: value for key, value in file.metadata.items() if key != f"{_ASSISTANT}.{PREDICTED}"}
    values = Values(replace(file, metadata=own))
    layers = read_shape(values, ARCHITECTURES["gemma4"]) | gemma.gemma_4(values)
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": values.count("embedding_length_out"),
        "text_config": layers | {"vocab_size": values.rows_of("token_embd.weight", 0)},
    }


def read_gguf_assistant_tensors(path: str) -> dict[str, HeadTensor]:
    """The tensors of an assistant in a GGUF file, by their names in folders."""
    found = _read_tensors(read_gguf(path), (FREQUENCY_FACTORS,))
    return {
        own: tensor for name, tensor in found.items() for own in stock_names(GEMMA_4, name) or [name.removeprefix("nextn.")]
    }
