"""What ends a text of a GGUF file, how its texts are drawn, and which files are taken for one, or for a part of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import LLM, SamplingParams
from outrider.errors import ModelLoadError
from outrider.loading.gguf.header import is_gguf, read_gguf
from outrider.loading.gguf.tokenizer import end_tokens
from tests.model import checkpoints
from tests.model.gguf_files import Written
from tests.model.test_gguf_tokenizers import metadata_only
from tests.model.test_gguf_vocabularies import byte_level_tokenizer, saved

gguf = pytest.importorskip("gguf")
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def ends(folder: Path, tokens: dict[str, int], eos: int | None = None) -> list[str]:
    """Which tokens end a text, of a vocabulary with these types: 1 is normal, 3 of control, 4 defined by users."""

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(tokens.values()))
        if eos is not None:
            writer.add_eos_token_id(eos)

    file = read_gguf(metadata_only(folder / "ends.gguf", write))
    return [list(tokens)[number] for number in end_tokens(file)]


@pytest.mark.parametrize(
    ("tokens", "eos", "want"),
    [
        ({"a": 1, "<eos>": 3, "<end_of_turn>": 3}, 1, ["<eos>", "<end_of_turn>"]),
        ({"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 4}, 0, ["<|endoftext|>", "<|im_end|>"]),
        ({"<|eot_id|>": 3, "<|eom_id|>": 3, "<|end_of_text|>": 3}, None, ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]),
        ({"a": 1, "<|im_end|>": 1, "</s>": 1}, 0, ["a"]),
        ({"<eos>": 3, "</s>": 4, "<|fim_pad|>": 3, "<|file_sep|>": 3}, 0, ["<eos>", "<|fim_pad|>", "<|file_sep|>"]),
        ({"<s>": 3, "</s>": 3, "<|end|>": 3}, None, ["</s>", "<|end|>"]),
        ({"<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, 0, ["<|return|>", "<|call|>"]),
        ({"<|calls|>": 3, "<|flush|>": 3, "<|end|>": 3}, None, ["<|calls|>", "<|flush|>"]),
        ({"<|return|>": 3, "<|calls|>": 3, "<|end|>": 3}, None, ["<|return|>", "<|calls|>"]),
        ({"<|call|>": 3, "<|end|>": 3}, None, ["<|call|>", "<|end|>"]),
        ({"<|ifm|im_end|>": 3, "<|plamo:file_separator|>": 3}, None, ["<|ifm|im_end|>", "<|plamo:file_separator|>"]),
    ],
    ids=["gemma", "chatml", "llama-3", "of-texts", "html", "phi-3", "gpt-oss", "solar", "both", "no-parts", "k2-and-plamo"],
)
def test_what_ends_a_turn_is_known_by_its_text(
    tmp_path: Path, tokens: dict[str, int], eos: int | None, want: list[str]
) -> None:
    """Where it is no part of a text. What a file says counts whatever it is."""
    assert ends(tmp_path, tokens, eos) == want


def test_every_end_that_a_file_names_counts(tmp_path: Path) -> None:
    """Those of what is written between two texts and of a file, too, as in llama.cpp."""

    def write(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(list("abcdefgh"))
        for number, name in enumerate(("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep", "fim_pre")):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)

    assert end_tokens(read_gguf(metadata_only(tmp_path / "ends.gguf", write))) == [0, 1, 2, 3, 4, 5]


def test_the_end_of_a_tokenizer_counts_beside_those_of_a_configuration(tmp_path: Path) -> None:
    """Chat models are published whose configuration names the end of a text, and whose tokenizer that of a turn."""
    tokenizer = byte_level_tokenizer("qwen2")
    checkpoint = saved(tmp_path / "source", "llama", tokenizer)
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        path = Path(checkpoint, name)
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"eos_token_id": other}), "utf-8")
    loaded = LLM(checkpoint, speculation="none").engine.runner.loaded
    assert loaded.eos_token_ids == {other, tokenizer.eos_token_id}


def small(folder: Path, write: Any = None, name: str = "model.gguf") -> Path:
    source = checkpoints.save("llama", folder / "source", layers=1, intermediate_size=64)
    return Written(source, folder / name, ("Q8_0",), write).path


def test_what_a_file_says_of_sampling_is_the_default_of_requests(tmp_path: Path) -> None:
    def write(writer: Any) -> None:
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_top_p(0.95)
        writer.add_sampling_min_p(0.05)
        writer.add_sampling_penalty_repeat(1.05)

    llm = LLM(str(small(tmp_path, write)), speculation="none")
    want = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05)
    assert llm.default_params == want
    assert LLM(str(small(tmp_path / "plain")), speculation="none").default_params == SamplingParams()


def test_what_a_file_says_wrongly_of_sampling_is_left_out(tmp_path: Path) -> None:
    def write(writer: Any) -> None:
        writer.add_sampling_temp(-1.0)
        writer.add_string("general.sampling.top_k", "many")
        writer.add_sampling_top_p(0.5)

    assert LLM(str(small(tmp_path, write)), speculation="none").default_params == SamplingParams(top_p=0.5)


@pytest.mark.parametrize("name", ["sha256-0f3c", "MODEL.GGUF", "model.bin"])
def test_a_file_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    path = small(tmp_path).rename(tmp_path / name)
    assert is_gguf(str(path))
    llm = LLM(str(path), draft_model=str(path))
    drafted, plain = (llm.generate([[1, 2, 3]], GREEDY, **how)[0].token_ids for how in ({}, {"speculation": "none"}))
    assert drafted == plain
    other = tmp_path / "notes"
    other.write_text("GGU")
    assert not is_gguf(str(other))
    assert not is_gguf(str(tmp_path))


def part(folder: Path, number: int, name: str, count: int = 2) -> Path:
    """A part of a model of two, with one matrix."""
    writer = gguf.GGUFWriter(folder / name, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_tensor(f"t{number}", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / name


@pytest.mark.parametrize("ending", [".gguf", ".GGUF"])
def test_parts_with_their_names_are_one_model(tmp_path: Path, ending: str) -> None:
    paths = [part(tmp_path, number, f"m-0000{number + 1}-of-00002{ending}") for number in range(2)]
    assert [read_gguf(str(path)).tensors.keys() for path in paths] == [{"t0", "t1"}] * 2


def test_a_part_that_was_renamed_is_told_as_such(tmp_path: Path) -> None:
    for number in range(2):
        says = rf"it is part {number + 1} of 2 .* renamed.*NAME-0000{number + 1}-of-00002\.gguf"
        with pytest.raises(ModelLoadError, match=says):
            read_gguf(str(part(tmp_path, number, "model.gguf")))
    swapped = [part(tmp_path, 1 - number, f"m-0000{number + 1}-of-00002.gguf") for number in range(2)]
    with pytest.raises(ModelLoadError, match=r"m-00001-of-00002\.gguf': it is part 2 of 2 .* renamed"):
        read_gguf(str(swapped[0]))
    for count in (0, 1):  # as files are that were merged
        read_gguf(str(part(tmp_path, 0, "merged.gguf", count)))


def test_parts_that_were_joined_are_told_as_such(tmp_path: Path) -> None:
    both = b"".join(part(tmp_path, number, f"{number}.gguf").read_bytes() for number in range(2))
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(both)
    with pytest.raises(ModelLoadError, match=r"part 1 of 2 .* with other parts written behind it.*cannot be joined"):
        read_gguf(str(joined))
