"""Structures whose text is that of an added token: as calls of tools begin in most models that have tools."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.config import default_model
from outrider.errors import InvalidParameterError, UnsupportedParameterError
from outrider.loading.tokenizers import given_tokenizer
from outrider.params import StructuredOutputs
from outrider.server.tool_grammars import calls_grammar
from outrider.structured.grammar import GrammarCompiler
from outrider.structured.structures import StructureVocabulary, _Encoder

#: GGUF files of published models, in the folder that this variable names.
REAL = sorted(Path(os.environ.get("OUTRIDER_REAL_MODELS", "nowhere")).glob("*.gguf"))
#: The last one has letters that stand for other bytes in the vocabulary. In an added token they stand for themselves.
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<\u0120\u00e9>")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """That of the embedded pair, with the tokens that many models have for calls and thoughts, and with a special one."""
    found = given_tokenizer(default_model("target"))
    found.add_tokens(list(ADDED))
    found.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    return found


def compiler_of(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return compiler_of(tokenizer)


def written(compiler: GrammarCompiler, tokenizer: Any, structure: StructuredOutputs, wanted: str = "") -> list[int]:
    """The tokens of a text that has the structure. Where it leaves a choice they spell `wanted`, in its own tokens."""
    state, tokens = compiler.start(structure), list[int]()
    wishes = tokenizer(wanted, add_special_tokens=False)["input_ids"]
    while True:
        assert len(tokens) < 1000, f"it does not end: {tokenizer.decode(tokens)[:500]}"
        mask = state.allowed(tuple(tokens), len(tokenizer))
        assert mask is not None
        wish = wishes[len(tokens)] if len(tokens) < len(wishes) else None
        if wish is None or not mask[wish]:
            assert mask.any(), tokenizer.decode(tokens)
            wish = tokenizer.eos_token_id if mask[tokenizer.eos_token_id] else int(mask.nonzero()[0])
        if wish == tokenizer.eos_token_id:
            return tokens
        tokens.append(wish)


@pytest.mark.parametrize(
    "structure",
    [
        {"grammar": 'start: "<tool_call>\\n"'},
        {"grammar": "start: X\nX: /<tool_call>\\n/"},
        {"grammar": 'root ::= "<tool_call>\\n"'},
        {"regex": "<tool_call>\n"},
        {"choice": ("<tool_call>\n",)},
    ],
    ids=lambda structure: "-".join(structure),
)
def test_where_a_structure_has_the_text_of_an_added_token_it_is_that_token(
    compiler: GrammarCompiler, tokenizer: Any, structure: dict[str, Any]
) -> None:
    tokens = written(compiler, tokenizer, StructuredOutputs(**structure))
    assert tokens[0] == tokenizer.convert_tokens_to_ids("<tool_call>")
    assert tokenizer.decode(tokens) == "<tool_call>\n"


def test_thoughts_and_schemas_have_them_too(compiler: GrammarCompiler, tokenizer: Any) -> None:
    think, end = (tokenizer.convert_tokens_to_ids(name) for name in ("<think>", "</think>"))
    thoughts = StructuredOutputs(grammar='start: "<think>" /[a-z]*/ "</think>" %json {"const": "a</think>"}')
    tokens = written(compiler, tokenizer, thoughts, '<think>yes</think>"a</think>"')
    assert (tokens[0], tokens.count(end)) == (think, 2)
    assert tokenizer.decode(tokens) == '<think>yes</think>"a</think>"'


def test_special_tokens_have_no_text_unless_they_are_named(compiler: GrammarCompiler, tokenizer: Any) -> None:
    """A text of theirs that a structure asks for is in the answer. Named without quotes they are what Lark means."""
    special = tokenizer.convert_tokens_to_ids("<|tool|>")
    tokens = written(compiler, tokenizer, StructuredOutputs(grammar='start: "a<|tool|>"'))
    assert special not in tokens
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "a<|tool|>"
    assert written(compiler, tokenizer, StructuredOutputs(grammar='start: "a" <|tool|>'))[-1] == special
    with pytest.raises(InvalidParameterError, match="unknown special token"):
        compiler.start(StructuredOutputs(grammar="start: <|nothing|>"))


def test_free_text_has_no_special_token(compiler: GrammarCompiler, tokenizer: Any) -> None:
    mask = compiler.start(StructuredOutputs(regex="(.|\n)+")).allowed((), len(tokenizer))
    assert mask is not None
    found = {name: bool(mask[tokenizer.convert_tokens_to_ids(name)]) for name in (*ADDED, "<|tool|>", "<|end|>")}
    assert found == {**dict.fromkeys(ADDED, True), "<|tool|>": False, "<|end|>": False}


def check_tokens(tokenizer: Any) -> None:
    """Every token writes what llguidance would have read out of the tokenizer."""
    size = len(tokenizer)
    known = StructureVocabulary.of(tokenizer, size, [0])
    read = llguidance.LLTokenizer(known.tokenizer, n_vocab=size, eos_token=[0])
    encoder, added = _Encoder(known), tokenizer.added_tokens_decoder
    assert encoder.tokens == [read.decode_bytes([number]) for number in range(size)]
    has_text = {number for number, token in added.items() if not token.special}
    assert encoder.special_token_ids == [n for n in range(size) if read.is_special_token(n) and n not in has_text]


def of_pieces() -> Any:
    """A tokenizer of SentencePiece's kind. Added tokens have blanks, too."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "\u2581a",
        "\u00e9",
        "\u2581<0xzz>",
    ]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("\u2581", "a")], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    found.add_tokens(["\u2581\u2581", "<tool>", "[x]"])
    return found


