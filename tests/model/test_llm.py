"""What an LLM shows of itself, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as hf_logging

from outrider import LLM, DraftModel, SpeculationConfig
from outrider.config import default_model
from outrider.errors import ModelLoadError
from outrider.kernels.library import available_sets

BEST = available_sets()[-1] if available_sets() else "stock"
FAST = "fused" if available_sets() else "paged"


@pytest.mark.parametrize(
    ("settings", "kernels", "shown"),
    [
        (
            {},
            None,
            f"model=embedded dtype=bfloat16 device=cpu attention_backend={FAST} kernels={BEST} "
            "speculation=auto num_draft_tokens=16 draft_model=embedded",
        ),
        (
            {"speculation": "suffix", "quantization": "int8", "attention_backend": "paged"},
            None,
            f"model=embedded dtype=bfloat16 quantization=int8 device=cpu attention_backend=paged kernels={BEST} "
            "speculation=suffix num_draft_tokens=16",
        ),
        (
            {"speculation": "none", "dtype": "float16"},  # which the kernels do not compute
            None,
            "model=embedded dtype=float16 device=cpu attention_backend=paged kernels=stock speculation=none",
        ),
        (
            {"speculation": "none", "batch_invariant": True},
            "off",
            "model=embedded dtype=bfloat16 device=cpu attention_backend=row_by_row kernels=stock batch_invariant=True "
            "speculation=none",
        ),
    ],
)
def test_one_line_says_what_runs(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], kernels: str | None, shown: str
) -> None:
    monkeypatch.delenv("OUTRIDER_KERNELS", raising=False)
    if kernels is not None:
        monkeypatch.setenv("OUTRIDER_KERNELS", kernels)
    assert repr(LLM(**settings, kv_cache_tokens=512, device="cpu")) == f"<LLM {shown}>"


def test_models_of_ones_own_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(default_model("target"))
    llm = LLM(
        str(tmp_path / "mine"),
        speculation=SpeculationConfig(method=DraftModel(model=str(tmp_path / "mine")), tree=(2, 1)),
        kv_cache_tokens=512,
    )
    assert f"<LLM model={tmp_path}/mine " in repr(llm)
    assert f" num_draft_tokens=4 draft_model={tmp_path}/mine>" in repr(llm)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process: transformers shows its bars."""
    monkeypatch.setattr(hf_logging, "_tqdm_active", True)
    monkeypatch.setattr(hf_logging, "_tqdm_hook", None)


@pytest.mark.usefixtures("bars")
def test_loading_prints_nothing_and_leaves_the_bars_of_others_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert LLM(kv_cache_tokens=512).generate("x")
    assert capfd.readouterr() == ("", "")
    assert list(hf_logging.tqdm([1, 2], desc="somebody else's")) == [1, 2]
    assert "somebody else's" in capfd.readouterr().err


@pytest.mark.usefixtures("bars")
def test_bars_that_were_asked_for_are_shown(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_info()
    try:
        LLM(kv_cache_tokens=512)
    finally:
        hf_logging.set_verbosity(verbosity)
    assert "Loading weights" in capfd.readouterr().err
    shown: list[str] = []

    def hook(factory: Any, args: Any, kwargs: Any) -> Any:
        shown.append(kwargs["desc"])
        return hf_logging.EmptyTqdm(*args, **kwargs)

    hf_logging.set_tqdm_hook(hook)
    LLM(kv_cache_tokens=512)
    assert shown == ["Loading weights"] * 2
    assert hf_logging.set_tqdm_hook(None) is hook


@pytest.mark.usefixtures("bars")
def test_a_load_that_fails_brings_the_bars_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError):
        LLM(str(tmp_path))
    assert hf_logging.set_tqdm_hook(None) is None
