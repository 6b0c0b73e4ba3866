"""Runs an examination: files first, then facts of the loaded models, then measured texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from outrider.building import num_prediction_layers
from outrider.config import ModelConfig
from outrider.errors import ModelError, OutriderError, ProposerError
from outrider.govern.costs import Curve
from outrider.heads.assistant import check_target, is_assistant, read_assistant_config
from outrider.heads.formats.published import method_at, read_head_config
from outrider.kernels.library import kernels_problem
from outrider.lab.doctor.measure import Writing, pass_seconds, shifts, write
from outrider.lab.doctor.verdict import Acceptance, Finding, Level, Situation, Terms, judge_acceptance, judge_speed
from outrider.lab.measure.agreement import Rounding, measure_rounded_rows, measure_rounding
from outrider.lab.measure.machine import LoadWatch
from outrider.lab.measure.writing import Contestant, EncodedTask, believed_rounds, interleave, mean_length
from outrider.lab.train.trainer import by_position
from outrider.llm import LLM
from outrider.loading import hf_modules
from outrider.loading.configuration import read_context
from outrider.loading.fit import available_bytes
from outrider.loading.loaded_model import LoadedModel
from outrider.loading.sources import check_sources
from outrider.loading.templates import TemplateLimits, render_conversation, renders_by_template
from outrider.loading.tokenizers import given_tokenizer
from outrider.model import memory
from outrider.model.memory import device_name
from outrider.model.runner import ModelRunner
from outrider.model.vocabulary import ModelVocabulary
from outrider.propose.bridge import VocabularyReport, report
from outrider.propose.compositions import parts_of
from outrider.propose.cross_vocabulary import CrossVocabulary
from outrider.propose.draft_model import DraftModel, DraftModelProposer
from outrider.propose.settings import PLAIN, SpeculationConfig

# --- Facts about a loaded target: its kernels, its memory, and how many requests fit.


#: Lengths of requests, in tokens, for which it is said how many fit.
LENGTHS = (256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class ModelFacts:
    """A model that is loaded."""

    name: str  # path or hub id
    dtype: str  # of its weights
    arithmetic: str  # what it computes in, in words
    device: str  # where it lies; of a GPU its name, too
    backend: str  # which way its passes are driven
    # The instruction set of our kernels in use, or "triton" on a GPU; None where stock operators compute.
    kernels: str | None
    # Whether greedy and seeded requests may be sped up under `auto`: what is written for a row does not depend on the other
    # rows of its pass.
    invariant: bool
    weight_bytes: int | None  # that a pass reads; None for a mixture of experts, whose passes read a part
    context: int  # longest text, in tokens
    kv_tokens: int  # tokens of keys and values that there is room for
    free_bytes: int | None  # memory that is free beside all this; None where the system does not say
    requests: dict[int, int]  # how many requests of each length fit into the KV memory at a time
    text_bytes: int = 0  # memory that the running states of a text take at most; 0 for a model without them
    prediction_layers: int = 0  # of its own files that predict several tokens, with which `mtp` drafts
    beside: tuple[str, ...] = ()  # paths beside its own where something lies that was made to draft for it
    kernels_problem: str | None = None  # what is wrong with the compiled kernels, so that they are not used, and the remedy


def model_facts(runner: ModelRunner) -> ModelFacts:
    """The facts of the model of a runner."""
    loaded, blocks, device = runner.loaded, runner.blocks, runner.loaded.device
    context = loaded.max_model_len
    lengths = sorted({*(n for n in LENGTHS if n < context), context})
    return ModelFacts(
        name=loaded.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        arithmetic=loaded.arithmetic,
        device=f"{device_name(device)} ({device})" if device.type == "cuda" else str(device),
        backend=runner.backend.name,
        kernels=runner.backend.instruction_set(loaded.model),
        invariant=runner.invariant,
        weight_bytes=runner.backend.weight_bytes(loaded.model) or memory.weight_bytes(loaded.model),
        context=context,
        kv_tokens=blocks.num_blocks * blocks.block_size,
        free_bytes=available_bytes(loaded.device),
        requests={length: blocks.num_blocks // blocks.blocks_for(length) for length in lengths},
        text_bytes=runner.text_bytes,
        prediction_layers=num_prediction_layers(loaded),
        beside=tuple(drafts_beside(loaded)),
        kernels_problem=kernels_problem(),
    )


def drafts_beside(loaded: LoadedModel) -> list[str]:
    """Paths in the folder around that of a model where an assistant of it lies, or a published head that names it."""
    path, found = Path(loaded.name), list[str]()
    if not path.exists():
        return found  # it was named by a hub id, or given loaded
    config = hf_modules.decoder_config(loaded.model.config)
    for other in sorted(path.resolve().parent.iterdir()):
        if other == path.resolve():
            continue
        try:
            if is_assistant(str(other)):
                check_target(read_assistant_config(str(other)), loaded.name, config, loaded.vocab_size)
                fits = True
            else:
                head = read_head_config(str(other)) if method_at(str(other)) is not None else None
                fits = head is not None and Path(head.verifier).name == path.resolve().name
        except OutriderError:
            continue  # something else lies there, an assistant of another target, or what cannot be read
        found += [str(other)] if fits else []
    return found


# --- Runs an examination: files first, then the loaded models, then measured texts.


#: Texts that are written greedily to see where the first tokens of drafts stand.
_SHIFT_TEXTS, _SHIFT_TOKENS = 2, 24
_WARM_UP_TOKENS = 6


@dataclass(frozen=True)
class MethodReport:
    """Holds what was found of one method."""

    name: str  # of the method
    num_draft_tokens: int  # most draft tokens of a text in a step
    findings: tuple[Finding, ...]  # in the order in which they were made
    draft: ModelFacts | None = None  # the facts of its own model; None where it has none, or could not be loaded
    draft_pass_seconds: dict[int, float] = field(default_factory=dict)  # by rows, what a pass of its own model takes
    acceptance: Acceptance | None = None  # what became of its drafts; None where it could not draft
    terms: Terms | None = None  # what a step takes and brings; None as before
    # The speedup over plain decoding, a median over rounds; None as before, and where it cannot be believed.
    measured: float | None = None
    rounds: tuple[float, ...] = ()  # the speedup of each round that may be true

    @property
    def level(self) -> Level:
        """The gravest of its findings."""
        found = {finding.level for finding in self.findings}
        return next((level for level in (Level.WRONG, Level.USELESS, Level.NOTE) if level in found), Level.OK)


@dataclass(frozen=True)
class Report:
    """A whole examination."""

    target: ModelFacts  # the facts of the target
    pass_seconds: dict[int, float]  # by rows, what a pass of the target takes
    plain_tokens_per_second: float  # of plain decoding, all texts together
    batch: int  # texts at a time
    methods: tuple[MethodReport, ...]  # what was found of each method
    load: str  # of the machine meanwhile, as a sentence
    doubts: tuple[str, ...] = ()  # what cannot be believed, since other work disturbed it
    passes_doubted: bool = False  # whether the times of the target's passes are among it. Then no ratios are told.
    target_is_rounded: bool = False  # whether its weights were rounded when it was loaded, or its rows are
    # What this costs and gains. None where it is not, or the model as it was cannot be loaded beside it.
    rounding: Rounding | None = None
    # What rows of 8 bits would cost and gain. None where they are rounded or cannot be, where nobody asked, or where the
    # model cannot be loaded once more.
    rounded_rows: Rounding | None = None

    @property
    def healthy(self) -> bool:
        """Tells whether nothing is wrong or disturbed, and some method gains where any was asked for."""
        levels = {found.level for found in self.methods}
        return not self.doubts and Level.WRONG not in levels and (not levels or bool(levels & {Level.OK, Level.NOTE}))

    def as_json(self) -> dict[str, Any]:
        """Plain data: everything that was found, and the ratios that are read most."""
        found = asdict(self)
        for entry, method in zip(found["methods"], self.methods, strict=True):
            entry["level"] = str(method.level)
            entry["predicted"] = None if method.terms is None else method.terms.speedup
        ratios = None if self.passes_doubted else cost_ratios(self.pass_seconds)
        return {**found, "row_cost_ratio": ratios, "healthy": self.healthy}


def cost_ratios(pass_seconds: dict[int, float]) -> dict[int, float]:
    """C(n) = T(n) / T(1) by rows."""
    return {rows: seconds / pass_seconds[1] for rows, seconds in pass_seconds.items()}


@dataclass(frozen=True)
class Sample:
    """Holds what is written in an examination."""

    rounds: Sequence[Sequence[EncodedTask]]  # the texts of each round, one batch each
    text: str  # their prompts, to compare vocabularies on
    temperature: float  # 0 is greedy

    @property
    def batch(self) -> int:
        return len(self.rounds[0])

    @property
    def context(self) -> int:
        """The mean length of the texts while they are written."""
        return int(mean_length([task for tasks in self.rounds for task in tasks]))


class Examination:
    """Examines the methods with which a target may be sped up."""

    def __init__(
        self,
        llm: LLM,
        asked: SpeculationConfig,
        sample: Sample,
        progress: Callable[[str], None] = lambda _: None,
        *,
        rounded: bool = False,
        quantization: str | None = None,
        tries_rows: bool = False,
    ) -> None:
        self._llm = llm
        self._rounded = rounded
        self._quantization, self._tries_rows = quantization, tries_rows
        self._asked = asked
        self._sample = sample
        self._progress = progress
        self._doubts: list[str] = []

    def run(self) -> Report:
        """Measure everything."""
        runner, watch = self._llm.engine.runner, LoadWatch()
        self._progress("passes of the target")
        passes = self._passes(runner, "the target")
        passes_doubted = bool(self._doubts)
        self._progress("plain decoding")
        self._round(PLAIN, self._short())
        speeds = [self._round(PLAIN, tasks).tokens_per_second for tasks in self._sample.rounds]
        methods = tuple(self._method(config, passes) for config in members(self._asked))
        said = (str(watch.load()), tuple(self._doubts), passes_doubted)
        cost = self._loaded_beside("what rounding costs", self._rounded, partial(measure_rounding, self._llm))
        rows = partial(measure_rounded_rows, self._llm, self._quantization)
        rounding = (self._rounded, cost, self._loaded_beside("what rows of 8 bits would gain", self._tries_rows, rows))
        return Report(model_facts(runner), passes, median(speeds), self._sample.batch, methods, *said, *rounding)

    def _loaded_beside(
        self, what: str, wanted: bool, measure: Callable[[Sequence[Sequence[int]]], Rounding]
    ) -> Rounding | None:
        """Returns what is measured on the prompts; None where nobody wants it, or there is no room for another model."""
        if not wanted:
            return None
        self._progress(what)
        try:
            return measure([task.prompt_ids for task in self._texts(len(self._sample.rounds))])
        except ModelError:
            return None

    def _passes(self, runner: ModelRunner, whose: str) -> dict[int, float]:
        """The times of passes. Where they cannot be believed, this is noted."""
        found, doubt = pass_seconds(runner, self._sample.context)
        if doubt is not None:
            self._doubts.append(f"The times of passes of {whose} were disturbed: {doubt}.")
        return found

    def _method(self, config: SpeculationConfig, passes: dict[int, float]) -> MethodReport:
        name, length = config.name, config.num_draft_tokens
        self._progress(name)
        findings: list[Finding] = []
        if isinstance(config.method, DraftModel | CrossVocabulary) and config.method.model is not None:
            target = self._llm.engine.runner.loaded.name
            pairing = examine_pairing(target, config.method.model, name, self._sample.text)
            findings += pairing.findings
            if not pairing.fits:
                return MethodReport(name, length, tuple(findings))
        assert config.method is not None
        try:
            proposer = self._llm.proposers.get(config.method)
        except (ModelError, ProposerError) as error:
            findings.append(Finding("method", Level.WRONG, f"It cannot draft: {error}"))
            return MethodReport(name, length, tuple(findings))
        own = proposer.runner if isinstance(proposer, DraftModelProposer) else None
        return self._measured(config, findings, own, passes)

    def _measured(
        self, config: SpeculationConfig, findings: list[Finding], own: ModelRunner | None, passes: dict[int, float]
    ) -> MethodReport:
        """Returns what a method that can draft is worth."""
        own_passes = {} if own is None else self._passes(own, "the draft model")
        moved = shifts(self._llm.engine, [t.shortened(_SHIFT_TOKENS) for t in self._texts(_SHIFT_TEXTS)], config)
        self._round(config, self._short())
        pairs = self._pairs(config)
        plain, drafted = _total([before for before, _ in pairs]), _total([after for _, after in pairs])
        ratios = self._believed(config.name, pairs)
        stats = drafted.stats
        acceptance = Acceptance(stats.num_drafts, stats.mean_acceptance_length, by_position(stats), moved)
        terms = _terms(plain, drafted, passes, own_passes)
        judged = judge_acceptance(config.name, acceptance)
        situation = self._situation(config, drafted, passes, own, own_passes)
        measured = median(ratios) if ratios else None
        speed = judge_speed(ratios, terms, situation, acceptance=judged.level)
        facts = None if own is None else model_facts(own)
        found = (*findings, judged, speed)
        return MethodReport(
            config.name, config.num_draft_tokens, found, facts, own_passes, acceptance, terms, measured, ratios
        )

    def _pairs(self, config: SpeculationConfig) -> list[tuple[Writing, Writing]]:
        """Texts of each round, written plainly and with drafts in turns."""
        ways = {"plain": PLAIN, "drafts": config}
        contestants = [Contestant(name, partial(self._round, way), plain=way is PLAIN) for name, way in ways.items()]
        return list(zip(*interleave(self._sample.rounds, contestants).values(), strict=True))

    def _round(self, config: SpeculationConfig, tasks: Sequence[EncodedTask]) -> Writing:
        return write(self._llm.engine, tasks, config, self._sample.temperature)

    def _believed(self, name: str, pairs: Sequence[tuple[Writing, Writing]]) -> tuple[float, ...]:
        """The speedups that may be true; none where most may not, which is noted."""
        good = believed_rounds([after for _, after in pairs], [before for before, _ in pairs])
        if not good:
            self._doubts.append(f"{name} was disturbed: it seemed to gain more than its tokens a pass, which cannot be.")
        return tuple(after.tokens_per_second / before.tokens_per_second for after, before in good)

    def _short(self) -> list[EncodedTask]:
        return [task.shortened(_WARM_UP_TOKENS) for task in self._sample.rounds[0]]

    def _texts(self, count: int) -> list[EncodedTask]:
        return [task for tasks in self._sample.rounds for task in tasks][:count]

    def _situation(
        self,
        config: SpeculationConfig,
        drafted: Writing,
        passes: dict[int, float],
        own: ModelRunner | None,
        own_passes: dict[int, float],
    ) -> Situation:
        target = model_facts(self._llm.engine.runner)
        share = None
        if own is not None and target.weight_bytes:
            share = (model_facts(own).weight_bytes or 0) / target.weight_bytes
        return Situation(
            method=config.name,
            batch=self._sample.batch,
            rows=_rows(drafted) / max(drafted.texts_per_step, 1.0),
            kernels=target.kernels is not None,
            weight_share=share,
            pass_ratio=own_passes[1] / passes[1] if own_passes else None,
        )


def members(asked: SpeculationConfig) -> Iterator[SpeculationConfig]:
    """The methods to examine, each once, one after the other; those of a composition each by itself."""
    found: list[SpeculationConfig] = []
    for part in (part for config in asked.candidates for part in parts_of(config)):
        if part.method is not None and part not in found:
            found.append(part)
    yield from found


def _total(writings: Sequence[Writing]) -> Writing:
    found = Writing()
    for each in writings:
        found.add(each)
    return found


def _rows(drafted: Writing) -> float:
    """Mean rows of a pass: one a text, and the draft tokens."""
    drafts = drafted.stats.num_draft_tokens / max(drafted.stats.num_target_passes, 1)
    return drafted.texts_per_step * (1.0 + drafts)


def _terms(plain: Writing, drafted: Writing, passes: dict[int, float], own_passes: dict[int, float]) -> Terms:
    """Returns what a step with drafts takes, from calibrated passes; times that no calibration tells are those of the
    steps."""
    curve = Curve(passes)
    before, after = curve.base(plain.texts_per_step), curve.base(_rows(drafted))
    propose = drafted.step_seconds("propose")
    if own_passes:
        positions = drafted.stats.drafted_per_position
        levels = sum(positions) / max(drafted.stats.num_target_passes, 1)
        propose = levels * Curve(own_passes).base(drafted.texts_per_step)
    unit = before + plain.host_seconds
    return Terms(
        tokens=drafted.tokens_per_pass,
        verify=after / unit,
        propose=propose / unit,
        host=drafted.host_seconds / unit,
        plain_verify=before / unit,
    )


# --- Checks whether a draft model fits a target, from tokenizers and configurations, before weights are read.


_CONVERSATION = [{"role": "user", "content": "How long is a day?"}, {"role": "assistant", "content": "24 hours."}]


@dataclass(frozen=True)
class Pairing:
    """A target and a draft model before they are loaded."""

    draft: str  # the draft model
    findings: tuple[Finding, ...]  # what was found
    fits: bool  # whether the method can draft with it at all


def examine_pairing(target: str, draft: str, method: str, sample: str) -> Pairing:
    """Compare vocabularies, chat templates and contexts. The method "draft_model" needs the same tokens, and
    "cross_vocabulary" does not."""
    check_sources(draft_model=draft)
    ours = given_tokenizer(target)
    try:
        theirs, context = given_tokenizer(draft), read_context(ModelConfig(model=draft))
        compared = report(ModelVocabulary(ours, target), ModelVocabulary(theirs, draft), sample)
    except OutriderError as error:
        return Pairing(draft, (Finding("vocabulary", Level.WRONG, f"It cannot be compared: {error}"),), fits=False)
    vocabulary = _vocabulary(compared, method)
    found = (vocabulary, _template(ours, theirs), _context(read_context(ModelConfig(model=target)), context))
    return Pairing(draft, found, fits=vocabulary.level is not Level.WRONG)


def _vocabulary(compared: VocabularyReport, method: str) -> Finding:
    if compared.same_ids:
        text = f"The draft model has the same {compared.target_size:,} tokens as the target."
        return Finding("vocabulary", Level.OK, text)
    shared = (
        f"{compared.num_shared:,} of the target's {compared.target_size:,} tokens are shared, and they write "
        f"{compared.share_of_text:.0%} of the sample."
    )
    if compared.match is None:
        remedy = "Use a draft model of the target's family."
        return Finding("vocabulary", Level.WRONG, f"The draft model speaks other tokens: {shared}", remedy)
    settings = json.dumps({"method": "cross_vocabulary", "model": compared.draft, "match": compared.match})
    if method == "draft_model":
        text = f"The draft model speaks other tokens, so that it cannot draft as it is: {shared}"
        return Finding("vocabulary", Level.WRONG, text, f"Use --method '{settings}', or a draft model of the family.")
    return Finding("vocabulary", Level.OK, shared, f"The setting that suits the pair is --method '{settings}'.")


def _template(target: Any, draft: Any) -> Finding:
    ours, theirs = (_rendered(tokenizer) for tokenizer in (target, draft))
    if ours is None and theirs is None:
        return Finding("chat template", Level.OK, "Neither model has one: both complete texts.")
    if ours == theirs:
        return Finding("chat template", Level.OK, "Both models write a conversation in the same way.")
    if ours is None or theirs is None:
        who = "draft model" if ours is None else "target"
        text = f"Only the {who} has one, so the two were trained on texts of different form."
    else:
        text = "The two models write a conversation in different ways, so they were trained on texts of different form."
    return Finding("chat template", Level.NOTE, text, "Expect fewer accepted tokens in chats, and measure on chats.")


def _rendered(tokenizer: Any) -> str | None:
    """A conversation in the form of a tokenizer's chat template; None where it has none or cannot write this one."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    try:
        if renders_by_template(tokenizer):
            return render_conversation(tokenizer, _CONVERSATION, None, {}, TemplateLimits())
        return str(tokenizer.apply_chat_template(_CONVERSATION, tokenize=False))
    except Exception:  # whatever the template itself raises
        return None


def _context(target: int, draft: int) -> Finding:
    if draft >= target:
        text = f"The draft model reads {draft:,} tokens, and the target {target:,}."
        return Finding("context", Level.OK, text)
    text = f"The draft model reads {draft:,} tokens and the target {target:,}: behind {draft:,} tokens nobody drafts."
    return Finding("context", Level.NOTE, text, "For longer texts use a draft model with a longer context.")
