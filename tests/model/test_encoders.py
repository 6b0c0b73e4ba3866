"""Models with an encoder: texts are those of transformers, whoever drafts and whatever is beside them in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider import LLM, SamplingParams
from outrider.cli import generate, render
from outrider.config import default_model
from outrider.errors import (
    ContradictionError,
    InvalidPromptError,
    ModelLoadError,
    UnsupportedModelError,
    UnsupportedParameterError,
    VocabularyMismatchError,
)
from outrider.kernels.library import available_sets
from outrider.lab.prove.own_model import CacheAudit
from outrider.model import hf_encoder
from outrider.model.batch import RaggedBatch, Segment
from outrider.model.context import ForwardContext
from outrider.server.requests import JobMaker
from outrider.server.schemas import CompletionRequest
from outrider.server.settings import ServerSettings
from tests.model import checkpoints, encoders

LONG = [(7 * i + 2) % 61 for i in range(32)]
#: Of other lengths each; the second and third begin alike, and fill blocks to their ends.
SOURCES = [[9], LONG, LONG[:16], [(5 * i) % 61 for i in range(23)]]
LENGTH = 24
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
DRAWN = SamplingParams(temperature=1.5, seed=5, max_tokens=LENGTH, logprobs=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return encoders.save(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return encoders.save(tmp_path_factory.mktemp("draft"), seed=2, num_layers=1, num_decoder_layers=1)


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return LLM(path, dtype="float64", speculation="none")


@pytest.fixture(scope="module")
def greedy(path: str) -> list[tuple[int, ...]]:
    return [encoders.greedy_by_transformers(path, source, LENGTH) for source in SOURCES]


def texts(llm: LLM, params: SamplingParams = GREEDY, **options: Any) -> list[tuple[int, ...]]:
    outputs = llm.generate(SOURCES, params, **options)
    llm.engine.check_rest()
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def drawn_as_stock(llm: LLM, path: str) -> list[tuple[int, ...]]:
    """Drawn texts, whose tokens have the probabilities that the stock model gives them."""
    found = []
    for source, output in zip(SOURCES, llm.generate(SOURCES, DRAWN), strict=True):
        written = list(output.outputs[0].token_ids)
        assert len(set(written)) > LENGTH // 4, "texts that repeat one token would show nothing"
        want = encoders.stock_logprobs(path, source, written)[range(LENGTH), written].tolist()
        positions = output.outputs[0].logprobs or ()
        assert [by_token[t].logprob for by_token, t in zip(positions, written, strict=True)] == pytest.approx(
            want, abs=1e-6
        )
        found.append(tuple(written))
    return found


def ways(draft: str) -> list[Any]:
    """Chains and trees of lookups, of another model with an encoder, of the target's layers and of what it held likely."""
    return [
        "ngram",
        {"method": "suffix", "branches": True},
        {"method": "draft_model", "model": draft, "num_draft_tokens": 3},
        {"method": "draft_model", "model": draft, "tree": (2, 2, 1)},
        {"method": "layer_skip", "skip": (1,), "tree": (2, 1)},
        {"method": "early_exit", "num_draft_tokens": 3},
        {"method": "token_recycling", "tree": (3, 2, 1)},
    ]


def test_texts_are_those_of_transformers(llm: LLM, draft: str, greedy: list[tuple[int, ...]]) -> None:
    assert sum(len(set(text)) for text in greedy) > 20, "texts that repeat one token would show nothing"
    assert texts(llm) == greedy
    llm.stats.reset()
    for way in ways(draft):
        assert texts(llm, speculation=way) == greedy, way
    assert llm.stats.finished.num_accepted_tokens > 50


