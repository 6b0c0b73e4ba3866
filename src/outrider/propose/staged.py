"""A draft model whose own passes are saved by another drafter: staged speculation (Spector and Re 2023).

A drafter guesses what the draft model will write, and the draft model verifies the guess in one pass, as the target
verifies a draft. What comes out is distributed exactly as what the draft model writes by itself. So each token counts as
drawn from the draft model's probabilities, and the target's verification is that of any drawn draft. Only time is saved:
several tokens of the draft may take one pass of the draft model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from outrider.cache.state import KVView
from outrider.draft import EMPTY, Draft
from outrider.errors import ContradictionError, InputError, InvalidParameterError, ModelError
from outrider.model.batch import Segment
from outrider.model.runner import ForwardOutput, ModelRunner
from outrider.params import SamplingParams
from outrider.propose.base import DraftNoise, PromptRows, Proposer, ProposeRequest, ProposerSequence
from outrider.propose.bridge import SameVocabulary
from outrider.propose.compositions import Composition, check_depth, check_drafts, named
from outrider.propose.draft_model import DraftModel, DraftModelProposer, PartialDraft, TextReading, Work
from outrider.propose.draft_vocabulary import DraftVocabulary
from outrider.propose.host import PassRows
from outrider.propose.settings import ProposerContext, SpeculationConfig
from outrider.propose.stage import Guess, StageDrafter, StageObserver
from outrider.verify.logits import target_probs
from outrider.verify.verifier import CandidateKeys, DraftCandidate, Verdict, Verifier, rule_for

#: Where the noise of a stage's drafter and that of its own verification come from (`DraftNoise.member`).
_GUESSES, _CHECKS = 0, 1
#: Parameters of a text of which the draft model takes the most likely tokens.
_LIKELIEST = SamplingParams(temperature=0.0)


def _as_drafter(value: Any) -> SpeculationConfig:
    try:
        return SpeculationConfig.of(value)
    except InputError as error:
        raise named("drafter", error) from None


class Staged(DraftModel):
    """A smaller model of the same vocabulary drafts, and verifies what a drafter of its own guesses of it.

    Attributes:
        drafter: Who drafts for the draft model: whole settings of a method of its own, such as "suffix", a smaller draft
            model, heads or first layers of the draft model itself, or another staged method. Its rule says how the draft
            model verifies it.
    """

    name: ClassVar[str] = "staged"
    default_num_draft_tokens: ClassVar[int] = 8
    takes_tree: ClassVar[bool] = False
    instead_of_tree: ClassVar[str] = "Give the tree to its drafter."

    drafter: Annotated[SpeculationConfig, BeforeValidator(_as_drafter)] = Field(
        description='Name the method that drafts for the draft model, like "suffix" or {"method": "ngram"}.'
    )

    @model_validator(mode="after")
    def _drafter_fits(self) -> Staged:
        check_drafts("drafter", self.drafter)
        if isinstance(self.drafter.method, Composition):
            problem = "a stage has one drafter"
            raise InvalidParameterError("drafter.method", self.drafter.name, problem, "Name one of its methods.")
        if isinstance(self.drafter.tree, str):
            problem = "trees adapt to what the target takes, and the draft model verifies this one"
            raise InvalidParameterError("drafter.tree", self.drafter.tree, problem, "Give the children by depth.")
        if self.drafter.rule == "coupled":
            problem = "the whole draft is coupled where a request has a seed or asks for it"
            raise ContradictionError("drafter.rule", self.drafter.rule, problem, "Give the rule beside the staged method.")
        for place, model in _models_inside(self.drafter, "drafter"):
            if model.identity == self.identity:
                problem = "it is the model that it would draft for"
                raise ContradictionError(f"{place}.model", model.model, problem, "Use a smaller one, or a lookup.")
        check_depth("drafter", self)
        return self

    @property
    def nested(self) -> Mapping[str, SpeculationConfig]:
        return {"drafter": self.drafter}

    def with_nested(self, nested: Mapping[str, SpeculationConfig]) -> Self:
        return self.replace(drafter=nested["drafter"])

    def build(self, context: ProposerContext) -> Proposer:
        runner = self.runner(context)
        assert self.drafter.method is not None, "a stage without a drafter is refused"
        try:
            drafter = context.inside(runner).build(self.drafter.method)
        except (InputError, ModelError) as error:
            raise named("drafter", error) from None
        stage = StageDrafter(drafter, self.drafter, context.vocab_size)
        return StagedProposer(
            runner,
            stage,
            context.vocab_size,
            context.max_num_batched_tokens,
            self.min_confidence,
            self.drafted_tokens(runner),
        )


def _models_inside(config: SpeculationConfig, place: str) -> Iterator[tuple[str, DraftModel]]:
    """The models with memory of their own that a drafter brings, each with its place."""
    if isinstance(config.method, DraftModel):
        yield place, config.method
    for own, member in config.method.nested.items() if config.method is not None else ():
        yield from _models_inside(member, f"{place}.{own}")


@dataclass
class _Round:
    """One draft's part in a pass of the draft model."""

    work: Work  # rows of the text that are due
    guess: Draft  # what the drafter guesses behind them
    number: int  # the text's round in this stage
    place: int = 0  # of its segment
    #: (first, end) of its logits in the pass: behind the text, then behind each node of the guess.
    rows: tuple[int, int] = (0, 0)
    path: tuple[int, ...] = ()  # nodes of the guess that stand

    @property
    def drafting(self) -> PartialDraft:
        return self.work.drafting

    @property
    def segment(self) -> Segment:
        """The rows of both."""
        due, guess = self.work.segment, self.guess
        if not len(guess):
            return due
        last, tokens = due.num_rows - 1, [*due.token_ids, *guess.token_ids]
        if guess.is_chain:
            return replace(due, token_ids=tokens)
        behind = (last if parent < 0 else last + 1 + parent for parent in guess.parents)
        return replace(due, token_ids=tokens, parents=(*range(-1, last), *behind))

    @property
    def verified(self) -> PassRows:
        """Its rows after the verdict."""
        due = self.work.segment
        sequence = self.drafting.growth.request.sequence
        return PassRows(sequence, due.start, due.num_rows, self.guess, self.path, self.place)


