"""Encodes prompts and conversations to token ids, for several threads at once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from threading import Lock
from typing import Any

from outrider.arguments import encode_text, read_conversation, read_prompt
from outrider.errors import InvalidParameterError, InvalidPromptError

#: The text of a prompt, None where it came as token ids or as a conversation, and its token ids.
Encoded = tuple[str | None, tuple[int, ...]]


class PromptEncoder:
    """Encodes what callers give. Tokenizers written in Python serve one thread at a time. Those of the tokenizers library
    serve several, once the first call has settled that texts are neither cut nor padded.

    Args:
        tokenizer: Of the target; None where it has none, and then prompts are token ids.
        model: What to call the target in errors; None for the embedded one.
        max_model_len: Tokens of the longest text that the target takes; None for no limit.
    """

    def __init__(self, tokenizer: Any | None, model: str | None, max_model_len: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self._max_model_len = max_model_len
        self._lock: AbstractContextManager[Any] = Lock()
        if tokenizer is not None and getattr(tokenizer, "is_fast", False):
            tokenizer("", verbose=False)
            self._lock = nullcontext()

    def encode(self, prompt: Any, *, add_special_tokens: bool = True) -> Encoded:
        """A prompt in any form.

        Args:
            prompt: A text, token ids, or either in a dict.
            add_special_tokens: Whether a text gets the tokens that the tokenizer puts around texts.

        Raises:
            InvalidPromptError: It is none, it is empty, it is far too long, or it cannot be encoded.
        """
        content = read_prompt(prompt)
        if not isinstance(content, str):
            return None, content
        self._check_length("prompt", len(content))
        with self._lock:
            return content, encode_text(self.tokenizer, content, add_special_tokens=add_special_tokens)

    def encode_prediction(self, prediction: Any) -> tuple[int, ...]:
        """What a caller expects an output to be: a text, token ids, or None for nothing.

        Raises:
            InvalidPromptError: It is none of these, it is far too long, or it cannot be encoded.
        """
        return self._encode_continuation("prediction", prediction)

    def encode_decoder_prompt(self, decoder_prompt: Any, text_start: tuple[int, ...]) -> tuple[int, ...]:
        """What a decoder goes on from, where an encoder reads the prompt: a text, which gets the tokens that every text
        begins with, or token ids, which are taken as they are; empty for None.

        Raises:
            InvalidPromptError: It is none of these, it is far too long, or it cannot be encoded.
        """
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
        with self._lock:  # it goes on behind other tokens, so it has none that begins a text
            return encode_text(self.tokenizer, given, field=field, add_special_tokens=False)

    def encode_conversation(self, messages: Any, *, tools: Any | None = None, **settings: Any) -> Encoded:
        """A conversation through the tokenizer's chat template, with the turn handed to the model.

        Args:
            messages: The conversation.
            tools: Descriptions of functions that the model may call, for templates that know them.
            settings: What else the template knows.

        Raises:
            InvalidParameterError: There is no tokenizer, or it has no chat template.
            InvalidPromptError: The template refuses the messages, they are far too long, or they are none.
        """
        self.check_template()
        assert self.tokenizer is not None, "it has a template"
        conversation = read_conversation(messages)
        self._check_length("messages", sum(map(_num_characters, conversation)))
        try:
            with self._lock:
                encoded = self.tokenizer.apply_chat_template(
                    conversation,
                    tools=tools,
                    add_generation_prompt=True,
                    return_dict=True,
                    tokenizer_kwargs={"verbose": False},
                    **settings,
                )
        except Exception as error:
            problem = f"the chat template refuses them ({error})"
            raise InvalidPromptError("messages", conversation, problem, "Use role and content in each.") from error
        return None, tuple(encoded["input_ids"])

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

    def check_template(self) -> None:
        """Raise InvalidParameterError where conversations cannot be written as prompts."""
        if getattr(self.tokenizer, "chat_template", None) is not None:
            return
        raise InvalidParameterError(
            "model",
            "the embedded default" if self._model is None else self._model,
            "it has no chat template: it completes text and was not trained to converse",
            "Use generate with a plain prompt, or a model whose tokenizer has a chat template.",
        )


def _num_characters(message: Any) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else 0
