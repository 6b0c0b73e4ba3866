"""Checks a request before it is queued; each refusal names the field, the value and what would be right."""

from __future__ import annotations

from typing import Any

from outrider.cache.blocks import BlockManager
from outrider.config import NO_OPTIONS, RequestOptions, SchedulerConfig
from outrider.errors import ContradictionError, InvalidParameterError, InvalidPromptError, UnsupportedParameterError
from outrider.loading.loaded_model import LoadedModel
from outrider.params import SamplingParams
from outrider.propose.settings import SpeculationConfig, tree_size

#: How many characters the stop strings of a request may have in all: their automaton takes time and memory for each.
MAX_STOP_CHARACTERS = 100_000


def check_request(
    tokens: tuple[int, ...],
    params: SamplingParams,
    speculation: SpeculationConfig,
    loaded: LoadedModel,
    blocks: BlockManager,
    config: SchedulerConfig,
    options: RequestOptions = NO_OPTIONS,
) -> None:
    """Raise an InputError for what the engine, the model or the memory cannot serve."""
    _check_prompt(tokens, params, loaded)
    if options.decoder_prompt:
        _check_decoder_prompt(options.decoder_prompt, loaded)
    if params.n > config.max_num_seqs:
        raise InvalidParameterError("n", params.n, f"more samples than max_num_seqs={config.max_num_seqs}", "Lower it.")
    if params.seed is not None:
        _check_coupled(params.seed, speculation)
    _check_tree(speculation, loaded.max_model_len, config.max_num_batched_tokens)
    _check_ends(params, loaded)
    _check_token_ids(params, loaded)
    _check_memory(len(tokens), params, loaded, blocks, options.decoder_prompt)


def rule_against_seeds(speculation: SpeculationConfig, place: str = "") -> str | None:
    """The rule, with its place in the settings, that asks for a ratio test, which no seeded text may have; None where there
    is none."""
    if speculation.rule in ("token", "block"):
        return f"{place}rule={speculation.rule!r}"
    nested = {} if speculation.method is None else speculation.method.nested
    found = (rule_against_seeds(inner, f"{place}{own}.") for own, inner in nested.items())
    return next(filter(None, found), None)


def _check_coupled(seed: int, speculation: SpeculationConfig) -> None:
    """Raise ContradictionError where settings, or some inside them, ask for a ratio test for a seeded text."""
    rule = rule_against_seeds(speculation)
    if rule is not None:
        problem = f"{rule} makes the text depend on the drafts, and a seed promises that it does not"
        raise ContradictionError("seed", seed, problem, "Use rule='auto', or leave the seed out.")


