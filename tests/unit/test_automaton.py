"""The suffix automaton against brute force, and the suffix proposer's drafts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.propose.suffix import ROOT, SuffixAutomaton

FEW = settings(max_examples=150, deadline=None, derandomize=True)
text = st.lists(st.integers(0, 2), min_size=1, max_size=22)


def build(texts: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for each in texts:
        automaton.begin()
        for token in each:
            automaton.append(token)
    return automaton


def occurrences(texts: list[list[int]]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(t[i:j]) for t in texts for i in range(len(t)) for j in range(i + 1, len(t) + 1))


@FEW
@given(st.lists(text, min_size=1, max_size=3))
def test_every_substring_is_found_and_counted(texts: list[list[int]]) -> None:
    automaton = build(texts)
    for substring, count in occurrences(texts).items():
        state = ROOT
        for token in substring:
            state = automaton.followers[state][token]
        assert automaton.counts[state] == count


@FEW
@given(text)
def test_the_link_of_the_whole_text_is_its_longest_earlier_suffix(tokens: list[int]) -> None:
    automaton = build([tokens])
    earlier = [n for n in range(1, len(tokens)) if any(tokens[i : i + n] == tokens[-n:] for i in range(len(tokens) - n))]
    assert automaton.lengths[automaton.links[automaton.last]] == max(earlier, default=0)


@FEW
@given(st.lists(text, min_size=1, max_size=3), text, text)
def test_a_reader_knows_its_longest_match_while_texts_are_added(
    texts: list[list[int]], read: list[int], added: list[int]
) -> None:
    automaton = build(texts)
    state = length = 0
    for place, token in enumerate(read):
        if place == len(read) // 2:  # states split under a reader's feet
            automaton.begin()
            for new in added:
                automaton.append(new)
            texts = [*texts, added]
            longest = _longest(read[:place], texts)
            if length < longest:  # what it has read matches longer only in what was just added; it need not go back
                state, length = ROOT, 0
                for old in read[:place]:
                    state, length = automaton.step(state, length, old)
        state, length = automaton.step(state, length, token)
        assert length == _longest(read[: place + 1], texts)


def _longest(read: list[int], texts: list[list[int]]) -> int:
    known = occurrences(texts)
    return max((n for n in range(len(read) + 1) if n == 0 or tuple(read[-n:]) in known), default=0)


def test_memory_is_linear_in_the_text() -> None:
    automaton = build([[i * i % 101 for i in range(4000)]])
    assert len(automaton.links) <= 2 * 4000
    assert automaton.num_bytes < 4000 * 2 * 500
