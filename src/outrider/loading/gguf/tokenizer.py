"""The tokenizer of a GGUF file, from its vocabulary, its merges or scores, and the name of its pre-tokenizer.

BPE is known with the pre-tokenizers of splitting.py, that of SentencePiece with byte fallback as Llama, Phi-3 and Gemma
have it, and the unigrams of SentencePiece as T5 has them. Other vocabularies are refused by name: a text that is cut in
another way than the model has learnt would be read wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from outrider.config import Elsewhere, declared
from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.loading.file_limits import check_file_limit
from outrider.loading.gguf.header import GgufFile
from outrider.loading.gguf.splitting import SPLITTINGS, Splitting, kinds_of_splitting
from outrider.params import SamplingParams

_AGAIN = "Download the file again."
_UNKNOWN = 'Pass tokenizer="FOLDER or hub id" of the original checkpoint.'
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
SPACE = "\u2581"


def read_gguf_tokenizer(file: GgufFile) -> Any | None:
    """A tokenizer of transformers. None where the file brings placeholders."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = _Vocabulary(file)
    kind = vocabulary.get("model")
    template = file.metadata.get("tokenizer.chat_template")
    check_file_limit(file.path, "template_bytes", len(template.encode()) if isinstance(template, str) else 0)
    if kind in (None, "rwkv", "no_vocab", "none"):
        return None
    if kind in ("gpt2", "gemma4"):
        splitting = _splitting(vocabulary, kind if kind == "gemma4" else vocabulary.get("pre"))
        begins, backend = splitting.begins, (_of_text if splitting.of_text else _byte_level)(vocabulary, splitting)
    elif kind == "llama" and file.metadata.get("general.architecture") in WITH_PIECES:
        begins, backend = True, _sentence_piece(vocabulary)
    elif kind == "t5":
        begins, backend = False, _unigrams(vocabulary)
    else:
        architecture = file.metadata.get("general.architecture")
        problem = (
            f"its vocabulary is {kind!r} of {architecture}, and gpt2, t5, and llama of {', '.join(WITH_PIECES)}, are known"
        )
        raise UnsupportedModelError(file.path, problem, _UNKNOWN)
    check_file_limit(file.path, "added_tokens", vocabulary.num_added)
    backend.add_special_tokens(vocabulary.added(special=True))
    backend.add_tokens(vocabulary.added(special=False))
    named = {f"{name}_token": vocabulary.named(f"{key}_token_id") for name, key in _NAMED.items()}
    if kind == "gemma4" or vocabulary.flag("add_bos_token", default=begins and vocabulary.get("bos_token_id") is not None):
        _put_around(backend, vocabulary, "bos")
    elif kind == "t5" and vocabulary.flag("add_eos_token", default=True):
        _put_around(backend, vocabulary, "eos")
    return PreTrainedTokenizerFast(
        tokenizer_object=_Given(backend),
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )


def end_tokens(file: GgufFile) -> list[int]:
    """The tokens that end a text, or a turn of a chat: those that the file says, and those that llama.cpp knows by their
    texts, since many files say one alone."""
    vocabulary = _Vocabulary(file)
    found = {vocabulary.number(f"{name}_token_id") for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")}
    if isinstance(vocabulary.get("tokens"), list):
        found |= _ends_by_text(vocabulary)
    return sorted(number for number in found if number is not None)


#: What ends a text or a turn, by its text. Those of the last lines end what is written between two texts, or of a file.
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<|ifm|im_end|>", "<EOT>", "_<EOT>", "\u2581<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>", "<|plamo:file_separator|>",
})  # fmt: skip
#: Where all of these end texts, the last one ends a part of an answer.
_PARTS_OF_ANSWERS = (
    ("<|return|>", "<|call|>", "<|end|>"),
    ("<|return|>", "<|calls|>", "<|end|>"),
    ("<|call|>", "<|flush|>", "<|end|>"),
    ("<|calls|>", "<|flush|>", "<|end|>"),
    ("<|tool_response>", "</s>"),
)


