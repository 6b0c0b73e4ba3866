"""The joint distribution of texts of models with a running state, with controls that must turn red."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.core import DRAFTING, core

from outrider.cache.running import CellRecord
from outrider.lab.prove.engine import BOUND, EngineProof
from outrider.lab.prove.forking import total_variation
from outrider.lab.prove.settings import Setting
from outrider.lab.prove.target_settings import MTP, RUNNING_HEADS_SETTINGS, RUNNING_SETTINGS, SHARED_TARGET_LAYERS
from outrider.lab.prove.tiny import save_tiny_hybrid
from outrider.lab.prove.tiny_heads import save_random_mtp, save_tiny_heads
from outrider.model.batch import Segment
from outrider.model.running import Convolution
from outrider.params import SamplingParams

BY_NAME = {setting.name: setting for setting in RUNNING_SETTINGS}
HEADS_BY_NAME = {setting.name: setting for setting in RUNNING_HEADS_SETTINGS}
CHAIN, TREE = BY_NAME["running state, chain"], BY_NAME["running state, tree, traversal"]
#: Drafts of the layer that a checkpoint of such a model carries.
LAYER_TREE = Setting("MTP, tree", MTP | {"tree": (2, 1), "rule": "token"})
#: What always runs: a chain, a tree, samples and a seed, and every kind of head once.
FEW = (
    CHAIN.name,
    TREE.name,
    *(f"running state, {way}" for way in ("two samples", "seeded", "early exit", "staged", "lookup")),
)
FEW_HEADS = [f"running state, {head}" for head in ("EAGLE-3", "EAGLE-3, seeded", "DFlash", "P-EAGLE", "Medusa", "EAGLE")]
#: Where states of texts are kept and go back, beside what drafts.
OF_STATES = (*DRAFTING, "src/outrider/cache/running.py", "src/outrider/model/running.py", "src/outrider/kernels/mixers.py")
#: What the states of the stock delta rule and the norms round to.
FLOAT32_BOUND = 1e-6


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProof]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    folder = tmp_path_factory.mktemp("hybrid")
    yield EngineProof(save_tiny_hybrid(folder / "target", 1), save_tiny_hybrid(folder / "draft", 2))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", core(BY_NAME, FEW, *OF_STATES))
def test_joint_distribution(proof: EngineProof, name: str) -> None:
    proof.llm.stats.reset()
    assert proof.prove(BY_NAME[name], 3).measured <= BOUND
    stats = proof.llm.stats.finished
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_proposer_faults == 0


@pytest.fixture(scope="module")
def heads_proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProof]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    folder = tmp_path_factory.mktemp("heads")
    target = save_tiny_hybrid(folder / "target", 1, num_layers=SHARED_TARGET_LAYERS)
    yield EngineProof(target, save_tiny_hybrid(folder / "draft", 2), heads=save_tiny_heads(folder, target))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", core(HEADS_BY_NAME, FEW_HEADS, *OF_STATES))
def test_joint_distribution_with_heads(heads_proof: EngineProof, name: str) -> None:
    heads_proof.llm.stats.reset()
    assert heads_proof.prove(HEADS_BY_NAME[name], 3).measured <= BOUND
    stats = heads_proof.llm.stats.finished
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_proposer_faults == 0


def _rejected_rows_stay(record: CellRecord, position: int) -> Any:
    return record.function.replay(record.anchors[0].state, record.tape) if position else record.anchors[0].state


@pytest.mark.by_change(*OF_STATES)
@pytest.mark.parametrize(
    ("setting", "owner", "name", "bug"),
    [
        (CHAIN, CellRecord, "state_at", _rejected_rows_stay),
        (CHAIN, Convolution, "replay", lambda _, state, tape: state),
        (TREE, CellRecord, "lined_up", lambda record, *_: record),
        (TREE, Segment, "row_parents", property(lambda segment: range(-1, segment.num_rows - 1))),
    ],
    ids=["rejected rows stay", "accepted rows are forgotten", "the path is not moved to the front", "siblings in a row"],
)
def test_control(
    proof: EngineProof, setting: Any, owner: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert proof.prove(setting, 3).measured > 1e-4


@pytest.mark.by_change(*OF_STATES)
@pytest.mark.parametrize(
    ("name", "bug"),
    [("replay", lambda _, state, tape: state), ("state_at", _rejected_rows_stay)],
    ids=["accepted rows are forgotten", "rejected rows stay"],
)
def test_control_with_heads(heads_proof: EngineProof, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Convolution if name == "replay" else CellRecord, name, bug)
    assert heads_proof.prove(HEADS_BY_NAME["running state, EAGLE-3"], 3).measured > 1e-4


@pytest.mark.by_change(*OF_STATES)
def test_a_delta_rule_has_the_law_of_plain_decoding(tmp_path: Path) -> None:
    """Its stock states are float32, so drafts are held against plain decoding, and that against the stock model."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    for part, seed in (("target", 1), ("draft", 2)):
        torch.manual_seed(seed)
        config = Qwen3_5TextConfig(
            vocab_size=3, hidden_size=8, intermediate_size=16, num_hidden_layers=2, head_dim=8, num_attention_heads=2,
            num_key_value_heads=1, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=2,
            linear_num_key_heads=1, linear_key_head_dim=4, linear_value_head_dim=4, max_position_embeddings=64,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        model = Qwen3_5ForCausalLM(config).double()
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0.0, 0.7)
        model.save_pretrained(tmp_path / part)
    target = str(tmp_path / "target")
    layer = save_random_mtp(tmp_path / "target", target, "qwen3_next", scale=0.7)
    proof = EngineProof(target, str(tmp_path / "draft"), heads={"mtp": layer})
    params = SamplingParams(**{"max_tokens": 3, **CHAIN.params})
    plain = proof.distribution(Setting("plain"), params)
    for setting in (TREE, *(Setting(rule, MTP | {"rule": rule}) for rule in ("block", "token")), LAYER_TREE):
        proof.llm.stats.reset()
        found = proof.distribution(setting, params)
        assert total_variation(found.probs, plain.probs) + found.dropped <= BOUND
        assert 0 < proof.llm.stats.finished.num_accepted_tokens < proof.llm.stats.finished.num_draft_tokens
    assert proof.prove(CHAIN, 3).measured <= FLOAT32_BOUND
