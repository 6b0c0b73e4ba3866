"""Matrices of numbers of 8 bits with a scale for each block of rows and columns: FP8, as transformers' FineGrainedFP8Config
declares it.

`weight` [out_features, in_features] is float8, and `weight_scale_inv` [row blocks, column blocks] is what each block is
multiplied with, or a single number. The kernels have no products with such blocks, so a matrix is unfolded to the dtype of
the model, as transformers unfolds it on a CPU, and takes as much memory as in the original checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.formats.registry import is_plain, plain
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.rounding import parts
from outrider.model.loading.quantised.layout import Headers, Read, Tensors, check

_SCALE = "weight_scale_inv"


@dataclass(frozen=True)
class Fp8:
    """Matrices of float8 in blocks.

    Attributes:
        block: Rows and columns of a block. None where a matrix has one scale.
    """

    block: tuple[int, int] | None
    suffixes: tuple[str, ...] = ("weight", _SCALE, "activation_scale")
    stays_rounded: bool = False

    def holds(self, headers: Headers) -> bool:
        return _SCALE in headers or ("weight" in headers and headers["weight"].dtype.startswith("F8_"))

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        kept = headers["weight"].dtype
        check(kept.startswith("F8_E"), f"weights are {kept}, and not numbers of 8 bits with a fraction")
        outputs, inputs = headers["weight"].shape
        return outputs, inputs

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        codes, scale = tensors["weight"], self._by_column(_wide(tensors[_SCALE]), tensors["weight"].shape)
        found = torch.empty(codes.shape, dtype=dtype)
        height = codes.shape[0] if self.block is None else self.block[0]
        for rows in parts(codes):
            block_of = torch.arange(rows.start, min(rows.stop, len(codes))) // height
            wide = codes[rows].to(torch.float32).mul_(scale[block_of])
            check(bool(wide.isfinite().all()), "weights are not finite")
            found[rows] = wide.to(dtype)
        return plain(found if is_plain(dtype) else found.to(torch.float32))

    def _by_column(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """float32 [row blocks, in_features]"""
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(-(-shape[0] // (self.block or shape)[0]), shape[1])
        check(self.block is not None, f"there are {scale.numel()} scales, and the configuration has no weight_block_size")
        assert self.block is not None, "this was checked"
        wanted = [-(-size // step) for size, step in zip(shape, self.block, strict=True)]
        check(list(scale.shape) == wanted, f"scales of shape {list(scale.shape)} do not fit {wanted} blocks")
        return scale.repeat_interleave(self.block[1], 1)[:, : shape[1]]


def _wide(scale: Tensor) -> Tensor:
    """Scales in float32. Bytes are powers of two, by their exponents and 127."""
    return (scale.to(torch.float32) - 127.0).exp2() if scale.dtype == torch.uint8 else scale.to(torch.float32)
