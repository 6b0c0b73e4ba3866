"""Tokenizers of GGUF files: ids of transformers' own tokenizers over text with Unicode, spaces and special tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from outrider import LLM, SamplingParams
from outrider.config import ModelConfig
from outrider.errors import InvalidParameterError, ModelLoadError, OutriderError
from outrider.lab.doctor.examination import examine_pairing
from outrider.loading.tokenizers import read_tokenizer
from tests.model import checkpoints
from tests.model.core import of_formats
from tests.model.gguf_files import Written

gguf = pytest.importorskip("gguf")
pytestmark = of_formats
CORPUS = [
    "Hello, world! It's what we've had: 12345 + 678 = 13023.",
    "  two spaces,\ttabs\n\n\nand  lines \r\n end  ",
    "na\u00efve caf\u00e9, cafe\u0301, \u4f60\u597d\u4e16\u754c, \u3053\u3093\u306b\u3061\u306f, \U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0130\u00df",
    "<|im_start|>user\nHi<|im_end|>\n<think>a</think>",
    "def f(x):\n    return x**2 # don't\n",
    "\u0000\u00a0\u2028 x\u0301\u0302",
    "",
    " ",
]
NUMBERS = [" 12 and  3.50", "1,000,000 \u0661\u0662 \u00b2\u2462", "a1b22c333"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def byte_level(splitting: Any) -> tuple[list[str], list[str]]:
    """Tokens and merges of a small vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitting
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    vocab = tokenizer.get_vocab()
    merges = [f"{a} {b}" for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]
    return sorted(vocab, key=lambda token: vocab[token]), merges


def pairs(merges: list[str]) -> list[tuple[str, str]]:
    return [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]


def vocabulary(pre: str, tokens: list[str], merges: list[str]) -> Any:
    def write(writer: Any) -> None:
        every = [*tokens, *SPECIAL, "<think>"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(every)
        writer.add_token_types([1] * len(tokens) + [3] * len(SPECIAL) + [4])
        writer.add_token_merges(merges)
        writer.add_eos_token_id(len(tokens) + 2)
        writer.add_pad_token_id(len(tokens))
        writer.add_chat_template(TEMPLATE)

    return write


def metadata_only(path: Path, write: Any, architecture: str = "qwen2") -> str:
    writer = gguf.GGUFWriter(path, architecture)
    write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def read(path: str) -> Any:
    return read_tokenizer(ModelConfig(model=path))


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2"])
def test_byte_level_ids_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    tokens, merges = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    ours = read(metadata_only(tmp_path / "v.gguf", vocabulary(pre, tokens, merges)))
    vocab = {token: number for number, token in enumerate([*tokens, *SPECIAL, "<think>"])}
    theirs = (Qwen2Tokenizer if pre == "qwen2" else GPT2Tokenizer)(
        vocab=vocab, merges=pairs(merges), eos_token="<|im_end|>", unk_token=None
    )
    theirs.add_special_tokens({"additional_special_tokens": SPECIAL})
    theirs.add_tokens(["<think>"])
    for text in [normalize("NFC", text) for text in CORPUS]:  # Qwen's own composes it, and llama.cpp does not
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.eos_token_id == len(tokens) + 2
    assert ours.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x<|im_end|>"


def test_llama_3_keeps_pieces_that_are_tokens(tmp_path: Path) -> None:
    """Its reference tokenizer takes a piece that is a token as it is, even where no merges lead to it."""
    tokens, merges = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokens = [*tokens, "xyzzy"]
    path = metadata_only(tmp_path / "v.gguf", vocabulary("llama-bpe", tokens, merges))
    assert read(path).encode("xyzzy") == [tokens.index("xyzzy")]
    assert [read(path).decode([i]) for i in read(path).encode("12345")][:1] != ["12345"], "numbers are cut by three"
    other = metadata_only(tmp_path / "o.gguf", vocabulary("qwen2", tokens, merges))
    assert len(read(other).encode("xyzzy")) > 1


def test_smollm_cuts_every_digit_before_words(tmp_path: Path) -> None:
    """Its own tokenizer has this pre-tokenizer: a space stays by itself before a digit."""
    splitting = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    tokens, merges = byte_level(splitting)
    theirs = Tokenizer(models.BPE(vocab=dict(zip(tokens, range(len(tokens)), strict=True)), merges=pairs(merges)))
    theirs.pre_tokenizer = splitting
    ours = read(metadata_only(tmp_path / "v.gguf", vocabulary("smollm", tokens, merges)))
    for text in [*CORPUS, *NUMBERS]:
        if "<|" not in text and "<think>" not in text:
            assert ours.encode(text) == theirs.encode(text).ids, text
    assert "12" not in [ours.decode([number]) for number in ours.encode("12")]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("It's 12345 + 678=?", ["It", "'", "s", "\u0120", "123", "45", "\u0120", "+", "\u0120", "678", "=?"]),
        ("a  b\n\n c$`d ^~|", ["a", "\u0120", "\u0120b", "\u010a\u010a", "\u0120c", "$", "`", "d", "\u0120", "^~|"]),
        ("x 1234567", ["x", "\u0120", "123", "456", "7"]),
    ],
)
def test_default_cuts_signs_before_words_and_digits_by_three(tmp_path: Path, text: str, pieces: list[str]) -> None:
    """The pieces are those of llama.cpp, whose four expressions cut one after another. No tokenizer of transformers has
    them."""
    tokens, merges = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    ours = read(metadata_only(tmp_path / "v.gguf", vocabulary("default", tokens, merges)))
    assert [piece for piece, _ in ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def sentence_piece(tokens: list[str], begins: bool | None) -> Any:
    def write(writer: Any) -> None:
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *tokens]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(tokens))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(tokens))
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if begins is not None:
            writer.add_add_bos_token(begins)

    return write