def check_prompt_ids(tokens: tuple[int, ...], vocab_size: int, field: str = "prompt") -> None:
    """Raise InvalidPromptError where a token of a prompt is outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            remedy = f"Use ids from 0 to {vocab_size - 1}."
            raise InvalidPromptError(field, token, "token id outside the vocabulary", remedy)


def bad_word_ids(params: SamplingParams, tokenizer: Any | None) -> tuple[tuple[int, ...], ...]:
    """Every token sequence that `params` bans. A word is banned as it begins a text and as it follows a space; where there
    is no tokenizer, that is a ContradictionError."""
    if params.bad_words and tokenizer is None:
        raise ContradictionError("bad_words", params.bad_words, "the model has no tokenizer", "Use bad_words_ids.")
    words = dict.fromkeys(params.bad_words_ids)
    if params.bad_words:
        assert tokenizer is not None
        texts = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        words |= dict.fromkeys(map(tuple, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))
    return tuple(word for word in words if word)


def _check_prompt(tokens: tuple[int, ...], params: SamplingParams, loaded: LoadedModel) -> None:
    if not tokens:
        raise InvalidPromptError("prompt", list(tokens), "it has no tokens", "Give at least one.")
    check_prompt_ids(tokens, loaded.vocab_size)
    if loaded.encoder is not None:
        _check_source(tokens, params, loaded.encoder.max_source_len)
        return
    if len(tokens) >= loaded.max_model_len:
        raise InvalidPromptError(
            "prompt",
            f"{len(tokens)} tokens",
            f"no room in the context of {loaded.max_model_len}",
            f"Shorten it to {loaded.max_model_len - 1} tokens or fewer.",
        )


def _check_source(tokens: tuple[int, ...], params: SamplingParams, longest: int) -> None:
    """Refuses what needs probabilities of the prompt where an encoder reads it: there it is no part of the text."""
    if len(tokens) > longest:
        problem, remedy = f"the encoder reads {longest} at most", f"Shorten it to {longest} tokens or fewer."
        raise InvalidPromptError("prompt", f"{len(tokens)} tokens", problem, remedy)
    if params.prompt_logprobs is not None:
        problem = "an encoder reads the prompt, and gives its tokens no probabilities"
        raise UnsupportedParameterError("prompt_logprobs", params.prompt_logprobs, problem, "Leave it out.")


def _check_decoder_prompt(tokens: tuple[int, ...], loaded: LoadedModel) -> None:
    """It must begin as every text of the model does, and leave room for a token."""
    field = "decoder_prompt"
    if loaded.encoder is None:
        problem = "the model has no encoder, so its text begins with the prompt"
        raise UnsupportedParameterError(field, list(tokens), problem, "Put it behind the prompt.")
    check_prompt_ids(tokens, loaded.vocab_size, field)
    start = loaded.encoder.text_start
    if tokens[: len(start)] != start[: len(tokens)]:
        names = "decoder_start_token_id" if len(start) == 1 else "decoder_start_token_id and forced_bos_token_id"
        problem = f"texts of this model begin with {list(start)}, as {names} of its configuration say"
        raise ContradictionError(field, list(tokens), problem, "Begin with these tokens, or give a text.")
    if len(tokens) >= loaded.max_model_len:
        problem, remedy = f"no room in the context of {loaded.max_model_len}", f"Shorten it to {loaded.max_model_len - 1}."
        raise InvalidPromptError(field, f"{len(tokens)} tokens", problem, remedy)


def _check_tree(speculation: SpeculationConfig, max_model_len: int, max_rows: int) -> None:
    """A shape that could never be drafted as it was asked for is refused; one that adapts fits itself to what there is."""
    tree = speculation.tree
    if speculation.method is None or isinstance(tree, str):
        return
    if tree and tree_size(tree) >= max_rows:
        problem = f"it has {tree_size(tree)} nodes, and a pass has max_num_batched_tokens={max_rows} rows"
        raise ContradictionError("tree", tree, problem, f"Use {max_rows - 1} nodes or fewer.")
    if len(tree) >= max_model_len:
        problem = f"it is {len(tree)} tokens deep, and the context has {max_model_len}"
        raise ContradictionError("tree", tree, problem, f"Use {max_model_len - 1} levels or fewer.")


def _check_ends(params: SamplingParams, loaded: LoadedModel) -> None:
    if params.min_tokens and len(set(params.stop_token_ids)) == loaded.vocab_size:
        raise ContradictionError("min_tokens", params.min_tokens, "every token is a stop token", "Leave one out.")
    if params.stop and loaded.tokenizer is None:
        raise ContradictionError("stop", params.stop, "the model has no tokenizer", "Use stop_token_ids.")
    stop_characters = sum(map(len, params.stop))
    if stop_characters > MAX_STOP_CHARACTERS:
        raise InvalidParameterError(
            "stop",
            params.stop,
            f"{stop_characters:,} characters are too many",
            f"Use stop strings of up to {MAX_STOP_CHARACTERS:,} characters in all.",
        )


def _check_token_ids(params: SamplingParams, loaded: LoadedModel) -> None:
    fields: dict[str, tuple[int, ...]] = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_ids": tuple(token for word in params.bad_words_ids for token in word),
    }
    for field, tokens in fields.items():
        for token in tokens:
            if token >= loaded.vocab_size:
                raise InvalidParameterError(
                    field, token, "outside the vocabulary", f"Use ids from 0 to {loaded.vocab_size - 1}."
                )


def _check_memory(
    prompt_len: int, params: SamplingParams, loaded: LoadedModel, blocks: BlockManager, decoder_prompt: tuple[int, ...]
) -> None:
    """A text, and its source, must fit into the memory alone, or preemption could never make room for them."""
    encoder = loaded.encoder
    begins, source = (prompt_len, 0) if encoder is None else (len(encoder.begin(decoder_prompt)), prompt_len)
    text = min(begins + params.max_tokens, loaded.max_model_len)
    longest, capacity = text + source, blocks.num_blocks * blocks.block_size
    if blocks.blocks_for(text) + blocks.blocks_for(source) > blocks.num_blocks:
        raise InvalidPromptError(
            "prompt",
            f"{prompt_len} tokens",
            f"with max_tokens={params.max_tokens} it may need {longest} tokens of KV memory, and there are {capacity}",
            "Shorten it, lower max_tokens, or raise kv_cache_tokens.",
        )
