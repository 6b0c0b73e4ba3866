"""Drafts of EAGLE heads in all published layouts, in the whole engine, against a reference of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from outrider import LLM, Eagle1, Eagle3, Ngram, SamplingParams, SpeculationConfig
from outrider.engine.drafting import asking, drafting
from outrider.engine.drafting.asking import StepDraft
from outrider.engine.drafting.planning import as_requested
from outrider.heads.fused_head import FusedEagle, FusedRunner
from outrider.heads.runner import HeadRunner
from outrider.kernels.library import kernel_library
from outrider.kernels.linear import PackedLinear
from outrider.lab.prove.own_model import CacheAudit
from outrider.lab.prove.tiny import raise_engine_norms
from outrider.lab.prove.tiny_heads import save_random_eagle
from outrider.params import RequestOutput
from outrider.propose import eagle
from outrider.propose.eagle import HeadProposer
from tests.model import checkpoints
from tests.model.core import core
from tests.model.eagle_reference import Eagle1Reference, EagleReference
from tests.model.preempted import found_again
from tests.model.test_target import Oracle

PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 9, 9, 4], [5, 6], [7, 7, 7, 7, 7, 8, 30]]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SEEDED = SamplingParams(seed=3, max_tokens=20)
BACKENDS = ("fused", "paged", "gather")
LAYERS = 7  # as many as a head with implicit layers needs
#: Of the largest logit, in float32 over ten levels.
BOUND = 1e-5

UNKNOWN = "an activation that the kernels do not know"
HEADS: dict[str, dict[str, Any]] = {
    "safeailab": {"layout": "safeailab", "draft_tokens": (1, 2, 3, 5, 7, 9, 11, 20, 30, 31)},
    "safeailab, own embedding": {"layout": "safeailab", "own_embedding": True, "sizes": {"rope_theta": 500.0}},
    "safeailab, narrower": {
        "layout": "safeailab", "own_embedding": True, "target_hidden_size": 32,
        "sizes": {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4,
                  "head_dim": 6},
    },
    "speculators": {"layout": "speculators", "eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
    "speculators, normed residual": {
        "layout": "speculators", "norm_before_residual": True, "norm_output": True, "draft_tokens": (0, 4, 8, 9, 30),
    },
    "speculators, qwen3": {
        "layout": "speculators", "sizes": {"model_type": "qwen3"}, "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": [1, 5],
    },
    "eagle1": {"layout": "safeailab1"},
    "eagle1, without a bias": {"layout": "safeailab1", "bias": False, "own_embedding": True, "sizes": {"qkv_bias": True}},
    "speculators, one norm": {"layout": "speculators", "norm_before_fc": True},
    "nvidia": {"layout": "nvidia", "draft_tokens": (1, 2, 3, 5, 7, 9, 11, 20, 30, 31)},
    "nvidia, without an output layer": {
        "layout": "nvidia", "own_output": False, "eagle_config": {"eagle_aux_hidden_state_layer_ids": []},
    },
    UNKNOWN: {"layout": "safeailab", "sizes": {"hidden_act": "mish"}},
    "specforge": {"layout": "safeailab", "fc_norm": True, "norm_output": True, "architectures": ["LlamaForCausalLMEagle3"]},
}  # fmt: skip


class Made(NamedTuple):
    """A target and heads for it."""

    path: str
    oracle: Oracle
    heads: dict[str, str]

    def way(self, name: str, **settings: Any) -> SpeculationConfig:
        settings = settings if "tree" in settings else {"num_draft_tokens": 3, **settings}
        method = Eagle1 if "eagle1" in name else Eagle3
        return SpeculationConfig(method=method(model=self.heads[name]), **settings)

    def reference(self, name: str) -> EagleReference:
        kind = Eagle1Reference if "eagle1" in name else EagleReference
        return kind(self.heads[name], self.oracle.model)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("eagle3")
    path = checkpoints.save("llama", folder / "target", seed=3, layers=LAYERS)
    heads = {name: save_random_eagle(folder / name, path, scale=0.1, **how) for name, how in HEADS.items()}
    return Made(path, Oracle(path), heads)


def load(made: Any, backend: str = "auto", **how: Any) -> LLM:
    how = {"dtype": "float64", "block_size": 4, "speculation": "none", **how}
    llm = LLM(made.path, attention_backend=backend, **how)
    if how["dtype"] == "float64":
        raise_engine_norms(llm)
    return llm


def proposer_of(llm: LLM, config: SpeculationConfig) -> HeadProposer:
    found = llm.engine.proposers.get(config.method)
    assert isinstance(found, HeadProposer)
    return found


class Watch:
    """Compares the logits behind every node of every draft with the reference.

    Args:
        reference: Of the head that drafts.
        patch: Where the proposer is watched.
        grower: The module that grows drafts.
    """

    def __init__(self, reference: Any, patch: pytest.MonkeyPatch, grower: ModuleType = eagle) -> None:
        self._reference = reference
        self.worst, self.num_rows, self.deepest = 0.0, 0, 0
        stock: Any = vars(grower)["add_level"]

        def watched(growths: Any, logits: torch.Tensor, noise: Any) -> None:
            places = [(growth, node) for growth in growths for node in growth.level]
            for (growth, node), row in zip(places, logits, strict=True):
                self._compare(growth, node, row)
            stock(growths, logits, noise)

        patch.setattr(grower, "add_level", watched)

    def _compare(self, growth: Any, node: int, row: torch.Tensor) -> None:
        request = growth.request
        (held,) = request.sequence.kv._state.num_filled.values()  # of the target's features, those of so many are read
        text, path = tuple(request.text(0)[: held + 1]), (*request.text(held + 1), *growth.path(node))
        want = self._reference.logits(text, path)  # of the token behind both
        drafted = want > float("-inf")
        assert (row[~drafted] < -1e29).all()
        difference = (row[drafted].double() - want[drafted]).abs().max() / want[drafted].abs().max()
        self.worst = max(self.worst, float(difference.nan_to_num(torch.inf)))
        self.num_rows += 1
        self.deepest = max(self.deepest, len(path))


def texts(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def faults(outputs: Sequence[RequestOutput]) -> int:
    return sum(sample.stats.num_proposer_faults for output in outputs for sample in output.outputs)


@pytest.fixture(scope="module", params=BACKENDS)
def crowded(request: pytest.FixtureRequest, made: Made) -> LLM:
    """Too little memory for all texts of a test."""
    return load(made, request.param, kv_cache_tokens=120, max_num_batched_tokens=48)


@pytest.fixture(autouse=True)
def nothing_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "crowded" in request.fixturenames:
        used: LLM = request.getfixturevalue("crowded")
        used.engine.drafting.planner = as_requested
        used.engine.check_integrity()
        used.engine.check_rest()


# -- what is drafted ---------------------------------------------------------------------------------------------------


#: Every layout in float32, whose bound is for it, and one in float64.
LAYOUTS = [*((name, "float32") for name in HEADS if name != UNKNOWN), ("safeailab", "float64")]


@pytest.mark.parametrize(("name", "dtype"), LAYOUTS)
def test_logits_are_those_of_the_reference_over_ten_levels(
    made: Made, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, llm = Watch(made.reference(name), monkeypatch), load(made, dtype=dtype)
    way = made.way(name, num_draft_tokens=11)
    outputs = llm.generate(PROMPTS[:1], GREEDY.replace(max_tokens=13), speculation=way)
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 20
    assert watch.deepest == 10


DRAFTING = ["safeailab", "speculators, normed residual", "eagle1"]
SHAPES: list[dict[str, Any]] = [{}, {"tree": (3, 2)}, {"tree": "best_first", "num_draft_tokens": 6}]
#: Every head with every shape on one backend; on the others every head once, and every shape once.
CROWDS = [("fused", name, shape) for name in DRAFTING for shape in SHAPES]
CROWDS += [(backend, name, shape) for backend in BACKENDS[1:] for name, shape in zip(DRAFTING, SHAPES, strict=True)]
#: On one backend every head once and every shape once, and one of these on each of the others.
FEW = [("fused", name, shape) for name, shape in zip(DRAFTING, SHAPES, strict=True)]
FEW += [("paged", DRAFTING[1], SHAPES[1]), ("gather", DRAFTING[2], SHAPES[2])]


@pytest.mark.parametrize(("crowded", "name", "shape"), core(CROWDS, FEW), indirect=["crowded"], ids=str)
def test_every_draft_is_what_the_reference_says(
    crowded: LLM, made: Made, name: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rejected drafts, prefix hits, preemptions and forks, on every backend."""
    watch, way = Watch(made.reference(name), monkeypatch), made.way(name, **shape)
    crowded.stats.reset()
    found = found_again(monkeypatch)
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


