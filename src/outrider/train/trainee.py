"""The interface of what is trained: a draft model, or heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from outrider.train.batches import Batch
from outrider.train.manifest import Manifest
from outrider.train.settings import TrainSettings
from outrider.train.target import FrozenTarget
from outrider.validation import Frozen


class Overlaps(NamedTuple):
    """How often draft tokens would be accepted, by how far ahead they are.

    Attributes:
        sums: [depth] of the chances of all rows.
        counts: [depth] rows.
    """

    sums: Tensor
    counts: Tensor


class Trainee:
    """Something that learns to draft; a subclass for each kind.

    Attributes:
        module: What is optimised.
        rows: Names of what the data must hold of the target's passes.
        reach: Tokens by which the last draft token is ahead of the row that it is made from.
        draft_vocab_size: Tokens that it drafts, where these are not all of the target's.
    """

    module: nn.Module
    rows: tuple[str, ...] = ()
    reach: int = 1
    draft_vocab_size: int | None = None

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch; `module` is the one to call, wrapped for several devices where there are some."""
        raise NotImplementedError

    def overlaps(self, module: nn.Module, batch: Batch) -> Overlaps:
        """How often its draft tokens would be accepted in these texts, where the target wrote them."""
        raise NotImplementedError

    def tau(self, acceptance: Sequence[float], num_draft_tokens: int) -> float:
        """Tokens that a pass of the target is expected to yield, from the acceptance by depth."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write it as a folder that loads as a method. Raises StorageError."""
        raise NotImplementedError

    def speculation(self, folder: Path) -> dict[str, Any]:
        """The settings that draft with what `save` wrote there."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What the model card says of it, by name."""
        raise NotImplementedError


class HeadLearning(Frozen):
    """Which heads are trained on a frozen target, and what they learn; a subclass for each kind."""

    def trainee(self, target: FrozenTarget, manifest: Manifest, data: Path, settings: TrainSettings) -> Trainee:
        """What learns.

        Args:
            target: The target.
            manifest: Of the data.
            data: Their folder.
            settings: How the training runs.

        Raises:
            InputError: The settings do not fit the target, or the data do not hold what the teacher needs.
        """
        raise NotImplementedError


def chain_tau(acceptance: Sequence[float]) -> float:
    """1 + a1 + a1 a2 + ...: tokens of a pass, where draft token i stands with chance a_i if those before it do."""
    total, stands = 1.0, 1.0
    for chance in acceptance:
        stands *= chance
        total += stands
    return total
