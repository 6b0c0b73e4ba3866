"""Gives a transformers model a `generate` that speculates, writes the same, and refuses what it cannot compute exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from inspect import signature
from typing import Any, TypeVar, Unpack

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import logits_process as stock
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput

from outrider.engine.admission import rule_against_seeds
from outrider.errors import InvalidParameterError, InvalidPromptError, UnsupportedParameterError
from outrider.llm import LLM
from outrider.options import LLMSettings, names_keywords
from outrider.params import LogitsProcessor, SamplingParams

# --- Gives a transformers model a `generate` that speculates and writes the same.


M = TypeVar("M", bound=nn.Module)


@names_keywords(LLMSettings)
def patch(model: M, **settings: Unpack[LLMSettings]) -> M:
    """Let `model.generate` speculate: the same arguments, the same greedy tokens, the same distribution where it draws.

    `torch.manual_seed` repeats drawn texts, unless the rule is "token" or "block", with which they depend on the drafts.

    The weights are copied once into the engine's own layout, and the model goes on working as before; `consume=True` takes
    them without a copy, and then the model can do nothing else. `model.generate.llm` is the engine, with its statistics.

    Args:
        model: A language model of transformers that generates text, with or without an encoder.
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
    """Tells whether a model's `generate` is ours."""
    return isinstance(getattr(model, "__dict__", {}).get("generate"), SpeculativeGenerate)


