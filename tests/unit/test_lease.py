"""Leases: what one sequence holds of a memory, against a model of what is really written to every slot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.cache.blocks import BlockManager
from outrider.cache.lease import KVLease

NAMESPACES = (None, "tenant")


@dataclass
class Text:
    """A text and the lease on its KV."""

    tokens: list[int]
    namespace: str | None
    lease: KVLease

    @property
    def computed(self) -> list[int]:
        """The tokens whose KV the lease claims to hold: confirmed ones, then those ahead."""
        return self.tokens[: self.lease.num_computed] + self.lease.ahead


class LeaseMachine(RuleBasedStateMachine):
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
        self.slots: dict[int, tuple[object, ...]] = {}
        self.texts: list[Text] = []

    def _is_long(self, num_tokens: int) -> bool:
        return self.long_rope_after is not None and num_tokens > self.long_rope_after

    def _content(self, text: Text, tokens: list[int]) -> tuple[object, ...]:
        return (text.namespace, text.lease.long_rope, *tokens)

    def _slot(self, text: Text, position: int) -> int:
        block, offset = divmod(position, self.blocks.block_size)
        return text.lease.block_table[block] * self.blocks.block_size + offset

    def _shared_prefix(self, text: Text) -> int:
        """Tokens that a text finds in the cache, by trying every block of the memory for each of its own."""
        size, found = self.blocks.block_size, 0
        lease = text.lease
        while found + size < len(text.tokens) and self._is_published(text, found):
            found += size
        assert lease.num_computed == found
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
        lease = KVLease(self.blocks, namespace, self.long_rope_after)
        assert (lease.block_table, lease.num_computed, lease.end, lease.capacity) == ([], 0, 0, 0)
        self.texts.append(Text(tokens, namespace, lease))

    @precondition(lambda self: any(not text.lease.block_table for text in self.texts))
    @rule(data=st.data(), share=st.booleans())
    def open(self, data: st.DataObject, share: bool) -> None:
        text = data.draw(st.sampled_from([text for text in self.texts if not text.lease.block_table]))
        text.lease.open(text.tokens, share=share)
        self._has_opened(text, share=share)

    def _has_opened(self, text: Text, *, share: bool = True) -> None:
        lease = text.lease
        assert lease.long_rope == self._is_long(len(text.tokens))
        assert lease.num_computed == lease.num_published * self.blocks.block_size == lease.capacity
        assert lease.num_computed < len(text.tokens), "one token must be left to compute"
        assert lease.ahead == []
        if share:
            self._shared_prefix(text)
        else:
            assert lease.num_computed == 0

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.texts)).lease
        lease.free()
        assert (lease.block_table, lease.num_computed, lease.ahead, lease.num_published) == ([], 0, [], 0)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        text.lease.free()
        self.texts = [other for other in self.texts if other is not text]

    @precondition(lambda self: 0 < len(self.texts) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        free = self.blocks.num_free
        twin = Text(list(text.tokens), text.namespace, text.lease.fork())
        assert self.blocks.num_free == free, "a fork costs no memory"
        assert twin.lease.block_table == text.lease.block_table
        assert twin.lease.block_table is not text.lease.block_table
        assert twin.lease.ahead == text.lease.ahead
        assert twin.lease.ahead is not text.lease.ahead
        assert (twin.lease.num_computed, twin.lease.space) == (text.lease.num_computed, text.lease.space)
        self.texts.append(twin)

    # -- a text is computed and grows --

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        text = data.draw(st.sampled_from(self.texts))
        text.tokens.append(data.draw(st.sampled_from([*text.lease.ahead[:1], token])))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """What a pass does to the target's lease."""
        text = data.draw(st.sampled_from(self.texts))
        lease = text.lease
        if lease.ahead or lease.long_rope != self._is_long(len(text.tokens)):
            return  # the engine has every text follow its factors first
        stop = data.draw(st.integers(lease.num_computed, len(text.tokens)))
        if self._own(text, stop):
            self._write(text, lease.num_computed, text.tokens[:stop])
            lease.num_computed = stop

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def compute_ahead(self, data: st.DataObject, tokens: list[int]) -> None:
        """What a draft model does: the rest of the text, and tokens behind it that the text may never confirm."""
        text = data.draw(st.sampled_from(self.texts))
        lease = text.lease
        missing = [] if lease.ahead else text.tokens[lease.num_computed :]
        if missing and lease.long_rope != self._is_long(len(text.tokens)):
            return  # a draft model too follows the factors first
        end = lease.end + len(missing) + len(tokens)
        if self._own(text, end):
            self._write(text, lease.end, [*text.computed, *missing, *tokens])
            lease.num_computed += len(missing)
            lease.ahead += tokens
            assert lease.end == end

    def _own(self, text: Text, stop: int) -> bool:
        """Own the blocks up to `stop` as the scheduler does; False where memory is short."""
        lease, size = text.lease, self.blocks.block_size
        needed, free, before = lease.needed(stop), self.blocks.num_free, list(lease.block_table)
        new = max(0, -(-stop // size) - len(before))
        shared = [
            index
            for index in range(lease.end // size, min(-(-stop // size), len(before)))
            if any(before[index] in other.lease.block_table for other in self.texts if other is not text)
        ]
        assert needed == new + len(shared)
        if needed > free:
            return False
        copies = lease.make_writable(stop)
        assert free - self.blocks.num_free == needed
        assert lease.capacity >= stop
        assert copies == [(before[index], lease.block_table[index]) for index in shared]
        assert lease.needed(stop) == 0
        held = {d * size + i: self.slots.get(s * size + i) for s, d in copies for i in range(size)}
        self.slots.update({slot: content for slot, content in held.items() if content is not None})
        return True

    def _write(self, text: Text, start: int, tokens: list[int]) -> None:
        """Keys and values of `tokens` from position `start` on."""
        for position in range(start, len(tokens)):
            slot = self._slot(text, position)
            owners = [other for other in self.texts if slot // self.blocks.block_size in other.lease.block_table]
            assert owners == [text], "wrote to a block that another text reads"
            self.slots[slot] = self._content(text, tokens[: position + 1])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), num_tokens=st.integers(0, 16))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        lease = data.draw(st.sampled_from(self.texts)).lease
        before, free = list(lease.block_table), self.blocks.num_free
        missing = max(0, self.blocks.blocks_for(num_tokens) - len(before))
        assert lease.grow(num_tokens) == (missing <= free)
        assert lease.block_table[: len(before)] == before
        grown = missing if missing <= free else 0
        assert len(lease.block_table) == len(before) + grown
        assert self.blocks.num_free == free - grown

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        lease = text.lease
        settled = lease.num_published
        lease.publish(text.tokens)
        assert lease.num_published == max(settled, lease.num_computed // self.blocks.block_size)

    # -- a text goes another way than was computed --

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        lease, known = text.lease, text.computed
        if lease.long_rope != self._is_long(len(text.tokens)):
            lease.roll_back(text.tokens)
            self._has_opened(text)
            return
        table = list(lease.block_table)
        agreeing = 0
        while agreeing < min(len(known), len(text.tokens) - 1) and known[agreeing] == text.tokens[agreeing]:
            agreeing += 1
        lease.roll_back(text.tokens)
        assert lease.num_computed == agreeing, "all that the text confirms, but for its last token"
        assert (lease.ahead, lease.block_table) == ([], table)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def enter_regime(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        lease, long = text.lease, self._is_long(len(text.tokens))
        before = (list(lease.block_table), lease.num_computed, list(lease.ahead), lease.num_published)
        costs = lease.long_rope != long
        assert lease.enter_regime(len(text.tokens)) == costs
        after = (lease.block_table, lease.num_computed, lease.ahead, lease.num_published)
        assert after == (([], 0, [], 0) if costs else before)
        assert lease.long_rope == long
        assert lease.space == (text.namespace, long)

    # -- at all times --

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity([text.lease.block_table for text in self.texts])
            held = {block for text in self.texts for block in text.lease.block_table}
            assert self.blocks.num_free == self.blocks.num_blocks - len(held)

    @invariant()
    def every_lease_holds_what_it_claims(self) -> None:
        for text in getattr(self, "texts", []):
            known = text.computed
            assert (
                len(known) == text.lease.end <= text.lease.capacity == len(text.lease.block_table) * self.blocks.block_size
            )
            # A rollback counts the last token as not computed; its block stays in the cache, and gets the same token again.
            assert text.lease.num_published * self.blocks.block_size <= text.lease.num_computed + 1
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


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def computed(blocks: BlockManager, tokens: list[int], *, ahead: tuple[int, ...] = (), **how: object) -> KVLease:
    """A lease on a computed and published text, with tokens ahead of it."""
    lease = KVLease(blocks, **how)  # type: ignore[arg-type]
    lease.open(tokens)
    lease.make_writable(len(tokens) + len(ahead))
    lease.num_computed = len(tokens)
    lease.publish(tokens)
    lease.ahead += ahead
    return lease


def test_the_same_text_of_another_namespace_is_not_found() -> None:
    blocks = BlockManager(20, 2)
    computed(blocks, [1, 2, 3, 4, 5], namespace="alice").free()
    found = {}
    for namespace in ("alice", "bob", None):
        lease = KVLease(blocks, namespace)
        lease.open([1, 2, 3, 4, 5])
        found[namespace] = lease.num_computed
    assert found == {"alice": 4, "bob": 0, None: 0}


def test_a_text_under_other_rotary_factors_is_not_found() -> None:
    blocks = BlockManager(20, 2)
    computed(blocks, [1, 2, 3, 4], long_rope_after=4).free()
    short, long = KVLease(blocks, None, 4), KVLease(blocks, None, 4)
    short.open([1, 2, 3, 4])
    long.open([1, 2, 3, 4, 5])
    assert (short.num_computed, short.long_rope) == (2, False)
    assert (long.num_computed, long.long_rope) == (0, True)


def test_a_text_may_begin_without_what_others_computed() -> None:
    blocks = BlockManager(20, 2)
    first = computed(blocks, [1, 2, 3, 4, 5])
    lease = KVLease(blocks)
    lease.open([1, 2, 3, 4, 5], share=False)
    assert (lease.block_table, lease.num_computed) == ([], 0)
    lease.open([1, 2, 3, 4, 5])
    assert lease.block_table == first.block_table[:2]


def test_a_lease_that_holds_blocks_is_not_opened_again() -> None:
    lease = computed(BlockManager(4, 2), [1, 2, 3])
    with pytest.raises(AssertionError, match="opened twice"):
        lease.open([1, 2, 3])


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
    lease = computed(BlockManager(10, 2), [1, 2, 3], ahead=(7, 8))
    table = list(lease.block_table)
    assert lease.end == 5
    lease.roll_back(text)
    assert (lease.num_computed, lease.end, lease.ahead) == (num_computed, num_computed, [])
    assert lease.block_table == table


def test_a_text_that_becomes_long_is_computed_anew() -> None:
    blocks = BlockManager(20, 2)
    known = computed(blocks, [1, 2, 3, 4, 5], long_rope_after=4)
    lease = computed(blocks, [1, 2, 3], ahead=(4,), long_rope_after=4)
    lease.roll_back([1, 2, 3, 4])
    assert (lease.num_computed, lease.long_rope) == (3, False)
    lease.roll_back([1, 2, 3, 4, 5])
    assert lease.long_rope
    assert lease.block_table == known.block_table[:2], "another long text has computed its beginning"
    assert lease.num_computed == 4


def test_who_writes_first_copies_and_the_other_keeps_the_original() -> None:
    blocks = BlockManager(10, 2)
    lease = computed(blocks, [1, 2, 3])
    shared, twin = list(lease.block_table), lease.fork()
    assert twin.needed(4) == lease.needed(4) == 1
    (copy,) = twin.make_writable(4)
    assert copy == (shared[1], twin.block_table[1])
    assert twin.block_table[0] == shared[0]
    assert lease.block_table == shared
    assert lease.make_writable(4) == [], "it is alone on the block now"


@pytest.mark.parametrize(("tokens", "ahead"), [([1, 2, 3, 4], ()), ([1, 2], (3, 4))])
def test_rows_that_are_computed_already_are_not_copied(tokens: list[int], ahead: tuple[int, ...]) -> None:
    blocks = BlockManager(10, 2)
    lease = computed(blocks, tokens, ahead=ahead)
    twin = lease.fork()
    assert twin.needed(6) == 1, "a new block, and no copy of the full ones"
    assert twin.make_writable(6) == []
    assert twin.block_table[:2] == lease.block_table
