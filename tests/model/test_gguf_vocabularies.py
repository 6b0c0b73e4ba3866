"""Vocabularies in GGUF files that are written here: the ids and texts of the checkpoint's own tokenizer, on both ways."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.config import default_model
from outrider.errors import UnsupportedModelError
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.convert.gguf_vocabulary import OF_CHECKPOINTS, own_vocabulary
from outrider.loading.gguf.splitting import SPLITTINGS
from tests.model import checkpoints
from tests.model.core import of_formats
from tests.model.test_gguf_tokenizers import CORPUS, SPECIAL, TEMPLATE, byte_level, metadata_only, read
from tests.warm import warm_python

pytest.importorskip("gguf")
pytestmark = of_formats
SPACE = "\u2581"
TEXTS = [
    "low",
    *CORPUS,
    "    four  two   three",
    "a\n\n\n  b\t\tc",
    "HELLO World's I'LL camelCase 12345/\n/",
    f"{SPACE * 2} signs",
]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def byte_level_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """That of a checkpoint whose pre-tokenizer has this name in files."""
    splitting = OF_CHECKPOINTS.get(name) or SPLITTINGS[name]
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    steps = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokens, merges = byte_level(steps)
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=splitting.whole_pieces))
    backend.pre_tokenizer, backend.decoder = steps, decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return _finished(backend, "<|endoftext|>", "<|im_end|>")


def piece_tokenizer(*, gemma: bool) -> PreTrainedTokenizerFast:
    """One of SentencePiece. Gemma's has runs of spaces and lines that users define, and no space before the first word."""
    letters = sorted(
        {letter for text in TEXTS for letter in text.replace(" ", SPACE) if letter.isascii() or letter == SPACE}
    )
    pieces = [
        f"{SPACE}t",
        "er",
        "in",
        f"{SPACE}th",
        "ll",
        f"{SPACE}hell",
        f"{SPACE}the",
        "he",
        "wor",
        "ld",
        "world",
        "lo",
        "ow",
    ]
    runs = [SPACE * 2, SPACE * 3, SPACE * 4, "\n\n"]
    every = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *runs, *pieces, *letters]
    vocab = {token: number for number, token in enumerate(every)}
    merges: list[tuple[str, str]] = []
    for run in sorted(runs, key=len, reverse=True):
        merges += [(run[:i], run[i:]) for i in range(len(run) - 1, 0, -1) if run[:i] in vocab and run[i:] in vocab]
    merges.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
    for piece in pieces:
        merges += [(piece[:i], piece[i:]) for i in range(len(piece) - 1, 0, -1) if {piece[:i], piece[i:]} <= vocab.keys()]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    before = [] if gemma else [normalizers.Prepend(SPACE)]
    after = [] if gemma else [decoders.Strip(" ", 1, 0)]
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>")])
    if gemma:
        backend.add_tokens([AddedToken(run, normalized=False) for run in runs])
    return _finished(backend, "<s>", "</s>", unk_token="<unk>")


def _finished(backend: Tokenizer, bos: str, eos: str, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        **special,
    )


CASES: dict[str, tuple[str, Any]] = {
    "qwen2": ("qwen3", lambda: byte_level_tokenizer("qwen2")),
    "llama-bpe": ("llama", lambda: byte_level_tokenizer("llama-bpe")),
    "gpt-4o": ("gpt_oss", lambda: byte_level_tokenizer("gpt-4o")),
    "tekken": ("ministral3", lambda: byte_level_tokenizer("tekken")),
    "gpt-2": ("llama", lambda: byte_level_tokenizer("gpt-2")),
    "smollm": ("llama", lambda: byte_level_tokenizer("smollm")),
    "default": ("llama", lambda: byte_level_tokenizer("default")),
    "llama": ("llama", lambda: piece_tokenizer(gemma=False)),
    "gemma": ("gemma2", lambda: piece_tokenizer(gemma=True)),
}


def saved(folder: Path, family: str, tokenizer: PreTrainedTokenizerFast) -> str:
    changes: dict[str, Any] = {"vocab_size": len(tokenizer) + 3, "layers": 2, "eos_token_id": tokenizer.eos_token_id}
    checkpoint = checkpoints.save(family, folder, seed=1, **changes)
    tokenizer.save_pretrained(checkpoint)
    return checkpoint


