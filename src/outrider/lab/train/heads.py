"""Heads on a frozen target learn which tokens come further ahead.

Stern et al. 2018 (blockwise), Cai et al. 2024 (medusa), Elhoushi et al. 2024 (exit).

Row i of the target has read token i, and its own output layer speaks of token i + 1. A head that drafts *ahead* tokens
behind row i learns what the target itself says of token i + ahead, which it says at row i + ahead - 1. An exit head stands
where the output layer stands and has ahead = 1. Head k of the others, from 0, drafts behind the token that the target is
about to write, and has ahead = k + 2.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.errors import InvalidParameterError
from outrider.heads.checkpoint import describe_target, save_heads, take_witness
from outrider.heads.networks import BlockwiseConfig, ExitConfig, HeadsConfig, MedusaConfig, build_network
from outrider.lab.train.batches import Batch
from outrider.lab.train.losses import Depth, LossName, Said
from outrider.lab.train.settings import HeadLearning, HeadTrainee, Tally, Trainee, TrainSettings, tally_of_each
from outrider.lab.train.target import Features, FrozenTarget
from outrider.records import Manifest

HeadMethod = Literal["medusa", "blockwise", "exit"]
#: Exit heads read what this share of the layers leaves, unless somebody says which.
_EXIT_SHARE = 4


class HeadSettings(HeadLearning):
    """Which heads, and what they learn."""

    method: HeadMethod  # of what kind
    heads: int = Field(4, ge=1, le=32, description="Use 1 to 32.")  # tokens ahead that medusa and blockwise guess
    blocks: int = Field(1, ge=1, le=8, description="Use 1 to 8.")  # residual blocks in a head of medusa
    # Units of blockwise's hidden layer for each head; None takes the target's hidden size.
    inner: int | None = Field(None, ge=1, description="Use 1 or more, or None.")
    # Of medusa's blocks and of exit's norm; None takes the target's hidden size.
    width: int | None = Field(None, ge=1, description="Use 1 or more, or None.")
    # "own" for an output layer in each head, "target" for the target's, frozen.
    output: Literal["own", "target"] = Field("own", description="Use own or target.")
    # They read what the first so many layers leave; None takes all, and a quarter of them for exit.
    layer: int | None = Field(None, ge=1, description="Use 1 to the number of the target's layers, or None.")
    # How far their probabilities are from the target's.
    loss: LossName = Field("forward_kl", description="Use forward_kl, reverse_kl, jsd, total_variation or cross_entropy.")
    # What the loss of a head counts, relative to the one before.
    decay: float = Field(0.8, gt=0.0, le=1.0, description="Use a number above 0, up to 1.")

    def trainee(self, target: FrozenTarget, manifest: Manifest, data: Path, settings: TrainSettings) -> Trainee:
        return TrainedHeads(target, manifest, self, settings)

    def config(self, target: FrozenTarget) -> HeadsConfig:
        """Returns what the checkpoint will say."""
        meant = describe_target(target.model, target.name)
        width = self.width or target.hidden_size
        if self.method == "exit":
            layer = self.layer or max(1, target.num_layers // _EXIT_SHARE)
            if layer == target.num_layers:
                problem = f"the target has no more layers than {layer}, so every draft token would take a whole pass of it"
                raise InvalidParameterError("layer", layer, problem, f"Use 1 to {target.num_layers - 1}.")
            return ExitConfig(target=meant, layer=layer, normed=True, width=width, output=self.output)
        layer = self.layer or target.num_layers
        if self.method == "blockwise":
            inner = self.inner or target.hidden_size
            return BlockwiseConfig(target=meant, layer=layer, normed=True, heads=self.heads, inner=inner)
        return MedusaConfig(
            target=meant, layer=layer, normed=True, heads=self.heads, blocks=self.blocks, width=width, output=self.output
        )


class TrainedHeads(HeadTrainee):
    """Heads in training."""

    def __init__(self, target: FrozenTarget, manifest: Manifest, learning: HeadSettings, settings: TrainSettings) -> None:
        torch.manual_seed(settings.seed)
        config = learning.config(target)
        self._target = target
        self._settings = learning
        self._num_draft_tokens = settings.num_draft_tokens
        self.loss_name, self.decay, self.method = learning.loss, learning.decay, learning.method
        self._config = config
        self._temperature = manifest.settings.temperature
        self._features = Features(target, manifest, settings.teacher, [config.layer])
        self.rows = self._features.rows
        network = build_network(config)
        fits = getattr(config, "width", None) == target.hidden_size
        network.begin(target.output_weight() if fits else None)
        self.module = network.to(target.device).train()
        first = 1 if learning.method == "exit" else 2
        self._ahead = tuple(range(first, first + config.num_heads))
        self.reach = self._ahead[-1]

    def save(self, folder: Path) -> None:
        network: Any = self.module
        save_heads(folder, network, take_witness(self._target.model, self._config))

    def facts(self) -> dict[str, Any]:
        return {
            "kind": f"{self._settings.method} heads",
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "heads": self._config.num_heads,
            "layer that they read behind": self._config.layer,
            "loss": self._settings.loss,
        }

    def drafted(self, module: nn.Module, batch: Batch, *, learn: bool) -> tuple[list[Depth], Said]:
        rows_of = batch.predicts if learn else partial(batch.drafts, first=self._ahead[0])
        layer, first = self._config.layer, rows_of(self._ahead[0])
        states, target = self._features.read(batch)
        features = states[layer][first]
        if layer != self._target.num_layers:  # they read hidden states behind the final norm
            features = self._target.norm(features)
        logits: Tensor = module(features.float(), self._target.head)
        wanted = [rows_of(ahead) for ahead in self._ahead[: None if learn else self._num_draft_tokens]]
        depths = [
            Depth(own[rows[first]], rows, ahead) for own, rows, ahead in zip(logits, wanted, self._ahead, strict=False)
        ]
        return depths, Said(batch, target, self._temperature)

    def tally(self, module: nn.Module, batch: Batch) -> Tally:
        if self.method != "exit":
            return super().tally(module, batch)
        # It drafts one token after the other, as a draft model does.
        (depth,), said = self.drafted(module, batch, learn=False)
        return tally_of_each(said.overlap(depth), depth.rows, self._num_draft_tokens)
