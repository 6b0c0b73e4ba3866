"""The architectures of GGUF files that are known, and what llama.cpp's converter does to each.

Files have llama.cpp's names of tensors and values. Where it rotates neighbours, the rows of queries and keys of each head
are interleaved in the file, and are put back here. What an architecture would mean otherwise is refused by name, and never
guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.model.loading.gguf.header import GgufFile

#: What to do with a file that cannot be loaded.
ORIGINAL = 'Give the original checkpoint in safetensors; quantization="int4" rounds it while it is loaded.'
_AGAIN = "Download the file again."
#: The names of tensors of a layer, as llama.cpp and as transformers have them.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: What is called otherwise where norms stand behind the parts of a layer, too.
_WITH_POST_NORMS = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Factors of the rotary frequencies, which belong to no module of transformers.
FREQUENCY_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """A kind of model.

    Attributes:
        config: The name of its configuration in transformers.
        interleaved: Whether the rows of queries and keys are interleaved in the file.
        adjusted: Makes the configuration's values that are not common to all, from a reader of the file.
        layer: The names of tensors of a layer.
        offset_norms: Whether the weights of norms are kept plus 1.
        knows: Values that `adjusted` takes care of, and that are refused elsewhere.
    """

    config: str
    interleaved: bool = False
    adjusted: Callable[[Values], dict[str, Any]] = lambda values: {}
    layer: dict[str, str] = field(default_factory=lambda: _LAYER)
    offset_norms: bool = False
    knows: tuple[str, ...] = ()


class Values:
    """The values of a file that describe its model."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = self._text("general.architecture")

    def _text(self, key: str) -> str:
        found = self.file.metadata.get(key)
        if not isinstance(found, str):
            raise ModelLoadError(self.file.path, f"its {key} is {found!r}, and no text", _AGAIN)
        return found

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 on."""
        found = self._get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found < 2**31:
            raise self._wrong(name, found, "no whole number from 1 on")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        found = self._get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
            raise self._wrong(name, found, "no positive number")
        return float(found)

    def get(self, name: str) -> Any:
        """A value of the architecture, or None."""
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error for something that is not known of this architecture."""
        return UnsupportedModelError(self.file.path, f"it has {what}, which is not known of GGUF files here", ORIGINAL)

    def _get(self, name: str, default: Any) -> Any:
        found = self.get(name)
        return default if found is None else found

    def _wrong(self, name: str, found: object, why: str) -> ModelLoadError:
        return ModelLoadError(self.file.path, f"its {self.architecture}.{name} is {found!r}, and {why}", _AGAIN)


def _llama(values: Values) -> dict[str, Any]:
    biases = values.has("blk.0.attn_q.bias")
    if biases != values.has("blk.0.attn_output.bias"):
        raise values.refuse("biases of some projections of its attention alone")
    return {"attention_bias": biases, "mlp_bias": values.has("blk.0.ffn_up.bias")}


