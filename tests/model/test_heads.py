"""Methods that draft with heads on the target's hidden states, in the whole engine and on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outrider import LLM, Blockwise, ExitHead, Medusa, Ngram, SamplingParams, SpeculationConfig
from outrider.engine.drafting import drafting
from outrider.engine.drafting.planning import as_requested
from outrider.errors import HeadMismatchError, InvalidParameterError, ModelLoadError, UnsupportedModelError
from outrider.heads import checkpoint
from outrider.heads.checkpoint import load_heads, save_heads
from outrider.heads.networks import HeadNetwork
from outrider.kernels.library import kernel_library
from outrider.lab.measure.decoding_config import parse_ways
from outrider.lab.prove.own_model import CacheAudit
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle, save_random_heads
from outrider.model import factory, hf
from outrider.params import RequestOutput
from outrider.propose.row_heads import RowHeadsProposer
from tests.model import checkpoints
from tests.model.core import DRAFTING, core, in_turn
from tests.model.gguf_heads import write_block_head
from tests.model.preempted import found_again
from tests.model.test_target import Oracle

PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 9, 9, 4], [5, 6], [7, 7, 7, 7, 7, 8, 30]]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SEEDED = SamplingParams(seed=3, max_tokens=20)
BACKENDS = ("fused", "paged", "gather", "row_by_row")
METHODS = {"medusa": Medusa, "blockwise": Blockwise, "exit": ExitHead}


class Made(NamedTuple):
    """A target and heads for it."""

    path: str
    oracle: Oracle
    heads: dict[str, str]

    def way(self, name: str, **settings: Any) -> SpeculationConfig:
        settings = {"num_draft_tokens": 3, **settings} if "tree" not in settings else settings
        return SpeculationConfig(method=METHODS[name.split(",")[0]](model=self.heads[name]), **settings)

    def ways(self) -> dict[str, SpeculationConfig]:
        return {
            "medusa": self.way("medusa"),
            "medusa, inner layer": self.way("medusa, inner layer"),
            "medusa, target's output": self.way("medusa, target's output"),
            "medusa, tree": self.way("medusa", tree=(3, 2)),
            "blockwise": self.way("blockwise"),
            "blockwise, tree": self.way("blockwise", tree=(2, 2, 1)),
            "exit": self.way("exit"),
            "exit, target's norm": self.way("exit, target's norm"),
            "exit, tree": self.way("exit", tree=(2, 1)),
        }


WAYS = (
    "medusa", "medusa, inner layer", "medusa, target's output", "medusa, tree", "blockwise", "blockwise, tree",
    "exit", "exit, target's norm", "exit, tree",
)  # fmt: skip


def make(path: str, folder: Path) -> Made:
    def save(name: str, method: str, **changes: Any) -> str:
        return save_random_heads(folder / name, path, method, **changes)

    heads = {
        "medusa": save("medusa", "medusa", heads=4, blocks=2, width=20),
        "medusa, inner layer": save("inner", "medusa", layer=2, normed=False),
        "medusa, target's output": save("shared", "medusa", output="target"),
        "blockwise": save("blockwise", "blockwise"),
        "exit": save("exit", "exit", layer=2),
        "exit, target's norm": save("normed", "exit", layer=3, normed=True, width=20),
    }
    return Made(path, Oracle(path), heads)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("heads")
    return make(checkpoints.save("llama", folder / "target", seed=3), folder)


def load(path: str, backend: str = "auto", **how: Any) -> LLM:
    how = {"dtype": "float64", "block_size": 4, "speculation": "none", **how}
    if backend != "row_by_row":
        return LLM(path, attention_backend=backend, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "INVARIANT", ("row_by_row",))
        return LLM(path, batch_invariant=True, **how)


@pytest.fixture(scope="module", params=BACKENDS)
def crowded(request: pytest.FixtureRequest, made: Made) -> LLM:
    """Too little memory for all texts of a test."""
    return load(made.path, request.param, kv_cache_tokens=120, max_num_batched_tokens=48)


@pytest.fixture(scope="module")
def llm(made: Made) -> LLM:
    return load(made.path)


@pytest.fixture(autouse=True)
def nothing_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("llm", "crowded"):
        if name in request.fixturenames:
            used: LLM = request.getfixturevalue(name)
            used.engine.drafting.planner = as_requested
            used.engine.check_integrity()
            assert used.engine.runner.blocks.num_free == used.engine.runner.blocks.num_blocks
            for proposer in used.proposers:
                assert not getattr(proposer, "_features", None), "features of texts that have ended"


def texts(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def faults(outputs: Sequence[RequestOutput]) -> int:
    return sum(sample.stats.num_proposer_faults for output in outputs for sample in output.outputs)


# -- what is drafted ---------------------------------------------------------------------------------------------------


class Watch:
    """Compares every greedy draft with what the heads say of the stock model's hidden states.

    Args:
        made: The target and its heads.
        patch: Where the engine is watched.
    """

    def __init__(self, made: Made, patch: pytest.MonkeyPatch) -> None:
        self._oracle, self._opened = made.oracle, dict[str, HeadNetwork]()
        self._said: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.num_drafts = 0
        self.wrong: list[tuple[int, ...]] = []  # (sequence, tokens written so far, node, token, what it should be)
        self.empty: list[tuple[int, int]] = []  # (sample, tokens written so far) where nothing was drafted
        stock: Callable[..., Any] = drafting.propose_all

        def watched(items: Any, *args: Any) -> Any:
            steps = stock(items, *args)
            for item, step in zip(items, steps, strict=True):
                if item.turns:
                    self._look(item, step)
            return steps

        patch.setattr(drafting, "propose_all", watched)

    def _look(self, item: Any, step: Any) -> None:
        seq, end = item.seq, 0
        before: tuple[int, ...] = ()
        for turn in item.turns:
            part = next((p for p in step.parts if p.root == end - 1 and p.drafter.method is turn.method), None)
            if isinstance(turn.method, Medusa | Blockwise | ExitHead):
                self._compare(seq, turn.method, step.draft, part, before)
            if part is None:
                continue
            end = part.nodes[-1] + 1
            before = step.draft.paths[end - 1]

    def _compare(self, seq: Any, method: Any, draft: Any, part: Any, before: tuple[int, ...]) -> None:
        if part is None:
            self.empty.append((seq.index, seq.num_output_tokens))
            return
        self.num_drafts += 1
        first, stop = part.nodes[0], part.nodes[-1] + 1
        for node in range(first, stop):
            path = draft.paths[node][:-1]
            logits = self._logits(method, list(seq.token_ids), path, len(path))
            siblings = [n for n in range(first, stop) if draft.parents[n] == draft.parents[node]]
            rank = siblings.index(node)
            want = int(logits.sort(descending=True, stable=True).indices[rank])
            if draft.token_ids[node] != want:
                self.wrong.append((seq.seq_id, seq.num_output_tokens, node, draft.token_ids[node], want))

    def _logits(self, method: Any, text: list[int], path: tuple[int, ...], depth: int) -> torch.Tensor:
        if method.model not in self._opened:
            self._opened[method.model] = load_heads(method.model).network.double()
        network = self._opened[method.model]
        config = network.config
        exits = isinstance(method, ExitHead)
        read = (*text, *path) if exits else tuple(text[:-1])
        if (method.model, read) not in self._said:
            stock = self._oracle.model
            hidden = hf.layer_features(stock, torch.tensor([read]), config.layer, normed=config.normed)[0, -1:]
            self._said[method.model, read] = network(hidden, stock.get_output_embeddings())[:, 0]
        return self._said[method.model, read][0 if exits else depth]


#: All heads on one backend, and a kind of them on each of the others.
WITH_BACKENDS = [*product(WAYS, BACKENDS[:1]), *in_turn(METHODS, BACKENDS[1:])]


@pytest.mark.parametrize(("name", "crowded"), core(product(WAYS, BACKENDS), WITH_BACKENDS), indirect=["crowded"])
def test_every_draft_is_what_the_heads_say_of_the_stock_models_states(
    crowded: LLM, made: Made, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rejected drafts, prefix hits, preemptions and forks: the row that is read is always the last one computed."""
    watch, config, found = Watch(made, monkeypatch), made.ways()[name], found_again(monkeypatch)
    assert made.ways().keys() == set(WAYS)
    crowded.stats.reset()
    outputs = crowded.generate([*PROMPTS, *PROMPTS], [GREEDY, SEEDED.replace(temperature=0, n=2)] * 3, speculation=config)
    assert faults(outputs) == 0
    stats = crowded.stats.finished
    assert watch.wrong == []
    assert watch.num_drafts > 50
    assert stats.num_preemptions > 0
    assert sum(found) > 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens


