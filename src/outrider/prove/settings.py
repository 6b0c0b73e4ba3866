"""The requests that are proven: every method, rule, shape and parameter, with injected faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.params import StructuredOutputs


@dataclass(frozen=True)
class Setting:
    """One way to ask the engine for text.

    Attributes:
        name: A short name for reports.
        speculation: The settings in the form of one mapping. The path of the draft model is filled in later.
        params: Fields of SamplingParams.
        turns: The methods that draft in each round; within a round each one drafts behind the one before. Round r takes the
            entry at r modulo the number of entries. Empty where the request's own method drafts in every round.
        by_drafts: Whether the entry of `turns` is taken at the number of tokens drafted so far instead of the round, as a
            planner does that goes by what came of earlier drafts.
        language: Every text that the requested structure admits. It needs a pair of models with a tokenizer.
        prediction: The tokens that the caller predicts.
    """

    name: str
    speculation: dict[str, Any] = field(default_factory=lambda: {"method": "none"})
    params: dict[str, Any] = field(default_factory=dict)
    turns: tuple[tuple[dict[str, Any], ...], ...] = ()
    by_drafts: bool = False
    language: tuple[str, ...] = ()
    prediction: tuple[int, ...] = ()


#: In a setting this stands for the path of the draft model of the proof.
DRAFT = "the draft model of the proof"
#: This stands for the path of its target, as a draft model of another law.
TARGET = "the target of the proof"
#: And this for the folder of its heads for the method of the setting.
HEADS = "the heads of the proof"


def _drafted(rule: str, **more: Any) -> dict[str, Any]:
    length = {} if isinstance(more.get("tree", ""), tuple) else {"num_draft_tokens": 2}  # a shape has as many as it has
    return {"method": "draft_model", "model": DRAFT, **length, "rule": rule, **more}


#: Whether a fault happens depends on the committed length alone, and never on what was drawn.
FAULTS = ("raises", "nan row", "truncated", "token outside", "too long")

LOOKUP = {"method": "ngram", "num_draft_tokens": 2, "min_match": 1}
_ONE = _drafted("auto", num_draft_tokens=1)
_DOUBTED = {"min_confidence": 0.33, "num_draft_tokens": 3}
#: Draws from the same probabilities as the draft model, independently.
_TWIN = _drafted("auto", num_draft_tokens=1, dtype="float64")
#: Finds nothing behind most tokens.
_RARE = LOOKUP | {"num_draft_tokens": 1, "min_match": 2}
#: Longer drafts are expected to bring more at first: the draft model begins in the first, and the lookup in the second.
_GOVERNED = {"method": "auto", "methods": (_drafted("auto"), LOOKUP | {"num_draft_tokens": 1})}
_LOOKUP_FIRST = {"method": "auto", "methods": (_drafted("auto"), LOOKUP)}
#: Merges and stages of which the engine may choose one.
_TWO = {"method": "merge", "methods": (_ONE, _TWIN)}
_WITH_LOOKUP = {"method": "merge", "methods": (_ONE, LOOKUP)}
_GOES_ON = {"method": "then", "methods": (_RARE, _TWIN)}
_STAGED_ONE = {"method": "staged", "drafter": LOOKUP, "model": DRAFT, "num_draft_tokens": 2}
_BRANCHING = {"method": "suffix", "num_draft_tokens": 3, "min_match": 1, "branches": True}
_PREDICTED = {"method": "prediction", "num_draft_tokens": 3, "min_match": 1}
#: This lookup learns from other texts of its namespace.
_SHARED = {"method": "suffix", "num_draft_tokens": 2, "min_match": 1, "shared": True}
#: This one keeps what the target held likely in earlier texts of its namespace.
_RECYCLED = {"method": "token_recycling", "num_draft_tokens": 4}
#: Window and guesses have room in the first rounds, and are cut in the later ones.
_LOOKAHEAD = {"method": "lookahead", "window": 2, "ngram": 3, "guesses": 2, "num_draft_tokens": 7}

#: Draws from other probabilities than the draft model.
_OTHER = {"method": "draft_model", "model": TARGET, "num_draft_tokens": 2}


def _staged(drafter: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"method": "staged", "model": DRAFT, "drafter": drafter, "num_draft_tokens": 3, **more}


#: Texts in which a stage has several rounds in one draft, of fewer paths.
_LONGER = {"max_tokens": 4, "top_k": 2}
#: A stage whose drafter is a stage.
_TWO_STAGES = _staged({"method": "staged", "model": TARGET, "drafter": LOOKUP, "num_draft_tokens": 2})

#: Drafts that a draft model makes with a drafter of its own: names, settings and parameters.
_STAGES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("a lookup", _staged(LOOKUP), _LONGER),
    ("a lookup, token rule", _staged(LOOKUP, rule="token"), {}),
    ("a lookup with branches", _staged(_BRANCHING), _LONGER),
    ("a drawn drafter", _staged(_OTHER), _LONGER),
    ("a drawn drafter under the token rule", _staged(_OTHER | {"rule": "token"}), {}),
    ("a drawn drafter that is walked", _staged(_OTHER | {"rule": "walk"}), {}),
    ("a drafter's most likely tokens", _staged(_OTHER | {"draft_sampling": "greedy"}), {}),
    ("a drawn tree", _staged(_OTHER | {"tree": (2, 1), "num_draft_tokens": 4}), {}),
    ("a drawn tree, token rule", _staged(_OTHER | {"tree": (2,), "rule": "token", "num_draft_tokens": 2}), {}),
    ("two stages", _TWO_STAGES, {}),
    ("two stages, walked", _TWO_STAGES | {"rule": "walk"}, {}),
    ("two stages, seeded", _TWO_STAGES, {"seed": 9}),
    ("seeded", _staged(LOOKUP), {"seed": 5}),
    ("seeded, a drawn drafter", _staged(_OTHER), {"seed": 6}),
    ("most likely tokens", _staged(_OTHER, draft_sampling="greedy"), {}),
    ("two samples", _staged(_OTHER, num_draft_tokens=2), {"n": 2, "max_tokens": 2}),
    ("temperature and top_p", _staged(_OTHER), {"temperature": 1.5, "top_p": 0.9}),
    ("behind a token of low confidence", _staged(_OTHER, min_confidence=0.33), {}),
    ("a drafter that keeps what the target held likely", _staged(_RECYCLED), {}),
    ("in a merge", {"method": "merge", "methods": (_staged(_OTHER, num_draft_tokens=2), LOOKUP)}, {}),
    ("behind a lookup", {"method": "then", "methods": (_RARE, _staged(_OTHER, num_draft_tokens=2))}, {}),
    *(
        (f"the drafter's fault: {fault}", _staged(_OTHER | {"method": "_prove_faulty", "fault": fault}), {})
        for fault in ("raises", "nan row", "truncated", "token outside")
    ),
)

QUICK_SETTINGS = (
    Setting("token", _drafted("token")),
    Setting("block", _drafted("block")),
    Setting("coupled", _drafted("coupled")),
)

SETTINGS = (
    Setting("plain"),
    *QUICK_SETTINGS,
    Setting("walk", _drafted("walk")),
    Setting("auto, seeded", _drafted("auto"), {"seed": 5}),
    Setting("greedy drafts", _drafted("auto", draft_sampling="greedy")),
    Setting("ngram", {"method": "ngram", "num_draft_tokens": 2, "min_match": 1}),
    Setting("ngram, seeded", {"method": "ngram", "num_draft_tokens": 2, "min_match": 1}, {"seed": 6}),
    Setting("suffix", {"method": "suffix", "num_draft_tokens": 2, "min_match": 1}),
    Setting("suffix, seeded", {"method": "suffix", "num_draft_tokens": 2, "min_match": 1}, {"seed": 4}),
    Setting("suffix, branches", _BRANCHING),
    Setting("suffix, shared texts", _SHARED),
    Setting("suffix, shared texts, two samples", _SHARED, {"n": 2, "max_tokens": 2}),
    Setting("token recycling", _RECYCLED),
    Setting("token recycling, fixed shape, one context", {**_RECYCLED, "context": 1, "tree": (2, 1)}),
    Setting("token recycling, two samples", _RECYCLED, {"n": 2, "max_tokens": 2}),
    Setting("token recycling behind a drawn draft", turns=((_ONE, _RECYCLED),)),
    Setting("lookahead", _LOOKAHEAD, {"max_tokens": 6}),
    Setting("lookahead, seeded", _LOOKAHEAD, {"max_tokens": 5, "seed": 7}),
    Setting("lookahead, two samples", _LOOKAHEAD, {"n": 2, "max_tokens": 2}),
    Setting("lookahead behind a drawn draft", turns=((_ONE, _LOOKAHEAD),)),
    Setting("tree, traversal", _drafted("block", tree=(2, 1))),
    Setting("tree, recursive rejection", _drafted("token", tree=(2, 1))),
    Setting("tree, coupled", _drafted("coupled", tree=(2, 1))),
    Setting("tree, walk", _drafted("walk", tree=(2,))),
    Setting("tree, most likely tokens", _drafted("auto", tree=(2, 1), draft_sampling="greedy")),
    Setting("best-first tree, traversal", _drafted("block", tree="best_first", num_draft_tokens=4)),
    Setting("best-first tree, recursive rejection", _drafted("token", tree="best_first", num_draft_tokens=3)),
    Setting("best-first tree, top_k", _drafted("auto", tree="best_first", num_draft_tokens=4), {"top_k": 2}),
    Setting("best-first tree, seeded", _drafted("auto", tree="best_first", num_draft_tokens=3), {"seed": 5}),
    Setting("best-first tree, most likely tokens", _drafted("auto", tree="best_first", draft_sampling="greedy")),
    Setting("Sequoia's tree", _drafted("block", tree="sequoia", num_draft_tokens=3)),
    Setting("stop behind a token of low confidence", _drafted("block", min_confidence=0.33, num_draft_tokens=3)),
    Setting("the same in a tree", _drafted("block", min_confidence=0.33, tree=(2, 1))),
    Setting("the same in a best-first tree", _drafted("auto", min_confidence=0.33, tree="best_first", num_draft_tokens=3)),
    Setting("tree, wider than the tokens left", _drafted("block", tree=(3, 1)), {"top_k": 2}),
    Setting("merged tree", _drafted("auto", tree=(1, 1), num_draft_tokens=4) | {"method": "_prove_merged"}),
    Setting("merged tree, three laws", _drafted("token", tree=(2,), num_draft_tokens=4) | {"method": "_prove_merged"}),
    *(
        Setting(f"merge, {name}", {"method": "merge", "methods": members, **more}, params)
        for name, members, more, params in (
            ("two drawn members of equal laws", (_ONE, _TWIN), {"rule": "block"}, {}),
            ("the same under the token rule", (_ONE, _TWIN), {"rule": "token"}, {}),
            ("the same, longer", (_drafted("auto"), _TWIN), {}, {}),
            ("drawn trees that collide", (_drafted("auto", tree=(2,)), _TWIN), {"rule": "block"}, {}),
            ("the same, recursive rejection", (_drafted("auto", tree=(2,)), _TWIN), {"rule": "token"}, {}),
            ("a lookup beside a drawn draft", (_ONE, LOOKUP), {}, {}),
            ("a lookup that leaves rows to a drawn draft", (_drafted("auto"), _RARE), {"num_draft_tokens": 2}, {}),
            ("seeded", (_ONE, LOOKUP, _TWIN), {}, {"seed": 5}),
            ("two samples", (_ONE, _TWIN), {}, {"n": 2, "max_tokens": 2}),
            ("penalties", (_ONE, _TWIN), {}, {"frequency_penalty": -0.6, "repetition_penalty": 1.7}),
            ("one goes on inside", ({"method": "then", "methods": (_RARE, _ONE)}, _TWIN), {}, {}),
        )
    ),
    Setting("then, a lookup and a drawn draft", {"method": "then", "methods": (_RARE, _ONE)}),
    Setting("then, a drawn draft and a lookup", {"method": "then", "methods": (_drafted("auto"), _RARE)}),
    Setting("then, behind a merge", {"method": "then", "methods": ({"method": "merge", "methods": (_ONE, _TWIN)}, _RARE)}),
    *(Setting(f"staged, {name}", asked, params) for name, asked, params in _STAGES),
    Setting("a text that the caller predicts", _PREDICTED, prediction=(1, 0, 1, 2)),
    Setting("the same, seeded", _PREDICTED, {"seed": 3}, prediction=(0, 1, 0, 1)),
    Setting("the engine chooses", _GOVERNED, {"max_tokens": 5}),
    Setting("the engine chooses, a lookup first", _LOOKUP_FIRST, {"max_tokens": 5}),
    Setting("the engine chooses, token rule", {"method": "auto", "methods": (_drafted("token"),)}),
    Setting("the engine chooses, trees", {"method": "auto", "methods": (_drafted("block", tree=(2, 1)), LOOKUP)}),
    Setting("the engine chooses, a lookup of other texts", {"method": "auto", "methods": (_SHARED, _drafted("block"))}),
    Setting("the engine chooses, seeded", _GOVERNED, {"seed": 5}),
    Setting("the engine chooses, two samples", _GOVERNED, {"n": 2, "max_tokens": 3}),
    *(
        Setting(f"the engine chooses, {name}", {"method": "auto", "methods": choices}, params)
        for name, choices, params in (
            ("a merge of two drawn members", (_TWO,), {"max_tokens": 4}),
            ("a merge under the token rule", ({**_TWO, "rule": "token"},), {"max_tokens": 4}),
            ("a merge or its lookup", (_WITH_LOOKUP, LOOKUP | {"num_draft_tokens": 1}), {"max_tokens": 4}),
            ("a merge or its model, seeded", ({"method": "merge", "methods": (_ONE, LOOKUP, _TWIN)}, _ONE), {"seed": 5}),
            ("a coupled merge beside the token rule", (_WITH_LOOKUP | {"rule": "coupled"}, _drafted("token")), {}),
            ("then or a draft", ({"method": "then", "methods": (_RARE, _ONE)}, _drafted("block")), {}),
            ("a nesting or a stage", ({"method": "merge", "methods": (_ONE, _GOES_ON)}, _STAGED_ONE), {}),
        )
    ),
    Setting("two methods in turns", turns=((_drafted("block"),), (LOOKUP,), (_drafted("token", tree=(2,)),))),
    Setting("a lookup, then the draft model behind it", turns=((LOOKUP | {"num_draft_tokens": 1}, _drafted("block")),)),
    Setting(
        "the draft model, then a lookup behind it",
        turns=((_drafted("block", num_draft_tokens=1), LOOKUP | {"num_draft_tokens": 1}),),
    ),
    Setting(
        "two drawn tokens, then a lookup that sometimes finds nothing behind them",
        turns=((_drafted("block"), LOOKUP | {"num_draft_tokens": 1, "min_match": 2}),),
    ),
    Setting(
        "two drawn drafts, one behind the other", turns=((_ONE, _drafted("block", dtype="float64", num_draft_tokens=1)),)
    ),
    Setting("the same under the token rule", turns=((_ONE | {"rule": "token"}, _drafted("block", dtype="float64")),)),
    Setting("a drawn tree behind a drawn chain", turns=((_ONE, _drafted("block", dtype="float64", tree=(2,))),)),
    Setting("coupled drafts, one behind the other", turns=((_ONE, _drafted("auto", dtype="float64")),), params={"seed": 2}),
    *(
        Setting(
            f"coupled drafts, or {rule}{' on a tree' if tree else ''} by what was drafted",
            turns=((_drafted("coupled", **_DOUBTED),), (_drafted(rule, **({"tree": tree} if tree else {})),)),
            by_drafts=True,
            params={"max_tokens": 4},
        )
        for rule, tree in (("block", ""), ("token", ""), ("token", (2,)))
    ),
    Setting("block, temperature", _drafted("block"), {"temperature": 0.6}),
    Setting("block, top_k", _drafted("block"), {"top_k": 2}),
    Setting("token, top_p", _drafted("token"), {"top_p": 0.8, "temperature": 1.5}),
    Setting("block, min_p", _drafted("block"), {"min_p": 0.3}),
    Setting("coupled, all filters", _drafted("coupled"), {"top_k": 2, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3}),
    Setting("block, stop tokens", _drafted("block"), {"stop_token_ids": (2,)}),
    Setting("token, min_tokens", _drafted("token"), {"stop_token_ids": (1,), "min_tokens": 2}),
    Setting("block, two samples", _drafted("block", num_draft_tokens=1), {"n": 2, "max_tokens": 2}),
    Setting("auto, seeded, two samples", _drafted("auto", num_draft_tokens=1), {"n": 2, "max_tokens": 2, "seed": 3}),
    *(Setting(f"block, fault: {f}", _drafted("block", fault=f) | {"method": "_prove_faulty"}) for f in FAULTS),
    *(Setting(f"token, fault: {f}", _drafted("token", fault=f) | {"method": "_prove_faulty"}) for f in FAULTS[1:3]),
    Setting("coupled, fault: raises", _drafted("coupled", fault="raises") | {"method": "_prove_faulty"}),
    Setting("tree, fault: nan row", _drafted("block", tree=(2,), fault="nan row") | {"method": "_prove_faulty"}),
)

#: Layers of the target of `SHARED_TARGET_SETTINGS`.
SHARED_TARGET_LAYERS = 3
_EXIT = {"method": "early_exit", "layers": 1, "num_draft_tokens": 2}
_DEEPER = _EXIT | {"layers": 2}
_SKIP = {"method": "layer_skip", "skip": (1,), "num_draft_tokens": 2}
_EXIT_ONE, _SKIP_ONE = _EXIT | {"num_draft_tokens": 1}, _SKIP | {"num_draft_tokens": 1}


def _exit_tree(rule: str) -> dict[str, Any]:
    return {"method": "early_exit", "layers": 1, "tree": (2, 1), "rule": rule}


def _skip_tree(rule: str) -> dict[str, Any]:
    return {"method": "layer_skip", "skip": (1,), "tree": (2, 1), "rule": rule}


#: Methods that draft with some of the target's own layers; the target of these proofs has several.
SHARED_TARGET_SETTINGS = (
    Setting("early exit, block", _EXIT | {"rule": "block"}),
    Setting("early exit, token", _EXIT | {"rule": "token"}),
    Setting("early exit, seeded", _EXIT, {"seed": 5}),
    Setting("early exit, most likely tokens", _EXIT | {"draft_sampling": "greedy"}),
    Setting("early exit, two samples", _EXIT_ONE, {"n": 2, "max_tokens": 2}),
    Setting("early exit, tree, traversal", _exit_tree("block")),
    Setting("early exit, tree, recursive rejection", _exit_tree("token")),
    Setting("early exit, tree, seeded", _exit_tree("auto"), {"seed": 6}),
    Setting("staged, early exit drafts for the draft model", _staged(_EXIT_ONE)),
    Setting("early exit in turns with the draft model", turns=((_EXIT,), (_drafted("block"),))),
    Setting("early exit behind a lookup", turns=((LOOKUP | {"num_draft_tokens": 1}, _EXIT),)),
    Setting("early exit, then the draft model behind it", turns=((_EXIT_ONE, _drafted("block", num_draft_tokens=1)),)),
    Setting("early exit, then a deeper one behind it", turns=((_EXIT_ONE, _DEEPER | {"num_draft_tokens": 1}),)),
    Setting("early exit, then a tree behind it", turns=((_EXIT_ONE, _skip_tree("block") | {"num_draft_tokens": 2}),)),
    *(
        Setting(f"merge of {name}, {rule}", {"method": "merge", "methods": members, "rule": rule})
        for name, members in (
            ("early exit and the draft model", (_EXIT_ONE, _ONE)),
            ("a tree and a chain of unlike laws", (_exit_tree("auto") | {"tree": (2,)}, _SKIP_ONE)),
        )
        for rule in ("block", "token")
    ),
    Setting("layer skip behind early exit", turns=((_EXIT_ONE, _SKIP_ONE),)),
    Setting("early exit behind layer skip", turns=((_SKIP_ONE, _EXIT_ONE),)),
    Setting("layer skip, block", _SKIP | {"rule": "block"}),
    Setting("layer skip, token", _SKIP | {"rule": "token"}),
    Setting("layer skip, without the first layer", _SKIP | {"skip": (0,)}),
    Setting("layer skip, seeded", _SKIP, {"seed": 7}),
    Setting("layer skip, tree, traversal", _skip_tree("block")),
    Setting("layer skip, tree, recursive rejection", _skip_tree("token")),
    Setting("layer skip in turns with early exit", turns=((_SKIP_ONE,), (_EXIT,), (_exit_tree("block"),))),
)


_MEDUSA = {"method": "medusa", "model": HEADS, "num_draft_tokens": 2}
_BLOCKWISE = {"method": "blockwise", "model": HEADS, "num_draft_tokens": 2}
_EXIT_HEAD = {"method": "exit", "model": HEADS, "num_draft_tokens": 2}
_MEDUSA_ONE = _MEDUSA | {"num_draft_tokens": 1}
_EAGLE3 = {"method": "eagle3", "model": HEADS, "num_draft_tokens": 2}
_EAGLE3_ONE = _EAGLE3 | {"num_draft_tokens": 1}
_EAGLE1 = {"method": "eagle1", "model": HEADS, "num_draft_tokens": 2}
#: The row that heads read was computed for an earlier text here, so a text begins with a token that is decoded plainly.
_FOUR, _PAIR = {"max_tokens": 4}, {"n": 2, "max_tokens": 3, "top_k": 2}

#: Methods that draft with heads on the target's hidden states. They need the pair with several layers.
HEADS_SETTINGS = (
    Setting("Medusa, block", _MEDUSA | {"rule": "block"}, _FOUR),
    Setting("Medusa, token", _MEDUSA | {"rule": "token"}, _FOUR),
    Setting("Medusa, walk", _MEDUSA | {"rule": "walk"}, _FOUR),
    Setting("Medusa, seeded", _MEDUSA, {"seed": 5, **_FOUR}),
    Setting("Medusa, most likely tokens", _MEDUSA | {"draft_sampling": "greedy"}, _FOUR),
    Setting("Medusa, two samples", _MEDUSA_ONE, _PAIR),
    Setting("Medusa, temperature and filters", _MEDUSA, {"top_k": 2, "top_p": 0.9, "temperature": 1.3, **_FOUR}),
    Setting("Medusa, penalties", _MEDUSA, {"frequency_penalty": -0.6, "repetition_penalty": 1.7, **_FOUR}),
    Setting("Medusa, stop tokens", _MEDUSA, {"stop_token_ids": (2,), **_FOUR}),
    Setting("Medusa, low confidence", _MEDUSA | {"min_confidence": 0.4}, _FOUR),
    Setting("Medusa, tree, traversal", _MEDUSA | {"tree": (2, 1), "rule": "block"}, _FOUR),
    Setting("Medusa, tree, recursive rejection", _MEDUSA | {"tree": (2, 1), "rule": "token"}, _FOUR),
    Setting("Medusa, tree, seeded", _MEDUSA | {"tree": (2, 1)}, {"seed": 6, **_FOUR}),
    Setting("Medusa, best-first tree", _MEDUSA | {"tree": "best_first", "num_draft_tokens": 4}, _FOUR),
    Setting("Medusa, Sequoia's tree", _MEDUSA | {"tree": "sequoia", "num_draft_tokens": 3}, _FOUR),
    Setting("Medusa in turns with others", turns=((_MEDUSA,), (), (LOOKUP,), (_drafted("block"),)), params=_FOUR),
    Setting("Medusa behind a lookup", turns=((LOOKUP | {"num_draft_tokens": 1}, _MEDUSA),), params=_FOUR),
    Setting("Medusa behind the draft model", turns=((_ONE, _MEDUSA_ONE),), params=_FOUR),
    Setting("the draft model behind Medusa", turns=((_MEDUSA_ONE, _ONE),), params=_FOUR),
    Setting("Medusa behind early exit", turns=((_EXIT_ONE, _MEDUSA_ONE),), params=_FOUR),
    Setting("blockwise, block", _BLOCKWISE | {"rule": "block"}, _FOUR),
    Setting("blockwise, token", _BLOCKWISE | {"rule": "token"}, _FOUR),
    Setting("blockwise, seeded", _BLOCKWISE, {"seed": 7, **_FOUR}),
    Setting("blockwise, two samples", _BLOCKWISE | {"num_draft_tokens": 1}, _PAIR),
    Setting("blockwise, tree", _BLOCKWISE | {"tree": (2, 1)}, _FOUR),
    Setting("exit, block", _EXIT_HEAD | {"rule": "block"}),
    Setting("exit, token", _EXIT_HEAD | {"rule": "token"}),
    Setting("exit, seeded", _EXIT_HEAD, {"seed": 5}),
    Setting("exit, two samples", _EXIT_HEAD | {"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    Setting("exit, tree, traversal", _EXIT_HEAD | {"tree": (2, 1), "rule": "block"}),
    Setting("exit, tree, recursive rejection", _EXIT_HEAD | {"tree": (2, 1), "rule": "token"}),
    Setting("exit behind Medusa", turns=((_MEDUSA_ONE, _EXIT_HEAD | {"num_draft_tokens": 1}),), params=_FOUR),
    Setting("exit in turns with early exit", turns=((_EXIT_HEAD,), (_EXIT,)), params=_FOUR),
    Setting("EAGLE-3, block", _EAGLE3 | {"rule": "block"}),
    Setting("EAGLE-3, token", _EAGLE3 | {"rule": "token"}),
    Setting("EAGLE-3, walk", _EAGLE3 | {"rule": "walk"}),
    Setting("EAGLE-3, seeded", _EAGLE3, {"seed": 5}),
    Setting("EAGLE-3, most likely tokens", _EAGLE3 | {"draft_sampling": "greedy"}),
    Setting("EAGLE-3, two samples", _EAGLE3_ONE, {"n": 2, "max_tokens": 2}),
    Setting("EAGLE-3, temperature and filters", _EAGLE3, {"top_k": 2, "top_p": 0.9, "temperature": 1.3}),
    Setting("EAGLE-3, penalties", _EAGLE3, {"frequency_penalty": -0.6, "repetition_penalty": 1.7}),
    Setting("EAGLE-3, tokens that it never drafts", _EAGLE3, {"allowed_token_ids": (1, 2)}),
    Setting("EAGLE-3, low confidence", _EAGLE3 | {"min_confidence": 0.5}),
    Setting("EAGLE-3, tree, traversal", _EAGLE3 | {"tree": (2, 1), "rule": "block"}),
    Setting("EAGLE-3, tree, recursive rejection", _EAGLE3 | {"tree": (2, 1), "rule": "token"}),
    Setting("EAGLE-3, tree, seeded", _EAGLE3 | {"tree": (2, 1)}, {"seed": 6}),
    Setting("EAGLE-3, best-first tree", _EAGLE3 | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("EAGLE-3, Sequoia's tree", _EAGLE3 | {"tree": "sequoia", "num_draft_tokens": 3}),
    Setting("EAGLE-3 in turns with others", _EAGLE3, turns=((_EAGLE3,), (), (LOOKUP,), (_drafted("block"),)), params=_FOUR),
    Setting("EAGLE-3 behind a lookup", _EAGLE3, turns=((LOOKUP | {"num_draft_tokens": 1}, _EAGLE3),)),
    Setting("EAGLE-3 behind the draft model", _EAGLE3_ONE, turns=((_ONE, _EAGLE3_ONE),)),
    Setting("the draft model behind EAGLE-3", _EAGLE3_ONE, turns=((_EAGLE3_ONE, _ONE),)),
    Setting("EAGLE-3 behind Medusa", _EAGLE3_ONE, turns=((_MEDUSA_ONE, _EAGLE3_ONE),), params=_FOUR),
    Setting("EAGLE-3, then the draft model", {"method": "then", "methods": (_EAGLE3_ONE, _ONE)}),
    Setting("staged, EAGLE-3 drafts for the draft model", _staged(_EAGLE3_ONE)),
    *(
        Setting(f"merge of {name}, {rule}", {"method": "merge", "methods": members, "rule": rule})
        for name, members in (
            ("EAGLE-3 and the draft model", (_EAGLE3_ONE, _ONE)),
            ("a tree of EAGLE-3 and EAGLE", (_EAGLE3_ONE | {"tree": (2,)}, _EAGLE1 | {"num_draft_tokens": 1})),
        )
        for rule in ("block", "token")
    ),
    Setting("the engine chooses, EAGLE-3", {"method": "auto", "methods": (_EAGLE3,)}, {"max_tokens": 5}),
    Setting("EAGLE, block", _EAGLE1 | {"rule": "block"}),
    Setting("EAGLE, token", _EAGLE1 | {"rule": "token"}),
    Setting("EAGLE, seeded", _EAGLE1, {"seed": 5}),
    Setting("EAGLE, two samples", _EAGLE1 | {"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    Setting("EAGLE, tree, traversal", _EAGLE1 | {"tree": (2, 1), "rule": "block"}),
    Setting("EAGLE-2: the likeliest tokens first", _EAGLE1 | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("EAGLE-3 behind EAGLE", {"method": "then", "methods": (_EAGLE1 | {"num_draft_tokens": 1}, _EAGLE3_ONE)}),
)


def _every_other(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor whose answer depends on the whole prefix."""
    pushed = scores.clone()
    pushed[:, int(ids.sum()) % scores.shape[-1]] -= 1.5
    return pushed


