"""Each Triton kernel in each dtype, beside the same in float64 by stock operators on the same device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.record import Record
from benchmarks.gpu.timing import first_seconds, milliseconds
from outrider.cache.pool import LayerReach
from outrider.kernels.triton import sampling
from outrider.kernels.triton.attention import SPLIT, TILE, TritonAttention, write_rows
from outrider.model.attention import pass_rows
from outrider.model.batch import RaggedBatch, Segment
from outrider.model.context import visible
from outrider.params import SamplingParams
from outrider.verify import noise
from outrider.verify.logits import target_probs
from outrider.verify.rules import owed_mass, residual

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: The largest error, by the norms of all numbers, that is rounding.
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
BLOCK, NUM_BLOCKS = 16, 512
TREE = (-1, 0, 0, 1, 2, 2, 4, 3, -1, 8)
BLOCKS = [(7 * i + 3) % NUM_BLOCKS for i in range(NUM_BLOCKS)]
#: A chunk over the border of a split, a row at the first position of one, a tree over a border, a prompt, one row.
SEGMENTS = (
    Segment([0] * 9, SPLIT - 4, BLOCKS[:17]),
    Segment([0], SPLIT, BLOCKS[17:34]),
    Segment([0] * len(TREE), TILE - 3, BLOCKS[34:39], TREE),
    Segment([0] * 70, 0, BLOCKS[39:44]),
    Segment([0], 2000, BLOCKS[44:170]),
)
#: Key-value heads, query heads of each, width, reach, bound of scores, whether there are sinks.
WAYS: dict[str, tuple[int, int, int, LayerReach, float | None, bool]] = {
    "llama": (8, 4, 128, LayerReach(), None, False),
    "small heads": (2, 3, 64, LayerReach(window=TILE), None, False),
    "caps and sinks": (1, 4, 72, LayerReach(), 1.5, True),
    "wide heads": (2, 2, 256, LayerReach(chunk=24), None, True),
    "narrow heads": (1, 5, 16, LayerReach(window=3), 0.7, False),
}


def kinds(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes to try. The interpreter of Triton takes bfloat16 for whole numbers."""
    return DTYPES if device.type == "cuda" else DTYPES[1:]


def attention(record: Record, device: torch.device) -> None:
    for dtype in kinds(device):
        for name in WAYS:
            record.step(f"attention, {name}, {dtype}", lambda name=name, dtype=dtype: attends(name, dtype, device))
    record.step("attention, time", lambda: attention_times(device))


