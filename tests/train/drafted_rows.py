"""Whether a head in training drafts what a reference says, which computes one draft token after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outrider.lab.train.batches import Batch
from outrider.lab.train.target import FrozenTarget
from outrider.loading.hf_modules import use_plain_experts

#: The temperature of the data.
TEMPERATURE = 0.7


def disturb(trained: Any) -> None:
    """Give a head weights with which each token has a chance of its own."""
    generator = torch.Generator().manual_seed(4)
    for weight in trained.module.parameters():
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)


def assert_drafts_as(
    trained: Any,
    frozen: FrozenTarget,
    opened: Callable[[], Callable[[tuple[int, ...], tuple[int, ...]], Tensor]],
    depths: int = 3,
) -> None:
    """By hand: at each depth, how often the token rule accepts behind every row where the engine drafts.

    Args:
        trained: What learns.
        frozen: The target, whose model is float64 from here on.
        opened: Opens the reference: logits of the token behind a text and a path.
        depths: Draft tokens behind a row that are measured.
    """
    generator = torch.Generator().manual_seed(5)
    texts, lengths, prompts = torch.randint(61, (2, 9), generator=generator), [9, 7], [4, 1]
    batch = Batch(texts, torch.tensor(lengths), torch.tensor(prompts))
    with torch.no_grad():
        found = trained.tally(trained.module, batch)
    use_plain_experts(frozen.model.double())
    logits = opened()
    stood, tried = torch.zeros(depths).double(), torch.zeros(depths).double()
    for text, length, prompt in zip(texts.tolist(), lengths, prompts, strict=True):
        law = (frozen.model(torch.tensor([text[:length]])).logits[0] / TEMPERATURE).softmax(-1)
        chances = {}
        for row in range(prompt, length):
            for depth in range(depths):
                if row + depth + 1 < length:
                    drafted = logits(tuple(text[: row + 1]), tuple(text[row + 1 : row + 1 + depth]))
                    chance = torch.minimum(law[row + depth], (drafted / TEMPERATURE).softmax(-1)).sum()
                    chances[row, depth] = float(chance)
        of_text = followed(chances, prompt, depths)
        stood, tried = stood + of_text[0], tried + of_text[1]
    torch.testing.assert_close(found.tried.double(), tried, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.stood.double(), stood, atol=1e-3, rtol=1e-3)


def followed(chances: dict[tuple[int, int], float], row: int, depths: int) -> tuple[Tensor, Tensor]:
    """Draft tokens that stand and that are tried [depths] from a row to the end of a text: every way in which its drafts
    may end is followed.

    Args:
        chances: By row and depth, that a draft token stands where the earlier ones of its draft stand.
    """

    @cache
    def behind(row: int) -> Tensor:
        found, likely = torch.zeros(2, depths).double(), 1.0  # that so many of the draft stand
        for depth in range(depths + 1 if (row, 0) in chances else 0):
            chance = chances.get((row, depth), 0.0)
            if (row, depth) in chances:
                found[:, depth] += torch.tensor([likely * chance, likely])
            found = found + likely * (1.0 - chance) * behind(row + depth + 1)
            likely *= chance
        return found

    stood, tried = behind(row)
    return stood, tried
