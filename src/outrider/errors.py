"""The exceptions that Outrider raises on purpose.

OutriderError
├── InputError (ValueError)          what the caller passed; carries field, value and remedy
│   ├── InvalidParameterError        a value outside its range, of the wrong type, or an unknown name
│   ├── ContradictionError           two settings that cannot hold together
│   ├── UnsupportedParameterError    known elsewhere, not exact here yet, so refused
│   └── InvalidPromptError           empty, too long, out of the vocabulary, not encodable
├── ModelError                       a checkpoint or architecture; carries the model's name and a remedy
│   ├── ModelLoadError               not on the hub, unreadable or corrupt
│   ├── ModelTooLargeError           takes more memory than there is; carries the numbers
│   ├── UnsupportedModelError        loads, but cannot be driven exactly; says why
│   ├── VocabularyMismatchError      a draft model that speaks other tokens than its target
│   ├── HeadMismatchError            heads that were made for another target; carries what differs
│   └── ProfileMismatchError         a profile that was made for another target; carries what differs
├── RequestError                     one request failed; its neighbours did not
│   ├── NonFiniteLogitsError         the target wrote NaN or infinity
│   ├── ProcessingError              a logits processor or a grammar failed
│   ├── NoTokenLeftError             its parameters together forbid every token
│   ├── ForwardError                 the target's forward pass raised
│   └── StepAbortedError             a step that served it was interrupted, or raised where nobody expected it
├── ProposerError                    a proposer cannot be found or built
├── ClosedError                      an LLM was called after it was closed
├── ForkedProcessError               a process was forked after a model was loaded, and its threads did not come along
├── OtherEngineError                 another engine cannot be driven; carries its name and a remedy
│   ├── MissingExtraError            a package that drives it is not installed
│   ├── EngineAnswerError            it answered with an error, or with something that cannot be read
│   └── UnforkableError              it uses chance in a way whose branches cannot be followed
├── StorageError                     a file cannot be written; carries its path and a remedy
├── TrainingError                    a training cannot go on; carries the step and a remedy
├── EngineBusyError                  an LLM was used inside one of its own steps
├── EngineDiedError                  the thread that owns an LLM's engine has ended, so that nothing can be written any more
├── TrialError                       no process can be had in which a structure would be tried
├── EngineStalledError               the engine has work and no step makes progress: a defect
├── KernelMismatchError              the compiled kernels come from other sources than the package; carries the constant
└── NoiseReuseError                  a random key was used twice: a defect, never a user's fault
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from types import TracebackType
from typing import Any, Self, SupportsIndex


class OutriderError(Exception):
    """Base of every error raised on purpose.

    Every such error can be copied and pickled, so that it comes out of a worker process as it went in: its message, its
    attributes, its notes and its cause. An attribute that cannot be pickled travels as its short text; a cause that cannot
    be pickled is left behind.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # Each part is pickled by itself: one that fails, here or where it is read, does not take the others with it.
        parts = _parts(self, lambda value, substitute: (_pickled(value, protocol), substitute))
        return _unpickled_error, (type(self), *parts)

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        _restore(copied, *_parts(self, lambda value, substitute: value))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied  # a cause may lead back to this error
        _restore(copied, *_parts(self, lambda value, substitute: _deep_copied(value, substitute, memo)))
        return copied


