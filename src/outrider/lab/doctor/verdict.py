"""Interprets an examination: the predicted speedup, what limits it, what is typical, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from outrider.propose.row_heads import FolderMethod
from outrider.propose.settings import find

#: A measured speedup below this gains nothing that could be told from chance.
GAINS_FROM = 1.02
#: Where a pass of the draft takes more than this share of a target pass, no acceptance that was ever measured pays well.
_SLOW_DRAFT = 0.3
#: A draft whose weights are at most this share of the target's should be fast. Where it is not, passes cost a fixed time.
_SMALL_DRAFT = 0.3
#: Where a step with drafts takes longer than a plain one by less than this share, acceptance is what limits.
_LITTLE = 0.25
#: The share of first tokens that agree at another distance, above which drafts are taken to be for another place.
_ELSEWHERE = 0.3
_TRAIN = "Train the draft on what this target writes (outrider train)."


@dataclass(frozen=True)
class Terms:
    """Holds what a step with drafts takes, in plain steps of the same texts, and what it brings."""

    tokens: float  # tokens that a text gains in a step
    verify: float  # time of the target's pass over the rows of the drafts
    propose: float  # time of the proposer
    host: float  # time of everything else
    plain_verify: float  # time of the target's pass in a plain step

    @property
    def passes(self) -> float:
        """Time of the whole step."""
        return self.verify + self.propose + self.host

    @property
    def speedup(self) -> float:
        """Over plain decoding, as these times predict it."""
        return self.tokens / self.passes

    @property
    def excess(self) -> dict[str, float]:
        """Returns what each part takes beyond a plain step."""
        rows, host = self.verify - self.plain_verify, self.host - (1.0 - self.plain_verify)
        return {"draft": self.propose, "verification": rows, "host": host}


@dataclass(frozen=True)
class Situation:
    """Holds what else a verdict depends on."""

    method: str  # the name of the method
    batch: int  # texts at a time
    rows: float  # rows of a text in a verified pass
    kernels: bool  # whether our kernels compute
    weight_share: float | None  # bytes of the draft model over those of the target; None where no model of its own drafts
    pass_ratio: float | None  # time of a draft pass over that of a target pass; None as before


@dataclass(frozen=True)
class Acceptance:
    """Holds what became of drafts."""

    num_drafts: int  # drafts that were verified
    tau: float  # the mean acceptance length
    # The share of draft tokens that stood at each position, of those whose earlier tokens stood.
    by_position: tuple[float, ...]
    # By distance from its place in greedy text, how often the first token of a draft was found there.
    shifts: Mapping[int, float]


def judge_acceptance(method: str, found: Acceptance) -> Finding:
    """Returns what is to be said of the acceptance of a method."""
    if not found.num_drafts:
        text = f"{method} drafted nothing: this text gave it nothing to go by."
        return Finding("acceptance", Level.USELESS, text, checks(method))
    if found.num_drafts < LEAST_DRAFTS:
        text = f"{method} drafted {found.num_drafts} times, too few to judge (mean acceptance length {found.tau:.2f})."
        return Finding("acceptance", Level.NOTE, text, "Write more, or longer, texts (--num-prompts, --max-tokens).")
    first = found.by_position[0]
    shift = max(found.shifts, key=lambda each: found.shifts[each], default=0)
    said = f"The mean acceptance length of {method} is {found.tau:.2f}, and {first:.0%} of first draft tokens stand"
    if shift and found.shifts[shift] >= max(_ELSEWHERE, 2.0 * found.shifts.get(0, 0.0)):
        where = f"{abs(shift)} {'place' if abs(shift) == 1 else 'places'} {'later' if shift > 0 else 'earlier'}"
        text = f"{said}. But {found.shifts[shift]:.0%} of them are the token that stands {where}: the offset is wrong."
        return Finding("acceptance", Level.WRONG, text, _offset_remedy(shift))
    if first < BROKEN_BELOW and was_trained(method):
        text = f"{said}: it hardly guesses anything, so that it looks wrong and not merely weak.{_usual(method)}"
        return Finding("acceptance", Level.WRONG, text, checks(method))
    return _against_typical(method, said, found.tau)


def _offset_remedy(shift: int) -> str:
    if shift > 0:
        return f"The proposer's first guess is for {shift} further on than the next token. Correct the offset by {shift}."
    said = f"The proposer repeats what is committed already. Correct the offset by {-shift}"
    return f"{said}; or, if it is a head that has hardly learnt yet, train it for longer."


def _against_typical(method: str, said: str, tau: float) -> Finding:
    typical = TYPICAL.get(method)
    if typical is None:
        return Finding("acceptance", Level.OK, f"{said}. No figures of other pairs are known for this method.")
    text = f"{said}.{_usual(method)}"
    if tau - 1.0 >= 0.5 * (typical.low - 1.0):
        if tau < typical.low:
            text += " Less is still right while drafts add at least half as many tokens as that: texts and models differ."
        return Finding("acceptance", Level.OK, text)
    return Finding("acceptance", Level.NOTE, text, _TRAIN if was_trained(method) else checks(method))


def _usual(method: str) -> str:
    """A sentence about what is typical; empty where nothing is known."""
    typical = TYPICAL.get(method)
    if typical is None:
        return ""
    usual = f"{typical.low:.1f}" if typical.low == typical.high else f"{typical.low:.1f} to {typical.high:.1f}"
    return f" Typical is {usual} ({typical.source})."


def judge_speed(rounds: Sequence[float], terms: Terms, situation: Situation, *, acceptance: Level) -> Finding:
    """Tells whether speculation gains, by its speedup in each round, what limits it most, and the remedy. There are no
    rounds where other work disturbed it, so that its speed is not known."""
    if not rounds:
        text = f"{situation.method} seemed faster than it can be: other work disturbed it, and its speed is not known."
        return Finding("speed", Level.NOTE, text, "Measure again when the machine is at rest.")
    name, text, remedy = limit(terms, situation)
    measured = median(rounds)
    said = (
        f"{situation.method} writes {measured:.2f} times as fast as plain decoding; {terms.speedup:.2f} was predicted from "
        "the acceptance and the times of passes."
    )
    if acceptance is Level.WRONG:
        return Finding("speed", Level.USELESS, f"{said} Too little of the drafts stands.", "Correct the acceptance first.")
    if measured < GAINS_FROM <= min(max(rounds), terms.speedup):
        apart = f"Rounds lie between {min(rounds):.2f} and {max(rounds):.2f}, so that so few cannot tell whether it gains."
        return Finding(
            "speed", Level.NOTE, f"{said} {apart}", "Measure again when the machine is at rest, with more prompts."
        )
    level = Level.OK if measured >= GAINS_FROM else Level.USELESS
    return Finding("speed", level, f"{said} What limits it is the {name}: {text}", remedy)


def limit(terms: Terms, situation: Situation) -> tuple[str, str, str]:
    """The term that costs most: its name, a sentence about it, and the remedy."""
    excess = terms.excess
    if sum(excess.values()) < _LITTLE:
        return _of_acceptance(terms, situation)
    worst = max(excess, key=lambda name: excess[name])
    if worst == "draft":
        return _of_draft(terms, situation)
    if worst == "verification":
        return _of_rows(terms, situation)
    text = f"the host takes {terms.host:.2f} times a plain step beside the passes: the target is too small."
    return "host", text, "Use a larger target: its passes hide the time of the host."


def _of_acceptance(terms: Terms, situation: Situation) -> tuple[str, str, str]:
    text = f"a step takes {terms.passes:.2f} times a plain one and writes {terms.tokens:.2f} tokens: more must stand."
    trained = was_trained(situation.method)
    return "acceptance", text, _TRAIN if trained else checks(situation.method)


def _of_draft(terms: Terms, situation: Situation) -> tuple[str, str, str]:
    said = f"drafting takes {terms.propose:.2f} times a plain step"
    ratio, share = situation.pass_ratio, situation.weight_share
    if ratio is None or share is None:
        return "draft", f"{said}: the draft is too slow.", "Use a method that computes less, or fewer draft tokens (-k)."
    said += f", since one of its passes takes {ratio:.2f} of a pass of the target"
    if ratio <= _SLOW_DRAFT:
        return "draft", f"{said}, and there are many of them.", "Use fewer draft tokens (-k)."
    if share <= _SMALL_DRAFT:
        text = f"{said} though it has {share:.2f} of its weights: the target is too small for speculation to gain."
        return "target", text, "Use a larger target, or a lookup (--method suffix), which computes no passes."
    text = f"{said}, with {share:.2f} of its weights: the draft is too slow."
    return "draft", text, "Use a smaller draft model: outrider plan shows what a cost ratio is worth."


def _of_rows(terms: Terms, situation: Situation) -> tuple[str, str, str]:
    said = f"a pass of {situation.rows:.1f} rows a text takes {terms.verify:.2f} times a plain step"
    if situation.batch > 1:
        text = f"{said} with {situation.batch} texts at a time: the batch is too large for drafts of this length."
        return "batch", text, "Use fewer draft tokens (-k), or --method auto, which drafts less where more texts run."
    if not situation.kernels:
        text = f"{said}, because stock operators compute it."
        return "verification", text, "Use a dtype and a model that the kernels compute, or fewer draft tokens (-k)."
    return "verification", f"{said}.", "Use fewer draft tokens (-k), or a chain in place of a tree."


# --- Typical acceptance rates of methods, and what to check where a proposer stays far below them.


#: Below this share of first draft tokens that stand, something that was trained to guess is taken to be wrong.
BROKEN_BELOW = 0.15
#: The fewest drafts from which acceptance is judged.
LEAST_DRAFTS = 20


@dataclass(frozen=True)
class Typical:
    """The mean acceptance lengths that were measured or published."""

    low: float  # the smallest and the largest
    high: float  # the smallest and the largest
    source: str  # where they come from


_PERFORMANCE = "docs/explanation/what_methods_gain.md, drawn text"
#: By method. The others have no figures that could be compared: what they accept depends on the text alone.
TYPICAL = {
    "draft_model": Typical(2.5, 3.9, "docs/how-to/recipes.md, drawn text, 5 to 7 draft tokens"),
    "layer_skip": Typical(2.3, 2.3, f"{_PERFORMANCE}, 2 draft tokens of five layers in eight"),
    "early_exit": Typical(1.3, 1.3, f"{_PERFORMANCE}, 2 draft tokens of a target that was not trained for it"),
    "medusa": Typical(2.3, 2.3, "Spec-Bench (Xia et al. 2024), Vicuna 7B"),
    "token_recycling": Typical(1.7, 2.7, f"{_PERFORMANCE}, 10 rows; Spec-Bench (Xia et al. 2024)"),
    "lookahead": Typical(1.4, 1.4, f"{_PERFORMANCE}, 9 rows"),
}
#: Methods that look up what the text said before. Where it repeats nothing they draft little, and nothing is wrong.
LOOKUPS = frozenset({"ngram", "suffix", "prediction", "lookahead", "token_recycling"})
#: Methods that run layers of the target as they are. Their guesses may be poor, but no training of theirs can be wrong.
OWN_LAYERS = frozenset({"early_exit", "layer_skip"})
_HEADS = frozenset({"medusa", "blockwise", "exit"})

_CHECK_HEADS = (
    "Check, in this order: the offset (head i guesses the token i + 1 places behind the one that the target is about to "
    "write), the layer id (which hidden states the head reads), the normalisation (whether the target's final norm comes "
    "before it), the positions that it was trained with, and whether it was trained at all."
)
_CHECK_FEATURES = (
    "Layers or norms are probably read wrongly. Check in the head's config.json which layers it was trained with, whether "
    "they count from 0, which flags of norms its training set, and whether it was trained for this very target. Such a "
    "head has no witness of the target's hidden states, so that shapes, names and embeddings alone were compared. A head "
    "that has hardly learnt yet guesses as badly; train it for longer."
)
_CHECK_MODEL = (
    "Check that the draft model writes sensible text by itself (outrider generate DRAFT), that it was trained on the same "
    "chat template and kind of text, and that its positions begin at the same token."
)
_CHECK_LAYERS = "Train an exit head for these layers (outrider train exit), or let more layers draft."
_CHECK_TEXT = "Give texts like yours with --prompts: lookups gain where an answer repeats its prompt or itself."


def checks(method: str) -> str:
    """Returns what to check where drafts of a method hardly ever stand."""
    if method in LOOKUPS:
        return _CHECK_TEXT
    if method in OWN_LAYERS:
        return _CHECK_LAYERS
    if method in _HEADS:
        return _CHECK_HEADS
    return _CHECK_FEATURES if issubclass(find(method), FolderMethod) else _CHECK_MODEL


def was_trained(method: str) -> bool:
    """Tells whether a method drafts with something that was trained to guess, so that it can be broken."""
    return method not in LOOKUPS and method not in OWN_LAYERS


# --- What an examination found: facts with a level, in plain words, and the remedy.


class Level(StrEnum):
    """Says how grave a finding is."""

    OK = "ok"
    NOTE = "note"  # worth knowing; speculation works nonetheless
    USELESS = "useless"  # speculation gains nothing
    WRONG = "wrong"  # something is broken or does not fit


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    topic: str  # what it is about, like "vocabulary"
    level: Level  # how grave it is
    text: str  # what was found, as a sentence
    remedy: str = ""  # what to do about it, as a sentence; empty where nothing is to be done
