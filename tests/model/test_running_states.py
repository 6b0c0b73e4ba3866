"""Models with a running state write what stock transformers writes, and their states are those of a fresh prefill."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams, SpeculationConfig, Suffix
from outrider.cache.running import CellRecord, RunningText
from outrider.cache.state import SequenceState
from outrider.config import RequestOptions
from outrider.errors import UnsupportedModelError
from outrider.lab.prove.own_model import KV_BOUND, CacheAudit
from outrider.model.batch import Segment
from outrider.model.memory import PassTimer
from outrider.model.running import Convolution, Recurrence, RunningPass, StateRows
from outrider.propose.draft_model import DraftModel
from outrider.propose.ngram import Prediction
from outrider.propose.own_layers import EarlyExit, LayerSkip
from tests.model import checkpoints
from tests.model.core import core

PROMPT = [(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(23)]
GREEDY, SEEDED = SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=7, max_tokens=24)
BRANCHES = SpeculationConfig(method=Suffix(min_match=1, branches=True), num_draft_tokens=4)
PREDICTION = SpeculationConfig(method=Prediction(min_match=1), num_draft_tokens=4)
EXIT = SpeculationConfig(method=EarlyExit(layers=2), num_draft_tokens=3)
SKIP = SpeculationConfig(method=LayerSkip(), tree=(2, 1))
#: A delta rule and a scan of Mamba-2 in whole passes of the kernels, and a delta rule and Mamba under transformers.
KINDS = ("qwen3_next", "granitemoehybrid", "olmo_hybrid", "mamba")
#: The third one takes most of the time. It belongs to changes of what keeps states and of what loads families.
FEW = ("qwen3_next", "granitemoehybrid", "mamba")


def saved(family: str, folder: Path) -> str:
    return checkpoints.save(family, folder / family)


def load(path: str, **settings: Any) -> LLM:
    return LLM(path, **{"dtype": "float64", "block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 4, **settings})


def almost(text: tuple[int, ...]) -> tuple[int, ...]:
    """A prediction that goes wrong twice, so that drafts stand as a whole, in part, and not at all."""
    return tuple((token + (place in (9, 15))) % checkpoints.VOCAB_SIZE for place, token in enumerate(text))


#: Where a change may concern one family and no other.
OF_FAMILIES = (
    *("src/outrider/model/", "src/outrider/kernels/", "src/outrider/cache/"),
    "tests/model/checkpoints.py",
)


@pytest.mark.parametrize("family", core(checkpoints.RUNNING, (*FEW, "lfm2"), *OF_FAMILIES))
def test_writes_what_transformers_writes(family: str, tmp_path: Path) -> None:
    path = saved(family, tmp_path)
    want = checkpoints.greedy_by_transformers(path, PROMPT, 24)
    llm = load(path)
    for speculation in ("none", BRANCHES, PREDICTION):
        assert llm.generate(PROMPT, GREEDY, speculation=speculation, prediction=almost(want))[0].token_ids == want
    plain = llm.generate(PROMPT, SEEDED, speculation="none")[0].token_ids
    found = llm.generate(PROMPT, SEEDED, speculation=PREDICTION, prediction=almost(plain))[0].token_ids
    assert found == plain
    stats = llm.stats.finished
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_proposer_faults == 0


def test_layers_of_a_bamba_draft_for_it(tmp_path: Path) -> None:
    """Its first layers, and those that are left when some are skipped, go over states of the same layers."""
    path = saved("bamba", tmp_path)
    llm, want = load(path), checkpoints.greedy_by_transformers(path, PROMPT, 24)
    for speculation in (EXIT, SKIP):
        (output,) = llm.generate(PROMPT, GREEDY, speculation=speculation)
        assert output.token_ids == want
        assert 0 < output.stats.num_accepted_tokens < output.stats.num_draft_tokens
    assert llm.stats.finished.num_proposer_faults == 0


@pytest.fixture(scope="module", params=core(KINDS, FEW, *OF_FAMILIES))
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model of every kind, which drafts for itself, with memory for two texts that share nothing."""
    path = saved(request.param, tmp_path_factory.mktemp(request.param))
    return load(path, draft_model=path, kv_cache_tokens=80, prefix_caching=False)


