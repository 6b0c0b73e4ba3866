"""The KV tensors: what is written to a slot is what is read from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.cache.pool import KVPool


def rows(values: list[float], heads: int = 2, dim: int = 3) -> Tensor:
    """[n, heads, dim] rows that tell slot, head and dimension apart."""
    grid = torch.arange(heads * dim, dtype=torch.float64).view(1, heads, dim) / 100
    return torch.tensor(values, dtype=torch.float64)[:, None, None] + grid


def filled(num_slots: int, layers: tuple[int, ...] = (0,)) -> KVPool:
    pool = KVPool(num_slots)
    for layer in layers:
        values = [1000.0 * layer + slot for slot in range(num_slots)]
        pool.write(layer, rows(values), rows([-v for v in values], dim=2), torch.arange(num_slots))
    return pool


def held(pool: KVPool, layer: int = 0) -> list[int]:
    keys, values = pool.read(layer, slice(0, pool.num_slots))
    found = keys[:, 0, 0]
    assert torch.equal(values[:, 0, 0], -found), "keys and values moved together"
    assert torch.equal(keys, rows(found.tolist()))
    return [int(v) for v in found]


def test_written_rows_are_read_back_by_slot_in_any_order() -> None:
    pool = KVPool(10)
    pool.write(3, rows([1, 2, 3]), rows([4, 5, 6], dim=5), torch.tensor([7, 0, 4]))
    keys, values = pool.read(3, torch.tensor([0, 4, 7, 0]))
    assert torch.equal(keys, rows([2, 3, 1, 2]))
    assert torch.equal(values, rows([5, 6, 4, 5], dim=5))


def test_a_slice_reads_the_same_without_copying() -> None:
    pool = filled(6)
    by_slice, by_index = pool.read(0, slice(2, 5)), pool.read(0, torch.tensor([2, 3, 4]))
    for one, other in zip(by_slice, by_index, strict=True):
        assert torch.equal(one, other)
    assert by_slice[0].data_ptr() == pool.read(0, slice(2, 3))[0].data_ptr()


def test_a_later_write_replaces_only_its_slots() -> None:
    pool = filled(4)
    pool.write(0, rows([70]), rows([-70], dim=2), torch.tensor([2]))
    assert held(pool) == [0, 1, 70, 3]


def test_layers_are_apart_and_take_the_shapes_they_are_given() -> None:
    pool = KVPool(4)
    pool.write(5, rows([1], heads=1, dim=4), rows([1], heads=1, dim=2), torch.tensor([0]))
    pool.write(2, rows([2]).float(), rows([2]).float(), torch.tensor([0]))
    assert pool.layers == [2, 5]
    assert pool.read(5, slice(0, 1))[0].shape == (1, 1, 4)
    assert pool.read(2, slice(0, 1))[0].dtype == torch.float32
    assert torch.equal(pool.read(5, slice(0, 1))[0], rows([1], heads=1, dim=4))


def test_moves_reach_every_layer() -> None:
    pool = filled(4, (0, 7))
    pool.move([3], [0])
    assert held(pool, 0) == [3, 1, 2, 3]
    assert held(pool, 7) == [7003, 7001, 7002, 7003]


@pytest.mark.parametrize(
    ("sources", "destinations", "left"),
    [
        ([1, 2, 3], [0, 1, 2], [1, 2, 3, 3, 4]),  # down by one: a copy from the top would smear
        ([0, 1, 2], [1, 2, 3], [0, 0, 1, 2, 4]),  # up by one: a copy from the bottom would smear
        ([0, 1], [1, 0], [1, 0, 2, 3, 4]),  # swap
        ([0, 1, 2], [1, 2, 0], [2, 0, 1, 3, 4]),  # cycle
        ([4, 4], [0, 1], [4, 4, 2, 3, 4]),  # one source for two
        ([2], [2], [0, 1, 2, 3, 4]),
        ([], [], [0, 1, 2, 3, 4]),
    ],
)
def test_overlapping_moves_read_everything_first(sources: list[int], destinations: list[int], left: list[int]) -> None:
    pool = filled(5)
    pool.move(sources, destinations)
    assert held(pool) == left


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_moves_equal_a_simultaneous_assignment(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    destinations = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    sources = [data.draw(st.integers(0, size - 1)) for _ in destinations]
    expected = list(range(size))
    for source, destination in zip(sources, destinations, strict=True):
        expected[destination] = source
    pool = filled(size)
    pool.move(sources, destinations)
    assert held(pool) == expected


def test_moving_before_anything_was_written_does_nothing() -> None:
    KVPool(4).move([0], [1])


def test_bytes_per_slot_counts_keys_and_values_of_all_layers() -> None:
    pool = KVPool(100)
    assert pool.bytes_per_slot() == 0
    pool.write(0, rows([1]), rows([1], dim=2), torch.tensor([0]))
    assert pool.bytes_per_slot() == (2 * 3 + 2 * 2) * 8
    pool.write(1, rows([1]).bfloat16(), rows([1]).bfloat16(), torch.tensor([0]))
    assert pool.bytes_per_slot() == (2 * 3 + 2 * 2) * 8 + 2 * (2 * 3) * 2