def test_tokens_write_what_the_library_reads(tokenizer: Any) -> None:
    check_tokens(tokenizer)
    check_tokens(of_pieces())


def test_numbers_without_a_token_are_in_no_text(tokenizer: Any) -> None:
    """The logits of many models are wider than their vocabulary."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer) + 3, frozenset({tokenizer.eos_token_id}))
    mask = compiler.start(StructuredOutputs(regex="(.|\n)+")).allowed((), len(tokenizer) + 3)
    assert mask is not None
    assert mask[:100].any()
    assert not mask[len(tokenizer) :].any()


@pytest.mark.slow
@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_tokens_of_real_files_write_what_the_library_reads(file: Path) -> None:
    check_tokens(given_tokenizer(file))


def test_a_tokenizer_whose_tokens_say_nothing_of_their_bytes_is_refused() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")), eos_token="b")
    with pytest.raises(UnsupportedParameterError, match="become text by None, and ByteLevel and ByteFallback are known"):
        compiler_of(words).start(StructuredOutputs(regex="a"))


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}


def check_calls(compiler: GrammarCompiler, tokenizer: Any) -> None:
    grammar = calls_grammar("hermes", {"weather": SCHEMA}, several=False)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    tokens = written(compiler, tokenizer, StructuredOutputs(grammar=grammar), call)
    assert tokens == tokenizer(call, add_special_tokens=False)["input_ids"], "as the model was trained"
    assert json.loads(tokenizer.decode(tokens).split("\n")[1])["arguments"] == {"city": "Paris"}


def test_calls_are_written_in_the_tokens_that_models_know(compiler: GrammarCompiler, tokenizer: Any) -> None:
    check_calls(compiler, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_calls_are_written_by_real_tokenizers(file: Path) -> None:
    found = given_tokenizer(file)
    check_calls(compiler_of(found), found)


@pytest.mark.slow
@pytest.mark.skipif(not any("qwen" in file.stem for file in REAL), reason="no such model is here")
def test_every_method_writes_the_same_call() -> None:
    file = min((file for file in REAL if "qwen" in file.stem), key=lambda file: file.stat().st_size)
    llm = LLM(str(file), max_model_len=512, kv_cache_tokens=1024)
    grammar = calls_grammar("hermes", {"weather": SCHEMA}, several=False)
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputs(grammar=grammar))
    methods = ("none", "ngram", "suffix", "token_recycling", "lookahead", "layer_skip", "early_exit")
    texts = [llm.generate("The weather in Paris:", params, speculation=method)[0] for method in methods]
    assert len({text.token_ids for text in texts}) == 1, [text.text for text in texts]
    assert texts[0].text.startswith('<tool_call>\n{"name": "weather", "arguments": {"city": "')
