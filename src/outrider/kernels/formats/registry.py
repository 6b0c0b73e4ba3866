"""The formats by their names, and the formats of weights that are not rounded by their dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.formats.bfloat16 import BFloat16
from outrider.kernels.formats.format import WeightFormat
from outrider.kernels.formats.int4 import Int4
from outrider.kernels.formats.int8 import Int8
from outrider.kernels.formats.real import Real
from outrider.kernels.formats.stored import StoredWeight

#: The sizes of groups that the kernels know.
GROUPS = (32, 64, 128)
_FLOATS: dict[torch.dtype, WeightFormat] = {
    torch.float32: Real(),
    torch.float64: Real("float64", real=torch.float64),
    torch.bfloat16: BFloat16(),
}
_QUANTISED: tuple[WeightFormat, ...] = (
    Int8(),
    *(Int8(f"int8-g{size}", size) for size in GROUPS),
    *(Int4(f"int4-g{size}", size) for size in GROUPS),
    *(Int4(f"int4-g{size}-asym", size, has_zeros=True) for size in GROUPS),
)
#: Every format by its name. "int4" is what others mean by it: groups of 128, symmetric.
FORMATS: dict[str, WeightFormat] = {
    **{known.name: known for known in (*_FLOATS.values(), *_QUANTISED)},
    "int4": Int4("int4-g128", 128),
}
#: The formats of weights that files bring, as far as such weights have been packed.
_FROM_FILES: dict[str, WeightFormat] = {}


def remember(fmt: WeightFormat) -> str:
    """The name of a format, by which `by_name` finds it from now on."""
    if fmt.name not in FORMATS:
        _FROM_FILES[fmt.name] = fmt
    return fmt.name


def by_name(name: str) -> WeightFormat:
    """A format that users may ask for, or one that was remembered."""
    return FORMATS.get(name) or _FROM_FILES[name]


def plain(weight: Tensor) -> StoredWeight:
    """A matrix of floats as it is stored. Raises KeyError for a dtype that the kernels do not know."""
    return _FLOATS[weight.dtype].store(weight)


def is_plain(dtype: torch.dtype) -> bool:
    """Whether the kernels know weights of this dtype."""
    return dtype in _FLOATS
