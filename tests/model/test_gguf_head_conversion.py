"""Heads of EAGLE-3 that become GGUF files: every weight keeps its bits, and what llama.cpp would not compute is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM, Eagle3, SamplingParams, SpeculationConfig
from outrider.cli.app import app
from outrider.config import default_model
from outrider.errors import ContradictionError, InvalidParameterError, StorageError, UnsupportedModelError
from outrider.heads.formats.published import is_head, read_head
from outrider.lab.convert.gguf import write_gguf, write_gguf_head
from outrider.lab.convert.gguf_vocabulary import placeholders
from outrider.lab.peers.base import PeerModels
from outrider.lab.peers.known import open_peer
from outrider.lab.prove.tiny import PIECES, save_tiny_llama
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle
from outrider.loading.gguf.header import read_gguf
from tests.model import checkpoints
from tests.model.core import of_formats
from tests.model.test_head_conversion import EAGLES, YARN
from tests.model.test_hostile_heads import exchange

pytestmark = of_formats
IDS: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
HEADS: dict[str, dict[str, Any]] = {
    "all tokens": {"layout": "safeailab", **IDS, "own_output": False},
    "some tokens": {"layout": "safeailab", **IDS, "draft_tokens": (3, 5, 8, 60)},
    "heads that share keys": {
        "layout": "speculators", **IDS, "norm_before_residual": True,
        "sizes": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 5e5},
    },
    "scaled": {"layout": "speculators", **IDS, "sizes": {"rope_scaling": YARN}},
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("target"), seed=3)


def written(head: str, path: Path, target: str | None = None) -> str:
    write_gguf_head(head, path, target, placeholders())
    return str(path)


@pytest.mark.parametrize("how", HEADS.values(), ids=list(HEADS))
def test_a_head_comes_back_to_the_bit(target: str, tmp_path: Path, how: dict[str, Any]) -> None:
    first = read_head(save_random_eagle(tmp_path / "head", target, **how))
    second = read_head(written(first.folder, tmp_path / "head.gguf"))
    a, b = first.network.state_dict(), second.network.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    drafted = [None if each.tokens is None else each.tokens.tolist() for each in (first, second)]
    assert drafted[0] == drafted[1]
    for name in ("aux_layers", "norm_before_residual", "draft_vocab_size", "target_hidden_size", "vocab_size"):
        assert getattr(first.config, name) == getattr(second.config, name)
    rotary = [each.config.layer.rope_parameters for each in (first, second)]
    assert all(rotary[1][name] == value for name, value in rotary[0].items())
    assert second.config.layer.rms_norm_eps == pytest.approx(first.config.layer.rms_norm_eps, rel=1e-7)  # float32 in files


def test_tokens_are_absolute_and_rows_are_those_of_llama_cpp(target: str, tmp_path: Path) -> None:
    head = read_head(save_random_eagle(tmp_path / "head", target, "safeailab", draft_tokens=(3, 5, 8, 60), **IDS))
    file = read_gguf(written(head.folder, tmp_path / "head.gguf"))
    assert file.tensors["d2t"].integers().tolist() == [3, 5, 8, 60]
    rows = head.network.state_dict()["layer.self_attn.q_proj.weight"]
    size = head.config.layer.head_dim
    neighbours = file.tensors["blk.0.attn_q.weight"].floats()[:2]
    assert torch.equal(neighbours, rows[[0, size // 2]])  # dimension i comes beside i + head_dim / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_stay_as_they_are(target: str, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_random_eagle(tmp_path / "head", target, "safeailab", **IDS)
    for name in ("fc.weight", "midlayer.mlp.up_proj.weight", "norm.weight"):
        stock = {"fc.weight": "fc.weight", "norm.weight": "norm.weight"}.get(name, "layer.mlp.up_proj.weight")
        exchange(folder, name, read_head(folder).network.state_dict()[stock].to(dtype))
    file = read_gguf(written(folder, tmp_path / "head.gguf"))
    assert file.tensors["fc.weight"].type == {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    a, b = (read_head(each).network.state_dict() for each in (folder, str(tmp_path / "head.gguf")))
    assert all(torch.equal(a[name].float(), b[name]) for name in a)


def test_layers_that_go_by_the_target_are_named(tmp_path: Path) -> None:
    """And what is written drafts."""
    target, path = default_model("target"), tmp_path / "head.gguf"
    folder = save_random_eagle(tmp_path / "head", target, "safeailab")
    assert read_head(folder).config.aux_layers is None
    with pytest.raises(InvalidParameterError, match=r"target=None.*does not name the model"):
        written(folder, path)
    with pytest.raises(UnsupportedModelError, match=r"its pre-tokenizer .* has no name in GGUF files"):
        write_gguf_head(folder, path, target)  # the vocabulary would be the target's own
    written(folder, path, target)
    assert read_head(str(path)).config.aux_layers == (2, 4, 5)
    way = SpeculationConfig(method=Eagle3(model=str(path)), num_draft_tokens=3)
    with LLM(target, speculation=way) as llm:
        (out,) = llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=4))
    assert out.stats.num_draft_tokens > 0
    assert out.stats.num_proposer_faults == 0


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (EAGLES["norms"], "norms of its features"),
        ({**HEADS["all tokens"], "layout": "speculators", "norm_output": True}, "norm_output"),
        (EAGLES["layers"], "2 layers of the target"),
        ({**HEADS["some tokens"], "own_embedding": True}, "token_embd.weight is of float64"),
        ({**HEADS["scaled"], "sizes": {"hidden_act": "gelu"}}, "its hidden_act is 'gelu'"),
        ({"layout": "safeailab1"}, "no heads of eagle1"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(target: str, tmp_path: Path, how: dict[str, Any], told: str) -> None:
    folder = save_random_eagle(tmp_path / "head", target, **how)
    with pytest.raises(UnsupportedModelError) as caught:
        written(folder, tmp_path / "head.gguf", target)
    assert told in str(caught.value)
    assert not (tmp_path / "head.gguf").exists()


def test_biases_are_refused(target: str, tmp_path: Path) -> None:
    folder = save_random_eagle(tmp_path / "head", target, "safeailab", **IDS)
    for part, weight in read_head(folder).network.get_submodule("layer.self_attn").named_parameters():
        exchange(folder, f"midlayer.self_attn.{part.removesuffix('weight')}bias", torch.zeros(len(weight)))
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_bias": True}))
    with pytest.raises(UnsupportedModelError, match="it has biases"):
        written(folder, tmp_path / "head.gguf", target)


def run(*words: Any) -> str:
    found = CliRunner().invoke(app, ["convert", *map(str, words)])
    if found.exception is not None:
        raise found.exception
    return found.stdout


def test_the_command_tells_heads_from_checkpoints(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = save_random_eagle(tmp_path / "head", target, "safeailab", **IDS)
    old = save_random_eagle(tmp_path / "old", target, "safeailab1")
    block = save_random_dflash(tmp_path / "block", target)
    assert [is_head(folder) for folder in (head, old, block, target, str(tmp_path))] == [True, True, True, False, False]
    out = tmp_path / "head.gguf"
    assert "a head of eagle3 in the format of gguf" in run(head, "--to", "gguf", "--out", out, "--placeholders")
    with pytest.raises(InvalidParameterError, match="it is there already"):
        run(head, "--to", "gguf", "--out", out, "--placeholders")
    with pytest.raises(InvalidParameterError, match=r"does not end in \.gguf"):
        run(head, "--to", "gguf", "--out", tmp_path / "new.bin", "--placeholders")
    with pytest.raises(ContradictionError, match="a head keeps its weights"):
        run(head, "--to", "gguf", "--out", tmp_path / "new.gguf", "--type", "Q8_0")
    with pytest.raises(ContradictionError, match="has no vocabulary"):
        run(head, "--to", "speculators", "--out", tmp_path / "new", "--placeholders")
    for other, method in ((old, "eagle1"), (block, "dflash")):
        with pytest.raises(UnsupportedModelError, match=f"no heads of {method}"):
            run(other, "--to", "gguf", "--out", tmp_path / "new.gguf", "--placeholders")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gguf.GGUFWriter.write_tensors_to_file", full)
    with pytest.raises(StorageError, match=r"new\.gguf.*No space left"):
        run(head, "--to", "gguf", "--out", tmp_path / "new.gguf", "--placeholders")
    assert not list(tmp_path.glob("new.gguf*"))


@pytest.mark.slow  # with the extra `peers`
def test_llama_cpp_accepts_the_same_drafts(tmp_path: Path) -> None:
    """Where it writes the same text: near ties of the target fall on another side now and then."""
    pytest.importorskip("xllamacpp")
    target = save_tiny_llama(tmp_path / "target", 1, vocab_size=16, num_layers=4)
    head = save_random_eagle(tmp_path / "head", target, "safeailab", **IDS)
    prompts = [[(5 * i * i + k * i + k) % 16 for i in range(6 + k)] for k in range(6)]
    with open_peer("llama.cpp", PeerModels(target, None, "float32", 1, tmp_path / "kept", head)) as peer:
        mode = next(mode for mode in peer.modes(full=False) if mode.name == "eagle3 k=3")
        theirs = [peer.generate(mode, [prompt], max_tokens=48, temperature=0.0, seed=None) for prompt in prompts]
    with LLM(target, speculation=SpeculationConfig(method=Eagle3(model=head), num_draft_tokens=3)) as llm:
        ours = [llm.generate([prompt], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)) for prompt in prompts]
    pairs = [(one, run) for (one,), run in zip(ours, theirs, strict=True) if tuple(one.token_ids) == run.texts[0]]
    assert len(pairs) >= 4
    assert sum(one.stats.num_accepted_tokens for one, _ in pairs) > 8
    for one, run in pairs:
        assert one.stats.num_draft_tokens == run.num_draft_tokens
        assert one.stats.num_accepted_tokens == run.num_accepted_tokens


def test_a_head_for_a_file_takes_its_vocabulary(target: str, tmp_path: Path) -> None:
    """With all that the file says of it, as it stands there."""
    speaks = save_tiny_llama(tmp_path / "speaks", 1, num_layers=8, speaks=True, vocab_size=len(PIECES))
    file = write_gguf(speaks, tmp_path / "target.gguf", "float32", placeholders(eos_token_id=1))
    head = save_random_eagle(tmp_path / "head", speaks, "safeailab")  # its layers go by the target, too
    write_gguf_head(head, tmp_path / "head.gguf", file)
    theirs, ours = (
        {key: value for key, value in read_gguf(path).metadata.items() if key.startswith("tokenizer.")}
        for path in (file, str(tmp_path / "head.gguf"))
    )
    assert theirs
    assert ours == theirs
    assert read_head(str(tmp_path / "head.gguf")).config.aux_layers == (2, 4, 5)
    other = write_gguf(target, tmp_path / "other.gguf", "float32", placeholders())
    with pytest.raises(InvalidParameterError, match=r"target.*its vocabulary has \d+ tokens, and \d+ are needed"):
        write_gguf_head(head, tmp_path / "second.gguf", other)
    assert not (tmp_path / "second.gguf").exists()
