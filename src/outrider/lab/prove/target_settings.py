"""The requests that are proven with heads, shared layers, other vocabularies, structures, encoders and running states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.lab.prove.settings import (
    BLOCKWISE,
    CROSSED,
    DEEPER,
    DFLASH,
    DFLASH_ONE,
    DSPARK,
    EAGLE1,
    EAGLE3,
    EAGLE3_ONE,
    EXIT,
    EXIT_HEAD,
    EXIT_ONE,
    LAYERED,
    LAYERED_HEADS,
    LAYERED_ONE,
    LOOKUP,
    MEDUSA,
    MEDUSA_ONE,
    MTP,
    MTP_ONE,
    ONE,
    OTHER,
    PEAGLE,
    PEAGLE_ONE,
    SKIP,
    SKIP_ONE,
    Setting,
    drafted,
    exit_tree,
    skip_tree,
    staged,
)
from outrider.params import StructuredOutputs

# --- Proven requests whose drafts come from heads on the target's hidden states.


#: The row that heads read was computed for an earlier text here, so a text begins with a token that is decoded plainly.
_FOUR, _PAIR = {"max_tokens": 4}, {"n": 2, "max_tokens": 3, "top_k": 2}
_OF_TWO, _PAIR_OF_TWO = {"top_k": 2}, {"n": 2, "max_tokens": 2, "top_k": 2}


def _staged(drafter: dict[str, Any]) -> dict[str, Any]:
    """A stage whose draft model is unlike the target, with heads or layers of that draft model."""
    own = {"model": LAYERED_HEADS} if "model" in drafter else {}
    return staged({**drafter, **own}, model=LAYERED)


#: Methods that draft with heads on the target's hidden states. They need the pair with several layers.
HEADS_SETTINGS = (
    Setting("Medusa, block", MEDUSA | {"rule": "block"}, _FOUR),
    Setting("Medusa, token", MEDUSA | {"rule": "token"}, _FOUR),
    Setting("Medusa, walk", MEDUSA | {"rule": "walk"}, _FOUR),
    Setting("Medusa, seeded", MEDUSA, {"seed": 5, **_FOUR}),
    Setting("Medusa, most likely tokens", MEDUSA | {"draft_sampling": "greedy"}, _FOUR),
    Setting("Medusa, two samples", MEDUSA_ONE, _PAIR),
    Setting("Medusa, temperature and filters", MEDUSA, {"top_k": 2, "top_p": 0.9, "temperature": 1.3, **_FOUR}),
    Setting("Medusa, penalties", MEDUSA, {"frequency_penalty": -0.6, "repetition_penalty": 1.7, **_FOUR}),
    Setting("Medusa, stop tokens", MEDUSA, {"stop_token_ids": (2,), **_FOUR}),
    Setting("Medusa, low confidence", MEDUSA | {"min_confidence": 0.4}, _FOUR),
    Setting("Medusa, tree, traversal", MEDUSA | {"tree": (2, 1), "rule": "block"}, _FOUR),
    Setting("Medusa, tree, recursive rejection", MEDUSA | {"tree": (2, 1), "rule": "token"}, _FOUR),
    Setting("Medusa, tree, seeded", MEDUSA | {"tree": (2, 1)}, {"seed": 6, **_FOUR}),
    Setting("Medusa, best-first tree", MEDUSA | {"tree": "best_first", "num_draft_tokens": 4}, _FOUR),
    Setting("Medusa, Sequoia's tree", MEDUSA | {"tree": "sequoia", "num_draft_tokens": 3}, _FOUR),
    Setting("Medusa in turns with others", turns=((MEDUSA,), (), (LOOKUP,), (drafted("block"),)), params=_FOUR),
    Setting("Medusa behind a lookup", turns=((LOOKUP | {"num_draft_tokens": 1}, MEDUSA),), params=_FOUR),
    Setting("Medusa behind the draft model", turns=((ONE, MEDUSA_ONE),), params=_FOUR),
    Setting("the draft model behind Medusa", turns=((MEDUSA_ONE, ONE),), params=_FOUR),
    Setting("Medusa behind early exit", turns=((EXIT_ONE, MEDUSA_ONE),), params=_FOUR),
    Setting("blockwise, block", BLOCKWISE | {"rule": "block"}, _FOUR),
    Setting("blockwise, token", BLOCKWISE | {"rule": "token"}, _FOUR),
    Setting("blockwise, seeded", BLOCKWISE, {"seed": 7, **_FOUR}),
    Setting("blockwise, two samples", BLOCKWISE | {"num_draft_tokens": 1}, _PAIR),
    Setting("blockwise, tree", BLOCKWISE | {"tree": (2, 1)}, _FOUR),
    Setting("exit, block", EXIT_HEAD | {"rule": "block"}),
    Setting("exit, token", EXIT_HEAD | {"rule": "token"}),
    Setting("exit, seeded", EXIT_HEAD, {"seed": 5}),
    Setting("exit, two samples", EXIT_HEAD | {"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    Setting("exit, tree, traversal", EXIT_HEAD | {"tree": (2, 1), "rule": "block"}),
    Setting("exit, tree, recursive rejection", EXIT_HEAD | {"tree": (2, 1), "rule": "token"}),
    Setting("exit behind Medusa", turns=((MEDUSA_ONE, EXIT_HEAD | {"num_draft_tokens": 1}),), params=_FOUR),
    Setting("exit in turns with early exit", turns=((EXIT_HEAD,), (EXIT,)), params=_FOUR),
    Setting("EAGLE-3, block", EAGLE3 | {"rule": "block"}),
    Setting("EAGLE-3, token", EAGLE3 | {"rule": "token"}),
    Setting("EAGLE-3, walk", EAGLE3 | {"rule": "walk"}),
    Setting("EAGLE-3, seeded", EAGLE3, {"seed": 5}),
    Setting("EAGLE-3, most likely tokens", EAGLE3 | {"draft_sampling": "greedy"}),
    Setting("EAGLE-3, two samples", EAGLE3_ONE, {"n": 2, "max_tokens": 2}),
    Setting("EAGLE-3, temperature and filters", EAGLE3, {"top_k": 2, "top_p": 0.9, "temperature": 1.3}),
    Setting("EAGLE-3, penalties", EAGLE3, {"frequency_penalty": -0.6, "repetition_penalty": 1.7}),
    Setting("EAGLE-3, tokens that it never drafts", EAGLE3, {"allowed_token_ids": (1, 2)}),
    Setting("EAGLE-3, low confidence", EAGLE3 | {"min_confidence": 0.5}),
    Setting("EAGLE-3, tree, traversal", EAGLE3 | {"tree": (2, 1), "rule": "block"}),
    Setting("EAGLE-3, tree, recursive rejection", EAGLE3 | {"tree": (2, 1), "rule": "token"}),
    Setting("EAGLE-3, tree, seeded", EAGLE3 | {"tree": (2, 1)}, {"seed": 6}),
    Setting("EAGLE-3, best-first tree", EAGLE3 | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("EAGLE-3, Sequoia's tree", EAGLE3 | {"tree": "sequoia", "num_draft_tokens": 3}),
    Setting("EAGLE-3 in turns with others", EAGLE3, turns=((EAGLE3,), (), (LOOKUP,), (drafted("block"),)), params=_FOUR),
    Setting("EAGLE-3 behind a lookup", EAGLE3, turns=((LOOKUP | {"num_draft_tokens": 1}, EAGLE3),)),
    Setting("EAGLE-3 behind the draft model", EAGLE3_ONE, turns=((ONE, EAGLE3_ONE),)),
    Setting("the draft model behind EAGLE-3", EAGLE3_ONE, turns=((EAGLE3_ONE, ONE),)),
    Setting("EAGLE-3 behind Medusa", EAGLE3_ONE, turns=((MEDUSA_ONE, EAGLE3_ONE),), params=_FOUR),
    Setting("EAGLE-3, then the draft model", {"method": "then", "methods": (EAGLE3_ONE, ONE)}),
    *(
        Setting(f"staged, {name}", _staged(drafter), {"top_k": 2, **params})
        for name, drafter, params in (
            ("Medusa's heads of the draft model", MEDUSA, _FOUR),
            ("a tree of the draft model's heads, seeded", BLOCKWISE | {"tree": (2, 1)}, {"seed": 6, **_FOUR}),
            ("the first layer of the draft model", EXIT, {}),
            ("the draft model's head for an exit", EXIT_HEAD | {"rule": "token"}, {}),
            ("EAGLE-3 of the draft model", EAGLE3, {}),
            ("a tree of EAGLE of the draft model", EAGLE1 | {"tree": (2, 1)}, {}),
            ("layers of the draft model's checkpoint", MTP, {}),
            ("a block of the draft model's head, seeded", DFLASH, {"seed": 6}),
            ("P-EAGLE of the draft model", PEAGLE, {}),
        )
    ),
    Setting(
        "EAGLE-3 of the draft model and that model itself",
        {"method": "merge", "methods": (_staged(EAGLE3 | {"num_draft_tokens": 1}), LAYERED_ONE)},
        {"top_k": 2},
    ),
    *(
        Setting(f"merge of {name}, {rule}", {"method": "merge", "methods": members, "rule": rule})
        for name, members in (
            ("EAGLE-3 and the draft model", (EAGLE3_ONE, ONE)),
            ("a tree of EAGLE-3 and EAGLE", (EAGLE3_ONE | {"tree": (2,)}, EAGLE1 | {"num_draft_tokens": 1})),
        )
        for rule in ("block", "token")
    ),
    Setting("the engine chooses, EAGLE-3", {"method": "auto", "methods": (EAGLE3,)}, {"max_tokens": 5}),
    Setting("EAGLE, block", EAGLE1 | {"rule": "block"}),
    Setting("EAGLE, token", EAGLE1 | {"rule": "token"}),
    Setting("EAGLE, seeded", EAGLE1, {"seed": 5}),
    Setting("EAGLE, two samples", EAGLE1 | {"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    Setting("EAGLE, tree, traversal", EAGLE1 | {"tree": (2, 1), "rule": "block"}),
    Setting("EAGLE-2: the likeliest tokens first", EAGLE1 | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting(
        "the engine chooses, EAGLE", {"method": "auto", "methods": (EAGLE1 | {"num_draft_tokens": 1},)}, _FOUR | _OF_TWO
    ),
    Setting("EAGLE-3 behind EAGLE", {"method": "then", "methods": (EAGLE1 | {"num_draft_tokens": 1}, EAGLE3_ONE)}),
    Setting("MTP, block", MTP | {"rule": "block"}),
    Setting("MTP, seeded", MTP, {"seed": 5}),
    Setting("MTP, most likely tokens", MTP | {"draft_sampling": "greedy"}),
    Setting("MTP, two samples", MTP_ONE, _PAIR_OF_TWO),
    Setting("MTP, tree, traversal", MTP | {"tree": (2, 1), "rule": "block"}),
    Setting("MTP, tree, recursive rejection", MTP | {"tree": (2, 1), "rule": "token"}),
    Setting("MTP, best-first tree", MTP | {"tree": "best_first", "num_draft_tokens": 4}, _OF_TWO),
    Setting("MTP, Sequoia's tree", MTP | {"tree": "sequoia", "num_draft_tokens": 3}, _OF_TWO),
    Setting("MTP behind a lookup", MTP, turns=((LOOKUP | {"num_draft_tokens": 1}, MTP),)),
    Setting("merge of MTP and the draft model", {"method": "merge", "methods": (MTP_ONE, ONE), "rule": "block"}, _OF_TWO),
    Setting("the engine chooses, MTP", {"method": "auto", "methods": (MTP_ONE,)}, {"max_tokens": 4, "top_k": 2}),
    Setting("DFlash, block", DFLASH | {"rule": "block"}),
    Setting("DFlash, token", DFLASH | {"rule": "token"}),
    Setting("DFlash, seeded", DFLASH, {"seed": 5}),
    Setting("DFlash, two samples", DFLASH_ONE, {"n": 2, "max_tokens": 2}),
    Setting("DFlash, penalties", DFLASH, {"frequency_penalty": -0.6, "repetition_penalty": 1.7}),
    Setting("DFlash, tree, traversal", DFLASH | {"tree": (2, 1), "rule": "block"}),
    Setting("DFlash, tree, recursive rejection", DFLASH | {"tree": (2, 1), "rule": "token"}),
    Setting("DFlash, best-first tree", DFLASH | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("DFlash, Sequoia's tree", DFLASH | {"tree": "sequoia", "num_draft_tokens": 3}),
    Setting("DSpark, block", DSPARK | {"rule": "block"}),
    Setting("DSpark, token", DSPARK | {"rule": "token"}),
    Setting("DSpark, seeded", DSPARK, {"seed": 5}),
    Setting(
        "DSpark, three tokens, by the chances of their places", DSPARK | {"num_draft_tokens": 3, "min_confidence": 0.2}
    ),
    Setting("DSpark, seeded, by their chances", DSPARK | {"min_confidence": 0.2}, {"seed": 6}),
    Setting("DSpark, tree, traversal", DSPARK | {"tree": (2, 1), "rule": "block"}),
    Setting("DSpark, tree, recursive rejection", DSPARK | {"tree": (2, 1), "rule": "token", "min_confidence": 0.2}),
    Setting("DSpark, best-first tree", DSPARK | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("DSpark behind a lookup", DSPARK, turns=((LOOKUP | {"num_draft_tokens": 1}, DSPARK),)),
    Setting("the engine chooses, DFlash", {"method": "auto", "methods": (DFLASH_ONE,)}, _FOUR | _OF_TWO),
    Setting("DFlash behind a lookup", DFLASH_ONE, turns=((LOOKUP | {"num_draft_tokens": 1}, DFLASH_ONE),), params=_FOUR),
    Setting("merge of DFlash and EAGLE-3", {"method": "merge", "methods": (DFLASH_ONE | {"tree": (2,)}, EAGLE3_ONE)}),
    Setting("P-EAGLE, block", PEAGLE | {"rule": "block"}),
    Setting("P-EAGLE, token", PEAGLE | {"rule": "token"}),
    Setting("P-EAGLE, seeded", PEAGLE, {"seed": 5}),
    Setting("P-EAGLE, two samples", PEAGLE_ONE, {"n": 2, "max_tokens": 2}),
    Setting("P-EAGLE, tree, traversal", PEAGLE | {"tree": (2, 1), "rule": "block"}),
    Setting("P-EAGLE, best-first tree", PEAGLE | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("P-EAGLE, Sequoia's tree", PEAGLE | {"tree": "sequoia", "num_draft_tokens": 3}),
    Setting("P-EAGLE behind a lookup", PEAGLE_ONE, turns=((LOOKUP | {"num_draft_tokens": 1}, PEAGLE_ONE),), params=_FOUR),
    Setting("merge of P-EAGLE and the draft model", {"method": "merge", "methods": (PEAGLE_ONE, ONE)}, _OF_TWO),
    Setting("the engine chooses, P-EAGLE", {"method": "auto", "methods": (PEAGLE_ONE,)}, {"max_tokens": 4, "top_k": 2}),
)


# --- Proven requests with every parameter whose effect depends on the path of a row, under every way to draft.


def _every_other(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor whose answer depends on the whole prefix."""
    pushed = scores.clone()
    pushed[:, int(ids.sum()) % scores.shape[-1]] -= 1.5
    return pushed