class StagedProposer(DraftModelProposer):
    """Greedy, drawn or coupled chains from a draft model that verifies the guesses of a drafter, batched over sequences.
    Arguments are those of DraftModelProposer, and the drafter."""

    def __init__(
        self,
        runner: ModelRunner,
        stage: StageDrafter,
        vocab_size: int,
        max_num_batched_tokens: int,
        min_confidence: float = 0.0,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        super().__init__(runner, SameVocabulary(vocab_size), max_num_batched_tokens, min_confidence, vocabulary)
        self.stage = stage
        self._rows = StageObserver(stage)
        self._shown_layers = self._rows.aux_layers if self._rows.reads_all else ()

    # -- life ----------------------------------------------------------------------------------------------------------

    def begin(self, sequence: ProposerSequence) -> None:
        self.stage.begin(sequence)

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        self.stage.fork(parent, child)

    def prefill(self, prompts: Sequence[PromptRows]) -> None:
        super().prefill(prompts)
        self.stage.prefill(prompts)

    def finish(self, sequence: ProposerSequence) -> None:
        super().finish(sequence)
        self.stage.finish(sequence)
        self._rows.finish(sequence)

    def snapshot(self) -> object | None:
        return self.stage.proposer.snapshot()

    def restore(self, state: object) -> None:
        self.stage.proposer.restore(state)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.stage.proposer.check_integrity()

    def check_rest(self) -> None:
        super().check_rest()
        self.stage.check_rest()

    # -- reading -------------------------------------------------------------------------------------------------------

    def needs(self, sequence: ProposerSequence) -> frozenset[int]:
        return self._rows.needs(sequence)

    def lag(self, sequence: ProposerSequence) -> int:
        unread = super().lag(sequence)
        state = self._states.get(sequence.seq_id)
        held = [state.num_filled.get(number, 0) for number in self.needs(sequence)] if state is not None else []
        return max(unread, len(sequence.token_ids) - min(held)) if held else unread

    def read(self, reading: Sequence[TextReading]) -> ForwardOutput:
        out = super().read(reading)
        if self._rows.reads_all:
            rows = [
                PassRows(each.sequence, each.segment.start, each.segment.num_rows, EMPTY, (), place)
                for place, each in enumerate(reading)
            ]
            self._rows.show([each.text for each in reading], rows, out)
        return out

    # -- drafting ------------------------------------------------------------------------------------------------------

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafting = [self.begin_draft(request, requests) for request in requests]
        growing = [d for d in drafting if d.growth.budget > 0]
        for d in growing:
            self._rows.begin_draft(d.growth.request.sequence, d.text)
        while growing:
            rounds = self._guessed(self.due(growing), noise.member(_GUESSES))
            segments, panels = [each.segment for each in rounds], self._head_panels()
            out = self.runner.forward(segments, self._rows.aux_layers, head_panels=panels)
            processed = self._processed(rounds, out)
            checked = [each for each in rounds if each.work.wanted]
            candidates = [self._candidate(each, noise.member(_CHECKS)) for each in checked]
            verdicts = Verifier(noise.source).verify(candidates, processed)
            for each, verdict in zip(checked, verdicts, strict=True):
                self._extend(each, verdict, processed[slice(*each.rows)])
            self._rows.show([each.drafting.text for each in rounds], [each.verified for each in rounds], out)
            growing = [each.drafting for each in checked if each.drafting.growth.level]
        return [d.growth.draft() for d in drafting]

    def _guessed(self, due: list[Work], noise: DraftNoise) -> list[_Round]:
        """Each draft's part in the next pass. How many rows a guess may have is fixed before it is made."""
        rows_left = self._max_rows - sum(work.segment.num_rows for work in due)
        asked, places = list[Guess](), list[int]()
        rounds = [_Round(work, Draft(), 0) for work in due]
        for place, work in enumerate(due):
            if work.wanted:
                rounds[place].number = self.stage.next_round(work.drafting.growth.request.sequence)
                asked.append(self._wish(work.drafting, rounds[place].number, rows_left))
                places.append(place)
                rows_left -= asked[-1].num_rows
        for place, guess in zip(places, self.stage.guesses(asked, noise), strict=True):
            rounds[place].guess = guess
        self.runner.partial_rows.clear()  # the pass to come computes all layers
        return rounds

    def _wish(self, d: PartialDraft, number: int, rows_left: int) -> Guess:
        """The wish to the drafter: one token less than what is still to be drafted, since the draft model's own pass
        brings that one."""
        growth, config, text = d.growth, self.stage.config, d.text
        assert config.method is not None
        depth = growth.budget - len(growth.nodes) - 1
        rows = min(config.num_draft_tokens, rows_left) if depth > 0 else 0
        rows = rows if config.tree or config.method.branches_freely else min(rows, depth)
        if rows > 0 and not self._reserve(text.state, text.num_missing + rows):
            rows = min(rows, text.state.capacity - text.length)
        path, kv = growth.path(len(growth.nodes) - 1), KVView(text.state)
        return Guess(growth.request, path, kv, number, max(rows, 0), depth)

    def _processed(self, rounds: list[_Round], out: ForwardOutput) -> Tensor:
        """Note what a pass has computed, and in each round what is its own; returns logits [num_logits, vocab_size] as the
        requests' parameters leave them."""
        logits, done = self._bridge.logits(out.logits), list[Tensor]()
        for place, (each, rows) in enumerate(zip(rounds, out.logits_spans, strict=True)):
            each.place, each.rows = place, rows
            each.drafting.text.record(each.work.segment.token_ids)
            done.append(_processed(each, logits[slice(*rows)]))
        return torch.cat(done)

    def _candidate(self, each: _Round, noise: DraftNoise) -> DraftCandidate:
        """A guess as the Verifier sees it. Its draws have keys of their own, or, where the request is coupled, the bits of
        the target's draws."""
        growth = each.drafting.growth
        request = growth.request
        sequence = request.sequence
        keys = CandidateKeys(
            sequence.seq_id,
            sequence.seed,
            sequence.sample,
            each.number,
            request.length + len(growth.nodes),
            noise.drafter(request),
            coupled=request.coupled,
        )
        rule = rule_for(each.guess, self.stage.config.rule, coupled=request.coupled)
        return DraftCandidate(each.guess, each.rows, sequence.sampling if growth.draws else _LIKELIEST, keys, rule)

    def _extend(self, each: _Round, verdict: Verdict, rows: Tensor) -> None:
        """Add what stands of a guess, and the token behind it, to the draft; counts the pass. `rows` [1 + num_nodes,
        vocab_size] are processed logits behind the text, then behind each node of the guess."""
        growth, text, guess = each.drafting.growth, each.drafting.text, each.guess
        each.path = tuple(verdict.path)
        stood = tuple(guess.token_ids[node] for node in verdict.path)
        text.state.run_ahead(stood, verdict.path)
        text.loose = (*text.loose, *stood, verdict.token_id)
        behind = rows[[0, *(1 + node for node in verdict.path)]]
        laws = target_probs(behind, [growth.request.sequence.sampling] * len(behind)) if growth.draws else behind
        before = len(growth.nodes)
        growth.follow((*stood, verdict.token_id), laws)
        num_kept = min(len(stood), len(growth.nodes) - before)
        growth.request.count_stage(self.stage.config.name, len(guess), num_kept)


def _processed(each: _Round, rows: Tensor) -> Tensor:
    """Logits behind the text and behind each node of the guess as the request's parameters leave them."""
    growth = each.drafting.growth
    request = growth.request
    processing = request.sequence.processing
    if not len(rows) or not processing.active:
        return rows
    before = request.path + growth.path(len(growth.nodes) - 1)
    return processing.apply(rows, [before, *(before + path for path in each.guess.paths)]).logits
