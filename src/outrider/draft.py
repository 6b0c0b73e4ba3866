"""A guess: a token tree, for every node the law by which it was chosen, and rows that are no guess but are computed too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Law(StrEnum):
    """How a draft token was chosen, which decides how it may be verified."""

    DETERMINISTIC = "deterministic"  # a function of the committed tokens
    SAMPLED = "sampled"  # drawn with keyed noise from exactly the given draft_probs
    COUPLED = "coupled"  # drawn with the target's own noise keys; accepted iff equal
    OPAQUE = "opaque"  # chosen somehow, blind to the target's noise


class Confidence(NamedTuple):
    """How sure a proposer was of a token.

    Attributes:
        best: The largest probability of what the token and its siblings were chosen from.
        token: The probability of the token in it.
    """

    best: float
    token: float


@dataclass(frozen=True)
class ScratchRows:
    """Rows that a proposer wants computed beside its draft: no draft tokens, never verified, never part of the text.

    Attributes:
        token_ids: Token of each row.
        parents: What each row follows: -1 is the last committed token, i below the number of nodes is a node of the draft,
            and the number of nodes + j is row j of these.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


NO_SCRATCH = ScratchRows()


@dataclass(frozen=True)
class Draft:
    """A token tree in topological order.

    Attributes:
        token_ids: Token of each node.
        parents: Node index of each node's parent, smaller than its own; -1 is the root, the token that the draft follows.
        laws: Law of each node.
        draft_probs: [num_nodes, vocab_size] probabilities that each sampled node was drawn from; None where none is.
            Sampled siblings are drawn one after another without replacement, in the order of their indices, and all carry
            the probabilities of the first: what the removal of its elder siblings makes of them follows from that.
        expected_accepted: How many of its tokens the proposer expects to stand, if it has an opinion.
        scratch: Rows to compute beside it.
        confidences: How sure the proposer was of each node, or nothing. It has no part in verification.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    laws: tuple[Law, ...] = ()
    draft_probs: Tensor | None = None
    expected_accepted: float | None = None
    scratch: ScratchRows = NO_SCRATCH
    confidences: tuple[Confidence, ...] = ()

    @staticmethod
    def chain(token_ids: Iterable[int], law: Law, draft_probs: Tensor | None = None) -> Draft:
        """A draft without branches whose nodes share one law."""
        tokens = tuple(int(token) for token in token_ids)
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)), (law,) * len(tokens), draft_probs)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows that the target computes for it: nodes and scratch rows."""
        return len(self.token_ids) + len(self.scratch)

    @property
    def row_token_ids(self) -> tuple[int, ...]:
        """Tokens of all its rows, nodes first."""
        return self.token_ids + self.scratch.token_ids

    @property
    def row_parents(self) -> tuple[int, ...]:
        """What each of its rows follows: another row, or -1 for the root."""
        return self.parents + self.scratch.parents

    @property
    def is_chain(self) -> bool:
        """Whether its nodes have no branches."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def rows_are_chain(self) -> bool:
        """Whether all its rows, scratch rows included, follow one another."""
        return self.is_chain and not self.scratch.token_ids

    @property
    def depths(self) -> list[int]:
        """Distance of each node from the root; its children have 1."""
        return depths_of(self.parents)

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
    def deepest(self) -> int:
        """The first node among those that are farthest from the root; -1 for an empty draft."""
        depths = self.depths
        return depths.index(max(depths)) if depths else -1

    def children(self, node: int) -> list[int]:
        """Children of `node` (-1: the root), in order."""
        return [i for i in range(node + 1, len(self.token_ids)) if self.parents[i] == node]

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that carries `token_id`."""
        return next((child for child in self.children(node) if self.token_ids[child] == token_id), None)

    def first(self, count: int) -> Draft:
        """The first `count` nodes, whole since parents come before children; without scratch rows."""
        probs = None if self.draft_probs is None else self.draft_probs[:count]
        kept = self.token_ids[:count], self.parents[:count], self.laws[:count]
        return Draft(*kept, probs, confidences=self.confidences[:count])

    def with_scratch(self, count: int) -> Draft:
        """The same nodes with the first `count` scratch rows."""
        scratch = ScratchRows(self.scratch.token_ids[:count], self.scratch.parents[:count])
        return replace(self, scratch=scratch)

    def opaque(self) -> Draft:
        """The same guess without any claim on how it was drawn."""
        laws = (Law.OPAQUE,) * len(self.token_ids)
        return replace(self, laws=laws, draft_probs=None)

    def extended(self, tail: Draft) -> Draft:
        """This draft going on with `tail` behind its deepest node; its scratch rows come first."""
        if not self.num_rows:
            return tail
        if not tail.num_rows:
            return self
        size, end, both = len(self), self.deepest, len(self) + len(tail)
        scratch = ScratchRows(
            self.scratch.token_ids + tail.scratch.token_ids,
            (
                *(parent if parent < size else parent + len(tail) for parent in self.scratch.parents),
                *(
                    _moved(parent, end, size if parent < len(tail) else size + len(self.scratch))
                    for parent in tail.scratch.parents
                ),
            ),
        )
        assert all(parent < both + len(scratch) for parent in scratch.parents), "scratch rows follow rows"
        return Draft(
            self.token_ids + tail.token_ids,
            self.parents + tuple(_moved(parent, end, size) for parent in tail.parents),
            self.laws + tail.laws,
            _joined_probs(self, tail),
            scratch=scratch,
            confidences=self.confidences + tail.confidences if self.confidences and tail.confidences else (),
        )


EMPTY = Draft()

#: The drafts of one step, in the order of the requests.
Drafts = Sequence[Draft]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Distance from the root of each row of a tree in topological order; children of the root (-1) have 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _moved(parent: int, root: int, offset: int) -> int:
    return root if parent < 0 else parent + offset


def _joined_probs(head: Draft, tail: Draft) -> Tensor | None:
    """Probabilities [num_nodes, vocab_size] of both; zeros for the nodes of the one that has none."""
    known = [draft.draft_probs for draft in (head, tail) if draft.draft_probs is not None]
    if not known:
        return None
    dtype = torch.promote_types(known[0].dtype, known[-1].dtype)  # so that neither is rounded
    wide = known[0].to(dtype)
    parts = [
        wide.new_zeros(len(draft), wide.shape[-1]) if draft.draft_probs is None else draft.draft_probs.to(wide)
        for draft in (head, tail)
    ]
    return torch.cat(parts)