_LOGITS = checkpoint.RunningHeads.logits


def _without_norm(heads: checkpoint.RunningHeads, hidden: Tensor, num_heads: int) -> Tensor:
    """Planted: heads read hidden states before the target's norm. The check that they fit the target reads them rightly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "read_features", lambda config, target, hidden: hidden)
        return _LOGITS(heads, hidden, num_heads)


@pytest.mark.by_change("tests/model/")  # of the tests themselves: it plants what they must see
@pytest.mark.parametrize("bug", ["a row off", "the norm is forgotten", "a rejected row is read", "heads a place too far"])
def test_control_heads_that_read_or_say_something_else_are_seen(
    made: Made, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = made.way("exit, target's norm" if "norm" in bug else "medusa")
    if bug == "the norm is forgotten":
        monkeypatch.setattr(checkpoint.RunningHeads, "logits", _without_norm)
    elif bug == "heads a place too far":
        stock = checkpoint.RunningHeads.logits
        monkeypatch.setattr(checkpoint.RunningHeads, "logits", lambda self, hidden, n: stock(self, hidden, n + 1)[1:])
    else:
        monkeypatch.setattr(RowHeadsProposer, "observe", _wrong(RowHeadsProposer.observe, bug))
    watch = Watch(made, monkeypatch)
    outputs = load(made.path).generate(PROMPTS, GREEDY, speculation=way)
    assert faults(outputs) == 0
    assert len(watch.wrong) > 10


def _wrong(stock: Callable[..., None], bug: str) -> Callable[..., None]:
    """`observe` with hidden states moved by a row, or those of the last draft row whatever became of it."""

    def observe(self: Any, rows: Any) -> None:
        for seen in rows:
            layer = self._heads.config.layer
            states = seen.aux_hidden_states[layer]
            moved = states.roll(1, 0) if bug == "a row off" and len(states) > 1 else states
            if bug == "a rejected row is read":
                moved = states[-1:].expand_as(states)
            seen.aux_hidden_states[layer] = moved
        stock(self, rows)

    return observe


# -- no text changes ---------------------------------------------------------------------------------------------------


ASKED: dict[str, SamplingParams] = {
    "three samples": SEEDED.replace(n=3),
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": SEEDED.replace(repetition_penalty=1.3, logit_bias={4: 2.0}),
}


@pytest.mark.parametrize("crowded", BACKENDS, indirect=True)
@pytest.mark.parametrize("asked", ASKED)
def test_a_crowded_batch_writes_what_each_writes_alone(crowded: LLM, made: Made, asked: str) -> None:
    """All kinds of heads, a lookup and nobody, preempted, and with prefixes from the cache."""
    params = ASKED[asked]
    ways = [*made.ways().values(), SpeculationConfig(method=Ngram(min_match=1)), SpeculationConfig()]
    prompts = [PROMPTS[i % 3] for i in range(len(ways))]
    plain = [crowded.generate(prompt, params, speculation="none")[0] for prompt in PROMPTS]
    crowded.stats.reset()
    outputs = crowded.generate(prompts, params, speculation=ways)
    assert texts(outputs) == texts([plain[i % 3] for i in range(len(ways))])
    assert faults(outputs) == 0
    stats = crowded.stats.finished
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert all(sum(sample.stats.num_draft_tokens for sample in output.outputs) > 0 for output in outputs[: len(WAYS)])


@pytest.mark.parametrize("crowded", core(BACKENDS, ("fused", "gather")), indirect=True)
def test_kv_is_that_of_a_fresh_prefill(crowded: LLM, made: Made) -> None:
    for i, speculation in enumerate(made.ways().values()):
        params = SEEDED.replace(max_tokens=12, n=2 if i == 0 else 1)
        crowded.engine.add_request(tuple(PROMPTS[i % 3]), params, speculation)
    audit = CacheAudit(crowded.engine)
    audit.run()
    assert audit.num_checked > 20
    assert audit.worst <= 1e-5  # transformers keeps norms in float32


@pytest.mark.parametrize("family", core(["gemma2", "gpt2", "longrope"], ["longrope"], *DRAFTING, "src/outrider/model/"))
def test_other_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capped logits, a norm with a bias, texts that change their rotary factors."""
    other = make(checkpoints.save(family, tmp_path / "target", seed=3), tmp_path)
    llm = load(other.path)
    ways = list(other.ways().values())
    plain = llm.generate([PROMPTS[0]] * len(ways), SEEDED.replace(max_tokens=24), speculation="none")
    outputs = llm.generate([PROMPTS[0]] * len(ways), SEEDED.replace(max_tokens=24), speculation=ways)
    assert texts(outputs) == texts(plain)
    assert faults(outputs) == 0
    if family != "longrope":  # the stock model takes the factors of the longest text
        watch = Watch(other, monkeypatch)
        llm.generate([PROMPTS[0]] * len(ways), GREEDY, speculation=ways)
        assert watch.num_drafts > 50
        assert watch.wrong == []


