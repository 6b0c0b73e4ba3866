"""GGUF files in llama.cpp and here: the same logits of float32 files, near ones of blocks, and the same ids of texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from tokenizers import pre_tokenizers

from outrider import LLM, SamplingParams
from outrider.config import ModelConfig, default_model
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.convert.gguf_vocabulary import own_vocabulary
from outrider.lab.prove.tiny_heads import save_random_mtp
from outrider.loading.gguf.splitting import SPLITTINGS
from outrider.loading.tokenizers import read_tokenizer
from tests.model import checkpoints
from tests.model.gguf_families import GROUPS, SHAPES, as_ling, save
from tests.model.gguf_files import Written
from tests.model.test_gguf_models import EXPERTS, GEMMA, SEVEN, SHAPE, YARN
from tests.model.test_gguf_splitting import CORPUS as CUT_TEXTS
from tests.model.test_gguf_splitting import LENGTHS, lengths, write_vocabulary
from tests.model.test_gguf_tokenizers import CORPUS, byte_level, read, sentence_piece, vocabulary
from tests.model.test_gguf_vocabularies import CASES, TEXTS, saved

native = pytest.importorskip("xllamacpp")
#: The last token is a letter, so that the next one is whole Unicode even where embeddings are tied.
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(23)] + [65]
GEMMA_FILE = GEMMA | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": None}


#: llama.cpp knows windows of models of 64 layers alone, and lets layers behind the 20th read keys of others.
UNKNOWN = ("exaone4:windows", "gemma3n_text:shared")
KNOWN = {family: changes for family, changes in SHAPES.items() if family not in UNKNOWN}


@contextmanager
def server(path: Path) -> Iterator[Any]:
    """Sends a request to llama.cpp's server of a file."""
    params = native.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.port, params.verbosity = 128, 1, 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.fit_params, params.cache_ram_mib = False, 0
    params.flash_attn_type = native.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which rounds to float16
    params.cache_type_k = params.cache_type_v = native.ggml_type.GGML_TYPE_F32
    running = native.Server(params)

    def send(where: str, body: dict[str, Any]) -> Any:
        content = json.dumps(body).encode()
        request = Request(f"{running.listening_address}{where}", content, {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            return json.loads(answer.read())

    yield send


@pytest.mark.parametrize(
    ("family", "kinds", "changes", "most"),
    [
        ("llama", ("F32",), {}, 1e-3),
        ("qwen2", ("F32",), {}, 1e-3),
        ("qwen3", ("F32",), {}, 1e-3),
        ("gemma2", ("F32",), GEMMA | {"query_pre_attn_scalar": 64}, 1e-3),
        ("gemma3", ("F32",), GEMMA_FILE | SEVEN, 1e-3),
        ("qwen3", ("F32",), {"rope_parameters": YARN}, 1e-3),
        ("llama", ("F32",), {"rope_parameters": YARN | {"rope_type": "linear"}}, 1e-3),
        ("phi3", ("F32",), {"sliding_window": None}, 1e-3),
        ("qwen3_moe", ("F32",), EXPERTS, 1e-3),
        ("gpt_oss", ("F32",), {}, 5e-3),
        ("qwen3_moe", ("Q4_K", "Q6_K"), EXPERTS, 0.2),
        ("gpt_oss", ("MXFP4",), {}, 0.2),
        ("llama", ("Q4_0", "Q8_0", "Q5_1"), {}, 0.2),  # llama.cpp rounds activations to 8 bits
        ("llama", ("Q4_K", "Q6_K", "Q5_K"), {}, 0.2),
        ("llama", ("IQ4_NL", "MXFP4", "Q3_K", "Q2_K"), {}, 0.2),
        *((family, ("F32",), changes, 1e-3 + 4e-3 * family.startswith("gemma4")) for family, changes in KNOWN.items()),
        *((family, ("Q8_0",), changes, 0.2) for family, changes in KNOWN.items()),
    ],
    ids=str,
)
def test_logits_are_those_of_llama_cpp(
    tmp_path: Path,
    family: str,
    kinds: tuple[str, ...],
    changes: dict[str, Any],
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if family == "gemma3n_text":  # llama.cpp divides the squares of a deviation by one less than there are
        monkeypatch.setattr(torch, "std", partial(_std, torch.std))
    tokens, merges = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    shape = SHAPE | {"vocab_size": len(tokens) + 4, "head_dim": 64} | changes
    source = save(family, tmp_path / "source", **shape)
    file = Written(source, tmp_path / "model.gguf", kinds, vocabulary("gpt-2", tokens, merges))
    compare(file.path, most)


def _std(stock: Callable[..., torch.Tensor], values: torch.Tensor, **options: Any) -> torch.Tensor:
    return stock(values, **options | {"unbiased": True})


def compare(path: Path, most: float) -> None:
    """Compare the logits of the likeliest tokens, all of which are letters, behind a prompt."""
    with server(path) as send:  # which tells nothing of a part of a letter, so the next token is "A" or "B"
        letters = {"grammar": "root ::= [AB]", "post_sampling_probs": False}
        asked = letters | {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "cache_prompt": False, "n_probs": 5}
        told = send("/completion", asked)["completion_probabilities"][0]["top_logprobs"]
    llm = LLM(str(path), speculation="none")
    ours = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1, logprobs=20))[0].logprobs
    assert ours is not None
    for entry in told[:3]:
        assert abs(ours[0][entry["id"]].logprob - entry["logprob"]) < most
    assert len({entry["id"] for entry in told}) == 5


@pytest.mark.parametrize(("kind", "most"), [("F32", 1e-3), ("Q8_0", 0.2)])
def test_logits_of_ling_are_those_of_llama_cpp(tmp_path: Path, kind: str, most: float) -> None:
    """transformers has no folders of it, so files are made of those of GLM-4.5."""
    tokens, merges = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    groups = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "use_qk_norm": True}
    shape = SHAPE | {"vocab_size": len(tokens) + 4, "head_dim": 64} | SHAPES["glm4_moe"] | groups
    source = save("glm4_moe", tmp_path / "source", **shape)
    file = Written(source, tmp_path / "glm.gguf", (kind,), vocabulary("gpt-2", tokens, merges), **GROUPS)
    compare(Path(as_ling(file.path, tmp_path / "ling.gguf")), most)


