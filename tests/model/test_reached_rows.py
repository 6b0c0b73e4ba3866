"""Rows of a draft that no text comes to cannot end a request: it ends as it does without drafts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import LLM, Prediction, SamplingParams, SpeculationConfig
from outrider.errors import NonFiniteLogitsError, NoTokenLeftError, OutriderError, ProcessingError
from outrider.model.attention import PassOutput
from outrider.model.context import ForwardContext
from tests.model.core import core, in_turn

PROMPT = "import os\nimport sys\n\ndef main("
LENGTH = 14
V = 4096
SAMPLED = {"temperature": 1.2, "top_k": 40}
WAYS: dict[str, Any] = {
    "chain": {"method": "draft_model", "num_draft_tokens": 6},
    "token rule": {"method": "draft_model", "num_draft_tokens": 6, "rule": "token"},
    "tree": {"method": "draft_model", "tree": (2, 2, 1, 1)},
    "recursive rejection": {"method": "draft_model", "tree": (2, 2, 1, 1), "rule": "token"},
    "prediction": SpeculationConfig(method=Prediction(min_match=1), num_draft_tokens=6),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    torch.set_num_threads(1)
    return LLM(dtype="float64", speculation="draft_model")


@pytest.fixture(scope="module")
def whole(llm: LLM) -> tuple[int, ...]:
    """The greedy text without an end."""
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=LENGTH), speculation="none")[0].token_ids


Raising = Callable[[Tensor, Tensor], Tensor]


def raises_behind(*tokens: int) -> Raising:
    """A processor that raises when its row follows one of these tokens."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        if int(ids[0, -1]) in tokens:
            raise KeyError(f"behind {int(ids[0, -1])}")
        return scores

    return processor


def stuck_behind(token: int) -> dict[str, Any]:
    return {"bad_words_ids": [[token, other] for other in range(V)]}


def outcome(llm: LLM, params: SamplingParams, way: Any, prediction: tuple[int, ...]) -> tuple[Any, ...]:
    """What a caller learns of the text."""
    predicted = prediction if way is WAYS["prediction"] else None
    if params.seed is not None and isinstance(way, dict):  # a seed has a rule of its own
        way = {name: value for name, value in way.items() if name != "rule"}
    try:
        (output,) = llm.generate(PROMPT, params, speculation=way, prediction=predicted)
    except OutriderError as error:
        return type(error), str(error).split(": ", 1)[1]
    return output.token_ids, output.text, output.finish_reason, output.outputs[0].stop_reason


ENDS: dict[str, Callable[[LLM, int], dict[str, Any]]] = {
    "stop token": lambda llm, stop: {"stop_token_ids": [stop]},
    "stop string": lambda llm, stop: {"stop": [llm.tokenizer.decode([stop])]},
}
BEHIND: dict[str, Callable[[int], dict[str, Any]]] = {
    "nothing is allowed": stuck_behind,
    "a processor raises": lambda stop: {"logits_processors": [raises_behind(stop)]},
}


GREEDY_WAYS = ["chain", "tree", "prediction"]  # a greedy target walks all drafts


GREEDY_ENDS = list(product(ENDS, BEHIND, GREEDY_WAYS))
#: Every way with one end and one row behind it, and all of these.
FEW_ENDS = [("stop token", "nothing is allowed", "chain"), ("stop string", "a processor raises", "tree")]
FEW_ENDS += [("stop string", "nothing is allowed", "prediction"), ("stop token", "a processor raises", "prediction")]


@pytest.mark.parametrize(("end", "behind", "way"), core(GREEDY_ENDS, FEW_ENDS))
def test_a_row_behind_the_end_of_a_greedy_text(llm: LLM, whole: Any, end: str, behind: str, way: str) -> None:
    for stop in whole[1:3]:
        assert stop not in llm.encode(PROMPT), "or the text would be stuck where it begins"
        params = SamplingParams(
            temperature=0, max_tokens=LENGTH, logprobs=1, **ENDS[end](llm, stop), **BEHIND[behind](stop)
        )
        want = outcome(llm, params, "none", whole)
        assert want[2] == "stop"
        assert outcome(llm, params, WAYS[way], whole) == want


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("way", WAYS)
def test_a_row_behind_the_end_of_a_drawn_text(llm: LLM, behind: str, way: str) -> None:
    """Under all rules, and with a seed the very text."""
    params = SamplingParams(seed=1, max_tokens=LENGTH, **SAMPLED)
    text = llm.generate(PROMPT, params, speculation="none")[0].token_ids
    params = params.replace(stop_token_ids=[text[5]], **BEHIND[behind](text[5]))
    assert outcome(llm, params, WAYS[way], text) == outcome(llm, params, "none", text)
    for _ in range(4):
        found = outcome(llm, params.replace(seed=None), WAYS[way], text)
        assert found[-2] in ("stop", "length"), found


