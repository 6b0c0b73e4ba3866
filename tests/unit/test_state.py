"""States: what a model keeps of one text, against a model of what is really written to every slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.state import SequenceState

NAMESPACES = (None, "tenant")
#: The number of a layer that a proposer has added.
ADDED = 5


@dataclass
class Text:
    """A text, and what the model keeps of it."""

    tokens: list[int]
    namespace: str | None
    state: SequenceState

    @property
    def computed(self) -> list[int]:
        """The tokens that the state claims to hold: confirmed ones, then those ahead."""
        return self.tokens[: self.state.num_computed] + self.state.ahead


class SlotMemory(StateMemory):
    """A memory of which it is known what every slot holds."""

    def __init__(self, blocks: BlockManager, long_rope_after: int | None) -> None:
        super().__init__(blocks, long_rope_after)
        self.slots: dict[int, tuple[object, ...]] = {}
        self.filled: dict[int, tuple[object, ...]] = {}  # the same of a layer that a proposer has added

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        for kept in (self.slots, self.filled):
            kept.update({target: kept[source] for source, target in slots if source in kept})


class StateMachine(RuleBasedStateMachine):
    """Texts come, share, draft ahead, are rolled back, diverge and go, while `slots` remembers what was written where.

    A slot holds all that keys and values depend on: whose text it is, under which rotary factors, and every token so far.
    """

    @initialize(
        num_blocks=st.integers(1, 9),
        block_size=st.integers(1, 3),
        prefix_caching=st.booleans(),
        long_rope_after=st.none() | st.integers(1, 8),
    )
    def start(self, num_blocks: int, block_size: int, prefix_caching: bool, long_rope_after: int | None) -> None:
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self.long_rope_after = long_rope_after
        self.memory = SlotMemory(self.blocks, long_rope_after)
        self.slots = self.memory.slots
        self.texts: list[Text] = []

    def _is_long(self, num_tokens: int) -> bool:
        return self.long_rope_after is not None and num_tokens > self.long_rope_after

    def _content(self, text: Text, tokens: list[int]) -> tuple[object, ...]:
        return (text.namespace, text.state.long_rope, *tokens)

    def _slot(self, text: Text, position: int) -> int:
        block, offset = divmod(position, self.blocks.block_size)
        return text.state.block_table[block] * self.blocks.block_size + offset

    def _shared_prefix(self, text: Text) -> int:
        """Tokens that a text finds in the cache, by trying every block of the memory for each of its own."""
        size, found = self.blocks.block_size, 0
        state = text.state
        while found + size < len(text.tokens) and self._is_published(text, found):
            found += size
        assert state.num_computed == found
        return found

    def _is_published(self, text: Text, start: int) -> bool:
        """Whether some findable block holds the tokens of one of this text's blocks, and all that led to them."""
        size, blocks = self.blocks.block_size, self.blocks
        wanted = [self._content(text, text.tokens[: start + i + 1]) for i in range(size)]
        return any(
            blocks._key[block] is not None and [self.slots.get(block * size + i) for i in range(size)] == wanted
            for block in range(blocks.num_blocks)
        )

    # -- a text begins and ends --

    @precondition(lambda self: len(self.texts) < 6)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), namespace=st.sampled_from(NAMESPACES))
    def arrive(self, tokens: list[int], namespace: str | None) -> None:
        state = self.memory.state(namespace)
        assert (state.block_table, state.num_computed, state.end, state.capacity) == ([], 0, 0, 0)
        self.texts.append(Text(tokens, namespace, state))

    @precondition(lambda self: any(not text.state.block_table for text in self.texts))
    @rule(data=st.data(), share=st.booleans(), needs=st.booleans())
    def open(self, data: st.DataObject, share: bool, needs: bool) -> None:
        text = data.draw(st.sampled_from([text for text in self.texts if not text.state.block_table]))
        text.state.open(text.tokens, share=share, needs=frozenset({ADDED} if needs else ()))
        if needs:
            assert text.state.num_filled == {ADDED: text.state.num_computed}
        else:
            self._has_opened(text, share=share)

    def _has_opened(self, text: Text, *, share: bool = True) -> None:
        state = text.state
        assert state.long_rope == self._is_long(len(text.tokens))
        assert state.num_computed == state.num_published * self.blocks.block_size == state.capacity
        assert state.num_computed < len(text.tokens), "one token must be left to compute"
        assert state.ahead == []
        if share:
            self._shared_prefix(text)
        else:
            assert state.num_computed == 0

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        state = data.draw(st.sampled_from(self.texts)).state
        state.free()
        assert (state.block_table, state.num_computed, state.ahead, state.num_published) == ([], 0, [], 0)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        text.state.free()
        self.texts = [other for other in self.texts if other is not text]

    @precondition(lambda self: 0 < len(self.texts) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        free = self.blocks.num_free
        twin = Text(list(text.tokens), text.namespace, text.state.fork())
        assert self.blocks.num_free == free, "a fork costs no memory"
        assert twin.state.block_table == text.state.block_table
        assert twin.state.block_table is not text.state.block_table
        assert twin.state.ahead == text.state.ahead
        assert twin.state.ahead is not text.state.ahead
        assert (twin.state.num_computed, twin.state.space) == (text.state.num_computed, text.state.space)
        self.texts.append(twin)

    # -- a text is computed and grows --

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        text = data.draw(st.sampled_from(self.texts))
        text.tokens.append(data.draw(st.sampled_from([*text.state.ahead[:1], token])))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """What a pass does to the target's state."""
        text = data.draw(st.sampled_from(self.texts))
        state = text.state
        if state.ahead or state.long_rope != self._is_long(len(text.tokens)):
            return  # the engine has every text follow its factors first
        stop = data.draw(st.integers(state.num_computed, len(text.tokens)))
        if self._own(text, stop):
            self._write(text, state.num_computed, text.tokens[:stop])
            state.commit(state.num_computed, range(stop - state.num_computed))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), rows=st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=6))
    def verify(self, data: st.DataObject, rows: list[tuple[int, bool]]) -> None:
        """The rest of a text, and behind it rows of a draft, of which some stand and follow each other."""
        text = data.draw(st.sampled_from(self.texts))
        state, start = text.state, text.state.num_computed
        if state.ahead or state.long_rope != self._is_long(len(text.tokens) + len(rows)):
            return  # no draft spans two sets of factors
        missing = len(text.tokens) - start
        if not self._own(text, len(text.tokens) + len(rows)):
            return
        self._write(text, start, text.tokens)
        for place, (token, stands) in enumerate(rows):
            text.tokens += [token] if stands else []
            self.slots[self._slot(text, start + missing + place)] = (
                self._content(text, text.tokens) if stands else ("rejected",)
            )
        state.commit(start, [*range(missing), *(missing + place for place, (_, stands) in enumerate(rows) if stands)])
        assert state.num_computed == len(text.tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def compute_ahead(self, data: st.DataObject, tokens: list[int]) -> None:
        """What a draft model does: the rest of the text, and tokens behind it that the text may never confirm."""
        text = data.draw(st.sampled_from(self.texts))
        state = text.state
        missing = [] if state.ahead else text.tokens[state.num_computed :]
        if missing and state.long_rope != self._is_long(len(text.tokens)):
            return  # a draft model too follows the factors first
        end = state.end + len(missing) + len(tokens)
        if self._own(text, end):
            self._write(text, state.end, [*text.computed, *missing, *tokens])
            state.commit(state.num_computed, range(len(missing)))
            state.run_ahead(tokens)
            assert state.end == end

    def _own(self, text: Text, stop: int) -> bool:
        """Own the blocks up to `stop` as the scheduler does; False where memory is short."""
        state, size = text.state, self.blocks.block_size
        rows, free, before = stop - state.end, self.blocks.num_free, list(state.block_table)
        new = max(0, -(-stop // size) - len(before))
        shared = [
            index
            for index in range(state.end // size, min(-(-stop // size), len(before)))
            if any(before[index] in other.state.block_table for other in self.texts if other is not text)
        ]
        needed = new + len(shared)
        assert state.fits(rows) == (needed <= free)
        assert state.reserve(rows) == (needed <= free)
        if needed > free:
            assert (state.block_table, state.copies, self.blocks.num_free) == (before, [], free)
            return False
        assert free - self.blocks.num_free == needed
        assert state.capacity >= stop
        assert state.copies == [(before[index], state.block_table[index]) for index in shared]
        self.memory.make_copies([state])
        assert state.copies == []
        return True

    def _write(self, text: Text, start: int, tokens: list[int]) -> None:
        """Keys and values of `tokens` from position `start` on."""
        for position in range(start, len(tokens)):
            slot = self._slot(text, position)
            owners = [other for other in self.texts if slot // self.blocks.block_size in other.state.block_table]
            assert owners == [text], "wrote to a block that another text reads"
            self.slots[slot] = self._content(text, tokens[: position + 1])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """What a proposer does to its added layer, as far as it has kept up."""
        text = data.draw(st.sampled_from(self.texts))
        state = text.state
        filled = state.num_filled.get(ADDED, 0)
        if filled < state.writable_from:
            return  # it lies further back than the last pass, and may belong to others
        for position in range(filled, state.num_computed):
            self.memory.filled[self._slot(text, position)] = self._content(text, text.tokens[: position + 1])
        state.fill(ADDED, state.num_computed)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        state = text.state
        settled = state.num_published
        state.publish(text.tokens)
        assert state.num_published == max(settled, state.num_computed // self.blocks.block_size)

    # -- a text goes another way than was computed --

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        state, known = text.state, text.computed
        if state.long_rope != self._is_long(len(text.tokens)):
            state.roll_back(text.tokens)
            self._has_opened(text)
            return
        table = list(state.block_table)
        agreeing = 0
        while agreeing < min(len(known), len(text.tokens) - 1) and known[agreeing] == text.tokens[agreeing]:
            agreeing += 1
        state.roll_back(text.tokens)
        assert state.num_computed == agreeing, "all that the text confirms, but for its last token"
        assert (state.ahead, state.block_table) == ([], table)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def enter_regime(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        state, long = text.state, self._is_long(len(text.tokens))
        before = (list(state.block_table), state.num_computed, list(state.ahead), state.num_published)
        costs = state.long_rope != long
        assert state.enter_regime(len(text.tokens)) == costs
        after = (state.block_table, state.num_computed, state.ahead, state.num_published)
        assert after == (([], 0, [], 0) if costs else before)
        assert state.long_rope == long
        assert state.space == (text.namespace, long)

    # -- at all times --

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity([text.state.block_table for text in self.texts])
            held = {block for text in self.texts for block in text.state.block_table}
            assert self.blocks.num_free == self.blocks.num_blocks - len(held)

    @invariant()
    def every_state_holds_what_it_claims(self) -> None:
        for text in getattr(self, "texts", []):
            known = text.computed
            assert (
                len(known) == text.state.end <= text.state.capacity == len(text.state.block_table) * self.blocks.block_size
            )
            # A rollback counts the last token as not computed; its block stays in the cache, and gets the same token again.
            assert text.state.num_published * self.blocks.block_size <= text.state.num_computed + 1
            for position in range(min(text.state.num_filled.get(ADDED, 0), text.state.num_computed)):
                assert self.memory.filled[self._slot(text, position)] == self._content(text, known[: position + 1])
            for position in range(len(known)):
                assert self.slots[self._slot(text, position)] == self._content(text, known[: position + 1])

    @invariant()
    def whatever_can_be_found_is_what_it_says(self) -> None:
        """No block in the prefix cache has been written over since it was published."""
        size = self.blocks.block_size if hasattr(self, "blocks") else 0
        for (_, tokens), block in self.blocks._published.items() if size else []:
            held = [self.slots[block * size + i] for i in range(size)]
            assert held[-1][-size:] == tokens
            assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(held))


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def computed(
    blocks: BlockManager,
    tokens: list[int],
    *,
    ahead: tuple[int, ...] = (),
    namespace: str | None = None,
    long_rope_after: int | None = None,
) -> SequenceState:
    """The state of a computed and published text, with tokens ahead of it."""
    state = StateMemory(blocks, long_rope_after).state(namespace)
    state.open(tokens)
    assert state.reserve(len(tokens) + len(ahead))
    state.commit(state.num_computed, range(len(tokens) - state.num_computed))
    state.publish(tokens)
    state.run_ahead(ahead)
    return state


def test_the_same_text_of_another_namespace_is_not_found() -> None:
    blocks = BlockManager(20, 2)
    computed(blocks, [1, 2, 3, 4, 5], namespace="alice").free()
    found = {}
    for namespace in ("alice", "bob", None):
        state = StateMemory(blocks).state(namespace)
        state.open([1, 2, 3, 4, 5])
        found[namespace] = state.num_computed
    assert found == {"alice": 4, "bob": 0, None: 0}


def test_a_text_under_other_rotary_factors_is_not_found() -> None:
    blocks = BlockManager(20, 2)
    computed(blocks, [1, 2, 3, 4], long_rope_after=4).free()
    memory = StateMemory(blocks, long_rope_after=4)
    short, long = memory.state(), memory.state()
    short.open([1, 2, 3, 4])
    long.open([1, 2, 3, 4, 5])
    assert (short.num_computed, short.long_rope) == (2, False)
    assert (long.num_computed, long.long_rope) == (0, True)


def test_a_text_may_begin_without_what_others_computed() -> None:
    blocks = BlockManager(20, 2)
    first = computed(blocks, [1, 2, 3, 4, 5])
    state = StateMemory(blocks).state()
    state.open([1, 2, 3, 4, 5], share=False)
    assert (state.block_table, state.num_computed) == ([], 0)
    state.open([1, 2, 3, 4, 5])
    assert state.block_table == first.block_table[:2]


def test_a_state_that_holds_blocks_is_not_opened_again() -> None:
    state = computed(BlockManager(4, 2), [1, 2, 3])
    with pytest.raises(AssertionError, match="opened twice"):
        state.open([1, 2, 3])


@pytest.mark.parametrize(
    ("text", "num_computed"),
    [
        ([1, 2, 3], 2),  # nothing new: the last token is computed again
        ([1, 2, 3, 7], 3),  # the first token ahead was right, and is the last one now
        ([1, 2, 3, 7, 8], 4),
        ([1, 2, 3, 7, 8, 9, 9], 5),  # all that was ahead was right
        ([1, 2, 3, 7, 9, 9], 4),
        ([1, 2, 3, 9], 3),
        ([1, 2, 3, 9, 8, 1], 3),  # a token behind a wrong one is wrong, whatever it is
    ],
)
def test_rolling_back_keeps_what_the_text_confirms(text: list[int], num_computed: int) -> None:
    state = computed(BlockManager(10, 2), [1, 2, 3], ahead=(7, 8))
    table = list(state.block_table)
    assert state.end == 5
    state.roll_back(text)
    assert (state.num_computed, state.end, state.ahead) == (num_computed, num_computed, [])
    assert state.block_table == table


def test_a_text_that_becomes_long_is_computed_anew() -> None:
    blocks = BlockManager(20, 2)
    known = computed(blocks, [1, 2, 3, 4, 5], long_rope_after=4)
    state = computed(blocks, [1, 2, 3], ahead=(4,), long_rope_after=4)
    state.roll_back([1, 2, 3, 4])
    assert (state.num_computed, state.long_rope) == (3, False)
    state.roll_back([1, 2, 3, 4, 5])
    assert state.long_rope
    assert state.block_table == known.block_table[:2], "another long text has computed its beginning"
    assert state.num_computed == 4


def test_who_writes_first_copies_and_the_other_keeps_the_original() -> None:
    blocks = BlockManager(10, 2)
    state = computed(blocks, [1, 2, 3])
    shared, twin = list(state.block_table), state.fork()
    assert twin.reserve(1)
    assert twin.copies == [(shared[1], twin.block_table[1])]
    assert twin.block_table[0] == shared[0]
    assert state.block_table == shared
    assert state.reserve(1)
    assert state.copies == [], "it is alone on the block now"


@pytest.mark.parametrize(("tokens", "ahead"), [([1, 2, 3, 4], ()), ([1, 2], (3, 4))])
def test_rows_that_are_computed_already_are_not_copied(tokens: list[int], ahead: tuple[int, ...]) -> None:
    blocks = BlockManager(10, 2)
    state = computed(blocks, tokens, ahead=ahead)
    twin = state.fork()
    free = blocks.num_free
    assert twin.reserve(2)
    assert blocks.num_free == free - 1, "a new block, and no copy of the full ones"
    assert twin.copies == []
    assert twin.block_table[:2] == state.block_table


def written_rows() -> tuple[SlotMemory, SequenceState, list[int]]:
    """A text of two tokens with rows behind it, and where all of them lie; each slot holds its place."""
    memory = SlotMemory(BlockManager(10, 2), None)
    state = memory.state()
    assert state.reserve(7)
    state.commit(0, range(2))
    slots = [state.slot(place) for place in range(7)]
    memory.slots.update({slot: (place,) for place, slot in enumerate(slots)})
    return memory, state, slots


def test_rows_that_stand_move_behind_what_is_computed_and_the_others_are_gone() -> None:
    memory, state, slots = written_rows()
    state.commit(2, [0, 2, 4])  # row 0 is the last token of the text; rows 1 and 3 are rejected siblings
    assert [memory.slots[slot] for slot in slots[:5]] == [(0,), (1,), (2,), (4,), (6,)]
    assert state.num_computed == 5


def test_rows_that_stand_ahead_of_the_text_move_too() -> None:
    memory, state, slots = written_rows()
    state.run_ahead([5])
    state.run_ahead([6, 7], [1, 3])
    assert [memory.slots[slot] for slot in slots[:5]] == [(0,), (1,), (2,), (4,), (6,)]
    assert (state.num_computed, state.ahead) == (2, [5, 6, 7])


def test_rows_are_committed_behind_what_is_computed() -> None:
    state = computed(BlockManager(10, 2), [1, 2, 3])
    with pytest.raises(AssertionError, match="behind what is computed"):
        state.commit(2, [0])


def test_what_is_given_back_owes_no_copies() -> None:
    """Its blocks may be handed out in the same step, and then they are filled by somebody else."""
    state = computed(BlockManager(10, 2), [1, 2, 3])
    twin = state.fork()
    assert twin.reserve(1)
    twin.free()
    assert twin.copies == []
