"""Growing drafts from heads that guess each place by itself: all tokens at one depth are chosen from one law."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.propose.base import DraftNoise
from outrider.propose.trees.growth import Growth, add_level


def wanted_places(growth: Growth, first: int) -> range:
    """The places whose logits a draft may need, given the place of its own first token."""
    return range(first, first + min(growth.max_depth, growth.budget))


def grow_by_depth(growths: Sequence[Growth], logits: Sequence[Tensor], noise: DraftNoise) -> None:
    """Grow drafts to their end.

    Args:
        growths: Drafts that grow.
        logits: By draft: [num_places, vocab_size] of its `wanted_places`, before any parameter.
        noise: For drawn tokens.
    """
    rows_of = {id(growth): rows for growth, rows in zip(growths, logits, strict=True)}
    while alive := [growth for growth in growths if growth.growing]:
        rows = [rows_of[id(growth)][growth.node(node).depth] for growth in alive for node in growth.level]
        add_level(alive, torch.stack(rows), noise)
