"""What the stock model says in the probe is kept for the next load of a GGUF file, and does not hide a wrong backend."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.kernels.library import available_sets
from outrider.loading.loaded_model import LoadedModel
from outrider.model import factory, keeping
from outrider.model import keeping as kept_reference
from outrider.model.fused import FusedDecoder
from outrider.model.keeping import read_reference
from tests.model.test_rounded_rows_of_files import write

pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")


class Loads:
    """Loads one file, and counts the passes of the stock model."""

    def __init__(self, path: str, patch: pytest.MonkeyPatch) -> None:
        self.path, self.passes = path, 0
        stock = factory.reference

        def counted(loaded: Any) -> Any:
            self.passes += 1
            return stock(loaded)

        patch.setattr(factory, "reference", counted)

    def backend(self, **settings: Any) -> str:
        with LLM(self.path, speculation="none", kv_cache_tokens=64, max_model_len=64, **settings) as llm:
            return llm.engine.runner.backend.name


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    monkeypatch.setenv(keeping.VARIABLE, str(tmp_path / "kept"))
    return Loads(write(tmp_path, "llama", ("Q8_0",)), monkeypatch)


def test_a_file_that_was_loaded_needs_no_pass_of_the_stock_model(loads: Loads) -> None:
    assert [loads.backend(), loads.backend()] == ["fused"] * 2
    assert loads.passes == 1
    os.utime(loads.path, (1, 1))  # as if it were another file
    others: list[dict[str, Any]] = [{}, {"activations": "none"}, {"dtype": "float32"}, {"quantization": "int4-g32"}]
    assert [loads.backend(**each) for each in others] == ["fused"] * 4
    assert [loads.backend(**each) for each in others] == ["fused"] * 4
    assert loads.passes == 5


def test_what_contradicts_the_backend_is_computed_anew(loads: Loads, tmp_path: Path) -> None:
    loads.backend()
    (kept,) = (tmp_path / "kept").glob("reference-*.json")
    right = json.loads(kept.read_text())
    wrong = torch.randn(right["shape"]).numpy().tobytes()
    for content in ({**right, "logits": b64encode(wrong).decode()}, {"shape": [1]}):
        kept.write_text(json.dumps(content))
        assert loads.backend() == "fused"
        assert json.loads(kept.read_text()) == right
    assert loads.passes == 3


def test_a_wrong_backend_is_still_found(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loads.backend() == "fused"
    stock = FusedDecoder.forward

    def wrong(self: Any, *args: Any) -> Any:
        found = stock(self, *args)
        found.logits.mul_(1.5)
        return found

    monkeypatch.setattr(FusedDecoder, "forward", wrong)
    assert loads.backend() == "paged"
    assert loads.passes == 2


class OnGpu(torch.Tensor):
    """A tensor that lies where NumPy cannot read it."""

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def to(self, device: Any, *rest: Any) -> torch.Tensor:
        return torch.Tensor.to(self, device, *rest).as_subclass(torch.Tensor if device == "cpu" else OnGpu)


def test_it_comes_from_the_device_and_goes_there(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = factory.reference
    monkeypatch.setattr(
        factory, "reference", lambda loaded: replace(found := stock(loaded), logits=found.logits.as_subclass(OnGpu))
    )
    found: list[LoadedModel] = []
    monkeypatch.setattr(factory, "read_reference", lambda loaded: found.append(loaded))
    assert loads.backend() == "fused"
    kept = read_reference(found[0])
    assert kept is not None
    path = kept_reference._path(found[0])
    monkeypatch.setattr(kept_reference, "_path", lambda loaded: path)
    there = read_reference(replace(found[0], device=torch.device("meta")))
    assert there is not None
    assert (kept.logits.device.type, there.logits.device.type) == ("cpu", "meta")


def test_nothing_is_kept_where_nothing_may_be(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keeping.VARIABLE, "off")
    assert [loads.backend(), loads.backend()] == ["fused"] * 2
    assert loads.passes == 2
