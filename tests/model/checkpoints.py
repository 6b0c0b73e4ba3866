"""Small random checkpoints of every family, written by transformers, with weights wide enough that a wrong mask matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 61
WINDOW = 6

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _config(family: str) -> Any:
    import transformers as t

    if family == "llama":
        return t.LlamaConfig(**_SHAPE)
    if family == "mistral":
        return t.MistralConfig(**_SHAPE, sliding_window=WINDOW)
    if family == "qwen3":
        return t.Qwen3Config(**_SHAPE, head_dim=8)
    if family == "gemma2":
        return t.Gemma2Config(
            **_SHAPE, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=5.0
        )
    assert family == "gpt2"
    return t.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=160,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gpt2")


def save(family: str, folder: Path, *, seed: int = 0, layers: int | None = None) -> str:
    """Write a checkpoint of `family`; returns its path."""
    from transformers import AutoModelForCausalLM

    config = _config(family)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    model = AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
    model.save_pretrained(folder)
    return str(folder)


@torch.inference_mode()
def greedy_by_transformers(path: str, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    """What the stock model writes, computing everything anew for every token."""
    from transformers import AutoModelForCausalLM

    attention = "eager" if "gemma2" in path else "sdpa"  # sdpa drops soft-capping
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation=attention).eval()
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return tuple(text[len(prompt) :])
