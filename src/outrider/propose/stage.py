"""Stages: a drafter guesses, a draft model verifies the guesses, and the target sees only what the draft model left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from outrider.cache.state import KVView
from outrider.draft import EMPTY, Draft
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
)
from outrider.propose.draft_model import OwnText
from outrider.propose.host import PassRows, ProposerHost, blaming
from outrider.propose.settings import SpeculationConfig
from outrider.propose.tree import CHAIN, StaticTree

# --- The drafter of a stage: a proposer whose guesses a draft model verifies before the target sees anything of them.


@dataclass(frozen=True)
class Guess:
    """The wish to a drafter in one round of a stage."""

    request: ProposeRequest  # that the stage itself drafts for
    path: tuple[int, ...]  # tokens behind those that the request's draft follows, which the stage has drafted already
    kv: KVView  # what the draft model keeps of the text, with room for the guess
    round: int  # of the text in this stage; part of the keys of all that is drawn in it
    num_rows: int  # most nodes
    max_depth: int  # longest path that may be of use


@dataclass
class _StageText:
    """A text as the drafter of a stage knows it. After a fault it is not asked for the text any more."""

    view: ProposerSequence
    fault: str | None = None
    told: bool = False  # to the request that the stage drafts for
    believed: bool = True

    def report_fault(self, problem: str, *, useless: bool = True) -> None:
        self.fault = self.fault or problem


class StageDrafter(ProposerHost):
    """Asks a proposer for guesses at what a draft model will write.

    It is shown each text as a sequence of its own, whose rounds are the verify passes of the draft model, and whose KV is
    the draft model's. A fault costs its own guesses: it is set aside for that text, and the draft model goes on without it.
    """

    def __init__(self, proposer: Proposer, config: SpeculationConfig, vocab_size: int) -> None:
        super().__init__(proposer, vocab_size)
        proposer.keeps_up = True
        self.config = config
        self._texts: dict[int, _StageText] = {}

    # -- life ----------------------------------------------------------------------------------------------------------

    def begin(self, sequence: ProposerSequence) -> None:
        text = self._texts[sequence.seq_id] = _StageText(replace(sequence, round=0))
        with blaming([text], "begin"):
            self.proposer.begin(text.view)

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        text = self._texts[child.seq_id] = _StageText(replace(child, round=0))
        with blaming([text], "fork"):
            self.proposer.fork(self._texts[parent.seq_id].view, text.view)

    def prefill(self, prompts: Sequence[PromptRows]) -> None:
        sound = [prompt for prompt in prompts if not self.is_set_aside(prompt.sequence)]
        texts = [self._texts[prompt.sequence.seq_id] for prompt in sound]
        if sound:
            with blaming(texts, "prefill"):
                shown = zip(sound, texts, strict=True)
                self.proposer.prefill([replace(prompt, sequence=text.view) for prompt, text in shown])

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        """Show the drafter rows of the draft model."""
        sound = [seen for seen in rows if not self.is_set_aside(seen.sequence)]
        if sound:
            with blaming([self._texts[seen.sequence.seq_id] for seen in sound], "observe"):
                self.proposer.observe(sound)

    def is_set_aside(self, sequence: ProposerSequence) -> bool:
        """True if the drafter is not asked for a text any more."""
        text = self._texts.get(sequence.seq_id)
        return text is not None and text.fault is not None

    def forget(self, sequence: ProposerSequence) -> None:
        """Let the drafter begin a text anew, of which it was shown what is not so any more."""
        if not self.is_set_aside(sequence):
            text = self._texts[sequence.seq_id]
            with blaming([text], "finish"):
                self.proposer.finish(text.view)
            with blaming([text], "begin"):
                self.proposer.begin(text.view)

    def view(self, sequence: ProposerSequence, token_ids: list[int], kv: KVView) -> ProposerSequence:
        """A text as it is shown, with these tokens, and with what the draft model keeps of it."""
        return replace(self._texts[sequence.seq_id].view, token_ids=Tokens(token_ids), kv=kv)

    def finish(self, sequence: ProposerSequence) -> None:
        text = self._texts.pop(sequence.seq_id)
        with blaming([text], "finish"):
            self.proposer.finish(text.view)

    def check_rest(self) -> None:
        assert not self._texts, f"the drafter of a stage still has {len(self._texts)} texts"
        self.proposer.check_rest()

    # -- guessing ------------------------------------------------------------------------------------------------------

    def next_round(self, sequence: ProposerSequence) -> int:
        """The number of the text's next round in this stage."""
        view = self._texts[sequence.seq_id].view
        view.round += 1
        return view.round

    def guesses(self, asked: Sequence[Guess], noise: DraftNoise) -> list[Draft]:
        """Sound drafts, in order; empty ones where the drafter has none, or is not asked."""
        found = [EMPTY] * len(asked)
        places = [i for i, each in enumerate(asked) if each.num_rows > 0 and self._is_sound(each.request)]
        texts = [self._texts[asked[i].request.sequence.seq_id] for i in places]
        requests = [self._request(asked[i]) for i in places]
        for i, draft in zip(places, self.ask(texts, requests, noise) if places else (), strict=True):
            found[i] = draft.with_scratch(0)
            self._is_sound(asked[i].request)
        return found

    def _request(self, guess: Guess) -> ProposeRequest:
        config, asked = self.config, guess.request
        shape = config.tree
        assert not isinstance(shape, str), "a drafter's tree has a fixed shape"
        view = self._texts[asked.sequence.seq_id].view
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

    def _is_sound(self, request: ProposeRequest) -> bool:
        """True if the drafter may be asked for a text; if not, the request is told why, once."""
        text = self._texts[request.sequence.seq_id]
        if text.fault is not None and not text.told:
            text.told = True
            request.report(f"its drafter {self.config.name} is set aside for this text: {text.fault}")
        return text.fault is None


