"""A guess: a token tree, and for every node the law by which it was chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Law(StrEnum):
    """How a draft token was chosen, which decides how it may be verified."""

    DETERMINISTIC = "deterministic"  # a function of the committed tokens
    SAMPLED = "sampled"  # drawn with keyed noise from exactly the given draft_probs
    COUPLED = "coupled"  # drawn with the target's own noise keys; accepted iff equal
    OPAQUE = "opaque"  # chosen somehow, blind to the target's noise
    SCRATCH = "scratch"  # no candidate: a row the proposer wants computed beside the others


@dataclass(frozen=True)
class Draft:
    """A token tree in topological order.

    Attributes:
        token_ids: Token of each node.
        parents: Node index of each node's parent, smaller than its own; -1 is the last committed token.
        laws: Law of each node.
        draft_probs: [num_nodes, vocab_size] law that each sampled node was drawn from; None where none is. Sampled siblings
            are drawn one after another without replacement, in the order of their indices, and all carry the law of the
            first: what the removal of its elder siblings makes of it follows from that.
        expected_accepted: How many of its tokens the proposer expects to stand, if it has an opinion.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    laws: tuple[Law, ...] = ()
    draft_probs: Tensor | None = None
    expected_accepted: float | None = None

    @staticmethod
    def chain(token_ids: Iterable[int], law: Law, draft_probs: Tensor | None = None) -> Draft:
        """A draft without branches whose nodes share one law."""
        tokens = tuple(int(token) for token in token_ids)
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)), (law,) * len(tokens), draft_probs)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def depths(self) -> list[int]:
        """Distance of each node from the last committed token; its children have 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Tokens from the root to each node, the node's own included."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.token_ids, self.parents, strict=True):
            paths.append((token,) if parent < 0 else (*paths[parent], token))
        return paths

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        return max(self.depths, default=0)

    @property
    def candidate_laws(self) -> set[Law]:
        """The laws that occur, scratch rows aside."""
        return set(self.laws) - {Law.SCRATCH}

    def children(self, node: int) -> list[int]:
        """Candidate children of `node` (-1: the root), in order."""
        indices = range(node + 1, len(self.token_ids))
        return [i for i in indices if self.parents[i] == node and self.laws[i] is not Law.SCRATCH]

    def child(self, node: int, token_id: int) -> int | None:
        """The candidate child of `node` that carries `token_id`."""
        return next((child for child in self.children(node) if self.token_ids[child] == token_id), None)

    def first(self, count: int) -> Draft:
        """The first `count` nodes; whole, since parents come before children."""
        probs = None if self.draft_probs is None else self.draft_probs[:count]
        return Draft(self.token_ids[:count], self.parents[:count], self.laws[:count], probs)

    def opaque(self) -> Draft:
        """The same guess without any claim on how it was drawn."""
        laws = tuple(law if law is Law.SCRATCH else Law.OPAQUE for law in self.laws)
        return Draft(self.token_ids, self.parents, laws)


EMPTY = Draft()

#: The drafts of one step, in the order of the requests.
Drafts = Sequence[Draft]
