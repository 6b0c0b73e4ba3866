"""Builds the layer descriptions of the fused decoder from a model and its Family."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from outrider.cache.pool import LayerReach
from outrider.kernels.decoder import DecoderLayer, DecoderShape, Norm
from outrider.kernels.experts import ExpertsShape, PackedExperts
from outrider.kernels.packed import PackedWeights
from outrider.loading import hf_modules
from outrider.model.families import FAMILIES, Family
from outrider.model.matrices import Packer, halves, interleaved_qkv, queries_and_gates, stored, whole

#: The activations of transformers by their names in the kernels.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
#: The epsilon of norms that do not say theirs, which is that of PyTorch's layer norm.
_USUAL_EPSILON = 1e-5


def described(model: Any) -> tuple[Any, Family]:
    """The configuration of a model's decoder, and the description of its family."""
    config = hf_modules.decoder_config(model.config)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"the kernels do not know {config.model_type}")
    if model.device.type != "cpu" or model.dtype not in _DTYPES:
        raise ValueError(f"the kernels do not compute {model.dtype} on {model.device.type}")
    activation_of(config, family)
    for name, value in family.only.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"the kernels do not know {name}={getattr(config, name)}")
    if model.get_input_embeddings().weight.shape[1] != config.hidden_size:
        raise ValueError("the kernels do not know embeddings of another width")
    return config, family


def decoder_shape(
    config: Any, family: Family, embeddings: nn.Embedding | None, layers: Sequence[DecoderLayer]
) -> DecoderShape:
    """The sizes of a decoder whose layers are packed already; layers that read given rows have no embeddings."""
    scale = getattr(embeddings, "embed_scale", None)
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=max((layer.down.in_features for layer in layers if layer.down is not None), default=0),
        **_heads(config, family, layers),
        activation=activation_of(config, family),
        parallel=_switch(config, family.parallel),
        interleaved=family.interleaved,
        embedding_scale=1.0 if embeddings is None or scale is None else float(scale.to(embeddings.weight.dtype)),
        input_scale=_number(config, family.input_scale, 1.0),
        logit_scale=_logit_scale(config, family),
        logit_cap=_number(config, family.logit_cap, 0.0),
    )


def _logit_scale(config: Any, family: Family) -> float:
    scaled = family.scaled_outputs is not None and _switch(config, family.scaled_outputs)
    divisor = _number(config, family.logit_divisor, 1.0) * (config.hidden_size**0.5 if scaled else 1.0)
    return _number(config, family.logit_scale, 1.0) / divisor


