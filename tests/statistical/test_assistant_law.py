"""The joint distribution of LLM.generate where an assistant of Gemma 4 drafts, or a DSpark head with layers of Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.model import checkpoints
from tests.model.core import DRAFTING, core
from tests.model.gemma_heads import save_gemma_head
from tests.model.test_assistants import mended_configurations, save_assistant
from tests.statistical import planted

from outrider.lab.prove.engine import BOUND, EngineProof
from outrider.lab.prove.settings import HEADS, LOOKUP, Setting, behind, in_ways, one
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.propose.assistant import AssistantProposer

ASSISTANT = {"method": "gemma4_assistant", "model": HEADS, "num_draft_tokens": 2}
DSPARK = {"method": "dspark", "model": HEADS, "num_draft_tokens": 2, "min_confidence": 0.0}
SETTINGS = {
    setting.name: setting
    for setting in (
        *in_ways("assistant", ASSISTANT, "block | token | seeded | temperature and filters | tree, traversal"),
        *in_ways("assistant", ASSISTANT, "tree, recursive rejection | best-first tree"),
        Setting("assistant, two samples", one(ASSISTANT), {"n": 2, "max_tokens": 3, "top_k": 2}),
        Setting("assistant behind a lookup", ASSISTANT, {"max_tokens": 4}, turns=behind(one(LOOKUP), ASSISTANT)),
        *in_ways("head", DSPARK, "block | token | seeded | tree, traversal"),
        Setting("head, by its chances", DSPARK | {"min_confidence": 0.2}),
        Setting("head behind a lookup", DSPARK, {"max_tokens": 4}, turns=behind(one(LOOKUP), DSPARK)),
    )
}
#: What always runs, and stands for the others.
FEW = (
    "assistant, block",
    "assistant, seeded",
    "assistant, tree, traversal",
    "assistant behind a lookup",
    "head, by its chances",
)
#: Settings of many paths. A token ends their texts but in the slow tier: each token is still drafted, tested and drawn.
LONG = ("assistant, two samples", "head behind a lookup")


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProof]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    folder = tmp_path_factory.mktemp("assistant")
    fields = {"vocab_size": 3, "vocab_size_per_layer_input": 3, "pad_token_id": None, "eos_token_id": None}
    target = checkpoints.save("gemma4_text", folder / "target", seed=3, **fields, bos_token_id=None)
    with mended_configurations():
        head = save_assistant(folder / "assistant", target)
    own = save_gemma_head(folder / "head", target, scale=0.7, block_size=3)
    heads = {"gemma4_assistant": head, "dspark": own}
    yield EngineProof(target, save_tiny_llama(folder / "draft", 2), heads=heads)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", core(SETTINGS, FEW, *DRAFTING))
def test_joint_distribution_of_generate(proof: EngineProof, name: str) -> None:
    proof.llm.stats.reset()
    setting = SETTINGS[name]
    if name in LONG:
        setting = replace(setting, params={**setting.params, "stop_token_ids": (1,)})
    assert proof.prove(setting, 3).measured <= BOUND
    stats = proof.llm.stats.finished
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0, "otherwise the proof would say nothing about drafts"
    assert stats.num_proposer_faults == 0
    assert stats.drafted_by_method["dspark" if name.startswith("head") else "gemma4_assistant"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_joint_distribution_of_texts_that_nothing_ends(proof: EngineProof, name: str) -> None:
    assert proof.prove(SETTINGS[name], 3).measured <= BOUND


@pytest.mark.by_change("src/outrider/lab/prove/", "tests/statistical/")  # the prover notices what is planted
def test_control_drafts_that_are_dropped_for_what_they_are_are_faults(
    proof: EngineProof, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = AssistantProposer.propose

    def picky(self: Any, requests: Any, noise: Any) -> Any:
        drafts = stock(self, requests, noise)
        return [draft.first(0) if draft.token_ids[:1] == (2,) else draft for draft in drafts]

    monkeypatch.setattr(AssistantProposer, "propose", picky)
    assert planted.is_a_fault(proof, SETTINGS["assistant, token"])
