"""Linear layers for the few rows of a verify pass, where a stock product on a CPU costs as much as several decode steps.

`PackedLinear` computes with our own kernels over weights that are packed for them. They read the weights once for all
rows, and the bits of a row do not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.kernels.formats import by_name, is_plain, plain, remember
from outrider.kernels.layout import FormatCode, Operand
from outrider.kernels.library import KernelLibrary, kernels_for
from outrider.kernels.packed import PackedWeights, linear_struct, packed_bytes, product, release
from outrider.kernels.weights import QuantisedLinear, empty_weight, restore_weight, stored_weight

# A custom operator, so that torch.compile and dispatch modes see a single product and not what is inside.
_NAME = "outrider::packed_linear"
torch.library.define(
    _NAME,
    "(Tensor rows, Tensor data, Tensor? scale, Tensor? bias, Tensor? places, SymInt out_features, str format, int operand,"
    " str kernels) -> Tensor",
)


@torch.library.impl(_NAME, "CPU")
def _packed_linear(
    rows: Tensor,  # [..., in_features]
    data: Tensor,  # packed weights
    scale: Tensor | None,  # [width]
    bias: Tensor | None,  # [width]
    places: Tensor | None,  # [in_features]
    out_features: int,
    format: str,
    operand: int,
    kernels: str,
) -> Tensor:
    library, found = kernels_for(kernels), by_name(format)
    real = torch.float64 if rows.dtype == torch.float64 else torch.float32
    width = -(-out_features // library.panel(real)) * library.panel(real)
    fits = (real == torch.float64) == (format == "float64")
    fits &= (found.code is FormatCode.INT8 and found.group is None) == (scale is not None)
    fits &= places is None or (places.dtype == torch.int32 and len(places) == rows.shape[-1])
    fits &= all(column is None or (column.dtype == real and len(column) == width) for column in (scale, bias))
    struct = linear_struct(found, Operand(operand), out_features, rows.shape[-1])
    if not fits or data.nbytes != packed_bytes(library, struct, real):
        raise RuntimeError(f"rows {list(rows.shape)} of {rows.dtype} do not fit these packed weights")
    flat = rows.reshape(rows.shape[:-1].numel(), rows.shape[-1]).to(real).contiguous()
    struct.data = data.data_ptr()
    columns = (scale, bias, places)
    struct.scale, struct.bias, struct.places = (None if column is None else column.data_ptr() for column in columns)
    out = product(library, struct, flat)
    return out[:, :out_features].to(rows.dtype).reshape(*rows.shape[:-1], out_features)


@torch.library.register_fake(_NAME)  # type: ignore[untyped-decorator]
def _packed_linear_shape(
    rows: Tensor,
    data: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    places: Tensor | None,
    out_features: int,
    format: str,
    operand: int,
    kernels: str,
) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], out_features)


def packed_product(rows: Tensor, packed: PackedWeights) -> Tensor:
    """[..., in_features] to [..., out_features], with the bias that was packed."""
    tensors = (packed.data, packed.scale, packed.bias, packed.places)
    how = (packed.out_features, remember(packed.format), packed.operand, packed.kernels)
    out: Tensor = torch.ops.outrider.packed_linear(rows, *tensors, *how)
    return out


class PackedLinear(nn.Linear):
    """nn.Linear over packed weights. Its `weight` keeps its shape and dtype, but holds no numbers."""

    packed: PackedWeights
    tied: nn.Parameter | None  # the embeddings that shared their weight with it

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return packed_product(input, self.packed)


class PackedTransposed(nn.Module):
    """A linear layer over packed weights, in place of one whose weight was [in_features, out_features]."""

    packed: PackedWeights
    stock: type[nn.Module]
    weight: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return packed_product(input, self.packed)


def use_packed_linear(model: nn.Module, library: KernelLibrary, transposed: tuple[type[nn.Module], ...] = ()) -> None:
    """Let the stock linear layers of `model` use our kernels, where these support the device and the dtype.

    The weights are moved into packed ones.

    Args:
        model: The model, which is changed in place.
        transposed: The types of linear layers whose weight is [in_features, out_features].
    """
    _pack_transposed(model, library, transposed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in _stock_linears(model):
        packed = PackedWeights(library, stored_weight(module), None if module.bias is None else module.bias.detach())
        tied = module.weight if id(module.weight) in embeddings else None
        empty_weight(module)
        module.__class__ = PackedLinear  # changed in place, so that hooks and names stay as they are
        module.packed = packed  # type: ignore[assignment]
        module.__dict__["tied"] = tied  # not a parameter of this layer


def packed_for(model: nn.Module) -> str | None:
    """The instruction set whose kernels compute linear layers of `model`. None where stock operators do."""
    layers = (module for module in model.modules() if isinstance(module, PackedLinear | PackedTransposed))
    return next((layer.packed.kernels for layer in layers), None)


def use_stock_linear(model: nn.Module) -> None:
    """Undo `use_packed_linear`."""
    for module in model.modules():
        if type(module) is PackedLinear:
            restore_weight(module, module.packed.unpacked())
            if module.tied is not None:
                module.weight = module.tied
            del module.packed, module.__dict__["tied"]
            stock: type[nn.Module] = QuantisedLinear if hasattr(module, "quantised_weight") else nn.Linear
            module.__class__ = stock  # type: ignore[assignment]
        elif type(module) is PackedTransposed:
            module.weight = nn.Parameter(module.packed.unpacked().data.t().contiguous(), requires_grad=False)
            del module.packed
            module.__class__ = module.stock  # type: ignore[assignment]


def _pack_transposed(model: nn.Module, library: KernelLibrary, types: tuple[type[nn.Module], ...]) -> None:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module) not in types or weight is None or weight.device.type != "cpu" or not is_plain(weight.dtype):
            continue
        bias = getattr(module, "bias", None)
        packed = PackedWeights(library, plain(weight.data.t()), None if bias is None else bias.detach())
        release(weight.data)
        nothing = torch.full((), float("nan"), dtype=weight.dtype).expand(weight.shape)
        module.weight = nn.Parameter(nothing, requires_grad=False)
        module.stock = type(module)  # type: ignore[assignment]
        module.packed = packed  # type: ignore[assignment]
        module.__class__ = PackedTransposed


def _stock_linears(model: nn.Module) -> list[nn.Linear]:
    return [
        module
        for module in model.modules()
        if (type(module) is nn.Linear or type(module) is QuantisedLinear)
        and module.weight.device.type == "cpu"
        and is_plain(module.weight.dtype)
    ]
