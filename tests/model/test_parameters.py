"""Every sampling parameter, a test for each row of docs/reference/parameters.md: one text with and without speculation.

The exact joint laws of the same parameters are in tests/statistical/test_engine_distribution.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, NoRepeatNGramLogitsProcessor

from outrider import LLM, Ngram, SamplingParams, SpeculationConfig, StructuredOutputs, Suffix
from outrider.config import default_model
from outrider.errors import (
    ContradictionError,
    InvalidParameterError,
    NoTokenLeftError,
    ProcessingError,
    UnsupportedParameterError,
)

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "parameters.md"
PROMPTS = ["def parse(line):\n", "for name in names:\n    for name in names:\n    for", '{"name": "']
SPECULATIONS = [
    SpeculationConfig(method="draft_model", num_draft_tokens=4),
    SpeculationConfig(method="draft_model", tree=(3, 2)),
    SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=4),
    SpeculationConfig(method=Suffix(min_match=1, branches=True)),
]
#: Every parameter meets a chain and a tree, of a model and of a lookup, each in one way to draw.
WAYS = {"greedy": SPECULATIONS[1:3], "seeded": SPECULATIONS[::3]}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def every_third(ids: Tensor, scores: Tensor) -> Tensor:
    pushed = scores.clone()
    pushed[:, int(ids[0, -1]) % 3 :: 3] -= 1.5
    return pushed


#: Name of each row, and a setting that changes the text.
ROWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "logit_bias": {"logit_bias": {11: 6.0, 35: -8.0}},
    "bad_words": {"bad_words": ["self", "name", "(", "    "]},
    "bad_words_ids": {"bad_words_ids": [[260], [556, 316], [8, 1406]]},
    "allowed_token_ids": {"allowed_token_ids": list(range(1, 4096, 2))},
    "logits_processors": {"logits_processors": [NoRepeatNGramLogitsProcessor(2), every_third]},
    "structured_outputs": {"structured_outputs": StructuredOutputs(json_schema=SCHEMA)},
    "max_tokens": {"max_tokens": 7},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [260, 556, 8]},
    "stop": {"stop": ["\n", ")"]},
    "stop_token_ids": {"stop_token_ids": [260, 556, 8]},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {0: 9.0}},
    "seed": {"seed": 5},
    "n": {"n": 2},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "logprobs_mode": {"logprobs": 2, "logprobs_mode": "processed", "top_k": 9, "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    torch.set_num_threads(1)
    return LLM(dtype="float64", speculation="none", block_size=8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", ROWS)
def test_the_text_is_that_of_plain_decoding(llm: LLM, row: str, way: str) -> None:
    given = {"max_tokens": 12, "seed": 5, **ROWS[row]}
    if way == "greedy":
        given["temperature"] = 0.0
    params = SamplingParams(**given)
    plain = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    for config in WAYS[way]:
        for alone, drafted in zip(plain, llm.generate(PROMPTS, params, speculation=config), strict=True):
            assert [o.token_ids for o in drafted.outputs] == [o.token_ids for o in alone.outputs]
            assert [o.text for o in drafted.outputs] == [o.text for o in alone.outputs]
            _same_logprobs([o.logprobs for o in drafted.outputs], [o.logprobs for o in alone.outputs])
            _same_logprobs([drafted.prompt_logprobs], [alone.prompt_logprobs])


def _same_logprobs(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        for mine, yours in zip(ours or (), theirs or (), strict=True):
            assert (mine or {}).keys() == (yours or {}).keys()
            for token, entry in (mine or {}).items():
                assert entry.logprob == pytest.approx(yours[token].logprob, abs=1e-6)
                assert (entry.rank, entry.decoded_token) == (yours[token].rank, yours[token].decoded_token)


def test_every_parameter_has_a_row_here_and_in_the_docs() -> None:
    assert ROWS.keys() == SamplingParams.model_fields.keys()
    named = re.findall(r"^\|( `[^|]+) \|", DOCS.read_text("utf-8"), re.MULTILINE)
    listed = [name for cell in named for name in re.findall(r"`(\w+)`", cell)]
    assert set(listed) >= SamplingParams.model_fields.keys() | SamplingParams.refused.keys()


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r not in ("seed", "n", "logprobs", "prompt_logprobs", "logprobs_mode", "temperature")]
)
def test_the_setting_makes_a_difference(llm: LLM, row: str) -> None:
    """Or the test above could not fail."""
    free = {"max_tokens": 18, "seed": 5}
    if row == "min_tokens":
        free["stop_token_ids"] = ROWS[row]["stop_token_ids"]
    if row == "ignore_eos":
        free["logit_bias"] = ROWS[row]["logit_bias"]
    texts = [[o.text for o in llm.generate(PROMPTS, SamplingParams(**{**free, **more}))] for more in ({}, ROWS[row])]
    assert texts[0] != texts[1]


# -- what they say -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SpeculationConfig(), *SPECULATIONS], ids=str)
def test_structured_texts_keep_their_structure(llm: LLM, config: SpeculationConfig) -> None:
    for output in llm.generate(
        ["x = "] * 4,
        SamplingParams(max_tokens=90, structured_outputs=StructuredOutputs(json_schema=SCHEMA), temperature=0.8),
        speculation=config,
    ):
        if output.finish_reason == "stop":
            assert set(json.loads(output.text)) == {"name", "size"}
    pattern = r"[a-f]{3}-\d{2,4}"
    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputs(regex=pattern))
    for output in llm.generate(["id: "] * 4, params, speculation=config):
        assert re.fullmatch(pattern, output.text)
    choice = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputs(choice=["yes", "no", "maybe"]))
    assert llm.generate("Is it? ", choice, speculation=config)[0].text in ("yes", "no", "maybe")


def test_samples_of_one_request_have_automata_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=40, structured_outputs=StructuredOutputs(regex=r"[a-f]{3}-\d{2,4}"))
    for sample in llm.generate("id: ", params, speculation=SPECULATIONS[0])[0].outputs:
        assert re.fullmatch(r"[a-f]{3}-\d{2,4}", sample.text)


def test_logprobs_are_those_of_a_plain_forward_pass(llm: LLM) -> None:
    prompt = llm.encode(PROMPTS[0])
    params = SamplingParams(max_tokens=12, seed=1, logprobs=2, prompt_logprobs=1, repetition_penalty=1.4)
    output = llm.generate(list(prompt), params, speculation=SPECULATIONS[1])[0]
    stock = AutoModelForCausalLM.from_pretrained(default_model("target"), dtype=torch.float64)
    with torch.inference_mode():
        law = stock(torch.tensor([[*prompt, *output.token_ids]])).logits[0].log_softmax(-1)
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    entries = [*output.prompt_logprobs[1:], *output.logprobs]
    for row, (token, entry) in enumerate(zip([*prompt[1:], *output.token_ids], entries, strict=True)):
        assert entry is not None
        assert next(iter(entry)) == token
        for other, found in entry.items():
            assert found.logprob == pytest.approx(float(law[row, other]), abs=1e-5)
            assert found.rank == 1 + int((law[row] > law[row, other]).sum())
            assert found.decoded_token == llm.tokenizer.decode([other])


def test_processed_logprobs_are_those_of_the_law_drawn_from(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=1, logprobs=-1, logprobs_mode="processed", top_k=3)
    output = llm.generate(PROMPTS[0], params, speculation=SPECULATIONS[0])[0]
    for entry in output.logprobs or ():
        masses = [2.718281828459045**found.logprob for found in entry.values()]
        assert sum(masses) == pytest.approx(1.0)
        assert sum(mass > 0 for mass in masses) == 3


def test_logprobs_stream_with_their_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=1, logprobs=0)
    pieces = list(llm.stream(PROMPTS[0], params, speculation=SPECULATIONS[0]))
    for piece in pieces:
        assert piece.logprobs is not None
        assert [next(iter(entry)) for entry in piece.logprobs] == list(piece.token_ids)
    last = pieces[-1].output
    assert last is not None
    assert last.logprobs == tuple(entry for piece in pieces for entry in piece.logprobs or ())


def test_prompt_logprobs_survive_chunks_prefix_hits_and_preemption() -> None:
    tight = LLM(dtype="float64", block_size=8, max_num_batched_tokens=9, max_num_seqs=4, kv_cache_tokens=96)
    prompts = [[(7 * i + j) % 4000 + 1 for i in range(30)] for j in (0, 0, 1)]
    params = SamplingParams(max_tokens=24, seed=2, prompt_logprobs=0)
    found = tight.generate(prompts, params)
    assert tight.stats.finished.num_preemptions > 0
    roomy = LLM(dtype="float64", speculation="none")
    for one, prompt in zip(found, prompts, strict=True):
        alone = roomy.generate(prompt, params)[0]
        assert one.token_ids == alone.token_ids
        _same_logprobs([one.prompt_logprobs], [alone.prompt_logprobs])


# -- what fails, fails alone -------------------------------------------------------------------------------------------


def _with_neighbour(llm: LLM, bad: SamplingParams, config: SpeculationConfig) -> Exception | None:
    good = SamplingParams(max_tokens=10, seed=4)
    alone = llm.generate(PROMPTS[1], good, speculation="none")[0]
    failed, neighbour = llm.generate(PROMPTS[:2], [bad, good], speculation=config)
    assert neighbour.token_ids == alone.token_ids
    assert not llm.engine.has_work
    return failed.error


@pytest.mark.parametrize("config", [SpeculationConfig(), *SPECULATIONS], ids=str)
def test_parameters_that_leave_no_token_end_their_own_request(llm: LLM, config: SpeculationConfig) -> None:
    ban_all = SamplingParams(max_tokens=10, allowed_token_ids=[11], bad_words_ids=[[11, 11, 11]])
    error = _with_neighbour(llm, ban_all, config)
    assert isinstance(error, NoTokenLeftError)
    assert "after 2 tokens of the text" in str(error), "as many as were written, drafted or not, without the prompt"
    assert "min_tokens" not in str(error)


CONFIGS, KINDS = [SpeculationConfig(), *SPECULATIONS], [KeyError, SystemExit, GeneratorExit]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_processor_that_raises_ends_its_own_request(
    llm: LLM, config: SpeculationConfig, kind: type[BaseException]
) -> None:
    prompt_len = len(llm.encode(PROMPTS[0]))

    def breaks(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] >= prompt_len + 4:
            raise kind("planted")
        return scores

    faults = llm.stats.finished.num_proposer_faults
    error = _with_neighbour(llm, SamplingParams(max_tokens=10, logits_processors=[breaks]), config)
    assert llm.stats.finished.num_proposer_faults == faults, "a caller's mistake is not held against the proposer"
    assert isinstance(error, ProcessingError)
    assert isinstance(error.__cause__, kind)


@pytest.mark.parametrize(
    ("values", "field", "kind"),
    [
        ({"logit_bias": {4096: 1.0}}, "logit_bias", InvalidParameterError),
        ({"allowed_token_ids": [1, 9999]}, "allowed_token_ids", InvalidParameterError),
        ({"bad_words_ids": [[1, 4096]]}, "bad_words_ids", InvalidParameterError),
        ({"structured_outputs": StructuredOutputs(regex="((")}, "structured_outputs", InvalidParameterError),
        ({"structured_outputs": StructuredOutputs(json_schema="{")}, "structured_outputs", InvalidParameterError),
        ({"structured_outputs": StructuredOutputs(grammar="start: missing")}, "structured_outputs", InvalidParameterError),
    ],
)
def test_what_this_model_cannot_serve_is_refused(llm: LLM, values: dict[str, Any], field: str, kind: type) -> None:
    with pytest.raises(kind) as caught:
        llm.generate(PROMPTS[0], SamplingParams(**values))
    assert caught.value.field == field


def test_structure_contradictions_are_refused() -> None:
    with pytest.raises(ContradictionError, match="exactly one"):
        StructuredOutputs(regex="a", choice=["b"])
    with pytest.raises(ContradictionError):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True)


def test_without_the_grammar_library_structure_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedParameterError, match="outrider\\[grammar\\]"):
        llm.generate(PROMPTS[0], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
