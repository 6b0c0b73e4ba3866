"""Heads on a frozen target learn which tokens come further ahead.

Stern et al. 2018 (blockwise), Cai et al. 2024 (medusa), Elhoushi et al. 2024 (exit).

Row i of the target has read token i, and its own output layer speaks of token i + 1. A head that drafts *ahead* tokens
behind row i learns what the target itself says of token i + ahead, which it says at row i + ahead - 1. An exit head stands
where the output layer stands and has ahead = 1. Head k of the others, from 0, drafts behind the token that the target is
about to write, and has ahead = k + 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.errors import ContradictionError, InvalidParameterError
from outrider.files import storing
from outrider.heads.checkpoint import save_heads
from outrider.heads.config import BlockwiseConfig, ExitConfig, HeadsConfig, MedusaConfig
from outrider.heads.networks import build_network
from outrider.heads.pairing import describe_target, take_witness
from outrider.train.batches import Batch
from outrider.train.losses import LossName, divergence, overlap
from outrider.train.manifest import Manifest
from outrider.train.records import hidden_name
from outrider.train.target import FrozenTarget
from outrider.train.trainee import Overlaps, Trainee, chain_tau
from outrider.validation import Frozen

HeadMethod = Literal["medusa", "blockwise", "exit"]
#: Exit heads read what this share of the layers leaves, unless somebody says which.
_EXIT_SHARE = 4


class HeadSettings(Frozen):
    """Which heads, and what they learn.

    Attributes:
        method: Of what kind.
        heads: Tokens ahead that medusa and blockwise guess.
        blocks: Residual blocks in a head of medusa.
        inner: Units of blockwise's hidden layer for each head; None takes the target's hidden size.
        width: Of medusa's blocks and of exit's norm; None takes the target's hidden size.
        output: "own" for an output layer in each head, "target" for the target's, frozen.
        layer: They read what the first so many layers leave; None takes all, and a quarter of them for exit.
        loss: How far their probabilities are from the target's.
        decay: What the loss of a head counts, relative to the one before.
    """

    method: HeadMethod
    heads: int = Field(4, ge=1, le=32, description="Use 1 to 32.")
    blocks: int = Field(1, ge=1, le=8, description="Use 1 to 8.")
    inner: int | None = Field(None, ge=1, description="Use 1 or more, or None.")
    width: int | None = Field(None, ge=1, description="Use 1 or more, or None.")
    output: Literal["own", "target"] = Field("own", description="Use own or target.")
    layer: int | None = Field(None, ge=1, description="Use 1 to the number of the target's layers, or None.")
    loss: LossName = Field("forward_kl", description="Use forward_kl, reverse_kl, jsd, total_variation or cross_entropy.")
    decay: float = Field(0.8, gt=0.0, le=1.0, description="Use a number above 0, up to 1.")

    def config(self, target: FrozenTarget) -> HeadsConfig:
        """What the checkpoint will say.

        Raises:
            InputError: The target has no such layer, or the settings contradict.
        """
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
            target=meant,
            layer=layer,
            normed=True,
            heads=self.heads,
            blocks=self.blocks,
            width=width,
            output=self.output,
        )


class TrainedHeads(Trainee):
    """Heads in training.

    Args:
        target: The target.
        manifest: Of the data.
        settings: Which heads.
        source: "forward" runs the target on every batch; "hidden_states" takes what the heads read, and what the final norm
            leaves, from the data.
        seed: Of weights that begin random.

    Raises:
        InputError: The settings do not fit the target, or the data do not hold what `source` says.
    """

    def __init__(self, target: FrozenTarget, manifest: Manifest, settings: HeadSettings, source: str, seed: int) -> None:
        torch.manual_seed(seed)
        config = settings.config(target)
        self._target = target
        self._settings = settings
        self._config = config
        self._temperature = manifest.settings.temperature
        self._source = source
        self.rows = self._needed(manifest)
        network = build_network(config)
        fits = getattr(config, "width", None) == target.hidden_size
        network.begin(target.model.get_output_embeddings().weight.float() if fits else None)
        self.module = network.to(target.device).train()
        first = 1 if settings.method == "exit" else 2
        self._ahead = tuple(range(first, first + config.num_heads))
        self.reach = self._ahead[-1]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        logits, target, rows = self._logits(module, batch, batch.predicts(self._ahead[0]))
        total, weight = logits.new_zeros(()), 1.0
        for head, ahead in enumerate(self._ahead):
            reached = batch.predicts(ahead)
            mine = logits[head][reached[rows]]
            tokens = _shifted(batch.token_ids, ahead)[reached]
            found = divergence(self._settings.loss, _shifted(target, ahead - 1)[reached], mine, tokens, self._temperature)
            if len(found):
                total = total + weight * found.mean()
            weight *= self._settings.decay
        return total

    def overlaps(self, module: nn.Module, batch: Batch) -> Overlaps:
        logits, target, rows = self._logits(module, batch, batch.writes(self._ahead[0]))
        sums, counts = [], []
        for head, ahead in enumerate(self._ahead):
            reached = batch.writes(ahead)
            theirs = _shifted(target, ahead - 1)[reached]
            found = overlap(theirs, logits[head][reached[rows]], self._temperature)
            sums.append(found.sum().double())
            counts.append(len(found))
        return Overlaps(torch.stack(sums), torch.tensor(counts))

    def tau(self, acceptance: Sequence[float], num_draft_tokens: int) -> float:
        if self._settings.method == "exit":  # drafts one token after the other, as a draft model does
            return chain_tau([acceptance[0]] * num_draft_tokens)
        return chain_tau(acceptance[:num_draft_tokens])

    def save(self, folder: Path) -> None:
        with storing(folder):
            network: Any = self.module
            save_heads(folder, network, take_witness(self._target.model, self._config))

    def speculation(self, folder: Path) -> dict[str, Any]:
        return {"method": self._settings.method, "model": str(folder)}

    def facts(self) -> dict[str, Any]:
        return {
            "kind": f"{self._settings.method} heads",
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "heads": self._config.num_heads,
            "layer that they read behind": self._config.layer,
            "loss": self._settings.loss,
        }

    def _needed(self, manifest: Manifest) -> tuple[str, ...]:
        """What the data must hold."""
        if self._source == "forward":
            return ()
        layers = {self._config.layer, self._target.num_layers}
        there = set(manifest.settings.hidden_states)
        if self._source != "hidden_states" or not layers <= there:
            problem = f"heads learn from the hidden states of layers {sorted(layers)}, and the data hold {sorted(there)}"
            raise ContradictionError("teacher", self._source, problem, "Use teacher='forward', or make other data.")
        return tuple(hidden_name(layer) for layer in sorted(layers))

    def _logits(self, module: nn.Module, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the heads say in the chosen rows [heads, n, vocab_size], what the target says in all rows
        [num_texts, num_tokens, vocab_size], and the rows."""
        layer, last = self._config.layer, self._target.num_layers
        if self._source == "forward":
            states, target = self._target.states(batch.token_ids, [layer])
            features = states[layer][rows]
        else:
            chosen = rows[:, :-1]
            features = batch.rows[hidden_name(layer)][chosen]
            target = self._kept_logits(batch.rows[hidden_name(last)])
        logits: Tensor = module(self._read(features).float(), self._target.head)
        return logits, target, rows

    @torch.no_grad()
    def _kept_logits(self, hidden: Tensor) -> Tensor:
        """The target's logits of hidden states that were kept, with a row for the last token, which has none."""
        texts, kept, _ = hidden.shape
        logits = self._target.head(hidden.flatten(0, 1)).reshape(texts, kept, -1)
        return torch.cat([logits, logits[:, -1:]], 1)

    def _read(self, features: Tensor) -> Tensor:
        """Hidden states behind the final norm, where the heads read those."""
        return features if self._config.layer == self._target.num_layers else self._target.norm(features)


def _shifted(values: Tensor, by: int) -> Tensor:
    """Column i holds what column i + by held; the last columns, which nobody may read, repeat the last one."""
    length = values.shape[1]
    columns = torch.arange(length, device=values.device) + by
    return values[:, columns.clamp(max=length - 1)]
