"""Draft models that learn their target's probabilities (DistillSpec, Zhou et al. 2023), from a shape or cut out of it."""

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
from torch import Tensor, nn

from outrider.config import Frozen, ModelConfig
from outrider.errors import ContradictionError, InvalidParameterError, UnsupportedModelError, VocabularyMismatchError
from outrider.files import storing, write_whole
from outrider.kernels.weights import use_plain_weights
from outrider.lab.train.batches import Batch
from outrider.lab.train.losses import NEEDS_ALL_TOKENS, Law, LossName, divergence, in_pieces, overlap
from outrider.lab.train.settings import Tally, Trainee, tally_of_each
from outrider.lab.train.target import FrozenTarget, Teacher
from outrider.loading import hf_modules
from outrider.loading.exclusive import exclusive_transformers
from outrider.loading.loader import load_model
from outrider.loading.sources import check_sources


class DistillSettings(Frozen):
    """Holds what is learnt, and on whose texts."""

    # How far the draft's probabilities are from the target's.
    loss: LossName = Field("forward_kl", description="Use forward_kl, reverse_kl, jsd, total_variation or cross_entropy.")
    # Share of the batches whose texts the draft itself writes behind the prompts. There it learns what the target says
    # where the draft leads.
    on_policy: float = Field(0.0, ge=0.0, le=1.0, description="Use a share of the batches, 0 to 1.")

    def check(self, source: str) -> None:
        """Raise ContradictionError where the target's probabilities, as they come, do not serve."""
        if self.on_policy and source != "forward":
            problem = "the data do not hold what the target says of texts that the draft writes"
            raise ContradictionError("on_policy", self.on_policy, problem, "Use teacher='forward'.")
        if self.loss in NEEDS_ALL_TOKENS and source == "top_k":
            problem = "it needs the probabilities of all tokens, and the data hold the most likely ones"
            raise ContradictionError("loss", self.loss, problem, "Use another loss, or another teacher.")


class DistilledDraft(Trainee):
    """A draft model in training, with the tokenizer of the target, if any."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None,
        target: FrozenTarget,
        teacher: Teacher,
        settings: DistillSettings,
        temperature: float,
        num_draft_tokens: int,
    ) -> None:
        self.module = model
        self.rows = teacher.rows
        self._tokenizer = tokenizer
        self._target = target
        self._teacher = teacher
        self._settings = settings
        self._temperature = temperature
        self._num_draft_tokens = num_draft_tokens

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        if self._settings.on_policy and float(torch.rand(())) < self._settings.on_policy:
            batch = write_on(self.module, batch, self._temperature)
        rows = batch.predicts()
        logits = module(input_ids=batch.token_ids, use_cache=False).logits[rows]
        tokens = batch.token_ids[:, 1:][rows[:, :-1]]
        from_texts_alone = self._settings.loss == "cross_entropy"
        target = logits if from_texts_alone else self._teacher.logits(batch, rows)

        def losses_of(some: Tensor, rows: slice) -> Tensor:
            return divergence(self._settings.loss, Law(target[rows]), some, tokens[rows], self._temperature)

        return in_pieces(logits, losses_of).mean()

    def tally(self, module: nn.Module, batch: Batch) -> Tally:
        rows = batch.drafts()
        logits = module(input_ids=batch.token_ids, use_cache=False).logits[rows]
        found = overlap(Law(self._teacher.logits(batch, rows)), logits, self._temperature)
        return tally_of_each(found, rows, self._num_draft_tokens)

    def save(self, folder: Path) -> None:
        save_model(self.module, self._tokenizer, folder, self._target.dtype)

    def speculation(self, folder: Path) -> dict[str, Any]:
        return {"method": "draft_model", "model": str(folder)}

    def facts(self) -> dict[str, Any]:
        config: Any = self.module.config
        return {
            "kind": "draft model",
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "shape": f"{config.model_type}, {config.num_hidden_layers} layers, {config.hidden_size} wide",
            "loss": self._settings.loss,
            "share of batches that the draft writes": self._settings.on_policy,
        }


@torch.no_grad()
def write_on(model: Any, batch: Batch, temperature: float) -> Batch:
    """Returns the same prompts with continuations that `model` draws, as long as the batch is. All prompts are cut to the
    shortest one, so that every text grows by one token at a time."""
    length = batch.token_ids.shape[1]
    start = max(1, min(int(batch.num_prompt_tokens.min()), length - 1))
    tokens = batch.token_ids[:, :start]
    out = model(input_ids=tokens, use_cache=True)
    while True:
        logits = out.logits[:, -1].float()
        if temperature == 0.0:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            drawn = torch.multinomial(torch.softmax(logits / temperature, -1), 1)
        tokens = torch.cat([tokens, drawn], 1)
        if tokens.shape[1] == length:
            return Batch(tokens, torch.full_like(batch.lengths, length), torch.full_like(batch.lengths, start))
        out = model(input_ids=drawn, past_key_values=out.past_key_values, use_cache=True)


# --- Initial draft models: of a given shape, cut out of the target, or trained already; and how they are saved.


_SHAPE = "Use LAYERSxWIDTH, like 2x192, or LAYERSxWIDTH:FEED_FORWARD, like 2x192:512."
#: Width of a head where the target's does not divide the draft's.
_HEAD_WIDTH = 64


class Shape(Frozen):
    """The shape of a draft model that is trained from scratch. It is a Llama, which our kernels run whole."""

    layers: int = Field(ge=1, description="Use 1 or more.")  # decoder layers
    # Of the hidden states; a multiple of 64, or up to 64 and even.
    width: int = Field(ge=2, description="Use a multiple of 64, or an even number below.")
    feed_forward: int = Field(ge=1, description="Use 1 or more.")  # units of the feed-forward part

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
    """A shape from LAYERSxWIDTH or LAYERSxWIDTH:FEED_FORWARD; unless given, the last is 8/3 of the width."""
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
    """The target with some of its layers alone: a copy, in float32."""
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
        stack = hf_modules.decoder_layers(model)
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
    """Returns the same model in float32, its quantised weights replaced by those that they stand for."""
    use_plain_weights(model, hf_modules.expert_stacks(model))
    hf_modules.use_stock_experts(model)
    model.tie_weights()
    return model.float()


def existing(name: str, target: FrozenTarget) -> Any:
    """A draft model that is there already, in float32."""
    check_sources(init=name)
    loaded = load_model(ModelConfig(model=name, dtype="float32", device=str(target.device), activations="none"))
    ours, theirs = loaded.tokenizer, target.tokenizer
    differ = ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab()
    if differ or loaded.vocab_size != target.vocab_size:
        problem = f"its tokens are not those of {target.name}"
        raise VocabularyMismatchError(name, problem, "Begin with a draft model of the same family, or from a shape.")
    return _trainable(loaded.model).requires_grad_(True)


def draft_to_begin_with(
    target: FrozenTarget, *, shape: Shape | None, prune: Sequence[int] | None, init: str | None, seed: int
) -> Any:
    """The model that learns, in float32 and for training."""
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
    """Write a model and its tokenizer. The configuration comes last: without it, nothing loads what is there."""
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
