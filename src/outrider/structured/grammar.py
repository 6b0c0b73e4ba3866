"""Grammars of structured output: the tokens that may follow along any draft path.

The automaton is llguidance's, an optional extra. It advances by committed tokens only; a look along a draft path consumes
the path and takes it back. A text is started with its first mask, where most of the work may be. The library bounds
the work of later masks too, and a text that comes to a bound is ended alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from threading import Lock
from time import thread_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import ContradictionError, InputError, InvalidParameterError, OutriderError, UnsupportedParameterError
from outrider.params import StructuredOutputs
from outrider.structured.structures import StructureError, StructureVocabulary, Written, compiled
from outrider.structured.trials import Trials

#: Tokens behind the committed text.
Path = tuple[int, ...]
_FIELD = "structured_outputs"
#: The largest structures that the automaton begins with in a fraction of a second. Beyond them its time grows with the
#: square of the size, and all requests wait for it.
MAX_CHOICES = 10_000
MAX_CHARACTERS = 200_000
#: What following a request's texts may take of a processor's time: so much in all, and for each mask. Masks of JSON and of
#: programming languages take 0.1 to 0.3 ms, and 2 ms where most of 120,000 tokens may follow. One inside a literal of
#: 60,000 characters takes 9 ms.
_SECONDS = 0.2
_SECONDS_A_MASK = 0.005
#: What the library says where a limit is reached, and not where something is wrong.
_TOO_MUCH = (
    "too big",
    "schema too large",
    "too deeply",
    "too many",
    "fuel",
    "max is",
    "recursion limit",
    "precomputation failed",
    "too much work",
)
#: And where nothing more may follow, although the structure is not complete, or where no text has the structure at all.
_DEAD_END = "NoExtension"
_DEAD_ENDS = (_DEAD_END, "Unsatisfiable schema")
#: And of what is sound and not supported.
_UNKNOWN_KEYWORDS = re.compile(r'Unimplemented keys: \["(.*?)"')
_UNSUPPORTED = ("not supported", "Default retriever does not fetch resources")


class GrammarError(OutriderError):
    """The automaton refused a token or gave up; its request fails with a ProcessingError."""


class _Times:
    """Holds what following a request's texts has taken of a processor's time, which all other requests wait for."""

    def __init__(self) -> None:
        self._seconds, self._num_masks = 0.0, 0

    @contextmanager
    def counted(self, num_masks: int) -> Iterator[None]:
        """A block of work for so many masks."""
        self._check()
        begun = thread_time()
        yield
        self.add(thread_time() - begun, num_masks)
        self._check()

    def add(self, seconds: float, num_masks: int) -> None:
        """Work was done for so many masks."""
        self._seconds += seconds
        self._num_masks += num_masks

    @property
    def too_much(self) -> bool:
        """Tells whether the work takes too long."""
        return self._seconds > _SECONDS + _SECONDS_A_MASK * self._num_masks

    def _check(self) -> None:
        if self.too_much:
            mean = 1000 * self._seconds / max(self._num_masks, 1)
            raise GrammarError(_gave_up(f"too much work: its {self._num_masks:,} masks took {mean:.1f} ms each"))


@dataclass
class _Wear:
    """Says whether drafts have used an automaton, which all texts share that began as copies of one."""

    by_drafts: bool = False


class GrammarState:
    """Says where one text stands in its structure.

    A look along a draft may be too much for the automaton where the text itself is not, and then the automaton cannot be
    used any more. That costs the draft: the automaton begins anew and follows the text, and from the next step on the text
    has no drafts. The time of such a look counts against the text only as far as the text comes there.

    Args:
        bits: Its mask; None where it is not known yet.
        times: Of all texts of its request; None for the first of them.

    Attributes:
        follows_drafts: Whether drafts can be followed.
    """

    def __init__(
        self, matcher: Any, renew: Callable[[], Any], bits: bytes | None = None, times: _Times | None = None
    ) -> None:
        self._matcher = matcher
        self._renew = renew
        self._times = _Times() if times is None else times
        self._taken: list[int] = []
        self._ahead: Path = ()  # tokens behind the committed text that the automaton has consumed
        #: By path, of what may follow it; None where the path itself may not. The draft and the target ask for the same.
        self._masks: dict[Path, bytes | None] = {} if bits is None else {(): bits}
        #: By path, the seconds of its mask; and the tokens that were committed since.
        self._looks: dict[Path, float] = {}
        self._walked: Path = ()
        self._look_times = _Times()
        self._wear = _Wear()
        self.follows_drafts = True

    def copy(self) -> GrammarState:
        """Another text of the same request, at the same place. They share what the automaton has computed, so nothing is
        compiled anew, and where one has failed all have, until they begin anew. They share the time that their masks may
        take, too."""
        self._go_to(())
        twin = GrammarState(self._matcher.deep_copy(), self._renew, self._masks.get(()), self._times)
        twin._taken, twin._wear = list(self._taken), self._wear
        return twin

    def advance(self, token_id: int) -> None:
        """A token was committed; one that the structure allows."""
        self._masks.clear()
        self._walked = (*self._walked, token_id)
        if self._walked in self._looks:
            self._times.add(self._looks[self._walked], 1)
        with self._times.counted(num_masks=0):
            known = self._ahead[:1] == (token_id,)
            self._go_to(self._ahead[:1] if known else ())
            taken = known or self._matcher.consume_token(token_id)
            if not taken and self._wear.by_drafts:
                self._begin_anew()
                taken = self._matcher.consume_token(token_id)
            self._ahead = ()
        if not taken:
            raise GrammarError(_gave_up(self._matcher.get_error()))
        self._taken.append(token_id)

    def allowed(self, path: Path, vocab_size: int) -> Tensor | None:
        """Tokens [vocab_size] bool that may follow the committed text and `path`; None where the path itself may not."""
        bits = self._mask(path)
        if bits is None:
            return None
        flags = _flags(bits)[:vocab_size]
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[: len(flags)] = torch.from_numpy(flags)
        return mask

    def only(self, path: Path) -> int | None:
        """The token that alone may follow the committed text and `path`; None where several may, or the path may not.

        Where the structure leaves no choice of the next bytes, a mask of the library has one token: the first of their
        canonical tokenisation, in so far as what comes behind the bytes cannot change it.
        """
        bits = self._mask(path)
        flags = 0 if bits is None else int.from_bytes(bits, "little")
        return flags.bit_length() - 1 if flags.bit_count() == 1 else None

    def _mask(self, path: Path) -> bytes | None:
        if not self._masks:
            self._looks.clear()
            self._walked = ()
        if path not in self._masks:
            self._masks[path] = self._ahead_mask(path) if path else self._own_mask()
        return self._masks[path]

    def _own_mask(self) -> bytes | None:
        """Returns the mask of what may follow the text. If it fails and drafts may have worn the automaton out, a new one
        is asked."""
        with self._times.counted(num_masks=1):
            try:
                return self._compute(())
            except GrammarError:
                if not self._wear.by_drafts:
                    raise
                self._begin_anew()
                return self._compute(())

    def _ahead_mask(self, path: Path) -> bytes | None:
        """Returns the mask of what may follow a draft."""
        begun, self._wear.by_drafts = thread_time(), True
        try:
            return self._compute(path)
        except GrammarError:
            self.follows_drafts = False
            self._begin_anew()
            raise
        finally:
            self._looks[path] = thread_time() - begun
            self._look_times.add(self._looks[path], 1)
            self.follows_drafts = self.follows_drafts and not self._look_times.too_much

    def _begin_anew(self) -> None:
        """Follow the text with a new automaton."""
        self._matcher, self._ahead, self._wear = self._renew(), (), _Wear()
        self._matcher.try_consume_tokens(self._taken)

    def _go_to(self, path: Path) -> bool:
        """Let the automaton stand behind `path`; False where the path may not follow. Paths of one draft begin alike, so it
        goes back no farther than to where they part."""
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._ahead, path, strict=False)))
        if len(self._ahead) > shared:
            self._matcher.rollback(len(self._ahead) - shared)
        taken = self._matcher.try_consume_tokens(list(path[shared:])) if len(path) > shared else 0
        self._ahead = path[: shared + taken]
        return len(self._ahead) == len(path)

    def _compute(self, path: Path) -> bytes | None:
        bits = self._matcher.compute_bitmask() if self._go_to(path) else None
        if self._matcher.is_error():
            raise GrammarError(_gave_up(self._matcher.get_error()))
        return bits


class GrammarCompiler:
    """Makes automata for one tokenizer.

    Args:
        tokenizer: Of the target; None where it has none.

    Attributes:
        trials: Where structures are tried before anything is made of them here; None where those who write them are trusted
            with the whole process.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = Lock()
        self._wrapped: Any | None = None
        self.trials: Trials | None = None

    def start(self, structure: StructuredOutputs) -> GrammarState:
        """A text that has yet to begin, with its first mask. Any thread may call this, and it may take tenths of a
        second."""
        written = _written(structure)
        library = _library()
        with self._lock:
            if self._wrapped is None:
                vocabulary = self._read_vocabulary()
                if self.trials is not None:  # its process reads the vocabulary meanwhile
                    self.trials.prepare(vocabulary)
                self._wrapped = vocabulary.wrapped(library)
        if self.trials is not None:
            refusal = self.trials.verdict(written, self._read_vocabulary)
            if refusal is not None:
                raise _refused(structure, refusal)
        wrapped = self._wrapped
        try:
            matcher, bits = compiled(written, wrapped, library)
            return GrammarState(matcher, lambda: compiled(written, wrapped, library)[0], bits)
        except StructureError as error:
            raise _refused(structure, error) from error

    def _read_vocabulary(self) -> StructureVocabulary:
        if self._tokenizer is None or not self._eos_token_ids:
            lacks = "tokenizer" if self._tokenizer is None else "token that ends a text"
            raise ContradictionError(_FIELD, "...", f"the model has no {lacks}", "Use a model that has one.")
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            problem = "the model's tokenizer is none of the fast ones, which structures need"
            raise UnsupportedParameterError(_FIELD, "...", problem, "Use a model that has a tokenizer.json.")
        try:
            return StructureVocabulary.of(self._tokenizer, self._vocab_size, self._eos_token_ids)
        except StructureError as error:
            problem = f"the model's tokenizer is none that structures can follow: {error}"
            raise UnsupportedParameterError(_FIELD, "...", problem, "Use another model.") from error


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedParameterError(
            _FIELD, "...", "the library that follows grammars is not installed", "Install outrider[grammar]."
        ) from error
    return llguidance


