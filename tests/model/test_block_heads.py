"""Drafts of DFlash heads in all published layouts, in the whole engine, against a reference of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from outrider import DFlash, Eagle3, Ngram, SpeculationConfig
from outrider.engine.drafting.planning import as_requested
from outrider.errors import HeadMismatchError, ModelLoadError
from outrider.heads import block
from outrider.heads.formats.published import read_head, read_head_config
from outrider.lab.prove.own_model import CacheAudit
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle
from outrider.propose.parallel import BlockProposer
from outrider.propose.trees import growth
from tests.model import checkpoints
from tests.model.block_reference import BlockReference
from tests.model.preempted import found_again
from tests.model.test_feature_heads import BOUND, GREEDY, LAYERS, PROMPTS, SEEDED, Watch, faults, load, texts
from tests.model.test_hostile_heads import change, exchange
from tests.model.test_target import Oracle

#: Layers with a window and layers without one.
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 5}
HEADS: dict[str, dict[str, Any]] = {
    "z-lab": {},
    "z-lab, old": {"layout": "z-lab, old", "inputs": (2, 4, 6), "sizes": {"rope_theta": 500.0, "num_key_value_heads": 2}},
    "z-lab, windows": {"sizes": MIXED, "block_size": 8},
    "z-lab, one way": {"is_causal": True, "sizes": {"num_hidden_layers": 3}},
    "speculators": {"layout": "speculators", "draft_tokens": (1, 2, 3, 5, 7, 9, 11, 20, 30, 31), "block_size": 8},
    "speculators, windows": {"layout": "speculators", "sizes": MIXED, "sliding_window_non_causal": True, "inputs": (3,)},
}


class Made(NamedTuple):
    """A target and heads for it."""

    path: str
    oracle: Oracle
    heads: dict[str, str]

    def way(self, name: str, **settings: Any) -> SpeculationConfig:
        settings = settings if "tree" in settings else {"num_draft_tokens": 3, **settings}
        return SpeculationConfig(method=DFlash(model=self.heads[name]), **settings)

    def reference(self, name: str) -> BlockReference:
        return BlockReference(self.heads[name], self.oracle.model)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("dflash")
    path = checkpoints.save("llama", folder / "target", seed=3, layers=LAYERS)
    heads = {name: save_random_dflash(folder / name, path, scale=0.1, **how) for name, how in HEADS.items()}
    return Made(path, Oracle(path), heads)


def watched(made: Any, name: str, patch: pytest.MonkeyPatch) -> Watch:
    """Compares the logits behind every node of every draft with the reference of a head."""
    return Watch(made.reference(name), patch, growth)


# -- what is drafted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_the_reference_over_the_whole_block(
    made: Made, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, llm = watched(made, name, monkeypatch), load(made, dtype="float32")
    way = SpeculationConfig(method=DFlash(model=made.heads[name]))  # a whole block, unless somebody says how long
    outputs = llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=10), speculation=way)
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 10
    assert watch.deepest == made.reference(name).block_size - 2


@pytest.mark.parametrize("name", ["z-lab", "z-lab, windows"])
def test_a_text_may_be_longer_than_the_positions_of_a_head(
    made: Made, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary factors have no end. A text may also fill the target's context, so that a block would reach beyond it."""
    sizes = HEADS[name].get("sizes", {}) | {"max_position_embeddings": 16}
    head = save_random_dflash(tmp_path / "head", made.path, scale=0.1, block_size=8, sizes=sizes)
    made = made._replace(heads={name: head})
    watch, llm = watched(made, name, monkeypatch), load(made, dtype="float32")
    longest = llm.engine.runner.loaded.max_model_len
    prompts = [[(7 * i * i + 3) % 59 + 2 for i in range(count)] for count in (70, longest - 12)]
    params = GREEDY.replace(max_tokens=12)
    outputs = llm.generate(prompts, params, speculation=SpeculationConfig(method=DFlash(model=head)))
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 50
    assert texts(outputs) == texts(llm.generate(prompts, params, speculation="none"))
    assert len(outputs[1].token_ids) == 12
    llm.engine.check_integrity()
    llm.engine.check_rest()


