"""transformers under proof: `generate` with an assistant, prompt lookup or early exit, against `generate` alone.

The law of a call is exact: its only chance is torch's generator, whose every branch is walked (`torch_forking`). It is
compared with the exact law of the same call without its speculation, and that one with teacher-forced forwards.
transformers turns logits into float32, so equal laws agree to about 1e-7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.params import SamplingParams
from outrider.prove.engine_law import PROMPT, TeacherForced
from outrider.prove.engines.torch_forking import explore_torch
from outrider.prove.forking import Law, Outcome, total_variation
from outrider.prove.report import Finding
from outrider.prove.runner import Proof
from outrider.prove.tiny import raise_norms, save_tiny_llama

#: Rounding to float32 moves a law of three tokens by about 1e-7; the smallest planted error moves it by 1e-3.
BOUND = 1e-5

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
#: Parameters whose law `TeacherForced` computes by code of its own.
_TEACHABLE = {"temperature", "top_k", "top_p", "min_p"}


@dataclass(frozen=True)
class Call:
    """One way to call `generate`.

    Attributes:
        speculation: Arguments that turn speculation on; a model is given by its name, "draft" or "target".
        assistant: Fields of the assistant's `generation_config`, which is where transformers looks for them.
        params: Arguments with and without speculation.
        num_layers: Of the target.
        lossy_by_design: Its documentation says so: reported, not judged.
    """

    speculation: Mapping[str, Any]
    assistant: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    num_layers: int = 1
    lossy_by_design: bool = False

    @property
    def name(self) -> str:
        """The arguments; those of the assistant's configuration in brackets."""
        arguments = [f"{key}={value}" for key, value in {**self.speculation, **self.params}.items()]
        inner = ", ".join(f"{key}={value}" for key, value in self.assistant.items())
        return ", ".join(arguments) + (f" [{inner}]" if inner else "")

    @property
    def greedy(self) -> Call:
        """Without what matters only to sampling."""
        kept = {key: value for key, value in self.params.items() if key not in _SAMPLING}
        return Call(self.speculation, self.assistant, kept, self.num_layers, self.lossy_by_design)


class StopAfter:
    """A stopping criterion of the caller's: the text ends once it holds the token.

    Args:
        token: Counted behind the prompt only.
    """

    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, input_ids: Tensor, scores: Any, **ignored: Any) -> Tensor:
        return (input_ids[:, len(PROMPT) :] == self._token).any(-1)

    def __repr__(self) -> str:
        return f"StopAfter({self._token})"


def _assistant(num_tokens: int, **more: Any) -> dict[str, Any]:
    settled = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    return {"num_assistant_tokens": num_tokens, **settled, **more}


_DRAFT = {"assistant_model": "draft"}
_TWO = _assistant(2)
_LOOKUP = {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1}

QUICK_CALLS = (Call(_DRAFT, _TWO), Call(_DRAFT, _TWO, {"top_k": 2}), Call(_LOOKUP))

