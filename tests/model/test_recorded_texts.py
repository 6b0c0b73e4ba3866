"""Texts of every method and rule, as they were recorded: what drafts and verifies may be rebuilt, and no text may change.

`python -m tests.model.test_recorded_texts` records them anew, where a change of texts is meant.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.config import default_model
from outrider.lab.prove.tiny_heads import (
    save_random_dflash,
    save_random_eagle,
    save_random_heads,
    save_random_mtp,
    save_random_peagle,
)
from outrider.propose.trees.adaptive import FixedPace
from tests.model.test_mixed_methods import PREDICTION, WAYS

RECORDED = Path(__file__).with_suffix(".json")
PROMPTS = ("def main(", "x = [1, 2, 3, 1, 2, 3,")
#: Of texts without a seed, in the place of one from the operating system.
FIXED_SEED = 77
#: The engine's choice follows the clock, so its texts without a seed are recorded nowhere. So do the lengths of DSpark's
#: drafts without a threshold.
METHODS = [
    {**way, "min_confidence": 0.0} if way["method"] == "dspark" else way
    for way in WAYS
    if way["method"] not in ("auto", "cross_vocabulary", "merge", "then")
]
RULES: list[dict[str, Any]] = [
    {"method": "draft_model", "num_draft_tokens": 4, "rule": rule, **tree}
    for rule in ("token", "block", "walk", "coupled")
    for tree in ({}, {"tree": [2, 2, 1]})
]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=16),
    "seeded": SamplingParams(seed=5, max_tokens=16),
    "unseeded": SamplingParams(max_tokens=16, top_p=0.95, frequency_penalty=0.2),
}


def write(folder: Path, half: int | None = None) -> dict[str, list[Any]]:
    """Every text with the number of draft tokens that stood in it, by method and parameters.

    Args:
        folder: Where heads are written.
        half: 0 or 1, for half of the texts that are drawn; None for all of them.
            Greedy texts are always written, since later drafts depend on what they leave in caches. Methods that learn from
            texts write all of theirs.
    """
    llm = LLM(dtype="float64", block_size=8, kv_cache_tokens=2000)
    # Trees that adapt follow no clock.
    llm.engine.drafting.builders.use_pace(FixedPace({1: 1.0, 2: 1.0, 3: 1.02, 4: 1.1, 8: 1.6}))
    heads = {name: save_random_heads(folder / name, default_model("target"), name, scale=0.05) for name in _HEADS}
    for method, layout in (("eagle1", "safeailab1"), ("eagle3", "safeailab")):
        heads[method] = save_random_eagle(folder / method, default_model("target"), layout, scale=0.1)
    heads["mtp"] = save_random_mtp(folder / "mtp", default_model("target"), "deepseek_v3", 2, scale=0.1)
    heads["dflash"] = save_random_dflash(folder / "dflash", default_model("target"), scale=0.1)
    heads["dspark"] = save_random_dflash(folder / "dspark", default_model("target"), "deepspec", scale=0.1)
    heads["peagle"] = save_random_peagle(folder / "peagle", default_model("target"), scale=0.1)
    found: dict[str, list[Any]] = {}
    for turn, way in enumerate((*METHODS, *RULES)):
        model = {"model": heads[way["method"]]} if way["method"] in heads else {}
        config = SpeculationConfig.of({**way, **model})
        for place, (name, params) in enumerate(PARAMS.items()):
            if name != "greedy" and half not in (None, (turn + place) % 2) and not _learns(way):
                continue
            if params.seed is not None and config.rule in ("token", "block"):
                continue  # a seed promises that texts do not depend on drafts
            outputs = llm.generate(list(PROMPTS), params, speculation=config, prediction=PREDICTION)
            key = f"{json.dumps(way)} {name}"
            found[key] = [[list(output.token_ids), output.stats.num_accepted_tokens] for output in outputs]
    return found


_HEADS = ("medusa", "blockwise", "exit")


def _learns(way: dict[str, Any]) -> bool:
    """Whether what it drafts depends on earlier texts."""
    return way["method"] == "token_recycling" or way.get("shared", False)


#: What decides what is drawn.
of_drafts = pytest.mark.by_change("src/outrider/propose/", "src/outrider/heads/", "src/outrider/verify/")


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=of_drafts)])
def test_texts_are_as_recorded(half: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half has texts of every method."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: FIXED_SEED)
    found, recorded = write(tmp_path, half), json.loads(RECORDED.read_text("utf-8"))
    assert {key.partition("}")[0] for key in found} == {key.partition("}")[0] for key in recorded}
    assert found == {key: recorded[key] for key in found}


if __name__ == "__main__":
    secrets.randbits = lambda bits: FIXED_SEED  # type: ignore[assignment]
    texts = write(Path(tempfile.mkdtemp()))
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in texts.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
