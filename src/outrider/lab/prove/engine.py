"""The joint distribution of the whole engine on a real checkpoint, by every path, with planted faults."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from outrider.draft import Draft, Law
from outrider.engine.drafting.planning import Planner
from outrider.govern.costs import CostTable, StepTimes, StepWork
from outrider.lab.prove.forking import Distribution, ForkingNoise, Outcome, explore, total_variation
from outrider.lab.prove.running import Finding
from outrider.lab.prove.sampled import TeacherForced
from outrider.lab.prove.settings import DRAFT, HEADS, LAYERED, LAYERED_HEADS, OTHER_DRAFT, TARGET, Setting
from outrider.lab.prove.tiny import PIECES, raise_engine_norms, raise_norms
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.propose import settings as registry
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest, ProposerSequence
from outrider.propose.compositions import Composition, parts_of
from outrider.propose.cross_vocabulary import CrossVocabulary
from outrider.propose.draft_model import DraftModel, DraftModelProposer
from outrider.propose.settings import Method, ProposerContext, SpeculationConfig
from outrider.propose.staged import Staged
from outrider.propose.trees.adaptive import FixedPace
from outrider.verify.noise import Key, KeyedNoise, NoiseSource, Stream

# --- Planted faults: proposers that change the drafts of a draft model, and noise that breaks off behind a drawn token.


class _Around(Proposer):
    """A draft model whose drafts are changed before the engine sees them."""

    def __init__(self, inner: DraftModelProposer) -> None:
        self._inner = inner
        self.runner = inner.runner

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafts = self._inner.propose(requests, noise)
        return [self.changed(draft, request) for draft, request in zip(drafts, requests, strict=True)]

    def changed(self, draft: Draft, request: ProposeRequest) -> Draft:
        raise NotImplementedError

    def finish(self, sequence: ProposerSequence) -> None:
        self._inner.finish(sequence)

    def check_integrity(self) -> None:
        self._inner.check_integrity()


class MergedProposer(_Around):
    """Adds a guess of up to two tokens to the tree of a draft model. The guess depends on the length of the text alone. The
    first token stands below the root, and it may repeat a sampled sibling. The second one follows it and is declared
    opaque."""

    def changed(self, draft: Draft, request: ProposeRequest) -> Draft:
        token = request.length % 3
        extra = min(2, request.max_depth, request.budget - len(draft))
        if not len(draft) or extra <= 0:
            return draft
        size, probs = len(draft), draft.draft_probs
        return Draft(
            (*draft.token_ids, *(token, (token + 1) % 3)[:extra]),
            (*draft.parents, *(-1, size)[:extra]),
            (*draft.laws, *(Law.DETERMINISTIC, Law.OPAQUE)[:extra]),
            None if probs is None else torch.cat([probs, probs.new_zeros(extra, probs.shape[-1])]),
        )


class FaultyProposer(_Around):
    """A draft model whose drafts are spoilt wherever the length of the text is odd."""

    def __init__(self, inner: DraftModelProposer, fault: str) -> None:
        super().__init__(inner)
        self._fault = fault

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafts = super().propose(requests, noise)
        if self._fault == "raises" and any(request.length % 2 == 1 for request in requests):
            raise RuntimeError("planted fault")
        return drafts

    def changed(self, draft: Draft, request: ProposeRequest) -> Draft:
        if request.length % 2 == 0 or not len(draft) or self._fault == "raises":
            return draft
        if self._fault == "truncated":
            return draft.first(1)
        if self._fault == "token outside":
            return Draft((*draft.token_ids[:-1], 99), draft.parents, draft.laws, draft.draft_probs)
        assert draft.draft_probs is not None
        probs = draft.draft_probs.clone()
        if self._fault == "nan row":
            probs[-1] = float("nan")
            return Draft(draft.token_ids, draft.parents, draft.laws, probs)
        size = len(draft)
        longer = torch.cat([probs, probs[-1:]])
        return Draft(
            (*draft.token_ids, draft.token_ids[-1]), (*draft.parents, size - 1), (*draft.laws, draft.laws[-1]), longer
        )


class BreakingNoise:
    """Chance that raises when a proposer draws on behind a certain token, as a proposer does that knows no more of it."""

    def __init__(self, source: NoiseSource, token: int) -> None:
        self._source = source
        self._token = token
        self._broken: set[tuple[int, int]] = set()  # owner and drafter whose last draw was the token
        self.num_breaks = 0

    def bernoulli(self, probability: Tensor, keys: Sequence[Key]) -> Tensor:
        return self._source.bernoulli(probability, keys)

    def categorical(self, probs: Tensor, keys: Sequence[Key]) -> Tensor:
        drawing = [(key.owner, key.drafter) if key.stream is Stream.DRAFT else None for key in keys]
        if not self._broken.isdisjoint(drawing):
            self.num_breaks += 1
            self._broken.difference_update(drawing)
            raise RuntimeError("planted fault behind a drawn token")
        tokens = self._source.categorical(probs, keys)
        for who, key, token in zip(drawing, keys, tokens.tolist(), strict=True):
            if who is None:  # the draft is checked, and whoever draws next begins another one
                self._broken = {broken for broken in self._broken if broken[0] != key.owner}
            elif token == self._token:
                self._broken.add(who)
        return tokens

    def forget(self, owner: int) -> None:
        self._source.forget(owner)

    def mark(self) -> None:
        self._source.mark()

    def rewind(self) -> None:
        self._source.rewind()


class _OfDraftModel(Method):
    """The settings of a method that changes the drafts of a draft model."""

    name: ClassVar[str] = "_prove_around"

    model: str  # the draft model

    def inner(self, context: ProposerContext) -> DraftModelProposer:
        """The draft model, in float64 throughout."""
        proposer = context.build(DraftModel(model=self.model))
        assert isinstance(proposer, DraftModelProposer)
        raise_norms(proposer.runner.loaded.model)
        return proposer


class Merged(_OfDraftModel):
    """The settings of `MergedProposer`."""

    name: ClassVar[str] = "_prove_merged"

    def build(self, context: ProposerContext) -> Proposer:
        return MergedProposer(self.inner(context))


class Faulty(_OfDraftModel):
    """The settings of `FaultyProposer`."""

    name: ClassVar[str] = "_prove_faulty"

    fault: Literal["raises", "nan row", "truncated", "token outside", "too long"]  # how it fails, one of `FAULTS`

    def build(self, context: ProposerContext) -> Proposer:
        return FaultyProposer(self.inner(context), self.fault)


# --- The joint distribution of the engine: the real `LLM.generate` runs on a real checkpoint, once for every path.
#
# The distribution is compared with teacher-forced forward passes of the stock transformers model (see
# sampled.py). When the norms compute in float64 (see `tiny.raise_norms`), both sides round by about 1e-15 in
# each step, and the bound of 1e-12 on the total variation leaves three digits of room. The smallest planted error
# measured 1e-4. A penalty that was rounded to float32 measured 5e-9.


BOUND = 1e-12
PROMPT = (0, 1, 2, 0, 1)
_WIDTH = 32


#: Passes become longer after the second row, so that trees that adapt have something to weigh.
_PACE = FixedPace({1: 1.0, 2: 1.0, 3: 1.02, 4: 1.1, 8: 1.6})

#: Where the engine chooses who drafts, a draft token brings little more than it costs, so that what stood decides.
_COSTS = CostTable({1: 1.0, 2: 1.02, 3: 1.05, 4: 1.1, 8: 1.6}, 0.0, {"draft_model": {1: 0.1, 8: 0.12}})


class ScriptedClock:
    """Times of steps that come again on every path: now fast and now slow, whatever the machine does."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, work: StepWork, times: StepTimes) -> StepTimes:
        self._count += 1
        factor = (1.0, 1.6, 0.7)[self._count % 3]
        levels = sum(draft.levels for draft in work.drafts)
        return StepTimes(0.08 * factor * levels, factor * (1.0 + 0.05 * work.rows), 0.02)


