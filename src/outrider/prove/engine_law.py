"""The law of the engine: the real `LLM.generate` on a real checkpoint, every path walked.

Its joint law is compared with teacher-forced forwards of the stock transformers model, whose sampling parameters are
applied here by code of its own. With the norms raised to float64 (see `tiny.raise_norms`) both sides round at 1e-15 a step,
so the bound of 1e-12 on total variation leaves three digits; the smallest planted error measured 1e-4.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from outrider.config import SpeculationConfig
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.propose import registry
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.draft import Draft
from outrider.propose.draft_model import DraftModelProposer
from outrider.prove.forking import ForkingNoise, Law, Outcome, explore, total_variation
from outrider.prove.report import Finding
from outrider.prove.tiny import raise_engine_norms, raise_norms

BOUND = 1e-12
PROMPT = (0, 1, 2, 0, 1)
_WIDTH = 32


@dataclass(frozen=True)
class Setting:
    """One way to ask the engine for text.

    Attributes:
        name: Short.
        speculation: Fields of SpeculationConfig; the draft model's path is filled in.
        params: Fields of SamplingParams.
    """

    name: str
    speculation: dict[str, Any] = field(default_factory=lambda: {"proposer": "none"})
    params: dict[str, Any] = field(default_factory=dict)


def _drafted(rule: str, **more: Any) -> dict[str, Any]:
    return {"proposer": "draft_model", "num_draft_tokens": 2, "rule": rule, **more}


#: The fault is a function of the committed length alone, never of what was drawn.
FAULTS = ("raises", "nan row", "truncated", "token outside", "too long")

QUICK_SETTINGS = (
    Setting("token", _drafted("token")),
    Setting("block", _drafted("block")),
    Setting("coupled", _drafted("coupled")),
)

SETTINGS = (
    Setting("plain"),
    *QUICK_SETTINGS,
    Setting("walk", _drafted("walk")),
    Setting("auto, seeded", _drafted("auto"), {"seed": 5}),
    Setting("greedy drafts", _drafted("auto", draft_sampling="greedy")),
    Setting("ngram", {"proposer": "ngram", "num_draft_tokens": 2, "ngram_min": 1}),
    Setting("ngram, seeded", {"proposer": "ngram", "num_draft_tokens": 2, "ngram_min": 1}, {"seed": 6}),
    Setting("block, temperature", _drafted("block"), {"temperature": 0.6}),
    Setting("block, top_k", _drafted("block"), {"top_k": 2}),
    Setting("token, top_p", _drafted("token"), {"top_p": 0.8, "temperature": 1.5}),
    Setting("block, min_p", _drafted("block"), {"min_p": 0.3}),
    Setting("coupled, all filters", _drafted("coupled"), {"top_k": 2, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3}),
    Setting("block, stop tokens", _drafted("block"), {"stop_token_ids": (2,)}),
    Setting("token, min_tokens", _drafted("token"), {"stop_token_ids": (1,), "min_tokens": 2}),
    Setting("block, two samples", _drafted("block", num_draft_tokens=1), {"n": 2, "max_tokens": 2}),
    Setting("auto, seeded, two samples", _drafted("auto", num_draft_tokens=1), {"n": 2, "max_tokens": 2, "seed": 3}),
    *(
        Setting(f"block, fault: {f}", _drafted("block", options={"fault": f}) | {"proposer": "prove_faulty"})
        for f in FAULTS
    ),
    *(
        Setting(f"token, fault: {f}", _drafted("token", options={"fault": f}) | {"proposer": "prove_faulty"})
        for f in FAULTS[:2]
    ),
    Setting("coupled, fault: raises", _drafted("coupled", options={"fault": "raises"}) | {"proposer": "prove_faulty"}),
)


class FaultyProposer(Proposer):
    """A draft model whose answers are spoilt on every other length of the text."""

    def __init__(self, inner: DraftModelProposer, fault: str) -> None:
        self._inner, self._fault = inner, fault
        self.runner = inner.runner
        self.finish = inner.finish  # type: ignore[method-assign]

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafts = self._inner.propose(requests, noise)
        spoilt = [len(r.sequence.token_ids) % 2 == 1 for r in requests]
        if self._fault == "raises":
            if any(spoilt):
                raise RuntimeError("planted fault")
            return drafts
        return [self._spoil(d) if bad and len(d) else d for d, bad in zip(drafts, spoilt, strict=True)]

    def _spoil(self, draft: Draft) -> Draft:
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


def _build_faulty(context: registry.ProposerContext) -> Proposer:
    assert context.config.draft_model is not None
    runner = context.load_runner(context.config.draft_model, None)
    raise_norms(runner.loaded.model)
    inner = DraftModelProposer(runner, context.target.vocab_size, context.max_num_batched_tokens)
    return FaultyProposer(inner, context.config.options["fault"])


registry.register("prove_faulty", _build_faulty)


class EngineProof:
    """One loaded pair, and the laws of its engine under any setting.

    Args:
        target: Path of a checkpoint over three tokens.
        draft: Path of another one.
    """

    def __init__(self, target: str, draft: str) -> None:
        self._draft = draft
        speculation = SpeculationConfig(proposer="draft_model", draft_model=draft)
        self.llm = LLM(target, dtype="float64", device="cpu", speculation=speculation, block_size=2, max_num_seqs=_WIDTH)
        raise_engine_norms(self.llm)
        # A prompt that is not yet cached is computed in a pass without drafts; every path must find it cached.
        self.llm.generate(PROMPT, SamplingParams(max_tokens=1))
        self._reference = TeacherForced(target)

    def prove(self, setting: Setting, length: int = 4) -> Finding:
        """Total variation between the engine's joint law and that of the stock model."""
        params = SamplingParams(**{"max_tokens": length, **setting.params})
        law = self.law(setting, params)
        missing = abs(sum(law.probs.values()) - 1.0)
        distance = total_variation(law.probs, self._reference.law(PROMPT, params)) + law.dropped + missing
        return Finding(distance, BOUND, f"{law.num_paths} paths, joint of {params.max_tokens} tokens x {params.n}")

    def law(self, setting: Setting, params: SamplingParams) -> Law:
        """The joint law of what `LLM.generate` returns."""
        noise = ForkingNoise()
        self.llm.engine.use_noise(noise)
        speculation = dict(setting.speculation)
        if speculation["proposer"] not in ("ngram", "none"):
            speculation["draft_model"] = self._draft
        config = SpeculationConfig(**speculation)

        def run(count: int) -> Iterator[Outcome]:
            for output in self.llm.generate([PROMPT] * count, params, speculation=config):
                if output.error is not None:
                    raise output.error
                yield tuple(sample.token_ids for sample in output.outputs)

        with quiet():
            # Samples of one request share a path, so they run alone; a fault that raises takes its whole batch with it.
            alone = params.n > 1 or speculation.get("options") == {"fault": "raises"}
            return explore(run, noise, width=1 if alone else _WIDTH)


