"""Drafts of DSpark heads with layers of Gemma 4, in the whole engine, against transformers' own layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from outrider import DSpark, SpeculationConfig
from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.heads.formats.published import read_head_config
from outrider.heads.formats.writing import convert_head
from outrider.propose import parallel
from outrider.propose.trees import growth
from tests.model import checkpoints
from tests.model.gemma_heads import GemmaReference, save_gemma_head
from tests.model.test_block_heads import check_added_layers, check_crowded
from tests.model.test_feature_heads import BOUND, GREEDY, PROMPTS, Watch, faults, load
from tests.model.test_hostile_heads import change, exchange
from tests.model.test_target import Oracle

HEADS: dict[str, dict[str, Any]] = {
    "keys as values": {},
    "values of their own": {
        "attention_k_eq_v": False, "final_logit_softcapping": None, "inputs": (0, 2, 3),
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
}  # fmt: skip


class Made(NamedTuple):
    """A target and heads for it."""

    path: str
    oracle: Oracle
    heads: dict[str, str]

    def way(self, name: str, **settings: Any) -> SpeculationConfig:
        settings = settings if "tree" in settings else {"num_draft_tokens": 5, **settings}
        return SpeculationConfig(method=DSpark(model=self.heads[name], min_confidence=0.0), **settings)

    def reference(self, name: str) -> GemmaReference:
        return GemmaReference(self.heads[name], self.oracle.model)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("gemma"))


def make(folder: Path) -> Made:
    path = checkpoints.save("gemma4_text", folder / "target", seed=3)
    heads = {name: save_gemma_head(folder / name, path, **how) for name, how in HEADS.items()}
    return Made(path, Oracle(path), heads)


@pytest.fixture(autouse=True)
def _one_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Watch` looks at `growth.add_level`, and this proposer calls it by a name of its own."""
    monkeypatch.setattr(parallel, "add_level", lambda *args: growth.add_level(*args))


@pytest.mark.parametrize(
    ("name", "dtype"), [("keys as values", "float64"), ("keys as values", "bfloat16"), ("values of their own", "float32")]
)
def test_logits_are_those_of_transformers_layers(
    made: Made, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_logits(made, name, dtype, monkeypatch)


def check_logits(made: Made, name: str, dtype: str, patch: pytest.MonkeyPatch) -> None:
    watch, llm = Watch(made.reference(name), patch, growth), load(made, dtype=dtype)
    outputs = llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=10), speculation=made.way(name))
    assert faults(outputs) == 0
    assert watch.worst <= (0.2 if dtype == "bfloat16" else BOUND)
    assert watch.num_rows > 10
    assert watch.deepest == 4


def test_every_draft_is_what_the_reference_says(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    check_crowded(made, "keys as values", "auto", {"tree": (3, 2)}, monkeypatch)


def test_the_added_layers_hold_what_a_fresh_prefill_gives(made: Made) -> None:
    check_added_layers(made, "keys as values")


def test_such_a_head_is_written_in_no_other_format(made: Made, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        convert_head(made.heads["keys as values"], "speculators", tmp_path / "other", made.path)
    assert "has no layers of Gemma 4" in caught.value.problem


def _set(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping.update(fields)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_set(model_type="gemma3_text"), "model_type='gemma3_text': heads with layers of Qwen3 or Gemma 4"),
        (_set(layer_types=["sliding_attention", "full_attention"]), "layer_types=['sliding_attention', 'full_attention']"),
        (_set(enable_moe_block=True), "enable_moe_block=True: this version does not compute it"),
        (_set(hidden_size_per_layer_input=8), "hidden_size_per_layer_input=8: this version does not compute it"),
        (_set(use_double_wide_mlp=True), "use_double_wide_mlp=True: this version does not compute it"),
        (_set(final_logit_softcapping=0.0), "final_logit_softcapping=0.0: no bound"),
        (_set(global_head_dim=15), "num_attention_heads=[4, 2, 15]: heads, key-value heads and width"),
        (_set(rope_parameters={"full_attention": {"rope_type": "dynamic", "factor": 2.0}}), "rope_type='dynamic'"),
        (
            _set(rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
            "nothing of full_attention",
        ),
        (_set(final_logit_softcapping="4"), "describes no gemma4_text layer"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(
    made: Made, spoil: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    folder = save_gemma_head(tmp_path, made.path)
    change(folder, spoil)
    with pytest.raises(ModelLoadError) as caught:
        read_head_config(folder)
    assert told in caught.value.problem
    assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("layers.1.layer_scalar", None, "it has no tensor layers.1.layer_scalar"),
        ("layers.0.self_attn.v_proj.weight", torch.zeros(32, 32), "layers.0.self_attn.v_proj.weight in model.safetensors"),
    ],
)
def test_tensors_are_those_of_its_layers(made: Made, name: str, tensor: Any, told: str, tmp_path: Path) -> None:
    folder = save_gemma_head(tmp_path, made.path)
    exchange(folder, name, tensor)
    with pytest.raises(ModelLoadError) as caught:
        load(made).generate([1, 2, 3], GREEDY, speculation=SpeculationConfig(method=DSpark(model=folder)))
    assert told in caught.value.problem