#: Where a change may concern one type of those that the kernels know.
OF_FUSED = (
    *("src/outrider/model/", "src/outrider/model/hf_encoder.py", "src/outrider/kernels/native/"),
    "tests/model/encoders.py",
)
TIERS: dict[str, Any] = {kind: pytest.mark.slow for kind in encoders.OTHERS if kind != "BartConfig"}
TIERS |= dict.fromkeys(encoders.DESCRIBED, pytest.mark.by_change(*OF_FUSED))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=TIERS.get(kind, ())) for kind in encoders.OTHERS])
def test_other_types_write_the_texts_of_transformers(kind: str, tmp_path: Path) -> None:
    path = encoders.save_other(tmp_path, kind)
    llm = LLM(path, dtype="float64", speculation="none")
    fused = kind in encoders.DESCRIBED and bool(available_sets())
    assert llm.engine.runner.backend.name == ("fused" if fused else "paged")
    assert texts(llm) == [encoders.greedy_by_transformers(path, source, LENGTH) for source in SOURCES]
    plain = drawn_as_stock(llm, path)
    for way in ({"method": "draft_model", "model": path, "tree": (2, 1)}, {"method": "layer_skip", "tree": (2, 1)}):
        assert texts(llm, DRAWN, speculation=way) == plain, way


def test_a_terminal_shows_the_text_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not go on from the prompt, which a decoder's text does."""
    llm = LLM(path, dtype="float64", speculation="none", tokenizer=str(default_model("target")))
    shown: list[str] = []
    monkeypatch.setattr(render, "write", lambda _, spans, *__: shown.extend(text for text, _ in spans))
    generate._stream(llm, "!#", GREEDY.replace(max_tokens=4), Console(stderr=True), no_color=True, compare=False)
    assert "".join(shown) == llm.generate("!#", GREEDY.replace(max_tokens=4))[0].outputs[0].text


def test_drawn_tokens_have_the_probabilities_of_the_stock_model(llm: LLM, path: str, draft: str) -> None:
    plain = drawn_as_stock(llm, path)
    for way in ways(draft)[1::2]:  # a seed promises the same text, which is true only if every row of a draft says the same
        assert texts(llm, DRAWN, speculation=way) == plain, way


