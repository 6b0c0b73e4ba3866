"""A smaller model of the same vocabulary drafts ahead (Leviathan et al. 2023; Chen et al. 2023).

It runs through the same runner and the same kind of block-table KV memory as the target, for all sequences at once, with
its own watermark: what it has computed of a sequence is whatever prefix of its own rows the committed tokens agree with.
So rejected drafts, bonus tokens and prompts that only the target had cached need no messages; the next call fills the gap.

A draft is a chain, or a tree of a shape fixed beforehand whose siblings are drawn without replacement (Jeon et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.errors import VocabularyMismatchError
from outrider.model.batch import Segment
from outrider.model.loader import LoadedModel
from outrider.model.runner import ModelRunner
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest, ProposerSequence, TargetFacts
from outrider.propose.draft import EMPTY, Draft, Law
from outrider.verify.logits import argmax, target_probs


@dataclass
class _Progress:
    """What the draft model holds of one sequence."""

    block_table: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # tokens whose KV is in the table, drafts included
    num_published: int = 0
    long_rope: bool = False


@dataclass
class _Node:
    """A node of a growing draft.

    Attributes:
        token: Its token.
        parent: Index of its parent, -1 for the root.
        place: Where it stands in its level of the full shape, whether or not all its neighbours exist.
        law: [vocab_size] that it and its siblings were drawn from; None where the draft is not drawn.
    """

    token: int
    parent: int
    place: int
    law: Tensor | None


_ROOT = _Node(-1, -1, 0, None)


@dataclass
class _Growing:
    """A draft in the making, level by level.

    Attributes:
        request: What was asked for.
        progress: What is computed of its sequence.
        widths: Children of each node, by depth.
        budget: Most nodes of the shape, counted level by level.
        nodes: So far.
        level: Indices of the deepest nodes; -1 is the root.
        begun: Places of the shape in the levels so far.
    """

    request: ProposeRequest
    progress: _Progress
    widths: tuple[int, ...]
    budget: int
    nodes: list[_Node] = field(default_factory=list)
    level: list[int] = field(default_factory=lambda: [-1])
    depth: int = 0
    begun: int = 0

    @property
    def draws(self) -> bool:
        sequence = self.request.sequence
        return not (sequence.sampling.greedy or sequence.greedy_drafts)

    @property
    def branches(self) -> bool:
        return any(width > 1 for width in self.widths)

    @property
    def growing(self) -> bool:
        """Whether another level has room."""
        return self.depth < len(self.widths) and self.begun < self.budget and bool(self.level)

    def node(self, index: int) -> _Node:
        return _ROOT if index < 0 else self.nodes[index]

    def path(self, index: int) -> tuple[int, ...]:
        """Tokens from below the root to a node."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.nodes[index].token)
            index = self.nodes[index].parent
        return tuple(reversed(tokens))

    def width(self, index: int) -> int:
        """How many children of a node of the deepest level the budget has room for; decided by the shape alone."""
        width = self.widths[self.depth]
        return max(0, min(width, self.budget - self.begun - self.node(index).place * width))

    def close_level(self, first: int) -> None:
        """The nodes from `first` on are the deepest level now."""
        self.begun = min(self.budget, self.begun + _size(self.widths[: self.depth + 1]))
        self.depth += 1
        self.level = list(range(first, len(self.nodes)))


def _size(widths: tuple[int, ...]) -> int:
    """Nodes in the last level of a shape."""
    size = 1
    for width in widths:
        size *= width
    return size


