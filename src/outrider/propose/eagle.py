"""Heads that draft token by token from the target's features: EAGLE, EAGLE-3, and MTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from outrider.config import Elsewhere
from outrider.draft import Draft
from outrider.errors import HeadMismatchError
from outrider.heads.features import FeatureHeadConfig
from outrider.heads.formats.mtp import read_mtp_config
from outrider.heads.formats.published import PublishedHead, read_head, read_head_config
from outrider.heads.fused_head import open_head
from outrider.heads.mtp import mtp_shape, open_mtp
from outrider.heads.rows import DraftRows, Work
from outrider.loading.loaded_model import LoadedModel
from outrider.loading.sources import check_is_there
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.beside_target import ProposerBesideTarget, unread_tokens
from outrider.propose.bridge import Bridge, ChosenTokens, SameVocabulary
from outrider.propose.draft_vocabulary import DraftVocabulary, VocabularySize, draft_vocabulary
from outrider.propose.row_heads import FolderMethod
from outrider.propose.settings import ProposerContext
from outrider.propose.trees.growth import Growth, add_level

# --- Settings that all methods with published heads share.


class FeatureMethod(FolderMethod):
    """A published head drafts from the target's features.

    Attributes:
        vocabulary: Where the head uses the target's output layer, so many of the first tokens are drafted, and those that
            texts contain; 0 for all. None leaves rare tokens out where the vocabulary is large.
    """

    vocabulary: VocabularySize = None

    if_nothing_stands: ClassVar[str] = (
        "layers or norms are probably read wrongly, or the head has hardly learnt yet, or for another model; it has no "
        "witness of the target's hidden states, so that shapes, names and embeddings alone were compared (outrider doctor "
        "says more)"
    )

    def added_token_bytes(self, target: LoadedModel) -> int:
        return read_head_config(self.folder()).kept.numbers_per_token * target.dtype.itemsize

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings; HeadMismatchError for a head of another method or of another target."""
        head, size = read_head(self.folder()), context.vocab_size
        self._check_method(head.config)
        bridge: Bridge = SameVocabulary(size) if head.tokens is None else ChosenTokens(size, head.tokens)
        return self.proposer(head, context.target, bridge)

    def proposer(self, head: PublishedHead, target: Target, bridge: Bridge) -> Proposer:
        """The proposer that drafts with a head; for methods that draft otherwise than token by token to override."""
        return HeadProposer(open_head(head, target), bridge, self.min_confidence, self.drafted_tokens(head, target))

    def drafted_tokens(self, head: PublishedHead, target: Target) -> DraftVocabulary | None:
        """The tokens that the target's output layer computes for the head; None for all."""
        return draft_vocabulary(self.vocabulary, target, target.tokens_at_once if head.network.lm_head is None else None)

    def _check_method(self, config: FeatureHeadConfig) -> None:
        if config.method != self.name:
            problem = f"its head is for method={config.method!r}, and method={self.name!r} was asked for"
            remedy = f"Use method={config.method!r}."
            raise HeadMismatchError(self.folder(), problem, remedy, "method", config.method, self.name)


# --- EAGLE: a head with attention of its own continues the target's last hidden states (Li et al. 2024).
#
# EAGLE-2 (Li et al. 2024) drafts trees with the same heads, whose likeliest tokens come first: `tree="best_first"`.


class Eagle1(FeatureMethod):
    """A published EAGLE head drafts from the target's last hidden state, with the target's own output layer.

    Attributes:
        model: Local folder of the head, as SafeAILab publishes it.
    """

    name: ClassVar[str] = "eagle1"


# --- EAGLE-3: a head with attention of its own drafts from features of several of the target's layers (Li et al. 2025).


class Eagle3(FeatureMethod):
    """A published EAGLE-3 head drafts from what entered three of the target's layers.

    Attributes:
        model: Local folder of the head, as SafeAILab, SpecForge, NVIDIA or the speculators package publish it; or a GGUF
            file.
    """

    name: ClassVar[str] = "eagle3"


