"""Renders texts for a terminal: colours of tokens, the closing line, why a text ended, and outputs as JSON."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.text import Text

    from outrider.llm import LLM
    from outrider.params import CompletionOutput, Logprob, PositionLogprobs, SamplingParams, StreamPiece
    from outrider.propose.settings import SpeculationConfig
    from outrider.results import RequestStats

# --- Renders tokens in the colours of their origins and members, the closing line, and outputs as JSON.


_WORDS = re.compile(r"\s+|\S+")

#: Chosen to stay apart for colour-blind readers and on light and dark backgrounds; plain tokens keep the default.
STYLES = {
    "prompt": "dim",
    "plain": "",
    "accepted": "#12a07a",
    "recovered": "bold #cc5f00",
    "bonus": "bold #8a7df0",
}


#: Of the members of a draft, in the order in which they are named; beyond the last it begins anew.
_MEMBERS = ("#12a07a", "#2f86d6", "#c07aa8", "#9a8a1f", "#4fb3c8", "#7d6b5d")


def members_of(speculation: SpeculationConfig, params: SamplingParams) -> list[str]:
    """The names of all that may draft for a text: methods, those that the engine may choose, and its structure."""
    from outrider.propose.compositions import Auto, parts_of
    from outrider.results import FORCED

    method = speculation.method
    configs = method.methods if isinstance(method, Auto) else (speculation,)
    names = [part.name for config in configs for part in parts_of(config) if part.method is not None]
    return list(dict.fromkeys([*names, *([FORCED] if params.structured_outputs is not None else [])]))


def palette(members: Sequence[str]) -> dict[str, str]:
    """The style of each origin and of each member."""
    return STYLES | {member: _MEMBERS[place % len(_MEMBERS)] for place, member in enumerate(members)}


def legend(members: Sequence[str]) -> Text:
    """One line that says what the colours mean; where several members draft, each has its own."""
    from rich.text import Text

    drafted = {"accepted": "draft token"} if len(members) < 2 else dict.fromkeys(members, "draft token")
    meanings = {**drafted, "recovered": "after a rejection", "bonus": "after a whole draft"}
    line, styles = Text(), palette(members)
    for source, meaning in meanings.items():
        line.append(f"{source} ", styles[source])
        line.append(f"{meaning}   ", "dim")
    return line


def sources(piece: StreamPiece) -> Iterator[tuple[str, str]]:
    """The spans of a piece, each with the member that drafted it, or else with its origin."""
    for (text, origin), member in zip(piece.spans, piece.span_members, strict=True):
        yield text, member or str(origin)


def coloured(spans: Any) -> Text:
    """Text from (piece, origin) pairs."""
    from rich.text import Text

    text = Text()
    for piece, origin in spans:
        text.append(piece, STYLES[str(origin)])
    return text


def write(paper: Console, spans: Iterable[tuple[str, str]], styles: Mapping[str, str] = STYLES) -> None:
    """Put (piece, source) pairs on paper, character for character: rich's Text expands tabs and drops form feeds. A source
    without a style of its own is a member whose tokens look like all draft tokens."""
    from rich.segment import Segment, Segments
    from rich.style import Style

    segments = [Segment(piece, Style.parse(styles.get(str(source), STYLES["accepted"]))) for piece, source in spans]
    paper.print(Segments(segments), end="", soft_wrap=True)
    paper.file.flush()


class Wrapped:
    """Paper for a text that grows, with lines that break between words and not within them.

    A word is written once it is whole. Text that is no terminal's is written as it is.
    """

    def __init__(self, paper: Console) -> None:
        self._paper, self._column = paper, 0
        self._word: list[tuple[str, str]] = []

    def write(self, spans: Iterable[tuple[str, str]]) -> None:
        """Go on with (piece, origin) pairs."""
        if not self._paper.is_terminal:
            write(self._paper, spans)
            return
        for piece, origin in spans:
            for part in _WORDS.findall(piece):
                if part.isspace():
                    self._end_word()
                    self._blank(part, origin)
                else:
                    self._word.append((part, origin))

    def finish(self) -> None:
        """Write the last word."""
        self._end_word()

    def _end_word(self) -> None:
        from rich.cells import cell_len

        size = sum(cell_len(piece) for piece, _ in self._word)
        if self._column and self._column + size > self._paper.width:
            write(self._paper, [("\n", "plain")])
            self._column = 0
        if self._word:
            write(self._paper, self._word)
        self._column = (self._column + size) % max(1, self._paper.width)
        self._word = []

    def _blank(self, blank: str, origin: str) -> None:
        """Blanks that do not fit end the line instead."""
        last = blank.rpartition("\n")[2]
        if "\n" not in blank and self._column + len(last) >= self._paper.width:
            blank, last = "\n", ""
        write(self._paper, [(blank, origin)])
        self._column = len(last) if "\n" in blank else self._column + len(last)


def write_logprobs(paper: Console, positions: Iterable[PositionLogprobs] | None) -> None:
    """A line a token, where they were asked for: how likely it was, its rank, and the likeliest others at its place."""
    if positions is None:
        return
    paper.print(f"{'token':<16} {'logprob':>8} {'rank':>5}   others", style="dim")
    for entry in positions:
        (piece, own), *others = ((_quoted(token, found), found) for token, found in entry.items())
        rest = (f"  {other} {found.logprob:.3f}" for other, found in others)
        paper.print(f"{piece:<16} {own.logprob:>8.3f} {own.rank:>5}", *rest, markup=False, emoji=False)


def _quoted(token: int, found: Logprob) -> str:
    return repr(token if found.decoded_token is None else found.decoded_token)


def closing_line(num_tokens: int, seconds: float, stats: RequestStats, ended: str) -> str:
    """tokens/s, how the text ended, mean acceptance length and acceptance rate of one run."""
    line = f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / max(seconds, 1e-9):.1f} tokens/s, {ended}"
    if stats.num_drafts:
        line += f", mean acceptance length {stats.mean_acceptance_length:.2f}, acceptance rate {stats.acceptance_rate:.0%}"
    return line


def write_closing(notes: Console, num_tokens: int, seconds: float, stats: RequestStats, ended: str) -> None:
    """The closing line, and how those fared who drafted together."""
    notes.print(closing_line(num_tokens, seconds, stats, ended), style="dim")
    for line in drafters_lines(stats):
        notes.print(line, style="dim", markup=False)


def drafters_lines(stats: RequestStats) -> list[str]:
    """Returns how those fared who draft together: a line for several methods, and one for each stage."""
    lines, drafted = list[str](), stats.drafted_by_method
    if len(drafted) > 1:
        parts = (f"{name} {stats.accepted_by_method[name]} of {number}" for name, number in drafted.items())
        lines.append(f"draft tokens accepted by method: {', '.join(parts)}")
    for name, passes in stats.passes_by_stage.items():
        guessed, kept = stats.drafted_by_stage[name], stats.accepted_by_stage[name]
        lines.append(f"{name}: {passes} passes of the draft model, which kept {kept} of {guessed} guessed tokens")
    return lines


def completion_json(output: CompletionOutput) -> dict[str, Any]:
    """One completion as plain data; logprobs where they were asked for, the token's own first, the likeliest next."""
    scores = {} if output.logprobs is None else {"logprobs": [_position_json(entry) for entry in output.logprobs]}
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "origins": [str(origin) for origin in output.origins],
        "members": list(output.members),
        "stats": stats_json(output.stats),
        **scores,
    }


