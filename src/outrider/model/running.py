"""Running states: one pass over those of all texts, and the functions of layers that read and change them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from outrider.cache.running import Anchor, Cell, CellRecord, RunningText
from outrider.kernels import mixers
from outrider.kernels.library import kernel_library
from outrider.kernels.mixers import MatrixUpdates
from outrider.model.batch import RaggedBatch, Segment

# --- RunningPass: one pass over the running states of all its texts.


class RunningPass:
    """Computes state functions over the rows of a batch, text by text.

    What the texts keep is replaced by `keep`, once the whole pass has succeeded.

    Args:
        batch: The rows.
    """

    def __init__(self, batch: RaggedBatch, most_places: int = 0) -> None:
        self._batch = batch
        self._places: list[tuple[int, ...]] = []
        for segment in batch.segments:
            self._places.append(segment.places[: max(most_places, 0)])
            most_places -= len(segment.places)
        self._texts = [RunningText() if s.running is None else s.running for s in batch.segments]
        self._left: list[dict[Cell, CellRecord]] = [{} for _ in self._texts]
        self._cell: Cell = (-1, 0)

    @property
    def layers(self) -> set[int]:
        """Layers whose states were used."""
        return {layer for left in self._left for layer, _ in left}

    def enter(self, layer: int) -> None:
        """A part of a layer begins to compute; the functions that are called next are the layer's own."""
        if layer != self._cell[0]:
            self._cell = (layer, 0)

    def compute(self, function: StateFunction, tape: tuple[Tensor, ...], queries: tuple[Tensor, ...] = ()) -> Tensor:
        """The outputs [num_rows, ...] of a function over rows [num_rows, ...] of all texts."""
        cell = self._cell
        self._cell = (cell[0], cell[1] + 1)
        outputs = []
        for part, (first, end) in zip(self.open(cell, function, tape), self._batch.row_spans, strict=True):
            inputs, asked = (tuple(each[first:end] for each in some) for some in (tape, queries))
            out, states = function.run(part.state, StateRows(inputs, asked, part.segment.parents), part.wanted)
            part.leave(inputs, states)
            outputs.append(out)
        return torch.cat(outputs)

    def open(self, cell: Cell, function: StateFunction, tape: tuple[Tensor, ...]) -> list[CellRows]:
        """The texts in one cell, in their order, for rows that leave such a tape [num_rows, ...]."""
        some = zip(self._texts, self._batch.segments, self._places, self._left, strict=True)
        return [CellRows(text, cell, function, segment, tape, passed, left) for text, segment, passed, left in some]

    def keep(self) -> None:
        """The pass has succeeded: leave the states, and the tape of its rows, to the next one."""
        for text, left in zip(self._texts, self._left, strict=True):
            text.records.update(left)


class CellRows:
    """The rows of one text in one cell: the state that they go on from, and what the text keeps of them.

    The rows of earlier passes that are certain by now are applied first, and for good. Those behind them, which some
    proposer has computed ahead of the text, are applied for this pass alone. States behind some rows are for the prefix
    cache.

    Args:
        segment: The rows.
        tape: [n, ...] inputs such as those of the rows.

    Attributes:
        state: Before the first row; it is not to be changed.
        wanted: Rows behind which the state is asked for.
    """

    def __init__(
        self,
        text: RunningText,
        cell: Cell,
        function: StateFunction,
        segment: Segment,
        tape: Sequence[Tensor],
        passed: tuple[int, ...],
        left: dict[Cell, CellRecord],
    ) -> None:
        self.segment = segment
        self._cell, self._function, self._passed, self._left = cell, function, passed, left
        start, end = segment.start, segment.context_len
        base = min(segment.certain, start)
        known = text.records.get(cell)
        if known is None:
            assert start == 0 or text.is_arbitrary, f"cell {cell} has no state for the {start} tokens before this pass"
            self._first = before = Anchor(base, function.start(tape))
            self._ahead = [each[:0] for each in tape]
        else:
            self._first, before = Anchor(base, known.state_at(base)), Anchor(start, known.state_at(start))
            self._ahead = known.rows(base, start) if base < start else [each[:0] for each in tape]
        self.state = before.state
        self._mark = min(segment.certain, end)
        last = segment.num_rows - 1 if segment.parents is None else -1
        self._places = sorted({row for row in (self._mark - start - 1, last) if row >= 0})
        self.wanted = sorted({*self._places, *(position - start - 1 for position in passed)})

    def leave(self, tape: Sequence[Tensor], states: Mapping[int, Tensor]) -> None:
        """Leave the inputs of the rows [num_rows, ...], and the states behind those that were wanted."""
        start, mark = self.segment.start, self._mark
        anchors = (self._first, *(Anchor(start + row + 1, states[row]) for row in self._places))
        if mark > start:
            kept = tuple(each[mark - start :].clone() for each in tape)
            passed = tuple(Anchor(position, states[position - start - 1]) for position in self._passed)
            self._left[self._cell] = CellRecord(self._function, anchors, mark, kept, passed)
            return
        kept = tuple(torch.cat(pair) for pair in zip(self._ahead, tape, strict=True))
        self._left[self._cell] = CellRecord(self._function, anchors, self._first.position, kept)


