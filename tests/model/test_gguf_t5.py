"""Files of T5: the texts of their folders, ids of transformers' own tokenizer, and what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from outrider import LLM, SamplingParams
from outrider.errors import ModelError, OutriderError
from tests.model import encoders, gguf_t5
from tests.model.test_gguf_tokenizers import CORPUS, NUMBERS, metadata_only, read

pytest.importorskip("gguf")
SOURCE = [(7 * i * i + 3 * i) % encoders.VOCAB_SIZE for i in range(40)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=4)
kinds_of_models = pytest.mark.parametrize("model", gguf_t5.SHAPES)


def told(model: str, **settings: Any) -> list[dict[int, float]]:
    """Logarithms of probabilities, token by token."""
    found = LLM(model, speculation="none", **settings).generate([SOURCE], GREEDY)[0]
    assert found.logprobs is not None
    return [{token: entry.logprob for token, entry in each.items()} for each in found.logprobs]


@kinds_of_models
def test_a_file_of_floats_has_the_bits_of_its_folder(tmp_path: Path, model: str) -> None:
    source = gguf_t5.save(model, tmp_path / "source")
    assert told(gguf_t5.write(source, tmp_path / "m.gguf")) == told(source, dtype="float32")


@kinds_of_models
@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_blocks_have_the_logits_of_what_they_stand_for(tmp_path: Path, model: str, kind: str) -> None:
    """An encoder looks embeddings up after the kernels have taken those of the output layer."""
    source = gguf_t5.save(model, tmp_path / "source", vocab_size=encoders.VOCAB_SIZE + 100)
    file, plain = gguf_t5.write(source, tmp_path / "m.gguf", kind), gguf_t5.plain(source, tmp_path / "plain", kind)
    for ours, want in zip(told(file, dtype="float64"), told(plain, dtype="float64"), strict=True):
        assert ours == pytest.approx(want, abs=1e-6)
    wanted = told(plain, dtype="float32")
    for backend in ("fused", "paged"):
        found = told(file, dtype="float32", activations="none", attention_backend=backend)
        for ours, want in zip(found, wanted, strict=True):
            assert ours == pytest.approx(want, abs=1e-3), backend
    llm = LLM(file)
    assert llm.engine.runner.backend.name == "fused"
    texts = [llm.generate([SOURCE], GREEDY, speculation=how)[0].token_ids for how in ("none", "suffix")]
    assert texts[0] == texts[1]


def test_biases_of_attention_to_a_source_are_left_out(tmp_path: Path) -> None:
    """Files of the first T5 have them, and nothing reads them."""
    source = gguf_t5.save("tied", tmp_path / "source")
    more = {"dec.blk.0.cross_attn_rel_b.weight": (8, 32)}
    assert told(gguf_t5.write(source, tmp_path / "m.gguf", more=more)) == told(source, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"missing": ("dec.blk.2.cross_attn_q.weight",)}, r"that for decoder\.block\.2\.layer\.1\.EncDecAttention\.q"),
        ({"missing": ("enc.blk.0.attn_rel_b.weight",)}, r"that for encoder\.block\.0\.layer\.0\.SelfAttention\.relative"),
        ({"missing": ("enc.blk.1.ffn_gate.weight",)}, r"that for encoder\.block\.1\.layer\.1\.DenseReluDense\.wi_0"),
        ({"missing": ("enc.output_norm.weight",)}, r"that for encoder\.final_layer_norm\.weight"),
        ({"missing": ("token_embd.weight",)}, r"the tensor token_embd\.weight is missing"),
        ({"more": {"enc.blk.1.attn_rel_b.weight": (8, 32)}}, r"has a tensor enc\.blk\.1\.attn_rel_b\.weight, which its"),
        ({"more": {"dec.blk.0.attn_sinks.weight": (32,)}}, r"tensor dec\.blk\.0\.attn_sinks\.weight, which is not known"),
        ({"relative_attn_buckets_count": 16}, r"rel_b\.weight has shape \[8, 32\], and its metadata ask for \[16, 32\]"),
        ({"decoder_block_count": 2}, r"dec\.blk\.2\.\w+\.weight, which its architecture does not have"),
        ({"decoder_block_count": 2**30}, r"it says 1,073,741,824 layers"),
        ({"decoder_start_token_id": None}, r"its t5\.decoder_start_token_id is None, and no token"),
        ({"decoder_start_token_id": 61}, r"its t5\.decoder_start_token_id is 61, and no token"),
        ({"value_length": 16}, "values of another width than its keys"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    source = gguf_t5.save("gated", tmp_path / "source")
    with pytest.raises(ModelError, match=problem):
        LLM(gguf_t5.write(source, tmp_path / "m.gguf", **changes))


# --- Its tokenizer.


SPACE = "\u2581"
TEXTS = [
    *CORPUS,
    *NUMBERS,
    f"{SPACE}x {SPACE} y",
    "a</s> b <pad>c<unk>",
    "\ufb01n \u00bd\u00a0\u2460",
    "hello [PAD1] world",
]
TABLE = gguf_t5.charsmap({
    "\t": " ", "\n": " ", "\r": " ", "\u00a0": " ", "\u2028": " ", "\0": "", "e\u0301": "\u00e9", "\ufb01": "fi",
    "\u00bd": "1\u20442", "\u2460": "1", "\u200d": " ", "\u00b2": "2",
})  # fmt: skip
_WORDS = ["the", "two", "hell", "hello", "world", "lines", "fi", "return", "caf\u00e9", "\u4f60\u597d"]
_LETTERS = sorted(
    {letter for text in CORPUS + NUMBERS for letter in text if letter.isascii() and letter.isprintable()} - {" "}
)
PIECES = [
    ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (SPACE, -2.5),
    *((f"{SPACE}{word}", -4.0 - 0.25 * place) for place, word in enumerate(_WORDS)),
    *((word, -6.0 - 0.125 * place) for place, word in enumerate(["lo", "er", "o,", "12", "345", "00", "\u00e9"])),
    *((letter, -8.0 - 0.0625 * place) for place, letter in enumerate(_LETTERS)),
]  # fmt: skip


def vocabulary(*, filled: int = 3, table: bytes = TABLE, merged: bool = True, **values: Any) -> Callable[[Any], None]:
    """Writes the vocabulary, filled up as converters do it, or other values of it, None for none."""
    told = {
        "tokenizer_model": "t5",
        "tokenizer_pre": "default",
        "token_list": [piece for piece, _ in PIECES] + [f"[PAD{number}]" for number in range(filled)],
        "token_scores": [score for _, score in PIECES] + [-10000.0] * filled,
        "token_types": [3, 3, 2] + [1] * (len(PIECES) - 3) + [5] * filled,
        "add_space_prefix": True,
        "remove_extra_whitespaces": merged,
        "precompiled_charsmap": table,
        **values,
    }

    def write(writer: Any) -> None:
        for name, value in told.items():
            if value is not None:
                getattr(writer, f"add_{name}")(value)

    return write


def stock() -> Any:
    """transformers' own."""
    from transformers import T5Tokenizer

    return T5Tokenizer(vocab=PIECES, _spm_precompiled_charsmap=TABLE, extra_ids=0)