@pytest.mark.parametrize(
    ("backend", "shape"),
    [("fused", {"tree": "best_first", "num_draft_tokens": 6}), ("paged", {"tree": (3, 2)}), ("gather", {})],
    ids=str,
)
def test_every_draft_is_what_the_reference_says(
    made: Made, backend: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_crowded(made, "z-lab, windows", backend, shape, monkeypatch)


def check_crowded(made: Any, name: str, backend: str, shape: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """After rejected drafts, prefix hits, preemptions and forks, in too little memory for all texts."""
    crowded = load(made, backend, kv_cache_tokens=120, max_num_batched_tokens=48)
    watch, way, found = watched(made, name, patch), made.way(name, **shape), found_again(patch)
    params = [GREEDY, SEEDED.replace(temperature=0, n=2), SEEDED] * 2
    outputs = crowded.generate([*PROMPTS, *PROMPTS], params, speculation=way)
    stats = crowded.stats.finished
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 50
    assert stats.num_preemptions > 0
    assert sum(found) > 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    plain = crowded.generate([*PROMPTS, *PROMPTS], params, speculation="none")
    assert texts(outputs) == texts(plain)
    crowded.engine.check_integrity()
    crowded.engine.check_rest()


def test_the_added_layers_hold_what_a_fresh_prefill_gives(made: Made) -> None:
    check_added_layers(made, "z-lab")


def check_added_layers(made: Any, name: str) -> None:
    llm = load(made, kv_cache_tokens=120)
    for prompt in PROMPTS:
        llm.engine.add_request(tuple(prompt), SEEDED.replace(n=3, max_tokens=8), made.way(name))
    audit = CacheAudit(llm.engine)
    audit.run()
    assert audit.num_checked
    assert audit.worst <= 1e-12


def test_a_prefix_hit_costs_no_second_prefill_and_is_drafted_for_at_once(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_prefix_hit(made, "z-lab", monkeypatch)


def check_prefix_hit(made: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    llm, way = load(made), made.way(name)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    first = llm.generate(prompt, GREEDY, speculation=way)
    llm.stats.reset()
    watch = watched(made, name, patch)
    again = llm.generate(prompt, GREEDY, speculation=way)
    assert texts(again) == texts(first)
    assert llm.stats.finished.num_cached_tokens == 12
    assert watch.num_rows > 0
    assert watch.worst <= BOUND


def test_a_draft_behind_another_proposers_takes_the_places_that_come_after(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_behind_another(made, "z-lab", 9, monkeypatch)


def check_behind_another(made: Any, name: str, length: int, patch: pytest.MonkeyPatch) -> None:
    """A lookup drafts two tokens; the head's own places reach to the fifth one behind the text at most."""
    watch, llm = watched(made, name, patch), load(made)
    lookup = SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=2)
    llm.engine.drafting.planner = lambda seq: (lookup, made.way(name, num_draft_tokens=length))
    outputs = llm.generate(PROMPTS, GREEDY, speculation=made.way(name))
    llm.engine.drafting.planner = as_requested
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.deepest == 4
    assert texts(outputs) == texts(llm.generate(PROMPTS, GREEDY, speculation="none"))


def _rejected_rows_are_kept(patch: pytest.MonkeyPatch) -> None:
    """The feature of the last row of the pass, which stood or did not, overwrites that of the last one that stood."""
    stock = BlockProposer.observe

    def observe(self: Any, rows: Any) -> None:
        stock(self, rows)
        for seen in rows:
            end, kv = self.added.num_filled(seen.sequence.kv), seen.sequence.kv
            states = {layer: states[-1:] for layer, states in seen.aux_hidden_states.items()}
            if end > kv.writable[0]:  # else rows wait, since nothing is drafted
                for number, kept in enumerate(self._head.keys_and_values(self._head.fuse(states), [end - 1])):
                    self.added.write(kv, number, end - 1, *kept)

    patch.setattr(BlockProposer, "observe", observe)


def _blocks_are_causal(patch: pytest.MonkeyPatch) -> None:
    stock = block._mask
    patch.setattr(block, "_mask", lambda reach, *args: stock(block.BlockReach(reach.window, True), *args))


@pytest.mark.by_change("tests/model/")  # of the tests themselves: it plants what they must see
@pytest.mark.parametrize("plant", [_rejected_rows_are_kept, _blocks_are_causal])
def test_control_a_head_that_reads_something_else_is_seen(
    made: Made, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    watch = watched(made, "z-lab", monkeypatch)
    outputs = load(made).generate(PROMPTS[0], GREEDY, speculation=made.way("z-lab"))
    assert faults(outputs) == 0
    assert watch.worst > 100 * BOUND


# -- what is refused ---------------------------------------------------------------------------------------------------


def _nested(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping["dflash_config"].update(fields)


def _set(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping.update(fields)


def test_layers_that_no_file_holds_are_not_made(made: Made, tmp_path: Any) -> None:
    folder = save_random_dflash(tmp_path, made.path)
    change(folder, _set(num_hidden_layers=1000))
    with pytest.raises(ModelLoadError, match=r"num_hidden_layers=1000: it holds \d+ tensors in all"):
        read_head(folder)


@pytest.mark.parametrize(
    ("layout", "spoil", "told"),
    [
        ("z-lab", _nested(block_size=None), "block_size=None: no size of a block"),
        ("z-lab", _nested(block_size=1), "block_size=1: no size of a block"),
        ("z-lab", _nested(block_size=10**9), "block_size=1000000000: no size of a block"),
        ("z-lab", _set(block_size=4), "block_size=4: dflash_config says 6"),
        ("z-lab", _nested(mask_token_id=None), "mask_token_id=None: no token of the 61"),
        ("z-lab", _nested(mask_token_id=61), "mask_token_id=61: no token of the 61"),
        ("z-lab", _nested(target_layer_ids=[3, 1]), "in which order"),
        ("z-lab", _nested(target_layer_ids=None), "target_layer_ids=None: no list of layers"),
        ("z-lab", _nested(selector_rank=4), "selector_rank=4: this version does not compute it"),
        ("z-lab", _set(output_multiplier=0.5), "output_multiplier=0.5: this version does not compute it"),
        ("z-lab", _nested(causal=True), "dflash_config.causal=True: vLLM reads it"),
        ("z-lab", _set(model_type="llama"), "model_type='llama': such heads have layers of Qwen3"),
        (
            "z-lab",
            _set(layer_types=["sliding_attention"] * 2, use_sliding_window=False),
            "sliding_window=None: a layer has a window",
        ),
        ("speculators", _set(mask_token_id=None), "mask_token_id=None"),
        ("speculators", _set(shift_label=True), "its places were moved in training"),
        ("speculators", _set(projector_type="domino"), "projector_type='domino': it corrects"),
        ("speculators", _set(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids=None: no list of layers"),
        ("speculators", _set(transformer_layer_config={"model_type": "llama"}), "it describes no layers of Qwen3"),
    ],
)
def test_a_configuration_that_settles_nothing_is_refused(
    made: Made, layout: str, spoil: Callable[[dict[str, Any]], Any], told: str, tmp_path: Any
) -> None:
    folder = save_random_dflash(tmp_path, made.path, layout)
    change(folder, spoil)
    with pytest.raises(ModelLoadError) as caught:
        read_head_config(folder)
    assert told in caught.value.problem
    assert caught.value.remedy.endswith(".")


def test_a_head_that_does_not_belong_is_refused(made: Made, tmp_path: Any) -> None:
    eagle = save_random_eagle(tmp_path / "eagle", made.path, "safeailab")
    deep = save_random_dflash(tmp_path / "deep", made.path, inputs=(2, LAYERS))
    masked = save_random_dflash(tmp_path / "masked", made.path)
    torch.save(torch.zeros(32), tmp_path / "masked" / "mask_embedding.pt")
    short = save_random_dflash(tmp_path / "short", made.path)
    exchange(short, "layers.1.self_attn.q_norm.weight", None)
    llm = load(made)
    for method, kind, told in (
        (DFlash(model=eagle), HeadMismatchError, "its head is for method='eagle3'"),
        (Eagle3(model=masked), ModelLoadError, "mask_embedding.pt is pickled"),
        (Eagle3(model=made.heads["z-lab"]), HeadMismatchError, "its head is for method='dflash'"),
        (DFlash(model=deep), HeadMismatchError, "it reads what enters layers 2, 7"),
        (DFlash(model=short), ModelLoadError, "it has no tensor layers.1.self_attn.q_norm.weight"),
    ):
        with pytest.raises(kind) as caught:
            llm.generate([1, 2, 3], GREEDY, speculation=SpeculationConfig(method=method))
        assert told in caught.value.problem
