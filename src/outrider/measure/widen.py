"""Makes a *wide* copy of a Llama-style checkpoint: it computes the same function and reads many times the weights.

The hidden state, the heads and the feed-forward units are repeated, and the matching input weights are divided. So the
network computes what it computed before, up to the rounding of longer sums; with powers of two the divisions are exact.
The acceptance that is measured on the wide copy is therefore that of the real pair, while a forward pass reads as many
bytes as one of a model of that size. This gives a memory-bound target from a checkpoint that is small enough to ship. A
report with such a figure must say so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.embedded import default_model
from outrider.model.loading.exclusive import exclusive_transformers

#: The factors for the embedded target: 384 x 1024 becomes 1536 x 8192, with 0.36 B parameters.
HIDDEN, FFN = 4, 8


def cache_folder() -> Path:
    """The folder for copies of models: OUTRIDER_CACHE, or `outrider` in the user's cache folder."""
    own = os.environ.get("OUTRIDER_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def wide_target(dtype: str) -> str:
    """The folder of the wide copy of the embedded target. The copy is made when it is first asked for.

    Args:
        dtype: The name of the dtype in torch, without "torch.".
    """
    source = Path(default_model("target"))
    folder = cache_folder() / f"wide-{dtype}-{_digest(source)}"
    if not folder.exists():
        unfinished = folder.with_suffix(f".{os.getpid()}")  # so that an interrupted copy is not taken for a whole one
        shutil.rmtree(unfinished, ignore_errors=True)
        widen(str(source), str(unfinished), HIDDEN, FFN, getattr(torch, dtype))
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return str(folder)


def stretched(folder: str, positions: int) -> str:
    """A copy of a checkpoint whose rotary range reaches so many positions. It is made when it is first asked for.

    The weights are the same files. Beyond the positions that the model was trained for, the rotary angles simply go on. So
    the text there is worth nothing, and only the time of a pass counts.

    Args:
        folder: The folder of the checkpoint, as `wide_target` made it.
        positions: The positions of the copy.
    """
    source, copy = Path(folder), Path(f"{folder}-{positions}")
    if not copy.exists():
        unfinished = copy.with_suffix(f".{os.getpid()}")
        shutil.copytree(source, unfinished, copy_function=os.link)
        config = json.loads((source / "config.json").read_text("utf-8"))
        (unfinished / "config.json").unlink()  # it is a link to the file of the source
        (unfinished / "config.json").write_text(
            json.dumps({**config, "max_position_embeddings": positions}, indent=2), "utf-8"
        )
        try:
            unfinished.rename(copy)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return str(copy)


def _digest(source: Path) -> str:
    """A digest of the checkpoint and the factors, so that an old copy is never used for another checkpoint."""
    found = hashlib.sha256(f"{HIDDEN} {FFN}".encode())
    for file in sorted(source.iterdir()):
        found.update(file.read_bytes())
    return found.hexdigest()[:8]


def widen(source: str, target: str, hidden: int, ffn: int, dtype: torch.dtype) -> int:
    """Write the wide copy of `source` to `target`. Returns its number of parameters.

    Args:
        source, target: The folders.
        hidden: The factor for the hidden size and the heads.
        ffn: The factor for the feed-forward units.
        dtype: The type of the copy's weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.hidden_size *= hidden
    config.num_attention_heads *= hidden
    config.num_key_value_heads *= hidden
    config.head_dim = head_dim
    config.intermediate_size *= ffn
    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wide = AutoModelForCausalLM.from_config(config).to(dtype)
    wide.load_state_dict({name: _tiled(name, w, hidden, ffn).to(dtype) for name, w in model.state_dict().items()})
    wide.generation_config = model.generation_config
    with exclusive_transformers():
        wide.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return sum(p.numel() for p in wide.parameters())


def _tiled(name: str, w: Any, hidden: int, ffn: int) -> Any:
    """One tensor of the wide copy."""
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):  # [vocab, hidden]
        return w.repeat(1, hidden)
    if name == "model.norm.weight":  # the tied head sums `hidden` copies
        return w.repeat(hidden) / hidden
    if w.dim() == 1:  # inner norms
        return w.repeat(hidden)
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):  # [heads, hidden]
        return w.repeat(hidden, hidden) / hidden
    if name.endswith(("gate_proj.weight", "up_proj.weight")):  # [ffn, hidden]
        return w.repeat(ffn, hidden) / hidden
    assert name.endswith("down_proj.weight"), name  # [hidden, ffn]
    return w.repeat(hidden, ffn) / ffn
