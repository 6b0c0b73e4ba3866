"""Prompts and conversations of callers: their types and checks, and their encoding to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, partial
from numbers import Integral
from threading import Lock
from typing import Any, TypedDict

import numpy as np
import torch

from outrider.conversations import (
    check_developer,
    read_conversation,
    read_tools,
    template_of,
    with_written_arguments,
)
from outrider.errors import InvalidParameterError, InvalidPromptError
from outrider.loading.templates import TemplateLimits, render_conversation, renders_by_template

# --- Encodes prompts and conversations to token ids, for several threads at once.


#: Characters of a token, of which few texts have more.
_USUAL_CHARACTERS = 8
#: The text of a prompt, None where it came as token ids or as a conversation, and its token ids.
Encoded = tuple[str | None, tuple[int, ...]]


class PromptEncoder:
    """Encodes what callers give. Tokenizers written in Python serve one thread at a time. Those of the tokenizers library
    serve several, once the first call has settled that texts are neither cut nor padded.

    Args:
        tokenizer: Of the target; None where it has none, and then prompts are token ids.
        model: What to call the target in errors; None for the embedded one.
        max_model_len: Tokens of the longest text that the target takes; None for no limit.

    Attributes:
        template_limits: What it may cost to write a conversation by a chat template.
    """

    def __init__(self, tokenizer: Any | None, model: str | None, max_model_len: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self.template_limits = TemplateLimits()
        self._max_model_len = max_model_len
        self._lock: AbstractContextManager[Any] = Lock()
        if tokenizer is not None and getattr(tokenizer, "is_fast", False):
            tokenizer("", verbose=False)
            self._lock = nullcontext()

    def encode(self, prompt: Any, *, add_special_tokens: bool = True) -> Encoded:
        """A prompt in any form."""
        content = read_prompt(prompt)
        if not isinstance(content, str):
            return None, content
        self._check_length("prompt", len(content))
        self._check_beginning("prompt", content)
        with self._lock:
            return content, encode_text(self.tokenizer, content, add_special_tokens=add_special_tokens)

    def encode_prediction(self, prediction: Any) -> tuple[int, ...]:
        """Returns what a caller expects an output to be: a text, token ids, or None for nothing."""
        return self._encode_continuation("prediction", prediction)

    def encode_references(self, references: Any) -> tuple[tuple[int, ...], ...]:
        """Returns the texts that an output may quote, of each as much as the context might hold."""
        if isinstance(references, str | bytes) or not isinstance(references, Sequence):
            raise InvalidPromptError("references", references, "no list of texts", "Give a list of texts or of token ids.")
        length = self._max_model_len
        most = None if length is None else length * min(_USUAL_CHARACTERS, self._longest_token)
        found = [each[:most] if isinstance(each, str) else each for each in references]
        return tuple(self._encode_continuation(f"references.{place}", each) for place, each in enumerate(found))

    def encode_decoder_prompt(self, decoder_prompt: Any, text_start: tuple[int, ...]) -> tuple[int, ...]:
        """Returns what a decoder goes on from, where an encoder reads the prompt: a text, which gets the tokens that every
        text begins with, or token ids, which are taken as they are; empty for None."""
        tokens = self._encode_continuation("decoder_prompt", decoder_prompt)
        return (*text_start, *tokens) if tokens and isinstance(decoder_prompt, str) else tokens

    def _encode_continuation(self, field: str, given: Any) -> tuple[int, ...]:
        if given is None or (isinstance(given, str) and not given):
            return ()
        if not isinstance(given, str):
            try:
                return self.encode(given)[1]
            except InvalidPromptError as error:
                raise InvalidPromptError(field, given, error.problem, error.remedy) from None
        self._check_length(field, len(given))
        self._check_beginning(field, given)
        with self._lock:  # it goes on behind other tokens, so it has none that begins a text
            return encode_text(self.tokenizer, given, field=field, add_special_tokens=False)

    def encode_conversation(self, messages: Any, *, tools: Any | None = None, **settings: Any) -> Encoded:
        """A conversation through the tokenizer's chat template, with the turn handed to the model."""
        self.check_template()
        assert self.tokenizer is not None, "it has a template"
        conversation = read_conversation(messages, template_of(self.tokenizer, tools=bool(tools)))
        described = read_tools(tools)
        sizes = {"messages": conversation, "tools": described, "chat_template_kwargs": settings}
        found = {name: num_characters(given) for name, given in sizes.items()}
        largest = max(found, key=lambda name: found[name])
        self._check_length(largest, sum(found.values()))

        def encode(tools: Any) -> tuple[int, ...]:
            try:
                return self._encode_conversation(conversation, messages, tools, settings, largest)
            except TypeError:  # the template joins arguments of calls with text
                written = with_written_arguments(conversation)
                return self._encode_conversation(written, messages, tools, settings, largest)

        try:
            return None, encode(described)
        except InvalidPromptError:
            raise
        except Exception as error:
            field, remedy = "messages", "Give each a role and a content, in an order that the template takes."
            value: object = conversation
            with suppress(Exception):  # which a conversation without tools may do as well
                if described and encode(None):
                    field, value, remedy = "tools", described, "Use fewer tools, and schemas that are not nested so deeply."
            with suppress(Exception):  # as may one with the template's own settings
                if settings and self._encode_conversation(conversation, messages, described, {}, largest):
                    field, value = "chat_template_kwargs", settings
                    remedy = "Use values that the template takes, and that are not nested deeply."
            whose = "the embedded model" if self._model is None else self._model
            problem = f"the chat template of {whose} refuses them ({error})"
            raise InvalidPromptError(field, value, problem, remedy) from error

    def _encode_conversation(
        self, conversation: list[dict[str, Any]], asked: Any, tools: Any, settings: Mapping[str, Any], largest: str
    ) -> tuple[int, ...]:
        """The tokens of a conversation that was read from `asked`; `largest` is the field that has most of its text."""
        how: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, **settings}
        if not renders_by_template(self.tokenizer):  # it has its own way to write one
            plain = {"return_dict": True, "tokenizer_kwargs": {"verbose": False}}
            encode = self.tokenizer.apply_chat_template  # type: ignore[union-attr]
            with self._lock:
                check_developer(conversation, asked, partial(encode, tokenize=False, **how))
                return tuple(encode(conversation, **plain, **how)["input_ids"])

        def write(conversation: Any) -> str:
            return render_conversation(self.tokenizer, conversation, tools, settings, self.template_limits)

        check_developer(conversation, asked, write)
        text = write(conversation)
        self._check_length(largest, len(text))
        self._check_beginning(largest, text)
        with self._lock:
            return encode_text(self.tokenizer, text, field="messages", add_special_tokens=False)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1) if self.tokenizer is not None else 1

    def _check_length(self, field: str, num_characters: int) -> None:
        """Raise InvalidPromptError where a text is so long that it is not worth encoding: not if every token of it were the
        longest that there is would it fit into the context."""
        length = self._max_model_len
        if length is None or num_characters <= length or num_characters <= length * self._longest_token:
            return
        raise InvalidPromptError(
            field,
            f"{num_characters:,} characters",
            f"no room in the context of {length:,} tokens, of which the longest has {self._longest_token} characters",
            f"Shorten it to {length * self._longest_token:,} characters or fewer.",
        )

    def _check_beginning(self, field: str, text: str) -> None:
        """Raise InvalidPromptError where the beginning of a long text has more tokens already than the context.

        What follows may change the last few tokens of a beginning, and no more of them than the longest token has
        characters.
        """
        length = self._max_model_len
        if length is None or self.tokenizer is None:
            return
        size = _USUAL_CHARACTERS * length
        while 2 * size < len(text):
            found = 0
            with self._lock, suppress(InvalidPromptError):  # whoever encodes the whole text says what is wrong with it
                found = len(encode_text(self.tokenizer, text[:size]))
            if found > length + self._longest_token:
                problem = f"no room in the context of {length:,} tokens, which its first {size:,} characters fill"
                raise InvalidPromptError(field, f"{len(text):,} characters", problem, "Shorten it.")
            size *= 4

    def check_template(self) -> None:
        """Raise InvalidParameterError where conversations cannot be written as prompts."""
        if getattr(self.tokenizer, "chat_template", None) is not None:
            return
        raise InvalidParameterError(
            "model",
            "the embedded default" if self._model is None else self._model,
            "it has no chat template: it completes text and was not trained to converse",
            "Use generate with a plain prompt, or a model that has one, or give one: chat and serve take --chat-template.",
        )


