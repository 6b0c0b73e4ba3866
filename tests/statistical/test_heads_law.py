"""The joint distribution of LLM.generate where heads draft, with controls that must turn red."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.model.core import DRAFTING, core
from tests.statistical import planted

from outrider.lab.prove.engine import BOUND, EngineProof
from outrider.lab.prove.target_settings import HEADS_SETTINGS, SHARED_TARGET_LAYERS
from outrider.lab.prove.tiny import save_layered, save_tiny_llama
from outrider.lab.prove.tiny_heads import save_tiny_heads
from outrider.propose.base import Proposer
from outrider.propose.eagle import HeadProposer
from outrider.propose.parallel import BlockProposer
from outrider.propose.row_heads import RowHeadsProposer
from outrider.propose.staged import StagedProposer
from outrider.propose.trees import growth
from outrider.propose.trees.adaptive import FixedPace, JudgedChain

BY_NAME = {setting.name: setting for setting in HEADS_SETTINGS}


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProof]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    folder = tmp_path_factory.mktemp("heads")
    target = save_tiny_llama(folder / "target", 1, num_layers=SHARED_TARGET_LAYERS)
    heads, layered = save_tiny_heads(folder, target), save_layered(folder / "layered", SHARED_TARGET_LAYERS)
    yield EngineProof(target, save_tiny_llama(folder / "draft", 2), heads=heads, **layered)
    torch.set_num_threads(threads)


#: A rule reads the drafts of all heads alike, and so does a parameter: EAGLE-3 and draft models have them all. Shapes that
#: adapt, samples and the engine's choice are those of one kind of heads.
REPEATS = (
    *("Medusa, walk", "Medusa, temperature and filters", "Medusa, penalties", "Medusa, stop tokens", "Medusa, token"),
    *("Medusa, tree, recursive rejection", "Medusa, seeded", "Medusa, two samples", "Medusa, best-first tree"),
    *("Medusa, Sequoia's tree", "Medusa behind early exit", "the draft model behind Medusa"),
    *("blockwise, token", "blockwise, seeded", "blockwise, two samples"),
    *("exit, tree, recursive rejection", "exit, two samples", "exit behind Medusa", "exit in turns with early exit"),
    *("EAGLE-3, Sequoia's tree", "EAGLE-3 behind Medusa", "EAGLE-3, then the draft model"),
    *("EAGLE, seeded", "EAGLE, two samples"),
    *("MTP, seeded", "MTP, tree, recursive rejection", "MTP, two samples", "MTP, Sequoia's tree"),
    *(
        "DFlash, two samples",
        "DFlash, best-first tree",
        "DSpark, lengths by their worth, token",
        "the engine chooses, DSpark",
    ),
    *("P-EAGLE, block", "P-EAGLE, two samples", "P-EAGLE, best-first tree", "P-EAGLE, Sequoia's tree"),
    *("staged, Medusa's heads of the draft model", "the engine chooses, EAGLE-3"),
    *(f"merge of EAGLE-3 and the draft model, {rule}" for rule in ("block", "token")),
    *("merge of a tree of EAGLE-3 and EAGLE, token", "merge of MTP and the draft model", "merge of DFlash and EAGLE-3"),
)
#: What always runs: every kind of head once, and every way of a verification.
FEW = (
    *("Medusa, block", "blockwise, block", "exit, token", "EAGLE-2: the likeliest tokens first", "EAGLE-3, seeded"),
    *("EAGLE-3, two samples", "MTP, tree, traversal", "DFlash behind a lookup", "P-EAGLE behind a lookup"),
    *("DSpark, lengths by their worth, block", "the engine chooses, DFlash", "EAGLE-3 in turns with others"),
    *("merge of a tree of EAGLE-3 and EAGLE, block", "staged, EAGLE-3 of the draft model"),
    "staged, layers of the draft model's checkpoint",
)
#: Of proofs that the prover notices what is planted, whatever the engine does.
of_the_prover = pytest.mark.by_change("src/outrider/lab/prove/", "tests/statistical/")


@pytest.mark.parametrize("name", core(BY_NAME, FEW, *DRAFTING, slow=REPEATS))
def test_joint_distribution_of_generate(proof: EngineProof, name: str) -> None:
    proof.llm.stats.reset()
    assert proof.prove(BY_NAME[name], 3).measured <= BOUND
    stats = proof.llm.stats.finished
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0, "otherwise the proof would say nothing about drafts"
    assert stats.num_proposer_faults == 0
    named = str((BY_NAME[name].speculation, BY_NAME[name].turns))
    methods = ("eagle1", "eagle3", "mtp", "dflash", "dspark", "peagle")
    inside = {stage.split(".")[-1] for stage, count in stats.drafted_by_stage.items() if count}
    assert {method for method in methods if f"'{method}'" in named} <= {*stats.drafted_by_method} | inside
    assert ("staged" in named) == any(stats.drafted_by_stage.values()), "heads of the draft model have guessed"


@pytest.mark.parametrize("way", ["block", "seeded"])
def test_joint_distribution_where_rows_are_dear(proof: EngineProof, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Drafts end behind some drawn tokens, and go on behind others."""
    seen, stock = set[tuple[int, bool]](), JudgedChain.children

    def watched(self: JudgedChain, grown: Any, company: int) -> dict[int, int]:
        found = stock(self, grown, company)
        seen.add((len(grown.nodes), bool(found)))
        return found

    monkeypatch.setattr(JudgedChain, "children", watched)
    builders = proof.llm.engine.drafting.builders
    monkeypatch.setattr(builders, "_pace", FixedPace({1: 1.0, 64: 1.0 + 63 * 0.02}))
    assert proof.prove(BY_NAME[f"DSpark, lengths by their worth, {way}"], 3, faultless=True).passed
    assert seen >= {(1, True), (1, False)}


