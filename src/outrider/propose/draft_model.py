"""A smaller model of the same vocabulary drafts ahead (Leviathan et al. 2023; Chen et al. 2023).

It runs through the same runner and the same kind of block-table KV memory as the target, for all sequences at once, with
states of its own. It reads a prompt chunk by chunk beside the target, so that its first draft waits for nothing. What it
has computed of a sequence is whatever prefix of its own rows the committed tokens confirm. So rejected drafts, bonus tokens
and prompts that only the target had cached need no messages; the next call fills the gap.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from outrider.cache.state import SequenceState
from outrider.config import QUANTIZATIONS, DraftQuantizationName, DTypeName, Elsewhere
from outrider.draft import Draft
from outrider.errors import InvalidParameterError, VocabularyMismatchError
from outrider.loading.loaded_model import LoadedModel
from outrider.loading.sources import check_sources
from outrider.model.batch import Segment
from outrider.model.runner import ForwardOutput, ModelRunner
from outrider.model.target import Target
from outrider.propose.base import DraftNoise, PromptRows, Proposer, ProposeRequest, ProposerSequence, host_waits
from outrider.propose.bridge import Bridge, SameVocabulary
from outrider.propose.draft_vocabulary import DraftVocabulary, VocabularySize, draft_vocabulary
from outrider.propose.settings import Method, ProposerContext, SpeculationConfig
from outrider.propose.tree import CHAIN
from outrider.propose.trees.growth import Growth, add_level, level_logits, next_of_chains
from outrider.verify.logits import target_probs as law_of

#: Rows a step for texts that the draft model has far to catch up with, while others draft beside them.
CATCH_UP_ROWS = 128
#: Rows that every draft needs anyway: the last token, and one more where a whole draft was accepted.
_USUAL_ROWS = 2
#: What names a draft model in llama.cpp's commands.
_MODEL = ("--spec-draft-model", "--model-draft", "-md", "--spec-draft-hf", "--hf-repo-draft", "-hfd", "-hfrd")


class DraftModel(Method):
    """A smaller model of the same vocabulary drafts.

    Proposers whose settings of the model are equal share one loaded model and its memory of each text.

    Attributes:
        model: Local folder or hub id. None takes the LLM's own draft model, the embedded one for the embedded pair.
        dtype: Of its weights; None takes the target's.
        quantization: How its weights are rounded, "none" for not at all; None takes what the LLM says of draft models.
        revision: Hub revision.
        trust_remote_code: Whether transformers may run code that this checkpoint brings; trust in the target's is another.
        min_confidence: Nothing is drafted behind a token whose own draft probability is smaller. The token itself stays.
        vocabulary: So many of the first tokens are drafted, and those that texts contain; 0 for all. None leaves rare
            tokens out where the vocabulary is large (`propose/draft_vocabulary.py`).
    """

    name: ClassVar[str] = "draft_model"

    model: Annotated[str | None, Elsewhere(options=_MODEL)] = Field(
        None, min_length=1, description="Use a local folder or a hub id."
    )
    dtype: DTypeName | None = Field(None, description="Use auto, float64, float32, bfloat16, float16 or None.")
    quantization: DraftQuantizationName | None = Field(None, description=f"Use {', '.join(QUANTIZATIONS)}, none or None.")
    revision: str | None = None
    trust_remote_code: bool = False
    min_confidence: Annotated[float, Elsewhere(options=("--spec-draft-p-min", "--draft-p-min"))] = Field(
        0.0, ge=0.0, le=1.0, description="Use 0 to 1."
    )
    vocabulary: VocabularySize = None

    def check_source(self, field: str) -> None:
        check_sources(**{field: self.model})

    @property
    def identity(self) -> Hashable:
        """Returns what settings share that share one loaded model."""
        return (self.model, self.dtype, self.quantization, self.revision, self.trust_remote_code)

    @property
    def model_settings(self) -> dict[str, Any]:
        """Returns how the model is loaded, as the arguments of `LoadRunner`."""
        return {name: getattr(self, name) for name in ("model", "dtype", "quantization", "revision", "trust_remote_code")}

    def build(self, context: ProposerContext) -> Proposer:
        runner, bridge = self.runner(context), SameVocabulary(context.vocab_size)
        return DraftModelProposer(
            runner, bridge, context.max_num_batched_tokens, self.min_confidence, self.drafted_tokens(runner)
        )

    def drafted_tokens(self, runner: ModelRunner) -> DraftVocabulary | None:
        """The tokens that the draft model computes; None for all."""
        return draft_vocabulary(self.vocabulary, runner.loaded, runner.backend.tokens_at_once())

    def runner(self, context: ProposerContext) -> ModelRunner:
        """The draft model, which proposers of equal models share.

        Raises:
            InvalidParameterError: No model is named, or there is no such folder.
            ModelError: It cannot be used, or speaks other tokens than the target.
        """
        runner = context.loaded.get(self.identity) or self.load(context)
        context.loaded[self.identity] = runner
        check_vocabulary(runner.loaded, context.target)
        return runner

    def load(self, context: ProposerContext) -> ModelRunner:
        """The draft model with KV memory of its own.

        Raises:
            InvalidParameterError: No model is named, or there is no such folder.
            ModelError: It cannot be used.
        """
        if self.model is None:
            raise InvalidParameterError(
                "model", None, f"method={self.name!r} needs one", "Give a local folder or a hub id."
            )
        return context.load_runner(**self.model_settings)


def draft_models(config: SpeculationConfig) -> Iterator[DraftModel]:
    """The draft models of settings, and of those inside them."""
    if isinstance(config.method, DraftModel):
        yield config.method
    for inner in config.method.nested.values() if config.method is not None else ():
        yield from draft_models(inner)


class DraftModelProposer(Proposer):
    """Greedy, drawn or coupled chains and trees from a draft model, batched over sequences.

    Args:
        bridge: Between the target's tokens and the draft's.
        vocabulary: The tokens that are drafted; None for all.
    """

    def __init__(
        self,
        runner: ModelRunner,
        bridge: Bridge,
        max_num_batched_tokens: int,
        min_confidence: float = 0.0,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.runner = runner
        self._bridge = bridge
        self._max_rows = max_num_batched_tokens
        self._min_confidence = min_confidence
        self._vocabulary = vocabulary
        self._shown_layers: tuple[int, ...] = ()  # hidden states that a pass over texts brings
        self._states = runner.states  # by sequence, least recently drafted for first

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafting = [self.begin_draft(request, requests) for request in requests]
        work = self.due([d for d in drafting if d.growth.budget > 0])
        if self._may_run_ahead(work, drafting):
            self._run_ahead(work, noise)
            work = []
        ready = self.run(work)
        while ready is not None:
            drafts, logits = ready
            growths = [d.growth for d in drafts]
            add_level(growths, self._bridge.logits(level_logits(growths, logits)), noise)
            ready = self.run([self._level_work(d) for d in drafts if d.growth.growing])
        return [d.growth.draft() for d in drafting]

    def prefill(self, prompts: Sequence[PromptRows]) -> None:
        """Compute as large a part of each prompt as the target will have computed, all in one pass."""
        rows_left = self._max_rows
        reading = list[TextReading]()
        for prompt in prompts:
            text = self._follow(prompt.sequence, ())
            rows = text.missing(min(text.due(prompt) - text.state.end, rows_left))
            if rows and text.room > 1 and self._reserve(text.state, len(rows)):
                rows_left -= len(rows)
                reading.append(TextReading(prompt.sequence, text, text.segment(rows, len(rows))))
        if reading:
            self.read(reading)
        for each in reading:
            each.text.state.publish(each.text.settled)

    def finish(self, sequence: ProposerSequence) -> None:
        state = self._states.pop(sequence.seq_id, None)
        if state is not None:
            state.free()
        self._bridge.forget(sequence)
        if self._vocabulary is not None:
            self._vocabulary.forget(sequence.seq_id)

    def lag(self, sequence: ProposerSequence) -> int:
        state = self._states.get(sequence.seq_id)
        return max(0, len(sequence.token_ids) - (0 if state is None else state.end))

    @property
    def tells_overlaps(self) -> bool:
        return isinstance(self._bridge, SameVocabulary)

    def overlaps(self, sequence: ProposerSequence, target_probs: Sequence[float]) -> list[float]:
        """The pass that catches up is the measurement. Who has far to catch up reads CATCH_UP_ROWS tokens a call, and is
        measured where it comes to tokens of known probability. Penalties and the like are not applied to the draft, so the
        answer errs on the low side where there are any."""
        text = self._follow(sequence, ())
        rows, start = text.missing(min(text.num_missing, CATCH_UP_ROWS)), text.state.end
        if not rows or not self.tells_overlaps or not self._reserve(text.state, len(rows)):
            return []
        known = len(sequence.token_ids) - len(target_probs)  # tokens before the first one of known probability
        first, end = max(known, start + 1), min(start + len(rows) + 1, len(sequence.token_ids))
        count = max(0, end - first)
        segment = text.segment(rows, first - 1 - start if count else len(rows))
        logits = self.read([TextReading(sequence, text, segment)]).logits[:count]
        if not count:
            return []
        probs = law_of(self._bridge.logits(logits), [sequence.sampling] * count)
        tokens = torch.tensor(sequence.token_ids[first:end], device=probs.device)
        drafted: list[float] = probs.gather(-1, tokens[:, None])[:, 0].tolist()
        targets = target_probs[first - known : end - known]
        return [min(1.0, q / max(p, 1e-9)) for q, p in zip(drafted, targets, strict=True)]

    def check_integrity(self) -> None:
        self.runner.memory.check_integrity(self._states.values())

    def check_rest(self) -> None:
        assert not self._states, f"the draft model still has memory for {len(self._states)} texts"

    def begin_draft(self, request: ProposeRequest, requests: Sequence[ProposeRequest]) -> PartialDraft:
        """Roll back to what the committed tokens confirm and make room for the draft, shortened to what fits."""
        text = self._follow(request.sequence, request.path)
        depth = min(request.max_depth, text.room)
        budget = min(request.budget, depth) if request.builder is CHAIN else request.budget
        budget = budget if min(depth, text.length) > 0 else 0
        while budget > 0 and not self._take(text.state, text.num_missing + budget - 1, requests):
            budget -= 1
        return PartialDraft(text, Growth.of(request, budget, depth, self._min_confidence))

    def needs(self, sequence: ProposerSequence) -> frozenset[int]:
        """Added layers that must hold all that is computed of a text; for a proposer that shows its rows to override."""
        return frozenset()

    def read(self, reading: Sequence[TextReading]) -> ForwardOutput:
        """Compute rows of texts in one pass, and note that they are computed."""
        out = self.runner.forward([each.segment for each in reading], self._shown_layers, head_panels=self._head_panels())
        for each in reading:
            each.text.record(each.segment.token_ids)
        return out

    def _follow(self, sequence: ProposerSequence, path: Sequence[int]) -> OwnText:
        """The text in the draft's tokens, and its memory, rolled back to what the committed tokens confirm."""
        settled, loose = self._bridge.text(sequence, path)
        if self._vocabulary is not None:
            self._vocabulary.see(sequence.seq_id, settled)
        state, needs = self._states.pop(sequence.seq_id, None), self.needs(sequence)
        if state is None:
            state = self.runner.memory.state(sequence.namespace, sequence.source)
            state.open(settled, needs=needs)
        else:
            state.roll_back(settled, loose, needs=needs)
        self._states[sequence.seq_id] = state
        state.publish(settled)
        length = len(settled) + len(loose)
        room, longest = self.runner.loaded.max_model_len - length, state.longest_draft(length)
        return OwnText(settled, loose, state, room if longest is None else min(room, longest))

    def _head_panels(self) -> np.ndarray | None:
        return None if self._vocabulary is None else self._vocabulary.panels

    def _take(self, state: SequenceState, rows: int, requests: Sequence[ProposeRequest]) -> bool:
        """Make room for so many rows, if need be by taking the memory of sequences that are not drafted for now."""
        if self._reserve(state, rows):
            return True
        busy = {request.sequence.seq_id for request in requests}
        for seq_id in [i for i in self._states if i not in busy]:
            self._states.pop(seq_id).free()  # it will catch up should it be drafted for again
            if self._reserve(state, rows):
                return True
        return False

    def _reserve(self, state: SequenceState, rows: int) -> bool:
        """Make room for so many rows; False where memory is short."""
        reserved = state.reserve(rows)
        self.runner.memory.make_copies([state])
        return reserved

    def due(self, drafting: list[PartialDraft]) -> list[Work]:
        """Rows of tokens that the draft model has not seen; logits are wanted where they reach the end of the text.

        Those with little to catch up come first. Who has far to go shares few rows a step while others are ready to draft,
        so that these keep their pace.
        """
        order = sorted(drafting, key=lambda d: d.text.num_missing)
        others_wait = bool(order) and order[0].text.num_missing <= _USUAL_ROWS
        rows_left, late_left = self._max_rows, CATCH_UP_ROWS if others_wait else self._max_rows
        work = list[Work]()
        for d in order:
            late = d.text.num_missing > _USUAL_ROWS
            missing = d.text.missing(min(rows_left, late_left) if late else rows_left)
            if not missing:
                break
            rows_left -= len(missing)
            late_left -= len(missing) if late else 0
            wanted = len(missing) == d.text.num_missing
            work.append(Work(d, d.text.segment(missing, len(missing) - int(wanted)), wanted))
        return work

    def run(self, work: list[Work]) -> tuple[list[PartialDraft], Tensor] | None:
        """Compute rows; returns those that want logits, and these logits. Nothing is recorded as computed before the
        pass has succeeded."""
        if not work:
            return None
        logits = self.runner.forward([w.segment for w in work], head_panels=self._head_panels()).logits
        for w in work:
            if w.segment.parents is None:
                w.drafting.text.record(w.segment.token_ids)
        ready = [w.drafting for w in work if w.wanted]
        return (ready, logits) if ready else None

    def _may_run_ahead(self, work: list[Work], drafting: list[PartialDraft]) -> bool:
        """Tells whether the host would wait for each token of drafts of which nothing else depends on the tokens."""
        plain = host_waits(self.runner.loaded.device) and self.runner.takes_unknown_tokens and self._vocabulary is None
        plain = plain and type(self._bridge) is SameVocabulary and self._min_confidence == 0.0
        asked = [d.growth for d in drafting if d.growth.budget > 0]
        return (
            plain
            and len(work) == len(asked)
            and all(w.wanted for w in work)
            and all(growth.request.builder is CHAIN and growth.request.drawn.is_empty for growth in asked)
            and not any(growth.request.sequence.processing.active for growth in asked)
        )

    def _run_ahead(self, work: list[Work], noise: DraftNoise) -> None:
        """Compute all levels of chains, each from the tokens that the level before left on the device; the host learns them
        at the end, all at once."""
        growing, depth = [w.drafting for w in work], 0
        levels: list[tuple[list[PartialDraft], Sequence[Tensor], Tensor]] = []
        ready = self.run(work)
        assert ready is not None, "all of them want logits"
        logits = ready[1]
        while True:
            rows, tokens = next_of_chains([d.growth for d in growing], self._bridge.logits(logits), depth, noise)
            levels.append((growing, rows, tokens))
            depth += 1
            going = [i for i, d in enumerate(growing) if depth < min(d.growth.budget, d.growth.max_depth)]
            if not going:
                break
            if len(going) < len(growing):
                tokens = tokens[torch.tensor(going).to(tokens.device, non_blocking=True)]
            growing = [growing[i] for i in going]
            segments = [d.text.segment([0]) for d in growing]
            known = tokens.clamp(0, self.runner.loaded.vocab_size - 1)  # rows that are no numbers may leave any token
            logits = self.runner.forward(segments, token_ids=known).logits
            for d in growing:
                d.text.record([UNKNOWN])
        _settle(levels)

    def _level_work(self, d: PartialDraft) -> Work:
        """Rows of the deepest level. A chain's KV is kept as it grows; a tree is computed anew as a whole, since its rows
        see only their ancestors, and so few rows cost one pass either way."""
        growth = d.growth
        if not growth.branches:
            return Work(d, d.text.segment([self._bridge.token(growth.nodes[-1].token_id)]), True)
        parents = tuple(n.parent for n in growth.nodes)
        tokens = [self._bridge.token(n.token_id) for n in growth.nodes]
        return Work(d, d.text.segment(tokens, growth.level[0], parents), True)


