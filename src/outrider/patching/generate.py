"""Gives a transformers model a `generate` that speculates and writes the same."""

from __future__ import annotations

from functools import partial, update_wrapper
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.engine.admission import rule_against_seeds
from outrider.errors import InvalidParameterError, UnsupportedParameterError
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.patching.arguments import check_arguments, check_prepared, params_of, split_rows

M = TypeVar("M", bound=nn.Module)


def patch(model: M, **settings: Any) -> M:
    """Let `model.generate` speculate: the same arguments, the same greedy tokens, the same distribution where it draws.

    `torch.manual_seed` repeats drawn texts, unless the rule is "token" or "block", with which they depend on the drafts.

    The weights are copied once into the engine's own layout, and the model goes on working as before; `consume=True` takes
    them without a copy, and then the model can do nothing else. `model.generate.llm` is the engine, with its statistics.

    Args:
        model: A causal language model of transformers.
        settings: What LLM takes beside the model, such as draft_model, speculation or kv_cache_tokens.

    Returns:
        The model itself.

    Raises:
        InvalidParameterError: It is patched already.
        InputError: A setting is unknown, out of range or contradicts another.
        ModelError: The model cannot be used.
    """
    if is_patched(model):
        raise InvalidParameterError("model", type(model), "it is patched already", "Call outrider.unpatch(model) first.")
    own: Any = model
    own.generate = SpeculativeGenerate(own.generate, LLM(model, **settings))
    return model


def unpatch(model: M) -> M:
    """Give a model its own `generate` back, and free the engine behind ours.

    Raises:
        InvalidParameterError: It is not patched.
    """
    if not is_patched(model):
        raise InvalidParameterError("model", type(model), "it is not patched", "Call outrider.patch(model) before.")
    generate: Any = model.generate
    del model.generate
    generate.llm.close()
    return model


def is_patched(model: object) -> bool:
    """Whether a model's `generate` is ours."""
    return isinstance(getattr(model, "__dict__", {}).get("generate"), SpeculativeGenerate)


class SpeculativeGenerate:
    """The `generate` of a patched model. transformers prepares a call as ever, and we write its texts.

    Attributes:
        llm: Who writes.

    Args:
        stock: The model's own `generate`.
        llm: Built on this model.
    """

    def __init__(self, stock: Any, llm: LLM) -> None:
        self.llm = llm
        self._stock = stock
        update_wrapper(self, stock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As GenerationMixin.generate of transformers.

        Returns:
            Token ids [rows, columns], prompts included, padded on the right behind texts that ended early; or a
            GenerateDecoderOnlyOutput with these `sequences`, where return_dict_in_generate asks for one.

        Raises:
            InputError: An argument is not served, or out of range.
            OutriderError: A text could not be written.
        """
        given = signature(self._stock).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        check_arguments(given, self._stock.__self__.generation_config)
        given.pop("custom_generate", None)
        return self._stock(**given, custom_generate=partial(self._write, streamer=given.get("streamer")))

    def _write(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        streamer: Any | None = None,
        **prepared: Any,
    ) -> Any:
        """The texts behind prompts, which transformers has repeated; of what else it has prepared, the mask is of use."""
        check_prepared(generation_config, stopping_criteria)
        rows, columns = split_rows(input_ids, prepared.get("attention_mask")), input_ids.shape[1]
        seeded = rule_against_seeds(self.llm.speculation) is None
        params = [params_of(generation_config, columns, logits_processor, padding, seeded=seeded) for padding, _ in rows]
        prompts = [prompt for _, prompt in rows]
        if streamer is None:
            texts = [output.first for output in self.llm.generate(prompts, params)]
        else:
            texts = [self._stream(prompts, params, streamer)]
        for text, asked in zip(texts, params, strict=True):
            if text.finish_reason == "length" and len(text.token_ids) < asked.max_tokens:
                problem = f"the context has no room for more than {len(text.token_ids)}"
                raise InvalidParameterError("max_new_tokens", asked.max_tokens, problem, "Ask for fewer tokens.")
        padding = getattr(generation_config, "_pad_token_tensor", None)
        sequences = _padded(input_ids, [text.token_ids for text in texts], 0 if padding is None else int(padding))
        return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences

    def _stream(self, prompts: list[list[int]], params: list[SamplingParams], streamer: Any) -> Any:
        """One text, with every token told to the streamer as it is written."""
        if len(prompts) != 1:
            remedy = "Give one prompt, and num_return_sequences=1."
            raise UnsupportedParameterError("streamer", type(streamer).__name__, "there are several texts", remedy)
        output = None
        for piece in self.llm.stream(prompts[0], params[0]):
            for token in piece.token_ids:
                streamer.put(torch.tensor([token]))
            output = piece.output or output
        streamer.end()
        return output


def _padded(input_ids: torch.Tensor, texts: list[tuple[int, ...]], padding: int) -> torch.Tensor:
    """Prompts with the texts behind them: [rows, columns]."""
    longest = max(map(len, texts))
    behind = [[*text, *[padding] * (longest - len(text))] for text in texts]
    return torch.cat([input_ids, torch.tensor(behind, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
