"""A smaller model of the same vocabulary drafts ahead (Leviathan et al. 2023; Chen et al. 2023).

It runs through the same runner and the same kind of block-table KV memory as the target, for all sequences at once, with
its own watermark: what it has computed of a sequence is whatever prefix of its own rows the committed tokens agree with.
So rejected drafts, bonus tokens and prompts that only the target had cached need no messages; the next call fills the gap.
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
from outrider.verify.logits import RowParams, argmax, forbid, target_probs


@dataclass
class _Progress:
    """What the draft model holds of one sequence."""

    block_table: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # tokens whose KV is in the table, drafts included
    num_published: int = 0


@dataclass
class _Growing:
    """A draft in the making."""

    request: ProposeRequest
    progress: _Progress
    budget: int
    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)  # [vocab_size] each; empty where the draft is not drawn

    @property
    def draws(self) -> bool:
        sequence = self.request.sequence
        return not (sequence.sampling.greedy or sequence.greedy_drafts)


class DraftModelProposer(Proposer):
    """Greedy or sampled chains from a draft model, batched over sequences.

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
        del progress.computed[_confirmed(progress.computed, sequence.token_ids) :]
        progress.num_published = blocks.publish(
            progress.computed, progress.block_table, progress.num_published, sequence.namespace
        )
        num_tokens = len(sequence.token_ids)
        budget = min(request.budget, self.runner.loaded.max_model_len - num_tokens)
        while budget > 0 and not blocks.grow(progress.block_table, num_tokens + budget - 1):
            budget -= 1
        return _Growing(request, progress, max(budget, 0))

    def _start(self, sequence: ProposerSequence) -> _Progress:
        blocks = self.runner.blocks
        table = blocks.match(sequence.token_ids, sequence.namespace)
        return _Progress(table, list(sequence.token_ids[: len(table) * blocks.block_size]), len(table))

    def _catch_up(self, growing: list[_Growing]) -> tuple[list[_Growing], Tensor] | None:
        """Compute committed tokens the draft model has not seen; returns who reached the end, and their logits."""
        rows_left, work = self._max_rows, []
        for g in sorted(growing, key=lambda g: len(g.request.sequence.token_ids) - len(g.progress.computed)):
            start = len(g.progress.computed)
            missing = g.request.sequence.token_ids[start : start + rows_left]
            if not missing:
                break
            rows_left -= len(missing)
            work.append((g, missing, start + len(missing) == len(g.request.sequence.token_ids)))
        return self._run(work)

    def _extend(self, ready: list[_Growing], logits: Tensor, noise: DraftNoise) -> tuple[list[_Growing], Tensor] | None:
        """Choose one more token for every draft that has room and compute its row where another is to follow."""
        for g, token in zip(ready, self._choose(ready, logits, noise), strict=True):
            g.tokens.append(token)
        return self._run([(g, g.tokens[-1:], True) for g in ready if len(g.tokens) < g.budget])

    def _run(self, work: list[tuple[_Growing, list[int], bool]]) -> tuple[list[_Growing], Tensor] | None:
        """Compute rows; returns those that want the logits of their last row, and these logits. Nothing is recorded
        as computed before the pass has succeeded."""
        if not work:
            return None
        segments = [
            Segment(rows, len(g.progress.computed), g.progress.block_table, logits_from=len(rows) - int(wanted))
            for g, rows, wanted in work
        ]
        logits = self.runner.forward(segments).logits
        for g, rows, _ in work:
            g.progress.computed += rows
        ready = [g for g, _, wanted in work if wanted]
        return (ready, self._fit(logits)) if ready else None

    def _choose(self, ready: list[_Growing], logits: Tensor, noise: DraftNoise) -> list[int]:
        rows = [_row_params(g) for g in ready]
        tokens = argmax(forbid(logits, rows))
        drawing = [i for i, g in enumerate(ready) if g.draws]
        if drawing:
            index = torch.tensor(drawing, device=logits.device)
            probs = target_probs(logits[index], [rows[i] for i in drawing])
            sequences = [ready[i].request.sequence for i in drawing]
            tokens[index] = noise.categorical(probs, sequences, [len(ready[i].tokens) for i in drawing])
            for i, law in zip(drawing, probs, strict=True):
                ready[i].laws.append(law)
        chosen: list[int] = tokens.tolist()
        return chosen

    def _finished(self, g: _Growing, noise: DraftNoise) -> Draft:
        if not g.tokens:
            return EMPTY
        if not g.draws:
            return Draft.chain(g.tokens, Law.DETERMINISTIC)
        return Draft.chain(g.tokens, noise.law(g.request.sequence), torch.stack(g.laws))

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


def _row_params(g: _Growing) -> RowParams:
    sequence = g.request.sequence
    return RowParams(sequence.sampling, sequence.forbidden_at(len(sequence.token_ids) + len(g.tokens)))


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
