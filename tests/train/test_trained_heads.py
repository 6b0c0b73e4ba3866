"""Heads learn the tokens that are as far ahead as they are asked for, and the engine accepts these; other offsets fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.errors import ContradictionError, HeadMismatchError, InputError, InvalidParameterError
from outrider.heads.checkpoint import load_heads
from outrider.heads.networks import randomise
from outrider.lab.train import losses
from outrider.lab.train.batches import in_turn, load_data
from outrider.lab.train.collect import Source, collect
from outrider.lab.train.heads import HeadSettings, TrainedHeads
from outrider.lab.train.run import Job, train_heads
from outrider.lab.train.settings import TrainSettings
from outrider.lab.train.target import FrozenTarget
from outrider.records import DataSettings, read_manifest
from tests.train.drafted_rows import followed
from tests.train.markov import LAYERS, VOCAB
from tests.train.test_training import KillAt, Killed

pytest.importorskip("accelerate")

SETTINGS = TrainSettings(
    steps=60, batch_size=8, lr=2e-2, precision="fp32", evaluate_every=20, save_every=10, engine_prompts=4, engine_tokens=16
)
KINDS = (
    HeadSettings(method="medusa", heads=3),
    HeadSettings(method="medusa", heads=3, output="target", blocks=2),
    HeadSettings(method="medusa", heads=3, width=32),
    HeadSettings(method="blockwise", heads=3, inner=48),
    HeadSettings(method="exit", layer=1),
    HeadSettings(method="exit", layer=2, width=32),
)
NAMES = ["medusa", "medusa-target", "medusa-narrow", "blockwise", "exit", "exit-narrow"]


@pytest.fixture
def job(target: str, data: Path, tmp_path: Path) -> Job:
    return Job(data, tmp_path / "out", target, "float32", SETTINGS)


#: One of each method.
CORE = ("medusa", "blockwise", "exit")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=[pytest.mark.core] if name in CORE else [])
        for kind, name in zip(KINDS, NAMES, strict=True)
    ],
)
def test_heads_learn_what_comes_and_the_engine_accepts_it(job: Job, kind: HeadSettings) -> None:
    job = replace(job, settings=job.settings.replace(num_draft_tokens=3))
    found = train_heads(job, kind)
    assert len(found.best.acceptance) == 3
    assert min(found.best.acceptance) > 0.8
    assert found.stats is not None
    assert found.stats.mean_acceptance_length > 2.3  # of 4 at most, over some 20 drafts that are drawn anew each time
    assert kind.method == "exit" or found.before.tau < 2
    own = {"method": kind.method, "model": str(job.out)}
    with LLM(job.target, dtype="float32", speculation=own) as llm:
        assert llm.generate([[1, 2]], SamplingParams(seed=1, max_tokens=60))[0].stats.mean_acceptance_length > 2.5
    assert (job.out / "README.md").read_text().startswith(f"# {kind.method.capitalize()} heads for")


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        pytest.param(KINDS[0], -1, id="medusa, before"),
        pytest.param(KINDS[0], 1, id="medusa, behind"),
        pytest.param(KINDS[3], -1, id="blockwise, before", marks=pytest.mark.slow),
        pytest.param(KINDS[3], 1, id="blockwise, behind"),
        pytest.param(KINDS[4], -1, id="exit, before"),
        pytest.param(KINDS[4], 1, id="exit, behind", marks=pytest.mark.slow),
    ],
)
def test_an_offset_that_is_wrong_by_one_yields_nothing(
    job: Job, kind: HeadSettings, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: each head learns the token before, or behind, the one that it will be asked for."""
    if kind.method == "exit" and wrong == -1:
        kind = kind.replace(loss="cross_entropy")  # the target says nothing of the first token
    shifted, taken = losses.shifted, losses._taken

    def wrong_tokens(values: Tensor, by: int) -> Tensor:
        return shifted(values, max(by + wrong, 0))

    def wrong_laws(values: Tensor, depth: losses.Depth, rows: slice) -> Tensor:
        return taken(values, depth._replace(ahead=max(depth.ahead + wrong, 1)), rows)

    measure = TrainedHeads.tally

    def honest(self: TrainedHeads, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "_taken", taken)
            return measure(self, *args)

    monkeypatch.setattr(losses, "shifted", wrong_tokens)
    monkeypatch.setattr(losses, "_taken", wrong_laws)
    monkeypatch.setattr(TrainedHeads, "tally", honest)
    found = train_heads(replace(job, settings=job.settings.replace(patience=0)), kind)
    last = found.progress.measurements[-1]
    assert max(last.acceptance) < 0.3
    assert last.tau < 1.4


@pytest.mark.core
def test_each_head_is_compared_with_the_target_where_it_speaks_of_the_same_token(job: Job) -> None:
    """By hand: head k behind row i is about token i + k + 2, which the target speaks of in row i + k + 1."""
    frozen = FrozenTarget(job.target, "float32")
    learning, settings = HeadSettings(method="medusa", heads=3), SETTINGS.replace(num_draft_tokens=3)
    trained = TrainedHeads(frozen, read_manifest(job.data), learning, settings)
    randomise(trained.module, seed=4, scale=1.0)  # type: ignore[arg-type]  # so that each token has a chance of its own
    batch = next(in_turn(load_data(job.data, length=512).held_out, 4))
    with torch.no_grad():
        found = trained.tally(trained.module, batch)
        stood, tried = torch.zeros(3).double(), torch.zeros(3).double()
        states, logits = frozen.states(batch.token_ids, [LAYERS])
        for text, (length, prompt) in enumerate(zip(batch.lengths.tolist(), batch.num_prompt_tokens.tolist(), strict=True)):
            chances = {}
            for row in range(prompt - 1, length):
                drafts = trained.module(states[LAYERS][text, row][None], frozen.head)[:, 0].softmax(-1)
                for head in range(3):
                    if row + head + 2 < length:
                        there = logits[text, row + head + 1].softmax(-1)
                        chances[row, head] = float(torch.minimum(there, drafts[head]).sum())
            of_text = followed(chances, prompt - 1, 3)
            stood, tried = stood + of_text[0], tried + of_text[1]
    torch.testing.assert_close(found.tried.double(), tried, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.stood.double(), stood, atol=1e-3, rtol=1e-3)