@pytest.mark.parametrize("begins", [None, False])
def test_sentence_piece_ids_are_those_of_transformers(tmp_path: Path, begins: bool | None) -> None:
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    space = "\u2581"
    pieces = [f"{space}t", "er", "in", f"{space}a", "en", "on", f"{space}th", "or", "an", f"{space}he", "ll"]
    letters = {letter for text in CORPUS for letter in text.replace(" ", space) if letter.isascii() or letter == space}
    pieces += [f"{space}hell", f"{space}the", space * 2, "world", "wor", "ld", *sorted(letters)]
    ours = read(metadata_only(tmp_path / "v.gguf", sentence_piece(pieces, begins), "llama"))
    every = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: number for number, token in enumerate(every)}
    scores = dict.fromkeys(every[:259], 0.0) | {token: -float(i) for i, token in enumerate(pieces)}
    theirs = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores), legacy=True, add_bos_token=begins is None)
    for text in [text for text in CORPUS if "<" not in text and not text.startswith(" ") and text]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert (ids[0] == 1) is (begins is None)
        assert ours.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("write", "problem", "remedy"),
    [
        (vocabulary("brand-new", ["a", "b"], []), "pre-tokenizer is 'brand-new'", "tokenizer="),
        (vocabulary("qwen2", ["a", "b"], ["a b"]), "'a b', whose parts or whole are no tokens", "again"),
        (vocabulary("qwen2", ["a", "a"], []), "holds 'a' twice", "again"),
        (lambda writer: writer.add_tokenizer_model("bert"), "its vocabulary is 'bert' of qwen2", "tokenizer="),
        (lambda writer: writer.add_tokenizer_model("gpt2"), "its pre-tokenizer is None", "tokenizer="),
    ],
)  # fmt: skip
def test_unknown_vocabularies_are_refused_by_name(tmp_path: Path, write: Any, problem: str, remedy: str) -> None:
    with pytest.raises(OutriderError) as caught:
        read(metadata_only(tmp_path / "v.gguf", write))
    assert problem in str(caught.value)
    assert remedy in str(caught.value)


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    tokens, merges = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    size = len(tokens) + len(SPECIAL) + 1
    source = checkpoints.save("qwen2", tmp_path / "source", layers=1, intermediate_size=64, vocab_size=size)
    file = Written(source, tmp_path / "model.gguf", ("Q8_0",), vocabulary("qwen2", tokens, merges))
    llm = LLM(str(file.path), speculation="suffix")
    out = llm.generate(["Hello, world"], SamplingParams(temperature=0, max_tokens=5))[0]
    assert out.text == read(str(file.path)).decode(out.token_ids, skip_special_tokens=True)
    assert LLM(str(file.path), tokenizer=str(file.path)).engine.runner.loaded.tokenizer is not None
    pairing = examine_pairing(str(file.path), str(file.path), "draft_model", "Hello")
    assert pairing.draft == str(file.path)
    assert len(tokens) + 2 in llm.engine.runner.loaded.eos_token_ids
    assert llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=2))[0].text is not None


