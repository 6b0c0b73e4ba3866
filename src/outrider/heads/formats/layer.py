"""The layer of a published head: transformers' configuration of it, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from outrider.errors import ModelLoadError
from outrider.heads.feature_config import FeatureHeadConfig, FeatureNorm
from outrider.heads.formats.folder import CONFIG
from outrider.model.lone_layer import knows_activation, layer_config

#: Kinds of layers that heads are published with, by transformers' name.
KINDS = ("llama", "qwen3")
#: transformers' names for layers with a window and without one.
SLIDING, FULL = "sliding_attention", "full_attention"
#: Rotary factors that do not change with the length of a text.
_ROTARY = ("default", "linear", "llama3", "yarn")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_OTHER = "Use another head."
#: The layers of the target that heads of EAGLE-3 read.
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class Format(NamedTuple):
    """A published format for heads of one method.

    Attributes:
        name: How messages call it.
        family: The name under which heads are converted into it; formats of one publisher share it.
        method: Whose heads it holds.
        prefixes: What names of tensors begin with in files, and here.
        fits: Whether a configuration is of this format.
        read: The head that a configuration describes, by folder and configuration. Raises ModelLoadError for a field that
            cannot be used, or where the file does not settle what it means.
        write: The configuration of a head. Raises UnsupportedModelError where the format cannot say it.
        written: The prefixes of files that are written, where they are others.
    """

    name: str
    family: str
    method: str
    prefixes: Mapping[str, str]
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[str, Mapping[str, Any]], Any]
    write: Callable[[Any], dict[str, Any]]
    written: Mapping[str, str] | None = None


def read_layer(folder: str, mapping: Mapping[str, Any], kind: str) -> Any:
    """The configuration of a head's only layer, which sees the whole text; else as `read_layers`."""
    layer = read_layers(folder, mapping, kind)
    if layer.num_hidden_layers != 1:
        raise refused(folder, "num_hidden_layers", layer.num_hidden_layers, "heads of one layer are read", _OTHER)
    if SLIDING in (getattr(layer, "layer_types", None) or ()):
        raise refused(folder, "layer_types", layer.layer_types, "a window is not computed", _OTHER)
    return layer


def read_layers(folder: str, mapping: Mapping[str, Any], kind: str) -> Any:
    """transformers' configuration of the layers that a mapping describes; what it leaves out has transformers' defaults.

    Args:
        folder: Of the head, to name.
        mapping: The fields.
        kind: transformers' name for the model that has such layers.

    Raises:
        ModelLoadError: It cannot be read, or has layers that this version does not compute.
    """
    if kind not in KINDS:
        raise refused(
            folder, "model_type", kind, "its layers are not known", f"Use heads with layers of {', '.join(KINDS)}."
        )
    fields = {name: value for name, value in mapping.items() if name != "model_type"}
    try:
        layer: Any = layer_config(kind, fields)
    except Exception as error:  # whatever transformers raises for a field that it cannot use
        raise ModelLoadError(folder, f"{CONFIG} describes no {kind} layer ({error})", _OTHER) from error
    for name in _SIZES:
        size = getattr(layer, name, None)
        if type(size) is not int or size < 1:
            raise refused(folder, name, size, "no size", "Use a whole number from 1 on.")
    if layer.num_attention_heads % layer.num_key_value_heads or layer.head_dim % 2:
        shape = [layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim]
        problem = "heads, key-value heads and width of a head do not go together"
        raise refused(folder, "num_attention_heads", shape, problem, _OTHER)
    rotary = (layer.rope_parameters or {}).get("rope_type", "default")
    if rotary not in _ROTARY:
        problem = "such rotary factors change with the length of a text"
        raise refused(folder, "rope_type", rotary, problem, f"Use heads with one of {', '.join(_ROTARY)}.")
    if not knows_activation(layer.hidden_act):
        raise refused(folder, "hidden_act", layer.hidden_act, "no such activation", _OTHER)
    return layer


def read_layer_ids(folder: str, ids: Any, field: str = AUX_LAYERS) -> tuple[int, ...]:
    """The ids of the target's layers that a head reads, as its format counts them.

    Raises:
        ModelLoadError: They are no layers in ascending order. vLLM joins their states in the order of the layers and others
            in the order of the list, so a list in another order says two things.
    """
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise refused(folder, field, ids, "no list of layers", _OTHER)
    if ids != sorted(set(ids)):
        problem = "it does not say in which order their states are joined"
        raise refused(folder, field, ids, problem, "Use a head with ascending layers.")
    return tuple(ids)


def read_flag(folder: str, mapping: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A flag of a configuration.

    Raises:
        ModelLoadError: It is neither true nor false.
    """
    value = mapping.get(name, default)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise refused(folder, name, value, "neither true nor false", "Use true or false.")
    return value


def refused(folder: str, field: str, value: object, problem: str, remedy: str) -> ModelLoadError:
    """The error for a field of the configuration."""
    return ModelLoadError(folder, f"{CONFIG} has {field}={value!r}: {problem}", remedy)


_LAYER_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
)


def layer_fields(layer: Any) -> dict[str, Any]:
    """The fields that say what layers compute. Rotary factors are written as releases before 5 of transformers read them,
    which newer ones do, too."""
    found = {name: getattr(layer, name) for name in _LAYER_FIELDS if getattr(layer, name, None) is not None}
    rotary = dict(layer.rope_parameters or {})
    found["rope_theta"] = rotary.pop("rope_theta", 10000.0)
    if rotary.get("rope_type", "default") != "default":
        found["rope_scaling"] = rotary
    kinds = list(getattr(layer, "layer_types", None) or ())
    if SLIDING in kinds:
        found |= {"layer_types": kinds, "sliding_window": layer.sliding_window, "use_sliding_window": True}
    return found


def norm_flags(config: FeatureHeadConfig) -> dict[str, bool]:
    """The flags of norms that change what a head of EAGLE-3 computes. Those that are false are left out."""
    flags = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm is FeatureNorm.ALL,
        "fc_norm": config.feature_norm is FeatureNorm.EACH,
        "norm_output": config.norm_output,
    }
    return {name: True for name, flag in flags.items() if flag}
