"""Draft trees: the nodes of one that grows, the interface of tree builders, fixed shapes, and acceptance of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

from torch import Tensor

from outrider.draft import Confidence, Draft, Law, depths_of

# --- Draft trees in the making: the nodes, the interface of tree builders, and trees of a fixed shape.


#: Rows that a draft may ask for.
MAX_ROWS = 512

#: What the acceptance of a row depends on beside its probabilities: its law, and whether the target is greedy.
Mode = tuple[Law, bool]

#: Siblings whose chances are counted apart; later ones count as the last of these.
RANKS = 4


@dataclass
class Node:
    """A node of a growing draft."""

    token_id: int  # its token
    parent: int  # index of its parent, -1 for the root
    depth: int  # tokens from the root to it
    rank: int  # how many elder siblings it has
    place: int  # which node of a template it is, -1 where there is none
    chance: float = 1.0  # how likely the target's text reaches it, as far as its builder has an opinion


_ROOT = Node(-1, -1, 0, 0, -1)


@dataclass(frozen=True)
class NodeLaw:
    """Holds what the children of a node are chosen from."""

    row: Tensor  # [vocab_size] probabilities where they are drawn, else logits
    drawn: bool  # whether they are drawn

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities [vocab_size]."""
        return self.row if self.drawn else self.row.softmax(-1)

    @cached_property
    def likeliest(self) -> list[float]:
        """The largest probabilities above 0 in descending order, as many as there are ranks that are counted apart."""
        return [p for p in self.probs.topk(min(RANKS, len(self.row))).values.tolist() if p > 0.0]


@dataclass
class GrowingTree:
    """A tree of draft tokens in the making, as tree builders see it."""

    budget: int  # most nodes
    max_depth: int  # longest path
    mode: Mode  # what the acceptance of a row depends on beside its probabilities
    min_confidence: float = 0.0  # nothing is drafted behind a token whose own probability is smaller
    nodes: list[Node] = field(default_factory=list)  # so far
    # By node, -1 for the root: what its children are chosen from, where that is known.
    laws: dict[int, NodeLaw] = field(default_factory=dict)
    # By node: how likely a token behind it stands, where the proposer guesses that before the token is chosen.
    chances: dict[int, float] = field(default_factory=dict)
    level: list[int] = field(default_factory=list)  # nodes whose logits are wanted next, in ascending order; -1 is the root
    open: list[int] = field(default_factory=list)  # nodes that were added last, and may be wanted next
    template: tuple[tuple[int, ...], ...] = ()  # where the shape is fixed: the children of the root and then of each node

    @property
    def depth(self) -> int:
        """Length of its longest path so far."""
        return max((node.depth for node in self.nodes), default=0)

    @property
    def growing(self) -> bool:
        """Tells whether the logits of further nodes are wanted."""
        return bool(self.level)

    def node(self, index: int) -> Node:
        """A node, or the root for -1."""
        return _ROOT if index < 0 else self.nodes[index]

    def place(self, index: int) -> int:
        """Which node of the template a node is; -1 is the root."""
        return self.node(index).place

    def children(self, index: int) -> list[int]:
        """The children of a node so far, in order."""
        return [i for i in range(index + 1, len(self.nodes)) if self.nodes[i].parent == index]

    def path(self, index: int) -> tuple[int, ...]:
        """Tokens from below the root to a node."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.nodes[index].token_id)
            index = self.nodes[index].parent
        return tuple(reversed(tokens))

    def confidence(self, index: int) -> Confidence:
        """Returns how sure the proposer was at the place of a node, and of its token."""
        node = self.nodes[index]
        law = self.laws[node.parent]
        return Confidence(law.likeliest[0], float(law.probs[node.token_id]))

    def may_go_on(self, node: int) -> bool:
        """Tells whether a draft may go on behind a token; a token of low confidence is kept, and is the last of its
        path."""
        if self.nodes[node].depth >= self.max_depth:
            return False
        return self.min_confidence <= 0.0 or self.confidence(node).token >= self.min_confidence


class TreeBuilder(ABC):
    """Decides which rows a growing draft gets, and which of them it goes on from.

    A decision may use the probabilities and the tokens of the rows before a row, and never the token that is drawn for the
    row itself. So whether a row exists says nothing about its token, and the verification stays exact.
    """

    #: Whether it learns from what stands, for which drafts say how sure of each token the proposer was.
    learns: ClassVar[bool] = False

    @abstractmethod
    def begin(self, growth: GrowingTree) -> None:
        """A draft begins to grow."""

    @abstractmethod
    def branches(self, growth: GrowingTree) -> bool:
        """Tells whether the draft may become a tree; otherwise it is a chain."""

    @abstractmethod
    def children(self, growth: GrowingTree, company: int) -> dict[int, int]:
        """Returns how many children nodes are to have now, the ones that they have included; for nodes whose law is
        known."""

    @abstractmethod
    def expanded(self, growth: GrowingTree, company: int) -> list[int]:
        """Which of the nodes without a law are to get one, in ascending order; empty where the draft grows no deeper."""

    def last_children(self, growth: GrowingTree, company: int) -> dict[int, int]:
        """Chooses children as `children` does, for rows that are added once no further law will be known."""
        return {}

    def appraise(self, growth: GrowingTree, node: int) -> None:
        """A node has its token."""
        return

    def sureness(self, growth: GrowingTree, node: int) -> Confidence:
        """How sure of a node the proposer was, as `learn` finds it in the draft."""
        return growth.confidence(node)

    def learn(self, draft: Draft, accepted: Collection[int], mode: Mode) -> None:
        """See what stands of a draft that this builder shaped.

        Args:
            mode: How its tokens were chosen.
        """
        return


class TemplateTree(TreeBuilder):
    """A builder whose drafts follow a shape that is fixed before the first token is chosen."""

    @abstractmethod
    def parents(self, growth: GrowingTree) -> tuple[int, ...]:
        """The parent of each node of the shape, level by level; -1 is the root."""

    def begin(self, growth: GrowingTree) -> None:
        growth.template = children_of(cut(self.parents(growth), growth.budget, growth.max_depth))

    def branches(self, growth: GrowingTree) -> bool:
        return any(len(children) > 1 for children in growth.template)

    def children(self, growth: GrowingTree, company: int) -> dict[int, int]:
        return {node: len(growth.template[growth.place(node) + 1]) for node in growth.level}

    def expanded(self, growth: GrowingTree, company: int) -> list[int]:
        return [node for node in growth.open if growth.template[growth.place(node) + 1]]


class StaticTree(TemplateTree):
    """A tree of one shape."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.shape = tuple(parents)

    @staticmethod
    @lru_cache(64)
    def of_widths(widths: tuple[int, ...]) -> StaticTree:
        """The tree with so many children of each node by depth."""
        parents, level = list[int](), [-1]
        for width in widths:
            children = [parent for parent in level for _ in range(width)]
            level = list(range(len(parents), len(parents) + len(children)))
            parents += children
            if len(parents) > MAX_ROWS:
                break
        return StaticTree(parents[:MAX_ROWS])

    def parents(self, growth: GrowingTree) -> tuple[int, ...]:
        return self.shape


