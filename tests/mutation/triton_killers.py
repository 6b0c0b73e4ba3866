"""Checks that a bug in the kernels for GPUs must turn red, run by Triton's interpreter."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest


def triton_attention_is_its_definition() -> None:
    """Rows of scattered blocks, chunks, trees, windows and sinks."""
    from tests.unit import test_triton_attention as attention

    for way in attention.WAYS[:2]:
        attention.test_every_row_attends_to_what_it_sees(way)


def triton_attention_has_bits_of_its_own() -> None:
    """Neither the batch, nor the chunk, nor the tree that a row is computed in has a part in its bits."""
    from tests.unit import test_triton_attention as attention

    with attention.pytest.MonkeyPatch.context() as patch:
        attention.test_the_bits_of_a_row_do_not_depend_on_what_else_attends(patch)
    attention.test_a_tree_has_the_bits_of_its_paths()
    attention.test_what_a_row_does_not_see_may_be_infinite()


def triton_probabilities_are_the_stock_ones() -> None:
    """The same tokens stay, and they are as probable."""
    from tests.unit import test_triton_sampling as sampling

    _stock()
    for size, dtype in (
        (61, sampling.torch.float64),
        (sampling.sampling._PROBABILITY_ENTRIES + 9, sampling.torch.float32),
    ):
        sampling.test_probabilities_are_the_stock_ones(size, dtype)


def triton_draws_are_the_stock_ones() -> None:
    """The same noise draws the same tokens, and the same is owed."""
    from tests.unit import test_triton_sampling as sampling

    _stock()
    sampling.test_draws_have_the_noise_of_the_stock_ones()
    sampling.test_debts_are_the_stock_ones()


def _stock() -> None:
    os.environ["OUTRIDER_KERNELS"] = "off"


def triton_rows_are_kept() -> None:
    """Keys and values lie in the slots of their rows."""
    from tests.unit import test_triton_attention as attention

    attention.test_keys_and_values_go_to_their_slots()


def triton_norms_and_rotations_are_the_stock_ones() -> None:
    """Every form of a norm, and the halves of heads."""
    from tests.unit import test_triton_rows as rows

    for kind in rows.NORMS:
        rows.test_norms_are_those_of_transformers(kind, rows.torch.float16)
    rows.test_rotations_are_those_of_transformers(rows.torch.float32)


def triton_graphs_replay_the_pass() -> None:
    """Other tokens, tables, windows and wanted rows than those of the pass that was recorded."""
    from tests.model import test_graphs as graphs

    with pytest.MonkeyPatch.context() as patch, graphs.replaying(patch) as found, tempfile.TemporaryDirectory() as folder:
        graphs.test_what_is_launched_again_is_what_the_pass_computes("gemma2", Path(folder), found, patch)
