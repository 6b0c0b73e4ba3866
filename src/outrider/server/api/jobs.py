"""Job: a checked request with its prompts as tokens, its parameters and its tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.engine.admission import check_prompt_ids
from outrider.errors import ContradictionError, InvalidParameterError, UnsupportedParameterError
from outrider.params import SamplingParams, StructuredOutputs
from outrider.prompts import PromptEncoder
from outrider.propose.speculation import SpeculationConfig
from outrider.server.api.allowed import AllowedMethods
from outrider.server.api.conversation import encode, forced_calls, only_call_ends_with
from outrider.server.api.schemas import ChatRequest, CommonRequest, CompletionRequest
from outrider.server.api.sizes import check_lists
from outrider.server.api.translate import check_size, sampling
from outrider.server.settings import ServerSettings


@dataclass(frozen=True)
class Prompt:
    """What is completed.

    Attributes:
        token_ids: Never changed by the engine.
        text: As it was given, or as the tokens read; empty where nobody wants it back.
        first: How the first token reads.
    """

    token_ids: tuple[int, ...]
    text: str = ""
    first: str = ""


@dataclass(frozen=True)
class Job:
    """What the engine is asked to write.

    Attributes:
        asked: The request.
        prompts: One or more, and `params.n` samples of each.
        params: For all of them.
        speculation: Who drafts.
        namespace: Whose it is.
        is_silent: Whether no token is told: only the prompt and its log probabilities are wanted.
        is_recorded: Whether somebody else than the client wants to know of its rounds.
    """

    asked: CommonRequest
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    speculation: SpeculationConfig
    namespace: str | None
    is_silent: bool = False
    is_recorded: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_sequences(self) -> int:
        """Texts that are written."""
        return len(self.prompts) * self.params.n

    def options(self) -> dict[str, Any]:
        """What AsyncLLM takes beside a prompt and parameters."""
        return {
            "speculation": self.speculation,
            "namespace": self.namespace,
            "trace": bool(self.asked.trace) or self.is_recorded,
            "prediction": self.asked.predicted,
            "priority": self.asked.priority or 0,
        }


@dataclass(frozen=True)
class JobMaker:
    """Makes jobs of requests, in any thread.

    Attributes:
        prompts: Encodes.
        defaults: The model's own parameters.
        longest: Tokens that a text may have, prompt and output together.
        allowed: The methods of the server.
        settings: Its limits.
        vocab_size: Token ids that the model knows.
        text_start: What every text begins with, where an encoder reads the prompt; None where it begins with the prompt.
    """

    prompts: PromptEncoder
    defaults: SamplingParams
    longest: int
    allowed: AllowedMethods
    settings: ServerSettings
    vocab_size: int
    text_start: tuple[int, ...] | None = None

    def make(self, asked: CommonRequest, namespace: str | None) -> Job:
        """A request with all that can be known of it before the engine sees it.

        Raises:
            InputError: Something in it cannot be served.
        """
        self.check_size(asked)
        found = self._prompts(asked)
        begun = max(len(prompt.token_ids) for prompt in found) if self.text_start is None else len(self.text_start)
        room = self.longest - begun
        params = sampling(asked, self.defaults, room, self.settings)
        if isinstance(asked, ChatRequest):
            params = self._with_calls(asked, params)
        speculation = self.allowed.of(asked.speculation, predicted=asked.predicted is not None)
        return Job(asked, found, params, speculation, namespace, is_silent=asked.max_tokens == 0)

    def _with_calls(self, asked: ChatRequest, params: SamplingParams) -> SamplingParams:
        """The parameters with which the text has the calls of tools that the request asks for."""
        grammar, end = forced_calls(asked, self.prompts), only_call_ends_with(asked, self.prompts)
        if grammar is not None:
            if params.structured_outputs is not None:
                problem = "the text cannot be a call and have a structure of its own"
                raise ContradictionError("tool_choice", asked.tool_choice, problem, "Leave one of them out.")
            check_size("tools", grammar, self.settings)
            params = params.replace(structured_outputs=StructuredOutputs(grammar=grammar))
        return params if end is None else params.replace(stop=(*params.stop, end))

    def check_size(self, asked: CommonRequest) -> int:
        """The number of texts that a request asks for; known before its prompts are encoded.

        Raises:
            InvalidParameterError: There are too many, or none, or a list of the request is too large.
        """
        check_lists(asked, self.settings)
        num_prompts = len(asked.prompts) if isinstance(asked, CompletionRequest) else 1
        num_samples = 1 if asked.n is None else asked.n
        num_texts = num_prompts * num_samples
        if not 1 <= num_texts <= self.settings.max_n:
            prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
            samples = "1 sample" if num_samples == 1 else f"{num_samples} samples"
            problem = f"{prompts} with {samples} each make {num_texts} in all"
            remedy = f"Ask for 1 to {self.settings.max_n} texts at a time."
            raise InvalidParameterError("n", asked.n, problem, remedy)
        return num_texts

    def _prompts(self, asked: CommonRequest) -> tuple[Prompt, ...]:
        if isinstance(asked, ChatRequest):
            return (Prompt(encode(asked, self.prompts)),)
        assert isinstance(asked, CompletionRequest)
        if asked.echo and self.text_start is not None:
            problem = "an encoder reads the prompt, which is no part of the text"
            raise UnsupportedParameterError("echo", asked.echo, problem, "Leave it out.")
        special = asked.add_special_tokens is not False
        encoded = [self.prompts.encode(prompt, add_special_tokens=special) for prompt in asked.prompts]
        return tuple(self._prompt(text, tokens, echoed=bool(asked.echo)) for text, tokens in encoded)

    def _prompt(self, text: str | None, tokens: tuple[int, ...], *, echoed: bool) -> Prompt:
        tokenizer = self.prompts.tokenizer
        if not echoed or tokenizer is None:
            return Prompt(tokens)
        check_prompt_ids(tokens, self.vocab_size)  # now: a tokenizer reads no others back
        shown = tokenizer.decode(tokens, skip_special_tokens=True) if text is None else text
        return Prompt(tokens, shown, tokenizer.decode(tokens[:1]))
