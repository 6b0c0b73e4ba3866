"""Initial draft models: of a given shape, cut out of the target, or trained already; and how they are saved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import Field, model_validator

from outrider.config import ModelConfig
from outrider.errors import ContradictionError, InvalidParameterError, UnsupportedModelError, VocabularyMismatchError
from outrider.files import storing, write_whole
from outrider.kernels.weights import use_plain_weights
from outrider.model import hf
from outrider.model.loading.exclusive import exclusive_transformers
from outrider.model.loading.loader import load_model
from outrider.model.loading.sources import check_sources
from outrider.train.target import FrozenTarget
from outrider.validation import Frozen

_SHAPE = "Use LAYERSxWIDTH, like 2x192, or LAYERSxWIDTH:FEED_FORWARD, like 2x192:512."
#: Width of a head where the target's does not divide the draft's.
_HEAD_WIDTH = 64


class Shape(Frozen):
    """The shape of a draft model that is trained from scratch. It is a Llama, which our kernels run whole.

    Attributes:
        layers: Decoder layers.
        width: Of the hidden states; a multiple of 64, or up to 64 and even.
        feed_forward: Units of the feed-forward part.
    """

    layers: int = Field(ge=1, description="Use 1 or more.")
    width: int = Field(ge=2, description="Use a multiple of 64, or an even number below.")
    feed_forward: int = Field(ge=1, description="Use 1 or more.")

    @model_validator(mode="after")
    def _splits_into_heads(self) -> Shape:
        if self.width % min(self.width, _HEAD_WIDTH) or self.width % 2:
            problem = f"it does not split into heads of {_HEAD_WIDTH}"
            raise InvalidParameterError("width", self.width, problem, "Use a multiple of 64, or an even number below.")
        return self

    @property
    def num_heads(self) -> int:
        return max(1, self.width // _HEAD_WIDTH)

    @property
    def num_kv_heads(self) -> int:
        """A third of the heads, or the next fewer that divides them, as in the embedded pair."""
        return next(n for n in range(max(1, self.num_heads // 3), 0, -1) if self.num_heads % n == 0)

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}:{self.feed_forward}"


def parse_shape(text: str) -> Shape:
    """A shape from LAYERSxWIDTH or LAYERSxWIDTH:FEED_FORWARD; unless given, the last is 8/3 of the width.

    Raises:
        InvalidParameterError: It is of another form.
    """
    form = re.fullmatch(r"(\d{1,3})x(\d{1,5})(?::(\d{1,6}))?", text)
    if form is None:
        raise InvalidParameterError("shape", text, "not a shape", _SHAPE)
    layers, width = int(form[1]), int(form[2])
    return Shape(layers=layers, width=width, feed_forward=int(form[3] or max(8, round(width * 8 / 3 / 64) * 64)))


def from_scratch(shape: Shape, target: FrozenTarget, seed: int) -> Any:
    """A Llama of this shape with the target's tokens and context, and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = target.model.config.get_text_config(decoder=True)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=int(getattr(theirs, "max_position_embeddings", None) or 2048),
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        **{name: getattr(theirs, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    return LlamaForCausalLM(config)


def pruned(target: FrozenTarget, layers: Sequence[int]) -> Any:
    """The target with some of its layers alone: a copy, in float32.

    Raises:
        InvalidParameterError: There are no such layers.
        UnsupportedModelError: Its layers cannot be chosen from.
    """
    count = target.num_layers
    if (
        not layers
        or sorted(set(layers)) != list(layers)
        or not 0 <= layers[0] <= layers[-1] < count
        or len(layers) == count
    ):
        problem = f"not some of the target's layers 0 to {count - 1}, in ascending order"
        raise InvalidParameterError("prune", tuple(layers), problem, f"Use a form like 0,{count // 2},{count - 1}.")
    model = _trainable(deepcopy(target.model))
    try:
        stack = hf.decoder_layers(model)
    except ValueError as error:
        raise UnsupportedModelError(target.name, str(error), "Train a draft of a shape instead.") from error
    kept = [stack[layer] for layer in layers]
    for place, layer in enumerate(kept):  # each looks for its keys and values by its number
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    del stack[len(kept) :]
    for place, layer in enumerate(kept):
        stack[place] = layer
    config = model.config.get_text_config(decoder=True)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    return model.requires_grad_(True)


def _trainable(model: Any) -> Any:
    """The same model in float32, its quantised weights replaced by those that they stand for."""
    use_plain_weights(model, hf.expert_stacks(model))
    hf.use_stock_experts(model)
    model.tie_weights()
    return model.float()


def existing(name: str, target: FrozenTarget) -> Any:
    """A draft model that is there already, in float32.

    Raises:
        ModelError: It cannot be loaded, or has other tokens than the target.
    """
    check_sources(init=name)
    loaded = load_model(ModelConfig(model=name, dtype="float32", device=str(target.device)))
    ours, theirs = loaded.tokenizer, target.tokenizer
    differ = ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab()
    if differ or loaded.vocab_size != target.vocab_size:
        problem = f"its tokens are not those of {target.name}"
        raise VocabularyMismatchError(name, problem, "Begin with a draft model of the same family, or from a shape.")
    return _trainable(loaded.model).requires_grad_(True)


def draft_to_begin_with(
    target: FrozenTarget, *, shape: Shape | None, prune: Sequence[int] | None, init: str | None, seed: int
) -> Any:
    """The model that learns, in float32 and for training.

    Raises:
        ContradictionError: Not exactly one of the three is given.
        InputError: What is given does not fit the target.
        ModelError: A model cannot be used.
    """
    given = {"shape": shape, "prune": prune, "init": init}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        problem = f"{' and '.join(chosen)} are given" if chosen else "nothing says what draft model to begin with"
        raise ContradictionError("shape", shape, problem, "Give one of shape, prune and init.")
    if shape is not None:
        model = from_scratch(shape, target, seed)
    elif prune is not None:
        model = pruned(target, prune)
    else:
        assert init is not None
        model = existing(init, target)
    return model.float().to(target.device).train()


def save_model(model: Any, tokenizer: Any | None, folder: Path, dtype: torch.dtype) -> None:
    """Write a model and its tokenizer. The configuration comes last: without it, nothing loads what is there.

    Raises:
        StorageError: It cannot be written.
    """
    copy = deepcopy(model).to(dtype)
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished, exclusive_transformers():
            copy.save_pretrained(unfinished)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            files = sorted(Path(unfinished).iterdir(), key=lambda file: file.name == "config.json")
            usual = files[-1].stat().st_mode
            for file in files:
                file.chmod(usual)  # safetensors lets the owner alone read its files, and a server may run as somebody else
                write_whole(folder / file.name, partial(_move, file))


def _move(file: Path, place: Path) -> None:
    file.replace(place)
