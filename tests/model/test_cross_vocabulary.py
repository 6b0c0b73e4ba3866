"""Drafts from models of other vocabularies: no text changes, drafts are as good as they were, and misuse is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, CrossVocabulary, DraftModel, Ngram, SamplingParams, SpeculationConfig
from outrider.config import default_model
from outrider.errors import ContradictionError, InvalidParameterError, VocabularyMismatchError
from outrider.propose.bridge import SharedTokens
from outrider.propose.cross_vocabulary import TextProposer
from outrider.propose.draft_model import DraftModelProposer
from tests.model import checkpoints
from tests.model.core import DRAFTING, core
from tests.model.vocabularies import save_permuted_and_cut, save_random, sentencepiece_like, words_alone

ALL_MERGES = 1 << 20
PROMPTS = [
    "def parse(line):\n    return line.split(",
    "é世界 🎉 the 世",
    "import os\nimport sys\n\ndef main(",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [",
]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(seed=4, max_tokens=16)
PENALISED = SamplingParams(seed=5, max_tokens=16, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={300: 2.0})
TWO = SamplingParams(seed=6, max_tokens=10, n=2)
MATCHES = ("tokens", "text")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "permuted": save_permuted_and_cut(folder / "permuted", num_merges=ALL_MERGES),
        "cut": save_permuted_and_cut(folder / "cut", num_merges=1200),
        "spaced": save_random(folder / "spaced", sentencepiece_like(), **ends),
    }


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(dtype="float64", block_size=8, max_num_batched_tokens=64)
    yield llm
    llm.engine.check_integrity()
    for proposer in llm.proposers:
        if not isinstance(proposer, DraftModelProposer):
            continue
        assert not proposer._states
        assert not getattr(proposer._bridge, "_readings", {})
        assert proposer.runner.blocks.num_free == proposer.runner.blocks.num_blocks


def texts(llm: LLM, prompts: Any, params: Any, speculation: Any) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate(prompts, params, speculation=speculation)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert sum(output.stats.num_proposer_faults for output in outputs) == 0
    return [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]


def crossed(model: str, match: str = "tokens", num_draft_tokens: int = 4, **more: Any) -> SpeculationConfig:
    return SpeculationConfig(method=CrossVocabulary(model=model, match=match), num_draft_tokens=num_draft_tokens, **more)


@pytest.mark.parametrize(
    "shift",
    [0, *(pytest.param(shift, marks=pytest.mark.slow) for shift in (1, 2, 3))],
    ids="parameters shifted by {}".format,
)
def test_no_text_changes_in_a_batch_of_all_ways(llm: LLM, drafts: dict[str, str], shift: int) -> None:
    """Every way meets every prompt and all parameters, but not each prompt with each parameters: these are shifted."""
    asked = [GREEDY, SEEDED, PENALISED, TWO]
    plain = {
        (prompt, place): texts(llm, prompt, params, "none")[0] for prompt in PROMPTS for place, params in enumerate(asked)
    }
    ways = [crossed(model, match) for model in drafts.values() for match in MATCHES]
    ways += [crossed(drafts["cut"], tree=(2, 1), num_draft_tokens=4), SpeculationConfig(method="ngram")]
    pairs = [(prompt, (turn + place + shift) % 4) for turn, prompt in enumerate(PROMPTS) for place in range(len(ways))]
    found = texts(llm, [prompt for prompt, _ in pairs], [asked[place] for _, place in pairs], ways * len(PROMPTS))
    assert found == [plain[pair] for pair in pairs]


def test_nothing_is_told_of_its_drafts_while_it_is_idle(llm: LLM, drafts: dict[str, str]) -> None:
    """So the engine tries it now and then where it chooses: it would else read texts for nothing."""
    method = crossed(drafts["cut"]).method
    assert method is not None
    assert not llm.proposers.get(method).tells_overlaps


@pytest.mark.parametrize("match", core(MATCHES, ["text"], *DRAFTING))
def test_a_prompt_that_ends_inside_a_character(llm: LLM, drafts: dict[str, str], match: str) -> None:
    whole = llm.encode("the 世界 🎉")
    prompts = [list(whole[:end]) for end in range(1, len(whole))]
    params = GREEDY.replace(max_tokens=8)
    for name in ("cut", "spaced"):
        assert texts(llm, prompts, params, crossed(drafts[name], match)) == texts(llm, prompts, params, "none")


# -- how good the drafts are --------------------------------------------------------------------------------------------


def accepted(llm: LLM, params: SamplingParams, speculation: SpeculationConfig) -> tuple[int, int]:
    """(accepted tokens, drafts) over all prompts, once every prompt is in the prefix caches: a draft model that has far to
    catch up with drafts nothing meanwhile."""
    llm.generate(PROMPTS, params, speculation=speculation)
    outputs = llm.generate(PROMPTS, params, speculation=speculation)
    return sum(o.stats.num_accepted_tokens for o in outputs), sum(o.stats.num_drafts for o in outputs)


@pytest.mark.parametrize("params", core([GREEDY, SEEDED], [SEEDED], *DRAFTING), ids=["greedy", "coupled"])
def test_with_other_ids_for_the_same_tokens_drafts_are_the_same(
    llm: LLM, drafts: dict[str, str], params: SamplingParams
) -> None:
    same = SpeculationConfig(method=DraftModel(), num_draft_tokens=4)
    found = accepted(llm, params, crossed(drafts["permuted"]))
    assert found == accepted(llm, params, same)
    assert found[0] > 0
    tree = {"tree": (2, 2), "num_draft_tokens": 6}
    assert accepted(llm, params, crossed(drafts["permuted"], **tree)) == accepted(llm, params, same.replace(**tree))


@pytest.mark.parametrize("match", MATCHES)
def test_a_draft_that_lost_two_thirds_of_its_tokens_is_still_followed(llm: LLM, drafts: dict[str, str], match: str) -> None:
    full, _ = accepted(llm, GREEDY, SpeculationConfig(method=DraftModel(), num_draft_tokens=4))
    cut, _ = accepted(llm, GREEDY, crossed(drafts["cut"], match))
    assert cut > 0.6 * full


# -- what is kept from step to step -------------------------------------------------------------------------------------


def drafted(llm: LLM, speculation: SpeculationConfig, params: SamplingParams) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, params, speculation=speculation, trace=True)
    return [found.token_ids for out in outputs for found in out.outputs[0].rounds or ()]


@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize("name", ["cut", "spaced"])
def test_what_is_kept_is_what_would_be_computed_anew(
    llm: LLM, drafts: dict[str, str], name: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = crossed(drafts[name], match)
    assert config.method is not None
    proposer = llm.proposers.get(config.method)
    assert isinstance(proposer, DraftModelProposer)
    monkeypatch.setattr(proposer, "_max_rows", 1000)  # who forgets all reads all in one pass
    kept = drafted(llm, config, GREEDY)
    assert sum(map(bool, kept)) > 15
    stock = proposer.begin_draft

    def forgetful(request: Any, requests: Any) -> Any:
        state = proposer._states.pop(request.sequence.seq_id, None)
        if state is not None:
            state.free()
        proposer._bridge.forget(request.sequence)
        return stock(request, requests)

    monkeypatch.setattr(proposer, "begin_draft", forgetful)
    assert drafted(llm, config, GREEDY) == kept


@pytest.mark.parametrize("match", MATCHES)
def test_few_rows_are_computed_anew(llm: LLM, drafts: dict[str, str], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the prompt is read, a step costs no more than what came since, and what was open."""
    config = crossed(drafts["cut"], match)
    assert config.method is not None
    proposer = llm.proposers.get(config.method)
    assert isinstance(proposer, DraftModelProposer)
    rows: list[int] = []
    stock = proposer.runner.forward

    def counting(segments: Any, *args: Any, **more: Any) -> Any:
        rows.extend(segment.num_rows for segment in segments)
        return stock(segments, *args, **more)

    monkeypatch.setattr(proposer.runner, "forward", counting)
    prompt = "The keeper of the lighthouse counted the ships accordingly. " * 12
    llm.generate(prompt, GREEDY, speculation=config)
    read = next(place for place, count in enumerate(rows) if count <= 8)
    assert sum(rows[:read]) > 100
    assert max(rows[read:]) <= 16


