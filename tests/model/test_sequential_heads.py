"""Drafts of DSpark heads in their published layouts, in the whole engine, against a reference of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from outrider import DFlash, DSpark, SpeculationConfig
from outrider.engine.drafting.proposers import TreeBuilders
from outrider.errors import HeadMismatchError, ModelLoadError
from outrider.heads.block_networks import MarkovHead, MarkovStep
from outrider.heads.formats.published import read_head_config
from outrider.heads.formats.writing import convert_head
from outrider.lab.prove.tiny_heads import save_random_dflash
from outrider.propose import parallel
from outrider.propose.tree import CHAIN
from outrider.propose.trees import growth
from outrider.propose.trees.adaptive import FixedPace, JudgedChain
from tests.model import checkpoints
from tests.model.block_reference import BlockReference
from tests.model.gguf_heads import write_block_head
from tests.model.test_block_heads import MIXED, check_added_layers, check_behind_another, check_crowded, check_prefix_hit
from tests.model.test_feature_heads import BOUND, GREEDY, LAYERS, PROMPTS, SEEDED, Watch, faults, load, texts
from tests.model.test_hostile_heads import change, exchange
from tests.model.test_target import Oracle

FEW = (1, 2, 3, 5, 7, 9, 11, 20, 30, 31)
HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {"layout": "deepspec", "block_size": 5},
    "gated": {"layout": "deepspec", "markov_head_type": "gated", "confidence_head_with_markov": False},
    "rnn": {"layout": "deepspec", "markov_head_type": "rnn", "inputs": (0, 2, 4), "block_size": 5},
    "speculators": {"layout": "speculators dspark", "draft_tokens": FEW, "block_size": 7},
    "behind the anchor": {
        "layout": "speculators dspark", "sample_from_anchor": False, "markov_head_type": "gated", "sizes": MIXED,
    },
}  # fmt: skip


class Made(NamedTuple):
    """A target and heads for it."""

    path: str
    oracle: Oracle
    heads: dict[str, str]

    def way(self, name: str, **settings: Any) -> SpeculationConfig:
        settings = settings if "tree" in settings else {"num_draft_tokens": 3, **settings}
        least: float | None = settings.pop("min_confidence", 0.0)
        return SpeculationConfig(method=DSpark(model=self.heads[name], min_confidence=least), **settings)

    def reference(self, name: str) -> BlockReference:
        return BlockReference(self.heads[name], self.oracle.model)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("dspark")
    path = checkpoints.save("llama", folder / "target", seed=3, layers=LAYERS)
    heads = {name: save_random_dflash(folder / name, path, scale=0.1, **how) for name, how in HEADS.items()}
    return Made(path, Oracle(path), heads)


@pytest.fixture(autouse=True)
def _one_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Watch` looks at `growth.add_level`, and this proposer calls it by a name of its own."""
    monkeypatch.setattr(parallel, "add_level", lambda *args: growth.add_level(*args))


# -- what is drafted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_the_reference_over_the_whole_block(
    made: Made, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, llm = Watch(made.reference(name), monkeypatch, growth), load(made, dtype="float32")
    # A whole block, unless somebody says how long.
    way = SpeculationConfig(method=DSpark(model=made.heads[name], min_confidence=0.0))
    outputs = llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=10), speculation=way)
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 10
    reference = made.reference(name)
    assert watch.deepest == reference.block_size - (1 if reference.from_anchor else 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("name", ["gated", "rnn"])
def test_a_head_runs_in_the_precision_of_its_target(
    made: Made, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, llm = Watch(made.reference(name), monkeypatch, growth), load(made, dtype=dtype)
    outputs = llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=10), speculation=made.way(name, num_draft_tokens=5))
    assert faults(outputs) == 0
    assert watch.worst <= (0.2 if dtype == "bfloat16" else BOUND)
    assert watch.num_rows > 10


