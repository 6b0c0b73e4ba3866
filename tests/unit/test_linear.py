"""The few-row linear layer computes what nn.Linear computes, and is used only where it was measured to help."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from outrider.kernels.linear import MAX_ROWS, SkinnyLinear, use_skinny_linear

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the fast product is MKL's")


@needs_mkl
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 15, MAX_ROWS, MAX_ROWS + 1])
def test_equals_the_stock_layer(num_rows: int, bias: bool) -> None:
    torch.manual_seed(num_rows)
    stock = nn.Linear(48, 33, bias=bias)
    fast = copy.deepcopy(stock)
    use_skinny_linear(fast)
    assert isinstance(fast, SkinnyLinear)
    rows = torch.randn(1, num_rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(fast(rows), stock(rows), rtol=1e-5, atol=1e-5)
        assert fast(rows).is_contiguous()


@needs_mkl
def test_a_row_does_not_depend_on_the_padding_beside_it() -> None:
    fast = nn.Linear(64, 40)
    use_skinny_linear(fast)
    rows = torch.randn(4, 64)
    with torch.inference_mode():
        assert torch.equal(fast(rows[:3]), fast(rows)[:3])


def test_other_dtypes_keep_the_stock_layer() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        layer = nn.Linear(8, 8, dtype=dtype)
        use_skinny_linear(layer)
        assert type(layer) is nn.Linear


def test_without_mkl_the_stock_layer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    layer = nn.Linear(8, 8)
    use_skinny_linear(layer)
    assert type(layer) is nn.Linear


@needs_mkl
def test_tied_weights_stay_tied() -> None:
    embedding = nn.Embedding(10, 8)
    head = nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    use_skinny_linear(head)
    assert head.weight is embedding.weight
