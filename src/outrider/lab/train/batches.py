"""Batches of texts, each a function of its number alone, so that a training goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import InvalidParameterError
from outrider.records import Manifest, Record, read_manifest, read_records

#: Batches whose texts are put in order of length together, so that little of a batch is padding.
_SORTED_TOGETHER = 32
#: Least texts on either side of the split; with fewer, no measurement says anything.
_LEAST_TEXTS = 2


@dataclass(frozen=True)
class Piece:
    """A text, or a part of a long one."""

    token_ids: Tensor  # [num_tokens]
    num_prompt_tokens: int  # how many of them are the prompt
    rows: dict[str, Tensor]  # what was kept of the target's passes, [num_tokens - 1, ...] by name


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded behind their ends."""

    token_ids: Tensor  # [num_texts, num_tokens]
    lengths: Tensor  # [num_texts] tokens of each
    num_prompt_tokens: Tensor  # [num_texts] how many of these are the prompt
    rows: dict[str, Tensor] = field(default_factory=dict)  # [num_texts, num_tokens - 1, ...] by name; padded with zeros

    def to(self, device: torch.device) -> Batch:
        """Returns the same on a device."""
        rows = {name: values.to(device) for name, values in self.rows.items()}
        return Batch(self.token_ids.to(device), self.lengths.to(device), self.num_prompt_tokens.to(device), rows)

    def predicts(self, ahead: int = 1) -> Tensor:
        """[num_texts, num_tokens] whether row i has a token `ahead` behind it to predict."""
        places = torch.arange(self.token_ids.shape[1], device=self.lengths.device)
        return places[None] + ahead < self.lengths[:, None]

    def drafts(self, ahead: int = 1, first: int = 1) -> Tensor:
        """[num_texts, num_tokens] the same, and the engine begins a draft there, whose first token is `first` behind row i.
        The target itself writes the first token behind a prompt, and drafts begin behind that token."""
        places = torch.arange(self.token_ids.shape[1], device=self.lengths.device)
        return self.predicts(ahead) & (places[None] + first > self.num_prompt_tokens[:, None])

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted."""
        return int((self.lengths - 1).sum())


@dataclass(frozen=True)
class TrainingData:
    """The texts of a folder, on both sides of the split."""

    manifest: Manifest  # of the folder
    train: list[Piece]  # to learn from
    held_out: list[Piece]  # to measure with: pieces in which a draft can begin


def load_data(folder: Path, *, length: int, rows: Sequence[str] = ()) -> TrainingData:
    """Read a folder of data."""
    manifest = read_manifest(folder)
    sides: dict[bool, list[Piece]] = {False: [], True: []}
    for record in read_records(folder, manifest, rows=rows):
        sides[record.held_out] += _cut(record, length, written=manifest.settings.max_tokens > 0)
    found = sides[True]
    sides[True] = [piece for piece in found if piece.num_prompt_tokens + 1 < len(piece.token_ids)]
    if not sides[True] and len(found) >= _LEAST_TEXTS:
        problem = f"none of its {len(found)} pieces of held-out texts has two tokens behind the prompt"
        raise InvalidParameterError(
            "data", str(folder), problem, "Make data with a larger max_tokens, or use a larger length."
        )
    for held_out, pieces in sides.items():
        if len(pieces) < _LEAST_TEXTS:
            side = "to measure with" if held_out else "to train on"
            problem = f"{len(pieces)} of its {manifest.num_records} texts are left {side}, too few for a split"
            remedy = f"Add prompts, or change held_out, which is {manifest.settings.held_out}."
            if held_out:
                remedy += f" Pieces of {length} tokens with fewer than two behind the prompt do not count."
            raise InvalidParameterError("data", str(folder), problem, remedy)
    return TrainingData(manifest, sides[False], sides[True])


def _cut(record: Record, length: int, *, written: bool) -> Iterator[Piece]:
    """Pieces of at most `length` tokens; one token alone predicts nothing. Where the target has written nothing, the first
    half of a text stands for the prompt."""
    size = len(record.token_ids)
    num_prompt_tokens = record.num_prompt_tokens if written else size // 2
    for start in range(0, size - 1, length):
        end = min(start + length, size)
        if end - start > 1:
            prompt = min(max(num_prompt_tokens - start, 0), end - start)
            rows = {name: values[start : end - 1] for name, values in record.rows.items()}
            yield Piece(record.token_ids[start:end], prompt, rows)


class Batches:
    """Batches without end: every text once, in another order, and so on."""

    def __init__(self, pieces: Sequence[Piece], batch_size: int, seed: int) -> None:
        self._pieces = pieces
        self._size = min(batch_size, len(pieces))
        self._seed = seed
        self._epoch = -1
        self._order: list[list[int]] = []

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`, from 0."""
        each = len(self._pieces) // self._size
        if number // each != self._epoch:
            self._epoch = number // each
            self._order = self._shuffled(self._epoch)
        return collate([self._pieces[index] for index in self._order[number % each]])

    def _shuffled(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._pieces), generator=generator).tolist()
        groups = []
        for start in range(0, len(order), _SORTED_TOGETHER * self._size):
            part = order[start : start + _SORTED_TOGETHER * self._size]
            part.sort(key=lambda index: len(self._pieces[index].token_ids))
            groups += [part[i : i + self._size] for i in range(0, len(part) - self._size + 1, self._size)]
        return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def in_turn(pieces: Sequence[Piece], batch_size: int) -> Iterator[Batch]:
    """All texts once, in their order."""
    for start in range(0, len(pieces), batch_size):
        yield collate(pieces[start : start + batch_size])


def collate(pieces: Sequence[Piece]) -> Batch:
    """A batch of these texts."""
    lengths = [len(piece.token_ids) for piece in pieces]
    longest = max(lengths)
    tokens = torch.zeros((len(pieces), longest), dtype=torch.long)
    rows = {
        name: values.new_zeros((len(pieces), longest - 1, *values.shape[1:])) for name, values in pieces[0].rows.items()
    }
    for place, piece in enumerate(pieces):
        tokens[place, : lengths[place]] = piece.token_ids
        for name, values in piece.rows.items():
            rows[name][place, : lengths[place] - 1] = values
    prompts = torch.tensor([piece.num_prompt_tokens for piece in pieces])
    return Batch(tokens, torch.tensor(lengths), prompts, rows)
