"""Heads that draft token by token from the target's features: EAGLE, EAGLE-3, and MTP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.errors import HeadMismatchError
from outrider.heads.eagle import EagleHead, FeatureHead
from outrider.heads.features import FeatureHeadConfig
from outrider.heads.formats.mtp import read_mtp_config
from outrider.heads.formats.published import PublishedHead, read_head, read_head_config
from outrider.heads.fused_head import FusedHead, Left, open_fused
from outrider.heads.lone import SeenContext
from outrider.heads.mtp import MtpHead, mtp_shape
from outrider.loading.loaded_model import LoadedModel
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.beside_target import FeatureTextProposer, read_texts
from outrider.propose.bridge import Bridge, ChosenTokens, SameVocabulary
from outrider.propose.feature_rows import (
    PartialBlockDraft,
    PartialDraft,
    PartialModuleDraft,
    TextRows,
    pass_through,
    unread_tokens,
)
from outrider.propose.row_heads import FolderMethod
from outrider.propose.settings import ProposerContext
from outrider.propose.trees.growth import add_level

# --- Settings that all methods with published heads share.


class FeatureMethod(FolderMethod):
    """A published head drafts from the target's features."""

    if_nothing_stands: ClassVar[str] = (
        "layers or norms are probably read wrongly, or the head was trained for another model; it has no witness of the "
        "target's hidden states, so that shapes, names and embeddings alone were compared (outrider doctor says more)"
    )

    def added_token_bytes(self, target: LoadedModel) -> int:
        return read_head_config(self.folder()).kept_per_token * target.dtype.itemsize

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings.

        Raises:
            InvalidParameterError: No folder is named, or there is no such folder.
            ModelLoadError: It holds no head of a known format.
            HeadMismatchError: The head is for another method, or was made for another target.
        """
        head, size = read_head(self.folder()), context.vocab_size
        self._check_method(head.config)
        bridge: Bridge = SameVocabulary(size) if head.tokens is None else ChosenTokens(size, head.tokens)
        return self.proposer(head, context.target, bridge)

    def proposer(self, head: PublishedHead, target: Target, bridge: Bridge) -> Proposer:
        """What drafts with a head; for methods that draft otherwise than token by token to override.

        Raises:
            HeadMismatchError: The head was made for another target.
        """
        fused = open_fused(head, target)
        if fused is not None:
            return FusedHeadProposer(fused, target, bridge, self.min_confidence)
        return LayerHeadProposer(EagleHead(head, target), target, bridge, self.min_confidence)

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
    """

    name: ClassVar[str] = "mtp"
    default_num_draft_tokens: ClassVar[int] = 3
    if_nothing_stands: ClassVar[str] = (
        "its norms are probably read wrongly, or the target's weights were changed since these layers were trained "
        "(outrider doctor says more)"
    )

    def added_token_bytes(self, target: LoadedModel) -> int:
        folder = target.folder() if self.model is None else self.model
        config = read_mtp_config(folder, target.model.config.get_text_config(decoder=True))
        return mtp_shape(config).numbers_per_token * target.dtype.itemsize

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings.

        Raises:
            InvalidParameterError: There is no such folder.
            UnsupportedModelError: The checkpoint carries no such layers, or has no folder.
            ModelLoadError: They cannot be read.
        """
        target = context.target
        bridge = SameVocabulary(context.vocab_size)
        return LayerHeadProposer(MtpHead(target, self.model), target, bridge, self.min_confidence)


# --- Drafting token by token with a head that reads the target's features.
#
# The rows of a draft are the head's own: each token reads what the head left for the token before it in place of the
# target's feature. They live as long as the draft grows, and no level of it costs a pass of the target.
#
# A head of several layers guesses the first token of a draft with its first layer, the second token with its second
# layer, and so on; the last layer guesses all tokens that are left.


RowsT = TypeVar("RowsT", bound=PartialDraft)


class FeatureHeadProposer(FeatureTextProposer, Generic[RowsT]):
    """Greedy, drawn or coupled chains and trees from a head that reads features, batched over sequences. Subclasses compute
    its rows. The arguments are those of `FeatureTextProposer`."""

    @abstractmethod
    def _begin(self, request: ProposeRequest) -> RowsT:
        """An empty draft, and the head's rows for it."""

    @abstractmethod
    def _run(self, work: Sequence[tuple[RowsT, list[int]]]) -> None:
        """Compute rows of drafts that no guess is wanted of."""

    @abstractmethod
    def _guess(self, work: Sequence[tuple[RowsT, list[int]]]) -> Tensor:
        """Logits [n, draft_vocab_size] of the tokens behind rows of drafts."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafting = [self._begin(request) for request in requests]
        begun = [each for each in drafting if each.growth.growing]
        for row in range(max((len(each.unread) - 1 for each in begun), default=0)):
            self._run([(each, [row]) for each in begun if row < len(each.unread) - 1])
        while alive := [each for each in begun if each.growth.growing]:
            logits = self._guess([(each, [each.row(node) for node in each.growth.level]) for each in alive])
            add_level([each.growth for each in alive], self._bridge.logits(logits), noise)
        return [each.growth.draft() for each in drafting]


class LayerHeadProposer(FeatureHeadProposer[PartialModuleDraft]):
    """The same from a head whose layers are modules; the arguments are those of `FeatureHeadProposer`."""

    def __init__(self, head: FeatureHead, target: Target, bridge: Bridge, min_confidence: float = 0.0) -> None:
        super().__init__(head, target, bridge, min_confidence)
        self._head = head

    def _compute(self, read: Sequence[TextRows], before: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        return read_texts(self.added, self._head, read, before, states)

    def _begin(self, request: ProposeRequest) -> PartialModuleDraft:
        growth = self._growth(request, request.max_depth, self._head.num_layers)
        held = self.added.num_filled(request.sequence.kv)
        drafting = PartialModuleDraft(growth, held, unread_tokens(request, held), self._head.window)
        if growth.growing:
            text = [self.added.read(request.sequence.kv, layer, held) for layer in range(self._head.num_layers)]
            features = self._last_features(request.sequence).to(self._head.dtype)
            drafting.begin(text, features.reshape(self._head.num_layers, -1), self._head.dtype)
        return drafting

    def _run(self, work: Sequence[tuple[PartialModuleDraft, list[int]]]) -> None:
        self._leave(work)

    def _guess(self, work: Sequence[tuple[PartialModuleDraft, list[int]]]) -> Tensor:
        return self._head.logits(self._leave(work))

    def _leave(self, work: Sequence[tuple[PartialModuleDraft, list[int]]]) -> Tensor:
        """What the head leaves [n, width] at rows of drafts, in the layer that guesses the token behind each."""
        rows = [(each, row) for each, own in work for row in own]
        last = self._head.num_layers - 1
        guessing = [min(each.depth(row), last) for each, row in rows]
        read = torch.stack([each.features[each.parent(row)] for each, row in rows])  # [n, num_layers, width]
        found, following = torch.empty_like(read[:, 0]), torch.zeros_like(read)
        for layer in range(min(guessing), last + 1):
            chosen = [i for i, first in enumerate(guessing) if first <= layer]
            guess = [place for place, i in enumerate(chosen) if guessing[i] == layer]
            left = self._run_layer(layer, [rows[i] for i in chosen], read[chosen, layer])
            follows, guessed = self._head.next_feature(left), [chosen[place] for place in guess]
            found[guessed] = left[guess]
            if layer < last:
                following[chosen, layer + 1] = follows
            else:
                following[guessed, last] = follows[guess]
        for (each, row), features in zip(rows, following, strict=True):
            each.features[row] = features
        return found

    def _run_layer(self, layer: int, rows: Sequence[tuple[PartialModuleDraft, int]], features: Tensor) -> Tensor:
        """What a layer leaves [n, width] at rows of drafts, those of each draft in one run."""

        def look(keys: Tensor, values: Tensor) -> list[SeenContext]:
            seen, first = [], 0
            while first < len(rows):
                each = rows[first][0]
                own = [row for drafting, row in rows[first:] if drafting is each]
                taken = slice(first, first + len(own))
                seen.append(each.write(layer, own, taken, keys[taken], values[taken]))
                first = taken.stop
            return seen

        tokens, positions = [each.token(row) for each, row in rows], [each.position(row) for each, row in rows]
        return self._head.run(layer, tokens, features, positions, look)


# --- Drafting with a head that reads the target's features and that our kernels compute in one pass a level.
#
# Keys and values of a draft lie in blocks of its own, behind those of the text, so no level of it copies what is kept
# of the text.


class FusedHeadProposer(FeatureHeadProposer[PartialBlockDraft]):
    """Drafts from a head in our kernels; the arguments are those of `FeatureHeadProposer`."""

    def __init__(self, head: FusedHead, target: Target, bridge: Bridge, min_confidence: float = 0.0) -> None:
        super().__init__(head, target, bridge, min_confidence)
        self._head = head
        self._free: Iterator[int] = iter(())
        head.kernel.use_memory(self.added.memory)

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        self._free = iter(self.added.draft_blocks)  # no earlier draft is growing any more
        return super().propose(requests, noise)

    def _compute(self, read: Sequence[TextRows], before: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        tokens, positions = [text.token_ids for text in read], [text.positions for text in read]
        slots = [slot for text in read for slot in self.added.writable_slots(text.kv, text.start, len(text))]
        return self._head.read(tokens, positions, before, states, slots)

    def _begin(self, request: ProposeRequest) -> PartialBlockDraft:
        growth = self._growth(request, request.max_depth, 1)
        kv = request.sequence.kv
        held = self.added.num_filled(kv)
        drafting = PartialBlockDraft(growth, held, unread_tokens(request, held))
        if growth.growing:
            if drafting.begin(kv, self.added, self._free):
                drafting.features[-1] = self._last_features(request.sequence)
            else:
                growth.level = []
        return drafting

    def _run(self, work: Sequence[tuple[PartialBlockDraft, list[int]]]) -> None:
        self._leave(work, wanted=False)

    def _guess(self, work: Sequence[tuple[PartialBlockDraft, list[int]]]) -> Tensor:
        return self._leave(work, wanted=True).logits

    def _leave(self, work: Sequence[tuple[PartialBlockDraft, list[int]]], *, wanted: bool) -> Left:
        rows = [(drafting, row) for drafting, own in work for row in own]
        read = torch.stack([drafting.features[drafting.parent(row)].to(self._head.dtype) for drafting, row in rows])
        left = self._head.run(pass_through(work, wanted=wanted), read)
        for (drafting, row), features in zip(rows, left.features, strict=True):
            drafting.features[row] = features
        return left
