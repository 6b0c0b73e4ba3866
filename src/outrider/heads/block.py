"""Runs heads that draft several tokens in one pass of their layers beside their target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outrider.heads.block_networks import BlockHeadNetwork, BlockReach, ConfidenceHead, MarkovHead, ParallelNetwork
from outrider.heads.features import LayerInput
from outrider.heads.lone import SeenContext
from outrider.heads.runner import HeadRunner
from outrider.model.context import additive
from outrider.model.runner import upcast_logits


@dataclass(frozen=True)
class Block:
    """Tokens that are to be drafted behind a text."""

    token: int  # the last token of the text, or the first that the head has not read
    position: int  # where that stands: so many tokens come before it
    context: Callable[[int], tuple[Tensor, Tensor]]  # by layer, what is kept of these: [position, num_kv_heads, head_dim]
    places: range  # which tokens are wanted; 0 is the one behind `token`
    feature: Tensor | None = None  # [width] of the token before, where the head reads such


@dataclass(frozen=True)
class DraftedBlock:
    """What a head says of the tokens behind a text."""

    states: Tensor  # [num_places, hidden_size] that the output layer reads, of all places from 0 on
    logits: Tensor  # [len(places), draft_vocab_size] of the wanted places, float32 at least, given the text alone


class BlockRunner(HeadRunner[BlockHeadNetwork | ParallelNetwork]):
    """A head whose rows of tokens that are to be drafted read a mask token, and perhaps a mask state. They are kept
    nowhere.

    The arguments are those of `HeadRunner`.
    """

    @torch.inference_mode()
    def keys_and_values(self, features: Tensor, positions: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """By layer, what is kept of tokens of a text that are read as features [n, width] alone."""
        where, rows = self._where(positions), features.to(self.dtype)
        return [layer.keys_and_values(LayerInput(rows, rows), where) for layer in self._stacks[0]]

    @torch.inference_mode()
    def draft(self, blocks: Sequence[Block]) -> list[DraftedBlock]:
        """What the head says of the wanted tokens of each block."""
        size, mask = self.network.block_size, self.network.config.mask_token_id
        counts = [block.places.stop if size is None else size for block in blocks]
        sized = list(zip(blocks, counts, strict=True))
        embeddings = self.embed([token for block, count in sized for token in (block.token, *[mask] * (count - 1))])
        given = self.network.enter(embeddings, self._features(sized))
        where = self._where([block.position + i for block, count in sized for i in range(count)])
        left = self._through(0, given, where, partial(self._look, sized))
        firsts = accumulate(counts[:-1], initial=self.network.ahead)
        rows = [[first + place for place in range(block.places.stop)] for first, block in zip(firsts, blocks, strict=True)]
        wanted = [row for own, block in zip(rows, blocks, strict=True) for row in own[block.places.start :]]
        logits = torch.split(self.logits(left[wanted]), [len(block.places) for block in blocks])
        states = self.network.output_states(left) if self.is_sequential else left
        return [DraftedBlock(states[own], each) for own, each in zip(rows, logits, strict=True)]

    @property
    def num_places(self) -> int | None:
        """Tokens that a block drafts at most; None for as many as are wanted."""
        return self.network.config.num_places if isinstance(self.network, BlockHeadNetwork) else None

    @property
    def is_sequential(self) -> bool:
        """Tells if a place depends on the tokens before it, so that blocks are drafted from left to right."""
        return self._markov is not None

    @property
    def judges(self) -> bool:
        """Tells if the head guesses the chances of places, given the tokens before them."""
        return self.is_sequential and self._confidence is not None

    def begin_path(self, block: DraftedBlock) -> Tensor:
        """The state of the sequential head before the first place of a block."""
        assert self._markov is not None
        return self._markov.begin(block.states)

    @torch.inference_mode()
    def go_on(self, tokens: Sequence[int], rows: Tensor, states: Tensor, *, judged: bool) -> tuple[Tensor, Tensor, Tensor]:
        """What the sequential head says of places behind tokens.

        Args:
            tokens: [n] the target's tokens before the places.
            rows: [n, hidden_size] of `DraftedBlock.states` at the places.
            states: [n, width] that it came to before them.
            judged: Whether the chances are asked for.

        Returns:
            The bias of the places' logits [n, draft_vocab_size], the states behind them, and the chances [n] with which
            their tokens stand: 1 where nothing guesses them or nobody asks.
        """
        assert self._markov is not None
        step = self._markov(torch.tensor(tokens, device=rows.device), rows, states)
        guesses = self._confidence if judged else None
        chances = rows.new_ones(len(rows)) if guesses is None else guesses(rows, step.embeddings)
        return upcast_logits(step.bias), step.states, chances

    def _features(self, sized: Sequence[tuple[Block, int]]) -> Tensor:
        """Features [n, width] that the rows of blocks read beside their tokens, where they do."""
        if isinstance(self.network, BlockHeadNetwork):
            return torch.empty(0)
        mask, parts = self._mask_feature, list[Tensor]()
        for block, count in sized:
            assert block.feature is not None, "the head reads features"
            parts += [block.feature[None], mask.expand(count - 1, -1)]
        return torch.cat(parts).to(self.dtype)

    @cached_property
    def _markov(self) -> MarkovHead | None:
        return self.network.markov_head if isinstance(self.network, BlockHeadNetwork) else None

    @cached_property
    def _confidence(self) -> ConfidenceHead | None:
        return self.network.confidence_head if isinstance(self.network, BlockHeadNetwork) else None

    @cached_property
    def _reaches(self) -> Sequence[BlockReach]:
        return self.network.reaches

    @cached_property
    def _mask_feature(self) -> Tensor:
        assert isinstance(self.network, ParallelNetwork)
        return self.network.mask_feature(self.dtype).to(self._target.dtype)

    def _look(self, sized: Sequence[tuple[Block, int]], layer: int, keys: Tensor, values: Tensor) -> list[SeenContext]:
        """Says what the rows of blocks see in a layer: the text but for tokens that no row sees, and rows of their
        block."""
        found, first, reach, unseen = [], 0, self._reaches[layer], self.unseen(0)
        for block, count in sized:
            rows = slice(first, first + count)
            held = [kept[unseen:].to(keys.dtype) for kept in block.context(layer)]
            own_keys, own_values = (torch.cat([old, new[rows]]) for old, new in zip(held, (keys, values), strict=True))
            found.append(SeenContext(rows, own_keys, own_values, _mask(reach, len(held[0]), keys[rows])))
            first = rows.stop
        return found

    def _read(
        self, tokens: list[int], spans: Sequence[range], before: Tensor, hidden: Mapping[int, Tensor], keep: Any
    ) -> Tensor:
        if self.network.reads_tokens:
            return super()._read(tokens, spans, before, hidden, keep)
        features = self.fuse(hidden)
        for layer, kept in enumerate(self.keys_and_values(features, [place for span in spans for place in span])):
            keep(layer, *kept, seen=False)
        return features[:, :0]


def _mask(reach: BlockReach, before: int, rows: Tensor) -> Tensor | None:
    """Mask of what the rows of a block see of so many tokens before it and of the block: additive [len(rows), before +
    len(rows)]; None for all."""
    if reach.window is None and (not reach.causal or len(rows) == 1):
        return None
    seen = torch.ones(len(rows), before + len(rows), dtype=torch.bool, device=rows.device)
    seen = seen.tril(before) if reach.causal else seen
    if reach.window is not None:
        slots = torch.arange(before + len(rows), device=rows.device)
        ahead = slots[None] - slots[before:, None]
        seen &= ahead.abs() < reach.window
    return additive(seen, rows.dtype)