def num_characters(given: Any) -> int:
    """Characters of all texts and numbers in a value, names included; objects of other kinds count as nothing."""
    found, left = 0, [given]
    while left:
        value = left.pop()
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, Mapping):
            left += (*value.keys(), *value.values())
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, bool | int | float):
            found += 1
    return found


# --- Types and checks of the prompts that callers write.


class TextPrompt(TypedDict):
    """A text to complete."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids to complete."""

    prompt_token_ids: Sequence[int] | torch.Tensor | np.ndarray


#: A text, token ids (a list, or a 1-D array of integers), or either in a dict.
Prompt = str | Sequence[int] | torch.Tensor | np.ndarray | TextPrompt | TokensPrompt

_ARRAYS = (torch.Tensor, np.ndarray)
_BYTES = (bytes, bytearray, memoryview)
_DICT_REMEDY = "Give {'prompt': text} or {'prompt_token_ids': token ids}."


def split_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts one by one, and whether it is a single one that stands in no list. None of them is checked yet."""
    if isinstance(prompts, str | Mapping | torch.Tensor | np.ndarray) or _is_list_of_numbers(prompts):
        return [prompts], True
    if not isinstance(prompts, Iterable) or isinstance(prompts, _BYTES):
        raise InvalidPromptError(
            "prompts",
            prompts,
            "neither a prompt nor a list of prompts",
            "Give a string, a list of token ids, or a list of either.",
        )
    return list(prompts), False


def read_prompt(prompt: Any) -> str | tuple[int, ...]:
    """The text, or the token ids, that a prompt holds."""
    if isinstance(prompt, Mapping):
        return _read_dict(prompt)
    if isinstance(prompt, str):
        return prompt
    tokens = _token_ids(prompt)
    if tokens is None:
        raise InvalidPromptError("prompt", prompt, "neither text nor token ids", "Give a string or a list of integers.")
    return tokens


def encode_text(tokenizer: Any, text: str, *, field: str = "prompt", add_special_tokens: bool = True) -> tuple[int, ...]:
    """The tokens of a prompt.

    Args:
        tokenizer: That of the model. None where it has none.
    """
    if tokenizer is None:
        raise InvalidPromptError(field, text, "the model has no tokenizer", "Give a list of token ids.")
    if not text:
        raise InvalidPromptError(field, text, "it is empty", "Give at least one character.")
    try:
        # Not verbose: it would warn of the length that the tokenizer's file names. The model's own is checked elsewhere.
        return tuple(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    except (TypeError, UnicodeError) as error:  # half a surrogate pair, as undecodable bytes in argv become
        raise InvalidPromptError(field, text, "it is not valid Unicode", "Give text in UTF-8.") from error


def _read_dict(prompt: Mapping[Any, Any]) -> str | tuple[int, ...]:
    if prompt.keys() == {"prompt"}:
        text = prompt["prompt"]
        if isinstance(text, str):
            return text
        raise InvalidPromptError("prompt", text, "not text", _DICT_REMEDY)
    if prompt.keys() == {"prompt_token_ids"}:
        tokens = _token_ids(prompt["prompt_token_ids"])
        if tokens is not None:
            return tokens
        raise InvalidPromptError("prompt_token_ids", prompt["prompt_token_ids"], "not token ids", _DICT_REMEDY)
    raise InvalidPromptError("prompt", prompt, "a dict that does not hold exactly one prompt", _DICT_REMEDY)


def _token_ids(value: Any) -> tuple[int, ...] | None:
    """None where `value` is no list of whole numbers; an array that is none is refused with what is wrong with it."""
    if isinstance(value, _ARRAYS):
        _check_array(value)
        return tuple(value.tolist())
    if _is_list(value) and all(_is_number(t) and not isinstance(t, bool) for t in value):
        return tuple(int(t) for t in value)
    return None


def _check_array(array: torch.Tensor | np.ndarray) -> None:
    if array.ndim > 1:
        remedy = "Give one prompt as a 1-D array of integers, several as a list of 1-D arrays of integers without padding."
        raise InvalidPromptError("prompt", array, f"an array of {array.ndim} dimensions", remedy)
    if array.ndim == 0 or not _is_whole(array):
        problem = f"an array of {array.dtype}" if array.ndim else "an array of 0 dimensions"
        raise InvalidPromptError("prompt", array, problem, "Give token ids as a 1-D array of integers, text as a string.")


def _is_whole(array: torch.Tensor | np.ndarray) -> bool:
    """Tells whether its numbers are integers."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"
    return not (array.is_floating_point() or array.is_complex() or array.dtype == torch.bool)


def _is_number(value: Any) -> bool:
    """An integer of Python, of NumPy, or in a tensor without dimensions, as iterating over a tensor gives."""
    return isinstance(value, Integral) or (isinstance(value, torch.Tensor) and value.ndim == 0 and _is_whole(value))


def _is_list(value: Any) -> bool:
    """Bytes are a sequence of integers to Python, and not what anyone means."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_list_of_numbers(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(_is_number(item) for item in value)
