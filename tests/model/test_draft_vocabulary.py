"""Drafts that leave rare tokens out: the logits that are computed keep their bits, drafts hold no other tokens, and texts
stay what they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, DFlash, DraftModel, Eagle1, Mtp, SamplingParams, SpeculationConfig
from outrider.kernels.library import available_sets
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle, save_random_mtp
from outrider.model.batch import Segment
from outrider.propose.draft_vocabulary import DraftVocabulary, draft_vocabulary
from outrider.propose.settings import Method
from tests.model import checkpoints
from tests.model.test_fused import runner_of

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
VOCAB, SIZE = 1000, 200
TEXT = [3, 5, 8, 13, 999, 21]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return tuple(  # type: ignore[return-value]
        str(checkpoints.save("llama", folder / str(seed), seed=seed, vocab_size=VOCAB, layers=layers))
        for seed, layers in ((1, 3), (2, 1))
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the latter one caps its logits
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_logits_that_are_computed_have_their_bits_and_others_are_minus_infinity(
    tmp_path: Path, family: str, dtype: str
) -> None:
    runner = runner_of(str(checkpoints.save(family, tmp_path / family, vocab_size=VOCAB)), dtype)
    at_once = runner.backend.tokens_at_once()
    assert at_once is not None
    groups = [(0, 3), (4, 5), (-(-VOCAB // at_once) - 1, -(-VOCAB // at_once))]
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    for begin, end in groups:
        kept[begin * at_once : end * at_once] = True
    table, threads = runner.blocks.allocate(12), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for text in (TEXT[:1], TEXT, TEXT * 3):
                segments = [Segment(text, 0, table)]
                whole = runner.forward(segments).logits
                part = runner.forward(segments, head_panels=np.array(groups, np.int64)).logits
                assert torch.equal(part[:, kept], whole[:, kept])
                assert part[:, ~kept].eq(-torch.inf).all()
            states = runner.forward([Segment(TEXT, 0, table)], aux_layers=[-1]).aux_hidden_states[-1]
            whole = runner.backend.head(runner.loaded, states)
            part = runner.backend.head(runner.loaded, states, np.array(groups, np.int64))
            assert torch.equal(whole, runner.forward([Segment(TEXT, 0, table, logits_from=0)]).logits)
            assert torch.equal(part[:, kept], whole[:, kept])
            assert part[:, ~kept].eq(-torch.inf).all()
    finally:
        torch.set_num_threads(threads)


def groups_of(vocabulary: DraftVocabulary) -> set[int]:
    return {group for begin, end in vocabulary.panels.tolist() for group in range(begin, end)}


def test_tokens_of_texts_are_among_those_that_are_drafted() -> None:
    vocabulary = DraftVocabulary(64, 1000, 16, {999, 990, 5})
    first = {0, 1, 2, 3}
    assert vocabulary.panels.tolist() == [[0, 4], [61, 63]]
    vocabulary.see(7, [1, 500, 5000])  # the last one is none of the draft model's tokens
    assert groups_of(vocabulary) == {*first, 31, 61, 62}
    vocabulary.see(7, [1, 500, 5000, 600])
    vocabulary.see(8, [500])
    assert groups_of(vocabulary) == {*first, 31, 37, 61, 62}
    vocabulary.see(8, [500, 700])
    assert groups_of(vocabulary) == {*first, 31, 43, 61, 62}, "there is room for two, and 600 was seen before 500"
    vocabulary.forget(8)
    vocabulary.see(8, [600])
    assert groups_of(vocabulary) == {*first, 37, 43, 61, 62}


def test_rare_tokens_are_left_out_of_large_vocabularies_alone() -> None:
    loaded: Any = SimpleNamespace(vocab_size=150_000, tokenizer=None, eos_token_ids=frozenset({149_999}))
    found = draft_vocabulary(None, loaded, 32)
    assert found is not None
    assert found.panels.tolist() == [[0, 49_152 // 32], [149_999 // 32, 149_999 // 32 + 1]]
    assert draft_vocabulary(0, loaded, 32) is None
    assert draft_vocabulary(150_000, loaded, 32) is None
    assert draft_vocabulary(None, loaded, None) is None, "its backend computes all tokens"
    loaded.vocab_size = 50_000
    assert draft_vocabulary(None, loaded, 32) is None
    assert draft_vocabulary(1000, loaded, 32) is not None


@pytest.fixture(scope="module")
def methods(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Method]:
    """Methods that draft few of the tokens; heads have no output layer of their own."""
    folder = tmp_path_factory.mktemp("heads")
    mtp = save_random_mtp(folder / "mtp", pair[0], "deepseek_v3", 2)
    dflash = save_random_dflash(folder / "dflash", pair[0])
    return {
        "draft_model": DraftModel(model=pair[1], vocabulary=SIZE),
        "eagle1": Eagle1(model=save_random_eagle(folder / "eagle1", pair[0], "safeailab1"), vocabulary=SIZE),
        "mtp": Mtp(model=mtp, vocabulary=SIZE),
        "dflash": DFlash(model=dflash, vocabulary=SIZE),
    }


@pytest.mark.parametrize("shape", [{"num_draft_tokens": 5}, {"tree": (2, 2, 1)}], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1, max_tokens=24, ignore_eos=True, seed=3),
    ],
    ids=["greedy", "seeded"],
)
@pytest.mark.parametrize("name", ["draft_model", "eagle1", "mtp", "dflash"])
def test_texts_stay_and_drafts_hold_the_first_tokens_and_those_of_texts(
    pair: tuple[str, str],
    methods: dict[str, Method],
    name: str,
    sampling: SamplingParams,
    shape: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(pair[0], dtype="float32", max_num_seqs=3)
    prompts = [[1, 2, 3], [9, 800, 7, 6], [998] * 5]
    want = [out.token_ids for out in llm.generate(prompts, sampling, speculation="none")]

    def drafted_by(method: Method) -> list[tuple[set[int], set[int]]]:
        """The tokens of drafts, each with those of its text."""
        found: list[tuple[set[int], set[int]]] = []
        proposer = llm.proposers.get(method)
        propose = proposer.propose

        def watched(requests: Any, noise: Any) -> Any:
            drafts = propose(requests, noise)
            for request, draft in zip(requests, drafts, strict=True):
                found.append((set(draft.token_ids), set(request.sequence.token_ids)))
            return drafts

        with monkeypatch.context() as patch:
            patch.setattr(proposer, "propose", watched)
            config = SpeculationConfig(method=method, **shape)
            assert [out.token_ids for out in llm.generate(prompts, sampling, speculation=config)] == want
        return found

    at_once = llm.engine.runner.backend.tokens_at_once()
    assert at_once is not None
    first = -(-SIZE // at_once) * at_once
    few = drafted_by(methods[name])
    groups = {token // at_once for _, text in few for token in text}
    assert any(t >= first for tokens, _ in few for t in tokens), "tokens of texts are drafted, too"
    assert all(t < first or t // at_once in groups for tokens, _ in few for t in tokens)
    every = drafted_by(methods[name].model_copy(update={"vocabulary": 0}))
    assert any(t >= first and t // at_once not in groups for tokens, _ in every for t in tokens)


def test_a_stage_verifies_by_the_law_that_is_drafted_from(pair: tuple[str, str]) -> None:
    llm = LLM(pair[0], dtype="float32", max_num_seqs=2)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[1, 2, 3, 1, 2, 3], [900, 901, 900, 901]]
    want = [out.token_ids for out in llm.generate(prompts, sampling, speculation="none")]
    staged = {"method": "staged", "model": pair[1], "vocabulary": SIZE, "drafter": "ngram"}
    assert [out.token_ids for out in llm.generate(prompts, sampling, speculation=staged)] == want
