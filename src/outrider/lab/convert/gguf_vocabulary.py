"""The vocabulary of a GGUF file: that of a tokenizer, or placeholders.

A byte-level vocabulary is written with the name of its pre-tokenizer, and that of SentencePiece with scores that give its
merges. What no name stands for is refused: llama.cpp would cut texts in another way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from outrider.config import ModelConfig
from outrider.errors import InvalidParameterError, UnsupportedModelError
from outrider.loading.exclusive import attempt
from outrider.loading.gguf.header import is_gguf, parts_of
from outrider.loading.gguf.splitting import DIGIT, ENDING, GPT_2, SPLITTINGS, Splitting, kinds_of_splitting
from outrider.loading.gguf.tokenizer import SPACE
from outrider.loading.tokenizers import checkpoint_tokenizer

#: Writes the vocabulary of a model with so many tokens.
WriteVocabulary = Callable[[Any, int], None]
_REMEDY = "Write placeholders (--placeholders), and give other engines prompts as token ids."
_ENDS = ("eos", "eot", "eom")
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_OF_CAPITALS = (rf"{_BEFORE}{_UPPER}*{_LOWER}+", rf"{_BEFORE}{_UPPER}+{_LOWER}*")
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: How checkpoints cut whose names llama.cpp reads a little otherwise, where letters are not ASCII.
OF_CHECKPOINTS = {
    "gpt-4o": Splitting(
        ("|".join([*(f"{word}{_ENDING}?" for word in _OF_CAPITALS), r"\p{N}{1,3}", _OTHERS]),), whole_pieces=True
    ),
    "tekken": Splitting(("|".join([*_OF_CAPITALS, r"\p{N}", _OTHERS]),), whole_pieces=True),
}


def placeholders(eos_token_id: int | None = None) -> WriteVocabulary:
    """Names without a meaning, for engines that are given token ids. With None no token ends a text."""

    def write(writer: Any, size: int) -> None:
        import gguf

        # This is the only kind of vocabulary without special tokens. With the others, token 2 or 11 would end every text.
        writer.add_tokenizer_model("rwkv")
        writer.add_vocab_size(size)
        writer.add_token_list([f"<{token}>" for token in range(size)])
        writer.add_token_types([gguf.TokenType.NORMAL] * size)
        writer.add_add_bos_token(False)
        if eos_token_id is not None:
            writer.add_eos_token_id(eos_token_id)

    return write


def vocabulary_of(checkpoint: str, tokenizer: Any, ends: list[int]) -> WriteVocabulary:
    """The vocabulary, the special tokens and the chat template of a tokenizer."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise UnsupportedModelError(checkpoint, f"its vocabulary is of the kind {model['type']}, and no BPE", _REMEDY)
    pieces = model["byte_fallback"]
    pre = None if pieces else _pre_tokenizer(checkpoint, state)

    def write(writer: Any, size: int) -> None:
        writer.add_tokenizer_model("llama" if pieces else "gpt2")
        writer.add_vocab_size(size)
        tokens = _tokens(state, size)
        writer.add_token_list(tokens)
        writer.add_token_types(_types(state, tokens))
        if pre is None:
            writer.add_token_scores(_scores(_merges(model), tokens))
            writer.add_add_space_prefix(_has_prefix(state["normalizer"]))
        else:
            writer.add_tokenizer_pre(pre)
            writer.add_token_merges([" ".join(pair) for pair in _merges(model)])
        _write_special(writer, tokenizer, ends)

    return write


def _pre_tokenizer(checkpoint: str, state: dict[str, Any]) -> str:
    """The name of a byte-level pre-tokenizer. No name says that it composes Unicode (NFC), and no reader of files does."""
    steps = state["pre_tokenizer"] or {}
    parts = steps.get("pretokenizers", [steps])
    patterns = tuple(pattern for pattern in map(_pattern, parts) if pattern is not None)
    changes = {step["type"] for step in _steps(state["normalizer"])} - {"NFC"}
    if changes:
        raise UnsupportedModelError(checkpoint, f"its tokenizer changes texts by {', '.join(sorted(changes))}", _REMEDY)
    if parts[-1].get("type") == "ByteLevel" and not parts[-1]["add_prefix_space"]:
        whole = bool(state["model"].get("ignore_merges"))
        ours = tuple(pattern.replace(f"{_ENDING}|", f"{ENDING}|") for pattern in patterns)
        for name, known in [*OF_CHECKPOINTS.items(), *SPLITTINGS.items()]:
            if known.patterns in (patterns, ours) and known.whole_pieces == whole:
                return name
    shown = ", ".join(patterns) or parts[-1].get("type")
    problem = f"its pre-tokenizer ({shown}) has no name in GGUF files; {kinds_of_splitting()} are known"
    raise UnsupportedModelError(checkpoint, problem, _REMEDY)


