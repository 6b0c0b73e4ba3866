"""KVLease: the blocks that one sequence holds of one KV memory, and how many of its tokens they hold. No torch.

The target has one lease for each sequence, and so has a draft model with memory of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from outrider.cache.blocks import BlockManager


class KVLease:
    """The blocks of one sequence.

    Attributes:
        blocks: The memory.
        block_table: Blocks, in the order of the tokens that they hold.
        num_computed: Leading tokens of the text whose KV is in the blocks.
        ahead: Tokens computed behind these that the text has not confirmed; only a draft model has such.
        num_published: Leading blocks that are settled in the prefix cache.
        long_rope: Whether the KV was computed with the rotary factors of long texts.

    Args:
        blocks: The memory.
        namespace: Whose text it is; KV is shared within a namespace and never beyond it.
        long_rope_after: Tokens after which the model uses other rotary factors for the whole text; None for never.
    """

    def __init__(self, blocks: BlockManager, namespace: str | None = None, long_rope_after: int | None = None) -> None:
        self.blocks = blocks
        self._namespace = namespace
        self._long_rope_after = long_rope_after
        self.block_table: list[int] = []
        self.num_computed = 0
        self.ahead: list[int] = []
        self.num_published = 0
        self.long_rope = False

    @property
    def space(self) -> Hashable:
        """Whose KV it may share: that of its namespace under the same rotary factors."""
        return (self._namespace, self.long_rope)

    @property
    def end(self) -> int:
        """Position of the next token to compute."""
        return self.num_computed + len(self.ahead)

    @property
    def capacity(self) -> int:
        """Tokens that its blocks have room for."""
        return len(self.block_table) * self.blocks.block_size

    def open(self, token_ids: Sequence[int], *, share: bool = True) -> None:
        """Begin with the longest published prefix of the text, at least one token short of it.

        Args:
            token_ids: The text.
            share: Whether to look for one; without, everything is computed.
        """
        assert not self.block_table, "opened twice"
        self.long_rope = self._is_long(len(token_ids))
        self.block_table = self.blocks.match(token_ids, self.space) if share else []
        self.num_published = len(self.block_table)
        self.num_computed = self.num_published * self.blocks.block_size

    def roll_back(self, token_ids: Sequence[int], loose: Sequence[int] = ()) -> None:
        """Keep what the committed tokens confirm of the tokens computed ahead, and forget the others.

        The last token always counts as not computed, since its row is needed again. A text that has come under other rotary
        factors loses everything.

        Args:
            token_ids: The committed tokens.
            loose: Tokens behind these that later ones may still change; what they confirm stays ahead of the text.
        """
        if self.enter_regime(len(token_ids)):
            self.open(token_ids)
            return
        size = len(token_ids)
        last = max(size + len(loose) - 1, 0)
        self.num_computed = min(self.num_computed, last)
        confirmed = 0
        while confirmed < min(len(self.ahead), last - self.num_computed):
            place = self.num_computed + confirmed
            if self.ahead[confirmed] != (token_ids[place] if place < size else loose[place - size]):
                break
            confirmed += 1
        settled = min(confirmed, max(size - self.num_computed, 0))
        self.num_computed += settled
        self.ahead = self.ahead[settled:confirmed]

    def enter_regime(self, num_tokens: int) -> bool:
        """Follow a text that has come under other rotary factors; returns whether that cost it all its KV."""
        if self.long_rope == self._is_long(num_tokens):
            return False
        self.free()
        self.long_rope = not self.long_rope
        return True

    def needed(self, stop: int) -> int:
        """Free blocks that it takes to write the tokens up to position `stop`."""
        shared = len(self.blocks.shared_from(self.block_table, self.end, stop))
        return max(0, self.blocks.blocks_for(stop) - len(self.block_table)) + shared

    def make_writable(self, stop: int) -> list[tuple[int, int]]:
        """Own the blocks from the next token up to position `stop`; there are enough free ones.

        Returns:
            (source, destination) blocks whose contents must be copied before anything is read.
        """
        copies = self.blocks.make_writable(self.block_table, self.end, stop)
        grown = self.grow(stop)
        assert grown, "the caller has checked needed()"
        return copies

    def grow(self, num_tokens: int) -> bool:
        """Make room for so many tokens; False, and no change, where memory is short."""
        return self.blocks.grow(self.block_table, num_tokens)

    def publish(self, token_ids: Sequence[int]) -> None:
        """Let others find the blocks that are full of computed tokens of this text."""
        if self.num_computed // self.blocks.block_size > self.num_published:
            tokens = token_ids[: self.num_computed]
            self.num_published = self.blocks.publish(tokens, self.block_table, self.num_published, self.space)

    def fork(self) -> KVLease:
        """A second lease on the same blocks; whoever writes first copies."""
        twin = KVLease(self.blocks, self._namespace, self._long_rope_after)
        twin.block_table = self.blocks.fork(self.block_table)
        twin.num_computed, twin.ahead, twin.num_published = self.num_computed, list(self.ahead), self.num_published
        twin.long_rope = self.long_rope
        return twin

    def free(self) -> None:
        """Give all blocks back; the tokens will be computed again."""
        self.blocks.free(self.block_table)
        self.num_computed = self.num_published = 0
        self.ahead.clear()

    def _is_long(self, num_tokens: int) -> bool:
        return self._long_rope_after is not None and num_tokens > self._long_rope_after


class KVView:
    """A lease to look at: what a proposer may know of the target's KV of a sequence.

    Args:
        lease: The lease; what is read here is always its present state.
    """

    def __init__(self, lease: KVLease) -> None:
        self._lease = lease

    @property
    def block_table(self) -> tuple[int, ...]:
        """Blocks, in the order of the tokens that they hold."""
        return tuple(self._lease.block_table)

    @property
    def num_computed(self) -> int:
        """Leading tokens of the text whose KV is in the blocks."""
        return self._lease.num_computed

    @property
    def capacity(self) -> int:
        """Tokens that the blocks have room for."""
        return self._lease.capacity

    @property
    def long_rope(self) -> bool:
        """Whether the KV was computed with the rotary factors of long texts."""
        return self._lease.long_rope

    def belongs_to(self, blocks: BlockManager) -> bool:
        """Whether the blocks are of this memory."""
        return self._lease.blocks is blocks
