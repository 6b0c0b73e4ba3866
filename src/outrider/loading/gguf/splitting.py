r"""How BPE cuts a text before it merges bytes or letters, by the names of pre-tokenizers in GGUF files.

The names are those of llama.cpp, and the pieces, too, also where the tokenizer of a model makes others. Two habits of its
expressions show in many of ours: it does not compose Unicode (NFC), and it knows small and capital letters among those of
ASCII alone, so that \p{Lu} is any letter there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Splitting:
    """Says how text is cut before merges."""

    patterns: tuple[str, ...]  # the regular expressions of pieces. Each one cuts what the ones before it have left.
    whole_pieces: bool = False  # whether a piece that is a token is one, whatever its merges would give
    begins: bool = False  # whether a text begins with a token where the file does not say it
    of_text: bool = False  # whether tokens are text with signs for spaces, and not bytes
    # Whether a run of line breaks that is a token is one, and any other one is cut into single breaks.
    whole_breaks: bool = False


#: Every digit is a piece.
DIGIT = r"\p{N}"
#: Endings of English words.
ENDING = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
#: That of GPT-2, which byte-level pre-tokenizers have of their own.
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_THREE_DIGITS = r"\p{N}{1,3}"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_WORD = rf"{_BEFORE}\p{{L}}+"
_MARKED_WORD = rf"{_BEFORE}[\p{{L}}\p{{M}}]+"
_JOINED_WORD = rf"{_BEFORE}[\p{{L}}\p{{M}}\u200c\u200d]+"
_ENDED_WORD = rf"{_MARKED_WORD}(?:{ENDING})?"
_PHRASE = rf"{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s+(?!\S)|\s+"
_WHITE = rf"\s*[\r\n]+|{_SPACES}"
_WHITE_BY_LINES = rf"\s*[\r\n]|{_SPACES}"
_WHITE_BY_POWERS = "|".join([
    r"\s*[\r\n]+", *(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)|\s"
])  # fmt: skip


def _words(*words: str, digits: str = DIGIT, signs: str = rf"{_SIGNS}[\r\n]*", white: str = _WHITE) -> str:
    return "|".join([*words, digits, signs, white])


def _capitals(marks: str, ending: str) -> str:
    """Words whose capitals come first."""
    upper, lower = rf"[\p{{L}}{marks}&&[^a-z]]", rf"[\p{{L}}{marks}&&[^A-Z]]"
    return f"{_BEFORE}{upper}*{lower}+{ending}|{_BEFORE}{upper}+{lower}*{ending}"


_LLAMA_3 = _words(ENDING, _WORD, digits=_THREE_DIGITS)
_QWEN_2 = _words(ENDING, _WORD)
_LINES = r"[^\n]+|\n+"
_STROKES = rf"{_SIGNS}[\r\n/]*"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# A number is cut by three from its end, and its first part stays with what is before it.
_DIGITS_FROM_THEIR_END = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"

# In DeepSeek's first models, letters with a case are those of Unicode 9, and spaces are neither signs nor letters.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}\x{a790}-\x{ab68}"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{1df2a}]]+"
)
_FULL_WIDTH = r"[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3001}-\x{3002}]+"
_EASTERN = r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}&&\S]+"
_HAN_AND_KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
_DEEPSEEK_WORDS = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_3 = rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_WHITE}"
_SPARK = rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}"
_YOUTU = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+|[\x{3105}-\x{312f}]+|"
    r"[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+|"
) + _HAN_AND_KANA
_HAN = r"[\x{3400}-\x{4dbf}\x{4e00}-\x{9fff}\x{f900}-\x{faff}\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}\x{2f800}-\x{2fa1f}]"
_NOT_HAN = rf"{_BEFORE}(?:(?!{_HAN})\p{{L}})+(?:{ENDING})?"
_ASIAN = (
    r"[\x{3400}-\x{4dbf}\x{4e00}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{e40}-\x{eff}\x{1000}-\x{109f}\x{1100}-\x{11ff}\x{1780}-\x{17ff}]+"
)


def _cut(*patterns: str, whole_pieces: bool = False, begins: bool = False) -> Splitting:
    return Splitting(patterns, whole_pieces=whole_pieces, begins=begins)


#: Names with the same pieces stand in one row.
ROWS = {
    "default": _cut(r"[\p{P}$+<=>^~|]+", GPT_2, r"\p{N}+", "[0-9]{3}"),
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum modern-bert granite-docling jina-es jina-de "
    "jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe": _cut(GPT_2),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _cut(DIGIT, GPT_2),
    "falcon": _cut(r"[\p{P}$+<=>^~|`]+", GPT_2, "[0-9]{3}"),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _cut(
        _LLAMA_3, whole_pieces=True, begins=True
    ),
    "glm4 glm5": _cut(_LLAMA_3, whole_pieces=True),
    "chatglm-bpe dbrx smaug-bpe": _cut(_LLAMA_3),
    "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez grok-2 kormo f2llmv2": _cut(_QWEN_2),
    "qwen35": _cut(_words(ENDING, _MARKED_WORD, signs=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")),
    "ufakzeka": _cut(_words(_WORD)),
    "laguna": _cut(_LINES, _QWEN_2),
    "seed-coder": _cut(_words(ENDING, _WORD, signs=_SIGNS)),
    "bailingmoe bailingmoe2 llada-moe": _cut(_words(ENDING, _WORD, white=_WHITE_BY_LINES)),
    "exaone-moe": _cut(_words(ENDING, _PHRASE, signs=rf"{_SIGNS}[\r\n/]?", white=_WHITE_BY_LINES)),
    "jais-2": _cut(_words(ENDING, _WORD, digits=_THREE_DIGITS, white=_WHITE_BY_POWERS)),
    "k2-horizon": _cut(_words(ENDING, _JOINED_WORD, digits=_THREE_DIGITS)),
    "minicpm5": _cut(_THREE_DIGITS, _words(ENDING, _WORD, digits=r"\p{N}+"), whole_pieces=True),
    "kimi-k2": _cut(_words(f"{_HAN}+", _NOT_HAN, digits=_THREE_DIGITS)),
    "deepseek-llm": _cut(r"[\r\n]", rf"\s?{_CASED}", rf"\s?{_FULL_WIDTH}", r"\s+\z", _EASTERN, r"\p{N}+"),
    "deepseek-coder": _cut(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, DIGIT),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _cut(_THREE_DIGITS, _HAN_AND_KANA, _DEEPSEEK_3),
    "spark2_5": _cut(_THREE_DIGITS, _HAN_AND_KANA, _SPARK, DIGIT),
    "afmoe": _cut(_DIGITS_FROM_THEIR_END, _ASIAN, _DEEPSEEK_3),
    "youtu": _cut(_YOUTU, _words(_ENDED_WORD, signs=_STROKES), whole_pieces=True),
    "tiny_aya cohere2moe": _cut(_DIGITS_FROM_THEIR_END, _words(_ENDED_WORD, digits=_THREE_DIGITS, signs=_STROKES)),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _cut(
        _words(_capitals("", f"(?:{ENDING})?"), digits=_THREE_DIGITS, signs=_STROKES)
    ),
    "granite-embed-multi-97m": _cut(
        _words(_capitals(r"\p{M}", f"(?:{ENDING})?"), digits=_THREE_DIGITS, signs=_STROKES), whole_pieces=True
    ),
    "tekken": _cut(_words(_capitals("", ""), signs=_STROKES), whole_pieces=True, begins=True),
    "superbpe": _cut(r"\p{N}+", "(?=([0-9]{3})+(?![0-9]))"),
    "bloom gpt3-finnish poro-chat": _cut(_BLOOM),
    "viking": _cut(_BLOOM, DIGIT),
    "chameleon": _cut(
        "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", DIGIT, r"[\p{P}!-/:-@\[-`{-~]", GPT_2, begins=True
    ),
    "gemma4 granite-embed-multi-311m": Splitting((_LINES,), begins=True, of_text=True, whole_breaks=True),
    "sarvam-moe": Splitting((_LINES,), of_text=True),
}
#: The pre-tokenizers by their names in files.
SPLITTINGS = {name: splitting for names, splitting in ROWS.items() for name in names.split()}


def kinds_of_splitting() -> str:
    """One name for each way to cut, for a message."""
    return ", ".join(names.split()[0] for names in ROWS)