registry.register(Merged)
registry.register(Faulty)


class EngineProof:
    """A loaded pair of models. It computes the distribution of the engine's output under any setting."""

    def __init__(
        self,
        target: str,
        draft: str,
        *,
        speaks: bool = False,
        crossed: bool = False,
        heads: Mapping[str, str] | None = None,
        layered: str | None = None,
        layered_heads: Mapping[str, str] | None = None,
        prompt: tuple[int, ...] = PROMPT,
    ) -> None:
        self.prompt = prompt
        self._models = {DRAFT: draft, OTHER_DRAFT: draft, TARGET: target, LAYERED: layered}
        self._heads = {HEADS: dict(heads or {}), LAYERED_HEADS: dict(layered_heads or {})}
        kind = CrossVocabulary if crossed else DraftModel
        speculation = kind(model=draft)
        self.llm = LLM(target, dtype="float64", device="cpu", speculation=speculation, block_size=2, max_num_seqs=_WIDTH)
        raise_engine_norms(self.llm)
        self.llm.engine.drafting.builders.use_pace(_PACE)
        # A prompt that is not cached is computed in a pass without drafts. Every path must find the prompt cached, or the
        # first path would differ from the others.
        self.llm.generate(prompt, SamplingParams(max_tokens=1))
        self._reference = TeacherForced(target, (len(PIECES) - 1,) if speaks else ())

    def prove(self, setting: Setting, length: int = 4, *, faultless: bool = False) -> Finding:
        """Total variation between the engine's joint distribution and that of the stock model."""
        params = SamplingParams(**{"max_tokens": length, **setting.params})
        stats = self.llm.stats.finished
        before = stats.num_proposer_faults
        found = self.distribution(setting, params)
        faults = stats.num_proposer_faults - before
        missing = abs(sum(found.probs.values()) - 1.0)
        exact = self._reference.distribution(self.prompt, params, setting.language)
        distance = total_variation(found.probs, exact) + found.dropped + missing
        detail = f"{found.num_paths} paths, joint of {params.max_tokens} tokens x {params.n}"
        if faults:
            detail += f", {faults} faults"
        holds = None if not faults or not faultless or setting.fails_behind is not None else False
        return Finding(distance, BOUND, detail, holds, horizon=params.max_tokens)

    def distribution(self, setting: Setting, params: SamplingParams) -> Distribution:
        """The joint distribution of the texts of `LLM.generate`. The proposer starts each path in the same state."""
        noise, engine = ForkingNoise(), self.llm.engine
        config = SpeculationConfig.of(self.filled(setting.speculation))
        rounds = [tuple(SpeculationConfig.of(self.filled(turn)) for turn in turns) for turns in setting.turns]
        asked = [config, *(turn for turns in rounds for turn in turns)]
        learnt = self._learnt(asked, setting.namespace)
        self._cache_prompt(asked, setting.namespace)
        engine.use_noise(noise if setting.fails_behind is None else BreakingNoise(noise, setting.fails_behind))
        engine.drafting.planner = _planner(rounds, setting) if rounds else engine.drafting.as_asked

        def run(count: int) -> Iterator[Outcome]:
            for proposer, state in learnt:
                proposer.restore(state)
            engine.drafting.script(_COSTS, ScriptedClock(), holds=1)
            predicted = setting.prediction or None
            given = {"prediction": predicted, "references": setting.references}
            how: dict[str, Any] = {"speculation": config, "namespace": setting.namespace, **given}
            for output in self.llm.generate([self.prompt] * count, params, **how):
                if output.error is not None:
                    raise output.error
                yield tuple(sample.token_ids for sample in output.outputs)

        with quiet():
            # One path runs at a time in four cases: the samples of one request share a path; a proposer that remembers
            # texts, or a tree that learns, would carry that from path to path; and a fault that raises ends the drafts of
            # the whole batch.
            adapts = any(each.engine_chooses or isinstance(each.method, Composition) for each in asked)
            adapts = adapts or any(isinstance(each.tree, str) or self._judges(each) for each in asked)
            alone = params.n > 1 or bool(learnt) or adapts or _raises(config) or setting.fails_behind is not None
            return explore(run, noise, width=1 if alone else _WIDTH)

    def _judges(self, part: SpeculationConfig) -> bool:
        """Tells if chains of these settings end where a row is not worth its time, by chances that are learnt."""
        return part.method is not None and not part.tree and self.llm.engine.proposers.get(part.method).judges

    def _learnt(self, configs: Sequence[SpeculationConfig], namespace: str | None) -> list[tuple[Proposer, object]]:
        """The proposers that remember earlier texts, each with its state after it has seen some."""
        found: list[tuple[Proposer, object]] = []
        self.llm.engine.use_noise(KeyedNoise())
        self.llm.engine.drafting.planner = self.llm.engine.drafting.as_asked
        for config in _members(configs):
            proposer = None if config.method is None else self.llm.engine.proposers.get(config.method)
            if proposer is None or proposer.snapshot() is None or any(proposer is known for known, _ in found):
                continue
            for seed in range(3):
                params = SamplingParams(seed=seed, max_tokens=6)
                self.llm.generate(self.prompt, params, speculation=config.replace(rule="auto"), namespace=namespace)
            found.append((proposer, proposer.snapshot()))
        raise_engine_norms(self.llm)
        return found

    def _cache_prompt(self, configs: Sequence[SpeculationConfig], namespace: str | None) -> None:
        """Let the cached prompt of a namespace hold the layers that proposers have added, too, those beside draft models
        included."""

        def write(count: int, **how: Any) -> None:
            self.llm.generate(self.prompt, SamplingParams(temperature=0, max_tokens=count), namespace=namespace, **how)

        if namespace is not None:
            write(1)
        for config in configs:
            members = _members([config])
            if any(isinstance(part.method, Staged) for part in members):  # a draft model publishes when it drafts again
                write(12, speculation=config)
                continue
            needs = [self.llm.engine.proposers.get(part.method).requires for part in members if part.method is not None]
            if any(each is not None and each.added_layers is not None for each in needs):
                write(1, speculation=config)

    def filled(self, settings: Any) -> Any:
        """The settings with the path of a model or of heads in place of what stands for it, in nested settings too."""
        if isinstance(settings, Mapping):
            filled = {name: self.filled(value) for name, value in settings.items()}
            heads = self._heads.get(filled.get("model", ""))
            return filled if heads is None else {**filled, "model": heads[filled["method"]]}
        if isinstance(settings, list | tuple):
            return type(settings)(self.filled(value) for value in settings)
        return self._models.get(settings, settings) if isinstance(settings, str) else settings


def _planner(rounds: Sequence[tuple[SpeculationConfig, ...]], setting: Setting) -> Planner:
    """Takes the entries of `Setting.turns` as the setting says."""
    if setting.by_drafts:
        return lambda seq: rounds[seq.stats.num_draft_tokens % len(rounds)]
    return lambda seq: rounds[seq.view.round % len(rounds)]


def _raises(config: SpeculationConfig) -> bool:
    """Tells whether a proposer of these settings, or one inside it, has the planted fault that ends the drafts of a
    batch."""
    if config.method is None:
        return False
    return getattr(config.method, "fault", None) == "raises" or any(map(_raises, config.method.nested.values()))


def _members(configs: Sequence[SpeculationConfig]) -> list[SpeculationConfig]:
    """The settings, with all that the engine may choose from in place of those that leave it the choice."""
    return [part for config in configs for candidate in config.candidates for part in parts_of(candidate)]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the log free of the faults that a proof plants. The engine still counts them."""
    logger = logging.getLogger("outrider.engine.sequence")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
