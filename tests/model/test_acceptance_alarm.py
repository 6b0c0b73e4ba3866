"""A head that is hardly ever right is told of in the log: one that reads another layer than it was made for."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, Eagle3, SamplingParams, SpeculationConfig
from outrider.lab.prove.tiny_heads import save_random_eagle
from outrider.model.target import Target
from tests.model import checkpoints

HIDDEN, LAYER = 64, 3
LONG = SamplingParams(seed=3, max_tokens=110)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target whose layers attend to nothing, and whose first layers change the states a lot. So the next token depends on
    the token alone, and another layer shows other states."""
    path = checkpoints.save("llama", tmp_path_factory.mktemp("alarm") / "target", seed=4, layers=4, hidden_size=HIDDEN)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"].zero_()
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] *= 20.0 if layer < LAYER else 0.0
    tensors["lm_head.weight"] *= 8.0
    save_file(tensors, file, {"format": "pt"})
    return path


def head_that_is_right(path: str, folder: Path) -> str:
    """A head that reads what entered layer 3 for the token before, and says what comes two tokens behind that one. It is
    computed, and not trained."""
    head = save_random_eagle(folder, path, "speculators", eagle_aux_hidden_state_layer_ids=[LAYER])
    target = Target(LLM(path, dtype="float64", speculation="none").engine.runner)
    seen = [target.run_apart([token], aux_layers=(LAYER,)) for token in range(checkpoints.VOCAB_SIZE)]
    probs = torch.cat([out.logits for out in seen]).double().softmax(-1)
    ahead = (probs @ probs).clamp(min=1e-9).log()  # two tokens ahead
    file = Path(head) / "model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    tensors["fc.weight"] = torch.eye(HIDDEN)
    tensors["norm.weight"] = torch.ones(HIDDEN)
    rows = torch.cat([out.aux_hidden_states[LAYER] for out in seen]).double()
    normed = rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    tensors["lm_head.weight"] = (torch.linalg.pinv(normed) @ ahead).T.float().contiguous()
    save_file(tensors, file)
    return head


@pytest.mark.parametrize("layer", [LAYER, 0])
def test_a_head_that_reads_another_layer_is_told_of_in_the_log(
    path: str, layer: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = head_that_is_right(path, tmp_path)
    config = Path(head) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eagle_aux_hidden_state_layer_ids": [layer]}))
    llm = LLM(path, dtype="float64", speculation="none")
    way = SpeculationConfig(method=Eagle3(model=head), num_draft_tokens=1)
    with caplog.at_level(logging.WARNING, "outrider"):
        llm.generate([[5], [7], [9]], LONG, speculation=way)
    told = [record.getMessage() for record in caplog.records if "near nothing" in record.getMessage()]
    assert len(told) == (layer != LAYER)
    assert all("method eagle3: at " in text and "layers or norms are probably read wrongly" in text for text in told)
    assert all("it has no witness of the target's hidden states" in text for text in told)
