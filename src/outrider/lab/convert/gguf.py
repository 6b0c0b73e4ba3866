"""Writes a checkpoint or a head as a GGUF file: its shape, its tensors, and the models that it cannot describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.files import write_whole
from outrider.heads.features import FeatureHeadConfig, FeatureNorm
from outrider.heads.formats.folder import renamed
from outrider.heads.formats.gguf import GGUF_EAGLE3, LAYERS
from outrider.heads.formats.published import PublishedHead, read_head
from outrider.lab.convert.gguf_vocabulary import WriteVocabulary, own_vocabulary, placeholders
from outrider.loading.exclusive import attempt, exclusive_transformers
from outrider.loading.gguf.rotary import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS

#: The types in which weights may be stored, with their names in the gguf package.
STORED_AS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}


def write_gguf(checkpoint: str, path: Path, dtype: str = "float32", vocabulary: WriteVocabulary | None = None) -> str:
    """Write a checkpoint to `path`, and return the path. This needs memory for several copies of the weights. Matrices are
    stored as one of `STORED_AS`; the last two have a scale for 32 weights. Vectors stay float32. Without a vocabulary
    placeholders are written, of which none ends a text."""
    import gguf
    from transformers import AutoModelForCausalLM

    if dtype not in STORED_AS:
        raise InvalidParameterError("dtype", dtype, "not a type of weights in GGUF", f"Use one of {', '.join(STORED_AS)}.")
    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    check_describable(checkpoint, model.config)
    writer = gguf.GGUFWriter(None, FAMILIES[model.config.model_type].architecture)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "float32" else f"MOSTLY_{STORED_AS[dtype]}"])
    describe(writer, model.config)
    (vocabulary or placeholders())(writer, model.config.vocab_size)
    _write_tensors(writer, model, _storing(checkpoint, dtype))
    write_file(writer, path)
    return str(path)


def _write_tensors(writer: Any, model: Any, store: Callable[[Any], tuple[Any, Any]]) -> None:
    import gguf

    for name, factors in frequency_factors(model.config).items():
        writer.add_tensor(name, factors)
    state = model.state_dict()
    for tensor in file_tensors(model.config, state):
        rows = np.ascontiguousarray(tensor.rows(state[tensor.stock]))
        stored, kind = store(rows) if is_matrix(tensor.name) else (rows, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(tensor.name, stored, raw_dtype=kind)


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


# --- Where the weights of a model lie in a GGUF file: llama.cpp's names of tensors, and the order of their rows.


_GATES = "mlp.experts.gate_up_proj"


@dataclass(frozen=True)
class FileFamily:
    """Says how models of a type become files."""

    architecture: str  # llama.cpp's name
    interleaved: bool = False  # whether llama.cpp rotates neighbours in them
    offset_norms: bool = False  # whether transformers adds 1 to the weights of norms, which files have added already


#: By the model type of their configuration.
FAMILIES = {
    "llama": FileFamily("llama", interleaved=True),
    "mistral": FileFamily("llama", interleaved=True),
    "ministral3": FileFamily("mistral3", interleaved=True),
    "qwen2": FileFamily("qwen2"),
    "qwen3": FileFamily("qwen3"),
    "qwen3_moe": FileFamily("qwen3moe"),
    "phi3": FileFamily("phi3"),
    "gpt_oss": FileFamily("gpt-oss"),
    "gemma2": FileFamily("gemma2", offset_norms=True),
    "gemma3_text": FileFamily("gemma3", offset_norms=True),
}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file."""

    name: str  # llama.cpp's name
    stock: str  # the name of the tensor of transformers that it is, or is a part of
    arranged: Callable[[np.ndarray], np.ndarray]  # makes the file's array of that of transformers
    offset: int = 0  # what is added to each number

    def rows(self, weight: Tensor) -> np.ndarray:
        """The file's array, float32, of the tensor of transformers."""
        rows = self.arranged(weight.float().numpy())
        return rows + np.float32(self.offset) if self.offset else rows


def is_matrix(name: str) -> bool:
    """Tells if a tensor of a file may be rounded. Norms, biases, sinks and routers stay float32."""
    return not any(part in name for part in ("norm", ".bias", "attn_sinks", ".ffn_gate_inp.", "rope_"))


