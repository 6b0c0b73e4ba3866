"""Tensors of GGUF files as weights that stay in their blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import ModelLoadError
from outrider.kernels.formats.gguf import GGUF_TYPES
from outrider.kernels.formats.stored import StoredWeight
from outrider.kernels.pages import release
from outrider.kernels.rounding import parts
from outrider.model.loading.gguf.header import GgufFile, GgufTensor
from outrider.model.loading.gguf.values import AGAIN


def is_packed(tensor: GgufTensor) -> bool:
    """Whether a matrix, or one for each expert, stays in blocks. The kernels take units of 32 inputs, and routers are
    floats."""
    known = tensor.type in GGUF_TYPES and ".ffn_gate_inp." not in tensor.name
    return known and len(tensor.shape) in (2, 3) and tensor.shape[-1] % 32 == 0


def rows_may_be_rounded(file: GgufFile) -> bool:
    """Whether there are matrices of a file that rows of 8 bits can be multiplied with."""
    return any(is_packed(tensor) and GGUF_TYPES[tensor.type].format.may_round_rows for tensor in file.tensors.values())


def stored_tensor(path: str, tensor: GgufTensor, dtype: torch.dtype, order: Tensor | None = None) -> StoredWeight:
    """The weights of a tensor for which `is_packed` holds, which stand for `dtype`: [out_features, in_features], or with
    [num_experts] before it. `order` are the rows of the file in the order that is wanted.

    Raises:
        ModelLoadError: Numbers are not finite.
    """
    rows = tensor.rows()
    stored = GGUF_TYPES[tensor.type].stored(rows if order is None else rows[order], dtype)
    release(rows)
    halves = torch.bfloat16 if tensor.type == "BF16" else torch.float16
    numbers = stored.data.view(halves) if stored.scale is None else stored.scale  # no copy in float32
    if not all(bool(numbers[some].isfinite().all()) for some in parts(numbers)):
        raise ModelLoadError(path, f"the tensor {tensor.name} holds numbers that are not finite", AGAIN)
    if len(tensor.shape) == 2:
        return stored
    return stored.each(lambda column: column.reshape(*tensor.shape[:2], *column.shape[1:]))
