"""Draft trees in the making: the nodes, the interface of tree builders, and trees of a fixed shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

from torch import Tensor

from outrider.draft import Confidence, Draft, Law

#: Rows that a draft may ask for.
MAX_ROWS = 512

#: What the acceptance of a row depends on beside its probabilities: its law, and whether the target is greedy.
Mode = tuple[Law, bool]

#: Siblings whose chances are counted apart; later ones count as the last of these.
RANKS = 4


@dataclass
class Node:
    """A node of a growing draft.

    Attributes:
        token_id: Its token.
        parent: Index of its parent, -1 for the root.
        depth: Tokens from the root to it.
        rank: How many elder siblings it has.
        place: Which node of a template it is, -1 where there is none.
        chance: How likely the target's text reaches it, as far as its builder has an opinion.
    """

    token_id: int
    parent: int
    depth: int
    rank: int
    place: int
    chance: float = 1.0


_ROOT = Node(-1, -1, 0, 0, -1)


@dataclass(frozen=True)
class NodeLaw:
    """What the children of a node are chosen from.

    Attributes:
        row: [vocab_size] probabilities where they are drawn, else logits.
        drawn: Whether they are drawn.
    """

    row: Tensor
    drawn: bool

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
    """A tree of draft tokens in the making, as tree builders see it.

    Attributes:
        budget: Most nodes.
        max_depth: Longest path.
        mode: What the acceptance of a row depends on beside its probabilities.
        min_confidence: Nothing is drafted behind a token whose own probability is smaller.
        nodes: So far.
        laws: By node, -1 for the root: what its children are chosen from, where that is known.
        level: Nodes whose logits are wanted next, in ascending order; -1 is the root.
        open: Nodes that were added last, and may be wanted next.
        template: Where the shape is fixed: the children of the root and then of each node.
    """

    budget: int
    max_depth: int
    mode: Mode
    min_confidence: float = 0.0
    nodes: list[Node] = field(default_factory=list)
    laws: dict[int, NodeLaw] = field(default_factory=dict)
    level: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    template: tuple[tuple[int, ...], ...] = ()

    @property
    def depth(self) -> int:
        """Length of its longest path so far."""
        return max((node.depth for node in self.nodes), default=0)

    @property
    def growing(self) -> bool:
        """Whether the logits of further nodes are wanted."""
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
        """How sure the proposer was at the place of a node, and of its token."""
        node = self.nodes[index]
        law = self.laws[node.parent]
        return Confidence(law.likeliest[0], float(law.probs[node.token_id]))

    def may_go_on(self, node: int) -> bool:
        """Whether a draft may go on behind a token; a token of low confidence is kept, and is the last of its path."""
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
        """Whether the draft may become a tree; otherwise it is a chain."""

    @abstractmethod
    def children(self, growth: GrowingTree, company: int) -> dict[int, int]:
        """How many children nodes are to have now, the ones that they have included; for nodes whose law is known.

        Args:
            growth: The draft.
            company: Number of drafts that grow in the same passes, this one included.
        """

    @abstractmethod
    def expanded(self, growth: GrowingTree, company: int) -> list[int]:
        """Which of the nodes without a law are to get one, in ascending order; empty where the draft grows no deeper."""

    def last_children(self, growth: GrowingTree, company: int) -> dict[int, int]:
        """As `children`, for rows that are added once no further law will be known."""
        return {}

    def appraise(self, growth: GrowingTree, node: int) -> None:
        """A node has its token."""
        return

    def learn(self, draft: Draft, accepted: Collection[int], mode: Mode) -> None:
        """See what stands of a draft that this builder shaped.

        Args:
            draft: The draft.
            accepted: Its nodes that stand.
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
    """A tree of one shape.

    Args:
        parents: The parent of each node, level by level; -1 is the root.
    """

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
