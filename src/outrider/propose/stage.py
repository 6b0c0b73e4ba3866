"""Stages: a drafter guesses, a draft model verifies the guesses, and the target sees only what the draft model left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from outrider.cache.state import KVView
from outrider.draft import EMPTY, Draft
from outrider.model.batch import Segment
from outrider.model.runner import ForwardOutput
from outrider.propose.base import (
    DraftNoise,
    Drawn,
    ObservedRows,
    PromptRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
    Tokens,
    TopK,
)
from outrider.propose.draft_model import OwnText, TextReading
from outrider.propose.inspection import inspected
from outrider.propose.settings import SpeculationConfig
from outrider.propose.tree import CHAIN, StaticTree

# --- The drafter of a stage: a proposer whose guesses a draft model verifies before the target sees anything of them.


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guess:
    """What a drafter is asked for in one round of a stage.

    Attributes:
        request: The request that the stage itself drafts for.
        path: Tokens behind those that the request's draft follows, which the stage has drafted already.
        kv: What the draft model keeps of the text, with room for the guess.
        round: The text's round in this stage; part of the keys of all that is drawn in it.
        num_rows: Most nodes.
        max_depth: Longest path that may be of use.
    """

    request: ProposeRequest
    path: tuple[int, ...]
    kv: KVView
    round: int
    num_rows: int
    max_depth: int


class StageDrafter:
    """Asks a proposer for guesses at what a draft model will write.

    It is shown each text as a sequence of its own, whose rounds are the verify passes of the draft model, and whose KV is
    the draft model's. What it raises, or answers against the rules, costs its own guesses: it is not asked for that text
    again, and the draft model goes on without it.

    Args:
        proposer: The drafter.
        config: Its settings.
        vocab_size: Width of the target's logits.
    """

    def __init__(self, proposer: Proposer, config: SpeculationConfig, vocab_size: int) -> None:
        self.proposer = proposer
        self.config = config
        self._vocab_size = vocab_size
        self._views: dict[int, ProposerSequence] = {}
        self._faults: dict[int, str] = {}  # texts for which it is not asked again
        self._told: set[int] = set()

    # -- life ----------------------------------------------------------------------------------------------------------

    def begin(self, sequence: ProposerSequence) -> None:
        """As for any proposer."""
        view = self._views[sequence.seq_id] = replace(sequence, round=0)
        self._tell("begin", [sequence], view)

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        """As for any proposer."""
        view = self._views[child.seq_id] = replace(child, round=0)
        self._tell("fork", [child], self._views[parent.seq_id], view)

    def prefill(self, prompts: Sequence[PromptRows]) -> None:
        """As for any proposer."""
        sound = [prompt for prompt in prompts if prompt.sequence.seq_id not in self._faults]
        shown = [replace(prompt, sequence=self._views[prompt.sequence.seq_id]) for prompt in sound]
        self._tell("prefill", [prompt.sequence for prompt in sound], shown)

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        """Rows of the draft model."""
        sound = [seen for seen in rows if seen.sequence.seq_id not in self._faults]
        self._tell("observe", [seen.sequence for seen in sound], sound)

    def is_set_aside(self, sequence: ProposerSequence) -> bool:
        """Whether it is not asked for a text any more."""
        return sequence.seq_id in self._faults

    def forget(self, sequence: ProposerSequence) -> None:
        """What it was shown of a text is not so any more: it begins anew."""
        if not self.is_set_aside(sequence):
            self._tell("finish", [sequence], self._views[sequence.seq_id])
            self._tell("begin", [sequence], self._views[sequence.seq_id])

    def view(self, sequence: ProposerSequence, token_ids: list[int], kv: KVView) -> ProposerSequence:
        """A text as it is shown, with these tokens, and with what the draft model keeps of it."""
        return replace(self._views[sequence.seq_id], token_ids=Tokens(token_ids), kv=kv)

    def finish(self, sequence: ProposerSequence) -> None:
        """As for any proposer."""
        view = self._views.pop(sequence.seq_id)
        self._tell("finish", [sequence], view)
        self._faults.pop(sequence.seq_id, None)
        self._told.discard(sequence.seq_id)

    def check_rest(self) -> None:
        """As for any proposer."""
        assert not self._views, f"the drafter of a stage still has {len(self._views)} texts"
        self.proposer.check_rest()

    # -- guessing ------------------------------------------------------------------------------------------------------

    def next_round(self, sequence: ProposerSequence) -> int:
        """The number of the text's next round in this stage."""
        view = self._views[sequence.seq_id]
        view.round += 1
        return view.round

    def guesses(self, asked: Sequence[Guess], noise: DraftNoise) -> list[Draft]:
        """Sound drafts, in order; empty ones where the drafter has none, or is not asked.

        Args:
            asked: What is wanted.
            noise: The drafter's.
        """
        found = [EMPTY] * len(asked)
        places = [i for i, each in enumerate(asked) if each.num_rows > 0 and self._is_sound(each.request)]
        requests = [self._request(asked[i]) for i in places]
        answers: Sequence[object]
        try:
            answers = list(self.proposer.propose(requests, noise)) if places else []
            if len(answers) != len(places):
                raise ValueError(f"{len(answers)} drafts for {len(places)} requests")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            answers = [error] * len(places)
        for i, request, answer in zip(places, requests, answers, strict=True):
            sound, problem = inspected(request, answer, self._vocab_size)
            if problem is not None:
                self._fail(request, problem)
            found[i] = sound.with_scratch(0)
        return found

    def _request(self, guess: Guess) -> ProposeRequest:
        config, asked = self.config, guess.request
        shape = config.tree
        assert not isinstance(shape, str), "a drafter's tree has a fixed shape"
        view = self._views[asked.sequence.seq_id]
        view.kv = guess.kv
        return replace(
            asked,
            sequence=view,
            budget=guess.num_rows,
            max_depth=guess.max_depth,
            path=asked.path + guess.path,
            builder=StaticTree.of_widths(shape) if shape else CHAIN,
            greedy=asked.greedy or config.draft_sampling == "greedy",
            count_stage=self._count_inner(asked),
            drawn=Drawn(),
        )

    def _count_inner(self, asked: ProposeRequest) -> Callable[[str, int, int], None]:
        """Counts passes of a stage inside the drafter, under its place in this one."""
        return lambda stage, drafted, accepted: asked.count_stage(f"{self.config.name}.{stage}", drafted, accepted)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _is_sound(self, request: ProposeRequest) -> bool:
        """Whether the drafter may be asked for a text; tells of a fault that happened outside of a draft."""
        problem = self._faults.get(request.sequence.seq_id)
        if problem is not None:
            self._fail(request, problem)
        return problem is None

    def _fail(self, request: ProposeRequest, problem: str) -> None:
        seq_id = request.sequence.seq_id
        self._faults.setdefault(seq_id, problem)
        if seq_id not in self._told:
            self._told.add(seq_id)
            request.report(f"its drafter {self.config.name} is set aside for this text: {problem}")

    def _tell(self, verb: str, sequences: Sequence[ProposerSequence], *args: object) -> None:
        try:
            if sequences:
                getattr(self.proposer, verb)(*args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            for sequence in sequences:
                self._faults.setdefault(sequence.seq_id, f"{verb} raised {error!r}")


# --- Rows of a draft model as its drafter in a stage is shown them: those of the passes that verify the drafter's guesses.


@dataclass(frozen=True)
class VerifiedRows:
    """Rows of one text in a pass of the draft model, after its verdict.

    Attributes:
        sequence: Whose.
        text: The text, with the tokens that stand and the one behind them.
        segment: The rows: first those of the text, then those of a guess.
        num_due: How many are of the text.
        place: Of the segment in the pass.
        path: Nodes of the guess that stand.
    """

    sequence: ProposerSequence
    text: OwnText
    segment: Segment
    num_due: int
    place: int
    path: tuple[int, ...]

    @staticmethod
    def of_text(reading: TextReading, place: int) -> VerifiedRows:
        """Rows of a text without a guess behind them."""
        return VerifiedRows(reading.sequence, reading.text, reading.segment, reading.segment.num_rows, place, ())


@dataclass(frozen=True)
class _Kept:
    """The rows of a text that the latest draft has run through.

    Attributes:
        start: Position of the last token that was committed when the draft began.
        tokens: Of the text from there on, with those of the draft.
        states: By position: the hidden states of its row, [1, hidden_size] by layer.
    """

    start: int
    tokens: list[int]
    states: dict[int, dict[int, Tensor]]


class StageObserver:
    """Shows a drafter what its draft model computed, as the engine shows a proposer the rows of the target.

    The text of a drafter goes on with each token that the stage drafts. Where the target takes another one, the drafter is
    shown the last row again that still stands; without such a row it forgets the text. One with added layers is shown every
    row of the text, and those that its layers lack are computed again; the state of the text says what they hold.

    Args:
        drafter: Who is shown them.
    """

    def __init__(self, drafter: StageDrafter) -> None:
        self._drafter = drafter
        self._needs = drafter.proposer.requires or Requirements()
        self._kept: dict[int, _Kept] = {}

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Hidden states that a pass must bring."""
        return self._needs.aux_layers

    @property
    def reads_all(self) -> bool:
        """Whether every row of a text must be shown, since layers are kept beside those of the draft model."""
        return self._needs.added_layers is not None

    def needs(self, sequence: ProposerSequence) -> frozenset[int]:
        """Added layers that must hold all that is computed of a text; none where the drafter is set aside for it."""
        added = self._needs.added_layers
        return frozenset() if added is None or self._drafter.is_set_aside(sequence) else frozenset({added.number})

    def begin_draft(self, sequence: ProposerSequence, text: OwnText) -> None:
        """A draft behind this text begins."""
        kept = self._kept.pop(sequence.seq_id, None)
        if kept is None:
            return
        pairs = zip(kept.tokens, text.tokens(kept.start), strict=False)
        stands = kept.start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        end = min(stands, text.length - 1)  # nothing was written behind the last token
        last = max((position for position in kept.states if position < end), default=None)
        if last is None:
            self._drafter.forget(sequence)
        elif last < max(kept.states):
            view = self._drafter.view(sequence, text.tokens()[: last + 2], KVView(text.state))
            self._show_again(view, last, kept.states[last])

    def show(self, verified: Sequence[VerifiedRows], out: ForwardOutput) -> None:
        """Show the rows of a pass."""
        if not self._needs.aux_layers and not self._needs.target_top_k and not self.reads_all:
            return
        shown = [self._observed(each, out) for each in verified]
        for each, seen in zip(verified, shown, strict=True):
            self._keep(each, seen)
        self._drafter.observe(shown)

    def finish(self, sequence: ProposerSequence) -> None:
        """The text has ended."""
        self._kept.pop(sequence.seq_id, None)

    def _observed(self, each: VerifiedRows, out: ForwardOutput) -> ObservedRows:
        segment, first = each.segment, out.row_spans[each.place][0]
        parents = segment.parents or tuple(range(-1, len(segment.token_ids) - 1))
        positions = list[int]()
        for parent in parents:
            positions.append(segment.start if parent < 0 else positions[parent] + 1)
        guess = range(len(parents) - each.num_due)
        return ObservedRows(
            sequence=self._drafter.view(each.sequence, each.text.tokens(), KVView(each.text.state)),
            token_ids=tuple(segment.token_ids),
            positions=tuple(positions),
            parents=parents,
            statuses=(
                *[RowStatus.TEXT] * each.num_due,
                *(RowStatus.ACCEPTED if node in each.path else RowStatus.REJECTED for node in guess),
            ),
            aux_hidden_states={
                layer: out.aux_hidden_states[layer][first : first + len(parents)] for layer in self._needs.aux_layers
            },
            target_top_k=self._top_k(each.place, out),
        )

    def _top_k(self, place: int, out: ForwardOutput) -> TopK | None:
        if not self._needs.target_top_k:
            return None
        (begin, end), first_row = out.logits_spans[place], out.logits_first_rows[place]
        values, tokens = out.logits[begin:end].topk(min(self._needs.target_top_k, out.logits.shape[-1]), -1)
        return TopK(tuple(range(first_row, first_row + end - begin)), tokens, values)

    def _keep(self, each: VerifiedRows, seen: ObservedRows) -> None:
        """Rows that stand, with their states, until the next draft begins."""
        if not self._needs.aux_layers or self.reads_all:
            return
        seq_id, start = each.sequence.seq_id, len(each.sequence.token_ids) - 1
        states = self._kept[seq_id].states if seq_id in self._kept else {}
        for row in seen.where(RowStatus.TEXT, RowStatus.ACCEPTED):
            if seen.positions[row] >= start:
                index = torch.tensor([row])  # a copy: a view would keep all rows
                states[seen.positions[row]] = {layer: rows[index] for layer, rows in seen.aux_hidden_states.items()}
        self._kept[seq_id] = _Kept(start, each.text.tokens(start), states)

    def _show_again(self, view: ProposerSequence, position: int, states: Mapping[int, Tensor]) -> None:
        token, status = view.token_ids[position], (RowStatus.TEXT,)
        self._drafter.observe([ObservedRows(view, (token,), (position,), (-1,), status, dict(states))])
