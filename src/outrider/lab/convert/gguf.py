"""Writes a checkpoint or a head as a GGUF file: its shape, its tensors, and the models that it cannot describe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidParameterError, ModelError, UnsupportedModelError
from outrider.files import write_whole
from outrider.heads.features import FeatureHeadConfig, FeatureNorm
from outrider.heads.formats.folder import renamed
from outrider.heads.formats.gguf import GGUF_EAGLE3, LAYERS
from outrider.heads.formats.mtp import carries_mtp, read_mtp, read_mtp_config
from outrider.heads.formats.published import PublishedHead, read_head
from outrider.heads.mtp import MtpLayer, load_mtp_layer
from outrider.lab.convert.gguf_families import FAMILIES, family_of
from outrider.lab.convert.gguf_family import AS_IT_IS, FileFamily, FileTensor, Paired, head_width, rope_of, whole
from outrider.lab.convert.gguf_vocabulary import WriteVocabulary, own_vocabulary, placeholders
from outrider.loading.exclusive import attempt, exclusive_transformers
from outrider.loading.gguf.architecture import read_config
from outrider.loading.gguf.header import GgufFile, GgufTensor, is_gguf, read_gguf
from outrider.loading.gguf.rotary import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS

#: The types in which weights may be stored, with their names in the gguf package.
STORED_AS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
#: What a file holds of a checkpoint.
Parts = Literal["all", "model", "layers"]


def write_gguf(
    checkpoint: str,
    path: Path,
    dtype: str = "float32",
    vocabulary: WriteVocabulary | None = None,
    parts: Parts | None = "model",
    layers: str | None = None,
) -> str:
    """Write a checkpoint to `path`, and return the path. This needs memory for several copies of the weights.

    Matrices are stored as one of `STORED_AS`; the last two have a scale for 32 weights. Vectors stay float32. Without a
    vocabulary placeholders are written, of which none ends a text.

    Args:
        parts: Beside "model", also the layers that predict several tokens ("all"), or these with no more of the model than
            its embeddings, its last norm and its output layer ("layers"). None for all that there is and that files have.
        layers: The folder of these layers; None for the checkpoint's own.
    """
    import gguf
    from transformers import AutoModelForCausalLM

    if dtype not in STORED_AS:
        raise InvalidParameterError("dtype", dtype, "not a type of weights in GGUF", f"Use one of {', '.join(STORED_AS)}.")
    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    family, behind = check_describable(checkpoint, model.config), None
    if (
        parts in ("all", "layers")
        or layers is not None
        or (parts is None and _has_layers(checkpoint, model.config, family))
    ):
        behind = _BehindModel(layers or checkpoint, model.config, family)
    writer = gguf.GGUFWriter(None, family.architecture)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "float32" else f"MOSTLY_{STORED_AS[dtype]}"])
    family.describe(writer, model.config, 0 if behind is None else behind.num_layers)
    (vocabulary or placeholders())(writer, model.config.vocab_size)
    for name, factors in frequency_factors(model.config).items():
        writer.add_tensor(name, factors)
    state, store = model.state_dict(), _storing(checkpoint, dtype)
    own = ((tensor, state[tensor.stock]) for tensor in family.tensors(model.config, state))
    _write_tensors(writer, (each for each in own if parts != "layers" or not each[0].name.startswith("blk.")), store)
    if behind is not None:
        _write_tensors(writer, behind.tensors(), store)
    write_file(writer, path)
    return str(path)


def _write_tensors(
    writer: Any, tensors: Iterable[tuple[FileTensor, Tensor]], store: Callable[[str, Any], tuple[Any, Any]]
) -> None:
    import gguf

    for name, parts in groupby(tensors, lambda each: each[0].name):  # several of a folder may be stacked in one
        each = [np.ascontiguousarray(tensor.rows(weight)) for tensor, weight in parts]
        rows = each[0] if len(each) == 1 else np.stack(each)
        stored, kind = store(name, rows) if is_matrix(name) else (rows, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, stored, raw_dtype=kind)


#: Tensors of two dimensions that stay float32, beside norms, biases, sinks and routers.
_KEPT = (
    "ssm_a", "ssm_d", "ssm_conv1d.weight", "shortconv.conv.weight", "ffn_gate_inp_shexp.weight",
    "layer_output_scale.weight", ".scale",
)  # fmt: skip


def is_matrix(name: str) -> bool:
    """Tells if a tensor of a file may be rounded."""
    parts = ("norm", ".bias", "attn_sinks", ".ffn_gate_inp.", "rope_")
    return not name.endswith(_KEPT) and not any(part in name for part in parts)


#: What llama.cpp's quantiser leaves as it is.
NOT_ROUNDED = ("altup", "laurel")


def _storing(checkpoint: str, dtype: str) -> Callable[[str, Any], tuple[Any, Any]]:
    """A function that stores a matrix of float32 by its name as `dtype`."""
    import gguf

    kind = gguf.GGMLQuantizationType[STORED_AS[dtype]]
    block = gguf.GGML_QUANT_SIZES[kind][0]

    def store(name: str, rows: Any) -> tuple[Any, Any]:
        if block > 1 and any(part in name for part in NOT_ROUNDED):
            return rows, gguf.GGMLQuantizationType.F32
        if rows.shape[-1] % block:
            problem = f"rows of {rows.shape[-1]} weights do not divide into blocks of {block}"
            raise UnsupportedModelError(checkpoint, problem, "Store it as float32 or bfloat16.")
        return gguf.quants.quantize(rows, kind), kind

    return store


# --- Layers that predict several tokens, behind those of the model; `loading/gguf/prediction.py` reads them.


#: llama.cpp's names of what such a layer has beside its decoder layer and its last norm.
_BESIDE = {"fc": "nextn.eh_proj", "embedding_norm": "nextn.enorm", "hidden_norm": "nextn.hnorm"}


class _BehindModel:
    """The layers of a folder, as a file has them behind those of a model with this configuration."""

    def __init__(self, folder: str, config: Any, family: FileFamily) -> None:
        self._family = family
        if family.predicted_norm is None:
            problem = f"files of {family.architecture} have no layers that predict several tokens"
            raise UnsupportedModelError(folder, problem, "Write the model without them, and draft from their folder.")
        self._folder, self._config = folder, config
        self._told = read_mtp_config(folder, config)

    @property
    def num_layers(self) -> int:
        """How many there are."""
        return self._told.num_layers

    def tensors(self) -> Iterator[tuple[FileTensor, Tensor]]:
        """Their tensors with their numbers, layer by layer. What all share stands in the first."""
        first, place = int(self._config.num_hidden_layers), (torch.float32, torch.device("cpu"))
        for number, read in enumerate(read_mtp(self._folder, self._config), first):
            layer = load_mtp_layer(self._folder, self._told, read, *place)
            yield from self._decoder(layer, number)
            if number == first or not self._told.shared:
                yield from self._beside(layer, number)

    def _decoder(self, layer: MtpLayer, number: int) -> Iterator[tuple[FileTensor, Tensor]]:
        own = layer.decoder.stack.layers[0].state_dict()
        weights = {f"model.layers.{number}.{name}": weight for name, weight in own.items()}
        for tensor in self._family.tensors(self._config, weights, number + 1):
            yield tensor, weights[tensor.stock]

    def _beside(self, layer: MtpLayer, number: int) -> Iterator[tuple[FileTensor, Tensor]]:
        modules = {"fc": layer.fc, "norm": layer.decoder.norm}
        modules |= {name: getattr(layer, name) for name in ("embedding_norm", "hidden_norm")}
        for name, theirs in {**_BESIDE, "norm": self._family.predicted_norm}.items():
            change = AS_IT_IS if name == "fc" else self._family.norms
            weight = modules[name].weight
            assert isinstance(weight, Tensor)
            yield FileTensor(f"blk.{number}.{theirs}.weight", f"{number}.{name}", whole, change), weight.detach()


def _has_layers(checkpoint: str, config: Any, family: FileFamily) -> bool:
    """Tells whether a checkpoint carries such layers, and whether files of its family have some."""
    return family.predicted_norm is not None and carries_mtp(checkpoint, config)


# --- Puts a GGUF file in place when it is whole.


def write_file(writer: Any, path: Path) -> None:
    """Write what a writer of the gguf package, which was made without a path, has been told."""

    def put(unfinished: Path) -> None:
        try:
            writer.write_header_to_file(unfinished)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()

    write_whole(path, put)


# --- The models that a GGUF file cannot describe, and those whose rotary frequencies have factors.


_NOT_WRITTEN = "No GGUF is written for such a model."
#: What a configuration says and no text shows: of training, of how passes are cut, and what tensors or other values say.
_NO_MATTER = re.compile(
    r"token_id|dropout|pdrop|initializer|chunk_size$|^(use_cache|output_router_logits|router_aux_loss_coef|router_jitter_noise"
    r"|pretraining_tp|num_logits_to_keep|use_mamba_kernels|mamba_ssm_cache_dtype|moe_shared_expert_overlap|num_mtp_layers"
    r"|num_nextn_predict_layers|mtp_layers_block_type|rescale_prenorm_residual|tie_word_embeddings|time_step_(floor|max|rank)"
    r"|sliding_window_pattern|no_rope_layer_interval|full_attn_idxs|moe_layers|vocab_size_per_layer_input)$"
)
#: Rotary positions where nothing else is said of them.
_USUAL_ROPE = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "partial_rotary_factor": 1.0}
#: What a configuration with long texts may say twice, or leave to be calculated.
_OF_LONG_ROPE = {"attention_factor", "factor", "type", "original_max_position_embeddings"}
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers")


def check_describable(checkpoint: str, config: Any) -> FileFamily:
    """The family of a model. Raises UnsupportedModelError where a reader would make another model of what a file says."""
    from transformers import PreTrainedConfig

    family = family_of(config)
    if family is None:
        problem = f"no GGUF is written for {config.model_type}"
        raise UnsupportedModelError(checkpoint, problem, f"Use one of {', '.join(FAMILIES)}.")
    try:
        found = read_config(_header(checkpoint, config, family))
    except ModelError as error:
        raise UnsupportedModelError(checkpoint, f"a file cannot describe it: {error.problem}", _NOT_WRITTEN) from error
    told = (config.to_dict(), found.to_dict())
    unread = {*family.unread(config), *(() if _has_window(config) else _WINDOW)}
    for field in fields(type(config)):
        name = field.name
        if _NO_MATTER.search(name) or name in unread or name in PreTrainedConfig.__dataclass_fields__:
            continue
        usual = None if name in _WINDOW else field.default  # what a configuration of another kind does not say
        ours, theirs = (_meant(name, one.get(name, usual)) for one in told)
        if ours != theirs and (ours or theirs):
            problem = f"its {name} is {ours!r}, and a reader of its file would take {theirs!r}"
            raise UnsupportedModelError(checkpoint, problem, _NOT_WRITTEN)
    return family


def _has_window(config: Any) -> bool:
    """Tells if a layer has a window that is shorter than the context."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    some = kinds is None or "sliding_attention" in kinds
    return bool(window) and some and window < config.max_position_embeddings