def _heads(config: Any, family: Family, layers: Sequence[DecoderLayer]) -> dict[str, int]:
    """The sizes of attention, which are those of its first layer. Where no layer attends, nobody reads them."""
    attending = next((layer for layer in layers if layer.mixer is None), None)
    if attending is None:
        return {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1}
    num_heads = config.num_attention_heads
    kv_heads = _num_kv_heads(config, attending.qkv, attending.out, family)
    return {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": attending.out.in_features // num_heads}


def decoder_layer(
    layer: Any,
    reach: LayerReach,
    rotary: int | None,
    config: Any,
    family: Family,
    packer: Packer,
    biases: Tensor | None = None,
) -> DecoderLayer:
    """A layer for the kernels. Its weights are taken out of their modules by `packer`; `biases` are those of its scores."""
    parts = _mixer(layer, family, packer) or _attention(layer, reach, rotary, config, family, packer)
    experts = _experts(layer, config, family, packer)
    gate, up, down = _feed_forward(layer, experts, config, family, packer)
    return DecoderLayer(
        attention_norm=_layer_norm(layer, family.attention_norm, family),
        attention_post_norm=_layer_norm(layer, family.attention_post_norm, family),
        mlp_norm=_layer_norm(layer, family.mlp_norm, family),
        mlp_post_norm=_layer_norm(layer, family.mlp_post_norm, family),
        gate=gate,
        up=up,
        down=down,
        experts=experts,
        beside_gate=_beside_gate(layer, experts, family),
        residual_scale=_number(config, family.residual_scale, 1.0),
        biases=biases,
        **parts,
        **_source(layer, family, packer),
    )


def _mixer(layer: Any, family: Family, packer: Packer) -> dict[str, Any] | None:
    """Returns what a layer with a running state has in the place of attention; None for a layer that attends."""
    if family.mixer is None or getattr(layer, family.mixer[0], None) is None:
        return None
    described = family.mixer[1](getattr(layer, family.mixer[0]))
    into, out = packer.take(*described.into), packer.take(whole(described.out))
    without = dict.fromkeys(("query_norm", "key_norm", "rotary"))
    return {"qkv": into, "out": out, "mixer": described.mixer, **without, **_NO_ATTENTION}


#: What layers without attention say of it.
_NO_ATTENTION = {"whole_norms": False, "scale": 1.0, "softcap": 0.0, "window": 0, "chunk": 0}


def _attention(
    layer: Any, reach: LayerReach, rotary: int | None, config: Any, family: Family, packer: Packer
) -> dict[str, Any]:
    """Returns what a layer has that attends."""
    attention, num_heads = attrgetter(family.attention)(layer), config.num_attention_heads
    if family.rotary_where is not None and not getattr(attention, family.rotary_where):
        rotary = None
    out = packer.take(whole(getattr(attention, family.out)))
    projections = [getattr(attention, name) for name in family.qkv]
    parts = [whole(module) for module in projections]
    if family.interleaved_qkv:
        parts = interleaved_qkv(projections[0], num_heads, out.in_features // num_heads)
    if family.gated_heads:
        queries, gates = queries_and_gates(projections[0], num_heads)
        parts = [*queries, *parts[1:], *gates]
    qkv = packer.take(*parts)
    query_norm, key_norm = (getattr(attention, name, None) for name in family.head_norms)
    return {
        "query_norm": _head_norm(query_norm, num_heads, family),
        "key_norm": _head_norm(key_norm, _num_kv_heads(config, qkv, out, family), family),
        "whole_norms": family.whole_norms,
        "qkv": qkv,
        "out": out,
        "rotary": rotary,
        "scale": attention.scaling,
        "softcap": _number(config, family.score_cap, 0.0),
        "sinks": None if family.sinks is None else getattr(attention, family.sinks),
        "window": reach.window or 0,
        "chunk": reach.chunk or 0,
        "gated_heads": family.gated_heads,
    }


def _source(layer: Any, family: Family, packer: Packer) -> dict[str, Any]:
    """Returns what a layer has that attends to a source. The keys and values of a source are computed by its own
    modules."""
    if family.source is None:
        return {}
    attention = attrgetter(family.source.attention)(layer)
    return {
        "source_norm": _layer_norm(layer, family.source.norm, family),
        "source_query": packer.take(whole(getattr(attention, family.qkv[0]))),
        "source_out": packer.take(whole(getattr(attention, family.out))),
    }


def keys_and_values_of_source(layer: Any, family: Family, encoded: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a source in a layer, [num_tokens, num_kv_heads * head_dim] both, from what the encoder leaves of
    it, [num_tokens, width]."""
    assert family.source is not None, "the family has an encoder"
    attention = attrgetter(family.source.attention)(layer)
    keys, values = (getattr(attention, name)(encoded) for name in family.qkv[1:])
    return keys, values


def _feed_forward(
    layer: Any, experts: PackedExperts | None, config: Any, family: Family, packer: Packer
) -> tuple[PackedWeights | None, PackedWeights | None, PackedWeights | None]:
    """The matrices of a feed-forward, or of the one beside experts: gate, if there is one, up and down. None without it."""
    mlp = attrgetter(family.mlp)(layer) if family.mlp else layer
    if experts is not None:
        if family.experts is None or family.experts.beside is None:
            return None, None, None
        mlp = attrgetter(family.experts.beside)(layer)
    gated = _switch(config, family.gated)
    modules = [getattr(mlp, name) for name in (family.matrices if gated else family.plain_matrices or family.matrices)]
    if not gated:
        return None, packer.take(whole(modules[0])), packer.take(whole(modules[1]))
    gate, up = halves(modules[0]) if len(modules) == 2 else (whole(modules[0]), whole(modules[1]))
    packed_gate, packed_up = packer.take(gate), packer.take(up)
    if not packed_gate.shares_rows_with(packed_up):
        raise ValueError("the kernels do not know a gate and values whose formats take their rows in different forms")
    return packed_gate, packed_up, packer.take(whole(modules[-1]))


def _beside_gate(layer: Any, experts: PackedExperts | None, family: Family) -> Tensor | None:
    """[hidden_size] the projection to the number that scales a feed-forward beside experts."""
    if experts is None or family.experts is None or family.experts.beside_gate is None:
        return None
    stored_gate = stored(attrgetter(family.experts.beside_gate)(layer))
    if stored_gate.format.quantised:
        raise ValueError("the kernels do not know a gate beside experts whose weights are rounded")
    return stored_gate.data[0]


def _experts(layer: Any, config: Any, family: Family, packer: Packer) -> PackedExperts | None:
    """The experts that a feed-forward is made of. None where it is an ordinary one."""
    mlp = None if family.experts is None else getattr(layer, family.experts.block or family.mlp)
    if family.experts is None or not hasattr(mlp, family.experts.module):
        return None
    described, module = family.experts, getattr(mlp, family.experts.module)
    slope, limit = (getattr(module, name) for name in described.bounded) if described.bounded else (0.0, 0.0)
    shape = ExpertsShape(
        num_chosen=getattr(config, described.num_chosen),
        normalised=_switch(config, described.normalised),
        activation=activation_of(config, family),
        slope=slope,
        limit=limit,
    )
    return PackedExperts(shape, packer.take(whole(getattr(mlp, described.router))), *packer.take_experts(module))


def _layer_norm(layer: Any, name: str | None, family: Family) -> Norm | None:
    module = None if name is None else attrgetter(name)(layer)  # some layers have a norm only where they need it
    return None if module is None else norm_of(module, family)


def _head_norm(module: Any | None, num_heads: int, family: Family) -> Norm | None:
    """The norm of queries or keys, with weights for every head."""
    if module is None or isinstance(module, nn.Identity):
        return None
    if family.whole_norms:
        return norm_of(module, family)
    norms = [norm_of(each, family) for each in getattr(module, "norms", [module])]
    weights = torch.cat([norm.weight.reshape(-1, norm.weight.shape[-1]) for norm in norms])
    biases = [norm.bias for norm in norms if norm.bias is not None]
    return Norm(
        norms[0].kind,
        norms[0].epsilon,
        weights.expand(num_heads, -1).flatten(),
        torch.stack(biases).expand(num_heads, -1).flatten() if biases else None,
    )


def norm_of(module: Any, family: Family) -> Norm:
    """A norm for the kernels, which know no offset of its weights."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is None:  # a norm without factors
        weight = torch.ones(module.normalized_shape, dtype=torch.float32)
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)) + family.norm_offset
    epsilon: float = getattr(module, "eps" if hasattr(module, "eps") else "variance_epsilon", _USUAL_EPSILON)
    return Norm(family.norm, epsilon, wide, None if bias is None else bias.detach())


def activation_of(config: Any, family: Family) -> str:
    """The kernels' name of the activation."""
    name = getattr(config, family.activation, "silu")
    if name not in _ACTIVATIONS:
        raise ValueError(f"the kernels do not know the activation {name}")
    return _ACTIVATIONS[name]


def _num_kv_heads(config: Any, qkv: PackedWeights, out: PackedWeights, family: Family) -> int:
    """From the sizes of the matrices, since not every configuration tells the truth."""
    head_dim: int = out.in_features // config.num_attention_heads
    return int(qkv.out_features // head_dim - config.num_attention_heads * (1 + family.gated_heads)) // 2


def _switch(config: Any, value: bool | str) -> bool:
    """A value, or what the configuration keeps under this name."""
    return bool(getattr(config, value)) if isinstance(value, str) else value


def _number(config: Any, name: str | None, default: float) -> float:
    """The number that the configuration keeps under a name, or `default` where it keeps none."""
    value = None if name is None else getattr(config, name)
    return default if value is None else float(value)