class InputError(OutriderError, ValueError):
    """The caller passed something that cannot be used."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{field}={_short(value)}: {problem}. {remedy}")


class InvalidParameterError(InputError):
    """A setting is unknown, of the wrong type, or outside its range."""


class ContradictionError(InputError):
    """Two settings cannot hold together."""


class UnsupportedParameterError(InputError):
    """A parameter that other engines know and this one does not yet compute exactly."""


class InvalidPromptError(InputError):
    """A prompt is empty, too long, out of the vocabulary, or cannot be encoded."""


class ModelError(OutriderError):
    """A checkpoint cannot be used.

    Attributes:
        place: The setting that names it, such as "methods.1.model", where settings stand inside others; else empty.
    """

    place = ""

    def __init__(self, model: str, problem: str, remedy: str) -> None:
        self.model = model
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"model {model!r}: {problem}. {remedy}")

    def at(self, place: str) -> Self:
        """Returns the same error, whose message begins with the place of the settings that name the model."""
        text = str(self).removeprefix(f"{self.place}: ")
        self.place = f"{place}.{self.place or 'model'}"
        self.args = (f"{self.place}: {text}",)
        return self


class ModelLoadError(ModelError):
    """The checkpoint is not on the hub, unreadable or corrupt; a folder that is not there is an InvalidParameterError."""


class ModelTooLargeError(ModelError):
    """The checkpoint takes more memory than there is."""

    def __init__(
        self,
        model: str,
        problem: str,
        remedy: str,
        weight_bytes: int = 0,
        kv_bytes: int = 0,
        available_bytes: int = 0,
        state_bytes: int = 0,
    ) -> None:
        self.weight_bytes = weight_bytes
        self.kv_bytes = kv_bytes
        self.available_bytes = available_bytes
        self.state_bytes = state_bytes
        super().__init__(model, problem, remedy)


class UnsupportedModelError(ModelError):
    """The architecture cannot be driven exactly by any attention backend."""


class VocabularyMismatchError(ModelError):
    """The draft model's tokens are not the target's."""


class HeadMismatchError(ModelError):
    """Heads were made for another target than this one, or for another method."""

    def __init__(
        self, model: str, problem: str, remedy: str, field: str = "", needed: object = None, found: object = None
    ) -> None:
        self.field = field
        self.needed = needed
        self.found = found
        super().__init__(model, problem, remedy)


class ProfileMismatchError(ModelError):
    """A profile was made for another target than this one."""

    def __init__(
        self, model: str, problem: str, remedy: str, field: str = "", needed: object = None, found: object = None
    ) -> None:
        self.field = field
        self.needed = needed
        self.found = found
        super().__init__(model, problem, remedy)


class RequestError(OutriderError):
    """One request failed while others went on."""

    def __init__(self, request_id: int, problem: str, remedy: str) -> None:
        self.request_id = request_id
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"request {request_id}: {problem}. {remedy}")


class NonFiniteLogitsError(RequestError):
    """The target's logits held NaN or infinity where a token had to be chosen."""


class ProcessingError(RequestError):
    """A logits processor of the caller, or a structured output's automaton, raised or answered nonsense; see the cause."""


class NoTokenLeftError(RequestError):
    """The request's parameters together forbid every token where one had to be chosen."""


class ForwardError(RequestError):
    """The target's forward pass raised; the cause is chained."""


class StepAbortedError(RequestError):
    """A step that served the request was interrupted, or raised where nobody expected it; see the cause."""


class ProposerError(OutriderError):
    """A proposer cannot be found or built."""


class ClosedError(OutriderError):
    """An LLM was called after it was closed."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed: its weights and its memory are freed. Make a new one.")


class ForkedProcessError(OutriderError):
    """This process was forked after a model was loaded; PyTorch's threads do not survive that, so a pass would hang."""

    def __init__(self) -> None:
        super().__init__(
            "this process was forked from one that had loaded a model, and PyTorch's threads do not survive a fork. "
            'Start processes with multiprocessing.get_context("spawn"), or load models in the child alone.'
        )


class OtherEngineError(OutriderError):
    """Another engine, under proof or beside ours in a benchmark, cannot be driven."""

    def __init__(self, engine: str, problem: str, remedy: str) -> None:
        self.engine = engine
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{engine}: {problem}. {remedy}")


class MissingExtraError(OtherEngineError):
    """A package that drives the engine is not installed."""


class EngineAnswerError(OtherEngineError):
    """The engine refused, did not answer, or answered something that cannot be read."""


class UnforkableError(OtherEngineError):
    """The engine uses random numbers in a way whose branches cannot be followed."""


