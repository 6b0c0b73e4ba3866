"""One flattened forward pass of a model over its own KV memory; the target and a draft model use the same class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.pool import KVPool
from outrider.cache.state import KVView, SequenceState, SourceState
from outrider.loading.loaded_model import LoadedModel
from outrider.model import hf_encoder
from outrider.model.attention import AttentionBackend, HostedAttention, PartialPass, PassOutput
from outrider.model.batch import RaggedBatch, Segment
from outrider.model.context import ForwardContext, SourcePass
from outrider.model.graphs import PassGraphs
from outrider.model.running import RunningPass


@dataclass(frozen=True)
class ForwardOutput:
    """Holds what a pass computed."""

    logits: Tensor  # [num_logits, vocab_size] in float32, or float64 for a float64 model
    logits_spans: list[tuple[int, int]]  # (first, end) logits of each segment
    logits_first_rows: list[int]  # the row of each segment that its first logits belong to
    row_spans: list[tuple[int, int]]  # (first, end) rows of each segment
    # By index as transformers counts them (0 is the embeddings, i the input of layer i): [num_rows, hidden_size].
    aux_hidden_states: dict[int, Tensor]
    # [num_rows, hidden_size] as the last layer that ran left them, before the final norm; for a partial pass.
    hidden: Tensor | None = None
    num_resumed_rows: int = 0  # rows whose first layers a proposer had run already

    def logits_row(self, place: int, row: int) -> int:
        """The place in `logits` of a row of a segment, which must be among those whose logits were wanted."""
        return self.logits_spans[place][0] + row - self.logits_first_rows[place]


class ModelRunner:
    """A loaded model, an attention backend and the memory they share.

    Attributes:
        memory: Where the states of texts lie.
        partial_rows: Rows that the first layers have computed for a proposer in this step.
        graphs: Launches passes of few rows at once on a GPU.
        states: Those of the texts that proposers read with this model, by sequence; proposers with equal models share them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        blocks: BlockManager,
        text_bytes: int = 0,
        token_bytes: int = 0,
    ) -> None:
        self.loaded = loaded
        self.text_bytes = text_bytes
        self._token_bytes = token_bytes
        self.backend = backend
        self.memory = StateMemory(blocks, loaded.long_rope_after, loaded.trial_source, loaded.key_owners)
        self.states: dict[int, SequenceState] = {}
        self.partial_rows = PartialRows()
        self.num_passes = 0
        self._reaches = [layer.reach for layer in loaded.layers]
        self.graphs = PassGraphs(loaded, backend, self.pool, self._reaches)

    @property
    def blocks(self) -> BlockManager:
        return self.memory.blocks

    @property
    def pool(self) -> KVPool:
        return self.memory.pool

    @property
    def unmade_bytes(self) -> int:
        """Bytes of keys and values that have no memory yet: a layer gets its own when it is first written."""
        return self.pool.num_slots * max(0, self._token_bytes - self.pool.bytes_per_slot())

    @property
    def num_layers(self) -> int:
        return len(self._reaches)

    @property
    def invariant(self) -> bool:
        """Tells whether other rows in a pass do not change what is written for a row: its bits are its own, or in float64
        far finer than what a choice depends on."""
        return self.backend.invariant or self.loaded.dtype is torch.float64

    @property
    def takes_unknown_tokens(self) -> bool:
        """Tells whether a pass takes tokens that the host does not know yet."""
        return isinstance(self.backend, HostedAttention) and not self.loaded.running_layers and self.loaded.encoder is None

    def with_own_memory(self, num_tokens: int) -> ModelRunner:
        """Returns the same model over a small memory of its own, with room for so many tokens and some more, to try things
        out."""
        size = self.blocks.block_size
        num_tokens += 0 if self.loaded.trial_source is None else 4 * len(self.loaded.trial_source)  # of up to four texts
        shares = not self.loaded.running_layers  # it keeps no running states for other texts
        return ModelRunner(self.loaded, self.backend, BlockManager(-(-num_tokens // size) + 3, size, prefix_caching=shares))

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        aux_layers: Sequence[int] = (),
        part: PartialPass | None = None,
        head_panels: np.ndarray | None = None,
        token_ids: Tensor | None = None,
    ) -> ForwardOutput:
        """Compute every row of `segments` in one pass and leave in the memory what it keeps.

        Args:
            segments: The rows.
            head_panels: The tokens that have logits where the backend can leave some out.
            token_ids: [num_rows] on the device, in place of those of the segments; where `takes_unknown_tokens` says so.
        """
        batch = RaggedBatch(segments, self.blocks.block_size, self.loaded.device, token_ids)
        out = self.graphs.forward(batch, aux_layers) if part is None else None
        out = out or self._computed(batch, aux_layers, part, head_panels)
        self.num_passes += 1
        return ForwardOutput(
            logits=upcast_logits(out.logits),
            logits_spans=batch.logits_spans,
            logits_first_rows=[segment.logits_from for segment in batch.segments],
            row_spans=batch.row_spans,
            aux_hidden_states=out.aux_hidden_states,
            hidden=out.hidden,
        )

    def _computed(
        self, batch: RaggedBatch, aux_layers: Sequence[int], part: PartialPass | None, head_panels: np.ndarray | None
    ) -> PassOutput:
        running = RunningPass(batch, self._room_for_states(batch)) if self.loaded.running_layers else None
        sources = None if self.loaded.encoder is None else self._sources(batch)
        context = ForwardContext(batch, self.pool, self._reaches, running=running, sources=sources, head_panels=head_panels)
        out = self.backend.forward(self.loaded, context, aux_layers, part)
        for kept in (running, sources):
            if kept is not None:
                kept.keep()
        return out

    def _sources(self, batch: RaggedBatch) -> SourcePass:
        """The sources of a pass; those that come new are encoded."""
        encoder = self.loaded.encoder
        assert encoder is not None, "the model has an encoder"
        return SourcePass(batch, self.pool, self._encode, self.num_layers, encoder.width, self.loaded.dtype)

    def _encode(self, source: SourceState) -> Tensor:
        with self.backend.scope():
            return hf_encoder.encode(self.loaded.model, torch.tensor(source.token_ids, device=self.loaded.device))

    def _room_for_states(self, batch: RaggedBatch) -> int:
        """At how many of its places a pass may leave running states to the prefix cache, which makes room for these."""
        states, wanted = self.blocks.states, sum(len(segment.places) for segment in batch.segments)
        return 0 if states is None or not wanted else states.make_room(wanted)


def upcast_logits(logits: Tensor) -> Tensor:
    """Logits in float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# --- Rows whose first layers a proposer has computed, and on which the target's own pass may continue.
#
# A proposer that drafts with the first layers of the target leaves two things behind: the KV of these layers, in the
# very slots that the target's own pass will use, and the hidden states that the next layer reads. Whether they are
# still what the target needs is not left to proposers. `Target.run` alone writes down what it has computed, keeps a
# copy of the hidden states that nobody else holds, and forgets a sequence as soon as any other run touches it. The
# engine asks with the rows that it is about to compute, and gets those whose tokens, positions and blocks are the same.
# So it does not matter who drafted, or whether the draft was cut, demoted or continued by somebody else: rows that have
# changed are not found here.


@dataclass(frozen=True)
class PartialChain:
    """Rows of one sequence, a chain, that the first layers have computed. Nothing has written over their KV since."""

    depth: int  # how many layers: 0 to depth - 1
    start: int  # position of the first row
    token_ids: tuple[int, ...]  # tokens of the rows
    block_table: tuple[int, ...]  # the blocks that the sequence had
    long_rope: bool  # whether they were computed with the rotary factors of long texts
    hidden: Tensor  # [num_rows, hidden_size] what layer `depth` reads

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> PartialChain:
        """The first `count` rows."""
        return replace(self, token_ids=self.token_ids[:count], hidden=self.hidden[:count])

    def same_memory(self, segment: Segment) -> bool:
        """Tells whether rows of `segment` lie in the same blocks, under the same rotary factors."""
        return self.long_rope == segment.long_rope and self.block_table == tuple(segment.block_table)


class PartialRows:
    """The rows that were begun in this step, one chain for each sequence."""

    def __init__(self) -> None:
        self._chains: dict[KVView, PartialChain] = {}

    def clear(self) -> None:
        """Forget everything: between two steps blocks change their owners."""
        self._chains.clear()

    def take(self, kv: KVView) -> PartialChain | None:
        """Returns what is known of a sequence, which is forgotten: its KV is about to be written."""
        return self._chains.pop(kv, None)

    def add(self, kv: KVView, segment: Segment, depth: int, hidden: Tensor, before: PartialChain | None) -> None:
        """Write down rows that the first layers have just computed from the embeddings.

        Args:
            segment: The rows. Of a tree nothing is written down: its rows can only be computed all together.
            hidden: [num_rows, hidden_size] what they left.
            before: What `take` gave before these rows were computed. They go on behind its rows, or in the place of the
                last of them.
        """
        if segment.parents is not None:
            return
        tokens, states, start = tuple(segment.token_ids), hidden.clone(), segment.start
        if before is not None and before.depth == depth and before.same_memory(segment):
            kept = segment.start - before.start
            if 0 <= kept <= len(before):
                tokens, start = before.token_ids[:kept] + tokens, before.start
                states = torch.cat([before.hidden[:kept], states])
        self._chains[kv] = PartialChain(depth, start, tokens, tuple(segment.block_table), segment.long_rope, states)

    def find(self, kvs: Sequence[KVView], segments: Sequence[Segment]) -> list[PartialChain | None]:
        """For each segment of the target's own pass, the first of its rows that were begun; None where there are none."""
        return [self._leading(self._chains.get(kv), segment) for kv, segment in zip(kvs, segments, strict=True)]

    def _leading(self, begun: PartialChain | None, segment: Segment) -> PartialChain | None:
        if begun is None or segment.parents is not None:
            return None
        if begun.start != segment.start or not begun.same_memory(segment):
            return None
        count = 0
        for ours, theirs in zip(begun.token_ids, segment.token_ids, strict=False):
            if ours != theirs:
                break
            count += 1
        return begun.first(count) if count else None