def audited(llm: LLM, num_texts: int = 5) -> tuple[CacheAudit, list[BaseException]]:
    """Texts of all lengths at a time, with drafts of all kinds, samples and preemptions, and what has failed of them."""
    text = llm.generate(PROMPT, GREEDY, speculation="none")[0].token_ids
    trees = SpeculationConfig(method=DraftModel(), tree=(2, 1))
    requests = []
    for place, way in enumerate([PREDICTION, trees, EXIT, SKIP, BRANCHES][:num_texts]):
        params = SamplingParams(temperature=0, max_tokens=16, n=1 + (place == 2))
        options = RequestOptions(prediction=almost(text))
        requests.append(llm.engine.add_request(tuple(PROMPT[: 23 - 3 * place]), params, llm.resolve(way), options))
    audit = CacheAudit(llm.engine)
    audit.run()
    return audit, [request.error for request in requests if request.error is not None]


def test_states_are_those_of_a_fresh_prefill(llm: LLM) -> None:
    llm.stats.reset()
    (audit, errors), stats = audited(llm), llm.stats.finished
    assert not errors
    assert audit.num_checked > 40
    assert stats.num_preemptions > 0
    assert stats.num_proposer_faults == 0
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    # Where bits are a function of the text, they are the same bits.
    assert audit.worst <= (0 if llm.engine.runner.backend.invariant else KV_BOUND)


def test_a_draft_model_with_a_state_rolls_back(llm: LLM) -> None:
    """A model that drafts for itself is always right, and a state that is wrong shows in what is accepted alone."""
    chain = SpeculationConfig(method=DraftModel(), num_draft_tokens=4)
    for output in llm.generate([PROMPT, PROMPT[:9]], GREEDY, speculation=chain):
        assert output.stats.num_draft_tokens == output.stats.num_accepted_tokens > 12
    tree = SpeculationConfig(method=DraftModel(), tree=(2, 1, 1))
    stats = llm.generate(PROMPT, GREEDY, speculation=tree)[0].stats
    assert stats.num_accepted_tokens >= 3 * (stats.num_drafts - 1) > 9


def _siblings_in_a_row(patch: pytest.MonkeyPatch) -> None:
    """Under transformers, and in the kernels."""
    patch.setattr(StateRows, "parent", lambda _, row: row - 1)
    patch.setattr(Segment, "row_parents", property(lambda segment: range(-1, segment.num_rows - 1)))


def _unmoved(record: CellRecord, *_: Any) -> CellRecord:
    return record


