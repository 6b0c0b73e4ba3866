"""The offline API: load a model, generate, stream, chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from inspect import signature
from os import PathLike, fspath
from typing import Any, Never, cast

import torch

from outrider.config import (
    PLAIN,
    AttentionName,
    CacheConfig,
    DTypeName,
    ModelConfig,
    QuantizationName,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.engine import Engine, completion
from outrider.engine.proposers import ProposerSet
from outrider.engine.sequence import Request
from outrider.engine.stats import EngineStats
from outrider.errors import InvalidParameterError, InvalidPromptError, OutriderError
from outrider.model.capabilities import make_runner
from outrider.model.loader import check_sources, load_model
from outrider.model.runner import ModelRunner
from outrider.params import RequestOutput, SamplingParams, StreamPiece
from outrider.propose import registry
from outrider.propose.base import TargetFacts
from outrider.validation import Frozen, unknown_setting

Prompt = str | Sequence[int]
Speculation = SpeculationConfig | str

#: Settings that are easily taken for LLM's, and where they go.
_ELSEWHERE: dict[type[Frozen], str] = {
    SpeculationConfig: "LLM(speculation=SpeculationConfig({}=...))",
    SamplingParams: "generate(prompts, SamplingParams({}=...))",
}


def default_model(part: str) -> str:
    """Folder of the embedded default pair: part is "target" or "draft"."""
    return str(files("outrider") / "assets" / part)


class LLM:
    """A model ready to write, with or without a proposer that runs ahead of it. The output law is the same.

    Args:
        model: Local folder or hub id; None takes the embedded default pair.
        speculation: Who drafts, unless a call says otherwise: a SpeculationConfig or a proposer's name. None drafts with
            the embedded draft for the embedded pair, and not at all for other models.
        dtype: "auto" (the checkpoint's), "float64", "float32", "bfloat16" or "float16".
        device: A torch device; None takes CUDA where there is one.
        revision: Hub revision.
        trust_remote_code: Whether transformers may run code that the checkpoint brings.
        attention_backend: "auto" probes; "fused" is fastest, "paged" fast, "gather" portable.
        max_model_len: Longest sequence; None takes the checkpoint's context.
        max_num_seqs: Sequences that run at a time.
        max_num_batched_tokens: Rows in one target pass.
        block_size: Tokens a KV block.
        kv_cache_tokens: KV capacity in tokens; None sizes it from free memory.
        prefix_caching: Whether prompts that begin alike share KV.
        quantization: "int8" rounds linear layers' weights at load; what is lossless is then relative to the rounded model.
        batch_invariant: Same seed, same bits: with any proposer or none, in any batch, in any chunks. Free where
            our kernels run the model; elsewhere every row is computed alone, which is slow.

    Raises:
        InputError: A setting is unknown, out of range or contradicts another.
        ModelError: A checkpoint cannot be used.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        speculation: Speculation | None = None,
        dtype: DTypeName = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        attention_backend: AttentionName = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 1024,
        block_size: int = 16,
        kv_cache_tokens: int | None = None,
        prefix_caching: bool = True,
        quantization: QuantizationName | None = None,
        batch_invariant: bool = False,
        **unknown: Never,
    ) -> None:
        _refuse_unknown(unknown)
        self._embedded = model is None
        source = default_model("target") if model is None else model
        self._model_config = ModelConfig(
            model=fspath(source) if isinstance(source, PathLike) else source,
            dtype=dtype,
            device=None if device is None else str(device),
            revision=revision,
            trust_remote_code=trust_remote_code,
            attention_backend=attention_backend,
            max_model_len=max_model_len,
            quantization=quantization,
            batch_invariant=batch_invariant,
        )
        self._cache_config = CacheConfig(block_size=block_size, num_tokens=kv_cache_tokens, prefix_caching=prefix_caching)
        scheduling = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.speculation = self._resolve(
            speculation or (SpeculationConfig(proposer="draft_model") if model is None else PLAIN)
        )
        drafts = self.speculation.proposer == "draft_model"  # a plug-in may mean something else by the name
        check_sources(model=self._model_config.model, draft_model=self.speculation.draft_model if drafts else None)
        loaded = load_model(self._model_config)
        runner = make_runner(loaded, attention_backend, self._cache_config, max_num_seqs, batch_invariant=batch_invariant)
        self.tokenizer = loaded.tokenizer
        self.engine = Engine(runner, scheduling)
        self.proposers = ProposerSet(
            TargetFacts(loaded.name, loaded.model, loaded.tokenizer, loaded.vocab_size, loaded.max_model_len),
            max_num_batched_tokens,
            self._load_draft_runner,
        )
        self.proposers.get(
            self.speculation
        )  # a draft model that cannot be used is better known now than at the first prompt

    def __repr__(self) -> str:
        runner, config, speculation = self.engine.runner, self._model_config, self.speculation
        loaded = runner.loaded
        facts = {
            "model": _shown(loaded.name),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "quantization": config.quantization,
            "device": loaded.device,
            "attention_backend": runner.backend.name,
            "kernels": runner.backend.instruction_set(loaded.model) or "stock",
            "batch_invariant": config.batch_invariant or None,
            "speculation": speculation.proposer,
            "num_draft_tokens": speculation.num_draft_tokens if speculation.enabled else None,
            "draft_model": _shown(speculation.draft_model),
        }
        return f"<LLM {' '.join(f'{name}={fact}' for name, fact in facts.items() if fact is not None)}>"

    @property
    def stats(self) -> EngineStats:
        """Totals over all requests since the start, or since `stats.reset()`."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculation | Sequence[Speculation | None] | None = None,
        namespace: str | None = None,
        on_finished: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts in continuous batches.

        Args:
            prompts: A string, a list of token ids, or a list of either.
            params: For all prompts, or one each.
            speculation: Overrides the LLM's, for all prompts or one each; "none" decodes plainly.
            namespace: Whose prompts these are: caches are shared within a namespace and never beyond it.
            on_finished: Called with each output as it is done, for progress displays.

        Returns:
            Outputs in the order of the prompts. In a list, a prompt that cannot be served has `error` set and the
            others finish; a single prompt raises instead.

        Raises:
            OutriderError: The only prompt failed, or `params` or `speculation` do not fit the prompts.
        """
        single = _is_prompt(prompts)
        items = [cast(Prompt, prompts)] if single else _prompt_list(prompts)
        each = list(zip(items, _spread(params, items, "params"), _spread(speculation, items, "speculation"), strict=True))
        outputs: dict[int, RequestOutput] = {}
        pending: dict[int, Request] = {}

        def settle(place: int, output: RequestOutput) -> None:
            outputs[place] = output
            if on_finished is not None:
                on_finished(output)

        try:
            for place, (prompt, sampling, config) in enumerate(each):
                try:
                    pending[place] = self._submit(prompt, sampling, config, namespace=namespace)
                except OutriderError as error:
                    settle(place, _refused(prompt, error))
            while pending:
                self.engine.step()
                for place in [p for p, request in pending.items() if request.finished]:
                    settle(place, _output(pending.pop(place)))
        finally:
            for request in pending.values():
                self.engine.cancel(request)
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return [outputs[place] for place in range(len(items))]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        namespace: str | None = None,
    ) -> Iterator[StreamPiece]:
        """Complete one prompt and yield what each step adds. Closing the iterator cancels the request.

        Raises:
            OutriderError: The prompt cannot be served, or the request failed on the way.
        """
        pieces = self._pieces(self._submit(prompt, params, speculation, namespace=namespace, streaming=True))
        next(pieces)  # started at once: a stream that is dropped unread must still cancel its request
        return cast(Iterator[StreamPiece], pieces)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        namespace: str | None = None,
    ) -> list[RequestOutput]:
        """Complete a conversation through the tokenizer's own chat template.

        Raises:
            InvalidParameterError: The model has no tokenizer or its tokenizer no chat template.
            InvalidPromptError: The template refuses the messages.
        """
        return self.generate(self.chat_prompt(messages), params, speculation=speculation, namespace=namespace)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, with the turn handed to the model; raises as chat() does."""
        if self.tokenizer is None or getattr(self.tokenizer, "chat_template", None) is None:
            raise InvalidParameterError(
                "model",
                None if self._embedded else self._model_config.model,
                f"{'the embedded default model' if self._embedded else 'it'} has no chat template: "
                "it completes text and was not trained to converse",
                "Use generate with a plain prompt, or a model whose tokenizer has a chat template.",
            )
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise InvalidPromptError(
                "messages", messages, "not a list of messages", "Give a list of {'role': ..., 'content': ...}."
            )
        try:
            encoded = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except Exception as error:
            raise InvalidPromptError(
                "messages", list(messages), f"the chat template refuses them ({error})", "Use role and content in each."
            ) from error
        return list(encoded["input_ids"])

    # -- inside --------------------------------------------------------------------------------------------------------

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        speculation: Speculation | None,
        *,
        namespace: str | None = None,
        streaming: bool = False,
    ) -> Request:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError(
                "params", params, "not a SamplingParams", "Use SamplingParams(temperature=..., ...)."
            )
        config = self.speculation if speculation is None else self._resolve(speculation)
        text = prompt if isinstance(prompt, str) else None
        return self.engine.add_request(
            self.encode(prompt),
            params,
            config,
            self.proposers.get(config),
            prompt=text,
            streaming=streaming,
            namespace=namespace,
        )

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, as generate() sees them; raises InvalidPromptError."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidPromptError("prompt", prompt, "the model has no tokenizer", "Give a list of token ids.")
            if not prompt:
                raise InvalidPromptError("prompt", prompt, "it is empty", "Give at least one character.")
            try:
                return tuple(self.tokenizer(prompt)["input_ids"])
            except (TypeError, UnicodeError) as error:  # half a surrogate pair, as undecodable bytes in argv become
                raise InvalidPromptError("prompt", prompt, "it is not valid Unicode", "Give text in UTF-8.") from error
        if _is_list(prompt) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            return tuple(prompt)
        raise InvalidPromptError("prompt", prompt, "neither text nor token ids", "Give a string or a list of integers.")

    def _resolve(self, speculation: Speculation) -> SpeculationConfig:
        """Fill in what the caller left to us, and refuse names that nobody answers to."""
        if isinstance(speculation, str):
            speculation = SpeculationConfig(proposer="none" if speculation == "off" else speculation)
        if not isinstance(speculation, SpeculationConfig):
            raise InvalidParameterError(
                "speculation",
                speculation,
                "not a SpeculationConfig",
                "Use SpeculationConfig(...) or a proposer's name.",
            )
        registry.check_name(speculation.proposer)
        if speculation.proposer == "draft_model" and speculation.draft_model is None:
            standing = getattr(self, "speculation", None)
            known = standing.draft_model if standing is not None else None
            if known is None and self._embedded:
                known = default_model("draft")
            if known is None:
                raise InvalidParameterError(
                    "draft_model", None, "proposer='draft_model' needs one", "Give a local folder or a hub id."
                )
            speculation = speculation.replace(draft_model=known)
        return speculation

    def _load_draft_runner(self, model: str, dtype: str | None) -> ModelRunner:
        check_sources(draft_model=model)
        target = self.engine.runner
        config = self._model_config.replace(
            model=model,
            dtype=dtype or str(target.loaded.dtype).removeprefix("torch."),
            device=str(target.loaded.device),
            revision=None,
            attention_backend="auto",
            max_model_len=None,
            quantization=None,  # a draft model is small already
            batch_invariant=False,  # drafts may differ in their bits: they are guesses
        )
        capacity = target.blocks.num_blocks * target.blocks.block_size  # whatever fits the target's memory fits the draft's
        cache = self._cache_config.replace(num_tokens=capacity)
        return make_runner(load_model(config), "auto", cache, self.engine.scheduler.config.max_num_seqs)

    def _pieces(self, request: Request) -> Iterator[StreamPiece | None]:
        """None once, then the pieces."""
        assert request.outbox is not None
        try:
            yield None
            while True:
                while request.outbox:
                    yield request.outbox.pop(0)
                if request.finished:
                    break
                self.engine.step()
        finally:
            self.engine.cancel(request)
        if request.error is not None:
            raise request.error


def _shown(model: str | None) -> str | None:
    """A model's name; where the package lies is of no interest."""
    return "embedded" if model in (default_model("target"), default_model("draft")) else model


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    """Raise for the first of these, which LLM does not have; it may be one that belongs elsewhere."""
    for name, value in settings.items():
        for owner, place in _ELSEWHERE.items():
            if name in owner.model_fields:
                remedy = f"Give it in {place.format(name)}."
                raise InvalidParameterError(name, value, f"a setting of {owner.__name__}, not of LLM", remedy)
        raise unknown_setting("LLM", name, value, signature(LLM).parameters.keys() - {"unknown"})


def _is_list(value: Any) -> bool:
    """Bytes are a sequence of integers to Python, and not what anyone means."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (_is_list(prompts) and len(prompts) > 0 and all(isinstance(p, int) for p in prompts))


def _prompt_list(prompts: Any) -> list[Prompt]:
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray | memoryview | Mapping):
        raise InvalidPromptError(
            "prompts",
            prompts,
            "neither a prompt nor a list of prompts",
            "Give a string, a list of token ids, or a list of either.",
        )
    return list(prompts)


def _spread(value: Any, items: Sequence[Prompt], name: str) -> list[Any]:
    """One value an item: the value itself repeated, or a list of the right length."""
    if not isinstance(value, list | tuple):
        return [value] * len(items)
    if len(value) != len(items):
        raise InvalidParameterError(
            name, value, f"{len(value)} entries for {len(items)} prompts", "Give one for all, or one for each."
        )
    return list(value)


def _refused(prompt: Prompt, error: OutriderError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(-1, text, (), (), error)


def _output(request: Request) -> RequestOutput:
    outputs = () if request.error is not None else tuple(completion(seq) for seq in request.sequences)
    scores = None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)
    return RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, outputs, request.error, scores)
