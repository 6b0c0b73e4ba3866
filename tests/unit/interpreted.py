"""Where the tests of the Triton kernels run: interpreted on a CPU, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

#: Where the kernels compute.
DEVICE = torch.device("cuda" if os.environ.get("TRITON_INTERPRET") == "0" else "cpu")


@contextmanager
def even_products() -> Iterator[None]:
    """Products of tiles have the bits of each row alone, as on a GPU.

    The interpreter calls a library for CPUs, which sums in another order for other rows of a tile. A GPU needs nothing.
    """
    if DEVICE.type != "cpu":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        products = np.einsum("mk,kn->mn", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return TensorHandle(products + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield
