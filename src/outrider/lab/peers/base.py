"""Another engine that is measured beside this one: its interface, its process, and its converted checkpoints."""

from __future__ import annotations

import json
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from http.client import HTTPException
from importlib import metadata, util
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from outrider.errors import EngineAnswerError, InvalidParameterError, InvalidPromptError

if TYPE_CHECKING:
    from outrider.lab.prove.running import Proof  # which imports torch

#: The seconds that a mode may take to convert, load and write its first texts; those for any later answer, and what is
#: added to them for every token.
PREPARE_SECONDS = 900.0
ANSWER_SECONDS = 300.0
TOKEN_SECONDS = 0.05
#: The draft lengths of each kind of mode, in a usual run and in a full one.
_LENGTHS = {"draft_model": ((3, 5), (2, 3, 5, 8)), "ngram": ((3,), (3, 5, 8))}
#: The text that is written before the first one that counts. Its tokens repeat, so that n-grams find something to draft.
_WARM_UP_PROMPT, _WARM_UP_TOKENS = (1, 2, 1, 2, 1, 2), 8


@dataclass(frozen=True)
class PeerMode:
    """One setting of a peer."""

    name: str  # the name in reports, such as "plain" or "draft_model k=3"
    kind: str  # "plain", "draft_model", "ngram", "mtp" or "eagle3"
    num_draft_tokens: int = 0  # the most draft tokens in a step. 0 where the mode does not speculate.


@dataclass(frozen=True)
class PeerRun:
    """The texts that a peer wrote at a time. Figures are None or empty where the peer does not tell them."""

    texts: tuple[tuple[int, ...], ...]  # the output tokens of each text
    seconds: float  # wall time, prompts included
    first_token_seconds: tuple[float, ...]  # seconds until the first output of each text, which may be several tokens
    decode_tokens: int  # the tokens that came after the first output of all
    decode_seconds: float | None  # wall time from then on
    num_draft_tokens: int | None  # the number of draft tokens of all texts
    num_accepted_tokens: int | None  # the number of accepted draft tokens of all texts

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class PeerModels:
    """The weights, which are the same for every engine."""

    target: str  # folder or hub id
    draft: str | None  # folder or hub id of a draft model with the same vocabulary. None where there is none.
    # "float32", "bfloat16", "int8" or "int4". The last two have a scale for 32 weights, as GGUF's Q8_0 and Q4_0.
    dtype: str
    num_threads: int  # the number of threads that compute
    folder: Path  # where converted files are kept from one run to the next
    head: str | None = None  # folder or GGUF file of a head of EAGLE-3 for the target. None where there is none.


@dataclass(frozen=True)
class PeerRequest:
    """The texts to write at a time. Each has exactly `max_tokens` tokens, even where one of them would end a text."""

    mode: PeerMode  # the mode of the peer
    prompts: tuple[tuple[int, ...], ...]  # the tokens of each prompt
    max_tokens: int  # the length of each output
    temperature: float  # 0 takes the likeliest token. Otherwise all tokens of the vocabulary may be drawn, without filters.
    seed: int | None  # the seed of the sampling. None leaves it to the peer.

    @property
    def batch(self) -> int:
        return len(self.prompts)


class PeerEngine(Protocol):
    """The engine inside the process of a peer. It loads what a mode needs when the mode is first asked for."""

    def __init__(self, models: PeerModels) -> None: ...

    def generate(self, request: PeerRequest) -> PeerRun:
        """Write all texts, in one batch."""
        ...


class OtherEngine(Protocol):
    """An engine whose speculation is proved."""

    title: str  # its name and version, as far as the engine tells them

    def proofs(self, *, quick: bool) -> Sequence[Proof]:
        """The claims by name, each with the function that proves it. They run in order, one at a time."""
        ...