CHAIN = StaticTree(range(-1, MAX_ROWS - 1))


@lru_cache(256)
def cut(parents: tuple[int, ...], budget: int, max_depth: int) -> tuple[int, ...]:
    """The first nodes of a shape that is given level by level: at most `budget`, none deeper than `max_depth`."""
    kept, depths = list[int](), list[int]()
    for parent in parents[: max(budget, 0)]:
        depth = 1 if parent < 0 else depths[parent] + 1
        if depth > max_depth:
            break
        depths.append(depth)
        kept.append(parent)
    return tuple(kept)


@lru_cache(256)
def children_of(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The children of the root and then of each node of a shape."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent + 1].append(node)
    return tuple(tuple(each) for each in children)


# --- Estimates how often rows of adaptive trees are accepted, from earlier rows of the same rank, depth and confidence.
#
# It is asked while a draft grows. Before that, the governor's estimate (`govern/acceptance.py`) says whether to draft
# at all.


#: Upper ends of the ranges of confidence that are counted apart.
_ENDS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
#: Depths that are counted apart; deeper rows count as the last of these.
_DEPTHS = 6
#: How many observations the first guess weighs.
_WEIGHT = 12.0
#: Beyond so many observations older ones fade, so that a change of text is followed.
_FADES_AT = 1024.0


@dataclass
class _Count:
    """Rows whose fate was decided, and those of them that stood; fractions where older ones have faded."""

    tried: float
    stood: float

    def add(self, stood: bool) -> None:
        if self.tried >= _FADES_AT:
            self.tried, self.stood = self.tried / 2, self.stood / 2
        self.tried += 1
        self.stood += stood

    @property
    def share(self) -> float:
        return self.stood / self.tried

    @property
    def odds(self) -> float:
        return (self.stood + 0.5) / (self.tried - self.stood + 0.5)


class AcceptanceRates:
    """The chance that a row stands once the target's text has come to its parent and refused its elder siblings.

    Before a token is drawn, the chance follows from the largest probability of what it is drawn from, and behind the draw
    from the probability of the token itself. Where the likeliest tokens are taken, both are one. Deeper rows stand more
    often, since block verification and traversal weigh whole paths, and since easy text goes on being easy. Confidence
    and depth are taken to say independent things: each changes the odds.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[Hashable, ...], _Count] = {}
        self._chances: dict[tuple[Hashable, ...], float] = {}  # until the next draft is learnt from

    def before(self, mode: Mode, rank: int, depth: int, confidence: float) -> float:
        """The chance of a row without a token yet.

        Args:
            depth: Tokens from the root to it, itself included.
            confidence: The largest probability of what it is drawn from. Where the likeliest tokens are taken, the
                probability of its token among those that its elder siblings have left.
        """
        return self._chance(mode, "before", rank, depth, confidence)

    def behind(self, mode: Mode, rank: int, depth: int, confidence: float) -> float:
        """The chance of a row whose token has the probability `confidence`; the other arguments as for `before`."""
        kind = "before" if mode[0] is Law.DETERMINISTIC else "behind"
        return self._chance(mode, kind, rank, depth, confidence)

    def usual(self, mode: Mode, rank: int, depth: int) -> float:
        """The chance of a row before its law is known; the arguments as for `before`."""
        key = (mode, rank, depth)
        chance = self._chances.get(key)
        if chance is None:
            chance = self._chances[key] = self._at(mode, rank, depth).share
        return chance

    def learn(self, draft: Draft, accepted: Collection[int], mode: Mode) -> None:
        """Count the rows of a draft whose fate was decided."""
        self._chances.clear()
        depths = depths_of(draft.parents)
        for node, rank, taken in tried(draft, accepted):
            stood = node in accepted
            best, token = draft.confidences[node]
            if mode[0] is Law.DETERMINISTIC:
                self._of(mode, "before", rank, token / max(1.0 - taken, token, 1e-9)).add(stood)
            else:
                self._of(mode, "before", rank, best).add(stood)
                self._of(mode, "behind", rank, token).add(stood)
            self._at(mode, rank, depths[node]).add(stood)
            self._any(mode, rank).add(stood)

    def fade(self) -> None:
        """Believe half as much of what was seen, so that new observations soon weigh more."""
        self._chances.clear()
        for count in self._counts.values():
            if count.tried > 1.0:  # what is never seen would fade to nothing
                count.tried, count.stood = count.tried / 2, count.stood / 2

    def _chance(self, mode: Mode, kind: str, rank: int, depth: int, confidence: float) -> float:
        key = (mode, kind, rank, depth, bisect_right(_ENDS, confidence))
        chance = self._chances.get(key)
        if chance is None:
            own, here, usual = self._of(mode, kind, rank, confidence), self._at(mode, rank, depth), self._any(mode, rank)
            odds = own.odds * here.odds / usual.odds
            chance = self._chances[key] = odds / (1.0 + odds)
        return chance

    def _of(self, mode: Mode, kind: str, rank: int, confidence: float) -> _Count:
        """Rows of one confidence at any depth."""
        return self._count(self._guess(mode, rank, confidence), mode, kind, rank, bisect_right(_ENDS, confidence))

    def _at(self, mode: Mode, rank: int, depth: int) -> _Count:
        """Rows of one depth and any confidence."""
        return self._count(self._guess(mode, rank, 0.3), mode, "depth", rank, min(depth, _DEPTHS))

    def _any(self, mode: Mode, rank: int) -> _Count:
        """Rows of any depth and any confidence."""
        return self._count(self._guess(mode, rank, 0.3), mode, "any", rank, 0)

    def _guess(self, mode: Mode, rank: int, confidence: float) -> float:
        """Returns what is believed of a row before anything is known."""
        return _first_guess(mode, rank, confidence)

    def _count(self, guess: float, mode: Mode, kind: str, rank: int, cell: int) -> _Count:
        key = (mode, kind, min(rank, RANKS - 1), cell)
        if key not in self._counts:
            self._counts[key] = _Count(_WEIGHT, _WEIGHT * guess)
        return self._counts[key]


class JudgedRates(AcceptanceRates):
    """The chance that a row stands whose proposer has guessed that chance, and how often it is right. Its guess knows the
    depth: deep rows are there where it is high."""

    def _chance(self, mode: Mode, kind: str, rank: int, depth: int, confidence: float) -> float:
        return self._of(mode, kind, rank, confidence).share

    def _guess(self, mode: Mode, rank: int, confidence: float) -> float:
        return confidence


def tried(draft: Draft, accepted: Collection[int]) -> Iterator[tuple[int, int, float]]:
    """The nodes whose fate was decided: the parent stands, and no elder sibling does.

    Yields each node, its rank, and the probability that its elder siblings have together.
    """
    seen: defaultdict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(draft.parents):
        elders = seen[parent]
        if (parent < 0 or parent in accepted) and not any(elder in accepted for elder in elders):
            taken = sum(draft.confidences[elder].token for elder in elders) if draft.confidences else 0.0
            yield node, len(elders), taken
        elders.append(node)


def _first_guess(mode: Mode, rank: int, confidence: float) -> float:
    """Returns what holds before anything is known, from the embedded pair of models."""
    law, target_is_greedy = mode
    if law is Law.DETERMINISTIC and not target_is_greedy:
        return 0.05 + 0.8 * confidence
    first = 0.5 + 0.45 * confidence
    return first if rank == 0 else 0.25 * 0.8 ** (rank - 1)