def seldom(patch: pytest.MonkeyPatch, every: int) -> None:
    """Drafts are asked for in one of so many steps, as where the engine finds that they do not pay."""
    asked, steps = asking.propose_all, count()

    def propose(items: Any, *others: Any) -> Any:
        return asked(items, *others) if next(steps) % every == every - 1 else [StepDraft() for _ in items]

    patch.setattr(drafting, "propose_all", propose)


@pytest.mark.parametrize("every", [3, 11])
def test_rows_wait_until_their_block_is_full_where_nothing_is_drafted(
    made: Made, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With samples, a short memory and prefix hits: all is drafted that is drafted where no row waits, by fewer passes."""
    name, reads, read = DRAFTING[0], list[int](), HeadRunner.read
    watch = Watch(made.reference(name), monkeypatch)
    params = [GREEDY, SEEDED.replace(temperature=0, n=2), SEEDED] * 2

    def counted(self: Any, added: Any, texts: Any, before: Any) -> Any:
        reads[-1] += 1
        return read(self, added, texts, before)

    def written(*, keeps_up: bool) -> list[Any]:
        reads.append(0)
        llm = load(made, kv_cache_tokens=96, max_num_batched_tokens=48)
        proposer_of(llm, made.way(name)).keeps_up = keeps_up
        seldom(monkeypatch, every)
        outputs = llm.generate([*PROMPTS, *PROMPTS], params, speculation=made.way(name))
        assert faults(outputs) == 0
        assert llm.stats.finished.num_preemptions > 0
        llm.engine.check_rest()
        samples = [sample for output in outputs for sample in output.outputs]
        return [(each.token_ids, each.stats.num_draft_tokens, each.stats.num_accepted_tokens) for each in samples]

    monkeypatch.setattr(HeadRunner, "read", counted)
    assert written(keeps_up=True) == written(keeps_up=False)
    assert watch.worst <= BOUND
    assert watch.num_rows > 0
    eager, waiting = reads
    assert waiting < eager if every == 11 else waiting <= 2 * eager


@pytest.mark.parametrize("params", [GREEDY, SEEDED.replace(n=3), SamplingParams(max_tokens=12, n=2)], ids=str)
def test_the_added_layer_holds_what_a_fresh_prefill_gives(made: Made, params: SamplingParams) -> None:
    llm = load(made, kv_cache_tokens=120)
    for prompt in PROMPTS * 2:
        llm.engine.add_request(tuple(prompt), params, made.way("speculators"))
    audit = CacheAudit(llm.engine)
    audit.run()
    assert audit.num_checked
    assert audit.worst <= 1e-12


def test_a_prefix_hit_costs_no_second_prefill_and_is_drafted_for_at_once(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, way = load(made), made.way("safeailab")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    first = llm.generate(prompt, GREEDY, speculation=way)
    llm.stats.reset()
    watch = Watch(made.reference("safeailab"), monkeypatch)
    again = llm.generate(prompt, GREEDY, speculation=way)
    assert texts(again) == texts(first)
    assert llm.stats.finished.num_cached_tokens == 12
    assert watch.num_rows > 0
    assert watch.worst <= BOUND


def test_a_draft_goes_on_behind_another_proposers(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, llm = Watch(made.reference("speculators"), monkeypatch), load(made)
    lookup = SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=2)
    llm.engine.drafting.planner = lambda seq: (lookup, made.way("speculators", num_draft_tokens=2))
    outputs = llm.generate(PROMPTS, GREEDY, speculation=made.way("speculators"))
    llm.engine.drafting.planner = as_requested
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.deepest >= 3
    assert texts(outputs) == texts(llm.generate(PROMPTS, GREEDY, speculation="none"))


def _a_row_off(stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, sequence, text, like: torch.zeros_like(like[0])


def _slot_zero_is_seen(stock: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: Any, *how: Any) -> Any:
        draft = stock(self, *how)
        draft.kept = [tuple(torch.cat([torch.zeros_like(rows[:1]), rows]) for rows in draft.kept[0])]
        draft.held += 1
        return draft

    return begin


def _slot_zero_is_seen_by_kernels(stock: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: Any, *how: Any) -> Any:
        self.kernel._layers[0].unseen = 0
        return stock(self, *how)

    return begin


def test_our_kernels_compute_a_head_where_they_compute_the_target(made: Made) -> None:
    for backend, name, kind in (
        ("fused", "safeailab", FusedEagle),
        ("paged", "safeailab", HeadRunner),
        ("fused", UNKNOWN, HeadRunner),
    ):
        llm, way = load(made, backend, dtype="bfloat16"), made.way(name)
        assert faults(llm.generate(PROMPTS, GREEDY, speculation=way)) == 0
        assert type(proposer_of(llm, way)._head) is kind


@pytest.mark.parametrize("family", ["granite", "gemma2"])
def test_what_a_target_lends_has_its_factors(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite scales logits, and Gemma 2 scales embeddings and caps logits."""
    path = checkpoints.save(family, tmp_path / "target", seed=3)
    layouts: dict[str, dict[str, Any]] = {
        "eagle1": HEADS["eagle1"],
        "nvidia": {"layout": "nvidia", "own_output": False, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}},
    }
    heads = {name: save_random_eagle(tmp_path / name, path, scale=0.1, **how) for name, how in layouts.items()}
    made, found = Made(path, Oracle(path), heads), dict[str, list[torch.Tensor]]()
    stock = eagle.add_level
    for backend in ("fused", "paged"):
        rows = found[backend] = []

        def kept(growths: Any, logits: torch.Tensor, noise: Any, rows: list[torch.Tensor] = rows) -> None:
            rows.append(logits)
            stock(growths, logits, noise)

        monkeypatch.setattr(eagle, "add_level", kept)
        llm = load(made, backend)
        for name in heads:
            assert faults(llm.generate(PROMPTS[:1], GREEDY, speculation=made.way(name))) == 0
    assert len(found["fused"]) == len(found["paged"]) > 10
    for ours, stocks in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, stocks, rtol=1e-4, atol=1e-4)