def _meant(name: str, value: Any) -> Any:
    """A value without what stands beside it in tensors, or is usual. A number is taken with 32 bits: a file keeps no more,
    and a folder that was made of a file has the number that 32 bits make of the original one."""
    if isinstance(value, float):
        return float(str(np.float32(value)))
    if isinstance(value, list | tuple):
        return [_meant(name, each) for each in value]
    if not isinstance(value, dict) or "rope" not in name:
        return value
    if "rope_type" not in value:
        return {kind: _meant(name, own) for kind, own in value.items()}
    kind = value["rope_type"]
    left_out = {"llama3": set(value) - {"rope_theta"}, "longrope": _OF_LONG_ROPE}.get(kind, set())
    told = {key: own for key, own in value.items() if key not in left_out and own not in (None, _USUAL_ROPE.get(key))}
    found = {key: _meant(key, own) for key, own in told.items()}
    return found | ({"rope_type": "default"} if kind == "llama3" else {})


def _header(checkpoint: str, config: Any, family: FileFamily) -> GgufFile:
    """The file of a model, whose tensors have no numbers, but for factors of rotary frequencies."""
    import gguf
    from transformers import AutoModelForCausalLM

    writer = gguf.GGUFWriter(None, family.architecture)
    family.describe(writer, config)
    for name, factors in frequency_factors(config).items():
        writer.add_tensor(name, factors)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    own = {each.name: tuple(state[each.stock].shape) for each in family.tensors(config, state)}
    tensors = {name: GgufTensor(name, shape, "F32", np.empty(0, np.uint8)) for name, shape in own.items()}
    for name, info in writer.tensors[0].items():
        tensors[name] = GgufTensor(name, tuple(info.shape), "F32", info.tensor.view(np.uint8))
    return GgufFile(checkpoint, {key: value.value for key, value in writer.kv_data[0].items()}, tensors)


def frequency_factors(config: Any) -> dict[str, np.ndarray]:
    """The tensors with factors of rotary frequencies, float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_of(config)
    if rope["rope_type"] == "longrope":
        names = {SHORT_FACTORS: "short_factor", LONG_FACTORS: "long_factor"}
        return {name: np.array(rope[key], np.float32) for name, key in names.items()}
    if rope["rope_type"] != "llama3":
        return {}
    width = head_width(config)
    usual = rope["rope_theta"] ** -(np.arange(0, width, 2) / width)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return {FREQUENCY_FACTORS: (usual / scaled.double().numpy()).astype(np.float32)}


# --- Heads of EAGLE-3 as GGUF files, in the layout of llama.cpp; `heads/formats/gguf.py` reads it.


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
    FAMILIES["llama"].describe(writer, config.layer)
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

    if is_gguf(target):
        return int(read_config(read_gguf(target)).num_hidden_layers)
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
