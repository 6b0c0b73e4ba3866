"""The language models of folders that read pictures, too: the texts of the whole model, by older and newer names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.errors import UnsupportedModelError

pytestmark = pytest.mark.by_change("src/outrider/loading/", "tests/model/test_language_parts.py")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 61, "head_dim": 8, "max_position_embeddings": 160,
}  # fmt: skip
EYE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16}
TURNED: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
OTHER_EYE: dict[str, Any] = {**EYE, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
SMALL_EYE: dict[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
PIXTRAL: dict[str, Any] = {
    **EYE, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
TOKENS = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}
#: The names of configurations and models, and what makes them small.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": ("Mistral3", {"text_config": {**TEXT, "model_type": "mistral"}, "vision_config": PIXTRAL}),
    "qwen2_vl": (
        "Qwen2VL",
        {
            "text_config": {**TEXT, **TURNED},
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
        },
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", {"text_config": {**TEXT, **TURNED}, "vision_config": OTHER_EYE}),
    "qwen3_vl": (
        "Qwen3VL",
        {"text_config": {**TEXT, **TURNED}, "vision_config": {**OTHER_EYE, "deepstack_visual_indexes": [0]}},
    ),
}


def saved(kind: str, folder: Path, *, tied: bool = False) -> tuple[str, list[int]]:
    """A checkpoint, and what stock transformers writes with all of it."""
    name, parts = KINDS[kind]
    tokens = {} if kind == "mistral3" else TOKENS
    config = getattr(transformers, f"{name}Config")(**parts, **tokens, tie_word_embeddings=tied, bos_token_id=None)
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    ids = torch.tensor([PROMPT])
    found = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    return str(folder), found[0, len(PROMPT) :].tolist()


def written(folder: str) -> list[int]:
    llm = LLM(folder, dtype="float32", speculation="none")
    assert llm.engine.runner.backend.name == "fused"
    return list(llm.generate([PROMPT], GREEDY)[0].token_ids)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.core] if kind == "mistral3" else []) for kind in KINDS]
)
def test_texts_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    folder, want = saved(kind, tmp_path)
    assert len(set(want)) > 3
    assert written(folder) == want


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl"])
def test_tied_output_layers_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    folder, want = saved(kind, tmp_path, tied=True)
    assert not any("lm_head" in name for name in load_file(tmp_path / "model.safetensors"))
    assert written(folder) == want


def test_older_names_are_read_too(tmp_path: Path) -> None:
    """As most folders of Mistral Small have them. Without a word on tied embeddings, an output layer of its own is used."""
    folder, want = saved("mistral3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    for new, old in names.items():
        tensors = {name.replace(new, old, 1) if name.startswith(new) else name: each for name, each in tensors.items()}
    assert any(name.startswith("language_model.model.layers") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    assert written(folder) == want


def test_a_part_whose_weights_are_quantised_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = saved("mistral3", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    with pytest.raises(UnsupportedModelError, match="multimodal model of type 'mistral3'"):
        LLM(folder)
