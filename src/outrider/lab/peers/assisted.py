"""Proofs on transformers: `generate` with an assistant, prompt lookup or early exit, against `generate` alone.

The joint distribution of a call is exact, because its only source of chance is torch's generator, and every branch of that
is walked. It is compared with the exact distribution of the same call without its speculation, and that one with
teacher-forced forward passes. transformers turns logits into float32, so equal distributions agree to about 1e-7.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outrider.errors import UnforkableError
from outrider.lab.prove.engine import PROMPT
from outrider.lab.prove.forking import Distribution, ForkingNoise, Outcome, explore, total_variation
from outrider.lab.prove.running import Finding, Proof
from outrider.lab.prove.sampled import TeacherForced
from outrider.lab.prove.tiny import raise_norms, save_tiny_llama
from outrider.loading.exclusive import exclusive_transformers
from outrider.params import SamplingParams

#: Rounding to float32 moves a distribution of three tokens by about 1e-7. The smallest planted error moves it by 1e-3.
BOUND = 1e-5

#: Fields of every assistant's `generation_config`, unless a call gives other values.
_SETTLED = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
#: Parameters whose effect `TeacherForced` computes by code of its own.
_TEACHABLE = {"temperature", "top_k", "top_p", "min_p"}


@dataclass(frozen=True)
class Call:
    """One way to call `generate`."""

    # The arguments that turn speculation on. They give models and tokenizers by their names (`_Cast`).
    speculation: Mapping[str, Any]
    # Fields of the assistant's `generation_config`, where transformers looks for them.
    assistant: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)  # the arguments that are the same with and without speculation
    num_layers: int = 1  # the number of layers of the target
    # Whether the documentation says that the call is lossy. The finding is shown, but decides nothing.
    lossy_by_design: bool = False
    # Whether the call raised in a release that was measured. A call that raises writes no wrong text, so the error is shown
    # and decides nothing. Any other call that raises has failed.
    may_raise: bool = False

    @property
    def name(self) -> str:
        """The arguments, and in brackets the fields of the assistant's configuration that differ from `_SETTLED`."""
        arguments = [f"{key}={value}" for key, value in {**self.speculation, **self.params}.items()]
        inner = ", ".join(f"{key}={value}" for key, value in self.assistant.items() if _SETTLED.get(key) != value)
        return ", ".join(arguments) + (f" [{inner}]" if inner else "")

    @property
    def greedy(self) -> Call:
        """Returns the same call without the parameters that matter only to sampling."""
        kept = {key: value for key, value in self.params.items() if key not in _SAMPLING}
        return replace(self, params=kept)


def _assistant(num_tokens: int, **more: Any) -> dict[str, Any]:
    return {"num_assistant_tokens": num_tokens, **_SETTLED, **more}


_DRAFT = {"assistant_model": "draft"}
_TWO = _assistant(2)
_LOOKUP = {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1}
_STOP = {"tokenizer": "abcdef", "stop_strings": ["c"]}


def _foreign(letters: str) -> dict[str, str]:
    return {"assistant_model": "foreign draft", "tokenizer": "abc", "assistant_tokenizer": letters}


QUICK_CALLS = (Call(_DRAFT, _TWO), Call(_DRAFT, _TWO, {"top_k": 2}), Call(_LOOKUP))

