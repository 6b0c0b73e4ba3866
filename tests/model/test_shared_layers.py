"""Methods that draft with the target's own layers: what they write, how much of it stands, and passes that are resumed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, Ngram, SamplingParams, SpeculationConfig
from outrider.engine.drafting.planning import as_requested
from outrider.errors import InputError, InvalidParameterError, UnsupportedModelError
from outrider.lab.prove.own_model import CacheAudit
from outrider.model import factory
from outrider.propose import own_layers
from outrider.propose.own_layers import EarlyExit, LayerSkip
from tests.model import checkpoints
from tests.model.core import core

LENGTH = 4
TREE = (2, 1, 1, 1)
PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 9, 9, 4], [5, 6], [7, 7, 7, 7, 7, 8, 30]]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SEEDED = SamplingParams(seed=3, max_tokens=20)
BACKENDS = ("fused", "paged", "gather", "row_by_row")
EXIT = SpeculationConfig(method=EarlyExit(layers=2), num_draft_tokens=LENGTH)
EXIT_TREE = SpeculationConfig(method=EarlyExit(layers=2), tree=TREE)
SKIP = SpeculationConfig(method=LayerSkip(skip=(1, 3)), num_draft_tokens=LENGTH)
SKIP_TREE = SpeculationConfig(method=LayerSkip(skip=(1, 3)), tree=TREE)
LOOKUP = SpeculationConfig(method=Ngram(min_match=1))


def load(path: str, backend: str, **how: Any) -> LLM:
    how = {"dtype": "float64", "block_size": 4, "speculation": "none", **how}
    if backend != "row_by_row":
        return LLM(path, attention_backend=backend, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "INVARIANT", ("row_by_row",))
        return LLM(path, batch_invariant=True, **how)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("llama"), seed=3)


@pytest.fixture(scope="module")
def llm(path: str, backend: str) -> LLM:
    """Too little memory for all texts of a test."""
    return load(path, backend, kv_cache_tokens=120)


# -- texts, and the KV memory ------------------------------------------------------------------------------------------


ASKED = {"greedy": GREEDY, "seeded": SEEDED, "two samples": SEEDED.replace(n=2)}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_mixed_batch_writes_what_each_writes_alone(llm: LLM, asked: str) -> None:
    """Exits after different layers, skipped layers, chains, trees, a lookup and nobody, with too little memory for all."""
    params = ASKED[asked]
    ways = [EXIT, EXIT_TREE, SKIP, SKIP_TREE, EXIT.replace(method=EarlyExit(layers=1)), LOOKUP, SpeculationConfig(), EXIT]
    prompts = [PROMPTS[i % 3] for i in range(len(ways))]
    plain = [llm.generate(p, params, speculation="none")[0] for p in PROMPTS]
    llm.stats.reset()
    outputs = llm.generate(prompts, params, speculation=ways)
    for i, output in enumerate(outputs):
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in plain[i % 3].outputs]
    stats = llm.stats.finished
    assert stats.num_proposer_faults == 0
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert llm.stats.num_resumed_rows > 0
    llm.engine.check_integrity()
    assert llm.engine.runner.blocks.num_free == llm.engine.runner.blocks.num_blocks


@pytest.mark.parametrize("backend", core(BACKENDS, ("fused", "gather")), indirect=True)
def test_turns_of_methods_that_share_the_target(llm: LLM) -> None:
    """One behind the other, over the same slots, and in turns by round."""
    shorter = EXIT.replace(num_draft_tokens=2)
    deeper = EXIT.replace(method=EarlyExit(layers=3), num_draft_tokens=2)
    skip, tree = SKIP.replace(num_draft_tokens=2), EXIT_TREE.replace(tree=(2, 1), num_draft_tokens=4)
    lookup = LOOKUP.replace(num_draft_tokens=2)
    steps = [(shorter, deeper), (shorter, skip), (skip, shorter), (lookup, shorter), (shorter, lookup), (tree, shorter), ()]
    for params in (GREEDY, SEEDED):
        plain = llm.generate(PROMPTS, params, speculation="none")
        llm.engine.drafting.planner = lambda seq: steps[(seq.view.round + seq.seq_id) % len(steps)]
        llm.stats.reset()
        outputs = llm.generate(PROMPTS, params, speculation="none")
        llm.engine.drafting.planner = as_requested
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert llm.stats.finished.num_proposer_faults == 0
        assert llm.stats.num_resumed_rows > 0


@pytest.mark.parametrize("backend", core(BACKENDS, ("fused", "gather")), indirect=True)
def test_kv_is_that_of_a_fresh_prefill(llm: LLM) -> None:
    for i, speculation in enumerate((EXIT, EXIT_TREE, SKIP, SKIP_TREE, EXIT)):
        params = SEEDED.replace(max_tokens=12, n=2 if i == 0 else 1)
        llm.engine.add_request(tuple(PROMPTS[i % 3]), params, speculation)
    audit = CacheAudit(llm.engine)
    audit.run()
    assert audit.num_checked > 20
    assert audit.worst <= 1e-5  # transformers keeps norms in float32


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox", "longrope", "mixtral", "olmo2"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Windows, scaled embeddings, added positions, parallel feed-forwards, norms behind attention, other rotary factors."""
    llm = load(checkpoints.save(family, tmp_path, seed=3), "auto")
    params = SEEDED.replace(max_tokens=24)
    plain = llm.generate([PROMPTS[0]] * 3, params, speculation="none")
    llm.stats.reset()
    outputs = llm.generate([PROMPTS[0]] * 3, params, speculation=[EXIT, EXIT_TREE, SKIP])
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert llm.stats.finished.num_proposer_faults == 0
    assert llm.stats.num_resumed_rows > 0


