"""What a model keeps of one text, and what layers that attend to a source keep of it. No torch at import."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence, Set
from typing import TYPE_CHECKING, Protocol

from outrider.cache.blocks import BlockManager
from outrider.cache.running import RunningText

if TYPE_CHECKING:
    from torch import Tensor

# --- SequenceState: what a model keeps of one text. No torch.
#
# Whoever lets a model compute a text uses this, and nothing below it: the scheduler makes room and gives it back, the
# commit says which rows stand, proposers with models of their own do both. Where the tokens lie, and how they get
# there, is known here and in the memory alone. The target has a state for each sequence, and so has a draft model with
# memory of its own.


class Memory(Protocol):
    """The memory of one model, as states use it."""

    blocks: BlockManager  # its blocks
    long_rope_after: int | None  # tokens after which the model uses other rotary factors for the whole text; None for never

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copy slots, (source, destination) each; all sources are read before any destination is written."""


class SequenceState:
    """Holds what a model keeps of one text.

    Attributes:
        memory: Where it lies.
        block_table: Blocks, in the order of the tokens that they hold.
        copies: (source, destination) blocks that reservations have left to be copied before anything is read.
        num_computed: Leading tokens of the text that are in the blocks.
        ahead: Tokens computed behind these that the text has not confirmed; only a draft model has such.
        num_published: Leading blocks that are settled in the prefix cache.
        num_filled: Leading tokens that added layers hold, by their number; those ahead of the text too, until it turns out
            that the text takes others.
        writable_from: First slot that a proposer may write in added layers: where the block begins in which the last pass
            began, until another step begins, and then where the block begins in which that one goes on.
        long_rope: Whether they were computed with the rotary factors of long texts.
        running: What layers with a running state keep of the text.
        end_of_prompt: Where the last full block ends of what the text began with.
        source: What its layers keep of the source that an encoder has read for it; None for a model without an encoder.

    Args:
        namespace: Whose text it is; blocks are shared within a namespace and never beyond it.
    """

    def __init__(self, memory: Memory, namespace: str | None = None, source: SourceState | None = None) -> None:
        self.memory = memory
        self.source = source
        self._namespace = namespace
        self.block_table: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.num_computed = 0
        self.ahead: list[int] = []
        self.num_published = 0
        self.num_filled: dict[int, int] = {}
        self.writable_from = 0
        self.long_rope = False
        self.running = RunningText()
        self.end_of_prompt = 0

    @property
    def space(self) -> Hashable:
        """Key under which blocks are shared: (namespace, rotary factors, source)."""
        space = (self._namespace, self.long_rope)
        return space if self.source is None else (*space, self.source.token_ids)

    @property
    def block_tables(self) -> list[list[int]]:
        """The tables of all blocks that it refers to; a table that states share is one object."""
        return [self.block_table] if self.source is None else [self.block_table, self.source.block_table]

    @property
    def num_source_rows(self) -> int:
        """Rows of an encoder that its next pass computes beside its own."""
        return 0 if self.source is None else self.source.num_missing

    @property
    def end(self) -> int:
        """Position of the next token to compute."""
        return self.num_computed + len(self.ahead)

    @property
    def capacity(self) -> int:
        """Tokens that its blocks have room for."""
        return len(self.block_table) * self._blocks.block_size

    def longest_draft(self, num_tokens: int) -> int | None:
        """Most tokens that a draft behind so many may have, since no draft spans two sets of rotary factors; None for any
        number."""
        limit = self.memory.long_rope_after
        return None if limit is None or self.long_rope else limit - num_tokens

    def open(self, token_ids: Sequence[int], *, share: bool = True, needs: Set[int] = frozenset()) -> None:
        """Begin with the longest published prefix of the text, at least one token short of it."""
        assert not self.block_table, "opened twice"
        if self.source is not None:
            self.source.open()
        self.long_rope = self._is_long(len(token_ids))
        self.block_table = self._blocks.match(token_ids, self.space, needs) if share else []
        self.num_published = len(self.block_table)
        self.num_computed = self.writable_from = self.num_published * self._blocks.block_size
        self.num_filled = dict.fromkeys(needs, self.num_computed)
        self.end_of_prompt = (len(token_ids) - 1) // self._blocks.block_size * self._blocks.block_size
        if self.block_table and self._blocks.states is not None:
            self.running = self._blocks.states.begin_at(self.block_table[-1])

    def roll_back(self, token_ids: Sequence[int], loose: Sequence[int] = (), *, needs: Set[int] = frozenset()) -> None:
        """Keep what the committed tokens confirm of the tokens computed ahead, and forget the others.

        The last token always counts as not computed, since its row is needed again. A text that has come under other rotary
        factors loses everything.

        Args:
            loose: Tokens behind these that later ones may still change; what they confirm stays ahead of the text.
        """
        if self.enter_regime(len(token_ids)):
            self.open(token_ids, needs=needs)
            return
        before = self.end
        self._keep_confirmed(token_ids, loose)
        for number, filled in self.num_filled.items():
            if filled <= before:  # what lies further back than all tokens ahead is settled
                self.num_filled[number] = min(filled, self.end)
        held = min((self.num_filled.get(number, 0) for number in needs), default=self.end)
        if held < self.end:
            self._compute_again(held)

    def _keep_confirmed(self, token_ids: Sequence[int], loose: Sequence[int]) -> None:
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

    def _compute_again(self, start: int) -> None:
        """Count the tokens from a position on as not computed. Layers that hold settled ones among them keep these."""
        if self.running.records:  # states of earlier positions may be gone
            self.free()
            return
        for number, filled in self.num_filled.items():
            self.num_filled[number] = min(filled, self.num_computed)
        self.ahead = self.ahead[: max(start - self.num_computed, 0)]
        self.num_computed = min(self.num_computed, start)

    def enter_regime(self, num_tokens: int) -> bool:
        """Follow a text that has come under other rotary factors; returns whether that cost it all its KV."""
        if self.long_rope == self._is_long(num_tokens):
            return False
        self.free()
        self.long_rope = not self.long_rope
        return True

    def fits(self, rows: int) -> bool:
        """Tells whether there is memory for so many rows behind what is computed."""
        stop = self.end + rows
        needed = len(self._blocks.shared_from(self.block_table, self.end, stop))
        needed += 0 if self.source is None else self.source.missing_blocks
        return max(0, self._blocks.blocks_for(stop) - len(self.block_table)) + needed <= self._blocks.num_free

    def reserve(self, rows: int) -> bool:
        """Own room for so many rows behind what is computed, and for the source; False, and no change, where memory is
        short.

        Blocks that somebody else reads too are replaced by copies of them. These are noted in `copies`, since the copies of
        all texts are made together (see `StateMemory.make_copies`).
        """
        if not self.fits(rows):
            return False
        if self.source is not None:
            self.source.reserve()
        stop, self.writable_from = self.end + rows, self._begin_of_block(self.end)
        self.copies += self._blocks.make_writable(self.block_table, self.end, stop)
        return self._blocks.grow(self.block_table, stop)

    def commit(self, start: int, accepted_rows: Sequence[int]) -> None:
        """Keep the rows of a pass that are part of the text, and nothing of the others."""
        assert start == self.num_computed, "rows are committed behind what is computed"
        self._line_up(start, accepted_rows)
        self.num_computed, self.writable_from = start + len(accepted_rows), self._begin_of_block(start)

    def _begin_of_block(self, position: int) -> int:
        """The first slot of the block that a pass goes on in, which nobody else reads while it is not full."""
        return position // self._blocks.block_size * self._blocks.block_size

    def fill(self, number: int, stop: int) -> None:
        """An added layer holds the first `stop` tokens now."""
        filled = self.num_filled.get(number, 0)
        assert filled <= stop <= self.end, "an added layer holds no more than is computed"
        self.num_filled[number] = stop
        self._hold(number, filled // self._blocks.block_size)

    def _hold(self, number: int, first: int) -> None:
        """Note which settled blocks from index `first` on an added layer holds."""
        stop = min(self.num_filled[number], self.num_computed) // self._blocks.block_size
        self._blocks.hold(self.block_table[first:stop], number)

    def run_ahead(self, token_ids: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Keep tokens that were computed behind the end and that the text has not confirmed.

        Args:
            rows: Their rows behind the end, in the order of their path; None for the first ones.
        """
        if rows is not None:
            self._line_up(self.end, rows)
        self.ahead += token_ids

    def publish(self, token_ids: Sequence[int]) -> None:
        """Let others find the blocks that are full of computed tokens of this text."""
        first = self.num_published
        if self.num_computed // self._blocks.block_size > first:
            tokens = token_ids[: self.num_computed]
            self.num_published = self._blocks.publish(tokens, self.block_table, first, self.space)
            for number in self.num_filled:
                self._hold(number, first)
            self._keep_states(first)

    def places(self, start: int, stop: int) -> tuple[int, ...]:
        """Positions behind `start`, up to `stop`, where a pass leaves the running states to the prefix cache."""
        states = self._blocks.states
        return () if states is None else states.places(start, stop, self.end_of_prompt)

    def _keep_states(self, first: int) -> None:
        """Leave running states with the blocks from index `first` on that are published by now."""
        size = self._blocks.block_size
        for place in self.places(first * size, self.num_published * size):
            text = self.running.cut(place)
            if text is not None:
                self._blocks.keep_states(self.block_table[place // size - 1], text)
        self.running.leave_passed()

    def fork(self) -> SequenceState:
        """A second state over the same blocks; whoever writes first copies."""
        assert not self.copies, "a state is forked between two steps"
        twin = SequenceState(self.memory, self._namespace, None if self.source is None else self.source.share())
        twin.block_table = self._blocks.fork(self.block_table)
        twin.num_computed, twin.ahead, twin.num_published = self.num_computed, list(self.ahead), self.num_published
        twin.num_filled, twin.long_rope, twin.running = dict(self.num_filled), self.long_rope, self.running.fork()
        twin.end_of_prompt = self.end_of_prompt
        self.writable_from = twin.writable_from = self.num_computed
        return twin

    def free(self) -> None:
        """Give all blocks back; the tokens will be computed again."""
        self._blocks.free(self.block_table)
        if self.source is not None:
            self.source = self.source.leave()
        self.num_computed = self.num_published = self.writable_from = 0
        self.ahead.clear()
        self.num_filled.clear()
        self.copies.clear()
        self.running.clear()

    def void(self) -> None:
        """The memory begins anew: what was in the blocks is lost, and there is nothing to give back."""
        for table in self.block_tables:
            table.clear()
        self.free()

    @property
    def _blocks(self) -> BlockManager:
        return self.memory.blocks

    def _line_up(self, start: int, rows: Sequence[int]) -> None:
        """Move rows that were written from position `start` on behind each other, in this order."""
        moved = [(row, place) for place, row in enumerate(rows) if row != place]
        if moved:  # never after a chain
            self.memory.move([(self.slot(start + row), self.slot(start + place)) for row, place in moved])
            self.running.line_up(start, rows)

    def slot(self, position: int) -> int:
        """Returns where the token at a position lies."""
        block, offset = divmod(position, self._blocks.block_size)
        return self.block_table[block] * self._blocks.block_size + offset

    def _is_long(self, num_tokens: int) -> bool:
        limit = self.memory.long_rope_after
        return limit is not None and num_tokens > limit


class KVView:
    """A state to look at: what a proposer may know of the target's KV of a sequence."""

    def __init__(self, state: SequenceState) -> None:
        self._state = state

    @property
    def block_table(self) -> tuple[int, ...]:
        """Blocks, in the order of the tokens that they hold."""
        return tuple(self._state.block_table)

    @property
    def num_computed(self) -> int:
        """Leading tokens of the text whose KV is in the blocks."""
        return self._state.num_computed

    @property
    def end(self) -> int:
        """Position of the next token to compute: of the target's KV the same, and behind what a draft model has computed
        ahead of its text."""
        return self._state.end

    @property
    def running(self) -> RunningText:
        """Returns what layers with a running state keep of the text."""
        return self._state.running

    @property
    def source(self) -> SourceState | None:
        """Returns what layers keep of the source of the text; None for a model without an encoder."""
        return self._state.source

    def places(self, start: int, stop: int) -> tuple[int, ...]:
        """Positions behind `start`, up to `stop`, where a pass leaves the running states to the prefix cache."""
        return self._state.places(start, stop)

    @property
    def capacity(self) -> int:
        """Tokens that the blocks have room for."""
        return self._state.capacity

    @property
    def long_rope(self) -> bool:
        """Tells whether the KV was computed with the rotary factors of long texts."""
        return self._state.long_rope

    @property
    def writable(self) -> tuple[int, int]:
        """(first, end) slots that a proposer may write in its added layers now."""
        return self._state.writable_from, self._state.capacity

    def num_filled(self, number: int) -> int:
        """Leading tokens that an added layer holds."""
        return self._state.num_filled.get(number, 0)

    def fill(self, number: int, stop: int) -> None:
        """An added layer holds the first `stop` tokens now."""
        self._state.fill(number, stop)

    def slots(self, start: int, stop: int) -> list[int]:
        """Returns where the tokens from position `start` to `stop` lie."""
        return [self._state.slot(position) for position in range(start, stop)]

    def belongs_to(self, memory: Memory) -> bool:
        """Tells whether the blocks are of this memory."""
        return self._state.memory is memory


# --- SourceState: what the layers that attend to a source keep of it. No torch at import.
#
# A source is what an encoder reads before a text begins. Each decoder layer keeps keys and values of its rows, as of
# the rows of a text. They lie in blocks of the same memory, in the same tensors: a block holds rows of one source or of
# texts, so a layer finds both kinds under its one number, by different block tables. An encoder sees its source from
# both ends. So blocks of a source are found again by the whole of it, or not at all.


#: Stands in the last block for the rows that a source does not fill; no token has this id.
_NOTHING = -1


class SourceState:
    """Holds what a model keeps of one source, shared by the texts that were opened or forked with it.

    Attributes:
        token_ids: The source, with at least one token.
        block_table: Its blocks; empty before `reserve`.
        encoded: [num_tokens, width] what the encoder has left, until all layers have their keys and values.
        is_computed: Whether all layers have them.

    Args:
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
        """Returns where its blocks are found: by whose it is, and by all of its tokens."""
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
        """Returns the same source for a further text, which leaves it on its own."""
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