CALLS = (
    *QUICK_CALLS,
    Call(_DRAFT, _assistant(1)),
    Call(_DRAFT, _assistant(5)),
    Call(_DRAFT, _assistant(2, assistant_confidence_threshold=0.4)),
    Call(_DRAFT, _assistant(2, assistant_confidence_threshold=0.9)),
    Call(_DRAFT, _assistant(2, num_assistant_tokens_schedule="heuristic")),
    Call(_DRAFT, _TWO, {"temperature": 0.6}),
    Call(_DRAFT, _TWO, {"top_p": 0.8, "temperature": 1.5}),
    Call(_DRAFT, _TWO, {"min_p": 0.3}),
    Call(_DRAFT, _TWO, {"top_k": 2, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3}),
    Call(_DRAFT, _TWO, {"typical_p": 0.6}),
    Call(_DRAFT, _TWO, {"repetition_penalty": 1.5}),
    Call(_DRAFT, _TWO, {"no_repeat_ngram_size": 2}),
    Call(_DRAFT, _TWO, {"sequence_bias": (((0, 1), -2.0),)}),
    Call(_DRAFT, _TWO, {"eos_token_id": 2}),
    Call(_DRAFT, _TWO, {"eos_token_id": 2, "min_new_tokens": 2}),
    Call(_DRAFT, _TWO, {"stopping_criteria": [StopAfter(2)]}),
    Call({"assistant_model": "target"}, _TWO),
    Call(_LOOKUP, params={"temperature": 0.6, "top_k": 2}),
    Call(_LOOKUP, params={"repetition_penalty": 1.5}),
    Call(_LOOKUP, params={"stopping_criteria": [StopAfter(2)]}),
    Call({"assistant_early_exit": 1}, _TWO, num_layers=2),
    Call({"assistant_early_exit": 1}, _TWO, {"top_k": 2, "temperature": 0.6}, num_layers=2),
    Call({**_DRAFT, "assistant_ensemble_weight": 0.5}, _TWO, lossy_by_design=True),
)


