"""Heads that the speculators package has written, against what it has computed with them (`speculators_fixtures.py`).

Its training reads several levels of EAGLE-3 in one pass, each row with the rows that a draft would see. Its further levels
of MTP see other rows than a draft does: all those of their own level. So only the first one is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM
from outrider.heads import mtp
from outrider.heads.block import Block, BlockRunner
from outrider.heads.formats.published import read_head
from outrider.heads.lone import SeenContext
from outrider.heads.runner import HeadRunner
from outrider.model.target import Target
from tests.model import checkpoints
from tests.model.test_feature_heads import BOUND

FOLDER = Path(__file__).parent / "fixtures" / "speculators"
#: The target that these heads are for.
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "rms_norm_eps": 1e-5, "layer_types": ["full_attention"] * 5,
}  # fmt: skip


class Made(NamedTuple):
    """A head, the text that it was given, and what came out.

    Attributes:
        folder: Of the head.
        target: One with the embeddings and the output layer that the head was run beside.
        tokens: The text.
        hidden: By layer, the target's hidden states [n, 16] for the text.
        logits: What the package computed.
    """

    folder: str
    target: Target
    tokens: list[int]
    hidden: dict[int, Tensor]
    logits: Tensor


def made(name: str, folder: Path) -> Made:
    expected = load_file(FOLDER / name / "expected.safetensors")
    path = checkpoints.save("qwen3", folder, layers=5, **SIZES)
    file = folder / "model.safetensors"
    names = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    lent = {own: expected[key] for own, key in names.items() if key in expected}
    save_file(load_file(file) | lent, file, {"format": "pt"})
    hidden = {int(key.partition(".")[2]): rows for key, rows in expected.items() if key.startswith("hidden.")}
    target = Target(LLM(path, dtype="float32", speculation="none").engine.runner)
    return Made(str(FOLDER / name), target, expected["token_ids"].tolist(), hidden, expected["logits"])


def distance(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


def drafted(head: HeadRunner[Any], made: Made, length: int, levels: int) -> Tensor:
    """Logits [levels, draft_vocab_size] behind the first tokens of the text and then each of the next tokens, as a draft
    computes them."""
    hidden = {layer: rows[: length - 1] for layer, rows in made.hidden.items()}
    (kept,) = head.recompute(made.tokens[: length - 1], hidden)
    keys, values = ([each[1:]] for each in kept)  # the first token has no row

    def look(own_keys: Tensor, own_values: Tensor) -> list[SeenContext]:
        keys.append(own_keys)
        values.append(own_values)
        return [SeenContext(slice(0, 1), torch.cat(keys), torch.cat(values), None)]

    feature, found = head.fuse(hidden)[-1:], []
    for position in range(length - 1, length - 1 + levels):
        left = head.run(0, made.tokens[position : position + 1], feature, [position], look)
        found.append(head.logits(left))
        feature = head.next_feature(left)
    return torch.cat(found)


@pytest.mark.parametrize("name", ["eagle3_llama", "eagle3_normed", "eagle3_qwen3"])
def test_ten_levels_of_eagle_3(name: str, tmp_path: Path) -> None:
    given = made(name, tmp_path)
    head: HeadRunner[Any] = HeadRunner.of(read_head(given.folder), given.target)
    levels = len(given.logits)
    assert levels == 11
    for length in range(2, len(given.tokens) - levels + 2):
        # row i of the package reads token i + 1, which ends a text of i + 2 tokens
        assert distance(drafted(head, given, length, levels), given.logits[:, length - 2]) <= BOUND


@pytest.mark.parametrize("name", ["dflash", "dflash_windows"])
def test_a_block_of_dflash(name: str, tmp_path: Path) -> None:
    given = made(name, tmp_path)
    head = BlockRunner.of(read_head(given.folder), given.target)
    end = len(given.tokens) - 1
    features = head.fuse({layer: rows[:end] for layer, rows in given.hidden.items()})
    kept = head.keys_and_values(features, range(end))
    block = Block(given.tokens[-1], end, lambda layer: kept[layer], range((head.network.block_size or 0) - 1))
    (found,) = head.draft([block])
    assert (
        distance(found.logits, given.logits[1:]) <= BOUND
    )  # the package's first row stands at the anchor, and drafts nothing


def test_the_first_level_of_mtp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = made("mtp", tmp_path)
    monkeypatch.setattr(mtp, "_is_fused", lambda *about: False)  # only modules run over keys and values that are given
    head = mtp.open_mtp(given.target, given.folder)
    for length in range(2, len(given.tokens)):
        assert distance(drafted(head, given, length, 1)[0], given.logits[length - 2]) <= BOUND
