"""Heads of EAGLE-3 and DFlash in GGUF files are the heads in safetensors that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, DFlash, Eagle3, SamplingParams, SpeculationConfig
from outrider.errors import ModelError
from outrider.heads.formats.published import PublishedHead, read_head
from outrider.heads.lone import RotaryFactors
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle
from outrider.loading.gguf.header import read_gguf
from tests.model import checkpoints
from tests.model.core import of_formats
from tests.model.gguf_heads import write_block_head, write_head
from tests.model.test_hostile_heads import exchange

pytestmark = of_formats
LAYERS = [1, 2, 3]
DRAFTED = (1, 2, 3, 5, 8, 13, 21, 30)
_LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 5}
IN_GGUF = {"attention.sliding_window": 5, "attention.sliding_window_pattern": [True, False], "attention.causal": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("gguf_heads") / "target", seed=3)


def both(path: str, folder: Path, stored: str = "F32", key: str = "target_layers", **how: Any) -> list[PublishedHead]:
    fields = {"eagle_aux_hidden_state_layer_ids": LAYERS, "draft_tokens": DRAFTED, **how}
    head = save_random_eagle(folder, path, "safeailab", **fields)
    flags = {name: value for name, value in how.items() if name == "norm_before_residual"}
    return [read_head(head), read_head(write_head(head, folder / "head.gguf", LAYERS, key=key, stored=stored, **flags))]


@pytest.mark.parametrize(
    "how",
    [
        {"sizes": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 500.0}},
        {"sizes": {"rope_scaling": _LLAMA_3}, "own_embedding": True, "norm_before_residual": True},
        {"key": "extract_layers", "draft_tokens": None, "own_output": False},
    ],
    ids=["heads", "scaled", "older"],
)
def test_it_is_the_head_that_it_was_made_of(path: str, how: dict[str, Any], tmp_path: Path) -> None:
    first, second = both(path, tmp_path, **how)
    ours, theirs = first.network.state_dict(), second.network.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name]) for name in ours)
    assert (first.tokens is None) == (second.tokens is None)
    assert first.tokens is None or torch.equal(first.tokens, second.tokens)
    for name in ("aux_layers", "norm_before_residual", "norm_output", "feature_norm", "target_hidden_size", "vocab_size"):
        assert getattr(first.config, name) == getattr(second.config, name)
    factors = [
        RotaryFactors(each.config.layer, torch.device("cpu")).at(range(60), torch.float32) for each in (first, second)
    ]
    for one, other in zip(*factors, strict=True):
        assert float((one - other).abs().max()) <= 1e-5


def test_it_drafts_from_blocks(path: str, tmp_path: Path) -> None:
    first, second = both(path, tmp_path, stored="Q8_0")
    for name, weight in first.network.state_dict().items():
        other = second.network.state_dict()[name]
        assert float((weight - other).abs().max()) <= 0.005 * float(weight.abs().max())
    way = SpeculationConfig(method=Eagle3(model=second.folder), num_draft_tokens=3)
    llm, params = LLM(path, dtype="float64", speculation="none"), SamplingParams(temperature=0, max_tokens=12)
    (drafted,), (plain,) = (llm.generate([1, 2, 3], params, speculation=each) for each in (way, "none"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_draft_tokens > 0
    assert drafted.stats.num_proposer_faults == 0


def test_a_file_that_settles_nothing_is_refused(path: str, tmp_path: Path) -> None:
    head = save_random_eagle(tmp_path, path, "safeailab", draft_tokens=DRAFTED)
    files = {
        "is [3, 1], and no list of the target's layers": write_head(head, tmp_path / "order.gguf", [3, 1]),
        "eagle3.target_layers is None": write_head(head, tmp_path / "none.gguf", LAYERS, key="other"),
        "it has eagle3.fc_norm, which is not known": write_head(head, tmp_path / "fork.gguf", LAYERS, fc_norm=True),
    }
    exchange(head, "d2t", torch.full((len(DRAFTED),), 60))
    files["d2t in far.gguf leads to token 67"] = write_head(head, tmp_path / "far.gguf", LAYERS)
    exchange(head, "d2t", torch.arange(len(DRAFTED)))
    exchange(head, "midlayer.mlp.up_proj.weight", None)
    files["it has no tensor blk.0.ffn_up.weight"] = write_head(head, tmp_path / "short.gguf", LAYERS)
    for told, file in files.items():
        with pytest.raises(ModelError) as caught:
            read_head(file)
        assert told in caught.value.problem
        assert caught.value.model == file
        assert caught.value.remedy.endswith(".")


def test_whole_numbers_are_no_blocks(path: str, tmp_path: Path) -> None:
    """A tensor of the type that only d2t has is no fault of the reader."""
    head = save_random_eagle(tmp_path, path, "safeailab", draft_tokens=DRAFTED)
    file = read_gguf(write_head(head, tmp_path / "head.gguf", LAYERS))
    assert torch.equal(file.tensors["d2t"].floats(), torch.tensor(DRAFTED).float())


@pytest.mark.parametrize(
    ("how", "more"),
    [
        ({"inputs": (1, 3)}, {}),
        ({"layout": "speculators", "draft_tokens": DRAFTED}, {}),
        ({"layout": "speculators", "sizes": WINDOWS, "sliding_window_non_causal": True}, IN_GGUF),
        ({"is_causal": True, "sizes": {"num_hidden_layers": 3}}, {"attention.causal": True}),
    ],
    ids=["z-lab", "fewer tokens", "windows", "one way"],
)
def test_a_block_drafter_is_the_one_that_it_was_made_of(
    path: str, how: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_random_dflash(tmp_path, path, **how)
    first, second = read_head(folder), read_head(write_block_head(folder, tmp_path / "head.gguf", **more))
    ours, theirs = first.network.state_dict(), second.network.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (first.tokens is None) == (second.tokens is None) == ("draft_tokens" not in how)
    assert first.tokens is None or torch.equal(first.tokens, second.tokens)
    for name in ("aux_layers", "block_size", "mask_token_id", "reaches", "target_hidden_size", "vocab_size"):
        assert getattr(first.config, name) == getattr(second.config, name)
    for name in ("rope_parameters", "layer_types", "sliding_window"):
        assert getattr(first.config.layer, name) == getattr(second.config.layer, name)


def test_a_block_drafter_drafts_from_blocks_of_weights(path: str, tmp_path: Path) -> None:
    file = write_block_head(save_random_dflash(tmp_path, path, scale=0.1), tmp_path / "head.gguf", stored="Q8_0")
    llm, params = LLM(path, dtype="float64", speculation="none"), SamplingParams(temperature=0, max_tokens=12)
    ways = (SpeculationConfig(method=DFlash(model=file)), "none")
    (drafted,), (plain,) = (llm.generate([1, 2, 3], params, speculation=each) for each in ways)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_draft_tokens > 0
    assert drafted.stats.num_proposer_faults == 0


def test_a_block_drafter_that_settles_nothing_is_refused(path: str, tmp_path: Path) -> None:
    head = save_random_dflash(tmp_path, path)
    unsaid = {name: value for name, value in IN_GGUF.items() if name != "attention.causal"}
    told: dict[str, dict[str, Any]] = {
        "layers with a window and no dflash.attention.causal": unsaid,
        "sliding_window_pattern is None": {"attention.sliding_window": 5},
        "sliding_window_pattern is [True]": {**IN_GGUF, "attention.sliding_window_pattern": [True]},
        "attention.causal is 2, and neither true": {"attention.causal": 2},
        "mask_token_id is None": {"mask_token_id": None},
        "mask_token_id is 999": {"mask_token_id": 999},
        "dflash.block_size is None": {"block_size": None},
        "block_size is 1, and one row": {"block_size": 1},
        "target_layers is None": {"target_layers": None},
        "it has dflash.selector_rank": {"selector_rank": 256},
        "dflash.final_logit_softcapping=30.0": {"final_logit_softcapping": 30.0},
        "its architecture is dflash-draft, and heads in GGUF files are of eagle3 or dflash": {
            "architecture": "dflash-draft"
        },
    }
    exchange(head, "layers.1.mlp.up_proj.weight", None)
    told["it has no tensor blk.1.ffn_up.weight"] = {}
    for number, (problem, more) in enumerate(told.items()):
        file = write_block_head(head, tmp_path / f"{number}.gguf", **more)
        with pytest.raises(ModelError) as caught:
            read_head(file)
        assert problem in caught.value.problem
        assert caught.value.model == file
        assert caught.value.remedy.endswith(".")
