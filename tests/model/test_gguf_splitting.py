"""Pre-tokenizers of GGUF files cut texts as llama.cpp does, by every name that it knows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from outrider.loading.gguf.header import GgufFile, read_gguf
from outrider.loading.gguf.splitting import SPLITTINGS
from outrider.loading.gguf.tokenizer import SPACE, read_gguf_tokenizer
from tests.model.core import of_formats
from tests.model.test_gguf_tokenizers import metadata_only

pytest.importorskip("gguf")
pytestmark = of_formats
#: Texts, and for the first name of each row of the table how long the tokens are that llama.cpp (xllamacpp 2026.10.11549)
#: makes of each of them. test_gguf_beside_llama_cpp.py compares these lengths, and the ids of every name, with llama.cpp.
#: All letters are in Unicode 15: it does not know later ones.
RECORDED = json.loads(Path(__file__).with_name("gguf_splitting.json").read_text("utf-8"))
CORPUS: list[str] = RECORDED["texts"]
LENGTHS: dict[str, list[str]] = RECORDED["lengths"]
BEGIN, WHOLE = "<|begin|>", "wonderful"


def _letters(text: str) -> str:
    """One letter for each byte."""
    steps = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in steps.pre_tokenize_str(text))


def _tokens(texts: list[str], alphabet: set[str], space: str) -> tuple[list[str], list[str]]:
    """Tokens and merges that show cuts: two tokens of the texts that lie side by side and have eight letters at most are
    merged, unless a cut is between them. Long runs of spaces are tokens, too."""
    found = {text[start : start + size] for text in texts for size in range(2, 9) for start in range(len(text) - size + 1)}
    parts = sorted((part for part in found if alphabet.issuperset(part)), key=lambda part: (len(part), part))
    merges = [f"{part[:i]} {part[i:]}" for part in parts for i in range(1, len(part))]
    for half in (8, 16, 32):
        parts.append(space * (2 * half))
        merges.append(f"{space * half} {space * half}")
    return [*sorted(alphabet), *parts], merges


def write_vocabulary(writer: Any, pre: str = "default", size: int = 0) -> list[str]:
    """A vocabulary that shows cuts. One token is made by no merges, so that it shows who takes pieces as they are. Where
    tokens are text, letters from U+3000 on are bytes. Names without a meaning fill the vocabulary up to a size."""
    if SPLITTINGS[pre].of_text:
        texts = [text.replace(" ", SPACE) for text in CORPUS]
        tokens, merges = _tokens(texts, {letter for letter in "".join(texts) if letter < "\u3000"} - {"\n"}, SPACE)
        tokens += [*("\n" * run for run in range(1, 5)), *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        tokens, merges = _tokens(list(map(_letters, CORPUS)), set(pre_tokenizers.ByteLevel.alphabet()), _letters(" "))
    begin = len(tokens) + 1
    tokens += [WHOLE, BEGIN]
    tokens += [f"<{number}>" for number in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [6 if token.startswith("<0x") else 1 for token in tokens]
    kinds[begin] = 3
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(begin)
    return tokens


def lengths(tokens: list[str], ids: list[int]) -> str:
    """A digit for each token, and a sign for the one that begins a text."""
    return "".join("^" if tokens[number] == BEGIN else str(len(tokens[number])) for number in ids)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, GgufFile]:
    """One with tokens of bytes, and one with tokens of text."""
    folder = tmp_path_factory.mktemp("pieces")
    names = {SPLITTINGS[name].of_text: name for name in LENGTHS}
    written = {of_text: partial(write_vocabulary, pre=name) for of_text, name in names.items()}
    return {of_text: read_gguf(metadata_only(folder / f"{of_text}.gguf", write)) for of_text, write in written.items()}


@pytest.mark.parametrize("name", LENGTHS)
def test_texts_are_cut_as_in_llama_cpp(files: dict[bool, GgufFile], name: str) -> None:
    file = files[SPLITTINGS[name].of_text]
    tokenizer = read_gguf_tokenizer(replace(file, metadata=file.metadata | {"tokenizer.ggml.pre": name}))
    assert tokenizer is not None
    for text, want in zip(CORPUS, LENGTHS[name], strict=True):
        assert lengths(file.metadata["tokenizer.ggml.tokens"], tokenizer.encode(text)) == want, text


def test_the_vocabulary_of_gemma_4_has_its_pre_tokenizer_and_begins_every_text(files: dict[bool, GgufFile]) -> None:
    """Whatever its file says of both, as in llama.cpp."""
    said = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": False}
    tokenizer = read_gguf_tokenizer(replace(files[True], metadata=files[True].metadata | said))
    assert tokenizer is not None
    tokens = files[True].metadata["tokenizer.ggml.tokens"]
    assert [lengths(tokens, tokenizer.encode(text)) for text in CORPUS] == LENGTHS["gemma4"]
    assert tokenizer.decode(tokenizer.encode(CORPUS[3]), skip_special_tokens=True) == CORPUS[3]


def test_every_name_has_lengths_and_is_in_the_guide() -> None:
    assert {SPLITTINGS[name] for name in LENGTHS} == set(SPLITTINGS.values())
    guide = Path(__file__).parents[2] / "docs/how-to/llama_cpp_files.md"
    assert set(re.findall(r"`([^`\s]+)`", guide.read_text("utf-8"))) >= SPLITTINGS.keys()