@pytest.mark.parametrize("backend", core(BACKENDS, ("fused", "gather")), indirect=True)
def test_up_to_the_longest_text(llm: LLM) -> None:
    prompt = [(7 * i) % 60 for i in range(100)]
    params = GREEDY.replace(max_tokens=100)
    want = llm.generate(prompt, params.replace(max_tokens=20), speculation="none")[0].token_ids
    for speculation in (EXIT, EXIT_TREE, SKIP):
        output = llm.generate(prompt, params.replace(max_tokens=20), speculation=speculation)[0]
        assert output.token_ids == want
    roomy = load(llm.engine.runner.loaded.name, "fused")
    plain = roomy.generate(prompt, params, speculation="none")[0].token_ids
    assert len(plain) == 60, "the model ends at 160"
    assert roomy.generate(prompt, params, speculation=EXIT)[0].token_ids == plain
    assert roomy.stats.finished.num_proposer_faults == 0


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fused(path: str) -> LLM:
    return load(path, "fused")


@pytest.mark.parametrize(
    "values",
    [
        {"method": "early_exit", "layers": 0},
        {"method": "early_exit", "layers": -1},
        {"method": "early_exit", "layers": 4},
        {"method": "early_exit", "layers": 99},
        {"method": "early_exit", "layers": 1.5},
        {"method": "early_exit", "layers": True},
        {"method": "early_exit", "layers": "2"},
        {"method": "layer_skip", "skip": ()},
        {"method": "layer_skip", "skip": []},
        {"method": "layer_skip", "skip": (0, 1, 2, 3)},
        {"method": "layer_skip", "skip": (4,)},
        {"method": "layer_skip", "skip": (-1,)},
        {"method": "layer_skip", "skip": (1.0,)},
        {"method": "layer_skip", "skip": "1"},
        {"method": "layer_skip", "skip": 1},
        {"method": "layer_skip", "skip": (True,)},
    ],
    ids=str,
)
def test_bad_layers_are_refused_before_any_work(fused: LLM, values: dict[str, Any]) -> None:
    passes = fused.engine.runner.num_passes
    with pytest.raises(InputError) as caught:
        fused.generate(PROMPTS[0], GREEDY, speculation=values)
    assert isinstance(caught.value, InvalidParameterError)
    assert caught.value.field == ("layers" if "layers" in values else "skip")
    assert caught.value.remedy
    assert fused.engine.runner.num_passes == passes


def test_the_same_layers_are_the_same_settings() -> None:
    assert LayerSkip(skip=(3, 1, 3)) == LayerSkip(skip=(1, 3))
    config = SpeculationConfig.of({"method": "layer_skip", "skip": [3, 1]})
    assert config.method == LayerSkip(skip=(1, 3))
    assert SpeculationConfig.of(config.as_mapping()) == config


@pytest.mark.parametrize("depth", [2, 3, 4, 5, 9])
def test_defaults_fit_any_depth(depth: int, tmp_path: Path) -> None:
    llm = load(checkpoints.save("llama", tmp_path, seed=1, layers=depth), "fused")
    exits, skips = llm.proposers.get(EarlyExit()), llm.proposers.get(LayerSkip())
    assert isinstance(exits, own_layers.SharedLayersProposer)
    assert isinstance(skips, own_layers.SharedLayersProposer)
    assert exits.layers == tuple(range(max(1, depth // 4)))
    assert 0 in skips.layers
    assert len(skips.layers) < depth
    left_out = [layer for layer in range(depth) if layer not in skips.layers]
    assert all(b - a == 2 for a, b in pairwise(left_out))
    plain = llm.generate(PROMPTS, GREEDY, speculation="none")
    for name in ("early_exit", "layer_skip"):
        assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY, speculation=name)] == [o.token_ids for o in plain]
    assert llm.stats.finished.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["early_exit", "layer_skip"])
def test_a_model_of_one_layer_has_no_part_that_could_draft(name: str, tmp_path: Path) -> None:
    llm = load(checkpoints.save("llama", tmp_path, seed=1, layers=1), "fused")
    with pytest.raises(InvalidParameterError, match="one layer"):
        llm.generate(PROMPTS[0], GREEDY, speculation=name)


def test_a_model_whose_layers_cannot_be_chosen_from_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(path, "paged")

    def no_list(model: Any) -> Any:
        raise ValueError("it has no list of its layers")

    monkeypatch.setattr("outrider.model.hf.decoder_layers", no_list)
    with pytest.raises(UnsupportedModelError, match="no list of its layers"):
        llm.generate(PROMPTS[0], GREEDY, speculation=EarlyExit())
