"""Wide copies of models, which compute what the model computes at the cost of a larger one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.config import default_model
from outrider.heads.formats.folder import list_tensors, read_tensors
from outrider.loading.exclusive import exclusive_transformers
from outrider.loading.sources import WHOLE

# --- Makes a *wide* copy of a checkpoint like Llama, Qwen3.5 or T5: the same function, with many times the weights to read.
#
# The hidden state, the heads and the feed-forward units are repeated, and the matching input weights are divided. So
# the network computes what it computed before, up to the rounding of longer sums; with powers of two the divisions are
# exact. The acceptance that is measured on the wide copy is therefore that of the real pair, while a forward pass reads
# as many bytes as one of a model of that size. This gives a memory-bound target from a checkpoint that is small enough
# to ship. A report with such a figure must say so.
#
# Layers with a running state (gated delta rules) are repeated in the same way, head by head. A layer of the checkpoint
# that predicts several tokens (`mtp.*`) is carried over, so that it drafts for the copy what it drafts for the source.


#: The factors for the embedded target: 384 x 1024 becomes 1536 x 8192, with 0.36 B parameters.
HIDDEN, FFN = 4, 8


def cache_folder() -> Path:
    """The folder for copies of models: OUTRIDER_CACHE, or `outrider` in the user's cache folder."""
    own = os.environ.get("OUTRIDER_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def wide_target(dtype: str) -> str:
    """The folder of the wide copy of the embedded target. The copy is made when it is first asked for."""
    return wide_copy(default_model("target"), dtype)


def wide_copy(checkpoint: str, dtype: str) -> str:
    """The folder of the wide copy of a checkpoint. The copy is made when it is first asked for."""
    source = Path(checkpoint)
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
    """Write the wide copy of `source` to `target`. Returns its number of parameters."""
    from transformers import AutoTokenizer

    wide = wide_module(source, hidden, ffn, dtype).to(dtype)
    with exclusive_transformers():
        wide.save_pretrained(target)
    factors = _factors(source, hidden, ffn)
    if factors.norms_add_one:
        _add_layers_ahead(source, target, factors, dtype)
    if any(Path(source).glob("*token*")):  # a checkpoint without a tokenizer has a copy without one
        AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return sum(p.numel() for p in wide.parameters())


def wide_module(
    source: str, hidden: int, ffn: int, dtype: torch.dtype, *, device: str = "cpu", layers: int | None = None
) -> Any:
    """The wide copy of `source`, made in the memory of a device.

    Args:
        layers: The number of its layers. Those behind the layers of `source` add zeros to the hidden state: they take time
            and change nothing. None adds no layers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config, factors = AutoConfig.from_pretrained(source), _factors(source, hidden, ffn)
    _grow(config, factors)
    config.num_hidden_layers = layers or config.num_hidden_layers
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with exclusive_transformers():
        narrow = kind.from_pretrained(source, dtype=torch.float32)
    with torch.device(device):
        wide = kind.from_config(config, dtype=dtype)
    wide.generation_config = narrow.generation_config
    weights, tile = narrow.state_dict(), _tiled if factors.scales_outputs is None else _tiled_t5
    with torch.no_grad():
        for name, w in wide.state_dict().items():
            if name in weights:
                w.copy_(tile(name, weights[name].to(device), factors))
            elif name.endswith(_INTO_HIDDEN):
                w.zero_()
    return wide


def _factors(source: str, hidden: int, ffn: int) -> _Factors:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    return _Factors(hidden, ffn, _block_rows(config), _norms_add_one(config), _scales_outputs(config))


#: What the names of a layer begin with that predicts several tokens.
_AHEAD = "mtp."
#: Norms of the numbers of one head, which all heads share.
_OF_ONE_HEAD = ("q_norm.weight", "k_norm.weight", "linear_attn.norm.weight")
#: Projections from the hidden state to heads, and back.
_OF_HEADS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
#: Projections of a layer of Llama that add to the hidden state.
_INTO_HIDDEN = ("o_proj.weight", "down_proj.weight")
#: Fields of a configuration that grow with the hidden size.
_GROWN = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)


@dataclass(frozen=True)
class _Factors:
    """Says how a checkpoint is widened."""

    hidden: int  # the factors
    ffn: int  # the factors
    blocks: tuple[int, ...]  # rows of the queries, keys and values that a delta rule projects together
    norms_add_one: bool  # whether norms multiply by 1 + w
    # Whether a T5 divides what enters its head by the root of the hidden size; None for other models.
    scales_outputs: bool | None = None


def _add_layers_ahead(source: str, target: str, factors: _Factors, dtype: torch.dtype) -> None:
    """Carry over the layers that predict several tokens, which transformers leaves out when it loads a model."""
    from safetensors.torch import load_file, save_file

    file = Path(target) / WHOLE
    read = read_tensors(source, [name for name in list_tensors(source) if name.startswith(_AHEAD)])
    added = {name: _tiled(name, each.tensor.float(), factors).to(dtype) for name, each in read.items()}
    save_file(load_file(file) | added, file, {"format": "pt"})


def _norms_add_one(config: Any) -> bool:
    return bool(config.model_type == "qwen3_5_text")


def _scales_outputs(config: Any) -> bool | None:
    if config.model_type not in TYPES:
        return None
    return bool(getattr(config, "scale_decoder_outputs", config.model_type == "umt5" and config.tie_word_embeddings))


def _tiled_t5(name: str, w: Any, factors: _Factors) -> Any:
    assert factors.scales_outputs is not None, "it is a T5"
    return tiled(name, w, factors.hidden, factors.ffn, scales_outputs=factors.scales_outputs)


def _block_rows(config: Any) -> tuple[int, ...]:
    if not hasattr(config, "linear_num_key_heads"):
        return ()
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


def _grow(config: Any, factors: _Factors) -> None:
    """Let a configuration be that of the copy."""
    if factors.scales_outputs is not None:
        grow(config, factors.hidden, factors.ffn)
        return
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _GROWN:
        if hasattr(config, name):
            setattr(config, name, factors.hidden * getattr(config, name))
    config.intermediate_size *= factors.ffn
    if factors.norms_add_one:  # dividing 1 + w would cost digits, so the output layer is divided, and cannot be shared
        config.tie_word_embeddings = False


def _tiled(name: str, w: Any, factors: _Factors) -> Any:
    """One tensor of the wide copy."""
    hidden, ffn = factors.hidden, factors.ffn
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "embed_tokens":  # [vocab, hidden]
        return w.repeat(1, hidden)
    if part == "lm_head":  # it sums `hidden` copies, and the final norm is divided unless it adds 1
        return w.repeat(1, hidden) / (hidden if factors.norms_add_one else 1)
    if name == "model.norm.weight" and not factors.norms_add_one:
        return w.repeat(hidden) / hidden
    if name.endswith(_OF_ONE_HEAD):
        return w
    if w.dim() == 1:  # norms, and what each head of a delta rule has
        return w.repeat(hidden)
    if part == "conv1d":  # [channels, 1, width]
        return torch.cat([block.repeat(hidden, 1, 1) for block in w.split(factors.blocks)])
    if part == "in_proj_qkv":
        return torch.cat([block.repeat(hidden, hidden) for block in w.split(factors.blocks)]) / hidden
    if part == "fc":  # [hidden, embedding and hidden state]
        return w.unflatten(1, (2, -1)).repeat(hidden, 1, hidden).flatten(1) / hidden
    if part in _OF_HEADS:
        return w.repeat(hidden, hidden) / hidden
    if part in ("gate_proj", "up_proj"):  # [ffn, hidden]
        return w.repeat(ffn, hidden) / hidden
    assert part == "down_proj", name  # [hidden, ffn]
    return w.repeat(hidden, ffn) / ffn


# --- How the wide copy of a T5 is made, see `outrider.widen`: its configuration, and each of its tensors.


#: The types whose tensors have these names.
TYPES = frozenset({"t5", "mt5", "umt5"})
#: Projections from the hidden state to heads, and back.
_OF_T5_HEADS = ("q", "k", "v", "o")
#: Projections into the feed-forward.
_INTO = ("wi", "wi_0", "wi_1")


def grow(config: Any, hidden: int, ffn: int) -> None:
    """Let a configuration be that of the copy.

    Args:
        config: Of the source; changed in place.
    """
    config.d_model *= hidden
    config.num_heads *= hidden
    config.d_ff *= ffn


def tiled(name: str, w: Tensor, hidden: int, ffn: int, *, scales_outputs: bool) -> Tensor:
    """One tensor of the copy."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in ("shared", "embed_tokens", "lm_head"):  # [vocab, hidden]
        return w.repeat(1, hidden)
    if name == "decoder.final_layer_norm.weight":  # the head sums `hidden` copies
        return w.repeat(hidden) / (hidden**0.5 if scales_outputs else hidden)
    if w.dim() == 1:
        return w.repeat(hidden)
    if part == "relative_attention_bias":  # [buckets, heads]
        return w.repeat(1, hidden)
    if part in _OF_T5_HEADS:
        return w.repeat(hidden, hidden) / hidden
    if part in _INTO:  # [ffn, hidden]
        return w.repeat(ffn, hidden) / hidden
    assert part == "wo", name  # [hidden, ffn]
    return w.repeat(hidden, ffn) / ffn
