"""HeadRunner: a network that stands beside a target, reads the texts that the target has computed, and drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from outrider.cache.memory import AddedLayers, AddedShape
from outrider.cache.state import KVView
from outrider.errors import HeadMismatchError
from outrider.heads.checkpoint import round_weights, use_kernels, witness_tokens
from outrider.heads.features import BesideNetwork, FeatureHeadConfig
from outrider.heads.formats.published import PublishedHead
from outrider.heads.lone import Look, RotaryFactors, SeenContext, is_model_class, model_class
from outrider.heads.rows import DraftRows, TextRows, Work
from outrider.model.context import additive
from outrider.model.runner import upcast_logits
from outrider.model.target import Target

#: `Look` for any layer of a head, which is the first argument. Told `seen=False` it only keeps.
Keep = Callable[..., Sequence[SeenContext]]
NetworkT = TypeVar("NetworkT", bound=BesideNetwork)


class HeadRunner(Generic[NetworkT]):
    """A network of torch modules beside its target, which lends what the network does not bring.

    In a text the slot of token i holds, in each layer, what token i and the target's feature of token i - 1 give. The rows
    of a draft read what the head itself left for the token before in place of the target's feature.

    Level i reads a token beside what level i - 1 left of the token before, and guesses one token further ahead: the first
    level guesses the first token of a draft, and the last one all tokens that are left. So what the next token reads, its
    *features*, are num_levels rows. In level i the rows of the first i + 1 tokens have nothing to read, and no row looks at
    them. Where a network reads features alone, the slot of token i holds what those of token i give.

    Args:
        network: In the target's dtype, on its device; taken over.
        rotary: Its rotary positions; None where its layers make their own.
        window: How many tokens back its rows look; None for all.
    """

    def __init__(
        self,
        network: NetworkT,
        target: Target,
        aux_layers: tuple[int, ...],
        shape: AddedShape,
        rotary: RotaryFactors | None = None,
        window: int | None = None,
    ) -> None:
        self._target, self._rotary, self._window = target, rotary, window
        self.aux_layers, self.shape = aux_layers, shape
        self.network = network
        #: Returns the tokens that have logits where the target lends its output layer, as `Target.head` takes them.
        self.head_panels: Callable[[], np.ndarray | None] = lambda: None
        self.dtype = self._pack()
        self._levels = list(network.levels)
        self._stacks = [list(level.stack) for level in self._levels]
        self.num_levels = len(self._levels)

    @classmethod
    def of(cls, head: PublishedHead, target: Target) -> Self:
        """A published head, whose network is taken over. Raises HeadMismatchError where it was made for another target."""
        layers, rotary = paired_layers(head, target), RotaryFactors(head.config.layer, target.device)
        network: Any = head.network.to(target.device, target.dtype)
        round_weights(network, target, head.folder)
        return cls(network, target, layers, head.config.kept, rotary)

    def _pack(self) -> torch.dtype:
        """Let our kernels compute what they can of the network; returns the dtype in which rows are given."""
        return use_kernels(self.network, self._target)

    def join(self) -> AddedLayers:
        """Layers in the target's memory for what it keeps of texts."""
        return self._target.add_layers(self.shape, self.recompute, self.aux_layers)

    def unseen(self, level: int) -> int:
        """Returns how many tokens at the beginning of a text no later row sees in a level, since they have nothing to
        read."""
        return level + 1 if self.network.reads_tokens else 0

    # --- Parts of a pass.

    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Features [n, width] in the target's dtype, of its hidden states [n, target_hidden_size] by layer."""
        return self.network.fuse([hidden[layer].to(self.dtype) for layer in self.aux_layers]).to(self._target.dtype)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Embeddings [n, hidden_size] of tokens, its own or the target's."""
        own = self.network.embed_tokens
        if own is None:
            return self._target.embed(token_ids).to(self.dtype)
        rows: Tensor = own(torch.tensor(token_ids, device=self._target.device))
        return rows.to(self.dtype)

    def logits(self, left: Tensor) -> Tensor:
        """Logits [n, draft_vocab_size] of what a level left, float32 at least."""
        return upcast_logits(self.network.logits(left, self._target_head))

    def _target_head(self, states: Tensor) -> Tensor:
        return self._target.head(states, self.head_panels())

    def next_feature(self, left: Tensor) -> Tensor:
        """Features [n, width] that the next token reads, of what a level left."""
        return self.network.next_feature(left)

    def run(self, level: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int], look: Look) -> Tensor:
        """Returns what a level leaves [n, width] of tokens at positions, which it reads beside features [n, width].
        `look` is given keys and values of the rows in `dtype`."""
        given = self._levels[level].enter(self.embed(token_ids), features.to(self.dtype))
        return self._through(level, given, self._where(positions), lambda _, *kept: look(*kept))

    def _through(self, level: int, given: Any, where: Any, look: Keep, *, whole: bool = True) -> Tensor:
        """Returns what a level leaves of rows [n, width]. Unless `whole`, its last layer only keeps them, and leaves
        nothing."""
        stack, left = self._stacks[level], torch.empty(0)
        for number, layer in enumerate(stack, level):
            given = given if number == level else layer.enter(left)
            if whole or layer is not stack[-1]:
                left = layer(given, where, partial(look, number))
            else:
                look(number, *layer.keys_and_values(given, where), seen=False)
        return left

    def _where(self, positions: Sequence[int]) -> Any:
        """Positions as its layers take them."""
        return positions if self._rotary is None else self._rotary.at(positions, self.dtype)

    # --- Texts.

    def read(self, added: AddedLayers, texts: Sequence[TextRows], before: Tensor) -> Tensor:
        """Keep what the layers make of rows of texts, in the memory that `join` gave.

        Args:
            before: [num_texts, feature_size] the features of the tokens before them.

        Returns:
            The features [n, feature_size] of the rows of all texts in turn, in the target's dtype.
        """
        hidden = {layer: _joined([text.hidden[layer] for text in texts]) for layer in self.aux_layers}
        tokens, spans = [token for text in texts for token in text.token_ids], [text.span for text in texts]
        return self._read(tokens, spans, before, hidden, self._keeping(added, texts))

    def recompute(self, token_ids: Sequence[int], hidden: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Computes what is kept of a whole text, for the proofs: see `AddedLayers`. The first token has no features before
        it."""
        kept = []

        def keep(layer: int, keys: Tensor, values: Tensor, *, seen: bool = True) -> list[SeenContext]:
            rows = keys.to(self._target.dtype), values.to(self._target.dtype)
            kept.append(rows)
            return [self._seen_of_text(layer, 0, slice(0, len(keys)), *rows)] if seen else []

        before = torch.zeros(1, self.shape.feature_size, dtype=self._target.dtype, device=self._target.device)
        self._read(list(token_ids), [range(len(token_ids))], before, hidden, keep)
        return kept

    @torch.inference_mode()
    def _read(
        self, tokens: list[int], spans: Sequence[range], before: Tensor, hidden: Mapping[int, Tensor], keep: Any
    ) -> Tensor:
        """The features of `read`, of texts whose tokens and hidden states stand in turn. `keep` is what `_keeping`
        returned."""
        features, embeddings = [self.fuse(hidden)], self.embed(tokens)
        where, width = self._where([place for span in spans for place in span]), features[0].shape[-1]
        for level, part in enumerate(self._levels):
            first = before[:, level * width : (level + 1) * width]
            read = features_before(first, features[-1], spans)
            more = level < self.num_levels - 1
            left = self._through(level, part.enter(embeddings, read.to(self.dtype)), where, keep, whole=more)
            if more:
                features.append(self.network.next_feature(left).to(self._target.dtype))
        return torch.cat(features, -1)

    def _keeping(self, added: AddedLayers, texts: Sequence[TextRows]) -> Any:
        """Returns the `keep` of `_read` that puts rows of texts into their memory."""
        return partial(self._keep, added, texts)

    def _keep(
        self, added: AddedLayers, texts: Sequence[TextRows], layer: int, keys: Tensor, values: Tensor, *, seen: bool = True
    ) -> list[SeenContext]:
        """Write rows of texts, and say what they see if that is asked."""
        found, first = [], 0
        for text in texts:
            rows = slice(first, first + len(text.span))
            dtype, first = self._target.dtype, rows.stop
            added.write(text.kv, layer, text.start, keys[rows].to(dtype), values[rows].to(dtype))
            if seen:
                held = added.read(text.kv, layer, text.span.stop)
                found.append(self._seen_of_text(layer, text.start, rows, *held))
        return found

    def _seen_of_text(self, layer: int, start: int, rows: slice, keys: Tensor, values: Tensor) -> SeenContext:
        """Says what rows of a text from a position on see in a layer, of the keys and values [num_slots, num_kv_heads, dim]
        up to the last row."""
        slots = torch.arange(len(keys), device=keys.device)
        own = slots[start:, None]
        seen = (slots >= self.unseen(min(layer, self.num_levels - 1))) & (slots <= own)
        if self._window is not None:
            seen &= own - slots < self._window
        seen |= slots == own  # rows that nobody looks at must be numbers all the same
        return SeenContext(rows, keys.to(self.dtype), values.to(self.dtype), additive(seen, self.dtype))

    # --- Drafts that grow level by level.

    def begin(self, added: AddedLayers, kv: KVView, feature: Tensor, room: int, free: Iterator[int]) -> DraftRows | None:
        """A draft behind what is held of a text; None where memory is short.

        Args:
            feature: [feature_size] of the last token that is held.
            room: Most rows that it will have.
        """
        held = added.num_filled(kv)
        draft = DraftRows.of(held, feature.to(self.dtype).reshape(self.num_levels, -1), room)
        for level in range(self.num_levels):
            keys, values = (
                _with_room(rows[self.unseen(level) :], room, self.dtype) for rows in added.read(kv, level, held)
            )
            draft.kept.append((keys, values))
        return draft

    @torch.inference_mode()
    def compute(self, work: Sequence[Work], *, wanted: bool) -> Tensor:
        """Compute rows of drafts; returns logits [n, draft_vocab_size] of the tokens behind them, if these are wanted."""
        rows = [(draft, row) for draft, tokens, parents in work for row in draft.take(tokens, parents)]
        last = self.num_levels - 1
        guessing = [min(draft.depth(row), last) for draft, row in rows]
        read = torch.stack([draft.features[draft.parents[row]] for draft, row in rows])  # [n, num_levels, width]
        found, following = torch.empty_like(read[:, 0]), torch.zeros_like(read)
        for level in range(min(guessing), last + 1):
            chosen = [i for i, first in enumerate(guessing) if first <= level]
            guess = [place for place, i in enumerate(chosen) if guessing[i] == level]
            left = self._run_drafts(level, [rows[i] for i in chosen], read[chosen, level])
            follows, guessed = self.next_feature(left), [chosen[place] for place in guess]
            found[guessed] = left[guess]
            if level < last:
                following[chosen, level + 1] = follows
            else:
                following[guessed, last] = follows[guess]
        for (draft, row), features in zip(rows, following, strict=True):
            draft.features[row] = features
        return self.logits(found) if wanted else found

    def _run_drafts(self, level: int, rows: Sequence[tuple[DraftRows, int]], features: Tensor) -> Tensor:
        """Returns what a level leaves [n, width] at rows of drafts, those of each draft in one run."""

        def look(keys: Tensor, values: Tensor) -> list[SeenContext]:
            found, first = [], 0
            for _, group in groupby(rows, lambda each: id(each[0])):
                own = list(group)
                taken = slice(first, first + len(own))
                first = taken.stop
                found.append(self._seen_of_draft(level, own, taken, keys[taken], values[taken]))
            return found

        tokens, positions = [draft.tokens[row] for draft, row in rows], [draft.positions[row] for draft, row in rows]
        return self.run(level, tokens, features, positions, look)

    def _seen_of_draft(
        self, level: int, own: Sequence[tuple[DraftRows, int]], taken: slice, keys: Tensor, values: Tensor
    ) -> SeenContext:
        """Keep rows of a draft in a level, which stand at `taken` among all that it computes; returns what they see."""
        draft, rows = own[0][0], [row for _, row in own]
        (held_keys, held_values), unseen = draft.kept[level], self.unseen(level)
        text = draft.held - unseen
        slots = [text + row for row in rows]
        held_keys[slots], held_values[slots] = keys, values
        stop = text + len(draft.tokens)
        seen = np.ones((len(rows), stop), bool)
        seen[:, text:] = draft.seen[rows, : len(draft.tokens)]
        if self._window is not None:
            places = np.array([*range(unseen, draft.held), *draft.positions])
            seen &= places[slots, None] - places < self._window
        mask = None if seen.all() else additive(torch.from_numpy(seen).to(keys.device), keys.dtype)
        return SeenContext(taken, held_keys[:stop], held_values[:stop], mask)


def features_before(first: Tensor, features: Tensor, spans: Sequence[range]) -> Tensor:
    """The features [n, width] of the tokens before those of texts, given those of the token before each text [num_texts,
    width] and of the tokens themselves [n, width]."""
    own = torch.split(features, [len(span) for span in spans])
    return torch.cat([part for i, rows in enumerate(own) for part in (first[i : i + 1], rows[:-1])])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of texts one behind another; those of a single text are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _with_room(rows: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    """Rows, and room for more behind them."""
    wide = rows.new_zeros((len(rows) + room, *rows.shape[1:]), dtype=dtype)  # what is masked must be a number all the same
    wide[: len(rows)] = rows
    return wide


# --- Checks that a published head fits a target.
#
# Such a head has no witness of the target's hidden states. It is compared by shapes, by the classes of the model that it
# names, and by its embeddings where it brings a copy of the target's.


_REMEDY = "Use a head that was made for this target."
#: Least mean cosine between embeddings of the head and the target. A copy, rounded or trained on, has nearly 1; the
#: embeddings of another model have nearly 0.
LEAST_COSINE = 0.5


class PairedTarget(Protocol):
    """What a head is compared with: a target that runs, or one that teaches."""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int

    def embed(self, token_ids: Tensor, /) -> Tensor:
        """Rows [n, hidden_size] of its embedding table, of tokens [n]."""


def paired_layers(head: PublishedHead, target: PairedTarget) -> tuple[int, ...]:
    """The layers of the target whose inputs a head reads. HeadMismatchError where it was made for another target."""
    folder, config = head.folder, head.config
    for field, value in {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}.items():
        found = getattr(target, field)
        if found != value:
            problem = f"it was made for a target with {field}={value}, and {target.name!r} has {found}"
            raise HeadMismatchError(folder, problem, _REMEDY, field, value, found)
    _check_architecture(folder, config, target)
    count = target.num_layers
    layers = config.layers_of(count)
    if list(layers) != sorted(set(layers)) or layers[-1] > _last_shown(config, count):
        problem = f"it reads what enters layers {', '.join(map(str, layers))}, and {target.name!r} has {count} layers"
        raise HeadMismatchError(folder, problem, _REMEDY, "num_layers", layers[-1] + 1, count)
    own, wide = head.network.embed_tokens, config.hidden_size != target.hidden_size
    lacks = {
        "embed_tokens.weight, and the target's are": own is None,
        "lm_head.weight, and the target's reads states that are": head.network.lm_head is None,
    }
    for problem in (problem for problem, missing in lacks.items() if wide and missing):
        problem = f"it brings no {problem} {target.hidden_size} wide"
        raise HeadMismatchError(folder, problem, _REMEDY, "hidden_size", config.hidden_size, target.hidden_size)
    if own is not None and not wide and not config.trains_embedding:
        _check_embedding(folder, own, target)
    return layers


def _check_embedding(folder: str, own: nn.Embedding, target: PairedTarget) -> None:
    """Raise HeadMismatchError where a head's embeddings are not the target's."""
    tokens = witness_tokens(target.vocab_size)
    theirs, ours = own(tokens.to(own.weight.device)).double().cpu(), target.embed(tokens).double().cpu()
    cosine = float(torch.cosine_similarity(theirs, ours, dim=-1).mean())
    if not cosine >= LEAST_COSINE:
        problem = f"its embed_tokens.weight is no copy of the embeddings of {target.name!r} (mean cosine {cosine:.2f})"
        raise HeadMismatchError(folder, problem, _REMEDY, "embed_tokens.weight", LEAST_COSINE, cosine)


def _last_shown(config: FeatureHeadConfig, count: int) -> int:
    """The last index of hidden states that a head may read: what the last layer leaves is shown behind the final norm only,
    which heads of eagle1 read and others do not mean."""
    return count if config.method == "eagle1" else count - 1


def _check_architecture(folder: str, config: FeatureHeadConfig, target: PairedTarget) -> None:
    own = model_class(target.model_type)
    foreign = [name for name in config.architectures if is_model_class(name)]
    if own is not None and foreign and own not in foreign:
        problem = f"it was made for {config.verifier!r}, which is a {foreign[0]}, and {target.name!r} is a {own}"
        raise HeadMismatchError(folder, problem, _REMEDY, "architectures", foreign[0], own)