class DraftModelProposer(Proposer):
    """Greedy or sampled chains and trees from a draft model, batched over sequences.

    Args:
        runner: The draft model with KV memory of its own.
        vocab_size: Width of the target's logits; the draft's are cut or padded to it.
        max_num_batched_tokens: Rows a pass; longer prompts are caught up over several steps, drafting nothing meanwhile.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, max_num_batched_tokens: int) -> None:
        self.runner = runner
        self._vocab_size = vocab_size
        self._max_rows = max_num_batched_tokens
        self._progress: dict[int, _Progress] = {}

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        growing = [self._grow(request) for request in requests]
        ready = self._catch_up([g for g in growing if g.budget > 0])
        while ready:
            ready = self._extend(*ready, noise)
        return [self._finished(g, noise) for g in growing]

    def finish(self, sequence: ProposerSequence) -> None:
        progress = self._progress.pop(sequence.seq_id, None)
        if progress is not None:
            self.runner.blocks.free(progress.block_table)

    def check_integrity(self) -> None:
        self.runner.blocks.check_integrity([p.block_table for p in self._progress.values()])

    def _grow(self, request: ProposeRequest) -> _Growing:
        """Roll back to what the committed tokens confirm and make room for the draft, shortened to what fits."""
        sequence, blocks = request.sequence, self.runner.blocks
        progress = self._progress.get(sequence.seq_id)
        if progress is None:
            progress = self._progress[sequence.seq_id] = self._start(sequence)
        if progress.long_rope != self._long_rope(sequence):  # other rotary factors for all of the text: none of it stands
            blocks.free(progress.block_table)
            progress = self._progress[sequence.seq_id] = self._start(sequence)
        del progress.computed[_confirmed(progress.computed, sequence.token_ids) :]
        space = (sequence.namespace, progress.long_rope)
        progress.num_published = blocks.publish(progress.computed, progress.block_table, progress.num_published, space)
        num_tokens = len(sequence.token_ids)
        depth = min(request.max_depth, self.runner.loaded.max_model_len - num_tokens)
        budget = request.budget if depth > 0 else 0
        while budget > 0 and not blocks.grow(progress.block_table, num_tokens + budget - 1):
            budget -= 1
        widths = sequence.tree or (1,) * budget
        return _Growing(request, progress, widths[: max(depth, 0)], max(budget, 0))

    def _start(self, sequence: ProposerSequence) -> _Progress:
        blocks = self.runner.blocks
        long_rope = self._long_rope(sequence)
        table = blocks.match(sequence.token_ids, (sequence.namespace, long_rope))
        return _Progress(table, list(sequence.token_ids[: len(table) * blocks.block_size]), len(table), long_rope)

    def _long_rope(self, sequence: ProposerSequence) -> bool:
        return self.runner.loaded.uses_long_rope(len(sequence.token_ids))

    def _catch_up(self, growing: list[_Growing]) -> tuple[list[_Growing], Tensor] | None:
        """Compute committed tokens the draft model has not seen; returns who reached the end, and their logits."""
        rows_left, work = self._max_rows, list[_Work]()
        for g in sorted(growing, key=lambda g: len(g.request.sequence.token_ids) - len(g.progress.computed)):
            start = len(g.progress.computed)
            missing = g.request.sequence.token_ids[start : start + rows_left]
            if not missing:
                break
            rows_left -= len(missing)
            wanted = start + len(missing) == len(g.request.sequence.token_ids)
            unwanted = len(missing) - int(wanted)
            segment = Segment(missing, start, g.progress.block_table, None, unwanted, g.progress.long_rope)
            work.append(_Work(g, segment, wanted))
        return self._run(work)

    def _extend(self, ready: list[_Growing], logits: Tensor, noise: DraftNoise) -> tuple[list[_Growing], Tensor] | None:
        """Add a level to every draft and compute its rows where another is to follow."""
        self._add_level(ready, logits, noise)
        return self._run([_level_work(g) for g in ready if g.growing])

    def _run(self, work: list[_Work]) -> tuple[list[_Growing], Tensor] | None:
        """Compute rows; returns those that want logits, and these logits. Nothing is recorded as computed before the
        pass has succeeded."""
        if not work:
            return None
        logits = self.runner.forward([w.segment for w in work]).logits
        for w in work:
            if w.segment.parents is None:
                w.growing.progress.computed += w.segment.token_ids
        ready = [w.growing for w in work if w.wanted]
        return (ready, self._fit(logits)) if ready else None

    def _add_level(self, ready: list[_Growing], logits: Tensor, noise: DraftNoise) -> None:
        """Choose the children of every node of the deepest levels.

        Args:
            ready: Drafts that grow.
            logits: [num_nodes, vocab_size] of their deepest nodes, one draft after another.
            noise: For drawn children.
        """
        parents = [(g, index) for g in ready for index in g.level]
        rows = _processed(ready, logits)
        first = {id(g): len(g.nodes) for g in ready}
        drawing = [i for i, (g, _) in enumerate(parents) if g.draws]
        best = [i for i, (g, _) in enumerate(parents) if not g.draws]
        children: dict[int, list[int]] = _most_likely([parents[i] for i in best], rows[best], best)
        laws: dict[int, Tensor] = {}
        if drawing:
            probs = target_probs(rows[drawing], [parents[i][0].request.sequence.sampling for i in drawing])
            laws = dict(zip(drawing, probs, strict=True))
            drawn = _draw_children([parents[i] for i in drawing], probs, noise)
            children.update(zip(drawing, drawn, strict=True))
        for i, (g, index) in enumerate(parents):
            for rank, token in enumerate(children[i]):
                place = g.node(index).place * g.widths[g.depth] + rank
                g.nodes.append(_Node(token, index, place, laws.get(i)))
        for g in ready:
            g.close_level(first[id(g)])

    def _finished(self, g: _Growing, noise: DraftNoise) -> Draft:
        if not g.nodes:
            return EMPTY
        tokens, parents = tuple(n.token for n in g.nodes), tuple(n.parent for n in g.nodes)
        if not g.draws:
            return Draft(tokens, parents, (Law.DETERMINISTIC,) * len(tokens))
        laws = [n.law for n in g.nodes if n.law is not None]
        return Draft(tokens, parents, (noise.law(g.request.sequence),) * len(tokens), torch.stack(laws))

    def _fit(self, logits: Tensor) -> Tensor:
        """Cut or pad [n, draft_vocab] to the target's vocabulary; tokens only one of them has are never drafted."""
        missing = self._vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits


