"""The requests that are proven: methods that need no layer of the target, under every rule and shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    references: tuple[tuple[int, ...], ...] = ()  # the texts that the output may quote
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


def made_of(method: str, *members: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A method that is made of others."""
    return {"method": method, "methods": members, **more}


def behind(first: dict[str, Any], then: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], ...]:
    """The turns in which the second method drafts behind the first one in every round."""
    return ((first, then),)


def one(method: dict[str, Any]) -> dict[str, Any]:
    """The method with drafts of one token."""
    return method | {"num_draft_tokens": 1}


LOOKUP = {"method": "ngram", "num_draft_tokens": 2, "min_match": 1}
ONE = drafted("auto", num_draft_tokens=1)
DOUBTED = {"min_confidence": 0.33, "num_draft_tokens": 3}
#: Draws from the same probabilities as the draft model, independently.
TWIN = drafted("auto", num_draft_tokens=1, dtype="float64")
#: Finds nothing behind most tokens.
RARE = LOOKUP | {"num_draft_tokens": 1, "min_match": 2}
#: Longer drafts are expected to bring more at first: the draft model begins in the first, and the lookup in the second.
GOVERNED = made_of("auto", drafted("auto"), one(LOOKUP))
LOOKUP_FIRST = made_of("auto", drafted("auto"), LOOKUP)
#: Merges and stages of which the engine may choose one.
TWO = made_of("merge", ONE, TWIN)
WITH_LOOKUP = made_of("merge", ONE, LOOKUP)
GOES_ON = made_of("then", RARE, TWIN)
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


