"""The few-row kernels: every instruction set this machine runs, against float64, bit for bit the same in any company."""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from outrider.kernels import library
from outrider.kernels.formats import FORMATS, StoredWeight, plain
from outrider.kernels.gguf_blocks import GGUF_TYPES
from outrider.kernels.layout import Operand
from outrider.kernels.library import available_sets, kernel_library, kernels_for
from outrider.kernels.linear import PackedLinear, PackedTransposed, use_packed_linear, use_stock_linear
from outrider.kernels.packed import PackedWeights, product
from outrider.kernels.weights import quantise_linears, stored_weight
from tests.kernel_sets import instruction_sets
from tests.model.gguf_files import blocks

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
SHAPES = [(1, 1), (16, 8), (33, 48), (64, 65), (200, 31)]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3}


@pytest.fixture(params=instruction_sets())
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTRIDER_KERNELS", request.param)
    return str(request.param)


def layer(rows: int, cols: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(rows * 1000 + cols)
    return nn.Linear(cols, rows, bias=bias, dtype=dtype).requires_grad_(False)


def packed(stock: nn.Linear) -> nn.Linear:
    fast = copy.deepcopy(stock)
    found = kernel_library()
    assert found is not None
    use_packed_linear(fast, found)
    assert isinstance(fast, PackedLinear)
    return fast


def exact(stock: nn.Linear, rows: Tensor) -> Tensor:
    bias = 0 if stock.bias is None else stock.bias.double()
    return rows.double() @ stock.weight.double().t() + bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_product(instruction_set: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    stock = layer(*shape, dtype, bias=shape[0] % 2 == 0)
    fast = packed(stock)
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 40):
        rows = torch.randn(1, num_rows, shape[1]).to(dtype)
        got = fast(rows)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact(stock, rows), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_no_columns_leave_the_bias(instruction_set: str) -> None:
    stock = layer(40, 1, torch.float32)
    stock.in_features, stock.weight = 0, nn.Parameter(torch.empty(40, 0), requires_grad=False)
    assert torch.equal(packed(stock)(torch.empty(3, 0)), stock.bias.expand(3, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [63, 65, 129, 256, 257, 511, 513, 2051, 4200])  # weights and rows are read in runs
def test_long_rows_are_read_in_runs(instruction_set: str, num_columns: int, dtype: torch.dtype) -> None:
    stock = layer(70, num_columns, dtype)
    fast, rows = packed(stock), torch.randn(50, num_columns).to(dtype)
    alone = torch.cat([fast(row[None]) for row in rows])
    torch.testing.assert_close(alone.double(), exact(stock, rows), rtol=3 * TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])
    for count in (2, 6, 11, 12, 13, 30, 47, 50):
        assert torch.equal(fast(rows[:count]), alone[:count])


def of_kind(kind: torch.dtype, rows: int, cols: int) -> tuple[nn.Linear, torch.dtype]:
    """A packed layer with weights of this dtype, and the dtype of the rows that enter it."""
    stock = layer(rows, cols, torch.float32 if kind == torch.int8 else kind)
    if kind == torch.int8:
        quantise_linears(stock, FORMATS["int8"])
    return packed(stock), stock.weight.dtype


KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int8]


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_are_its_own(instruction_set: str, kind: torch.dtype) -> None:
    fast, dtype = of_kind(kind, 200, 96)
    rows = torch.randn(200, 96).to(dtype)
    alone = torch.cat([fast(row[None]) for row in rows])
    for count in range(1, 201):
        assert torch.equal(fast(rows[:count]), alone[:count])
        assert torch.equal(fast(rows[-count:]), alone[-count:])


