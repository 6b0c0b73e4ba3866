"""Code that a checkpoint brings is run where this checkpoint is trusted, and not because another one is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.config import default_model
from outrider.propose.draft_model import DraftModelProposer

PARAMS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies such code before it runs it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def with_code(part: str, folder: Path) -> Path:
    """One of the embedded models, with code that leaves a file `ran` in its folder."""
    shutil.copytree(default_model(part), folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["auto_map"] = {"AutoModelForCausalLM": f"modeling_{folder.name}.Brought"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / f"modeling_{folder.name}.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaForCausalLM\n"
        f"Path({str(folder / 'ran')!r}).touch()\n"
        "class Brought(LlamaForCausalLM):\n    pass\n",
        "utf-8",
    )
    return folder


def test_a_draft_model_is_not_trusted_with_its_target(tmp_path: Path) -> None:
    target, draft = with_code("target", tmp_path / "target"), with_code("draft", tmp_path / "draft")
    llm = LLM(target, trust_remote_code=True, kv_cache_tokens=512)
    assert (target / "ran").exists()
    speculation = SpeculationConfig(method=DraftModel(model=str(draft)))
    drafted = llm.generate("def f(", PARAMS, speculation=speculation)[0]
    assert drafted.stats.num_draft_tokens > 0
    assert not (draft / "ran").exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_a_draft_model_may_be_trusted_for_itself(tmp_path: Path, trusted: bool) -> None:
    draft = with_code("draft", tmp_path / f"draft_{trusted}")
    llm = LLM(kv_cache_tokens=512, speculation="none")
    method = DraftModel(model=str(draft), trust_remote_code=trusted)
    drafted = llm.generate("def f(", PARAMS, speculation=SpeculationConfig(method=method))[0]
    assert drafted.stats.num_draft_tokens > 0
    assert (draft / "ran").exists() is trusted
    proposer = llm.engine.proposers.get(method)
    assert isinstance(proposer, DraftModelProposer)
    assert type(proposer.runner.loaded.model).__name__ == ("Brought" if trusted else "LlamaForCausalLM")
