"""Passes of few rows on a GPU, each shape of which is launched at once, as a CUDA graph."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import KVPool, LayerReach
from outrider.kernels.triton.devices import Numbers, runs_on
from outrider.loading.loaded_model import LoadedModel
from outrider.model.attention import AttentionBackend, PagedAttention, PassOutput, pass_rows
from outrider.model.batch import RaggedBatch, Segment
from outrider.model.context import ForwardContext

# A pass over a decoder of 32 layers launches some 1,500 kernels. The host takes longer to launch them one by one than a
# GPU takes to run them, so a step of few rows waits for the host. A CUDA graph is the list of all launches of a pass with
# their arguments, recorded once and then launched at once. The arguments are fixed, so whatever differs from pass to pass
# has to lie in memory of a fixed place: tokens, positions, slots, block tables. They are written anew before each launch.
#
# Sizes are fixed, too. So there is a graph for each shape of passes: numbers of rows and of logits, splits of the longest
# text, entries of block tables and of paths. Sizes are rounded up to a few. A pass with fewer rows computes its first row
# several times: the same token at the same place, so what it writes there is the same, and nobody reads the rest.
#
# The first pass of a shape runs as always, over the memory of fixed places. It has compiled all kernels when the second
# one is recorded.

_log = logging.getLogger(__name__)

#: Numbers of rows that graphs are made for. Passes with more rows keep a GPU busy without one.
ROWS = (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128)
#: The most rows times splits of the longest text, for which the kernel of attention needs memory in each layer.
ROWS_TIMES_SPLITS = 4096
#: The fewest entries of block tables and of paths that there is room for.
FEWEST = 64
#: Stands beside the numbers of layers.
_LOGITS = -1
#: So many graphs are kept, of the shapes that were used last.
MOST_GRAPHS = 48


@dataclass(frozen=True)
class PassShape:
    """Holds what passes of one graph have in common."""

    rows: int  # how many there are
    logits: int  # how many rows have logits
    splits: int  # of the longest text, at most; see `TritonAttention`
    tables: int  # entries of all block tables, at most
    paths: int  # entries of the paths of all trees, at most; 0 without trees
    aux_layers: tuple[int, ...]  # layers whose inputs are wanted

    @classmethod
    def of(cls, batch: RaggedBatch, aux_layers: Sequence[int]) -> PassShape | None:
        """The smallest shape that a pass fits into; None where there are too many rows."""
        from outrider.kernels.triton.attention import SPLIT  # which imports Triton

        if not 0 < batch.num_rows <= ROWS[-1]:
            return None
        rows = _rows(batch.num_rows)
        # The rows that are computed once more bring a block table each.
        tables = sum(len(s.block_table) for s in (*batch.segments, *[batch.segments[0]] * (rows - batch.num_rows)))
        splits = max(-(-segment.context_len // SPLIT) for segment in batch.segments)
        paths = sum(int(segment.ancestry.sum()) for segment in batch.segments if segment.parents is not None)
        shape = cls(
            rows=rows,
            logits=_rows(batch.logits_spans[-1][1]),
            splits=_power(splits),
            tables=max(_power(tables), FEWEST),
            paths=max(_power(paths), FEWEST) if paths else 0,
            aux_layers=tuple(aux_layers),
        )
        return shape if rows * shape.splits <= ROWS_TIMES_SPLITS else None


def _rows(count: int) -> int:
    return ROWS[bisect_left(ROWS, count)] if count else 0


def _power(count: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (count - 1).bit_length()


class PassGraphs:
    """Computes the passes of a model over one KV memory by graphs, where their shape allows it."""

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend, pool: KVPool, reaches: list[LayerReach]) -> None:
        self._loaded = loaded
        self._backend = backend
        self._pool = pool
        self._reaches = reaches
        self._graphs: OrderedDict[PassShape, PassGraph] = OrderedDict()
        self._memory = GraphMemory(loaded.device)
        self.on = (
            type(backend) is PagedAttention
            and runs_on(loaded.device)
            and records(loaded.device)
            and loaded.encoder is None
            and not loaded.running_layers
            and loaded.long_rope_after is None
        )

    def forward(self, batch: RaggedBatch, aux_layers: Sequence[int]) -> PassOutput | None:
        """A pass through all layers; None where it has to be computed otherwise, which is tried once for a model."""
        shape = PassShape.of(batch, aux_layers) if self.on else None
        if shape is None:
            return None
        try:
            return self._graph(shape, batch).forward(batch)
        except Exception as error:
            _log.info("passes are not recorded as CUDA graphs, since that failed: %r", error)
            self.on = False
            self._graphs.clear()
            return None

    def _graph(self, shape: PassShape, batch: RaggedBatch) -> PassGraph:
        if shape not in self._graphs:
            self._graphs[shape] = PassGraph(self._compute, shape, batch, self._pool, self._reaches, self._memory)
        self._graphs.move_to_end(shape)
        while len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return self._graphs[shape]

    def _compute(self, context: ForwardContext, aux_layers: Sequence[int]) -> PassOutput:
        return self._backend.forward(self._loaded, context, aux_layers)


class PassGraph:
    """The passes of one shape."""

    def __init__(
        self,
        compute: Callable[[ForwardContext, Sequence[int]], PassOutput],
        shape: PassShape,
        batch: RaggedBatch,
        pool: KVPool,
        reaches: list[LayerReach],
        memory: GraphMemory,
    ) -> None:
        from outrider.kernels.triton.attention import TileRoom, TritonAttention

        self._compute, self._shape, self._memory = compute, shape, memory
        room = TileRoom(shape.rows, shape.splits, shape.tables, shape.paths)
        self._attention = TritonAttention(pass_rows(self._filled(batch)), batch.device, room)
        sizes = [shape.rows, shape.rows, shape.rows, shape.logits]
        self._numbers = Numbers(sizes, np.dtype(np.int64), batch.device, aligned=2)
        static = RaggedBatch([], batch.block_size, batch.device)  # whose lists nobody may ask for
        tokens, positions, static.slot_mapping, static.logits_rows = self._numbers.parts
        static.input_ids, static.position_ids = tokens[None], positions[None]
        self._context = ForwardContext(static, pool, reaches, kernel=self._attention)
        self._launch: Callable[[], object] | None = None
        self._places: PassOutput | None = None  # where its graph leaves what it computes

    def forward(self, batch: RaggedBatch) -> PassOutput:
        """One pass."""
        filled = self._filled(batch)
        wanted = np.resize(batch.wanted, self._shape.logits)
        self._numbers.write([filled.tokens, filled.positions, filled.row_slots, wanted])
        if batch.token_ids is not None:
            tokens = self._numbers.parts[0]
            tokens[: batch.num_rows] = batch.token_ids
            tokens[batch.num_rows :] = batch.token_ids[0]
        self._attention.rewrite(pass_rows(filled))
        if self._places is None:
            out = self._compute(self._context, self._shape.aux_layers)
            self._places = self._memory.places(out)
            return self._kept(out, batch)
        if self._launch is None:
            self._launch = self._memory.recorded(self._work)
        self._launch()
        return self._kept(self._places, batch)

    def _work(self) -> None:
        """Does what the graph does. Nothing else holds what it computes, so that another graph may use the memory of it."""
        assert self._places is not None, "a pass has run"
        out = self._compute(self._context, self._shape.aux_layers)
        self._places.logits.copy_(out.logits)
        for layer, states in self._places.aux_hidden_states.items():
            states.copy_(out.aux_hidden_states[layer])

    def _filled(self, batch: RaggedBatch) -> RaggedBatch:
        """Returns the same rows, and the first of them again until there are as many as the shape has."""
        first = batch.segments[0]
        again = Segment(first.token_ids[:1], first.start, first.block_table, logits_from=1)
        segments = [*batch.segments, *[again] * (self._shape.rows - batch.num_rows)]
        return RaggedBatch(segments, batch.block_size, batch.device)

    def _kept(self, out: PassOutput, batch: RaggedBatch) -> PassOutput:
        """Copies of what a pass leaves: the next launch of any graph may write over it."""
        aux = {layer: states[: batch.num_rows].clone() for layer, states in out.aux_hidden_states.items()}
        return PassOutput(out.logits[: batch.logits_spans[-1][1]].clone(), aux)


def records(device: torch.device) -> bool:
    """Tells whether launches on a device can be recorded."""
    return device.type == "cuda"


class GraphMemory:
    """Memory of a device that the graphs of a model take turns in, and the places where they leave what they compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._places: dict[int, Tensor] = {}

    def places(self, out: PassOutput) -> PassOutput:
        """Memory for what passes of this shape leave; passes of all shapes share it."""
        aux = {layer: self._place(layer, states) for layer, states in out.aux_hidden_states.items()}
        return PassOutput(self._place(_LOGITS, out.logits), aux)

    def _place(self, number: int, rows: Tensor) -> Tensor:
        if number not in self._places:
            self._places[number] = rows.new_empty(ROWS[-1], rows.shape[-1])
        return self._places[number][: len(rows)]

    def recorded(self, work: Callable[[], None]) -> Callable[[], object]:
        """Returns what launches the work again."""
        with torch.cuda.device(self._device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as that of a server, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        return graph.replay
