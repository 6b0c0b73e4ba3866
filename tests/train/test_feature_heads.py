"""EAGLE heads that are trained: they compute what they will compute in the engine, learn, and go on to the bit."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.errors import (
    ContradictionError,
    HeadMismatchError,
    InputError,
    InvalidParameterError,
    ModelLoadError,
    OutriderError,
    StorageError,
    UnsupportedModelError,
)
from outrider.heads.block import BlockRunner
from outrider.heads.formats import writing
from outrider.heads.formats.folder import AUX_LAYERS
from outrider.heads.formats.published import read_head
from outrider.kernels.formats import FORMATS
from outrider.lab.convert.compressed_tensors import write_compressed
from outrider.lab.prove.tiny_heads import _NVIDIA, save_random_dflash, save_random_eagle
from outrider.lab.train import losses
from outrider.lab.train.batches import Batch, in_turn, load_data
from outrider.lab.train.blocks import DflashSettings, DsparkSettings
from outrider.lab.train.collect import Source, collect
from outrider.lab.train.features import Eagle1Settings, Eagle3Settings, FeatureHeadSettings, _any_rows
from outrider.lab.train.losses import LOSSES, Depth, Law, Said, depth_loss, divergence
from outrider.lab.train.run import Job, head_learning, train_heads
from outrider.lab.train.settings import TrainSettings, frequent_tokens
from outrider.lab.train.target import FrozenTarget
from outrider.lab.train.trainer import by_position
from outrider.propose.base import ProposeRequest
from outrider.propose.beside_target import ProposerBesideTarget
from outrider.records import DataSettings, read_manifest
from tests.model import checkpoints
from tests.model.block_reference import BlockReference
from tests.model.eagle_reference import Eagle1Reference, EagleReference
from tests.train.drafted_rows import assert_drafts_as, disturb
from tests.train.markov import LAYERS, VOCAB, save_data
from tests.train.test_training import KillAt, Killed

pytest.importorskip("accelerate")

SETTINGS = TrainSettings(
    steps=40,
    batch_size=8,
    lr=1e-2,
    precision="fp32",
    evaluate_every=40,
    engine_prompts=4,
    engine_tokens=16,
    num_draft_tokens=3,
)
HEAD = Eagle3Settings(unroll=3, draft_vocab=20, feed_forward=32)
OTHERS = (
    Eagle1Settings(unroll=3, feed_forward=32),
    DflashSettings(own_layers=1, block_size=4, feed_forward=32),
    DsparkSettings(own_layers=1, block_size=3, feed_forward=32, markov_rank=8),
)


@pytest.fixture
def job(target: str, data: Path, tmp_path: Path) -> Job:
    return Job(data, tmp_path / "out", target, "float32", SETTINGS)


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(read_head(str(folder)).network.state_dict())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(HEAD, id="eagle3", marks=pytest.mark.core),
        pytest.param(OTHERS[0], id="eagle1", marks=pytest.mark.slow),  # eagle3 with less
        pytest.param(OTHERS[1], id="dflash", marks=pytest.mark.core),
        pytest.param(OTHERS[2], id="dspark", marks=pytest.mark.core),
    ],
)
def test_a_head_learns_what_comes_and_the_engine_accepts_it(job: Job, kind: Any) -> None:
    found = train_heads(job, kind)
    assert found.before.tau < (1.8 if kind.method == "dspark" else 1.5)  # its first row reads the last token of the text
    # EAGLE-3 drafts 20 of the 24 tokens here, which come equally often; drafts meet those that it does not know.
    assert min(found.best.acceptance) > 0.55
    assert found.stats is not None
    assert found.stats.mean_acceptance_length > 2.3
    assert (job.out / "README.md").read_text().startswith(f"# {kind.method.capitalize()} head for")
    with LLM(job.target, dtype="float32", speculation={"method": kind.method, "model": str(job.out)}) as llm:
        assert llm.generate([[1, 2]], SamplingParams(seed=1, max_tokens=60))[0].stats.mean_acceptance_length > 1.9


def test_a_training_in_bf16_says_nothing_of_how_norms_are_computed(job: Job) -> None:
    settings = TrainSettings(steps=1, batch_size=4, precision="bf16", evaluate_every=1, engine_prompts=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train_heads(replace(job, settings=settings), HEAD)


def test_a_confidence_head_says_how_often_places_stand(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    train_heads(job, OTHERS[2])
    said: list[float] = []
    stock = BlockRunner.go_on

    def watched(self: Any, *args: Any, **how: Any) -> Any:
        found = stock(self, *args, **how)
        said.append(float(found[2].mean()))
        return found

    monkeypatch.setattr(BlockRunner, "go_on", watched)
    speculation = {"method": "dspark", "model": str(job.out), "num_draft_tokens": 1}
    with LLM(job.target, dtype="float32", speculation=speculation) as llm:
        llm.generate([[1, 2], [3]], SamplingParams(seed=1, max_tokens=150))
        assert len(said) > 50
        assert sum(said) / len(said) == pytest.approx(llm.stats.finished.acceptance_rate, abs=0.1)


@pytest.mark.parametrize(
    "kind", [HEAD, *(each.replace(draft_vocab=20) for each in OTHERS[1:])], ids=lambda kind: kind.method
)
def test_a_head_of_some_tokens_says_which(job: Job, kind: Any) -> None:
    train_heads(replace(job, settings=SETTINGS.replace(steps=1, engine_prompts=2)), kind)
    head = read_head(str(job.out))
    chosen = frequent_tokens(job.data, read_manifest(job.data), 20).tokens
    assert head.tokens is not None
    assert chosen is not None
    assert torch.equal(head.tokens, chosen)
    assert kind is not HEAD or head.config.layers_of(LAYERS) == (1, 2, 3)
    assert "| tokens that it drafts | 20 |" in (job.out / "README.md").read_text()


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        pytest.param(Eagle3Settings(), EagleReference, id="eagle3"),
        pytest.param(Eagle3Settings(draft_vocab=6), EagleReference, id="eagle3, some tokens"),
        pytest.param(Eagle1Settings(), Eagle1Reference, id="eagle1"),
        pytest.param(DflashSettings(block_size=4), BlockReference, id="dflash"),
        pytest.param(DflashSettings(block_size=4, draft_vocab=6), BlockReference, id="dflash, some tokens"),
        pytest.param(DsparkSettings(block_size=3, markov_rank=8), BlockReference, id="dspark"),
        pytest.param(DsparkSettings(block_size=3, markov_rank=8, markov_head="gated"), BlockReference, id="dspark, gated"),
        pytest.param(DsparkSettings(block_size=3, markov_rank=8, draft_vocab=6), BlockReference, id="dspark, some tokens"),
        pytest.param(DsparkSettings(block_size=3, markov_rank=8, markov_head="rnn"), BlockReference, id="dspark, rnn"),
    ],
)
def test_each_draft_token_is_made_as_in_the_engine(tmp_path: Path, kind: FeatureHeadSettings, reference: Any) -> None:
    """Against a reference that knows the published format alone, and computes one draft after the other."""
    path = checkpoints.save("llama", tmp_path / "target", seed=3)
    frozen, data = FrozenTarget(path, "float32"), save_data(tmp_path / "data", path, temperature=0.7)
    trained = kind.trainee(frozen, read_manifest(data), data, SETTINGS)
    disturb(trained)
    trained.save(tmp_path / "head")
    assert_drafts_as(trained, frozen, lambda: reference(str(tmp_path / "head"), frozen.model).logits)


#: Random heads as they are published, by the method that drafts with them: how each is written, and what reads it here.
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}
READ: dict[str, Any] = {AUX_LAYERS: [1, 2, 3]}
PUBLISHED: dict[str, tuple[str, Any, Any]] = {
    "eagle1": ("eagle1", partial(save_random_eagle, layout="safeailab1"), Eagle1Reference),
    "eagle1, own embedding": (
        "eagle1",
        partial(save_random_eagle, layout="safeailab1", own_embedding=True, bias=False),
        Eagle1Reference,
    ),
    "eagle3, nvidia": (
        "eagle3",
        partial(save_random_eagle, layout="nvidia", eagle_config={**_NVIDIA, AUX_LAYERS: [0, 1, 2]}),
        EagleReference,
    ),
    "eagle3, some tokens": (
        "eagle3",
        partial(save_random_eagle, layout="safeailab", **READ, draft_tokens=tuple(range(1, 24, 3))),
        EagleReference,
    ),
    "eagle3, norms": (
        "eagle3",
        partial(save_random_eagle, layout="speculators", **READ, norm_before_residual=True, fc_norm=True, norm_output=True),
        EagleReference,
    ),
    "eagle3, narrow": (
        "eagle3",
        partial(
            save_random_eagle,
            layout="speculators",
            **READ,
            own_embedding=True,
            sizes={"hidden_size": 24, "head_dim": 12},
            target_hidden_size=32,
        ),
        EagleReference,
    ),
    "dflash": ("dflash", save_random_dflash, BlockReference),
    "dflash, window": ("dflash", partial(save_random_dflash, layout="speculators", sizes=SLIDING), BlockReference),
    "dflash, window both ways": (
        "dflash",
        partial(save_random_dflash, layout="speculators", sizes=SLIDING, sliding_window_non_causal=True),
        BlockReference,
    ),
    "dspark": ("dspark", partial(save_random_dflash, layout="deepspec", markov_head_type="rnn"), BlockReference),
    "dspark, no sequential head": (
        "dspark",
        partial(save_random_dflash, layout="deepspec", markov_rank=0, confidence_head_with_markov=False),
        BlockReference,
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_head_goes_on_to_learn(tmp_path: Path, name: str) -> None:
    """What it drafts in training is what a reference makes of the published files, and of those that it is written to."""
    method, write, reference = PUBLISHED[name]
    path = checkpoints.save("llama", tmp_path / "target", seed=3)
    begun = write(tmp_path / "begun", path)
    data = save_data(tmp_path / "data", path, temperature=0.7)
    frozen = FrozenTarget(path, "float32")
    trained: Any = head_learning(method, {"init": begun}).trainee(frozen, read_manifest(data), data, SETTINGS)
    trained.save(tmp_path / "same")
    before, after = weights(Path(begun)), weights(tmp_path / "same")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    disturb(trained)
    trained.save(tmp_path / "head")
    assert_drafts_as(trained, frozen, lambda: reference(str(tmp_path / "head"), frozen.model).logits)


@pytest.mark.parametrize("kind", [HEAD, *OTHERS], ids=lambda kind: kind.method)
def test_a_head_goes_on_from_an_earlier_one(job: Job, kind: Any) -> None:
    how = SETTINGS.replace(steps=8, evaluate_every=8, engine_prompts=0)
    first = train_heads(replace(job, settings=how), kind)
    second = replace(job, out=job.out / "more", settings=how.replace(seed=1))
    found = train_heads(second, type(kind)(init=str(job.out)))
    assert found.before.acceptance == pytest.approx(first.best.acceptance, abs=1e-5)
    assert found.best.tau > first.best.tau
    assert f"| begun with | {job.out.name} |" in (second.out / "README.md").read_text()
    assert read_head(str(second.out)).config.layer.intermediate_size == 32


def test_blocks_begin_at_some_rows() -> None:
    rows = torch.tensor([[False, True, True, True, True, True, True], [False, False, True, False, True, False, False]])
    torch.manual_seed(2)
    chosen = _any_rows(rows, 3)
    assert chosen.sum(1).tolist() == [3, 2]
    assert not (chosen & ~rows).any()
    assert len({tuple(_any_rows(rows, 3)[0].tolist()) for _ in range(20)}) > 5


@pytest.mark.parametrize(
    "kind",
    [HEAD, DflashSettings(block_size=4, blocks=3), DsparkSettings(block_size=3, blocks=3, markov_rank=8)],
    ids=lambda kind: kind.method,
)
def test_a_training_goes_on_to_the_bit(job: Job, kind: Any) -> None:
    settings = job.settings.replace(steps=7, evaluate_every=4, save_every=2, engine_prompts=0)
    whole, broken = (replace(job, out=job.out / name, settings=settings) for name in ("whole", "broken"))
    kind = kind.replace(loss="accepted_length")
    train_heads(whole, kind)
    with pytest.raises(Killed):
        train_heads(broken, kind, watcher=KillAt(6))
    assert not (broken.out / "config.json").exists()  # nothing that loads
    train_heads(broken, kind)
    one, other = weights(whole.out), weights(broken.out)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("last", ["write_tensors", "write_text"])
def test_a_full_disk_at_the_end_leaves_nothing_that_loads(job: Job, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(job, settings=SETTINGS.replace(steps=1, engine_prompts=0))

    def full(path: Path, *_: Any) -> None:
        raise StorageError(str(path), "No space left on device", "Free some space.")

    with monkeypatch.context() as patch:
        patch.setattr(writing, last, full)
        with pytest.raises(StorageError, match="No space left"):
            train_heads(here, HEAD)
    with pytest.raises(ModelLoadError, match=r"it has no config\.json"):
        read_head(str(here.out))
    train_heads(here, HEAD)
    assert read_head(str(here.out)).config.method == "eagle3"


def test_hidden_states_that_were_kept_teach_as_a_pass_does(target: str, tmp_path: Path) -> None:
    sources = [Source(f"{i}", "prompt", [i, (i * 5) % VOCAB]) for i in range(VOCAB)]
    asked = DataSettings(max_tokens=12, held_out=0.3, hidden_states=(1, 2, 3, LAYERS))
    collect(sources, tmp_path / "data", asked, target=target, dtype="float32")
    found = []
    for teacher in ("forward", "hidden_states"):
        settings = SETTINGS.replace(teacher=teacher, steps=4, evaluate_every=2, engine_prompts=0)
        here = Job(tmp_path / "data", tmp_path / teacher, target, "float32", settings)
        found.append(train_heads(here, HEAD).progress.measurements)
    for one, other in zip(*found, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-3)
        assert one.acceptance == pytest.approx(other.acceptance, abs=1e-3)


def test_the_laws_of_a_target_with_rounded_weights_are_learnt(job: Job, tmp_path: Path) -> None:
    rounded = write_compressed(str(job.target), tmp_path / "rounded", FORMATS["int8"])
    here = replace(job, target=str(rounded), settings=SETTINGS.replace(steps=1, engine_prompts=2))
    found = train_heads(here, HEAD)
    assert found.stats is not None
    assert found.stats.num_target_passes > 0
    batch = next(in_turn(load_data(job.data, length=512).held_out, 2))
    one, other = (FrozenTarget(str(name), "float32").logits(batch.token_ids) for name in (rounded, job.target))
    assert 0 < float((one - other).abs().max()) < 0.5


def test_the_most_frequent_tokens_of_the_training_texts_are_drafted(data: Path) -> None:
    manifest = read_manifest(data)
    counts = [0] * VOCAB
    for piece in load_data(data, length=512).train:
        for token in piece.token_ids[piece.num_prompt_tokens :].tolist():
            counts[token] += 1
    expected = sorted(range(VOCAB), key=lambda token: (-counts[token], token))[:10]
    found = frequent_tokens(data, manifest, 10)
    assert found.tokens is not None
    assert found.tokens.tolist() == sorted(expected)
    assert found.share == pytest.approx(sum(counts[token] for token in expected) / sum(counts))
    assert frequent_tokens(data, manifest, VOCAB).tokens is None


def said_of(batch: Batch, logits: Tensor, temperature: float, tokens: Tensor | None = None) -> Said:
    """What is said of a batch by logits [num_texts, num_tokens, vocab_size]."""
    rows = logits.flatten(0, 1)
    return Said(batch, lambda some, of: rows[some] if of is None else rows[some][:, of], temperature, tokens)


@pytest.mark.core
def test_losses_of_a_head_that_knows_some_tokens() -> None:
    target, draft = torch.tensor([[1.0, 0.5, -1.0, 2.0]]), torch.tensor([[0.3, -0.7]])
    tokens, p, q = torch.tensor([0, 3]), target.softmax(-1)[0], draft.softmax(-1)[0]
    known = p[tokens] / p[tokens].sum()
    batch = Batch(torch.tensor([[1, 0, 3]]), torch.tensor([3]), torch.tensor([1]))
    # What the second row says of the third token is compared with what is drafted two tokens ahead of the first row.
    logits = torch.cat([torch.zeros(1, 4), target, torch.zeros(1, 4)])[None]

    def said(temperature: float, draft: Tensor = draft) -> tuple[Said, Depth]:
        return said_of(batch, logits, temperature, tokens), Depth(draft, torch.tensor([[True, False, False]]), 2)

    def accepted(*arguments: Any) -> float:
        found, depth = said(*arguments)
        return float(found.overlap(depth))

    loss = {name: float(depth_loss(name, [said(1.0)[1]], said(1.0)[0], 1.0)) for name in LOSSES}
    assert loss["forward_kl"] == pytest.approx(float((known * (known / q).log()).sum()), abs=1e-6)
    assert loss["cross_entropy"] == pytest.approx(-math.log(q[1]), abs=1e-6)
    assert float(divergence("cross_entropy", Law(target), draft, torch.tensor([2]), 1.0, tokens)) == 0.0
    expected = float(torch.minimum(p[tokens], q).sum())
    assert accepted(1.0) == pytest.approx(expected, abs=1e-6)
    assert loss["total_variation"] == pytest.approx(1 - expected, abs=1e-6)
    half = torch.minimum((target[0] / 0.5).softmax(-1)[tokens], (draft[0] / 0.5).softmax(-1))
    assert accepted(0.5) == pytest.approx(float(half.sum()), abs=1e-6)
    assert accepted(0.0, -draft) == 1.0
    assert accepted(0.0) == 0.0
    logits[0, 1, 1] = 3.0  # a token that the head does not know is the most likely one
    assert accepted(0.0, -draft) == 0.0


def test_the_accepted_length_counts_a_token_where_those_before_it_stand() -> None:
    texts = torch.tensor([[0, 1, 1, 0]])
    batch = Batch(texts, torch.tensor([4]), torch.tensor([1]))
    said = said_of(batch, torch.zeros(1, 4, 2), 1.0)  # the target gives both tokens a half
    rows = [torch.tensor([[False, True, True, False]]), torch.tensor([[False, True, False, False]])]
    sure = torch.tensor([[99.0, 0.0]])  # and stands with a chance of a half
    depths = [Depth(torch.cat([sure, torch.zeros(1, 2)]), rows[0], 1), Depth(sure, rows[1], 2)]
    expected = [(0.5 + 0.25) / 2, 1.0]
    assert float(depth_loss("accepted_length", depths, said, 1.0)) == pytest.approx(
        -(math.log(expected[0]) + math.log(expected[1])) / 2, abs=1e-5
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", [*LOSSES, "accepted_length"])
def test_losses_and_gradients_of_a_few_rows_at_a_time_are_those_of_all_rows(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    texts = torch.randint(12, (2, 9))
    batch = Batch(texts, torch.tensor([9, 7]), torch.tensor([2, 3]))
    logits, tokens = torch.randn(2, 9, 12), torch.tensor([0, 1, 3, 5, 8, 10])
    said = said_of(batch, logits, temperature, tokens)
    rows = [batch.drafts(ahead) for ahead in (1, 2)]
    drafted = [torch.randn(int(each.sum()), 6, requires_grad=True) for each in rows]
    depths = [Depth(logits, each, ahead) for ahead, (logits, each) in enumerate(zip(drafted, rows, strict=True), 1)]

    def learnt() -> tuple[Tensor, ...]:
        loss = depth_loss(name, depths, said, 0.5)
        return loss.detach(), *torch.autograd.grad(loss, drafted)

    monkeypatch.setattr(losses, "in_pieces", lambda logits, losses_of: losses_of(logits, slice(None)))
    whole = learnt()
    monkeypatch.undo()
    monkeypatch.setitem(losses._PIECE, "cpu", 4 * 6)  # four rows
    monkeypatch.setattr(losses, "_ROWS", 5)
    said = said_of(batch, logits, temperature, tokens)
    for found, expected in zip(learnt(), whole, strict=True):
        torch.testing.assert_close(found, expected)
        assert expected.any()


@pytest.mark.parametrize(
    "settings",
    [{"layers": (3, 1)}, {"layers": (1, LAYERS)}, {"layers": ()}, {"draft_vocab": 1}, {"unroll": 0}, {"loss": "hinge"}],
)
def test_heads_that_cannot_be_are_refused_before_any_work(job: Job, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        train_heads(job, Eagle3Settings(**settings))
    assert not job.out.exists()


@pytest.mark.parametrize("settings", [{"mask_token": VOCAB}, {"block_size": 1}, {"own_layers": 0}, {"layers": (4,)}])
def test_blocks_that_cannot_be_are_refused_before_any_work(job: Job, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        train_heads(job, DflashSettings(**settings))
    assert not job.out.exists()


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"init": "nowhere"}, r"model='nowhere': no such folder"),
        ({"method": "eagle1"}, r"init=.*method='eagle3'.*outrider train eagle3"),
        ({"method": "dflash"}, r"init=.*method='eagle3'.*outrider train eagle3"),
        ({"draft_vocab": 10}, r"draft_vocab=10: the head in .* has 20\. Leave it out"),
        ({"feed_forward": 16}, r"feed_forward=16: the head in .* has 32"),
        ({"layers": (1, 2)}, r"layers=\(1, 2\): the head in .* has \(1, 2, 3\)"),
    ],
)
def test_a_head_that_training_cannot_begin_with_is_refused(job: Job, asked: dict[str, Any], problem: str) -> None:
    train_heads(replace(job, settings=SETTINGS.replace(steps=1, engine_prompts=0)), HEAD)
    more = replace(job, out=job.out / "more")
    with pytest.raises(OutriderError, match=problem):
        train_heads(more, head_learning(asked.pop("method", "eagle3"), {"init": str(job.out), **asked}))
    assert not more.out.exists()


def test_a_head_of_another_target_is_refused(job: Job, tmp_path: Path) -> None:
    other = checkpoints.save("llama", tmp_path / "other", seed=3)
    begun = save_random_eagle(tmp_path / "head", other, "speculators", **READ)
    with pytest.raises(HeadMismatchError, match=r"made for a target with hidden_size=32, and .* has 64"):
        train_heads(job, Eagle3Settings(init=begun))
    assert not job.out.exists()


def test_a_head_that_could_not_be_written_is_refused_before_any_work(job: Job) -> None:
    assert job.target is not None
    begun = save_random_dflash(job.out / "begun", job.target, is_causal=True)
    with pytest.raises(UnsupportedModelError, match="the format of speculators cannot say"):
        train_heads(replace(job, out=job.out / "more"), DflashSettings(init=begun))
    assert not (job.out / "more").exists()


def test_pieces_and_data_that_do_not_reach_are_refused(job: Job) -> None:
    with pytest.raises(InvalidParameterError, match=r"length=4.*4 tokens ahead.*Use 5 or more"):
        train_heads(replace(job, settings=SETTINGS.replace(length=4)), HEAD)
    with pytest.raises(ContradictionError, match=r"layers \[1, 2, 3, 4\], and the data hold \[\]"):
        train_heads(replace(job, settings=SETTINGS.replace(teacher="hidden_states")), HEAD)


@pytest.mark.core
def test_what_is_measured_is_what_the_engine_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head learns from all rows that have a feature before them. The engine first asks it behind the first token that the
    target wrote, and so do measurements."""
    path = checkpoints.save("llama", tmp_path / "target", seed=3)
    frozen, data = FrozenTarget(path, "float32"), save_data(tmp_path / "data", path)
    trained: Any = Eagle1Settings(unroll=2).trainee(frozen, read_manifest(data), data, SETTINGS.replace(num_draft_tokens=2))
    trained.save(tmp_path / "head")
    wanted: list[list[Tensor]] = []
    made = trained.module.forward
    trained.module.forward = lambda *args: wanted.append(args[2]) or made(*args)
    batch = Batch(torch.arange(9)[None], torch.tensor([9]), torch.tensor([4]))
    for asked in (trained.loss, trained.tally):
        asked(trained.module, batch)
    learnt, measured = ([rows[0].nonzero()[:, 0].tolist() for rows in depths] for depths in wanted)
    assert learnt == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6]]
    assert measured == [[4, 5, 6, 7], [4, 5, 6]]

    behind: list[int] = []
    propose = ProposerBesideTarget._growth

    def seen(self: ProposerBesideTarget, request: ProposeRequest, *args: int) -> Any:
        behind.append(len(request.sequence.token_ids) - 1)
        return propose(self, request, *args)

    monkeypatch.setattr(ProposerBesideTarget, "_growth", seen)
    with LLM(path, dtype="float32", speculation={"method": "eagle1", "model": str(tmp_path / "head")}) as llm:
        llm.generate([[0, 1, 2, 3]], SamplingParams(temperature=0, max_tokens=5))
    assert min(behind) == measured[0][0]


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        pytest.param(HEAD.replace(draft_vocab=12), 40, id="half of the tokens", marks=pytest.mark.core),
        pytest.param(OTHERS[1], 12, id="dflash"),
        pytest.param(OTHERS[2], 12, id="dspark"),
    ],
)
def test_a_training_measures_what_the_engine_counts(target: str, tmp_path: Path, kind: Any, steps: int) -> None:
    """In texts that the engine wrote itself."""
    sources = [Source(f"{i}", "prompt", [i % VOCAB, (i * 5) % VOCAB]) for i in range(200)]
    asked = DataSettings(max_tokens=24, held_out=0.3)
    collect(sources, tmp_path / "data", asked, target=target, dtype="float32")
    settings = SETTINGS.replace(steps=steps, evaluate_every=steps, engine_prompts=100, engine_tokens=24)
    found = train_heads(Job(tmp_path / "data", tmp_path / "out", target, "float32", settings), kind)
    assert found.stats is not None
    for chance, tried, share in zip(
        found.best.acceptance, found.stats.tried_per_position, by_position(found.stats), strict=True
    ):
        assert abs(share - chance) < 3 * math.sqrt(chance * (1 - chance) / tried), f"of {tried} draft tokens"
    assert found.best.tau == pytest.approx(found.stats.mean_acceptance_length, abs=0.15)