def stuck_behind(token: int) -> dict[str, Any]:
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
    "nothing may follow a stop": {"stop_token_ids": (2,), **stuck_behind(2)},
    "a processor that raises behind a stop": {"stop_token_ids": (2,), "logits_processors": (_raising,)},
    "all together": {
        "repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": 0.4, "logit_bias": {1: 0.5},
        "bad_words_ids": ((2, 1),), "logits_processors": (_every_other,), "temperature": 1.4, "top_p": 0.95,
    },
}  # fmt: skip

#: Ways to draft, at least one for each rule, with the parameters that each of them needs.
DRAFTED_BY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block": (drafted("block"), {}),
    "token": (drafted("token"), {}),
    "tree": (drafted("block", tree=(2, 1)), {"max_tokens": 2}),
    "recursive": (drafted("token", tree=(2,)), {"max_tokens": 2}),
    "merged": (drafted("auto", tree=(2,), num_draft_tokens=4) | {"method": "_prove_merged"}, {"max_tokens": 2}),
    "coupled": (drafted("auto"), {"seed": 8}),
    "staged": (staged(OTHER), {}),
    "lookup": ({"method": "ngram", "num_draft_tokens": 2, "min_match": 1}, {}),
}

PARAMETER_SETTINGS = tuple(
    Setting(f"{name}, {way}", speculation, {**asked, **extra})
    for name, asked in PARAMETERS.items()
    for way, (speculation, extra) in DRAFTED_BY.items()
)


