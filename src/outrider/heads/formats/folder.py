"""The folder of a published head: its configuration, its layer and its tensors, and nothing that could run code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from outrider.errors import InvalidParameterError, ModelLoadError
from outrider.heads.features import FeatureHeadConfig, FeatureNorm, PublishedNetwork
from outrider.heads.lone import knows_activation, layer_config
from outrider.loading.sources import WHOLE, check_files, indexed_files

# --- Reads the folder of a published head: its configuration and its tensors, and nothing that could run code.


CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DOWNLOAD = "Download the head again."


class HeadTensor(NamedTuple):
    """A tensor and the file that holds it."""

    tensor: Tensor
    file: str


def read_config(folder: str) -> dict[str, Any]:
    """The configuration in a folder."""
    _check_folder(folder, f"Give the folder that holds the head's {CONFIG}.")
    try:
        found = json.loads((Path(folder) / CONFIG).read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(folder, f"it has no {CONFIG}", "Give the folder of a published head.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(folder, f"{CONFIG} cannot be read ({error})", _DOWNLOAD) from error
    if not isinstance(found, dict):
        raise ModelLoadError(folder, f"{CONFIG} holds no mapping", _DOWNLOAD)
    return found


def list_tensors(folder: str) -> list[str]:
    """The names of all tensors in a folder."""
    _check_folder(folder, f"Give the folder that holds {WHOLE}.")
    return [key for _, _, keys in _opened(folder) for key in keys]


def read_tensors(folder: str, wanted: Collection[str] | None = None) -> dict[str, HeadTensor]:
    """Tensors in a folder, by name."""
    found: dict[str, HeadTensor] = {}
    for name, file, keys in _opened(folder):
        found |= {key: HeadTensor(file.get_tensor(key), name) for key in keys if wanted is None or key in wanted}
    for key, (tensor, name) in found.items():
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize < 2):
            raise ModelLoadError(folder, f"{key} in {name} holds {tensor.dtype}", "Write it in bfloat16 or float32.")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ModelLoadError(folder, f"{key} in {name} holds NaN or infinity", _DOWNLOAD)
    return found


def _check_folder(folder: str, remedy: str) -> None:
    if not Path(folder).is_dir():
        raise InvalidParameterError("model", folder, "no such folder", remedy)
    check_files(folder)


def _opened(folder: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Each file of weights in a folder: its name, the open file, and the names of its tensors."""
    from safetensors import SafetensorError, safe_open

    for name in _weight_files(folder):
        try:
            with safe_open(Path(folder) / name, "pt") as file:
                yield name, file, list(file.keys())
        except (OSError, RuntimeError, SafetensorError) as error:  # PyTorch maps the file, where the system lets it
            raise ModelLoadError(folder, f"{name} cannot be read ({error})", _DOWNLOAD) from error


def _weight_files(folder: str) -> list[str]:
    path = Path(folder)
    if (path / WHOLE).is_file():
        return [WHOLE]
    if (path / _INDEX).is_file():
        return indexed_files(folder, path / _INDEX)
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
    if not pickled:
        raise ModelLoadError(folder, f"it has no {WHOLE}", "Give the folder of a published head.")
    problem = f"{pickled[0]} is pickled, and reading such a file may run any code"
    remedy = f"Load it yourself with torch.load(..., weights_only=True), and save it as {WHOLE}."
    raise ModelLoadError(folder, problem, remedy)


# --- The layer of a published head: transformers' configuration of it, checked.


#: Kinds of layers that heads are published with, by transformers' name.
KINDS = ("llama", "qwen3")
#: transformers' names for layers with a window and without one.
SLIDING, FULL = "sliding_attention", "full_attention"
#: Rotary factors that do not change with the length of a text.
_ROTARY = ("default", "linear", "llama3", "yarn", "proportional")
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_OTHER = "Use another head."
#: No model has such a size.
_TOO_LARGE = 2**24
#: The layers of the target that heads of EAGLE-3 read.
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class Format(NamedTuple):
    """A published format for heads of one method."""

    name: str  # how messages call it
    family: str  # the name under which heads are converted into it; formats of one publisher share it
    method: str  # whose heads it holds
    network: type[PublishedNetwork]  # the layers of such a head
    #: Names of tensors begin with these in files, and here; by configuration where they depend on it.
    prefixes: Mapping[str, str] | Callable[[Any], Mapping[str, str]]
    fits: Callable[[Mapping[str, Any]], bool]  # whether a configuration is of this format
    #: The head that a configuration describes, by folder and configuration. It raises ModelLoadError for a field that
    #: cannot be used, or where the file does not settle what it means.
    read: Callable[[str, Mapping[str, Any]], Any]
    #: The configuration of a head. It raises UnsupportedModelError where it cannot be said. None where no folder is
    #: written.
    write: Callable[[Any], dict[str, Any]] | None = None
    written: Mapping[str, str] | None = None  # the prefixes of files that are written, where they are others
    tensors: Callable[[str], dict[str, HeadTensor]] = read_tensors  # all tensors of a head, as they are here

    def names(self, config: FeatureHeadConfig) -> Mapping[str, str]:
        """The prefixes for a head."""
        return self.prefixes(config) if callable(self.prefixes) else self.prefixes

    def published(self, config: FeatureHeadConfig) -> Mapping[str, str]:
        """The prefixes of what is written, by those here."""
        return {own: there for there, own in (self.written or self.names(config)).items()}


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """The name of a tensor whose beginning is exchanged for another."""
    return next((own + name.removeprefix(known) for known, own in prefixes.items() if name.startswith(known)), name)


