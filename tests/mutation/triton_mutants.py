"""Bugs planted in the kernels for GPUs."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

_LAW, _BITS, _KEPT = "triton_attention_is_its_definition", "triton_attention_has_bits_of_its_own", "triton_rows_are_kept"


def _mutant(name: str, killer: str, old: str, new: str, file: str = "kernels/triton/attention.py") -> Mutant:
    return Mutant(name, 0, file, old, new, killer)


def _probs(name: str, old: str, new: str) -> Mutant:
    return _mutant(name, "triton_probabilities_are_the_stock_ones", old, new, "kernels/triton/sampling.py")


def _draws(name: str, old: str, new: str) -> Mutant:
    return _mutant(name, "triton_draws_are_the_stock_ones", old, new, "kernels/triton/sampling.py")


def _rows(name: str, old: str, new: str) -> Mutant:
    return _mutant(name, "triton_norms_and_rotations_are_the_stock_ones", old, new, "kernels/triton/rows.py")


def _graphs(name: str, old: str, new: str, file: str = "model/graphs.py") -> Mutant:
    return _mutant(name, "triton_graphs_replay_the_pass", old, new, file)


_TILES = "kernels/triton/attention.py"

TRITON_MUTANTS = (
    _mutant("a row does not see itself", _LAW, "seen = (places <= own[:, None])", "seen = (places < own[:, None])"),
    _mutant("the last position of a split is left out", _LAW, "(split + 1) * SPLIT,", "(split + 1) * SPLIT - 1,"),
    _mutant("all texts have the blocks of the first", _LAW, "tables + table_at + places", "tables + places"),
    _mutant("a sink takes no weight", _LAW, "        totals += 1\n", ""),
    _mutant("scores are not capped", _LAW, "if SOFTCAP > 0:", "if SOFTCAP > 1e9:"),
    _mutant("a tree's row sees the rows before it", _LAW, "at < start, at, start + behind", "at < start, at, at"),
    _mutant("a window is one position wider", _LAW, "tiles.positions - window + 1", "tiles.positions - window"),
    _mutant("a split is not scaled as it is folded in", _LAW, "here * now[:, None]", "here"),
    _mutant("query heads go with other key-value heads", _LAW, "tl.program_id(1), tl.program_id(2)", "0, tl.program_id(2)"),
    _mutant("tiles begin where the first row's window does", _BITS, "tl.min(first, 0) // TILE * TILE", "tl.min(first, 0)"),
    _mutant("splits overlap", _LAW, "split * SPLIT, tl.min", "split * (SPLIT - 2), tl.min"),
    _mutant("what a row does not see spoils it", _BITS, "tile = tl.where(sound[:, None] > 0, tile, 0.0)", "tile = tile"),
    _mutant("what a row sees does not spoil it", _BITS, 'float("nan"), sums)', "sums, sums)"),
    _probs("the k-th largest entry is left out", "_key(values, BITS) >= floor", "_key(values, BITS) > floor"),
    _probs("more than the nucleus stays", "limit = nucleus * mass", "limit = (nucleus + 0.1) * mass"),
    _probs("all that are equal to the edge stay", "tl.cumsum(tied, 0) <= ties)", "tl.cumsum(tied, 0) <= size)"),
    _probs("equal entries are counted anew in each part", "        before += tl.sum(tied, 0)\n", ""),
    _probs("zeros of both signs differ", "    values = tl.where(values == 0, 0.0, values)\n", ""),
    _probs("all of equals are the likeliest", "(at == best).to", "(tl.load(logits + at, at < size, 0.0) == largest).to"),
    _probs("min_p cuts what top_p has cut", "(smallest > edge)", "(smallest < edge)"),
    _draws("noise begins with another token", "(at + 1).to(tl.uint64)", "at.to(tl.uint64)"),
    _draws("noise is mixed less", "(x >> 27)) * 0x94D049BB133111EB", "(x >> 27))"),
    _draws("the walk begins anew in each part", "        before += tl.sum(p, 0)\n", ""),
    _draws("a debt is not weighed", "owed = tl.maximum(weight * wanted", "owed = tl.maximum(wanted"),
    _mutant("values lie with the heads of keys", _KEPT, "row * value_row", "row * key_row", "kernels/triton/attention.py"),
    _rows("a norm is rounded once", "normed = _rounded(normed, out)", "normed = normed"),
    _rows("the weight of a norm is its own", "factors = factors + 1.0", "factors = factors"),
    _rows("a norm's mean is that of the padded row", "/ SIZE + eps", "/ PADDED + eps"),
    _rows(
        "the halves of a head turn alike",
        "_rounded(near, out) - _rounded(far, out)",
        "_rounded(near, out) + _rounded(far, out)",
    ),
    _graphs(
        "the wanted rows are the first ones", "np.resize(batch.wanted, self._shape.logits)", "np.arange(self._shape.logits)"
    ),
    _graphs("the block tables are those that came first", "        self._attention.rewrite(pass_rows(filled))\n", ""),
    _graphs("windows begin where they began", "        self._seen_from.clear()\n", "", _TILES),
    _graphs(
        "a pass is written over by the next one", "[: batch.logits_spans[-1][1]].clone()", "[: batch.logits_spans[-1][1]]"
    ),
    _graphs("hidden states are written over", "states[: batch.num_rows].clone()", "states[: batch.num_rows]"),
    _graphs("old numbers stay behind shorter lists", "        here.fill(0)\n", "", "kernels/triton/devices.py"),
)
