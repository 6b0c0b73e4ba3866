"""The tokens that a head drafts: those that the training texts hold most often."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.train.manifest import Manifest
from outrider.train.records import read_records


class DraftVocabulary(NamedTuple):
    """Some of the target's tokens.

    Attributes:
        tokens: [size] in ascending order; None for all.
        share: How many of the tokens to be learnt are among them.
    """

    tokens: Tensor | None
    share: float


def frequent_tokens(folder: Path, manifest: Manifest, size: int) -> DraftVocabulary:
    """The most frequent tokens of what the target wrote in texts that are not held out. Of tokens that are equally frequent
    the smaller number goes first.

    Args:
        folder: Of the data.
        manifest: Its manifest.
        size: How many tokens.

    Raises:
        InvalidParameterError: A file is missing or damaged.
    """
    vocab_size = manifest.target.vocab_size
    if size >= vocab_size:
        return DraftVocabulary(None, 1.0)
    counts = token_counts(folder, manifest)
    chosen = torch.sort(counts, descending=True, stable=True).indices[:size]
    return DraftVocabulary(chosen.sort().values, float(counts[chosen].sum() / counts.sum().clamp(min=1)))


def token_counts(folder: Path, manifest: Manifest) -> Tensor:
    """[vocab_size] how often the target wrote each token in texts that are not held out.

    Raises:
        InvalidParameterError: A file is missing or damaged.
    """
    counts = torch.zeros(manifest.target.vocab_size, dtype=torch.long)
    for record in read_records(folder, manifest):
        if not record.held_out:
            first = record.num_prompt_tokens if manifest.settings.max_tokens else 1
            counts += torch.bincount(record.token_ids[first:], minlength=len(counts))
    return counts
