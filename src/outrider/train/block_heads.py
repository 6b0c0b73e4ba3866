"""Block drafters (DFlash, 2026) that are to be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from outrider.errors import InvalidParameterError
from outrider.heads.block_config import BlockHeadConfig, BlockReach
from outrider.heads.block_network import BlockHeadNetwork
from outrider.heads.formats.published import PublishedHead
from outrider.train.block_module import TextBlocks
from outrider.train.draft_vocabulary import token_counts
from outrider.train.feature_heads import Design, OwnLayerSettings, published_design
from outrider.train.head_layers import head_layers, layers_to_read
from outrider.train.manifest import Manifest
from outrider.train.target import FrozenTarget

#: Most layers of the target that it reads unless somebody says which.
_MOST_READ = 5


class DflashSettings(OwnLayerSettings):
    """A block drafter.

    Attributes:
        layers: The target's layers whose inputs it reads, in ascending order; None takes up to five, evenly spread.
        own_layers: Layers of its own.
        block_size: Rows of a block: the last token of the text, then a mask token for each token that is drafted.
        mask_token: The target's token whose embedding stands for one that is to be drafted; None takes the rarest one.
        blocks: Most blocks of a text that are drafted in a batch, behind tokens that are drawn.
    """

    method: Literal["dflash"] = "dflash"
    layers: tuple[int, ...] | None = Field(None, description="Use ascending layer numbers, or None.")
    own_layers: int = Field(2, ge=1, le=16, description="Use 1 to 16.")
    block_size: int = Field(8, ge=2, le=64, description="Use 2 to 64.")
    mask_token: int | None = Field(None, ge=0, description="Use a token of the target, or None.")
    blocks: int = Field(32, ge=1, description="Use 1 or more.")

    def design(self, target: FrozenTarget, manifest: Manifest, data: Path) -> Design:
        layers = layers_to_read(target, self.layers, _usual_layers(target.num_layers))
        mask = self._mask_token(target, manifest, data)
        config = BlockHeadConfig(
            method=self.method,
            layer=head_layers("qwen3", target, self.feed_forward, self.own_layers),
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            aux_layers=layers,
            verifier=target.name,
            architectures=tuple(target.model.config.architectures or ()),
            block_size=self.block_size,
            mask_token_id=mask,
            reaches=(BlockReach(),) * self.own_layers,
        )
        network = BlockHeadNetwork(config, own_embedding=False, own_output=False)
        module = TextBlocks(network, target.embed(torch.tensor(mask, device=target.device)).float())
        facts = {"layers of its own": self.own_layers, "rows of a block": self.block_size, "mask token": mask}
        drafted = self.block_size - 1
        head = PublishedHead("", config, network, None)
        return published_design(head, "z-lab", target, module, drafted, most=drafted, rows=self.blocks, facts=facts)

    def _mask_token(self, target: FrozenTarget, manifest: Manifest, data: Path) -> int:
        """The one that is asked for, or the rarest; of equally rare ones that with the highest number, since tokens that no
        text holds lie there."""
        if self.mask_token is None:
            counts = token_counts(data, manifest)
            return int((counts == counts.min()).nonzero()[-1])
        if self.mask_token >= target.vocab_size:
            problem = f"no token of the {target.vocab_size} of the target"
            raise InvalidParameterError("mask_token", self.mask_token, problem, f"Use 0 to {target.vocab_size - 1}.")
        return self.mask_token


def _usual_layers(count: int) -> tuple[int, ...]:
    """Up to five layers, evenly spread from the third to the last but one, or from the second where there are few."""
    first, last = (2, count - 2) if count > _MOST_READ + 2 else (min(1, count - 1), count - 1)
    number = min(_MOST_READ, last - first + 1)
    return tuple(first + round(i * (last - first) / max(1, number - 1)) for i in range(number))
