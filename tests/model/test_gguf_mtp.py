"""Layers of GGUF files that predict several tokens, against the same layers in folders and against the reference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from outrider import LLM, DraftModel, Mtp, SamplingParams
from outrider.cli import options
from outrider.errors import HeadMismatchError, ModelError, ModelLoadError, UnsupportedModelError
from outrider.heads.formats.mtp import MtpTensors, name_mtp, read_mtp, read_mtp_config
from outrider.heads.mtp import MtpLayer, load_mtp_layer
from outrider.lab.convert.gguf_families import FAMILIES as WRITTEN
from outrider.lab.convert.gguf_family import AS_IT_IS, FileTensor
from outrider.lab.doctor.examination import model_facts
from outrider.lab.prove.tiny_heads import save_random_mtp
from outrider.lab.tune.tuner import candidates
from outrider.propose.defaults import drafter_at
from tests.model.core import core
from tests.model.gguf_families import SHAPES, as_ling, save
from tests.model.gguf_files import Kinds, Written
from tests.model.mtp_reference import MtpReference
from tests.model.test_feature_heads import BOUND, Watch, faults
from tests.model.test_gguf_families import folder, kinds
from tests.model.test_mtp import way
from tests.model.test_target import Oracle

pytest.importorskip("gguf")
PROMPT = [(7 * i * i + 3 * i) % 61 for i in range(20)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@dataclass(frozen=True)
class Family:
    """A family of files with such layers, the layout of its folders, and how many there are."""

    name: str
    layout: str
    num_layers: int = 1


QWEN, DEEPSEEK = Family("qwen3_5_text", "qwen3_next"), Family("deepseek_v3", "deepseek_v3", 2)
GLM = Family("glm4_moe", "deepseek_v3")
#: Whose layers look back over a window.
MIMO = Family("mimo_v2_flash", "mimo_v2", 3)
NEXT = Family("qwen3_next", "qwen3_next")
FAMILIES = (QWEN, DEEPSEEK, Family("qwen3_5_moe_text", "qwen3_next"), NEXT, GLM, MIMO)
families = pytest.mark.parametrize(
    "family", core(FAMILIES, (QWEN, DEEPSEEK), "src/outrider/loading/gguf/", "tests/model/gguf_"), ids=str
)


def made(family: Family, path: Path) -> str:
    changes = (
        {}
        if family.layout in ("qwen3_next", "mimo_v2")
        else {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    )
    source = folder(family.name, path, **changes)  # the reference knows no other rotary positions
    return save_random_mtp(Path(source), source, family.layout, family.num_layers, scale=0.15)


def layers_of(source: str) -> list[MtpLayer]:
    config = AutoConfig.from_pretrained(source)
    told = read_mtp_config(source, config)
    place = (torch.float32, torch.device("cpu"))
    return [load_mtp_layer(source, told, tensors, *place) for tensors in read_mtp(source, config)]


def weights_of(layer: MtpLayer, number: int) -> dict[str, Tensor]:
    """A layer by the names that it would have in the model."""
    own = {"fc": layer.fc, "enorm": layer.embedding_norm, "hnorm": layer.hidden_norm, "shared": layer.decoder.norm}
    decoder = layer.decoder.stack.layers[0].state_dict()
    found = {f"model.layers.{number}.{name}": weight for name, weight in decoder.items()}
    return found | {f"{number}.{name}": module.weight for name, module in own.items()}


def behind(source: str) -> Iterator[tuple[FileTensor, Tensor]]:
    """The tensors of a file of the layers of a folder."""
    config = AutoConfig.from_pretrained(source)
    family, deep = WRITTEN[config.model_type], deepcopy(config)
    for number, layer in enumerate(layers_of(source), config.num_hidden_layers):
        deep.num_hidden_layers = number + 1
        weights = weights_of(layer, number)
        for tensor in family.tensors(deep, [name for name in weights if name.startswith("model.")]):
            yield tensor, weights[tensor.stock]
        names = {"fc": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared": "shared_head_norm"}
        for own, theirs in names.items():
            change = AS_IT_IS if own == "fc" else family.norms
            place = "layer_output_norm" if (own, family.architecture) == ("shared", "mimo2") else f"nextn.{theirs}"
            name = f"blk.{number}.{place}.weight"
            yield FileTensor(name, f"{number}.{own}", lambda rows: rows, change=change), weights[f"{number}.{own}"]


def written(source: str, path: Path, kinds: Kinds, num_layers: int, **more: Any) -> Written:
    config = AutoConfig.from_pretrained(source)
    counts: dict[str, Any] = {
        "nextn_predict_layers": num_layers,
        "block_count": config.num_hidden_layers + num_layers,
    }
    if config.model_type == "mimo_v2_flash":
        windows = [kind == "sliding_attention" for kind in config.layer_types] + [True] * num_layers
        counts["attention.sliding_window_pattern"] = windows
        counts["attention.head_count_kv"] = [config.num_key_value_heads * (2 if window else 1) for window in windows]
    return Written(source, path, kinds, behind=behind(source), **counts | more)


def plain(file: Written, source: str, path: Path) -> str:
    """A folder of what a file stands for, with its layers."""
    found = file.plain(path)
    config, layers = AutoConfig.from_pretrained(source), []
    for number, layer in enumerate(layers_of(source), config.num_hidden_layers):
        for name, weight in weights_of(layer, number).items():
            weight.copy_(file.values[name].reshape(weight.shape))
        own = (layer.fc.weight, layer.embedding_norm.weight, layer.hidden_norm.weight)
        layers.append(MtpTensors(*(weight.detach() for weight in own), layer.decoder.tensors()))
    tensors = load_file(path / "model.safetensors") | name_mtp(layers, config, source)
    save_file({name: weight.contiguous().clone() for name, weight in tensors.items()}, path / "model.safetensors")
    return found


def drafted(model: str, **how: Any) -> tuple[tuple[int, ...], int]:
    llm = LLM(model, speculation="none", **how)
    output = llm.generate([PROMPT], GREEDY, speculation=way(num_draft_tokens=4))[0]
    assert faults([output]) == 0
    assert output.token_ids == llm.generate([PROMPT], GREEDY)[0].token_ids
    return output.token_ids, output.outputs[0].stats.num_draft_tokens


@families
def test_layers_of_floats_draft_what_the_reference_says(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made(family, tmp_path / "source")
    file = written(source, tmp_path / "m.gguf", ("F32",), family.num_layers)
    watch = Watch(MtpReference(source, family.layout, family.num_layers, Oracle(source).model), monkeypatch)
    _, count = drafted(str(file.path), dtype="float64")
    assert watch.worst <= BOUND
    assert watch.num_rows >= count > 4


def test_layers_of_ling_draft_what_the_reference_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose norm behind a layer has another name."""
    source = made(GLM, tmp_path / "source")
    file = as_ling(written(source, tmp_path / "glm.gguf", ("F32",), 1).path, tmp_path / "ling.gguf")
    watch = Watch(MtpReference(source, GLM.layout, 1, Oracle(source).model), monkeypatch)
    drafted(file, dtype="float64")
    assert watch.worst <= BOUND
    assert watch.num_rows > 4


