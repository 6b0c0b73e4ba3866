"""Applies a sequence's parameters to its logits, row by row along each row's own path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.errors import Contained, OutriderError
from outrider.params import SamplingParams
from outrider.structured.grammar import GrammarState
from outrider.verify.logits import argmax

Path = tuple[int, ...]


class NothingAllowedError(OutriderError):
    """The parameters together forbid every token of a row; a request whose text comes there fails with NoTokenLeftError."""


@dataclass(frozen=True)
class Processed:
    """Logits as the parameters leave them."""

    logits: Tensor  # [num_rows, vocab_size], finite or minus infinity
    # Rows without probabilities, with what was raised there. Their logits are as they came. Drafts have rows that no text
    # comes to, so a fault ends a request only where its text comes to the row.
    faults: dict[int, BaseException]


class Processing:
    """Everything in SamplingParams that depends on the tokens before: bias, penalties, processors, forbidden tokens.

    A row is named by its path, the draft tokens between the committed text and the token to be chosen. The target's rows
    and a draft model's both pass through here.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        end_token_ids: Sequence[int] = (),
        bad_words: Sequence[Path] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        self._sampling = sampling
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._ends = frozenset(end_token_ids)
        self._end_token_ids = tuple(end_token_ids) if sampling.min_tokens else ()
        self._bad_words: dict[Path, list[int]] = {}  # by their beginning, the tokens that complete one
        for *beginning, last in bad_words:
            self._bad_words.setdefault(tuple(beginning), []).append(last)
        self._lengths = sorted({len(beginning) for beginning in self._bad_words})
        self._grammar = grammar

    @property
    def active(self) -> bool:
        """Tells whether it may change any logits from here on."""
        sampling = self._sampling
        return bool(
            sampling.logit_bias
            or sampling.penalises
            or sampling.logits_processors
            or sampling.allowed_token_ids is not None
            or self._bad_words
            or self._grammar is not None
            or self._forbids_ends(())
        )

    @property
    def follows_drafts(self) -> bool:
        """Tells whether rows of drafts can be processed from here on."""
        return self._grammar is None or self._grammar.follows_drafts

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> Processed:
        """Logits as the parameters leave them.

        A row that no text can come to, behind an end or behind a token that the row before forbids, is shown to no logits
        processor and to no grammar.

        Args:
            logits: [num_rows, vocab_size], finite; not written to.
        """
        faults: dict[int, BaseException] = {}
        scores = self._penalised(self._biased(logits), paths)
        forbidden = self._forbidden(paths, scores, faults)
        scores = self._user_processed(scores, paths, forbidden, faults)
        masked = scores.masked_fill(forbidden, float("-inf"))
        for row, best in enumerate(masked.amax(-1).tolist()):
            if best == float("-inf"):
                faults.setdefault(row, NothingAllowedError())
        if faults:
            masked[list(faults)] = logits[list(faults)]
        return Processed(masked, faults)

    def advance(self, token_id: int) -> None:
        """A token was committed and the text goes on."""
        if self._grammar is not None:
            self._grammar.advance(token_id)

    def forced(self, most: int) -> Path:
        """Tokens that must come next, `most` at most: before each of them the structure admits one alone. Empty where there
        is no structure, and where its automaton raises: its next row will tell why.

        They are a guess like any other. What else is asked for may forbid them. An end is none of them: the pass over the
        tokens before it brings it anyway.
        """
        path: Path = ()
        with Contained(lambda error: None):
            while self._grammar is not None and len(path) < most:
                token = self._grammar.only(path)
                if token is None or token in self._ends:
                    break
                path = (*path, token)
            return path
        return ()

    def _biased(self, logits: Tensor) -> Tensor:
        bias = self._sampling.logit_bias
        if not bias:
            return logits
        index = torch.tensor(list(bias), device=logits.device)
        return logits.index_add(1, index, logits.new_tensor(list(bias.values())).expand(len(logits), -1))

    def _penalised(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Repetition (Keskar et al. 2019) over prompt and output; frequency and presence over the output alone."""
        sampling = self._sampling
        if not sampling.penalises:
            return logits
        prompt, output = self._counts(paths, logits)
        seen = (prompt + output) > 0
        penalty = logits.new_tensor(sampling.repetition_penalty)  # in the logits' own dtype, or it is rounded to float32
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, penalised, logits)
        return logits - sampling.frequency_penalty * output - sampling.presence_penalty * (output > 0).to(logits)

    def _counts(self, paths: Sequence[Path], like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns how often each token stands in the prompt [vocab_size], and in the output before each row [n,
        vocab_size]."""
        vocab_size = like.shape[-1]
        tokens = torch.tensor(list(self._token_ids))
        prompt = torch.bincount(tokens[: self._num_prompt_tokens], minlength=vocab_size)
        output = torch.bincount(tokens[self._num_prompt_tokens :], minlength=vocab_size).repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token in path:
                output[row, token] += 1
        return prompt.to(like.device), output.to(like)

    def _user_processed(
        self, logits: Tensor, paths: Sequence[Path], forbidden: Tensor, faults: dict[int, BaseException]
    ) -> Tensor:
        """The rows that a text can come to, through the caller's functions; notes in `faults` what they raise."""
        if not self._sampling.logits_processors:
            return logits
        committed, rows = list(self._token_ids), list(logits)
        reached: dict[Path, Tensor | None] = {}  # by path, the row as it will be; None where no text goes on from it
        for row, path in enumerate(paths):
            if row in faults or not self._may_come(path, reached):
                reached[path] = None
                continue
            reached[path] = None
            with Contained(partial(faults.__setitem__, row)):
                rows[row] = self._through_processors(committed, path, logits[row])[0]
                reached[path] = rows[row].masked_fill(forbidden[row], float("-inf"))
        return torch.stack(rows)

    def _may_come(self, path: Path, reached: dict[Path, Tensor | None]) -> bool:
        """Tells whether a text may come to the row of `path`, as far as the rows before it are among those `reached`."""
        if self._is_over(path):
            return False
        if not path or path[:-1] not in reached:
            return True
        before, token = reached[path[:-1]], path[-1]
        if before is None or float(before[token]) == float("-inf"):
            return False
        return not self._sampling.greedy or int(argmax(before[None])) == token

    def _is_over(self, path: Path) -> bool:
        """Tells whether the text ends within `path`."""
        return not self._ends.isdisjoint(path)

    def _through_processors(self, committed: list[int], path: Path, row: Tensor) -> Tensor:
        """One row through the caller's functions, [1, vocab_size]."""
        ids = torch.tensor([[*committed, *path]], device=row.device)
        scores = row[None].clone()
        for processor in self._sampling.logits_processors:
            answer = processor(ids, scores)
            if not isinstance(answer, Tensor) or answer.shape != scores.shape:
                shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
                raise ValueError(f"{_name(processor)} returned {shape} instead of scores {tuple(scores.shape)}")
            if bool(answer.isnan().any()) or bool((answer == float("inf")).any()):
                raise ValueError(f"{_name(processor)} returned NaN or infinity")
            scores = answer.to(row)
        return scores

    def _forbidden(self, paths: Sequence[Path], logits: Tensor, faults: dict[int, BaseException]) -> Tensor:
        """True [num_rows, vocab_size] where a token may not stand; notes in `faults` what the grammar raises."""
        mask = torch.zeros(logits.shape, dtype=torch.bool)
        if self._sampling.allowed_token_ids is not None:
            mask[:] = True
            mask[:, list(self._sampling.allowed_token_ids)] = False
        for row, path in enumerate(paths):
            if self._forbids_ends(path):
                mask[row, list(self._end_token_ids)] = True
            mask[row, self._completions(path)] = True
            if self._grammar is None or self._is_over(path):
                continue
            with Contained(partial(faults.__setitem__, row)):
                allowed = self._grammar.allowed(path, logits.shape[-1])
                mask[row] |= torch.zeros_like(mask[row]) if allowed is None else ~allowed
        return mask.to(logits.device)

    def _forbids_ends(self, path: Path) -> bool:
        written = len(self._token_ids) - self._num_prompt_tokens + len(path)
        return bool(self._end_token_ids) and written < self._sampling.min_tokens

    def _completions(self, path: Path) -> list[int]:
        """Last tokens of the bad words whose beginning stands right before this row."""
        if not self._bad_words:
            return []
        before = (*self._token_ids[max(0, len(self._token_ids) - self._lengths[-1]) :], *path)
        tails = (before[len(before) - length :] for length in self._lengths if length <= len(before))
        return [last for tail in tails for last in self._bad_words.get(tail, ())]


def _name(processor: object) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