class AssistedGeneration:
    """The installed transformers.

    Args:
        folder: Where the tiny models are written.
        calls: What is asked of it; None takes `CALLS`, or `QUICK_CALLS`.
    """

    def __init__(self, folder: Path, calls: Sequence[Call] | None = None) -> None:
        import transformers

        self.title = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._folder, self._calls = folder, calls
        self._models: dict[tuple[str, int], Any] = {}
        self._plain: dict[str, Law] = {}

    def proofs(self, *, quick: bool) -> Sequence[Proof]:
        """See OtherEngine."""
        calls = self._calls if self._calls is not None else QUICK_CALLS if quick else CALLS
        return [*self._law_proofs(calls, 2 if quick else 3), *self._text_proofs(calls, 12 if quick else 24)]

    def _law_proofs(self, calls: Sequence[Call], length: int) -> Iterator[Proof]:
        for params in _distinct(call.params for call in calls):
            if params.keys() <= _TEACHABLE:
                yield f"law, plain: {Call({}, params=params).name}", partial(self.prove_plain, params, length)
        for call in calls:
            yield f"law: {call.name}", partial(self.prove_law, call, length)

    def _text_proofs(self, calls: Sequence[Call], length: int) -> Iterator[Proof]:
        for call in {call.greedy.name: call.greedy for call in calls}.values():
            yield f"greedy text: {call.name}", partial(self.prove_greedy, call, length)
        for call in {str(call.speculation): call for call in calls if not call.params}.values():
            yield f"seeded text: {call.name}", partial(self.compare_seeded, call, length)

    # -- laws ----------------------------------------------------------------------------------------------------------

    def prove_plain(self, params: Mapping[str, Any], length: int) -> Finding:
        """Total variation between the law of `generate` alone and that of teacher-forced forwards."""
        law = self._plain_law(Call({}, params=params), length)
        taught = TeacherForced(str(self._saved("target", 1))).law(PROMPT, SamplingParams(max_tokens=length, **params))
        return _distance(law, {text: mass for (text,), mass in taught.items()}, length)

    def prove_law(self, call: Call, length: int) -> Finding:
        """Total variation between the law of `generate` with and without speculation."""
        found = _distance(self.law(call, length), self._plain_law(call, length).probs, length)
        if not call.lossy_by_design:
            return found
        return Finding(found.measured, found.bound, f"{found.detail}; lossy by its documentation", informs=True)

    def law(self, call: Call, length: int) -> Law:
        """The exact joint law of the tokens that `call` writes behind `PROMPT`; of a failure, its message."""

        def run() -> Outcome:
            try:
                return self._write(call, PROMPT, length, do_sample=True)
            except RuntimeError as error:  # one path fails, with the probability of that path
                return (f"RuntimeError: {error}",)

        self._models_of(call)  # loading draws too, but is no part of the call
        return explore_torch(run)

    def _plain_law(self, call: Call, length: int) -> Law:
        plain = Call({}, params=call.params, num_layers=call.num_layers)
        key = f"{plain.name} {plain.num_layers} {length}"
        if key not in self._plain:
            self._plain[key] = self.law(plain, length)
        return self._plain[key]

    # -- texts ---------------------------------------------------------------------------------------------------------

    def prove_greedy(self, call: Call, length: int) -> Finding:
        """Greedy texts that differ from plain ones."""
        wrong = sum(self._differs(call, prompt, length, do_sample=False) for prompt in _PROMPTS)
        return Finding(wrong, 0.0, f"{len(_PROMPTS)} texts of {length} tokens, float64", informs=call.lossy_by_design)

    def compare_seeded(self, call: Call, length: int) -> Finding:
        """Texts that differ from plain ones after the same `torch.manual_seed`."""
        wrong = sum(self._differs(call, prompt, length, do_sample=True) for prompt in _PROMPTS)
        return Finding(wrong, 0.0, f"{len(_PROMPTS)} texts of {length} tokens; not promised", informs=True)

    def _differs(self, call: Call, prompt: tuple[int, ...], length: int, *, do_sample: bool) -> bool:
        texts = []
        for speculation in (call.speculation, {}):
            way = Call(speculation, call.assistant, call.params, call.num_layers)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(len(prompt))
                texts.append(self._write(way, prompt, length, do_sample=do_sample))
        return texts[0] != texts[1]

    # -- models --------------------------------------------------------------------------------------------------------

    def _write(self, call: Call, prompt: tuple[int, ...], length: int, *, do_sample: bool) -> tuple[int, ...]:
        from transformers import GenerationConfig

        target, assistant = self._models_of(call)
        # Some schedules write to these; every call starts afresh.
        target.generation_config = GenerationConfig()
        assistant.generation_config = GenerationConfig(**call.assistant)
        arguments = {**call.params, **call.speculation}
        if "assistant_model" in arguments:
            arguments["assistant_model"] = assistant
        ids = torch.tensor([prompt])
        text = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=do_sample,
            max_new_tokens=length,
            **arguments,
        )
        return tuple(text[0, len(prompt) :].tolist())

    def _models_of(self, call: Call) -> tuple[Any, Any]:
        """The target and its assistant, which is the target itself where none is named."""
        target, helper = self._model("target", call.num_layers), call.speculation.get("assistant_model")
        return target, target if helper is None else self._model(helper, 1)

    def _model(self, name: str, num_layers: int) -> Any:
        from transformers import AutoModelForCausalLM

        key = (name, num_layers)
        if key not in self._models:
            path = self._saved(name, num_layers)
            self._models[key] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
            raise_norms(self._models[key])
        return self._models[key]

    def _saved(self, name: str, num_layers: int) -> Path:
        path = self._folder / f"{name}-{num_layers}"
        if not path.exists():
            save_tiny_llama(path, seed={"target": 1, "draft": 2}[name], num_layers=num_layers)
        return path


#: Behind each, lookup finds something, and draft models have something to disagree on.
_PROMPTS = tuple(tuple((3 * i * i + i * j + j) % 3 for i in range(4 + j)) for j in range(8))


def _distinct(params: Iterator[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({repr(sorted(p.items(), key=str)): p for p in params}.values())


def _distance(law: Law, reference: Mapping[Any, float], length: int) -> Finding:
    missing = abs(sum(law.probs.values()) - 1.0)
    distance = total_variation(law.probs, reference) + law.dropped + missing
    failures = sum(mass for text, mass in law.probs.items() if text and isinstance(text[0], str))
    failed = f", fails with probability {failures:.3g}" if failures else ""
    return Finding(distance, BOUND, f"{law.num_paths} paths, joint law of {length} tokens{failed}")