# --- StateFunction: the interface of what reads and changes a running state.


@dataclass(frozen=True)
class StateRows:
    """The rows of one text in a pass."""

    tape: tuple[Tensor, ...]  # [num_rows, ...] each, the inputs that change the state
    queries: tuple[Tensor, ...] = ()  # [num_rows, ...] each, what else a row needs to read the state
    # Index of each row's parent, -1 for a row that continues the text; None for a chain.
    parents: tuple[int, ...] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tape[0])

    def parent(self, row: int) -> int:
        """The row that a row follows; -1 for the text before the pass."""
        return row - 1 if self.parents is None else self.parents[row]


class StateFunction(ABC):
    """Rows of one text over one state."""

    @abstractmethod
    def start(self, tape: Sequence[Tensor]) -> Tensor:
        """The state of a text without tokens, for inputs [n, ...] such as these."""

    @abstractmethod
    def replay(self, state: Tensor, tape: Sequence[Tensor]) -> Tensor:
        """The state behind the inputs [n, ...] of a chain. What is given is not changed."""

    @abstractmethod
    def run(self, state: Tensor, rows: StateRows, wanted: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute the rows of a text.

        Args:
            wanted: Rows behind which the state is asked for.

        Returns:
            The outputs [num_rows, ...], and the states by row.
        """


# --- What our passes answer when a layer of transformers calls a function that looks back over the tokens.
#
# The arguments are those of transformers, by its names. A batch of one holds the rows of all texts, one after another.
# States are kept in float32 at least.


_NORM_EPS = 1e-6


def convolve(
    running: RunningPass,
    hidden_states: Tensor,  # [1, num_channels, num_rows]
    weight: Tensor,  # [num_channels, width]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """A causal convolution of each channel: [1, num_channels, num_rows]."""
    rows = hidden_states[0].t().contiguous().to(weight.dtype)
    out = running.compute(Convolution(weight, bias), (rows,))
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.t()[None].to(hidden_states.dtype)


def apply_delta_rule(
    running: RunningPass,
    query: Tensor,  # [1, num_rows, num_key_heads, key_dim]
    key: Tensor,  # [1, num_rows, num_key_heads, key_dim]
    value: Tensor,  # [1, num_rows, num_heads, value_dim]
    g: Tensor,  # [1, num_rows, num_heads] or [1, num_rows, num_heads, key_dim], logarithms of the decay
    beta: Tensor,  # [1, num_rows, num_heads]
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule, or that of Kimi Delta Attention: [1, num_rows, num_heads, value_dim], and no state to keep."""
    dtype = _wide(query)
    queries, keys, values, decay, share = (each[0].to(dtype).contiguous() for each in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        queries, keys = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + _NORM_EPS) for each in (queries, keys))
    queries = queries * query.shape[-1] ** -0.5
    factors = decay.exp() if decay.dim() == keys.dim() else decay.exp()[..., None]
    out = running.compute(Recurrence(), (keys, values, factors, share[..., None]), (queries,))
    return out[None].to(query.dtype), None


def scan_heads(
    running: RunningPass,
    hidden_states: Tensor,  # [1, num_rows, num_heads, head_dim]
    dt: Tensor,  # [1, num_rows, num_heads]
    A: Tensor,  # [num_heads]
    B: Tensor,  # [1, num_rows, num_groups, state_size]
    C: Tensor,  # [1, num_rows, num_groups, state_size]
    chunk_size: int = 0,
    D: Tensor | None = None,  # [num_heads]
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """The scan of Mamba-2: [1, num_rows, num_heads, head_dim]."""
    dtype = _wide(hidden_states)
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)[0].to(dtype)  # [num_rows, num_heads]
    rows = hidden_states[0].to(dtype)
    writes, reads = (each[0].to(dtype).contiguous() for each in (B, C))
    decay = (steps * A.to(dtype)).exp()[..., None]
    out = running.compute(Recurrence(), (writes, rows * steps[..., None], decay), (reads,))
    return (out if D is None else out + rows * D.to(dtype)[:, None])[None]