CALLS = (
    *QUICK_CALLS,
    Call(_DRAFT, _assistant(1)),
    Call(_DRAFT, _assistant(5)),
    Call(_DRAFT, _assistant(2, assistant_confidence_threshold=0.4)),
    Call(_DRAFT, _assistant(2, num_assistant_tokens_schedule="heuristic")),
    Call({"assistant_model": "target"}, _TWO),
    Call(_DRAFT, _TWO, {"temperature": 0.6}),
    Call(_DRAFT, _TWO, {"top_p": 0.8, "temperature": 1.5}),
    Call(_DRAFT, _TWO, {"min_p": 0.3}),
    Call(_DRAFT, _TWO, {"top_k": 2, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3}),
    Call(_DRAFT, _TWO, {"typical_p": 0.9}),
    Call(_DRAFT, _TWO, {"repetition_penalty": 1.5}),
    Call(_DRAFT, _TWO, {"no_repeat_ngram_size": 2}),
    Call(_DRAFT, _TWO, {"sequence_bias": [[[0, 1], -2.0]]}),
    Call(_DRAFT, _TWO, {"eos_token_id": 2}),
    Call(_DRAFT, _TWO, {"eos_token_id": 2, "min_new_tokens": 2}),
    Call(_DRAFT, _TWO, _STOP, may_raise=True),
    Call(_LOOKUP, params={"temperature": 0.6, "top_k": 2}),
    Call(_LOOKUP, params={"repetition_penalty": 1.5}),
    Call(_LOOKUP, params={"eos_token_id": 2}),
    Call(_LOOKUP, params=_STOP),
    Call({"assistant_early_exit": 1}, _TWO, num_layers=2),
    Call({"assistant_early_exit": 1}, _TWO, {"top_k": 2, "temperature": 0.6}, num_layers=2),
    Call(_foreign("dabc"), _TWO),
    Call(_foreign("dabc, listed backwards"), _TWO),
    Call(_foreign("ab"), _TWO, may_raise=True),
    Call({**_DRAFT, "assistant_ensemble_weight": 0.5}, _TWO, lossy_by_design=True),
)