@pytest.mark.parametrize("way", GREEDY_WAYS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3, **SAMPLED}], ids=["greedy", "seeded"])
def test_a_row_that_a_text_comes_to_ends_it_as_without_drafts(llm: LLM, sampling: dict[str, Any], way: str) -> None:
    params = SamplingParams(max_tokens=LENGTH, **sampling)
    text = llm.generate(PROMPT, params, speculation="none")[0].token_ids
    for kind, behind in ((NoTokenLeftError, BEHIND["nothing is allowed"]), (ProcessingError, BEHIND["a processor raises"])):
        wrong = params.replace(**behind(text[6]))
        want = outcome(llm, wrong, "none", text)
        assert want[0] is kind
        assert outcome(llm, wrong, WAYS[way], text) == want


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 3, **SAMPLED},
    "drawn": SAMPLED,
}


@pytest.mark.parametrize(
    ("way", "asked"), core(product(WAYS, SAMPLINGS), [*in_turn(WAYS, SAMPLINGS), *product(WAYS, ["drawn"])])
)
def test_a_processor_is_not_shown_a_token_that_it_forbids(llm: LLM, asked: str, way: str) -> None:
    sampling = SAMPLINGS[asked]
    plain = SamplingParams(max_tokens=LENGTH, **sampling)
    banned = llm.generate(PROMPT, plain, speculation="none")[0].token_ids[5]
    shown: list[int] = []
    prompt_length = len(llm.encode(PROMPT))

    def forbid(ids: Tensor, scores: Tensor) -> Tensor:
        shown.extend(ids[0, prompt_length:].tolist())
        if banned in ids[0, prompt_length:]:
            raise KeyError("it was forbidden")
        return scores.index_fill(1, torch.tensor([banned]), float("-inf"))

    params = plain.replace(logits_processors=[forbid])
    drafted = llm.generate(PROMPT, plain.replace(seed=3), speculation="none")[0].token_ids
    found = outcome(llm, params, WAYS[way], drafted)
    assert banned not in shown
    assert not isinstance(found[0], type), found
    if params.seed is not None or params.greedy:
        assert found == outcome(llm, params, "none", drafted)


def poisoned(llm: LLM, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make NaN of the logits of every row that holds `token`."""
    backend = llm.engine.runner.backend
    stock = backend.forward

    def forward(loaded: Any, context: ForwardContext, aux_layers: Any, part: Any = None) -> PassOutput:
        out = stock(loaded, context, aux_layers, part)
        out.logits[torch.from_numpy(context.batch.tokens[context.batch.wanted] == token)] = float("nan")
        return out

    monkeypatch.setattr(backend, "forward", forward)


@pytest.mark.parametrize("way", GREEDY_WAYS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3, **SAMPLED}], ids=["greedy", "seeded"])
def test_a_row_without_finite_logits(llm: LLM, sampling: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts where a text comes to it, and only there: behind a token that is forbidden or ends the text it does not."""
    params = SamplingParams(max_tokens=LENGTH, logprobs=1, **sampling)
    text = llm.generate(PROMPT, params, speculation="none")[0].token_ids
    token = next(token for token in text[4:] if token not in llm.encode(PROMPT))
    poisoned(llm, token, monkeypatch)
    for mended in (params.replace(bad_words_ids=[[token]]), params.replace(stop_token_ids=[token])):
        want = outcome(llm, mended, "none", text)
        assert not isinstance(want[0], type)
        assert outcome(llm, mended, WAYS[way], text) == want
    want = outcome(llm, params, "none", text)
    assert want[0] is NonFiniteLogitsError
    assert outcome(llm, params, WAYS[way], text) == want


def test_what_was_written_before_is_kept(llm: LLM, whole: Any) -> None:
    """Tokens before the row that fails reach a stream, with drafts as without."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, **stuck_behind(whole[6]))
    for way in ("none", WAYS["chain"]):
        stream, got = llm.stream(PROMPT, params, speculation=way), list[int]()
        with pytest.raises(NoTokenLeftError):
            got.extend(token for piece in stream for token in piece.token_ids)
        assert tuple(got) == whole[: whole.index(whole[6]) + 1]