class Peer(ABC):
    """Another engine that is measured. It is a context manager around a process of its own. The process starts with the
    first text, and again after a failure that ended it. So a mode that crashes or hangs loses only its own figures. In one
    process, the thread pools of two engines would slow each other down."""

    name: ClassVar[str]  # the name that users give
    package: ClassVar[str]  # the package whose version is that of the peer
    dtypes: ClassVar[tuple[str, ...]]  # the types of weights that it can use
    needs: ClassVar[tuple[str, ...]] = ()  # the modules that it cannot do without
    extra: ClassVar[str] = ""  # the extra of this project that installs them
    engine: ClassVar[type[PeerEngine]]  # what is built in the process of the peer
    drafts_in_batches: ClassVar[bool] = True  # whether it can draft for several texts at a time

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
        self._worker = Worker(self.name, partial(self.engine, models))
        self._warm: set[PeerMode] = set()
        self._batch = 1

    @classmethod
    def missing(cls) -> str | None:
        """The packages that are not installed, and the command that installs them. None where all are installed."""
        absent = [name for name in cls.needs if util.find_spec(name) is None]
        return f"{', '.join(absent)} not installed; run: pip install 'outrider[{cls.extra}]'" if absent else None

    @staticmethod
    def proving(folder: Path) -> AbstractContextManager[OtherEngine] | None:
        """The engine with tiny models in a folder, whose speculation can be proved. None where nobody has proofs for it."""
        return None

    @property
    @abstractmethod
    def precision(self) -> str:
        """The types in which it keeps weights and KV, in words for a report."""

    def modes(self, *, full: bool, batch: int = 1) -> Sequence[PeerMode]:
        """The modes to measure, "plain" first."""
        kinds = [kind for kind in _LENGTHS if kind != "draft_model" or self.models.draft is not None]
        if batch > 1 and not self.drafts_in_batches:
            kinds = []
        speculating = [PeerMode(f"{kind} k={k}", kind, k) for kind in kinds for k in _LENGTHS[kind][full]]
        return [PeerMode("plain", "plain"), *speculating]

    def generate(
        self, mode: PeerMode, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, seed: int | None
    ) -> PeerRun:
        """Write exactly `max_tokens` tokens behind each prompt, all in one batch. Before the first texts of a mode, and
        when the number of texts changes, short ones are written that do not count."""
        request = PeerRequest(mode, tuple(map(tuple, prompts)), max_tokens, temperature, seed)
        self._check(request)
        if not self._worker.is_alive or request.batch != self._batch:
            self._warm.clear()
            self._batch = request.batch
        if mode not in self._warm:
            warm_up = PeerRequest(mode, (_WARM_UP_PROMPT,) * request.batch, _WARM_UP_TOKENS, 0.0, None)
            self._worker.ask(warm_up, PREPARE_SECONDS)
            self._warm.add(mode)
        run = self._worker.ask(request, _deadline(request))
        for text in run.texts:
            if len(text) != max_tokens:
                problem = f"{mode.name} wrote {len(text)} tokens instead of {max_tokens}"
                raise EngineAnswerError(self.name, problem, "Its figures would not be comparable.")
        return run

    def _check(self, request: PeerRequest) -> None:
        if not request.prompts or not all(request.prompts):
            raise InvalidPromptError("prompts", request.prompts, "no token to continue", "Give at least one.")
        if request.max_tokens < 1:
            raise InvalidParameterError("max_tokens", request.max_tokens, "nothing to write", "Use 1 or more.")
        if not request.temperature >= 0.0:
            raise InvalidParameterError("temperature", request.temperature, "below zero or no number", "Use 0 for greedy.")
        if request.batch > 1 and request.mode.kind != "plain" and not self.drafts_in_batches:
            problem = f"{self.name} drafts for one text at a time"
            raise InvalidParameterError("mode", request.mode.name, problem, 'Use "plain", or one prompt.')
        if request.mode.kind == "draft_model" and self.models.draft is None:
            raise InvalidParameterError(
                "mode", request.mode.name, "there is no draft model", "Name one in PeerModels.draft."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._worker.close()


def _deadline(request: PeerRequest) -> float:
    """The seconds that a peer may take: a fixed time, and more for every token that it reads or writes."""
    num_tokens = sum(map(len, request.prompts)) + request.batch * request.max_tokens
    return ANSWER_SECONDS + TOKEN_SECONDS * num_tokens


# --- A server that speaks OpenAI's API.


def asked(root: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
    """The answer of a server, open to be read. The key is taken from OPENAI_API_KEY where that is set."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return urlopen(Request(f"{root}/v1/{path}", data, headers), timeout=timeout)
    except HTTPError as error:
        said = error.read(500).decode("utf-8", "replace").strip()
        raise EngineAnswerError(root, f"answers {error.code} on {path}: {said}", "See its log.") from error
    except (HTTPException, OSError, ValueError) as error:
        raise EngineAnswerError(root, f"does not answer: {error}", "Is the server up, and the address right?") from error


# --- Converted checkpoints, which are kept from one run to the next.


#: What GGUF calls the types that round weights.
GGUF_NAMES = {"int8": "q8_0", "int4": "q4_0"}


def converted_path(folder: Path, checkpoint: str, kind: str) -> Path:
    """The path in `folder` for `checkpoint`, converted to `kind`. The name changes when the files of the checkpoint
    change."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(checkpoint)
    files = sorted(source.iterdir()) if source.is_dir() else []
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = sha256(repr((str(source.resolve()) if files else checkpoint, facts)).encode()).hexdigest()[:12]
    return folder / f"{source.name}-{key}-{kind}"


def gguf_file(folder: Path, checkpoint: str, dtype: str) -> str:
    """The checkpoint as a GGUF file in which no token ends a text. The file is written if it is missing. A checkpoint
    that is a GGUF file is taken as it is."""
    if checkpoint.lower().endswith(".gguf"):
        return checkpoint
    from outrider.lab.convert.gguf import write_gguf  # imports torch, which a check of names does not need

    path = converted_path(folder, checkpoint, f"{dtype}.gguf")
    return str(path) if path.exists() else write_gguf(checkpoint, path, dtype)


# --- A process that holds one engine and answers one request at a time. If it dies, another one replaces it.


#: The seconds that a process may take to end by itself.
_LEAVE_SECONDS = 5.0


class Worker:
    """Starts the process when it is needed, and ends it when it does not answer."""

    def __init__(self, name: str, build: Callable[[], PeerEngine]) -> None:
        self._name, self._build = name, build
        self._process: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None

    @property
    def is_alive(self) -> bool:
        """Tells whether there is a process, which still holds what was loaded."""
        return self._process is not None and self._process.is_alive()

    def ask(self, request: PeerRequest, deadline: float) -> PeerRun:
        """The answer to a request. The process is ended where it does not come within so many seconds."""
        if not self.is_alive:
            self.close()
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(request)
            if not self._connection.poll(deadline):
                raise self._error(f"no answer to {request.mode.name} within {deadline:g} s", "Its process was ended.")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(request) from error
        if isinstance(answer, str):
            raise EngineAnswerError(self._name, f"{request.mode.name} raises {answer}", "Leave out this mode.")
        run: PeerRun = answer
        return run

    def close(self) -> None:
        """End the process, if there is one. A later `ask` starts another."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()  # a living process ends when its connection is closed
        if process is not None:
            process.join(_LEAVE_SECONDS)
            process.kill()
            process.join()
            process.close()

    def _start(self) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(self._build, theirs), name=self._name, daemon=True)
        with _interrupts_wait():
            self._process.start()
        theirs.close()  # so that the pipe ends when the process ends

    def _death(self, request: PeerRequest) -> EngineAnswerError:
        assert self._process is not None
        self._process.join(_LEAVE_SECONDS)
        code = self._process.exitcode
        return self._error(f"its process died in {request.mode.name} (exit code {code})", "See what it wrote to stderr.")

    def _error(self, problem: str, remedy: str) -> EngineAnswerError:
        if self._process is not None:
            self._process.kill()
        self.close()
        return EngineAnswerError(self._name, problem, remedy)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C back from this process within the block, and from a process that is started there until it handles it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows: a started process inherits no mask
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, and it would remove the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(build: Callable[[], PeerEngine], connection: Connection[Any, Any]) -> None:
    """The main function of the process: build the engine at the first request, and answer until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process handles interrupts, since it can tell the user
    engine: PeerEngine | None = None
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            engine = engine or build()
            answer: PeerRun | str = engine.generate(request)
        except Exception as error:  # it goes into the report, in words since not every one can be sent, and ends nothing
            answer = f"{type(error).__name__}: {error}"
        connection.send(answer)
