"""Fields of other servers' requests that are refused, with the reason and the alternative."""

from __future__ import annotations

from typing import Any, NamedTuple

_HERE = "this server writes text only"
_SEARCH = "it searches over whole texts instead of drawing from the model's probabilities"
_AT_START = "the server's own is used, which it is started with"
_TENANT = "each API key has a prefix cache of its own"
_WHOLE = "prompts are taken whole"
_ONE_SERVER = "there is one server"
_ONE_LIBRARY = "there is one library for structures"
_TRANSPORT = "pieces are sent as they are written"
_OTHER_LAW = "it draws from other probabilities than those of the model and of the settings that are known here"
_LEAVE = "Leave it out."
_STRUCTURES = "Use structured_outputs with json, regex, choice, grammar or json_object."
_HEADER = "Send the header x-request-id."


class Refusal(NamedTuple):
    """What is said of a field that is known elsewhere.

    Attributes:
        reason: Why it is not taken.
        remedy: What to do instead.
        neutral: Values that ask for nothing, which are taken.
    """

    reason: str
    remedy: str = _LEAVE
    neutral: tuple[Any, ...] = ()


#: Fields of OpenAI that change no text. Clients send them by habit, and they are passed over with a warning.
IGNORED = frozenset(
    {
        *("metadata", "service_tier", "session_id"),  # this server names nothing that it keeps, and has one tier
        *("prompt_cache_key", "prompt_cache_retention"),  # each API key has a prefix cache of its own
        "verbosity",  # of OpenAI's own models
    }
)
#: Fields of OpenAI, vLLM and llama.cpp's server that are not supported.
_REFUSED: dict[str, Refusal] = {
    "best_of": Refusal(_SEARCH, "Use n, and choose among the texts yourself.", (1,)),
    "use_beam_search": Refusal(_SEARCH, neutral=(False,)),
    "length_penalty": Refusal(_SEARCH, neutral=(1.0,)),
    "early_stopping": Refusal(_SEARCH, neutral=(False,)),
    "skip_special_tokens": Refusal(
        "texts never show special tokens", "Use return_token_ids, which gives every token.", (True,)
    ),
    "spaces_between_special_tokens": Refusal("texts never show special tokens", neutral=(True,)),
    "include_stop_str_in_output": Refusal(
        "a stop string is never part of the text", "Add it to the text where finish_reason is stop.", (False,)
    ),
    "truncate_prompt_tokens": Refusal(_WHOLE, "Shorten the prompt; /tokenize counts its tokens."),
    "truncation_side": Refusal(_WHOLE, "Shorten the prompt; /tokenize counts its tokens."),
    "prompt_embeds": Refusal("a prompt is a text or token ids", "Use prompt."),
    "logits_processors": Refusal("a request cannot bring code", "Use logit_bias, bad_words or a structure.", ([],)),
    "logprobs_mode": Refusal(
        "log probabilities are those of the model itself, before any setting", neutral=("raw_logprobs",)
    ),
    "logprob_token_ids": Refusal("the most likely tokens are told", "Use logprobs, or top_logprobs in a chat."),
    "return_tokens_as_token_ids": Refusal("tokens are told as text", "Use return_token_ids.", (False,)),
    "return_token_offsets": Refusal("offsets are not told", neutral=(False,)),
    "cache_salt": Refusal(_TENANT),
    "kv_transfer_params": Refusal(_ONE_SERVER),
    "ec_transfer_params": Refusal(_ONE_SERVER),
    "routed_experts_prompt_start": Refusal("the experts of tokens are not told", neutral=(0,)),
    "guided_decoding": Refusal("it is a class of vLLM's Python API", _STRUCTURES),
    "guided_decoding_backend": Refusal(_ONE_LIBRARY),
    "guided_whitespace_pattern": Refusal(
        "the schema says it", 'Put {"x-guidance": {"whitespace_pattern": ...}} into the schema.'
    ),
    "structural_tag": Refusal("structures hold for the whole text", "Use structured_outputs with a grammar."),
    "request_id": Refusal("requests are named by a header", _HEADER),
    "vllm_xargs": Refusal("it is for extensions of vLLM", neutral=({},)),
    "watermarking": Refusal(_OTHER_LAW, neutral=(False,)),
    "repetition_detection": Refusal("a text ends at a stop, at its length or at its end", "Use repetition_penalty."),
    "thinking_token_budget": Refusal("thoughts are text like all other", "Use max_tokens.", (-1,)),
    "stream_interval": Refusal(_TRANSPORT, neutral=(1,)),
    "n_predict": Refusal("it is llama.cpp's name", "Use max_tokens."),
    "repeat_penalty": Refusal("it is llama.cpp's name", "Use repetition_penalty."),
    "n_probs": Refusal("it is llama.cpp's name", "Use logprobs, or top_logprobs in a chat."),
    "cache_prompt": Refusal("beginnings that were computed before are always used", neutral=(True,)),
    "grammar": Refusal("it is llama.cpp's name", "Use guided_grammar."),
    "json_schema": Refusal("it is llama.cpp's name", "Use guided_json, or response_format."),
    "typical_p": Refusal(_OTHER_LAW, "Use top_p or min_p.", (1.0,)),
    "mirostat": Refusal(_OTHER_LAW, "Use top_p or min_p.", (0,)),
}
#: What requests for completions may not have, and requests for chats.
IN_COMPLETIONS: dict[str, Refusal] = {
    **_REFUSED,
    "suffix": Refusal("the model writes on at the end only", neutral=("",)),
    "prompt_logprobs": Refusal("this server tells them as OpenAI does", "Use echo=true with logprobs."),
    "max_completion_tokens": Refusal("it is a field of chats", "Use max_tokens."),
    "messages": Refusal("it is a field of chats", "Use /v1/chat/completions."),
    "top_logprobs": Refusal("it is a field of chats", "Use logprobs with a number."),
    "tools": Refusal("it is a field of chats", "Use /v1/chat/completions."),
    "tool_choice": Refusal("it is a field of chats", "Use /v1/chat/completions."),
    "chat_template_kwargs": Refusal("it is a field of chats", "Use /v1/chat/completions."),
}
IN_CHATS: dict[str, Refusal] = {
    **_REFUSED,
    "prompt": Refusal("a chat has messages", "Use messages, or /v1/completions."),
    "prompt_logprobs": Refusal("a chat does not tell them", "Use /v1/completions with echo=true and logprobs."),
    "audio": Refusal(_HERE),
    "modalities": Refusal(_HERE, neutral=(["text"],)),
    "functions": Refusal("its newer name is tools", "Use tools.", ([],)),
    "function_call": Refusal("its newer name is tool_choice", "Use tool_choice.", ("none",)),
    "include_reasoning": Refusal("thoughts are text like all other", neutral=(True,)),
    "web_search_options": Refusal("this server searches nothing"),
    "moderation": Refusal("it is a service of OpenAI"),
    "echo": Refusal("a conversation is not repeated", neutral=(False,)),
    "add_generation_prompt": Refusal("the model's turn always comes next", neutral=(True,)),
    "continue_final_message": Refusal(
        "the model's turn always comes next", "Use /v1/completions with the text so far.", (False,)
    ),
    "chat_template": Refusal(_AT_START, "Start the server with --chat-template FILE."),
    "documents": Refusal("a chat has messages", "Put them into the messages."),
    "mm_processor_kwargs": Refusal(_HERE),
    "media_io_kwargs": Refusal(_HERE),
    "return_prompt_text": Refusal("the prompt is not told", "Use /tokenize with messages, and /detokenize.", (False,)),
}