def _confirmed(computed: list[int], committed: Sequence[int]) -> int:
    """How many leading computed tokens are committed ones, the last committed token left out: its logits are needed."""
    limit = min(len(computed), len(committed) - 1)
    if computed[:limit] == committed[:limit]:
        return limit
    return next(i for i in range(limit) if computed[i] != committed[i])


@dataclass
class _Work:
    """Rows to compute for one draft, and whether their logits are needed to go on."""

    growing: _Growing
    segment: Segment
    wanted: bool


def _level_work(g: _Growing) -> _Work:
    """Rows of the deepest level. A chain's KV is kept as it grows; a tree is computed anew as a whole, since its rows see
    only their ancestors, and so few rows cost one pass either way."""
    start, table, long_rope = len(g.progress.computed), g.progress.block_table, g.progress.long_rope
    if not g.branches:
        return _Work(g, Segment([g.nodes[-1].token], start, table, long_rope=long_rope), True)
    parents = tuple(n.parent for n in g.nodes)
    return _Work(g, Segment([n.token for n in g.nodes], start, table, parents, g.level[0], long_rope), True)


def _processed(ready: list[_Growing], logits: Tensor) -> Tensor:
    """Logits [num_nodes, vocab_size] as the requests' parameters leave them, each along its own path."""
    done, end = [], 0
    for g in ready:
        start, end = end, end + len(g.level)
        done.append(_along_paths(g, logits[start:end]))
    return torch.cat(done)


def _along_paths(g: _Growing, rows: Tensor) -> Tensor:
    processing = g.request.sequence.processing
    if not processing.active:
        return rows
    try:
        return processing.apply(rows, [g.path(i) for i in g.level])[0]
    except Exception:  # a caller's processor that fails here will fail on the target's rows, and end its own request there
        return rows


def _most_likely(parents: list[tuple[_Growing, int]], logits: Tensor, places: list[int]) -> dict[int, list[int]]:
    """The likeliest children of each node, best first, the lowest id among equals."""
    if not parents:
        return {}
    widths = [g.width(index) for g, index in parents]
    if max(widths) <= 1:
        tokens = argmax(logits)[:, None]
    else:
        tokens = logits.sort(stable=True, dim=-1, descending=True).indices[:, : max(widths)]
    possible = logits.gather(-1, tokens) > float("-inf")
    rows = zip(places, tokens.tolist(), possible.tolist(), widths, strict=True)
    return {i: [t for t, may in zip(row[:width], ok, strict=False) if may] for i, row, ok, width in rows}


def _draw_children(parents: list[tuple[_Growing, int]], probs: Tensor, noise: DraftNoise) -> list[list[int]]:
    """Children of each node drawn from its law [n, vocab_size] without replacement, in draw order.

    A node has fewer where its law has no more tokens; which ones were drawn has no part in that.
    """
    widths = [g.width(index) for g, index in parents]
    children: list[list[int]] = [[] for _ in parents]
    if set(widths) == {1}:
        places = [g.node(index).place * g.widths[g.depth] for g, index in parents]
        sequences = [g.request.sequence for g, _ in parents]
        return [[t] for t in noise.categorical(probs, sequences, [g.depth for g, _ in parents], places).tolist()]
    left = probs.clone()
    for rank in range(max(widths)):
        wide = [i for i, width in enumerate(widths) if rank < width]
        mass = left[wide].sum(-1).tolist()
        members = [i for i, m in zip(wide, mass, strict=True) if m > 0.0]
        if not members:
            break
        drafts = [parents[i][0] for i in members]
        branches = [g.node(parents[i][1]).place * g.widths[g.depth] + rank for i, g in zip(members, drafts, strict=True)]
        sequences = [g.request.sequence for g in drafts]
        tokens = noise.categorical(left[members], sequences, [g.depth for g in drafts], branches)
        left[members, tokens] = 0.0
        for i, token in zip(members, tokens.tolist(), strict=True):
            children[i].append(token)
    return children


def check_vocabulary(draft: LoadedModel, target: TargetFacts) -> None:
    """Raise VocabularyMismatchError unless token ids mean the same to both models.

    Logits may differ in width, as padded vocabularies do, where both tokenizers are there to agree on the tokens.
    """
    if draft.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if ours != theirs:
            differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
            raise VocabularyMismatchError(
                draft.name,
                f"its tokens are not those of {target.name}: {len(differing)} differ, {differing[0]!r} first",
                "Use a draft model of the same family.",
            )
    elif draft.vocab_size != target.vocab_size:
        raise VocabularyMismatchError(
            draft.name,
            f"it has {draft.vocab_size} tokens and {target.name} has {target.vocab_size}",
            "Use a draft model of the same vocabulary.",
        )