#: What stands for a token that the host does not know yet. It is no token of any text.
UNKNOWN = -1


def _settle(levels: list[tuple[list[PartialDraft], Sequence[Tensor], Tensor]]) -> None:
    """Tell drafts, and what the model keeps of their texts, the tokens of each level."""
    told = iter(torch.cat([tokens for _, _, tokens in levels]).tolist())
    found: dict[int, tuple[PartialDraft, list[int], list[Tensor]]] = {}
    for drafting, rows, _ in levels:
        for d, row in zip(drafting, rows, strict=True):
            _, tokens, laws = found.setdefault(id(d), (d, [], []))
            tokens.append(next(told))
            laws.append(row)
    for d, tokens, laws in found.values():
        possible = tokens[: tokens.index(UNKNOWN)] if UNKNOWN in tokens else tokens
        state, unknown = d.text.state, len(tokens) - 1  # nothing was computed behind the last one
        if unknown:
            state.ahead[-unknown:] = possible[:unknown]
        d.growth.follow(possible, laws[: len(possible)])


@dataclass
class OwnText:
    """A text in the draft model's own tokens, and what the model keeps of it."""

    settled: Sequence[int]  # tokens that the committed ones settle
    loose: Sequence[int]  # tokens behind these: drafted by another proposer in this step, or still open to change
    state: SequenceState  # what the model keeps of it
    room: int  # tokens that a draft behind it may have

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.settled) + len(self.loose)

    @property
    def num_missing(self) -> int:
        """Tokens before a draft whose rows are due."""
        return self.length - self.state.end

    def tokens(self, start: int = 0) -> list[int]:
        """All of them from a position on."""
        return [*self.settled[start:], *self.loose[max(start - len(self.settled), 0) :]]

    def due(self, prompt: PromptRows) -> int:
        """Settled tokens that are as large a part of the text as the target will have computed."""
        return len(self.settled) * prompt.stop // len(prompt.sequence.token_ids)

    def missing(self, count: int) -> list[int]:
        """The first so many of the missing tokens."""
        size, start = len(self.settled), self.state.end
        stop = max(start + count, start)
        return [*self.settled[start:stop], *self.loose[max(start - size, 0) : max(stop - size, 0)]]

    def segment(self, token_ids: Sequence[int], logits_from: int = 0, parents: tuple[int, ...] | None = None) -> Segment:
        """Rows behind what is computed. The last token may be computed anew; all others that are settled are certain."""
        certain = max(len(self.settled) - 1, 0)
        return Segment.of(self.state, token_ids, self.state.end, parents, logits_from, certain=certain)

    def record(self, token_ids: Sequence[int]) -> None:
        """These rows are computed; what is not settled yet stands ahead of the text."""
        state = self.state
        settled = max(0, min(len(token_ids), len(self.settled) - state.end)) if not state.ahead else 0
        state.commit(state.num_computed, range(settled))
        state.run_ahead(token_ids[settled:])


