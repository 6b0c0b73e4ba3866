"""The tokens that the output layer of a draft computes, where the vocabulary is large.

The output layer of a small model with a large vocabulary may be a third of what a pass reads. For a head that uses the
target's, it is most of what a draft token reads. Most of its tokens are hardly ever written. A draft may leave them out:
its law is zero there, and a text is distributed as the target's whatever law a draft is drawn from (FR-Spec, Zhao et al.
2025; VocabTrim, Goel et al. 2025).

Tokenizers number tokens in the order of their merges, or of their scores, which is that of how often texts use them. So
the first tokens are taken, and the added ones, which end turns; and then those that texts contain, since a text that has
used a rare token is likely to use it again. Tokens are taken in the groups that kernels compute together, so that no weight
is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from outrider.loading.loaded_model import LoadedModel
from outrider.model.target import Target

#: The first tokens that are computed where nobody says how many.
USUAL_SIZE = 49_152
#: Vocabularies of fewer tokens are computed whole, unless somebody says how many: leaving some out would save little.
_LEAST_WHOLE = 2 * USUAL_SIZE

#: The setting of methods: how many of the first tokens.
VocabularySize = Annotated[int | None, Field(ge=0, description="Use 0 for all tokens, a number of tokens, or None.")]


def draft_vocabulary(size: int | None, model: LoadedModel | Target, at_once: int | None) -> DraftVocabulary | None:
    """The tokens that a draft's output layer computes. None where it computes all.

    Args:
        size: How many of the first tokens; 0 for all. None chooses.
        model: The model that has the layer.
        at_once: How many tokens its backend computes together. None where it cannot leave some out.
    """
    if size is None:
        size = USUAL_SIZE if model.vocab_size >= _LEAST_WHOLE else 0
    if at_once is None or not 0 < size < model.vocab_size:
        return None
    added = () if model.tokenizer is None else model.tokenizer.get_added_vocab().values()
    return DraftVocabulary(size, model.vocab_size, at_once, {*added, *model.eos_token_ids})


class DraftVocabulary:
    """Groups of tokens that have logits in a pass of a draft.

    Args:
        size: How many of the first tokens always have some.
        vocab_size: All tokens.
        at_once: The tokens of a group.
        always: Other tokens that always have some.

    Those of texts that were seen last have some too, in at most half as many groups as the first tokens fill.
    """

    def __init__(self, size: int, vocab_size: int, at_once: int, always: Iterable[int]) -> None:
        self._at_once, self._first = at_once, -(-size // at_once)
        self._num_groups = -(-vocab_size // at_once)
        self._always = {token // at_once for token in always if token < vocab_size}
        self._seen: dict[int, None] = {}  # the last one is that of the token that was seen last
        self._read: dict[int, int] = {}  # tokens of each sequence that were seen
        self._panels: np.ndarray | None = None

    def see(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Take in the tokens of a text, which has grown since the last time."""
        known = self._read.get(seq_id, 0)
        if len(token_ids) <= known:
            return
        self._read[seq_id] = len(token_ids)
        new = dict.fromkeys(token // self._at_once for token in token_ids[known:])
        groups = [group for group in new if self._first <= group < self._num_groups and group not in self._always]
        if groups and self._panels is not None and any(group not in self._seen for group in groups):
            self._panels = None
        for group in groups:
            self._seen.pop(group, None)
            self._seen[group] = None
        while len(self._seen) > self._first // 2:
            del self._seen[next(iter(self._seen))]
            self._panels = None

    def forget(self, seq_id: int) -> None:
        """A text has ended. Its tokens stay, since the next text may be about the same."""
        self._read.pop(seq_id, None)

    @property
    def panels(self) -> np.ndarray:
        """int64 [n, 2] ascending ranges of groups, as passes take them."""
        if self._panels is None:
            groups = np.array(sorted({*range(self._first), *self._always, *self._seen}), np.int64)
            ends = np.append(np.flatnonzero(np.diff(groups) > 1), len(groups) - 1)
            begins = np.append(0, ends[:-1] + 1)
            self._panels = np.ascontiguousarray(np.stack([groups[begins], groups[ends] + 1], 1))
        return self._panels