# --- Proven requests whose drafts come from some of the target's own layers.


#: Layers of the target of `SHARED_TARGET_SETTINGS`.
SHARED_TARGET_LAYERS = 3

#: Methods that draft with some of the target's own layers; the target of these proofs has several.
SHARED_TARGET_SETTINGS = (
    Setting("early exit, block", EXIT | {"rule": "block"}),
    Setting("early exit, token", EXIT | {"rule": "token"}),
    Setting("early exit, seeded", EXIT, {"seed": 5}),
    Setting("early exit, most likely tokens", EXIT | {"draft_sampling": "greedy"}),
    Setting("early exit, two samples", EXIT_ONE, {"n": 2, "max_tokens": 2}),
    Setting("early exit, tree, traversal", exit_tree("block")),
    Setting("early exit, tree, recursive rejection", exit_tree("token")),
    Setting("early exit, tree, seeded", exit_tree("auto"), {"seed": 6}),
    Setting("early exit in turns with the draft model", turns=((EXIT,), (drafted("block"),))),
    Setting("early exit behind a lookup", turns=((LOOKUP | {"num_draft_tokens": 1}, EXIT),)),
    Setting("early exit, then the draft model behind it", turns=((EXIT_ONE, drafted("block", num_draft_tokens=1)),)),
    Setting("early exit, then a deeper one behind it", turns=((EXIT_ONE, DEEPER | {"num_draft_tokens": 1}),)),
    Setting("early exit, then a tree behind it", turns=((EXIT_ONE, skip_tree("block") | {"num_draft_tokens": 2}),)),
    *(
        Setting(f"merge of {name}, {rule}", {"method": "merge", "methods": members, "rule": rule})
        for name, members in (
            ("early exit and the draft model", (EXIT_ONE, ONE)),
            ("a tree and a chain of unlike laws", (exit_tree("auto") | {"tree": (2,)}, SKIP_ONE)),
        )
        for rule in ("block", "token")
    ),
    Setting("layer skip behind early exit", turns=((EXIT_ONE, SKIP_ONE),)),
    Setting("early exit behind layer skip", turns=((SKIP_ONE, EXIT_ONE),)),
    Setting("layer skip, block", SKIP | {"rule": "block"}),
    Setting("layer skip, token", SKIP | {"rule": "token"}),
    Setting("layer skip, without the first layer", SKIP | {"skip": (0,)}),
    Setting("layer skip, seeded", SKIP, {"seed": 7}),
    Setting("layer skip, tree, traversal", skip_tree("block")),
    Setting("layer skip, tree, recursive rejection", skip_tree("token")),
    Setting("layer skip in turns with early exit", turns=((SKIP_ONE,), (EXIT,), (exit_tree("block"),))),
)


