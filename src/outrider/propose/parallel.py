"""Heads that draft several tokens in one pass: DFlash, DSpark and P-EAGLE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from outrider.draft import Draft
from outrider.heads.block import Block, BlockRunner, DraftedBlock
from outrider.heads.formats.published import PublishedHead
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.beside_target import ProposerBesideTarget, unread_tokens
from outrider.propose.bridge import Bridge
from outrider.propose.draft_vocabulary import DraftVocabulary
from outrider.propose.eagle import FeatureMethod
from outrider.propose.trees.growth import Growth, add_level, grow_by_depth, wanted_places


class BlockMethod(FeatureMethod):
    """A published head drafts several tokens in one pass."""

    drafts_in_one_pass: ClassVar[bool] = True

    def proposer(self, head: PublishedHead, target: Target, bridge: Bridge) -> Proposer:
        vocabulary = self.drafted_tokens(head, target)
        return BlockProposer(BlockRunner.of(head, target), bridge, self.min_confidence, vocabulary)


class DFlash(BlockMethod):
    """A published DFlash head drafts a whole block of tokens in one pass, from what several of the target's layers left.

    Attributes:
        model: Local folder of the head, as z-lab or the speculators package publish it; or a GGUF file. A
            draft is shorter than its block.
    """

    name: ClassVar[str] = "dflash"
    default_num_draft_tokens: ClassVar[int] = 15  # a whole block of 16 rows, or of fewer


class DSpark(BlockMethod):
    """A published DSpark head drafts a whole block of tokens in one pass, and chooses them from left to right.

    Attributes:
        model: Local folder of the head, as DeepSpec (with layers of Qwen3 or Gemma 4) or the speculators package publish
            it; or a GGUF file. A draft has as many tokens as its block at most.
        min_confidence: Where the head guesses the chances of places: no token is drafted at a place whose chance, given the
            tokens before it, is smaller; None to end each chain where a further token is not worth its time. Elsewhere as
            for other methods.
    """

    name: ClassVar[str] = "dspark"
    default_num_draft_tokens: ClassVar[int] = 15  # a whole block of 15 tokens, or of fewer
    ends_drafts: ClassVar[bool] = True

    min_confidence: float | None = Field(None, ge=0.0, le=1.0, description="Use 0 to 1.")  # type: ignore[assignment]


class PEagle(BlockMethod):
    """A published P-EAGLE head drafts several tokens in one pass, from what entered three of the target's layers.

    Attributes:
        model: Local folder of the head, as the speculators package publishes it.
    """

    name: ClassVar[str] = "peagle"


class BlockProposer(ProposerBesideTarget):
    """Greedy, drawn or coupled chains and trees from a head that drafts blocks, batched over sequences. The arguments are
    those of `ProposerBesideTarget`.

    Each place of a block is guessed given the text, and a draft behind one of another proposer takes the places that come
    after that. Where a head is sequential, the tokens before a place bias its logits, and so they are part of its law.
    """

    _head: BlockRunner

    def __init__(
        self,
        head: BlockRunner,
        bridge: Bridge,
        min_confidence: float | None = 0.0,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.judges, least = head.judges and min_confidence is None, min_confidence or 0.0
        self._least_chance = least if head.judges else 0.0
        super().__init__(head, bridge, 0.0 if head.judges else least, vocabulary)

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        self._catch_up(requests)
        growths = [self._begin(request) for request in requests]
        begun = [growth for growth in growths if growth.growing]
        if begun:
            drafted = self._head.draft([self._block(growth) for growth in begun])
            if self._head.is_sequential:
                self._grow([self._path(growth, block) for growth, block in zip(begun, drafted, strict=True)], noise)
            else:
                grow_by_depth(begun, [self._bridge.logits(block.logits) for block in drafted], noise)
        return [growth.draft() for growth in growths]

    def _begin(self, request: ProposeRequest) -> Growth:
        """An empty draft, no longer than what is left of the block."""
        places = self._head.num_places
        read = request.length - self.added.num_filled(request.sequence.kv)
        return self._growth(request, 1, None if places is None else places + 1 - read)

    def _block(self, growth: Growth) -> Block:
        sequence, (token, *others) = growth.request.sequence, self._unread(growth)
        held = self.added.num_filled(sequence.kv)
        feature = self._last_features(sequence) if self.added.shape.feature_size else None

        return Block(
            token,
            held,
            lambda layer: self.added.read(sequence.kv, layer, held),
            wanted_places(growth, len(others)),
            feature,
        )

    def _unread(self, growth: Growth) -> list[int]:
        return unread_tokens(growth.request, self.added.num_filled(growth.request.sequence.kv))

    def _path(self, growth: Growth, block: DraftedBlock) -> _Path:
        """A draft of a sequential head, which takes in what stands at the places before its first one."""
        *before, last = self._unread(growth)
        state = self._head.begin_path(block)[None]
        for place, token in enumerate(before):
            _, state, _ = self._head.go_on([token], block.states[place : place + 1], state, judged=False)
        return _Path(growth, block, last, len(before), state[0])

    def _grow(self, paths: Sequence[_Path], noise: DraftNoise) -> None:
        """Grow drafts of a sequential head to their end, level by level. Where it guesses the chances of places, nothing is
        drawn at unlikely ones: what is asked for depends on the tokens before a place alone."""
        while alive := [path for path in paths if path.growth.growing]:
            rows = [(path, node) for path in alive for node in path.growth.level]
            bias, states, chances = self._head.go_on(
                [path.token(node) for path, node in rows],
                torch.stack([path.block.states[path.first + path.depth(node)] for path, node in rows]),
                torch.stack([path.state_before(node) for path, node in rows]),
                judged=self.judges or self._least_chance > 0.0,
            )
            logits = bias + torch.stack([path.block.logits[path.depth(node)] for path, node in rows])
            guessed = chances.tolist()
            likely = [i for i, chance in enumerate(guessed) if chance >= self._least_chance]
            for (path, node), state, chance in zip(rows, states, guessed, strict=True):
                path.behind[node], path.growth.chances[node], path.growth.level = state, chance, []
            for path, node in (rows[i] for i in likely):
                path.growth.level.append(node)
            if likely:
                going = [path.growth for path in alive if path.growth.growing]
                add_level(going, self._bridge.logits(logits if len(likely) == len(rows) else logits[likely]), noise)


@dataclass
class _Path:
    """A draft of a sequential head in the making."""

    growth: Growth
    block: DraftedBlock
    last: int  # the token that the draft follows
    first: int  # the place of its own first token
    start: Tensor  # the state before that place
    #: By node, -1 for the root: the state behind the place of its children.
    behind: dict[int, Tensor] = field(default_factory=dict)

    def depth(self, node: int) -> int:
        return self.growth.node(node).depth

    def token(self, node: int) -> int:
        return self.last if node < 0 else self.growth.nodes[node].token_id

    def state_before(self, node: int) -> Tensor:
        return self.start if node < 0 else self.behind[self.growth.nodes[node].parent]
