"""EAGLE heads learn to continue what the target computed (Li et al. 2024, 2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.convert.head_files import write_head
from outrider.errors import InvalidParameterError
from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.feature_networks import Eagle3Network
from outrider.heads.formats.published import PublishedHead
from outrider.model.lone_layer import layer_config
from outrider.train.batches import Batch
from outrider.train.depths import Depth, Said, depth_loss, depth_overlaps
from outrider.train.draft_vocabulary import DraftVocabulary, frequent_tokens
from outrider.train.features import Features
from outrider.train.losses import LossName
from outrider.train.manifest import Manifest
from outrider.train.settings import TrainSettings
from outrider.train.target import FrozenTarget
from outrider.train.trainee import HeadLearning, Overlaps, Trainee, chain_tau
from outrider.train.unrolled_head import UnrolledHead

_LOSSES = "Use forward_kl, reverse_kl, jsd, total_variation, cross_entropy or accepted_length."
#: Least layers of a target for the layers that EAGLE-3 reads to be three different ones.
_USUAL_FROM = 7


class FeatureHeadSettings(HeadLearning):
    """Which head, and what it learns.

    Attributes:
        method: Of what kind.
        layers: The target's layers whose inputs it reads, in ascending order; None takes 2, n // 2 and n - 3 of n.
        draft_vocab: Most tokens that it drafts: the most frequent ones of the data.
        unroll: Draft tokens behind each token of a text that it learns.
        feed_forward: Units of the feed-forward part of its layer; None takes as many as the target has.
        loss: How far its probabilities are from the target's.
        decay: What the loss of a draft token counts, relative to the one before.
    """

    method: Literal["eagle3"] = "eagle3"
    layers: tuple[int, ...] | None = Field(None, description="Use ascending layer numbers, or None.")
    draft_vocab: int = Field(32000, ge=2, description="Use 2 or more.")
    unroll: int = Field(4, ge=1, le=16, description="Use 1 to 16.")
    feed_forward: int | None = Field(None, ge=1, description="Use 1 or more, or None.")
    loss: LossName | Literal["accepted_length"] = Field("forward_kl", description=_LOSSES)
    decay: float = Field(0.8, gt=0.0, le=1.0, description="Use a number above 0, up to 1.")

    def trainee(self, target: FrozenTarget, manifest: Manifest, data: Path, settings: TrainSettings) -> Trainee:
        vocabulary, depth = frequent_tokens(data, manifest, self.draft_vocab), settings.num_draft_tokens
        return TrainedFeatureHead(target, manifest, self, vocabulary, settings.teacher, depth, settings.seed)

    def config(self, target: FrozenTarget, draft_vocab_size: int) -> FeatureHeadConfig:
        """The shape of the head.

        Raises:
            InvalidParameterError: The target has no such layers.
        """
        count = target.num_layers
        layers = _usual_layers(count) if self.layers is None else self.layers
        if list(layers) != sorted(set(layers)) or not layers or not 0 <= layers[0] <= layers[-1] < count:
            problem = f"not some of the inputs of the target's layers 0 to {count - 1}, in ascending order"
            remedy = f"Use a form like {','.join(map(str, _usual_layers(count)))}."
            raise InvalidParameterError("layers", layers, problem, remedy)
        return FeatureHeadConfig(
            method=self.method,
            layer=_layer(target, self.feed_forward),
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            aux_layers=layers,
            verifier=target.title,
            architectures=tuple(target.model.config.architectures or ()),
        )


class TrainedFeatureHead(Trainee):
    """A head in training.

    Args:
        target: The target.
        manifest: Of the data.
        settings: Which head.
        vocabulary: The tokens that it drafts.
        source: "forward" runs the target on every batch; "hidden_states" takes what it computed from the data.
        depth: Draft tokens that are measured.
        seed: Of weights that begin random.

    Raises:
        InputError: The settings do not fit the target, or the data do not hold what `source` says.
    """

    def __init__(
        self,
        target: FrozenTarget,
        manifest: Manifest,
        settings: FeatureHeadSettings,
        vocabulary: DraftVocabulary,
        source: str,
        depth: int,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self._target, self._settings, self._vocabulary = target, settings, vocabulary
        tokens = vocabulary.tokens
        self._config = settings.config(target, target.vocab_size if tokens is None else len(tokens))
        self._layers = self._config.layers_of(target.num_layers)
        self._features = Features(target, manifest, source, self._layers)
        self.rows = self._features.rows
        self._temperature = manifest.settings.temperature
        self._tokens = None if tokens is None else tokens.to(target.device)
        network = Eagle3Network(self._config, own_embedding=False, own_output=True)
        output = target.output_weight()
        assert network.lm_head is not None
        with torch.no_grad():
            network.lm_head.weight.copy_(output if self._tokens is None else output[self._tokens])
        self._network = network.to(target.device)
        self.module = UnrolledHead(self._network).train()
        self.draft_vocab_size = self._config.draft_vocab_size
        self._depth = depth
        self.reach = max(settings.unroll, depth) + 1  # row 0 drafts nothing

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        depths, said = self._drafted(module, batch, batch.predicts, self._settings.unroll)
        return depth_loss(self._settings.loss, depths, said, self._settings.decay)

    def overlaps(self, module: nn.Module, batch: Batch) -> Overlaps:
        return depth_overlaps(*self._drafted(module, batch, batch.writes, self._depth))

    def tau(self, acceptance: Sequence[float], num_draft_tokens: int) -> float:
        return chain_tau(acceptance[:num_draft_tokens])

    def save(self, folder: Path) -> None:
        write_head(folder, PublishedHead(str(folder), self._config, self._network, self._vocabulary.tokens), "speculators")

    def speculation(self, folder: Path) -> dict[str, Any]:
        return {"method": self._settings.method, "model": str(folder)}

    def facts(self) -> dict[str, Any]:
        return {
            "kind": f"{self._settings.method} head",
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "layers whose inputs it reads": ", ".join(map(str, self._layers)),
            "tokens that it drafts": self.draft_vocab_size,
            "share of the training texts that these make up": f"{self._vocabulary.share:.4f}",
            "draft tokens that it learns behind each token": self._settings.unroll,
            "loss": self._settings.loss,
        }

    def _drafted(
        self, module: nn.Module, batch: Batch, rows_of: Callable[[int], Tensor], depth: int
    ) -> tuple[list[Depth], Said]:
        """So many draft tokens behind the rows that `rows_of` has for tokens so far ahead, and what the target says."""
        states, logits = self._features.read(batch)
        embeddings = self._target.embed(batch.token_ids).float()
        has_feature = torch.arange(batch.token_ids.shape[1], device=embeddings.device) > 0
        wanted = [rows_of(ahead) & has_feature for ahead in range(1, depth + 1)]
        hidden = [states[layer].float() for layer in self._layers]
        drafted = module(embeddings, hidden, wanted, self._target.head)
        depths = [Depth(own, rows, ahead) for ahead, (own, rows) in enumerate(zip(drafted, wanted, strict=True), 1)]
        return depths, Said(batch, logits, self._temperature, self._tokens)


def _usual_layers(count: int) -> tuple[int, ...]:
    """EAGLE-3's layers of so many; a target with fewer layers shows what enters its second, middle and last one."""
    if count >= _USUAL_FROM:
        return (2, count // 2, count - 3)
    return tuple(sorted({min(1, count - 1), count // 2, count - 1}))


def _layer(target: FrozenTarget, feed_forward: int | None) -> Any:
    """A layer of Llama in the target's sizes."""
    theirs = target.model.config.get_text_config(decoder=True)
    heads = int(theirs.num_attention_heads)
    rotary = getattr(theirs, "rope_parameters", None) or {}
    return layer_config(
        "llama",
        {
            "hidden_size": target.hidden_size,
            "intermediate_size": feed_forward or int(getattr(theirs, "intermediate_size", 0) or 4 * target.hidden_size),
            "num_attention_heads": heads,
            "num_key_value_heads": int(getattr(theirs, "num_key_value_heads", None) or heads),
            "head_dim": int(getattr(theirs, "head_dim", None) or target.hidden_size // heads),
            "num_hidden_layers": 1,
            "vocab_size": target.vocab_size,
            "rms_norm_eps": float(getattr(theirs, "rms_norm_eps", None) or 1e-5),
            "hidden_act": "silu",
            "max_position_embeddings": int(getattr(theirs, "max_position_embeddings", None) or 2048),
            "rope_theta": float(rotary.get("rope_theta", 10000.0)),
        },
    )
