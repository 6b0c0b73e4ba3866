"""A target whose next token follows from the last one alone, almost surely, so that what must be learnt is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.loading.exclusive import exclusive_transformers
from outrider.records import DataSettings, Manifest, Record, TargetFacts, write_shard

VOCAB, WIDTH, LAYERS = 24, 64, 4
#: What follows each token: one cycle through all of them, in no simple order.
NEXT = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5)).tolist()
FOLLOWS = {token: NEXT[(NEXT.index(token) + 1) % VOCAB] for token in range(VOCAB)}


#: A gated delta rule in all layers but the last one.
_HYBRID: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
}


def save_markov_target(folder: Path, *, sharpness: float = 8.0, hybrid: bool = False) -> str:
    """Write a Llama whose layers add almost nothing, so that its hidden state tells the last token and no other.

    Args:
        folder: The folder to write to.
        sharpness: How far the logit of the token that follows lies above the others.
        hybrid: Whether it is a Qwen3.5 instead, with running states.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_5_text" if hybrid else "llama",
        **(_HYBRID if hybrid else {}),
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(11)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        rows = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0][:VOCAB]  # orthogonal: no token looks like another
        model.model.embed_tokens.weight.copy_(rows)
        for layer in model.model.layers:
            mixer = layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj
            mixer.weight.mul_(1e-3)
            layer.mlp.down_proj.weight.mul_(1e-3)
        for token, follower in FOLLOWS.items():
            model.lm_head.weight[follower] = rows[token] * sharpness / WIDTH**0.5
    with exclusive_transformers():
        model.save_pretrained(folder)
    return str(folder)


def walk(start: int, length: int) -> list[int]:
    """The text that the target writes from a token on."""
    tokens = [start]
    while len(tokens) < length:
        tokens.append(FOLLOWS[tokens[-1]])
    return tokens


def save_data(
    folder: Path, target: str, *, texts: int = 48, length: int = 24, temperature: float = 1.0, num_prompt_tokens: int = 4
) -> Path:
    """Texts of the target, every sixth held out; no engine is needed for them."""
    facts = TargetFacts(name=target, vocab_size=VOCAB, hidden_size=WIDTH, num_layers=LAYERS)
    manifest = Manifest(target=facts, settings=DataSettings(max_tokens=length - 4, temperature=temperature))
    records = [
        Record(i.to_bytes(16, "big"), 0, i % 6 == 0, num_prompt_tokens, torch.tensor(walk(i % VOCAB, length - i % 5)))
        for i in range(texts)
    ]
    manifest.with_shard(write_shard(folder, "shard-00000.safetensors", records)).save(folder)
    return folder
