"""The law of the engine: the real `LLM.generate` on a real checkpoint, every path walked.

Its joint law is compared with teacher-forced forwards of the stock transformers model (see teacher_forced.py). With the
norms raised to float64 (see `tiny.raise_norms`) both sides round at 1e-15 a step, so the bound of 1e-12 on total variation
leaves three digits; the smallest planted error measured 1e-4, and a penalty rounded to float32 shows as 5e-9.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.config import SpeculationConfig
from outrider.llm import LLM
from outrider.params import SamplingParams, StructuredOutputs
from outrider.propose import registry
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.draft import Draft, Law
from outrider.propose.draft_model import DraftModelProposer
from outrider.prove.forking import ForkingNoise, Outcome, explore, total_variation
from outrider.prove.forking import Law as JointLaw
from outrider.prove.report import Finding
from outrider.prove.teacher_forced import TeacherForced
from outrider.prove.tiny import PIECES, raise_engine_norms, raise_norms

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
        language: Every text that the structure asked for admits; then the pair must speak.
    """

    name: str
    speculation: dict[str, Any] = field(default_factory=lambda: {"proposer": "none"})
    params: dict[str, Any] = field(default_factory=dict)
    language: tuple[str, ...] = ()


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
    Setting("tree, traversal", _drafted("block", tree=(2, 1))),
    Setting("tree, recursive rejection", _drafted("token", tree=(2, 1))),
    Setting("tree, coupled", _drafted("coupled", tree=(2, 1))),
    Setting("tree, walk", _drafted("walk", tree=(2,))),
    Setting("tree, most likely tokens", _drafted("auto", tree=(2, 1), draft_sampling="greedy")),
    Setting("tree, wider than its law", _drafted("block", tree=(3, 1)), {"top_k": 2}),
    Setting("merged tree", _drafted("auto", tree=(1, 1), num_draft_tokens=4) | {"proposer": "prove_merged"}),
    Setting("merged tree, three laws", _drafted("token", tree=(2,), num_draft_tokens=4) | {"proposer": "prove_merged"}),
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
        for f in FAULTS[1:3]
    ),
    Setting("coupled, fault: raises", _drafted("coupled", options={"fault": "raises"}) | {"proposer": "prove_faulty"}),
    Setting(
        "tree, fault: nan row", _drafted("block", tree=(2,), options={"fault": "nan row"}) | {"proposer": "prove_faulty"}
    ),
)


