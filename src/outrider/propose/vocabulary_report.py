"""Compares two vocabularies, and says how a model of one may draft for a model of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.errors import InvalidParameterError
from outrider.model.loading.sources import check_sources
from outrider.model.loading.tokenizers import given_tokenizer
from outrider.model.vocabulary import Vocabulary
from outrider.propose.bridge import shared_tokens

#: With the embedded target and copies of its draft whose vocabularies were cut, drafting by tokens was accepted at least as
#: far as drafting by text down to this share of the text; nothing smaller was measured.
LEAST_SHARE = 0.25


@dataclass(frozen=True)
class VocabularyReport:
    """What the vocabularies of a target and of a draft model have in common.

    Attributes:
        target: The target's name.
        draft: The draft model's name.
        target_size: Tokens of the target.
        draft_size: Tokens of the draft model.
        num_shared: Tokens that write the same bytes in both, or have the same role.
        num_text_tokens: Tokens that the target's tokenizer makes of the sample.
        share_of_text: How many of these are shared, 0 to 1.
        share_of_bytes: How many of the sample's bytes these write, 0 to 1.
        outside: Tokens of the sample that the draft model does not have, as text, most frequent first.
        same_ids: Whether all ids mean the same, so that the method "draft_model" serves.
        match: The setting of the method "cross_vocabulary" that suits the pair; None where no way does.
    """

    target: str
    draft: str
    target_size: int
    draft_size: int
    num_shared: int
    num_text_tokens: int
    share_of_text: float
    share_of_bytes: float
    outside: tuple[str, ...]
    same_ids: bool
    match: Literal["tokens", "text"] | None

    @property
    def share_of_target(self) -> float:
        """How many of the target's tokens are shared, 0 to 1."""
        return self.num_shared / max(self.target_size, 1)


def compare_vocabularies(target: str, draft: str, text: str, *, num_examples: int = 12) -> VocabularyReport:
    """Compare the tokenizers of two models by the bytes that their tokens write. No weights are loaded.

    Args:
        target: Folder or hub id of the target.
        draft: The same of the draft model.
        text: A sample of what is to be written.
        num_examples: The most tokens to name that the draft model does not have.

    Raises:
        InvalidParameterError: There is no such folder, or the sample is empty.
        ModelLoadError: There is no tokenizer, or it cannot be read.
        ContradictionError: A tokenizer does not tell what its tokens write.
    """
    check_sources(target=target, draft=draft)
    ours, theirs = (Vocabulary(given_tokenizer(name), name) for name in (target, draft))
    return report(ours, theirs, text, num_examples=num_examples)


def report(target: Vocabulary, draft: Vocabulary, text: str, *, num_examples: int = 12) -> VocabularyReport:
    """The same of vocabularies that are there already.

    Raises:
        InvalidParameterError: The sample is empty.
    """
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


def _match(target: Vocabulary, draft: Vocabulary, share: float) -> Literal["tokens", "text"] | None:
    if share >= LEAST_SHARE:
        return "tokens"
    return "text" if any(piece and target.can_write(piece) for piece in draft.pieces) else None


def _known(vocabulary: Vocabulary) -> dict[int, bytes | str]:
    """What each token writes, or its text where it is a special one."""
    ordinary = {id: piece for id, piece in enumerate(vocabulary.pieces) if piece is not None}
    return {**ordinary, **vocabulary.special}
