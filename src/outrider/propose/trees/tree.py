"""The interface of tree builders, and trees of a fixed shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from outrider.draft import Draft, Law

if TYPE_CHECKING:
    from outrider.propose.trees.growth import Growth

#: Rows that a draft may ask for.
MAX_ROWS = 512

#: What the acceptance of a row depends on beside its probabilities: its law, and whether the target is greedy.
Mode = tuple[Law, bool]


class TreeBuilder(ABC):
    """Decides which rows a growing draft gets, and which of them it goes on from.

    A decision may use the probabilities and the tokens of the rows before a row, and never the token that is drawn for the
    row itself. So whether a row exists says nothing about its token, and the verification stays exact.
    """

    #: Whether it learns from what stands, for which drafts say how sure of each token the proposer was.
    learns: ClassVar[bool] = False

    @abstractmethod
    def begin(self, growth: Growth) -> None:
        """A draft begins to grow."""

    @abstractmethod
    def branches(self, growth: Growth) -> bool:
        """Whether the draft may become a tree; otherwise it is a chain."""

    @abstractmethod
    def children(self, growth: Growth, company: int) -> dict[int, int]:
        """How many children nodes are to have now, the ones that they have included; for nodes whose law is known.

        Args:
            growth: The draft.
            company: Number of drafts that grow in the same passes, this one included.
        """

    @abstractmethod
    def expanded(self, growth: Growth, company: int) -> list[int]:
        """Which of the nodes without a law are to get one, in ascending order; empty where the draft grows no deeper."""

    def last_children(self, growth: Growth, company: int) -> dict[int, int]:
        """As `children`, for rows that are added once no further law will be known."""
        return {}

    def appraise(self, growth: Growth, node: int) -> None:
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
    def parents(self, growth: Growth) -> tuple[int, ...]:
        """The parent of each node of the shape, level by level; -1 is the root."""

    def begin(self, growth: Growth) -> None:
        growth.template = children_of(cut(self.parents(growth), growth.budget, growth.max_depth))

    def branches(self, growth: Growth) -> bool:
        return any(len(children) > 1 for children in growth.template)

    def children(self, growth: Growth, company: int) -> dict[int, int]:
        return {node: len(growth.template[growth.place(node) + 1]) for node in growth.level}

    def expanded(self, growth: Growth, company: int) -> list[int]:
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

    def parents(self, growth: Growth) -> tuple[int, ...]:
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
