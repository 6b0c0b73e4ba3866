"""Heads with random weights in the layouts in which they are published, for proofs without a trained one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.heads.checkpoint import describe_target, save_heads, take_witness
from outrider.heads.lone import lone_config
from outrider.heads.networks import (
    BlockwiseConfig,
    ExitConfig,
    HeadsConfig,
    HeadTarget,
    MedusaConfig,
    build_network,
    randomise,
)
from outrider.loading.exclusive import exclusive_transformers

#: What NVIDIA nests in a configuration, with the layers whose outputs are read.
_NVIDIA = {
    "eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True, "use_mtp_layernorm": False,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "next_layer_regular": True,
    "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
}  # fmt: skip
#: Where each layout puts the layer. The first one is that of EAGLE-1.
HEAD_LAYOUTS = {"safeailab1": "layers.0.", "safeailab": "midlayer.", "nvidia": "layers.0.", "speculators": "layers.0."}


def save_random_eagle(
    folder: Path,
    target: str,
    layout: str,
    seed: int = 1,
    *,
    scale: float = 0.3,
    draft_tokens: tuple[int, ...] | None = None,
    sizes: dict[str, Any] | None = None,
    own_embedding: bool = False,
    own_output: bool = True,
    **fields: Any,
) -> str:
    """Write a head with random weights for a checkpoint; returns its folder. It drafts these tokens of the target, in
    ascending order; None for all."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    layer = _layer(config, "llama", 1, sizes)
    drafted = config.vocab_size if draft_tokens is None else len(draft_tokens)
    named = {} if layout == "safeailab1" else {"draft_vocab_size": drafted}
    mapping = _head_mapping(layout, target, layer, named | fields)
    wide = int(mapping.get("target_hidden_size") or layer["hidden_size"])
    of_eagle1 = layout == "safeailab1"
    shapes = _eagle1_shapes(layer, mapping) if of_eagle1 else _eagle3_shapes(layout, layer, mapping, wide, drafted)
    if not own_output:
        del shapes["lm_head.weight"]
    tensors = random_tensors(shapes, seed, scale) | _columns(draft_tokens, config.vocab_size)
    if own_embedding:
        copy = load_file(Path(target) / "model.safetensors")["model.embed_tokens.weight"]
        random = random_tensors({"": (config.vocab_size, layer["hidden_size"])}, seed + 1, scale)[""]
        tensors["embed_tokens.weight"] = copy.clone() if copy.shape == random.shape else random
    return _written(folder, mapping, tensors)


def _layer(config: Any, kind: str, count: int, sizes: dict[str, Any] | None) -> dict[str, Any]:
    """The configuration of so many layers for a target, with other sizes where they are given."""
    return {
        "model_type": kind, "hidden_size": config.hidden_size, "intermediate_size": 2 * config.hidden_size,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": config.hidden_size // 2,
        "num_hidden_layers": count, "vocab_size": config.vocab_size, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        **(sizes or {}),
    }  # fmt: skip


def _columns(drafted: tuple[int, ...] | None, vocab_size: int) -> dict[str, Tensor]:
    """The tensors that name the target's tokens which a head drafts; none where it drafts all."""
    if drafted is None:
        return {}
    chosen = torch.tensor(drafted)
    known = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    return {"d2t": chosen - torch.arange(len(chosen)), "t2d": known}


