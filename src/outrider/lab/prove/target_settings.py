"""The requests that are proven with heads, shared layers, other vocabularies, structures, encoders and running states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.lab.prove import settings
from outrider.lab.prove.settings import LOOKUP, ONE, OTHER, Setting, behind, drafted, in_ways, made_of, one, staged
from outrider.params import StructuredOutputs

# --- Methods that draft with layers of the target, with heads on its hidden states, or in another vocabulary.


EXIT: dict[str, Any] = {"method": "early_exit", "layers": 1, "num_draft_tokens": 2}
SKIP: dict[str, Any] = {"method": "layer_skip", "skip": (1,), "num_draft_tokens": 2}
EXIT_TREE: dict[str, Any] = {"method": "early_exit", "layers": 1, "tree": (2, 1)}
SKIP_TREE: dict[str, Any] = {"method": "layer_skip", "skip": (1,), "tree": (2, 1)}
_HEADS = ("medusa", "blockwise", "exit", "eagle1", "eagle3", "mtp", "dflash", "dspark", "peagle")
MEDUSA, BLOCKWISE, EXIT_HEAD, EAGLE1, EAGLE3, MTP, DFLASH, DSPARK, PEAGLE = (
    {"method": name, "model": settings.HEADS, "num_draft_tokens": 2} for name in _HEADS
)
#: Without it the engine chooses how long its drafts are, and one path runs at a time.
_WHOLE = DSPARK | {"min_confidence": 0.0}
CROSSED = {"method": "cross_vocabulary", "model": settings.OTHER_DRAFT, "num_draft_tokens": 2}
_LAYERED_ONE = {"method": "draft_model", "model": settings.LAYERED, "num_draft_tokens": 1}

#: The row that heads read was computed for an earlier text here, so a text begins with a token that is decoded plainly.
_FOUR, _PAIR = {"max_tokens": 4}, {"n": 2, "max_tokens": 3, "top_k": 2}
_OF_TWO, _PAIR_OF_TWO = {"top_k": 2}, {"n": 2, "max_tokens": 2, "top_k": 2}
#: Texts in which a pass goes on behind a draft of which a part stood.
_LONGER = {"max_tokens": 4, "top_k": 2}


def _staged(drafter: dict[str, Any]) -> dict[str, Any]:
    """A stage whose draft model is unlike the target, with heads or layers of that draft model."""
    own = {"model": settings.LAYERED_HEADS} if "model" in drafter else {}
    return staged({**drafter, **own}, model=settings.LAYERED)


# --- Proven requests whose drafts come from heads on the target's hidden states.


_STAGED: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
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

#: Methods that draft with heads on the target's hidden states. They need the pair with several layers.
HEADS_SETTINGS = (
    *in_ways("Medusa", MEDUSA, "block | token | walk | seeded | most likely tokens", **_FOUR),
    Setting("Medusa, two samples", one(MEDUSA), _PAIR),
    *in_ways("Medusa", MEDUSA, "temperature and filters | penalties | stop tokens", **_FOUR),
    Setting("Medusa, low confidence", MEDUSA | {"min_confidence": 0.4}, _FOUR),
    *in_ways("Medusa", MEDUSA, "tree, traversal | tree, recursive rejection | tree, seeded", **_FOUR),
    *in_ways("Medusa", MEDUSA, "best-first tree | Sequoia's tree", **_FOUR),
    Setting("Medusa in turns with others", turns=((MEDUSA,), (), (LOOKUP,), (drafted("block"),)), params=_FOUR),
    Setting("Medusa behind a lookup", turns=behind(one(LOOKUP), MEDUSA), params=_FOUR),
    Setting("Medusa behind the draft model", turns=behind(ONE, one(MEDUSA)), params=_FOUR),
    Setting("the draft model behind Medusa", turns=behind(one(MEDUSA), ONE), params=_FOUR),
    Setting("Medusa behind early exit", turns=behind(one(EXIT), one(MEDUSA)), params=_FOUR),
    *in_ways("blockwise", BLOCKWISE, "block | token", **_FOUR),
    Setting("blockwise, seeded", BLOCKWISE, {"seed": 7, **_FOUR}),
    Setting("blockwise, two samples", one(BLOCKWISE), _PAIR),
    *in_ways("blockwise", BLOCKWISE, "tree", **_FOUR),
    *in_ways("exit", EXIT_HEAD, "block | token | seeded | two samples | tree, traversal | tree, recursive rejection"),
    Setting("exit behind Medusa", turns=behind(one(MEDUSA), one(EXIT_HEAD)), params=_FOUR),
    Setting("exit in turns with early exit", turns=((EXIT_HEAD,), (EXIT,)), params=_FOUR),
    *in_ways("EAGLE-3", EAGLE3, "block | token | walk | seeded | most likely tokens | two samples"),
    *in_ways("EAGLE-3", EAGLE3, "temperature and filters | penalties"),
    Setting("EAGLE-3, tokens that it never drafts", EAGLE3, {"allowed_token_ids": (1, 2)}),
    Setting("EAGLE-3, low confidence", EAGLE3 | {"min_confidence": 0.5}),
    *in_ways("EAGLE-3", EAGLE3, "tree, traversal | tree, recursive rejection | tree, seeded"),
    *in_ways("EAGLE-3", EAGLE3, "best-first tree | Sequoia's tree"),
    Setting("EAGLE-3 in turns with others", EAGLE3, turns=((EAGLE3,), (), (LOOKUP,), (drafted("block"),)), params=_FOUR),
    Setting("EAGLE-3 behind a lookup", EAGLE3, turns=behind(one(LOOKUP), EAGLE3)),
    Setting("EAGLE-3 behind the draft model", one(EAGLE3), turns=behind(ONE, one(EAGLE3))),
    Setting("the draft model behind EAGLE-3", one(EAGLE3), turns=behind(one(EAGLE3), ONE)),
    Setting("EAGLE-3 behind Medusa", one(EAGLE3), turns=behind(one(MEDUSA), one(EAGLE3)), params=_FOUR),
    Setting("EAGLE-3, then the draft model", made_of("then", one(EAGLE3), ONE)),
    *(Setting(f"staged, {name}", _staged(drafter), _OF_TWO | params) for name, drafter, params in _STAGED),
    Setting(
        "EAGLE-3 of the draft model and that model itself", made_of("merge", _staged(one(EAGLE3)), _LAYERED_ONE), _OF_TWO
    ),
    *in_ways("merge of EAGLE-3 and the draft model", made_of("merge", one(EAGLE3), ONE), "block | token"),
    *in_ways(
        "merge of a tree of EAGLE-3 and EAGLE", made_of("merge", one(EAGLE3) | {"tree": (2,)}, one(EAGLE1)), "block | token"
    ),
    Setting("the engine chooses, EAGLE-3", made_of("auto", EAGLE3), {"max_tokens": 5}),
    *in_ways("EAGLE", EAGLE1, "block | token | seeded | two samples | tree, traversal"),
    Setting("EAGLE-2: the likeliest tokens first", EAGLE1 | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("the engine chooses, EAGLE", made_of("auto", one(EAGLE1)), _LONGER),
    Setting("EAGLE-3 behind EAGLE", made_of("then", one(EAGLE1), one(EAGLE3))),
    *in_ways("MTP", MTP, "block | seeded | most likely tokens"),
    Setting("MTP, two samples", one(MTP), _PAIR_OF_TWO),
    *in_ways("MTP", MTP, "tree, traversal | tree, recursive rejection"),
    *in_ways("MTP", MTP, "best-first tree | Sequoia's tree", **_OF_TWO),
    Setting("MTP behind a lookup", MTP, turns=behind(one(LOOKUP), MTP)),
    Setting("merge of MTP and the draft model", made_of("merge", one(MTP), ONE, rule="block"), _OF_TWO),
    Setting("the engine chooses, MTP", made_of("auto", one(MTP)), _LONGER),
    *in_ways("DFlash", DFLASH, "block | token | seeded | two samples | penalties | tree, traversal"),
    *in_ways("DFlash", DFLASH, "tree, recursive rejection | best-first tree | Sequoia's tree"),
    Setting("the engine chooses, DFlash", made_of("auto", one(DFLASH)), _LONGER),
    Setting("DFlash behind a lookup", one(DFLASH), turns=behind(one(LOOKUP), one(DFLASH)), params=_FOUR),
    Setting("merge of DFlash and EAGLE-3", made_of("merge", one(DFLASH) | {"tree": (2,)}, one(EAGLE3))),
    *in_ways("DSpark", _WHOLE, "block | token | seeded | tree, traversal | best-first tree"),
    *in_ways("DSpark, lengths by their worth", DSPARK | {"num_draft_tokens": 3}, "block | token | seeded"),
    Setting("the engine chooses, DSpark", made_of("auto", DSPARK), _LONGER),
    Setting("DSpark, three tokens, by their chances", DSPARK | {"num_draft_tokens": 3, "min_confidence": 0.1}),
    Setting("DSpark, seeded, by their chances", DSPARK | {"min_confidence": 0.1}, {"seed": 6}),
    Setting("DSpark, tree, by their chances", DSPARK | {"tree": (2, 1), "rule": "token", "min_confidence": 0.2}),
    Setting("DSpark behind a lookup", one(_WHOLE), turns=behind(one(LOOKUP), one(_WHOLE)), params=_FOUR),
    *in_ways(
        "P-EAGLE", PEAGLE, "block | token | seeded | two samples | tree, traversal | best-first tree | Sequoia's tree"
    ),
    Setting("P-EAGLE behind a lookup", one(PEAGLE), turns=behind(one(LOOKUP), one(PEAGLE)), params=_FOUR),
    Setting("merge of P-EAGLE and the draft model", made_of("merge", one(PEAGLE), ONE), _OF_TWO),
    Setting("the engine chooses, P-EAGLE", made_of("auto", one(PEAGLE)), _LONGER),
)


# --- Proven requests with every parameter whose effect depends on the path of a row, under every way to draft.


def _every_other(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor whose answer depends on the whole prefix."""
    pushed = scores.clone()
    pushed[:, int(ids.sum()) % scores.shape[-1]] -= 1.5
    return pushed


