"""The drafter of a stage: a proposer whose guesses a draft model verifies before the target sees anything of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.cache.state import KVView
from outrider.draft import EMPTY, Draft
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    PromptRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Tokens,
)
from outrider.propose.drawn import Drawn
from outrider.propose.inspection import inspected
from outrider.propose.speculation import SpeculationConfig
from outrider.propose.trees.tree import CHAIN, StaticTree

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
