"""SourceState: what the layers that attend to a source keep of it. No torch at import.

A source is what an encoder reads before a text begins. Each decoder layer keeps keys and values of its rows, as of the rows
of a text. They lie in blocks of the same memory, in the same tensors: a block holds rows of one source or of texts, so a
layer finds both kinds under its one number, by different block tables. An encoder sees its source from both ends. So blocks
of a source are found again by the whole of it, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING

from outrider.cache.blocks import BlockManager

if TYPE_CHECKING:
    from torch import Tensor

#: Stands in the last block for the rows that a source does not fill; no token has this id.
_NOTHING = -1


class SourceState:
    """What a model keeps of one source, shared by the texts that were opened or forked with it.

    Attributes:
        token_ids: The source, with at least one token.
        block_table: Its blocks; empty before `reserve`.
        encoded: [num_tokens, width] what the encoder has left, until all layers have their keys and values.
        is_computed: Whether all layers have them.

    Args:
        blocks: Those of the model's memory.
        token_ids: The source.
        namespace: Whose it is; blocks are shared within a namespace and never beyond it.
    """

    def __init__(self, blocks: BlockManager, token_ids: Sequence[int], namespace: str | None = None) -> None:
        self._blocks = blocks
        self._namespace = namespace
        self._num_holders = 1
        self._written: set[int] = set()
        self.token_ids = tuple(token_ids)
        self.block_table: list[int] = []
        self.encoded: Tensor | None = None
        self.is_computed = False

    @property
    def space(self) -> Hashable:
        """Where its blocks are found: by whose it is, and by all of its tokens."""
        return ("source", self._namespace, self.token_ids)

    @property
    def num_missing(self) -> int:
        """Rows of the encoder that are due before a text can go on."""
        return 0 if self.is_computed else len(self.token_ids)

    @property
    def missing_blocks(self) -> int:
        """Blocks that `reserve` takes."""
        return self._blocks.blocks_for(len(self.token_ids)) - len(self.block_table)

    def open(self) -> None:
        """Take the blocks of an equal source that was computed before, if all of them are there still."""
        if self.block_table:
            return
        table = self._blocks.match((*self._rows, _NOTHING), self.space)
        if len(table) * self._blocks.block_size == len(self._rows):
            self.block_table, self.is_computed = table, True
        else:
            self._blocks.free(table)

    def reserve(self) -> None:
        """Own the blocks of all rows; the caller has checked that there are so many."""
        grown = self._blocks.grow(self.block_table, len(self.token_ids))
        assert grown, "a source is reserved where there is room for it"

    def wrote(self, layers: Collection[int], num_layers: int) -> None:
        """A pass has written keys and values of these layers, out of so many. With the last of them others find the
        source."""
        self._written.update(layers)
        if len(self._written) == num_layers and not self.is_computed:
            self.is_computed, self.encoded = True, None
            self._blocks.publish(self._rows, self.block_table, 0, self.space)

    def share(self) -> SourceState:
        """The same source for a further text, which leaves it on its own."""
        self._num_holders += 1
        return self

    def leave(self) -> SourceState:
        """A text has no more use for it, and the last one gives the blocks back. Returns the source, of which nothing is
        kept."""
        self._num_holders -= 1
        if not self._num_holders:
            self._blocks.free(self.block_table)
        return SourceState(self._blocks, self.token_ids, self._namespace)

    @property
    def _rows(self) -> tuple[int, ...]:
        """Its tokens, and what fills the last block."""
        missing = -len(self.token_ids) % self._blocks.block_size
        return (*self.token_ids, *(_NOTHING,) * missing)