@pytest.mark.parametrize(
    ("family", "layout", "num_layers"),
    [
        *((family, "qwen3_next", 1) for family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")),
        *((family, "deepseek_v3", 1) for family in ("glm4_moe", "deepseek_v3")),
        ("mimo_v2_flash", "mimo_v2", 3),
    ],
)
def test_llama_cpp_reads_what_is_written_of_prediction_layers(
    tmp_path: Path, family: str, layout: str, num_layers: int
) -> None:
    tokens, merges = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    shape = SHAPE | {"vocab_size": len(tokens) + 4, "head_dim": 64} | SHAPES[family]
    source = save(family, tmp_path / "source", **shape)
    save_random_mtp(Path(source), source, layout, num_layers)
    write = vocabulary("gpt-2", tokens, merges)
    path = write_gguf(source, tmp_path / "m.gguf", "float32", lambda writer, size: write(writer), parts="all")
    compare(Path(path), 1e-3)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_greedy_texts_are_those_of_llama_cpp_until_a_near_tie(
    tmp_path: Path, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """llama.cpp rounds rows to 8 bits, too, with scales of float16, so that logits differ in their last digits."""
    path = write_gguf(default_model("draft"), tmp_path / "m.gguf", kind)  # with placeholders as its vocabulary
    tokenizer = read_tokenizer(ModelConfig(model=default_model("draft")))
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in ("def parse(text):\n    ", "import os\n\n\nclass Reader:", "for i in ")]
    asked = {"n_predict": 40, "temperature": 0, "cache_prompt": False, "return_tokens": True, "ignore_eos": True}
    with server(Path(path)) as send:
        theirs = [send("/completion", asked | {"prompt": prompt})["tokens"] for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=20)
    ours = LLM(path, activations="int8", speculation="none").generate(prompts, greedy)
    for prompt, told, found in zip(prompts, theirs, ours, strict=True):
        parted = next((i for i, pair in enumerate(zip(found.token_ids, told, strict=True)) if len({*pair}) > 1), None)
        if parted is not None:
            assert found.logprobs is not None
            here = found.logprobs[parted]
            gap = here[found.token_ids[parted]].logprob - here[told[parted]].logprob
            record_property("gap of the logits where texts part", gap)
            assert gap < 0.05, f"{prompt}: {found.token_ids} and {told} part at {parted}, where logits are {gap:.4f} apart"


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "sentence_piece"])
def test_ids_are_those_of_llama_cpp(tmp_path: Path, pre: str) -> None:
    tokens, merges = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    space = "\u2581"
    pieces = [f"{space}t", "er", "in", f"{space}a", "en", f"{space}th", "ll", f"{space}the", space * 2, space]
    pieces += sorted(set("".join(pieces)) - {space})  # as every vocabulary has the letters of its tokens
    write, size = vocabulary(pre, tokens, merges), len(tokens) + 4
    if pre == "sentence_piece":
        write, size = sentence_piece(pieces, None), 259 + len(pieces)
    source = checkpoints.save("llama", tmp_path / "source", layers=1, intermediate_size=64, vocab_size=size)

    def with_start(writer: Any) -> None:
        write(writer)
        if pre == "llama-bpe":
            writer.add_bos_token_id(3)

    file = Written(source, tmp_path / "model.gguf", ("Q8_0",), with_start)
    ours = read_tokenizer(ModelConfig(model=str(file.path)))
    assert ours is not None
    with server(file.path) as send:
        for text in CORPUS:
            told = send("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
            if text:  # of nothing, SentencePiece makes a space here and nothing there
                assert ours.encode(text) == told, text


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("small"), layers=1, intermediate_size=64, vocab_size=10000)


