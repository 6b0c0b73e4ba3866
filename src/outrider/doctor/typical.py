"""Typical acceptance rates of methods, and what to check where a proposer stays far below them."""

from __future__ import annotations

from dataclasses import dataclass

#: Below this share of first draft tokens that stand, something that was trained to guess is taken to be wrong.
BROKEN_BELOW = 0.15
#: The fewest drafts from which acceptance is judged.
LEAST_DRAFTS = 20


@dataclass(frozen=True)
class Typical:
    """The mean acceptance lengths that were measured or published.

    Attributes:
        low, high: The smallest and the largest.
        source: Where they come from.
    """

    low: float
    high: float
    source: str


_PERFORMANCE = "docs/explanation/performance.md, drawn text"
#: By method. The others have no figures that could be compared: what they accept depends on the text alone.
TYPICAL = {
    "draft_model": Typical(2.5, 3.9, "docs/how-to/train_a_draft.md, drawn text, 5 to 7 draft tokens"),
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
_FEATURE_HEADS = frozenset({"eagle1", "eagle3", "mtp", "dflash", "peagle"})

_CHECK_HEADS = (
    "Check, in this order: the offset (head i guesses the token i + 1 places behind the one that the target is about to "
    "write), the layer id (which hidden states the head reads), the normalisation (whether the target's final norm comes "
    "before it), the positions that it was trained with, and whether it was trained at all."
)
_CHECK_FEATURES = (
    "Layers or norms are probably read wrongly. Check in the head's config.json which layers it was trained with, whether "
    "they count from 0, which flags of norms its training set, and whether it was trained for this very target. Such a "
    "head has no witness of the target's hidden states, so that shapes, names and embeddings alone were compared."
)
_CHECK_MODEL = (
    "Check that the draft model writes sensible text by itself (outrider generate DRAFT), that it was trained on the same "
    "chat template and kind of text, and that its positions begin at the same token."
)
_CHECK_LAYERS = "Train an exit head for these layers (outrider train exit), or let more layers draft."
_CHECK_TEXT = "Give texts like yours with --prompts: lookups gain where an answer repeats its prompt or itself."


def checks(method: str) -> str:
    """What to check where drafts of a method hardly ever stand.

    Args:
        method: Its name.
    """
    if method in LOOKUPS:
        return _CHECK_TEXT
    if method in OWN_LAYERS:
        return _CHECK_LAYERS
    if method in _FEATURE_HEADS:
        return _CHECK_FEATURES
    return _CHECK_HEADS if method in _HEADS else _CHECK_MODEL


def was_trained(method: str) -> bool:
    """Whether a method drafts with something that was trained to guess, so that it can be broken."""
    return method not in LOOKUPS and method not in OWN_LAYERS
