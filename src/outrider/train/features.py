"""What heads read of the target, and what the target says: computed, or as it was kept with the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.errors import ContradictionError
from outrider.train.batches import Batch
from outrider.train.manifest import Manifest
from outrider.train.records import hidden_name
from outrider.train.target import FrozenTarget


class Features:
    """Hidden states and logits of the target.

    Args:
        target: The target.
        manifest: Of the data.
        source: "forward" runs the target on every batch; "hidden_states" takes the states from the data, and runs the
            output layer on those of the final norm.
        layers: Whose states are read, by transformers' index.

    Attributes:
        rows: Names of what the data must hold.

    Raises:
        ContradictionError: The data do not hold what `source` says.
    """

    def __init__(self, target: FrozenTarget, manifest: Manifest, source: str, layers: Sequence[int]) -> None:
        self._target = target
        self._layers = sorted(set(layers))
        self._kept = source != "forward"
        needed = sorted({*layers, target.num_layers})
        there = set(manifest.settings.hidden_states)
        if self._kept and (source != "hidden_states" or not there.issuperset(needed)):
            problem = f"heads learn from the hidden states of layers {needed}, and the data hold {sorted(there)}"
            raise ContradictionError("teacher", source, problem, "Use teacher='forward', or make other data.")
        self.rows = tuple(hidden_name(layer) for layer in needed) if self._kept else ()

    @torch.no_grad()
    def read(self, batch: Batch) -> tuple[dict[int, Tensor], Tensor]:
        """Hidden states [num_texts, num_tokens, hidden_size] by layer, and the logits [num_texts, num_tokens, vocab_size].

        What was kept has no row for the last token; there the one before stands in, which nobody may read.
        """
        if not self._kept:
            return self._target.states(batch.token_ids, self._layers)
        states = {layer: _with_last(batch.rows[hidden_name(layer)]) for layer in self._layers}
        last = _with_last(batch.rows[hidden_name(self._target.num_layers)])
        return states, self._target.head(last.flatten(0, 1)).reshape(*last.shape[:2], -1)


def _with_last(kept: Tensor) -> Tensor:
    return torch.cat([kept, kept[:, -1:]], 1)
