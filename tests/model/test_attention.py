"""Attention alone, against sums in float64; and the bits of a row are its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from outrider.kernels.library import available_sets
from tests.model.attention import HIDDEN, LONG, Attention, Layer, in_pieces, segment, text_of
from tests.model.core import core, in_turn

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")

SHAPES = {
    "long": (Attention(), LONG),
    "window": (Attention(window=37), LONG),
    "window over a run": (Attention(window=300), LONG),
    "chunk": (Attention(chunk=70), LONG),
    "chunk and window": (Attention(chunk=270, window=100), LONG),
    "softcap": (Attention(softcap=1.5), 300),
    "sinks": (Attention(sinks=True), 300),
    "sinks, softcap and window": (Attention(sinks=True, softcap=2.0, window=50), 300),
    "no groups": (Attention(group=1, kv_heads=3), 100),
    "a group of 7": (Attention(group=7, kv_heads=1), 100),
    "a group of 16": (Attention(group=16, kv_heads=1), 100),
    "blocks of one": (Attention(block_size=1), 100),
    "large blocks": (Attention(block_size=48), LONG),
    **{f"heads of {size}": (Attention(head_dim=size), 140) for size in (6, 64, 80, 96, 128, 256)},
}
#: Attention that looks back over all runs, over two, and over those of its chunk.
SEVERAL = {
    "all": Attention(),
    "window and sinks": Attention(group=5, kv_heads=1, window=270, sinks=True),
    "chunk": Attention(chunk=259, head_dim=40),
}
#: How far sums may be from those in float64, relative to the largest; bf16 rounds queries, keys, values and the output.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2e-2}


#: Kernels are compiled for each of these pairs.
KERNELS = list(product(available_sets(), TOLERANCES))


@pytest.mark.parametrize(("instruction_set", "dtype"), KERNELS, ids=str)
def test_attention_is_the_sum_that_it_stands_for(dtype: torch.dtype, instruction_set: str) -> None:
    for name, (attention, length) in SHAPES.items():
        layer = Layer(replace(attention, dtype=dtype), instruction_set)
        hidden = text_of(length)
        want = layer.reference(hidden)
        error = (in_pieces(layer, hidden, [length - 9, length - 3]) - want).abs().max() / want.abs().max()
        assert error < TOLERANCES[dtype], name


#: Every kernel with one kind of attention, and every kind.
CASES = [(*kernel, kind) for kernel in KERNELS for kind in SEVERAL]
FEW = in_turn(*zip(*KERNELS, strict=True), SEVERAL) if KERNELS else []


@pytest.mark.parametrize(("instruction_set", "dtype", "kind"), core(CASES, FEW, "src/outrider/kernels/"), ids=str)
def test_bits_do_not_depend_on_chunks_neighbours_or_threads(kind: str, dtype: torch.dtype, instruction_set: str) -> None:
    attention = replace(SEVERAL[kind], dtype=dtype)
    one, two = (Layer(attention, instruction_set, threads) for threads in (1, 2))
    hidden = text_of(LONG)
    whole = in_pieces(one, hidden, [])
    assert torch.equal(in_pieces(one, hidden, [1, 255, 256, 257, 300, 513]), whole)
    for cuts in ([1, 255, 256, 257, 300, 513], [97, 510, 511, 512, 529], list(range(40, LONG, 33))):
        assert torch.equal(in_pieces(two, hidden, cuts), whole)
    assert torch.equal(in_pieces(two, hidden, [250, 520], beside=True), whole)


#: Windows, and where a tree begins: before, behind and across the border of a run.
PLACES = [(0, 0), (0, 250), (3, 253), (90, 77), (90, 256)]


@pytest.mark.parametrize(("instruction_set", "dtype"), KERNELS, ids=str)
def test_a_tree_has_the_bits_of_its_paths(dtype: torch.dtype, instruction_set: str) -> None:
    """Two paths in turn, with leaves beside them that are not numbers: nobody but themselves may notice."""
    for window, start in PLACES:
        got, want = tree_and_paths(start, Attention(window=window, dtype=dtype), instruction_set)
        assert torch.equal(got, want), (window, start)


def tree_and_paths(start: int, attention: Attention, instruction_set: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rows of both paths have in a tree, and what they have in texts of their own."""
    depth = 9
    layer = Layer(attention, instruction_set, threads=2)
    texts = [torch.cat([text_of(start), text_of(depth, seed)]) for seed in (1, 2)]
    want = [in_pieces(layer, text, [])[start:] for text in texts]
    rows, parents, places = [], [], ([], [])
    for d in range(depth):
        for path, text in enumerate(texts):
            parent = places[path][-1] if d else -1
            places[path].append(len(rows))
            rows += [text[start + d], torch.full((HIDDEN,), float("nan"))]
            parents += [parent, parent]
    layer.clear()
    table = list(range(80, 0, -1))
    if start:
        layer.forward([texts[0][:start]], [segment(0, start, table)])
    got = layer.forward([torch.stack(rows)], [segment(start, start + len(rows), table, tuple(parents))])[0]
    return torch.cat([got[places[path]] for path in range(2)]), torch.cat(want)


@pytest.mark.parametrize(("instruction_set", "dtype"), KERNELS, ids=str)
def test_what_a_row_does_not_see_may_be_infinite(dtype: torch.dtype, instruction_set: str) -> None:
    """Rows behind it, and rows that left its window; a weight of zero would not silence them."""
    layer = Layer(Attention(window=20, dtype=dtype), instruction_set)
    hidden = text_of(90)
    want = in_pieces(layer, hidden, [])
    spoilt = hidden.clone()
    spoilt[41] = float("nan")
    got = in_pieces(layer, spoilt, [30])
    assert torch.equal(got[:41], want[:41])
    assert got[41:61].isnan().all()
    assert torch.equal(got[61:], want[61:])


@pytest.mark.parametrize("instruction_set", available_sets())
def test_bf16_is_no_farther_from_the_truth_than_stock_attention(instruction_set: str) -> None:
    """Where processors multiply pairs of bf16, weights are rounded to it, as stock attention does."""
    layer = Layer(Attention(head_dim=64, dtype=torch.bfloat16), instruction_set)
    of, hidden = layer.attention, text_of(400)
    got, want = in_pieces(layer, hidden, []).double(), layer.reference(hidden)
    normed = torch.nn.functional.rms_norm(hidden, (HIDDEN,)).bfloat16()
    heads = (normed @ layer.qkv.bfloat16().t()).view(400, -1, of.head_dim).transpose(0, 1)
    q, k, v = heads.split([of.heads, of.kv_heads, of.kv_heads])
    attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
    stock = (attended[0].transpose(0, 1).reshape(400, -1) @ layer.out.bfloat16().t()).double()
    assert (got - want).norm() <= (stock - want).norm()
