"""`outrider convert` writes layers that predict several tokens: in the file of the model, and in one of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM, Mtp
from outrider.cli.app import app
from outrider.errors import ContradictionError, ModelError, UnsupportedModelError
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.prove.tiny_heads import save_random_mtp
from outrider.loading.gguf.header import read_gguf
from tests.model import checkpoints
from tests.model.core import core
from tests.model.test_feature_heads import faults
from tests.model.test_gguf_mtp import FAMILIES, GREEDY, PROMPT, QWEN, Family, made, written
from tests.model.test_mtp import watch_logits, way

pytest.importorskip("gguf")
pytestmark = pytest.mark.by_change(
    "src/outrider/lab/convert/", "src/outrider/loading/gguf/", "src/outrider/heads/", "tests/model/test_gguf_mtp"
)
families = pytest.mark.parametrize(
    "family", core(FAMILIES, FAMILIES[:2], "src/outrider/lab/convert/", "tests/model/test_gguf_mtp"), ids=str
)


def proposed(model: str, monkeypatch: pytest.MonkeyPatch, mtp: str | None = None, **how: Any) -> list[torch.Tensor]:
    """Logits of all draft tokens of a text, which is what plain decoding writes."""
    llm = LLM(model, speculation="none", **how)
    want = llm.generate([PROMPT], GREEDY)[0].token_ids
    with monkeypatch.context() as patch:
        rows = watch_logits(patch)
        drafting = way(num_draft_tokens=4).replace(method=Mtp(model=mtp))
        output = llm.generate([PROMPT], GREEDY, speculation=drafting)[0]
    assert faults([output]) == 0
    assert output.token_ids == want
    assert len(rows) > 2
    return rows


def same(ours: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(ours) == len(want) and all(map(torch.equal, ours, want))


@families
def test_proposals_of_a_file_have_the_bits_of_those_of_its_folder(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the file of the model, and from one that holds the layers alone."""
    source = made(family, tmp_path / "source")
    want = proposed(source, monkeypatch, dtype="float32")
    both = write_gguf(source, tmp_path / "all.gguf", parts=None)
    assert same(proposed(both, monkeypatch), want)
    model, layers = (write_gguf(source, tmp_path / f"{parts}.gguf", parts=parts) for parts in ("model", "layers"))
    assert same(proposed(model, monkeypatch, layers), want)
    with pytest.raises(ModelError):
        LLM(layers)
    every, alone = read_gguf(both).tensors.keys(), read_gguf(layers).tensors.keys()
    behind = {name for name in every if name.startswith("blk.") and name not in read_gguf(model).tensors}
    assert alone == behind | {"token_embd.weight", "output_norm.weight", "output.weight"}


@families
def test_tensors_are_those_that_the_rules_of_llama_cpp_give(family: Family, tmp_path: Path) -> None:
    source = made(family, tmp_path / "source")
    want = read_gguf(str(written(source, tmp_path / "want.gguf", ("BF16",), family.num_layers).path))
    found = read_gguf(write_gguf(source, tmp_path / "found.gguf", "bfloat16", parts="all"))
    assert {name: (t.type, t.shape) for name, t in found.tensors.items()} == {
        name: (t.type, t.shape) for name, t in want.tensors.items()
    }
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor.floats(), want.tensors[name].floats()), name


def converted(*given: str) -> Any:
    return CliRunner().invoke(app, ["convert", *given, "--to", "gguf", "--placeholders"])


def test_layers_of_another_folder_are_written_in_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `outrider train mtp` writes them, beside a checkpoint."""
    source = made(QWEN, tmp_path / "source")
    head = save_random_mtp(tmp_path / "head", source, "speculators", 1, scale=0.3)
    result = converted(source, "--mtp", head, "--type", "F32", "--out", str(tmp_path / "m.gguf"))
    assert "matrices in F32, 1 prediction layer" in result.output
    want = proposed(source, monkeypatch, head, dtype="float32")
    assert same(proposed(str(tmp_path / "m.gguf"), monkeypatch), want)
    assert not same(proposed(source, monkeypatch, dtype="float32"), want)


def test_the_command_says_what_a_file_holds(tmp_path: Path) -> None:
    source = made(QWEN, tmp_path / "source")
    for parts, held in (("all", True), ("model", False), ("layers", True)):
        out = str(tmp_path / f"{parts}.gguf")
        assert ("1 prediction layer" in converted(source, "--parts", parts, "--out", out).output) is held
    assert "1 prediction layer" in converted(source, "--out", str(tmp_path / "usual.gguf")).output


def test_what_no_file_holds_is_refused(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "m.gguf"))
    llama = checkpoints.save("llama", tmp_path / "llama", hidden_size=64, intermediate_size=64)
    refused = converted(llama, "--parts", "layers", *out).exception
    assert isinstance(refused, UnsupportedModelError)
    assert "files of llama have no layers that predict several tokens" in refused.problem
    source = made(QWEN, tmp_path / "source")
    assert isinstance(converted(source, "--mtp", source, "--parts", "model", *out).exception, ContradictionError)
    assert isinstance(converted(source, "--mtp", llama, *out).exception, UnsupportedModelError)
    plain = checkpoints.save("qwen3_5_text", tmp_path / "plain")
    assert isinstance(converted(plain, "--parts", "all", *out).exception, UnsupportedModelError)