def test_every_setting_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(HEADS_SETTINGS)
    assert set(REPEATS) < set(BY_NAME)


@of_the_prover
@pytest.mark.parametrize(
    "name",
    [
        "Medusa, token",
        "Medusa, tree, traversal",
        "blockwise, block",
        "EAGLE-3, token",
        "EAGLE-3, tree, traversal",
        "DFlash, block",
        "DSpark, block",
        "P-EAGLE, block",
        "staged, the first layer of the draft model",
        "staged, EAGLE-3 of the draft model",
    ],
)
def test_control_drafts_that_are_dropped_for_what_they_are_are_faults(
    proof: EngineProof, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kinds = {
        "EAGLE-3": HeadProposer,
        "DFlash": BlockProposer,
        "DSpark": BlockProposer,
        "P-EAGLE": BlockProposer,
        "staged": StagedProposer,
    }
    kind: type[Proposer] = kinds.get(name.split(",")[0], RowHeadsProposer)
    stock = kind.propose

    def picky(self: Any, requests: Any, noise: Any) -> Any:
        drafts = stock(self, requests, noise)
        return [draft.first(0) if draft.token_ids[:1] == (2,) else draft for draft in drafts]

    monkeypatch.setattr(kind, "propose", picky)
    assert planted.is_a_fault(proof, BY_NAME[name])


@of_the_prover
@pytest.mark.parametrize("name", ["Medusa, block", "exit, token", "EAGLE-3, block", "DFlash, token", "P-EAGLE, token"])
def test_control_a_law_that_is_not_the_one_drawn_from_is_a_fault(
    proof: EngineProof, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Planted: what is reported is a softer row than the one that the token was drawn from."""
    stock = growth.Growth.draft

    def softer(self: growth.Growth) -> Any:
        draft = stock(self)
        if draft.draft_probs is not None:
            draft.draft_probs.sqrt_()
            draft.draft_probs.div_(draft.draft_probs.sum(-1, keepdim=True))
        return draft

    monkeypatch.setattr(growth.Growth, "draft", softer)
    assert planted.is_a_fault(proof, BY_NAME[name])


#: The draft model drafts here beside a stage of itself, whose heads guess what it writes.
BESIDE_ITSELF = "EAGLE-3 of the draft model and that model itself"


@of_the_prover
@pytest.mark.parametrize(
    "plant",
    [planted.opaque_on_collision, pytest.param(planted.one_test_a_token, marks=pytest.mark.slow)],
    ids=lambda plant: plant.__name__,
)
def test_control_a_token_that_a_stage_and_its_model_drew_has_two_tests(
    proof: EngineProof, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert proof.prove(BY_NAME[BESIDE_ITSELF], 3).measured > 1e-4


@of_the_prover
def test_control_a_guess_of_a_seeded_stage_that_is_not_what_the_target_draws(
    proof: EngineProof, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.a_guess_for_another_token(monkeypatch)
    assert proof.prove(BY_NAME["staged, a block of the draft model's head, seeded"], 3).measured > 1e-4
