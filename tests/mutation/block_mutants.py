"""Bugs planted in heads that draft whole blocks: which features, which rows, which norm, which layers."""

from __future__ import annotations

from tests.mutation.mutants import Mutant


def _mutant(name: str, path: str, old: str, new: str) -> Mutant:
    return Mutant(name, 0, path, old, new, "blocks_make_the_drafts")


_DRAFTS, _HEAD = "propose/parallel.py", "heads/block.py"
BLOCK_MUTANTS = (
    _mutant(
        "what is kept of a text comes from rows that were rejected",
        "propose/beside_target.py",
        "seen.aux_hidden_states[layer][rows_at(places)]",
        "seen.aux_hidden_states[layer][-len(places) :]",
    ),
    _mutant(
        "rows of a block see no later rows",
        "heads/formats/zlab.py",
        "causal_in_windows if kind == SLIDING else causal",
        "True",
    ),
    _mutant(
        "what is kept of a text passes the norm before attention",
        _HEAD,
        "layer.keys_and_values(LayerInput(rows, rows), where)",
        "layer.keys_and_values(layer.enter(rows), where)",
    ),
    _mutant(
        "ids of layers name what enters them",
        "heads/formats/zlab.py",
        "aux_layers=tuple(i + 1 for i in ids)",
        "aux_layers=tuple(ids)",
    ),
    _mutant("features are not normed", "heads/block_networks.py", "self.hidden_norm(self.fc(", "(self.fc("),
    _mutant("a window is one place wider", _HEAD, "ahead.abs() < reach.window", "ahead.abs() <= reach.window"),
    _mutant(
        "a block ends with the last token of the text",
        _HEAD,
        "(block.token, *[mask] * (count - 1))",
        "(*[mask] * (count - 1), block.token)",
    ),
    _mutant("tokens are drafted a place too early", _HEAD, "initial=self.network.ahead", "initial=0"),
    _mutant("rows of a block stand at one position", _HEAD, "[block.position + i for", "[block.position for"),
    _mutant(
        "a draft behind another one takes its places",
        _DRAFTS,
        "wanted_places(growth, len(others))",
        "wanted_places(growth, 0)",
    ),
    Mutant(
        "values of Gemma 4 are keys behind their norm and positions",
        0,
        "heads/block_networks.py",
        "return rotated(self.k_norm(keys), rotary), self.v_norm(values)",
        "found = rotated(self.k_norm(keys), rotary)\n        return found, found if self._values_are_keys else values",
        "gemma_layers_are_those_of_transformers",
    ),
)