def test_texts_longer_than_the_drafts_context_are_written_on_without_drafts(
    llm: LLM, drafts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random draft reads letter by letter and holds 160 tokens of its own; the target's text is much shorter."""
    for match in MATCHES:
        config = crossed(drafts["spaced"], match)
        assert config.method is not None
        proposer = llm.proposers.get(config.method)
        assert isinstance(proposer, DraftModelProposer)
        longest = 0
        stock = proposer.runner.forward

        def measuring(segments: Any, *args: Any, stock: Any = stock, **more: Any) -> Any:
            nonlocal longest
            longest = max(longest, *(segment.text_len for segment in segments))
            return stock(segments, *args, **more)

        monkeypatch.setattr(proposer.runner, "forward", measuring)
        prompt = "Counting ships accordingly. " * 5
        assert texts(llm, prompt, GREEDY, config) == texts(llm, prompt, GREEDY, "none")
        assert 150 < longest <= 160


def test_too_little_memory_and_other_methods_before_it(drafts: dict[str, str]) -> None:
    llm = LLM(dtype="float64", block_size=4, kv_cache_tokens=120, max_num_seqs=8, max_num_batched_tokens=24)
    plain = texts(llm, PROMPTS, SEEDED, "none")
    ways = [crossed(drafts[name], match) for name, match in (("cut", "tokens"), ("cut", "text"), ("spaced", "tokens"))]
    first = SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=2)
    llm.engine.drafting.planner = lambda seq: (first, ways[(seq.view.round + seq.num_prompt_tokens) % 3], ways[0])[
        : 2 + seq.view.round % 2
    ]
    assert texts(llm, PROMPTS * 2, SEEDED, ways[0]) == plain * 2
    assert llm.stats.finished.num_preemptions > 0
    for proposer in llm.proposers:
        proposer.check_integrity()


