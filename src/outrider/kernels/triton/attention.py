"""Attention on a GPU over the paged KV memory: the tiles of rows, the kernel, and the writing of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.decoder import PassRows
from outrider.kernels.triton.devices import KNOWN_DTYPES, Numbers

# --- Attention of the rows of a pass over the paged KV memory, on a GPU.
#
# A program computes what the rows of a tile find in one split of their texts, for the query heads that share a KV head.
# A second kernel folds the splits of a row, in their order. Splits and the tiles of positions in them have fixed sizes
# and begin at the first position of the text, and positions that a row does not see add exact zeros. So the bits of a
# row are a function of its text, and not of the batch, of the number of rows, or of the chunk or draft that it is
# computed in.
#
# A tree's rows share the tiles before the first of them. Behind that each row gathers its own path, so that its
# positions lie in the same columns as those of a chain.


#: Positions of a split, and of a tile in it.
SPLIT, TILE = 256, 64
#: Rows of a tile times the query heads that share a KV head, at most; fewer for wide heads, which take more registers.
QUERIES, QUERIES_OF_WIDE_HEADS = 64, 32
#: Bytes that what is found in the splits may take. Where there are more rows, they attend in several turns.
FOUND_BYTES = 64 * 2**20
#: A product and a sum are rounded one after the other, so that the bits are those of the source, however it is compiled.
OPTIONS = {"enable_fp_fusion": False}
#: Tiles of keys and values under way at a time. Those of float32 would not fit into the shared memory.
STAGES, STAGES_OF_FLOAT32 = 3, 1
WIDEST_HEAD = 256


class TritonAttention:
    """Attention by the kernels for GPUs, see RowAttention.

    Args:
        rows: The rows. Their lists are copied to the device once for each number of query heads that share a KV head.
        room: Of lists that are written anew for other rows, as a CUDA graph needs it. None for lists of these rows alone.
    """

    knows_biases = False

    def __init__(self, rows: PassRows, device: torch.device, room: TileRoom | None = None) -> None:
        self._rows = rows
        self._device = device
        self._room = room
        self._tiles: dict[int, RowTiles] = {}
        self._seen_from: dict[tuple[int, int], Tensor] = {}

    def rewrite(self, rows: PassRows) -> None:
        """Attend for other rows from here on, which fit into the same room. Nobody waits for the device."""
        self._rows = rows
        self._seen_from.clear()
        for rows_at_once, tiles in self._tiles.items():
            tiles.rewrite(rows, rows_at_once)

    def takes(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        """One known dtype, one width, heads that fit into a tile."""
        same = query.dtype == keys.dtype == values.dtype and query.shape[-1] == keys.shape[-1] == values.shape[-1]
        fits = query.shape[-1] <= WIDEST_HEAD and query.shape[1] // keys.shape[1] <= QUERIES_OF_WIDE_HEADS
        return same and fits and query.dtype in KNOWN_DTYPES

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        window: int,
        chunk: int,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """See RowAttention."""
        query = query.contiguous()
        num_rows, num_heads, dim = query.shape
        group = num_heads // keys.shape[1]
        padded = max(triton.next_power_of_2(dim), 16)
        queries = QUERIES if padded <= 128 else QUERIES_OF_WIDE_HEADS
        tiles = self._tiles_of(queries // group)
        firsts = self._firsts(tiles, window, chunk)
        num_splits = triton.cdiv(tiles.longest, SPLIT)
        most_rows = max(FOUND_BYTES // (4 * num_heads * num_splits * (padded + 2)), queries // group)
        most_rows = most_rows if self._room is None else num_rows
        sums = torch.empty(min(most_rows, num_rows), num_heads, num_splits, padded, device=query.device)
        largest, totals = torch.empty(2, *sums.shape[:3], device=query.device)
        out = torch.empty_like(query)
        sizes = {"GROUP": group, "QUERIES": queries, "SPLIT": SPLIT, "DIM": dim, "PADDED": padded, **OPTIONS}
        stages = STAGES_OF_FLOAT32 if query.dtype == torch.float32 else STAGES
        for begin, end, first_row in tiles.turns(len(sums)):
            here = tiles.tiles[begin:end]
            _find[(end - begin, keys.shape[1], num_splits)](
                query, keys, values, firsts, here, tiles.positions, tiles.path_at, tiles.paths, tiles.tables,
                sums, largest, totals, first_row, scale,
                SOFTCAP=softcap or 0.0, TILE=TILE, BLOCK=tiles.block_size, TREES=tiles.has_trees, num_stages=stages,
                **sizes,
            )  # fmt: skip
            _fold[(end - begin, keys.shape[1])](
                sums, largest, totals, query if sinks is None else sinks, firsts, here, tiles.positions, out,
                first_row, num_splits, SINKS=sinks is not None, **sizes,
            )  # fmt: skip
        return out

    def _tiles_of(self, rows_at_once: int) -> RowTiles:
        if rows_at_once not in self._tiles:
            self._tiles[rows_at_once] = RowTiles.of(self._rows, rows_at_once, self._device, self._room)
        return self._tiles[rows_at_once]

    def _firsts(self, tiles: RowTiles, window: int, chunk: int) -> Tensor:
        """The first position [num_rows] that each row sees."""
        if (window, chunk) not in self._seen_from:
            first = torch.zeros_like(tiles.positions)
            if window:
                first = (tiles.positions - window + 1).clamp_(min=0)
            if chunk:
                first = torch.maximum(first, tiles.positions // chunk * chunk)
            self._seen_from[window, chunk] = first
        return self._seen_from[window, chunk]


@triton.jit
def _slots(tables, table_at, places, inside, BLOCK: tl.constexpr):
    """The slots of places of a text: tokens in the order in which they lie in its blocks."""
    return tl.load(tables + table_at + places // BLOCK, inside, 0).to(tl.int64) * BLOCK + places % BLOCK


@triton.jit
def _scores(query, keys, offsets, inside, scale, SOFTCAP: tl.constexpr):
    """Scores of queries [QUERIES, PADDED] with the keys of a tile of positions, [QUERIES, TILE] in float32."""
    tile = tl.load(keys + offsets, inside, 0.0)
    scores = tl.dot(query, tl.trans(tile), input_precision="ieee") * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * (1 - 2 / (tl.exp(2 * scores / SOFTCAP) + 1))  # a scaled tanh
    return scores


@triton.jit
def _add(weights, seen, values, offsets, inside, sums):
    """Add the weighted values of a tile of positions to sums [QUERIES, PADDED].

    A weight of zero does not silence a value that is no number. So such values are left out, and queries that do see them
    get a sum that is no number.
    """
    tile = tl.load(values + offsets, inside, 0.0)
    sound = tl.min((tl.abs(tile) < float("inf")).to(tl.int32), 1)
    tile = tl.where(sound[:, None] > 0, tile, 0.0)
    spoilt = tl.max((seen & (sound[None, :] == 0)).to(tl.int32), 1)
    sums = tl.where(spoilt[:, None] > 0, float("nan"), sums)
    return tl.dot(weights.to(tile.dtype), tile, sums, input_precision="ieee")


@triton.jit
def _weigh(scores, seen, largest, totals):
    """The weights of a tile of positions, and what is found so far: the largest score, the factor of earlier sums, and the
    total of weights."""
    scores = tl.where(seen, scores, float("-inf"))
    most = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp(scores - shift[:, None])
    earlier = tl.exp(largest - shift)
    return weights, most, earlier, totals * earlier + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["first_row"])
def _find(
    query, keys, values,  # [num_rows, num_heads, DIM], [num_slots, num_kv_heads, DIM] twice
    firsts,  # [num_rows] the first position that each row sees
    tiles, positions, path_at, paths, tables,  # see RowTiles
    all_sums, all_largest, all_totals,  # [rows, num_heads, num_splits, PADDED], and twice without the last
    first_row,  # the row that these begin with
    scale,
    SOFTCAP: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    TREES: tl.constexpr, SPLIT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Computes what the rows of a tile find in a split of their text: sums of values, the largest score, the total of
    weights."""
    kv_head, split, num_splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    num_kv_heads = tl.num_programs(1)
    tiles += tl.program_id(0) * 4
    tile_row, num_rows, start, table_at = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2), tl.load(tiles + 3)

    turn = tl.arange(0, QUERIES) // GROUP  # of the tile's rows
    real = turn < num_rows
    rows = tile_row + turn
    own = tl.load(positions + rows, real, -1)
    first = tl.load(firsts + rows, real, 2147483647)
    begin = tl.maximum(split * SPLIT, tl.min(first, 0) // TILE * TILE)
    end = tl.minimum((split + 1) * SPLIT, tl.max(own, 0) + 1)
    if begin >= end:
        return

    dims, columns = tl.arange(0, PADDED), tl.arange(0, TILE)
    heads = kv_head * GROUP + tl.arange(0, QUERIES) % GROUP
    entry = rows.to(tl.int64) * (num_kv_heads * GROUP) + heads
    of_row = tl.load(query + entry[:, None] * DIM + dims, real[:, None] & (dims < DIM), 0.0)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    totals = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, PADDED], tl.float32)

    # Positions that all rows find in the same places: a chain's own, and those before a tree.
    shared_end = end
    if TREES:
        is_tree = tl.load(path_at + tile_row) >= 0
        shared_end = tl.where(is_tree, tl.minimum(end, tl.maximum(start // TILE * TILE, begin)), end)
    for at in range(begin, shared_end, TILE):
        places = at + columns
        inside = (places < end)[:, None] & (dims < DIM)
        slots = _slots(tables, table_at, places, places < end, BLOCK)
        offsets = (slots * num_kv_heads + kv_head)[:, None] * DIM + dims
        seen = (places <= own[:, None]) & (places >= first[:, None])
        scores = _scores(of_row, keys, offsets, inside, scale, SOFTCAP)
        weights, largest, earlier, totals = _weigh(scores, seen, largest, totals)
        sums = _add(weights, seen, values, offsets, inside, sums * earlier[:, None])
    if TREES:
        for at in range(shared_end, end, TILE):
            seen = (at + columns <= own[:, None]) & (at + columns >= first[:, None])
            scores = tl.full([QUERIES, TILE], float("-inf"), tl.float32)
            for row in range(num_rows):
                places, inside = _path(path_at, paths, tile_row + row, positions, start, at + columns)
                slots = _slots(tables, table_at, places, inside, BLOCK)
                offsets = (slots * num_kv_heads + kv_head)[:, None] * DIM + dims
                found = _scores(of_row, keys, offsets, inside[:, None] & (dims < DIM), scale, SOFTCAP)
                scores = tl.where((turn == row)[:, None], found, scores)
            weights, largest, earlier, totals = _weigh(scores, seen, largest, totals)
            sums = sums * earlier[:, None]
            for row in range(num_rows):
                places, inside = _path(path_at, paths, tile_row + row, positions, start, at + columns)
                slots = _slots(tables, table_at, places, inside, BLOCK)
                offsets = (slots * num_kv_heads + kv_head)[:, None] * DIM + dims
                added = _add(weights, seen & (turn == row)[:, None], values, offsets, inside[:, None] & (dims < DIM), sums)
                sums = tl.where((turn == row)[:, None], added, sums)

    found_at = (((rows - first_row).to(tl.int64) * (num_kv_heads * GROUP) + heads) * num_splits) + split
    tl.store(all_sums + found_at[:, None] * PADDED + dims, sums, real[:, None] & (dims < PADDED))
    tl.store(all_largest + found_at, largest, real)
    tl.store(all_totals + found_at, totals, real)


@triton.jit
def _path(path_at, paths, row, positions, start, at):
    """Finds where the positions `at` [TILE] on the path of a tree's row lie in its text, and which of them it has."""
    inside = at <= tl.load(positions + row)
    behind = tl.load(paths + tl.load(path_at + row) + at - start, inside & (at >= start), 0)
    return tl.where(at < start, at, start + behind), inside


@triton.jit(do_not_specialize=["first_row", "num_splits"])
def _fold(
    all_sums, all_largest, all_totals,  # as `_find` wrote them
    sinks,  # [num_heads], read with SINKS alone
    firsts, tiles, positions, out,  # [num_rows], see RowTiles twice, [num_rows, num_heads, DIM]
    first_row, num_splits,
    SINKS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SPLIT: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The attention of a tile's rows, from what they found in the splits of their text."""
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    tiles += tl.program_id(0) * 4
    turn = tl.arange(0, QUERIES) // GROUP
    rows, real = tl.load(tiles) + turn, turn < tl.load(tiles + 1)
    first, last = tl.load(firsts + rows, real, 2147483647) // SPLIT, tl.load(positions + rows, real, -1) // SPLIT
    heads, dims = kv_head * GROUP + tl.arange(0, QUERIES) % GROUP, tl.arange(0, PADDED)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    totals = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        largest = tl.load(sinks + heads).to(tl.float32)
        totals += 1
    sums = tl.zeros([QUERIES, PADDED], tl.float32)
    found_at = ((rows - first_row).to(tl.int64) * (num_kv_heads * GROUP) + heads) * num_splits
    for split in range(tl.min(first, 0), tl.max(last, 0) + 1):
        at, seen = found_at + split, (split >= first) & (split <= last)
        most = tl.maximum(largest, tl.load(all_largest + at, seen, float("-inf")))
        shift = tl.where(most == float("-inf"), 0.0, most)
        earlier, now = tl.exp(largest - shift), tl.exp(tl.load(all_largest + at, seen, float("-inf")) - shift)
        totals = totals * earlier + tl.load(all_totals + at, seen, 0.0) * now
        here = tl.load(all_sums + at[:, None] * PADDED + dims, seen[:, None] & (dims < DIM), 0.0)
        sums = sums * earlier[:, None] + here * now[:, None]
        largest = most
    entry = rows.to(tl.int64) * (num_kv_heads * GROUP) + heads
    attended = (sums / tl.where(real, totals, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out + entry[:, None] * DIM + dims, attended, real[:, None] & (dims < DIM))


# --- The rows of a pass as the kernel of attention reads them: in tiles of rows of one sequence.


#: Each part begins at a multiple of 16 bytes. Triton compiles a kernel anew for pointers that do and for those that do not.
ALIGNED = 4


@dataclass(frozen=True)
class TileRoom:
    """Room for the lists of any rows of a shape."""

    rows: int  # as many as there are
    splits: int  # of the longest text, at least
    tables: int  # entries of all block tables, at least
    paths: int  # entries of the paths of all trees, at least; 0 where no row is of a tree


@dataclass(frozen=True)
class RowTiles:
    """Rows of a pass on a device. All numbers are int32, and all tensors are parts of one, which is copied once."""

    # [num_tiles, 4] a tile's first row, how many rows it has, the tokens before the rows of its sequence, and where the
    # block table of the sequence begins. Where there is room for more, tiles without rows are the last.
    tiles: Tensor
    positions: Tensor  # [num_rows]
    path_at: Tensor  # [num_rows] where the path of a tree's row begins in `paths`; -1 for rows of a chain
    paths: Tensor  # for each row of a tree the rows of its sequence from its root to itself, by number within the sequence
    tables: Tensor  # the block tables, one after another
    spans: list[tuple[int, int]] | None  # (first, end) rows of each tile; None where all tiles attend at once
    longest: int  # the number of positions of the longest text
    has_trees: bool  # whether some rows are of a tree
    block_size: int  # tokens a block
    numbers: Numbers  # all of these numbers

    @classmethod
    def of(cls, rows: PassRows, rows_at_once: int, device: torch.device, room: TileRoom | None = None) -> RowTiles:
        """Tiles of at most `rows_at_once` rows each. With `room`, the lists of other rows may be written in their place."""
        parts, spans = _parts(rows, rows_at_once)
        sizes = list(map(len, parts))
        longest = max(rows.positions, default=-1) + 1
        if room is not None:
            sizes = [4 * room.rows, room.rows, room.rows, room.paths, room.tables]
            longest = room.splits * SPLIT
        numbers = Numbers(sizes, np.dtype(np.int32), device, ALIGNED)
        numbers.write(parts)
        tiles, positions, path_at, paths, tables = numbers.parts
        return cls(
            tiles=tiles.view(-1, 4),
            positions=positions,
            path_at=path_at,
            paths=paths,
            tables=tables,
            spans=spans if room is None else None,
            longest=longest,
            has_trees=bool(sizes[3]),
            block_size=rows.block_size,
            numbers=numbers,
        )

    def rewrite(self, rows: PassRows, rows_at_once: int) -> None:
        """Write the lists of other rows in the place of these."""
        self.numbers.write(_parts(rows, rows_at_once)[0])

    def turns(self, most_rows: int) -> Iterator[tuple[int, int, int]]:
        """(first tile, end, first row) of tiles that hold at most so many rows together, or one tile."""
        if self.spans is None:
            yield 0, len(self.tiles), 0
            return
        begin = 0
        for tile, (_, end_row) in enumerate(self.spans):
            if end_row - self.spans[begin][0] > most_rows and tile > begin:
                yield begin, tile, self.spans[begin][0]
                begin = tile
        if self.spans:
            yield begin, len(self.spans), self.spans[begin][0]


def _parts(rows: PassRows, rows_at_once: int) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """The lists of tiles, positions, beginnings of paths, paths and tables, and the rows of each tile."""
    path_at, paths = _paths(rows)
    tiles = [
        (first, min(rows_at_once, rows.first[segment + 1] - first), rows.start[segment], rows.table_at[segment])
        for segment in range(len(rows.start))
        for first in range(rows.first[segment], rows.first[segment + 1], rows_at_once)
    ]
    parts = [np.asarray(part, np.int32).reshape(-1) for part in (tiles, rows.positions, path_at, paths, rows.tables)]
    return parts, [(first, first + count) for first, count, _, _ in tiles]


def _paths(rows: PassRows) -> tuple[list[int], list[int]]:
    path_at, paths = [-1] * len(rows.positions), list[int]()
    for segment, at in enumerate(rows.ancestry_at):
        if at < 0:
            continue
        first, end = rows.first[segment], rows.first[segment + 1]
        sees = rows.ancestry[at : at + (end - first) ** 2].reshape(end - first, end - first)
        for row in range(end - first):  # ancestors come before their descendants, so they are in the order of positions
            path_at[first + row] = len(paths)
            paths += np.flatnonzero(sees[row]).tolist()
    return path_at, paths


# --- Writes the keys and values of new rows to their slots of the KV memory, on a GPU, in one launch.


def write_rows(keys: Tensor, values: Tensor, key_memory: Tensor, value_memory: Tensor, slots: Tensor) -> None:
    """Store keys and values [num_rows, num_kv_heads, dim] into memory [num_slots, num_kv_heads, dim].

    Args:
        keys, values: Of the new rows, of one dtype with the memory. The width of values may be another one.
        slots: [num_rows] int64, where each row goes.
    """
    if not len(keys):
        return
    keys, values = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (keys, values))
    sizes = keys.shape[1], keys.shape[2], values.shape[2]
    width = triton.next_power_of_2(sizes[0] * max(sizes[1:]))
    _write[(len(keys),)](
        keys, values, key_memory, value_memory, slots, *keys.stride()[:2], *values.stride()[:2],
        HEADS=sizes[0], KEY_DIM=sizes[1], VALUE_DIM=sizes[2], WIDTH=width,
    )  # fmt: skip


@triton.jit
def _write(
    keys, values, key_memory, value_memory, slots,  # see `write_rows`
    key_row, key_head, value_row, value_head,  # strides
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    slot = tl.load(slots + row)
    inside = at < HEADS * KEY_DIM
    key = tl.load(keys + row * key_row + at // KEY_DIM * key_head + at % KEY_DIM, inside)
    tl.store(key_memory + slot * (HEADS * KEY_DIM) + at, key, inside)
    inside = at < HEADS * VALUE_DIM
    value = tl.load(values + row * value_row + at // VALUE_DIM * value_head + at % VALUE_DIM, inside)
    tl.store(value_memory + slot * (HEADS * VALUE_DIM) + at, value, inside)
