"""Published heads that cannot be used are refused with the file, the field or the tensor, and what would help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, Eagle3, SamplingParams, SpeculationConfig
from outrider.errors import HeadMismatchError, InvalidParameterError, ModelError, ModelLoadError
from outrider.heads.formats.published import read_head
from outrider.lab.prove.tiny_heads import save_random_eagle
from tests.model import checkpoints

LAYERS = 7
DRAFTED = tuple(range(0, 40, 3))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("hostile") / "target", seed=3, layers=LAYERS)


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return LLM(path, dtype="float32", speculation="none")


def refused(llm: LLM, folder: str) -> ModelError:
    config = SpeculationConfig(method=Eagle3(model=folder))
    with pytest.raises(ModelError) as caught:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4), speculation=config)
    assert caught.value.model == folder
    assert caught.value.remedy.endswith(".")
    return caught.value


def change(folder: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the configuration of a head."""
    file = Path(folder) / "config.json"
    mapping = json.loads(file.read_text())
    change(mapping)
    file.write_text(json.dumps(mapping))


def exchange(folder: str, name: str, tensor: torch.Tensor | None) -> None:
    """Put another tensor into a head; None takes one out."""
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor.contiguous()}, file)


def _set(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping.update(fields)


def _nested(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping["eagle_config"].update(fields)


def _inner(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping["transformer_layer_config"].update(fields)


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_such_heads_draft_before_they_are_spoilt(llm: LLM, path: str, layout: str, tmp_path: Path) -> None:
    config = SpeculationConfig(method=Eagle3(model=save_random_eagle(tmp_path, path, layout, draft_tokens=DRAFTED)))
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=8), speculation=config)
    assert output.stats.num_draft_tokens > 0
    assert output.stats.num_proposer_faults == 0


@pytest.mark.parametrize(
    ("layout", "spoil", "told"),
    [
        ("speculators", lambda m: m.pop("norm_before_residual"), "norm_before_residual=None: vLLM takes true"),
        ("speculators", _set(speculators_model_type="eagle"), "'eagle': this version does not read it"),
        ("speculators", lambda m: m["transformer_layer_config"].pop("model_type"), "it names no model_type"),
        ("speculators", _set(fc_norm=True, norm_before_fc=True), "only one of them can be"),
        ("speculators", _set(norm_output="yes"), "neither true nor false"),
        ("speculators", _set(eagle_aux_hidden_state_layer_ids=[5, 3, 1]), "in which order"),
        ("speculators", _set(eagle_aux_hidden_state_layer_ids=[1, 3, -1]), "no list of layers"),
        ("speculators", _inner(num_hidden_layers=2), "num_hidden_layers=2: heads of one layer are read"),
        ("speculators", _inner(model_type="mamba"), "its layers are not known"),
        ("speculators", _inner(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "change with the length"),
        ("speculators", _inner(hidden_size="wide"), "describes no llama layer"),
        ("speculators", _inner(num_key_value_heads=3, num_attention_heads=4), "do not go together"),
        ("speculators", _inner(hidden_act="gone"), "no such activation"),
        ("speculators", _inner(rms_norm_eps=float("nan")), "rms_norm_eps=nan: no number above 0"),
        ("speculators", _inner(rms_norm_eps=-1.0), "rms_norm_eps=-1.0: no number above 0"),
        ("speculators", _inner(rope_theta=0), "rope_theta=0: no number above 0"),
        ("speculators", _inner(rope_theta="far"), "rope_theta='far': no number above 0"),
        ("speculators", _inner(intermediate_size=10**12), "intermediate_size=1000000000000: no size"),
        ("safeailab", _set(fc_norm=True, norm_before_fc=True), "only one of them can be"),
        ("safeailab", _set(num_aux_hidden_states=4), "num_aux_hidden_states=4: it names 3 layers"),
        ("nvidia", _nested(use_aux_hidden_state=False), "eagle_config.use_aux_hidden_state=False: this version"),
        ("nvidia", _nested(parallel_draft_step=4), "eagle_config.parallel_draft_step=4: this version"),
        ("nvidia", _nested(eagle_aux_hidden_state_layer_ids=[4, 2]), "in which order"),
        ("nvidia", _set(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), "=[1, 2, 4] beside it names the inputs"),
        ("nvidia", _set(eagle_config=[1]), "eagle_config=[1]: no mapping"),
        ("safeailab", _set(draft_vocab_size=0), "draft_vocab_size=0: no size"),
        ("safeailab", _set(draft_vocab_size=10**6), "the target has"),
        ("safeailab", lambda m: [m.pop(name) for name in ("draft_vocab_size", "num_hidden_layers")], "no head of a known"),
    ],
)
def test_a_configuration_that_settles_nothing_is_refused(
    llm: LLM, path: str, layout: str, spoil: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    folder = save_random_eagle(tmp_path, path, layout, draft_tokens=DRAFTED)
    change(folder, spoil)
    error = refused(llm, folder)
    assert isinstance(error, ModelLoadError)
    assert "config.json" in error.problem
    assert told in error.problem


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("fc.weight", None, "it has no tensor fc.weight"),
        ("midlayer.hidden_norm.weight", None, "it has no tensor midlayer.hidden_norm.weight"),
        ("fc.weight", torch.zeros(3, 4), "fc.weight in model.safetensors has shape [3, 4]"),
        ("midlayer.mlp.up_proj.weight", torch.zeros(3, 4), "midlayer.mlp.up_proj.weight in model.safetensors has shape"),
        ("norm.bias", torch.zeros(32), "norm.bias in model.safetensors belongs to no part"),
        ("norm.weight", torch.full((32,), float("nan")), "norm.weight in model.safetensors holds NaN"),
        ("norm.weight", torch.ones(32, dtype=torch.int32), "norm.weight in model.safetensors holds torch.int32"),
        ("norm.weight", torch.ones(32, dtype=torch.complex64), "norm.weight in model.safetensors holds torch.complex64"),
        (
            "norm.weight",
            torch.ones(32).to(torch.float8_e4m3fn),
            "norm.weight in model.safetensors holds torch.float8_e4m3fn",
        ),
        ("d2t", None, "it has no tensor d2t"),
        ("d2t", torch.full((len(DRAFTED),), 999), "d2t in model.safetensors leads to token 1012"),
        ("d2t", -torch.arange(len(DRAFTED)) - 1, "d2t in model.safetensors leads to token -1"),
        ("d2t", -torch.arange(len(DRAFTED)), "leads to one token twice"),
        ("d2t", torch.tensor(DRAFTED), "t2d in model.safetensors names other tokens than d2t"),  # absolute, as elsewhere
        ("d2t", torch.zeros(len(DRAFTED)), "whole numbers are needed"),
        ("t2d", torch.zeros(3, dtype=torch.bool), "t2d in model.safetensors has shape [3]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    llm: LLM, path: str, name: str, tensor: torch.Tensor | None, told: str, tmp_path: Path
) -> None:
    vocab = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    drafted = tuple(range(0, len(DRAFTED) * 2, 2)) if told.startswith("t2d") and "other" in told else DRAFTED
    assert max(drafted) < vocab
    folder = save_random_eagle(tmp_path, path, "safeailab", draft_tokens=drafted)
    exchange(folder, name, torch.tensor(drafted) if "other" in told else tensor)
    error = refused(llm, folder)
    assert isinstance(error, ModelLoadError)
    assert told in error.problem


def test_a_layer_that_has_two_names_is_refused(llm: LLM, path: str, tmp_path: Path) -> None:
    folder = save_random_eagle(tmp_path, path, "safeailab")
    exchange(folder, "layers.0.hidden_norm.weight", torch.ones(32))
    assert refused(llm, folder).problem == "midlayer. and layers.0. name one part of it twice"


def test_norms_with_names_of_older_files_are_read(path: str, tmp_path: Path) -> None:
    folder = save_random_eagle(tmp_path, path, "safeailab", fc_norm=True)
    now = read_head(folder).network.state_dict()
    for i, name in enumerate(("low", "mid", "high")):
        exchange(folder, f"fc_norm.{i}.weight", None)
        exchange(folder, f"aux_norm_{name}.weight", now[f"fc_norm.{i}.weight"])
    before = read_head(folder).network.state_dict()
    assert before.keys() == now.keys()
    assert all(torch.equal(before[name], now[name]) for name in now)


def test_a_folder_must_hold_a_head_that_is_not_pickled(llm: LLM, path: str, tmp_path: Path) -> None:
    folder = save_random_eagle(tmp_path / "pickled", path, "safeailab")
    weights = Path(folder) / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    error = refused(llm, folder)
    assert "pytorch_model.bin is pickled" in error.problem
    assert "weights_only=True" in error.remedy
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(llm, str(tmp_path / "empty")).problem
    assert "draft_model" in refused(llm, path).remedy
    weights.write_bytes(b"no tensors")
    assert "model.safetensors cannot be read" in refused(llm, folder).problem
    for method in (Eagle3(), Eagle3(model=str(tmp_path / "none"))):
        with pytest.raises(InvalidParameterError, match=r"needs one|no such folder"):
            llm.generate([1], SamplingParams(), speculation=SpeculationConfig(method=method))


def test_a_head_in_several_files_is_read(llm: LLM, path: str, tmp_path: Path) -> None:
    folder = Path(save_random_eagle(tmp_path, path, "safeailab"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = SpeculationConfig(method=Eagle3(model=str(folder)))
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=8), speculation=config)
    assert output.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("field", "other", "how"),
    [
        ("hidden_size", {"hidden_size": 64}, {}),
        ("vocab_size", {"vocab_size": 60}, {}),
        ("num_layers", {"layers": 5}, {}),
        ("num_layers", {}, {"eagle_aux_hidden_state_layer_ids": [1, 3, LAYERS]}),
        ("architectures", {"family": "mistral"}, {}),
        ("hidden_size", {}, {"target_hidden_size": 32, "sizes": {"hidden_size": 16}}),
        (
            "hidden_size",
            {},
            {"target_hidden_size": 32, "sizes": {"hidden_size": 16}, "own_embedding": True, "own_output": False},
        ),
        ("embed_tokens.weight", {"seed": 9}, {"own_embedding": True}),
    ],
    ids=str,
)
def test_a_head_for_another_target_is_refused(
    path: str, field: str, other: dict[str, Any], how: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_random_eagle(tmp_path / "head", path, "speculators", **how)
    change(folder, lambda m: m["speculators_config"]["verifier"].update(architectures=["LlamaForCausalLM"]))
    saved = {"family": "llama", "seed": 3, "layers": LAYERS, **other}
    target = checkpoints.save(saved.pop("family"), tmp_path / "target", **saved)
    error = refused(LLM(target, dtype="float32", speculation="none"), folder)
    assert isinstance(error, HeadMismatchError)
    assert error.field == field
    assert error.needed != error.found


def test_a_head_of_another_method_or_kind_is_refused(llm: LLM, path: str, tmp_path: Path) -> None:
    error = refused(llm, save_random_eagle(tmp_path / "first", path, "safeailab1"))
    assert isinstance(error, HeadMismatchError)
    assert (error.field, error.needed, error.found) == ("method", "eagle1", "eagle3")
    assert "Use method='eagle1'" in error.remedy
    folder = save_random_eagle(tmp_path / "normed", path, "safeailab1", add_para_norm=True)
    assert "add_para_norm=True" in refused(llm, folder).problem


def test_embeddings_that_were_trained_may_be_others(llm: LLM, path: str, tmp_path: Path) -> None:
    folder = save_random_eagle(tmp_path, path, "speculators", own_embedding=True, embed_requires_grad=True)
    table = load_file(Path(folder) / "model.safetensors")["embed_tokens.weight"]
    exchange(folder, "embed_tokens.weight", table.flip(0))
    config = SpeculationConfig(method=Eagle3(model=folder))
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=8), speculation=config)
    assert output.stats.num_draft_tokens > 0
    change(folder, _set(embed_requires_grad=False))
    other = LLM(path, dtype="float32", speculation="none")
    assert "no copy of the embeddings" in refused(other, folder).problem