def staged(drafter: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The draft model drafts three tokens with this drafter of its own."""
    return {"method": "staged", "model": DRAFT, "drafter": drafter, "num_draft_tokens": 3, **more}


#: A stage whose drafter is a stage.
TWO_STAGES = staged({"method": "staged", "model": TARGET, "drafter": LOOKUP, "num_draft_tokens": 2})


#: Ways in which most methods are asked: what each changes in the settings, and in the parameters.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block": ({"rule": "block"}, {}),
    "token": ({"rule": "token"}, {}),
    "token rule": ({"rule": "token"}, {}),
    "walk": ({"rule": "walk"}, {}),
    "seeded": ({}, {"seed": 5}),
    "most likely tokens": ({"draft_sampling": "greedy"}, {}),
    "two samples": ({"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    "temperature and filters": ({}, {"top_k": 2, "top_p": 0.9, "temperature": 1.3}),
    "penalties": ({}, {"frequency_penalty": -0.6, "repetition_penalty": 1.7}),
    "stop tokens": ({}, {"stop_token_ids": (2,)}),
    "tree": ({"tree": (2, 1)}, {}),
    "tree, traversal": ({"tree": (2, 1), "rule": "block"}, {}),
    "tree, recursive rejection": ({"tree": (2, 1), "rule": "token"}, {}),
    "tree, seeded": ({"tree": (2, 1)}, {"seed": 6}),
    "best-first tree": ({"tree": "best_first", "num_draft_tokens": 4}, {}),
    "Sequoia's tree": ({"tree": "sequoia", "num_draft_tokens": 3}, {}),
}


def in_ways(name: str, method: dict[str, Any], ways: str, **params: Any) -> tuple[Setting, ...]:
    """The method in some of `WAYS`, which a bar keeps apart; the parameters hold for those of all."""
    chosen = {way: WAYS[way] for way in ways.split(" | ")}
    return tuple(Setting(f"{name}, {way}", method | own, params | asked) for way, (own, asked) in chosen.items())


# --- Proven requests of every method that needs no layer of the target, under every rule and shape, with injected faults.


#: The same draft model behind a lookup that rarely finds something, and by itself; both stop behind a doubted token.
_DOUBTING = drafted("auto", min_confidence=0.33)
_AT_FIRST = made_of("then", RARE, _DOUBTING | {"num_draft_tokens": 1})
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
    ("in a merge", made_of("merge", staged(OTHER, num_draft_tokens=2), LOOKUP), {}),
    ("behind a lookup", made_of("then", RARE, staged(OTHER, num_draft_tokens=2)), {}),
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
    Setting("suffix, references", BRANCHING, references=((0, 1, 2, 0), (2, 2, 1))),
    Setting("suffix, references, seeded", BRANCHING, {"seed": 4}, references=((0, 1, 2, 0), (2, 2, 1))),
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
            ("one goes on inside", (made_of("then", RARE, ONE), TWIN), {}, {}),
        )
    ),
    Setting("then, a lookup and a drawn draft", made_of("then", RARE, ONE)),
    Setting("then, a drawn draft and a lookup", made_of("then", drafted("auto"), RARE)),
    Setting("then, behind a merge", made_of("then", made_of("merge", ONE, TWIN), RARE)),
    *(Setting(f"staged, {name}", asked, params) for name, asked, params in _STAGES),
    Setting("a text that the caller predicts", PREDICTED, prediction=(1, 0, 1, 2)),
    Setting("the same, seeded", PREDICTED, {"seed": 3}, prediction=(0, 1, 0, 1)),
    Setting("the engine chooses", GOVERNED, {"max_tokens": 5}),
    Setting("the engine chooses, a lookup first", LOOKUP_FIRST, {"max_tokens": 5}),
    Setting("the engine chooses, token rule", made_of("auto", drafted("token"))),
    Setting("the engine chooses, trees", made_of("auto", drafted("block", tree=(2, 1)), LOOKUP)),
    Setting("the engine chooses, a lookup of other texts", made_of("auto", SHARED, drafted("block"))),
    Setting("the engine chooses, seeded", GOVERNED, {"seed": 5}),
    Setting("the engine chooses, two samples", GOVERNED, {"n": 2, "max_tokens": 3}),
    Setting("the engine chooses, a merge of two drawn members", made_of("auto", TWO), {"max_tokens": 4}),
    Setting(
        "the engine chooses, a merge under the token rule", made_of("auto", TWO | {"rule": "token"}), {"max_tokens": 4}
    ),
    Setting("the engine chooses, a merge or its lookup", made_of("auto", WITH_LOOKUP, one(LOOKUP)), {"max_tokens": 4}),
    Setting(
        "the engine chooses, a merge or its model, seeded",
        made_of("auto", made_of("merge", ONE, LOOKUP, TWIN), ONE),
        {"seed": 5},
    ),
    Setting(
        "the engine chooses, a coupled merge beside the token rule",
        made_of("auto", WITH_LOOKUP | {"rule": "coupled"}, drafted("token")),
    ),
    Setting("the engine chooses, then or a draft", made_of("auto", made_of("then", RARE, ONE), drafted("block"))),
    Setting("the engine chooses, a nesting or a stage", made_of("auto", made_of("merge", ONE, GOES_ON), STAGED_ONE)),
    Setting("two methods in turns", turns=((drafted("block"),), (LOOKUP,), (drafted("token", tree=(2,)),))),
    Setting("a lookup, then the draft model behind it", turns=((one(LOOKUP), drafted("block")),)),
    Setting("the draft model, then a lookup behind it", turns=((one(drafted("block")), one(LOOKUP)),)),
    Setting("two drawn tokens, then a lookup that sometimes finds nothing behind them", turns=((drafted("block"), RARE),)),
    Setting("two drawn drafts, one behind the other", turns=((ONE, one(drafted("block", dtype="float64"))),)),
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
            ("merge", made_of("merge", drafted("auto"), TWIN), 2),
            ("the drafter of a stage", staged(OTHER), 1),
        )
    ),
    Setting("merge, one draft model at two lengths", made_of("merge", _AT_FIRST, _DOUBTING)),
    Setting("merge, a chain and a tree of one draft model", made_of("merge", drafted("auto"), drafted("auto", tree=(2,)))),
)