def test_structured_output_is_drafted_in_shared_tokens(llm: LLM, drafts: dict[str, str]) -> None:
    pytest.importorskip("llguidance")
    from outrider import StructuredOutputs

    structure = StructuredOutputs(json_schema={"type": "object", "properties": {"name": {"enum": ["é", "the"]}}})
    params = SEEDED.replace(structured_outputs=structure)
    plain = texts(llm, PROMPTS, params, "none")
    for name in ("cut", "spaced"):
        for match in MATCHES:
            assert texts(llm, PROMPTS, params, crossed(drafts[name], match)) == plain


def test_a_request_that_allows_only_what_the_draft_lacks_is_drafted_from_these(llm: LLM, drafts: dict[str, str]) -> None:
    config = crossed(drafts["spaced"])
    assert config.method is not None
    proposer = llm.proposers.get(config.method)
    assert isinstance(proposer, DraftModelProposer)
    assert isinstance(proposer._bridge, SharedTokens)
    lacking = tuple(id for id, twin in enumerate(proposer._bridge.twins) if twin < 0)[:3]
    params = SamplingParams(seed=2, max_tokens=24, allowed_token_ids=lacking)
    assert texts(llm, PROMPTS, params, config) == texts(llm, PROMPTS, params, "none")
    for more in ({}, {"tree": (2, 1)}):
        output = llm.generate(PROMPTS[0], params.replace(seed=None), speculation=crossed(drafts["spaced"], **more))[0]
        assert output.stats.num_proposer_faults == 0
        assert output.stats.num_accepted_tokens > 0


def test_a_written_text_is_spelled_as_the_target_would_spell_it(llm: LLM, drafts: dict[str, str]) -> None:
    """What the draft writes in several of its tokens is one token of the target where the target has it."""
    config = crossed(drafts["spaced"], "text")
    assert config.method is not None
    proposer = llm.proposers.get(config.method)
    assert isinstance(proposer, TextProposer)
    target, found = proposer._target, [list(tokens) for tokens in drafted(llm, config, GREEDY) if tokens]
    assert len(found) > 20
    assert [target.spell(target.written(tokens)) for tokens in found] == found


# -- misuse -------------------------------------------------------------------------------------------------------------


def test_a_pair_without_a_shared_token_is_refused(llm: LLM, tmp_path: Path) -> None:
    model = save_random(tmp_path / "words", words_alone("zzzzzzzzz", "qqqqqqqqq"), unk_token="<unk>")
    with pytest.raises(VocabularyMismatchError, match='match="text"'):
        llm.generate("def", GREEDY, speculation=crossed(model))
    assert texts(llm, "def", GREEDY, crossed(model, "text")) == texts(llm, "def", GREEDY, "none")


def test_a_pair_without_a_shared_byte_is_refused_by_text_too(tmp_path: Path) -> None:
    target = save_random(tmp_path / "target", words_alone("aa", "bb"), unk_token="<unk>")
    draft = save_random(tmp_path / "draft", words_alone("cc", "dd"), unk_token="<unk>")
    for match in MATCHES:
        with pytest.raises(VocabularyMismatchError, match="write"):
            LLM(target, speculation=crossed(draft, match))


def test_models_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    mute = checkpoints.save("llama", tmp_path / "mute")
    for target, draft in ((mute, default_model("draft")), (default_model("target"), mute)):
        with pytest.raises(ContradictionError, match="no tokenizer"):
            LLM(target, dtype="float32", speculation=crossed(draft))


def test_settings(tmp_path: Path) -> None:
    assert SpeculationConfig.of({"method": "cross_vocabulary", "model": "m", "match": "text"}).method == CrossVocabulary(
        model="m", match="text"
    )
    with pytest.raises(InvalidParameterError, match="tokens or text"):
        CrossVocabulary(match="bytes")
    with pytest.raises(ContradictionError, match="match"):
        SpeculationConfig(method=CrossVocabulary(match="text"), tree=(2, 1))
    with pytest.raises(InvalidParameterError, match="cross_vocabulary"):
        LLM(checkpoints.save("llama", tmp_path), speculation="cross_vocabulary")


def test_the_llms_own_draft_model_is_taken(llm: LLM) -> None:
    for match in MATCHES:
        config = llm.resolve({"method": "cross_vocabulary", "match": match})
        assert config.method == CrossVocabulary(model=default_model("draft"), match=match)
        assert config.method is not None
        assert isinstance(llm.proposers.get(config.method), TextProposer) == (match == "text")
    other = LLM(dtype="float32", speculation=CrossVocabulary(match="text"))
    assert other.resolve("draft_model").method == DraftModel(model=default_model("draft"))
