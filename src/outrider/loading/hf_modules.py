"""What transformers' models are made of, where that takes private interfaces. Verified on 5.17 and 5.23."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, initialization
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.integrations.moe import ExpertsInterface
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as hf_logging

from outrider.cache.pool import LayerReach, LayerSpec, StateKind
from outrider.kernels.experts import PackedStack, StoredStack, pack_stacks, unpack_stacks
from outrider.kernels.library import KernelLibrary
from outrider.kernels.weights import ExpertStack

#: Linear layers that keep their weight as [in_features, out_features].
TRANSPOSED_LINEARS = (Conv1D,)
#: The name under which transformers finds `_packed_experts`.
_PACKED_EXPERTS = "outrider_packed"
_RUNNING = frozenset({StateKind.RUNNING, StateKind.CONVOLUTION})
#: What layers keep of a text by transformers' name for their type; all other types attend and keep nothing else.
_KEEPS = {
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent"), _RUNNING),
    **dict.fromkeys(("hybrid", "hybrid_sliding"), _RUNNING | {StateKind.KEYS_AND_VALUES}),
    "rwkv": frozenset({StateKind.RUNNING}),
    "conv": frozenset({StateKind.CONVOLUTION}),
    "dummy": frozenset[StateKind](),  # it does not attend, or reads what an earlier layer keeps
}


@contextmanager
def loading_bars(between: Callable[[], None]) -> Iterator[None]:
    """Within the block, transformers shows no bars: a library does not print unasked. Who sets a hook for them, or the
    verbosity to "info", has asked. Downloads from the hub, which take long, keep theirs."""
    shown = hf_logging.get_verbosity() <= hf_logging.INFO

    def watched(factory: Any, args: Any, kwargs: Any) -> Any:
        if before is not None:
            bar = before(factory, args, kwargs)
        else:
            bar = (factory if shown else hf_logging.EmptyTqdm)(*args, **kwargs)
        return _WatchedBar(bar, between)

    before = hf_logging.set_tqdm_hook(watched)
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(before)


class _WatchedBar:
    """A bar that calls a function whenever it moves."""

    def __init__(self, bar: Any, between: Callable[[], None]) -> None:
        self._bar = bar
        self._between = between

    def __iter__(self) -> Iterator[Any]:
        for item in self._bar:
            self._between()
            yield item

    def __enter__(self) -> _WatchedBar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def update(self, *args: Any) -> None:
        self._between()
        self._bar.update(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


@contextmanager
def swaps_undone() -> Iterator[None]:
    """Returns what transformers swaps while it builds a model is what it was before the block, however the block ends."""
    dtype = torch.get_default_dtype()
    before = [(owner, name, getattr(owner, name)) for owner, name in _swapped()]
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for owner, name, value in before:
            setattr(owner, name, value)


def _swapped() -> Iterator[tuple[Any, str]]:
    """The owners and names of the functions that transformers swaps."""
    yield from ((PreTrainedModel, "tie_weights"), (PreTrainedModel, "init_weights"), (torch, "linspace"))
    modules = [sys.modules[name] for name in initialization.TORCH_MODULES_TO_PATCH if name in sys.modules]
    yield from ((m, name) for m in modules for name in initialization.TORCH_INIT_FUNCTIONS if hasattr(m, name))


def set_attention(model: Any, name: str) -> None:
    """Switch `model` to an attention implementation; raises ValueError where it stays on its own (it may only warn)."""
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} does not take a custom attention function")


def use_plain_experts(model: Any) -> None:
    """Let a mixture of experts compute one expert after another: the fused product takes no float64."""
    if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def expert_stacks(model: Any) -> list[ExpertStack]:
    """The projections of all experts of a model, or of one of its modules."""
    found = []
    for module in model.modules():
        if hasattr(module, "is_transposed"):  # Modules that hold all experts of a layer say how.
            weights = module.named_parameters(recurse=False)
            found += [ExpertStack(module, name, module.is_transposed) for name, weight in weights if weight.dim() == 3]
    return found


def use_packed_experts(model: Any, library: KernelLibrary) -> None:
    """Let mixtures of experts multiply with packed weights, where they have the form that is known here."""
    modules = {id(stack.module): stack.module for stack in expert_stacks(model)}
    known = [module for module in modules.values() if takes_packed_experts(module)]
    if known and model._can_set_experts_implementation():
        pack_stacks([stack for module in known for stack in expert_stacks(module)], library)
        ExpertsInterface.register(_PACKED_EXPERTS, _packed_experts)
        model.set_experts_implementation(_PACKED_EXPERTS)


def use_stored_experts(model: Any) -> None:
    """Let mixtures of experts whose weights are computed as they are stored do so where no kernels read them."""
    if any(stack.is_computed_as_stored for stack in expert_stacks(model)):
        ExpertsInterface.register(_PACKED_EXPERTS, _packed_experts)
        model.set_experts_implementation(_PACKED_EXPERTS)


def use_stock_experts(model: Any) -> None:
    """Undo `use_packed_experts`."""
    stacks = expert_stacks(model)
    unpack_stacks(stacks)
    is_ours = getattr(model.config, "_experts_implementation", None) == _PACKED_EXPERTS
    if is_ours and not any(stack.is_computed_as_stored for stack in stacks):
        use_plain_experts(model)


def takes_packed_experts(module: Any) -> bool:
    """Tells whether the experts of a module have the form that is known here."""
    up = "gate_up_proj" if getattr(module, "has_gate", False) else "up_proj"
    return {stack.name for stack in expert_stacks(module)} == {up, "down_proj"} and hasattr(module, "_apply_gate")


def _packed_experts(
    module: Any,
    hidden_states: Tensor,  # [num_rows, hidden_size]
    top_k_index: Tensor,  # [num_rows, num_chosen]
    top_k_weights: Tensor,  # [num_rows, num_chosen]
) -> Tensor:
    """Returns what transformers calls in each layer of experts. What is added to a row comes in the order of the experts,
    as in its plain implementation; what stands between the products is computed for all experts at once."""
    up, down = (_projection(module, name) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"))
    experts, order = torch.sort(top_k_index.flatten(), stable=True)  # [num_rows * num_chosen] both
    rows = order // top_k_index.shape[-1]
    inner = up.products(hidden_states[rows], experts)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = down.products(inner, experts)
    if getattr(module, "has_post_expert_norm", False):
        outer = module.post_expert_norm(outer)
    weighted = (outer * top_k_weights.flatten()[order, None]).to(hidden_states.dtype)
    return torch.zeros_like(hidden_states).index_add_(0, rows, weighted)


def _projection(module: Any, name: str) -> PackedStack | StoredStack:
    packed: PackedStack | None = module.__dict__.get("packed_stacks", {}).get(name)
    return StoredStack(ExpertStack(module, name, module.is_transposed)) if packed is None else packed


def stock_attention(model: Any) -> str:
    """The stock implementation to trust: sdpa, or eager where sdpa would drop soft-capping or attention sinks."""
    config = model.config.get_text_config()
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not capped else "eager"


def attends(config: Any) -> bool:
    """Tells whether any layer of a model attends."""
    return any(StateKind.KEYS_AND_VALUES in layer.keeps for layer in layer_specs(config))


def has_encoder(config: Any) -> bool:
    """Tells whether an encoder reads a source before the decoder writes."""
    return bool(getattr(config, "is_encoder_decoder", False))


def reads_text(config: Any) -> bool:
    """Tells whether transformers has a model of this type that reads text and writes text."""
    return getattr(config, "model_type", None) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def is_causal(config: Any) -> bool:
    """Tells whether transformers, or code that the checkpoint brings, has a causal language model of this type."""
    brought = getattr(config, "auto_map", None) or {}
    return "AutoModelForCausalLM" in brought or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


#: Types of assistants of Gemma 4, which write nothing without a target, and the types of the text models that they hold.
ASSISTANTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
#: Types of models that read pictures, too, and the types of their language models; None where the part says its own.
_LANGUAGE_MODELS = {"mistral3": None, "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
#: The names of a language model's tensors in files of such models, older and newer ones, and alone.
LANGUAGE_NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head": "lm_head",
}
_PART_OF = "_language_model_of"


def language_model(config: Any) -> Any | None:
    """The configuration of the language model alone of a model that reads pictures, too; None for other models. Positions
    of pictures have several numbers, which are one in a text."""
    kind = getattr(config, "model_type", None)
    if kind not in _LANGUAGE_MODELS:
        return None
    found, own = config.text_config, _LANGUAGE_MODELS[kind]
    if own is not None:
        known, given = AutoConfig.for_model(own).to_dict().keys() - {"model_type"}, found.to_dict()
        rope = {name: value for name, value in given["rope_parameters"].items() if not name.startswith("mrope")}
        values = {name: given[name] for name in known & given.keys()}
        found = AutoConfig.for_model(own, **values | {"rope_parameters": rope})
    found.tie_word_embeddings = config.tie_word_embeddings
    setattr(found, _PART_OF, kind)
    return found


def is_language_part(config: Any) -> bool:
    """Tells whether a configuration is that of a part, as `language_model` returns it."""
    return hasattr(config, _PART_OF)


def decoder_config(config: Any) -> Any:
    """The configuration of what writes text; of a model with an encoder, as one of its decoder alone would be."""
    found = config.get_text_config(decoder=True)
    layers = getattr(config, "num_decoder_layers", None)  # T5's name, which transformers takes for no part of a decoder's
    if has_encoder(config) and layers is not None:
        found.num_hidden_layers = layers
    return found


def layer_specs(config: Any) -> tuple[LayerSpec, ...]:
    """Returns what each layer of a model keeps of a text and how far back it looks, from the configuration (attention
    functions are not told reliably)."""
    of_source = frozenset({StateKind.SOURCE}) if has_encoder(config) else frozenset()
    return tuple(_layer_spec(name, size, of_source) for name, size in _layers(config))


def owners_of_keys(config: Any) -> dict[int, int]:
    """The layers whose keys and values other layers read, by these, as in Gemma 4; empty for other models."""
    text = decoder_config(config)
    found, stored = dict[int, int](), dict[str, int]()
    for layer, mode in enumerate(getattr(text, "kv_sharing_modes", None) or ()):
        kind = text.layer_types[layer]
        if mode == "store":
            stored[kind] = layer
        elif mode == "reuse":
            found[layer] = stored[kind]
    return found


class KeyHeads(NamedTuple):
    """The heads of keys of a layer, and how many numbers each has."""

    num: int
    width: int


def key_heads(config: Any) -> list[KeyHeads]:
    """The heads of keys by layer, as usual attention has them. Those of Gemma 4 differ from layer to layer."""
    text = decoder_config(config)
    layers = range(text.num_hidden_layers)
    own = [text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text for layer in layers]
    return [
        KeyHeads(
            getattr(each, "num_key_value_heads", None) or each.num_attention_heads,
            getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads,
        )
        for each in own
    ]


def _layer_spec(name: str, size: int | None, of_source: frozenset[StateKind]) -> LayerSpec:
    reach = LayerReach(chunk=size) if name == "chunked_attention" else LayerReach(window=size)
    return LayerSpec(name, _KEEPS.get(name, frozenset({StateKind.KEYS_AND_VALUES})) | of_source, reach)


def _layers(config: Any) -> list[tuple[str, int | None]]:
    """Kind of attention and size of its window or chunk, layer by layer.

    Releases differ: older ones give one set of arguments for all layers, newer ones a set for each.
    """
    text = decoder_config(config)
    types, arguments = get_layer_types_and_kwargs(text)
    each = arguments if isinstance(arguments, list) else [arguments] * len(types)
    found = [(kind, extra.get("sliding_window")) for kind, extra in zip(types, each, strict=True)]
    # A cache of transformers holds nothing for layers that read keys and values of others. They look as far as these do.
    for layer, mode in enumerate(getattr(text, "kv_sharing_modes", None) or ()):
        if mode == "reuse":
            kind = text.layer_types[layer]
            found[layer] = (kind, text.sliding_window if kind == "sliding_attention" else None)
    return [(kind, None if kind == "full_attention" else size) for kind, size in found]


def fixed_rope_context(config: Any) -> int | None:
    """Longest sequence before rotary factors begin to change with every token, as "dynamic" scaling makes them; None for
    no such limit."""
    return _original_context(config, "dynamic")


def long_rope_after(config: Any) -> int | None:
    """The longest text that uses the short factors of "longrope"; every longer one uses the long ones for all its tokens.
    None where there is one set of factors."""
    return _original_context(config, "longrope")


def _original_context(config: Any, rope_type: str) -> int | None:
    text_config = decoder_config(config)
    parameters = getattr(text_config, "rope_parameters", None) or {}
    sets = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    limits = []
    for rope in sets:
        if rope.get("rope_type") == rope_type:
            original = rope.get("original_max_position_embeddings")
            limits.append(original or getattr(text_config, "original_max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=None)


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a model, in order."""
    return _stack_and_layers(model)[1]


def decoder_stack(model: Any) -> Any:
    """The module that holds the decoder layers of a model, and what comes before and after them."""
    return _stack_and_layers(model)[0]


def _stack_and_layers(model: Any) -> tuple[Any, Any]:
    config = decoder_config(model.config)
    count = config.num_hidden_layers
    stack = model.get_decoder() if has_encoder(model.config) else model.base_model
    found = [
        (module, child)
        for module in stack.modules()
        for child in module.children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no list of its {count} layers")
    # An encoder of images may have as many layers, and another configuration.
    return next((pair for pair in found if getattr(pair[0], "config", None) is config), found[0])
