"""Small random checkpoints of models with an encoder, whose texts depend on every part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 61
START = 3
#: Distances beyond the last bucket of a bias occur in texts of a few dozen tokens.
_T5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4,
    "num_layers": 2, "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": START,
    "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip

_BART: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 160,
    "decoder_start_token_id": START, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "forced_eos_token_id": None,
}  # fmt: skip
#: Other types by the class of their configuration: with a table of distances in every layer, with local attention in
#: the encoder, and with learned or fixed embeddings of positions.
OTHERS: dict[str, dict[str, Any]] = {
    "BartConfig": _BART,
    "MT5Config": _T5,
    "UMT5Config": _T5,
    "LongT5Config": {**_T5, "local_radius": 4, "global_block_size": 4},
    "MBartConfig": _BART,
    "PLBartConfig": _BART,
    "PegasusConfig": _BART,
    "MarianConfig": _BART,
    "BlenderbotConfig": _BART,
    "BlenderbotSmallConfig": _BART,
    "BigBirdPegasusConfig": {**_BART, "attention_type": "original_full"},
}
#: Those of them whose decoders the kernels know, as they know T5.
DESCRIBED = ("MT5Config", "UMT5Config", "LongT5Config")


def save_other(folder: Path, kind: str) -> str:
    """Write a model of one of the other types; returns its path."""
    import transformers

    config = getattr(transformers, kind)(**OTHERS[kind])
    return _save_wide(transformers.AutoModelForSeq2SeqLM.from_config(config).double(), folder, 1)


def save(folder: Path, *, seed: int = 1, forced: int | None = None, **changes: Any) -> str:
    """Write a T5 of an encoder with two layers and a decoder with three; returns its path. `forced` stands behind the start
    token of every text."""
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(**{**_T5, **changes})).double()
    model.generation_config.forced_bos_token_id = forced
    return _save_wide(model, folder, seed)


def _save_wide(model: Any, folder: Path, seed: int) -> str:
    """Write a model with weights that are wide enough that every part of it matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "relative" in name:
                weight.normal_(0.0, 2.0, generator=generator)
            elif weight.dim() > 1:
                spread = 0.1 if "shared" in name else 10.0 if "positions" in name else 0.4 if ".q." in name else 3.0
                weight.normal_(0.0, spread / weight.shape[-1] ** 0.5, generator=generator)
            else:
                weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    model.save_pretrained(folder)
    return str(folder)


@torch.inference_mode()
def stock_logprobs(path: str, source: list[int], text: list[int]) -> torch.Tensor:
    """[len(text), vocab_size] what the stock model says to a text behind the start token."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float64).eval()
    begun = torch.tensor([[START, *text[:-1]]])
    logits = model(input_ids=torch.tensor([source]), decoder_input_ids=begun, use_cache=False).logits[0]
    return logits.log_softmax(-1)


def greedy_by_transformers(
    path: str, source: list[int], num_tokens: int, begun: tuple[int, ...] = (START,)
) -> tuple[int, ...]:
    """What `generate` writes behind the start token, or behind what the decoder is given. Its cache is left out: it has
    as many layers as the encoder."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float64).eval()
    given = {} if begun == (START,) else {"decoder_input_ids": torch.tensor([begun])}
    out = model.generate(torch.tensor([source]), max_new_tokens=num_tokens, do_sample=False, use_cache=False, **given)
    return tuple(out[0, len(begun) :].tolist())
