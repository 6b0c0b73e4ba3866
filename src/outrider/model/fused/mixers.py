"""Layers with a running state for the fused decoder, from the modules of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.layout import MixerKind
from outrider.kernels.mixers import MOST_TAPS, Mixer
from outrider.model.fused.weight_slice import WeightSlice, whole


@dataclass(frozen=True)
class DescribedMixer:
    """A layer with a running state.

    Attributes:
        into: The parts of the projection into it, in the order of `Mixer`.
        out: The projection behind it.
        mixer: What stands between the two.
    """

    into: list[WeightSlice]
    out: Any
    mixer: Mixer


def parted_delta(module: Any) -> DescribedMixer:
    """A gated delta rule with a projection for each thing that it needs."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return _delta(module, [whole(getattr(module, name)) for name in names])


def joined_delta(module: Any) -> DescribedMixer:
    """A gated delta rule whose two projections go from key head to key head."""
    heads, shared = module.num_k_heads, module.num_v_heads // module.num_k_heads
    key, values = module.head_k_dim, shared * module.head_v_dim
    sizes = (key, key, values, values)
    parts = [_of_each_head(module.in_proj_qkvz, heads, sizes, which) for which in range(4)]
    parts += [_of_each_head(module.in_proj_ba, heads, (shared, shared), which) for which in range(2)]
    return _delta(module, [part for some in parts for part in some])


def scan(module: Any) -> DescribedMixer:
    """The scan of Mamba-2."""
    _check_silu(module)
    inner, state = module.intermediate_size, module.n_groups * module.ssm_state_size
    values, keys, queries = inner, inner + state, inner + 2 * state  # where they end among the channels
    channels = [(keys, queries), (values, keys), (0, values)]
    ends = [(inner + begin, inner + end) for begin, end in channels]
    ends += [(0, inner), (inner + queries, inner + queries + module.num_heads)]
    taps, bias = _taps(module.conv1d)
    order = torch.cat([torch.arange(begin, end) for begin, end in channels])
    mixer = Mixer(
        kind=MixerKind.SCAN,
        taps=taps[:, order],
        tap_bias=None if bias is None else bias[order],
        num_heads=module.num_heads,
        num_key_heads=module.n_groups,
        key_dim=module.ssm_state_size,
        value_dim=module.head_dim,
        rates=_rates(module),
        step_bias=module.dt_bias,
        step_limits=tuple(module.time_step_limit),
        skip=module.D,
        norm_weight=module.norm.weight,
        norm_size=getattr(module.norm, "group_size", inner),
        gates_first=True,
        epsilon=module.norm.variance_epsilon,
    )
    return DescribedMixer([WeightSlice(module.in_proj, begin, end) for begin, end in ends], module.out_proj, mixer)


def short_convolution(module: Any) -> DescribedMixer:
    """A convolution between gates of what enters it and gates of what leaves it."""
    taps, bias = _taps(module.conv)
    size = taps.shape[1]
    thirds = [WeightSlice(module.in_proj, third * size, (third + 1) * size) for third in (2, 0, 1)]
    return DescribedMixer(thirds, module.out_proj, Mixer(MixerKind.CONVOLUTION, taps, bias))


#: Makes a description from a module.
DescribeMixer = Callable[[Any], DescribedMixer]


def _delta(module: Any, into: list[WeightSlice]) -> DescribedMixer:
    _check_silu(module)
    taps, bias = _taps(module.conv1d)
    mixer = Mixer(
        kind=MixerKind.DELTA,
        taps=taps,
        tap_bias=bias,
        num_heads=module.num_v_heads,
        num_key_heads=module.num_k_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        rates=_rates(module),
        step_bias=module.dt_bias,
        norm_weight=module.norm.weight.repeat(module.num_v_heads),
        norm_size=module.head_v_dim,
        epsilon=module.norm.variance_epsilon,
    )
    return DescribedMixer(into, module.out_proj, mixer)


def _of_each_head(module: Any, num_heads: int, sizes: tuple[int, ...], which: int) -> list[WeightSlice]:
    """One of the parts of these sizes that a projection holds for each head."""
    begins = [head * sum(sizes) + sum(sizes[:which]) for head in range(num_heads)]
    return [WeightSlice(module, begin, begin + sizes[which]) for begin in begins]


def _taps(convolution: Any) -> tuple[Tensor, Tensor | None]:
    """[width, num_channels], and [num_channels] or None."""
    taps = convolution.weight.detach().squeeze(1).t()
    if len(taps) > MOST_TAPS:
        raise ValueError(f"the kernels do not know convolutions over {len(taps)} inputs")
    return taps, None if convolution.bias is None else convolution.bias.detach()


def _rates(module: Any) -> Tensor:
    logs: Tensor = module.A_log.detach()
    return -logs.to(torch.promote_types(logs.dtype, torch.float32)).exp()


def _check_silu(module: Any) -> None:
    if module.activation not in ("silu", "swish"):
        raise ValueError(f"the kernels do not know the activation {module.activation} behind a convolution")
