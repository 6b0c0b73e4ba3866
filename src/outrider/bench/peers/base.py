"""What another engine must offer to be measured beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import ClassVar, Protocol, Self

from outrider.bench.peers.worker import Worker
from outrider.errors import EngineAnswerError, InvalidParameterError, InvalidPromptError

#: Seconds that a mode may take to convert, load and write its first text, and that any later text may take.
PREPARE_SECONDS = 900.0
ANSWER_SECONDS = 300.0
#: Draft lengths tried by kind: in short, and in full.
_LENGTHS = {"draft_model": ((3, 5), (2, 3, 5, 8)), "ngram": ((3,), (3, 5, 8))}
#: Written before the first text that counts. A token repeats, so that n-grams find something and verification is warm too.
_WARM_UP_PROMPT, _WARM_UP_TOKENS = (1, 2, 1, 2, 1, 2), 8


@dataclass(frozen=True)
class PeerMode:
    """One setting of a peer.

    Attributes:
        name: As reports show it: "plain", "draft_model k=3".
        kind: "plain", "draft_model" or "ngram".
        num_draft_tokens: Most draft tokens a step; 0 where it does not speculate.
    """

    name: str
    kind: str
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class PeerRun:
    """One text written by a peer; None for what it does not say.

    Attributes:
        token_ids: Output tokens.
        seconds: Wall time, prompt included.
        time_to_first_token: Seconds until the first output; who drafts behind the prompt hands out several tokens then.
        decode_seconds: Wall time from then on.
        num_draft_tokens: Drafted.
        num_accepted_tokens: Of these, accepted.
    """

    token_ids: tuple[int, ...]
    seconds: float
    time_to_first_token: float | None
    decode_seconds: float | None
    num_draft_tokens: int | None
    num_accepted_tokens: int | None


@dataclass(frozen=True)
class PeerModels:
    """The same weights for everybody.

    Attributes:
        target: Folder or hub id.
        draft: Folder or hub id of a draft model with the same vocabulary; None where there is none.
        dtype: "float32", "bfloat16" or "int8".
        num_threads: Threads that compute.
        folder: Where converted files are kept from one run to the next.
    """

    target: str
    draft: str | None
    dtype: str
    num_threads: int
    folder: Path


@dataclass(frozen=True)
class PeerRequest:
    """One text to write: exactly `max_tokens` tokens, whichever of them would end a text.

    Attributes:
        mode: How.
        prompt_ids: Tokens of the prompt.
        max_tokens: Length of the output.
        temperature: 0 takes the likeliest token; otherwise the whole law is sampled, without filters.
        seed: Of the sampling; None leaves it to the peer.
    """

    mode: PeerMode
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int | None


class PeerEngine(Protocol):
    """What lives in a peer's process and does its work; what a mode needs is loaded when it is first asked for."""

    def generate(self, request: PeerRequest) -> PeerRun:
        """Write one text."""
        ...


class Peer(ABC):
    """An engine under measurement: a context manager around a process of its own.

    The process starts with the first text, and again after a failure that ended it, so that one mode that crashes or hangs
    costs its own figures only. Thread pools of two engines in one process would spin against each other.

    Args:
        models: What it loads.

    Attributes:
        name: As users give it.
        package: Whose version is the peer's.
        dtypes: Types of weights that it can use.

    Raises:
        InvalidParameterError: It cannot use weights of this type.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]

    def __init__(self, models: PeerModels) -> None:
        if models.dtype not in self.dtypes:
            known = ", ".join(self.dtypes)
            raise InvalidParameterError(
                "dtype", models.dtype, f"{self.name} has no such weights here", f"It takes {known}."
            )
        if models.num_threads < 1:
            raise InvalidParameterError("num_threads", models.num_threads, "nothing would compute", "Use 1 or more.")
        self.models = models
        self.version = metadata.version(self.package)
        self._worker = Worker(self.name, self.building(models))
        self._warm: set[PeerMode] = set()

    @staticmethod
    @abstractmethod
    def missing() -> str | None:
        """Why it cannot run here, with what to install; None where it can."""

    @staticmethod
    @abstractmethod
    def building(models: PeerModels) -> Callable[[], PeerEngine]:
        """What builds the engine, sent to its process."""

    @property
    @abstractmethod
    def precision(self) -> str:
        """In which types it keeps weights and KV, in words for a report."""

    def modes(self, *, full: bool) -> Sequence[PeerMode]:
        """Its settings to be tried, "plain" first; more draft lengths where `full`."""
        kinds = [kind for kind in _LENGTHS if kind != "draft_model" or self.models.draft is not None]
        speculating = [PeerMode(f"{kind} k={k}", kind, k) for kind in kinds for k in _LENGTHS[kind][full]]
        return [PeerMode("plain", "plain"), *speculating]

    def generate(
        self, mode: PeerMode, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> PeerRun:
        """Write exactly `max_tokens` tokens; a mode's first text is preceded by a short one that does not count.

        Args:
            mode: One of `modes`, or another draft length.
            prompt_ids: At least one token.
            max_tokens: At least one; no token ends the text.
            temperature: 0 for greedy.
            seed: Of the sampling.

        Raises:
            InvalidParameterError: A number out of its range, or a draft model asked for where there is none.
            InvalidPromptError: No prompt.
            EngineAnswerError: The peer failed, crashed, took too long, or wrote fewer or more tokens.
        """
        request = PeerRequest(mode, tuple(prompt_ids), max_tokens, temperature, seed)
        self._check(request)
        if not self._worker.is_alive:
            self._warm.clear()
        if mode not in self._warm:
            self._worker.ask(PeerRequest(mode, _WARM_UP_PROMPT, _WARM_UP_TOKENS, 0.0, None), PREPARE_SECONDS)
            self._warm.add(mode)
        run = self._worker.ask(request, ANSWER_SECONDS)
        if len(run.token_ids) != max_tokens:
            problem = f"{mode.name} wrote {len(run.token_ids)} tokens instead of {max_tokens}"
            raise EngineAnswerError(self.name, problem, "Its figures would not be comparable.")
        return run

    def _check(self, request: PeerRequest) -> None:
        if not request.prompt_ids:
            raise InvalidPromptError("prompt_ids", (), "no token to continue", "Give at least one.")
        if request.max_tokens < 1:
            raise InvalidParameterError("max_tokens", request.max_tokens, "nothing to write", "Use 1 or more.")
        if not request.temperature >= 0.0:
            raise InvalidParameterError("temperature", request.temperature, "below zero or no number", "Use 0 for greedy.")
        if request.mode.kind == "draft_model" and self.models.draft is None:
            raise InvalidParameterError(
                "mode", request.mode.name, "there is no draft model", "Name one in PeerModels.draft."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._worker.close()


def missing_packages(packages: Sequence[str], extra: str) -> str | None:
    """Which of `packages` are not installed, with the command that installs them; None where all are."""
    absent = [name for name in packages if util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed; run: pip install 'outrider[{extra}]'" if absent else None


def build_with(engine: Callable[[PeerModels], PeerEngine], models: PeerModels) -> Callable[[], PeerEngine]:
    """`engine(models)`, to be called later in another process."""
    return partial(engine, models)