def stuckbehind(token: int) -> dict[str, Any]:
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
    "nothing may follow a stop": {"stop_token_ids": (2,), **stuckbehind(2)},
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
    *in_ways("early exit", EXIT, "block | token | seeded | most likely tokens | two samples"),
    *in_ways("early exit", EXIT_TREE, "tree, traversal | tree, recursive rejection"),
    Setting("early exit, tree, seeded", EXIT_TREE | {"rule": "auto"}, {"seed": 6}),
    Setting("early exit in turns with the draft model", turns=((EXIT,), (drafted("block"),))),
    Setting("early exit behind a lookup", turns=behind(one(LOOKUP), EXIT)),
    Setting("early exit, then the draft model behind it", turns=behind(one(EXIT), one(drafted("block")))),
    Setting("early exit, then a deeper one behind it", turns=behind(one(EXIT), one(EXIT) | {"layers": 2})),
    Setting(
        "early exit, then a tree behind it", turns=behind(one(EXIT), SKIP_TREE | {"rule": "block", "num_draft_tokens": 2})
    ),
    *in_ways("merge of early exit and the draft model", made_of("merge", one(EXIT), ONE), "block | token"),
    *in_ways(
        "merge of a tree and a chain of unlike laws",
        made_of("merge", EXIT_TREE | {"rule": "auto", "tree": (2,)}, one(SKIP)),
        "block | token",
    ),
    Setting("layer skip behind early exit", turns=behind(one(EXIT), one(SKIP))),
    Setting("early exit behind layer skip", turns=behind(one(SKIP), one(EXIT))),
    *in_ways("layer skip", SKIP, "block | token"),
    Setting("layer skip, without the first layer", SKIP | {"skip": (0,)}),
    Setting("layer skip, seeded", SKIP, {"seed": 7}),
    *in_ways("layer skip", SKIP_TREE, "tree, traversal | tree, recursive rejection"),
    Setting("layer skip in turns with early exit", turns=((one(SKIP),), (EXIT,), (EXIT_TREE | {"rule": "block"},))),
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
    "merge": (made_of("merge", LOOKUP, ONE), {}),
    "the engine's choice": (made_of("auto", LOOKUP, ONE), {}),
    "a text that ends among them": (ONE, {"max_tokens": 3}),
    "a stop string among them": (ONE, {"stop": ("aa",)}),
}