class TeacherForced:
    """The stock transformers model, one forward a context, and sampling parameters applied in plain Python."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        raise_norms(self._model)
        self._logits: dict[tuple[int, ...], list[float]] = {}

    def law(self, prompt: tuple[int, ...], params: SamplingParams) -> dict[Outcome, float]:
        """Joint law of the samples that `params` asks for; independent, each up to max_tokens or a stop token."""
        one: dict[tuple[int, ...], float] = {}
        alive: dict[tuple[int, ...], float] = {(): 1.0}
        while alive:
            context, weight = alive.popitem()
            for token, p in enumerate(process(self._row(prompt + context), params, len(context))):
                text = (*context, token)
                ended = len(text) >= params.max_tokens or token in params.stop_token_ids
                if p > 0.0:
                    (one if ended else alive)[text] = weight * p
        joint: dict[Outcome, float] = {}
        for texts in product(one, repeat=params.n):
            weight = 1.0
            for text in texts:
                weight *= one[text]
            joint[texts] = weight
        return joint

    def _row(self, tokens: tuple[int, ...]) -> list[float]:
        if tokens not in self._logits:
            with torch.inference_mode():
                self._logits[tokens] = self._model(torch.tensor([tokens])).logits[0, -1].tolist()
        return self._logits[tokens]


def process(logits: Sequence[float], params: SamplingParams, num_written: int) -> list[float]:
    """One row's law under temperature, top_k, top_p, min_p and min_tokens, by the parameters' definitions."""
    banned = params.stop_token_ids if num_written < params.min_tokens else ()
    alive = {t: x for t, x in enumerate(logits) if t not in banned}
    if params.greedy:
        best = max(alive, key=lambda t: (alive[t], -t))
        return [float(t == best) for t in range(len(logits))]
    top = max(alive.values())
    odds = {t: float(torch.tensor((x - top) / params.temperature, dtype=torch.float64).exp()) for t, x in alive.items()}
    if params.top_k > 0:
        edge = sorted(odds.values(), reverse=True)[: params.top_k][-1]
        odds = {t: x for t, x in odds.items() if x >= edge}
    if params.top_p < 1.0:
        total, mass, kept = sum(odds.values()), 0.0, {}
        for t in sorted(odds, key=lambda t: (-odds[t], t)):
            if mass / total < params.top_p:
                kept[t] = odds[t]
            mass += odds[t]
        odds = kept
    odds = {t: x for t, x in odds.items() if x >= params.min_p * max(odds.values())}
    total = sum(odds.values())
    return [odds.get(t, 0.0) / total for t in range(len(logits))]


@contextmanager
def quiet() -> Iterator[None]:
    """Planted faults are counted by the engine and need not fill the log."""
    logger = logging.getLogger("outrider.engine.drafting")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
