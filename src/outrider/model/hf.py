"""Private interfaces of transformers that our passes use or replace. Verified on 5.17 and 5.23."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from outrider.cache.pool import KVPool, Slots
from outrider.loading.hf_modules import decoder_layers
from outrider.model.context import ongoing_context
from outrider.model.running import ANSWERS

# --- All uses of private interfaces of transformers. Verified on 5.17 and 5.23.


def register_attention(name: str, function: Callable[..., Any]) -> str:
    """Make an attention function known under `name`; returns the name."""
    AttentionInterface.register(name, function)
    return name


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
    """Holds what the last decoder layer left, [num_rows, hidden_size]; None before a pass has run."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None


@contextmanager
def some_layers(model: Any, layers: Sequence[int], hidden: Tensor | None) -> Iterator[HiddenTap]:
    """Let only some of the decoder layers run within the block; the others hand on what they are given.

    Args:
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


@torch.no_grad()
def layer_features(model: Any, input_ids: Tensor, layer: int, *, normed: bool) -> Tensor:
    """Hidden states of a stock model, as heads read them: what its first layers leave.

    Args:
        input_ids: [batch, length]

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
        slot_mapping: [num_rows] where new rows go.
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


# --- RunningMixers: lets the unmodified layers of a transformers model compute over the states of many texts.
#
# The layers of transformers call functions of their module for whatever looks back over the tokens: a convolution, a
# delta rule, a scan. These functions know one text without a past. Within our passes such a call is answered for the
# rows of all texts, each from its own state; everywhere else the stock function answers, as before.


class RunningMixers:
    """Watches the layers of a model, until it is removed, so that their calls are answered from their own states."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks: list[Any] = []
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                _answer_calls(sys.modules[type(module).__module__])
                self._hooks.append(module.register_forward_pre_hook(_enter))

    def remove(self) -> None:
        """Watch them no longer."""
        for hook in self._hooks:
            hook.remove()


def _enter(module: Any, _: Any) -> None:
    context = ongoing_context()
    if context is not None and context.running is not None:
        context.running.enter(module.layer_idx)


def _answer_calls(namespace: Any) -> None:
    """Put our answers before the functions of a module of transformers, once."""
    for name, answer in ANSWERS.items():
        stock = getattr(namespace, name, None)
        if stock is not None and not hasattr(stock, "answers_in_passes"):
            setattr(namespace, name, _dispatching(stock, answer))


def _dispatching(stock: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        context = ongoing_context()
        if context is None or context.running is None:
            return stock(*args, **kwargs)
        return answer(context.running, *args, **kwargs)

    dispatch.answers_in_passes = True  # type: ignore[attr-defined]
    return dispatch