def scan_channels(
    running: RunningPass,
    hidden_states: Tensor,  # [1, num_channels, num_rows]
    dt: Tensor,  # [1, num_channels, num_rows]
    A: Tensor,  # [num_channels, state_size]
    B: Tensor,  # [1, state_size, num_rows]
    C: Tensor,  # [1, state_size, num_rows]
    D: Tensor | None = None,  # [num_channels]
    z: Tensor | None = None,  # [1, num_channels, num_rows]
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """The scan of Mamba: [1, num_channels, num_rows]."""
    dtype = _wide(hidden_states)
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    steps = (F.softplus(steps) if delta_softplus else steps)[0].t().to(dtype).contiguous()  # [num_rows, num_channels]
    rows = hidden_states[0].t().to(dtype).contiguous()
    writes, reads = (each[0].t().to(dtype).contiguous()[:, None] for each in (B, C))
    decay = (steps[:, None, None] * A.to(dtype).t().contiguous()).exp()  # [num_rows, 1, state_size, num_channels]
    out = running.compute(Recurrence(), (writes, (rows * steps)[:, None], decay), (reads,))[:, 0]
    if D is not None:
        out = out + rows * D.to(dtype)
    if z is not None:
        out = out * F.silu(z[0].t().to(dtype))
    return out.t()[None].to(hidden_states.dtype)


def _wide(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


#: By the names of transformers' functions.
ANSWERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": apply_delta_rule,
    "chunk_kimi_delta_attention": apply_delta_rule,
    "mamba2_chunk_scan": scan_heads,
    "mamba_selective_scan": scan_channels,
}


# --- Convolution: a short causal convolution of each channel over the rows of a text (depthwise).


class Convolution(StateFunction):
    """The state is the window of the last inputs, [width - 1, num_channels].

    Products and sums are those of single numbers in one order, so the bits of a row do not depend on the rows that are
    computed with it.

    Args:
        weight: [num_channels, width], the last column for the row itself.
        bias: [num_channels], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._reach = weight.shape[1] - 1

    def start(self, tape: Sequence[Tensor]) -> Tensor:
        (inputs,) = tape
        return inputs.new_zeros(self._reach, inputs.shape[1])

    def replay(self, state: Tensor, tape: Sequence[Tensor]) -> Tensor:
        (inputs,) = tape
        return torch.cat([state, inputs])[len(inputs) :].clone()  # a view would keep the inputs before the window

    def run(self, state: Tensor, rows: StateRows, wanted: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        (inputs,) = rows.tape
        known = torch.cat([state, inputs])  # row i stands at reach + i
        windows = torch.tensor(_windows(rows, self._reach), device=inputs.device)  # [num_rows, width]
        out = known[windows[:, 0]] * self._weight[:, 0]
        for column in range(1, self._reach + 1):
            out = out + known[windows[:, column]] * self._weight[:, column]
        if self._bias is not None:
            out = out + self._bias
        return out, {row: known[windows[row, 1:]] for row in wanted}


def _windows(rows: StateRows, reach: int) -> list[list[int]]:
    """For each row, where its window lies among the inputs before the pass and those of its rows, the row itself last."""
    before = list(range(reach))
    windows: list[list[int]] = []
    for row in range(rows.num_rows):
        parent = rows.parent(row)
        windows.append([*(before if parent < 0 else windows[parent][1:]), reach + row])
    return windows


# --- Recurrence: a running state of matrices, as delta rules (Yang et al. 2024) and state spaces (Gu and Dao 2023) keep it.


class Recurrence(StateFunction):
    """The state is a matrix for each head, [num_heads, key_dim, value_dim].

    A tape holds the fields of `MatrixUpdates` in their order, without shares where nothing is corrected. A row's query is
    [num_key_heads, key_dim]. The selective scan of Mamba is one head whose numbers all decay by factors of their own.

    Where there is no kernel, rows are computed one after another by operators whose shapes are those of one row. Either way
    the bits of a row do not depend on the rows that are computed with it.
    """

    def start(self, tape: Sequence[Tensor]) -> Tensor:
        keys, values = tape[0], tape[1]
        return values.new_zeros(values.shape[1], keys.shape[-1], values.shape[-1])

    def replay(self, state: Tensor, tape: Sequence[Tensor]) -> Tensor:
        last = len(tape[0]) - 1
        if last < 0:
            return state
        return self.run(state, StateRows(tuple(tape), (tape[0],)), (last,))[1][last]

    def run(self, state: Tensor, rows: StateRows, wanted: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        library = kernel_library()
        if library is not None and mixers.usable(state):
            return mixers.advance(library, state, MatrixUpdates(*rows.tape), rows.queries[0], rows.parents, wanted)
        return self.run_stock(state, rows, wanted)

    def run_stock(self, state: Tensor, rows: StateRows, wanted: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Computes the recurrence by operators of PyTorch."""
        last_child = {rows.parent(row): row for row in range(rows.num_rows)}
        states, outputs = {-1: state}, []
        for row in range(rows.num_rows):
            parent = rows.parent(row)
            states[row] = _step(states[parent], *(each[row] for each in rows.tape))
            outputs.append(_said(states[row], rows.queries[0][row]))
            if last_child[parent] == row and parent not in wanted:
                del states[parent]  # a long chain keeps no more than it needs
        return torch.stack(outputs), {row: states[row] for row in wanted}


def _step(state: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor | None = None) -> Tensor:
    """The state behind one more row."""
    state = state * (decay if decay.dim() == state.dim() else decay[..., None])
    added = value if share is None else (value - _said(state, key)) * share
    return state + _by_head(key, state)[..., None] * added[:, None]


def _said(state: Tensor, key: Tensor) -> Tensor:
    """Returns what a state says of a key: [num_heads, value_dim]."""
    return (state * _by_head(key, state)[..., None]).sum(-2)


def _by_head(keys: Tensor, state: Tensor) -> Tensor:
    """Keys [num_key_heads, key_dim] for each head."""
    return keys.repeat_interleave(len(state) // len(keys), 0)
