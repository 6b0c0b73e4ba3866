"""The weights of linear layers and the rows that meet them, as loaded or rounded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.kernels.formats import FORMATS, GROUPS, StoredWeight, WeightFormat, is_plain, plain
from outrider.kernels.layout import FormatCode
from outrider.kernels.packed import release
from outrider.kernels.rounding import parts

# --- The weights of linear layers in the forms that the kernels take: as loaded, or rounded.
#
# Only weights are rounded. The weight of a rounded layer *is* what its stored numbers stand for, and the model that is
# decoded losslessly is the rounded one.


def stored_weight(module: nn.Linear | nn.Embedding) -> StoredWeight:
    """The weight of a layer as it is stored."""
    return getattr(module, "quantised_weight", None) or plain(module.weight.data)


class ExpertStack(NamedTuple):
    """One projection of all experts of a layer."""

    module: Any  # the module that holds it
    name: str  # the name of the parameter, [num_experts, out_features, in_features]
    transposed: bool  # whether the last two dimensions are the other way round

    def stored(self) -> StoredWeight:
        """Its weights as they are stored."""
        kept = getattr(self.module, "quantised_stacks", {})
        return kept.get(self.name) or plain(self._turned(getattr(self.module, self.name).data))

    def quantise(self, fmt: WeightFormat, name: str) -> None:
        """Round the weights of each expert by itself. `name` is that of the tensor in errors."""
        weight = self._turned(getattr(self.module, self.name).data)
        rounded = [_rounded(expert, fmt, name) for expert in weight]  # one after another: copies of all might not fit
        for expert, stored in zip(weight, rounded, strict=True):
            expert.copy_(fmt.dequantise(stored, weight.dtype))
        if _is_kept(weight):
            self._keep(StoredWeight.of(rounded, torch.stack))

    def keep(self, stored: StoredWeight) -> None:
        """Give it weights that a file brings quantised."""
        if _is_kept(getattr(self.module, self.name)):
            self.empty()
            self._keep(stored)
        else:
            self._unfold(stored)

    def use_plain_weights(self) -> None:
        """Replace weights that must be computed as they are stored by those that they stand for."""
        if self.is_computed_as_stored:
            self._unfold(self.module.quantised_stacks.pop(self.name))

    @property
    def is_computed_as_stored(self) -> bool:
        """Tells whether stock products take its stored numbers, since these lie nowhere else, or since rows are rounded,
        too."""
        kept = getattr(self.module, "quantised_stacks", {}).get(self.name)
        return kept is not None and (kept.format.code is FormatCode.BLOCKS or kept.format.rounds_rows)

    @property
    def in_features(self) -> int:
        """The inputs of each expert."""
        return int(self._turned(getattr(self.module, self.name)).shape[-1])

    def empty(self) -> None:
        """Free its weights, and keep the shape and the dtype."""
        weight = getattr(self.module, self.name)
        nothing = torch.full((), float("nan"), dtype=weight.dtype).expand(weight.shape)
        release(weight.data)
        setattr(self.module, self.name, nn.Parameter(nothing, requires_grad=False))
        getattr(self.module, "quantised_stacks", {}).pop(self.name, None)

    def restore(self, stored: StoredWeight) -> None:
        """Give it its weights back."""
        if stored.format.code is not FormatCode.BLOCKS:  # those of a file are not unfolded
            self._unfold(stored)
        if stored.quantised:
            self._keep(stored)

    def _unfold(self, stored: StoredWeight) -> None:
        dtype, data = getattr(self.module, self.name).dtype, stored.data
        if stored.quantised:
            data = torch.stack([stored.format.dequantise(stored.expert(i), dtype) for i in range(len(stored.data))])
        setattr(self.module, self.name, nn.Parameter(self._turned(data).to(dtype).contiguous(), requires_grad=False))

    def _turned(self, weight: Tensor) -> Tensor:
        return weight.transpose(1, 2) if self.transposed else weight

    def _keep(self, stored: StoredWeight) -> None:
        self.module.__dict__.setdefault("quantised_stacks", {})[self.name] = stored


class QuantisedLinear(nn.Linear):
    """nn.Linear with rounded weights, for where no kernels read these: every pass makes weights of them anew, some rows at
    a time, unless `unfold_weights` made them once.

    So a model is never in memory both as it was and rounded. `weight` keeps its shape and dtype, but holds no numbers.
    """

    quantised_weight: StoredWeight

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        stored, bias, (rounded, dtype) = self.quantised_weight, self.bias, entering(input, self.quantised_weight)
        dtype = self._with_bias(dtype)
        if not stored.quantised:  # unfolded once (`unfold_weights`)
            weight = stored.format.dequantise(stored, dtype)
            return nn.functional.linear(rounded.to(dtype), weight, None if bias is None else bias.to(dtype)).to(input.dtype)
        outputs = rounded.new_empty(*rounded.shape[:-1], self.out_features, dtype=dtype)
        for rows in parts(self.weight):  # outputs that were kept in between would leave holes for parts in the memory
            outputs[..., rows] = nn.functional.linear(
                rounded.to(dtype),
                stored.format.dequantise(stored.rows(rows.start, rows.stop), dtype),
                None if bias is None else bias[rows].to(dtype),
            )
        return outputs.to(input.dtype)

    @property
    def unfolded_dtype(self) -> torch.dtype:
        """The dtype that products take its weights in, where rows are not rounded."""
        return self._with_bias(self.weight.dtype)

    def _with_bias(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.bias is None else torch.promote_types(dtype, self.bias.dtype)  # it may have more bits


class QuantisedEmbedding(nn.Embedding):
    """nn.Embedding with quantised rows, of which those that are asked for are made weights. `weight` keeps its shape and
    dtype, but holds no numbers."""

    quantised_weight: StoredWeight

    def forward(self, input: Tensor) -> Tensor:
        """[...] token ids to [..., embedding_dim]."""
        rows = self.quantised_weight.each(lambda tensor: tensor[input.flatten()])
        return rows.format.dequantise(rows, self.weight.dtype).reshape(*input.shape, self.embedding_dim)


def entering(rows: Tensor, stored: StoredWeight) -> tuple[Tensor, torch.dtype]:
    """Rows [..., in_features] as they enter a stock product with some weights, and the dtype of this product."""
    if not stored.format.rounds_rows:
        return rows, rows.dtype
    return RowRounding.apply(rows, stored), torch.float32  # type: ignore[no-untyped-call]  # more bits than bf16


def keep_quantised(module: nn.Linear | nn.Embedding, stored: StoredWeight) -> None:
    """Give a layer weights that a file brings quantised, or that were unfolded already. A class of embeddings that scales
    what it finds still does so."""
    if not stored.quantised or not _is_kept(module.weight):
        found = stored.format.dequantise(stored, module.weight.dtype)
        module.weight = nn.Parameter(found.to(module.weight.device), requires_grad=False)
        return
    if type(module) is nn.Linear:
        module.__class__ = QuantisedLinear
    elif type(module) is nn.Embedding:
        module.__class__ = QuantisedEmbedding
    else:
        stock = type(module)
        module.__class__ = type(f"Quantised{stock.__name__}", (stock, QuantisedEmbedding), {})
    empty_weight(module)
    module.quantised_weight = stored  # type: ignore[assignment]


def use_plain_weights(model: nn.Module, stacks: Iterable[ExpertStack] = ()) -> None:
    """Replace quantised weights by those that they stand for, so that they can be trained: those of layers, and those of
    experts that a file brought."""
    for stack in stacks:
        stack.use_plain_weights()
    for module in model.modules():
        stored = getattr(module, "quantised_weight", None)
        if isinstance(module, QuantisedLinear | QuantisedEmbedding) and stored is not None:
            del module.quantised_weight
            module.weight = nn.Parameter(stored.format.dequantise(stored, module.weight.dtype), requires_grad=False)
            module.__class__ = type(module).__mro__[1]  # what it was
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data = module.bias.data.to(module.weight.dtype)


def unfolded_bytes(model: nn.Module, stacks: Iterable[ExpertStack]) -> int:
    """The bytes of what `unfold_weights` makes."""
    layers = sum(layer.weight.numel() * layer.unfolded_dtype.itemsize for layer in _quantised_layers(model))
    weights: list[Tensor] = [getattr(stack.module, stack.name) for stack in stacks if stack.is_computed_as_stored]
    return layers + sum(weight.numel() * weight.dtype.itemsize for weight in weights)


def unfold_weights(model: nn.Module, stacks: Iterable[ExpertStack]) -> None:
    """Keep the numbers that quantised weights stand for, where rows are not rounded and no kernels read what is stored.
    Passes find the same numbers there that they would otherwise make, each anew."""
    for stack in stacks:
        stack.use_plain_weights()
    for layer in _quantised_layers(model):
        stored = layer.quantised_weight
        layer.quantised_weight = plain(stored.format.dequantise(stored, layer.unfolded_dtype))


def _quantised_layers(model: nn.Module) -> list[QuantisedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantisedLinear)]


def quantise_linears(
    model: nn.Module, fmt: WeightFormat, stacks: Iterable[ExpertStack] = (), *, name: str = "the model"
) -> None:
    """Round the weights of every linear layer, those of the head too, one after another. Embeddings stay as they are.

    Args:
        model: The model, which is changed in place.
    """
    linears = {f"{path}.weight": module for path, module in model.named_modules() if type(module) is nn.Linear}
    paths = {id(module): path for path, module in model.named_modules()}
    experts = {f"{paths.get(id(stack.module), '')}.{stack.name}": stack for stack in stacks}
    inputs = {path: module.in_features for path, module in linears.items()}
    check_groups(fmt, inputs | {path: stack.in_features for path, stack in experts.items()})
    try:
        for path, stack in experts.items():
            stack.quantise(fmt, path)
        for path, module in linears.items():
            _quantise(module, fmt, path)
    except _NotFiniteError as error:
        remedy = "Load it without quantization to see what it writes, or get the checkpoint again."
        raise UnsupportedModelError(
            name, f"{error} holds weights that are not finite, and cannot be rounded", remedy
        ) from None


def round_rows(model: nn.Module, stacks: Iterable[ExpertStack] = ()) -> None:
    """Let what enters products with weights that a file brought quantised be rounded to 8 bits. The weights stay as they
    are, and so do products with those that are floats in their file."""
    for stack in stacks:
        kept = getattr(stack.module, "quantised_stacks", {})
        if stack.name in kept:
            kept[stack.name] = _with_rounded_rows(kept[stack.name])
    for layer in _quantised_layers(model):
        layer.quantised_weight = _with_rounded_rows(layer.quantised_weight)


def _with_rounded_rows(stored: StoredWeight) -> StoredWeight:
    return replace(stored, format=replace(stored.format, rounds_rows=stored.format.may_round_rows))


class _NotFiniteError(ValueError):
    """A weight is not finite. The message is the name of the tensor."""


def _quantise(module: nn.Linear, fmt: WeightFormat, path: str) -> None:
    stored = _rounded(module.weight.data, fmt, path)
    # The layer gets a parameter of its own, so that a head is quantised without the embeddings that are tied to it.
    if _is_kept(module.weight):
        empty_weight(module)
        module.__class__ = QuantisedLinear
        module.quantised_weight = stored  # type: ignore[assignment]
    else:
        module.weight = nn.Parameter(fmt.dequantise(stored, module.weight.dtype), requires_grad=False)


def _is_kept(weight: Tensor) -> bool:
    """Tells whether rounded weights are kept as they are. Others are computed in their own precision, or without our
    kernels."""
    return is_plain(weight.dtype) and weight.dtype != torch.float64 and weight.device.type == "cpu"


def check_groups(fmt: WeightFormat, inputs: dict[str, int]) -> None:
    """Refuse groups that do not divide the inputs of all these weights, and say which do."""
    misfit = next((path for path, count in inputs.items() if not fmt.takes(count)), None)
    if misfit is None:
        _check_rows(fmt, inputs)
        return
    names = {f"int{fmt.bits}-g{size}" + "-asym" * fmt.has_zeros for size in GROUPS}
    fitting = [known for known in FORMATS if known in names and all(FORMATS[known].takes(n) for n in inputs.values())]
    raise InvalidParameterError(
        "quantization",
        fmt.name,
        f"{misfit} has {inputs[misfit]} inputs, which groups of {fmt.group} do not divide",
        f"Use {' or '.join([*fitting, 'int8'])}.",
    )


def _check_rows(fmt: WeightFormat, inputs: dict[str, int]) -> None:
    uneven = next((path for path, count in inputs.items() if fmt.rounds_rows and not takes_rows(fmt, count)), None)
    if uneven is not None:
        problem = f"{uneven} has {inputs[uneven]} inputs, which groups of {ROW_GROUPS[-1]} do not divide"
        raise InvalidParameterError("activations", "int8", problem, "Leave activations out.")


def empty_weight(module: nn.Linear | nn.Embedding) -> None:
    """Free the weight of a layer, but not a weight that is tied to it.

    The shape and the dtype stay. There are no numbers left, so that a use of them is noticed.
    """
    nothing = torch.full((), float("nan"), dtype=module.weight.dtype).expand(module.weight.shape)
    release(module.weight.data)
    module.weight = nn.Parameter(nothing, requires_grad=False)
    if hasattr(module, "quantised_weight"):
        del module.quantised_weight


def restore_weight(module: nn.Linear | nn.Embedding, stored: StoredWeight) -> None:
    """Give a layer its weight back."""
    if stored.quantised:
        module.quantised_weight = stored  # type: ignore[assignment]
    else:
        module.weight = nn.Parameter(stored.data, requires_grad=False)


def _rounded(weight: Tensor, fmt: WeightFormat, path: str) -> StoredWeight:
    stored = fmt.store(weight)
    if stored.scale is not None and not stored.scale.isfinite().all():  # so are the scales then
        raise _NotFiniteError(path)
    return stored


# --- Rounding of activations to whole numbers of 8 bits, as the kernels do it, bit for bit.
#
# A row is rounded in groups of inputs: those of the weights, or the largest of 128, 64 and 32 that divides the row
# where all weights of an output share a scale. For weights in the blocks of files these are the units of 32 inputs, at
# the places where the weights lie. The largest number of a group is 127 times the group's scale.


#: Groups of rows where all weights of an output share a scale. The smallest must divide the inputs.
ROW_GROUPS = (128, 64, 32)
#: A group without any number of this size is zero.
_LEAST = 2.0**-100


def takes_rows(fmt: WeightFormat, in_features: int) -> bool:
    """Tells whether rows of so many inputs can be rounded for weights of this format."""
    return in_features % (_own_group(fmt) or ROW_GROUPS[-1]) == 0


def row_group(fmt: WeightFormat, in_features: int) -> int:
    """Returns how many inputs of a row share a scale."""
    return _own_group(fmt) or next(group for group in ROW_GROUPS if in_features % group == 0)


def _own_group(fmt: WeightFormat) -> int | None:
    return ROW_GROUPS[-1] if fmt.code is FormatCode.BLOCKS else fmt.group


def rounded_rows(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round rows.

    Args:
        rows: [..., in_features], any floating dtype.
        group: The inputs that share a scale. It divides their number.

    Returns:
        Whole numbers in float32 [..., groups, group], and scales in float32 [..., groups, 1]. A scale is not a number where
        a number of the group is not finite.
    """
    wide = rows.to(torch.float32).reshape(*rows.shape[:-1], rows.shape[-1] // group, group)
    largest = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(largest < _LEAST, 0.0, largest / 127)
    # A number divided by a tensor would be rounded twice, since PyTorch multiplies it with the inverse of the tensor.
    inverse = torch.where(largest < _LEAST, 0.0, torch.full_like(largest, 127) / largest)
    finite = largest.isfinite()
    scale, inverse = torch.where(finite, scale, torch.nan), torch.where(finite, inverse, 0.0)
    return torch.where(finite, wide * inverse, 0.0).round_(), scale


def unrounded_rows(rows: Tensor, group: int) -> Tensor:
    """Returns what rows [..., in_features] stand for once they are rounded, in float32."""
    numbers, scale = rounded_rows(rows, group)
    return (numbers * scale).flatten(-2)


def unrounded_rows_for(rows: Tensor, stored: StoredWeight) -> Tensor:
    """Returns what rows [..., in_features] stand for in a product with these weights, in float32."""
    group = row_group(stored.format, rows.shape[-1])
    if stored.order is None:
        return unrounded_rows(rows, group)
    order = stored.order.long()
    return unrounded_rows(rows[..., order], group)[..., torch.argsort(order)]


class RowRounding(torch.autograd.Function):
    """`unrounded_rows_for`, where something learns to make the rows: gradients go through as if nothing were rounded, since
    those of the rounding are zero (the straight-through estimator, Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stored: StoredWeight) -> Tensor:
        """[..., in_features], any floating dtype, to the same in float32."""
        ctx.dtype = rows.dtype
        return unrounded_rows_for(rows, stored)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of the rows."""
        return gradients[0].to(ctx.dtype), None
