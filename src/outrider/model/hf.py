"""All uses of private interfaces of transformers. Verified on 5.17 and 5.23."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, initialization
from transformers.cache_utils import Cache, get_layer_types_and_kwargs
from transformers.integrations.moe import ExpertsInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as hf_logging

from outrider.cache.layer_spec import LayerReach, LayerSpec, StateKind
from outrider.cache.pool import KVPool, Slots
from outrider.kernels.expert_stacks import PackedStack, StoredStack, pack_stacks, unpack_stacks
from outrider.kernels.library import KernelLibrary
from outrider.kernels.weights import ExpertStack
from outrider.model.context import ongoing_context

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
    verbosity to "info", has asked. Downloads from the hub, which take long, keep theirs.

    Args:
        between: Called before every weight, and wherever else a bar would move. It may raise.
    """
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
    """What transformers swaps while it builds a model is what it was before the block, however the block ends."""
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


def register_attention(name: str, function: Callable[..., Any]) -> str:
    """Make an attention function known under `name`; returns the name."""
    AttentionInterface.register(name, function)
    return name


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
    """Whether the experts of a module have the form that is known here."""
    up = "gate_up_proj" if getattr(module, "has_gate", False) else "up_proj"
    return {stack.name for stack in expert_stacks(module)} == {up, "down_proj"} and hasattr(module, "_apply_gate")


def _packed_experts(
    module: Any,
    hidden_states: Tensor,  # [num_rows, hidden_size]
    top_k_index: Tensor,  # [num_rows, num_chosen]
    top_k_weights: Tensor,  # [num_rows, num_chosen]
) -> Tensor:
    """What transformers calls in each layer of experts. What is added to a row comes in the order of the experts, as in its
    plain implementation; what stands between the products is computed for all experts at once."""
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
    """Whether any layer of a model attends."""
    return any(StateKind.KEYS_AND_VALUES in layer.keeps for layer in layer_specs(config))


def has_encoder(config: Any) -> bool:
    """Whether an encoder reads a source before the decoder writes."""
    return bool(getattr(config, "is_encoder_decoder", False))


def reads_text(config: Any) -> bool:
    """Whether transformers has a model of this type that reads text and writes text."""
    return getattr(config, "model_type", None) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def decoder_config(config: Any) -> Any:
    """The configuration of what writes text; of a model with an encoder, as one of its decoder alone would be."""
    found = config.get_text_config(decoder=True)
    layers = getattr(config, "num_decoder_layers", None)  # T5's name, which transformers takes for no part of a decoder's
    if has_encoder(config) and layers is not None:
        found.num_hidden_layers = layers
    return found


def layer_specs(config: Any) -> tuple[LayerSpec, ...]:
    """What each layer of a model keeps of a text and how far back it looks, from the configuration (attention functions are
    not told reliably)."""
    of_source = frozenset({StateKind.SOURCE}) if has_encoder(config) else frozenset()
    return tuple(_layer_spec(name, size, of_source) for name, size in _layers(config))


def _layer_spec(name: str, size: int | None, of_source: frozenset[StateKind]) -> LayerSpec:
    reach = LayerReach(chunk=size) if name == "chunked_attention" else LayerReach(window=size)
    return LayerSpec(name, _KEEPS.get(name, frozenset({StateKind.KEYS_AND_VALUES})) | of_source, reach)


def _layers(config: Any) -> list[tuple[str, int | None]]:
    """Kind of attention and size of its window or chunk, layer by layer.

    Releases differ: older ones give one set of arguments for all layers, newer ones a set for each.
    """
    types, arguments = get_layer_types_and_kwargs(decoder_config(config))
    each = arguments if isinstance(arguments, list) else [arguments] * len(types)
    sizes = (extra.get("sliding_window") for extra in each)
    return [(kind, None if kind == "full_attention" else size) for kind, size in zip(types, sizes, strict=True)]


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


def split_rotary_regimes(model: Any, long_after: int) -> None:
    """Let texts on either side of `long_after` tokens share a pass.

    The stock module looks at the longest position of the whole batch and gives everybody the same factors. Within our
    passes it is asked once for the rows of short texts and once for those of long ones, with one position more that makes
    it choose the long factors.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        splits = kind == "longrope" or (isinstance(kind, dict) and "longrope" in kind.values())
        if splits and not isinstance(module.forward, _RegimeRotary):
            module.forward = _RegimeRotary(module.forward, long_after)


class _RegimeRotary:
    def __init__(self, stock: Callable[..., tuple[Tensor, Tensor]], long_after: int) -> None:
        self._stock = stock
        self._long_after = long_after

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        context = ongoing_context()
        if context is None or not context.batch.long_rows.any():
            return self._stock(x, position_ids, *args, **kwargs)
        long = context.batch.long_rows
        beyond = position_ids.new_full((1, 1), self._long_after)
        far = self._stock(x, torch.cat([position_ids[:, long], beyond], 1), *args, **kwargs)
        if long.all():
            return far[0][:, :-1], far[1][:, :-1]
        near = self._stock(x, position_ids[:, ~long], *args, **kwargs)
        return _interleaved(near[0], far[0], long), _interleaved(near[1], far[1], long)


def _interleaved(near: Tensor, far: Tensor, long: Tensor) -> Tensor:
    """Rows of two passes in the order of the batch; the last row of `far` is the one that forced it."""
    rows = near.new_empty(1, len(long), near.shape[-1])
    rows[:, ~long], rows[:, long] = near, far[:, :-1]
    return rows


class HiddenTap:
    """What the last decoder layer left, [num_rows, hidden_size]; None before a pass has run."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None