#: Ends of texts that need a tokenizer.
_STUCK_ENDS = {"a stop string": {"stop": ('"',), **stuckbehind(0)}, "an end of text": stuckbehind(2)}

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
    *in_ways("other vocabulary", CROSSED, "token rule", temperature=1.4, top_k=2),
    *in_ways("other vocabulary", CROSSED, "seeded | most likely tokens"),
    Setting("other vocabulary, tree", CROSSED | {"tree": (2, 1), "num_draft_tokens": 4}),
    *in_ways("other vocabulary", CROSSED, "penalties"),
    Setting("other vocabulary, only tokens outside it", CROSSED, {"allowed_token_ids": (1,)}),
    *in_ways("other vocabulary", CROSSED, "two samples"),
    Setting("other vocabulary, behind a lookup", turns=behind(one(LOOKUP), CROSSED)),
    Setting("other vocabulary, by text", CROSSED | {"match": "text"}),
    Setting("other vocabulary, by text, behind a lookup", turns=behind(LOOKUP, CROSSED | {"match": "text"})),
)


# --- Proven requests for a target with an encoder, and for one with a running state.


#: Ways to draft for a target with an encoder, by draft models with encoders of their own.
ENCODER_SETTINGS = (
    Setting("encoder, chain", drafted("block"), _LONGER),
    *in_ways("encoder", drafted("block", tree=(2, 1)), "tree, traversal | tree, recursive rejection", **_LONGER),
    Setting("encoder, seeded", drafted("auto"), {"seed": 5}),
    Setting("encoder, lookup", LOOKUP),
    Setting("encoder, early exit", EXIT, _LONGER),
    Setting("encoder, early exit, tree", EXIT_TREE | {"rule": "block"}),
)