# Rows are parted into tiles and blocks of rows, columns into panels and blocks of panels, and K into runs.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(300, 255), (300, 513), (33, 1027)])
def test_bits_over_the_borders_of_blocks(instruction_set: str, shape: tuple[int, int], kind: torch.dtype) -> None:
    fast, dtype = of_kind(kind, *shape)
    few, threads = torch.randn(97, shape[1]).to(dtype), torch.get_num_threads()
    alone = torch.cat([fast(row[None]) for row in few])
    try:
        for place, count in enumerate((13, 95, 96, 97, 143, 144, 145, 287, 288, 289, 512, 577, 2048)):
            which = torch.arange(count) * 31 % len(few)
            torch.set_num_threads(1 + place % 3)
            assert torch.equal(fast(few[which]), alone[which])
    finally:
        torch.set_num_threads(threads)


def test_bits_do_not_depend_on_the_number_of_threads(instruction_set: str) -> None:
    fast, rows, threads = packed(layer(200, 96, torch.float32)), torch.randn(5, 96), torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(fast(rows))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_weights_come_back_as_they_went(instruction_set: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    data = (torch.randn(shape) * 40).to(dtype)
    found = kernel_library()
    assert found is not None
    scale = torch.rand(shape[0]) if dtype == torch.int8 else None
    given = plain(data) if scale is None else StoredWeight(FORMATS["int8"], torch.float32, data, scale)
    back = PackedWeights(found, given).unpacked()
    assert torch.equal(back.data, data)
    assert scale is None or torch.equal(back.scale, scale)  # type: ignore[arg-type]


def drawn(name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight:
    torch.manual_seed(1)
    if name in FORMATS:
        return FORMATS[name].store(torch.randn(shape, dtype=dtype))
    return GGUF_TYPES[name].stored(torch.from_numpy(blocks(name, *shape, seed=1)), dtype)


@pytest.mark.skipif("avx512bf16" not in available_sets(), reason="no instruction for pairs that could be taken apart")
@pytest.mark.parametrize(
    "name", ["bfloat16", "int8", "int8-g64", "int4-g32", "int4-g128-asym", "Q4_0", "Q4_K", "Q6_K", "Q8_0"]
)
def test_pairs_that_are_taken_apart_have_the_bits_of_the_instruction(name: str) -> None:
    kernels, cols = kernels_for("avx512bf16"), 717 if name == "bfloat16" else 768
    given = drawn(name, (100, cols), torch.bfloat16)
    if name == "bfloat16":
        given.data[::3, ::2] *= 1e-38  # numbers that the instruction takes for 0
        given.data[1::3] *= 1e-8  # so that products are such numbers, too
    weights = PackedWeights(kernels, given)
    assert weights.operand == Operand.PAIRS
    rows = torch.randn(50, cols) * torch.tensor([1, 1e-30, 1e-38, 1e-36, 1])[torch.arange(50 * cols) % 5].view(50, cols)
    rows[::3] *= 1e-20
    rows[::7] *= 1e-30
    apart = ctypes.c_int.in_dll(kernels._library, "outrider_pairs_apart")
    before, got = apart.value, []
    for apart.value in (0, 1):
        got.append([product(kernels, weights.struct, rows[:count].contiguous()) for count in (*range(1, 14), 26, 50)])
    apart.value = before
    assert all(map(torch.equal, *got))
    assert not got[0][-1].isnan().any()


@pytest.mark.parametrize("name", ["int8", "int4-g32-asym", "Q4_K", "Q8_0"])
def test_a_matrix_that_is_consumed_is_packed_alike_and_freed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.kernels.packed._FREED_AT_ONCE", 100_000)
    kernels, shape = kernel_library(), (1000, 512)
    assert kernels is not None
    given, bias = drawn(name, shape, torch.float32), torch.randn(shape[0])
    whole = PackedWeights(kernels, given, bias)
    once = PackedWeights(kernels, given, bias, consume=True)
    assert torch.equal(once.data, whole.data)
    assert torch.equal(once.bias, whole.bias)  # type: ignore[arg-type]
    assert once.scale is whole.scale or torch.equal(once.scale, whole.scale)  # type: ignore[arg-type]
    assert 10 * int(given.data.count_nonzero()) < given.data.numel(), "all pages but those at the ends of parts are gone"


def test_undoing_restores_the_layer(instruction_set: str) -> None:
    stock = layer(33, 48, torch.float32)
    fast = packed(stock)
    assert fast.weight.shape == stock.weight.shape
    assert fast.weight.isnan().all(), "a weight that moved over must not be mistaken for one"
    use_stock_linear(fast)
    assert type(fast) is nn.Linear
    assert torch.equal(fast.weight, stock.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_the_nearest_and_its_product_exact(instruction_set: str, dtype: torch.dtype) -> None:
    stock = layer(50, 64, dtype)
    quantised = copy.deepcopy(stock)
    quantise_linears(quantised, FORMATS["int8"])
    stored = stored_weight(quantised)
    assert stored.data.dtype == torch.int8
    assert stored.scale is not None
    step = stored.scale[:, None] * 0.5
    assert ((stored.data * stored.scale[:, None] - stock.weight.float()).abs() <= step * (1 + 1e-5)).all()
    rows = torch.randn(9, 64).to(dtype)
    want = rows.double() @ (stored.data.double() * stored.scale.double()[:, None]).t() + stock.bias.double()
    torch.testing.assert_close(packed(quantised)(rows).double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def quantised(rows: int, cols: int, dtype: torch.dtype) -> tuple[nn.Linear, Tensor]:
    """An int8 layer, and its weights as float64 [rows, cols]."""
    stock = layer(rows, cols, dtype)
    quantise_linears(stock, FORMATS["int8"])
    if dtype == torch.float64:  # computed in its own precision, with the rounded weights
        return stock, stock.weight
    stored = stored_weight(stock)
    assert stored.scale is not None
    return stock, stored.data.double() * stored.scale.double()[:, None]


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, [1e36, 1e37, 1e38, 3.4e38]),
        (torch.bfloat16, [1e36, 1e37, 1e38, 3.3e38]),
        (torch.float64, [1e38, 1e300, 1e307, 1.7e308]),
    ],
)
@pytest.mark.parametrize("shape", [(50, 64), (33, 1), (40, 2500)])
def test_int8_products_overflow_only_where_their_result_does(
    instruction_set: str, shape: tuple[int, int], dtype: torch.dtype, sizes: list[float]
) -> None:
    stock, weights = quantised(*shape, dtype)
    fast = packed(stock)
    for size in sizes:
        rows = torch.zeros(5, shape[1], dtype=dtype)
        rows[0] = torch.linspace(-size, size, shape[1], dtype=torch.float64).to(dtype)
        rows[1, -1] = size  # one large number alone, others small
        rows[1, :-1] = 1.0
        rows[2] = rows[0].flip(0) / 3
        rows[3] = size * torch.linspace(-1, 1, shape[1], dtype=torch.float64).sin().to(dtype) / shape[1]
        got, weight = fast(rows), weights.double()
        want = torch.stack([(row[None].double() / size) @ weight.t() for row in rows])[:, 0]
        magnitude = torch.stack([(row[None].double().abs() / size) @ weight.abs().t() for row in rows])[:, 0]
        inside = want.abs() * size < 0.99 * torch.finfo(dtype).max
        assert got[inside].isfinite().all()
        error = (got.double() / size - want - stock.bias.double() / size).abs()
        rounding = TOLERANCE[dtype] * (magnitude + 1 / size)
        assert (error <= rounding)[inside].all()


def test_a_huge_row_leaves_its_neighbours_as_they_are(instruction_set: str) -> None:
    for cols in (70, 2500):  # in one run, and in several
        stock, _ = quantised(45, cols, torch.float32)
        fast, rows = packed(stock), torch.randn(41, cols)
        rows[::3] *= 3e37
        rows[7, 3], rows[8, 5] = float("inf"), float("nan")
        alone = torch.cat([fast(row[None]) for row in rows])
        assert alone[6].isfinite().all()
        assert not alone[7:9].isfinite().any()
        ordinary = [i for i in range(41) if i % 3]
        bits = alone.view(torch.int32)
        assert torch.equal(fast(rows[ordinary]).view(torch.int32), bits[ordinary])
        for count in (2, 5, 6, 12, 13, 41):
            assert torch.equal(fast(rows[:count]).view(torch.int32), bits[:count])
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert torch.equal(fast(rows).view(torch.int32), bits)
        finally:
            torch.set_num_threads(threads)


def test_tied_embeddings_keep_their_weights() -> None:
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head]).requires_grad_(False)
    found = kernel_library()
    assert found is not None
    before, rows = embedding.weight.clone(), torch.randn(3, 8)
    want = head(rows)
    use_packed_linear(model, found)
    assert torch.equal(embedding.weight, before)
    torch.testing.assert_close(head(rows), want)
    use_stock_linear(model)
    assert head.weight is embedding.weight


