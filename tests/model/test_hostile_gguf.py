"""Truncated, mutated and hostile GGUF files: a typed error that names file and tensor, and nothing is made of their
numbers."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.config import ModelConfig
from outrider.errors import ModelError, OutriderError
from outrider.loading.gguf.header import read_gguf
from outrider.loading.loader import load_model
from tests.model import checkpoints
from tests.model.gguf_files import Written
from tests.model.test_gguf_tokenizers import vocabulary

gguf = pytest.importorskip("gguf")
MUTATIONS = 3000


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("sound")
    tokens = [chr(code) for code in range(97, 123)]
    source = checkpoints.save("llama", folder / "source", layers=1, intermediate_size=64, vocab_size=len(tokens) + 4)
    write = vocabulary("llama-bpe", [*tokens[:-1], "ab"], ["a b"])
    path = Written(source, folder / "model.gguf", ("Q8_0", "Q4_0"), write).path
    load_model(ModelConfig(model=str(path)))
    return path.read_bytes()


def header_size(data: bytes) -> int:
    """Where the data of tensors begin, nearly."""
    return data.index(b"blk.0.ffn_up.weight") + 300


def refused_or_loaded(path: Path, data: bytes) -> str | None:
    """What is said of a file; None where it is a sound one."""
    path.write_bytes(data)
    try:
        load_model(ModelConfig(model=str(path)))
    except OutriderError as error:
        return str(error)
    return None


def mutated(data: bytes, random: np.random.Generator) -> bytes:
    changed = bytearray(data)
    kind, at = random.integers(0, 5), int(random.integers(0, header_size(data)))
    if kind == 0:
        return data[: int(random.integers(0, len(data)))]
    if kind == 1:
        changed[at] ^= 1 << int(random.integers(0, 8))
    elif kind == 2:
        changed[at : at + 8] = struct.pack("<Q", (0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1)[random.integers(0, 6)])
    elif kind == 3:
        changed[at : at + 4] = random.bytes(4)
    else:
        del changed[at : at + int(random.integers(1, 40))]
    return bytes(changed)


def check_mutations(sound: bytes, folder: Path, seeds: range) -> None:
    _, limit = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**31, limit))
    try:
        said = [refused_or_loaded(folder / "m.gguf", mutated(sound, np.random.default_rng(seed))) for seed in seeds]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    refused = [text for text in said if text is not None]
    assert len(refused) > len(said) / 3
    assert all("m.gguf" in text for text in refused)
    assert not any("MemoryError" in text or "allocate" in text for text in refused)


def test_mutations_are_refused_or_harmless(sound: bytes, tmp_path: Path) -> None:
    check_mutations(sound, tmp_path, range(40))


@pytest.mark.slow
def test_thousands_of_mutations(sound: bytes, tmp_path: Path) -> None:
    check_mutations(sound, tmp_path, range(100, 100 + MUTATIONS))


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


def value(key: bytes, kind: int, packed: bytes) -> Callable[[bytes], bytes]:
    """Another value of a key, of the same size."""

    def change(data: bytes) -> bytes:
        at = data.index(key) + len(key)
        assert struct.unpack_from("<I", data, at)[0] == kind
        return data[: at + 4] + packed + data[at + 4 + len(packed) :]

    return change


def tensor(name: bytes, dimension: int, size: int) -> Callable[[bytes], bytes]:
    """Another size of a dimension of a tensor."""

    def change(data: bytes) -> bytes:
        at = data.index(name) + len(name) + 4 + 8 * dimension
        return data[:at] + struct.pack("<Q", size) + data[at + 8 :]

    return change


def kind_of(name: bytes, number: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at = data.index(name) + len(name) + 4 + 16
        return data[:at] + struct.pack("<I", number) + data[at + 4 :]

    return change


def at_offset_of(name: bytes, other: bytes) -> Callable[[bytes], bytes]:
    """A tensor begins where another one does."""

    def change(data: bytes) -> bytes:
        places = [data.index(each) + len(each) + 4 + 16 + 4 for each in (name, other)]
        return data[: places[0]] + data[places[1] : places[1] + 8] + data[places[0] + 8 :]

    return change


WHOLE = 4  # the type of whole numbers in metadata


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: b"", "ends within its first 24 bytes"),
        (lambda data: b"PK" + data[2:], "does not begin with GGUF"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "version 50331648"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "it announces 1,152,921,504,606,846,976 tensors"),
        (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], "it announces 1,152,921,504,606,846,976 values"),
        (lambda data: data[: len(data) // 2], "the data of "),
        (lambda data: data[: data.index(b"blk.0.ffn_up.weight") + 8], "within its header"),
        (lambda data: data[:24] + struct.pack("<Q", 2**50) + data[32:], "a name of 1,125,899,906,842,624 bytes"),
        (replaced(b"blk.0.ffn_up.weight", b"blk.0.attn_q.weight"), "two tensors blk.0.attn_q.weight"),
        (replaced(b"blk.0.ffn_up.weight", b"blk.7.ffn_up.weight"), "blk.7.ffn_up.weight, which its architecture"),
        (replaced(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"), "blk.0.ffn_xx.weight, which is not known"),
        (tensor(b"blk.0.ffn_up.weight", 1, 2**40), "the data of blk.0.ffn_up.weight end at byte"),
        (tensor(b"blk.0.ffn_up.weight", 0, 33), "rows of 33 weights, and blocks of"),
        (tensor(b"blk.0.ffn_up.weight", 1, 32), r"ffn_up.weight has shape \[32, 32\], and its metadata ask for \[64, 32\]"),
        (tensor(b"blk.0.ffn_up.weight", 1, 0), r"ffn_up.weight has the shape \[0, 32\]"),
        (kind_of(b"blk.0.ffn_up.weight", 23), "has the type IQ4_XS, and F32"),
        (kind_of(b"blk.0.ffn_up.weight", 99), "type of number 99"),
        (value(b"llama.feed_forward_length", WHOLE, struct.pack("<I", 2**30)), r"ask for \[1073741824, 32\]"),
        (value(b"llama.embedding_length", WHOLE, struct.pack("<I", 0)), "embedding_length is 0, and no whole number"),
        (value(b"llama.block_count", WHOLE, struct.pack("<I", 10**6)), "it says 1,000,000 layers, and holds"),
        (at_offset_of(b"blk.0.ffn_up.weight", b"blk.0.attn_q.weight"), "have the same bytes"),
        (value(b"llama.attention.head_count", WHOLE, struct.pack("<I", 10**9)), "m.gguf"),
        (replaced(b"general.architecture", b"general.architecturX"), "general.architecture is None"),
        (replaced(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"), "architecture is mamba, and llama, mistral3"),
        (value(b"tokenizer.ggml.eos_token_id", WHOLE, struct.pack("<I", 10**6)), "is 1000000, and no token"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(sound: bytes, tmp_path: Path, change: Any, problem: str) -> None:
    (tmp_path / "m.gguf").write_bytes(change(sound))
    with pytest.raises(ModelError, match=problem) as caught:
        load_model(ModelConfig(model=str(tmp_path / "m.gguf")))
    assert "m.gguf" in str(caught.value)


def test_more_layers_than_any_model_has_are_refused(sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(value(b"llama.block_count", WHOLE, struct.pack("<I", 3))(sound))
    monkeypatch.setenv("OUTRIDER_FILE_LIMITS", "layers=2")
    with pytest.raises(
        ModelError, match=r"it has 3 layers, and layers of files are limited to 2\. Set OUTRIDER_FILE_LIMITS"
    ):
        load_model(ModelConfig(model=str(tmp_path / "m.gguf")))


def test_numbers_that_are_not_finite_are_named(tmp_path: Path, sound: bytes) -> None:
    file = read_gguf(str(_saved(tmp_path, sound)))
    begin = sound.index(file.tensors["blk.0.ffn_up.weight"].data.tobytes())
    changed = sound[:begin] + b"\xff\x7f" + sound[begin + 2 :]
    (tmp_path / "m.gguf").write_bytes(changed)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight holds numbers that are not finite"):
        load_model(ModelConfig(model=str(tmp_path / "m.gguf")))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_halves_that_are_not_finite_are_named(tmp_path: Path, kind: str) -> None:
    source = checkpoints.save("llama", tmp_path / "source", layers=1, intermediate_size=64)
    path = Written(source, tmp_path / "m.gguf", (kind,)).path
    load_model(ModelConfig(model=str(path)))
    data = path.read_bytes()
    begin = data.index(read_gguf(str(path)).tensors["blk.0.ffn_up.weight"].data.tobytes())
    path.write_bytes(data[:begin] + b"\x80\x7f" + data[begin + 2 :])
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight holds numbers that are not finite"):
        load_model(ModelConfig(model=str(path)))


def test_files_in_parts_are_one_model(sound: bytes, tmp_path: Path) -> None:
    whole = _saved(tmp_path, sound)
    reader = gguf.GGUFReader(whole)
    for part in range(2):
        writer = gguf.GGUFWriter(tmp_path / f"m-0000{part + 1}-of-00002.gguf", "llama")
        for name, field in reader.fields.items() if part == 0 else ():
            if name.startswith("llama."):
                writer.add_key_value(name, field.contents(), field.types[0])
        for tensor in reader.tensors[part::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    both = read_gguf(str(tmp_path / "m-00002-of-00002.gguf"))
    assert both.tensors.keys() == read_gguf(str(whole)).tensors.keys()
    load_model(ModelConfig(model=str(tmp_path / "m-00001-of-00002.gguf")))
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"one of 2 files, and m-00001-of-00002\.gguf is missing"):
        read_gguf(str(tmp_path / "m-00002-of-00002.gguf"))


def _saved(folder: Path, data: bytes) -> Path:
    (folder / "whole.gguf").write_bytes(data)
    return folder / "whole.gguf"