def _written(folder: Path, mapping: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(mapping), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def _head_mapping(layout: str, target: str, layer: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration as each of them writes it."""
    if layout == "nvidia":
        return {"architectures": ["LlamaForCausalLMEagle3"], **layer, "eagle_config": _NVIDIA, **fields}
    if layout != "speculators":
        return {"architectures": ["LlamaForCausalLM"], **layer, **fields}
    verifier = {"name_or_path": target, "architectures": []}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.5.0",
        "norm_before_residual": False, "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier}, **fields,
    }  # fmt: skip


def layer_shapes(layer: dict[str, Any], read: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a layer but for its first norms."""
    hidden, inner, dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, kept = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (hidden,)}
    for name, size in (("q", queries), ("k", kept), ("v", kept)):
        shapes[f"self_attn.{name}_proj.weight"] = (size, read)
        if layer.get("qkv_bias"):
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    shapes |= {
        "self_attn.o_proj.weight": (hidden, queries), "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner),
    }  # fmt: skip
    if layer["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


def _eagle1_shapes(layer: dict[str, Any], mapping: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of an EAGLE-1 head but the embeddings."""
    hidden = layer["hidden_size"]
    shapes = {HEAD_LAYOUTS["safeailab1"] + name: shape for name, shape in layer_shapes(layer, hidden).items()}
    return shapes | {"fc.weight": (hidden, 2 * hidden)} | ({"fc.bias": (hidden,)} if mapping.get("bias", True) else {})


def _eagle3_shapes(
    layout: str, layer: dict[str, Any], mapping: dict[str, Any], wide: int, drafted: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of an EAGLE-3 head but the embeddings and the columns of tokens."""
    hidden, named = layer["hidden_size"], mapping.get("eagle_config", mapping).get("eagle_aux_hidden_state_layer_ids")
    count = len(named or (0, 0, 0))
    of_layer = dict.fromkeys(("hidden_norm.weight", "input_layernorm.weight"), (hidden,)) | layer_shapes(layer, 2 * hidden)
    shapes = {HEAD_LAYOUTS[layout] + name: shape for name, shape in of_layer.items()}
    shapes |= {"fc.weight": (hidden, count * wide), "norm.weight": (hidden,), "lm_head.weight": (drafted, hidden)}
    if mapping.get("norm_before_fc"):
        shapes["input_norm.weight"] = (count * wide,)
    if mapping.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(count)}
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, scale: float, plain: float = 1.0) -> dict[str, Tensor]:
    """Normal numbers; norms lie around what leaves their rows as they are."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}
    return {name: values + plain if "norm" in name else values for name, values in found.items()}


# --- Block drafters with random weights in the layouts in which they are published, for proofs without a trained one.


BLOCK_LAYOUTS = ("z-lab", "z-lab, old", "speculators")
#: Those with the small heads of DSpark.
SEQUENTIAL_LAYOUTS = ("deepspec", "speculators dspark")


def save_random_dflash(
    folder: Path,
    target: str,
    layout: str = "z-lab",
    seed: int = 1,
    *,
    scale: float = 0.3,
    block_size: int = 6,
    inputs: tuple[int, ...] = (1, 2),
    draft_tokens: tuple[int, ...] | None = None,
    sizes: dict[str, Any] | None = None,
    bias: float = 3.0,
    **fields: Any,
) -> str:
    """Write a block drafter with random weights for a checkpoint; returns its folder. In the layouts of speculators it
    drafts these tokens of the target, in ascending order; None for all. The weights of the small heads of DSpark are larger
    than others by a factor of `bias`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    layers = _layer(config, "qwen3", 2, {"rope_theta": 10000.0, **(sizes or {})})
    drafted = config.vocab_size if draft_tokens is None else len(draft_tokens)
    shape = {"block_size": block_size, "mask_token_id": config.vocab_size - 1, **fields}
    mapping = _block_mapping(layout, target, layers, inputs, drafted, shape)
    shapes = _shapes(layers, len(inputs), int(mapping.get("target_hidden_size") or config.hidden_size))
    if draft_tokens is not None:
        shapes["lm_head.weight"] = (drafted, layers["hidden_size"])
    tensors = random_tensors(shapes, seed, scale) | _columns(draft_tokens, config.vocab_size)
    if layout in SEQUENTIAL_LAYOUTS:
        small = _sequential_shapes(mapping, layers["hidden_size"], config.vocab_size, drafted)
        tensors |= random_tensors(small, seed + 1, bias * scale)
    return _written(folder, mapping, tensors)


def _block_mapping(
    layout: str, target: str, layers: dict[str, Any], inputs: tuple[int, ...], num_drafted: int, shape: dict[str, Any]
) -> dict[str, Any]:
    """The configuration as each of them writes it."""
    if layout.startswith("speculators"):
        method = "dspark" if layout in SEQUENTIAL_LAYOUTS else "dflash"
        return {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": method, "speculators_version": "0.9.0",
            "transformer_layer_config": layers, "draft_vocab_size": num_drafted,
            "aux_hidden_state_layer_ids": list(inputs),
            "speculators_config": {"algorithm": method, "verifier": {"name_or_path": target, "architectures": []}},
            **({"markov_rank": 8} if layout in SEQUENTIAL_LAYOUTS else {}), **shape,
        }  # fmt: skip
    if layout == "deepspec":
        heads = {
            "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }  # fmt: skip
        ids = [i - 1 for i in inputs]
        return {"architectures": ["Qwen3DSparkModel"], **layers, "target_layer_ids": ids, **heads, **shape}
    nested = {"target_layer_ids": [i - 1 for i in inputs], "mask_token_id": shape.pop("mask_token_id")}
    block = {"block_size": shape.pop("block_size")}
    old = layout == "z-lab, old"
    return {
        "architectures": ["DFlashDraftModel"], **layers, **(block if old else {}),
        "dflash_config": {**nested, **({} if old else block)}, **shape,
    }  # fmt: skip


def _sequential_shapes(mapping: dict[str, Any], hidden: int, vocab_size: int, num_drafted: int) -> dict[str, Any]:
    """Returns the shapes of the small heads of DSpark."""
    rank, kind = mapping["markov_rank"], mapping.get("markov_head_type", "vanilla")
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab_size, rank), "markov_head.markov_w2.weight": (num_drafted, rank)}
    if rank and kind != "vanilla":
        name, wide, out = ("gate", hidden + rank, rank) if kind == "gated" else ("joint", 2 * rank + hidden, 3 * rank)
        shapes |= {f"markov_head.{name}_proj.weight": (out, wide), f"markov_head.{name}_proj.bias": (out,)}
    if mapping.get("enable_confidence_head", True):
        with_token = rank if mapping.get("confidence_head_with_markov", True) else 0
        shapes |= {"confidence_head.proj.weight": (1, hidden + with_token), "confidence_head.proj.bias": (1,)}
    return shapes