def _position_json(entry: PositionLogprobs) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "token": found.decoded_token, "logprob": found.logprob, "rank": found.rank}
        for token, found in entry.items()
    ]


def stats_json(stats: RequestStats) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **asdict(stats),
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
    }


# --- Says in words why a text ended, and which structured outputs were cut off before they were complete.


def ending(completion: CompletionOutput, params: SamplingParams) -> str:
    """Like "stopped at its end", "stopped at 'xyz'", "cut off at 128 tokens (--max-tokens)"."""
    if completion.finish_reason == "length":
        reached = len(completion.token_ids)
        limit = "--max-tokens" if reached >= params.max_tokens else "the model's context is full"
        return f"cut off at {reached} tokens ({limit})"
    if completion.finish_reason == "stop":
        return "stopped at its end" if completion.stop_reason is None else f"stopped at {completion.stop_reason!r}"
    return completion.finish_reason


def endings(completions: Iterable[CompletionOutput], params: SamplingParams) -> str:
    """Returns the ending of one text; of several how many ended in which way."""
    counts = Counter(ending(completion, params) for completion in completions)
    if counts.total() == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {'text' if count == 1 else 'texts'} {said}" for said, count in counts.items())


def is_incomplete(llm: LLM, completion: CompletionOutput, params: SamplingParams) -> bool:
    """Tells whether a text that has to follow a structure was cut off where the structure may not end."""
    structure = params.structured_outputs
    if structure is None or completion.finish_reason != "length":
        return False
    from outrider.structured.grammar import GrammarCompiler

    loaded = llm.engine.runner.loaded
    state = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids).start(structure)
    for token in completion.token_ids:
        state.advance(token)
    allowed = state.allowed((), loaded.vocab_size)
    assert allowed is not None  # only a path can be refused, and none was given
    return not any(bool(allowed[token]) for token in loaded.eos_token_ids)


def warning(completion: CompletionOutput, params: SamplingParams) -> str:
    """Returns what to say of a text that is incomplete, with the remedy."""
    full = len(completion.token_ids) < params.max_tokens
    remedy = "Give a shorter prompt: the model's context is full." if full else "Raise --max-tokens."
    return f"the output is incomplete: it was cut off before its structure was complete. {remedy}"
