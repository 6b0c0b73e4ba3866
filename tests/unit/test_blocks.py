"""Block tables: references, sharing and the prefix cache, held against a model of what every block contains."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.cache.blocks import BlockManager

NAMESPACES = (None, "tenant")


@dataclass
class Text:
    """A sequence as the engine would keep it."""

    tokens: list[int]
    namespace: str | None
    computed: int = 0
    published: int = 0
    table: list[int] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, share, diverge and go, while `slots` remembers what was really written to each slot.

    A slot holds the whole text up to its token, since that is what keys and values depend on.
    """

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(1, 3), prefix_caching=st.booleans())
    def start(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self.slots: dict[int, tuple[object, ...]] = {}
        self.texts: list[Text] = []

    def _slot(self, text: Text, position: int) -> int:
        block, offset = divmod(position, self.blocks.block_size)
        return text.table[block] * self.blocks.block_size + offset

    def _content(self, text: Text, position: int) -> tuple[object, ...]:
        return (text.namespace, *text.tokens[: position + 1])

    def _compute(self, text: Text, stop: int) -> bool:
        """Write keys and values of the tokens up to `stop`, as a pass would; False where memory is short."""
        blocks, start = self.blocks, text.computed
        needed = max(0, blocks.blocks_for(stop) - len(text.table)) + len(blocks.shared_from(text.table, start, stop))
        if needed > blocks.num_free:
            return False
        free = blocks.num_free
        copies = blocks.make_writable(text.table, start, stop)
        assert blocks.grow(text.table, stop)
        assert free - blocks.num_free <= needed
        assert len({destination for _, destination in copies}) == len(copies)
        size = blocks.block_size
        filled = {
            d * size + i: self.slots[s * size + i] for s, d in copies for i in range(size) if s * size + i in self.slots
        }
        self.slots.update(filled)
        for position in range(start, stop):
            slot = self._slot(text, position)
            owners = [other for other in self.texts if slot // size in other.table]
            assert owners == [text], "wrote to a block that another sequence reads"
            self.slots[slot] = self._content(text, position)
        text.computed = stop
        return True

    def _drop(self, text: Text) -> None:
        self.blocks.free(text.table)
        assert text.table == []
        text.computed = text.published = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        namespace=st.sampled_from(NAMESPACES),
    )
    def admit(self, tokens: list[int], namespace: str | None) -> None:
        text = Text(list(tokens), namespace)
        self._match(text)
        self.texts.append(text)

    def _match(self, text: Text) -> None:
        text.table = self.blocks.match(text.tokens, text.namespace)
        text.published = len(text.table)
        text.computed = text.published * self.blocks.block_size
        assert text.computed < len(text.tokens), "one token must be left to compute"
        assert self.blocks.prefix_caching or not text.table

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        stop = data.draw(st.integers(text.computed, len(text.tokens)))
        if not self._compute(text, stop):
            return
        size = self.blocks.block_size
        settled = self.blocks.publish(text.tokens[: text.computed], text.table, text.published, text.namespace)
        assert settled == text.computed // size
        text.published = settled

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        data.draw(st.sampled_from(self.texts)).tokens.append(token)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.integers(0, 5))
    def draft(self, data: st.DataObject, more: int) -> None:
        """Room past the text, for a draft that leaves rubbish behind."""
        text = data.draw(st.sampled_from(self.texts))
        if text.computed < len(text.tokens):
            return
        stop = len(text.tokens) + more
        before, free = list(text.table), self.blocks.num_free
        missing = self.blocks.blocks_for(stop) - len(before)
        if self.blocks.shared_from(text.table, text.computed, stop):
            return  # the engine makes the last row writable before it drafts
        if not self.blocks.grow(text.table, stop):
            assert text.table == before
            assert self.blocks.num_free == free < missing
            return
        assert text.table[: len(before)] == before
        assert free - self.blocks.num_free == max(0, missing)
        for position in range(len(text.tokens), stop):
            self.slots[self._slot(text, position)] = ("rubbish", position)

    @precondition(lambda self: 0 < len(self.texts) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        table = self.blocks.fork(text.table)
        assert table == text.table
        assert table is not text.table
        self.texts.append(Text(list(text.tokens), text.namespace, text.computed, text.published, table))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def preempt_and_match_again(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        self._drop(text)
        self._match(text)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        self._drop(text)
        self.texts = [other for other in self.texts if other is not text]

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity([text.table for text in self.texts])
            held = {block for text in self.texts for block in text.table}
            assert self.blocks.num_free == self.blocks.num_blocks - len(held)

    @invariant()
    def every_table_holds_the_text_it_claims(self) -> None:
        for text in getattr(self, "texts", []):
            for position in range(text.computed):
                assert self.slots[self._slot(text, position)] == self._content(text, position)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def written(blocks: BlockManager, tokens: list[int], namespace: str | None = None) -> list[int]:
    """A table for `tokens`, all of it published."""
    table = blocks.match(tokens, namespace)
    assert blocks.grow(table, len(tokens))
    blocks.publish(tokens, table, 0, namespace)
    return table


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(1, 4).blocks_for(num_tokens) == num_blocks


def test_a_freed_prefix_is_found_again_up_to_one_token_short() -> None:
    blocks = BlockManager(8, 2)
    table = written(blocks, [1, 2, 3, 4, 5])
    known = list(table)
    blocks.free(table)
    assert blocks.num_free == 8
    assert blocks.match([1, 2, 3, 4, 9, 9]) == known[:2]
    assert blocks.match([1, 2, 3, 4]) == known[:1], "the last token is left to compute"
    assert blocks.match([1, 2]) == []
    assert blocks.match([]) == []


def test_a_block_is_found_only_behind_the_tokens_that_led_to_it() -> None:
    blocks = BlockManager(8, 2)
    written(blocks, [1, 2, 3, 4])
    assert blocks.match([9, 9, 3, 4, 5]) == []
    assert blocks.match([3, 4, 5]) == []


def test_namespaces_do_not_see_each_other() -> None:
    blocks = BlockManager(8, 2)
    mine = written(blocks, [1, 2, 3, 4], "mine")
    assert blocks.match([1, 2, 3, 4, 5], "yours") == []
    assert blocks.match([1, 2, 3, 4, 5]) == []
    assert blocks.match([1, 2, 3, 4, 5], "mine") == mine


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(8, 2, prefix_caching=False)
    table = blocks.allocate(2)
    assert blocks.publish([1, 2, 3, 4], table, 0) == 2
    assert blocks.match([1, 2, 3, 4, 5]) == []


def test_a_partly_filled_block_is_not_published() -> None:
    blocks = BlockManager(8, 4)
    table = blocks.allocate(2)
    assert blocks.publish([1, 2, 3, 4, 5, 6], table, 0) == 1
    assert blocks.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == table[:1]


def test_unpublished_memory_is_handed_out_before_cached_memory() -> None:
    blocks = BlockManager(4, 1)
    cached = written(blocks, [1, 2])
    known = list(cached)
    blocks.free(cached)
    assert not set(blocks.allocate(2)) & set(known)
    assert blocks.match([1, 2, 3]) == known


def test_eviction_takes_the_oldest_text_and_its_tail_first() -> None:
    blocks = BlockManager(4, 1)
    old, new = written(blocks, [1, 2]), written(blocks, [8, 9])
    old_blocks, new_blocks = list(old), list(new)
    blocks.free(old)
    blocks.free(new)
    assert blocks.allocate(1) == [old_blocks[1]]
    assert blocks.match([1, 2, 3]) == old_blocks[:1]
    assert blocks.match([8, 9, 7]) == new_blocks


def test_an_evicted_block_is_not_found_again() -> None:
    blocks = BlockManager(2, 1)
    table = written(blocks, [1, 2])
    blocks.free(table)
    taken = blocks.allocate(2)
    assert blocks.match([1, 2, 3]) == []
    blocks.check_integrity([taken])


def test_a_child_whose_parent_was_evicted_is_not_found_under_a_stranger() -> None:
    blocks = BlockManager(3, 1)
    table = written(blocks, [1, 2])
    parent, child = table
    blocks.free([parent])  # leaves the child in use: the parent is evicted before it
    (taken,) = [b for b in blocks.allocate(2) if b == parent]
    blocks.publish([7], [taken], 0)
    assert blocks.match([7, 2, 3]) == [parent], "the new text in the parent's memory is not what led to the child"
    assert blocks.match([1, 2, 3]) == []
    assert child not in (parent, taken)


def test_twins_publish_once_and_go_on_together() -> None:
    blocks = BlockManager(6, 1)
    first, second = blocks.allocate(1), blocks.allocate(2)
    blocks.publish([1], first, 0)
    assert blocks.publish([1, 2], second, 0) == 2
    assert blocks.match([1, 2, 3]) == [first[0], second[1]], "the second's child continues the first's block"
    blocks.check_integrity([first, second, [first[0], second[1]]])


def test_a_hit_goes_as_far_as_the_added_layers_that_are_needed() -> None:
    blocks = BlockManager(8, 2)
    table = written(blocks, [1, 2, 3, 4, 5, 6])
    blocks.hold(table[:2], 7)
    blocks.free(table)
    found = {needs: blocks.match([1, 2, 3, 4, 5, 6, 7], None, frozenset(needs)) for needs in ((), (7,), (7, 8))}
    assert [len(found[needs]) for needs in ((), (7,), (7, 8))] == [3, 2, 0]


def test_a_block_that_holds_more_takes_the_place_of_its_twin() -> None:
    blocks = BlockManager(8, 2)
    first, second = written(blocks, [1, 2, 3, 4]), written(blocks, [1, 2, 3, 4])
    blocks.hold(second[:1], 7)
    blocks.hold(first[:1], 7)  # as much as its twin, which stays
    assert blocks.match([1, 2, 3, 4, 5]) == [second[0], first[1]], "both are one to the blocks behind them"
    blocks.check_integrity([first, second, [second[0], first[1]]])


def test_a_block_with_a_layer_that_its_twin_lacks_takes_its_place() -> None:
    """Two heads draft for the same prompt in turns: each finds it from its second request on."""
    blocks = BlockManager(8, 2)
    first, second = written(blocks, [1, 2]), written(blocks, [1, 2])
    blocks.hold(first, 7)
    blocks.hold(second, 8)
    assert blocks.match([1, 2, 3], None, frozenset({8})) == second
    assert blocks.match([1, 2, 3], None, frozenset({7})) == []
    blocks.check_integrity([first, second, second])


def test_what_a_block_held_is_gone_when_it_is_handed_out_again() -> None:
    blocks = BlockManager(1, 2)
    table = written(blocks, [1, 2])
    blocks.hold(table, 7)
    blocks.free(table)
    table = written(blocks, [3, 4])
    blocks.free(table)
    assert blocks.match([3, 4, 5], None, frozenset({7})) == []


def test_only_shared_blocks_in_the_written_range_are_copied() -> None:
    blocks = BlockManager(8, 2)
    table = blocks.allocate(3)
    fork = blocks.fork(table)
    original = list(table)
    copies = blocks.make_writable(fork, 3, 5)
    assert [source for source, _ in copies] == original[1:3]
    assert fork[:1] == original[:1]
    assert [destination for _, destination in copies] == fork[1:]
    assert table == original
    assert blocks.make_writable(fork, 3, 5) == []
    assert blocks.make_writable(table, 3, 5) == [], "now it is the only reader"
    assert blocks.shared_from(table, 0, 6) == [0]
    blocks.check_integrity([table, fork])


def test_misuse_is_an_assertion() -> None:
    blocks = BlockManager(2, 1)
    with pytest.raises(AssertionError, match="beyond num_free"):
        blocks.allocate(3)
    table = blocks.allocate(1)
    twice = list(table)
    blocks.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(twice)


@pytest.mark.parametrize(
    ("field", "message"),
    [("_ref_count", "reference counts"), ("_free", "lost or doubled"), ("_published", "prefix index")],
)
def test_check_integrity_sees_spoilt_books(field: str, message: str) -> None:
    blocks = BlockManager(4, 1)
    table = written(blocks, [1, 2])
    if field == "_ref_count":
        blocks._ref_count[table[0]] += 1
    elif field == "_free":
        blocks._free.pop()
    else:
        blocks._key[table[0]] = None
    with pytest.raises(AssertionError, match=message):
        blocks.check_integrity([table])
