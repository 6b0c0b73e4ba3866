"""The layouts of compressed-tensors with whole numbers.

"pack-quantized" keeps codes in words of 32 bits along the inputs, `weight_packed`, beside `weight_shape`; zero points lie
in words along the outputs. "int-quantized" keeps int8 as `weight`. Both have `weight_scale` [out_features, groups], and
older files a `weight_g_idx` [in_features] with the group of each input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.formats.stored import StoredWeight
from outrider.model.loading.quantised.layout import Headers, Read, Tensors, check, check_bits, from_words, grouped


@dataclass(frozen=True)
class Compressed:
    """Matrices of compressed-tensors."""

    suffixes: tuple[str, ...] = (
        "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    )  # fmt: skip
    stays_rounded: bool = True

    def holds(self, headers: Headers) -> bool:
        return "weight_packed" in headers or ("weight" in headers and "weight_scale" in headers)

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        if "weight" in headers:
            check(
                headers["weight"].dtype == "I8", f"weights are {headers['weight'].dtype}, and not whole numbers of 8 bits"
            )
            outputs, inputs = headers["weight"].shape
            return outputs, inputs
        outputs, inputs = read("weight_shape").tolist()
        check(headers["weight_packed"].shape[0] == outputs, f"codes of {outputs} outputs are missing")
        return outputs, inputs

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        if "weight" in tensors:
            bits, codes = 8, tensors["weight"].view(torch.uint8) ^ 128
        else:
            outputs, inputs = tensors["weight_shape"].tolist()
            words = tensors["weight_packed"]
            bits = 32 * words.shape[1] // inputs
            check_bits(bits)
            codes = from_words(words, bits)[:, :inputs]
            check(codes.shape == (outputs, inputs), f"there are codes for {codes.shape[1]} inputs of {inputs}")
        scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
        if scale.numel() == 1:  # one for the whole matrix
            scale = scale.reshape(1, 1).expand(len(codes), 1)
            zero = None if zero is None else zero.reshape(1, 1).expand(len(codes), 1)
        if scale.dim() == 1:
            scale = scale[:, None]
        zeros, order = _zeros(zero, bits, len(codes)), tensors.get("weight_g_idx")
        return grouped(codes, bits, scale, zeros, dtype, order, in_blocks=in_blocks)


def _zeros(zero: Tensor | None, bits: int, outputs: int) -> Tensor | None:
    """uint8 [outputs, groups]"""
    if zero is None:
        return None
    if zero.dtype == torch.int32:
        return from_words(zero.t(), bits)[:, :outputs].t().contiguous()
    check(zero.dtype == torch.int8, f"zero points are kept in {zero.dtype}, and neither in int32 nor in int8")
    codes = zero.to(torch.int16) + 2 ** (bits - 1)
    return torch.as_tensor(codes.to(torch.uint8).reshape(outputs, -1))
