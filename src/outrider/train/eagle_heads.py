"""EAGLE heads (Li et al. 2024, 2025) that are to be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from outrider.heads.feature_config import FeatureHeadConfig
from outrider.heads.feature_networks import Eagle1Network, Eagle3Network
from outrider.heads.formats.published import PublishedHead
from outrider.train.draft_vocabulary import frequent_tokens
from outrider.train.feature_heads import Design, OwnLayerSettings, published_design
from outrider.train.head_layers import head_layers, layers_to_read
from outrider.train.manifest import Manifest
from outrider.train.target import FrozenTarget
from outrider.train.unrolled_head import UnrolledHead

#: Least layers of a target for the layers that EAGLE-3 reads to be three different ones.
_USUAL_FROM = 7


class Eagle3Settings(OwnLayerSettings):
    """A head of EAGLE-3.

    Attributes:
        layers: The target's layers whose inputs it reads, in ascending order; None takes 2, n // 2 and n - 3 of n.
        draft_vocab: Most tokens that it drafts: the most frequent ones of the data.
        unroll: Draft tokens behind each token of a text that it learns.
    """

    method: Literal["eagle3"] = "eagle3"
    layers: tuple[int, ...] | None = Field(None, description="Use ascending layer numbers, or None.")
    draft_vocab: int = Field(32000, ge=2, description="Use 2 or more.")
    unroll: int = Field(4, ge=1, le=16, description="Use 1 to 16.")

    def design(self, target: FrozenTarget, manifest: Manifest, data: Path) -> Design:
        layers = layers_to_read(target, self.layers, _usual_layers(target.num_layers))
        tokens, share = frequent_tokens(data, manifest, self.draft_vocab)
        size = target.vocab_size if tokens is None else len(tokens)
        config = _config(self.method, target, self.feed_forward, size, layers)
        network = Eagle3Network(config, own_embedding=False, own_output=True)
        output = target.output_weight()
        assert network.lm_head is not None
        with torch.no_grad():
            network.lm_head.weight.copy_(output if tokens is None else output[tokens.to(output.device)])
        facts = {"tokens that it drafts": size, "share of the training texts that these make up": f"{share:.4f}"}
        head = PublishedHead("", config, network, tokens)
        return published_design(head, "speculators", target, UnrolledHead(network), self.unroll, facts=facts)


class Eagle1Settings(OwnLayerSettings):
    """A head of EAGLE, which EAGLE-2 drafts trees with.

    It continues what the target's final norm leaves. The target's output layer, which does not learn, reads what it leaves.

    Attributes:
        unroll: Draft tokens behind each token of a text that it learns.
    """

    method: Literal["eagle1"] = "eagle1"
    unroll: int = Field(4, ge=1, le=16, description="Use 1 to 16.")

    def design(self, target: FrozenTarget, manifest: Manifest, data: Path) -> Design:
        config = _config(self.method, target, self.feed_forward, target.vocab_size, None)
        network = Eagle1Network(config, own_embedding=False, bias=True)
        head = PublishedHead("", config, network, None)
        return published_design(head, "safeailab", target, UnrolledHead(network), self.unroll, facts={})


def _config(
    method: str, target: FrozenTarget, feed_forward: int | None, size: int, layers: tuple[int, ...] | None
) -> FeatureHeadConfig:
    return FeatureHeadConfig(
        method=method,
        layer=head_layers("llama", target, feed_forward),
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        aux_layers=layers,
        verifier=target.name,
        architectures=tuple(target.model.config.architectures or ()),
    )


def _usual_layers(count: int) -> tuple[int, ...]:
    """EAGLE-3's layers of so many; a target with fewer layers shows what enters its second, middle and last one."""
    if count >= _USUAL_FROM:
        return (2, count // 2, count - 3)
    return tuple(sorted({min(1, count - 1), count // 2, count - 1}))