@pytest.mark.by_change("tests/model/")  # of the tests themselves: it plants what they must see
@pytest.mark.parametrize(
    ("proposer", "name", "plant", "backend"),
    [
        (HeadProposer, "_features_before", _a_row_off, "fused"),
        (FusedRunner, "begin", _slot_zero_is_seen_by_kernels, "fused"),
        (HeadRunner, "begin", _slot_zero_is_seen, "paged"),
    ],
    ids=["a row off", "slot 0 is seen, fused", "slot 0 is seen"],
)
def test_control_a_head_that_reads_something_else_is_seen(
    made: Made, proposer: Any, name: str, plant: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposer, name, plant(getattr(proposer, name)))
    watch = Watch(made.reference("safeailab"), monkeypatch)
    outputs = load(made, backend).generate(PROMPTS, GREEDY, speculation=made.way("safeailab"))
    assert faults(outputs) == 0
    assert watch.worst > 100 * BOUND


@pytest.mark.skipif(kernel_library() is None, reason="stock products round nothing")
@pytest.mark.parametrize("activations", ["int8", "none"])
@pytest.mark.parametrize("name", ["speculators", "safeailab, narrower"])
def test_a_head_is_rounded_as_its_target_is(tmp_path: Path, name: str, activations: Any) -> None:
    """Where the target computes with rows of 8 bits, its head does, and reads half as many bytes; unless rows of its widths
    cannot be rounded."""
    path = checkpoints.save("llama", tmp_path / "target", seed=3, layers=LAYERS, intermediate_size=64)
    head = save_random_eagle(tmp_path / "head", path, scale=0.1, **HEADS[name])
    way = SpeculationConfig(method=Eagle3(model=head), num_draft_tokens=3)
    with LLM(path, dtype="bfloat16", quantization="int8", activations=activations, speculation="none") as llm:
        plain = llm.generate(list(PROMPTS), GREEDY)
        assert texts(llm.generate(list(PROMPTS), GREEDY, speculation=way)) == texts(plain)
        runner = proposer_of(llm, way)._head
        assert isinstance(runner, FusedEagle)
        layer, fc = runner.kernel._packed[0], runner.network.fc
        assert isinstance(fc, PackedLinear)
        packed = [fc.packed, runner.kernel.head, layer.qkv, layer.out, layer.gate, layer.up, layer.down]
        formats = {(each.format.name, each.format.rounds_rows) for each in packed if each is not None}
    rounded = activations == "int8" and name == "speculators"
    assert formats == {("int8", True) if rounded else ("bfloat16", False)}
