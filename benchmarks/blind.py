"""Proposers that do not see what a replay forces, so that forced text can be guessed wrongly as any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from outrider.draft import Draft
from outrider.propose.base import DraftNoise, ObservedRows, PromptRows, Proposer, ProposeRequest, ProposerSequence
from outrider.propose.settings import Method, ProposerContext, register
from outrider.verify.processing import Processing


@register
class Blind(Method):
    """Another method whose drafts do not pass the logits processors of the request, so that a replay cannot lead them.

    Attributes:
        of: Its settings.
    """

    name: ClassVar[str] = "blind"

    of: Method

    def build(self, context: ProposerContext) -> Proposer:
        return BlindProposer(context.build(self.of))


class BlindProposer(Proposer):
    """Shows another proposer every sequence without its logits processors.

    Args:
        inner: The other proposer.
    """

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.requires = inner.requires

    def begin(self, sequence: ProposerSequence) -> None:
        self.inner.begin(_blind(sequence))

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        self.inner.fork(_blind(parent), _blind(child))

    def prefill(self, prompts: Sequence[PromptRows]) -> None:
        self.inner.prefill([replace(prompt, sequence=_blind(prompt.sequence)) for prompt in prompts])

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return self.inner.propose([replace(r, sequence=_blind(r.sequence)) for r in requests], noise)

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        self.inner.observe([replace(seen, sequence=_blind(seen.sequence)) for seen in rows])

    def finish(self, sequence: ProposerSequence) -> None:
        self.inner.finish(_blind(sequence))

    def lag(self, sequence: ProposerSequence) -> int:
        return self.inner.lag(_blind(sequence))

    def overlaps(self, sequence: ProposerSequence, target_probs: Sequence[float]) -> list[float]:
        return self.inner.overlaps(_blind(sequence), target_probs)


def _blind(sequence: ProposerSequence) -> ProposerSequence:
    sampling = sequence.sampling.replace(logits_processors=())
    plain = Processing(sampling, sequence.token_ids, sequence.num_prompt_tokens)
    return replace(sequence, sampling=sampling, processing=plain)