def attends(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    kv_heads, group, dim, reach, softcap, with_sinks = WAYS[name]
    query, keys, values, logits = inputs(kv_heads, group, dim, dtype, sum(s.num_rows for s in SEGMENTS), device)
    sinks = logits if with_sinks else None
    how = {"window": reach.window or 0, "chunk": reach.chunk or 0, "softcap": softcap, "sinks": sinks, "scale": 0.3}
    got, seconds = first_seconds(lambda: attended(SEGMENTS, query, keys, values, **how), device)
    want, end = [], 0
    for segment in SEGMENTS:
        first, end = end, end + segment.num_rows
        want.append(defined(segment, reach, query[first:end], keys, values, softcap, sinks))
    return beside(got, torch.cat(want), BOUNDS[dtype]) | {"first_seconds": seconds}


def inputs(
    kv_heads: int, group: int, dim: int, dtype: torch.dtype, rows: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(dim)
    query = torch.randn(rows, kv_heads * group, dim)
    keys, values = torch.randn(2, NUM_BLOCKS * BLOCK, kv_heads, dim)
    sinks = torch.randn(kv_heads * group)
    return tuple(each.to(device, dtype) for each in (query, keys, values, sinks))  # type: ignore[return-value]


def attended(segments: tuple[Segment, ...], query: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Tensor:
    taken = TritonAttention(pass_rows(RaggedBatch(segments, BLOCK, CPU)), query.device)
    assert taken.takes(query, keys, values), "the kernel does not take them"
    return taken.attend(query, keys, values, **how)


def defined(
    segment: Segment,
    reach: LayerReach,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of the rows of a segment by its definition, [num_rows, num_heads, dim] in float64."""
    table = torch.tensor(segment.block_table, device=query.device)
    places = torch.arange(segment.context_len, device=query.device)
    slots = table[places // BLOCK] * BLOCK + places % BLOCK
    group = query.shape[1] // keys.shape[1]
    here_keys, here_values = (memory[slots].double().repeat_interleave(group, 1) for memory in (keys, values))
    scores = torch.einsum("rhd,chd->rhc", query.double(), here_keys) * 0.3
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    seen = visible(segment, reach).to(query.device)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None].expand(len(query), -1, 1)], -1)
    return torch.einsum("rhc,chd->rhd", scores.softmax(-1)[..., : len(slots)], here_values)


def attention_times(device: torch.device) -> dict[str, float]:
    """Milliseconds of a layer in the shape of an 8B, with the copy of its lists."""
    found = {}
    for batch, context in ((1, 1024), (16, 1024), (1, 8192)) if device.type == "cuda" else ((1, 128),):
        blocks = -(-(context + 8) // BLOCK)
        segments = tuple(Segment([0], context, [i * blocks + j for j in range(blocks)]) for i in range(batch))
        query = torch.randn(batch, 32, 128, device=device, dtype=DTYPES[0] if device.type == "cuda" else torch.float32)
        keys, values = torch.randn(2, batch * blocks * BLOCK, 8, 128, device=device, dtype=query.dtype)
        taken = TritonAttention(pass_rows(RaggedBatch(segments, BLOCK, CPU)), device)
        work = lambda: taken.attend(query, keys, values, window=0, chunk=0, scale=0.1)  # noqa: E731, B023
        work()
        found[f"{batch} x {context}"] = milliseconds(work, device)
    return found


def rows(record: Record, device: torch.device) -> None:
    """The kernels that take rows."""
    for dtype in kinds(device):
        record.step(f"kv_write, {dtype}", lambda dtype=dtype: written(dtype, device))
    sizes = (4096, 128_256) if device.type == "cuda" else (61, 700)
    for size in sizes:
        for dtype in (torch.float32, torch.float64):
            record.step(f"probabilities, {size}, {dtype}", lambda n=size, dtype=dtype: made_likely(n, dtype, device))
            record.step(f"draws, {size}, {dtype}", lambda n=size, dtype=dtype: drawn(n, dtype, device))


def written(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    keys, values = torch.randn(8, 33, 128).transpose(0, 1), torch.randn(33, 8, 64)
    memory = torch.zeros(64, 8, 128), torch.zeros(64, 8, 64)
    slots = torch.randperm(64)[:33]
    there = [each.to(device, dtype) for each in (keys, values, *memory)]
    _, seconds = first_seconds(lambda: write_rows(*there, slots.to(device)), device)
    want = [m.to(dtype).index_copy_(0, slots, rows.to(dtype)) for m, rows in zip(memory, (keys, values), strict=True)]
    same = all(torch.equal(got.cpu(), each) for got, each in zip(there[2:], want, strict=True))
    return {"right": same, "first_seconds": seconds}


#: Ways to cut a distribution, timed one by one for one row and for sixteen.
CUTS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "greedy": {"temperature": 0.0},
}


@contextmanager
def stock_operators() -> Iterator[None]:
    before = os.environ.get("OUTRIDER_KERNELS")
    os.environ["OUTRIDER_KERNELS"] = "off"
    try:
        yield
    finally:
        os.environ.pop("OUTRIDER_KERNELS")
        if before is not None:
            os.environ["OUTRIDER_KERNELS"] = before


def made_likely(size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(size)
    logits = (torch.randn(len(CUTS), size, dtype=dtype) * 3).to(device)
    logits[:, 1::7] = float("-inf")
    params = [SamplingParams(**cut) for cut in CUTS.values()]  # type: ignore[arg-type]
    with stock_operators():
        want = target_probs(logits.double(), params)
    got, seconds = first_seconds(lambda: likely(logits, params), device)
    both = (got > 0) & (want > 0)
    error = float(((got.double() - want) / want)[both].abs().max())
    others = ((got > 0) != (want > 0)).sum(-1).tolist()
    found: dict[str, Any] = {
        "largest_relative_error": error,
        "tokens_kept_or_left_otherwise": dict(zip(CUTS, others, strict=True)),
        "right": error < (1e-10 if dtype == torch.float64 else 1e-4) and sum(others) <= 2,
        "first_seconds": seconds,
    }
    if dtype == torch.float32:
        for name, way in zip(CUTS, params, strict=True):
            for count in (1, 16):
                same = logits[:1].repeat(count, 1)
                found[f"ms, {name}, {count} rows"] = milliseconds(lambda: likely(same, [way] * count), device, 10)  # noqa: B023
    return found


def cuts(record: Record, device: torch.device) -> None:
    """Which entries and warps compute probabilities fastest."""
    size = 128_256 if device.type == "cuda" else 700
    for entries in (512, 1024, 2048, 4096):
        for warps in (4, 8, 16):
            record.step(
                f"{entries} entries, {warps} warps", lambda entries=entries, warps=warps: cut(size, entries, warps, device)
            )


def cut(size: int, entries: int, warps: int, device: torch.device) -> dict[str, Any]:
    before = sampling._PROBABILITY_ENTRIES, sampling._PROBABILITY_WARPS
    sampling._PROBABILITY_ENTRIES, sampling._PROBABILITY_WARPS = entries, warps
    try:
        return made_likely(size, torch.float32, device)
    finally:
        sampling._PROBABILITY_ENTRIES, sampling._PROBABILITY_WARPS = before


def likely(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    cuts = ([getattr(each, name) for each in params] for name in ("top_k", "top_p", "min_p"))
    return sampling.target_probs(logits, [0.0 if each.greedy else each.temperature for each in params], *cuts)


def drawn(size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Draws and debts beside those of stock operators with the same bits of noise; the reference is on the CPU."""
    torch.manual_seed(size)
    probs = (torch.randn(16, size, dtype=dtype) * 4).softmax(-1)
    probs[:, ::3] = 0
    bits = torch.from_numpy(noise.mix_fields(torch.arange(80).view(16, 5).numpy().astype("uint64")))
    there = probs.to(device), bits.to(device)
    raced, seconds = first_seconds(lambda: sampling.race(*there).cpu(), device)
    inverted = sampling.invert(*there).cpu()
    with stock_operators():
        same = [
            int((raced == noise.gumbel_max(probs, bits)).sum()),
            int((inverted == noise.invert_cdf(probs, bits)).sum()),
        ]
        p, q = probs[:6].double().view(2, 3, -1), probs[6:12].double().view(2, 3, -1)
        weight = torch.rand(2, 3, dtype=torch.float64)
        mass = owed_mass(p, q, weight)
        want = torch.stack([residual(p[:, i], q[:, i], weight[:, i]) for i in range(3)], 1)
    given = p.to(device, dtype), q.to(device, dtype), weight.to(device, dtype)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    found = {
        "draws_as_on_the_cpu": same,
        "owed_mass": beside(sampling.owed_mass(*given).cpu(), mass, bound),
        "owed_probs": beside(sampling.owed_probs(*given).cpu(), want, bound),
        "first_seconds": seconds,
        "ms, race, 16 rows": milliseconds(lambda: sampling.race(*there), device),
        "ms, invert, 16 rows": milliseconds(lambda: sampling.invert(*there), device),
    }
    found["right"] = min(same) == 16 and found["owed_mass"]["right"] and found["owed_probs"]["right"]
    return found


def beside(got: Tensor, want: Tensor, bound: float) -> dict[str, Any]:
    """How far results are from those in float64, by their norms and in the worst number."""
    apart = got.double() - want
    error = float(apart.norm() / want.norm())
    return {"right": error < bound, "error": error, "bound": bound, "worst": float(apart.abs().max())}
