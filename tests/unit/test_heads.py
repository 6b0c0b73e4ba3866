"""Heads as a checkpoint: what they say of themselves, what is written and read, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ContradictionError, InvalidParameterError, ModelLoadError, StorageError
from outrider.heads.checkpoint import FILE, Witness, load_heads, save_heads, witness_tokens
from outrider.heads.networks import (
    BlockwiseConfig,
    ExitConfig,
    HeadNetwork,
    HeadsConfig,
    HeadTarget,
    MedusaConfig,
    build_network,
    randomise,
    read_config,
)
from outrider.propose.beside_target import _alone

TARGET = HeadTarget(name="t", model_type="llama", num_layers=4, hidden_size=6, vocab_size=11)
CONFIGS = [
    MedusaConfig(target=TARGET, layer=4, normed=True, heads=3, blocks=2, width=6),
    MedusaConfig(target=TARGET, layer=2, normed=False, heads=2, width=5),
    MedusaConfig(target=TARGET, layer=4, normed=True, heads=2, width=6, output="target"),
    BlockwiseConfig(target=TARGET, layer=4, normed=True, heads=3, inner=4),
    ExitConfig(target=TARGET, layer=4, normed=True, width=6, output="target"),
    ExitConfig(target=TARGET, layer=2, normed=False, width=5),
]
OUTPUT = torch.randn(11, 6, generator=torch.Generator().manual_seed(9))


def target_head(states: torch.Tensor) -> torch.Tensor:
    return states @ OUTPUT.T


def made(config: HeadsConfig, seed: int = 0) -> HeadNetwork:
    network = build_network(config)
    randomise(network, seed)
    return network


def witness() -> Witness:
    tokens = witness_tokens(11)
    return Witness(tokens, torch.randn(len(tokens), 6))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.method}-{c.layer}")
def test_what_is_written_is_read_again(config: HeadsConfig, tmp_path: Path) -> None:
    network, features = made(config), torch.randn(7, 6)
    seen = witness()
    save_heads(tmp_path / "new", network, seen)
    found = load_heads(tmp_path / "new")
    assert found.config == config == found.network.config
    assert torch.equal(found.witness.features, seen.features)
    assert torch.equal(found.network(features, target_head), network(features, target_head))
    assert not any(weight.requires_grad for weight in found.network.parameters())
    assert [file.name for file in (tmp_path / "new").iterdir()] == [FILE]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.method}-{c.layer}")
def test_the_first_heads_are_those_of_all(config: HeadsConfig) -> None:
    network, features = made(config), torch.randn(7, 6)
    whole = network(features, target_head)
    assert whole.shape == (config.num_heads, 7, 11)
    for count in range(1, config.num_heads + 1):
        torch.testing.assert_close(network(features, target_head, count), whole[:count])


def test_heads_differ_from_each_other() -> None:
    for config in CONFIGS[:4]:
        first, second = made(config)(torch.randn(7, 6), target_head)[:2]
        assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize("config", [c for c in CONFIGS if getattr(c, "width", 6) == 6], ids=lambda c: c.method)
def test_training_begins_with_what_the_target_would_say(config: HeadsConfig) -> None:
    network, features = build_network(config), torch.randn(7, 6)
    network.begin(OUTPUT)
    for logits in network(features, target_head):
        torch.testing.assert_close(logits, target_head(features))


def test_a_configuration_survives_as_plain_values() -> None:
    for config in CONFIGS:
        assert read_config(json.loads(json.dumps(config.as_mapping()))) == config


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": 2}, "format"),
        ({"method": "hydra"}, "method"),
        ({"target": None}, "target"),
        ({"layer": 5}, "layer"),
        ({"layer": 0}, "layer"),
        ({"heads": 0}, "heads"),
        ({"width": "6"}, "width"),
        ({"depth": 3}, "depth"),
    ],
)
def test_what_a_configuration_may_not_say(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        read_config({**CONFIGS[0].as_mapping(), **change})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "build",
    [
        lambda: MedusaConfig(target=TARGET, layer=4, normed=False, heads=1, width=6),
        lambda: MedusaConfig(target=TARGET, layer=4, normed=True, heads=1, width=5, output="target"),
        lambda: MedusaConfig(target=TARGET, layer=2, normed=False, heads=1, width=6, output="target"),
        lambda: BlockwiseConfig(target=TARGET, layer=2, normed=False, heads=1, inner=4),
        lambda: ExitConfig(target=TARGET, layer=2, normed=True, width=5, output="target"),
    ],
)
def test_settings_that_contradict(build: object) -> None:
    with pytest.raises(ContradictionError):
        build()  # type: ignore[operator]


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ModelLoadError, match=match):
        load_heads(folder)


def test_folders_without_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="no such folder"):
        load_heads(tmp_path / "none")
    refused(tmp_path, f"no {FILE}")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "a model and no heads")
    torch.save({"w": torch.zeros(1)}, tmp_path / "heads.pt")
    refused(tmp_path, "pickled")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = save_heads(tmp_path, made(CONFIGS[0]), witness())
    whole, tensors = path.read_bytes(), load_file(path)
    metadata = {"outrider_heads": json.dumps(CONFIGS[0].as_mapping())}
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused(tmp_path, "cannot be read")
    save_file(tensors, path)
    refused(tmp_path, "metadata")
    save_file(tensors, path, {"outrider_heads": "{"})
    refused(tmp_path, "cannot be read")
    save_file(tensors, path, {"outrider_heads": json.dumps({**CONFIGS[0].as_mapping(), "layer": 9})})
    refused(tmp_path, "configuration")
    save_file({**tensors, "blocks.0.0.weight": torch.full((6, 6), float("nan"))}, path, metadata)
    refused(tmp_path, "NaN")
    save_file({**tensors, "blocks.0.0.weight": torch.zeros(6, 7)}, path, metadata)
    refused(tmp_path, "blocks.0.0.weight")
    save_file({name: w for name, w in tensors.items() if name != "outputs.2.weight"}, path, metadata)
    refused(tmp_path, "outputs.2.weight")
    save_file({**tensors, "witness.features": torch.zeros(8, 7)}, path, metadata)
    refused(tmp_path, "witness")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_heads(tmp_path, made(CONFIGS[0]), witness())
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space"):
        save_heads(tmp_path, made(CONFIGS[0], seed=1), witness())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_rows_that_are_kept_keep_no_others_of_their_pass() -> None:
    """Rows of a text wait for its head until their block is full, and the pass of a prompt may have thousands."""
    rows = torch.randn(128, 8)
    kept = _alone(rows[:1])
    assert torch.equal(kept, rows[:1])
    assert kept.untyped_storage().nbytes() == kept.nbytes
    assert _alone(rows) is rows