class AssistedGeneration:
    """The installed transformers. Without calls of its own it proves `CALLS`, or `QUICK_CALLS` where a quick run is asked
    for."""

    def __init__(self, folder: Path, calls: Sequence[Call] | None = None) -> None:
        import transformers

        self.title = f"transformers {transformers.__version__}, torch {torch.__version__}, float64 weights"
        self._cast, self._calls = _Cast(folder), calls
        self._plain: dict[str, Distribution] = {}

    def proofs(self, *, quick: bool) -> Sequence[Proof]:
        """See OtherEngine."""
        calls = self._calls if self._calls is not None else QUICK_CALLS if quick else CALLS
        return [*self._distribution_proofs(calls, 2 if quick else 3), *self._text_proofs(calls, 12 if quick else 24)]

    def _distribution_proofs(self, calls: Sequence[Call], length: int) -> Iterator[Proof]:
        for params in {repr(sorted(call.params.items(), key=str)): call.params for call in calls}.values():
            if params.keys() <= _TEACHABLE:
                yield (
                    f"joint distribution, plain: {Call({}, params=params).name or 'no arguments'}",
                    partial(self.prove_plain, params, length),
                )
        for call in calls:
            yield f"joint distribution: {call.name}", partial(self.prove_distribution, call, length)

    def _text_proofs(self, calls: Sequence[Call], length: int) -> Iterator[Proof]:
        for call in {each.name: each for each in (call.greedy for call in calls)}.values():
            yield f"greedy text: {call.name}", partial(self.prove_greedy, call, length)
        seeded = {str(call.speculation): call for call in reversed(calls) if not call.params and not call.lossy_by_design}
        for call in reversed(seeded.values()):
            yield f"seeded text: {call.name}", partial(self.compare_seeded, call, length)

    # -- joint distributions -------------------------------------------------------------------------------------------

    def prove_plain(self, params: Mapping[str, Any], length: int) -> Finding:
        """Total variation between `generate` alone and teacher-forced forward passes."""
        found = self._plain_distribution(Call({}, params=params), length)
        taught = TeacherForced(self._cast.saved("target", 1)).distribution(
            PROMPT, SamplingParams(max_tokens=length, **params)
        )
        return _distance(found, {text: mass for (text,), mass in taught.items()}, length)

    def prove_distribution(self, call: Call, length: int) -> Finding:
        """Total variation between `generate` with speculation and without."""
        if (raised := self._attempt(call, do_sample=True)) is not None:
            return raised
        found = _distance(self.distribution(call, length), self._plain_distribution(call, length).probs, length)
        if not call.lossy_by_design:
            return found
        detail = f"{found.detail}; lossy by its documentation"
        return Finding(found.measured, found.bound, detail, informs=True, horizon=found.horizon)

    def distribution(self, call: Call, length: int) -> Distribution:
        """The exact joint distribution of the texts of `call` behind `PROMPT`. A failure counts as a text of its own."""

        def run() -> Outcome:
            try:
                return self._write(call, PROMPT, length, do_sample=True)
            except RuntimeError as error:  # one path fails, with the probability of that path
                return (f"RuntimeError: {error}",)

        with torch.random.fork_rng(devices=[]):
            run()  # the first call also prepares things, and draws random numbers for that
        return explore_torch(run)

    def _plain_distribution(self, call: Call, length: int) -> Distribution:
        plain = Call({}, params=call.params, num_layers=call.num_layers)
        key = f"{plain.name} {plain.num_layers} {length}"
        if key not in self._plain:
            self._plain[key] = self.distribution(plain, length)
        return self._plain[key]

    # -- texts ---------------------------------------------------------------------------------------------------------

    def prove_greedy(self, call: Call, length: int) -> Finding:
        """No greedy text with speculation differs from the plain one."""
        if (raised := self._attempt(call, do_sample=False)) is not None:
            return raised
        wrong = sum(self._differs(call, prompt, length, do_sample=False) for prompt in _PROMPTS)
        return Finding(wrong, 0.0, f"{len(_PROMPTS)} texts of {length} tokens, float64", informs=call.lossy_by_design)

    def compare_seeded(self, call: Call, length: int) -> Finding:
        """The number of texts that differ from the plain ones after the same `torch.manual_seed`."""
        if (raised := self._attempt(call, do_sample=True)) is not None:
            return raised
        wrong = sum(self._differs(call, prompt, length, do_sample=True) for prompt in _PROMPTS)
        return Finding(wrong, 0.0, f"{len(_PROMPTS)} texts of {length} tokens; not promised", informs=True)

    def _differs(self, call: Call, prompt: tuple[int, ...], length: int, *, do_sample: bool) -> bool:
        texts = []
        for speculation in (call.speculation, {}):
            way = replace(call, speculation=speculation)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(len(prompt))
                texts.append(self._write(way, prompt, length, do_sample=do_sample))
        return texts[0] != texts[1]

    def _attempt(self, call: Call, *, do_sample: bool) -> Finding | None:
        """The error of a call that fails and may fail; None where the call works."""
        try:
            with torch.random.fork_rng(devices=[]):
                self._write(call, PROMPT, 2, do_sample=do_sample)
        except Exception as error:  # users of this call meet the same error, of whatever type
            if not call.may_raise:
                raise
            first = str(error).partition(". ")[0][:90]
            return Finding(float("nan"), 0.0, f"raises {type(error).__name__}: {first}", informs=True)
        return None

    def _write(self, call: Call, prompt: tuple[int, ...], length: int, *, do_sample: bool) -> tuple[int, ...]:
        from transformers import GenerationConfig

        target = self._cast.model("target", call.num_layers)
        arguments = self._cast.fill({**call.params, **call.speculation}, do_sample=do_sample)
        # Some schedules change these configurations, so every call gets fresh ones.
        target.generation_config = GenerationConfig()
        arguments.get("assistant_model", target).generation_config = GenerationConfig(**call.assistant)
        ids = torch.tensor([prompt])
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=do_sample, max_new_tokens=length, **arguments
        )
        return tuple(text[0, len(prompt) :].tolist())