def test_what_is_kept_is_what_a_fresh_pass_leaves(path: str, draft: str, greedy: list[tuple[int, ...]]) -> None:
    """Little memory, so that texts lose it and begin anew, and a source is read again or found."""
    llm = LLM(path, dtype="float64", kv_cache_tokens=88, max_num_seqs=4, block_size=8, speculation="none")
    audit, params = CacheAudit(llm.engine), GREEDY.replace(max_tokens=14)
    chosen = zip(SOURCES, ways(draft)[2:6], strict=True)
    requests = [llm.engine.add_request(tuple(source), params, llm.resolve(way)) for source, way in chosen]
    audit.run()
    assert [request.sequences[0].output_token_ids for request in requests] == [list(text[:14]) for text in greedy]
    assert sum(request.sequences[0].stats.num_preemptions for request in requests) > 0
    assert audit.num_checked > 20
    assert audit.worst < 1e-9
    llm.engine.check_rest()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the sources that an encoder has read."""
    stock: Callable[..., Any] = hf_encoder.encode
    read: list[int] = []

    def counted(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
        read.append(len(token_ids))
        return stock(model, token_ids)

    monkeypatch.setattr(hf_encoder, "encode", counted)
    return read


def test_a_source_is_read_once(path: str, greedy: list[tuple[int, ...]], encoded: list[int]) -> None:
    llm = LLM(path, dtype="float64", speculation="none")
    encoded.clear()
    assert texts(llm) == greedy
    assert sorted(encoded) == sorted(map(len, SOURCES))
    encoded.clear()
    assert texts(llm) == greedy
    assert encoded == [], "the whole source is in the prefix cache"
    assert llm.generate([SOURCES[1][:24]], GREEDY)[0].outputs[0].token_ids != greedy[1]
    assert encoded == [24], "its beginning is no source that was read"
    llm.generate([SOURCES[0]], GREEDY, namespace="another")
    assert encoded == [24, 1], "nobody finds what another namespace has read"


def test_samples_share_their_source(path: str, encoded: list[int]) -> None:
    llm = LLM(path, dtype="float64", speculation="none", prefix_caching=False)
    encoded.clear()
    params = SamplingParams(n=3, temperature=1.5, seed=4, max_tokens=12)
    (output,) = llm.generate([SOURCES[3]], params)
    assert encoded == [23]
    assert len({sample.token_ids for sample in output.outputs}) == 3
    assert output.outputs[0].token_ids == llm.generate(SOURCES[3], params.replace(n=1))[0].outputs[0].token_ids
    assert output.prompt_token_ids == tuple(SOURCES[3])
    llm.engine.check_rest()


def test_bits_do_not_depend_on_the_batch(path: str) -> None:
    llm = LLM(path, dtype="float32", batch_invariant=True)
    params = DRAWN.replace(max_tokens=8)
    assert bits(llm, params, "ngram") == bits(llm, params, None)


@pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_whole_passes_depend_on_nothing_beside_a_row(path: str, dtype: str) -> None:
    """Not on the rows of a draft, the other texts, the size of a chunk or the number of threads."""
    llm, small = (LLM(path, dtype=dtype, prefix_caching=False, max_num_batched_tokens=most) for most in (2048, 33))
    assert llm.engine.runner.backend.name == small.engine.runner.backend.name == "fused"
    begun = (encoders.START, *LONG, *LONG)
    alone = bits(llm, DRAWN, None, decoder_prompt=begun)
    threads = torch.get_num_threads()
    try:
        for each, count in ((llm, 1), (llm, 3), (small, 2)):
            torch.set_num_threads(count)
            for way in ("none", "suffix", {"method": "token_recycling", "tree": (3, 2, 1)}):
                assert bits(each, DRAWN, way, decoder_prompt=begun) == alone, (count, way)
    finally:
        torch.set_num_threads(threads)


def bits(llm: LLM, params: SamplingParams, way: Any, **options: Any) -> list[Any]:
    """The tokens of all texts and their exact log-probabilities: each text alone where `way` is None, else together."""
    if way is None:
        outputs = [llm.generate(source, params, speculation="none", **options)[0] for source in SOURCES]
    else:
        outputs = llm.generate(SOURCES, params, speculation=way, **options)
    return [(output.error, output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_a_tree_gets_the_bias_of_its_distances(llm: LLM) -> None:
    """Beside the stock table, on rows behind a context, with siblings, and farther apart than the last bucket."""
    runner = llm.engine.runner
    attention = runner.loaded.model.decoder.block[0].layer[0].SelfAttention
    parents = (-1, 0, 0, 1, 3, 2)
    batch = RaggedBatch([Segment([0] * 6, 25, [0, 1], parents)], 16, runner.loaded.device)
    bias = hf_encoder.distance_biases(runner.loaded.model)[2]
    part = ForwardContext(batch, runner.pool, [layer.reach for layer in runner.loaded.layers], biases={2: bias}).part(
        0, 2, torch.float64
    )
    assert part.mask is not None
    positions = [*range(25), *batch.segments[0].positions.tolist()]
    stock = attention.compute_bias(31, 31)[0]
    for row, ancestors in enumerate([{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 3, 4}, {0, 2, 5}]):
        for slot, position in enumerate(positions):
            seen = slot < 25 or slot - 25 in ancestors
            want = stock[:, positions[25 + row], position] if seen else torch.full((4,), float("-inf"))
            assert torch.equal(part.mask[:, row, slot], want.to(part.mask))


def test_a_forced_token_stands_behind_the_start(tmp_path: Path) -> None:
    path = encoders.save(tmp_path, forced=7)
    (output,) = LLM(path, dtype="float64", speculation="ngram").generate([SOURCES[3]], GREEDY.replace(max_tokens=4))
    assert (7, *output.outputs[0].token_ids) == encoders.greedy_by_transformers(path, SOURCES[3], 5)


def test_a_decoder_goes_on_from_what_it_is_given(llm: LLM, path: str, draft: str, tmp_path: Path) -> None:
    begun = (encoders.START, *LONG[5:25])  # longer than a block
    wanted = [encoders.greedy_by_transformers(path, source, LENGTH, begun) for source in SOURCES]
    assert texts(llm) != wanted, "what a decoder is given would show nothing"
    for way in ["none", *ways(draft)]:
        assert texts(llm, speculation=way, decoder_prompt=begun) == wanted, way
    assert texts(llm, decoder_prompt=[encoders.START]) == texts(llm, decoder_prompt="") == texts(llm)
    worded = LLM(path, dtype="float64", speculation="none", tokenizer=str(default_model("target")))
    inside = tuple(worded.tokenizer("!#", add_special_tokens=False)["input_ids"])
    assert texts(worded, decoder_prompt="!#") == texts(llm, decoder_prompt=(encoders.START, *inside))
    forced = encoders.save(tmp_path, forced=7)
    output = LLM(forced, dtype="float64", speculation="ngram").generate(LONG, GREEDY, decoder_prompt=(3, 7, 9))[0]
    assert output.outputs[0].token_ids == encoders.greedy_by_transformers(forced, LONG, LENGTH, (3, 7, 9))


def test_what_a_decoder_cannot_go_on_from_is_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ContradictionError, match=r"decoder_prompt=\[4, 5\].*begin with \[3\].*decoder_start_token_id"):
        llm.generate([1, 2], decoder_prompt=[4, 5])
    with pytest.raises(InvalidPromptError, match=r"decoder_prompt=61.*outside the vocabulary"):
        llm.generate([1, 2], decoder_prompt=[encoders.START, 61])
    with pytest.raises(InvalidPromptError, match=r"decoder_prompt='4000 tokens'.*no room in the context"):
        llm.generate([1, 2], decoder_prompt=[encoders.START] * 4000)
    with pytest.raises(InvalidPromptError, match=r"decoder_prompt=.*has no tokenizer"):
        llm.generate([1, 2], decoder_prompt="!#")
    forced = LLM(encoders.save(tmp_path / "forced", forced=7), dtype="float64", speculation="none")
    with pytest.raises(ContradictionError, match=r"begin with \[3, 7\].*forced_bos_token_id"):
        forced.generate([1, 2], decoder_prompt=[3, 8])
    alone = LLM(checkpoints.save("llama", tmp_path / "alone"), dtype="float64", speculation="none")
    with pytest.raises(UnsupportedParameterError, match=r"decoder_prompt=.*the model has no encoder"):
        alone.generate([1, 2], decoder_prompt=[3, 8])


def test_what_cannot_be_served_is_refused_by_name(llm: LLM, path: str, tmp_path: Path) -> None:
    short = LLM(encoders.save(tmp_path / "short", max_position_embeddings=40), dtype="float64", speculation="none")
    with pytest.raises(InvalidPromptError, match=r"prompt='41 tokens'.*encoder reads 40 at most") as caught:
        short.generate([1] * 41)
    assert "40 tokens or fewer" in caught.value.remedy
    with pytest.raises(InvalidPromptError, match="no tokens"):
        llm.generate({"prompt_token_ids": []})
    with pytest.raises(UnsupportedParameterError, match=r"prompt_logprobs=1.*encoder reads the prompt"):
        llm.generate([1, 2], SamplingParams(prompt_logprobs=1))
    alone = checkpoints.save("llama", tmp_path / "alone")
    with pytest.raises(VocabularyMismatchError, match="has an encoder that reads prompts, and the other one has none"):
        llm.generate([1, 2], speculation={"method": "draft_model", "model": alone})
    other = encoders.save(tmp_path / "other", decoder_start_token_id=0)
    with pytest.raises(VocabularyMismatchError, match=r"begin with the tokens \[0\], and those of .* with \[3\]"):
        llm.generate([1, 2], speculation={"method": "draft_model", "model": other})
    with pytest.raises(ModelLoadError, match="decoder_start_token_id=None") as missing:
        LLM(encoders.save(tmp_path / "startless", decoder_start_token_id=None), speculation="none")
    assert "generation_config.json" in missing.value.remedy


def test_a_server_does_not_echo_what_an_encoder_reads(llm: LLM) -> None:
    methods: Any = None
    start, settings = llm.engine.runner.loaded.text_start, ServerSettings(model_name="t5")
    maker = JobMaker(llm.prompts, llm.default_params, 100, methods, settings, encoders.VOCAB_SIZE, start)
    with pytest.raises(UnsupportedParameterError, match=r"echo=True.*no part of the text"):
        maker.make(CompletionRequest(prompt=[1, 2], echo=True), None)


def test_encoders_of_images_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, VisionEncoderDecoderConfig, ViTConfig

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**sizes), LlamaConfig(vocab_size=9, **sizes))
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'vision-encoder-decoder', whose encoder reads no text"):
        LLM(str(tmp_path))