def test_weights_belong_to_the_kernels_that_packed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "generic")
    stock = layer(9, 48, torch.float32)
    fast, rows = packed(stock), torch.randn(27, 48)
    before = fast(rows)
    for other in ("", "off"):
        monkeypatch.setenv("OUTRIDER_KERNELS", other)
        assert torch.equal(fast(rows), before)


def test_rows_of_another_precision_are_refused() -> None:
    with pytest.raises(RuntimeError, match="do not fit"):
        packed(layer(9, 48, torch.float32))(torch.randn(2, 48, dtype=torch.float64))


def test_transposed_layers_are_packed_and_undone(instruction_set: str) -> None:
    from transformers.pytorch_utils import Conv1D

    stock = Conv1D(33, 48).requires_grad_(False)
    fast = copy.deepcopy(stock)
    found = kernel_library()
    assert found is not None
    use_packed_linear(fast, found, (Conv1D,))
    assert type(fast) is PackedTransposed
    assert fast.weight.isnan().all()
    rows = torch.randn(2, 5, 48)
    torch.testing.assert_close(fast(rows), stock(rows), rtol=1e-5, atol=1e-5)
    use_stock_linear(fast)
    assert type(fast) is Conv1D
    assert torch.equal(fast.weight, stock.weight)


def test_torch_compile_sees_one_operator() -> None:
    fast = packed(layer(33, 48, torch.float32))
    rows = torch.randn(4, 48)
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    assert torch.equal(compiled(rows), fast(rows))