def _every_other(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor whose answer hangs on the whole prefix."""
    pushed = scores.clone()
    pushed[:, int(ids.sum()) % scores.shape[-1]] -= 1.5
    return pushed


#: One setting of every parameter that works on logits and depends, or may depend, on the path of a row.
PARAMETERS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": -0.6},
    "logit_bias": {"logit_bias": {0: 1.0, 2: -0.7}},
    "bad_words_ids": {"bad_words_ids": ((1, 1), (2, 0), (0,))},
    "allowed_token_ids": {"allowed_token_ids": (0, 2)},
    "logits_processors": {"logits_processors": (_every_other,)},
    "min_tokens": {"stop_token_ids": (1,), "min_tokens": 2},
    "all together": {
        "repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": 0.4, "logit_bias": {1: 0.5},
        "bad_words_ids": ((2, 1),), "logits_processors": (_every_other,), "temperature": 1.4, "top_p": 0.95,
    },
}  # fmt: skip

#: One way to draft under each law.
DRAFTED_BY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block": (_drafted("block"), {}),
    "token": (_drafted("token"), {}),
    "tree": (_drafted("block", tree=(2, 1)), {"max_tokens": 2}),
    "recursive": (_drafted("token", tree=(2,)), {"max_tokens": 2}),
    "merged": (_drafted("auto", tree=(2,), num_draft_tokens=4) | {"proposer": "prove_merged"}, {"max_tokens": 2}),
    "coupled": (_drafted("auto"), {"seed": 8}),
    "lookup": ({"proposer": "ngram", "num_draft_tokens": 2, "ngram_min": 1}, {}),
}

PARAMETER_SETTINGS = tuple(
    Setting(f"{name}, {law}", speculation, {**asked, **extra})
    for name, asked in PARAMETERS.items()
    for law, (speculation, extra) in DRAFTED_BY.items()
)

_LANGUAGE = ('""', '"a"', '"aa"')
_RULE = " | ".join('"' + text.replace('"', '\\"') + '"' for text in _LANGUAGE)

#: Every way to ask for the same structure.
STRUCTURES: dict[str, StructuredOutputs] = {
    "choice": StructuredOutputs(choice=_LANGUAGE),
    "regex": StructuredOutputs(regex='""|"a"|"aa"'),
    "json_schema": StructuredOutputs(json_schema={"enum": ["", "a", "aa"]}),
    "lark": StructuredOutputs(grammar=f"start: {_RULE}"),
    "gbnf": StructuredOutputs(grammar=f"root ::= {_RULE}"),
}

STRUCTURE_SETTINGS = (
    *(
        Setting(f"{name}, block", _drafted("block"), {"structured_outputs": structure, "max_tokens": 5}, _LANGUAGE)
        for name, structure in STRUCTURES.items()
    ),
    *(
        Setting(
            f"regex, {law}",
            speculation,
            {"structured_outputs": STRUCTURES["regex"], **extra, "max_tokens": 5, "frequency_penalty": 0.5},
            _LANGUAGE,
        )
        for law, (speculation, extra) in DRAFTED_BY.items()
        if law != "block"
    ),
)


class MergedProposer(Proposer):
    """A draft model's tree with a guess below the root that follows from the length of the text alone.

    The guess may repeat a sampled sibling; the last of its nodes stands under it and is declared opaque.
    """

    def __init__(self, inner: DraftModelProposer) -> None:
        self._inner = inner
        self.runner = inner.runner
        self.finish = inner.finish  # type: ignore[method-assign]

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        drafts = self._inner.propose(requests, noise)
        return [self._merge(draft, request) for draft, request in zip(drafts, requests, strict=True)]

    def _merge(self, draft: Draft, request: ProposeRequest) -> Draft:
        token = len(request.sequence.token_ids) % 3
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


def _build_inner(context: registry.ProposerContext) -> DraftModelProposer:
    assert context.config.draft_model is not None
    runner = context.load_runner(context.config.draft_model, None)
    raise_norms(runner.loaded.model)
    return DraftModelProposer(runner, context.target.vocab_size, context.max_num_batched_tokens)


registry.register("prove_faulty", lambda context: FaultyProposer(_build_inner(context), context.config.options["fault"]))
registry.register("prove_merged", lambda context: MergedProposer(_build_inner(context)))


class EngineProof:
    """One loaded pair, and the laws of its engine under any setting.

    Args:
        target: Path of a checkpoint over three tokens.
        draft: Path of another one.
        speaks: Whether they were saved with a tokenizer and an end of text.
    """

    def __init__(self, target: str, draft: str, *, speaks: bool = False) -> None:
        self._draft = draft
        speculation = SpeculationConfig(proposer="draft_model", draft_model=draft)
        self.llm = LLM(target, dtype="float64", device="cpu", speculation=speculation, block_size=2, max_num_seqs=_WIDTH)
        raise_engine_norms(self.llm)
        # A prompt that is not yet cached is computed in a pass without drafts; every path must find it cached.
        self.llm.generate(PROMPT, SamplingParams(max_tokens=1))
        self._reference = TeacherForced(target, (len(PIECES) - 1,) if speaks else ())

    def prove(self, setting: Setting, length: int = 4) -> Finding:
        """Total variation between the engine's joint law and that of the stock model."""
        params = SamplingParams(**{"max_tokens": length, **setting.params})
        law = self.law(setting, params)
        missing = abs(sum(law.probs.values()) - 1.0)
        distance = total_variation(law.probs, self._reference.law(PROMPT, params, setting.language)) + law.dropped + missing
        return Finding(distance, BOUND, f"{law.num_paths} paths, joint of {params.max_tokens} tokens x {params.n}")

    def law(self, setting: Setting, params: SamplingParams) -> JointLaw:
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


@contextmanager
def quiet() -> Iterator[None]:
    """Planted faults are counted by the engine and need not fill the log."""
    logger = logging.getLogger("outrider.engine.drafting")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