def test_ids_and_texts_are_those_of_transformers(tmp_path: Path) -> None:
    ours, theirs = read(metadata_only(tmp_path / "v.gguf", vocabulary(), "t5")), stock()
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        for skipped in (False, True):
            told = [each.decode(ids, skip_special_tokens=skipped) for each in (ours, theirs)]
            assert told[0] == told[1], text
    assert ours.convert_ids_to_tokens(ours.encode("\ufb01\t\u2460")) == [f"{SPACE}fi", SPACE, "1", "</s>"]
    assert (ours.eos_token_id, ours.pad_token_id, ours.unk_token_id) == (1, 0, 2), "as llama.cpp where nothing is said"


def test_spaces_are_kept_where_the_file_says_so(tmp_path: Path) -> None:
    """As SentencePiece and llama.cpp keep them. transformers' own tokenizer merges them whatever is said."""
    kept = read(metadata_only(tmp_path / "v.gguf", vocabulary(merged=False), "t5"))
    assert kept.tokenize("  the   two ") == [SPACE, SPACE, f"{SPACE}the", SPACE, SPACE, f"{SPACE}two", SPACE]
    assert kept.decode(kept.encode("the   two"), skip_special_tokens=True) == "the   two"
    bare = read(metadata_only(tmp_path / "b.gguf", vocabulary(merged=False, add_space_prefix=False), "t5"))
    assert bare.tokenize("lo the") == ["lo", f"{SPACE}the"]
    assert bare.decode(bare.encode(" the"), skip_special_tokens=True) == " the"


def test_nothing_is_put_behind_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    ours = read(metadata_only(tmp_path / "v.gguf", vocabulary(add_eos_token=False), "t5"))
    assert ours.encode("the") == stock().encode("the")[:-1]


def test_what_is_in_no_text_makes_unknown_text_no_dearer(tmp_path: Path) -> None:
    """A letter that is no token costs more than the least score, by 10: here less than two tokens around it."""
    pieces = [*PIECES[:4], ("ab", -3.0), ("bZ", -16.0), (f"{SPACE}a", -16.0), ("<x>", -1000.0), ("[PAD]", -10000.0)]
    names, scores = (list(each) for each in zip(*pieces, strict=True))
    write = vocabulary(token_list=names, token_scores=scores, token_types=[3, 3, 2, 1, 1, 1, 1, 4, 5])
    ours = read(metadata_only(tmp_path / "v.gguf", write, "t5"))
    assert ours.convert_ids_to_tokens(ours.encode("abZ<x>")) == [SPACE, "ab", "<unk>", "<x>", "</s>"]


def corrupted(place: int, value: int) -> bytes:
    """The table with another unit."""
    return TABLE[: 4 + 4 * place] + value.to_bytes(4, "little") + TABLE[8 + 4 * place :]