def _gemma(values: Values, largest: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. Scores are scaled by the width of heads, but in the largest model, which has `largest`
    layers, by the hidden size for each head; files do not say it."""
    heads, hidden = values.count("attention.head_count"), values.count("embedding_length")
    scale = values.count("attention.key_length", hidden // heads)
    return {
        "query_pre_attn_scalar": hidden // heads if values.count("block_count") == largest else scale,
        "sliding_window": values.count("attention.sliding_window"),
    }


def _gemma_2(values: Values) -> dict[str, Any]:
    return _gemma(values, 46) | {name: values.number(name) for name in _CAPS}


def _gemma_3(values: Values) -> dict[str, Any]:
    if values.get("attention.sliding_window_pattern") not in (None, 6):
        raise values.refuse(f"attention.sliding_window_pattern={values.get('attention.sliding_window_pattern')!r}")
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10_000.0)}
    caps = {name: values.number(name) if values.get(name) else None for name in _CAPS}
    return (
        _gemma(values, 62)
        | caps
        | {
            "rope_parameters": {"full_attention": _rope(values, 1_000_000.0), "sliding_attention": local},
        }
    )


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_GEMMA: dict[str, Any] = {
    "layer": _WITH_POST_NORMS,
    "offset_norms": True,
    "knows": (*_CAPS, "attention.sliding_window"),
}
#: The architectures by their names in files.
ARCHITECTURES = {
    "llama": Architecture("LlamaConfig", interleaved=True, adjusted=_llama),
    "qwen2": Architecture("Qwen2Config"),
    "qwen3": Architecture("Qwen3Config"),
    "gemma2": Architecture("Gemma2Config", adjusted=_gemma_2, **_GEMMA),
    "gemma3": Architecture("Gemma3TextConfig", adjusted=_gemma_3, **_GEMMA),
}
#: Values that would change what a model computes, and what they are where they change nothing.
_SPECIAL = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "rope.scaling.attn_factor": 1.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "use_parallel_residual": False,
    "attention.causal": True,
    "nextn_predict_layers": 0,
}


def architecture_of(file: GgufFile) -> Architecture:
    """What is known of a file's architecture.

    Raises:
        ModelLoadError: It does not say its architecture.
        UnsupportedModelError: The architecture is not known.
    """
    name = Values(file).architecture
    if name not in ARCHITECTURES:
        problem = f"its architecture is {name}, and {', '.join(ARCHITECTURES)} are known of GGUF files"
        raise UnsupportedModelError(file.path, problem, ORIGINAL)
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> Any:
    """transformers' configuration of a model.

    Raises:
        ModelLoadError: A value is missing, or is not what it has to be.
        UnsupportedModelError: The architecture is not known, or has something that is not.
    """
    import transformers

    known, values = architecture_of(file), Values(file)
    for name, plain in _SPECIAL.items():
        if name not in known.knows and values.get(name) not in (None, plain):
            raise values.refuse(f"{values.architecture}.{name}={values.get(name)!r}")
    heads, hidden = values.count("attention.head_count"), values.count("embedding_length")
    layers = values.count("block_count")
    if layers > len(file.tensors):
        problem = f"it says {layers:,} layers, and holds {len(file.tensors)} tensors"
        raise ModelLoadError(file.path, problem, _AGAIN)
    head_dim = values.count("attention.key_length", hidden // heads)
    if values.count("attention.value_length", head_dim) != head_dim:
        raise values.refuse("values of another width than its keys")
    if values.count("rope.dimension_count", head_dim) != head_dim:
        raise values.refuse("rotary positions of a part of each head")
    shape = {
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": values.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(values),
        "tie_word_embeddings": not values.has("output.weight"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
    }
    try:
        return getattr(transformers, known.config)(**shape | known.adjusted(values))
    except Exception as error:  # whatever transformers finds wrong with a configuration
        reason = str(error).strip().splitlines()[-1].strip()
        raise ModelLoadError(file.path, f"its metadata are no configuration ({reason})", _AGAIN) from error


def _vocab_size(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelLoadError(file.path, "the tensor token_embd.weight is missing", _AGAIN)
    return table.shape[0]


def _rope(values: Values, theta: float = 10_000.0) -> dict[str, Any]:
    theta = values.number("rope.freq_base", theta)
    kind = values.get("rope.scaling.type")
    if kind in (None, "none"):
        if values.get("rope.scale_linear") not in (None, 1.0):
            raise values.refuse(f"{values.architecture}.rope.scale_linear")
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": values.number("rope.scaling.factor")}
    raise values.refuse(f"rotary positions that are scaled by {kind}")


def stock_name(known: Architecture, name: str) -> str | None:
    """transformers' name for a tensor of a file. None where it has none."""
    place, _, kind = name.rpartition(".")
    if place in _MODEL:
        return f"{_MODEL[place]}.{kind}"
    blk, _, rest = place.partition(".")
    number, _, part = rest.partition(".")
    if blk != "blk" or not number.isdecimal() or part not in known.layer:
        return None
    return f"model.layers.{int(number)}.{known.layer[part]}.{kind}"


def row_order(known: Architecture, name: str, config: Any) -> Tensor | None:
    """The rows of a tensor of the file in the order of transformers. None where they are in it."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or not known.interleaved:
        return None
    rows = torch.arange(heads * config.head_dim)
    return rows.reshape(heads, -1, 2).transpose(1, 2).flatten()
