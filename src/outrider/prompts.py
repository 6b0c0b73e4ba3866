"""From prompts and conversations to token ids, for several threads at once."""

from __future__ import annotations

from threading import Lock
from typing import Any

from outrider.arguments import encode_text, read_conversation, read_prompt
from outrider.errors import InvalidParameterError, InvalidPromptError

#: The text of a prompt, None where it came as token ids or as a conversation, and its token ids.
Encoded = tuple[str | None, tuple[int, ...]]


class PromptEncoder:
    """Encodes what callers give. Some tokenizers serve one thread at a time, so it does one prompt at a time.

    Args:
        tokenizer: Of the target; None where it has none, and then prompts are token ids.
        model: What to call the target in errors; None for the embedded one.
    """

    def __init__(self, tokenizer: Any | None, model: str | None) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self._lock = Lock()

    def encode(self, prompt: Any, *, add_special_tokens: bool = True) -> Encoded:
        """A prompt in any form.

        Args:
            prompt: A text, token ids, or either in a dict.
            add_special_tokens: Whether a text gets the tokens that the tokenizer puts around texts.

        Raises:
            InvalidPromptError: It is none, it is empty, or it cannot be encoded.
        """
        content = read_prompt(prompt)
        if not isinstance(content, str):
            return None, content
        with self._lock:
            return content, encode_text(self.tokenizer, content, add_special_tokens=add_special_tokens)

    def encode_prediction(self, prediction: Any) -> tuple[int, ...]:
        """What a caller expects an output to be: a text, token ids, or None for nothing.

        Raises:
            InvalidPromptError: It is none of these, or it cannot be encoded.
        """
        if prediction is None or prediction == "":
            return ()
        if not isinstance(prediction, str):
            try:
                return self.encode(prediction)[1]
            except InvalidPromptError as error:
                raise InvalidPromptError("prediction", prediction, error.problem, error.remedy) from None
        with self._lock:  # it goes on behind a prompt, so it has no token that begins a text
            return encode_text(self.tokenizer, prediction, field="prediction", add_special_tokens=False)

    def encode_conversation(self, messages: Any, *, tools: Any | None = None, **settings: Any) -> Encoded:
        """A conversation through the tokenizer's chat template, with the turn handed to the model.

        Args:
            messages: The conversation.
            tools: Descriptions of functions that the model may call, for templates that know them.
            settings: What else the template knows.

        Raises:
            InvalidParameterError: There is no tokenizer, or it has no chat template.
            InvalidPromptError: The template refuses the messages, or they are none.
        """
        self.check_template()
        assert self.tokenizer is not None, "it has a template"
        conversation = read_conversation(messages)
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

    def check_template(self) -> None:
        """Raise InvalidParameterError where conversations cannot be written as prompts."""
        if getattr(self.tokenizer, "chat_template", None) is not None:
            return
        raise InvalidParameterError(
            "model",
            self._model,
            f"{'the embedded default model' if self._model is None else 'it'} has no chat template: "
            "it completes text and was not trained to converse",
            "Use generate with a plain prompt, or a model whose tokenizer has a chat template.",
        )
