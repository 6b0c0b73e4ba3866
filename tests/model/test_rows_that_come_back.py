"""Methods that live on rows of the target's own pass: token recycling and lookahead, in the whole engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from outrider import LLM, DraftModel, Ngram, SamplingParams, SpeculationConfig
from outrider.engine.drafting.planning import as_requested
from outrider.errors import ContradictionError
from outrider.model.batch import Segment
from outrider.model.runner import ModelRunner
from outrider.params import RequestOutput
from outrider.propose.base import ObservedRows, RowStatus
from outrider.propose.lookahead import Lookahead, LookaheadProposer, _Look
from outrider.propose.recycling import TokenRecycling, TokenRecyclingProposer
from tests.model import checkpoints
from tests.model.test_target import Oracle

PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 9, 9, 4], [5, 6], [7, 7, 7, 7, 7, 8, 30]]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SEEDED = SamplingParams(seed=3, max_tokens=20)
RECYCLED = SpeculationConfig(method=TokenRecycling(top_k=4))
LOOK = SpeculationConfig(method=Lookahead(window=2, ngram=3, guesses=2))
WAYS: dict[str, SpeculationConfig] = {
    "recycled": RECYCLED,
    "recycled, fixed shape": SpeculationConfig(method=TokenRecycling(top_k=4, context=1), tree=(3, 2)),
    "lookahead": LOOK,
    "lookahead, one level": SpeculationConfig(method=Lookahead(window=4, ngram=2, guesses=3)),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("draft"), seed=1, layers=2)


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return LLM(path, dtype="float64", block_size=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def crowded(path: str) -> LLM:
    """Too little memory for all, and few rows a step."""
    return LLM(path, dtype="float64", block_size=4, max_num_batched_tokens=32, max_num_seqs=12, kv_cache_tokens=96)


@pytest.fixture(autouse=True)
def nothing_is_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("llm", "crowded"):
        if name in request.fixturenames:
            llm: LLM = request.getfixturevalue(name)
            llm.engine.drafting.planner = as_requested
            llm.engine.check_integrity()
            assert llm.engine.runner.blocks.num_free == llm.engine.runner.blocks.num_blocks


def texts(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def faults(outputs: Sequence[RequestOutput]) -> int:
    return sum(sample.stats.num_proposer_faults for output in outputs for sample in output.outputs)


# -- no text changes ---------------------------------------------------------------------------------------------------


ASKED = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "three samples": SEEDED.replace(n=3),
    "penalties": SEEDED.replace(repetition_penalty=1.3, logit_bias={4: 2.0}),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("way", WAYS)
def test_a_crowded_batch_writes_what_each_writes_alone(crowded: LLM, way: str, asked: str) -> None:
    """Preempted, with prefixes from the cache, drafts cut to the rows that are left, beside another method."""
    params = ASKED[asked]
    plain = [crowded.generate(prompt, params, speculation="none")[0] for prompt in PROMPTS]
    crowded.stats.reset()
    ways = [WAYS[way]] * 6 + [SpeculationConfig(method=Ngram(min_match=1))] * 3
    outputs = crowded.generate([*PROMPTS, *PROMPTS, *PROMPTS], params, speculation=ways)
    assert texts(outputs) == texts([*plain, *plain, *plain])
    assert faults(outputs) == 0
    stats = crowded.stats.finished
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert sum(sample.stats.num_draft_tokens for output in outputs[:6] for sample in output.outputs) > 0


@pytest.mark.parametrize("way", WAYS)
def test_up_to_the_end_of_the_context(path: str, way: str) -> None:
    llm = LLM(path, dtype="float64", block_size=4, max_model_len=24)
    params = GREEDY.replace(max_tokens=100)
    outputs = llm.generate(PROMPTS, params, speculation=WAYS[way])
    assert texts(outputs) == texts(llm.generate(PROMPTS, params, speculation="none"))
    assert [len(p) + len(o.token_ids) for p, o in zip(PROMPTS, outputs, strict=True)] == [24] * 3
    assert faults(outputs) == 0


@pytest.mark.parametrize("way", WAYS)
def test_in_turns_and_behind_other_drafts(llm: LLM, draft: str, way: str) -> None:
    """Behind a lookup, behind drawn tokens, before both, twice in one step, and not at all."""
    lookup = SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=2)
    drawn = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=2)
    one = WAYS[way]
    rounds = [(lookup, one), (drawn, one), (one, lookup), (one, drawn), (one, one), (), (one,)]
    for params in (GREEDY, SEEDED.replace(n=2)):
        llm.engine.drafting.planner = as_requested
        plain = llm.generate(PROMPTS, params, speculation="none")
        llm.engine.drafting.planner = lambda seq: rounds[seq.view.round % len(rounds)]
        outputs = llm.generate(PROMPTS, params, speculation="none")
        assert texts(outputs) == texts(plain)
        assert faults(outputs) == 0


# -- token recycling costs nothing -------------------------------------------------------------------------------------


class Rows:
    """Counts the rows of the target's passes, and those of them that have logits."""

    def __init__(self, runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
        self.num_rows = self.num_logits = 0
        stock = runner.forward

        def counting(segments: Sequence[Segment], *args: Any, **more: Any) -> Any:
            out = stock(segments, *args, **more)
            self.num_rows += sum(segment.num_rows for segment in segments)
            self.num_logits += len(out.logits)
            return out

        patch.setattr(runner, "forward", counting)


def test_recycling_computes_no_row_and_no_logits_and_loses_no_prefix(path: str) -> None:
    """Beside its draft tokens, a text costs what it costs with a method that asks for nothing."""
    found: dict[str, tuple[Any, ...]] = {}
    prompts = [*PROMPTS, [3] * 50, PROMPTS[0], [*PROMPTS[0], 8, 8, 8]]
    for name, config in {"recycled": RECYCLED, "lookup": SpeculationConfig(method=Ngram(min_match=1))}.items():
        llm = LLM(path, dtype="float64", block_size=4, max_num_batched_tokens=32)
        with pytest.MonkeyPatch.context() as patch:
            rows = Rows(llm.engine.runner, patch)
            cached, num_drafted, num_passes = [], 0, 0
            for prompt in prompts:
                stats = llm.generate(prompt, GREEDY, speculation=config)[0].stats
                cached.append(stats.num_cached_tokens)
                num_drafted += stats.num_draft_tokens
                num_passes += stats.num_target_passes
        assert num_drafted > 0
        assert rows.num_rows == llm.engine.stats.num_rows
        found[name] = (cached, rows.num_rows - num_drafted - num_passes, rows.num_logits - num_drafted - num_passes)
    assert found["recycled"] == found["lookup"]
    cached, num_prompt_rows, num_more_logits = found["recycled"]
    assert sum(cached) > 0
    assert num_prompt_rows == sum(len(prompt) - 1 for prompt in prompts) - sum(cached)
    assert num_more_logits == 0, "a row of logits for each pass and each draft token"


@pytest.mark.parametrize("params", [GREEDY, SEEDED.replace(n=2)], ids=["greedy", "two samples"])
def test_what_is_kept_is_what_the_target_said(
    crowded: LLM, path: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every row with logits, text or draft, standing or rejected: the stock model's likeliest tokens behind its path."""
    oracle = Oracle(path)
    stock = TokenRecyclingProposer._learn
    kept: list[tuple[list[int], list[int]]] = []

    def watched(self: TokenRecyclingProposer, seen: ObservedRows) -> None:
        stock(self, seen)
        contexts: dict[tuple[int, ...], list[int]] = {}
        for row in seen.target_top_k.rows if seen.target_top_k else ():
            path_up, at = [seen.token_ids[row]], row
            while seen.parents[at] >= 0:
                at = seen.parents[at]
                path_up.insert(0, seen.token_ids[at])
            text = [*seen.sequence.token_ids[: seen.positions[at]], *path_up]
            contexts[tuple(text[-2:])] = text
        for context, text in contexts.items():
            found = self.shared.of(seen.sequence.namespace).find(context)
            assert found is not None
            kept.append((text, found[0].tolist()))

    monkeypatch.setattr(TokenRecyclingProposer, "_learn", watched)
    outputs = crowded.generate([*PROMPTS, *PROMPTS], params, speculation=RECYCLED)
    assert faults(outputs) == 0
    assert len(kept) > 100
    for text, successors in kept[::5]:
        assert successors == oracle.logits(text)[-1].topk(4).indices.tolist()


def test_what_others_wrote_is_recycled_within_their_namespace_only(llm: LLM) -> None:
    def first_drafts(namespace: str) -> int:
        output = llm.generate(PROMPTS[0], GREEDY, speculation=RECYCLED, namespace=namespace, trace=True)[0].outputs[0]
        return sum(len(found.token_ids) for found in (output.rounds or ())[:2])

    assert first_drafts("alice") == 0, "nothing is known yet"
    assert first_drafts("alice") > 0
    assert first_drafts("bob") == 0


# -- lookahead's window ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SEEDED, SEEDED.replace(n=3)], ids=["greedy", "seeded", "three samples"])
def test_a_column_grows_by_what_the_target_likes_behind_it(
    crowded: LLM, path: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token that enters the window is the stock model's most likely one after the text, the first levels to its left
    and its own column; across preemptions, forks and drafts that are cut."""
    oracle = Oracle(path)
    stock = LookaheadProposer._advance
    new: list[tuple[list[int], int]] = []

    def watched(self: LookaheadProposer, look: _Look, seen: ObservedRows) -> None:
        asked = [(column, list(column)) for column in look.asked]
        rows = seen.where(RowStatus.SCRATCH)
        stock(self, look, seen)
        assert len(rows) == sum(len(before) for _, before in asked)
        root = seen.positions[rows[0]] if rows else 0
        left: list[int] = []
        for column, before in asked:
            new.append(([*seen.sequence.token_ids[:root], *left, *before], column[-1]))
            left.append(before[0])

    monkeypatch.setattr(LookaheadProposer, "_advance", watched)
    outputs = crowded.generate([*PROMPTS, *PROMPTS], params, speculation=LOOK)
    assert faults(outputs) == 0
    assert len(new) > 60
    for text, token in new[::5]:
        assert token == oracle.logits(text)[-1].argmax()


def test_window_rows_count_as_rows_and_are_no_draft_tokens(llm: LLM) -> None:
    output = llm.generate(PROMPTS[1], GREEDY, speculation=LOOK, trace=True)[0].outputs[0]
    rounds = [found for found in output.rounds or () if found.num_scratch_rows]
    assert max(found.num_scratch_rows for found in rounds) == 4
    assert all(found.num_scratch_rows + len(found.token_ids) <= LOOK.num_draft_tokens for found in rounds)
    assert output.stats.num_draft_tokens == sum(len(found.token_ids) for found in output.rounds or ())


def test_a_window_too_large_is_refused_before_any_work(llm: LLM) -> None:
    before = llm.engine.stats.num_steps
    with pytest.raises(ContradictionError, match="window"):
        llm.generate(PROMPTS[0], GREEDY, speculation={"method": "lookahead", "window": 400, "ngram": 4})
    with pytest.raises(ContradictionError, match="num_draft_tokens"):
        llm.generate(PROMPTS[0], GREEDY, speculation={"method": "lookahead", "window": 8, "num_draft_tokens": 4})
    assert llm.engine.stats.num_steps == before
    assert not llm.engine.has_work
