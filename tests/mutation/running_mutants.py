"""Bugs planted in models with a running state: what a rejected draft leaves behind in it."""

from __future__ import annotations

from tests.mutation.mutants import PROBE_DIFFERS, Mutant, Refusal


def _mutant(name: str, path: str, old: str, new: str, killer: str, refused: Refusal | None = None) -> Mutant:
    return Mutant(name, 13, path, old, new, killer, refused=refused)


_CACHE = "cache/running.py"
RUNNING_MUTANTS = (
    _mutant(
        "rejected rows stay in a running state",
        _CACHE,
        "self.rows(anchor.position, position))",
        "self.tape)",
        "running_chain",
    ),
    _mutant(
        "accepted rows are left out of the window of a convolution",
        "model/running.py",
        "return torch.cat([state, inputs])[len(inputs) :].clone()",
        "return state.clone()",
        "running_chain",
    ),
    _mutant(
        "the accepted path of a tree is not moved to the front of the tape",
        _CACHE,
        "tape=tuple(each[kept] for each in self.tape)",
        "tape=self.tape",
        "running_tree",
        PROBE_DIFFERS,
    ),
    _mutant(
        "siblings of a tree change one state after another",
        "model/running.py",
        "return row - 1 if self.parents is None else self.parents[row]",
        "return row - 1",
        "running_tree",
        PROBE_DIFFERS,
    ),
    _mutant(
        "a state is kept with the block before its own",
        "cache/state.py",
        "self.block_table[place // size - 1], text",
        "self.block_table[place // size - 2], text",
        "running_prefixes",
    ),
    _mutant(
        "a kept state lacks the window of the convolution",
        _CACHE,
        "(Anchor(position, state),), position, empty",
        "(Anchor(position, state * 0),), position, empty",
        "running_prefixes",
    ),
    _mutant(
        "a kept state is given away and then written",
        "cache/blocks.py",
        "return self._states[block].fork()",
        "return self._states[block]",
        "running_prefixes",
    ),
    _mutant(
        "a hit ends at a kept state whose blocks the layers ahead do not hold",
        "cache/blocks.py",
        "if block is None or not needs <= self._held[block]:",
        "if block is None or (self.states is None and not needs <= self._held[block]):",
        "running_prefixes_of_layers_ahead",
    ),
    _mutant(
        "the feature of the token before a hit is forgotten",
        "propose/beside_target.py",
        "return self._last_features(sequence) if text.start else",
        "return self._last_features(sequence) if sequence.seq_id in self._features else",
        "running_prefixes_of_layers_ahead",
    ),
    _mutant(
        "the feature kept with a block is that of the last token read",
        "cache/memory.py",
        "features[[end - stop - 1 for end in ends]]",
        "features[[-1 for end in ends]]",
        "running_prefixes_of_layers_ahead",
    ),
)