def _ends_by_text(vocabulary: _Vocabulary) -> set[int]:
    """Only what is no part of a text is taken by its own text: tokens of control, and those that users define. The one
    that is HTML, too, has to be of control: Gemma writes it."""
    kinds = zip(vocabulary.names, vocabulary.types, strict=True)
    known = {token: (number, kind) for number, (token, kind) in enumerate(kinds) if token in _ENDS}
    found = {
        token: number
        for token, (number, kind) in known.items()
        if kind == _CONTROL or (kind == _USER_DEFINED and token != "</s>")
    }
    parts = {part for *others, part in _PARTS_OF_ANSWERS if found.keys() >= set(others)}
    return {found[token] for token in found.keys() - parts}


def sampling_defaults(file: GgufFile) -> dict[str, float]:
    """Returns how texts are drawn where a request leaves it open, by the names of SamplingParams; not validated."""
    named = {ours: names.gguf for ours, names in declared(SamplingParams, Elsewhere) if names.gguf}
    found = {ours: file.metadata.get(f"general.sampling.{theirs}") for ours, theirs in named.items()}
    return {name: _shortest(value) for name, value in found.items() if value is not None}


def _shortest(value: Any) -> Any:
    """The number with the fewest digits that a float32 of a file stands for, as 0.95."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


#: The architectures whose vocabulary of SentencePiece is known.
WITH_PIECES = ("llama", "phi3", "gemma2", "gemma3", "gemma3n")
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
#: The tokens of T5 where a file says nothing of them, as llama.cpp takes them to be.
_OF_T5 = {"padding_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2}


class _Vocabulary:
    """Holds what a file says of its tokens, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{name}")

    def wrong(self, name: str, why: str) -> ModelLoadError:
        return ModelLoadError(self.file.path, f"its tokenizer.ggml.{name} {why}", _AGAIN)

    def texts(self, name: str) -> list[str]:
        found = self.get(name)
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.wrong(name, "is no list of texts")
        return found

    @cached_property
    def names(self) -> list[str]:
        """The tokens. In those of SentencePiece that users define, llama.cpp's converter writes spaces for the signs of
        spaces."""
        names = self.texts("tokens")
        check_file_limit(self.file.path, "token_characters", max(map(len, names), default=0))
        if self.get("model") != "llama":
            return names
        found = self.get("token_type")
        kinds = found if isinstance(found, list) and len(found) == len(names) else [1] * len(names)
        turned = {name: name.replace(" ", SPACE) for name, kind in zip(names, kinds, strict=True) if kind == _USER_DEFINED}
        known = set(names)
        return [turned[name] if name in turned and turned[name] not in known else name for name in names]

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Their numbers."""
        tokens: dict[str, int] = {}
        for number, token in enumerate(self.names):
            if token in tokens:
                raise self.wrong("tokens", f"holds {token!r} twice")
            tokens[token] = number
        return tokens

    @cached_property
    def types(self) -> list[int]:
        found, count = self.get("token_type"), len(self.names)
        if found is None:
            return [1] * count
        if not isinstance(found, list) or len(found) != count or not all(isinstance(each, int) for each in found):
            raise self.wrong("token_type", f"is no list of {count} numbers")
        return found

    def scores(self) -> list[float]:
        found, count = self.get("scores"), len(self.names)
        if not isinstance(found, list) or len(found) != count or not all(isinstance(each, float) for each in found):
            raise self.wrong("scores", f"is no list of {count} numbers")
        return found

    def charsmap(self) -> bytes | None:
        """The table by which SentencePiece changes characters beforehand."""
        found = self.get("precompiled_charsmap")
        if found is None:
            return None
        if isinstance(found, list) and all(isinstance(each, int) and -128 <= each < 256 for each in found):
            table = bytes(each & 255 for each in found)
            if _stays_inside(table):
                return table
        raise self.wrong("precompiled_charsmap", "is no table of characters")

    def merges(self) -> list[tuple[str, str]]:
        """Returns what is merged, of which a model finds out whether the parts and the whole are tokens."""
        return [(first, second) for merge in self.texts("merges") for first, _, second in [merge.partition(" ")]]

    def wrong_merge(self) -> ModelLoadError | None:
        """The error for the first merge whose parts or whole are no tokens. None where there is none."""
        for merge, (first, second) in zip(self.texts("merges"), self.merges(), strict=True):
            if not {first, second, first + second} <= self.tokens.keys():
                return self.wrong("merges", f"holds {merge!r}, whose parts or whole are no tokens")
        return None

    def added(self, *, special: bool) -> list[Any]:
        """Tokens that are found in a text as a whole: those of control, or those that are defined by users."""
        from tokenizers import AddedToken

        wanted = _CONTROL if special else _USER_DEFINED
        found = [token for token, kind in zip(self.names, self.types, strict=True) if kind == wanted and token]
        return [AddedToken(token, normalized=False, special=special, rstrip=self._takes_spaces(token)) for token in found]

    @property
    def num_added(self) -> int:
        """Returns how many such tokens there are. Each one is searched for in every text."""
        return sum(kind in (_CONTROL, _USER_DEFINED) for kind in self.types)

    def _takes_spaces(self, token: str) -> bool:
        """Tells whether a token that is found as a whole takes the spaces behind it. Phi-3's do, and files do not say
        it."""
        is_phi = self.get("model") == "llama" and self.file.metadata.get("general.architecture") == "phi3"
        return is_phi and token not in ("<unk>", "<s>", "<|endoftext|>")

    def number(self, name: str) -> int | None:
        found = self.get(name)
        if found is None and self.get("model") == "t5":
            found = _OF_T5.get(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < len(self.names):
            raise self.wrong(name, f"is {found!r}, and no token")
        return found

    def named(self, name: str) -> str | None:
        number = self.number(name)
        return None if number is None else self.names[number]

    def flag(self, name: str, *, default: bool) -> bool:
        found = self.get(name)
        if not isinstance(found, bool | None):
            raise self.wrong(name, f"is {found!r}, and neither true nor false")
        return default if found is None else found


def _splitting(vocabulary: _Vocabulary, name: Any) -> Splitting:
    found = SPLITTINGS.get(name) if isinstance(name, str) else None
    if found is None:
        problem = f"its pre-tokenizer is {name!r}, and {kinds_of_splitting()} are known"
        raise UnsupportedModelError(vocabulary.file.path, problem, _UNKNOWN)
    return found


def _byte_level(vocabulary: _Vocabulary, splitting: Splitting) -> Any:
    from tokenizers import decoders, models, pre_tokenizers

    tokens, merges = vocabulary.tokens, vocabulary.merges()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    with _merges_checked(vocabulary):
        model = models.BPE(vocab=tokens, merges=merges, ignore_merges=splitting.whole_pieces)
    tokenizer = _cutting(model, splitting.patterns, bytes_only)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_text(vocabulary: _Vocabulary, splitting: Splitting) -> Any:
    """Builds the tokenizer of Gemma 4, with tokens of bytes for letters that are none."""
    from tokenizers import decoders, models, normalizers

    tokens, merges, patterns = vocabulary.tokens, vocabulary.merges(), splitting.patterns
    if splitting.whole_breaks and ("\n", "\n") not in merges:
        longest = max((len(name) for name in tokens if not name.strip("\n")), default=1)
        patterns += (rf"\A\n{{1,{longest}}}\z|\n",)
        pairs = [("\n" * (size - 1), "\n") for size in range(longest, 1, -1)]  # so that a run grows at its begin alone
        merges = [pair for pair in pairs if tokens.keys() >= {*pair, "".join(pair)}] + merges
    with _merges_checked(vocabulary):
        model = models.BPE(vocab=tokens, merges=merges, byte_fallback=True)
    tokenizer = _cutting(model, patterns)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@contextmanager
def _merges_checked(vocabulary: _Vocabulary) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # it has no type of its own, and names one of the texts
        raise vocabulary.wrong_merge() or error from None


def _cutting(model: Any, patterns: tuple[str, ...], *steps: Any) -> Any:
    """A tokenizer whose texts are cut by these patterns, one after another, and go through these steps."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, *steps])
    return tokenizer


