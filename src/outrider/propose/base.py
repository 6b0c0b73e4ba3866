"""What a proposer is, and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from torch import Tensor

from outrider.params import SamplingParams
from outrider.propose.draft import Draft, Law
from outrider.verify.noise import Key, NoiseSource, Stream
from outrider.verify.processing import Processing


class Tokens(Sequence[int]):
    """A read-only view of a sequence's committed tokens, prompt first; it grows as the sequence does."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]


@dataclass
class ProposerSequence:
    """A sequence as proposers see it.

    Attributes:
        seq_id: Unique while the engine lives.
        token_ids: Committed tokens, prompt first.
        num_prompt_tokens: How many of them are the prompt.
        sampling: The request's parameters.
        processing: What its parameters do to logits, the target's and a draft model's alike.
        seed: Of the request's noise.
        sample: Sample index within the request.
        coupled: Whether drafts are to guess with the target's noise.
        greedy_drafts: Whether the caller asked for the most likely tokens instead of drawn ones.
        tree: Shape the caller asked for, children of each node by depth; empty for chains.
        round: Verify passes so far.
        namespace: Keeps prefix caches of unrelated callers apart.
    """

    seq_id: int
    token_ids: Tokens
    num_prompt_tokens: int
    sampling: SamplingParams
    processing: Processing
    seed: int
    sample: int
    coupled: bool
    greedy_drafts: bool
    tree: tuple[int, ...] = ()
    round: int = 0
    namespace: str | None = None


@dataclass(frozen=True)
class ProposeRequest:
    """One sequence that wants a draft.

    Attributes:
        sequence: Whose.
        budget: Most nodes it may hold; decided before anything is drawn.
        max_depth: Longest path that may be of use; as many as `budget` for a chain, fewer near the end of a text.
    """

    sequence: ProposerSequence
    budget: int
    max_depth: int = 1 << 30


class DraftNoise:
    """Chance for proposers: draws under keys that are theirs alone, or guesses with the target's noise when coupled."""

    def __init__(self, source: NoiseSource) -> None:
        self._source = source

    def law(self, sequence: ProposerSequence) -> Law:
        """The law that tokens drawn here for `sequence` have."""
        return Law.COUPLED if sequence.coupled else Law.SAMPLED

    def categorical(
        self,
        probs: Tensor,
        sequences: Sequence[ProposerSequence],
        offsets: Sequence[int],
        branches: Sequence[int] | None = None,
    ) -> Tensor:
        """Draw one token a row.

        Args:
            probs: [n, vocab_size] law of each row.
            sequences: Whose draft each row belongs to.
            offsets: How far ahead of the committed text the token stands, from 0.
            branches: Where a tree draws several tokens for one place: which of them, 0 or more. Each pair of offset and
                branch may be drawn once a round. Coupled guesses for one place share the target's noise for it.

        Returns:
            Tokens [n].
        """
        keys = [
            Key(
                seq.seq_id,
                seq.seed,
                seq.sample,
                Stream.GUESS if seq.coupled else Stream.DRAFT,
                len(seq.token_ids) + offset,
                seq.round,
                branch,
            )
            for seq, offset, branch in zip(sequences, offsets, branches or [0] * len(offsets), strict=True)
        ]
        return self._source.categorical(probs, keys)


@dataclass(frozen=True)
class Requirements:
    """What a proposer wants to be told of every committed row.

    Attributes:
        aux_layers: Hidden states by transformers' index: 0 is the embeddings, i the input of layer i.
        target_top_k: How many of the target's most likely next tokens.
    """

    aux_layers: tuple[int, ...] = ()
    target_top_k: int = 0

    @property
    def any(self) -> bool:
        return bool(self.aux_layers or self.target_top_k)


@dataclass(frozen=True)
class CommittedRows:
    """Rows of one sequence that are now part of its text, prefill included; after a preemption they come again.

    Attributes:
        sequence: Whose.
        positions: Position of each row.
        token_ids: Token of each row.
        aux_hidden_states: By layer index: [num_rows, hidden_size].
        target_top_k: Tokens and logits [num_rows, k] that the target thinks come next; None unless asked for.
    """

    sequence: ProposerSequence
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    aux_hidden_states: dict[int, Tensor] = field(default_factory=dict)
    target_top_k: tuple[Tensor, Tensor] | None = None


class Proposer:
    """Guesses what the target will write. A wrong guess costs time, never a token.

    Subclass it, return drafts from `propose`, register it (see docs/adding_a_proposer.md). Only `propose` must be written.
    """

    #: What `observe` must bring. A proposer that requires anything is served without prefix-cache hits on the target.
    requires: Requirements = Requirements()

    def begin(self, sequence: ProposerSequence) -> None:
        """A sequence has started; its prompt is in `token_ids`."""

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        """Guess for every request, in order; an empty Draft is always allowed. Called once a step.

        Tokens drawn from a law must be drawn through `noise`, and none may be dropped for what it turned out to be.
        """
        raise NotImplementedError

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        """Rows that were just committed, with what `requires` asked for."""

    def finish(self, sequence: ProposerSequence) -> None:
        """The sequence has ended or was cancelled; forget it."""

    def check_integrity(self) -> None:
        """Raise AssertionError where internal books disagree; for tests."""


@dataclass(frozen=True)
class TargetFacts:
    """What a proposer may know of the target when it is built.

    Attributes:
        name: Path or hub id.
        model: The transformers model, for proposers that share its weights.
        tokenizer: Its tokenizer, if any.
        vocab_size: Width of its logits.
        max_model_len: Longest sequence.
    """

    name: str
    model: Any
    tokenizer: Any | None
    vocab_size: int
    max_model_len: int
