"""The kernels' experts compute what their weights say, and the bits of a row are its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from outrider.kernels.decoder import DecoderKernel, DecoderLayer, DecoderShape, Norm, PassRows
from outrider.kernels.experts import ExpertsShape, PackedExperts, pack_gated, unpack_gated
from outrider.kernels.formats import FORMATS, StoredWeight, WeightFormat, plain
from outrider.kernels.layout import NormKind
from outrider.kernels.library import KernelLibrary, available_sets, kernels_for
from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import unrounded_rows
from tests.kernel_sets import instruction_sets

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
EPSILON = 1e-5


@pytest.fixture(params=instruction_sets())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return kernels_for(request.param)


@dataclass
class Experts:
    """Weights of experts in float64, each already one that its dtype can hold.

    Attributes:
        router: [num_experts, hidden]
        gate, up: [num_experts, size, hidden]
        down: [num_experts, hidden, size]
        biases: Those of the router, [num_experts], and of the three others, or None.
        group: The inputs of a row that share a scale where rows are rounded to 8 bits. None where they are not.
    """

    shape: ExpertsShape
    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    group: int | None = None

    def rounded(self, fmt: WeightFormat) -> Experts:
        """The same with weights that a format can hold."""
        gate, up, down = (
            torch.stack([fmt.dequantise(fmt.store(each.float()), torch.float64) for each in weights])
            for weights in (self.gate, self.up, self.down)
        )
        return replace(self, gate=gate, up=up, down=down, group=fmt.group if fmt.rounds_rows else None)

    def entering(self, rows: Tensor) -> Tensor:
        """Rows as they enter a product with the weights of an expert."""
        return rows if self.group is None else unrounded_rows(rows, self.group).double()

    @staticmethod
    def random(
        shape: ExpertsShape, count: int, hidden: int, size: int, dtype: torch.dtype, *, biased: bool = False
    ) -> Experts:
        """Gates are wide enough that bounds are met."""
        draw = torch.Generator().manual_seed(count)

        def some(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=draw, dtype=torch.float64).to(dtype).double()

        wide = 4.0 * some(2, count, size, hidden) / hidden**0.5
        gate, up = wide.to(dtype).double()
        down = (some(count, hidden, size) / size**0.5).to(dtype).double()
        biases = (some(count), some(count, size), some(count, size), some(count, hidden)) if biased else None
        return Experts(shape, some(count, hidden), gate, up, down, biases)

    def expected(self, rows: Tensor) -> Tensor:
        """What is added to rows [n, hidden] of float64: the feed-forward of their norm."""
        normed = rows / (rows.square().mean(-1, keepdim=True) + EPSILON).sqrt()
        router, *biases = self.biases or (None, None, None, None)
        logits = (normed[:, None] * self.router).sum(-1)  # equal for equal experts, as a matrix product need not be
        shares = (logits if router is None else logits + router).softmax(-1)
        chosen = shares.sort(dim=-1, descending=True, stable=True).indices[:, : self.shape.num_chosen]
        out = torch.zeros_like(rows)
        for row, experts in enumerate(chosen.tolist()):
            total = float(shares[row, experts].sum()) if self.shape.normalised else 1.0
            for expert in experts:
                out[row] += shares[row, expert] / total * self._expert(expert, normed[row], biases)
        return out

    def _expert(self, expert: int, row: Tensor, biases: list[Any]) -> Tensor:
        gate_bias, up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
        row = self.entering(row)
        gate, value = linear(row, self.gate[expert], gate_bias), linear(row, self.up[expert], up_bias)
        inner = silu(gate) * value
        if self.shape.limit:
            gate, value = gate.clamp(max=self.shape.limit), value.clamp(-self.shape.limit, self.shape.limit)
            inner = (value + 1) * gate * torch.sigmoid(self.shape.slope * gate)
        return linear(self.entering(inner), self.down[expert], down_bias)


def stored(weight: Tensor, dtype: torch.dtype, fmt: WeightFormat | None = None) -> StoredWeight:
    """A weight as the kernels take it: in a format, or as it is. int8 has scales of a power of two, so that nothing is
    rounded."""
    if fmt is not None:
        return fmt.store(weight.to(torch.float32))
    if dtype is not torch.int8:
        return plain(weight.to(dtype))
    return StoredWeight(FORMATS["int8"], torch.float32, (weight * 64).to(torch.int8), torch.full((len(weight),), 1 / 64))


class Layer:
    """A decoder of one layer, whose attention adds nothing."""

    def __init__(
        self, library: KernelLibrary, experts: Experts, dtype: torch.dtype, fmt: WeightFormat | None = None
    ) -> None:
        kept = torch.float32 if dtype is torch.int8 else dtype
        hidden = experts.router.shape[1]
        biases = experts.biases or (None, None, None, None)
        gate_up = [
            pack_gated(
                library,
                stored(gate, dtype, fmt),
                stored(up, dtype, fmt),
                None if biases[1] is None or biases[2] is None else (biases[1][expert], biases[2][expert]),
            )
            for expert, (gate, up) in enumerate(zip(experts.gate, experts.up, strict=True))
        ]
        down = [
            PackedWeights(library, stored(weight, dtype, fmt), None if biases[3] is None else biases[3][expert])
            for expert, weight in enumerate(experts.down)
        ]
        nothing = PackedWeights(library, plain(torch.zeros(hidden, 8, dtype=kept)))
        router = PackedWeights(library, plain(experts.router.to(kept)), biases[0])
        norm = Norm(NormKind.RMS, EPSILON, torch.ones(hidden))
        layer = DecoderLayer(
            attention_norm=norm,
            attention_post_norm=None,
            mlp_norm=norm,
            mlp_post_norm=None,
            query_norm=None,
            key_norm=None,
            whole_norms=False,
            qkv=PackedWeights(library, plain(torch.zeros(24, hidden, dtype=kept))),
            out=nothing,
            gate=None,
            up=None,
            down=None,
            experts=PackedExperts(experts.shape, router, gate_up, down),
            rotary=None,
            scale=1.0,
            softcap=0.0,
            sinks=None,
            residual_scale=1.0,
            window=0,
            chunk=0,
        )
        shape = DecoderShape(hidden, 0, num_heads=1, num_kv_heads=1, head_dim=8, activation="silu")
        head = PackedWeights(library, plain(torch.zeros(1, hidden, dtype=kept)))
        self.kernel = DecoderKernel(library, shape, [layer], None, None, None, head, kept)
        self.pool = (torch.zeros(1024, 1, 8, dtype=kept), torch.zeros(1024, 1, 8, dtype=kept))
        self.kernel.use_memory([self.pool])

    def __call__(self, rows: Tensor) -> Tensor:
        """[n, hidden] to what the layer adds to them, in the kernels' precision."""
        given = rows.to(self.kernel.real)
        return self.kernel.forward_part(_rows(len(rows)), (), [0], given)[2] - given