@dataclass(frozen=True)
class TextReading:
    """Rows of a text that the draft model computes without drafting."""

    sequence: ProposerSequence  # whose
    text: OwnText  # the text
    segment: Segment  # the rows


@dataclass
class PartialDraft:
    """One draft in the making, and the text that it follows."""

    text: OwnText  # the text
    growth: Growth  # the draft


@dataclass
class Work:
    """Rows to compute for one draft, and whether their logits are needed to go on."""

    drafting: PartialDraft
    segment: Segment
    wanted: bool


def check_vocabulary(draft: LoadedModel, target: Target) -> None:
    """Raise VocabularyMismatchError unless token ids mean the same to both models, and both read prompts alike.

    Logits may differ in width, as padded vocabularies do, where both tokenizers are there to agree on the tokens.
    """
    if draft.text_start != target.text_start:
        problem = _other_start(draft, target)
        raise VocabularyMismatchError(draft.name, problem, "Use a draft model of the same family.")
    if draft.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if ours != theirs:
            differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
            raise VocabularyMismatchError(
                draft.name,
                f"its tokens are not those of {target.name}: {len(differing)} differ, {differing[0]!r} first",
                "Use a draft model of the same family, or method='cross_vocabulary'.",
            )
    elif draft.vocab_size != target.vocab_size:
        raise VocabularyMismatchError(
            draft.name,
            f"it has {draft.vocab_size} tokens and {target.name} has {target.vocab_size}",
            "Use a draft model of the same vocabulary.",
        )


def _other_start(draft: LoadedModel, target: Target) -> str:
    """Returns what is wrong with a draft model whose texts begin in another way than the target's."""
    ours, theirs = draft.text_start, target.text_start
    if ours is None or theirs is None:
        return f"{target.name if ours is None else 'it'} has an encoder that reads prompts, and the other one has none"
    return f"its texts begin with the tokens {list(ours)}, and those of {target.name} with {list(theirs)}"