class _Cast:
    """Models and tokenizers by their names, made when they are first used. The models are "target", "draft" and "foreign
    draft". The last one has the vocabulary of its own tokenizer. A tokenizer is named by its letters in the order of their
    ids. `get_vocab` lists the letters in that order, or from the last to the first if the name ends in "listed backwards".
    A real tokenizer lists them in the order of a hash table, which differs from process to process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Any, Any] = {}

    def fill(self, arguments: Mapping[str, Any], *, do_sample: bool) -> dict[str, Any]:
        """Arguments of `generate`, with models and tokenizers in place of their names."""
        filled = dict(arguments)
        for key in ("tokenizer", "assistant_tokenizer"):
            if key in filled:
                filled[key] = self._make(filled[key], partial(_tokenizer, filled[key]))
        if filled.get("assistant_model") == "foreign draft":
            letters = arguments["assistant_tokenizer"]
            path = self.saved("foreign draft", 1, len(letters.partition(",")[0]))
            # The first sampled call changes a foreign draft for its tokenizer, and greedy calls cannot use it any more.
            filled["assistant_model"] = self._make((path, letters, do_sample), partial(_load, path))
        elif "assistant_model" in filled:
            filled["assistant_model"] = self.model(filled["assistant_model"], 1)
        return filled

    def model(self, name: str, num_layers: int) -> Any:
        """A model over three tokens in float64."""
        return self._make((name, num_layers), partial(_load, self.saved(name, num_layers)))

    def saved(self, name: str, num_layers: int, vocab_size: int = 3) -> str:
        """The path of its checkpoint, which is written when it is first asked for."""
        path = self._folder / f"{name.replace(' ', '-')}-{num_layers}-{vocab_size}"
        seed = 1 if name == "target" else 3
        if not path.exists():
            save_tiny_llama(path, seed, vocab_size=vocab_size, num_layers=num_layers)
        return str(path)

    def _make(self, key: Any, build: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = build()
        return self._made[key]


def _load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    raise_norms(model)
    return model


def _tokenizer(name: str) -> Any:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = name.partition(",")[0]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    order = -1 if "backwards" in name else 1
    tokenizer.get_vocab = lambda: {letter: i for i, letter in list(enumerate(letters))[::order]}
    return tokenizer


#: Prompts in which a lookup finds something, and about which the draft model and the target disagree.
_PROMPTS = tuple(tuple((3 * i * i + i * j + j) % 3 for i in range(4 + j)) for j in range(8))


def _distance(found: Distribution, reference: Mapping[Any, float], length: int) -> Finding:
    missing = abs(sum(found.probs.values()) - 1.0)
    distance = total_variation(found.probs, reference) + found.dropped + missing
    failures = sum(mass for text, mass in found.probs.items() if text and isinstance(text[0], str))
    failed = f", fails with probability {failures:.3g}" if failures else ""
    detail = f"{found.num_paths} paths, joint distribution of {length} tokens{failed}"
    return Finding(distance, BOUND, detail, horizon=length)


# --- Calls of torch that draw, as decisions.
#
# Two kinds of calls are replaced while a program runs. `multinomial` becomes a decision with one branch for each token.
# Uniform numbers become *intervals*: at first, all that is known of a number is that it lies in [0, 1). A comparison
# with a threshold t inside [low, high) is a decision with the probabilities (t - low) / (high - low) and its
# complement. After it, the number lies in the chosen part. A threshold outside the interval decides nothing. This is
# exact for any series of comparisons whose thresholds do not depend on the number itself, and only comparisons are
# allowed. A call that draws in another way moves the state of torch's, numpy's or Python's global generator. All three
# are checked after every path, so such a call is noticed.
#
# Uniform numbers are treated as continuous. Real ones are multiples of 2**-24 in float32, so a test `u <= 0` is never
# true here, and true once in 16 million times there.


_DRAWS = (torch.multinomial, Tensor.multinomial)
_RAND, _RAND_LIKE = torch.rand, torch.rand_like
_ENGINE = "torch program"
_REMEDY = "Prove it by sampling instead."


#: Rounding in float32 makes branches of a few 1e-8 where exact numbers have none. They are counted, but not followed.
FLOOR = 1e-6


def explore_torch(run: Callable[[], Outcome], *, max_paths: int = 100_000) -> Distribution:
    """The exact distribution of what `run` returns, over everything that torch's global generator can draw."""
    noise = ForkingNoise(FLOOR)

    def forked(_: int) -> Iterator[Outcome]:
        before = _generators()
        with _ForkingTorch(noise):
            yield run()
        if _generators() != before:
            raise UnforkableError(_ENGINE, "random numbers were drawn by a call that is not followed", _REMEDY)

    return explore(forked, noise, max_paths=max_paths)