class SpeculativeGenerate:
    """The `generate` of a patched model. transformers prepares a call as ever, and we write its texts.

    Attributes:
        llm: Who writes.
    """

    def __init__(self, stock: Any, llm: LLM) -> None:
        self.llm = llm
        self._stock = stock
        self._text_start = llm.engine.runner.loaded.text_start
        update_wrapper(self, stock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Writes as GenerationMixin.generate of transformers does.

        Returns:
            Token ids [rows, columns], padded on the right behind texts that ended early; or transformers' output with these
            `sequences`, where return_dict_in_generate asks for one. Prompts are included, but for those that an encoder
            reads; then texts begin with the decoder's start token.
        """
        given = signature(self._stock).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        model = self._stock.__self__
        check_arguments(given, model.generation_config, model.config)
        given.pop("custom_generate", None)
        if self._text_start is not None:
            given["encoder_outputs"] = in_place_of_states(given)
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
        mask, forced = prepared.get("attention_mask"), self._forced(input_ids, generation_config)
        if self._text_start is None:
            rows = split_rows(input_ids, mask)
        else:
            rows = [(input_ids[0, :0], source) for source in sources(prepared["encoder_outputs"], mask)]
        seeded = rule_against_seeds(self.llm.speculation) is None
        columns, longest = input_ids.shape[1] + len(forced), generation_config.max_length
        columns = min(columns, longest - 1)  # where a forced token fills the text, what is written behind it is cut off
        params = [params_of(generation_config, columns, logits_processor, padding, seeded=seeded) for padding, _ in rows]
        prompts = [prompt for _, prompt in rows]
        if streamer is None:
            texts = [output.first for output in self.llm.generate(prompts, params)]
        else:
            texts = [self._stream(prompts, params, streamer, forced)]
        for text, asked in zip(texts, params, strict=True):
            if text.finish_reason == "length" and len(text.token_ids) < asked.max_tokens:
                problem = f"the context has no room for more than {len(text.token_ids)}"
                raise InvalidParameterError("max_new_tokens", asked.max_tokens, problem, "Ask for fewer tokens.")
        padding = getattr(generation_config, "_pad_token_tensor", None)
        behind = [(*forced, *text.token_ids)[: longest - input_ids.shape[1]] for text in texts]
        sequences = _padded(input_ids, behind, 0 if padding is None else int(padding))
        if not generation_config.return_dict_in_generate:
            return sequences
        kind = GenerateDecoderOnlyOutput if self._text_start is None else GenerateEncoderDecoderOutput
        return kind(sequences=sequences)

    def _forced(self, input_ids: torch.Tensor, config: GenerationConfig) -> tuple[int, ...]:
        """The tokens that the engine puts behind the decoder's start token, since the checkpoint forces them."""
        start, *forced = self._text_start or (None,)
        if start is not None and (input_ids != start).any():
            found = sorted(set(input_ids[:, 0].tolist()))
            raise UnsupportedParameterError("decoder_start_token_id", found, _starts(start), _SET_BEFORE)
        asked = config.forced_bos_token_id
        if forced and asked != forced[0]:
            raise UnsupportedParameterError("forced_bos_token_id", asked, _starts(*forced), _SET_BEFORE)
        return tuple(forced)

    def _stream(
        self, prompts: list[list[int]], params: list[SamplingParams], streamer: Any, forced: tuple[int, ...]
    ) -> Any:
        """One text, with every token told to the streamer as it is written."""
        if len(prompts) != 1:
            remedy = "Give one prompt, and num_return_sequences=1."
            raise UnsupportedParameterError("streamer", type(streamer).__name__, "there are several texts", remedy)
        output = None
        for token in forced:
            streamer.put(torch.tensor([token]))
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


# --- Translates the arguments of transformers' generate into ours, and refuses what is not computed exactly.


#: What transformers puts behind all other processors, and SamplingParams has too. The others run as they are, in the order
#: that transformers gives them.
_WARPERS = (
    stock.LogitNormalization,
    stock.MinPLogitsWarper,
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
)
#: What is given as a setting and not as a processor.
_SETTINGS = (
    *_WARPERS,
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
)
_LEAVE = "Leave it out, or call outrider.unpatch(model) first."
_ONLY_TOKENS = "tokens are all that a draft is checked for"
_BEHIND = "it works behind temperature and top_p, where no processor of the caller runs"
_OF_THE_BATCH = "it depends on the place of a text in the batch"
_ENDS = "a text ends at its length or at an end-of-sequence token"

#: Arguments of generate that are not served, with the reason.
_ARGUMENTS = {
    "assistant_model": "the draft is chosen once: outrider.patch(model, draft_model=...)",
    "prefix_allowed_tokens_fn": _OF_THE_BATCH,
    "negative_prompt_ids": "it needs a second pass of the model for every token",
    "negative_prompt_attention_mask": "it needs a second pass of the model for every token",
    "custom_generate": "the patched generate is one itself",
    "synced_gpus": "the model runs on one device",
}
#: Settings of a GenerationConfig that are not served, with the values that ask for nothing, and the reason.
_CONFIG: dict[str, tuple[tuple[object, ...], str]] = {
    "cache_implementation": ((None, "dynamic"), "the KV memory is our own"),
    "encoder_no_repeat_ngram_size": ((None, 0), _OF_THE_BATCH),
    "encoder_repetition_penalty": ((None, 1.0), _OF_THE_BATCH),
    "epsilon_cutoff": ((None, 0.0), _BEHIND),
    "eta_cutoff": ((None, 0.0), _BEHIND),
    "guidance_scale": ((None, 1.0), "it needs a second pass of the model for every token"),
    "max_time": ((None,), _ENDS),
    "output_attentions": ((None, False), _ONLY_TOKENS),
    "output_hidden_states": ((None, False), _ONLY_TOKENS),
    "output_logits": ((None, False), _ONLY_TOKENS),
    "output_scores": ((None, False), _ONLY_TOKENS),
    "prompt_lookup_num_tokens": ((None,), "the draft is chosen once: outrider.patch(model, speculation=...)"),
    "stop_strings": ((None,), _ENDS),
    "token_healing": ((None, False), "prompts are taken as they stand"),
    "top_h": ((None,), _BEHIND),
    "typical_p": ((None, 1.0), _BEHIND),
    "watermarking_config": ((None,), _BEHIND),
}
#: Models in which types of tokens tell pictures from text.
_TYPES_ARE_PICTURES = ("gemma", "paligemma")
_SET_BEFORE = "Set it in model.generation_config, and patch the model then."
#: What generate takes beside settings.
_INPUTS = {"input_ids", "attention_mask", "tokenizer", "trust_remote_code", "use_model_defaults"}


def check_arguments(given: Mapping[str, Any], own_config: GenerationConfig, model_config: Any) -> None:
    """Refuse what a call asks for and is not served, before transformers prepares anything."""
    for name, reason in _ARGUMENTS.items():
        if given.get(name) not in (None, False):
            raise UnsupportedParameterError(name, given[name], reason, _LEAVE)
    settings, known = {**_set(own_config), **_set(given.get("generation_config")), **given}, vars(GenerationConfig())
    for name, (neutral, reason) in _CONFIG.items():
        if settings.get(name) not in neutral:
            raise UnsupportedParameterError(name, settings[name], reason, _LEAVE)
    others = {"inputs", "generation_config", "logits_processor", "stopping_criteria", "streamer", *_ARGUMENTS, *_INPUTS}
    for name in sorted(given.keys() - known.keys() - others):
        if given[name] is not None and not _marks_no_picture(name, given[name], model_config):
            raise UnsupportedParameterError(name, given[name], "prompts are token ids with a mask", _LEAVE)
    for processor in given.get("logits_processor") or ():
        if isinstance(processor, _SETTINGS):
            remedy = "Give the setting itself, such as temperature=0.7."
            raise InvalidParameterError("logits_processor", type(processor).__name__, "it is a setting", remedy)


def _marks_no_picture(name: str, value: Any, model_config: Any) -> bool:
    """Tells whether these are types of tokens that say that all of them are text. GPT-2 and others add an embedding of each
    type, also of type 0, to the token's."""
    if name == "token_type_ids" and not str(model_config.model_type).startswith(_TYPES_ARE_PICTURES):
        return False
    return name in ("token_type_ids", "mm_token_type_ids") and isinstance(value, torch.Tensor) and not value.any()


def in_place_of_states(given: Mapping[str, Any]) -> BaseModelOutput:
    """The sources of a call, where transformers expects what the encoder makes of them. It repeats them for each text that
    is asked for, and does not run the encoder, which our engine does."""
    source = next((given[name] for name in ("inputs", "input_ids") if given.get(name) is not None), None)
    if not isinstance(source, torch.Tensor) or source.ndim != 2:
        remedy = "Give token ids [rows, columns], as a tokenizer with return_tensors='pt' makes them."
        raise InvalidPromptError("inputs", source, "the encoder reads token ids", remedy)
    return BaseModelOutput(last_hidden_state=source[..., None])


def sources(encoder_outputs: BaseModelOutput, mask: torch.Tensor | None) -> list[list[int]]:
    """Returns what the encoder reads, row by row, without padding.

    Args:
        mask: [rows, columns] 0 where there is padding; None where there is none.
    """
    found = encoder_outputs.last_hidden_state[..., 0]
    for place, seen in enumerate([] if mask is None else mask.bool()):
        if not seen[: int(seen.sum())].all() or not seen.any():
            problem, remedy = "it is not padded on the right", "Use padding_side='right', and prompts of one token or more."
            raise InvalidPromptError(f"attention_mask[{place}]", seen.int().tolist(), problem, remedy)
    lengths = [found.shape[1]] * len(found) if mask is None else mask.bool().sum(1).tolist()
    return [row[:length].tolist() for row, length in zip(found, lengths, strict=True)]


def _starts(token: int) -> str:
    return f"the engine was built for texts that begin with {token}, as the model's generation config said then"


def _set(config: GenerationConfig | None) -> dict[str, Any]:
    return {} if config is None else {name: value for name, value in vars(config).items() if value is not None}


def check_prepared(config: GenerationConfig, criteria: Sequence[object]) -> None:
    """Refuse a search, and an end that is not served; raises UnsupportedParameterError."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        problem = "a search or a mixture of passes does not draw from the model's probabilities"
        raise UnsupportedParameterError("generation mode", mode.value, problem, "Use num_beams=1 and no mode of its own.")
    for each in criteria:
        if type(each) not in (EosTokenCriteria, MaxLengthCriteria):
            raise UnsupportedParameterError("stopping_criteria", type(each).__name__, _ENDS, _LEAVE)


def split_rows(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[tuple[torch.Tensor, list[int]]]:
    """The padding and the prompt of each row of a batch.

    Args:
        input_ids: [rows, columns], padded on the left.
        mask: The same shape: 0 where there is padding; None where there is none.
    """
    if mask is None:
        return [(row[:0], row.tolist()) for row in input_ids]
    found = []
    for place, (row, seen) in enumerate(zip(input_ids, mask.bool(), strict=True)):
        padding = int((~seen).sum())
        if not seen[padding:].all() or padding == len(row):
            remedy = "Use a tokenizer with padding_side='left', and prompts of one token or more."
            raise InvalidPromptError(f"attention_mask[{place}]", seen.int().tolist(), "it is padded on the right", remedy)
        found.append((row[:padding], row[padding:].tolist()))
    return found


def params_of(
    config: GenerationConfig,
    columns: int,
    processors: Sequence[LogitsProcessor],
    padding: torch.Tensor,
    *,
    seeded: bool = True,
) -> SamplingParams:
    """The parameters of one text.

    Args:
        columns: Tokens of a padded prompt.
    """
    ends = getattr(config, "_eos_token_tensor", None)
    drawn = {
        "temperature": 1.0 if config.temperature is None else config.temperature,
        "top_k": config.top_k or 0,
        "top_p": 1.0 if config.top_p is None else config.top_p,
        "min_p": config.min_p or 0.0,
        "seed": int(torch.randint(2**63 - 1, ())) if seeded else None,
    }
    before = [each for each in processors if not isinstance(each, _WARPERS)]
    return SamplingParams(
        **(drawn if config.do_sample else {"temperature": 0.0}),
        logits_processors=tuple(_with_padding(_of_row(each, len(padding)), padding) for each in before),
        max_tokens=config.max_length - columns,
        ignore_eos=True,
        stop_token_ids=() if ends is None else tuple(ends.flatten().tolist()),
    )


def _of_row(processor: Any, padding: int) -> Any:
    """A processor for one row alone, in place of one that knows how much padding each row of the batch has."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
        return stock.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=padding)
    return processor


def _with_padding(processor: LogitsProcessor, padding: torch.Tensor) -> LogitsProcessor:
    return partial(_process_padded, processor, padding) if len(padding) else processor


def _process_padded(processor: Callable[..., Any], padding: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> Any:
    return processor(torch.cat([padding.to(ids)[None], ids], dim=1), scores)
