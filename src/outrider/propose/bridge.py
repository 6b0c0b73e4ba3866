"""Bridges two vocabularies: texts and logits of a draft model in the tokens of a target, and how well that can work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.errors import InvalidParameterError
from outrider.loading.sources import check_sources
from outrider.loading.tokenizers import given_tokenizer
from outrider.model.vocabulary import ModelVocabulary, whole_characters
from outrider.propose.base import ProposerSequence

# --- Bridge: translates texts and logits between the vocabularies of a target and its draft model.
#
# Where both vocabularies are the same there is nothing to do (`SameVocabulary`), and where a head drafts a choice of
# the target's tokens its logits are spread out (`ChosenTokens`). Others are compared by the bytes that their tokens
# write, and share what both can write in one token (`SharedTokens`, after Timor et al. 2025).


#: Bytes of a text that are kept open, to be written anew with what follows; and how many stay open where some are settled.
_MOST_OPEN, _STILL_OPEN = 96, 32
#: Stands for the logits of tokens that the draft does not have. It is finite, so that a request that forbids all tokens
#: that it has still leaves probabilities that can be drawn from; any other logit makes theirs exactly 0.
_OUTSIDE = -1e30


class Bridge(Protocol):
    """Holds what a draft model's proposer asks between two vocabularies."""

    def text(self, sequence: ProposerSequence, path: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """A text with `path` behind its committed tokens, in the draft's own tokens: those that the committed tokens
        settle, which later calls only add to; and those behind them, which may change."""
        ...

    def token(self, token_id: int) -> int:
        """The draft's token for a token of the target that was just drafted."""
        ...

    def logits(self, logits: Tensor) -> Tensor:
        """Logits [n, draft_vocab] as logits [n, target_vocab]."""
        ...

    def forget(self, sequence: ProposerSequence) -> None:
        """The sequence has ended."""
        ...


class SameVocabulary:
    """The bridge of two models of one vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def text(self, sequence: ProposerSequence, path: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        return sequence.token_ids, path

    def token(self, token_id: int) -> int:
        return token_id

    def logits(self, logits: Tensor) -> Tensor:
        missing = self._vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def forget(self, sequence: ProposerSequence) -> None:
        pass


class ChosenTokens(SameVocabulary):
    """The bridge of a head that reads all tokens of the target and drafts some of them.

    Args:
        tokens: [draft_vocab] the target's token for each token that may be drafted.
    """

    def __init__(self, vocab_size: int, tokens: Tensor) -> None:
        super().__init__(vocab_size)
        self._tokens = tokens

    def logits(self, logits: Tensor) -> Tensor:
        wide = logits.new_full((len(logits), self._vocab_size), _OUTSIDE)
        return wide.index_copy_(1, self._tokens.to(logits.device), logits)


class SharedTokens:
    """The bridge of two models of different vocabularies.

    A committed token that both have reads as the draft's own. What the draft does not have, and characters that take
    several tokens, read as the tokens that the draft's tokenizer writes for the same text. With `by_text` everything does.

    Attributes:
        twins: For each token of the target the draft's token that writes the same, -1 where there is none.
    """

    def __init__(self, target: ModelVocabulary, draft: ModelVocabulary, *, by_text: bool = False) -> None:
        self.target, self.draft = target, draft
        self.twins = shared_tokens(target, draft)
        self._marks = {id: self._mark(id, text) for id, text in target.special.items()}
        self._alone = [-1] * target.size if by_text else self._whole_twins()
        shared = [id for id, twin in enumerate(self.twins) if twin >= 0]
        self._shared = torch.tensor(shared), torch.tensor([self.twins[id] for id in shared])
        self._readings: dict[int, _Reading] = {}

    def text(self, sequence: ProposerSequence, path: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        reading = self._readings.get(sequence.seq_id)
        if reading is None:
            reading = self._readings[sequence.seq_id] = _Reading(self)
        reading.follow(sequence.token_ids)
        return reading.settled, reading.loose(path)

    def token(self, token_id: int) -> int:
        """Finds, for a token that the draft does not have, the last of those that write it: the best single one to go on
        from. What is computed of it is not taken for the text later, since the text reads otherwise."""
        twin = self.twins[token_id]
        return twin if twin >= 0 else (self.read(token_id) or [0])[-1]

    def logits(self, logits: Tensor) -> Tensor:
        target_ids, draft_ids = (ids.to(logits.device) for ids in self._shared)
        wide = logits.new_full((len(logits), self.target.size), _OUTSIDE)
        wide[:, target_ids] = logits[:, draft_ids]
        return wide

    def forget(self, sequence: ProposerSequence) -> None:
        self._readings.pop(sequence.seq_id, None)

    def read(self, token_id: int) -> list[int]:
        """The draft's tokens for one token of the target, whatever stands beside it."""
        twin, piece = self.twins[token_id], self.target.pieces[token_id]
        if twin >= 0:
            return [twin]
        return list(self._marks.get(token_id, ())) if piece is None else self.draft.spell(piece)

    def push(self, token_id: int, written: list[int], held: bytes) -> bytes:
        """Read one more token of the target.

        Args:
            written: The draft's tokens so far, which it adds to.
            held: Bytes behind these that are still open.

        Returns:
            The bytes that are open now.
        """
        twin, piece = self._alone[token_id], self.target.pieces[token_id]
        if twin < 0 and piece is not None:
            return self._settle_some(written, held + piece)
        written += self.draft.spell(held)
        written += [twin] if twin >= 0 else self._marks.get(token_id, ())
        return b""

    def _settle_some(self, written: list[int], held: bytes) -> bytes:
        """Settle the first tokens of a long open text."""
        if len(held) <= _MOST_OPEN:
            return held
        tokens, size = self.draft.spell(held), 0
        if self.draft.written(tokens) != held:  # the draft cannot write it, so no part of it is told by its bytes
            written += tokens
            return b""
        for token in tokens:
            if len(held) - size <= _STILL_OPEN:
                break
            written.append(token)
            size += len(self.draft.pieces[token] or b"")
        return held[size:]

    def _whole_twins(self) -> list[int]:
        """Twins of the tokens whose bytes are whole characters: others are read together with their neighbours."""
        return [
            twin if piece is not None and whole_characters(piece) == (0, len(piece)) else -1
            for twin, piece in zip(self.twins, self.target.pieces, strict=True)
        ]

    def _mark(self, token_id: int, text: str) -> list[int]:
        """Returns how a special token of the target reads: as the draft's own of the same text or role, else as its
        text."""
        if self.twins[token_id] >= 0:
            return [self.twins[token_id]]
        if token_id != self.target.bos:
            return self.draft.spell(text.encode())
        return [] if self.draft.bos is None else [self.draft.bos]


class _Reading:
    """Says how far one sequence has been read. What it says follows from the tokens alone, not from when it was asked.

    Args:
        bridge: Reads the tokens.

    Attributes:
        settled: The draft's tokens that no later token changes.
    """

    def __init__(self, bridge: SharedTokens) -> None:
        self._bridge = bridge
        self._num_read = 0
        self._held = b""  # the text behind the settled tokens
        self.settled: list[int] = []

    def follow(self, token_ids: Sequence[int]) -> None:
        """Read on to the end of the committed tokens."""
        if not self._num_read:
            self._begin(token_ids[0])
        for token in token_ids[self._num_read :]:
            self._held = self._bridge.push(token, self.settled, self._held)
        self._num_read = len(token_ids)

    def loose(self, path: Sequence[int]) -> list[int]:
        """The draft's tokens behind the settled ones, if `path` comes behind the committed tokens."""
        written: list[int] = []
        held = self._held
        for token in path:
            held = self._bridge.push(token, written, held)
        return written + self._bridge.draft.spell(held)

    def _begin(self, first: int) -> None:
        """Returns what the draft's tokenizer puts before a text, unless the text itself begins so."""
        bridge = self._bridge
        if bridge.read(first) != bridge.draft.opening:
            self.settled += bridge.draft.opening


def shared_tokens(target: ModelVocabulary, draft: ModelVocabulary) -> list[int]:
    """For each token of the target the draft's token that writes the same bytes, -1 where there is none.

    No token is the twin of two. Special tokens are twins where their texts are the same; so are those that end a text.
    """
    twins = [-1] * target.size
    for piece, id in target.writer.items():
        twins[id] = draft.writer.get(piece, -1)
    by_text = {text: id for id, text in draft.special.items()}
    for id, text in target.special.items():
        twins[id] = by_text.get(text, -1)
    if target.eos is not None and draft.eos is not None and twins[target.eos] < 0 and draft.eos not in twins:
        twins[target.eos] = draft.eos
    return twins


# --- Compares two vocabularies, and says how a model of one may draft for a model of the other.


#: With the embedded target and copies of its draft whose vocabularies were cut, drafting by tokens was accepted at least as
#: far as drafting by text down to this share of the text; nothing smaller was measured.
LEAST_SHARE = 0.25


@dataclass(frozen=True)
class VocabularyReport:
    """Holds what the vocabularies of a target and of a draft model have in common."""

    target: str  # the target's name
    draft: str  # the draft model's name
    target_size: int  # tokens of the target
    draft_size: int  # tokens of the draft model
    num_shared: int  # tokens that write the same bytes in both, or have the same role
    num_text_tokens: int  # tokens that the target's tokenizer makes of the sample
    share_of_text: float  # how many of these are shared, 0 to 1
    share_of_bytes: float  # how many of the sample's bytes these write, 0 to 1
    outside: tuple[str, ...]  # tokens of the sample that the draft model does not have, as text, most frequent first
    same_ids: bool  # whether all ids mean the same, so that the method "draft_model" serves
    # The setting of the method "cross_vocabulary" that suits the pair; None where no way does.
    match: Literal["tokens", "text"] | None

    @property
    def share_of_target(self) -> float:
        """Returns how many of the target's tokens are shared, 0 to 1."""
        return self.num_shared / max(self.target_size, 1)


def compare_vocabularies(target: str, draft: str, text: str, *, num_examples: int = 12) -> VocabularyReport:
    """Compare the tokenizers of two models by the bytes that their tokens write. No weights are loaded."""
    check_sources(target=target, draft=draft)
    ours, theirs = (ModelVocabulary(given_tokenizer(name), name) for name in (target, draft))
    return report(ours, theirs, text, num_examples=num_examples)


def report(target: ModelVocabulary, draft: ModelVocabulary, text: str, *, num_examples: int = 12) -> VocabularyReport:
    """Reports on vocabularies that are there already."""
    data = text.encode()
    tokens = target.spell(data)
    if not tokens:
        raise InvalidParameterError("text", text, "it has no text", "Give a sample of what is to be written.")
    twins = shared_tokens(target, draft)
    inside = [token for token in tokens if twins[token] >= 0]
    counts: dict[int, int] = {}
    for token in tokens:
        if twins[token] < 0:
            counts[token] = counts.get(token, 0) + 1
    frequent = sorted(counts, key=lambda token: (-counts[token], token))[:num_examples]
    share = len(inside) / len(tokens)
    return VocabularyReport(
        target=target.name,
        draft=draft.name,
        target_size=len(_known(target)),
        draft_size=len(_known(draft)),
        num_shared=sum(twin >= 0 for twin in twins),
        num_text_tokens=len(tokens),
        share_of_text=share,
        share_of_bytes=len(target.written(inside)) / len(data),
        outside=tuple((target.pieces[token] or b"").decode(errors="backslashreplace") for token in frequent),
        same_ids=_known(target) == _known(draft),
        match=_match(target, draft, share),
    )


def _match(target: ModelVocabulary, draft: ModelVocabulary, share: float) -> Literal["tokens", "text"] | None:
    if share >= LEAST_SHARE:
        return "tokens"
    return "text" if any(piece and target.can_write(piece) for piece in draft.pieces) else None


def _known(vocabulary: ModelVocabulary) -> dict[int, bytes | str]:
    """Returns what each token writes, or its text where it is a special one."""
    ordinary = {id: piece for id, piece in enumerate(vocabulary.pieces) if piece is not None}
    return {**ordinary, **vocabulary.special}