#: Ways to draft for a target with a running state, by draft models with such states. Texts are so long that a pass goes on
#: behind a draft of which a part stood.
RUNNING_SETTINGS = (
    Setting("running state, chain", drafted("block"), _LONGER),
    *in_ways("running state", drafted("block"), "token rule", **_LONGER),
    *in_ways("running state", drafted("block", tree=(2, 1)), "tree, traversal | tree, recursive rejection", **_LONGER),
    Setting("running state, seeded", drafted("auto"), {"seed": 5}),
    Setting("running state, lookup", LOOKUP),
    Setting("running state, early exit", EXIT, _LONGER),
    Setting("running state, early exit, tree", EXIT_TREE | {"rule": "block"}),
    Setting("running state, early exit, then the draft model", turns=behind(one(EXIT), one(drafted("block")))),
    Setting("running state, merged", made_of("merge", ONE, LOOKUP)),
    Setting("running state, staged", staged(OTHER, num_draft_tokens=2)),
    *in_ways("running state", ONE, "two samples"),
)

#: Heads on the hidden states of such a target. They need several layers.
RUNNING_HEADS_SETTINGS = (
    Setting("running state, EAGLE-3", EAGLE3 | {"rule": "block"}, _LONGER),
    *in_ways("running state, EAGLE-3", EAGLE3, "token rule | tree, traversal | tree, recursive rejection", **_LONGER),
    *in_ways("running state, EAGLE-3", EAGLE3, "seeded"),
    Setting("running state, EAGLE-3 behind the draft model", turns=behind(ONE, one(EAGLE3)), params=_LONGER),
    Setting("running state, EAGLE", EAGLE1, _LONGER),
    Setting("running state, EAGLE-2: the likeliest tokens first", EAGLE1 | {"tree": "best_first"}, _LONGER),
    Setting("running state, Medusa", MEDUSA, _LONGER),
    Setting("running state, DFlash", DFLASH, _LONGER),
    Setting("running state, P-EAGLE", PEAGLE, _LONGER),
)