def test_other_devices_and_dtypes_keep_the_stock_layer() -> None:
    found = kernel_library()
    assert found is not None
    for stock in (nn.Linear(4, 4, dtype=torch.float16), nn.Linear(4, 4, device="meta")):
        use_packed_linear(stock, found)
        assert type(stock) is nn.Linear


def test_off_and_unknown_sets(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    assert kernel_library() is None
    monkeypatch.setenv("OUTRIDER_KERNELS", "mmx")
    found = kernel_library()
    assert found is not None
    assert found.instruction_set == available_sets()[-1]
    assert "mmx" in caplog.text


def test_a_missing_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_open", lambda: None)
    available_sets.cache_clear()
    try:
        assert available_sets() == ()
        assert kernel_library() is None
    finally:
        available_sets.cache_clear()


def test_a_system_that_lists_no_libraries_has_the_runtime_that_torch_brings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("libomp.dylib", "libtorch_cpu.dylib"):
        (tmp_path / "lib" / name).touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(library, "_MAPS", tmp_path / "maps")
    assert library._loaded_runtimes() == [str(tmp_path / "lib" / "libomp.dylib")]


def test_threads_are_torchs_own() -> None:
    found = kernel_library()
    assert found is not None
    assert found.num_threads == torch.get_num_threads()
    assert library._openmp_entries()[0].value, "PyTorch's OpenMP runtime was not found"
