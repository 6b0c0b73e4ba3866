"""The optimisers: Muon for matrices inside the layers, AdamW for all else, as the embedded pair was trained."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from outrider.train.settings import TrainSettings

_BETAS = (0.9, 0.95)


def make_optimisers(
    module: nn.Module, settings: TrainSettings, vocab_sizes: Collection[int]
) -> list[torch.optim.Optimizer]:
    """Optimisers for the parameters that learn.

    Muon makes the step of a matrix orthogonal, which suits maps between hidden states. A table with a row for each token is
    none of these, and so takes AdamW, as vectors do.
    """
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in learning if parameter.ndim == 2 and not set(parameter.shape) & set(vocab_sizes)]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in learning if id(parameter) not in chosen]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(
            torch.optim.Muon(
                matrices, lr=settings.lr, weight_decay=settings.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            )
        )
    if others:
        found.append(torch.optim.AdamW(others, lr=settings.lr, weight_decay=0.0, betas=_BETAS))
    return found
