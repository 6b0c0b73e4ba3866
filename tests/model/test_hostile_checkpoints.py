"""Checkpoints that are broken or made to harm: a typed error that names the file or the weight, at once and unread."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM
from outrider.errors import ModelError, ModelLoadError, UnsupportedModelError
from outrider.loading.fit import stored_tensors
from outrider.model import factory

UP, HEAD, NORM = "model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"


def refusal(folder: Path, **settings: Any) -> ModelError:
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        LLM(folder, speculation="none", **settings)
    assert "encoder" not in str(caught.value)
    return caught.value


def spoil(folder: Path, name: str, change: Callable[[torch.Tensor], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for each, tensor in tensors.items():
        if name in ("", each):
            change(tensor)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")


INT8 = {"dtype": "float32", "quantization": "int8"}


@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16"}, INT8], ids=str)
@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (UP, float("nan"), f"its weight {UP} holds NaN"),
        (NORM, float("nan"), f"its weight {NORM} holds NaN"),
        (UP, float("inf"), f"its weight {UP} is infinite in"),
        (UP, 1e30, f"largest of its weights is 1.0e+30, in {UP}"),
    ],
)
def test_one_number_that_is_none_names_its_weight(
    folder: Path, name: str, value: float, problem: str, how: dict[str, Any]
) -> None:
    spoil(folder, name, lambda tensor: tensor.view(-1)[3].fill_(value))
    if how is INT8 and name == UP and value != 1e30:  # rounding finds it first
        problem = f"{UP} holds weights that are not finite"
    assert problem in refusal(folder, **how).problem


@pytest.mark.parametrize("how", [{}, INT8], ids=str)
@pytest.mark.parametrize(("name", "named"), [(HEAD, HEAD), ("", "model.embed_tokens.weight")])
def test_weights_of_zeros_are_named(folder: Path, name: str, named: str, how: dict[str, Any]) -> None:
    spoil(folder, name, lambda tensor: tensor.zero_())
    assert refusal(folder, **how).problem == f"its weight {named} is all zero, so its logits are all zero"


def test_a_weight_that_overflows_in_float16_alone(folder: Path) -> None:
    spoil(folder, UP, lambda tensor: tensor.mul_(1e6))
    error = refusal(folder, dtype="float16")
    assert f"{UP} is infinite in float16" in error.problem
    assert error.remedy.startswith("Use dtype='float32'")
    LLM(folder, speculation="none", dtype="float32")


def test_sound_weights_are_not_searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "_weights", lambda model: pytest.fail("the weights were read once more"))
    LLM(folder, speculation="none")


@pytest.mark.parametrize("layers", [0, -1, 10**9])
def test_numbers_of_layers_that_cannot_be(folder: Path, layers: int) -> None:
    configure(folder, num_hidden_layers=layers)
    error = refusal(folder)
    assert f"num_hidden_layers={layers}" in error.problem
    assert error.remedy.startswith("Correct config.json")


def test_layers_without_a_count_of_tensors_have_a_limit(folder: Path) -> None:
    """As in a file of pickles, whose header names no tensors."""
    configure(folder, num_hidden_layers=10**9)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "limited to 1,024" in refusal(folder).problem


@pytest.mark.parametrize("context", [0, -1])
def test_contexts_that_cannot_be(folder: Path, context: int) -> None:
    configure(folder, max_position_embeddings=context)
    assert f"max_position_embeddings={context}" in refusal(folder).problem


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("/dev/zero", "names '/dev/zero' for weights"),
        ("../outside.safetensors", "names '../outside.safetensors' for weights"),
        (5, "names 5 for weights"),
        ("pipe", "pipe, which model.safetensors.index.json names, is a device or a pipe"),
    ],
)
def test_an_index_stays_in_its_folder(folder: Path, named: Any, problem: str) -> None:
    """The weights outside would load, and nobody ever writes into the pipe."""
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    os.mkfifo(folder / "pipe")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, named)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    assert problem in refusal(folder).problem


def test_a_pipe_has_no_header(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "pipe")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pipe"}}', "utf-8")
    assert stored_tensors(folder) == []


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '{"weight_map": [1]}'])
def test_a_malformed_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text, "utf-8")
    assert refusal(folder).problem.startswith("model.safetensors.index.json is no index of weights")


FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_opened(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to("/dev/zero")
    assert refusal(folder).problem == f"{name} is a device or a pipe, and no file"


def test_links_to_files_are_files(folder: Path) -> None:
    """As the cache of the hub has them."""
    for path in list(folder.iterdir()):
        path.rename(folder.parent / path.name)
        path.symlink_to(folder.parent / path.name)
    LLM(folder, speculation="none")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_file_far_too_large_is_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(2**40)
    assert f"{name} has 1,099,511,627,776 bytes" in refusal(folder).problem


@pytest.mark.parametrize("entry", [{"shape": "xx"}, {"shape": [1.5]}, {"dtype": ["F32"]}, {"shape": [[1]]}], ids=str)
def test_nonsense_in_a_header_is_left_to_loading(folder: Path, entry: dict[str, Any]) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **entry}}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert refusal(folder)


def test_the_reason_is_whole(folder: Path) -> None:
    """transformers names the field in one line, and says what is wrong in the next."""
    configure(folder, num_attention_heads="x")
    assert "'num_attention_heads': " in refusal(folder).problem