def _sentence_piece(vocabulary: _Vocabulary) -> Any:
    """The BPE of SentencePiece: of two neighbours the pair whose whole has the highest score is merged first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    model = models.BPE(
        vocab=vocabulary.tokens,
        merges=_merges_by_score(vocabulary),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=vocabulary.named("unknown_token_id"),
    )
    tokenizer = Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", default=True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """All ways to make a token of two, the best one first.

    Tokens that users define are whole before anything is merged, as runs of spaces are in Gemma, whatever their scores.
    Among the ways to make one token, Gemma's tokenizer tries the longest first part first, and Llama's the first one in
    the vocabulary, as Phi-3's does.
    """
    names, tokens = vocabulary.names, vocabulary.tokens
    scores, types = vocabulary.scores(), vocabulary.types
    by_length = vocabulary.file.metadata.get("general.architecture") in ("gemma2", "gemma3", "gemma3n")
    whole: list[tuple[int, int, int, str, str]] = []
    merges: list[tuple[str, str]] = []
    for number in sorted(range(len(names)), key=lambda number: -scores[number]):  # equal ones stay in order
        token = names[number]
        ends = [end for end in range(len(token) - 1, 0, -1) if token[:end] in tokens and token[end:] in tokens]
        ways = [(token[:end], token[end:]) for end in ends]
        if types[number] == _USER_DEFINED:
            whole += [(-len(first), -len(second), number, first, second) for first, second in ways]
            continue
        merges += ways if by_length else sorted(ways, key=lambda way: (tokens[way[0]], tokens[way[1]]))
    return [(first, second) for *_, first, second in sorted(whole)] + merges


def _unigrams(vocabulary: _Vocabulary) -> Any:
    """The unigrams of SentencePiece: of all ways to make a text of tokens, that whose scores add up to the most."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown, table = vocabulary.number("unknown_token_id") or 0, vocabulary.charsmap()
    tokenizer = Tokenizer(models.Unigram(_pieces(vocabulary, unknown + 1), unk_id=unknown, byte_fallback=False))
    changes: list[Any] = [] if table is None else [normalizers.Precompiled(table)]
    prefix = "always"
    if vocabulary.flag("remove_extra_whitespaces", default=False):
        words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    elif vocabulary.flag("add_space_prefix", default=False):
        changes += [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    else:
        prefix = "never"
        changes += [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(changes)
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=prefix)
    return tokenizer


def _pieces(vocabulary: _Vocabulary, least: int) -> list[tuple[str, float]]:
    """Tokens with their scores, and so many of them at least. Those that converters fill a vocabulary up with are in no
    text, and left out."""
    scores, types = vocabulary.scores(), vocabulary.types
    if not np.isfinite(scores).all():
        raise vocabulary.wrong("scores", "holds numbers that are not finite")
    used = max((number + 1 for number, kind in enumerate(types) if kind != _UNUSED), default=0)
    whole = (_CONTROL, _USER_DEFINED)  # found before anything is scored; the least score tells what unknown text costs
    pieces = zip(vocabulary.tokens, scores, types, strict=True)
    return [(token, 0.0 if kind in whole else score) for token, score, kind in pieces][: max(used, least)]


def _stays_inside(table: bytes) -> bool:
    """Tells whether a table of characters leads nowhere outside of itself. It is a trie of what is replaced, whose units
    are numbers of 32 bits behind their size, and the texts that replace it."""
    size = int.from_bytes(table[:4], "little") // 4
    if not 0 < size < len(table) // 4:
        return False
    units = np.frombuffer(table, "<u4", size, 4).astype(np.int64)
    texts = np.frombuffer(table[4 + 4 * size :] + b"\0", np.uint8)
    followed = units < 2**31  # the others are places of texts
    followed[0] = True
    after = np.arange(size) ^ (units >> 10 << ((units & 512) >> 6))  # whose last byte is that of the next character
    if (after[followed] | 255).max() >= size:
        return False
    places = units[after[followed & (units & 256 > 0)]] & (2**31 - 1)
    return bool((places < len(texts)).all() and (texts[places] & 0xC0 != 0x80).all())


class _Given:
    """A tokenizer that transformers takes as it is: a copy of a large vocabulary takes as long as all before it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Any:
        return self._backend


def _put_around(tokenizer: Any, vocabulary: _Vocabulary, name: str) -> None:
    """Let every text begin with a token ("bos"), or end with one ("eos")."""
    from tokenizers.processors import TemplateProcessing

    token, number = vocabulary.named(f"{name}_token_id"), vocabulary.number(f"{name}_token_id")
    if token is None or number is None:
        raise vocabulary.wrong(f"add_{name}_token", f"is true, and there is no {name}_token_id")
    added = {"id": "added", "ids": [number], "tokens": [token]}  # its own text may have a meaning in templates
    single, pair = (
        (["added", "$A"], ["added", "$A", "$B"]) if name == "bos" else (["$A", "added"], ["$A", "added", "$B", "added"])
    )
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=[added])