def _stuck_behind(token: int) -> dict[str, Any]:
    """No token may follow `token`."""
    return {"bad_words_ids": tuple((token, other) for other in range(3))}


def _raising(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that forbids one token, ends with another, and raises behind both of them."""
    if int(ids[0, -1]) == 2 and ids.shape[1] > 5:
        raise ValueError("the text has ended here, or has a token that was forbidden")
    return scores if ids.shape[1] % 2 else scores.index_fill(1, torch.tensor([2]), float("-inf"))


#: One setting of every parameter that changes logits and whose effect depends, or may depend, on the path of a row.
PARAMETERS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": -0.6},
    "logit_bias": {"logit_bias": {0: 1.0, 2: -0.7}},
    "bad_words_ids": {"bad_words_ids": ((1, 1), (2, 0), (0,))},
    "allowed_token_ids": {"allowed_token_ids": (0, 2)},
    "logits_processors": {"logits_processors": (_every_other,)},
    "min_tokens": {"stop_token_ids": (1,), "min_tokens": 2},
    "nothing may follow a stop": {"stop_token_ids": (2,), **_stuck_behind(2)},
    "a processor that raises behind a stop": {"stop_token_ids": (2,), "logits_processors": (_raising,)},
    "all together": {
        "repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": 0.4, "logit_bias": {1: 0.5},
        "bad_words_ids": ((2, 1),), "logits_processors": (_every_other,), "temperature": 1.4, "top_p": 0.95,
    },
}  # fmt: skip

#: Ways to draft, at least one for each rule, with the parameters that each of them needs.
DRAFTED_BY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block": (_drafted("block"), {}),
    "token": (_drafted("token"), {}),
    "tree": (_drafted("block", tree=(2, 1)), {"max_tokens": 2}),
    "recursive": (_drafted("token", tree=(2,)), {"max_tokens": 2}),
    "merged": (_drafted("auto", tree=(2,), num_draft_tokens=4) | {"method": "_prove_merged"}, {"max_tokens": 2}),
    "coupled": (_drafted("auto"), {"seed": 8}),
    "staged": (_staged(_OTHER), {}),
    "lookup": ({"method": "ngram", "num_draft_tokens": 2, "min_match": 1}, {}),
}

PARAMETER_SETTINGS = tuple(
    Setting(f"{name}, {way}", speculation, {**asked, **extra})
    for name, asked in PARAMETERS.items()
    for way, (speculation, extra) in DRAFTED_BY.items()
)

_LANGUAGE = ('""', '"a"', '"aa"')
_RULE = " | ".join('"' + text.replace('"', '\\"') + '"' for text in _LANGUAGE)

#: The same structure, in every form in which a caller may ask for it.
STRUCTURES: dict[str, StructuredOutputs] = {
    "choice": StructuredOutputs(choice=_LANGUAGE),
    "regex": StructuredOutputs(regex='""|"a"|"aa"'),
    "json_schema": StructuredOutputs(json_schema={"enum": ["", "a", "aa"]}),
    "lark": StructuredOutputs(grammar=f"start: {_RULE}"),
    "gbnf": StructuredOutputs(grammar=f"root ::= {_RULE}"),
}

#: A structure that forces the first four tokens, leaves a choice, and forces the end.
_FORCING = ('"aa"a', '"aa""')
_FORCED: dict[str, Any] = {"structured_outputs": StructuredOutputs(choice=_FORCING), "max_tokens": 7}

#: Who drafts behind what is forced, with the parameters that each needs.
_BEHIND_FORCED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nobody": ({"method": "none"}, {}),
    "nobody, seeded": ({"method": "none"}, {"seed": 8}),
    "nobody, two samples": ({"method": "none"}, {"n": 2}),
    "block": (_drafted("block"), {}),
    "token": (_drafted("token"), {"temperature": 1.4}),
    "tree": (_drafted("block", tree=(2, 1)), {}),
    "coupled": (_drafted("auto"), {"seed": 8}),
    "lookup": (LOOKUP, {}),
    "merge": ({"method": "merge", "methods": [LOOKUP, _ONE]}, {}),
    "the engine's choice": ({"method": "auto", "methods": [LOOKUP, _ONE]}, {}),
    "a text that ends among them": (_ONE, {"max_tokens": 3}),
    "a stop string among them": (_ONE, {"stop": ("aa",)}),
}

#: Ends of texts that need a tokenizer.
_STUCK_ENDS = {"a stop string": {"stop": ('"',), **_stuck_behind(0)}, "an end of text": _stuck_behind(2)}

STRUCTURE_SETTINGS = (
    *(
        Setting(f"{name}, block", _drafted("block"), {"structured_outputs": structure, "max_tokens": 5}, language=_LANGUAGE)
        for name, structure in STRUCTURES.items()
    ),
    *(
        Setting(
            f"regex, {way}",
            speculation,
            {"structured_outputs": STRUCTURES["regex"], **extra, "max_tokens": 5, "frequency_penalty": 0.5},
            language=_LANGUAGE,
        )
        for way, (speculation, extra) in DRAFTED_BY.items()
        if way != "block"
    ),
    Setting(
        "regex, nobody drafts", params={"structured_outputs": STRUCTURES["regex"], "max_tokens": 5}, language=_LANGUAGE
    ),
    *(
        Setting(f"forced tokens, then {way}", speculation, {**_FORCED, **extra}, language=_FORCING)
        for way, (speculation, extra) in _BEHIND_FORCED.items()
    ),
    *(
        Setting(f"nothing may follow {end}, {way}", DRAFTED_BY[way][0], {**asked, **DRAFTED_BY[way][1]})
        for end, asked in _STUCK_ENDS.items()
        for way in ("block", "tree", "coupled", "lookup")
    ),
)


#: The same in settings whose draft model has another vocabulary than the target.
OTHER_DRAFT = "the draft model of another vocabulary"
_CROSSED = {"method": "cross_vocabulary", "model": OTHER_DRAFT, "num_draft_tokens": 2}

#: Drafts from a model of another vocabulary. They need the pair of CROSSED_PIECES.
CROSSED_SETTINGS = (
    Setting("other vocabulary", _CROSSED),
    Setting("other vocabulary, token rule", _CROSSED | {"rule": "token"}, {"temperature": 1.4, "top_k": 2}),
    Setting("other vocabulary, seeded", _CROSSED, {"seed": 5}),
    Setting("other vocabulary, most likely tokens", _CROSSED | {"draft_sampling": "greedy"}),
    Setting("other vocabulary, tree", _CROSSED | {"tree": (2, 1), "num_draft_tokens": 4}),
    Setting("other vocabulary, penalties", _CROSSED, {"repetition_penalty": 1.7, "frequency_penalty": -0.6}),
    Setting("other vocabulary, only tokens outside it", _CROSSED, {"allowed_token_ids": (1,)}),
    Setting("other vocabulary, two samples", _CROSSED | {"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    Setting("other vocabulary, behind a lookup", turns=((LOOKUP | {"num_draft_tokens": 1}, _CROSSED),)),
    Setting("other vocabulary, by text", _CROSSED | {"match": "text"}),
    Setting("other vocabulary, by text, behind a lookup", turns=((LOOKUP, _CROSSED | {"match": "text"}),)),
)

#: Ways to draft for a target with a running state, by draft models with such states. Texts are so long that a pass goes on
#: behind a draft of which a part stood.
RUNNING_SETTINGS = (
    Setting("running state, chain", _drafted("block"), _LONGER),
    Setting("running state, token rule", _drafted("token"), _LONGER),
    Setting("running state, tree, traversal", _drafted("block", tree=(2, 1)), _LONGER),
    Setting("running state, tree, recursive rejection", _drafted("token", tree=(2, 1)), _LONGER),
    Setting("running state, seeded", _drafted("auto"), {"seed": 5}),
    Setting("running state, lookup", LOOKUP),
    Setting("running state, early exit", _EXIT, _LONGER),
    Setting("running state, early exit, tree", _exit_tree("block")),
    Setting("running state, early exit, then the draft model", turns=((_EXIT_ONE, _drafted("block", num_draft_tokens=1)),)),
    Setting("running state, merged", {"method": "merge", "methods": (_ONE, LOOKUP)}),
    Setting("running state, staged", _staged(_OTHER, num_draft_tokens=2)),
    Setting("running state, two samples", _ONE, {"n": 2, "max_tokens": 2}),
)
