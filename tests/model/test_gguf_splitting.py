"""Pre-tokenizers of GGUF files cut texts as llama.cpp does, by every name that it knows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from outrider.loading.gguf.header import GgufFile, read_gguf
from outrider.loading.gguf.splitting import SPLITTINGS
from outrider.loading.gguf.tokenizer import read_gguf_tokenizer
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


def write_vocabulary(writer: Any, pre: str = "default", size: int = 0) -> list[str]:
    """A vocabulary that shows cuts: two tokens of the corpus that lie side by side and have eight bytes at most are merged,
    unless a cut is between them. Long runs of spaces are tokens, too, and one token is made by no merges, so that
    it shows who takes pieces as they are. Names without a meaning fill it up to a size."""
    longest = 8
    texts = [_letters(text) for text in CORPUS]
    found = {
        text[start : start + size]
        for text in texts
        for size in range(2, longest + 1)
        for start in range(len(text) - size + 1)
    }
    parts = sorted(found, key=lambda part: (len(part), part))
    runs = [_letters(" ") * size for size in (16, 32, 64)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *parts, *runs, WHOLE, BEGIN]
    tokens += [f"<{number}>" for number in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    begin = tokens.index(BEGIN)
    writer.add_token_types([3 if number == begin else 1 for number in range(len(tokens))])
    merges = [f"{part[:i]} {part[i:]}" for part in parts for i in range(1, len(part))]
    writer.add_token_merges([*merges, *(f"{run[: len(run) // 2]} {run[: len(run) // 2]}" for run in runs)])
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(begin)
    return tokens


def lengths(tokens: list[str], ids: list[int]) -> str:
    """A digit for each token, and a sign for the one that begins a text."""
    return "".join("^" if tokens[number] == BEGIN else str(len(tokens[number])) for number in ids)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return read_gguf(metadata_only(tmp_path_factory.mktemp("pieces") / "v.gguf", write_vocabulary))


@pytest.mark.parametrize("name", LENGTHS)
def test_texts_are_cut_as_in_llama_cpp(file: GgufFile, name: str) -> None:
    tokenizer = read_gguf_tokenizer(replace(file, metadata=file.metadata | {"tokenizer.ggml.pre": name}))
    assert tokenizer is not None
    for text, want in zip(CORPUS, LENGTHS[name], strict=True):
        assert lengths(file.metadata["tokenizer.ggml.tokens"], tokenizer.encode(text)) == want, text


def test_every_name_has_lengths_and_is_in_the_guide() -> None:
    assert {SPLITTINGS[name] for name in LENGTHS} == set(SPLITTINGS.values())
    guide = Path(__file__).parents[2] / "docs/how-to/llama_cpp_files.md"
    assert set(re.findall(r"`([^`\s]+)`", guide.read_text("utf-8"))) >= SPLITTINGS.keys()