@pytest.mark.parametrize("name", SPLITTINGS)
def test_every_pre_tokenizer_gives_the_ids_of_llama_cpp(tmp_path: Path, small_llama: str, name: str) -> None:
    tokens: list[str] = []
    file = Written(
        small_llama, tmp_path / "m.gguf", ("Q8_0",), lambda writer: tokens.extend(write_vocabulary(writer, name, 10000))
    )
    ours = read_tokenizer(ModelConfig(model=str(file.path)))
    assert ours is not None
    with server(file.path) as send:
        told = [send("/tokenize", {"content": text, "add_special": True})["tokens"] for text in CUT_TEXTS]
    assert [ours.encode(text) for text in CUT_TEXTS] == told
    if name in LENGTHS:
        assert LENGTHS[name] == [lengths(tokens, ids) for ids in told]


def test_special_tokens_of_phi_3_take_the_spaces_behind_them_as_in_llama_cpp(tmp_path: Path) -> None:
    """Files do not say so: llama.cpp goes by their names."""
    turns = ["<|user|>", "<|end|>", "<|assistant|>", "<|endoftext|>"]
    pieces = ["\u2581", "\u2581t", "he", "\u2581the", "\u2581he", "l", "lo", "o", "h", "e", "t"]
    write, size = sentence_piece([*pieces, *turns], None), 259 + len(pieces) + len(turns)
    source = checkpoints.save(
        "phi3", tmp_path / "source", layers=1, intermediate_size=64, vocab_size=size, sliding_window=None
    )

    def named(writer: Any) -> None:
        writer.add_name("Phi-3 Mini")
        write(writer)
        kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [3, 3, 4, 3]
        writer.kv_data[0]["tokenizer.ggml.token_type"].value[:] = kinds

    file = Written(source, tmp_path / "model.gguf", ("Q8_0",), named)
    ours = read_tokenizer(ModelConfig(model=str(file.path)))
    assert ours is not None
    texts = ["<|user|>\n the hello<|end|>\n<|assistant|>  lo", "the <|endoftext|> he", "</s> \n he<s> t", "hello"]
    with server(file.path) as send:
        for text in texts:
            asked = {"content": text, "add_special": True, "parse_special": True}
            assert ours.encode(text) == send("/tokenize", asked)["tokens"], text


@pytest.mark.parametrize("case", CASES)
def test_ids_of_a_converted_checkpoint_are_those_of_llama_cpp(tmp_path: Path, case: str) -> None:
    """llama.cpp ends a token at a zero."""
    family, make = CASES[case]
    checkpoint = saved(tmp_path / "source", family, make())
    file = write_gguf(checkpoint, tmp_path / "m.gguf", "float32", own_vocabulary(checkpoint))
    ours = read(file)
    with server(Path(file)) as send:
        for text in (text for text in TEXTS if text.strip() and "\0" not in text):
            told = send("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
            assert ours.encode(text) == told, text