@pytest.mark.parametrize(
    ("name", "backend", "shape"),
    [
        ("vanilla", "fused", {"tree": "best_first", "num_draft_tokens": 6}),
        ("rnn", "paged", {"tree": (3, 2)}),
        ("behind the anchor", "gather", {}),
    ],
    ids=str,
)
def test_every_draft_is_what_the_reference_says(
    made: Made, name: str, backend: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_crowded(made, name, backend, shape, monkeypatch)


def test_the_added_layers_hold_what_a_fresh_prefill_gives(made: Made) -> None:
    check_added_layers(made, "rnn")


def test_a_prefix_hit_costs_no_second_prefill_and_is_drafted_for_at_once(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_prefix_hit(made, "vanilla", monkeypatch)


@pytest.mark.parametrize("name", ["vanilla", "rnn"])
def test_a_draft_behind_another_proposers_takes_in_its_tokens(
    made: Made, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_behind_another(made, name, 9, monkeypatch)


@pytest.mark.parametrize(("name", "least"), [("vanilla", 0.5), ("gated", 0.5), ("speculators", 0.45)])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_nothing_is_drafted_at_a_place_that_is_unlikely_to_stand(
    made: Made, name: str, least: float, params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a place is drafted follows from the tokens before it, and never from its own."""
    reference, llm = made.reference(name), load(made)
    asked, drafted, cut = list[float](), list[float](), 0
    stock = growth.add_level

    def watched(growths: Any, logits: Any, noise: Any) -> None:
        for each in growths:
            text = tuple(each.request.text(0))
            asked.extend(reference.chance(text, each.path(node)) for node in each.level)
        stock(growths, logits, noise)

    monkeypatch.setattr(growth, "add_level", watched)
    way = made.way(name, num_draft_tokens=4, min_confidence=least)
    outputs = llm.generate(PROMPTS, params.replace(max_tokens=24), speculation=way, trace=True)
    assert faults(outputs) == 0
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        whole = (*prompt, *output.token_ids)
        for found in (output.first.rounds or ())[1:]:
            text, tokens = whole[: found.position], found.token_ids
            drafted += [reference.chance(text, tokens[:place]) for place in range(len(tokens))]
            room = len(output.token_ids) - (found.position - len(prompt)) - 1
            if len(tokens) < min(4, room):
                cut += 1
                assert reference.chance(text, tokens) < least
    assert min(drafted) >= least
    assert min(asked) >= least
    assert cut > 3
    assert texts(outputs) == texts(llm.generate(PROMPTS, params.replace(max_tokens=24), speculation="none"))


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_engine_ends_each_draft_where_a_row_is_not_worth_its_time(made: Made, params: Any) -> None:
    llm, params = load(made), params.replace(max_tokens=24)

    def lengths(least: float | None, price: float) -> list[int]:
        llm.engine.drafting.builders.use_pace(FixedPace({1: 1.0, 64: 1.0 + 63 * price}))
        way = made.way("vanilla", num_draft_tokens=4, min_confidence=least)
        outputs = llm.generate(PROMPTS, params, speculation=way, trace=True)
        assert faults(outputs) == 0
        assert texts(outputs) == texts(llm.generate(PROMPTS, params, speculation="none"))
        return [len(found.token_ids) for output in outputs for found in (output.first.rounds or ())[1:]]

    free, dear, whole = lengths(None, 0.0), lengths(None, 0.06), lengths(0.0, 0.06)
    assert free == whole
    assert len(set(dear)) > 2
    assert sum(dear) / len(dear) < sum(whole) / len(whole)


def test_a_text_that_must_come_again_follows_no_clock_where_rows_depend_on_their_pass(made: Made) -> None:
    llm = load(made)
    host = llm.engine.proposers.find(made.way("vanilla", min_confidence=None).method)
    for invariant, repeated, once in ((True, JudgedChain, JudgedChain), (False, type(CHAIN), JudgedChain)):
        builders = TreeBuilders(llm.engine.proposers, lambda: FixedPace({1: 1.0}), invariant=invariant)
        assert type(builders.of(host, (), comes_again=True)) is repeated
        assert type(builders.of(host, ())) is once


# -- planted bugs ------------------------------------------------------------------------------------------------------


def _biased_by_the_text(patch: pytest.MonkeyPatch) -> None:
    """Every place is biased by the last token of the text."""
    patch.setattr(parallel._Path, "token", lambda self, node: self.last)


def _forgets(patch: pytest.MonkeyPatch) -> None:
    """Every place begins with no state."""
    patch.setattr(parallel._Path, "state_before", lambda self, node: self.start)


def _ungated(patch: pytest.MonkeyPatch) -> None:
    def forward(self: MarkovHead, tokens: torch.Tensor, rows: torch.Tensor, states: torch.Tensor) -> MarkovStep:
        embeddings = self.markov_w1(tokens).to(rows.dtype)
        return MarkovStep(self.markov_w2(embeddings), embeddings, states)

    patch.setattr(MarkovHead, "forward", forward)


@pytest.mark.by_change("tests/model/")  # of the tests themselves: it plants what they must see
@pytest.mark.parametrize(("name", "plant"), [("vanilla", _biased_by_the_text), ("rnn", _forgets), ("gated", _ungated)])
def test_control_a_head_that_reads_something_else_is_seen(
    made: Made, name: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    watch = Watch(made.reference(name), monkeypatch, growth)
    outputs = load(made).generate(PROMPTS[0], GREEDY, speculation=made.way(name))
    assert faults(outputs) == 0
    assert watch.worst > 100 * BOUND


# -- formats -----------------------------------------------------------------------------------------------------------


def test_a_head_of_deepspec_goes_to_the_speculators_package_and_drafts_the_same(made: Made, tmp_path: Path) -> None:
    llm = load(made)
    for name in ("vanilla", "gated", "rnn"):
        convert_head(made.heads[name], "speculators", tmp_path / name, made.path)
        other = DSpark(model=str(tmp_path / name), min_confidence=0.0)
        ways = [made.way(name), SpeculationConfig(method=other, num_draft_tokens=3)]
        first, second = (llm.generate(PROMPTS, SEEDED, speculation=way, trace=True) for way in ways)
        drafts = [[r.token_ids for o in outputs for r in o.first.rounds or ()] for outputs in (first, second)]
        assert drafts[0] == drafts[1]
        assert any(map(len, drafts[0]))


@pytest.mark.parametrize("name", ["vanilla", "speculators"])
@pytest.mark.parametrize("said", [None, True], ids=["by its tensors", "by its flag"])
def test_a_gguf_file_drafts_as_the_folder_does(
    made: Made, name: str, said: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_block_head(made.heads[name], tmp_path / "head.gguf", sample_from_anchor=said)
    watch, llm = Watch(made.reference(name), monkeypatch, growth), load(made)
    way = SpeculationConfig(method=DSpark(model=file, min_confidence=0.45), num_draft_tokens=4)
    outputs = llm.generate(PROMPTS, SEEDED, speculation=way, trace=True)
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    folder = llm.generate(PROMPTS, SEEDED, speculation=made.way(name, num_draft_tokens=4, min_confidence=0.45), trace=True)
    drafts = [[r.token_ids for o in each for r in o.first.rounds or ()] for each in (outputs, folder)]
    assert drafts[0] == drafts[1]
    assert watch.deepest == 3


def test_a_head_of_deepspec_without_the_small_heads_is_one_of_dflash(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"layout": "deepspec", "markov_rank": 0, "enable_confidence_head": False}
    head = save_random_dflash(tmp_path / "head", made.path, scale=0.1, confidence_head_with_markov=False, **how)
    watch, llm = Watch(BlockReference(head, made.oracle.model), monkeypatch, growth), load(made)
    outputs = llm.generate(PROMPTS, GREEDY, speculation=SpeculationConfig(method=DFlash(model=head)))
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.deepest == 5, "the last token of the text drafts, too"


def test_without_a_sequential_head_low_confidence_is_that_of_the_token(made: Made, tmp_path: Path) -> None:
    """A confidence head that reads the states alone says nothing of the tokens of a draft, so it ends none."""
    how: dict[str, Any] = {"layout": "deepspec", "markov_rank": 0, "confidence_head_with_markov": False}
    head = save_random_dflash(tmp_path / "head", made.path, scale=0.1, **how)
    llm, lengths = load(made), list[set[int]]()
    for least in (0.0, 1.0):
        way = SpeculationConfig(method=DSpark(model=head, min_confidence=least), num_draft_tokens=4)
        outputs = llm.generate(PROMPTS, GREEDY, speculation=way, trace=True)
        assert faults(outputs) == 0
        lengths.append({len(found.token_ids) for output in outputs for found in output.first.rounds or ()})
    assert max(lengths[0]) == 4
    assert max(lengths[1]) == 1


def _set(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping.update(fields)


@pytest.mark.parametrize(
    ("layout", "spoil", "told"),
    [
        ("deepspec", _set(model_type="gemma3_text"), "model_type='gemma3_text': heads with layers of Qwen3 or Gemma 4"),
        ("deepspec", _set(block_size=None), "block_size=None: no size of a block"),
        ("deepspec", _set(mask_token_id=61), "mask_token_id=61: no token of the 61"),
        ("deepspec", _set(target_layer_ids=[-2, 1]), "target_layer_ids=[-2, 1]: no list of layers"),
        ("deepspec", _set(markov_rank=-1), "markov_rank=-1: no rank"),
        ("deepspec", _set(markov_head_type="lstm"), "markov_head_type='lstm': no such head is known"),
        ("deepspec", _set(markov_rank=0), "confidence_head_with_markov=True: it reads the token"),
        ("speculators dspark", _set(enable_confidence_head=3), "enable_confidence_head=3: neither true nor false"),
        (
            "speculators dspark",
            _set(sample_from_anchor=False, markov_head_type="rnn"),
            "sample_from_anchor=False: markov_head_type is rnn",
        ),
        ("speculators dspark", _set(shift_label=True), "shift_label=True: its places were moved"),
    ],
)
def test_a_configuration_that_settles_nothing_is_refused(
    made: Made, layout: str, spoil: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    folder = save_random_dflash(tmp_path, made.path, layout)
    change(folder, spoil)
    with pytest.raises(ModelLoadError) as caught:
        read_head_config(folder)
    assert told in caught.value.problem
    assert caught.value.remedy.endswith(".")


def test_a_head_that_does_not_belong_is_refused(made: Made, tmp_path: Path) -> None:
    narrow, short, other = (
        save_random_dflash(tmp_path / name, made.path, "deepspec") for name in ("narrow", "short", "other")
    )
    exchange(narrow, "markov_head.markov_w2.weight", torch.zeros(61, 9))
    exchange(short, "confidence_head.proj.bias", None)
    change(other, _set(vocab_size=59, mask_token_id=1))
    llm = load(made)
    for method, kind, told in (
        (DFlash(model=made.heads["vanilla"]), HeadMismatchError, "its head is for method='dspark'"),
        (DSpark(model=narrow), ModelLoadError, "markov_head.markov_w2.weight in model.safetensors has shape [61, 9]"),
        (DSpark(model=short), ModelLoadError, "it has no tensor confidence_head.proj.bias"),
        (DSpark(model=other), ModelLoadError, "markov_head.markov_w1.weight"),
    ):
        with pytest.raises(kind) as caught:
            llm.generate([1, 2, 3], GREEDY, speculation=SpeculationConfig(method=method))
        assert told in caught.value.problem
