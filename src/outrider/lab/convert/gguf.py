"""Writes a checkpoint or a head as a GGUF file: its shape, its tensors, and the models that it cannot describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.files import write_whole
from outrider.heads.features import FeatureHeadConfig, FeatureNorm
from outrider.heads.formats.folder import renamed
from outrider.heads.formats.gguf import GGUF_EAGLE3, LAYERS
from outrider.heads.formats.mtp import carries_mtp, read_mtp, read_mtp_config
from outrider.heads.formats.published import PublishedHead, read_head
from outrider.heads.mtp import MtpLayer, load_mtp_layer
from outrider.lab.convert.gguf_families import (
    AS_IT_IS,
    FAMILIES,
    FileTensor,
    Paired,
    attention_interval,
    head_width,
    rope_of,
    whole,
)
from outrider.lab.convert.gguf_vocabulary import WriteVocabulary, own_vocabulary, placeholders
from outrider.loading.exclusive import attempt, exclusive_transformers
from outrider.loading.gguf.architecture import ARCHITECTURES, PREDICTED
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
    check_describable(checkpoint, model.config)
    family, behind = FAMILIES[model.config.model_type], None
    if parts in ("all", "layers") or layers is not None or (parts is None and _has_layers(checkpoint, model.config)):
        behind = _BehindModel(layers or checkpoint, model.config)
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
    writer: Any, tensors: Iterable[tuple[FileTensor, Tensor]], store: Callable[[Any], tuple[Any, Any]]
) -> None:
    import gguf

    for tensor, weight in tensors:
        rows = np.ascontiguousarray(tensor.rows(weight))
        stored, kind = store(rows) if is_matrix(tensor.name) else (rows, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(tensor.name, stored, raw_dtype=kind)


#: Tensors of two dimensions that stay float32, beside norms, biases, sinks and routers.
_KEPT = (
    "ssm_a", "ssm_d", "ssm_conv1d.weight", "shortconv.conv.weight", "ffn_gate_inp_shexp.weight",
    "layer_output_scale.weight", ".scale",
)  # fmt: skip


def is_matrix(name: str) -> bool:
    """Tells if a tensor of a file may be rounded."""
    parts = ("norm", ".bias", "attn_sinks", ".ffn_gate_inp.", "rope_")
    return not name.endswith(_KEPT) and not any(part in name for part in parts)


def _storing(checkpoint: str, dtype: str) -> Callable[[Any], tuple[Any, Any]]:
    """A function that stores a matrix of float32 as `dtype`."""
    import gguf

    kind = gguf.GGMLQuantizationType[STORED_AS[dtype]]
    block = gguf.GGML_QUANT_SIZES[kind][0]

    def store(rows: Any) -> tuple[Any, Any]:
        if rows.shape[-1] % block:
            problem = f"rows of {rows.shape[-1]} weights do not divide into blocks of {block}"
            raise UnsupportedModelError(checkpoint, problem, "Store it as float32 or bfloat16.")
        return gguf.quants.quantize(rows, kind), kind

    return store


# --- Layers that predict several tokens, behind those of the model; `loading/gguf/prediction.py` reads them.


#: llama.cpp's names of what such a layer has beside its decoder layer.
_BESIDE = {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head_norm"}


class _BehindModel:
    """The layers of a folder, as a file has them behind those of a model with this configuration."""

    def __init__(self, folder: str, config: Any) -> None:
        self._family = FAMILIES[config.model_type]
        if not _takes_layers(config):
            problem = f"files of {self._family.architecture} have no layers that predict several tokens"
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
        for name, theirs in _BESIDE.items():
            change = AS_IT_IS if name == "fc" else self._family.norms
            weight = modules[name].weight
            assert isinstance(weight, Tensor)
            yield FileTensor(f"blk.{number}.nextn.{theirs}.weight", f"{number}.{name}", whole, change), weight.detach()


def _has_layers(checkpoint: str, config: Any) -> bool:
    """Tells whether a checkpoint carries such layers, and whether files of its family have some."""
    return _takes_layers(config) and carries_mtp(checkpoint, config)


def _takes_layers(config: Any) -> bool:
    return PREDICTED in ARCHITECTURES[FAMILIES[config.model_type].architecture].knows


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


#: The activation that llama.cpp takes, by model type; "silu" elsewhere.
_ACTIVATIONS = {"gemma2": "gelu_pytorch_tanh", "gemma3_text": "gelu_pytorch_tanh"}
#: The kinds of rotary positions that a file describes, by model type; "default" elsewhere.
_ROPES = {"llama": ("default", "linear", "yarn", "llama3"), "phi3": ("default", "longrope"), "gpt_oss": ("default", "yarn")}
_ROPES |= dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "gemma3_text"), ("default", "linear", "yarn"))
_ROPES |= {"ministral3": ("yarn",), "deepseek_v3": ("default", "yarn")}


def check_describable(checkpoint: str, config: Any) -> None:
    """Refuse a model that llama.cpp would compute in another way, or would not load."""
    kind = config.model_type
    if kind not in FAMILIES:
        problem = f"no GGUF is written for {kind}"
        raise UnsupportedModelError(checkpoint, problem, f"Use one of {', '.join(FAMILIES)}.")
    rope, window = rope_of(config), getattr(config, "sliding_window", None)
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    wanted = _ACTIVATIONS.get(kind, "silu")
    special = {
        f"rotary positions of the kind {rope['rope_type']}": rope["rope_type"] not in _ROPES.get(kind, ("default",)),
        f"the activation {activation}": activation != wanted,
        "a scale of its own in YaRN": rope["rope_type"] == "yarn" and not _is_usual_yarn(kind, rope),
        "a sliding window": kind in ("mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe")
        and window is not None
        and _is_used(config),
        "another order of windows": _windows(config) not in (None, getattr(config, "layer_types", None)),
        "another scale of its scores": getattr(config, "query_pre_attn_scalar", None) not in (None, _score_scale(config)),
        "weights of experts that do not add up to 1": not getattr(config, "norm_topk_prob", True),
        "layers without experts beside others": bool(getattr(config, "mlp_only_layers", None))
        or getattr(config, "decoder_sparse_step", 1) != 1,
        "another order of its layers": kind.startswith("qwen3_5") and not attention_interval(config),
        "biases of its attention": kind == "deepseek_v3" and config.attention_bias,
        "another gate of its experts": kind == "gpt_oss" and (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0),
    }
    for name in (name for name, found in special.items() if found):
        raise UnsupportedModelError(checkpoint, f"it has {name}", "No GGUF is written for such a model.")


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


def _is_usual_yarn(kind: str, rope: dict[str, Any]) -> bool:
    """Tells if readers of files know how it scales scores, and rounds the ends of its ramp."""
    if kind == "deepseek_v3":  # whose files say one scale, and no ends of the ramp
        ends = (rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0)
        scale = rope.get("mscale_all_dim")
        return bool(scale) and rope.get("mscale") == scale and ends == (32.0, 1.0) and not rope.get("attention_factor")
    names = ["attention_factor"]
    if kind != "ministral3" or not rope.get("mscale_all_dim") or rope.get("mscale") != 1.0:
        names += ["mscale", "mscale_all_dim"]
    scaled = any(rope.get(name) is not None for name in names)
    return not scaled and rope.get("truncate", True) is (kind != "gpt_oss")


def _is_used(config: Any) -> bool:
    """Tells if its window is shorter than its context, and is used."""
    return bool(getattr(config, "use_sliding_window", True)) and config.sliding_window < config.max_position_embeddings


def _windows(config: Any) -> list[str] | None:
    """The order of the layers with windows that files mean. None for models without such layers."""
    every = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}.get(config.model_type)
    if every is None:
        return None
    layers = range(1, config.num_hidden_layers + 1)
    return ["sliding_attention" if layer % every else "full_attention" for layer in layers]


def _score_scale(config: Any) -> int:
    """The scale of scores that files mean: the width of heads, but in the largest Gemma the hidden size for each head."""
    largest = {"gemma2": 46, "gemma3_text": 62}.get(config.model_type)
    if config.num_hidden_layers == largest:
        return int(config.hidden_size // config.num_attention_heads)
    return head_width(config)


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