@families
def test_blocks_draft_what_they_stand_for(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made(family, tmp_path / "source")
    file = written(source, tmp_path / "m.gguf", kinds, family.num_layers)
    stood_for = plain(file, source, tmp_path / "plain")
    watch = Watch(MtpReference(stood_for, family.layout, family.num_layers, Oracle(stood_for).model), monkeypatch)
    drafted(str(file.path), dtype="float64")
    assert watch.worst <= BOUND
    assert watch.num_rows > 4


@families
def test_rounded_rows_change_no_text(family: Family, tmp_path: Path) -> None:
    """As a file is computed by itself: matrices in their blocks, and rows of 8 bits."""
    file = written(made(family, tmp_path / "source"), tmp_path / "m.gguf", kinds, family.num_layers)
    assert drafted(str(file.path))[1] > 4


def test_a_file_of_the_layers_alone_drafts_for_the_model_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are published beside trunks, with the embeddings and the last norm of the model."""
    source = made(QWEN, tmp_path / "source")
    whole = written(source, tmp_path / "whole.gguf", ("F32",), 1)
    trunk = Written(source, tmp_path / "trunk.gguf", ("F32",))
    alone = trimmed(whole.path, tmp_path / "mtp-alone.gguf")
    watch = Watch(MtpReference(source, QWEN.layout, 1, Oracle(source).model), monkeypatch)
    llm = LLM(str(trunk.path), dtype="float64", speculation="none")
    speculation = way(num_draft_tokens=3).replace(method=Mtp(model=str(alone)))
    assert faults(llm.generate([PROMPT], GREEDY, speculation=speculation)) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 4
    with pytest.raises(UnsupportedModelError, match="carries no layers"):
        llm.generate([PROMPT], GREEDY, speculation=way())
    assert [type(drafter_at(str(path))) for path in (alone, whole.path, trunk.path)] == [Mtp, DraftModel, DraftModel]
    with LLM(str(trunk.path), draft_model=str(alone)) as llm:
        assert "mtp" in {each.name for each in llm.speculation.candidates}
        assert llm.generate([PROMPT], GREEDY)
    with pytest.raises(UnsupportedModelError, match=r"drafts for a target \(method mtp\)"):
        LLM(str(alone))


def trimmed(path: Path, out: Path, drop: tuple[str, ...] = ("blk.0.", "blk.1.", "blk.2.", "blk.3.")) -> Path:
    """A file without some of the tensors of another."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if not tensor.name.startswith(drop):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_a_missing_norm_behind_the_layer_is_that_of_the_model(tmp_path: Path) -> None:
    """llama.cpp does the same."""
    whole = written(made(QWEN, tmp_path / "source"), tmp_path / "whole.gguf", ("F32",), 1)
    found = trimmed(whole.path, tmp_path / "m.gguf", ("blk.4.nextn.shared_head_norm",))
    drafted(str(found))


@pytest.mark.parametrize(
    ("drop", "told"),
    [
        ("blk.4.nextn.hnorm", "layer 4 that predicts several tokens has no nextn.hnorm.weight"),
        ("blk.4.ffn_up", "layers.0.mlp.up_proj.weight first"),
        ("blk.4.nextn.eh_proj", "layer 4 that predicts several tokens has no nextn.eh_proj.weight"),
    ],
)
def test_a_layer_that_lacks_a_tensor_is_refused_and_the_model_still_writes(drop: str, told: str, tmp_path: Path) -> None:
    whole = written(made(QWEN, tmp_path / "source"), tmp_path / "whole.gguf", ("F32",), 1)
    llm = LLM(str(trimmed(whole.path, tmp_path / "m.gguf", (drop,))), speculation="none")
    with pytest.raises(ModelError, match=told) as caught:
        llm.generate([PROMPT], GREEDY, speculation=way())
    assert isinstance(caught.value, ModelLoadError)
    assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 8


def test_layers_of_another_model_are_refused_by_what_differs(tmp_path: Path) -> None:
    source = made(QWEN, tmp_path / "source")
    whole = written(source, tmp_path / "whole.gguf", ("F32",), 1)
    other = save("qwen3_5_text", tmp_path / "other", **SHAPES["qwen3_5_text"] | {"hidden_size": 128, "head_dim": 64})
    with pytest.raises(HeadMismatchError, match="hidden_size=256, and the target has 128") as caught:
        LLM(other, speculation="none").generate(
            [PROMPT], GREEDY, speculation=way().replace(method=Mtp(model=str(whole.path)))
        )
    assert (caught.value.field, caught.value.needed, caught.value.found) == ("hidden_size", 128, 256)


def methods(llm: LLM) -> list[str]:
    return [candidate.name for candidate in llm.speculation.candidates]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_auto_drafts_with_the_layers_that_a_checkpoint_carries(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands say so when they load it."""
    source = made(QWEN, tmp_path / "source")
    model = source if kind == "folder" else str(written(source, tmp_path / "m.gguf", kinds, 1).path)
    console = Console(stderr=True, width=300)
    llm = options.load(console, model, None, chats=False)
    assert f"{model}: carries 1 prediction layer: mtp, in use" in capsys.readouterr().err
    assert model_facts(llm.engine.runner).prediction_layers == 1
    assert methods(llm) == ["mtp", "suffix", "then"]
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == llm.generate([PROMPT], GREEDY, speculation="none")[0].token_ids
    assert methods(options.load(console, model, "suffix", chats=False)) == ["suffix"]
    assert "1 prediction layer: mtp, not in use" in capsys.readouterr().err


def test_layers_that_cannot_be_read_are_named_and_left_out_by_auto(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = written(made(QWEN, tmp_path / "source"), tmp_path / "whole.gguf", ("F32",), 1)
    found = trimmed(whole.path, tmp_path / "m.gguf", ("blk.4.ffn_up",))
    with caplog.at_level(logging.WARNING, "outrider"):
        llm = LLM(str(found))
    assert methods(llm) == ["suffix", "token_recycling"]
    assert "which are not used" in caplog.text
    assert "in use" not in caplog.text.replace("not in use", "")
    assert "mlp.up_proj.weight" in caplog.text


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_tuning_tries_the_layers_that_a_checkpoint_carries(kind: str, tmp_path: Path) -> None:
    """With the choice that an engine makes of them. Ways that were asked for are those that are tried."""
    source = made(QWEN, tmp_path / "source")
    model = source if kind == "folder" else str(written(source, tmp_path / "m.gguf", kinds, 1).path)
    llm = LLM(model, speculation="none", dtype="float32")
    ways = {way.name: way.config for way in candidates(llm, (), None)}
    assert [name for name in ways if name.startswith("mtp")] == ["mtp k=1", "mtp k=2", "mtp k=3"]
    assert ways["auto"].method == LLM(model, dtype="float32").speculation.method
    assert [way.name for way in candidates(llm, ["ngram:3"], None)] == ["plain", "ngram k=3"]
    llm.load_method(ways["mtp k=2"])
