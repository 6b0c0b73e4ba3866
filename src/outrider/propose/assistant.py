"""Assistants of Gemma 4 draft from the target's own keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.heads.assistant import Assistant, AssistantRows, open_assistant
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.bridge import SameVocabulary
from outrider.propose.row_heads import FolderMethod, LastStateProposer
from outrider.propose.settings import ProposerContext
from outrider.propose.trees.growth import Growth, add_level


class Gemma4Assistant(FolderMethod):
    """The assistant that is published with a Gemma 4 drafts token by token, from the target's keys, values and states.

    Attributes:
        model: Local folder of the assistant; or a GGUF file.
    """

    name: ClassVar[str] = "gemma4_assistant"

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings; HeadMismatchError for an assistant of another target."""
        assistant, target = open_assistant(self.folder(), context.target), context.target
        bridge = SameVocabulary(context.vocab_size)
        return AssistantProposer(assistant, target.num_layers, bridge, self.min_confidence)


class AssistantProposer(LastStateProposer):
    """Greedy, drawn or coupled chains and trees from an assistant, batched over sequences.

    Each token of a draft is guessed from the token before it and the state that was left there. All of them see the text up
    to its last computed token, and stand at the place of its last token.
    """

    def __init__(self, assistant: Assistant, layer: int, bridge: SameVocabulary, min_confidence: float = 0.0) -> None:
        super().__init__(layer)
        self._assistant, self._bridge, self._min_confidence = assistant, bridge, min_confidence

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growths = [self._growth(request) for request in requests]
        begun = [self._begin(growth) for growth in growths if growth.growing]
        for row in range(max((len(each.unread) - 1 for each in begun), default=0)):
            self._read([each for each in begun if row < len(each.unread) - 1], row)
        while alive := [each for each in begun if each.growth.growing]:
            logits, states = self._assistant.compute([each.rows() for each in alive])
            counts = [len(each.growth.level) for each in alive]
            for each, own in zip(alive, torch.split(states, counts), strict=True):
                each.left |= zip(each.growth.level, own, strict=True)
            add_level([each.growth for each in alive], self._bridge.logits(logits), noise)
        return [growth.draft() for growth in growths]

    def _growth(self, request: ProposeRequest) -> Growth:
        ready = self.state_behind(request) is not None
        return Growth.of(request, request.budget if ready else 0, request.max_depth, self._min_confidence)

    def _begin(self, growth: Growth) -> _Drafting:
        request, seen = growth.request, self.state_behind(growth.request)
        assert seen is not None
        computed = seen.position + 1
        text = self._assistant.look(request.sequence.kv, computed)
        return _Drafting(growth, request.text(computed), seen.hidden, computed, text)

    def _read(self, drafts: Sequence[_Drafting], row: int) -> None:
        """Take in a token that another proposer has drafted, or the last one of the text before such."""
        rows = [AssistantRows(each.unread[row : row + 1], each.state[None], each.position, each.seen) for each in drafts]
        for each, state in zip(drafts, self._assistant.compute(rows)[1], strict=True):
            each.state = state


@dataclass
class _Drafting:
    """A draft in the making."""

    growth: Growth
    unread: Sequence[int]  # tokens that it follows, from the first that the target has not computed on
    state: Tensor  # [hidden_size] what was left before the last of them
    position: int  # where all rows stand
    seen: dict[str, tuple[Tensor, Tensor]]  # what they see of the text
    left: dict[int, Tensor] = field(default_factory=dict)  # by node, -1 for the root: what its row left

    def rows(self) -> AssistantRows:
        """The rows of the nodes behind which tokens are to be guessed."""
        nodes = self.growth.nodes
        tokens = [self.unread[-1] if node < 0 else nodes[node].token_id for node in self.growth.level]
        states = [self.state if node < 0 else self.left[nodes[node].parent] for node in self.growth.level]
        return AssistantRows(tokens, torch.stack(states), self.position, self.seen)