class StorageError(OutriderError):
    """A file cannot be written: the disk is full, or the folder takes no files. Nothing half-written is left in its
    place."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        self.path = path
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{path}: it cannot be written ({problem}). {remedy}")


class TrainingError(OutriderError):
    """A training cannot go on."""

    def __init__(self, step: int, problem: str, remedy: str) -> None:
        self.step = step
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"step {step}: {problem}. {remedy}")


class EngineBusyError(OutriderError):
    """A proposer or a logits processor used the LLM that was calling it, in the middle of one of its steps."""

    def __init__(self) -> None:
        super().__init__(
            "the LLM is in the middle of a step, which called this code. Use another LLM here, or call this one afterwards."
        )


class TrialError(OutriderError):
    """No process can be had in which a structure would be tried; without a trial it is not followed."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. Make room for one process more, and see that Python can be started here.")


class EngineDiedError(OutriderError):
    """The thread that owns an LLM's engine has ended: something went wrong there that it could not go on after."""

    def __init__(self) -> None:
        super().__init__("the engine of this LLM has died, and its log says of what. Close this LLM and make a new one.")


class EngineStalledError(OutriderError):
    """Requests wait and no step makes progress, so that waiting on would never end."""


class KernelMismatchError(OutriderError):
    """The compiled kernels and the package write a constant differently, so they come from different sources.

    Args:
        compiled: Its value in the compiled kernels, None where they do not have it.
        written: Its value in the package, None where it does not have it.
    """

    def __init__(self, constant: str, compiled: int | None, written: int | None) -> None:
        self.constant = constant
        self.compiled = compiled
        self.written = written
        super().__init__(
            f"the compiled kernels come from other sources: {constant} is {compiled} there and {written} in the package. "
            "Install the package again, or set OUTRIDER_KERNELS=off to use stock operators."
        )


class NoiseReuseError(OutriderError):
    """A random key was asked for twice, which would correlate draws that must be independent."""


def _short(value: object, limit: int = 80) -> str:
    try:
        text = repr(value)
    except Exception:  # a value of the caller's own type, or one that holds too many others inside one another
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[1 - limit // 2 :]}"  # a path ends in what matters


# -- copies ------------------------------------------------------------------------------------------------------------


def _parts(error: OutriderError, carry: Callable[[object, str | None], Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments, attributes and cause of an error, each carried over by a function of it and of its substitute."""
    args = tuple(carry(value, _short(value)) for value in error.args)
    attributes = {name: carry(value, _short(value)) for name, value in vars(error).items()}
    return args, attributes, carry(error.__cause__, None)


def _restore(error: OutriderError, args: tuple[Any, ...], attributes: dict[str, Any], cause: BaseException | None) -> None:
    error.args = args
    vars(error).update(attributes)
    if cause is not None:  # assigning None would hide the context of a later raise
        error.__cause__ = cause


def _pickled(value: object, protocol: SupportsIndex) -> bytes | None:
    try:
        return pickle.dumps(value, int(protocol))
    except Exception:  # pickle passes on whatever the value's own methods raise
        return None


def _unpickled(data: bytes | None, substitute: str | None) -> Any:
    if data is None:
        return substitute
    try:
        return pickle.loads(data)
    except Exception:  # it may be written where it can be named and read where it cannot
        return substitute


def _unpickled_error(
    kind: type[OutriderError],
    args: tuple[tuple[bytes | None, str | None], ...],
    attributes: dict[str, tuple[bytes | None, str | None]],
    cause: tuple[bytes | None, str | None],
) -> OutriderError:
    error = kind.__new__(kind)
    values = {name: _unpickled(*part) for name, part in attributes.items()}
    _restore(error, tuple(_unpickled(*part) for part in args), values, _unpickled(*cause))
    return error


def _deep_copied(value: object, substitute: str | None, memo: dict[int, Any]) -> Any:
    try:
        return deepcopy(value, memo)
    except Exception:  # copy passes on whatever the value's own methods raise
        return substitute


# --- Containment: code of others runs, and what it raises goes no further.


class Contained:
    """A block of code of others: what it raises is handed to `report` and goes no further, an interrupt excepted."""

    def __init__(self, report: Callable[[BaseException], object]) -> None:
        self._report = report

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None or isinstance(error, KeyboardInterrupt):
            return False
        self._report(error)
        return True
