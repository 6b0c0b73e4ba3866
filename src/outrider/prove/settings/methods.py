"""Methods of the proofs, in the form of one mapping each, and what stands for the models of a proof."""

from __future__ import annotations

from typing import Any

#: In a setting this stands for the path of the draft model of the proof.
DRAFT = "the draft model of the proof"
#: This stands for the path of its target, as a draft model of another law.
TARGET = "the target of the proof"
#: And this for the folder of its heads for the method of the setting.
HEADS = "the heads of the proof"
#: This stands for a draft model of several layers, of another law than the target and than the other draft model.
LAYERED = "the draft model of several layers"
#: And this for the folder of its heads.
LAYERED_HEADS = "the heads of the draft model of several layers"
#: And this for a draft model of another vocabulary than the target.
OTHER_DRAFT = "the draft model of another vocabulary"


def drafted(rule: str, **more: Any) -> dict[str, Any]:
    """The draft model drafts two tokens, or as many as the shape in `more` has, under this rule."""
    length = {} if isinstance(more.get("tree", ""), tuple) else {"num_draft_tokens": 2}  # a shape has as many as it has
    return {"method": "draft_model", "model": DRAFT, **length, "rule": rule, **more}


LOOKUP = {"method": "ngram", "num_draft_tokens": 2, "min_match": 1}
ONE = drafted("auto", num_draft_tokens=1)
DOUBTED = {"min_confidence": 0.33, "num_draft_tokens": 3}
#: Draws from the same probabilities as the draft model, independently.
TWIN = drafted("auto", num_draft_tokens=1, dtype="float64")
#: Finds nothing behind most tokens.
RARE = LOOKUP | {"num_draft_tokens": 1, "min_match": 2}
#: Longer drafts are expected to bring more at first: the draft model begins in the first, and the lookup in the second.
GOVERNED = {"method": "auto", "methods": (drafted("auto"), LOOKUP | {"num_draft_tokens": 1})}
LOOKUP_FIRST = {"method": "auto", "methods": (drafted("auto"), LOOKUP)}
#: Merges and stages of which the engine may choose one.
TWO = {"method": "merge", "methods": (ONE, TWIN)}
WITH_LOOKUP = {"method": "merge", "methods": (ONE, LOOKUP)}
GOES_ON = {"method": "then", "methods": (RARE, TWIN)}
STAGED_ONE = {"method": "staged", "drafter": LOOKUP, "model": DRAFT, "num_draft_tokens": 2}
BRANCHING = {"method": "suffix", "num_draft_tokens": 3, "min_match": 1, "branches": True}
PREDICTED = {"method": "prediction", "num_draft_tokens": 3, "min_match": 1}
#: This lookup learns from other texts of its namespace.
SHARED = {"method": "suffix", "num_draft_tokens": 2, "min_match": 1, "shared": True}
#: This one keeps what the target held likely in earlier texts of its namespace.
RECYCLED = {"method": "token_recycling", "num_draft_tokens": 4}
#: Window and guesses have room in the first rounds, and are cut in the later ones.
LOOKAHEAD = {"method": "lookahead", "window": 2, "ngram": 3, "guesses": 2, "num_draft_tokens": 7}

#: Draws from other probabilities than the draft model.
OTHER = {"method": "draft_model", "model": TARGET, "num_draft_tokens": 2}
LAYERED_ONE = {"method": "draft_model", "model": LAYERED, "num_draft_tokens": 1}


def staged(drafter: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The draft model drafts three tokens with this drafter of its own."""
    return {"method": "staged", "model": DRAFT, "drafter": drafter, "num_draft_tokens": 3, **more}


#: A stage whose drafter is a stage.
TWO_STAGES = staged({"method": "staged", "model": TARGET, "drafter": LOOKUP, "num_draft_tokens": 2})

EXIT = {"method": "early_exit", "layers": 1, "num_draft_tokens": 2}
DEEPER = EXIT | {"layers": 2}
SKIP = {"method": "layer_skip", "skip": (1,), "num_draft_tokens": 2}
EXIT_ONE, SKIP_ONE = EXIT | {"num_draft_tokens": 1}, SKIP | {"num_draft_tokens": 1}


def exit_tree(rule: str) -> dict[str, Any]:
    """The first layer drafts a tree."""
    return {"method": "early_exit", "layers": 1, "tree": (2, 1), "rule": rule}


def skip_tree(rule: str) -> dict[str, Any]:
    """All layers but the second draft a tree."""
    return {"method": "layer_skip", "skip": (1,), "tree": (2, 1), "rule": rule}


MEDUSA = {"method": "medusa", "model": HEADS, "num_draft_tokens": 2}
BLOCKWISE = {"method": "blockwise", "model": HEADS, "num_draft_tokens": 2}
EXIT_HEAD = {"method": "exit", "model": HEADS, "num_draft_tokens": 2}
MEDUSA_ONE = MEDUSA | {"num_draft_tokens": 1}
EAGLE3 = {"method": "eagle3", "model": HEADS, "num_draft_tokens": 2}
EAGLE3_ONE = EAGLE3 | {"num_draft_tokens": 1}
EAGLE1 = {"method": "eagle1", "model": HEADS, "num_draft_tokens": 2}
MTP = {"method": "mtp", "model": HEADS, "num_draft_tokens": 2}
MTP_ONE = MTP | {"num_draft_tokens": 1}
DFLASH = {"method": "dflash", "model": HEADS, "num_draft_tokens": 2}
DFLASH_ONE = DFLASH | {"num_draft_tokens": 1}
PEAGLE = {"method": "peagle", "model": HEADS, "num_draft_tokens": 2}
PEAGLE_ONE = PEAGLE | {"num_draft_tokens": 1}
CROSSED = {"method": "cross_vocabulary", "model": OTHER_DRAFT, "num_draft_tokens": 2}
