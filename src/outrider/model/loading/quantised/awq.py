"""The layout of AWQ that AutoAWQ calls "gemm".

Codes and zero points lie in words of 32 bits along the outputs, `qweight` [in_features, out_features / 8] and `qzeros`
[groups, out_features / 8]. The eight codes of a word belong to its outputs 0, 2, 4, 6, 1, 3, 5 and 7, from the lowest bits
on. `scales` are [groups, out_features].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.formats.stored import StoredWeight
from outrider.model.loading.quantised.layout import Headers, Read, Tensors, check, from_words, grouped

#: Where in its word the code of each output lies.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq:
    """Matrices of AWQ.

    Attributes:
        bits: Of a code.
    """

    bits: int
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales")
    stays_rounded: bool = True

    def holds(self, headers: Headers) -> bool:
        return "qweight" in headers

    def shape(self, headers: Headers, read: Read) -> tuple[int, int]:
        check(self.bits == 4, f"weights of {self.bits} bits are not known, but those of 4")
        inputs, words = headers["qweight"].shape
        return 8 * words, inputs

    def stored(self, tensors: Tensors, dtype: torch.dtype, *, in_blocks: bool = False) -> StoredWeight:
        codes, zero = (_by_output(tensors[name]) for name in ("qweight", "qzeros"))
        return grouped(codes, 4, tensors["scales"].t(), zero, dtype, in_blocks=in_blocks)


def _by_output(words: Tensor) -> Tensor:
    """uint8 [8 * n, rows] of words [rows, n]."""
    codes = from_words(words, 4).reshape(len(words), -1, 8)
    return codes[..., list(_PLACES)].flatten(1).t().contiguous()