@pytest.mark.parametrize("case", CASES)
def test_a_converted_checkpoint_has_the_ids_and_texts_of_the_original(tmp_path: Path, case: str) -> None:
    """A file is read as llama.cpp reads it: it does not compose Unicode, as Qwen's tokenizer does, and it cuts words of
    gpt-4o and tekken in its own way where letters are not ASCII."""
    family, make = CASES[case]
    theirs = make()
    checkpoint = saved(tmp_path / "source", family, theirs)
    file = write_gguf(checkpoint, tmp_path / "m.gguf", "float32", own_vocabulary(checkpoint))
    ours = read(file)
    texts = [text for text in TEXTS if text.isascii() or case not in OF_CHECKPOINTS]
    for text in [normalize("NFC", text) for text in texts] if case == "qwen2" else texts:
        assert ours.encode(text) == theirs.encode(text), text
        for skipped in (False, True):
            told = [each.decode(each.encode(text), skip_special_tokens=skipped) for each in (ours, theirs)]
            assert told[0] == told[1]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.chat_template == TEMPLATE
    answers = [
        LLM(model, dtype="float64", speculation="none").generate(["Hello, the world"], GREEDY)[0].token_ids
        for model in (checkpoint, file)
    ]
    assert answers[0] == answers[1]


def test_runs_of_spaces_may_be_written_as_spaces(tmp_path: Path) -> None:
    """llama.cpp's converter does so, and gives tokens that users define a low score."""
    theirs = piece_tokenizer(gemma=True)
    every = sorted(theirs.get_vocab(), key=theirs.get_vocab().get)  # type: ignore[arg-type]
    users = [number for number, token in enumerate(every) if token in (SPACE * 2, SPACE * 3, SPACE * 4, "\n\n")]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(every) - 259)

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([token.replace(SPACE, " ") if i in users else token for i, token in enumerate(every)])
        writer.add_token_scores([-1000.0 if i in users else -float(i) for i in range(len(every))])
        writer.add_token_types([4 if i in users else kind for i, kind in enumerate(kinds)])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(False)
        writer.add_add_space_prefix(False)

    ours = read(metadata_only(tmp_path / "v.gguf", write, "gemma3"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize(
    ("name", "world", "number"), [("gpt-4o", ["World's"], ["123", "45"]), ("tekken", ["World", "'s"], [*"12345"])]
)
def test_texts_are_cut_as_those_of_gpt_4o(name: str, world: list[str], number: list[str]) -> None:
    """Capitals begin a word, and lines and strokes belong to the signs before them. In gpt-4o an ending belongs to its
    word, and digits lie in threes."""
    steps = byte_level_tokenizer(name).backend_tokenizer.pre_tokenizer
    found = [piece for piece, _ in steps.pre_tokenize_str("HELLO World's camelCase 12345/\n/ a")]
    first, *rest = world
    assert found == ["HELLO", f"\u0120{first}", *rest, "\u0120camel", "Case", "\u0120", *number, "/\u010a/", "\u0120a"]


def test_a_pre_tokenizer_without_a_name_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"its pre-tokenizer \(.*A-Za-z_.*has no name.*--placeholders"):
        own_vocabulary(default_model("draft"))


def test_a_tokenizer_that_changes_texts_is_refused(tmp_path: Path) -> None:
    theirs = byte_level_tokenizer("gpt-2")
    theirs.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    with pytest.raises(UnsupportedModelError, match="changes texts by Lowercase"):
        own_vocabulary(saved(tmp_path / "source", "llama", theirs))


def test_the_command_writes_a_file_that_is_a_model(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "source", "llama", byte_level_tokenizer("llama-bpe"))
    out = str(tmp_path / "m.gguf")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return warm_python().run("outrider.cli.main", "convert", checkpoint, "--to", "gguf", "--out", out, *options)

    written = run("--type", "f16")
    assert written.returncode == 0, written.stderr
    assert written.stdout.endswith("matrices in F16\n")
    assert read(out).encode("Hello") == read_checkpoint(checkpoint).encode("Hello")
    again = run()
    assert again.returncode == 2
    assert "it is there already" in again.stderr


def read_checkpoint(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)