def _shapes(layers: dict[str, Any], num_read: int, wide: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors that every layout has."""
    hidden = layers["hidden_size"]
    of_layer = {"input_layernorm.weight": (hidden,), **layer_shapes(layers, hidden)}
    shapes = {f"layers.{i}.{name}": shape for i in range(layers["num_hidden_layers"]) for name, shape in of_layer.items()}
    return shapes | {"fc.weight": (hidden, num_read * wide), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}


# --- Layers with random weights that predict several tokens, in the layouts in which checkpoints are published with them.


#: By layout: where a layer's names begin, with its number; where those of all layers begin; the names of what is beside the
#: decoder layer; and its kind of attention.
MTP_LAYOUTS: dict[str, tuple[str, str | None, tuple[str, str, str, str], str]] = {
    "qwen3_next": (
        "mtp.layers.{}.", "mtp.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "full_attention",
    ),
    "deepseek_v3": ("model.layers.{}.", None, ("eh_proj", "enorm", "hnorm", "shared_head.norm"), "full_attention"),
    "mimo_7b": (
        "model.mtp_layers.{}.", None, ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        "full_attention",
    ),
    "speculators": (
        "mtp_layers.{}.", None, ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"), "full_attention",
    ),
    "mimo_v2": ("model.mtp.layers.{}.", None, ("eh_proj", "enorm", "hnorm", "final_layernorm"), "sliding_attention"),
}  # fmt: skip


def save_random_mtp(
    folder: Path, target: str, layout: str, num_layers: int = 1, seed: int = 1, *, scale: float = 0.3
) -> str:
    """Write layers with random weights for a checkpoint; returns their folder."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    file = folder / "model.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(file) if file.exists() else {}
    prefix, shared, (fc, embedding, hidden, norm), layer_type = MTP_LAYOUTS[layout]
    names = _layer_names(config, layer_type)
    size = config.hidden_size
    beside = {fc: (size, 2 * size), embedding: (size,), hidden: (size,), norm: (size,)}
    first = config.num_hidden_layers if layout == "deepseek_v3" else 0
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(first, first + num_layers):
        start = prefix.format(number)
        shapes |= {f"{start}{name}": shape for name, shape in names.items()}
        shapes |= {f"{start if shared is None else shared}{name}.weight": shape for name, shape in beside.items()}
        if layout == "deepseek_v3":  # copies of what the target has
            shapes |= {f"{start}{name}.weight": (config.vocab_size, size) for name in ("embed_tokens", "shared_head.head")}
    plain = 0.0 if layout == "qwen3_next" else 1.0  # its norms multiply by 1 + w
    save_file(tensors | random_tensors(shapes, seed, scale, plain), file, {"format": "pt"})
    return str(folder)


def _layer_names(config: object, layer_type: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a decoder layer, as transformers writes them."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    experts = layer_type == "full_attention" and hasattr(config, "num_experts_per_tok")
    with tempfile.TemporaryDirectory() as folder, exclusive_transformers():
        model = AutoModelForCausalLM.from_config(lone_config(config, experts=experts, layer_type=layer_type))
        model.save_pretrained(folder)
        found = load_file(Path(folder) / "model.safetensors")
    own = sorted(name for name in found if name.startswith("model.layers.0."))  # files are read in any order
    shapes = {name: tuple(found[name].shape) for name in own}
    renamed = {"post_attention_layernorm.": "pre_mlp_layernorm."} if layer_type == "sliding_attention" else {}
    shown = {}
    for name, shape in shapes.items():
        inner = name.removeprefix("model.layers.0.")
        start = next((old for old in renamed if inner.startswith(old)), "")
        shown[renamed.get(start, "") + inner.removeprefix(start)] = shape
    return shown


# --- P-EAGLE heads with random weights in the layout in which they are published, for proofs without a trained one.


def save_random_peagle(
    folder: Path,
    target: str,
    seed: int = 1,
    *,
    scale: float = 0.3,
    num_layers: int = 2,
    sizes: dict[str, Any] | None = None,
    **fields: Any,
) -> str:
    """Write a P-EAGLE head with random weights for a checkpoint, as the speculators package does; returns its folder."""
    from safetensors.torch import load_file

    save_random_eagle(
        folder, target, "speculators", seed, scale=scale, sizes={"num_hidden_layers": num_layers, **(sizes or {})}, **fields
    )
    mapping = json.loads((folder / "config.json").read_text("utf-8"))
    layer = mapping["transformer_layer_config"]
    mapping |= {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}
    mapping.setdefault("mask_token_id", layer["vocab_size"] - 1)
    mapping["speculators_config"]["algorithm"] = "peagle"
    tensors = load_file(folder / "model.safetensors")
    of_layer = {"input_layernorm.weight": (layer["hidden_size"],), **layer_shapes(layer, layer["hidden_size"])}
    shapes = {f"layers.{i}.{name}": shape for i in range(1, num_layers) for name, shape in of_layer.items()}
    shapes["mask_hidden"] = (1, 1, tensors["fc.weight"].shape[1])
    return _written(folder, mapping, tensors | random_tensors(shapes, seed + 2, scale))


# --- Heads with random weights for a small target, so that drafts from heads can be proven without training any.


#: Methods that draft with heads, and a spread of random weights for a tiny target, so that they guess unevenly and are not
#: sure of anything.
HEAD_METHODS = {"medusa": 0.7, "blockwise": 0.25, "exit": 0.7}
_SOME: dict[str, Any] = {"scale": 0.7, "draft_tokens": (0, 2)}
_LOW: dict[str, Any] = {**_SOME, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
#: Methods whose heads keep keys and values of the text, with what writes such a head. They need a target of three layers,
#: and layers that predict several tokens need a Llama.
FEATURE_METHODS: dict[str, Callable[[Path, str], str]] = {
    "eagle1": partial(save_random_eagle, layout="safeailab1", scale=0.7),
    "eagle3": partial(save_random_eagle, layout="speculators", **_LOW),
    "mtp": partial(save_random_mtp, layout="deepseek_v3", num_layers=2, scale=0.7),
    "dflash": partial(save_random_dflash, layout="speculators", block_size=4, **_SOME),
    "dspark": partial(save_random_dflash, layout="deepspec", scale=0.7, block_size=3, markov_head_type="rnn", bias=1.0),
    "peagle": partial(save_random_peagle, **_LOW),
}


def random_config(method: str, target: HeadTarget) -> HeadsConfig:
    """Heads of a method as small as they can be for a target."""
    if method == "medusa":
        width = target.hidden_size
        return MedusaConfig(target=target, layer=target.num_layers, normed=True, heads=3, width=width)
    if method == "blockwise":
        return BlockwiseConfig(target=target, layer=target.num_layers, normed=True, heads=3, inner=target.hidden_size)
    assert method == "exit", method
    return ExitConfig(target=target, layer=max(1, target.num_layers - 1), normed=False, width=target.hidden_size)


def save_tiny_heads(folder: Path, target: str) -> dict[str, str]:
    """Write heads of each method for a tiny target; returns their folders by method."""
    found = {name: save_random_heads(folder / name, target, name, scale=scale) for name, scale in HEAD_METHODS.items()}
    return found | {name: save(folder / name, target) for name, save in FEATURE_METHODS.items()}


def save_random_heads(folder: Path, target: str, method: str, seed: int = 1, *, scale: float = 0.3, **changes: Any) -> str:
    """Write heads with random weights for a checkpoint; returns their folder."""
    from transformers import AutoModelForCausalLM

    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    config = random_config(method, describe_target(model, target)).replace(**changes)
    network = build_network(config)
    randomise(network, seed, scale)
    save_heads(folder, network, take_witness(model, config))
    return str(folder)
