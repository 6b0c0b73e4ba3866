"""Checkpoints with rounded weights: transformers loads the weights that were rounded, and nothing half-written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.config import default_model
from outrider.errors import InvalidParameterError, ModelLoadError, StorageError, UnsupportedModelError
from outrider.kernels.formats import FORMATS
from outrider.lab.convert import compressed_tensors
from outrider.lab.convert.compressed_tensors import as_written, format_of, rounded_layers, write_compressed
from outrider.lab.measure.agreement import agreement_of_checkpoint, rounded_card
from tests.model import checkpoints
from tests.model.core import core

#: What writes such checkpoints, and the roundings themselves.
WRITERS = (
    "src/outrider/lab/convert/",
    "src/outrider/kernels/",
    "src/outrider/cli/",
    "tests/model/test_compressed_tensors.py",
)
FAMILIES = ["llama", "gemma2"]  # a head of its own, and one that is tied
NAMES = ["int4-g32", "int8", "int8-g32"]
WAYS = list(product(FAMILIES, NAMES, [torch.bfloat16, torch.float32]))


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("whole") / request.param
    return checkpoints.save(request.param, folder, seed=4, intermediate_size=96)


@pytest.mark.parametrize(("path", "name", "dtype"), core(WAYS, WAYS[::5], *WRITERS), indirect=["path"], ids=str)
def test_transformers_loads_the_rounded_weights(path: str, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    source = tmp_path / "source"
    whole: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    whole.save_pretrained(source)
    out = write_compressed(str(source), tmp_path / "out", FORMATS[name])
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    ids = torch.arange(20)[None] % checkpoints.VOCAB_SIZE
    with torch.inference_mode():
        got = loaded(ids).logits
        for layer, in_features in rounded_layers(str(source)).items():
            weight, written = whole.get_parameter(layer), as_written(FORMATS[name], in_features)
            weight.copy_(written.dequantise(written.store(weight), dtype))
        want = whole(ids).logits
    torch.testing.assert_close(got, want, rtol=0.02 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    assert sum(file.stat().st_size for file in out.glob("*.safetensors"))


def test_files_are_parted(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors")
    monkeypatch.setattr(compressed_tensors, "_FILE_BYTES", 20_000)
    out = write_compressed(path, tmp_path / "out", FORMATS["int4-g32"])
    assert len({file.stat().st_mode for file in Path(out).iterdir()}) == 1, "whoever may read one may read all"
    assert len(list(out.glob("*.safetensors"))) > 2
    AutoModelForCausalLM.from_pretrained(out)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


KILLED = """
import sys
from pathlib import Path
from outrider.lab.convert import compressed_tensors
from outrider.kernels.formats import FORMATS
compressed_tensors._FILE_BYTES = 10_000
real, calls = compressed_tensors._compressed, []
def slowly(*args):
    calls.append(args)
    if len(calls) == int(sys.argv[3]):
        print("now", flush=True)
        import time; time.sleep(60)
    return real(*args)
compressed_tensors._compressed = slowly
compressed_tensors.write_compressed(sys.argv[1], Path(sys.argv[2]), FORMATS["int4-g32"])
"""


@pytest.mark.by_change(*WRITERS)
@pytest.mark.parametrize("moment", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_what_is_killed_leaves_nothing_that_loads(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, moment: int
) -> None:
    path = checkpoints.save("llama", tmp_path_factory.mktemp("killed"), intermediate_size=96)
    command = [sys.executable, "-c", KILLED, path, str(tmp_path / "out"), str(moment)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    for left in tmp_path.iterdir():
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(left)
    write_compressed(path, tmp_path / "out", FORMATS["int4-g32"])
    assert (tmp_path / "out" / "config.json").exists()


def test_a_full_disk_leaves_nothing(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compressed_tensors, "_write_config", full)
    with pytest.raises(StorageError, match="No space left"):
        write_compressed(path, tmp_path / "out", FORMATS["int4-g32"])
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_rounded_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="groups of 64 do not divide"):
        write_compressed(path, tmp_path / "out", FORMATS["int4-g64"])
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(InvalidParameterError, match="not an empty folder"):
        write_compressed(path, tmp_path / "used", FORMATS["int4-g32"])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        write_compressed(str(tmp_path / "used"), tmp_path / "out", FORMATS["int4-g32"])
    for bits, group in ((3, 32), (4, None), (4, 48)):
        with pytest.raises(InvalidParameterError, match="there is no format"):
            format_of(bits, group)
    experts = checkpoints.save("mixtral", tmp_path / "experts")
    with pytest.raises(UnsupportedModelError, match="experts"):
        write_compressed(experts, tmp_path / "out", FORMATS["int4-g32"])
    whole: Any = AutoModelForCausalLM.from_pretrained(path)
    whole.model.layers[1].mlp.up_proj.weight.data[2, 3] = float("inf")
    whole.save_pretrained(tmp_path / "inf")
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds weights that are not finite"):
        write_compressed(str(tmp_path / "inf"), tmp_path / "out", FORMATS["int4-g32"])
    config = json.loads((tmp_path / "inf" / "config.json").read_text())
    (tmp_path / "inf" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModelError, match="quantised already"):
        write_compressed(str(tmp_path / "inf"), tmp_path / "out", FORMATS["int4-g32"])
    assert not (tmp_path / "out").exists()


def test_the_card_says_what_was_measured() -> None:
    model, text = (
        default_model("draft"),
        "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n" * 3,
    )
    layers = rounded_layers(model)
    costs = [agreement_of_checkpoint(model, FORMATS[name], layers, text) for name in ("int8", "int4-g32")]
    assert costs[0].original == costs[1].original
    assert 0 < costs[0].distance < costs[1].distance < 0.5
    assert all(cost.distance < cost.worst_distance <= 1 for cost in costs)
    assert 0 <= costs[0].divergence < costs[1].divergence
    assert abs(costs[0].rounded / costs[0].original - 1) < 0.05
    card = rounded_card("m", FORMATS["int4-g32"], len(layers), costs[1])
    assert f"{costs[1].rounded:.3f}" in card
    assert "not measured" in rounded_card("m", FORMATS["int4-g32"], len(layers), None)
    with pytest.raises(InvalidParameterError, match="fewer than two tokens"):
        agreement_of_checkpoint(model, FORMATS["int8"], layers, "")


def test_the_command_writes_a_folder_with_a_card(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from outrider.cli.app import app

    path = checkpoints.save("llama", tmp_path / "whole", intermediate_size=96)
    command = ["quantize", path, "--out", str(tmp_path / "out"), "--bits", "4", "--group-size", "32"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "28 matrices in int4-g32" in result.output
    assert (tmp_path / "out" / "README.md").read_text().startswith("# whole in int4-g32")
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, InvalidParameterError)
