"""The joint distribution of LLM.generate where the target's own layers draft, with controls that must turn red."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.statistical import planted

from outrider.lab.prove.engine import BOUND, EngineProof
from outrider.lab.prove.target_settings import SHARED_TARGET_LAYERS, SHARED_TARGET_SETTINGS
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.model import resumed_forward
from outrider.model.runner import PartialChain
from outrider.propose.own_layers import SharedLayersProposer

BY_NAME = {setting.name: setting for setting in SHARED_TARGET_SETTINGS}


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProof]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    folder = tmp_path_factory.mktemp("deep")
    target = save_tiny_llama(folder / "target", 1, num_layers=SHARED_TARGET_LAYERS)
    yield EngineProof(target, save_tiny_llama(folder / "draft", 2))
    torch.set_num_threads(threads)


#: The same layers under a rule that reads their drafts as another does.
REPEATS = (
    *("early exit, tree, recursive rejection", "layer skip, tree, recursive rejection"),
    *("merge of early exit and the draft model, token", "merge of a tree and a chain of unlike laws, token"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in REPEATS else []) for name in BY_NAME]
)
def test_joint_distribution_of_generate(proof: EngineProof, name: str) -> None:
    proof.llm.stats.reset()
    assert proof.prove(BY_NAME[name], 3).measured <= BOUND
    stats = proof.llm.stats.finished
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0, "otherwise the proof would say nothing about drafts"
    assert stats.num_proposer_faults == 0
    chain_exits = "early exit" in name and "tree," not in name
    assert (proof.llm.stats.num_resumed_rows > 0) is chain_exits


def test_every_setting_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(SHARED_TARGET_SETTINGS)
    assert set(REPEATS) < set(BY_NAME)


@pytest.mark.parametrize("error", ["one layer late", "other hidden states", "rows in another order"])
def test_control_a_pass_that_resumes_wrongly_is_seen(
    proof: EngineProof, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    stock, stock_part = resumed_forward.resumed, resumed_forward.PartialPass
    monkeypatch.setattr(resumed_forward.TargetPass, "_is_exact", lambda self, depth: True)  # the probe would see it too

    def late(layers: tuple[int, ...], hidden: Any = None) -> Any:
        return stock_part(layers if hidden is None else layers[1:], hidden)

    def changed(rows: PartialChain | None) -> PartialChain | None:
        if rows is None:
            return None
        hidden = rows.hidden * 1.001 if error == "other hidden states" else rows.hidden.flip(0)
        return PartialChain(rows.depth, rows.start, rows.token_ids, rows.block_table, rows.long_rope, hidden)

    def spoilt(runner: Any, segments: Any, known: Any, *args: Any) -> Any:
        return stock(runner, segments, [changed(rows) for rows in known], *args)

    if error == "one layer late":
        monkeypatch.setattr(resumed_forward, "PartialPass", late)
    else:
        monkeypatch.setattr(resumed_forward, "resumed", spoilt)
    assert proof.prove(BY_NAME["early exit, block"], 3).measured > 1e-6


@pytest.mark.parametrize("name", ["early exit, token", "layer skip, tree, traversal"])
def test_control_drafts_that_are_dropped_for_what_they_are_are_faults(
    proof: EngineProof, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Dropping an unlikely draft for what it is: the classic error."""
    stock = SharedLayersProposer.propose

    def picky(self: Any, requests: Any, noise: Any) -> Any:
        drafts = stock(self, requests, noise)
        return [draft.first(0) if draft.token_ids[:1] == (2,) else draft for draft in drafts]

    monkeypatch.setattr(SharedLayersProposer, "propose", picky)
    assert planted.is_a_fault(proof, BY_NAME[name])
