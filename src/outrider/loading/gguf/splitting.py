r"""How byte-level BPE cuts a text before it merges bytes, by the names of pre-tokenizers in GGUF files.

The names are those of llama.cpp, and the pieces, too, also where the tokenizer of a model makes others. Two habits of its
expressions show in many of ours: it does not compose Unicode (NFC), and it knows small and capital letters among those of
ASCII alone, so that \p{Lu} is any letter there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Splitting:
    """How text is cut before merges.

    Attributes:
        patterns: The regular expressions of pieces. Each one cuts what the ones before it have left.
        whole_pieces: Whether a piece that is a token is one, whatever its merges would give.
        begins: Whether a text begins with a token where the file does not say it.
    """

    patterns: tuple[str, ...]
    whole_pieces: bool = False
    begins: bool = False


def _any_of(*patterns: str) -> str:
    return "|".join(patterns)


#: Every digit is a piece.
DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
#: Endings of English words.
ENDING = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_WORD = rf"{_BEFORE}\p{{L}}+"
_MARKED_WORD = rf"{_BEFORE}[\p{{L}}\p{{M}}]+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_STROKES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"

#: That of GPT-2, which byte-level pre-tokenizers have of their own.
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = _any_of(ENDING, _WORD, _THREE_DIGITS, _SIGNS, _LINES, _SPACES)
_QWEN_2 = _any_of(ENDING, _WORD, DIGIT, _SIGNS, _LINES, _SPACES)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LINE_OR_BREAKS = r"[^\n]+|\n+"


def _capitals(upper: str, lower: str, ending: str) -> str:
    """Words whose capitals come first."""
    return _any_of(f"{_BEFORE}{upper}*{lower}+{ending}", f"{_BEFORE}{upper}+{lower}*{ending}")


_CAPITALS = (r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]")
_MARKED_CAPITALS = (r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]")
_GPT_4O = _any_of(_capitals(*_CAPITALS, f"(?:{ENDING})?"), _THREE_DIGITS, _SIGNS_AND_STROKES, _LINES, _SPACES)
_TEKKEN = _any_of(_capitals(*_CAPITALS, ""), DIGIT, _SIGNS_AND_STROKES, _LINES, _SPACES)
_MARKED_ENDED = f"{_MARKED_WORD}(?:{ENDING})?"

# DeepSeek's. In its first models, letters with a case are those of Unicode 9, and spaces are no signs.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}\x{a790}-\x{ab68}"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{1df2a}]]"
)
_FULL_WIDTH = r"!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3001}-\x{3002}"
_EASTERN = r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}&&\S]+"
_HAN_AND_KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
_SIGNED_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+"
_WORD_OF_NO_SIGN = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_MANY_SIGNS = r" ?[\p{P}\p{S}]+"
_DEEPSEEK_3 = _any_of(_SIGNED_WORD, _WORD_OF_NO_SIGN, rf"{_MANY_SIGNS}[\r\n]*", _LINES, _SPACES)

_YOUTU = _any_of(
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+",
    r"[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+",
    r"[\x{3105}-\x{312f}]+",
    _HAN_AND_KANA,
)
_HAN = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{20000}-\x{2a6df}\x{2a700}-\x{2b73f}\x{2b740}-\x{2b81f}\x{2b820}-\x{2ceaf}"
    r"\x{2ceb0}-\x{2ebef}\x{f900}-\x{faff}\x{2f800}-\x{2fa1f}]"
)
_KIMI_WORD = rf"{_BEFORE}(?:(?!{_HAN})\p{{L}})+(?:{ENDING})?"
# A number is cut by three from its end, and its first part stays with what is before it.
_DIGITS_FROM_THEIR_END = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASIAN = (
    r"[\x{3400}-\x{4dbf}\x{4e00}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{e40}-\x{eff}\x{1000}-\x{109f}\x{1100}-\x{11ff}\x{1780}-\x{17ff}]+"
)
_WHITE_BY_POWERS = _any_of(*(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)|\s")
_PHRASE = rf"{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"

_TABLE: tuple[tuple[str, Splitting], ...] = (
    ("default", Splitting((r"[\p{P}$+<=>^~|]+", GPT_2, r"\p{N}+", "[0-9]{3}"))),
    (
        "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum modern-bert granite-docling jina-es jina-de "
        "jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe",
        Splitting((GPT_2,)),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", Splitting((DIGIT, GPT_2))),
    ("falcon", Splitting((r"[\p{P}$+<=>^~|`]+", GPT_2, "[0-9]{3}"))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Splitting((_LLAMA_3,), whole_pieces=True, begins=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", Splitting((_LLAMA_3,))),
    ("glm4 glm5", Splitting((_LLAMA_3,), whole_pieces=True)),
    (
        "k2-horizon",
        Splitting((_any_of(ENDING, rf"{_BEFORE}[\p{{L}}\p{{M}}\u200c\u200d]+", _THREE_DIGITS, _SIGNS, _LINES, _SPACES),)),
    ),
    ("jais-2", Splitting((_any_of(ENDING, _WORD, _THREE_DIGITS, _SIGNS, _LINES, _WHITE_BY_POWERS),))),
    (
        "minicpm5",
        Splitting((_THREE_DIGITS, _any_of(ENDING, _WORD, r"\p{N}+", _SIGNS, _LINES, _SPACES)), whole_pieces=True),
    ),
    (
        "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez grok-2 kormo f2llmv2",
        Splitting((_QWEN_2,)),
    ),
    (
        "qwen35",
        Splitting((_any_of(ENDING, _MARKED_WORD, DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES, _SPACES),)),
    ),
    ("ufakzeka", Splitting((_any_of(_WORD, DIGIT, _SIGNS, _LINES, _SPACES),))),
    ("laguna", Splitting((_LINE_OR_BREAKS, _QWEN_2))),
    ("bailingmoe bailingmoe2 llada-moe", Splitting((_any_of(ENDING, _WORD, DIGIT, _SIGNS, r"\s*[\r\n]", _SPACES),))),
    ("seed-coder", Splitting((_any_of(ENDING, _WORD, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, _SPACES),))),
    (
        "exaone-moe",
        Splitting((_any_of(ENDING, _PHRASE, DIGIT, r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"\s*[\r\n]", _SPACES),)),
    ),
    (
        "deepseek-llm",
        Splitting((r"[\r\n]", rf"\s?{_CASED}+", rf"\s?[{_FULL_WIDTH}]+", r"\s+\z", _EASTERN, r"\p{N}+")),
    ),
    ("deepseek-coder", Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, DIGIT))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Splitting((_THREE_DIGITS, _HAN_AND_KANA, _DEEPSEEK_3))),
    (
        "spark2_5",
        Splitting(
            (
                _THREE_DIGITS,
                _HAN_AND_KANA,
                _any_of(_SIGNED_WORD, _WORD_OF_NO_SIGN, _MANY_SIGNS, r"[\r\n]", _SPACES),
                DIGIT,
            )
        ),
    ),
    ("afmoe", Splitting((_DIGITS_FROM_THEIR_END, _ASIAN, _DEEPSEEK_3))),
    (
        "youtu",
        Splitting((_YOUTU, _any_of(_MARKED_ENDED, DIGIT, _SIGNS_AND_STROKES, _LINES, _SPACES)), whole_pieces=True),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Splitting((_GPT_4O,))),
    (
        "granite-embed-multi-97m",
        Splitting(
            (_any_of(_capitals(*_MARKED_CAPITALS, f"(?:{ENDING})?"), _THREE_DIGITS, _SIGNS_AND_STROKES, _LINES, _SPACES),),
            whole_pieces=True,
        ),
    ),
    ("tekken", Splitting((_TEKKEN,), whole_pieces=True, begins=True)),
    (
        "tiny_aya cohere2moe",
        Splitting(
            (
                _DIGITS_FROM_THEIR_END,
                _any_of(_MARKED_ENDED, _THREE_DIGITS, _SIGNS_AND_STROKES, _LINES, _SPACES),
            )
        ),
    ),
    ("kimi-k2", Splitting((_any_of(f"{_HAN}+", _KIMI_WORD, _THREE_DIGITS, _SIGNS, _LINES, _SPACES),))),
    ("superbpe", Splitting((r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))"))),
    ("bloom gpt3-finnish poro-chat", Splitting((_BLOOM,))),
    ("viking", Splitting((_BLOOM, DIGIT))),
    (
        "chameleon",
        Splitting(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT_2,
            ),
            begins=True,
        ),
    ),
)
#: The pre-tokenizers by their names in files.
SPLITTINGS = {name: splitting for names, splitting in _TABLE for name in names.split()}
