"""Draft: a token tree with the law of every node, and scratch rows that are computed but are no candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Law(StrEnum):
    """Says how a draft token was chosen, which decides how it may be verified."""

    DETERMINISTIC = "deterministic"  # a function of the committed tokens
    SAMPLED = "sampled"  # drawn with keyed noise from exactly the given draft_probs
    COUPLED = "coupled"  # drawn with the target's own noise keys; accepted iff equal
    OPAQUE = "opaque"  # chosen somehow, blind to the target's noise


class Confidence(NamedTuple):
    """Says how sure a proposer was of a token."""

    best: float  # the largest probability of what the token and its siblings were chosen from
    token: float  # the probability of the token in it


@dataclass(frozen=True)
class ScratchRows:
    """Rows that a proposer wants computed beside its draft: no draft tokens, never verified, never part of the text."""

    token_ids: tuple[int, ...] = ()  # token of each row
    # What each row follows: -1 is the last committed token, i below the number of nodes is a node of the draft, and the
    # number of nodes + j is row j of these.
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


NO_SCRATCH = ScratchRows()


@dataclass(frozen=True)
class Draft:
    """A token tree in topological order, and the draws that proposed its nodes.

    A node is a row of the target's pass: a token at a place in the tree. A draw is one proposal of a node by a member, with
    the law by which the member chose it. Several members may propose the same node, so a node may have several draws.
    Verification tests draws, and the target computes nodes. Where one proposer drafts alone, draw i proposes node i.
    """

    token_ids: tuple[int, ...] = ()  # token of each node; siblings have unlike tokens
    # Node index of each node's parent, smaller than its own; -1 is the root, the token that the draft follows.
    parents: tuple[int, ...] = ()
    laws: tuple[Law, ...] = ()  # law of each draw
    # [num_draws, vocab_size] probabilities that each sampled draw was made from; None where none is. Siblings that one
    # member has sampled are drawn one after another without replacement, in the order of their draws, and all carry the
    # probabilities of the first: what the removal of its elder siblings makes of them follows from that.
    draft_probs: Tensor | None = None
    scratch: ScratchRows = NO_SCRATCH  # rows to compute beside it
    # How sure the proposer was of each draw, or nothing. It has no part in verification.
    confidences: tuple[Confidence, ...] = ()
    nodes: tuple[int, ...] = ()  # node of each draw. Left out, draw i proposes node i.
    members: tuple[int, ...] = ()  # which member made each draw. Left out, one member made all.

    def __post_init__(self) -> None:
        if not self.nodes and self.laws:
            object.__setattr__(self, "nodes", tuple(range(len(self.laws))))
        if not self.members and self.laws:
            object.__setattr__(self, "members", (0,) * len(self.laws))

    @staticmethod
    def chain(token_ids: Iterable[int], law: Law, draft_probs: Tensor | None = None) -> Draft:
        """A draft without branches whose nodes share one law."""
        tokens = tuple(int(token) for token in token_ids)
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)), (law,) * len(tokens), draft_probs)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_draws(self) -> int:
        """Proposals of nodes; more than nodes where members agree."""
        return len(self.laws)

    @property
    def num_members(self) -> int:
        """Members that drew, from the first to the last."""
        return max(self.members, default=-1) + 1

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
        """Returns what each of its rows follows: another row, or -1 for the root."""
        return self.parents + self.scratch.parents

    @property
    def is_chain(self) -> bool:
        """Tells whether its nodes have no branches."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def rows_are_chain(self) -> bool:
        """Tells whether all its rows, scratch rows included, follow one another."""
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
        """The first `count` nodes, whole since parents come before children, with their draws; without scratch rows."""
        kept = [draw for draw, node in enumerate(self.nodes) if node < count]
        if kept == list(range(len(kept))):
            probs = None if self.draft_probs is None else self.draft_probs[: len(kept)]
        else:
            probs = None if self.draft_probs is None else self.draft_probs[kept]
        return Draft(
            self.token_ids[:count],
            self.parents[:count],
            tuple(self.laws[draw] for draw in kept),
            probs,
            confidences=tuple(self.confidences[draw] for draw in kept) if self.confidences else (),
            nodes=tuple(self.nodes[draw] for draw in kept),
            members=tuple(self.members[draw] for draw in kept),
        )

    def with_scratch(self, count: int) -> Draft:
        """Returns the same nodes with the first `count` scratch rows."""
        scratch = ScratchRows(self.scratch.token_ids[:count], self.scratch.parents[:count])
        return replace(self, scratch=scratch)

    def opaque(self) -> Draft:
        """Returns the same guess without any claim on how it was drawn."""
        laws = (Law.OPAQUE,) * len(self.laws)
        return replace(self, laws=laws, draft_probs=None)

    def joined(self, tail: Draft, node: int) -> tuple[Draft, tuple[int, ...]]:
        """This draft with `tail` below `node`, and the node that each node of `tail` has become.

        A node that stands here already is shared: it keeps its draws and gains those of `tail`. The members of `tail` are
        others than those of this draft.
        """
        if not tail.num_rows:
            return self, ()
        tokens, parents, places = _shared_nodes(self, tail, node)
        if not self.num_rows and len(tokens) == len(tail):
            return tail, tuple(places)
        new, first = len(tokens), len(tokens) + len(self.scratch)
        above = [parent if parent < len(self) else parent - len(self) + new for parent in self.scratch.parents]
        for parent in tail.scratch.parents:
            above.append(parent - len(tail) + first if parent >= len(tail) else (node if parent < 0 else places[parent]))
        offset = self.num_members
        draft = Draft(
            tuple(tokens),
            tuple(parents),
            self.laws + tail.laws,
            _joined_probs(self, tail),
            scratch=ScratchRows(self.scratch.token_ids + tail.scratch.token_ids, tuple(above)),
            confidences=_joined_confidences(self, tail),
            nodes=self.nodes + tuple(places[own] for own in tail.nodes),
            members=self.members + tuple(offset + member for member in tail.members),
        )
        return draft, tuple(places)


EMPTY = Draft()


def depths_of(parents: Sequence[int]) -> list[int]:
    """Distance from the root of each row of a tree in topological order; children of the root (-1) have 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _shared_nodes(head: Draft, tail: Draft, node: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens and parents of both, `tail` below `node` of `head`, and the place of each node of `tail`."""
    tokens, parents, places = list(head.token_ids), list(head.parents), list[int]()
    known = {(parent, token): place for place, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    for token, parent in zip(tail.token_ids, tail.parents, strict=True):
        above = node if parent < 0 else places[parent]
        place = known.setdefault((above, token), len(tokens))
        if place == len(tokens):
            tokens.append(token)
            parents.append(above)
        places.append(place)
    return tokens, parents, places


def _joined_confidences(head: Draft, tail: Draft) -> tuple[Confidence, ...]:
    known = len(head.confidences) == head.num_draws and len(tail.confidences) == tail.num_draws
    return head.confidences + tail.confidences if known else ()


def _joined_probs(head: Draft, tail: Draft) -> Tensor | None:
    """Probabilities [num_draws, vocab_size] of both; zeros for the draws of the one that has none."""
    known = [draft.draft_probs for draft in (head, tail) if draft.draft_probs is not None]
    if not known:
        return None
    dtype = torch.promote_types(known[0].dtype, known[-1].dtype)  # so that neither is rounded
    wide = known[0].to(dtype)
    parts = [
        wide.new_zeros(draft.num_draws, wide.shape[-1]) if draft.draft_probs is None else draft.draft_probs.to(wide)
        for draft in (head, tail)
    ]
    return torch.cat(parts)