def _generators() -> tuple[Any, ...]:
    """The states of the global generators."""
    _, words, place, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), np.asarray(words).tobytes(), place, rest, random.getstate()


class Uniforms:
    """Uniform numbers that are known only by the answers to comparisons. Each element has one interval."""

    def __init__(self, shape: torch.Size, branches: ForkingNoise) -> None:
        self.shape = shape
        self._branches = branches
        self._intervals = [(0.0, 1.0)] * math.prod(shape)

    def __lt__(self, thresholds: Any) -> Tensor:
        return self._compare(thresholds, below=True)

    def __gt__(self, thresholds: Any) -> Tensor:
        return self._compare(thresholds, below=False)

    __le__, __ge__ = __lt__, __gt__  # equality has probability 0

    def _compare(self, thresholds: Any, *, below: bool) -> Tensor:
        """Which numbers lie below (or above) their threshold. `thresholds` broadcast to this shape."""
        wanted = torch.as_tensor(thresholds, dtype=torch.float64).expand(self.shape).flatten().tolist()
        # A number is neither below nor above NaN, as in torch.
        answers = [t == t and self._is_below(i, t) == below for i, t in enumerate(wanted)]
        return torch.tensor(answers, dtype=torch.bool).reshape(self.shape)

    def _is_below(self, index: int, threshold: float) -> bool:
        low, high = self._intervals[index]
        if threshold <= low or threshold >= high:
            return threshold >= high
        share = (threshold - low) / (high - low)
        below = self._branches.choose((share, 1.0 - share)) == 0
        self._intervals[index] = (low, threshold) if below else (threshold, high)
        return below

    def __getattr__(self, name: str) -> Any:
        raise UnforkableError(_ENGINE, f"asks {name!r} of a uniform number, which only comparisons may touch", _REMEDY)

    def _refuse(self, *ignored: Any) -> Any:
        raise UnforkableError(_ENGINE, "calculates with uniform numbers, which only comparisons may touch", _REMEDY)

    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuse
    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = _refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        name = getattr(function, "__name__", str(function)).strip("_")
        if name not in ("lt", "le", "gt", "ge") or len(args) != 2 or kwargs:
            raise UnforkableError(_ENGINE, f"calls {name!r} on uniform numbers, which only comparisons may touch", _REMEDY)
        left, right = args
        if isinstance(left, Uniforms):
            return left._compare(right, below=name in ("lt", "le"))
        assert isinstance(right, Uniforms)
        return right._compare(left, below=name in ("gt", "ge"))


class _ForkingTorch(TorchFunctionMode):
    """Replaces the random draws of torch in this thread, within a `with` block."""

    def __init__(self, branches: ForkingNoise) -> None:
        super().__init__()
        self._branches = branches

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _DRAWS:
            return self._multinomial(*args, **kwargs)
        if function in (_RAND, _RAND_LIKE):
            if kwargs.get("generator") is not None:
                raise UnforkableError(_ENGINE, "draws from a generator of its own", _REMEDY)
            shape = args[0].shape if function is _RAND_LIKE else torch.empty(*args).shape
            return Uniforms(shape, self._branches)
        return function(*args, **kwargs)

    def _multinomial(self, probs: Tensor, num_samples: int, replacement: bool = False, **options: Any) -> Tensor:
        if num_samples != 1 or options.get("generator") is not None:
            raise UnforkableError(_ENGINE, "draws several samples of one row, or from a generator of its own", _REMEDY)
        rows = probs.reshape(-1, probs.shape[-1]).tolist()
        return torch.tensor([self._draw(row) for row in rows]).reshape(*probs.shape[:-1], 1)

    def _draw(self, weights: list[float]) -> int:
        total = sum(weights)
        if not 0.0 < total < math.inf or min(weights) < 0.0:  # torch refuses it too
            raise RuntimeError("probability tensor contains either inf, nan or element < 0, or sums to 0")
        possible = [token for token, weight in enumerate(weights) if weight > 0.0]
        if len(possible) == 1:
            return possible[0]
        return possible[self._branches.choose([weights[token] / total for token in possible])]