def read_layer(folder: str, mapping: Mapping[str, Any], kind: str) -> Any:
    """The configuration of a head's only layer, which sees the whole text; else as `read_layers`."""
    layer = read_layers(folder, mapping, kind)
    if layer.num_hidden_layers != 1:
        raise refused(folder, "num_hidden_layers", layer.num_hidden_layers, "heads of one layer are read", _OTHER)
    if SLIDING in (getattr(layer, "layer_types", None) or ()):
        raise refused(folder, "layer_types", layer.layer_types, "a window is not computed", _OTHER)
    return layer


def read_layers(folder: str, mapping: Mapping[str, Any], kind: str) -> Any:
    """transformers' configuration of the layers that a mapping describes; what it leaves out has transformers' defaults."""
    if kind not in KINDS:
        raise refused(
            folder, "model_type", kind, "its layers are not known", f"Use heads with layers of {', '.join(KINDS)}."
        )
    layer = described(folder, mapping, kind)
    for name in _SIZES:
        size = getattr(layer, name, None)
        if type(size) is not int or not 1 <= size < _TOO_LARGE:
            raise refused(folder, name, size, "no size", f"Use a whole number from 1 to {_TOO_LARGE - 1}.")
    check_positive(folder, {"rms_norm_eps": layer.rms_norm_eps} | _theta(layer))
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


def _theta(layer: Any) -> dict[str, Any]:
    rotary = layer.rope_parameters
    return {"rope_theta": rotary["rope_theta"]} if isinstance(rotary, Mapping) and "rope_theta" in rotary else {}


def check_positive(folder: str, numbers: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a field that is no number above 0: what is computed with it would be none either."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise refused(folder, name, number, "no number above 0", "Write the one that it was trained with.")


def check_num_layers(folder: str, layers: Any, tensors: Collection[str]) -> None:
    """Raise ModelLoadError where a folder cannot hold so many layers, before they are made."""
    count = layers.num_hidden_layers
    if count > len(tensors):
        raise refused(folder, "num_hidden_layers", count, f"it holds {len(tensors)} tensors in all", _DOWNLOAD)


def described(folder: str, mapping: Mapping[str, Any], kind: str) -> Any:
    """Returns transformers' configuration of the layers that a mapping describes, unchecked."""
    fields = {name: value for name, value in mapping.items() if name != "model_type"}
    try:
        return layer_config(kind, fields)
    except Exception as error:  # whatever transformers raises for a field that it cannot use
        raise ModelLoadError(folder, f"{CONFIG} describes no {kind} layer ({error})", _OTHER) from error


def read_layer_ids(folder: str, ids: Any, field: str = AUX_LAYERS, least: int = 0) -> tuple[int, ...]:
    """The ids of the target's layers that a head reads, as its format counts them. vLLM joins their states in the order of
    the layers and others in the order of the list, so a list in another order says two things, and is refused."""
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < least for i in ids):
        raise refused(folder, field, ids, "no list of layers", _OTHER)
    if ids != sorted(set(ids)):
        problem = "it does not say in which order their states are joined"
        raise refused(folder, field, ids, problem, "Use a head with ascending layers.")
    return tuple(ids)


def read_flag(folder: str, mapping: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A flag of a configuration."""
    value = mapping.get(name, default)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise refused(folder, name, value, "neither true nor false", "Use true or false.")
    return value


def refused(folder: str, field: str, value: object, problem: str, remedy: str) -> ModelLoadError:
    """The error for a field of the configuration."""
    return ModelLoadError(folder, f"{CONFIG} has {field}={value!r}: {problem}", remedy)


# --- Fields of configurations that several formats have, as they are read and as they are written.


_LAYER_FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
    *("attention_bias", "mlp_bias", "qkv_bias"),
)


def widths(mapping: Mapping[str, Any], layer: Any, draft_vocab_size: Any) -> dict[str, Any]:
    """The layer of a head and the widths around it, as `FeatureHeadConfig` has them."""
    return {
        "layer": layer,
        "target_hidden_size": mapping.get("target_hidden_size") or layer.hidden_size,
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": draft_vocab_size,
    }


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


def read_norms(folder: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The norms that change what a head of EAGLE-3 computes, as `FeatureHeadConfig` has them."""
    each, together = read_flag(folder, mapping, "fc_norm"), read_flag(folder, mapping, "norm_before_fc")
    if each and together:
        problem = "norm_before_fc is true too, and only one of them can be"
        raise refused(folder, "fc_norm", True, problem, _OTHER)
    return {
        "feature_norm": FeatureNorm.EACH if each else FeatureNorm.ALL if together else FeatureNorm.NONE,
        **{name: read_flag(folder, mapping, name) for name in ("norm_before_residual", "norm_output")},
    }


def eagle3_fields(config: FeatureHeadConfig) -> dict[str, Any]:
    """The layers of the target that a head of EAGLE-3 reads, and the flags of its norms. What is not said is left out."""
    flags = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm is FeatureNorm.ALL,
        "fc_norm": config.feature_norm is FeatureNorm.EACH,
        "norm_output": config.norm_output,
    }
    ids = {} if config.aux_layers is None else {AUX_LAYERS: list(config.aux_layers)}
    return ids | {name: True for name, flag in flags.items() if flag}
