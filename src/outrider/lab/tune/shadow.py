"""Shadow acceptance: scores a method's drafts against text that is written already.

Given the text that was written, the chance that the token rule accepted a drawn draft token at a place is min(1, q / p) of
the token that stands there, for the draft's probability q and the target's p (Leviathan et al. 2023). It does not depend on
the places before, so the passes that a text takes can be expected exactly, place by place. A draft that was not drawn
stands as far as it agrees with the text. The first token of a text comes with its prompt, so nothing is drafted for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from outrider.engine.engine import Engine
from outrider.lab.measure.writing import EncodedTask
from outrider.model.batch import Segment
from outrider.model.runner import ModelRunner
from outrider.params import SamplingParams
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.draft_model import DraftModel, DraftModelProposer
from outrider.propose.settings import PLAIN, SpeculationConfig, tree_size
from outrider.verify.logits import target_probs

#: Rows of a pass over text that is written already.
_CHUNK = 64


@dataclass(frozen=True)
class Shadow:
    """Holds what drafts would have been worth."""

    num_tokens: int  # tokens of the texts behind their first ones
    passes: float  # passes of the target that would have written them, as expected
    num_draft_tokens: float  # draft tokens in these passes
    levels: float  # draft tokens on the longest paths of these drafts
    # Seconds that a lookup took for them; None for a draft model, whose passes are timed apart.
    propose_seconds: float | None = None

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(self.passes, 1e-9)

    @property
    def rows_per_pass(self) -> float:
        """Rows of a text in a pass, its own included."""
        return 1.0 + self.num_draft_tokens / max(self.passes, 1e-9)


@dataclass(frozen=True)
class Scored:
    """Holds what a model says of a text that is written already."""

    probs: tuple[float, ...]  # of each answer token, its probability
    ranks: tuple[int, ...]  # of each, how many tokens are likelier


class ShadowScorer:
    """Scores methods on texts."""

    def __init__(self, engine: Engine, texts: Sequence[EncodedTask], temperature: float) -> None:
        self._engine = engine
        self._texts = texts
        self._params = SamplingParams(temperature=temperature)
        self._scored: dict[int, list[Scored]] = {}

    def score(self, config: SpeculationConfig, proposer: Proposer | None) -> Shadow | None:
        """Returns what drafts of these settings would have been worth; None where text alone cannot tell. Plain decoding
        has no proposer."""
        if config.method is None or proposer is None:
            count = self._num_tokens
            return Shadow(count, float(count), 0.0, 0.0)
        if isinstance(proposer, DraftModelProposer):
            sure = self._params.greedy or config.draft_sampling == "greedy"
            widths = _widths(config, sure=sure)
            return None if widths is None else self._of_model(proposer, widths, sure=sure)
        if config.method.grows_from_probabilities or proposer.requires is not None or config.name == "prediction":
            return None  # it drafts from what the target's passes leave, or from what a caller expects
        return self._of_lookup(config, proposer)

    @property
    def _num_tokens(self) -> int:
        return sum(len(_answer(text)) - 1 for text in self._texts)

    # -- draft models --------------------------------------------------------------------------------------------------

    def _of_model(self, proposer: DraftModelProposer, widths: Sequence[int], *, sure: bool) -> Shadow:
        passes, rows, levels = 0.0, 0.0, 0.0
        target, draft = self._scores(self._engine.runner), self._scores(proposer.runner)
        for ours, theirs in zip(target, draft, strict=True):
            stands = _chances(ours, theirs, sure=sure)
            found = expected_passes(stands, widths, len(ours.probs))
            passes, rows, levels = passes + found[0], rows + found[1], levels + found[2]
        return Shadow(self._num_tokens, passes, rows, levels)

    def _scores(self, runner: ModelRunner) -> list[Scored]:
        if id(runner) not in self._scored:
            self._scored[id(runner)] = [score_text(runner, text, self._params) for text in self._texts]
        return self._scored[id(runner)]

    # -- lookups -------------------------------------------------------------------------------------------------------

    def _of_lookup(self, config: SpeculationConfig, proposer: Proposer) -> Shadow:
        before = proposer.snapshot()
        start = perf_counter()
        found = [self._walk(config, proposer, text) for text in self._texts]
        seconds = perf_counter() - start
        if before is not None:
            proposer.restore(before)  # what it saw here must not help where it is measured
        passes, rows, levels = (float(sum(part)) for part in zip(*found, strict=True))
        return Shadow(self._num_tokens, passes, rows, levels, seconds)

    def _walk(self, config: SpeculationConfig, proposer: Proposer, text: EncodedTask) -> tuple[int, int, int]:
        """(passes, draft tokens, levels) of a text that is written as it was."""
        answer, passes, rows, levels, place = _answer(text), 0, 0, 0, 1
        request = self._engine.prepare(text.prompt_ids, self._params.replace(max_tokens=len(answer)), PLAIN)
        (sequence,) = request.sequences
        sequence.token_ids.append(answer[0])
        noise = DraftNoise(self._engine.noise)
        proposer.begin(sequence.view)
        try:
            while place < len(answer):
                depth = len(answer) - place - 1
                budget = min(config.num_draft_tokens, depth)
                taken = 0
                if budget > 0:
                    (draft,) = proposer.propose([ProposeRequest(sequence.view, budget, depth)], noise)
                    rows, levels = rows + len(draft), levels + draft.depth
                    node = -1
                    while (child := draft.child(node, answer[place + taken])) is not None:
                        node, taken = child, taken + 1
                sequence.token_ids += answer[place : place + taken + 1]
                place, passes = place + taken + 1, passes + 1
        finally:
            proposer.finish(sequence.view)
        return passes, rows, levels


def _chances(ours: Scored, theirs: Scored, *, sure: bool) -> Callable[[int, int], float]:
    """The chance that one of so many siblings stood at a place, where all before it stood. Drafts that are sure take the
    likeliest tokens instead of drawing them."""
    if sure:
        return lambda place, width: float(theirs.ranks[place] < width)
    ratios = [min(1.0, q / max(p, 1e-9)) for p, q in zip(ours.probs, theirs.probs, strict=True)]
    return lambda place, width: ratios[place]


def expected_passes(stands: Callable[[int, int], float], widths: Sequence[int], length: int) -> tuple[float, float, float]:
    """Returns what writing a text is expected to take: (passes, draft tokens, levels)."""
    begins = [0.0, 1.0] + [0.0] * length  # how often a pass begins at each place
    passes = rows = levels = 0.0
    for place in range(1, length):
        visits = begins[place]
        used = widths[: length - place - 1]
        passes, rows, levels = passes + visits, rows + visits * tree_size(used), levels + visits * len(used)
        reached = visits
        for depth, width in enumerate(used):
            stood = reached * stands(place + depth, width)
            begins[place + depth + 1] += reached - stood
            reached = stood
        begins[place + len(used) + 1] += reached
    return passes, rows, levels


def score_text(runner: ModelRunner, text: EncodedTask, params: SamplingParams) -> Scored:
    """Returns what a model says of the answer of a text, in a memory of its own."""
    tokens = (*text.prompt_ids, *_answer(text))
    first = len(text.prompt_ids) - 1  # the row that says what the first answer token is
    apart = runner.with_own_memory(len(tokens))
    state = apart.memory.room_for(len(tokens))
    probs: list[float] = []
    ranks: list[int] = []
    for start in range(0, len(tokens) - 1, _CHUNK):
        rows = tokens[start : min(start + _CHUNK, len(tokens) - 1)]
        skipped = min(max(first - start, 0), len(rows))
        logits = apart.forward([Segment.of(state, rows, start, logits_from=skipped, certain=start + len(rows))]).logits
        state.commit(start, range(len(rows)))
        if skipped < len(rows):
            wanted = torch.tensor(tokens[start + skipped + 1 : start + len(rows) + 1], device=logits.device)
            found = target_probs(logits, [params] * len(wanted))
            probs += _taken(found, wanted).tolist()
            ranks += (logits > _taken(logits, wanted)[:, None]).sum(dim=-1).tolist()
    return Scored(tuple(probs), tuple(ranks))


def _taken(values: Tensor, wanted: Tensor) -> Tensor:
    """The values of some tokens, one a row; those of tokens that the model does not have are the least there is."""
    known = values.gather(-1, wanted.clamp(max=values.shape[-1] - 1)[:, None])[:, 0]
    return torch.where(wanted < values.shape[-1], known, values.min())


def _widths(config: SpeculationConfig, *, sure: bool) -> Sequence[int] | None:
    """Siblings by depth; None where text alone does not tell which rows a draft had, or what became of them."""
    method = config.method
    if type(method) is not DraftModel or method.min_confidence:
        return None
    if not config.tree:
        return [1] * config.num_draft_tokens
    return config.tree if sure and not isinstance(config.tree, str) else None


def _answer(text: EncodedTask) -> tuple[int, ...]:
    assert text.answer_ids is not None, "a shadow is cast on text that is written"
    return text.answer_ids