# --- Rows of a draft model as its drafter in a stage is shown them: those of the passes that verify the drafter's guesses.


@dataclass(frozen=True)
class _Kept:
    """The rows of a text that the latest draft has run through."""

    start: int  # position of the last token that was committed when the draft began
    tokens: list[int]  # of the text from there on, with those of the draft
    states: dict[int, dict[int, Tensor]]  # by position: the hidden states of its row, [1, hidden_size] by layer


class StageObserver:
    """Shows a drafter what its draft model computed, as the engine shows a proposer the rows of the target.

    The text of a drafter goes on with each token that the stage drafts. Where the target takes another one, the drafter is
    shown the last row again that still stands; without such a row it forgets the text. One with added layers is shown every
    row of the text, and those that its layers lack are computed again; the state of the text says what they hold.
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
        """True if every row of a text must be shown, since layers are kept beside those of the draft model."""
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

    def show(self, texts: Sequence[OwnText], verified: Sequence[PassRows], out: ForwardOutput) -> None:
        """Show the rows of a pass, with the tokens of each text that stand and the one behind them."""
        if not self._needs.aux_layers and not self._needs.target_top_k and not self.reads_all:
            return
        shown = []
        for text, rows in zip(texts, verified, strict=True):
            view = self._drafter.view(rows.sequence, text.tokens(), KVView(text.state))
            shown.append(replace(rows, sequence=view).shown(self._needs, out))
            self._keep(rows.sequence, text, shown[-1])
        self._drafter.observe(shown)

    def finish(self, sequence: ProposerSequence) -> None:
        """The text has ended."""
        self._kept.pop(sequence.seq_id, None)

    def _keep(self, sequence: ProposerSequence, text: OwnText, seen: ObservedRows) -> None:
        """Rows that stand, with their states, until the next draft begins."""
        if not self._needs.aux_layers or self.reads_all:
            return
        seq_id, start = sequence.seq_id, len(sequence.token_ids) - 1
        states = self._kept[seq_id].states if seq_id in self._kept else {}
        for row in seen.where(RowStatus.TEXT, RowStatus.ACCEPTED):
            if seen.positions[row] >= start:
                index = torch.tensor([row])  # a copy: a view would keep all rows
                states[seen.positions[row]] = {layer: rows[index] for layer, rows in seen.aux_hidden_states.items()}
        self._kept[seq_id] = _Kept(start, text.tokens(start), states)

    def _show_again(self, view: ProposerSequence, position: int, states: Mapping[int, Tensor]) -> None:
        token, status = view.token_ids[position], (RowStatus.TEXT,)
        self._drafter.observe([ObservedRows(view, (token,), (position,), (-1,), status, dict(states))])