# --- MTP: the layers that a checkpoint itself carries to predict several tokens draft (Gloeckle et al. 2024; DeepSeek-V3).


class Mtp(FolderMethod):
    """Layers that the target's own checkpoint carries to predict several tokens draft.

    Attributes:
        model: Local folder of another checkpoint of the target that holds these layers; None for the target's own.
        vocabulary: So many of the first tokens are drafted, and those that texts contain; 0 for all. None leaves rare
            tokens out where the vocabulary is large.
    """

    name: ClassVar[str] = "mtp"
    default_num_draft_tokens: ClassVar[int] = 3
    if_nothing_stands: ClassVar[str] = (
        "its norms are probably read wrongly, or the target's weights were changed since these layers were trained "
        "(outrider doctor says more)"
    )

    model: Annotated[str | None, Elsewhere(options=("--mtp-draft-model",))] = Field(
        None, min_length=1, description="Use a local folder."
    )
    vocabulary: VocabularySize = None

    def check_source(self, field: str) -> None:
        check_is_there(field, self.model)

    def added_token_bytes(self, target: LoadedModel) -> int:
        folder = target.folder() if self.model is None else self.model
        config = read_mtp_config(folder, target.model.config.get_text_config(decoder=True))
        return mtp_shape(config).numbers_per_token * target.dtype.itemsize

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings; UnsupportedModelError where the checkpoint carries no such layers."""
        target, bridge = context.target, SameVocabulary(context.vocab_size)
        vocabulary = draft_vocabulary(self.vocabulary, target, target.tokens_at_once)
        return HeadProposer(open_mtp(target, self.model), bridge, self.min_confidence, vocabulary)


# --- Drafting token by token with a head that reads the target's features.


@dataclass
class _Drafting:
    """A draft in the making, and the head's rows for it: first those of tokens of the text that the head has not read."""

    growth: Growth
    unread: list[int]
    rows: DraftRows
    row_of: dict[int, int] = field(default_factory=dict)  # by node; -1 is the token that the draft follows

    def next_unread(self) -> Work:
        """The next row of a token of the text that the head has not read."""
        row = self.row_of[-1] = len(self.rows.tokens)
        return self.rows, [self.unread[row]], [row - 1]

    def level(self) -> Work:
        """The rows of the nodes behind which tokens are to be guessed."""
        if self.growth.level == [-1]:
            return self.next_unread()
        nodes = [self.growth.nodes[node] for node in self.growth.level]
        self.row_of |= zip(self.growth.level, count(len(self.rows.tokens)))
        return self.rows, [node.token_id for node in nodes], [self.row_of[node.parent] for node in nodes]


class HeadProposer(ProposerBesideTarget):
    """Greedy, drawn or coupled chains and trees from a head that drafts level by level, batched over sequences. No level
    costs a pass of the target. The arguments are those of `ProposerBesideTarget`."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        self._catch_up(requests)
        free = iter(self.added.draft_blocks)  # no earlier draft is growing any more
        growths = [self._growth(request, self._head.num_levels) for request in requests]
        begun = [drafting for growth in growths if growth.growing and (drafting := self._begin(growth, free))]
        for row in range(max((len(each.unread) - 1 for each in begun), default=0)):
            self._head.compute([each.next_unread() for each in begun if row < len(each.unread) - 1], wanted=False)
        while alive := [each for each in begun if each.growth.growing]:
            logits = self._head.compute([each.level() for each in alive], wanted=True)
            add_level([each.growth for each in alive], self._bridge.logits(logits), noise)
        return [growth.draft() for growth in growths]

    def _begin(self, growth: Growth, free: Iterator[int]) -> _Drafting | None:
        """The head's rows for a draft; None where no memory is left for them, so that nothing grows."""
        sequence = growth.request.sequence
        unread = unread_tokens(growth.request, self.added.num_filled(sequence.kv))
        room, feature = len(unread) + growth.budget, self._last_features(sequence)
        rows = self._head.begin(self.added, sequence.kv, feature, room, free)
        return None if rows is None else _Drafting(growth, unread, rows)