# --- Proven requests whose output has a structure, with the tokens that it forces.


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
    "block": (drafted("block"), {}),
    "token": (drafted("token"), {"temperature": 1.4}),
    "tree": (drafted("block", tree=(2, 1)), {}),
    "coupled": (drafted("auto"), {"seed": 8}),
    "lookup": (LOOKUP, {}),
    "merge": ({"method": "merge", "methods": [LOOKUP, ONE]}, {}),
    "the engine's choice": ({"method": "auto", "methods": [LOOKUP, ONE]}, {}),
    "a text that ends among them": (ONE, {"max_tokens": 3}),
    "a stop string among them": (ONE, {"stop": ("aa",)}),
}

#: Ends of texts that need a tokenizer.
_STUCK_ENDS = {"a stop string": {"stop": ('"',), **stuck_behind(0)}, "an end of text": stuck_behind(2)}

STRUCTURE_SETTINGS = (
    *(
        Setting(f"{name}, block", drafted("block"), {"structured_outputs": structure, "max_tokens": 5}, language=_LANGUAGE)
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


# --- Proven requests whose draft model has another vocabulary than the target.


#: Drafts from a model of another vocabulary. They need the pair of CROSSED_PIECES.
CROSSED_SETTINGS = (
    Setting("other vocabulary", CROSSED),
    Setting("other vocabulary, token rule", CROSSED | {"rule": "token"}, {"temperature": 1.4, "top_k": 2}),
    Setting("other vocabulary, seeded", CROSSED, {"seed": 5}),
    Setting("other vocabulary, most likely tokens", CROSSED | {"draft_sampling": "greedy"}),
    Setting("other vocabulary, tree", CROSSED | {"tree": (2, 1), "num_draft_tokens": 4}),
    Setting("other vocabulary, penalties", CROSSED, {"repetition_penalty": 1.7, "frequency_penalty": -0.6}),
    Setting("other vocabulary, only tokens outside it", CROSSED, {"allowed_token_ids": (1,)}),
    Setting("other vocabulary, two samples", CROSSED | {"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    Setting("other vocabulary, behind a lookup", turns=((LOOKUP | {"num_draft_tokens": 1}, CROSSED),)),
    Setting("other vocabulary, by text", CROSSED | {"match": "text"}),
    Setting("other vocabulary, by text, behind a lookup", turns=((LOOKUP, CROSSED | {"match": "text"}),)),
)


# --- Proven requests for a target with an encoder.


#: Texts in which a pass goes on behind a draft of which a part stood.
_LONGER = {"max_tokens": 4, "top_k": 2}

#: Ways to draft for a target with an encoder, by draft models with encoders of their own.
ENCODER_SETTINGS = (
    Setting("encoder, chain", drafted("block"), _LONGER),
    Setting("encoder, tree, traversal", drafted("block", tree=(2, 1)), _LONGER),
    Setting("encoder, tree, recursive rejection", drafted("token", tree=(2, 1)), _LONGER),
    Setting("encoder, seeded", drafted("auto"), {"seed": 5}),
    Setting("encoder, lookup", LOOKUP),
    Setting("encoder, early exit", EXIT, _LONGER),
    Setting("encoder, early exit, tree", exit_tree("block")),
)


# --- Proven requests for a target with a running state.


#: Ways to draft for a target with a running state, by draft models with such states. Texts are so long that a pass goes on
#: behind a draft of which a part stood.
RUNNING_SETTINGS = (
    Setting("running state, chain", drafted("block"), _LONGER),
    Setting("running state, token rule", drafted("token"), _LONGER),
    Setting("running state, tree, traversal", drafted("block", tree=(2, 1)), _LONGER),
    Setting("running state, tree, recursive rejection", drafted("token", tree=(2, 1)), _LONGER),
    Setting("running state, seeded", drafted("auto"), {"seed": 5}),
    Setting("running state, lookup", LOOKUP),
    Setting("running state, early exit", EXIT, _LONGER),
    Setting("running state, early exit, tree", exit_tree("block")),
    Setting("running state, early exit, then the draft model", turns=((EXIT_ONE, drafted("block", num_draft_tokens=1)),)),
    Setting("running state, merged", {"method": "merge", "methods": (ONE, LOOKUP)}),
    Setting("running state, staged", staged(OTHER, num_draft_tokens=2)),
    Setting("running state, two samples", ONE, {"n": 2, "max_tokens": 2}),
)

#: Heads on the hidden states of such a target. They need several layers.
RUNNING_HEADS_SETTINGS = (
    Setting("running state, EAGLE-3", EAGLE3 | {"rule": "block"}, _LONGER),
    Setting("running state, EAGLE-3, token rule", EAGLE3 | {"rule": "token"}, _LONGER),
    Setting("running state, EAGLE-3, tree, traversal", EAGLE3 | {"tree": (2, 1), "rule": "block"}, _LONGER),
    Setting("running state, EAGLE-3, tree, recursive rejection", EAGLE3 | {"tree": (2, 1), "rule": "token"}, _LONGER),
    Setting("running state, EAGLE-3, seeded", EAGLE3, {"seed": 5}),
    Setting("running state, EAGLE-3 behind the draft model", turns=((ONE, EAGLE3_ONE),), params=_LONGER),
    Setting("running state, EAGLE", EAGLE1, _LONGER),
    Setting("running state, EAGLE-2: the likeliest tokens first", EAGLE1 | {"tree": "best_first"}, _LONGER),
    Setting("running state, Medusa", MEDUSA, _LONGER),
    Setting("running state, DFlash", DFLASH, _LONGER),
    Setting("running state, P-EAGLE", PEAGLE, _LONGER),
)