def file_tensors(config: Any, names: Iterable[str]) -> Iterator[FileTensor]:
    """The tensors of the file of a model. A tied head is none of them."""
    import gguf

    family = FAMILIES[config.model_type]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}

    def named(stock: str) -> str:
        found: str | None = known.get_name(stock, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"the gguf package has a name for {stock}"
        return found

    for stock in names:
        if stock == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".mlp.experts." in stock:
            yield from _expert_tensors(config, stock, named)
        elif stock.endswith(".sinks"):
            yield FileTensor(f"{named(stock)}.weight", stock, _as_it_is)
        else:
            count = next((n for part, n in heads.items() if part in stock and family.interleaved), None)
            offset = int(family.offset_norms and "norm" in stock)
            yield FileTensor(named(stock), stock, _as_it_is if count is None else Paired(count), offset)


def _expert_tensors(config: Any, stock: str, named: Callable[[str], str]) -> Iterator[FileTensor]:
    """Gates and values of all experts, which lie apart in files, or their projections back."""
    plain = stock.removesuffix("_bias")
    kind = "weight" if plain == stock else "bias"
    in_turn = turned = config.model_type == "gpt_oss"  # in transformers
    turned = turned and kind == "weight"
    if not plain.endswith(_GATES):
        yield FileTensor(named(f"{plain}.{kind}"), stock, _turned if turned else _as_it_is)
        return
    for part, projection in enumerate(("gate_proj", "up_proj")):
        name = named(f"{plain.replace('gate_up_proj', projection)}.{kind}")
        yield FileTensor(name, stock, _Part(part, in_turn=in_turn, turned=turned))


def _as_it_is(rows: np.ndarray) -> np.ndarray:
    return rows


def _turned(experts: np.ndarray) -> np.ndarray:
    return experts.swapaxes(1, 2)


@dataclass(frozen=True)
class _Part:
    """Gates (0) or values (1) of the rows of all experts."""

    part: int
    in_turn: bool
    turned: bool

    def __call__(self, experts: np.ndarray) -> np.ndarray:
        rows = _turned(experts) if self.turned else experts
        if self.in_turn:
            return rows[:, self.part :: 2]
        found: np.ndarray = np.split(rows, 2, axis=1)[self.part]
        return found


@dataclass(frozen=True)
class Paired:
    """Rows [num_heads * head_dim, ...] with the halves of each head interleaved, since llama.cpp rotates neighbours."""

    num_heads: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(self.num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


# --- What a GGUF file says of the shape of its model, and the models that it cannot describe.


#: The activation that llama.cpp takes, by model type; "silu" elsewhere.
_ACTIVATIONS = {"gemma2": "gelu_pytorch_tanh", "gemma3_text": "gelu_pytorch_tanh"}
#: The kinds of rotary positions that a file describes, by model type; "default" elsewhere.
_ROPES = {"llama": ("default", "linear", "yarn", "llama3"), "phi3": ("default", "longrope"), "gpt_oss": ("default", "yarn")}
_ROPES |= dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "gemma3_text"), ("default", "linear", "yarn"))
_ROPES |= {"ministral3": ("yarn",)}


def check_describable(checkpoint: str, config: Any) -> None:
    """Refuse a model that llama.cpp would compute in another way, or would not load."""
    kind = config.model_type
    if kind not in FAMILIES:
        problem = f"no GGUF is written for {kind}"
        raise UnsupportedModelError(checkpoint, problem, f"Use one of {', '.join(FAMILIES)}.")
    rope, window = _rope(config), getattr(config, "sliding_window", None)
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
        "another gate of its experts": kind == "gpt_oss" and (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0),
    }
    for name in (name for name, found in special.items() if found):
        raise UnsupportedModelError(checkpoint, f"it has {name}", "No GGUF is written for such a model.")


def describe(writer: Any, config: Any) -> None:
    """Write what a file says of the shape of a model."""
    head_dim = head_width(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _describe_rope(writer, config, head_dim)
    if config.model_type in ("gemma2", "gemma3_text", "gpt_oss", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.model_type.startswith("gemma") and getattr(config, name, None):
            getattr(writer, f"add_{name}")(getattr(config, name))
    if config.model_type in ("qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))


def frequency_factors(config: Any) -> dict[str, np.ndarray]:
    """The tensors with factors of rotary frequencies, float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = _rope(config)
    if rope["rope_type"] == "longrope":
        names = {SHORT_FACTORS: "short_factor", LONG_FACTORS: "long_factor"}
        return {name: np.array(rope[key], np.float32) for name, key in names.items()}
    if rope["rope_type"] != "llama3":
        return {}
    width = head_width(config)
    usual = rope["rope_theta"] ** -(np.arange(0, width, 2) / width)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return {FREQUENCY_FACTORS: (usual / scaled.double().numpy()).astype(np.float32)}


def head_width(config: Any) -> int:
    """The dimensions of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _describe_rope(writer: Any, config: Any, head_dim: int) -> None:
    import gguf

    rope = _rope(config)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"] if rope.get("mscale") else 0.0)
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        writer.add_rope_scaling_attn_factors(ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")[1])


def _rope(config: Any) -> dict[str, Any]:
    """The rotary positions of its layers without a window."""
    found: dict[str, Any] = config.rope_parameters
    whole: dict[str, Any] = found.get("full_attention", found)
    return whole


def _is_usual_yarn(kind: str, rope: dict[str, Any]) -> bool:
    """Tells if readers of files know how it scales scores, and rounds the ends of its ramp."""
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
    describe(writer, config.layer)
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
