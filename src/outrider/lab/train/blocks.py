"""Trains block drafters (DFlash and DSpark, 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy

from outrider.errors import InvalidParameterError
from outrider.heads.block_networks import (
    BlockHeadConfig,
    BlockHeadNetwork,
    BlockLayer,
    BlockReach,
    JudgeInput,
    MarkovKind,
    MarkovShape,
)
from outrider.heads.formats.published import PublishedHead
from outrider.heads.lone import RotaryFactors
from outrider.heads.networks import TargetHead
from outrider.lab.train.batches import Batch
from outrider.lab.train.features import (
    LOSS_NAMES,
    Design,
    OwnLayerSettings,
    TrainedFeatureHead,
    begin_output,
)
from outrider.lab.train.losses import LossName, depth_loss, shifted
from outrider.lab.train.settings import DraftVocabulary, Trainee, TrainSettings, frequent_tokens, token_counts
from outrider.lab.train.target import FrozenTarget, head_layers, layers_to_read
from outrider.records import Manifest

#: Most layers of the target that it reads unless somebody says which.
_MOST_READ = 5


class DflashSettings(OwnLayerSettings):
    """A block drafter."""

    method: Literal["dflash", "dspark"] = "dflash"
    # The target's layers whose inputs it reads, in ascending order; None takes up to five, evenly spread.
    layers: tuple[int, ...] | None = Field(None, description="Use ascending layer numbers, or None.")
    own_layers: int = Field(2, ge=1, le=16, description="Use 1 to 16.")  # layers of its own
    # Rows of a block: the last token of the text, then a mask token for each token that is drafted.
    block_size: int = Field(8, ge=2, le=64, description="Use 2 to 64.")
    # The target's token whose embedding stands for one that is to be drafted; None takes the rarest one.
    mask_token: int | None = Field(None, ge=0, description="Use a token of the target, or None.")
    # Most blocks of a text that are drafted in a batch, behind tokens that are drawn.
    blocks: int = Field(32, ge=1, description="Use 1 or more.")
    # Most tokens that it drafts: the most frequent ones of the data.
    draft_vocab: int = Field(32000, ge=2, description="Use 2 or more.")

    def _chosen_tokens(self, manifest: Manifest, data: Path) -> DraftVocabulary:
        return frequent_tokens(data, manifest, self.draft_vocab)

    def _new(self, target: FrozenTarget, manifest: Manifest, data: Path, drafted: DraftVocabulary) -> PublishedHead:
        config = self._config(target, self._mask_token(target, manifest, data), drafted)
        network = BlockHeadNetwork(config, own_embedding=False, own_output=drafted.tokens is not None)
        if drafted.tokens is not None:  # else the target lends its own
            begin_output(network, target, drafted.tokens)
        return PublishedHead("", config, network, drafted.tokens)

    def _config(self, target: FrozenTarget, mask_token: int, drafted: DraftVocabulary) -> BlockHeadConfig:
        """The description of a new head."""
        return BlockHeadConfig(
            method=self.method,
            layer=head_layers("qwen3", target, self.feed_forward, self.own_layers),
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=drafted.size(target),
            aux_layers=layers_to_read(target, self.layers, _usual_layers(target.num_layers)),
            verifier=target.name,
            architectures=tuple(target.model.config.architectures or ()),
            block_size=self.block_size,
            mask_token_id=mask_token,
            reaches=(BlockReach(),) * self.own_layers,
        )

    def _shape(self, config: Any, target: FrozenTarget) -> dict[str, Any]:
        return super()._shape(config, target) | {
            "layers": config.layers_of(target.num_layers),
            "own_layers": len(config.reaches),
            "block_size": config.block_size,
            "mask_token": config.mask_token_id,
            "draft_vocab": config.draft_vocab_size,
        }

    def _form(self, head: PublishedHead) -> str:
        """That of the speculators package has a place for an output layer, and for whatever a head that was there before
        may have."""
        return "z-lab" if self.init is None and head.tokens is None else "speculators"

    def _facts(self, config: Any) -> dict[str, Any]:
        sizes = {"layers of its own": len(config.reaches), "rows of a block": config.block_size}
        return sizes | {"mask token": config.mask_token_id}

    def _learning(self, head: PublishedHead, target: FrozenTarget) -> dict[str, Any]:
        network, config = head.network, head.config
        assert isinstance(network, BlockHeadNetwork)
        assert isinstance(config, BlockHeadConfig)
        mask = torch.tensor(config.mask_token_id)
        own = network.embed_tokens
        row = target.embed(mask) if own is None else own(mask)
        module, places = TextBlocks(network, row.detach().float()), config.num_places
        return {"module": module, "learnt": places, "most": places, "rows": self.blocks}

    def _mask_token(self, target: FrozenTarget, manifest: Manifest, data: Path) -> int:
        """The one that is asked for, or the rarest; of equally rare ones that with the highest number, since tokens that no
        text holds lie there."""
        if self.mask_token is None:
            counts = token_counts(data, manifest)
            return int((counts == counts.min()).nonzero()[-1])
        if self.mask_token >= target.vocab_size:
            problem = f"no token of the {target.vocab_size} of the target"
            raise InvalidParameterError("mask_token", self.mask_token, problem, f"Use 0 to {target.vocab_size - 1}.")
        return self.mask_token


class DsparkSettings(DflashSettings):
    """A block drafter whose tokens are chosen from left to right."""

    method: Literal["dflash", "dspark"] = "dspark"
    loss: Literal[LossName, "accepted_length"] = Field("total_variation", description=LOSS_NAMES)
    block_size: int = Field(7, ge=2, le=64, description="Use 2 to 64.")  # all of its rows draft
    markov_rank: int = Field(256, ge=1, description="Use 1 or more.")  # width between the matrices of the sequential head
    # What a place depends on: the token before it, that and its own state, or all tokens of the block before it.
    markov_head: Literal["vanilla", "gated", "rnn"] = Field("vanilla", description="Use vanilla, gated or rnn.")
    # Whether it learns how likely the token of a place stands.
    confidence: bool = True
    # Share of the loss that cross entropy has, against the tokens of the texts.
    cross_entropy: float = Field(0.1, ge=0.0, le=1.0, description="Use 0 to 1.")

    def trainee(self, target: FrozenTarget, manifest: Manifest, data: Path, settings: TrainSettings) -> Trainee:
        torch.manual_seed(settings.seed)
        return TrainedSequentialHead(target, manifest, self, self.design(target, manifest, data), settings)

    def _config(self, target: FrozenTarget, mask_token: int, drafted: DraftVocabulary) -> BlockHeadConfig:
        markov = MarkovShape(MarkovKind(self.markov_head), self.markov_rank)
        judge = JudgeInput.STATE_AND_TOKEN if self.confidence else None
        return replace(super()._config(target, mask_token, drafted), from_anchor=True, markov=markov, judge=judge)

    def _shape(self, config: Any, target: FrozenTarget) -> dict[str, Any]:
        small = {"confidence": config.judge is not None}
        if config.markov is not None:
            small |= {"markov_rank": config.markov.rank, "markov_head": config.markov.kind.value}
        return super()._shape(config, target) | small

    def _form(self, head: PublishedHead) -> str:
        return "speculators"


class TrainedSequentialHead(TrainedFeatureHead):
    """A head of DSpark in training.

    Its loss is that of Cheng et al. (2026): a divergence, cross entropy with the tokens of the texts, and for the
    confidence head binary cross entropy with the chance that the token rule accepts.
    """

    def __init__(
        self, target: FrozenTarget, manifest: Manifest, learning: DsparkSettings, design: Design, settings: TrainSettings
    ) -> None:
        super().__init__(target, manifest, learning, design, settings)
        self._cross_entropy = learning.cross_entropy
        self._chances: list[Tensor] = []  # by depth, what the confidence head said in the last pass

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        depths, said = self.drafted(module, batch, learn=True)
        share = self._cross_entropy
        total = (1.0 - share) * depth_loss(self.loss_name, depths, said, self.decay)
        total = total + share * depth_loss("cross_entropy", depths, said, self.decay)
        for place, (depth, chances) in enumerate(zip(depths, self._chances, strict=False)):  # where it guesses them
            if len(chances):
                with torch.no_grad():
                    stands = said.overlap(depth)
                total = total + self.decay**place * binary_cross_entropy(chances, stands)
        return total

    def _through(self, module: nn.Module, batch: Batch, embeddings: Tensor, hidden: list[Tensor], wanted: Any) -> Any:
        logits, self._chances = module(embeddings, hidden, wanted, self._target.head, batch.token_ids)
        return logits


def _usual_layers(count: int) -> tuple[int, ...]:
    """Up to five layers, evenly spread from the third to the last but one, or from the second where there are few."""
    first, last = (2, count - 2) if count > _MOST_READ + 2 else (min(1, count - 1), count - 1)
    number = min(_MOST_READ, last - first + 1)
    return tuple(first + round(i * (last - first) / max(1, number - 1)) for i in range(number))


# --- TextBlocks: a block drafter that drafts many blocks of a text at once, each as it will in the engine.


class TextBlocks(nn.Module):
    """A block drafter in training.

    A block begins with a token of the text. Its row r drafts the token that is r tokens ahead of that one, or r + 1 where
    the first row drafts, too. Rows see the text before the block and all rows of the block.

    Args:
        mask: [hidden_size] the embedding of the mask token.
    """

    mask: Tensor

    def __init__(self, network: BlockHeadNetwork, mask: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mask", mask, persistent=False)

    def forward(
        self,
        embeddings: Tensor,
        hidden: list[Tensor],
        wanted: Sequence[Tensor],
        target_head: TargetHead,
        token_ids: Tensor | None = None,
    ) -> Any:
        """Logits [n, vocab_size] of the draft tokens of each depth; see `Design`. Given the tokens of the texts
        [num_texts, num_tokens], what a sequential head makes of the logits, and the chances that the head guesses, [n] by
        depth; there are none where it guesses none."""
        places = _places(wanted[0])
        rows = self._rows(embeddings, hidden, places)[:, :, self.network.ahead :]
        asked = [_taken(each, places) & (places > 0) for each in wanted]
        logits = [self.network.logits(rows[:, :, depth][own], target_head) for depth, own in enumerate(asked)]
        return logits if token_ids is None else self._in_turn(rows, places, asked, logits, token_ids)

    def _in_turn(
        self, rows: Tensor, places: Tensor, asked: Sequence[Tensor], logits: list[Tensor], token_ids: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns what the sequential and the confidence head say of each depth, behind the tokens of the texts."""
        markov, judge = self.network.markov_head, self.network.confidence_head
        if markov is None:  # as some published heads are, in which nothing guesses chances either
            return logits, []
        state = markov.begin(rows).expand(places.numel(), -1)
        biased, chances = list[Tensor](), list[Tensor]()
        for depth, own in enumerate(asked):
            states = self.network.output_states(rows[:, :, depth]).flatten(0, 1)
            step = markov(_taken(shifted(token_ids, depth), places).flatten(), states, state)
            state, chosen = step.states, own.flatten()
            biased.append(logits[depth] + step.bias[chosen])
            if judge is not None:
                chances.append(judge(states[chosen], step.embeddings[chosen]))
        return biased, chances

    def _rows(self, embeddings: Tensor, hidden: list[Tensor], places: Tensor) -> Tensor:
        """Returns what the layers leave of all rows of blocks [num_texts, most, block_size, hidden_size]."""
        size = self.network.config.block_size
        features = self.network.fuse(hidden)
        rows = torch.stack([_taken(embeddings, places), *[self.mask.expand(*places.shape, -1)] * (size - 1)], 2)
        rotary = RotaryFactors(self.network.config.layer, rows.device)
        tables = rotary.at(range(embeddings.shape[1] + size), torch.float32)
        for layer, reach in zip(self.network.stack, self.network.reaches, strict=True):
            rows = _through(layer, rows, features, places, tables, reach)
        return rows