@pytest.mark.parametrize(("architecture", "ids"), [("phi3", [1, 2, 259]), ("llama", [1, 2, 261, 259])])
def test_tokens_of_control_take_the_spaces_behind_them_in_phi_3(tmp_path: Path, architecture: str, ids: list[int]) -> None:
    space = "\u2581"
    pieces = [f"{space}to", "to", space * 2, space, "t", "o"]
    read_file = read(metadata_only(tmp_path / "v.gguf", sentence_piece(pieces, None), architecture))
    assert read_file.encode("</s>  to") == ids
    assert read_file.encode("<s> to") == [1, 1, 262, 259], "a text's begin takes none"


def of_size(path: Path, *, length: int = 4, num_added: int = 0, template: str = "a", kind: str = "llama") -> str:
    """A file with a token of so many characters, so many tokens of control beside the usual ones, and a template."""

    def write(writer: Any) -> None:
        pieces = ["a", "b", *(("ab" * (size // 2) + "a")[:size] for size in range(2, 40)), ("ab" * length)[:length]]
        tokens = list(dict.fromkeys(pieces))
        names = [*tokens, *(f"<|c{number}|>" for number in range(num_added))]
        writer.add_tokenizer_model(kind)
        writer.add_token_list(names)
        writer.add_token_scores([-float(number) for number in range(len(names))])
        writer.add_token_types([1] * len(tokens) + [3] * num_added)
        writer.add_chat_template(template)

    return metadata_only(path, write, "llama")


@pytest.mark.parametrize(
    ("more", "limit", "said"),
    [
        (
            {"length": 400_000},
            "token_characters",
            r"it has a token of 400,000 characters, and token_characters .* to 2,048",
        ),
        ({"num_added": 70_000}, "added_tokens", r"it has 70,000 tokens of control .* added_tokens of files .* 65,536"),
        ({"template": "{% if 1 %}a{% endif %}" * 60_000}, "template_bytes", r"a chat template of 1,320,000 bytes, and"),
    ],
    ids=["token", "controls", "template"],
)
def test_sizes_that_no_model_has_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], limit: str, said: str
) -> None:
    path = of_size(tmp_path / "m.gguf", **more)
    begun = time.process_time()
    with pytest.raises(ModelLoadError, match=said) as caught:
        read(path)
    assert time.process_time() - begun < 5
    assert f"OUTRIDER_FILE_LIMITS={limit}=" in caught.value.remedy
    small = of_size(tmp_path / "n.gguf", length=30, num_added=30, template="a" * 30)
    assert read(small) is not None
    monkeypatch.setenv("OUTRIDER_FILE_LIMITS", f"layers=3, {limit}=29")
    with pytest.raises(ModelLoadError, match=rf"{limit} of files are limited to 29"):
        read(small)


@pytest.mark.parametrize("value", ["layers", "layers=-1", "layers=many", "depth=3"])
def test_a_variable_that_sets_no_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OUTRIDER_FILE_LIMITS", value)
    with pytest.raises(InvalidParameterError, match="Use names with numbers, like layers=2000"):
        read(of_size(tmp_path / "m.gguf"))


def test_the_time_for_long_tokens_grows_with_the_bytes(tmp_path: Path) -> None:
    """Every beginning and every end of the longest token that is allowed is a token, too."""

    def seconds(length: int, count: int) -> float:
        def write(writer: Any) -> None:
            names = ["a" * size for size in range(1, length + 1)]
            names += [f"{number}{'a' * length}"[:length] for number in range(count)]
            writer.add_tokenizer_model("llama")
            writer.add_token_list(names)
            writer.add_token_scores([-float(number) for number in range(len(names))])

        path = metadata_only(tmp_path / f"{length}-{count}.gguf", write, "llama")
        begun = time.process_time()
        read(path)
        return time.process_time() - begun

    seconds(64, 10)
    assert seconds(512, 4000) < 8 * seconds(512, 1000) + 1