def test_a_head_that_drafts_token_by_token_makes_each_as_the_first(job: Job) -> None:
    frozen = FrozenTarget(job.target, "float32")
    learning, settings = HeadSettings(method="exit", layer=1), SETTINGS.replace(num_draft_tokens=2)
    trained = TrainedHeads(frozen, read_manifest(job.data), learning, settings)
    batch = next(in_turn(load_data(job.data, length=512).held_out, 1))
    with torch.no_grad():
        found = trained.tally(trained.module, batch)
        states, logits = frozen.states(batch.token_ids, [1, LAYERS])
        drafts = trained.module(frozen.norm(states[1][0]).float(), frozen.head)[0].softmax(-1)
        each = torch.minimum(logits[0].softmax(-1), drafts).sum(-1).tolist()
    prompt, length = int(batch.num_prompt_tokens[0]), int(batch.lengths[0])
    places = [(row, depth) for row in range(prompt, length) for depth in range(2) if row + depth + 1 < length]
    stood, tried = followed({(row, depth): each[row + depth] for row, depth in places}, prompt, 2)
    torch.testing.assert_close(found.tried.double(), tried, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.stood.double(), stood, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4]], ids=["medusa", "exit"])
def test_hidden_states_that_were_kept_teach_as_a_pass_does(target: str, tmp_path: Path, kind: HeadSettings) -> None:
    sources = [Source(f"{i}", "prompt", [i, (i * 5) % VOCAB]) for i in range(VOCAB)]
    asked = DataSettings(max_tokens=12, held_out=0.3, hidden_states=(1, LAYERS))
    collect(sources, tmp_path / "data", asked, target=target, dtype="float32")
    found = {}
    for teacher in ("forward", "hidden_states"):
        settings = SETTINGS.replace(teacher=teacher, steps=10, evaluate_every=5, engine_prompts=0)
        here = Job(tmp_path / "data", tmp_path / teacher, target, "float32", settings)
        found[teacher] = train_heads(here, kind).progress.measurements
    for one, other in zip(*found.values(), strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-3)
        assert one.acceptance == pytest.approx(other.acceptance, abs=1e-3)


def test_heads_go_on_to_the_bit(job: Job) -> None:
    job = replace(job, settings=job.settings.replace(steps=20, evaluate_every=5, engine_prompts=0))
    whole = replace(job, out=job.out.with_name("whole"))
    for kind in (KINDS[1], KINDS[3]):
        job, whole = (replace(each, out=each.out / kind.method) for each in (job, whole))
        train_heads(whole, kind)
        with pytest.raises(Killed):
            train_heads(job, kind, watcher=KillAt(13))
        train_heads(job, kind)
        one, other = (load_heads(each.out).network.state_dict() for each in (job, whole))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_target_does_not_learn(job: Job) -> None:
    frozen = FrozenTarget(job.target, "float32")
    before = {name: tensor.clone() for name, tensor in frozen.model.state_dict().items()}
    trained = TrainedHeads(frozen, read_manifest(job.data), KINDS[1], SETTINGS)
    batch = next(in_turn(load_data(job.data, length=512).train, 4))
    trained.loss(trained.module, batch).backward()
    assert all(parameter.grad is not None for parameter in trained.module.parameters())
    assert all(parameter.grad is None for parameter in frozen.model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in frozen.model.state_dict().items())


def test_heads_of_one_target_are_refused_by_another(job: Job, tmp_path: Path) -> None:
    from tests.model import checkpoints

    job = replace(job, settings=job.settings.replace(steps=2, engine_prompts=0))
    train_heads(job, KINDS[0])
    other = checkpoints.save("llama", tmp_path / "other", seed=3)
    with pytest.raises(HeadMismatchError, match="were made for"):
        LLM(other, dtype="float32", speculation={"method": "medusa", "model": str(job.out)})


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "medusa", "layer": 9},
        {"method": "medusa", "heads": 0},
        {"method": "medusa", "width": 32, "output": "target"},
        {"method": "exit", "layer": LAYERS + 1},
        {"method": "exit", "layer": LAYERS},
        {"method": "none"},
    ],
)
def test_heads_that_cannot_be_are_refused_before_any_work(job: Job, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        train_heads(job, HeadSettings(**settings))
    assert not job.out.exists()


@pytest.mark.parametrize(("method", "length"), [("medusa", 5), ("blockwise", 5)])
def test_pieces_that_are_shorter_than_heads_reach_are_refused(job: Job, method: Any, length: int) -> None:
    short = replace(job, settings=job.settings.replace(length=length))
    with pytest.raises(InvalidParameterError, match=r"length=5.*5 tokens ahead.*Use 6 or more"):
        train_heads(short, HeadSettings(method=method, heads=4))
    assert not job.out.exists()


def test_data_without_the_layers_are_refused(job: Job) -> None:
    for teacher in ("hidden_states", "top_k"):
        here = replace(job, settings=job.settings.replace(teacher=teacher))
        with pytest.raises(ContradictionError, match=r"hidden states of layers \[1, 4\], and the data hold \[\]"):
            train_heads(here, KINDS[4])
