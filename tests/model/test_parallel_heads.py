"""Drafts of P-EAGLE heads in their published layout, in the whole engine, against a reference of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from outrider import Eagle3, PEagle, SpeculationConfig
from outrider.errors import HeadMismatchError, ModelLoadError
from outrider.heads import block
from outrider.heads.block import BlockRunner
from outrider.heads.formats.published import read_head_config
from outrider.lab.prove.tiny_heads import save_random_eagle, save_random_peagle
from tests.model import checkpoints
from tests.model.parallel_reference import ParallelReference
from tests.model.test_block_heads import (
    check_added_layers,
    check_behind_another,
    check_crowded,
    check_prefix_hit,
    watched,
)
from tests.model.test_feature_heads import BOUND, GREEDY, LAYERS, PROMPTS, faults, load
from tests.model.test_hostile_heads import change, exchange
from tests.model.test_target import Oracle

DRAFTED = (1, 2, 3, 5, 7, 9, 11, 20, 30, 31)
HEADS: dict[str, dict[str, Any]] = {
    "two layers": {"draft_tokens": DRAFTED, "own_embedding": True},
    "four layers": {"num_layers": 4, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
    "one layer": {"num_layers": 1, "fc_norm": True, "mask_token_id": 4},
    "qwen3": {"sizes": {"model_type": "qwen3"}, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 5]},
}


class Made(NamedTuple):
    """A target and heads for it."""

    path: str
    oracle: Oracle
    heads: dict[str, str]

    def way(self, name: str, **settings: Any) -> SpeculationConfig:
        settings = settings if "tree" in settings else {"num_draft_tokens": 3, **settings}
        return SpeculationConfig(method=PEagle(model=self.heads[name]), **settings)

    def reference(self, name: str) -> ParallelReference:
        return ParallelReference(self.heads[name], self.oracle.model)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("peagle")
    path = checkpoints.save("llama", folder / "target", seed=3, layers=LAYERS)
    heads = {name: save_random_peagle(folder / name, path, scale=0.1, **how) for name, how in HEADS.items()}
    return Made(path, Oracle(path), heads)


# -- what is drafted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_the_reference_over_ten_places(made: Made, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, llm = watched(made, name, monkeypatch), load(made, dtype="float32")
    way = made.way(name, num_draft_tokens=11)
    outputs = llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=14), speculation=way)
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 10
    assert watch.deepest == 10


@pytest.mark.parametrize(
    ("backend", "shape"),
    [("fused", {"tree": "best_first", "num_draft_tokens": 6}), ("paged", {"tree": (3, 2)}), ("gather", {})],
    ids=str,
)
def test_every_draft_is_what_the_reference_says(
    made: Made, backend: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_crowded(made, "two layers", backend, shape, monkeypatch)


def test_the_added_layers_hold_what_a_fresh_prefill_gives(made: Made) -> None:
    check_added_layers(made, "four layers")


def test_a_prefix_hit_costs_no_second_prefill_and_is_drafted_for_at_once(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_prefix_hit(made, "four layers", monkeypatch)


def test_a_draft_behind_another_proposers_takes_the_places_that_come_after(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_behind_another(made, "two layers", 3, monkeypatch)


def test_layers_whose_rows_are_wider_than_what_is_kept_read_texts(made: Made) -> None:
    """Our kernels compute rows in float32, and a target of 16 bits keeps 16 bits."""
    llm = load(made, dtype="bfloat16")
    outputs = llm.generate(PROMPTS, GREEDY, speculation=made.way("two layers"))
    assert faults(outputs) == 0
    assert llm.stats.finished.num_draft_tokens > 0


def _masks_have_the_feature_of_the_text(patch: pytest.MonkeyPatch) -> None:
    stock = BlockRunner.draft

    def draft(self: Any, blocks: Any) -> Any:
        self._mask_feature = blocks[0].feature[None]
        return stock(self, blocks)

    patch.setattr(BlockRunner, "draft", draft)


def _rows_see_later_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "additive", lambda seen, dtype: torch.zeros(seen.shape, dtype=dtype))


def _the_first_token_is_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockRunner, "unseen", lambda self, layer: 0)


@pytest.mark.by_change("tests/model/")  # of the tests themselves: it plants what they must see
@pytest.mark.parametrize("plant", [_masks_have_the_feature_of_the_text, _rows_see_later_ones, _the_first_token_is_seen])
def test_control_a_head_that_reads_something_else_is_seen(
    made: Made, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    watch = watched(made, "two layers", monkeypatch)
    outputs = load(made).generate(PROMPTS[0], GREEDY, speculation=made.way("two layers"))
    assert faults(outputs) == 0
    assert watch.worst > 100 * BOUND


# -- what is refused ---------------------------------------------------------------------------------------------------


def _set(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping.update(fields)


def _layer(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping["transformer_layer_config"].update(fields)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_set(mask_token_id=None), "mask_token_id=None: no token of the 61"),
        (_set(mask_token_id=61), "mask_token_id=61: no token of the 61"),
        (_set(norm_before_residual=None), "vLLM takes true and the package takes false"),
        (_set(transformer_layer_config={}), "it names no model_type"),
        (
            _layer(model_type="qwen3", layer_types=["sliding_attention"] * 2, sliding_window=4, use_sliding_window=True),
            "a window is not computed",
        ),
    ],
)
def test_a_configuration_that_settles_nothing_is_refused(
    made: Made, spoil: Callable[[dict[str, Any]], Any], told: str, tmp_path: Any
) -> None:
    folder = save_random_peagle(tmp_path, made.path)
    change(folder, spoil)
    with pytest.raises(ModelLoadError) as caught:
        read_head_config(folder)
    assert told in caught.value.problem
    assert caught.value.remedy.endswith(".")


def test_a_head_that_does_not_belong_is_refused(made: Made, tmp_path: Any) -> None:
    eagle = save_random_eagle(tmp_path / "eagle", made.path, "safeailab")
    deep = save_random_peagle(tmp_path / "deep", made.path, eagle_aux_hidden_state_layer_ids=[1, LAYERS])
    bare, short, long = (save_random_peagle(tmp_path / name, made.path) for name in ("bare", "short", "long"))
    exchange(bare, "mask_hidden", None)
    exchange(short, "layers.1.input_layernorm.weight", None)
    exchange(long, "layers.2.input_layernorm.weight", torch.zeros(32))
    llm = load(made)
    for method, kind, told in (
        (PEagle(model=eagle), HeadMismatchError, "its head is for method='eagle3'"),
        (Eagle3(model=made.heads["two layers"]), HeadMismatchError, "its head is for method='peagle'"),
        (PEagle(model=deep), HeadMismatchError, "it reads what enters layers 1, 7"),
        (PEagle(model=bare), ModelLoadError, "it has no tensor mask_hidden"),
        (PEagle(model=short), ModelLoadError, "it has no tensor layers.1.input_layernorm.weight"),
        (PEagle(model=long), ModelLoadError, "layers.2.input_layernorm.weight in model.safetensors belongs to no part"),
    ):
        with pytest.raises(kind) as caught:
            llm.generate([1, 2, 3], GREEDY, speculation=SpeculationConfig(method=method))
        assert told in caught.value.problem