def _pattern(part: dict[str, Any]) -> str | None:
    """The regular expression by which a part of a pre-tokenizer cuts text; None for what only turns bytes into letters.
    A part that cuts in another way is given by its name, which is no expression that is known."""
    kind = part.get("type")
    if kind == "Split":
        (pattern,) = part["pattern"].values()
        # "Removed" and inverted keeps the pieces, and drops what is none: nothing, where an expression takes spaces, too.
        keeps = part["behavior"] == "Isolated" or (part["behavior"] == "Removed" and part["invert"] and r"|\s+" in pattern)
        return str(pattern) if keeps else f"{part['behavior']} {pattern}"
    if kind == "Digits" and part["individual_digits"]:
        return DIGIT
    if kind == "ByteLevel":
        return GPT_2 if part["use_regex"] else None
    return str(kind)


def _tokens(state: dict[str, Any], size: int) -> list[str]:
    """Every token by its number; where there is none, a name that no text has."""
    tokens = [f"[PAD{number}]" for number in range(size)]
    for token, number in state["model"]["vocab"].items():
        tokens[number] = token
    for added in state["added_tokens"]:
        tokens[added["id"]] = added["content"]
    return tokens


def _types(state: dict[str, Any], tokens: list[str]) -> list[int]:
    from gguf import TokenType

    known = {**state["model"]["vocab"], **{added["content"]: added["id"] for added in state["added_tokens"]}}
    types = [TokenType.NORMAL if token in known else TokenType.UNUSED for token in tokens]
    if state["model"]["byte_fallback"]:
        for byte in range(256):
            types[known[f"<0x{byte:02X}>"]] = TokenType.BYTE
    for added in state["added_tokens"]:
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    unknown = state["model"]["unk_token"]
    if unknown is not None:
        types[known[unknown]] = TokenType.UNKNOWN
    return [int(kind) for kind in types]


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def _scores(merges: list[tuple[str, str]], tokens: list[str]) -> list[float]:
    """A token that is merged earlier has a higher score; what is not merged has the lowest one."""
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _steps(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if normalizer is None else list(normalizer.get("normalizers", [normalizer]))


def _has_prefix(normalizer: dict[str, Any] | None) -> bool:
    """Tells if a text gets a space before its first word."""
    return {"type": "Prepend", "prepend": SPACE} in _steps(normalizer)


def _write_special(writer: Any, tokenizer: Any, ends: list[int]) -> None:
    for name, number in zip(_ENDS, ends, strict=False):
        getattr(writer, f"add_{name}_token_id")(number)
    for name in ("bos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    begins = tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(begins)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def own_vocabulary(checkpoint: str) -> WriteVocabulary:
    """The vocabulary of a checkpoint or of a GGUF file, with the tokens that end its texts."""
    from transformers import AutoConfig, GenerationConfig

    if is_gguf(checkpoint):
        return _vocabulary_in_file(checkpoint)
    source = {"local_files_only": True}
    tokenizer = checkpoint_tokenizer(ModelConfig(model=checkpoint), source)
    if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
        raise UnsupportedModelError(checkpoint, "it brings no fast tokenizer", _REMEDY)
    try:
        generation = GenerationConfig.from_pretrained(checkpoint, **source)
    except OSError:
        generation = attempt(
            checkpoint, "its configuration cannot be read", AutoConfig.from_pretrained, checkpoint, **source
        )
    found = generation.eos_token_id if generation.eos_token_id is not None else tokenizer.eos_token_id
    ends = [] if found is None else [found] if isinstance(found, int) else list(found)
    if len(ends) > len(_ENDS):
        problem = f"{len(ends)} tokens end its texts, and a file names {len(_ENDS)} at most"
        raise UnsupportedModelError(checkpoint, problem, _REMEDY)
    return vocabulary_of(checkpoint, tokenizer, ends)


def _vocabulary_in_file(file: str) -> WriteVocabulary:
    """All that a file says of its vocabulary, with its own types."""
    from gguf import GGUFReader, GGUFValueType

    said = {name: field for name, field in GGUFReader(parts_of(file)[0]).fields.items() if name.startswith("tokenizer.")}

    def write(writer: Any, size: int) -> None:
        tokens = said.get("tokenizer.ggml.tokens")
        found = 0 if tokens is None else len(tokens.data)
        if found != size:
            problem = f"its vocabulary has {found:,} tokens, and {size:,} are needed"
            raise InvalidParameterError("target", file, problem, "Name the model that the head was made for.")
        for name, field in said.items():
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[1] if kind is GGUFValueType.ARRAY else None)

    return write
