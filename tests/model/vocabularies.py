"""Draft models of other vocabularies than the embedded target's: made for real, since no hub is asked."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from outrider.config import default_model


def save_permuted_and_cut(folder: Path, *, num_merges: int, seed: int = 0) -> str:
    """Write the embedded draft with its ids permuted and with the first merges of its tokenizer alone; returns the path.

    What it knows of the tokens that are left is what it knew before. What it lost it writes in smaller pieces.
    """
    from transformers import AutoModelForCausalLM

    source = Path(default_model("draft"))
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    lost = {"".join(pair) for pair in merges[num_merges:]} - {"".join(pair) for pair in merges[:num_merges]}
    kept = [text for text in vocab if text not in lost]
    random.Random(seed).shuffle(kept)
    rows = torch.tensor([vocab[text] for text in kept])
    tokenizer["model"] |= {"vocab": {text: id for id, text in enumerate(kept)}, "merges": merges[:num_merges]}
    for token in tokenizer["added_tokens"]:
        token["id"] = kept.index(token["content"])
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(len(kept))
    with torch.no_grad():
        stock = AutoModelForCausalLM.from_pretrained(source)
        model.get_input_embeddings().weight.copy_(stock.get_input_embeddings().weight[rows])
        model.get_output_embeddings().weight.copy_(stock.get_output_embeddings().weight[rows])
    end = kept.index("<|end|>")
    for holder in (model.config, model.generation_config):
        holder.bos_token_id = holder.eos_token_id = holder.pad_token_id = end
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return str(folder)


def save_random(folder: Path, tokenizer: Any, *, seed: int = 0, **more: Any) -> str:
    """Write a small random Llama with this tokenizer (of the tokenizers library); returns the path.

    Args:
        more: Names of special tokens, as transformers calls them.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **more)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        bos_token_id=wrapped.bos_token_id,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return str(folder)


def sentencepiece_like() -> Any:
    """A tokenizer with "▁" for a space, tokens for all bytes, and a space before every text, as Llama 2 has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    letters = ["▁", *"adefhinorstuxé():=12,"]
    merges = [
        ("d", "e"),
        ("de", "f"),
        ("▁", "def"),
        ("r", "e"),
        ("re", "t"),
        ("▁", "ret"),
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
    ]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytes_, *letters, *("".join(pair) for pair in merges)]
    model = models.BPE(
        vocab={piece: id for id, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def words_alone(*words: str) -> Any:
    """A tokenizer of these words and nothing else."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(("<unk>", *words))}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
