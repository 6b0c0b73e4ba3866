"""Heads in other formats: every weight keeps its bits, and what cannot be said is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.errors import ContradictionError, InvalidParameterError, OutriderError, StorageError, UnsupportedModelError
from outrider.heads.formats.published import PublishedHead, read_head
from outrider.heads.formats.writing import convert_head, write_head
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle, save_random_peagle
from tests.model import checkpoints


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("target"), seed=3)


def assert_same(one: PublishedHead, other: PublishedHead) -> None:
    """The same shape, weights and tokens; only the name and class of the target may be lost."""
    layer, same = one.config.layer, other.config.layer
    known = type(layer)().to_dict().keys() - {"architectures", "tie_word_embeddings"}
    assert {name: getattr(layer, name) for name in known} == {name: getattr(same, name) for name in known}
    shapes = [replace(head.config, layer=None, verifier="", architectures=()) for head in (one, other)]
    assert shapes[0] == shapes[1]
    a, b = one.network.state_dict(), other.network.state_dict()
    assert a.keys() == b.keys()
    assert all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
    assert (one.tokens is None) == (other.tokens is None)
    assert one.tokens is None or torch.equal(one.tokens, other.tokens)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
EAGLES: dict[str, dict[str, Any]] = {
    "plain": {"layout": "safeailab"},
    "some tokens and embeddings": {"layout": "safeailab", "draft_tokens": (3, 5, 8, 60), "own_embedding": True},
    "layers": {"layout": "speculators", "eagle_aux_hidden_state_layer_ids": [1, 3]},
    "norms": {"layout": "speculators", "norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "one norm": {"layout": "speculators", "norm_before_fc": True, "sizes": {"rope_scaling": YARN, "rope_theta": 5e5}},
    "nvidia": {"layout": "nvidia", "draft_vocab_size": 61},
}


@pytest.mark.parametrize("how", EAGLES.values(), ids=list(EAGLES))
def test_a_head_of_eagle3_comes_back_to_the_bit(target: str, tmp_path: Path, how: dict[str, Any]) -> None:
    first = save_random_eagle(tmp_path / "first", target, **how)
    convert_head(first, "speculators", tmp_path / "one", target)
    convert_head(str(tmp_path / "one"), "safeailab", tmp_path / "two")
    convert_head(str(tmp_path / "two"), "speculators", tmp_path / "three", target)
    assert read_head(str(tmp_path / "three")).config.verifier == target
    assert read_head(str(tmp_path / "three")).config.architectures == ("LlamaForCausalLM",)
    for name in ("one", "two", "three"):
        assert_same(read_head(first), read_head(str(tmp_path / name)))
    if how == EAGLES["some tokens and embeddings"]:  # the same file, but for the order of its tensors
        before, after = (load_file(Path(folder) / "model.safetensors") for folder in (first, tmp_path / "two"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_head_of_eagle1_comes_back_to_the_bit(target: str, tmp_path: Path) -> None:
    first = save_random_eagle(tmp_path / "first", target, "safeailab1")
    convert_head(first, "safeailab", tmp_path / "one")
    assert_same(read_head(first), read_head(str(tmp_path / "one")))


BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {
        "sizes": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
    },
    "some tokens": {"layout": "speculators", "draft_tokens": (3, 5, 8, 60)},
}


@pytest.mark.parametrize("how", BLOCKS.values(), ids=list(BLOCKS))
def test_a_block_drafter_comes_back_to_the_bit(target: str, tmp_path: Path, how: dict[str, Any]) -> None:
    first = save_random_dflash(tmp_path / "first", target, **how)
    convert_head(first, "speculators", tmp_path / "one", target)
    assert_same(read_head(first), read_head(str(tmp_path / "one")))
    if "draft_tokens" not in how:
        write_head(tmp_path / "two", read_head(str(tmp_path / "one")), "z-lab")
        assert_same(read_head(first), read_head(str(tmp_path / "two")))


def test_a_head_that_drafts_in_one_pass_comes_back_to_the_bit(target: str, tmp_path: Path) -> None:
    first = save_random_peagle(
        tmp_path / "first", target, num_layers=3, norm_before_residual=True, draft_tokens=(3, 5, 8, 60)
    )
    convert_head(first, "speculators", tmp_path / "one", target)
    assert_same(read_head(first), read_head(str(tmp_path / "one")))
    with pytest.raises(UnsupportedModelError, match="safeailab has no heads of peagle"):
        convert_head(first, "safeailab", tmp_path / "out")


def test_what_a_format_cannot_say_is_refused(target: str, tmp_path: Path) -> None:
    block = save_random_dflash(tmp_path / "block", target)
    with pytest.raises(UnsupportedModelError, match=r"safeailab has no heads of dflash\..*format of speculators\."):
        convert_head(block, "safeailab", tmp_path / "out")
    causal = save_random_dflash(tmp_path / "causal", target, is_causal=True)
    with pytest.raises(UnsupportedModelError, match="see no later rows"):
        convert_head(causal, "speculators", tmp_path / "out", target)
    with pytest.raises(UnsupportedModelError, match="no heads of eagle1"):
        convert_head(save_random_eagle(tmp_path / "old", target, "safeailab1"), "speculators", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_that_loads(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save_random_eagle(tmp_path / "first", target, "safeailab")

    def full(path: Path, text: str) -> None:
        raise StorageError(str(path), "No space left on device", "Free some space.")

    monkeypatch.setattr("outrider.heads.formats.writing.write_text", full)
    with pytest.raises(StorageError, match="No space left"):
        convert_head(first, "speculators", tmp_path / "out", target)
    with pytest.raises(OutriderError, match=r"no config\.json"):
        read_head(str(tmp_path / "out"))


def run(*words: Any) -> str:
    found = CliRunner().invoke(app, ["convert", *map(str, words)])
    if found.exception is not None:
        raise found.exception
    return found.stdout


def test_the_command_writes_a_head(target: str, tmp_path: Path) -> None:
    first = save_random_eagle(tmp_path / "first", target, "safeailab", draft_tokens=(3, 5, 8, 60))
    assert "a head of eagle3 in the format of speculators" in run(
        first, "--to", "speculators", "--out", tmp_path / "out", "--target", "hub/id"
    )
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["speculators_model_type"] == "eagle3"
    assert written["speculators_config"]["verifier"]["name_or_path"] == "hub/id"
    assert_same(read_head(first), read_head(str(tmp_path / "out")))
    with pytest.raises(InvalidParameterError, match=r"out=.*the folder holds files"):
        run(first, "--to", "safeailab", "--out", tmp_path / "out")
    with pytest.raises(ContradictionError, match="a head keeps its weights"):
        run(first, "--to", "safeailab", "--out", tmp_path / "new", "--type", "F16")
    with pytest.raises(OutriderError, match="no head of a known format"):
        run(target, "--to", "safeailab", "--out", tmp_path / "new")
    with pytest.raises(InvalidParameterError, match="does not name the model"):
        run(first, "--to", "speculators", "--out", tmp_path / "new")
    with pytest.raises(ContradictionError, match="made for no other model"):
        run(target, "--to", "gguf", "--out", tmp_path / "new.gguf", "--target", target)
    with pytest.raises(InvalidParameterError, match="no such folder"):
        run(tmp_path / "nowhere", "--to", "safeailab", "--out", tmp_path / "new")
