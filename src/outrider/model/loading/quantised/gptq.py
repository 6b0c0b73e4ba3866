"""The layout of GPTQ, as AutoGPTQ and GPTQModel write it.

Codes lie in words of 32 bits along the inputs, `qweight` [in_features * bits / 32, out_features], and zero points along the
outputs, `qzeros` [groups, out_features * bits / 32]. `scales` are [groups, out_features], and `g_idx` [in_features] says
the group of each input. In the first version a zero point is kept less 1, and the subtraction borrows from its neighbour in
the word where it was 0; so 1 is added to whole words, as GPTQModel does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.formats.stored import StoredWeight
from outrider.model.loading.quantised.layout import Headers, Read, Tensors, check, check_bits, from_words, grouped

#: One in every code of a word.
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Gptq:
    """Matrices of GPTQ.

    Attributes:
        bits: Of a code.
        first_version: Whether zero points are kept less 1.
    """

    bits: int
    first_version: bool
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    stays_rounded: bool = True

    def holds(self, headers: Headers) -> bool:
        return "qweight" in headers

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        check_bits(self.bits)
        words, outputs = headers["qweight"].shape
        return outputs, words * (32 // self.bits)

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        codes = from_words(tensors["qweight"].t(), self.bits)
        zeros = tensors["qzeros"]
        check(zeros.dtype == torch.int32, f"zero points are kept in {zeros.dtype}, and not in int32")
        if self.first_version:
            zeros = zeros + _ONES[self.bits]
        zero = from_words(zeros, self.bits)[:, : len(codes)].t().contiguous()
        return grouped(codes, self.bits, tensors["scales"].t(), zero, dtype, tensors.get("g_idx"), in_blocks=in_blocks)