@contextmanager
def some_layers(model: Any, layers: Sequence[int], hidden: Tensor | None) -> Iterator[HiddenTap]:
    """Let only some of the decoder layers run within the block; the others hand on what they are given.

    Args:
        model: A causal language model.
        layers: Indices of those that run.
        hidden: [num_rows, hidden_size] what the first of them reads instead of the embeddings; None changes nothing.
    """
    stack, tap = decoder_layers(model), HiddenTap()
    skipped = [index for index in range(len(stack)) if index not in layers]
    first = min(layers, default=len(stack))
    hooks = [stack[-1].register_forward_hook(lambda _, __, out: setattr(tap, "hidden", _states_of(out)[0]))]
    if hidden is not None and first == 0:
        hooks.append(stack[0].register_forward_pre_hook(_replace_input(hidden), with_kwargs=True))
    for index in skipped:  # the layer before the first that runs puts the given states in place
        stack[index].forward = _HandOn(stack[index], hidden if index == first - 1 else None)
    try:
        yield tap
    finally:
        for index in skipped:
            del stack[index].forward
        for hook in hooks:
            hook.remove()


class _HandOn:
    """A decoder layer's forward that returns the states it was given, or others, in the form of the stock one."""

    def __init__(self, layer: Any, hidden: Tensor | None) -> None:
        self._hidden = hidden
        self._tuple_size = _TUPLE_SIZES[type(layer)]

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        states = hidden_states if self._hidden is None else self._hidden[None].to(hidden_states)
        return (states, *(None,) * (self._tuple_size - 1)) if self._tuple_size else states


#: How many things a kind of decoder layer returns in a tuple, of which its states are the first, as older families do; 0
#: where it returns them alone. Found by looking at a pass.
_TUPLE_SIZES: dict[type, int] = {}


@contextmanager
def noting_layers(model: Any) -> Iterator[None]:
    """Note in what form the decoder layers of a model that runs within the block return their states."""
    try:
        stack = decoder_layers(model)
    except ValueError:  # its layers cannot be chosen from, and who tries is told so
        yield
        return

    def note(layer: Any, _: Any, output: Any) -> None:
        _TUPLE_SIZES[type(layer)] = len(output) if isinstance(output, tuple) else 0

    hooks = [layer.register_forward_hook(note) for layer in stack]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _replace_input(hidden: Tensor) -> Callable[..., tuple[Any, Any]]:
    def replace(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (hidden[None].to(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden[None].to(kwargs["hidden_states"])}

    return replace


def _states_of(output: Any) -> Tensor:
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a model, in order.

    Raises:
        ValueError: They are not one list, so that they cannot be chosen from.
    """
    return _stack_and_layers(model)[1]


def decoder_stack(model: Any) -> Any:
    """The module that holds the decoder layers of a model, and what comes before and after them.

    Raises:
        ValueError: They are not one list.
    """
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


@torch.no_grad()
def layer_features(model: Any, input_ids: Tensor, layer: int, *, normed: bool) -> Tensor:
    """Hidden states of a stock model, as heads read them: what its first layers leave.

    Args:
        model: A causal language model whose weights are in its own modules.
        input_ids: [batch, length]
        layer: How many first layers.
        normed: Whether the final norm is applied to what they leave.

    Returns:
        [batch, length, hidden_size]
    """
    kept: list[Tensor] = []
    hook = decoder_layers(model)[layer - 1].register_forward_hook(lambda _, __, out: kept.append(_states_of(out)))
    try:
        with noting_layers(model):
            out = model.base_model(input_ids=input_ids, use_cache=False)
    finally:
        hook.remove()
    if not normed:
        return kept[0]
    if layer == len(decoder_layers(model)):
        last: Tensor = out.last_hidden_state
        return last
    return torch.stack([final_norm(model, states) for states in kept[0]])


def final_norm(model: Any, hidden: Tensor) -> Tensor:
    """The final norm of hidden states [n, hidden_size]."""
    with some_layers(model, (), hidden):
        tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        normed: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
    return normed


@contextmanager
def only_head(model: Any, hidden: Tensor) -> Iterator[None]:
    """Let the model's head find `hidden` [num_rows, hidden_size] instead of what its decoder computes, with whatever the
    model does to its logits."""

    def replace(_: Any, __: Any, output: Any) -> Any:
        output["last_hidden_state"] = hidden[None].to(output["last_hidden_state"])
        return output

    hook = model.base_model.register_forward_hook(replace)
    try:
        with some_layers(model, (), None):
            yield
    finally:
        hook.remove()


class PoolCache(Cache):  # type: ignore[misc]
    """A Cache whose memory is a KVPool: writes this pass's rows, returns every context in the batch.

    Args:
        pool: KV memory.
        slot_mapping: [num_rows] where new rows go.
        context_slots: Slots of all sequences' contexts, one after another.
    """

    def __init__(self, pool: KVPool, slot_mapping: Tensor, context_slots: Slots) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self._slot_mapping = slot_mapping
        self._context_slots = context_slots

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """New rows [1, num_kv_heads, num_rows, dim] in, all contexts [1, num_kv_heads, num_slots, dim] out."""
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self._pool.write(layer_idx, keys, values, self._slot_mapping)
        keys, values = self._pool.read(layer_idx, self._context_slots)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
