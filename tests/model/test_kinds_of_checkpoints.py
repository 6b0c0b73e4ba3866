"""Folders and files that are no checkpoint of a causal decoder: the error says what they are, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli.app import app
from outrider.errors import MissingExtraError, OutriderError
from outrider.loading import sources


def configured(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def empty(folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


def adapter(folder: Path) -> Path:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "meta/base"}')
    return folder


def gguf(folder: Path) -> Path:
    empty(folder)
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    return folder


def gguf_file(folder: Path) -> Path:
    return gguf(folder) / "model-Q4_K_M.gguf"


def other_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def modelfile(folder: Path) -> Path:
    place = folder.with_name("Modelfile")
    place.write_text("# made by ollama\nFROM /models/blobs/sha256-ab\nTEMPLATE {{ .Prompt }}\n")
    return place


def hub_cache(folder: Path) -> Path:
    place = folder.with_name("models--owner--name")
    shutil.move(folder, place / "snapshots" / "ab")
    return place


def no_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def quantised(method: str) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        configured(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True})
        return folder

    return change


def of_type(name: str) -> Callable[[Path], Path]:
    """A checkpoint whose configuration is one of transformers' of this type."""

    def change(folder: Path) -> Path:
        from transformers import AutoConfig

        AutoConfig.for_model(name).save_pretrained(folder)
        return folder

    return change


def own_code(folder: Path) -> Path:
    configured(
        folder, model_type="unheard_of", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    )
    (folder / "code.py").write_text("raise RuntimeError('it ran')\n")
    return folder


def other_shape(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def encoder(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    shutil.rmtree(folder)
    BertModel(BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "problem", "remedy"),
    [
        (empty, "the folder is empty", "config.json"),
        (no_config, "it holds no config.json", "config.json"),
        (adapter, "it is an adapter of meta/base", "merge_and_unload"),
        (gguf, "it holds GGUF files", "model-Q4_K_M.gguf"),
        (gguf_file, "it ends within its first 24 bytes", "again"),
        (other_file, "it is a file, and neither a folder nor a GGUF file", "Give its folder, "),
        (modelfile, "it is a file, and neither a folder nor a GGUF file", "named behind FROM: /models/blobs/sha256-ab."),
        (hub_cache, "it holds no config.json, but snapshots", "snapshots/ab, where the hub's cache"),
        (quantised("awq"), "weights are quantised, and none are", "again"),
        (quantised("bitsandbytes"), "quantised by bitsandbytes", 'quantization="int8"'),
        (own_code, "trust_remote_code", "trust_remote_code=True"),
        (other_shape, "model.norm.weight has shape [7]", "config.json"),
        (of_type("smolvlm"), "it is a multimodal model of type 'smolvlm'", "language model in a folder of its own"),
        (of_type("idefics3"), "it is a multimodal model of type 'idefics3'", "language model in a folder of its own"),
        (of_type("qwen2_audio"), "it is a multimodal model of type 'qwen2_audio'", "language model in a folder of its own"),
        (of_type("vit"), "it is of type 'vit', which is no causal language model", "ForCausalLM"),
        (encoder, "it is a BertModel without an output layer", "ForCausalLM"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_given_is_named(folder: Path, change: Callable[[Path], Path], problem: str, remedy: str) -> None:
    with pytest.raises(OutriderError) as caught:
        LLM(change(folder), speculation="none")
    assert problem in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("name", ["llama3.2:1b", "owner/name:latest", "hf.co/owner/name-GGUF:Q4_K_M", "hf.co/owner/name"])
def test_a_name_of_ollama_is_told_where_its_file_is(name: str) -> None:
    with pytest.raises(OutriderError, match="ollama show --modelfile"):
        LLM(name, speculation="none")


@pytest.mark.parametrize("verb", [["quantize"], ["convert", "--to", "gguf"]])
def test_verbs_that_write_checkpoints_name_a_file_as_one(verb: list[str], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    for given, problem in ((file, "it is a GGUF file, and folders alone are taken"), (tmp_path / "no", "no such folder")):
        error = CliRunner().invoke(app, [*verb, str(given), "--out", str(tmp_path / "out")]).exception
        assert isinstance(error, OutriderError)
        assert problem in str(error)


def test_what_writes_gguf_files_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = CliRunner().invoke(app, ["convert", str(tmp_path), "--to", "gguf", "--out", str(tmp_path / "out")]).exception
    assert isinstance(error, MissingExtraError)
    assert "pip install gguf" in str(error)


def test_a_draft_model_is_named_in_the_same_way(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    with pytest.raises(OutriderError, match="the folder is empty") as caught:
        LLM(sound, draft_model=tmp_path / "draft")
    assert getattr(caught.value, "field", None) == "draft_model"


def test_a_name_that_nobody_answers_for_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked = []

    class Unreachable:
        def model_info(self, model: str, **how: object) -> None:
            asked.append(model)
            raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi", Unreachable)
    start = perf_counter()
    with pytest.raises(OutriderError, match="no folder of that name here"):
        LLM("owner/mistyped", speculation="none")
    assert perf_counter() - start < 10, "there are no retries"
    assert asked


def test_a_name_that_the_hub_does_not_know_is_no_question_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub.errors import RepositoryNotFoundError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    class Hub:
        def model_info(self, model: str, **how: object) -> None:
            response = httpx.Response(404, request=httpx.Request("GET", "http://localhost"))
            raise RepositoryNotFoundError("404", response=response)  # type: ignore[arg-type]

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    with pytest.raises(OutriderError, match="no such model on the hub"):
        sources.hub_options("owner/mistyped", None)
