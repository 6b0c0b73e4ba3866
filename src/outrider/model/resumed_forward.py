"""The target's own pass, continued where a proposer has computed the first layers (early exit, Elhoushi et al. 2024).

Rows that were not begun run through the first layers alone. Then all rows together run through the rest. Every row is
computed by every layer once, from the same numbers as in one pass through all layers; where the backend's bits do not
depend on the batch, they are the same bits. Whether a model can be computed in two parts at all is found by trying it: in
some, a layer reads what an earlier one left elsewhere than in the hidden states.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.cache.state import KVView
from outrider.model.attention import PartialPass
from outrider.model.batch import Segment
from outrider.model.probe import TOLERANCE
from outrider.model.runner import ForwardOutput, ModelRunner, PartialChain

logger = logging.getLogger(__name__)

_PROBE_LEN, _PROBE_CUT = 10, 7


class TargetPass:
    """Computes the target's own pass of a step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._exact: dict[int, bool] = {}  # by layer: whether a pass may resume there

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], kvs: Sequence[KVView], aux_layers: Sequence[int] = ()) -> ForwardOutput:
        """Compute every row of `segments`, of the sequences that `kvs` belong to, and forget all rows that were begun."""
        begun = self._runner.partial_rows.find(kvs, segments)
        self._runner.partial_rows.clear()
        depth = _most_common_depth(begun)
        if depth is None or min(aux_layers, default=depth) < depth or not self._is_exact(depth):
            return self._runner.forward(segments, aux_layers)
        known = [rows if rows is not None and rows.depth == depth else None for rows in begun]
        return resumed(self._runner, segments, known, depth, aux_layers)

    def _is_exact(self, depth: int) -> bool:
        if depth not in self._exact:
            self._exact[depth] = resumes_exactly(self._runner, depth)
        return self._exact[depth]


def resumed(
    runner: ModelRunner,
    segments: Sequence[Segment],
    known: Sequence[PartialChain | None],
    depth: int,
    aux_layers: Sequence[int] = (),
) -> ForwardOutput:
    """Compute every row of `segments`, of which `known` has the first ones as layer `depth` reads them.

    Args:
        known: For each segment, rows that were begun by `depth` layers.
        depth: The layer at which all rows go on.
    """
    missing = [_behind(segment, rows) for segment, rows in zip(segments, known, strict=True)]
    below = [segment for segment in missing if segment is not None]
    parts: list[Tensor] = []
    if below:
        out = runner.forward(below, (), PartialPass(tuple(range(depth))))
        assert out.hidden is not None
        parts = [out.hidden[first:end] for first, end in out.row_spans]
    hidden: list[Tensor] = []
    for rows, rest in zip(known, missing, strict=True):
        hidden += [] if rows is None else [rows.hidden]
        hidden += [] if rest is None else [parts.pop(0)]
    above = PartialPass(tuple(range(depth, runner.num_layers)), torch.cat(hidden))
    return replace(
        runner.forward(segments, aux_layers, above),
        hidden=None,
        num_resumed_rows=sum(len(rows) for rows in known if rows is not None),
    )


def _behind(segment: Segment, known: PartialChain | None) -> Segment | None:
    """The rows of a segment that were not begun, without logits; None where all were."""
    count = 0 if known is None else len(known)
    if count == segment.num_rows:
        return None
    rest, start = segment.num_rows - count, segment.start + count
    places = tuple(place for place in segment.places if place > start)  # no row of the rest leaves a state before it
    return replace(
        segment, token_ids=segment.token_ids[count:], start=start, logits_from=rest, logits_until=None, places=places
    )


def _most_common_depth(begun: Sequence[PartialChain | None]) -> int | None:
    """The layer at which most begun rows go on; the earliest among equals."""
    counts: Counter[int] = Counter()
    for rows in begun:
        if rows is not None:
            counts[rows.depth] += len(rows)
    return min(counts, key=lambda depth: (-counts[depth], depth), default=None)


def resumes_exactly(runner: ModelRunner, depth: int) -> bool:
    """Tells whether rows that go on at layer `depth` say what they say in one pass: to the bit where the backend's bits do
    not depend on the batch, else up to rounding."""
    loaded, apart = runner.loaded, runner.with_own_memory(3 * _PROBE_LEN)
    tokens = [(5 * i + 2) % loaded.vocab_size for i in range(_PROBE_LEN)]
    states, cut = [apart.memory.room_for(_PROBE_LEN) for _ in range(3)], _PROBE_LEN - _PROBE_CUT
    whole = [Segment.of(state, tokens[_PROBE_CUT:], _PROBE_CUT) for state in states]
    try:
        apart.forward([Segment.of(state, tokens[:_PROBE_CUT], 0) for state in states])
        want = apart.forward(whole[:2]).logits
        first = Segment.of(states[2], tokens[_PROBE_CUT:-1], _PROBE_CUT, logits_from=cut - 1)
        begun = apart.forward([first], (), PartialPass(tuple(range(depth)))).hidden
        assert begun is not None
        table, long = tuple(first.block_table), first.long_rope
        known = PartialChain(depth, _PROBE_CUT, tuple(first.token_ids), table, long, begun.clone())
        got = resumed(apart, [whole[0], whole[2]], [None, known], depth).logits
    except Exception as error:  # whatever the model's own code raises
        logger.info("%s cannot resume at layer %d: %r", loaded.name, depth, error)
        return False
    if runner.backend.invariant:
        return torch.equal(got, want)
    return bool((got - want).abs().max() <= TOLERANCE[loaded.precision] * want.abs().max())