# -- when they begin ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["medusa", "blockwise", "exit"])
def test_heads_of_the_request_draft_from_its_first_decoding_step(
    llm: LLM, made: Made, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(made, monkeypatch)
    llm.generate([[9, *prompt] for prompt in PROMPTS], GREEDY, speculation=made.way(name))
    assert watch.empty == []
    assert watch.num_drafts > 0


def test_samples_begin_where_their_prompt_ends(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples draft in their first step, from the row of the prompt that one of them computed."""
    watch, llm = Watch(made, monkeypatch), load(made.path, prefix_caching=False)
    params = SEEDED.replace(n=3, temperature=0)
    outputs = llm.generate(PROMPTS[0], params, speculation=made.way("medusa"))
    assert watch.empty == []
    assert watch.wrong == []
    drafts = [sample.stats.num_drafts for sample in outputs[0].outputs]
    assert drafts == [sample.stats.num_target_passes - 1 for sample in outputs[0].outputs], "the last token needs none"


def test_heads_that_are_chosen_late_begin_with_the_row_that_they_see_first(
    llm: LLM, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, way = Watch(made, monkeypatch), made.way("medusa")
    llm.engine.drafting.planner = lambda seq: (way,) if seq.num_output_tokens > 6 else ()
    llm.generate(PROMPTS[0], GREEDY, speculation="none")
    assert watch.empty == [(0, 7)], "one step without a draft, and no row computed for it"
    assert watch.num_drafts > 3
    assert watch.wrong == []


def test_heads_behind_other_drafts(llm: LLM, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head further ahead goes on where another proposer's draft ends, and none reaches further than there are heads."""
    watch = Watch(made, monkeypatch)
    one, two = made.way("medusa", num_draft_tokens=1), made.way("blockwise", num_draft_tokens=8)
    short = made.way("exit", num_draft_tokens=2)
    rounds = [(one, two), (short, two), (two, one), (one, short), ()]
    for params in (GREEDY, SEEDED):
        plain = llm.generate(PROMPTS, params, speculation="none")
        llm.engine.drafting.planner = lambda seq: rounds[seq.view.round % len(rounds)]
        outputs = llm.generate(PROMPTS, params, speculation="none")
        llm.engine.drafting.planner = as_requested
        assert texts(outputs) == texts(plain)
        if params is GREEDY:
            assert watch.num_drafts > 10
            assert watch.wrong == []


@pytest.mark.parametrize("n", [1, 2])
def test_a_prefix_hit_costs_no_second_prefill(made: Made, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, way = load(made.path), made.way("medusa")
    prompt, params = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], SEEDED.replace(n=n, temperature=0, max_tokens=6)
    first = llm.generate(prompt, params, speculation=way)
    llm.stats.reset()
    watch = Watch(made, monkeypatch)
    again = llm.generate(prompt, params, speculation=way)
    assert texts(again) == texts(first)
    assert llm.stats.finished.num_cached_tokens >= 12
    plain_rows = llm.stats.num_rows - llm.stats.finished.num_draft_tokens
    assert plain_rows <= 1 + n * 6, "the last prompt token's row, and those of the text"
    assert watch.num_drafts > 0
    assert watch.wrong == []
    assert all(written == 0 for _, written in watch.empty), "the first step alone may have no draft"


def test_a_text_that_was_preempted_goes_on_drafting(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, llm = Watch(made, monkeypatch), load(made.path, kv_cache_tokens=60, prefix_caching=False)
    outputs = llm.generate([[9, *prompt] for prompt in PROMPTS * 2], GREEDY, speculation=made.way("medusa"))
    assert sum(output.stats.num_preemptions for output in outputs) > 0
    assert watch.empty == []
    assert watch.wrong == []


def test_a_request_that_is_cancelled_is_forgotten(llm: LLM, made: Made) -> None:
    stream = llm.stream(PROMPTS[0], SEEDED, speculation=made.way("medusa"))
    next(stream)
    stream.close()
    llm.generate(PROMPTS[1], SEEDED, speculation="none")
    (proposer,) = [p for p in llm.proposers if isinstance(p, RowHeadsProposer) and p._heads.config.num_heads == 4]
    assert not proposer._features


# -- what heads are worth ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=20)], ids=["greedy", "sampled"])
def test_an_exit_behind_the_last_layer_with_the_targets_own_norm_and_head_is_never_wrong(
    llm: LLM, made: Made, params: SamplingParams, tmp_path: Path
) -> None:
    folder = save_random_heads(tmp_path, made.path, "exit", layer=4, normed=True, output="target")
    way = SpeculationConfig(method=ExitHead(model=folder), num_draft_tokens=3)
    outputs = llm.generate(PROMPTS, params, speculation=way)
    for output in outputs:
        assert output.stats.num_draft_tokens == output.stats.num_accepted_tokens > 10


def test_the_first_head_that_says_what_the_target_says_is_right_where_the_text_repeats_itself(
    llm: LLM, made: Made, tmp_path: Path
) -> None:
    """Heads as training begins with them say the token that the target is about to write, a place too late. They are right
    exactly where a token stands twice."""
    folder = tmp_path / "begun"
    config, network, witness = load_heads(save_random_heads(folder, made.path, "medusa", output="target"))
    network.begin()
    save_heads(folder, network, witness)
    assert config.num_heads == 3
    params = GREEDY.replace(max_tokens=24, logit_bias={9: 100.0})
    outputs = llm.generate(PROMPTS, params, speculation=SpeculationConfig(method=Medusa(model=str(folder))))
    for output in outputs:
        assert output.token_ids == (9,) * 24
        assert output.stats.num_draft_tokens == output.stats.num_accepted_tokens > 10


# -- which heads fit ---------------------------------------------------------------------------------------------------


def refusal(llm: LLM, method: str, folder: str) -> HeadMismatchError:
    with pytest.raises(HeadMismatchError) as caught:
        llm.generate(PROMPTS[0], GREEDY, speculation={"method": method, "model": folder})
    assert caught.value.model == folder
    assert caught.value.remedy.endswith(".")
    return caught.value


def test_heads_for_other_weights_are_refused(made: Made, tmp_path: Path) -> None:
    other = load(checkpoints.save("llama", tmp_path, seed=4))
    for name in ("medusa", "medusa, inner layer", "blockwise", "exit", "exit, target's norm"):
        error = refusal(other, name.split(",")[0], made.heads[name])
        assert error.field == "features"
        assert error.found > 0.5


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("mistral", {}, "model_type"),
        ("llama", {"layers": 3}, "num_layers"),
        ("llama", {"vocab_size": 60}, "vocab_size"),
        ("llama", {"hidden_size": 64}, "hidden_size"),
    ],
)
def test_heads_for_another_shape_are_refused(
    made: Made, tmp_path: Path, family: str, changes: dict[str, Any], field: str
) -> None:
    other = load(checkpoints.save(family, tmp_path, seed=3, **changes))
    error = refusal(other, "medusa", made.heads["medusa"])
    assert error.field == field
    assert error.needed != error.found
    assert str(error.needed) in error.problem
    assert str(error.found) in error.problem


def test_heads_of_another_kind_are_refused(llm: LLM, made: Made) -> None:
    error = refusal(llm, "medusa", made.heads["exit"])
    assert (error.field, error.needed, error.found) == ("method", "exit", "medusa")
    assert "Use method='exit'" in error.remedy


@pytest.mark.parametrize("wrong", ["layer", "norm"])
def test_a_checkpoint_that_names_another_layer_or_norm_is_refused(llm: LLM, made: Made, wrong: str, tmp_path: Path) -> None:
    """As where whoever trained the heads wrote down something else than they had read."""
    config, network, witness = load_heads(made.heads["exit"])
    network.config = config.replace(layer=3) if wrong == "layer" else config.replace(normed=True)  # type: ignore[assignment]
    if wrong == "norm":
        network = save_and_load(made, tmp_path / "normed", network.config)
    save_heads(tmp_path, network, witness)
    assert refusal(llm, "exit", str(tmp_path)).field == "features"


def save_and_load(made: Made, folder: Path, config: Any) -> HeadNetwork:
    save_random_heads(folder, made.path, "exit", layer=config.layer, normed=True)
    return load_heads(folder).network


@pytest.mark.by_change("src/outrider/heads/", "src/outrider/kernels/")
def test_rounding_is_no_mismatch(made: Made) -> None:
    for how in ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16", "quantization": "int8"}):
        llm = load(made.path, **how)
        for name in WAYS:
            assert faults(llm.generate(PROMPTS, SEEDED, speculation=made.ways()[name])) == 0
            config, _, witness = load_heads(made.ways()[name].method.model)
            distance = checkpoint._distance(config, witness, llm.proposers._context.target)
            assert distance < checkpoint.TOLERANCE / 3, (how, name)


def test_a_folder_is_needed_and_must_hold_heads(llm: LLM, made: Made, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="needs one"):
        llm.generate(PROMPTS[0], GREEDY, speculation="medusa")
    with pytest.raises(InvalidParameterError, match="no such folder"):
        llm.generate(PROMPTS[0], GREEDY, speculation={"method": "medusa", "model": str(tmp_path / "none")})
    with pytest.raises(ModelLoadError, match="draft_model"):
        llm.generate(PROMPTS[0], GREEDY, speculation={"method": "medusa", "model": made.path})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_what_heads_say_of_a_row_does_not_depend_on_other_rows(made: Made, dtype: str) -> None:
    if kernel_library() is None:
        pytest.skip("stock products make no such promise")
    target = load(made.path, dtype=dtype).proposers._context.target
    hidden = torch.randn(19, target.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name in WAYS:
        method = made.ways()[name].method
        heads = checkpoint.open_heads(method.model, method.name, target)
        together = heads.logits(hidden.to(target.dtype), heads.config.num_heads)
        for row in range(len(hidden)):
            alone = heads.logits(hidden[row : row + 1].to(target.dtype), heads.config.num_heads)
            assert torch.equal(alone[:, 0], together[:, row]), (name, row)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dspark", "dspark as a file"])
def test_a_draft_model_may_be_a_head(made: Made, tmp_path: Path, kind: str) -> None:
    """Its method is that of the head, in the engine and in what is measured; as a target it is refused by what it is."""
    folder, method = tmp_path / "head", kind.removesuffix(" as a file")
    if kind == "medusa":
        head = save_random_heads(folder, made.path, "medusa")
    elif kind == "eagle3":
        head = save_random_eagle(folder, made.path, "speculators", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    else:
        head = save_random_dflash(folder, made.path, "deepspec")
    if kind.endswith("file"):
        head = write_block_head(head, tmp_path / "head.gguf")
    (_, way) = parse_ways(["draft_model:3"], head)
    assert way.name == f"{method} k=3"
    with LLM(made.path, draft_model=head, speculation=method, block_size=4) as llm:
        assert llm._defaults.config.method == way.config.method
        plain = llm.generate([PROMPTS[0]], GREEDY, speculation="none")
        assert texts(llm.generate([PROMPTS[0]], GREEDY)) == texts(plain)
    with pytest.raises(UnsupportedModelError, match=rf"drafts for a target \(method {method}\).*this as draft_model"):
        LLM(head)