def _places(begun: Tensor) -> Tensor:
    """[num_texts, most] where the blocks of each text begin, in ascending order, and 0 where it has no more."""
    most = max(1, int(begun.sum(1).max()))
    places = torch.arange(begun.shape[1], device=begun.device).masked_fill(~begun, begun.shape[1])
    found = places.sort(1).values[:, :most]
    return found.masked_fill(found == begun.shape[1], 0)


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """[num_texts, most, ...] of values [num_texts, num_tokens, ...]."""
    return values[torch.arange(len(values), device=values.device)[:, None], places]


def _through(
    layer: BlockLayer, rows: Tensor, features: Tensor, places: Tensor, tables: tuple[Tensor, Tensor], reach: BlockReach
) -> Tensor:
    """Returns what a layer leaves of the rows [num_texts, most, block_size, hidden_size] of blocks.

    Args:
        features: [num_texts, num_tokens, hidden_size] of the texts.
        places: [num_texts, most] where the blocks begin.
    """
    texts, most, size, _ = rows.shape
    of_text, attention = slice(0, features.shape[1]), layer.self_attn
    keys, values = attention.keys_and_values(features, (tables[0][of_text], tables[1][of_text]))
    normed = layer.input_layernorm(rows).flatten(0, 2)
    positions = (places[..., None] + torch.arange(size, device=rows.device)).flatten()
    here = (tables[0][positions], tables[1][positions])
    queries = attention.queries(normed, here)
    queries = queries.reshape(texts, most, size, *queries.shape[1:])
    own = [each.reshape(texts, most, size, *each.shape[1:]) for each in attention.keys_and_values(normed, here)]
    shared_by = queries.shape[3] // keys.shape[2]
    keys, values = (each.repeat_interleave(shared_by, 2) for each in (keys, values))
    own_keys, own_values = (each.repeat_interleave(shared_by, 3) for each in own)
    seen, seen_among = _seen(reach, places, size, features.shape[1])
    scores = torch.einsum("bmihd,bjhd->bmhij", queries, keys).masked_fill(~seen[:, :, None], float("-inf"))
    among = torch.einsum("bmihd,bmjhd->bmhij", queries, own_keys).masked_fill(~seen_among, float("-inf"))
    shares = (torch.cat([scores, among], -1) * queries.shape[-1] ** -0.5).softmax(-1)
    found = torch.einsum("bmhij,bjhd->bmihd", shares[..., of_text], values)
    found = found + torch.einsum("bmhij,bmjhd->bmihd", shares[..., features.shape[1] :], own_values)
    return layer.leave(rows.flatten(0, 2), found.flatten(0, 2)).reshape(rows.shape)


def _seen(reach: BlockReach, places: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """What the rows of blocks that begin at places [num_texts, most] see: of the text [num_texts, most, size, length], and
    of their own block [size, size]."""
    own, text = torch.arange(size, device=places.device), torch.arange(length, device=places.device)
    seen = (text < places[..., None])[:, :, None].expand(-1, -1, size, -1)
    among = torch.ones(size, size, dtype=torch.bool, device=places.device)
    if reach.window is not None:
        seen = seen & (places[..., None, None] + own[:, None] - text < reach.window)
        among = (own - own[:, None]).abs() < reach.window
    return seen, among.tril() if reach.causal else among
