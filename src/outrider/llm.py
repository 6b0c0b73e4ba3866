"""The offline API: load a model, generate, stream, chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import torch

from outrider.building import EnginePlan, Identity, RecommendedSettings, draft_name, model_name
from outrider.config import (
    CacheConfig,
    ModelConfig,
    RequestOptions,
    SchedulerConfig,
    default_model,
    part_of,
    shown_name,
)
from outrider.conversations import Conversation, split_conversations
from outrider.engine.drafting.proposers import ProposerSet
from outrider.engine.engine import Engine
from outrider.engine.sequence import Request
from outrider.engine.stats import EngineStats
from outrider.engine.thread import EngineThread, Health, Inbox, Mailbox, stream_pieces, write_all
from outrider.errors import ClosedError, InputError, InvalidParameterError, InvalidPromptError, OutriderError
from outrider.loading.exclusive import collection_paused
from outrider.loading.gguf.header import forget_headers
from outrider.options import (
    CallOptions,
    LLMSettings,
    Speculation,
    TextOptions,
    check_namespace,
    names_keywords,
    refuse_keywords,
    refuse_settings,
    spread,
)
from outrider.params import RequestOutput, SamplingParams, StreamPiece
from outrider.prompts import Prompt, split_prompts
from outrider.propose.defaults import SpeculationDefaults
from outrider.propose.settings import SpeculationConfig

T = TypeVar("T")


class LLM:
    """A model ready to write, with or without a proposer that runs ahead of it. The output distribution is the same.

    Several threads may call it at the same time: the model runs in a thread of its own, and whatever they ask for shares
    its batches. A process that is forked after loading cannot use it. `close` frees its memory; so does the end of a
    `with` block, or of its last reference.

    Args:
        model: Local folder or hub id; or a causal language model of transformers, which is copied, weights and all, and
            stays as it is. None takes the embedded default pair.
        settings: Who drafts, and how the model is loaded and computed; see `LLMSettings`.

    Raises:
        InputError: A setting is unknown, out of range or contradicts another.
        ModelError: A checkpoint cannot be used, or the profile was made for another model.
        ForkedProcessError: This process was forked from one that had loaded a model.
    """

    @names_keywords(LLMSettings)
    def __init__(self, model: str | PathLike[str] | torch.nn.Module | None = None, **settings: Unpack[LLMSettings]) -> None:
        refuse_settings(settings)
        speculation, draft_model, profile = (
            settings.get("speculation"),
            settings.get("draft_model"),
            settings.get("profile"),
        )
        draft = draft_name(draft_model)
        given = {"model": model_name(model), **settings}
        self._plan = EnginePlan(
            ModelConfig(**part_of(ModelConfig, given)),
            CacheConfig(**part_of(CacheConfig, given)),
            SchedulerConfig(**part_of(SchedulerConfig, given)),
            SpeculationDefaults.of(speculation, draft, default_model("draft") if model is None else None),
            None if profile is None else RecommendedSettings.read(profile, speculation, draft),
            embedded=model is None,
        )
        if not isinstance(draft_model, torch.nn.Module):
            self._plan.defaults.check_sources()
        self._thread = EngineThread()
        build = partial(self._build, model, settings.get("tokenizer"), draft_model)
        self._thread.load(partial(build, consume=settings.get("consume", False)))

    def _build(self, model: Any, tokenizer: Any | None, draft_model: Any | None, *, consume: bool) -> Engine:
        try:
            with collection_paused():
                built = self._plan.build(model, tokenizer, draft_model, consume=consume)
        finally:
            forget_headers()
        engine, self.prompts, self.default_params, self._defaults = built
        return engine

    @property
    def speculation(self) -> SpeculationConfig:
        """The settings of calls that bring none."""
        return self._defaults.config

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, and free the weights and the KV memory.

        Calls that other threads wait in, and later ones, raise ClosedError, but for this one: it may be called again.
        """
        self._thread.close()

    def __repr__(self) -> str:
        try:
            runner = self.engine.runner
        except ClosedError:
            return f"<LLM model={shown_name(self._plan.model.model)} closed>"
        config, speculation, draft = self._plan.model, self.speculation, self._defaults.draft
        loaded = runner.loaded
        facts = {
            "model": shown_name(loaded.name),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "quantization": config.quantization,
            "activations": "int8" if loaded.rounds_rows else None,
            "device": loaded.device,
            "attention_backend": runner.backend.name,
            "kernels": runner.backend.instruction_set(loaded.model) or "stock",
            "batch_invariant": config.batch_invariant or None,
            "speculation": speculation.name,
            "num_draft_tokens": speculation.num_draft_tokens if speculation.enabled else None,
            "draft_model": None if draft is None else shown_name(draft.model),
        }
        return f"<LLM {' '.join(f'{name}={fact}' for name, fact in facts.items() if fact is not None)}>"

    @property
    def is_embedded(self) -> bool:
        """Tells whether the target is the one that comes with the package."""
        return self._plan.embedded

    @property
    def engine(self) -> Engine:
        """Returns what drives requests, in a thread of its own. Whoever drives it by hand does so while it has no work."""
        return self._thread.engine

    @property
    def identity(self) -> Identity:
        """Returns what a profile of this LLM holds for: its model, its weights' type and its machine."""
        return self.between_steps(lambda engine: Identity.of(engine.runner, self._plan.model))

    @property
    def proposers(self) -> ProposerSet:
        """The proposers in use."""
        return self.engine.proposers

    @property
    def tokenizer(self) -> Any | None:
        """The target's tokenizer; None where it has none."""
        return self.prompts.tokenizer

    @property
    def health(self) -> Health:
        """Returns how the engine has fared since the start."""
        return self._thread.health

    @property
    def busy_seconds(self) -> float:
        """Returns how long the engine has been at work on one step, or one command, so far; 0 while it rests."""
        return self._thread.busy_seconds

    @property
    def stats(self) -> EngineStats:
        """Totals over all requests since the start, or since `stats.reset()`."""
        return self.engine.stats

    @names_keywords(TextOptions)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        speculation: Speculation | Sequence[Speculation | None] | None = None,
        on_finished: Callable[[RequestOutput], None] | None = None,
        **options: Unpack[TextOptions],
    ) -> list[RequestOutput]:
        """Complete prompts in continuous batches.

        Args:
            prompts: A prompt, or a list of prompts. A prompt is a string, a list or 1-D array of token ids, or one of
                these in a dict: {"prompt": text} or {"prompt_token_ids": token ids}.
            params: For all prompts, or one each; taken as they stand. None takes `default_params`: what the checkpoint's
                generation_config.json, or a GGUF file, says of temperature, top_k, top_p, min_p, repetition_penalty and
                max_new_tokens, and the defaults of SamplingParams for the others; do_sample decides nothing, as in vLLM.
            speculation: Overrides the LLM's, for all prompts or one each; "none" decodes plainly.
            on_finished: Called with each output as it is done, for progress displays.
            options: For all of them `namespace`, `trace`, `prediction`, `references`, `priority`, `decoder_prompt` or
                `shown_tokens`; see TextOptions.

        Returns:
            Outputs in the order of the prompts. In a list, a prompt that cannot be served has `error` set and the
            others finish; a single prompt raises instead.

        Raises:
            OutriderError: The only prompt failed, or `params` or `speculation`, given once for all prompts or in the wrong
                number, cannot be used. Then nothing was written.
            ClosedError: The LLM is closed.
        """
        refuse_keywords(self.generate, options)
        items, single = split_prompts(prompts)
        return self._complete(items, single, self.prompts.encode, params, speculation, self._options(options), on_finished)

    @names_keywords(CallOptions)
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> Iterator[StreamPiece]:
        """Complete one prompt and yield what each step adds. Closing the iterator cancels the request. Options are those of
        `generate`, and `speculation`.

        Raises:
            OutriderError: The prompt cannot be served, or the request failed on the way.
            ClosedError: The LLM is closed.
        """
        refuse_keywords(self.stream, options)
        request = self.prepare(prompt, params, streaming=True, **options)
        inbox = Inbox()
        refusals = self.admit([request], inbox).result()
        if refusals[0] is not None:
            raise cast(OutriderError, refusals.pop())  # taken out: it points at this frame
        return stream_pieces(self._thread, request, inbox)

    @names_keywords(TextOptions)
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        speculation: Speculation | Sequence[Speculation | None] | None = None,
        on_finished: Callable[[RequestOutput], None] | None = None,
        **options: Unpack[TextOptions],
    ) -> list[RequestOutput]:
        """Complete a conversation, or each of a list of conversations, through the tokenizer's own chat template.

        Args:
            messages: A list of {"role": ..., "content": ...}, or a list of such lists, in OpenAI's form.
            params: As in generate.
            tools: Functions that the model may call, in OpenAI's form, for a template that knows tools. The output is the
                text with the calls in it.
            speculation: As in generate.
            on_finished: As in generate.
            options: As in generate.

        Returns:
            One output for each conversation. In a list, a conversation that cannot be served has `error` set and the
            others finish; a single one raises instead.

        Raises:
            InvalidParameterError: The model has no tokenizer or its tokenizer no chat template.
            InvalidPromptError: The template refuses the messages, or they are none.
            OutriderError: As in generate.
        """
        refuse_keywords(self.chat, options)
        self._thread.check()
        self.prompts.check_template()
        items, single = split_conversations(messages)
        return self._complete(
            items,
            single,
            partial(self.prompts.encode_conversation, tools=tools),
            params,
            speculation,
            self._options(options),
            on_finished,
        )

    def chat_prompt(self, messages: Conversation, *, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of one conversation, with the turn handed to the model; raises as chat() does."""
        self._thread.check()
        return list(self.prompts.encode_conversation(messages, tools=tools)[1])

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, as generate() sees them; raises InvalidPromptError."""
        self._thread.check()
        return self.prompts.encode(prompt)[1]

    # -- for those who wait in their own way, as AsyncLLM does -----------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Conversation | None = None,
        streaming: bool = False,
        **options: Unpack[CallOptions],
    ) -> Request:
        """Encode and check one prompt, or one conversation, and compile its structure, in the thread that calls this.

        Args:
            prompt: What to complete, or None with `messages`.
            params: As in generate.
            messages: A conversation, in place of the prompt.
            streaming: Whether its updates bring pieces.
            options: See CallOptions.

        Raises:
            OutriderError: As generate and chat do, but for what `admit` finds.
        """
        self._thread.check()
        encoded = self.prompts.encode(prompt) if messages is None else self.prompts.encode_conversation(messages)
        return self._prepare(*encoded, params, options.get("speculation"), self._options(options, streaming=streaming))

    def admit(self, requests: Sequence[Request], mailbox: Mailbox) -> Future[list[OutriderError | None]]:
        """Queue prepared requests; see EngineThread.admit."""
        return self._thread.admit(requests, mailbox)

    def cancel(self, request: Request) -> None:
        """Stop a request; its last update brings what it has written (finish_reason "cancelled"). It never waits."""
        self._thread.cancel(request)

    def drop(self, request: Request) -> None:
        """Cancel a request whose updates nobody wants any more. It never waits."""
        self._thread.drop(request)

    def between_steps(self, function: Callable[[Engine], T]) -> T:
        """Returns what a function finds out about the engine while it rests between two steps; raises what it raises."""
        return self._thread.call(lambda: function(self._thread.engine))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _complete(
        self,
        items: list[Any],
        single: bool,
        encode: Callable[[Any], tuple[str | None, tuple[int, ...]]],
        params: SamplingParams | Sequence[SamplingParams | None] | None,
        speculation: Speculation | Sequence[Speculation | None] | None,
        options: RequestOptions,
        on_finished: Callable[[RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        """Generate from `items`, each of which `encode` turns into its text, if it has one, and its token ids. A mistake in
        settings that are for all of them is raised before anything is written; others stay with their item."""
        for_all = not isinstance(params, list | tuple) and not isinstance(speculation, list | tuple)
        if speculation is not None and not isinstance(speculation, list | tuple):
            speculation = self.resolve(cast(Speculation, speculation))
        settings = (spread(params, len(items), "params"), spread(speculation, len(items), "speculation"))
        outputs: dict[int, RequestOutput] = {}
        pending: dict[int, Request] = {}

        def settle(place: int, output: RequestOutput) -> None:
            outputs[place] = output
            if on_finished is not None:
                on_finished(output)

        for place, (item, sampling, config) in enumerate(zip(items, *settings, strict=True)):
            try:
                pending[place] = self._prepare(*encode(item), sampling, config, options)
            except OutriderError as error:
                if for_all and isinstance(error, InputError) and not isinstance(error, InvalidPromptError):
                    raise
                settle(place, RequestOutput(-1, item if isinstance(item, str) else None, (), (), error))
        if pending and isinstance(speculation, SpeculationConfig):
            self.load_method(speculation)
        write_all(self._thread, pending, settle)
        if single and outputs[0].error is not None:
            raise cast(OutriderError, outputs.pop(0).error)
        # Taken out: an error among them points at this frame, and the two would keep everything alive.
        return [outputs.pop(place) for place in range(len(items))]

    def _prepare(
        self,
        text: str | None,
        token_ids: tuple[int, ...],
        params: SamplingParams | None,
        speculation: Speculation | None,
        options: RequestOptions,
    ) -> Request:
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError(
                "params", params, "not a SamplingParams", "Use SamplingParams(temperature=..., ...)."
            )
        config = self.speculation if speculation is None else self.resolve(speculation)
        return self._thread.prepare(token_ids, params, config, prompt=text, options=options)

    def _options(self, given: TextOptions | CallOptions, *, streaming: bool = False) -> RequestOptions:
        namespace, priority = given.get("namespace"), given.get("priority", 0)
        check_namespace(namespace)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise InvalidParameterError("priority", priority, "no whole number", "Use 0, or less to go first.")
        text_start = self._thread.engine.runner.loaded.text_start or ()
        return RequestOptions(
            namespace,
            self.prompts.encode_prediction(given.get("prediction")),
            self.prompts.encode_references(given.get("references", ())),
            priority,
            given.get("trace", False),
            streaming,
            self.prompts.encode_decoder_prompt(given.get("decoder_prompt"), text_start),
            frozenset(given.get("shown_tokens", ())),
        )

    def resolve(self, speculation: Speculation) -> SpeculationConfig:
        """The settings with what the caller left to us: the LLM's own draft model, or the embedded one."""
        return self._defaults.complete(speculation)

    def load_method(self, speculation: Speculation) -> None:
        """Load what these settings draft with now, and not when the first request asks for them.

        Raises:
            InputError, ModelError: It cannot be had.
        """
        config = self.resolve(speculation)
        self.between_steps(lambda engine: engine.load_method(config))

    def change_speculation(self, speculation: Speculation) -> None:
        """Draft otherwise from now on, in calls that bring no settings. Texts under way finish with what drafts for them
        now, which is let go when the last of them has ended.

        Args:
            speculation: As `LLM` takes it. What it drafts with is loaded beside what drafts now, while texts wait.

        Raises:
            InputError, ModelError, ProposerError: It cannot be had, and nothing has changed.
        """
        defaults = replace(self._defaults, config=self.resolve(speculation))

        def change(engine: Engine) -> None:
            engine.load_method(defaults.config)
            engine.proposers.change(defaults.config, defaults.kept)

        self.between_steps(change)
        self._defaults = defaults