def _given(structure: StructuredOutputs) -> object:
    return next(v for v in dict(structure).values() if v not in (None, False, ()))


def _written(structure: StructuredOutputs) -> Written:
    """The structure as text, which is not too large."""
    if structure.choice:
        _check_size(structure, sum(map(len, structure.choice)))
        return Written.choices(structure.choice)
    if structure.json_object or structure.json_schema is not None:
        written = Written("schema", '{"type": "object"}' if structure.json_object else _schema_text(structure))
    elif structure.regex is not None:
        written = Written("regex", structure.regex)
    else:
        written = Written.grammar(structure.grammar or "")
    _check_size(structure, len(written.text))
    return written


def _schema_text(structure: StructuredOutputs) -> str:
    if isinstance(structure.json_schema, str):
        return structure.json_schema
    try:
        return json.dumps(structure.json_schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(structure, error) from error


def _check_size(structure: StructuredOutputs, num_characters: int) -> None:
    if len(structure.choice) > MAX_CHOICES:
        raise InvalidParameterError(
            _FIELD,
            structure.choice,
            f"it is too large: {len(structure.choice):,} choices",
            f"Use up to {MAX_CHOICES:,} choices; a regex or a grammar says many alike in one.",
        )
    if num_characters > MAX_CHARACTERS:
        raise InvalidParameterError(
            _FIELD,
            _given(structure),
            f"it is too large: {num_characters:,} characters",
            f"Use up to {MAX_CHARACTERS:,} characters in all.",
        )


def _refused(structure: StructuredOutputs, reason: object) -> InputError:
    """Why a structure cannot be followed: it is more than an automaton can do, nothing has it, it asks for what is not
    supported, or it is written wrongly."""
    line = _first_line(reason)
    if _is_too_much(line):
        remedy = "Use fewer or shorter repetitions, fewer alternatives, smaller multiples, and less nesting."
        return InvalidParameterError(_FIELD, _given(structure), f"it is too much for an automaton ({line})", remedy)
    if any(part in line for part in _DEAD_ENDS):
        return InvalidParameterError(_FIELD, _given(structure), "no text can have it", "Give one that a text can have.")
    keywords = _UNKNOWN_KEYWORDS.search(line)
    if keywords is not None or any(part in line for part in _UNSUPPORTED):
        said = line if keywords is None else f"the keyword {keywords[1]}"
        problem = f"it is sound, but asks for what is not supported here ({said})"
        return UnsupportedParameterError(_FIELD, _given(structure), problem, "Say it in another way, or leave it out.")
    return InvalidParameterError(_FIELD, _given(structure), f"it is malformed ({line})", "Correct it.")


def _flags(bits: bytes) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").astype(bool)


def _is_too_much(line: str) -> bool:
    return any(part in line.lower() for part in _TOO_MUCH)


def _gave_up(reason: object) -> str:
    """Returns what is said of an automaton that cannot go on."""
    line = _first_line(reason)
    if _is_too_much(line):
        return f"the structure became too much for its automaton ({line})"
    return f"no token may follow in the structure ({line})" if _DEAD_END in line else line


def _first_line(reason: object, limit: int = 200) -> str:
    """Returns what an error says, without the states and lists that may follow."""
    lines = str(reason).strip().splitlines() or ["no reason was given"]
    # Behind a drawing of a regular expression comes what is wrong with it.
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    line = f"{lines[0].removesuffix('regex parse error:')}{told}" if told else lines[0]
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