def _rows(count: int) -> PassRows:
    """Rows of a sequence each."""
    places, nothing = list(range(count)), [0] * count
    return PassRows(
        tokens=nothing,
        positions=nothing,
        slots=places,
        long_rows=nothing,
        first=[*places, count],
        start=nothing,
        tables=places,
        table_at=places,
        ancestry_at=[-1] * count,
        logit_rows=[],
        ancestry=np.empty(0, np.uint8),
        block_size=1,
    )


def some_rows(count: int, hidden: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of many sizes, which bfloat16 can hold."""
    draw = torch.Generator().manual_seed(7)
    rows = torch.randn(count, hidden, generator=draw, dtype=torch.float64)
    return rows.to(torch.bfloat16).to(torch.float64 if dtype is torch.float64 else torch.float32)


PLAIN = ExpertsShape(num_chosen=3, normalised=True, activation="silu")
SHAPES = {
    "normalised": PLAIN,
    "shares": replace(PLAIN, num_chosen=5, normalised=False),
    "bounded": replace(PLAIN, slope=1.702, limit=2.5),
    "one": replace(PLAIN, num_chosen=1),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.int8: 1e-5}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("count", "hidden", "size"), [(6, 40, 33), (70, 16, 8)])
def test_experts_compute_what_their_weights_say(
    library: KernelLibrary, name: str, dtype: torch.dtype, count: int, hidden: int, size: int
) -> None:
    exact = torch.bfloat16 if dtype is torch.int8 else dtype
    experts = Experts.random(SHAPES[name], count, hidden, size, exact, biased=name == "bounded")
    if dtype is torch.int8:
        for part in ("gate", "up", "down"):
            setattr(experts, part, (getattr(experts, part) * 64).round().clamp(-127, 127) / 64)
    rows = some_rows(61, hidden, dtype)
    want, got = experts.expected(rows.double()), Layer(library, experts, dtype)(rows).double()
    assert (got - want).abs().max() < TOLERANCE[dtype] * want.abs().max()


def test_bfloat16_stays_close(library: KernelLibrary) -> None:
    """Rows may be rounded as they enter a product, so that a near tie goes to another expert; most rows have none."""
    experts = Experts.random(PLAIN, 8, 64, 96, torch.bfloat16)
    rows = some_rows(61, 64)
    want, got = experts.expected(rows.double()), Layer(library, experts, torch.bfloat16)(rows).double()
    assert ((got - want).abs().amax(-1) / want.abs().max()).median() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_the_bits_of_a_row_are_its_own(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Whichever rows share its experts, in any order, and on any number of threads."""
    kept = torch.bfloat16 if dtype is torch.int8 else dtype
    layer = Layer(library, Experts.random(SHAPES["shares"], 9, 48, 80, kept), dtype)
    rows = some_rows(90, 48, dtype)
    whole, usual = layer(rows), torch.get_num_threads()
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(layer(rows), whole)
            assert torch.equal(layer(rows[order]), whole[order])
            for begin, end in ((0, 1), (5, 7), (40, 53)):
                assert torch.equal(layer(rows[begin:end]), whole[begin:end])
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("name", ["int8-g32", "int4-g32", "int4-g64-asym"])
def test_rounded_rows_meet_the_weights_of_their_experts(library: KernelLibrary, name: str) -> None:
    """For 1 to 40 rows, on any number of threads. A number in the middle between two whole ones may go to either, which is
    why some rows of the reference lie as far as rounding moves them."""
    fmt = replace(FORMATS[name], rounds_rows=True)
    experts = Experts.random(SHAPES["shares"], 9, 64, 192, torch.float32)
    layer, rows, usual = Layer(library, experts, torch.float32, fmt), some_rows(40, 64), torch.get_num_threads()
    found = layer(rows)
    want, exact = (experts.rounded(each).expected(rows.double()) for each in (fmt, FORMATS[name]))
    sizes = want.abs().amax(-1)
    assert ((found - want).abs().amax(-1) / sizes).median() < 1e-5
    assert ((found - exact).abs().amax(-1) / sizes).median() > 1e-3, "rows are rounded"
    try:
        for count in range(1, 41):
            torch.set_num_threads(1 + count % 3)
            assert torch.equal(layer(rows[:count]), found[:count])
            assert torch.equal(layer(rows[-count:]), found[-count:])
        many = torch.arange(600) * 7 % 40  # more than are gathered at a time
        assert torch.equal(layer(rows[many]), found[many])
    finally:
        torch.set_num_threads(usual)


def test_many_rows_of_one_expert(library: KernelLibrary) -> None:
    """More than are gathered at a time."""
    experts = Experts.random(replace(PLAIN, num_chosen=2), 3, 16, 24, torch.float64)
    rows = some_rows(600, 16, torch.float64)
    layer = Layer(library, experts, torch.float64)
    want, got = experts.expected(rows), layer(rows)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    assert torch.equal(layer(rows[300:302]), got[300:302])


def test_equal_logits_choose_the_first_experts(library: KernelLibrary) -> None:
    experts = Experts.random(PLAIN, 12, 16, 8, torch.float64)
    experts.router[:] = experts.router[4]
    experts.router[6] *= 1.0 + 1e-9  # hardly larger, or hardly smaller
    rows = some_rows(20, 16, torch.float64)
    layer = Layer(library, experts, torch.float64)
    torch.testing.assert_close(layer(rows), experts.expected(rows), rtol=1e-8, atol=1e-8)


def test_what_is_not_a_number_stays_in_its_row(library: KernelLibrary) -> None:
    experts = Experts.random(PLAIN, 6, 16, 8, torch.float32)
    layer, rows = Layer(library, experts, torch.float32), some_rows(5, 16)
    whole = layer(rows)
    for bad in (float("nan"), float("inf")):
        spoiled = rows.clone()
        spoiled[2, 3] = bad
        got = layer(spoiled)
        assert got[2].isnan().all()
        assert torch.equal(got[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8], ids=str)
def test_packed_gates_are_unpacked(library: KernelLibrary, dtype: torch.dtype) -> None:
    gate, up = (torch.randint(-64, 64, (45, 7)).to(dtype) for _ in range(2))
    scale = torch.rand(45) if dtype is torch.int8 else None
    both = (plain(w) if scale is None else StoredWeight(FORMATS["int8"], torch.float32, w, scale) for w in (gate, up))
    packed = pack_gated(library, *both, None)
    for back, given in zip(unpack_gated(library, packed, 45), (gate, up), strict=True):
        assert torch.equal(back.data, given)
        assert scale is None or (back.scale is not None and torch.equal(back.scale, scale))
