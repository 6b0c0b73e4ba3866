"""Rows over running states in our kernel beside its definition, and the bits of a row beside other rows."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from outrider.kernels.library import available_sets, kernels_for
from outrider.kernels.mixers import MatrixUpdates, advance
from outrider.model.running import Recurrence, StateRows
from tests.kernel_sets import instruction_sets

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")

BOUND = {torch.float32: 2e-5, torch.float64: 1e-13}
TREE = (-1, 0, 0, 1, 2, 2, 4, 3, -1, 8)


def inputs(
    way: str, heads: int, repeats: int, key_dim: int, value_dim: int, num_rows: int
) -> tuple[Tensor, MatrixUpdates, Tensor]:
    """A state, rows over it and their queries, in float64."""
    torch.manual_seed(heads + 10 * repeats + key_dim + value_dim)
    size = (num_rows, heads * repeats)
    keys, queries = torch.randn(2, num_rows, heads, key_dim, dtype=torch.float64) * key_dim**-0.5
    values = torch.randn(*size, value_dim, dtype=torch.float64)
    factors = {"keys": (key_dim,), "all": (key_dim, value_dim)}.get(way, (1,))
    decays = torch.rand(*size, *factors, dtype=torch.float64) * 0.5 + 0.5
    shares = torch.rand(*size, 1, dtype=torch.float64) if way in ("delta", "keys") else None
    state = torch.randn(heads * repeats, key_dim, value_dim, dtype=torch.float64)
    return state, MatrixUpdates(keys, values, decays, shares), queries


def tape(rows: MatrixUpdates, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    found = (rows.keys, rows.values, rows.decays, rows.shares)
    return tuple(each.to(dtype) for each in found if each is not None)


def shapes(count: int) -> list[tuple[str, int, int, int, int]]:
    """Every way with the sizes of models, and some of no model."""
    chance = random.Random(3)
    usual = [("delta", 2, 2, 128, 128), ("keys", 2, 1, 64, 128), ("scan", 1, 3, 128, 64), ("all", 1, 1, 16, 300)]
    ways, few = ["delta", "keys", "scan", "all"], [1, 2, 3, 5, 8, 17, 33, 70]
    return usual + [
        (chance.choice(ways), chance.choice(few[:4]), chance.choice(few[:3]), chance.choice(few), chance.choice(few))
        for _ in range(count)
    ]


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", BOUND)
def test_rows_are_what_their_definition_says(instruction_set: str, dtype: torch.dtype) -> None:
    for place, shape in enumerate(shapes(24)):
        parents = TREE if place % 2 else None
        num_rows, wanted = len(TREE), (0, 4, 9)
        state, rows, queries = inputs(*shape, num_rows)
        want = Recurrence().run_stock(state, StateRows(tape(rows), (queries,), parents), wanted)
        narrow = MatrixUpdates(*tape(rows, dtype))
        got = advance(kernels_for(instruction_set), state.to(dtype), narrow, queries.to(dtype), parents, wanted)
        for found, expected in ((got[0], want[0]), *((got[1][row], want[1][row]) for row in wanted)):
            assert found.dtype is dtype
            assert torch.allclose(found.double(), expected, rtol=0, atol=BOUND[dtype] * float(expected.abs().max())), shape


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", BOUND)
def test_the_bits_of_a_row_are_its_own(instruction_set: str, dtype: torch.dtype) -> None:
    """In one pass, in passes of other numbers of rows, and as branches of a tree with siblings that stand between them."""
    library = kernels_for(instruction_set)
    for shape in shapes(8):
        state, rows, queries = inputs(*shape, 12)
        state, rows, queries = state.to(dtype), MatrixUpdates(*tape(rows, dtype)), queries.to(dtype)
        whole, states = advance(library, state, rows, queries, None, (6, 11))
        first = 0
        for end in (1, 4, 5, 7):
            part = [each[first:end] for each in tape(rows, dtype)]
            out, found = advance(library, state, MatrixUpdates(*part), queries[first:end], None, (end - 1 - first,))
            assert torch.equal(out, whole[first:end])
            state, first = found[end - 1 - first], end
        assert torch.equal(state, states[6])
        doubled = [each[7:].repeat_interleave(2, 0) for each in tape(rows, dtype)]
        parents = tuple(-1 if row < 2 else 2 * (row // 2 - 1) for row in range(10))
        out, found = advance(library, state, MatrixUpdates(*doubled), queries[7:].repeat_interleave(2, 0), parents, (8, 9))
        assert torch.equal(out[::2], whole[7:])
        assert torch.equal(out[1::2], whole[7:])
        assert torch.equal(found[8], states[11])
        assert torch.equal(found[9], states[11])
