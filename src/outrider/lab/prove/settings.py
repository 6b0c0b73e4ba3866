"""The requests that are proven: methods that need no layer of the target, under every rule and shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# --- A request that is proven: its method, its parameters and who drafts in which round.


@dataclass(frozen=True)
class Setting:
    """One way to ask the engine for text."""

    name: str  # a short name for reports
    # The settings in the form of one mapping. The path of the draft model is filled in later.
    speculation: dict[str, Any] = field(default_factory=lambda: {"method": "none"})
    params: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    # The methods that draft in each round; within a round each one drafts behind the one before. Round r takes the entry at
    # r modulo the number of entries. Empty where the request's own method drafts in every round.
    turns: tuple[tuple[dict[str, Any], ...], ...] = ()
    # Whether the entry of `turns` is taken at the number of tokens drafted so far instead of the round, as a planner does
    # that goes by what came of earlier drafts.
    by_drafts: bool = False
    # Every text that the requested structure admits. It needs a pair of models with a tokenizer.
    language: tuple[str, ...] = ()
    prediction: tuple[int, ...] = ()  # the tokens that the caller predicts
    namespace: str | None = None  # whose prompts and texts these are
    # A token behind which no further draw of a draft succeeds, so that the proposer raises; None plants no such fault.
    fails_behind: int | None = None


# --- Methods of the proofs, in the form of one mapping each, and what stands for the models of a proof.


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
DSPARK = {"method": "dspark", "model": HEADS, "num_draft_tokens": 2}
PEAGLE = {"method": "peagle", "model": HEADS, "num_draft_tokens": 2}
PEAGLE_ONE = PEAGLE | {"num_draft_tokens": 1}
CROSSED = {"method": "cross_vocabulary", "model": OTHER_DRAFT, "num_draft_tokens": 2}


# --- Proven requests of every method that needs no layer of the target, under every rule and shape, with injected faults.


#: The same draft model behind a lookup that rarely finds something, and by itself; both stop behind a doubted token.
_DOUBTING = drafted("auto", min_confidence=0.33)
_AT_FIRST = {"method": "then", "methods": (RARE, _DOUBTING | {"num_draft_tokens": 1})}
#: Whether a fault happens depends on the committed length alone, and never on what was drawn.
FAULTS = ("raises", "nan row", "truncated", "token outside", "too long")

#: Texts in which a stage has several rounds in one draft, of fewer paths.
_LONGER = {"max_tokens": 4, "top_k": 2}

#: Drafts that a draft model makes with a drafter of its own: names, settings and parameters.
_STAGES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("a lookup", staged(LOOKUP), _LONGER),
    ("a lookup, token rule", staged(LOOKUP, rule="token"), {}),
    ("a lookup with branches", staged(BRANCHING), _LONGER),
    ("a drawn drafter", staged(OTHER), _LONGER),
    ("a drawn drafter under the token rule", staged(OTHER | {"rule": "token"}), {}),
    ("a drawn drafter that is walked", staged(OTHER | {"rule": "walk"}), {}),
    ("a drafter's most likely tokens", staged(OTHER | {"draft_sampling": "greedy"}), {}),
    ("a drawn tree", staged(OTHER | {"tree": (2, 1), "num_draft_tokens": 4}), {}),
    ("a drawn tree, token rule", staged(OTHER | {"tree": (2,), "rule": "token", "num_draft_tokens": 2}), {}),
    ("two stages", TWO_STAGES, {}),
    ("two stages, walked", TWO_STAGES | {"rule": "walk"}, {}),
    ("two stages, seeded", TWO_STAGES, {"seed": 9}),
    ("seeded", staged(LOOKUP), {"seed": 5}),
    ("seeded, a drawn drafter", staged(OTHER), {"seed": 6}),
    ("most likely tokens", staged(OTHER, draft_sampling="greedy"), {}),
    ("two samples", staged(OTHER, num_draft_tokens=2), {"n": 2, "max_tokens": 2}),
    ("temperature and top_p", staged(OTHER), {"temperature": 1.5, "top_p": 0.9}),
    ("behind a token of low confidence", staged(OTHER, min_confidence=0.33), {}),
    ("a drafter that keeps what the target held likely", staged(RECYCLED), {}),
    ("in a merge", {"method": "merge", "methods": (staged(OTHER, num_draft_tokens=2), LOOKUP)}, {}),
    ("behind a lookup", {"method": "then", "methods": (RARE, staged(OTHER, num_draft_tokens=2))}, {}),
    *(
        (f"the drafter's fault: {fault}", staged(OTHER | {"method": "_prove_faulty", "fault": fault}), {})
        for fault in ("raises", "nan row", "truncated", "token outside")
    ),
)

QUICK_SETTINGS = (
    Setting("token", drafted("token")),
    Setting("block", drafted("block")),
    Setting("coupled", drafted("coupled")),
)

SETTINGS = (
    Setting("plain"),
    *QUICK_SETTINGS,
    Setting("walk", drafted("walk")),
    Setting("auto, seeded", drafted("auto"), {"seed": 5}),
    Setting("greedy drafts", drafted("auto", draft_sampling="greedy")),
    Setting("ngram", {"method": "ngram", "num_draft_tokens": 2, "min_match": 1}),
    Setting("ngram, seeded", {"method": "ngram", "num_draft_tokens": 2, "min_match": 1}, {"seed": 6}),
    Setting("suffix", {"method": "suffix", "num_draft_tokens": 2, "min_match": 1}),
    Setting("suffix, seeded", {"method": "suffix", "num_draft_tokens": 2, "min_match": 1}, {"seed": 4}),
    Setting("suffix, branches", BRANCHING),
    Setting("suffix, shared texts", SHARED),
    Setting("suffix, shared texts, two samples", SHARED, {"n": 2, "max_tokens": 2}),
    Setting("token recycling", RECYCLED),
    Setting("token recycling, fixed shape, one context", {**RECYCLED, "context": 1, "tree": (2, 1)}),
    Setting("token recycling, two samples", RECYCLED, {"n": 2, "max_tokens": 2}),
    Setting("token recycling behind a drawn draft", turns=((ONE, RECYCLED),)),
    Setting("lookahead", LOOKAHEAD, {"max_tokens": 6}),
    Setting("lookahead, seeded", LOOKAHEAD, {"max_tokens": 5, "seed": 7}),
    Setting("lookahead, two samples", LOOKAHEAD, {"n": 2, "max_tokens": 2}),
    Setting("lookahead behind a drawn draft", turns=((ONE, LOOKAHEAD),)),
    Setting("tree, traversal", drafted("block", tree=(2, 1))),
    Setting("tree, recursive rejection", drafted("token", tree=(2, 1))),
    Setting("tree, coupled", drafted("coupled", tree=(2, 1))),
    Setting("tree, walk", drafted("walk", tree=(2,))),
    Setting("tree, most likely tokens", drafted("auto", tree=(2, 1), draft_sampling="greedy")),
    Setting("best-first tree, traversal", drafted("block", tree="best_first", num_draft_tokens=4)),
    Setting("best-first tree, recursive rejection", drafted("token", tree="best_first", num_draft_tokens=3)),
    Setting("best-first tree, top_k", drafted("auto", tree="best_first", num_draft_tokens=4), {"top_k": 2}),
    Setting("best-first tree, seeded", drafted("auto", tree="best_first", num_draft_tokens=3), {"seed": 5}),
    Setting("best-first tree, most likely tokens", drafted("auto", tree="best_first", draft_sampling="greedy")),
    Setting("Sequoia's tree", drafted("block", tree="sequoia", num_draft_tokens=3)),
    Setting("stop behind a token of low confidence", drafted("block", min_confidence=0.33, num_draft_tokens=3)),
    Setting("the same in a tree", drafted("block", min_confidence=0.33, tree=(2, 1))),
    Setting("the same in a best-first tree", drafted("auto", min_confidence=0.33, tree="best_first", num_draft_tokens=3)),
    Setting("tree, wider than the tokens left", drafted("block", tree=(3, 1)), {"top_k": 2}),
    Setting("merged tree", drafted("auto", tree=(1, 1), num_draft_tokens=4) | {"method": "_prove_merged"}),
    Setting("merged tree, three laws", drafted("token", tree=(2,), num_draft_tokens=4) | {"method": "_prove_merged"}),
    *(
        Setting(f"merge, {name}", {"method": "merge", "methods": members, **more}, params)
        for name, members, more, params in (
            ("two drawn members of equal laws", (ONE, TWIN), {"rule": "block"}, {}),
            ("the same under the token rule", (ONE, TWIN), {"rule": "token"}, {}),
            ("the same, longer", (drafted("auto"), TWIN), {}, {}),
            ("drawn trees that collide", (drafted("auto", tree=(2,)), TWIN), {"rule": "block"}, {}),
            ("the same, recursive rejection", (drafted("auto", tree=(2,)), TWIN), {"rule": "token"}, {}),
            ("a lookup beside a drawn draft", (ONE, LOOKUP), {}, {}),
            ("a lookup that leaves rows to a drawn draft", (drafted("auto"), RARE), {"num_draft_tokens": 2}, {}),
            ("seeded", (ONE, LOOKUP, TWIN), {}, {"seed": 5}),
            ("two samples", (ONE, TWIN), {}, {"n": 2, "max_tokens": 2}),
            ("penalties", (ONE, TWIN), {}, {"frequency_penalty": -0.6, "repetition_penalty": 1.7}),
            ("one goes on inside", ({"method": "then", "methods": (RARE, ONE)}, TWIN), {}, {}),
        )
    ),
    Setting("then, a lookup and a drawn draft", {"method": "then", "methods": (RARE, ONE)}),
    Setting("then, a drawn draft and a lookup", {"method": "then", "methods": (drafted("auto"), RARE)}),
    Setting("then, behind a merge", {"method": "then", "methods": ({"method": "merge", "methods": (ONE, TWIN)}, RARE)}),
    *(Setting(f"staged, {name}", asked, params) for name, asked, params in _STAGES),
    Setting("a text that the caller predicts", PREDICTED, prediction=(1, 0, 1, 2)),
    Setting("the same, seeded", PREDICTED, {"seed": 3}, prediction=(0, 1, 0, 1)),
    Setting("the engine chooses", GOVERNED, {"max_tokens": 5}),
    Setting("the engine chooses, a lookup first", LOOKUP_FIRST, {"max_tokens": 5}),
    Setting("the engine chooses, token rule", {"method": "auto", "methods": (drafted("token"),)}),
    Setting("the engine chooses, trees", {"method": "auto", "methods": (drafted("block", tree=(2, 1)), LOOKUP)}),
    Setting("the engine chooses, a lookup of other texts", {"method": "auto", "methods": (SHARED, drafted("block"))}),
    Setting("the engine chooses, seeded", GOVERNED, {"seed": 5}),
    Setting("the engine chooses, two samples", GOVERNED, {"n": 2, "max_tokens": 3}),
    *(
        Setting(f"the engine chooses, {name}", {"method": "auto", "methods": choices}, params)
        for name, choices, params in (
            ("a merge of two drawn members", (TWO,), {"max_tokens": 4}),
            ("a merge under the token rule", ({**TWO, "rule": "token"},), {"max_tokens": 4}),
            ("a merge or its lookup", (WITH_LOOKUP, LOOKUP | {"num_draft_tokens": 1}), {"max_tokens": 4}),
            ("a merge or its model, seeded", ({"method": "merge", "methods": (ONE, LOOKUP, TWIN)}, ONE), {"seed": 5}),
            ("a coupled merge beside the token rule", (WITH_LOOKUP | {"rule": "coupled"}, drafted("token")), {}),
            ("then or a draft", ({"method": "then", "methods": (RARE, ONE)}, drafted("block")), {}),
            ("a nesting or a stage", ({"method": "merge", "methods": (ONE, GOES_ON)}, STAGED_ONE), {}),
        )
    ),
    Setting("two methods in turns", turns=((drafted("block"),), (LOOKUP,), (drafted("token", tree=(2,)),))),
    Setting("a lookup, then the draft model behind it", turns=((LOOKUP | {"num_draft_tokens": 1}, drafted("block")),)),
    Setting(
        "the draft model, then a lookup behind it",
        turns=((drafted("block", num_draft_tokens=1), LOOKUP | {"num_draft_tokens": 1}),),
    ),
    Setting(
        "two drawn tokens, then a lookup that sometimes finds nothing behind them",
        turns=((drafted("block"), LOOKUP | {"num_draft_tokens": 1, "min_match": 2}),),
    ),
    Setting(
        "two drawn drafts, one behind the other", turns=((ONE, drafted("block", dtype="float64", num_draft_tokens=1)),)
    ),
    Setting("the same under the token rule", turns=((ONE | {"rule": "token"}, drafted("block", dtype="float64")),)),
    Setting("a drawn tree behind a drawn chain", turns=((ONE, drafted("block", dtype="float64", tree=(2,))),)),
    Setting("coupled drafts, one behind the other", turns=((ONE, drafted("auto", dtype="float64")),), params={"seed": 2}),
    *(
        Setting(
            f"coupled drafts, or {rule}{' on a tree' if tree else ''} by what was drafted",
            turns=((drafted("coupled", **DOUBTED),), (drafted(rule, **({"tree": tree} if tree else {})),)),
            by_drafts=True,
            params={"max_tokens": 4},
        )
        for rule, tree in (("block", ""), ("token", ""), ("token", (2,)))
    ),
    Setting("block, temperature", drafted("block"), {"temperature": 0.6}),
    Setting("block, top_k", drafted("block"), {"top_k": 2}),
    Setting("token, top_p", drafted("token"), {"top_p": 0.8, "temperature": 1.5}),
    Setting("block, min_p", drafted("block"), {"min_p": 0.3}),
    Setting("coupled, all filters", drafted("coupled"), {"top_k": 2, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3}),
    Setting("block, stop tokens", drafted("block"), {"stop_token_ids": (2,)}),
    Setting("token, min_tokens", drafted("token"), {"stop_token_ids": (1,), "min_tokens": 2}),
    Setting("block, two samples", drafted("block", num_draft_tokens=1), {"n": 2, "max_tokens": 2}),
    Setting("auto, seeded, two samples", drafted("auto", num_draft_tokens=1), {"n": 2, "max_tokens": 2, "seed": 3}),
    *(Setting(f"block, fault: {f}", drafted("block", fault=f) | {"method": "_prove_faulty"}) for f in FAULTS),
    *(Setting(f"token, fault: {f}", drafted("token", fault=f) | {"method": "_prove_faulty"}) for f in FAULTS[1:3]),
    Setting("coupled, fault: raises", drafted("coupled", fault="raises") | {"method": "_prove_faulty"}),
    Setting("tree, fault: nan row", drafted("block", tree=(2,), fault="nan row") | {"method": "_prove_faulty"}),
    *(
        Setting(f"a fault behind a drawn token, {name}", asked, _LONGER if "stage" in name else {}, fails_behind=token)
        for name, asked, token in (
            ("block", drafted("block"), 2),
            ("token", drafted("token"), 0),
            ("walk", drafted("walk"), 1),
            ("tree", drafted("block", tree=(2, 1)), 2),
            ("recursive", drafted("token", tree=(2, 1)), 1),
            ("best-first tree", drafted("auto", tree="best_first", num_draft_tokens=3), 2),
            ("merge", {"method": "merge", "methods": (drafted("auto"), TWIN)}, 2),
            ("the drafter of a stage", staged(OTHER), 1),
        )
    ),
    *(
        Setting(f"merge, {name}", {"method": "merge", "methods": members})
        for name, members in (
            ("one draft model at two lengths", (_AT_FIRST, _DOUBTING)),
            ("a chain and a tree of one draft model", (drafted("auto"), drafted("auto", tree=(2,)))),
        )
    ),
)
