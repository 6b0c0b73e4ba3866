"""Heads that read the target's last hidden state: Medusa (Cai et al. 2024) and blockwise decoding (Stern et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from outrider.draft import Draft
from outrider.errors import InvalidParameterError
from outrider.heads.checkpoint import RunningHeads, open_heads
from outrider.loading.sources import check_is_there
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
)
from outrider.propose.bridge import Bridge, SameVocabulary
from outrider.propose.settings import Method, ProposerContext
from outrider.propose.trees.growth import Growth, grow_by_depth, wanted_places

# --- Drafting with heads that read the target's last hidden state; `medusa` and `blockwise` differ in their layers.
#
# Such heads need one row: that of the token before the last one of the text, which every pass of the target brings,
# whatever stands of its draft. So there is nothing to catch up with. A text whose prompt comes out of the prefix cache
# has its last prompt token computed anyway, and begins with that row; nothing is computed for the heads' sake.


class LastState(NamedTuple):
    """The hidden state that the target left at the last row of a text that is computed."""

    position: int
    hidden: Tensor  # [hidden_size]


class LastStateProposer(Proposer):
    """Keeps the hidden state that enters a layer of the target (its number of layers: that leaves the final norm) at the
    last computed row of each text. Subclasses draft."""

    def __init__(self, layer: int) -> None:
        self.requires = Requirements(aux_layers=(layer,))
        self._layer = layer
        self._features: dict[int, LastState] = {}  # by sequence

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        if parent.seq_id in self._features:
            self._features[child.seq_id] = self._features[parent.seq_id]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for seen in rows:
            last = len(seen.sequence.token_ids) - 2  # the row behind which the last token was written
            for row in seen.where(RowStatus.TEXT, RowStatus.ACCEPTED):
                if seen.positions[row] == last:
                    hidden = seen.aux_hidden_states[self._layer][row]
                    self._features[seen.sequence.seq_id] = LastState(last, hidden.clone())  # a view would keep all rows

    def finish(self, sequence: ProposerSequence) -> None:
        self._features.pop(sequence.seq_id, None)

    def state_behind(self, request: ProposeRequest) -> LastState | None:
        """The state behind which a draft goes on; None where the row was not seen, as in the first step of a text that the
        proposer is given late."""
        found = self._features.get(request.sequence.seq_id)
        return found if found is not None and found.position <= request.length - 2 else None


class RowHeadsProposer(LastStateProposer):
    """Greedy, drawn or coupled chains and trees from heads that are independent of each other, batched over sequences.

    All nodes of one depth are chosen from the probabilities of one head, whatever stands before them in the draft.
    """

    def __init__(self, heads: RunningHeads, bridge: Bridge, min_confidence: float = 0.0) -> None:
        super().__init__(heads.config.layer)
        self._heads, self._bridge, self._min_confidence = heads, bridge, min_confidence

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growths = [self._growth(request) for request in requests]
        begun = [growth for growth in growths if growth.growing]
        if begun:
            grow_by_depth(begun, self._logits(begun), noise)
        return [growth.draft() for growth in growths]

    def _growth(self, request: ProposeRequest) -> Growth:
        """An empty draft where the row was not seen."""
        seen = self.state_behind(request) is not None
        depth = min(request.max_depth, self._heads.config.num_heads - self._first(request)) if seen else 0
        return Growth.of(request, request.budget if seen else 0, depth, self._min_confidence)

    def _first(self, request: ProposeRequest) -> int:
        """The first head that guesses behind the request's path: one for each token that has come behind the row and the
        token that was written there."""
        return request.length - 2 - self._features[request.sequence.seq_id].position

    def _logits(self, growths: Sequence[Growth]) -> list[Tensor]:
        """By draft: logits [num_places, vocab_size] of the places that it may need."""
        hidden = torch.stack([self._features[growth.request.sequence.seq_id].hidden for growth in growths])
        places = [wanted_places(growth, self._first(growth.request)) for growth in growths]
        logits = self._bridge.logits(self._heads.logits(hidden, max(each.stop for each in places)))
        return [logits[each.start : each.stop, i] for i, each in enumerate(places)]


# --- Settings that all methods with heads from a folder share.


class FolderMethod(Method):
    """Heads from a folder.

    Attributes:
        model: Local folder of the heads.
        min_confidence: Nothing is drafted behind a token whose own draft probability is smaller. The token itself stays.
    """

    name: ClassVar[str] = "heads"

    model: str | None = Field(None, min_length=1, description="Use a local folder.")
    min_confidence: float = Field(0.0, ge=0.0, le=1.0, description="Use 0 to 1.")

    def check_source(self, field: str) -> None:
        check_is_there(field, self.model)

    def folder(self) -> str:
        """The folder; InvalidParameterError where none is named."""
        if self.model is None:
            remedy = (
                "Give draft_model, or in the method's own settings the local folder of what was trained for this target."
            )
            raise InvalidParameterError("model", None, f"method={self.name!r} needs one", remedy)
        return self.model


class HeadMethod(FolderMethod):
    """Heads that were trained for this target, as this package writes them."""

    def open(self, context: ProposerContext) -> RunningHeads:
        """The heads beside their target."""
        return open_heads(self.folder(), self.name, context.target)

    def build(self, context: ProposerContext) -> Proposer:
        return RowHeadsProposer(self.open(context), SameVocabulary(context.vocab_size), self.min_confidence)


# --- Medusa: heads on the target's last hidden state guess several tokens ahead at once (Cai et al. 2024).
#
# In the paper a draft is accepted where the target holds it "typical" enough, which changes the output; its heads are
# used here with our rules, which do not. A head's guess does not depend on the tokens that other heads guess before it.
#
# A draft of n tokens reads n output layers, since each head of the paper has one of its own. So its time grows with its
# length, and `drafts_in_one_pass` stays false.


class Medusa(HeadMethod):
    """Residual heads that were trained for this target guess several tokens ahead, from its own hidden states.

    Attributes:
        model: Local folder of the heads. A draft is no longer than there are heads.
    """

    name: ClassVar[str] = "medusa"
    default_num_draft_tokens: ClassVar[int] = 4


# --- Blockwise parallel decoding (Stern et al. 2018).
#
# One hidden layer turns the target's last hidden state into those of tokens further ahead, and the target's own output
# layer reads them.
#
# The paper takes as much of a block as the target would have chosen greedily, which is our walk at temperature 0. At
# other temperatures our rules keep the output exact, where the paper has nothing to say.


class Blockwise(HeadMethod):
    """A hidden layer that was trained for this target guesses several tokens ahead through the target's output layer.

    Attributes:
        model: Local folder of the heads. A draft is no longer than there are heads.
    """

    name: ClassVar[str] = "blockwise"
    default_num_draft_tokens: ClassVar[int] = 4
    drafts_in_one_pass: ClassVar[bool] = True