def _one_more(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rows of the last pass stay, whether they stand or not."""

    def state_at(record: CellRecord, position: int) -> Tensor:
        return record.anchors[-1].state if position else real(record, position)

    return state_at


def _written(real: Callable[..., Any]) -> Callable[..., Any]:
    """A pass writes its rows into the state before they stand."""

    def of(cls: Any, state: Any, token_ids: Any, start: int, *args: Any, **rest: Any) -> Any:
        return real(state, token_ids, start, *args, **{**rest, "certain": start + len(token_ids)})

    return of


#: What other engines have shipped, each as a change of one function.
BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "siblings of a tree follow each other": _siblings_in_a_row,
    "rejected rows of a tree stay": lambda patch: patch.setattr(CellRecord, "lined_up", _unmoved),
    "rejected rows of a chain stay": lambda patch: patch.setattr(CellRecord, "state_at", _one_more(CellRecord.state_at)),
    "a pass writes what it reads": lambda patch: patch.setattr(Segment, "of", classmethod(_written(Segment.of))),
    "the window of a convolution is left out": lambda patch: patch.setattr(
        Convolution, "replay", lambda _, state, tape: torch.zeros_like(state)
    ),
    "accepted rows are not applied": lambda patch: patch.setattr(Recurrence, "replay", lambda _, state, tape: state),
    "a preempted text keeps its states": lambda patch: patch.setattr(RunningText, "clear", lambda _: None),
    "texts share one state": lambda patch: patch.setattr(
        SequenceState, "running", property(lambda state: _shared, lambda state, _: None), raising=False
    ),
}
_shared = RunningText()


#: Each bug under transformers or in the kernels.
PLANTED = product(("olmo_hybrid", "qwen3_next"), BUGS)


@pytest.mark.parametrize(("llm", "bug"), core(PLANTED, (), *OF_FAMILIES, "src/outrider/lab/prove/"), indirect=["llm"])
def test_a_planted_bug_is_caught(llm: LLM, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    scheduler = llm.engine.scheduler
    try:
        audit, errors = audited(llm, 3)
    except AssertionError as error:  # of a record that is asked for what it does not hold
        llm.engine.rebuild({seq.request for seq in (*scheduler.running, *scheduler.waiting)}, error)
        return
    assert errors or audit.worst > 100 * KV_BOUND


def test_a_state_that_is_kept_in_an_unknown_way_is_refused(tmp_path: Path) -> None:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    shape = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**shape, **ends)).save_pretrained(tmp_path / "griffin")
    with pytest.raises(UnsupportedModelError, match=r"\(linear_attention\) that is kept in a way unknown"):
        load(str(tmp_path / "griffin"))


#: One attention with the number -1 serves both of these layers, and so there is one place for the keys of both.
_HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
#: Types that keep states in ways of their own, with what a refusal says.
REFUSED = {
    "minimax": ({"num_key_value_heads": 2, "num_local_experts": 4}, r"\(linear_attention\) that is kept in a way unknown"),
    "rwkv": ({"attention_hidden_size": 32, "context_length": 64}, "does not take a custom attention function"),
    "xlstm": ({"num_heads": 4, "chunk_size": 16}, "logits differ"),
    "zamba2": (
        {"layers_block_type": _HYBRID, "num_key_value_heads": 4, "n_mamba_heads": 4, "mamba_d_state": 8},
        "logits differ",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_types_that_keep_states_in_their_own_ways_are_refused(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    config = AutoConfig.for_model(kind, **shape, **REFUSED[kind][0])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind][1]):
        load(str(tmp_path / kind))


@pytest.mark.parametrize("bug", ["siblings of a tree follow each other", "rejected rows of a tree stay"])
def test_the_probe_refuses_a_state_that_drafts_corrupt(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("olmo_hybrid", tmp_path)
    BUGS[bug](monkeypatch)
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        load(path)


def _fails(*_: Any) -> None:
    raise ZeroDivisionError


#: A pass under transformers that fails on its way, and passes of the kernels that fail when all is computed.
FAILURES: dict[str, tuple[Any, str]] = {
    "olmo_hybrid": (Recurrence, "run"),
    **dict.fromkeys(("qwen3_next", "lfm2"), (RunningPass, "keep")),
}


@pytest.mark.parametrize("family", FAILURES)
def test_a_pass_that_fails_leaves_the_states_as_they_were(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(saved(family, tmp_path)).engine.runner
    state = runner.memory.room_for(23)
    runner.forward([Segment.of(state, PROMPT[:9], 0, certain=9)])
    state.commit(0, range(9))
    want = runner.forward([Segment.of(state, PROMPT[9:14], 9)]).logits
    owner, name = FAILURES[family]
    monkeypatch.setattr(owner, name, _fails)
    with pytest.raises(ZeroDivisionError):
        runner.forward([Segment.of(state, PROMPT[14:], 9, certain=18)])
    monkeypatch.undo()
    assert torch.equal(runner.forward([Segment.of(state, PROMPT[9:14], 9)]).logits, want)


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_states_do_not_depend_on_the_number_of_threads(family: str, tmp_path: Path) -> None:
    """Rows of a text go to several threads, and each adds up inputs of rows that others have brought."""
    runner, threads, found = load(saved(family, tmp_path)).engine.runner, torch.get_num_threads(), []
    try:
        for count in (1, 3, 4):
            torch.set_num_threads(count)
            state = runner.memory.room_for(60)
            out = runner.forward([Segment.of(state, [*PROMPT, *PROMPT], 0)]).logits
            states = [record.state_at(46) for _, record in sorted(state.running.records.items())]
            found.append(torch.cat([out.flatten(), *(each.flatten() for each in states)]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_passes_are_timed_at_any_place(tmp_path: Path) -> None:
    timer = PassTimer(load(saved("qwen3_next", tmp_path)).engine.runner, 30)
    timer.compute(20)
    assert all(timer.seconds(start, 3, logits=True) > 0 for start in (20, 4, 11))
