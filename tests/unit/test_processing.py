"""What parameters do to logits along a path: against transformers' own processors, and what may go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from outrider.draft import Draft, Law
from outrider.params import SamplingParams
from outrider.verify.noise import KeyedNoise
from outrider.verify.processing import NothingAllowedError, Processing
from outrider.verify.verifier import CandidateKeys, DraftCandidate, Rule, Verifier

VOCAB = 11
FEW = settings(max_examples=60, deadline=None, derandomize=True)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


def scores(num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB, generator=generator, dtype=torch.float64) * 3


def applied(
    params: SamplingParams, prompt: list[int], output: list[int], paths: list[tuple[int, ...]], **more: object
) -> Tensor:
    processing = Processing(params, [*prompt, *output], len(prompt), **more)
    return processing.apply(scores(len(paths)), paths).logits


@FEW
@given(tokens, tokens, st.lists(tokens.map(tuple), min_size=1, max_size=4))
def test_a_draft_row_is_what_the_committed_row_would_be(
    prompt: list[int], output: list[int], paths: list[tuple[int, ...]]
) -> None:
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=-0.2,
        logit_bias={2: 1.5},
        bad_words_ids=[[1, 2], [4]],
    )
    prompt = [0, *prompt]
    drafted = applied(params, prompt, output, paths, bad_words=params.bad_words_ids)
    for row, path in enumerate(paths):
        processing = Processing(params, [*prompt, *output, *path], len(prompt), bad_words=params.bad_words_ids)
        assert torch.equal(drafted[row], processing.apply(scores(len(paths))[row : row + 1], [()]).logits[0])


@FEW
@given(tokens, tokens)
def test_repetition_penalty_is_transformers(prompt: list[int], output: list[int]) -> None:
    ids = torch.tensor([[0, *prompt, *output]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, scores(1))
    torch.testing.assert_close(applied(SamplingParams(repetition_penalty=1.7), [0, *prompt], output, [()]), expected)


@FEW
@given(tokens, tokens.map(tuple))
def test_bad_words_are_transformers(output: list[int], path: tuple[int, ...]) -> None:
    words = [[1], [2, 3], [4, 4, 5]]
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=0)(torch.tensor([[9, *output, *path]]), scores(1))
    found = applied(SamplingParams(bad_words_ids=words), [9], output, [path], bad_words=tuple(tuple(w) for w in words))
    assert torch.equal(found, expected)


def test_frequency_and_presence_count_the_output_and_the_path_alone() -> None:
    found = applied(SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), [1, 1, 1], [2], [(2, 3)])
    expected = scores(1)
    expected[0, 2] -= 0.5 * 2 + 0.25
    expected[0, 3] -= 0.5 + 0.25
    torch.testing.assert_close(found, expected)


def test_the_order_is_bias_penalty_processor_mask() -> None:
    seen: list[Tensor] = []

    def spy(ids: Tensor, given: Tensor) -> Tensor:
        seen.append(given.clone())
        return given + 1000.0

    params = SamplingParams(logit_bias={1: 2.0}, repetition_penalty=2.0, logits_processors=[spy], allowed_token_ids=[1, 2])
    found = applied(params, [1], [], [()])
    biased = scores(1)[0, 1] + 2.0
    assert seen[0][0, 1] == (biased / 2 if biased > 0 else biased * 2)
    assert found.isfinite().nonzero()[:, 1].tolist() == [1, 2]


def test_ends_are_forbidden_until_enough_is_written_on_each_path() -> None:
    processing = Processing(SamplingParams(min_tokens=2, max_tokens=9), [5, 6], 1, end_token_ids=[0])
    found = processing.apply(scores(3), [(), (1,), (1, 2)]).logits
    assert found[:, 0].isfinite().tolist() == [False, True, True]


def test_a_row_without_any_token_left_is_told_and_returned_as_it_was() -> None:
    params = SamplingParams(allowed_token_ids=[3], bad_words_ids=[[1, 3]])
    processing = Processing(params, [1], 1, bad_words=[(1, 3)])
    found = processing.apply(scores(2), [(), (3,)])
    assert [type(fault) for fault in found.faults.values()] == [NothingAllowedError]
    assert torch.equal(found.logits[0], scores(2)[0])
    assert found.logits[1].isfinite().nonzero().flatten().tolist() == [3]


def test_nothing_asked_is_nothing_active() -> None:
    assert not Processing(SamplingParams(top_p=0.5, temperature=2.0), [1], 1, end_token_ids=[0]).active
    assert Processing(SamplingParams(min_tokens=1), [1], 1, end_token_ids=[0]).active
    assert not Processing(SamplingParams(min_tokens=1), [1, 2], 1, end_token_ids=[0]).active, "enough is written"


@pytest.mark.parametrize(
    "answer",
    [
        lambda s: s[0],
        lambda s: s[:, :3],
        lambda s: None,
        lambda s: s * float("nan"),
        lambda s: s + float("inf"),
        lambda s: 1.0,
    ],
)
def test_a_processor_that_answers_nonsense_is_refused(answer: object) -> None:
    params = SamplingParams(logits_processors=[lambda ids, s: answer(s)])
    faults = Processing(params, [1], 1).apply(scores(1), [()]).faults
    assert "returned" in str(faults[0])
    assert isinstance(faults[0], ValueError)


def test_a_processor_cannot_spoil_the_row_it_is_shown() -> None:
    def spoil(ids: Tensor, given: Tensor) -> Tensor:
        given.zero_()
        return given

    logits = scores(1)
    Processing(SamplingParams(logits_processors=[spoil]), [1], 1).apply(logits, [()])
    assert torch.equal(logits, scores(1))


# -- what is forced ------------------------------------------------------------------------------------------------------


class Forcing:
    """A structure that leaves no choice along one path; behind it, it raises or leaves one."""

    def __init__(self, *tokens: int, error: BaseException | None = None) -> None:
        self._tokens, self._error = tokens, error

    def only(self, path: tuple[int, ...]) -> int | None:
        if len(path) < len(self._tokens):
            return self._tokens[len(path)]
        if self._error is not None:
            raise self._error
        return None


@pytest.mark.parametrize(
    ("structure", "most", "wanted"),
    [
        (Forcing(4, 5, 6), 9, (4, 5, 6)),
        (Forcing(4, 5, 6), 2, (4, 5)),
        (Forcing(4, 5, 6), 0, ()),
        (Forcing(4, 5, 6), -1, ()),
        (Forcing(4, 2, 6), 9, (4,)),  # 2 ends the text, and needs no row
        (Forcing(4, 5, error=RuntimeError("gave up")), 9, ()),
        (None, 9, ()),
    ],
)
def test_a_forced_run_ends_where_it_must(structure: Any, most: int, wanted: tuple[int, ...]) -> None:
    assert Processing(SamplingParams(), [1, 3], 2, (2,), (), structure).forced(most) == wanted


def test_an_interrupt_is_no_fault_of_a_structure() -> None:
    structure: Any = Forcing(4, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Processing(SamplingParams(), [1, 3], 2, (2,), (), structure).forced(9)


# -- chances of what a walk writes -----------------------------------------------------------------------------------------


def test_a_walk_tells_the_chance_of_each_token_that_it_writes() -> None:
    """The governor compares an idle model with the last tokens of a text, so none of them may be left out."""
    logits = torch.tensor([[0.0, 30.0, 0.0], [0.0, 0.0, 30.0], [0.0, 0.0, 0.0]])
    keys = CandidateKeys(0, 1, 0, 0, 5)
    draft = Draft.chain([1, 2], Law.OPAQUE)
    for sampling, last in ((SamplingParams(temperature=1.0), 1 / 3), (SamplingParams(temperature=0.0), 1.0)):
        candidate = DraftCandidate(draft, (0, 3), sampling, keys, Rule.WALK)
        (verdict,) = Verifier(KeyedNoise()).verify([candidate], logits)
        assert verdict.path == (0, 1)
        assert verdict.chances == pytest.approx((1.0, 1.0, last))