_SIZE = int.from_bytes(TABLE[:4], "little")
_LEAF = next(4 + at for at in range(0, _SIZE, 4) if TABLE[7 + at] & 0x80)


@pytest.mark.parametrize(
    "table",
    [
        b"\0",
        bytes(8),
        TABLE[:400],
        TABLE[:4],
        (_SIZE + 2**20).to_bytes(4, "little") + TABLE[4:],
        corrupted(0, 2**30 | 1 << 10),
        corrupted((_LEAF - 4) // 4, 2**31 | 2**20),
        TABLE[: 4 + _SIZE] + b"\x80" * 40,
    ],
    ids=range(8),
)
def test_tables_that_lead_outside_of_themselves_are_refused(tmp_path: Path, table: bytes) -> None:
    """The library that follows them would break down in a request."""
    with pytest.raises(OutriderError, match=r"precompiled_charsmap is no table of characters"):
        read(metadata_only(tmp_path / "v.gguf", vocabulary(table=table), "t5"))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"token_list": None}, "tokens is no list of texts"),
        ({"token_list": ["a"] * (len(PIECES) + 3)}, "tokens holds 'a' twice"),
        ({"token_scores": None}, r"scores is no list of \d+ numbers"),
        ({"token_scores": [float("nan")] * (len(PIECES) + 3)}, "scores holds numbers that are not finite"),
        ({"unk_token_id": 1000}, "unknown_token_id is 1000, and no token"),
        ({"eos_token_id": 1000}, "eos_token_id is 1000, and no token"),
    ],
    ids=str,
)
def test_bad_vocabularies_are_refused_by_name(tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(OutriderError, match=problem):
        read(metadata_only(tmp_path / "v.gguf", vocabulary(**values), "t5"))


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    source = gguf_t5.save("gated", tmp_path / "source", vocab_size=len(PIECES) + 3, eos_token_id=1)
    stock().save_pretrained(source)
    file = gguf_t5.write(source, tmp_path / "m.gguf", vocabulary=vocabulary())
    answers = [
        LLM(model, dtype="float32", speculation="suffix").generate(["Hello, the  world"], GREEDY)[0]
        for model in (file, source)
    ]
    assert answers[0].text == answers[1].text
    assert answers[0].token_ids == answers[1].token_ids
    assert 1 in LLM(file).engine.runner.loaded.eos_token_ids


class Opaque(ctypes.Structure):
    """Settings of llama.cpp, of which only the defaults are used. They are shorter than this in all versions."""

    _fields_ = (("content", ctypes.c_char * 1024),)


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class LlamaCpp:
    """A file of T5 in llama.cpp, whose server takes none."""

    def __init__(self, path: str) -> None:
        native = pytest.importorskip("xllamacpp")
        self._library = ctypes.CDLL(native.xllamacpp.__file__)
        settings = self._call("llama_model_default_params", Opaque)
        model = self._call("llama_model_load_from_file", ctypes.c_void_p, path.encode(), settings)
        context = self._call("llama_context_default_params", Opaque)
        self._context = self._call("llama_init_from_model", ctypes.c_void_p, ctypes.c_void_p(model), context)
        assert self._context

    def _call(self, name: str, kind: Any, *values: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = kind
        return function(*values)

    def read(self, tokens: list[int], position: int, function: str = "llama_decode") -> list[float]:
        """The logits behind the first of these tokens."""
        batch = self._call("llama_batch_init", Batch, len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position + place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        assert self._call(function, ctypes.c_int32, ctypes.c_void_p(self._context), batch) == 0
        if function == "llama_encode":
            return []
        found = self._call("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), ctypes.c_void_p(self._context), 0)
        return list(found[: encoders.VOCAB_SIZE])


@pytest.mark.parametrize(("model", "kind", "most"), [("tied", "F32", 0.1), ("gated", "F32", 0.1), ("tied", "Q8_0", 0.5)])
def test_logits_are_those_of_llama_cpp(tmp_path: Path, model: str, kind: str, most: float) -> None:
    """It keeps keys and values as halves, looks GELU up, and needs as many layers of the decoder as of the encoder."""

    def placeholders(writer: Any) -> None:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(encoders.VOCAB_SIZE)

    source = gguf_t5.save(model, tmp_path / "source", num_layers=2, num_decoder_layers=2)
    file = gguf_t5.write(source, tmp_path / "m.gguf", kind, vocabulary=placeholders)
    theirs, config = LlamaCpp(file), AutoConfig.from_pretrained(source)
    theirs.read(SOURCE, 0, "llama_encode")
    scale = config.d_model**-0.5 if model == "tied" else 1.0  # which llama.cpp leaves out
    token = config.decoder_start_token_id
    for position, ours in enumerate(told(file)):
        logprobs = torch.tensor(theirs.read([token], position), dtype=torch.float64).mul(scale).log_softmax(0)
        assert max(abs(logprobs[token].item() - logprob) for token, logprob in ours.items()) < most, position
        token = max(ours, key=lambda token: ours[token])
        assert logprobs.argmax() == token or kind != "F32", position
